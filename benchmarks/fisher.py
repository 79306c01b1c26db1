"""What the Fisher information of a task costs, beside a forward and backward pass over the same rows in the same process.

Run: python benchmarks/fisher.py [--json]     (one thread, CPU time, interleaved, median of the ratios)

The plain pass takes 512 rows in batches of 32, as training with `batch_size: 32` does. The Fisher pass is given the same rows and
the same limit, and takes as many at once as `fisher.add_` does in a run; in the second column it is held to batches of 32.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from retain.forgetting import fisher
from retain.forgetting.fisher import Fisher, Labels, add_, fisher_diagonal
from retain.params import trainable
from retain.seams import Batch
from retain.step import CLASSIFICATION

ROWS, BATCH, ROUNDS = 512, 32, 9
BARS = {"S": 1.3, "L": 1.1, "transformer": 2.5}


class Transformer(nn.Module):
    """Two layers, 32 tokens of 128, 10 classes: 0.5 M parameters."""

    def __init__(self, d: int = 128, tokens: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(1000, d), nn.Embedding(tokens, d)
        layer = nn.TransformerEncoderLayer(d, 4, 4 * d, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(d, 10)

    def forward(self, input: Tensor) -> Tensor:
        """Logits [rows, 10] of token ids [rows, tokens]."""
        places = torch.arange(input.shape[1], device=input.device)
        return self.head(self.layers(self.words(input) + self.places(places[None])).mean(1))


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cases() -> dict[str, tuple[nn.Module, Tensor, int]]:
    """Model, rows and repetitions of each case."""
    return {
        "S": (mlp(64, 256, 256, 10), torch.randn(ROWS, 64), 20),
        "L": (mlp(784, 2000, 2000, 10), torch.randn(ROWS, 784), 1),
        "transformer": (Transformer(), torch.randint(0, 1000, (ROWS, 32)), 1),
    }


def plain_seconds(model: nn.Module, x: Tensor, y: Tensor, repetitions: int) -> float:
    """CPU seconds of forward and backward passes over the rows."""
    began = time.process_time()
    for _ in range(repetitions):
        for inputs, targets in zip(x.split(BATCH), y.split(BATCH), strict=True):
            F.cross_entropy(model(inputs), targets).backward()
            for param in model.parameters():
                param.grad = None
    return time.process_time() - began


def fisher_seconds(model: nn.Module, x: Tensor, y: Tensor, repetitions: int, estimator: str, strict: bool = False) -> float:
    """CPU seconds of the Fisher information of the same rows."""
    found, params, labels, batch = Fisher(), trainable(model), Labels(CLASSIFICATION, estimator), Batch({"input": x}, y)
    before, fisher.SMALL_BYTES = fisher.SMALL_BYTES, 1 if strict else fisher.SMALL_BYTES
    began = time.process_time()
    for _ in range(repetitions):
        add_(found, model, params, batch, labels, micro_batch=BATCH)
    fisher.SMALL_BYTES = before
    return time.process_time() - began


def loop_seconds(model: nn.Module, x: Tensor, y: Tensor, rows: int) -> float:
    """CPU seconds of a loop over single rows, for as many rows."""
    model.eval()
    params, began = trainable(model), time.process_time()
    sums = {name: torch.zeros_like(param) for name, param in params.items()}
    for row in range(rows):
        F.cross_entropy(model(x[row : row + 1]), y[row : row + 1]).backward()
        for name, param in params.items():
            sums[name] += param.grad**2  # type: ignore[operator]
            param.grad = None
    model.train()
    return time.process_time() - began


def peak(rows: int) -> int:
    """Bytes that torch's allocator gave out at most for the Fisher information of a small CNN over this many rows."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    batches = [Batch({"input": torch.randn(10, 1, 8, 8)}, torch.zeros(10, dtype=torch.int64))] * (rows // 10)
    fisher_diagonal(model, batches[:1], CLASSIFICATION)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        fisher_diagonal(model, batches, CLASSIFICATION)
    live = most = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda each: each.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    torch.set_num_threads(1)
    found = {}
    for name, (model, x, repetitions) in cases().items():
        y = torch.randint(0, 10, (ROWS,))
        plain_seconds(model, x, y, 1)
        ratios: dict[str, list[float]] = {"empirical": [], "empirical, batches of 32": [], "exact over 10": [], "row by row": []}
        for _ in range(ROUNDS):
            plain = plain_seconds(model, x, y, repetitions)
            ratios["empirical"].append(fisher_seconds(model, x, y, repetitions, "empirical") / plain)
            plain = plain_seconds(model, x, y, repetitions)
            ratios["empirical, batches of 32"].append(fisher_seconds(model, x, y, repetitions, "empirical", True) / plain)
        for _ in range(3):
            plain = plain_seconds(model, x, y, repetitions)
            ratios["exact over 10"].append(fisher_seconds(model, x, y, repetitions, "exact") / plain)
            ratios["row by row"].append(loop_seconds(model, x, y, 32) * ROWS / 32 * repetitions / plain)
        found[name] = {key: statistics.median(values) for key, values in ratios.items()} | {"bar": BARS[name]}
        if not as_json:
            row, spread = found[name], f"({min(ratios['empirical']):.2f} .. {max(ratios['empirical']):.2f})"
            verdict = "reached" if row["empirical"] <= row["bar"] else "SHORT"
            print(f"{name:12} empirical {row['empirical']:.2f} {spread}  bar {row['bar']}  {verdict}")
            print(f"{'':12} " + "   ".join(f"{key} {value:.2f}" for key, value in row.items() if key not in ("empirical", "bar")))
    peaks = {str(rows): peak(rows) for rows in (10, 1000)}
    if as_json:
        print(json.dumps({"ratios": found, "peak_bytes": peaks}))
    else:
        print(f"peak bytes over 10 and 1,000 rows: {peaks['10']:,} and {peaks['1000']:,}")


if __name__ == "__main__":
    main()
