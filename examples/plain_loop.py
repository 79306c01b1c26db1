"""EWC and replay in a PyTorch loop of your own, without retain's trainer: every seam is a plain function, called where it belongs.

Run: python examples/plain_loop.py

Ten handwritten digits as even and odd, two digits at a time (domain-incremental). The loop knows no method: `METHODS` is all that
has to be changed to try others. Rows, where they may be kept, keep more than weights do; both can be had at once.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from retain import CLASSIFICATION, Batch, EwcSpec, Method, ReplaySpec, StepContext, ewc, replay

METHODS = {
    "nothing": [],
    "EWC": [ewc(EwcSpec(lambda_=100.0))],
    "replay": [replay(ReplaySpec(ratio=1.0, capacity=50))],
    "both": [ewc(EwcSpec(lambda_=10.0)), replay(ReplaySpec(ratio=1.0, capacity=50))],
}
LEARNING_RATE, EPOCHS, BATCH = 0.1, 15, 32


def learn(model: nn.Module, tasks: list[tuple[Tensor, Tensor]], methods: list[Method]) -> None:
    """Learn tasks one after the other; each is (x, y)."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = torch.optim.SGD(params.values(), lr=LEARNING_RATE)
    sizes = dict.fromkeys(params, LEARNING_RATE)
    pairs = [(method, method.init(params)) for method in methods]

    for number, (x, y) in enumerate(tasks):
        ctx = StepContext(model, params, CLASSIFICATION, key=number, task=number, classes=2, step_sizes=sizes)
        for method, state in pairs:
            if method.begin_task:
                method.begin_task(ctx, state)
        order = [rows for _ in range(EPOCHS) for rows in torch.randperm(len(x)).split(BATCH)]
        for step, rows in enumerate(order):
            ctx = ctx._replace(step=step)
            batch = Batch({"input": x[rows]}, y[rows])
            for method, state in pairs:
                if method.mix:
                    batch = method.mix(batch, ctx, state)
            CLASSIFICATION.mean(model(**batch.inputs), batch).backward()
            for method, state in pairs:
                if method.add_grad_:
                    method.add_grad_(ctx._replace(batch=batch), state)
            nn.utils.clip_grad_norm_(params.values(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            for method, state in pairs:
                if method.project_:
                    method.project_(params, state, sizes)
        for method, state in pairs:
            if method.end_task:
                method.end_task(ctx, state)
        for method, state in pairs:  # the task could be measured here: what follows changes no weight
            if method.consolidate_batch:
                method.consolidate_batch(ctx._replace(batch=Batch({"input": x}, y)), state)
            if method.consolidate:
                method.consolidate(ctx, state)


def main() -> None:
    """Print the accuracy on each pair of digits after the last."""
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    tasks, tests = [], []
    for first in range(0, 10, 2):
        rows = ((y == first) | (y == first + 1)).nonzero().squeeze(1)
        cut = len(rows) * 4 // 5
        tasks.append((x[rows[:cut]], y[rows[:cut]] % 2))
        tests.append((x[rows[cut:]], y[rows[cut:]] % 2))
    for name, methods in METHODS.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
        learn(model, tasks, methods)
        kept = [(model(inputs).argmax(1) == labels).double().mean().item() for inputs, labels in tests]
        listed = "  ".join(f"{2 * k}-{2 * k + 1}: {value:.3f}" for k, value in enumerate(kept))
        print(f"{name:8} average {sum(kept) / len(kept):.3f}   {listed}")


if __name__ == "__main__":
    main()
