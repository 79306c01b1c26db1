"""The commands as functions of Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor, nn

from retain.data.features import encode, layout, texts
from retain.data.propose import propose
from retain.data.sources import features_of
from retain.data.tables import column_of, read_table
from retain.data.task import Stream
from retain.errors import ConfigError, DataError, RunError
from retain.models.build import build_model
from retain.report.page import page
from retain.seams import Batch
from retain.spec import RunSpec, matching
from retain.training import loop
from retain.training.checks import Listener
from retain.training.lineage import RunDirectory, load_checkpoint, opened, write_file
from retain.training.purge import purge as forget
from retain.training.summary import summarize

FORMS = {".csv": "csv", ".parquet": "parquet", ".jsonl": "jsonl", ".json": "jsonl", ".arrow": "arrow"}
"""Forms of a table by the suffix of its file; .gz may follow."""

ROWS_AT_ONCE = 65536


@dataclass(frozen=True)
class Learned:
    """A model as a run left it.

    Attributes:
        module: in eval mode, on the CPU. Call it with rows in the stream's own dtypes: ``module(x)`` (``module(x, task)`` where
            every task has its own head) gives logits [rows, classes].
        classes: names of the classes, in the order of the logits (of all heads together where each task has its own).
        tasks: names of the tasks learned, in order.
        spec: the description of the run when the last of them was learned.
        summary: its measures; see `summary.json`.
        columns: of a table: which columns the module takes and how they become numbers, as the first task fixed it (see
            `retain.data.features`); empty for other inputs.
    """

    module: nn.Module
    classes: tuple[str, ...]
    tasks: tuple[str, ...]
    spec: RunSpec
    summary: dict[str, Any]
    columns: list[dict[str, Any]] = field(default_factory=list)

    def rows(self, table: pa.Table, where: str = "the table") -> dict[str, Tensor]:
        """A table's rows as the module takes them: ``module(**rows)``.

        Args:
            table: with the run's feature columns; others are not looked at.
            where: names the table in messages.

        Raises:
            RunError: the run was not learned from a table.
            DataError: a column is not there, or holds what the run cannot read.
        """
        if not self.columns:
            raise RunError("The run was not learned from a table: give its module rows of the stream's own kind.")
        return encode(features_of(table, [entry["name"] for entry in self.columns], where), self.columns)


def as_spec(spec: RunSpec | Mapping[str, Any] | str | Path) -> RunSpec:
    """A spec from a spec, plain data, or the path of a YAML file."""
    if isinstance(spec, RunSpec):
        return spec
    if isinstance(spec, Mapping):
        return RunSpec.parse(spec, base=Path.cwd())
    return RunSpec.load(spec)


def init(
    data: str | Path | Sequence[str | Path],
    label: str,
    *,
    time: str | None = None,
    id: str | None = None,
    output: str | Path = "retain.yaml",
    force: bool = False,
) -> dict[str, Any]:
    """Look at tables and write a first configuration for them, with a comment on every choice.

    Args:
        data: one file or several of one form; a pattern such as ``data/*.csv`` stands for the files that match, then and later.
        label: the column of labels.
        time: the column that splits by time; default: the only column of dates of a single file.
        id: the column that says whom a row is about, such as a customer: no feature; `purge` finds rows by it.
        output: the YAML file; paths in it are relative to its folder.
        force: replace the file if it is there.

    Returns:
        What was seen: `rows`, `files`, `classes`, `columns`, `time`, `tasks`, `notes`, and the `config` that was written.

    Raises:
        ConfigError: the file is there already, or the data or a column cannot be used. Nothing was written.
    """
    path, given = Path(output), [str(file) for file in ([data] if isinstance(data, (str, Path)) else data)]
    files = [file for each in given for file in matching(each)]
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--output {path}: expected a file name in a folder that is there.")
    if not force and (path.exists() or path.is_symlink()):
        raise ConfigError(f"--output {path}: the file is there already. Replace it with --force, or give another name.")
    if not files:
        raise ConfigError(f"--data {', '.join(given)}: no file matches. Correct the path or the pattern.")
    forms = {FORMS.get(Path(file.lower().removesuffix(".gz")).suffix) for file in files}
    if len(forms) != 1 or None in forms:
        raise ConfigError(f"--data {', '.join(files)}: expected files of one form: .csv, .parquet, .jsonl or .arrow.")
    if len(set(files)) < len(files):
        raise ConfigError(f"--data {', '.join(files)}: a file is listed twice. List each file once.")
    found = propose(str(forms.pop()), files, label, time, id, path.parent.resolve(), given)
    write_file(path, found.text.encode())
    return found.seen


def train(
    spec: RunSpec | Mapping[str, Any] | str | Path,
    run: str | Path,
    *,
    stream: Stream | None = None,
    listener: Listener | None = None,
    gate: bool = False,
) -> dict[str, Any]:
    """Learn the tasks of a stream that a run does not have yet; see `retain.training.loop.train`."""
    return loop.train(as_spec(spec), Path(run), stream=stream, listener=listener, gate=gate)


def load(run: str | Path, task: str | int | None = None) -> Learned:
    """The model of a run as it was after a task.

    Args:
        run: the run's directory.
        task: its name or its number from 0; default: the promoted one, which is the last one unless the run was rolled back.

    Raises:
        RunError: the run has not learned the task, or the task's model is damaged or no longer kept.
    """
    path = Path(run)
    if not path.is_dir():
        raise RunError(f"{path}: no such run directory.")
    directory = RunDirectory(path)  # read as it is, without the lock: a model can be loaded while the next task is learned
    directory.read_records(repair=False)
    number = directory.latest() if task is None else _number_of(directory, task)
    if number is None:
        raise RunError(f"{path} has learned no task yet.")
    found = load_checkpoint(directory.task_path(number), ["state.json", "model.safetensors"])
    records = [record for record in directory.learned if record["number"] <= number]
    state = found["state.json"]
    spec = RunSpec.parse(state["spec"])
    inputs = state["identity"]["input"]
    columns = state["frozen"].get("columns", [])
    rows = layout(columns)
    shape = Stream(
        (),
        state["frozen"]["classes"],
        inputs["kind"],
        tuple(inputs["shape"]),
        state["scenario"],
        gaps=rows.gaps,
        categories=[len(values) for _, values in rows.categories],
    )
    module = build_model(spec.with_values({"model.weights": None}), shape, state["sizes"])
    module.load_state_dict(found["model.safetensors"])
    tasks = tuple(record["task"] for record in records)
    return Learned(module.eval(), tuple(shape.classes), tasks, spec, summarize(spec, records), columns)


def predict(run: str | Path, table: str | Path, *, task: str | int | None = None, keep: Sequence[str] = ()) -> pa.Table:
    """Classes and probabilities for the rows of a table.

    Args:
        run: the run's directory; its stream was a table.
        table: a csv, parquet, jsonl or arrow file with the run's feature columns; it needs no label.
        task: the model after this task, by name or number; default: the promoted one.
        keep: columns of the table to carry along, such as an identifier.

    Returns:
        The kept columns, `prediction`, and `p(CLASS)` for every class, in the order of the rows.

    Raises:
        RunError: the run is not of a table, or its tasks have heads of their own.
        DataError: the file cannot be read, or lacks a column.
    """
    learned = load(run, task)
    if not learned.columns:
        raise RunError(
            f"{run} was not learned from a table. Load its model with retain.load and give it rows of the stream's kind."
        )
    if learned.spec.stream.split.task_id or learned.spec.model.head == "per-task":
        raise RunError(f"{run} has a head for every task, and a row does not say its task. Use retain.load: module(x, task).")
    path = Path(table)
    form = next((form for suffix, form in FORMS.items() if suffix in path.suffixes), None)
    if form is None:
        raise DataError(f"{path}: expected a file called .csv, .parquet, .jsonl or .arrow.")
    as_text = texts(learned.columns) | (set(keep) - {entry["name"] for entry in learned.columns})  # 007 is to stay 007
    rows = read_table(form, str(path), as_text if form == "csv" else ())
    inputs = learned.rows(rows, str(path))
    dtype = next(learned.module.parameters()).dtype
    parts = Batch(inputs, torch.zeros(rows.num_rows)).parts(ROWS_AT_ONCE)
    with torch.no_grad():
        logits = torch.cat([learned.module(**part.inputs_as(dtype)).double() for part in parts])
    chances = logits.softmax(1)
    best = [learned.classes[place] for place in chances.argmax(1).tolist()]
    found = {name: column_of(rows, name, str(path), "--keep") for name in keep} | {"prediction": pa.array(best)}
    found |= {f"p({name})": pa.array(chances[:, place].numpy()) for place, name in enumerate(learned.classes[: chances.shape[1]])}
    return pa.table(found)


def promote(run: str | Path, task: str) -> None:
    """Count a task that the gate refused as learned: its model is the promoted one.

    Args:
        run: the run's directory.
        task: the task's name.

    Raises:
        RunError: there is no such run or refused task, or other tasks were learned since. Nothing was changed.
    """
    path = Path(run)
    if not (path / "lineage.jsonl").is_file():
        raise RunError(f"{path}: no such run directory.")
    with opened(path) as directory:
        refused = {record["task"]: record for record in directory.records if record["status"] == "rejected"}
        if task not in refused:
            known = ", ".join(refused) or "none"
            raise RunError(f"{path} has no refused task {task!r}; refused: {known}.")
        directory.promote(refused[task])
        directory.log("promote", task=task)


def rollback(run: str | Path, task: str | int) -> list[str]:
    """Count every task after `task` as not learned.

    Args:
        run: the run's directory.
        task: the name or the number of the last task to keep.

    Returns:
        The names of the tasks that no longer count.

    Raises:
        RunError: there is no such run or task, or the task's model is no longer kept. Nothing was changed.
    """
    path = Path(run)
    if not (path / "tasks").is_dir():
        raise RunError(f"{path}: no such run directory.")
    with opened(path) as directory:
        number = _number_of(directory, task)
        later = [record["task"] for record in directory.roll_back(number)]
        directory.log("rollback", task=number, dropped=later)
    return later


def purge(run: str | Path, where: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Remove a person's rows from a run's replay memory and kept evaluation rows; the model is not unlearned.

    Args:
        run: the run's directory.
        where: the run's `stream.id` and its value, or a list of values: ``{"customer": 48}``.

    Returns:
        Rows removed, by checkpoint and by what held them; see `retain.training.purge.purge`.

    Raises:
        ConfigError: `where` does not name one column and its values.
        RunError: there is no such run, or it does not find rows by that column. Nothing was changed.
    """
    path = Path(run)
    if not (path / "tasks").is_dir():
        raise RunError(f"{path}: no such run directory.")
    if len(where) != 1:
        raise ConfigError(f"where={dict(where)}: expected one column, the run's stream.id, and its value or values.")
    [(column, values)] = where.items()
    with opened(path) as directory:
        return forget(directory, column, values if isinstance(values, (list, tuple)) else [values])


def report(run: str | Path, output: str | Path | None = None) -> Path:
    """Write one self-contained HTML page that tells the story of a run; see `retain.report.page`.

    It takes no lock, so a run can be looked at while it trains.

    Args:
        run: the run's directory.
        output: the file to write; default: `report.html` in the run.

    Returns:
        The file that was written.

    Raises:
        RunError: there is no such run, it has learned no task yet, or a task's record is damaged.
        ConfigError: `output` is no file name in a folder that is there.
    """
    path = Path(run) / "report.html" if output is None else Path(output)
    made = page(Path(run))
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--output {path}: expected a file name in a folder that is there.")
    write_file(path, made.encode(errors="replace"))
    return path


def _number_of(run: RunDirectory, task: str | int) -> int:
    """The number of a learned task, from its name or its number."""
    numbers = {record["task"]: record["number"] for record in run.learned}
    if str(task) in numbers:
        return int(numbers[str(task)])
    if str(task).isdigit() and int(task) in numbers.values():
        return int(task)
    known = ", ".join(f"{number} ({name})" for name, number in numbers.items()) or "none"
    raise RunError(f"{run.path} has no learned task {task!r}; learned: {known}.")
