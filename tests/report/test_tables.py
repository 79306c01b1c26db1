"""Tables of a run: they fit the terminal, and show names as they are."""

from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console

from retain.forgetting.metrics import FORMULAS, measures
from retain.report import tables

NAMES = ["[red]x[/red]", "[/x]", ":smile:", "a\\[b]", "new\nline\x1b[2J", "数字" * 30, "x" * 200]


def summary_of(names, value=0.9, metric="accuracy", **memory):
    values = [[value] * (row + 1) + [None] * (len(names) - row - 1) for row in range(len(names))]
    return {
        "tasks": list(names),
        "primary": metric,
        "matrices": {metric: {"values": values}},
        "measures": measures(values) if names else dict.fromkeys(FORMULAS),
        "formulas": dict(FORMULAS),
        "memory": {
            "measured_peak_bytes": 487 * 2**20,
            "measured_by": "resident memory",
            "state_bytes": {"replay": 18_000},
            **memory,
        },
        "budgets": {"forgetting": {"limit": 0.08, "measured": 0.031, "status": "kept"}},
        "throughput_items_per_s": 36421.2,
        "seconds": 6.2,
    }


def shown(renderable, width=80, terminal=False):
    console = Console(file=StringIO(), width=width, force_terminal=terminal, color_system=None, _environ={})
    console.print(renderable)
    lines = console.file.getvalue().splitlines()
    assert max(map(cell_len, lines), default=0) <= width
    return "\n".join(line.rstrip() for line in lines)


def test_the_matrix_has_the_numbers_that_rollback_takes():
    text = shown(tables.summary_view(summary_of(["0-1", "2-3", "4-5"])))
    assert "│ 2 4-5 │ 0.900 │ 0.900 │ 0.900 │" in text and "┃     0 ┃     1 ┃     2 ┃" in text and "┃   0-1 ┃" in text


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [40, 80, 120, 160])
@pytest.mark.parametrize("names", [["a"], ["0-1", "2-3"], [f"2018-{n:02d}-and-more" for n in range(30)], NAMES, NAMES * 3])
def test_everything_fits(width, names, terminal):
    text = shown(tables.summary_view(summary_of(names)), width, terminal)
    assert "0.900" in text and "retention" in text and "\x1b[2J" not in text and "😄" not in text
    assert "…" not in text.partition("measures of")[2]


@pytest.mark.parametrize(
    ("width", "said"),
    [(80, "first 4 and last 3 of 30"), (120, "first 6 and last 5 of 30"), (160, "first 6 and last 6 of 30"), (40, "of 30")],
)
def test_of_many_tasks_the_first_and_the_last(width, said):
    text = shown(tables.matrix_table(summary_of([f"day-{n:02d}" for n in range(30)])), width)
    assert said in " ".join(text.split()) and "29 day-29" in text and " 0 day-00" in text and "day-15" not in text


def test_measures_are_readable_at_eighty_columns_and_below_that():
    text = shown(tables.measures_table(summary_of(["a", "b"])), 200)
    assert max(map(len, text.splitlines())) == 80
    words = " ".join(text.replace("│", " ").split())
    assert "R[i][j], minus R[T][j] (Chaudhry et al. 2018)" in words
    text = shown(tables.measures_table(summary_of(["a", "b"])), 40)
    assert "retention: mean over j < T of R[T][j] / R[j][j]" in " ".join(text.split())


def test_what_was_not_measured_is_a_dash():
    text = shown(tables.summary_view(summary_of(["a", "b"], value=None)))
    assert "│ 1 b   │ – │ – │" in text and "0.000" not in text
    assert shown(tables.summary_view(summary_of([]))) == "Nothing is learned yet."


def test_the_footer_says_what_its_figures_count():
    assert shown(tables.footer(summary_of(["a"]))).splitlines() == [
        "6.2 s of training, without loading, measuring and saving",
        "36,421 rows/s, replayed rows included · RSS peak 487 MiB · replay holds 17.6 KiB",
        "forgetting 0.031, budget 0.08: kept",
    ]
    unknown = summary_of(["a"], measured_peak_bytes=None, measured_by=None, state_bytes={})
    unknown["throughput_items_per_s"], unknown["budgets"]["forgetting"]["status"] = None, "none"
    assert "peak unknown" in shown(tables.footer(unknown)) and "budget" not in shown(tables.footer(unknown))


@pytest.mark.parametrize("width", [40, 80, 120])
def test_tasks_of_a_dry_run(width):
    text = shown(tables.tasks_table([(name, 1000, 0, 200, 96, "to learn") for name in NAMES]), width)
    assert "\x1b[2J" not in text and "😄" not in text
    assert width < 80 or ("to learn" in text and "[red]x[/red]" in text)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (59.4, "59 s"), (59.7, "1 min 0 s"), (61, "1 min 1 s"), (3599.8, "1 h 0 min"), (7260, "2 h 1 min")],
)
def test_durations(seconds, said):
    assert tables.duration(seconds) == said


@pytest.mark.parametrize(
    ("text", "cells", "said"), [("abc", 3, "abc"), ("abcd", 3, "ab…"), ("数字数字", 5, "数字…"), ("ab", 1, "…")]
)
def test_cut(text, cells, said):
    assert tables.cut(text, cells) == said
