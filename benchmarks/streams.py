"""Naive, replay and joint training side by side on a stream: what is forgotten, and what replay keeps of it.

Joint training is one task of the union of all tasks' rows, measured on each task's own test rows.

Run: python benchmarks/streams.py [examples/bank.yaml ...] [--seeds 3] [--json]     (data: RETAIN_DATA)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from retain.api import load
from retain.data.scenarios import build_stream
from retain.data.task import Rows, Stream, Task
from retain.forgetting.metrics import score
from retain.spec import RunSpec
from retain.training import loop

ROOT = Path(__file__).parent.parent
EXAMPLES = [ROOT / "examples" / name for name in ("digits.yaml", "bank.yaml", "fraud_handbook.yaml")]
KINDS = ("naive", "replay", "joint")


def joined(parts: Sequence[Rows]) -> Rows:
    """All rows one after the other."""
    inputs = {name: torch.cat([part.inputs[name] for part in parts]) for name in parts[0].inputs}
    return Rows(inputs, torch.cat([part.targets for part in parts]))


def union(stream: Stream) -> Stream:
    """One task of the rows of all tasks."""
    parts = ([t.train for t in stream.tasks], [t.validation for t in stream.tasks], [t.test for t in stream.tasks])
    task = Task("all", *map(joined, parts), classes=range(len(stream.classes)))
    return Stream([task], stream.classes, stream.kind, stream.shape, "domain-incremental", stream.features, stream.frozen)


def run(spec: RunSpec, kind: str, folder: Path) -> dict[str, Any]:
    """One training: the final score on each task, and the measures where there are several tasks."""
    stream = build_stream(spec)
    if kind != "replay":
        spec = spec.with_values({"training_params.regularization": {}, "training_params.methods": []})
    summary = loop.train(spec, folder, stream=union(stream) if kind == "joint" else stream)
    if kind == "joint":
        module = load(folder).module
        with torch.no_grad():
            logits = [module(task.test.inputs["x"]).numpy() for task in stream.tasks]
        metric = spec.stream.metric
        last = [score(metric, found, task.test.targets.numpy()) for found, task in zip(logits, stream.tasks, strict=True)]
        return {"last": last, "average": statistics.fmean(last), "seconds": summary["seconds"]}
    values = summary["matrices"][summary["primary"]]["values"]
    return {
        "last": values[-1],
        "learned": [row[n] for n, row in enumerate(values)],
        **summary["measures"],
        "seconds": summary["seconds"],
    }


def median(found: list[dict[str, Any]], key: str) -> str:
    """The median over seeds, with the smallest and largest where there are several; a dash where it is not measured."""
    values = [each[key] for each in found if each.get(key) is not None]
    if not values:
        return "-"
    spread = f" ({min(values):.3f}..{max(values):.3f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.3f}{spread}"


def main() -> None:
    """Print one table per stream."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", nargs="*", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("RETAIN_DATA", str(ROOT.parent / "shared" / "data"))
    for config in options.configs or EXAMPLES:
        found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(options.seeds):
                spec = RunSpec.load(config, [*options.settings, f"training_params.seed={seed}"])
                for kind in KINDS:
                    found[kind].append(run(spec, kind, Path(folder) / f"{kind}{seed}"))
        if options.json:
            print(json.dumps({"config": config.name, "metric": spec.stream.metric, "runs": found}))
            continue
        print(f"\n{config.name}: {spec.stream.metric}, median of {options.seeds} seeds")
        for kind in KINDS:
            last = " ".join(
                f"{statistics.median(scores):.3f}" for scores in zip(*(each["last"] for each in found[kind]), strict=True)
            )
            measures = " · ".join(f"{key} {median(found[kind], key)}" for key in ("average", "forgetting", "plasticity"))
            print(f"  {kind:7} final on each task: {last} · {measures} · {median(found[kind], 'seconds')} s")


if __name__ == "__main__":
    main()
