"""What a person sees while a run trains: a live line in a terminal, plain lines in a pipe."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn

from retain.report.tables import duration, size
from retain.report.tables import number as score


class TerminalProgress:
    """A listener of `train`: task, steps, time left, loss, peak bytes, and retention as last evaluated.

    Args:
        console: where to write; a live line only where it is a terminal.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar: Progress | None = None
        self.bar_task = TaskID(0)
        self.left = self.tasks = self.known = 0
        self.metric, self.retention, self.name = "", "", ""
        self.first_scores: list[float | None] = []
        self.began = time.monotonic()

    def __call__(self, kind: str, values: dict[str, Any]) -> None:
        """Hear one event."""
        getattr(self, f"_{kind}")(**values)

    def close(self) -> None:
        """Remove the live line."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _note(self, text: str) -> None:
        self.console.print(f"[yellow]·[/yellow] {escape(text)}", highlight=False, soft_wrap=True)

    def _stream(self, stream: Any, pending: Any, learned: Any, steps: int) -> None:
        self.tasks, self.left = len(learned) + len(pending), steps
        self.first_scores = [next(iter(record["row"].values()))[-1] for record in learned]
        state = f"{len(learned)} of {self.tasks} tasks learned" if learned else f"{self.tasks} tasks"
        self.console.print(f"{state}, {stream.scenario}, {len(stream.classes)} classes, {steps:,} steps to go", highlight=False)
        if pending and self.console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[state]}"),
            )
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.bar_task = self.bar.add_task("", total=steps, state="")
            self.bar.start()

    def _task(self, number: int, task: Any, steps: int, step: int) -> None:
        self.name, self.known = f"task {number + 1}/{self.tasks} {task.name}", steps - step
        self.left -= step
        if self.bar is not None:
            self.bar.update(self.bar_task, description=escape(self.name), total=steps, completed=step)

    def _progress(self, step: int, steps: int, loss: float, seconds_per_step: float, peak: tuple[int, str]) -> None:
        if self.bar is None:
            return
        left = self.left - (self.known - (steps - step))
        parts = [f"{duration(left * seconds_per_step)} left", f"loss {loss:.3f}", _peak(peak), self.retention]
        self.bar.update(self.bar_task, completed=step, state=" · ".join(part for part in parts if part))

    def _evaluated(self, number: int, task: Any, row: dict[str, list[float | None]], peak: tuple[int, str]) -> None:
        self.left -= self.known
        metric, scores = next(iter(row.items()))
        self.first_scores.append(scores[-1])
        kept = [now / first for now, first in zip(scores[:-1], self.first_scores, strict=False) if now is not None and first]
        if kept and metric != "loss":
            self.retention = f"retention {sum(kept) / len(kept):.3f}"
        said = f"task {number + 1}/{self.tasks} {task.name}: {metric} {score(scores[-1])}"
        parts = [said, self.retention, _peak(peak), duration(time.monotonic() - self.began)]
        self.console.print(escape(" · ".join(part for part in parts if part)), highlight=False, soft_wrap=True)

    def _done(self, summary: dict[str, Any]) -> None:
        self.close()


def _peak(peak: tuple[int, str]) -> str:
    return f"peak {size(peak[0])} {peak[1]}"
