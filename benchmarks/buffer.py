"""Time and memory of the replay buffer: microseconds for 32 rows of 64 float32 and an int64 label, one thread.

Steady state: the buffer has seen ten times as many rows as it holds. "insert, just full" is the worst case: nearly every
row is stored. "by class": with lists of the slots of each class.

PYTHONPATH=src python benchmarks/buffer.py [--json] [--sizes 200 2000] [--repeats 2000]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from retain.forgetting import buffer as store

ROWS, FEATURES, CLASSES = 32, 64, 10
BYTES_PER_ROW = FEATURES * 4 + 8
INSERT_US, DRAW_US, BALANCED_US, BYTES = 30.0, 20.0, 130.0, 1.05
"""The bars; the last is bytes held per byte of stored rows."""


def microseconds(call: Callable[[int], Any], repeats: int) -> float:
    """Median time of `call(number)`."""
    times = []
    for number in range(repeats):
        began = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


def batches(count: int) -> list[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Random batches."""
    made = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (count, ROWS), generator=made)
    return [({"x": torch.randn(ROWS, FEATURES, generator=made), "y": row}, row) for row in labels]


def fill_(held: store.Buffer, rows: int) -> None:
    """Insert until a number of rows have been seen."""
    features = torch.randn(1000, FEATURES)
    while held.seen < rows:
        labels = torch.randint(CLASSES, (min(1000, rows - held.seen),))
        store.insert_(held, {"x": features[: len(labels)], "y": labels}, labels, held.seen)


def measure(size: int, policy: str, by_class: bool, repeats: int) -> list[dict[str, Any]]:
    """Rows of the table for one buffer."""
    held, offered = store.empty(size, policy, by_class=by_class), batches(64)
    fill_(held, size)
    name = policy + (", by class" if by_class else "")
    slots = store.draw(held, ROWS, 0)
    rows: list[tuple[str, float, float | None]] = []

    def insert(number: int) -> None:
        columns, labels = offered[number % 64]
        store.insert_(held, columns, labels, number)

    rows.append(("insert, just full", microseconds(insert, max(10, min(repeats, size // ROWS // 4))), None))
    fill_(held, 10 * size)
    rows.append(("insert", microseconds(insert, repeats), INSERT_US))
    rows.append(("draw", microseconds(lambda number: store.draw(held, ROWS, number), repeats), DRAW_US))
    if held.by_class:
        drawn = microseconds(lambda number: store.draw_balanced(held, ROWS, number), repeats)
        rows.append(("balanced draw", drawn, BALANCED_US))
    rows.append(("fetch", microseconds(lambda number: store.fetch(held, slots), repeats), None))
    rows.append(("bytes / rows", store.nbytes(held) / (size * BYTES_PER_ROW), BYTES))
    return [
        {
            "policy": name,
            "stored": held.filled,
            "what": what,
            "measured": value,
            "bar": bar,
            "pass": bar is None or value <= bar,
        }
        for what, value, bar in rows
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="+", default=[200, 2_000, 20_000, 200_000])
    parser.add_argument("--repeats", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kinds = [("reservoir", False), ("ring", False), ("class-balanced", False), ("reservoir", True), ("ring", True)]
    table = [row for size in options.sizes for kind in kinds for row in measure(size, *kind, options.repeats)]
    if options.json:
        print(json.dumps({"schema": 1, "torch": torch.__version__, "rows": table}, indent=1))
        return
    print(f"{'policy':<20} {'stored':>8} {'what':<17} {'measured':>9} {'bar':>7}")
    for row in table:
        bar, verdict = ("", "") if row["bar"] is None else (f"{row['bar']:g}", "pass" if row["pass"] else "SHORT")
        print(f"{row['policy']:<20} {row['stored']:>8} {row['what']:<17} {row['measured']:>9.3f} {bar:>7} {verdict}")


if __name__ == "__main__":
    main()
