"""The main job on data that ships with scikit-learn: learn ten digits two at a time, with 200 stored images and with none."""

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from retain import RunSpec, train
from retain.errors import RetainError
from retain.report.progress import TerminalProgress
from retain.report.tables import matrix_table, number, size

HERE = Path(__file__).parent
RUNS = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")


def learn(name: str, settings: list[str]) -> dict:
    """Train one run, or go on with it, and say how it went."""
    console.print(f"\n[bold]{name}[/bold]")
    progress = TerminalProgress(console)
    try:
        return train(RunSpec.load(HERE / "digits.yaml", settings), RUNS / name, listener=progress)
    except RetainError as error:
        progress.close()
        console.print(str(error), markup=False, highlight=False)
        sys.exit(error.exit_code)
    finally:
        progress.close()


console = Console()
began = time.monotonic()
naive = learn("naive", ["training_params.regularization={}"])
replay = learn("replay", [])

console.print()
console.print(matrix_table(replay))
table = Table(title="ten digits, two at a time, with 200 stored images and with none", title_justify="left")
for column in ("", "average accuracy", "forgetting", "retention", "stored", "training"):
    table.add_column(column, justify="left" if not column else "right")
for name, summary in (("naive", naive), ("replay", replay)):
    measures = summary["measures"]
    stored = size(sum(summary["memory"]["state_bytes"].values()))
    scores = [number(measures[key]) for key in ("average", "forgetting", "retention")]
    table.add_row(name, *scores, stored, f"{summary['seconds']:.1f} s")
console.print(table)
console.print(f"{time.monotonic() - began:.1f} s in all. The runs are in {RUNS};", highlight=False)
console.print("the same command learns nothing twice.")
