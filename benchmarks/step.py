"""What `retain train` costs around a training step, beside a plain PyTorch loop on the same work in the same process.

Run: python benchmarks/step.py [--json]     (one thread, CPU time, interleaved, median of the ratios)
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from retain.spec import RunSpec
from retain.training import loop

BARS = {"framework, S batch 32": 1.15, "replay of 32 from 200 stored, S batch 32": 1.5}
ROWS, STEPS, ROUNDS = 6400, 1000, 7


def spec(methods: list) -> RunSpec:
    """S of anchors: MLP 64-256-256-10, SGD, batch 32; two tasks of `STEPS` steps."""
    stream = {"random": {"input": "vector", "shape": [64], "classes": 10, "samples": ROWS, "tasks": 2}, "split": {"by": "none"}}
    training = {"batch_size": 32, "epochs": 50, "max_steps": STEPS, "optimizer": "SGD(lr=0.1)", "methods": methods, "decay": "all"}
    return RunSpec.parse({"stream": stream, "training_params": training, "model": {"mlp": {"hidden": [256, 256]}}})


def retain_seconds(methods: list) -> float:
    """CPU seconds of the second task's steps in a real run, from its first step to its evaluation."""
    marks: dict[str, float] = {}

    def listen(kind: str, values: dict) -> None:
        if kind in ("task", "evaluated"):
            marks[kind] = time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        loop.train(spec(methods), Path(folder) / "run", listener=listen)
    return marks["evaluated"] - marks["task"]


def plain_seconds() -> float:
    """CPU seconds of the same steps in a loop that a user would write."""
    x, y = torch.randn(ROWS, 64), torch.arange(ROWS) % 10
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    began, done = time.process_time(), 0
    while done < STEPS:
        for index in torch.randperm(ROWS).split(32):
            loss = F.cross_entropy(model(x[index]), y[index])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == STEPS:
                break
    return time.process_time() - began


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    torch.set_num_threads(1)
    cases = {
        "framework, S batch 32": [],
        "replay of 32 from 200 stored, S batch 32": [{"replay": {"ratio": 1.0, "capacity": 200}}],
    }
    plain_seconds()
    ratios: dict[str, list[float]] = {name: [] for name in cases}
    plain = []
    for _ in range(ROUNDS):
        for name, methods in cases.items():
            before = plain_seconds()
            mine = retain_seconds(methods)
            after = plain_seconds()
            plain += [before, after]
            ratios[name].append(2 * mine / (before + after))
    found = {name: {"ratio": statistics.median(values), "bar": BARS[name]} for name, values in ratios.items()}
    if as_json:
        print(json.dumps({"plain_step_us": statistics.median(plain) / STEPS * 1e6, "cases": found}))
        return
    print(f"plain step: {statistics.median(plain) / STEPS * 1e6:.0f} us")
    for name, row in found.items():
        spread = f"{min(ratios[name]):.2f} .. {max(ratios[name]):.2f}"
        print(f"{name:44} {row['ratio']:.2f} ({spread})  bar {row['bar']}  {'reached' if row['ratio'] <= row['bar'] else 'SHORT'}")


if __name__ == "__main__":
    main()
