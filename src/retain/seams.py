"""The six seams at which every technique touches training, and what passes through them.

    seam        function                          when it runs
    batch       mix(batch, ctx, state) -> Batch   where batches are drawn, before items are counted
    loss        penalty(ctx, state) -> Tensor     inside each micro-batch; a sum over items, before division by the step's
    gradient    observe, add_grad_, project_grad_ once per optimizer step, after unscaling, before clipping, in this order;
                                                  not when the gradient overflowed
    parameter   project_(params, state, sizes)    after the optimizer's step; not when that step was skipped
    module      apply_(module, state) -> Undo     between steps; undone last in, first out
    decision    decide(...)                       every k steps (the controller's; not part of a method)

A method is a bundle of such functions; each works alone in a plain PyTorch loop. Nothing here knows a trainer, a loop or a clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Column = Any
"""One field of a batch: a tensor [rows, ...], a list of tensors (variable length), or an int that all rows share."""

Undo = Callable[[], None]
"""Takes back what a module seam did."""


@dataclass
class Batch:
    """Rows for one step.

    Attributes:
        inputs: what the model is called with, by name: ``model(**inputs)``.
        targets: labels, [rows] or [rows, tokens]; -100 marks a token that counts for nothing.
        weights: weight of each row in the loss, [rows], 1 on average over the run; None means 1 each.
        meta: what the model never sees: ``row`` (index in its task), ``task``, ``class`` where targets are local to the task,
            stored logits ...
    """

    inputs: dict[str, Column]
    targets: Tensor
    weights: Tensor | None = None
    meta: dict[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        """Rows."""
        return self.targets.shape[0]

    @property
    def items(self) -> int | Tensor:
        """What the summed loss is divided by: the number of rows, or of tokens that count."""
        if self.targets.ndim == 1:
            return self.targets.shape[0]
        return (self.targets != -100).sum()

    def rows(self, start: int, stop: int) -> Batch:
        """The rows from start to stop, as views."""
        weights = None if self.weights is None else self.weights[start:stop]
        return Batch(_cut(self.inputs, start, stop), self.targets[start:stop], weights, _cut(self.meta, start, stop))

    def split(self, sizes: list[int]) -> list[Batch]:
        """Consecutive parts of these many rows, as views; one call per column, however many parts."""
        count = len(sizes)
        targets = self.targets.split(sizes)
        weights = [None] * count if self.weights is None else self.weights.split(sizes)
        inputs, meta = _split(self.inputs, sizes), _split(self.meta, sizes)
        return [Batch(inputs[k], targets[k], weights[k], meta[k]) for k in range(count)]

    def parts(self, limit: int | None) -> list[Batch]:
        """The fewest parts of at most `limit` rows, of sizes as equal as possible; None for the batch as it is."""
        rows = len(self)
        if limit is None or rows <= limit:
            return [self]
        count = -(-rows // limit)
        size = -(-rows // count)
        return self.split([min(size, rows - start) for start in range(0, rows, size)])

    def inputs_as(self, dtype: torch.dtype) -> dict[str, Column]:
        """The inputs for a model in a dtype: floating tensors in it, for fp32 models as they are."""
        if dtype is torch.float32:
            return self.inputs
        return {name: _cast(value, dtype) for name, value in self.inputs.items()}

    def to(self, device: torch.device) -> Batch:
        """The batch with every tensor on a device (named with its index)."""
        if self.targets.device == device:
            return self
        weights = None if self.weights is None else self.weights.to(device, non_blocking=True)
        inputs, meta = _moved(self.inputs, device), _moved(self.meta, device)
        return Batch(inputs, self.targets.to(device, non_blocking=True), weights, meta)


def concatenated(first: Batch, second: Batch) -> Batch:
    """Rows of two batches one after the other; where only one has weights, the other's rows weigh 1.

    Meta fields that only one of them has are left out.
    """
    sizes = len(first), len(second)
    weights = None
    if first.weights is not None or second.weights is not None:
        ones = [b.targets.new_ones(len(b), dtype=torch.float32) if b.weights is None else b.weights for b in (first, second)]
        weights = torch.cat(ones)
    inputs = {name: _joined(first.inputs[name], second.inputs[name], sizes) for name in first.inputs}
    meta = {name: _joined(first.meta[name], second.meta[name], sizes) for name in first.meta if name in second.meta}
    return Batch(inputs, torch.cat([first.targets, second.targets]), weights, meta)


def _cast(value: Column, dtype: torch.dtype) -> Column:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _split(columns: Mapping[str, Column], sizes: list[int]) -> list[dict[str, Column]]:
    parts: list[dict[str, Column]] = [{} for _ in sizes]
    ends = list(itertools.accumulate(sizes))
    for name, value in columns.items():
        if isinstance(value, Tensor):
            pieces: Any = value.split(sizes)
        elif isinstance(value, int):
            pieces = [value] * len(sizes)
        else:
            pieces = [value[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return parts


def _cut(columns: Mapping[str, Column], start: int, stop: int) -> dict[str, Column]:
    return {name: value if isinstance(value, int) else value[start:stop] for name, value in columns.items()}


def _moved(columns: Mapping[str, Column], device: torch.device) -> dict[str, Column]:
    def move(value: Column) -> Column:
        if isinstance(value, list):
            return [item.to(device, non_blocking=True) for item in value]
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    return {name: move(value) for name, value in columns.items()}


def _joined(first: Column, second: Column, sizes: tuple[int, int]) -> Column:
    if isinstance(first, int) and isinstance(second, int) and first == second:
        return first
    if isinstance(first, list):
        return first + second
    if isinstance(first, int):
        first = second.new_full((sizes[0],), first)
    elif isinstance(second, int):
        second = first.new_full((sizes[1],), second)
    return torch.cat((first, second))


class Objective(NamedTuple):
    """What is learned.

    Attributes:
        losses: `losses(outputs, batch)`, the loss of every item, without weights, [rows] or [rows, tokens].
        categorical: the losses are -log softmax(outputs)[target], so that the Fisher information of the outputs has a closed form.
    """

    losses: Callable[[Any, Batch], Tensor]
    categorical: bool = False

    def mean(self, outputs: Any, batch: Batch) -> Tensor:
        """Weighted sum of the losses over the batch's items, 0-d: what a loop of one's own calls `backward` on."""
        losses = self.losses(outputs, batch)
        if batch.weights is not None:
            losses = (losses.mT * batch.weights).mT if losses.ndim > 1 else losses * batch.weights
        return losses.sum() / batch.items


class StepContext(NamedTuple):
    """What a seam function may read.

    Attributes:
        model: the module that is trained.
        params: its trainable parameters by name; tied tensors once.
        objective: the loss.
        batch: the micro-batch (loss seam), the step's batch (other seams), None where there is none.
        outputs: the model's outputs on `batch` (loss seam only).
        key: counter-based random key of this pass over the task; what is drawn at a step derives from it and `step`.
        step: optimizer steps done in this task; when consolidating, batches done.
        rows: new rows of this task drawn before this step; None where batches are all of one size.
        total_rows: new rows that this pass over the task draws in all; None where that is not known.
        micro_batch: rows of one forward pass at most; None for no limit.
        class_weights: weight of each label's rows in the loss, [labels], which the batch's own `weights` have already; None for 1.
        step_sizes: learning rate of each parameter by name, before any schedule; None where it is not known.
        task: tasks learned before this one.
        classes: classes seen so far, this task's included.
        new_classes: classes that this task brought.
        autocast: the precision's autocast region.
        sample: draws rows from the replay memory, `sample(rows, key) -> Batch | None`; None where there is none.
    """

    model: nn.Module
    params: Mapping[str, nn.Parameter]
    objective: Objective
    batch: Batch | None = None
    outputs: Any = None
    key: int = 0
    step: int = 0
    rows: int | None = None
    total_rows: int | None = None
    micro_batch: int | None = None
    class_weights: Tensor | None = None
    step_sizes: Mapping[str, float] | None = None
    task: int = 0
    classes: int = 0
    new_classes: int = 0
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    sample: Callable[[int, int], Batch | None] | None = None


State = Any
"""A dataclass of tensors keyed by parameter name, buffers and plain numbers; saved by `params.pack`."""


class Method(NamedTuple):
    """A technique against forgetting: the seams it uses, one field each; None where it uses none.

    Attributes:
        name: as in the configuration.
        init: `init(params) -> State`, before the first task.
        nbytes: `nbytes(state)`, bytes that the state holds now.
        allows: what it can do: ``class-incremental``, ``without-old-data``, ``micro-batching``, ``sharded``.
        mix, penalty, observe, add_grad_, project_grad_, project_, apply_: see the module's table.
        sample: `sample(state, rows, key) -> Batch | None`, offered to the other methods; one method of a run at most.
        begin_task: `begin_task(ctx, state)`, after the head has grown, before the first step.
        end_task: `end_task(ctx, state)`, after the last step, before the task is measured; may change the weights.
        consolidate_batch: `consolidate_batch(ctx, state)`, after the last step, for every batch of the task's training rows.
        consolidate: `consolidate(ctx, state)`, once after that.
        forget: `forget(state, ids) -> rows`, where rows are stored: removes those whose ``id`` is among the identifiers' hashes.
    """

    name: str
    init: Callable[[Mapping[str, nn.Parameter]], State]
    nbytes: Callable[[State], int]
    allows: frozenset[str]
    mix: Callable[[Batch, StepContext, State], Batch] | None = None
    penalty: Callable[[StepContext, State], Tensor] | None = None
    observe: Callable[[StepContext, State], None] | None = None
    add_grad_: Callable[[StepContext, State], None] | None = None
    project_grad_: Callable[[StepContext, State], None] | None = None
    project_: Callable[[Mapping[str, nn.Parameter], State, Mapping[str, float]], None] | None = None
    apply_: Callable[[nn.Module, State], Undo] | None = None
    sample: Callable[[State, int, int], Batch | None] | None = None
    begin_task: Callable[[StepContext, State], None] | None = None
    end_task: Callable[[StepContext, State], None] | None = None
    consolidate_batch: Callable[[StepContext, State], None] | None = None
    consolidate: Callable[[StepContext, State], None] | None = None
    forget: Callable[[State, Tensor], int] | None = None
