"""A first configuration for a table: what its columns hold, and a commented YAML that `retain train` takes as it stands.

What training would refuse is dropped by name, with the reason beside it. Nothing is guessed about meaning: a column that tells
the label alone is kept, and a comment says so.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
import yaml

from retain.data import tables
from retain.data.encode import Labels, name_of, read_labels, shortened
from retain.data.features import MOST_CATEGORIES
from retain.data.scenarios import build_stream
from retain.data.sources import TOO_LARGE
from retain.data.splits import by_time
from retain.errors import ConfigError, DataError
from retain.spec import RunSpec, SplitSpec

RARE = 0.05
"""A class with a smaller share of the rows is rare: accuracy and auc hardly notice it."""

FEWEST_MONTHS, MOST_MONTHS = 3, 36
"""With fewer or more months than this, four periods of equal row count are proposed."""

MOST_NAMED = 20
"""Leak suspects and columns with missing values that are written out at most."""

UNIQUE = 0.95
"""A column with more distinct values per row is nearly unique."""

_DATE = r"^\d{4}-\d{2}(-\d{2}([T ].*)?)?$"
_IDENTIFIER = re.compile(r"(^|[^a-z])(id|uuid|guid|key|nr|no|number|index)$|[a-z](Id|ID)$")


@dataclass(frozen=True)
class Column:
    """What was seen in a column beside the label.

    Attributes:
        name: its name.
        kind: number, category, true/false, date, text, identifier, constant, empty, or other.
        distinct: how many distinct values it has; 0 where they were not counted.
        dropped: why it is no feature; None where it is one.
        leak: whether it tells the label alone.
        missing: how many rows have no value in it.
    """

    name: str
    kind: str
    distinct: int = 0
    dropped: str | None = None
    leak: bool = False
    missing: int = 0


@dataclass(frozen=True)
class Proposal:
    """A configuration and what it was made from.

    Attributes:
        text: the YAML.
        seen: rows, classes, columns, time and tasks, as plain data.
    """

    text: str
    seen: dict[str, Any]


def propose(
    form: str,
    files: Sequence[str],
    label: str,
    time: str | None,
    who: str | None,
    folder: Path,
    written: Sequence[str] | None = None,
) -> Proposal:
    """Look at tables and propose a configuration, which has been tried: training takes it.

    Args:
        form: ``csv``, ``parquet``, ``jsonl`` or ``arrow``.
        files: at least one.
        label: the column of labels.
        time: the column that splits by time; None to take the only column of dates of a single file.
        who: the column that says whom a row is about, which is no feature.
        folder: where the YAML will lie; paths are written relative to it.
        written: what stands for the files in the YAML, such as a pattern; default: the files.

    Raises:
        ConfigError: the label, the time, the identifier or a path cannot be used.
        DataError: the data cannot be read or used.
    """
    if time == label:
        raise ConfigError(f"--time {time} is also the label. Name the column of dates.")
    if who is not None and who in (label, time):
        raise ConfigError(f"--id {who} is also the {'label' if who == label else 'time'}. Name the column of customers, say.")
    read, _ = tables.read_tables(form, files)
    if who is not None:
        for table, where in zip(read, files, strict=True):
            tables.column_of(table, who, where, "--id")
    read, unlabelled = _labelled(read, files, label)
    labels = read_labels(_whole(read, files, label, "--label", "A label is a text or a whole number: mend them."))
    counts = _class_counts(labels, label)
    key = None if time is None else _whole(read, files, time, "--time", "Every row needs a time: fill them in.")
    names = [name for name in dict.fromkeys(read[0].column_names) if name not in (label, time, who)]
    columns = [_look([_only(table, name) for table in read], name, labels.codes) for name in names]
    dates = [column.name for column in columns if column.kind == "date"]
    if key is None and len(files) == 1 and len(dates) == 1:
        time, key = dates[0], _whole(read, files, dates[0], "--time", "")
        columns = [column for column in columns if column.name != time]
    split, tasks, said = _split(time, key, labels.codes, len(files), dates)
    metric, positive, why = _metric(labels, counts)
    rows = len(labels.codes)
    paths = [os.path.relpath(Path(path).parent.resolve() / Path(path).name, folder) for path in written or files]
    classes = dict(zip(labels.names, counts.tolist(), strict=True))
    text = _written(form, paths, label, classes, columns, who, (split, said), (metric, positive, why), (rows, unlabelled), tasks)
    values = yaml.safe_load(text)
    spec = RunSpec.parse(values, base=folder)
    _same_files(getattr(spec.stream, form), files)
    stream = build_stream(spec)
    seen = {
        "rows": rows,
        "unlabelled": unlabelled,
        "files": list(paths),
        "classes": classes,
        "columns": [asdict(column) for column in columns],
        "time": None if split["by"] != "time" else {"column": time, "seen": said},
        "tasks": [task.name for task in stream.tasks],
        "config": values,
        "notes": list(stream.notes),
    }
    return Proposal(text, seen)


# --- what is there ----------------------------------------------------------------------------------------------------


def _labelled(read: Sequence[pa.Table], files: Sequence[str], label: str) -> tuple[list[pa.Table], int]:
    """The rows that have a label, table by table, and how many have none."""
    found = []
    for table, where in zip(read, files, strict=True):
        column = tables.column_of(table, label, where, "--label")
        found.append(table.filter(pc.invert(pc.is_null(column, nan_is_null=True))) if column.null_count else table)
    if not any(table.num_rows for table in found):
        raise DataError(f"--label {label}: no row of {files[0]} has a value there.")
    return found, sum(table.num_rows for table in read) - sum(table.num_rows for table in found)


def _whole(read: Sequence[pa.Table], files: Sequence[str], name: str, key: str, remedy: str) -> pa.ChunkedArray:
    """A column that an option names, of all files together; no value may be missing."""
    parts = []
    for table, where in zip(read, files, strict=True):
        column = tables.plain(tables.column_of(table, name, where, key), name, where)
        parts.append(tables.present(column, name, where, remedy))
        if parts[0].type != column.type:
            seen = f"column {name} holds {parts[0].type} in {files[0]} and {column.type} in {where}"
            raise DataError(f"{key}: {seen}. Use one type in all files.")
    return pa.chunked_array([chunk for part in parts for chunk in part.chunks], parts[0].type)


def _only(table: pa.Table, name: str) -> pa.ChunkedArray | None:
    """The column of a name; None where there is none, or several."""
    positions = table.schema.get_all_field_indices(name)
    return table.column(positions[0]) if len(positions) == 1 else None


def _class_counts(labels: Labels, label: str) -> np.ndarray:
    """Rows of each class.

    Raises:
        DataError: the column does not hold classes.
    """
    values, rows = labels.values, len(labels.codes)
    if any(isinstance(value, float) and not value.is_integer() for value in values):
        raise DataError(f"--label {label}: the column holds fractions. Labels are classes: texts or whole numbers.")
    if not isinstance(values[0], (str, bool, int, float)):
        raise DataError(f"--label {label}: the column holds dates. Labels are texts or whole numbers.")
    if len(values) < 2:
        raise DataError(f"--label {label}: every row has the label {labels.names[0]}. Two classes are needed at least.")
    if 2 * len(values) > rows:
        seen = f"the column has {len(values):,} values in {rows:,} rows ({shortened(labels.names, 5)})"
        raise DataError(f"--label {label}: {seen}. A class needs two rows at least: name a column of few values.")
    return np.bincount(labels.codes)


def _look(parts: Sequence[pa.ChunkedArray | None], name: str, codes: np.ndarray) -> Column:
    """What a column holds, given file by file, and whether training can use it."""
    rows, plain = len(codes), []
    for part in parts:
        if part is None:
            return Column(name, "other", dropped="not once in every file")
        try:
            plain.append(tables.plain(part, name, ""))
        except DataError:
            return Column(name, "other", dropped=f"holds {part.type}, neither numbers nor text")
    there = [~pc.is_null(part, nan_is_null=True).to_numpy() for part in plain]
    known = np.concatenate(there)
    if not known.any():
        return Column(name, "empty", dropped="empty")
    plain = [part.filter(pa.array(mask)) for part, mask in zip(plain, there, strict=True) if mask.any()]
    sorts = {"text" if kinds.is_string(p.type) else "date" if kinds.is_timestamp(p.type) else "number" for p in plain}
    if len(sorts) > 1:
        return Column(name, "other", dropped=f"{' in one file and '.join(sorted(sorts))} in another")
    kind = plain[0].type if len({part.type for part in plain}) == 1 else pa.float64()
    column = pa.chunked_array([chunk for part in plain for chunk in part.cast(kind, safe=False).chunks], kind)
    unique = not kinds.is_floating(kind) and all(pc.count_distinct(part).as_py() > UNIQUE * len(part) for part in plain)
    if kinds.is_timestamp(kind) and len(plain) > 1:
        ends = [pc.min_max(part).as_py() for part in plain]
        if all(one["max"] < other["min"] for one, other in itertools.pairwise(ends)):
            return Column(name, "date", dropped="dates that go on from file to file; --time makes them split")
    seen = _of_type(column, name, codes[known], unique)
    return replace(seen, missing=rows - int(known.sum()))


def _of_type(column: pa.ChunkedArray, name: str, codes: np.ndarray, unique: bool) -> Column:
    """What a column of one type without missing values holds; `unique`: nearly every row of each file has its own value."""
    rows, distinct, kind = len(codes), int(pc.count_distinct(column).as_py()), column.type
    if kinds.is_string(kind) and _is_dates(column, name):
        return Column(name, "date", distinct, "dates as text, which do not split here")
    if kinds.is_timestamp(kind) and distinct > 1:
        return Column(name, "date", distinct)
    if distinct == 1:
        return Column(name, "constant", 1, f"always {_shown(name_of(column[0].as_py()))}")
    if kinds.is_string(kind):
        if unique and distinct > 10:
            return Column(name, "identifier", distinct, f"nearly unique: {distinct:,} texts in {rows:,} rows")
        if distinct > MOST_CATEGORIES:
            return Column(name, "text", distinct, f"{distinct:,} texts; {MOST_CATEGORIES:,} categories at most")
        return Column(name, "category", distinct, leak=_tells(column, distinct, codes))
    if kinds.is_floating(kind):
        numbers = column.to_numpy()
        if not (np.abs(numbers) <= np.finfo(np.float32).max).all():
            return Column(name, "number", distinct, f"numbers that are infinite or {TOO_LARGE}")
    elif kinds.is_integer(kind) and unique and distinct >= 20:
        ends = pc.min_max(column).as_py()
        if _IDENTIFIER.search(name) or _IDENTIFIER.search(name.lower()) or ends["max"] - ends["min"] < 2 * rows:
            return Column(name, "identifier", distinct, f"nearly unique: {distinct:,} whole numbers in {rows:,} rows")
    said = "true/false" if kinds.is_boolean(kind) else "number"
    return Column(name, said, distinct, leak=_tells(column, distinct, codes))


def _is_dates(column: pa.ChunkedArray, name: str) -> bool:
    """Whether texts are dates that can split."""
    if not re.match(_DATE, column[0].as_py()) or not pc.all(pc.match_substring_regex(column, _DATE)).as_py():
        return False
    try:
        by_time(column, SplitSpec(by="time", column=name, every="month"), None, [])
    except ConfigError:
        return False
    return True


def _tells(column: pa.ChunkedArray, distinct: int, codes: np.ndarray) -> bool:
    """Whether a column tells the label alone: each of few values has one label, or the classes' ranges do not overlap."""
    if distinct <= len(codes) // 10:
        values = read_labels(column).codes
        return len(np.unique(values * (codes.max() + 1) + codes)) == distinct
    if kinds.is_string(column.type) or np.bincount(codes).min() < 5:
        return False
    order = np.argsort(codes, kind="stable")
    numbers = column.cast(pa.float64(), safe=False).to_numpy()[order]
    starts = np.searchsorted(codes[order], np.arange(codes.max() + 1))
    low, high = np.minimum.reduceat(numbers, starts), np.maximum.reduceat(numbers, starts)
    place = np.argsort(low)
    return bool((high[place][:-1] < low[place][1:]).all())


# --- what fits it -----------------------------------------------------------------------------------------------------


def _split(
    time: str | None, key: pa.ChunkedArray | None, codes: np.ndarray, files: int, dates: Sequence[str]
) -> tuple[dict[str, Any], int, str]:
    """How rows become tasks, into how many, and what was seen."""
    if key is None:
        if files > 1:
            return {"by": "file"}, files, f"{files} files, one task each, in this order"
        more = f"; split by time: --time {' or '.join(map(_shown, dates))}" if dates else ""
        return {"by": "file"}, 1, f"one file, so one task; a file added to the list is the next one{more}"
    periods = {"by": "time", "column": time, "periods": 4}
    if not (kinds.is_string(key.type) or kinds.is_timestamp(key.type)):
        by_time(key, SplitSpec.model_validate(periods), None, [])
        return periods, 4, "numbers, in four parts of equal row count"
    months, _ = by_time(key, SplitSpec(by="time", column=time, every="month"), None, [])
    span = f"{months[0].name} to {months[-1].name}" if len(months) > 1 else months[0].name
    seen = f"{len(months)} month{'s' if len(months) > 1 else ''}, {span}"
    if FEWEST_MONTHS <= len(months) <= MOST_MONTHS:
        if all(np.bincount(codes[month.rows]).max() > 1 for month in months):
            return {"by": "time", "column": time, "every": "month"}, len(months), seen
        return periods, 4, f"{seen}, of which some have too few rows for a task: four parts of equal row count"
    return periods, 4, f"{seen}: four parts of equal row count"


def _metric(labels: Labels, counts: np.ndarray) -> tuple[str, Any, str]:
    """The metric, the positive class where it matters, and why."""
    if len(counts) > 2:
        return "accuracy", None, f"{len(counts)} classes; the largest has {counts.max() / counts.sum():.1%} of the rows"
    place = int(counts.argmin())
    share = f"{_shown(labels.names[place])} has {counts[place] / counts.sum():.2%} of the rows"
    if counts[place] < RARE * counts.sum():
        return "average_precision", labels.values[place], f"{share}: rare; or recall_at_fpr=0.01, recall at 1 % false alarms"
    return "auc", None, f"two classes; {share}"


def _effort(rows: float) -> tuple[int, int]:
    """Batch size and epochs for a task of this many rows."""
    return next(((batch, epochs) for most, batch, epochs in _EFFORTS if rows < most))


_EFFORTS = ((2000, 32, 20), (20_000, 64, 10), (200_000, 256, 5), (math.inf, 1024, 3))


def _same_files(resolved: Sequence[str], files: Sequence[str]) -> None:
    """Raise a ConfigError where the YAML's own reading of a path (~, $ and wildcards) gives another file."""
    if len(resolved) == len(files):
        wrong = [new for old, new in zip(resolved, files, strict=True) if not (Path(old).exists() and os.path.samefile(old, new))]
    else:
        wrong = list(files)
    if wrong:
        raise ConfigError(f"--data {wrong[0]}: the path holds ~, $ or a wildcard, which mean something else in YAML. Rename it.")


# --- the text ---------------------------------------------------------------------------------------------------------


def _written(
    form: str,
    paths: Sequence[str],
    label: str,
    classes: dict[str, int],
    columns: Sequence[Column],
    who: str | None,
    split: tuple[dict[str, Any], str],
    metric: tuple[str, Any, str],
    counts: tuple[int, int],
    tasks: int,
) -> str:
    """The YAML: every line says what was seen; `counts`: rows with and without a label."""
    rows, unlabelled = counts
    dropped = [column for column in columns if column.dropped]
    features = [column for column in columns if not column.dropped]
    suspects = [column for column in features if column.leak]
    largest = sorted(classes.items(), key=lambda item: -item[1])
    named = ", ".join(f"{_shown(name)}: {count:,}" for name, count in largest[:5])
    batch, epochs = _effort(rows / tasks)
    lines = ["# Written by `retain init`. Every key: docs/configuration.md", "", "stream:"]
    lines += [f"  {form}:  # {rows:,} rows", *(f"    - {_scalar(path)}" for path in paths)]
    lines.append(f"  label: {_scalar(label)}  # {len(classes):,} classes; {named}{', …' if len(classes) > 5 else ''}")
    if unlabelled:
        lines.append(f"  # {unlabelled:,} more rows have no label; they are left out until they have one")
    lines.append(f"  split:  # {split[1]}; {rows:,} rows")
    lines += [f"    {key}: {_scalar(value)}" for key, value in split[0].items()]
    if dropped:
        lines.append(f"  drop:  # {len(dropped):,} of {len(columns):,} columns")
        lines += [f"    - {_scalar(column.name)}  # {column.dropped}" for column in dropped]
    of = {kind: [column for column in features if column.kind == kind] for kind in ("date", "category")}
    numbers = len(features) - len(of["date"]) - len(of["category"])
    said = f"{numbers:,} of numbers, {len(of['category']):,} of text with {sum(c.distinct for c in of['category']):,} categories"
    said += f", {len(of['date']):,} of dates" if of["date"] else ""
    lines.append(f"  # features: the other {len(features):,} columns, {said}")
    gaps = [f"{_shown(column.name)} ({column.missing:,})" for column in features if column.missing]
    if gaps:
        lines.append(f"  # missing values, which an indicator tells the model of: {shortened(gaps, MOST_NAMED)}")
    given = "# id: COLUMN" if who is None else f"id: {_scalar(who)}"
    lines.append(f"  {given}  # whom a row is about, such as a customer: no feature; `retain purge` finds rows by it")
    for column in suspects[:MOST_NAMED]:
        lines.append(
            f"  # leak? {_shown(column.name)} tells the label alone; add it to drop unless it is known before the label is"
        )
    if len(suspects) > MOST_NAMED:
        lines.append(f"  # leak? so do {len(suspects) - MOST_NAMED:,} more")
    lines.append("  test: 0.2  # share of each task's rows that measures it")
    lines.append(f"  metric: {metric[0]}  # {metric[2]}")
    if metric[1] is not None:
        lines.append(f"  positive: {_scalar(metric[1])}  # the rare class, which is to be found")
    lines += [
        "",
        "training_params:",
        f"  batch_size: {batch}  # about {rows / tasks:,.0f} rows in a task",
        f"  epochs: {epochs}  # passes over each task",
        "  optimizer: AdamW(lr=1e-3)  # the default",
        "  regularization:",
        "    replay_ratio: 0.5  # stored rows per new row",
        "    replay_capacity: 2000  # rows kept of all earlier tasks together",
        "    # ewc_lambda: 40  # instead of both, where rows may not be kept: holds the weights; 10 to 100",
        "",
        "budget:",
        "  forgetting: 0.05  # earlier tasks may lose this much; with `retain train --gate` a task that breaks it is refused",
        "  # score: 0.5  # what the newest task's own metric must reach; a month with wrong labels does not",
    ]
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    """A value as one line of YAML, in quotes where it needs them."""
    style = '"' if isinstance(value, str) and not re.fullmatch(r"\w[\w ./-]*", value) else None
    text = yaml.safe_dump(value, default_style=style, allow_unicode=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")


def _shown(name: str) -> str:
    """A name within a comment: on one line, with nothing that would end it, and not too long."""
    text = "".join(sign if sign.isprintable() else sign.encode("unicode_escape", "replace").decode() for sign in name)
    return text if len(text) <= 40 else f"{text[:39]}…"
