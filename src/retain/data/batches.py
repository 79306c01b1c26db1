"""Which rows a step trains on: a function of (seed, task, epoch, step), so that there is no sampler state to save or lose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from retain.data.task import Rows
from retain.params import bytes_per_row, derive, generator
from retain.seams import Batch, Column

BLOCK_BYTES = 2**20
"""Rows are gathered for as many steps at once as fit in here: for a small model, gathering each batch costs like a layer."""


def steps_per_epoch(rows: int, batch_size: int) -> int:
    """Optimizer steps in one pass over a task.

    The last batch may be smaller; a last batch of a single row joins the one before it, since BatchNorm cannot train on one row.
    """
    steps = -(-rows // batch_size)
    return steps - 1 if steps > 1 and rows % batch_size == 1 else steps


class TaskBatches:
    """The training batches of one task, each recomputed from its step's number.

    Args:
        rows: the task's training rows.
        batch_size: rows of a batch.
        seed: the run's seed.
        task: tasks learned before this one.
        with_task: whether the model is told the task (per-task heads).
        classes: global class ids of the task's local labels, [local classes]; None where labels are global.
        class_weights: weight in the loss of the rows of each label, [labels]; None for 1 each.
    """

    def __init__(
        self,
        rows: Rows,
        batch_size: int,
        *,
        seed: int,
        task: int,
        with_task: bool = False,
        classes: Tensor | None = None,
        class_weights: Tensor | None = None,
    ) -> None:
        self.rows, self.batch_size, self.seed, self.task = rows, batch_size, seed, task
        self.extra: dict[str, Column] = {"task": task} if with_task else {}
        self.classes, self.class_weights = classes, class_weights
        self.steps_per_epoch = steps_per_epoch(len(rows), batch_size)
        self._per_block = max(1, BLOCK_BYTES // (batch_size * bytes_per_row(rows.inputs)))
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)
        self._held: tuple[int, int] = (-1, -1)
        self._block: list[Batch] = []

    def at(self, step: int) -> Batch:
        """The batch of an optimizer step, counted from the task's start."""
        epoch, position = divmod(step, self.steps_per_epoch)
        block, place = divmod(position, self._per_block)
        if (epoch, block) != self._held:
            self._block, self._held = self._gather(epoch, block), (epoch, block)
        return self._block[place]

    def rows_before(self, step: int) -> int:
        """New rows drawn before an optimizer step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        return epoch * len(self.rows) + position * self.batch_size

    def _gather(self, epoch: int, block: int) -> list[Batch]:
        """The batches of a few steps, as views of rows gathered at once."""
        if epoch != self._epoch:
            key = derive("rows", self.seed, self.task, epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self.rows), generator=generator(key))
        first = block * self._per_block
        count = min(self._per_block, self.steps_per_epoch - first)
        stop = len(self.rows) if first + count == self.steps_per_epoch else (first + count) * self.batch_size
        gathered = self._batch(self._order[first * self.batch_size : stop])
        sizes = [self.batch_size] * (count - 1)
        return gathered.split([*sizes, len(gathered) - sum(sizes)])

    def in_order(self, batch_size: int, first: int = 0) -> Iterator[Batch]:
        """All rows from the first one on, once, in their own order."""
        for index in torch.arange(first, len(self.rows)).split(batch_size):
            if len(index):
                yield self._batch(index)

    def _batch(self, index: Tensor) -> Batch:
        inputs: dict[str, Column] = {name: values.index_select(0, index) for name, values in self.rows.inputs.items()}
        targets = self.rows.targets.index_select(0, index)
        meta: dict[str, Column] = {"row": index, "task": self.task}
        if self.classes is not None:
            meta["class"] = self.classes[targets]
        if self.rows.ids is not None:
            meta["id"] = self.rows.ids.index_select(0, index)
        weights = None if self.class_weights is None else self.class_weights[targets]
        return Batch({**inputs, **self.extra}, targets, weights, meta)


def class_weights(setting: str | Mapping[str, float], targets: Tensor, names: Sequence[str]) -> Tensor | None:
    """Weight in the loss of the rows of each label, fp32 [labels], of mean 1 over the rows; None where all weigh the same.

    Args:
        setting: ``none``; ``balanced``, n / (k n_c) for each of k classes with n_c of the n rows; or a weight by class name.
        targets: labels of the task's training rows, int64 [n].
        names: of the labels.
    """
    if setting == "none":
        return None
    counts = torch.bincount(targets, minlength=len(names)).double()
    if isinstance(setting, str):
        weights = torch.where(counts > 0, 1 / counts.clamp(min=1) * (len(targets) / (counts > 0).sum()), 1.0)
    else:
        weights = torch.tensor([setting.get(name, 1.0) for name in names], dtype=torch.float64)
        weights *= len(targets) / (weights * counts).sum()
    return weights.float()
