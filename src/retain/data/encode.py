"""Labels as class codes, and identifiers as keyed hashes."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from retain.errors import ConfigError

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


# --- identifiers ------------------------------------------------------------------------------------------------------


def id_hashes(values: Sequence[Any] | pa.ChunkedArray, key: int) -> np.ndarray:
    """Identifiers as keyed 64-bit hashes, int64 [rows], the same for 17, 17.0 and "17"; a missing one is 0.

    What a run keeps beside its rows is the hash: it finds the rows of a known person, and names nobody. With N persons, two
    share a hash with a chance of N^2 / 2^65.
    """
    column = (
        values if isinstance(values, pa.ChunkedArray) else pa.chunked_array([pa.array(list(map(name_of, values)), pa.string())])
    )
    distinct = pc.unique(column)
    salt = key.to_bytes(16, "little", signed=True)
    hashes = [0 if v is None else _hash64(name_of(v), salt) for v in distinct.to_pylist()]
    return np.array(hashes, dtype=np.int64)[pc.index_in(column, value_set=distinct).to_numpy()]


def _hash64(text: str, salt: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, key=salt).digest(), "little", signed=True) or 1
