"""Tasks and streams: rows in native dtypes, one task after another."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Labelled rows in memory, in native dtypes (uint8 images stay uint8).

    Attributes:
        inputs: the model's inputs by name, each [rows, ...].
        targets: class ids, int64 [rows].
        ids: hashes of identifiers, int64 [rows]; None where no column is named. Not what a model learns from, so not in the
            fingerprint.
    """

    inputs: Mapping[str, Tensor]
    targets: Tensor
    ids: Tensor | None = None

    def __len__(self) -> int:
        """Number of rows."""
        return self.targets.shape[0]

    def take(self, index: Tensor) -> Rows:
        """The rows at an index tensor, as copies."""
        ids = None if self.ids is None else self.ids[index]
        return Rows({name: values[index] for name, values in self.inputs.items()}, self.targets[index], ids)

    def tensors(self) -> dict[str, Tensor]:
        """All columns by name, for a file."""
        ids = {} if self.ids is None else {"ids": self.ids}
        return {**{f"inputs.{name}": values for name, values in self.inputs.items()}, "targets": self.targets, **ids}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Rows:
        """The inverse of `tensors`."""
        prefix = "inputs."
        inputs = {name.removeprefix(prefix): values for name, values in tensors.items() if name.startswith(prefix)}
        return cls(inputs, tensors["targets"], tensors.get("ids"))

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of every value, dtype and shape."""
        digest = hashlib.sha256()
        for name, values in sorted(Rows(self.inputs, self.targets).tensors().items()):
            digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
            if values.numel():
                digest.update(values.contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True)
class Task:
    """One task of a stream: rows to learn from and rows to be measured on.

    Attributes:
        name: unique in its stream; the lineage knows the task by it.
        train, validation, test: its rows; validation may be empty.
        classes: ids of the classes that occur in it. Labels of a task with its own head are positions in this list.
    """

    name: str
    train: Rows
    validation: Rows
    test: Rows
    classes: Sequence[int]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the task's rows."""
        parts = (self.train.fingerprint, self.validation.fingerprint, self.test.fingerprint)
        return hashlib.sha256("".join(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Stream:
    """Tasks in the order in which they are learned.

    Attributes:
        tasks: at least one.
        classes: names of all classes; a class's id is its position, in order of first appearance in the stream.
        kind: ``vector``, ``image`` or ``tokens``.
        shape: shape of one row of the model's input ``x``.
        gaps: of a table: which columns of ``x`` may be NaN, a missing value.
        categories: of a table: how many values each column of the model's input ``codes`` has; empty where there is none.
        scenario: ``class-incremental``, ``domain-incremental`` or ``task-incremental`` (van de Ven et al. 2022).
        features: names of what a table's rows become in the model, empty where there are none.
        frozen: what the first task fixed, as plain data: cut points, category maps, scaling. Given back to the builder when
            the stream is opened again, so that it is never computed twice.
        notes: sentences for the user: what was dropped, dealt or changed.
    """

    tasks: Sequence[Task]
    classes: Sequence[str]
    kind: str
    shape: tuple[int, ...]
    scenario: str
    features: Sequence[str] = ()
    frozen: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    gaps: Sequence[int] = ()
    categories: Sequence[int] = ()
