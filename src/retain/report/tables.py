"""Tables of a run for the terminal, made from its summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

MAX_COLUMNS = 12
"""Tasks that the matrix shows at most; the first and the last ones are kept."""


def summary_view(summary: Mapping[str, Any]) -> RenderableType:
    """The matrix of the primary metric, the measures with their formulas, and what the run used."""
    if not summary["tasks"]:
        return Text("Nothing is learned yet.")
    return Group(matrix_table(summary), measures_table(summary), Text(footer(summary), style="dim"))


def matrix_table(summary: Mapping[str, Any]) -> Table:
    """Rows: after which task; columns: measured on which task."""
    tasks, values = summary["tasks"], summary["matrices"][summary["primary"]]["values"]
    shown = list(range(len(tasks)))
    if len(shown) > MAX_COLUMNS:
        half = MAX_COLUMNS // 2
        shown = shown[:half] + shown[-half:]
    title = f"{summary['primary']} on each task after learning each task"
    if len(shown) < len(tasks):
        title += f" (first and last {MAX_COLUMNS // 2} of {len(tasks)})"
    table = Table(title=title, title_justify="left")
    table.add_column("after")
    for column in shown:
        table.add_column(escape(str(tasks[column])), justify="right")
    for row in shown:
        cells = [number(values[row][column]) if column <= row else "" for column in shown]
        table.add_row(escape(str(tasks[row])), *cells)
    return table


def measures_table(summary: Mapping[str, Any]) -> Table:
    """Each measure with the formula it was computed by."""
    table = Table(title=f"measures of {summary['primary']}", title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_column("formula", style="dim")
    for name, value in summary["measures"].items():
        table.add_row(name.replace("_", " "), number(value), escape(summary["formulas"][name]))
    return table


def footer(summary: Mapping[str, Any]) -> str:
    """Time, throughput, peak and the bytes that the methods hold, in one line."""
    memory = summary["memory"]
    parts = [f"{summary['seconds']:.1f} s of training"]
    if summary["throughput_items_per_s"]:
        parts.append(f"{summary['throughput_items_per_s']:,.0f} rows/s")
    parts.append(f"peak {size(memory['measured_peak_bytes'])} ({memory['measured_by']})")
    parts += [f"{name} holds {size(value)}" for name, value in memory["state_bytes"].items()]
    budget = summary["budgets"]["forgetting"]
    if budget["status"] != "none":
        parts.append(f"forgetting budget {budget['limit']:g} {budget['status']}")
    return " · ".join(parts)


def tasks_table(rows: list[tuple[str, int, int, int, int, str]]) -> Table:
    """Tasks of a stream: name, rows to train on, to validate and to test, steps, and the state of each."""
    table = Table(title="tasks", title_justify="left")
    for name in ("task", "train rows", "validation", "test", "steps", "state"):
        table.add_column(name, justify="left" if name in ("task", "state") else "right")
    for name, *counts, state in rows:
        table.add_row(escape(name), *[f"{count:,}" for count in counts], state)
    return table


def number(value: float | None) -> str:
    """A measure with three decimals; a dash where it was not measured."""
    return "–" if value is None else f"{value:.3f}"


def size(count: float | None) -> str:
    """Bytes in a unit a person reads."""
    if count is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
