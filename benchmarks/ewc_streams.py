"""What EWC keeps of a stream, without any stored row: average accuracy by strength, form and optimizer, each beside naive training.

A  digits, task-incremental: five tasks of two digits each, a head per task (bar .98)
B  digits, domain-incremental: the same tasks, but one head says even or odd (bar .85)
C  both streams, with lambda over ten decades in all three forms; the figure in docs/ewc.md
D  permuted MNIST, ten tasks of the 20,000 training rows and 10,000 test rows in RETAIN_DATA

MLP with two hidden layers of 256. Prints a table per stream: mean over the seeds of the average accuracy at the end, its smallest
and largest, then mean forgetting/plasticity. With --json a line per run instead, which --read takes in place of training.

Run: python benchmarks/ewc_streams.py [--part A B] [--seeds 3]        (one thread; A, B 3 minutes, C 6, D 9)
     python benchmarks/ewc_streams.py --part C --json > c.jsonl
     python benchmarks/ewc_streams.py --read c.jsonl --plot docs/ewc_lambda.svg        (needs matplotlib)
"""

from __future__ import annotations

import argparse
import functools
import itertools
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
MEASURES = ("average", "forgetting", "plasticity")
FORMS = ("proximal", "implicit", "explicit")
RANGE = tuple(f"lambda: 1.0e{power:+d}, form: {form}" for form in FORMS for power in range(-2, 9))


@dataclass(frozen=True)
class Part:
    """One table per stream: a row per setting of EWC, a column per optimizer with its epochs."""

    streams: tuple[str, ...]
    settings: tuple[str, ...]
    optimizers: tuple[tuple[str, int], ...] = (("SGD(lr=0.1)", 15), ("Adam(lr=1e-3)", 15))
    batch_size: int = 32
    seeds: int = 10


MAIN = ("lambda: 10", "lambda: 40", "lambda: 100", "lambda: 40, tasks: separate", "lambda: 40, form: implicit")
OTHERS = ("lambda: 0.1, form: implicit", "lambda: 100, form: implicit", "lambda: 0.1, form: explicit", "lambda: 1000")
MNIST = (("Adam(lr=1e-3)", 1), ("SGD(lr=0.05, momentum=0.9)", 1), ("SGD(lr=0.1)", 2))
PARTS = {
    "A": Part(("task-incremental",), (*MAIN, *OTHERS)),
    "B": Part(("parity",), (*MAIN, *OTHERS)),
    "C": Part(("task-incremental", "parity"), RANGE, seeds=3),
    "D": Part(("permuted MNIST",), (*MAIN, "lambda: 0.003, form: implicit"), MNIST, batch_size=64, seeds=1),
}


@functools.lru_cache(maxsize=1)
def stream_of(name: str, seed: int) -> Stream:
    """The tasks of a stream, once for all runs on them."""
    return build_stream(RunSpec.parse({"stream": STREAMS[name], "training_params": {"seed": seed}}))


def run(name: str, part: Part, optimizer: str, epochs: int, settings: str, seed: int) -> dict[str, Any]:
    """One training: its measures, or that it diverged."""
    methods = [] if settings == NAIVE else [{"ewc": yaml.safe_load(f"{{{settings}}}")}]
    training = {"optimizer": optimizer, "epochs": epochs, "batch_size": part.batch_size, "methods": methods, "seed": seed}
    spec = {"model": {"mlp": {}}, "stream": STREAMS[name], "training_params": training, "checkpoint": {"keep_tasks": 1}}
    with tempfile.TemporaryDirectory() as folder:
        try:
            summary = loop.train(RunSpec.parse(spec), Path(folder) / "run", stream=stream_of(name, seed))
        except RunError as error:
            if "diverged" not in str(error):
                raise
            return {"diverged": str(error)}
    return {key: summary["measures"][key] for key in MEASURES} | {"seconds": summary["seconds"]}


def runs(letter: str, seeds: int | None) -> Iterator[dict[str, Any]]:
    """All trainings of a part."""
    part = PARTS[letter]
    for name, seed in itertools.product(part.streams, range(seeds or part.seeds)):
        for (optimizer, epochs), settings in itertools.product(part.optimizers, (NAIVE, *part.settings)):
            case = {"part": letter, "stream": name, "optimizer": f"{optimizer}, epochs: {epochs}", "settings": settings}
            yield {**case, "seed": seed, **run(name, part, optimizer, epochs, settings, seed)}


def cell(found: Sequence[dict[str, Any]]) -> str:
    """Mean (smallest..largest) of the average accuracy, then mean forgetting/plasticity; how many diverged."""
    fine = [each for each in found if "average" in each]
    failed = f" {len(found) - len(fine)} of {len(found)} diverged" if len(fine) < len(found) else ""
    if not fine:
        return failed.strip()
    average, forgetting, plasticity = ([each[key] for each in fine] for key in MEASURES)
    spread = f" ({min(average):.3f}..{max(average):.3f})" if len(fine) > 1 else ""
    return f"{statistics.fmean(average):.3f}{spread} {statistics.fmean(forgetting):.3f}/{statistics.fmean(plasticity):.3f}{failed}"


def unique(found: Sequence[dict[str, Any]], key: str) -> list[Any]:
    """The values of a key, in the order of their first appearance."""
    return list(dict.fromkeys(each[key] for each in found))


def print_tables(found: Sequence[dict[str, Any]]) -> None:
    """One table for every part and stream."""
    for letter, name in dict.fromkeys((each["part"], each["stream"]) for each in found):
        rows = [each for each in found if (each["part"], each["stream"]) == (letter, name)]
        columns = unique(rows, "optimizer")
        print(f"\n{letter}  {name}, seeds: {len(unique(rows, 'seed'))}; average accuracy (min..max) forgetting/plasticity\n")
        print(" " * 46 + "".join(f"{column:40}" for column in columns).rstrip())
        for settings in unique(rows, "settings"):
            cells = [cell([r for r in rows if (r["settings"], r["optimizer"]) == (settings, column)]) for column in columns]
            print((f"  {settings:44}" + "".join(f"{each:40}" for each in cells)).rstrip())


def plot(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Average accuracy against lambda: a panel per stream and optimizer, a line per form with its range over the seeds."""
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        sys.exit("--plot draws with matplotlib, which is not installed: pip install matplotlib, here or where --read is used.")
    if not (found := [each for each in found if each["part"] == "C"]):
        sys.exit("--plot draws part C, of which there is no run: add --part C, or --read its lines.")
    names, optimizers = unique(found, "stream"), unique(found, "optimizer")
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "retain", "font.family": "sans-serif", "font.size": 10})
    shape = {"nrows": len(names), "ncols": len(optimizers), "figsize": (4.6 * len(optimizers), 3.3 * len(names))}
    figure, axes = plt.subplots(**shape, sharex=True, sharey="row", squeeze=False, layout="constrained")
    for axis, (name, optimizer) in zip(axes.flat, itertools.product(names, optimizers), strict=True):
        scores: dict[str, list[float | None]] = {}
        for each in found:
            if (each["stream"], each["optimizer"]) == (name, optimizer):
                scores.setdefault(each["settings"], []).append(each.get("average"))
        axis.axhline(statistics.fmean(scores.pop(NAIVE)), color="#555555", linestyle="--", label="naive")
        for form, color, marker in zip(FORMS, ("#0072b2", "#d98200", "#cc3377"), "os^", strict=True):
            cases = ((yaml.safe_load(f"{{{settings}}}"), values) for settings, values in scores.items())
            points = {float(case["lambda"]): values for case, values in cases if case["form"] == form}
            fine = {x: values for x, values in points.items() if None not in values}
            lowest, highest = [*map(min, fine.values())], [*map(max, fine.values())]
            axis.fill_between([*fine], lowest, highest, color=color, alpha=0.18, linewidth=0)
            style = {"color": color, "marker": marker, "markersize": 5, "markeredgewidth": 0, "label": form}
            axis.plot([*fine], [*map(statistics.fmean, fine.values())], **style)
            if gone := [x for x in points if x not in fine]:
                axis.plot(gone, [0.04] * len(gone), "x", color=color, transform=axis.get_xaxis_transform(), label="diverged")
        axis.set(title=f"{name}, {optimizer.split(', epochs')[0]}", xscale="log", xlabel="lambda", ylabel="average accuracy")
        axis.set_xticks([10.0**power for power in range(-2, 9, 2)], [f"1e{power}" for power in range(-2, 9, 2)])
        axis.locator_params(axis="y", nbins=6)
        axis.tick_params(left=False, bottom=False)
        axis.label_outer()
        axis.grid(alpha=0.25)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Run the parts, or read runs of them; print the tables, or the runs; draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", type=int, help="how many (default: A and B 10, C 3, D 1)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--read", nargs="+", type=Path, default=[], help="files of lines from --json, instead of training")
    parser.add_argument("--plot", type=Path, help="draw part C into this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("retain").setLevel(logging.ERROR)  # the explicit form warns of every lambda beyond its edge
    os.environ.setdefault("RETAIN_DATA", str(ROOT.parent / "shared" / "data"))
    lines = [line for path in options.read for line in path.read_text().splitlines()]
    trained = itertools.chain.from_iterable(runs(letter, options.seeds) for letter in options.part)
    found = []
    for each in map(json.loads, lines) if options.read else trained:
        if each["part"] in options.part:
            found.append(each)
            if options.json:
                print(json.dumps(each), flush=True)
    if not options.json:
        print_tables(found)
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
