"""What EWC keeps of a stream, without any stored row: average accuracy by strength, form and optimizer, each beside naive training.

A  digits, task-incremental: five tasks of two digits each, a head per task (bar .98)
B  digits, domain-incremental: the same tasks, but one head says even or odd (bar .85)
C  both streams, with lambda over ten decades in all three forms; this is the figure docs/ewc_lambda.svg
D  permuted MNIST, ten tasks (20,000 of its training rows; data: RETAIN_DATA)

Prints one table per part: the mean over the seeds of the average accuracy at the end, with the smallest and the largest, then
forgetting / plasticity. With --json one line per run instead, which the script reads again for tables and for the figure.

Run: python benchmarks/ewc_streams.py [--part A B] [--seeds 3]        (one thread; A 1, B 3, C 8, D 12 minutes)
     python benchmarks/ewc_streams.py --part C --json > c.jsonl
     python benchmarks/ewc_streams.py --read c.jsonl --plot docs/ewc_lambda.svg        (needs matplotlib)
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from retain.data.scenarios import build_stream
from retain.data.task import Stream
from retain.errors import RunError
from retain.spec import RunSpec
from retain.training import loop

ROOT = Path(__file__).parent.parent
STREAMS: dict[str, dict[str, Any]] = {
    "task-incremental": {"builtin": "digits", "split": {"by": "class", "groups": 5, "task_id": True}},
    "parity": {"builtin": "digits", "relabel": "parity", "split": {"by": "class", "groups": 5}},
    "permuted MNIST": {"npz": "${RETAIN_DATA}/mnist/mnist_20k_10k.npz", "split": {"by": "permutation", "tasks": 10}},
}
NAIVE = "naive"
FORMS = ("proximal", "implicit", "explicit")
DIGITS = (("SGD(lr=0.1)", 15), ("Adam(lr=1e-3)", 15))
RANGE = tuple(f"lambda: 1.0e{power:+d}, form: {form}" for form in FORMS for power in range(-2, 9))


@dataclass(frozen=True)
class Part:
    """One table per stream: a row per setting of EWC, a column per optimizer with its epochs."""

    streams: tuple[str, ...]
    settings: tuple[str, ...]
    optimizers: tuple[tuple[str, int], ...] = DIGITS
    hidden: tuple[int, ...] = (256, 256)
    batch_size: int = 32
    seeds: int = 3


STRENGTHS = ("lambda: 10", "lambda: 40", "lambda: 100")
SEPARATE = tuple(f"{strength}, tasks: separate" for strength in STRENGTHS)
PARTS = {
    "A": Part(("task-incremental",), STRENGTHS + SEPARATE),
    "B": Part(("parity",), (*STRENGTHS, *SEPARATE, "lambda: 40, form: implicit"), seeds=10),
    "C": Part(("task-incremental", "parity"), RANGE),
    "D": Part(
        ("permuted MNIST",),
        (*STRENGTHS, "lambda: 40, tasks: separate", "lambda: 40, form: implicit", "lambda: 0.003, form: implicit"),
        (("Adam(lr=1e-3)", 1), ("SGD(lr=0.05, momentum=0.9)", 1), ("SGD(lr=0.1)", 2)),
        hidden=(400, 400),
        batch_size=64,
        seeds=1,
    ),
}


@functools.lru_cache(maxsize=1)
def stream_of(name: str, seed: int) -> Stream:
    """The tasks of a stream, once for all runs on them."""
    return build_stream(RunSpec.parse({"stream": STREAMS[name], "training_params": {"seed": seed}}))


def run(name: str, part: Part, optimizer: str, epochs: int, settings: str, seed: int) -> dict[str, Any]:
    """One training: its measures, or that it diverged."""
    methods = [] if settings == NAIVE else [{"ewc": yaml.safe_load(f"{{{settings}}}")}]
    training = {"optimizer": optimizer, "epochs": epochs, "batch_size": part.batch_size, "methods": methods, "seed": seed}
    values = {"model": {"mlp": {"hidden": part.hidden}}, "stream": STREAMS[name], "training_params": training}
    spec = RunSpec.parse({**values, "checkpoint": {"keep_tasks": 1}})
    with tempfile.TemporaryDirectory() as folder:
        try:
            summary = loop.train(spec, Path(folder) / "run", stream=stream_of(name, seed))
        except RunError as error:
            if "diverged" not in str(error):
                raise
            return {"diverged": str(error)}
    measures = summary["measures"]
    return {key: measures[key] for key in ("average", "forgetting", "plasticity")} | {"seconds": summary["seconds"]}


def runs(letter: str, seeds: int | None) -> Iterator[dict[str, Any]]:
    """All trainings of a part."""
    part = PARTS[letter]
    for name in part.streams:
        for seed in range(seeds or part.seeds):
            for optimizer, epochs in part.optimizers:
                for settings in (NAIVE, *part.settings):
                    found = run(name, part, optimizer, epochs, settings, seed)
                    case = {"part": letter, "stream": name, "optimizer": f"{optimizer}, {epochs} epochs"}
                    yield {**case, "settings": settings, "seed": seed, **found}


def cell(found: Sequence[dict[str, Any]]) -> str:
    """Mean (smallest..largest) of the average accuracy, then mean forgetting / plasticity; how many diverged."""
    fine = [each for each in found if "average" in each]
    failed = f"{len(found) - len(fine)} of {len(found)} diverged" if len(fine) < len(found) else ""
    if not fine:
        return failed
    values = {key: [each[key] for each in fine] for key in ("average", "forgetting", "plasticity")}
    mean = {key: statistics.fmean(each) for key, each in values.items()}
    spread = f" ({min(values['average']):.3f}..{max(values['average']):.3f})" if len(fine) > 1 else ""
    return f"{mean['average']:.3f}{spread} {mean['forgetting']:.3f}/{mean['plasticity']:.3f} {failed}".rstrip()


def unique(found: Sequence[dict[str, Any]], key: str) -> list[Any]:
    """The values of a key, in the order of their first appearance."""
    return list(dict.fromkeys(each[key] for each in found))


def print_tables(found: Sequence[dict[str, Any]]) -> None:
    """One table for every part and stream."""
    for letter, name in dict.fromkeys((each["part"], each["stream"]) for each in found):
        rows = [each for each in found if (each["part"], each["stream"]) == (letter, name)]
        columns, seeds = unique(rows, "optimizer"), unique(rows, "seed")
        print(f"\n{letter}  {name}, {len(seeds)} seeds: average accuracy (min..max) forgetting/plasticity")
        print("\n" + " " * 33 + "".join(f"{column:38}" for column in columns))
        for settings in unique(rows, "settings"):
            each_column = [[r for r in rows if (r["settings"], r["optimizer"]) == (settings, column)] for column in columns]
            print(f"  {settings:31}" + "".join(f"{cell(column):38}" for column in each_column))


def plot(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Average accuracy against lambda: a panel per stream and optimizer, a line per form with its range over the seeds."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        sys.exit("--plot draws with matplotlib, which is not installed: pip install matplotlib, here or where --read is used.")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = [each for each in found if each["part"] == "C"]
    if not found:
        sys.exit("--plot draws part C, of which there is no run: add --part C, or --read its lines.")
    names, optimizers = unique(found, "stream"), unique(found, "optimizer")
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "retain", "font.family": "sans-serif", "font.size": 10})
    size = (4.6 * len(optimizers), 3.3 * len(names))
    figure, axes = plt.subplots(len(names), len(optimizers), figsize=size, sharex=True, sharey="row", squeeze=False)
    for (row, name), (column, optimizer) in ((r, c) for r in enumerate(names) for c in enumerate(optimizers)):
        axis = axes[row][column]
        here = [each for each in found if (each["stream"], each["optimizer"]) == (name, optimizer)]
        naive = [each["average"] for each in here if each["settings"] == NAIVE]
        axis.axhline(statistics.fmean(naive), color="#555555", linestyle="--", label="naive")
        for form, color, marker in zip(FORMS, ("#0072b2", "#e69f00", "#cc3377"), "os^", strict=True):
            points: dict[float, list[float]] = {}
            for each in here:
                settings = {} if each["settings"] == NAIVE else yaml.safe_load(f"{{{each['settings']}}}")
                if settings.get("form") == form:
                    points.setdefault(settings["lambda"], []).append(each.get("average"))
            kept = {x: ys for x, ys in sorted(points.items()) if None not in ys}
            axis.fill_between([*kept], [min(y) for y in kept.values()], [max(y) for y in kept.values()], color=color, alpha=0.18)
            means = [statistics.fmean(y) for y in kept.values()]
            axis.plot([*kept], means, color=color, marker=marker, markersize=4, label=form)
            if gone := [x for x in points if x not in kept]:
                axis.plot(gone, [0.04] * len(gone), "x", color=color, transform=axis.get_xaxis_transform(), label="diverged")
        axis.set(title=f"{name}, {optimizer}", xscale="log")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("lambda")
    for axis in axes[:, 0]:
        axis.set_ylabel("average accuracy")
    figure.tight_layout()
    figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Run the parts, or read runs of them; print the tables, or the runs; draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", type=int, help="how many (default: 3; B 10, D 1)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--read", nargs="+", type=Path, help="files of lines from --json, instead of training")
    parser.add_argument("--plot", type=Path, help="draw part C into this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("retain").setLevel(logging.ERROR)  # the explicit form warns of every lambda beyond its edge
    os.environ.setdefault("RETAIN_DATA", str(ROOT.parent / "shared" / "data"))
    found: list[dict[str, Any]] = []
    if options.read:
        lines = [line for path in options.read for line in path.read_text().splitlines()]
        found = [each for each in map(json.loads, lines) if each["part"] in options.part]
    else:
        for letter in options.part:
            for each in runs(letter, options.seeds):
                found.append(each)
                if options.json:
                    print(json.dumps(each), flush=True)
    if not options.json:
        print_tables(found)
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
