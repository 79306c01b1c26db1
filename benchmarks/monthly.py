"""A scoring model updated every month, each time by a new process: what the first month still scores, and what the gate refuses.

    python benchmarks/monthly.py                    # 6 months, 3 seeds; SIMULATED card transactions
    python benchmarks/monthly.py --seeds 1 --keep /tmp/monthly

Months are files; before every command one more of them is there. In the second stream the labels of month 4 are shuffled: the gate
must refuse it, learn month 5, and learn month 4 when its file has been mended.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import yaml

from retain.data import fraud

MONTHS = 6
EXAMPLE = Path(__file__).parents[1] / "examples" / "fraud.yaml"


def month_files(folder: Path, seed: int, rows: int) -> list[pa.Table]:
    """The months of a simulation."""
    table = fraud.simulate(rows=rows, seed=seed, months=MONTHS)
    months = table[fraud.DATE].to_numpy().astype("datetime64[M]")
    return [table.filter(pa.array(months == month)) for month in np.unique(months)]


def shuffled(table: pa.Table, seed: int) -> pa.Table:
    """The same rows with their labels in another order."""
    order = np.random.default_rng(seed).permutation(table.num_rows)
    place = table.column_names.index(fraud.LABEL)
    return table.set_column(place, fraud.LABEL, table[fraud.LABEL].take(pa.array(order)))


def configure(folder: Path) -> None:
    """The example's settings over the files of the folder."""
    values = yaml.safe_load(EXAMPLE.read_text())
    stream = {"parquet": "months/*.parquet", "label": fraud.LABEL, "drop": ["scenario"], "id": "customer"}
    split = {"by": "time", "column": fraud.DATE, "every": "month"}
    values["stream"] = {**stream, "split": split, "metric": values["stream"]["metric"]}
    (folder / "fraud.yaml").write_text(yaml.safe_dump(values))
    (folder / "months").mkdir()


def update(folder: Path, seed: int) -> tuple[int, dict]:
    """One month's command, as a user gives it; its exit code and summary."""
    command = [sys.executable, "-m", "retain", "train", folder / "fraud.yaml", "--run", folder / "run", "--gate", "--json"]
    done = subprocess.run([*command, "--set", f"training_params.seed={seed}"], capture_output=True, text=True, check=False)
    if not done.stdout:
        sys.exit(done.stderr)
    return done.returncode, json.loads(done.stdout)


def good(folder: Path, seed: int, rows: int) -> dict:
    """Six good months: the summary after the last, and the months that the gate refused wrongly."""
    configure(folder)
    refused = []
    for number, table in enumerate(month_files(folder, seed, rows)):
        pyarrow.parquet.write_table(table, folder / "months" / f"{number}.parquet")
        code, summary = update(folder, seed)
        refused += [summary["rejected"]] if summary["rejected"] else []
        assert (code == 3) == bool(summary["rejected"]), (code, summary["rejected"])
    return {**summary, "refused": refused}


def sabotaged(folder: Path, seed: int, rows: int) -> list[str]:
    """What each command did where month 4 comes with shuffled labels first, and mended after month 5."""
    configure(folder)
    months, story = month_files(folder, seed, rows), []
    for number in (0, 1, 2, 3, 4, 3):
        table = shuffled(months[number], seed) if number == 3 and len(story) == 3 else months[number]
        pyarrow.parquet.write_table(table, folder / "months" / f"{number}.parquet")
        code, summary = update(folder, seed)
        story.append(
            f"refused {summary['rejected']} ({code})" if summary["rejected"] else f"learned {summary['tasks'][-1]} ({code})"
        )
    return story


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = args.keep or Path(temporary)
        for seed in range(args.seeds):
            folders = [root / f"{name}-{seed}" for name in ("good", "sabotaged")]
            for folder in folders:
                folder.mkdir(parents=True)
            summary = good(folders[0], seed, args.rows)
            values = summary["matrices"][summary["primary"]]["values"]
            first = [row[0] for row in values]
            said, lost = " ".join(f"{value:.3f}" for value in first), max(first) - first[-1]
            print(f"seed {seed}: {summary['primary']} of the first month after each update: {said}; best - last {lost:.3f}")
            measures = {name: round(value, 3) for name, value in summary["measures"].items() if value is not None}
            print(f"    {measures}; wrongly refused: {', '.join(summary['refused']) or 'none'}")
            print(f"    month 4 shuffled: {'; '.join(sabotaged(folders[1], seed, args.rows))}", flush=True)


if __name__ == "__main__":
    main()
