"""Labels as class codes, and the columns of a table as one float32 matrix; both by plans that a run can freeze.

Numbers are standardised by the mean and the standard deviation of the rows that the plan was made from, and clipped to
10 standard deviations. A text column becomes one indicator column for every category in those rows, and one for all others.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from retain.errors import ConfigError, DataError

CLIP = 10.0
"""Standardised numbers are clipped to plus and minus this."""

MOST_CATEGORIES = 1000
"""A text column with more distinct values is refused: it is an identifier or a sentence."""

# --- labels -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Labels:
    """A column of few distinct values.

    Attributes:
        values: the distinct values, sorted: numbers by size, before texts by alphabet.
        codes: position in `values`, int64 [rows].
    """

    values: Sequence[Any]
    codes: np.ndarray

    @property
    def names(self) -> list[str]:
        """The values in words."""
        return [name_of(value) for value in self.values]

    def find(self, value: Any, key: str) -> int:
        """The position of a value that a key of the configuration names.

        Raises:
            ConfigError: no row has it.
        """
        names = self.names
        if name_of(value) in names:
            return names.index(name_of(value))
        close = difflib.get_close_matches(name_of(value), names, 1)
        hint = f"Did you mean {close[0]}?" if close else f"The data hold {shortened(names)}."
        if isinstance(value, bool):
            hint += " (YAML reads yes, no, on and off without quotes as true and false.)"
        raise ConfigError(f"{key}: no row has the value {name_of(value)}. {hint}")


def name_of(value: Any) -> str:
    """A value in words, the same for 1 and 1.0, and for true as YAML and as a file write it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def shortened(names: Sequence[str], most: int = 10) -> str:
    """The first names of a list, in words."""
    return ", ".join(names[:most]) + (f", … ({len(names):,} in all)" if len(names) > most else "")


def read_labels(column: pa.ChunkedArray) -> Labels:
    """Distinct values and codes of a column without missing values."""
    values = pc.unique(column)
    return _sorted(values.to_pylist(), pc.index_in(column, value_set=values).to_numpy())


def relabelled(labels: Labels, rule: str | Mapping[str, Any] | None) -> Labels:
    """Labels replaced by a mapping of names, or whole numbers by ``even`` and ``odd`` (rule ``parity``).

    Raises:
        ConfigError: a label is not in the mapping, or has no parity.
    """
    if rule is None:
        return labels
    if rule == "parity":
        wrong = [name_of(value) for value in labels.values if isinstance(value, bool) or not isinstance(value, int)]
        new = [] if wrong else [("even", "odd")[value % 2] for value in labels.values]
        said = "are no whole numbers, which parity needs"
    else:
        assert isinstance(rule, Mapping)
        wrong = [name for name in labels.names if name not in rule]
        new = [] if wrong else [rule[name] for name in labels.names]
        said = "are not in the mapping, which must name every label"
    if wrong:
        raise ConfigError(f"stream.relabel: the labels {shortened(wrong)} {said}.")
    distinct = list({name_of(value): value for value in new}.values())
    places = {name_of(value): place for place, value in enumerate(distinct)}
    return _sorted(distinct, np.array([places[name_of(value)] for value in new])[labels.codes])


def _sorted(values: Sequence[Any], codes: np.ndarray) -> Labels:
    order = sorted(range(len(values)), key=lambda place: (isinstance(values[place], str), values[place]))
    rank = np.empty(len(values), dtype=np.int64)
    rank[order] = np.arange(len(values))
    return Labels([values[place] for place in order], rank[codes])


# --- columns ----------------------------------------------------------------------------------------------------------

Plan = list[dict[str, Any]]
"""One entry per column, as plain data: its name, and mean and std, or its categories."""


def make_plan(table: pa.Table, rows: np.ndarray) -> Plan:
    """What the rows of a table fix: scaling and categories, column by column.

    Raises:
        DataError: a text column has too many distinct values.
    """
    part = table.take(pa.array(rows))
    return [_entry(name, part.column(name)) for name in table.column_names]


def _entry(name: str, column: pa.ChunkedArray) -> dict[str, Any]:
    if kinds.is_string(column.type):
        values = sorted(pc.unique(column).to_pylist())
        if len(values) > MOST_CATEGORIES:
            seen = f"column {name} holds {len(values):,} distinct texts in {len(column):,} rows"
            raise DataError(
                f"{seen}; at most {MOST_CATEGORIES:,} can become categories. {_words(column)}Drop it: stream.drop: [{name}]"
            )
        return {"name": name, "categories": values}
    numbers = _numbers(column)
    mean, std = float(numbers.mean()), float(numbers.std())
    # rounding alone gives a constant column a standard deviation of about 1e-16 of its mean
    return {"name": name, "mean": mean, "std": std if std > 1e-12 * abs(mean) else 1.0}


def doubts(table: pa.Table, plan: Plan, rows: int) -> list[str]:
    """Sentences about text columns that were probably meant otherwise: numbers with a few words, and identifiers.

    Args:
        table: all rows.
        plan: of its columns.
        rows: how many rows the plan was made from.
    """
    found = []
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
    odd = column.filter(pc.invert(pc.match_substring_regex(column, r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$")))
    if not 0 < 2 * len(odd) < len(column):
        return ""
    examples = ", ".join(repr(value) for value in pc.unique(odd).to_pylist()[:3])
    seen = f"{len(odd):,} of its {len(column):,} values are no numbers (such as {examples}), and the others are"
    return f"{seen}. Write numbers there too, or leave such rows out. "


def feature_names(plan: Plan) -> list[str]:
    """Names of the matrix's columns."""
    names = []
    for entry in plan:
        if "categories" in entry:
            names += [f"{entry['name']}={value}" for value in (*entry["categories"], "(other)")]
        else:
            names.append(entry["name"])
    return names


def encode(table: pa.Table, plan: Plan) -> np.ndarray:
    """The columns of a table as one float32 matrix [rows, features].

    Raises:
        DataError: a column held numbers when the plan was made and holds text now, or the other way round.
    """
    matrix = np.zeros((table.num_rows, len(feature_names(plan))), dtype=np.float32)
    start = 0
    for entry in plan:
        column = table.column(entry["name"])
        if ("categories" in entry) != kinds.is_string(column.type):
            before, now = ("text", "numbers") if "categories" in entry else ("numbers", "text")
            raise DataError(f"column {entry['name']} held {before} when the run began and holds {now} now. Mend the new file.")
        if "categories" in entry:
            known = entry["categories"]
            place = pc.index_in(column, value_set=pa.array(known, pa.string())).fill_null(len(known)).to_numpy()
            matrix[np.arange(len(matrix)), start + place] = 1.0
            start += len(known) + 1
        else:
            matrix[:, start] = np.clip((_numbers(column) - entry["mean"]) / entry["std"], -CLIP, CLIP)
            start += 1
    return matrix


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    return column.cast(pa.float64(), safe=False).to_numpy()
