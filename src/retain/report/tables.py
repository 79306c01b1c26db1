"""Tables of a run for the terminal, made from its summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

MAX_COLUMNS = 12
"""Tasks that the matrix shows at most; the first and the last ones are kept."""
READABLE = 80
"""Formulas and the footer are no wider than this."""
NAME_CELLS = 7
"""Task names up to this long head the matrix's columns; longer ones leave only their numbers there."""
LABEL_CELLS = 20
"""Cells of a task's name beside the matrix's rows."""


class Fitted:
    """Something whose content depends on the width that it gets.

    Args:
        build: makes it for a number of columns.
    """

    def __init__(self, build: Callable[[int], RenderableType]) -> None:
        self.build = build

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What fits."""
        yield self.build(options.max_width)


def summary_view(summary: Mapping[str, Any]) -> RenderableType:
    """The matrix of the primary metric, the measures with their formulas, and what the run used."""
    if not summary["tasks"]:
        return Text("Nothing is learned yet.")
    return Group(matrix_table(summary), measures_table(summary), footer(summary))


def matrix_table(summary: Mapping[str, Any]) -> RenderableType:
    """Rows: after which task; columns: measured on which task. Tasks have their numbers, and as many are shown as fit."""
    return Fitted(lambda width: _matrix(summary, width))


def _matrix(summary: Mapping[str, Any], width: int) -> RenderableType:
    tasks, values = [clean(name) for name in summary["tasks"]], summary["matrices"][summary["primary"]]["values"]
    named = all(cell_len(name) <= NAME_CELLS for name in tasks)
    label = min(max(max(map(cell_len, tasks)), 4), LABEL_CELLS, max(4, width // 4))
    digits = len(str(len(tasks) - 1))
    cell = max([5, digits, *(map(cell_len, tasks) if named else ())])
    count = min(MAX_COLUMNS, max(1, (width - 1 - (digits + 1 + label + 3)) // (cell + 3)))
    shown = list(range(len(tasks)))
    title = f"{summary['primary']} on each task after learning each task"
    if len(shown) > count:
        first, last = (count + 1) // 2, count // 2
        shown = shown[:first] + shown[len(shown) - last :]
        title += f" (first {first} and last {last} of {len(tasks)})"
    table = Table()
    table.add_column("after", no_wrap=True)
    for column in shown:
        table.add_column(Text(f"{column}\n{tasks[column]}" if named else str(column)), justify="right", no_wrap=True)
    for row in shown:
        cells = [number(values[row][column]) if column <= row else "" for column in shown]
        table.add_row(Text(f"{row:>{digits}} {cut(tasks[row], label)}"), *cells)
    return _titled(title, table)


def measures_table(summary: Mapping[str, Any]) -> RenderableType:
    """Each measure with the formula it was computed by; below the values where the terminal is narrow."""
    return Fitted(lambda width: _measures(summary, min(width, READABLE)))


def _measures(summary: Mapping[str, Any], width: int) -> RenderableType:
    beside = width >= 60
    table = Table()
    table.add_column("measure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    if beside:
        table.width = width
        table.add_column("formula", style="dim", ratio=1)
    below = []
    for name, value in summary["measures"].items():
        said, formula = name.replace("_", " "), summary["formulas"][name]
        table.add_row(said, number(value), *([Text(formula)] if beside else []))
        below.append(Text(f"{said}: {formula}", style="dim"))
    return _titled(f"measures of {summary['primary']}", table, *([] if beside else below))


def _titled(title: str, *parts: RenderableType) -> Group:
    """Parts under a title that may be wider than they are."""
    return Group(Text(title, style="table.title"), *parts)


def footer(summary: Mapping[str, Any]) -> RenderableType:
    """Time, throughput, peak and the bytes that the methods hold."""
    return Fitted(lambda width: Text("\n".join(_lines(_facts(summary), min(width, READABLE))), style="dim"))


def _facts(summary: Mapping[str, Any]) -> list[str]:
    memory = summary["memory"]
    facts = [f"{summary['seconds']:.1f} s of training, without loading, measuring and saving"]
    if summary["throughput_items_per_s"]:
        facts.append(f"{summary['throughput_items_per_s']:,.0f} rows/s, replayed rows included")
    facts.append(peak_text(memory["measured_peak_bytes"], memory["measured_by"]))
    facts += [f"{clean(name)} holds {size(value)}" for name, value in memory["state_bytes"].items()]
    for name, budget in summary["budgets"].items():
        if budget["status"] != "none":
            facts.append(f"{name} {number(budget['measured'])}, budget {budget['limit']:g}: {budget['status']}")
    return facts


def _lines(parts: Sequence[str], width: int) -> list[str]:
    """The parts, as many on a line as fit."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]} · {part}"
        if cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def tasks_table(rows: list[tuple[str, int, int, int, int, str]]) -> Table:
    """Tasks of a stream: name, rows to train on, to validate and to test, steps, and the state of each."""
    table = Table(title="tasks", title_justify="left")
    for name in ("task", "train rows", "validation", "test", "steps", "state"):
        table.add_column(name, justify="left" if name in ("task", "state") else "right")
    for name, *counts, state in rows:
        table.add_row(Text(clean(name)), *[f"{count:,}" for count in counts], state)
    return table


def clean(text: str) -> str:
    """A text of the user's, without characters that move a terminal's cursor or colour it."""
    return "".join(character if character.isprintable() else "�" for character in str(text))


def cut(text: str, cells: int) -> str:
    """A text of at most so many cells, with … for what is left out."""
    return text if cell_len(text) <= cells else f"{set_cell_size(text, cells - 1).rstrip()}…"


def number(value: float | None) -> str:
    """A measure with three decimals; a dash where it was not measured."""
    return "–" if value is None else f"{value:.3f}"


PEAKS = {"resident memory": "RSS peak", "allocator peak": "CUDA peak", "driver memory": "driver memory"}
"""Short words for what `peak_bytes` counts: resident memory of the process, or what CUDA's allocator gave out."""


def peak_text(count: float | None, measured_by: str | None) -> str:
    """The most memory in use at once, and whose it is."""
    return f"{PEAKS.get(str(measured_by), 'peak')} {size(count, 0 if (count or 0) < 2**30 else 1)}"


def size(count: float | None, decimals: int = 1) -> str:
    """Bytes in a unit a person reads."""
    if count is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.{decimals}f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
