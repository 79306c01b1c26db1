"""What a person sees while a run trains: a live line in a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from retain.forgetting.metrics import retention
from retain.report.tables import clean, cut, duration, peak_text
from retain.report.tables import number as score

WIDE = 100
"""Columns from which the live line has long words and a bar."""
NAME_CELLS = 10
"""Cells of a task's name that are shown before other parts of a line get their place."""
BAR_CELLS = (8, 24)
"""The shortest and the longest bar."""
GAP = "  "

Part = tuple[str, str]
"""A part of a line, in long and in short words."""


class TerminalProgress:
    """A listener of `train`: task, steps, time left, retention as last measured, peak memory, loss.

    Tasks have the numbers that `retain rollback` takes, from 0.

    Args:
        console: where to write; a live line only where it is a terminal.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live: Live | None = None
        self.tasks = self.left = self.known = 0
        self.digits = self.name_cells = 1
        self.rows: list[Sequence[float | None]] = []
        self.higher_is_better = True
        self.number, self.name, self.what, self.step, self.steps = 0, "", "step", 0, 0
        self.heard: list[Part] = []
        self.began = time.monotonic()

    def __call__(self, kind: str, values: dict[str, Any]) -> None:
        """Hear one event."""
        getattr(self, f"_{kind}")(**values)

    def close(self) -> None:
        """Remove the live line."""
        if self.live is not None:
            live, self.live, stdout = self.live, None, sys.stdout
            redirected = hasattr(stdout, "rich_proxied_file")
            live.stop()
            if not redirected:  # somebody has put standard output back already, and Live would put back an older one
                sys.stdout = stdout

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The live line, for the width that there is; nothing between two tasks."""
        if self.steps:
            yield self._live_line(options.max_width)

    # --- events -------------------------------------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        if not self.console.is_terminal:
            self._print(Text(f"· {clean(text)}"))
            return
        wrapped = Table.grid(padding=(0, 1))
        wrapped.add_row(Text("·", style="yellow"), Text(clean(text), overflow="fold"))
        self.console.print(wrapped)

    def _stream(self, stream: Any, pending: Any, learned: Any, steps: int) -> None:
        self.tasks, self.left = len(learned) + len(pending), steps
        self.digits = len(str(max(self.tasks - 1, 0)))
        names = [record["task"] for record in learned] + [task.name for task in pending]
        self.name_cells = max((cell_len(clean(name)) for name in names), default=1)
        for record in learned:
            self._add_row(record["row"])
        tasks = "1 task (0)" if self.tasks == 1 else f"{self.tasks} tasks (0 to {self.tasks - 1})"
        state = [tasks, *([f"{len(learned)} learned"] if learned else []), stream.scenario, f"{len(stream.classes)} classes"]
        self.console.print(Text(", ".join([*state, f"{steps:,} steps to go"])), soft_wrap=not self.console.is_terminal)

    def _task(self, number: int, task: Any, steps: int, step: int) -> None:
        self.number, self.name, self.what, self.step, self.steps = number, clean(task.name), "step", step, steps
        self.known, self.left, self.heard = steps - step, self.left - step, []
        if self.live is None and self.console.is_terminal:
            self.live = Live(self, console=self.console, transient=True, auto_refresh=False)
            self.live.start()
            self.console.show_cursor(True)  # a run that is killed cannot show it again
        self._draw()

    def _progress(self, step: int, steps: int, loss: float, seconds_per_step: float, peak: tuple[int, str]) -> None:
        left = (self.left - self.known + steps - step) * seconds_per_step
        self.step, self.steps = step, steps
        self.heard = [
            (f"{duration(left)} left", f"{_clock(left)} left"),
            *self._retention(),
            (peak_text(*peak),) * 2,
            (f"loss {loss:.3f}",) * 2,
        ]
        self._draw()

    def _evaluated(self, number: int, task: Any, row: dict[str, Sequence[float | None]], peak: tuple[int, str]) -> None:
        self.left -= self.known
        self.known = self.steps = 0  # the line below says it all
        metric, scores = next(iter(row.items()))
        self._add_row(row)
        total = duration(time.monotonic() - self.began)
        parts = [
            (f"{metric} {score(scores[-1]):<5}",) * 2,
            *(self._retention() or ([("retention –    ", "kept –    ")] if self.tasks > 1 else [])),
            (peak_text(*peak),) * 2,
            (f"total {total}", total),
        ]
        head, width, free = f"task {number:>{self.digits}}", self.console.width, not self.console.is_terminal
        self._print(_line([(head, head)], clean(task.name), self.name_cells, parts, width, free=free))

    def _consolidating(self, rows: int, of: int) -> None:
        self.what, self.step, self.steps, self.heard = "looking back, row", rows, of, []
        self._draw()

    def _done(self, summary: dict[str, Any]) -> None:
        self.close()

    # --- lines --------------------------------------------------------------------------------------------------------

    def _add_row(self, row: dict[str, Sequence[float | None]]) -> None:
        metric, scores = next(iter(row.items()))
        self.rows.append(scores)
        self.higher_is_better = metric != "loss"

    def _retention(self) -> list[Part]:
        """Of the tasks learned so far; nothing while there is none to forget."""
        if len(self.rows) < 2:
            return []
        value = f"{score(retention(self.rows, self.higher_is_better)):<5}"
        return [(f"retention {value}", f"kept {value}")]

    def _print(self, text: Text) -> None:
        self.console.print(text, soft_wrap=True)

    def _draw(self) -> None:
        if self.live is not None:
            self.live.refresh()
            # Whatever the terminal itself writes next, as ^C, then stands on the line and is removed with it.
            self.console.control(Control(ControlType.CARRIAGE_RETURN))

    def _live_line(self, width: int) -> Text:
        count = f"{self.step:>{len(str(self.steps))}}/{self.steps}"
        head = f"task {self.number} ({self.number + 1} of {self.tasks})", f"task {self.number} ({self.number + 1}/{self.tasks})"
        parts = [(f"{self.what} {count}", count), *self.heard]
        wide = width >= WIDE
        line = _line([head], self.name, 0, parts, width - (BAR_CELLS[0] + len(GAP)) * wide, short=not wide)
        room = min(width - line.cell_len - len(GAP), BAR_CELLS[1])
        if wide and room >= BAR_CELLS[0]:
            done = room * self.step // self.steps
            line = Text.assemble(("━" * done, "green"), ("─" * (room - done), "dim"), GAP, line)
        return line


def _line(
    head: Sequence[Part],
    name: str,
    name_cells: int,
    parts: Sequence[Part],
    width: int,
    *,
    free: bool = False,
    short: bool = False,
) -> Text:
    """Head, name and parts on one line of at most `width` cells.

    Long words where they fit, else short ones, else without the last parts; the name is cut where it must be, and has at least
    `NAME_CELLS` before that.

    Args:
        head: what stands before the name.
        name: the task's.
        name_cells: the name is filled up to this.
        parts: the most important first.
        width: of the console.
        free: nothing is cut or left out, as in a pipe.
        short: short words in any case.
    """
    wanted = max(name_cells, cell_len(name))
    reserved = wanted if free else min(wanted, NAME_CELLS)

    def texts(form: int) -> list[str]:
        return [part[form] for part in (*head, *parts)]

    def rest(found: Sequence[str]) -> int:
        return sum(cell_len(text) + len(GAP) for text in found)

    chosen = texts(1) if short or rest(texts(0)) + reserved > width else texts(0)
    while not free and len(chosen) > len(head) and rest(chosen) + reserved > width:
        chosen.pop()
    room = wanted if free else max(1, min(wanted, width - rest(chosen)))
    shown = cut(name, room)
    shown += " " * (min(room, max(name_cells, 0)) - cell_len(shown))
    line = Text(GAP.join([*chosen[: len(head)], shown, *chosen[len(head) :]]).rstrip())
    if not free:
        line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line


def _clock(seconds: float) -> str:
    """Seconds as a clock shows them."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
