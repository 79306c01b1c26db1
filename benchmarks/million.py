"""A million rows of thirty columns: how much memory loading and training take over the model's, from Parquet and from CSV.

    python benchmarks/million.py                # 1,000,000 rows, written to a temporary folder first
    python benchmarks/million.py --rows 100000

The peak is the most that a process had resident (VmHWM), less what it has after `import retain.training.loop`; each form is
loaded and trained in a process of its own, for one epoch.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

COLUMNS, TEXTS = 30, 5


def status(name: str) -> int:
    """Bytes that /proc says of this process: VmHWM, the peak, or VmRSS."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def write(folder: Path, rows: int) -> None:
    """The table in both forms: dates, 5 text columns of 10 to 200 categories, numbers of which one has gaps, and a label."""
    draw = np.random.default_rng(0)
    columns: dict[str, object] = {
        "day": np.datetime64("2024-01-01") + np.sort(draw.integers(0, 180, rows)).astype("timedelta64[D]")
    }
    for place in range(TEXTS):
        columns[f"text{place}"] = np.char.add("category ", draw.integers(0, (10, 20, 50, 100, 200)[place], rows).astype(str))
    numbers = draw.normal(size=(COLUMNS - TEXTS, rows)).round(6)
    columns |= {f"number{place}": values for place, values in enumerate(numbers)}
    columns["number0"] = pa.array(numbers[0], mask=draw.random(rows) < 0.1)
    columns["y"] = (numbers[1] + draw.normal(size=rows) > 2).astype(np.int64)
    table = pa.table(columns)
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    pyarrow.csv.write_csv(table, folder / "rows.csv")


def learn(path: Path) -> None:
    """Load and train one form; print its peaks."""
    from retain.spec import RunSpec
    from retain.training import loop

    before = status("VmRSS")
    stream = {path.suffix[1:]: str(path), "label": "y", "split": {"by": "time", "column": "day", "every": "month"}, "metric": "auc"}
    replay = {"replay_ratio": 0.5, "replay_capacity": 2000}
    training = {"epochs": 1, "batch_size": 1024, "device": "cpu", "regularization": replay}
    spec = RunSpec.parse({"stream": stream, "training_params": training})
    heard: dict[str, float] = {}
    began = time.monotonic()

    def listener(kind: str, values: object) -> None:
        if kind == "stream":
            heard["loaded"], heard["seconds"] = status("VmHWM"), time.monotonic() - began

    summary = loop.train(spec, path.parent / f"run-{path.suffix[1:]}", listener=listener)
    model = sum(file.stat().st_size for file in path.parent.glob(f"run-{path.suffix[1:]}/tasks/0005/[mo]*.safetensors"))
    peak = max(heard["loaded"], status("VmHWM"))  # training starts the kernel's own count anew
    said = {"import": before, "loaded": heard["loaded"], "peak": peak, "model": model, "load_seconds": heard["seconds"]}
    print(json.dumps({**said, "seconds": time.monotonic() - began, "auc": summary["measures"]["average"]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    for hidden in ("--write", "--learn"):
        parser.add_argument(hidden, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write(args.write, args.rows)
    elif args.learn:
        learn(args.learn)
    else:
        with tempfile.TemporaryDirectory() as folder:
            again = [sys.executable, __file__, "--rows", str(args.rows)]
            subprocess.run([*again, "--write", folder], check=True)
            for form in ("parquet", "csv"):
                path = Path(folder) / f"rows.{form}"
                done = subprocess.run([*again, "--learn", path], check=True, capture_output=True, text=True)
                show(path, args.rows, json.loads(done.stdout))


def show(path: Path, rows: int, said: dict[str, float]) -> None:
    """One line for a form."""
    loaded, peak = ((said[name] - said["import"] - said["model"]) / 2**30 for name in ("loaded", "peak"))
    size = path.stat().st_size / 2**20
    print(f"{path.suffix[1:]}, {rows:,} x {COLUMNS + 1}, {size:,.0f} MiB on disk: {loaded:.2f} GiB to load, {peak:.2f} GiB in all")
    print(f"    over the import and the model's {said['model'] / 2**20:.1f} MiB; {said['load_seconds']:.1f} s to load,", end=" ")
    print(f"{said['seconds']:.0f} s in all; auc {said['auc']:.3f}")


if __name__ == "__main__":
    main()
