"""The columns of a table as the model's rows, by a plan that the first task fixes and every later one follows.

    numbers     (value - mean) / standard deviation, clipped to 10; a missing value is the mean, or, where the first task
                already had missing ones, NaN, which the model's input layer turns into 0 and an indicator
    texts       the position among the first task's categories (a missing text is one of them), or one code for all others;
                the model's input layer makes one indicator per category
    dates       days, as a number, and the time of the week and of the year (of the day too, where the first task's dates have
                clock times) as points on a circle, since December and January are neighbours

Means, deviations and categories come from the first task's training rows only, so that no later row can leak into them.
They are plain numbers and texts: a run keeps them as JSON, and nobody has to unpickle an estimator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
import torch
from torch import Tensor

from retain.errors import DataError

CLIP = 10.0
"""Standardised numbers are clipped to plus and minus this."""

MOST_CATEGORIES = 1000
"""A text column with more distinct values is refused: it is an identifier or a sentence."""

DAY_US = 86_400_000_000
CIRCLES = {"week": 7.0, "year": 365.2425}
"""Periods of the circles that a date becomes a point on, in days."""
CLOCK = {"day": 1.0}

Plan = list[dict[str, Any]]
"""One entry per column, as plain data. All have a ``name``; beside it

    numbers     ``mean``, ``std``, and ``missing`` where the first task had missing values
    texts       ``categories``; None among them stands for a missing text
    dates       ``date``, the names of the circles, and ``mean``, ``std``, ``missing`` of the days
    none of it  every value in the first task's rows was missing: the column is left out
"""


class Layout(NamedTuple):
    """What the rows of a plan look like.

    Attributes:
        numbers: names of the columns of ``x``.
        gaps: which of them may be NaN.
        categories: of each column of ``codes``, its name and its categories, the last one for all others.
    """

    numbers: Sequence[str]
    gaps: Sequence[int]
    categories: Sequence[tuple[str, Sequence[str]]]

    @property
    def features(self) -> list[str]:
        """Names of what the model's input layer makes of a row."""
        missing = [f"{self.numbers[place]} is missing" for place in self.gaps]
        return [*self.numbers, *missing, *(f"{name}={value}" for name, values in self.categories for value in values)]


def layout(plan: Plan) -> Layout:
    """What the rows of a plan look like."""
    numbers: list[str] = []
    gaps, categories = [], []
    for entry in plan:
        name = entry["name"]
        if "categories" in entry:
            values = ["(missing)" if value is None else value for value in entry["categories"]]
            categories.append((name, [*values, "(other)"]))
            continue
        if entry.get("missing"):
            gaps.append(len(numbers))
        if "date" in entry:
            numbers += [
                f"{name} (days)",
                *(f"{name} ({way} of {circle})" for circle in entry["date"] for way in ("sine", "cosine")),
            ]
        elif "mean" in entry:
            numbers.append(name)
    return Layout(numbers, gaps, categories)


# --- the plan ---------------------------------------------------------------------------------------------------------


def make_plan(table: pa.Table, rows: np.ndarray) -> Plan:
    """What the rows of a table fix, column by column.

    Raises:
        DataError: a text column has too many distinct values, or no column has any value.
    """
    index = pa.array(rows)
    plan = [_entry(name, table.column(name).take(index)) for name in table.column_names]
    if all(len(entry) == 1 for entry in plan):
        raise DataError(f"every feature is empty in the first task's {len(rows):,} rows: {', '.join(table.column_names[:5])}.")
    return plan


def _entry(name: str, column: pa.ChunkedArray) -> dict[str, Any]:
    if column.null_count == len(column):
        return {"name": name}
    if kinds.is_string(column.type):
        values = sorted(pc.unique(column.drop_null()).to_pylist())
        if len(values) > MOST_CATEGORIES:
            seen = f"column {name} holds {len(values):,} distinct texts in {len(column):,} rows"
            raise DataError(
                f"{seen}; at most {MOST_CATEGORIES:,} can become categories. {_words(column)}Drop it: stream.drop: [{name}]"
            )
        return {"name": name, "categories": [*values, *([None] if column.null_count else [])]}
    if kinds.is_timestamp(column.type):
        days = _numbers(column) / DAY_US
        circles = [*CIRCLES, *(CLOCK if (days[~np.isnan(days)] % 1).any() else ())]
        return {"name": name, "date": circles, **_scale(days)}
    return {"name": name, **_scale(_numbers(column))}


def _scale(numbers: np.ndarray) -> dict[str, Any]:
    mean, std = float(np.nanmean(numbers)), float(np.nanstd(numbers))
    # rounding alone gives a constant column a standard deviation of about 1e-16 of its mean
    scale: dict[str, Any] = {"mean": mean, "std": std if std > 1e-12 * abs(mean) else 1.0}
    return scale | ({"missing": True} if np.isnan(numbers).any() else {})


def doubts(table: pa.Table, plan: Plan, rows: int) -> list[str]:
    """Sentences about columns that were probably meant otherwise: numbers with a few words, identifiers, empty columns.

    Args:
        table: all rows.
        plan: of its columns.
        rows: how many rows the plan was made from.
    """
    found = []
    if empty := [entry["name"] for entry in plan if len(entry) == 1]:
        found.append(f"Columns without any value in the rows that the first task learns from are left out: {', '.join(empty)}.")
    for entry in plan:
        name, values = entry["name"], len(entry.get("categories", ()))
        if values and (words := _words(table.column(name))):
            found.append(f"Column {name} is read as text. {words.strip()}")
        elif values > max(10, 0.9 * rows):
            seen = f"Column {name} has {values:,} values in the {rows:,} rows that the first task learns from"
            found.append(f"{seen}: it looks like an identifier, which says nothing of new rows. Drop it: stream.drop: [{name}]")
    return found


def _words(column: pa.ChunkedArray) -> str:
    """A sentence about the few texts in a column of numbers; empty if it is no such column."""
    column = column.drop_null()
    odd = column.filter(pc.invert(pc.match_substring_regex(column, r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$")))
    if not 0 < 2 * len(odd) < len(column):
        return ""
    examples = ", ".join(repr(value) for value in pc.unique(odd).to_pylist()[:3])
    seen = f"{len(odd):,} of its {len(column):,} values are no numbers (such as {examples}), and the others are"
    return f"{seen}. Write numbers there too, or leave such fields empty. "


def texts(plan: Sequence[Mapping[str, Any]]) -> set[str]:
    """Names of the columns that are read as texts, whatever a later file looks like."""
    return {entry["name"] for entry in plan if "categories" in entry}


# --- rows -------------------------------------------------------------------------------------------------------------


def encode(table: pa.Table, plan: Plan) -> dict[str, Tensor]:
    """The columns of a table as the model's inputs.

    Returns:
        ``x`` float32 [rows, numbers], and ``codes`` int16 [rows, text columns] where there are text columns; see `layout`.

    Raises:
        DataError: a column holds another kind of values than when the plan was made.
    """
    found = layout(plan)
    x = np.empty((table.num_rows, len(found.numbers)), dtype=np.float32)
    codes = np.empty((table.num_rows, len(found.categories)), dtype=np.int16)
    number = code = 0
    for entry in plan:
        column = table.column(entry["name"])
        _check_kind(entry, column)
        if "categories" in entry:
            known = pa.array(entry["categories"], pa.string())
            place = pc.index_in(column.cast(pa.string()), value_set=known)
            codes[:, code] = place.fill_null(len(known)).to_numpy()
            code += 1
        elif "mean" in entry:
            for values in _number_columns(entry, column):
                x[:, number] = values
                number += 1
    return {"x": torch.from_numpy(x)} | ({"codes": torch.from_numpy(codes)} if found.categories else {})


def _number_columns(entry: Mapping[str, Any], column: pa.ChunkedArray) -> Iterator[np.ndarray]:
    """The columns of ``x`` that one column of numbers or dates becomes, each [rows]."""
    values = _numbers(column)
    days = values / DAY_US if "date" in entry else values
    scaled = np.clip((days - entry["mean"]) / entry["std"], -CLIP, CLIP)
    yield scaled if entry.get("missing") else np.nan_to_num(scaled)
    periods = {**CIRCLES, **CLOCK}
    for circle in entry.get("date", ()):
        angle = 2 * np.pi * (days % periods[circle]) / periods[circle]
        yield np.nan_to_num(np.sin(angle))
        yield np.nan_to_num(np.cos(angle))


def _check_kind(entry: Mapping[str, Any], column: pa.ChunkedArray) -> None:
    """Raise a DataError where a column's type is not the plan's; a column without any value has none."""
    if kinds.is_null(column.type) or len(entry) == 1:
        return
    before = "text" if "categories" in entry else "dates" if "date" in entry else "numbers"
    now = "text" if kinds.is_string(column.type) else "dates" if kinds.is_timestamp(column.type) else "numbers"
    if before != now:
        raise DataError(f"column {entry['name']} held {before} when the run began and holds {now} now. Mend the new file.")


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """Values in fp64, dates in microseconds since 1970; a missing one is NaN."""
    if kinds.is_timestamp(column.type):
        column = column.cast(pa.int64())
    return np.asarray(column.cast(pa.float64(), safe=False).to_numpy())
