"""What a person sees while a run trains, at every width, in a terminal and in a pipe."""

import re
import sys
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from rich.console import Console

from retain.report.progress import TerminalProgress
from retain.spec import RunSpec
from retain.training.loop import train
from tests.kit import Killed, killed_after

MIB = 2**20
PEAK = (487 * MIB, "resident memory")
HOSTILE = ["[red]x[/red]", "[/x]", "a\\[b]", ":smile:", "new\nline\x1b[2J", "数字" * 30, "x" * 200]


def console(width=80, terminal=True):
    return Console(file=StringIO(), width=width, force_terminal=terminal, color_system=None, _environ={})


def stream_of(names):
    return SimpleNamespace(scenario="class-incremental", classes=["0", "1"], tasks=[SimpleNamespace(name=name) for name in names])


def row_of(number, metric="accuracy", value=0.9):
    return {metric: [value] * (number + 1), "loss": [0.1] * (number + 1)}


def play(view, names, learned=0, steps=100, resumed=0, metric="accuracy", value=0.9, peak=PEAK, stop=None, ticks=(1, 67, 100)):
    """The events of a run as the loop sends them; up to the progress of task `stop`."""
    stream = stream_of(names)
    records = [{"task": name, "row": row_of(k, metric, value)} for k, name in enumerate(names[:learned])]
    pending = stream.tasks[learned:]
    view("note", {"text": "before the stream"})
    view("stream", {"stream": stream, "pending": pending, "learned": records, "steps": steps * len(pending)})
    view("note", {"text": "after the stream"})
    for number, task in enumerate(pending, learned):
        first = resumed if number == learned else 0
        view("task", {"number": number, "task": task, "steps": steps, "step": first})
        for step in ticks:
            heard = {"step": step, "steps": steps, "loss": 0.02134, "seconds_per_step": 0.5, "peak": peak}
            view("progress", heard)
        if number == stop:
            return
        view("evaluated", {"number": number, "task": task, "row": row_of(number, metric, value), "peak": peak})
        view("note", {"text": "between tasks"})
    view("done", {"summary": {}})


def live_line(width, names=("0-1", "2-3", "4-5"), stop=2, **values):
    screen = console(width)
    view = TerminalProgress(screen)
    play(view, list(names), stop=stop, **values)
    text = view._live_line(width).plain
    view.close()
    assert cell_len(text) <= width and "\n" not in text
    return text


def lines_of(screen):
    """What stays on the screen; every line that was ever there must have fitted."""
    plain = [re.sub(r"\x1b\[(?!2K)[0-9;?]*[A-Za-z]|\r", "", line).split("\x1b[2K") for line in screen.file.getvalue().split("\n")]
    assert not screen.is_terminal or max(cell_len(text) for line in plain for text in line) <= screen.width
    assert not plain[-1][-1], "something is left on the last line"
    return [line[-1] for line in plain[:-1] if line[-1] or len(line) == 1]


# --- the live line ----------------------------------------------------------------------------------------------------


def test_the_live_line_at_eighty_columns():
    text = live_line(80)
    assert text == "task 2 (3/3)  4-5  100/100  0:00 left  kept 1.000  RSS peak 487 MiB  loss 0.021"


def test_a_wide_line_has_a_bar_and_long_words():
    text = live_line(120)
    assert text.startswith("━") and "task 2 (3 of 3)  4-5  step 100/100  0 s left  retention 1.000  RSS peak 487 MiB" in text
    assert "━" not in live_line(99)


def test_a_narrow_line_keeps_what_matters_most():
    text = live_line(50)
    assert text == "task 2 (3/3)  4-5  100/100  0:00 left  kept 1.000"
    assert live_line(40) == "task 2 (3/3)  4-5  100/100  0:00 left"
    assert live_line(24) == "task 2 (3/3)  4-5"


def test_a_long_name_is_cut_and_leaves_the_rest_in_sight():
    text = live_line(80, ["a", "b", "transactions_of_may_2018_and_more"])
    assert "transact" in text and "…" in text and "100/100  0:00 left  kept 1.000" in text


def test_time_left_counts_the_tasks_to_come():
    assert "1:40 left" in live_line(80, stop=0)  # 100 steps of each of the other two, at half a second
    assert "0:50 left" in live_line(80, stop=1)
    assert "0:00 left" in live_line(80, stop=2)
    assert "1:56 left" in live_line(80, stop=0, ticks=[68])
    assert "1:06 left" in live_line(80, learned=1, resumed=60, stop=1, ticks=[68])


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
@pytest.mark.parametrize("value", [0.9, 0.0, None])
def test_retention_is_that_of_the_summary(metric, value):
    text = live_line(120, metric=metric, value=value)
    assert ("retention 1.000" if metric == "accuracy" and value else "retention –") in text


def test_peaks_are_called_what_they_are():
    assert "CUDA peak 2.0 GiB" in live_line(80, peak=(2**31, "allocator peak"))
    assert "driver memory 3 MiB" in live_line(120, peak=(3 * MIB, "driver memory"))


def test_nothing_is_shown_before_the_first_task():
    screen = console()
    view = TerminalProgress(screen)
    stream = stream_of(["a", "b"])
    view("stream", {"stream": stream, "pending": stream.tasks, "learned": [], "steps": 10})
    assert view.live is None and screen.file.getvalue() == "2 tasks (0 to 1), class-incremental, 2 classes, 10 steps to go\n"
    view("task", {"number": 0, "task": stream.tasks[0], "steps": 5, "step": 0})
    assert view.live is not None and "task 0 (1/2)  a  0/5" in screen.file.getvalue()
    view.close()


def test_nothing_is_shown_between_two_tasks():
    screen = console()
    view = TerminalProgress(screen)
    play(view, ["a", "b"], stop=1)
    between = screen.file.getvalue().partition("total 0 s")[2].partition("task 1 (2/2)")[0]
    assert "between tasks" in between and "task 0" not in between
    view.close()


def test_the_live_line_is_removed():
    """The line is erased, the cursor is shown, and standard output is as it was, whoever put it back first."""
    before = sys.stdout
    screen = console()
    view = TerminalProgress(screen)
    play(view, ["a", "b"], stop=1)
    elsewhere = sys.stdout = StringIO()
    view.close()
    view.close()
    after, sys.stdout = sys.stdout, before
    assert after is elsewhere and view.live is None
    assert (
        screen.file.getvalue().rstrip("\n").endswith("\x1b[2K")
        and "\x1b[?25l" not in screen.file.getvalue().rpartition("\x1b[?25h")[2]
    )
    view = TerminalProgress(console())
    play(view, ["a", "b"])
    assert view.live is None and sys.stdout is before


# --- finished tasks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [True, False])
def test_a_finished_task_is_one_line_of_eighty_columns(terminal):
    screen = console(80, terminal)
    play(TerminalProgress(screen), [f"2018-{month:02d}" for month in range(1, 15)])
    found = [line for line in lines_of(screen) if "accuracy" in line]
    assert len(found) == 14 and max(map(len, found)) <= 80
    assert found[0] == "task  0  2018-01  accuracy 0.900  retention –      RSS peak 487 MiB  total 0 s"
    assert found[13] == "task 13  2018-14  accuracy 0.900  retention 1.000  RSS peak 487 MiB  total 0 s"


def test_long_metrics_get_short_words():
    screen = console(80, False)
    play(TerminalProgress(screen), ["march", "april"], metric="average_precision")
    assert "task 1  april  average_precision 0.900  kept 1.000  RSS peak 487 MiB  0 s" in lines_of(screen)


@pytest.mark.parametrize("terminal", [True, False])
def test_what_was_not_measured_is_a_dash(terminal):
    screen = console(80, terminal)
    play(TerminalProgress(screen), ["a", "b"], value=None)
    assert any("accuracy –      retention –" in line for line in lines_of(screen))


def test_a_pipe_gets_whole_lines():
    """Nothing is cut, wrapped or coloured where another program reads."""
    screen = console(40, False)
    view = TerminalProgress(screen)
    view("note", {"text": "word " * 40 + "[red]end[/red]"})
    play(view, ["n" * 60, "b"])
    text = screen.file.getvalue()
    assert "\x1b" not in text and "[red]end[/red]\n" in text and "n" * 60 in text and text.count("RSS peak 487 MiB") == 2


def test_notes_wrap_between_words_under_their_mark():
    screen = console(40)
    TerminalProgress(screen)("note", {"text": "No method against forgetting is configured, so [b]earlier[/b] tasks go."})
    assert [line.rstrip() for line in lines_of(screen)] == [
        "· No method against forgetting is",
        "  configured, so [b]earlier[/b] tasks",
        "  go.",
    ]


# --- any name, any order ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [20, 40, 80, 120])
@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_shown_as_they_are(width, terminal, name):
    screen = console(width, terminal)
    play(TerminalProgress(screen), [name, "b", *"cdefghijklmnop"])
    found = lines_of(screen)
    assert not terminal or max(map(cell_len, found)) <= width
    text = screen.file.getvalue()
    assert "\x1b[2J" not in text and "😄" not in text
    if not terminal and name.isprintable():
        assert name in text


@pytest.mark.parametrize("terminal", [True, False])
def test_resumed_within_a_task_and_with_nothing_pending(terminal):
    screen = console(80, terminal)
    play(TerminalProgress(screen), ["a", "b", "c"], learned=1, resumed=60)
    assert "3 tasks (0 to 2), 1 learned, class-incremental, 2 classes, 200 steps to go" in lines_of(screen)
    for names, learned in ((["a", "b"], 2), ([], 0), (["a"], 0)):
        screen = console(80, terminal)
        play(TerminalProgress(screen), names, learned=learned)
    assert "1 task (0), class-incremental, 2 classes, 100 steps to go" in lines_of(screen)


@pytest.mark.parametrize("terminal", [True, False])
def test_real_runs(tmp_path, terminal):
    """Killed within a task, gone on with, and given again: every event of the real loop."""
    spec = RunSpec.parse({"stream": {"random": {"tasks": 3}}, "training_params": {"epochs": 4}, "checkpoint": {"every_steps": 1}})
    view = TerminalProgress(console(80, terminal))
    with pytest.raises(Killed), killed_after(9):
        train(spec, tmp_path / "run", listener=view)
    view.close()
    screen = console(80, terminal)
    view = TerminalProgress(screen)
    train(spec, tmp_path / "run", listener=view)
    found = lines_of(screen)
    assert any("1 learned" in line for line in found) and sum("accuracy" in line for line in found) == 2
    assert view.live is None
    screen = console(80, terminal)
    train(spec, tmp_path / "run", listener=TerminalProgress(screen))
    assert lines_of(screen) == ["3 tasks (0 to 2), 3 learned, domain-incremental, 2 classes, 0 steps to go"]


def test_a_look_back_at_a_task_is_shown_and_ends_with_the_next_one():
    view = TerminalProgress(console(120))
    play(view, ["0-1", "2-3"], stop=1)
    view("consolidating", {"rows": 512, "of": 2000})
    assert "looking back, row  512/2000" in view._live_line(120).plain
    assert "512/2000" in view._live_line(40).plain
    view("task", {"number": 1, "task": SimpleNamespace(name="2-3"), "steps": 10, "step": 0})
    assert "step  0/10" in view._live_line(120).plain
    view.close()
