"""The main job on data that come with the library: one run that only learns what is new, and one that keeps a few old rows."""

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from retain import RunSpec, train
from retain.api import report
from retain.errors import RetainError
from retain.report.progress import TerminalProgress
from retain.report.tables import matrix_table, number, size

HERE = Path(__file__).parent
RUNS = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
NAIVE = ["training_params.regularization={}"]
KINDS = ["stream.split={by: column, column: scenario, order: [1, 3, 2], shared: [0]}", "budget={}"]


def learn(name: str, config: str, settings: list[str]) -> dict:
    """Train one run, or go on with it, and say how it went."""
    console.print(f"\n[bold]{name}[/bold]")
    progress = TerminalProgress(console)
    try:
        return train(RunSpec.load(HERE / config, settings), RUNS / name, listener=progress)
    except RetainError as error:
        progress.close()
        console.print(str(error), markup=False, highlight=False)
        sys.exit(error.exit_code)
    finally:
        progress.close()


def compare(title: str, naive: dict, replay: dict) -> None:
    """What each task still scores where rows are kept, and both runs side by side."""
    console.print()
    console.print(matrix_table(replay))
    table = Table()
    for column in ("", "average", "forgetting", "retention", "stored", "training"):
        table.add_column(column, justify="left" if not column else "right")
    for name, summary in (("naive", naive), ("replay", replay)):
        measures = summary["measures"]
        stored = size(sum(summary["memory"]["state_bytes"].values()))
        scores = [number(measures[key]) for key in ("average", "forgetting", "retention")]
        table.add_row(name, *scores, stored, f"{summary['seconds']:.1f} s")
    console.print(f"{replay['primary']}: {title}", highlight=False)
    console.print(table)


console = Console()
began = time.monotonic()
digits = learn("digits-naive", "digits.yaml", NAIVE), learn("digits-replay", "digits.yaml", [])
compare("ten digits, two at a time, with 200 stored images and with none", *digits)
fraud = learn("fraud-naive", "fraud.yaml", [*KINDS, *NAIVE]), learn("fraud-replay", "fraud.yaml", KINDS)
compare("SIMULATED card fraud, one kind after the other, with 2,000 stored rows and with none", *fraud)
page = report(RUNS / "fraud-replay")
console.print(
    f"{time.monotonic() - began:.1f} s in all. The runs are in {RUNS}; the same command learns nothing twice.", highlight=False
)
console.print(f"The page of the last one: {page}", highlight=False)
