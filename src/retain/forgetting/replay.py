"""Experience replay: stored rows of earlier tasks are mixed into every batch (Chaudhry et al. 2019, "tiny memories").

The replayed rows come on top of the batch, `ratio` per new row, exact on average at any batch size: the fraction is carried
as a function of the step, so there is nothing to save. The loss can be weighted so that every class, or every task, seen so
far counts the same whatever the ratio. Rows enter the buffer at the end of their task; which stay is the buffer's matter.

Not here: priorities, generated samples, stored logits.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from retain.errors import ConfigError
from retain.forgetting import buffer as store
from retain.forgetting.buffer import Buffer
from retain.params import bytes_per_row, derive
from retain.seams import Batch, Column, Method, StepContext, concatenated
from retain.spec import ReplaySpec

LOG = logging.getLogger("retain")
BLOCK_BYTES = 2**20
"""Rows are drawn for as many steps at once as fit in here: for a small model, a draw in every step costs like a layer."""


@dataclass
class ReplayState:
    """What replay keeps.

    Attributes:
        buffer: the stored rows.
        ratio: replayed rows per new row, now; a controller may change it at any step.
        configured: the ratio that the configuration gave.
    """

    buffer: Buffer
    ratio: float
    configured: float


def replay(settings: ReplaySpec) -> Method:
    """Replay as a method.

    Args:
        settings: ratio, capacity, policy, draw, weighting. There is no seed: every draw depends on the key of its step.

    Example:
        >>> method = replay(ReplaySpec(ratio=0.5, capacity=100))
        >>> method.init({}).ratio
        0.5
    """
    held: tuple[int, ...] = ()
    number, steps = -1, 1
    parts: list[Batch] = []
    weights = functools.lru_cache(maxsize=64)(row_weights)  # the same few tensors again and again; nothing writes to them

    def init(params: object) -> ReplayState:
        by_class = settings.draw == "class-balanced"
        buffer = store.empty(settings.capacity, settings.policy, floor=settings.floor, by_class=by_class)
        return ReplayState(buffer, settings.ratio, settings.ratio)

    def sample(state: ReplayState, rows: int, key: int) -> Batch | None:
        """Stored rows, drawn with replacement, on the CPU; None while there are none."""
        if not state.buffer.filled:
            return None
        draw = store.draw_balanced if settings.draw == "class-balanced" else store.draw
        columns = store.fetch(state.buffer, draw(state.buffer, rows, key))
        return Batch(columns["inputs"], columns["targets"], None, columns["meta"])

    def mix(batch: Batch, ctx: StepContext, state: ReplayState) -> Batch:
        """The batch with replayed rows behind its own."""
        ratio = state.ratio
        if ctx.task == 0 or ratio == 0 or not state.buffer.filled:
            return batch
        new, device = len(batch), batch.targets.device
        count = replayed_rows(ratio, new, new * ctx.step if ctx.rows is None else ctx.rows)
        mixed = Batch(batch.inputs, batch.targets)
        if count:
            mixed = concatenated(mixed, ahead(state, ctx, new, count).to(device))
        if settings.weighting == "classes":
            mixed.weights = weights(new, count, new_share(ctx), ratio, device)
        if batch.weights is not None:
            own = F.pad(batch.weights, (0, count), value=1.0)
            if ctx.class_weights is not None and settings.policy != "class-balanced" and "class" not in batch.meta:
                own[new:] = ctx.class_weights[mixed.targets[new:]]  # a balanced buffer has evened its classes out already
            mixed.weights = own if mixed.weights is None else own * mixed.weights
        return mixed

    def ahead(state: ReplayState, ctx: StepContext, new: int, count: int) -> Batch:
        """`count` rows for this step, from rows drawn for a few steps at once: a function of key, step and buffer."""
        nonlocal held, number, steps, parts
        most = math.ceil(state.ratio * new)
        if held != (now := (ctx.key, most, state.buffer.seen, id(state))):
            steps = max(1, BLOCK_BYTES // (most * bytes_per_row(state.buffer.columns["inputs"])))
            if ctx.total_rows is not None:  # no more than the task has
                steps = min(steps, -(-ctx.total_rows // new))
            held, number = now, -1
        wanted, place = divmod(ctx.step, steps)
        if number != wanted:
            drawn = sample(state, steps * most, derive("replay", ctx.key, wanted))
            assert drawn is not None
            parts, number = Batch(drawn.inputs, drawn.targets).split([most] * steps), wanted
        return parts[place] if count == most else parts[place].rows(0, count)

    def begin_task(ctx: StepContext, state: ReplayState) -> None:
        """Follow a configuration that has changed since the state was saved, as far as a filled buffer can."""
        _check_unchanged(settings, state.buffer)
        if settings.policy == "class-balanced" and ctx.classes > settings.capacity:
            seen = f"replay.capacity={settings.capacity} cannot hold a row of each of {ctx.classes} classes."
            raise ConfigError(f"{seen} Raise it to {ctx.classes} at least, or use policy: reservoir.")
        state.buffer.floor = settings.floor
        share = store.fair_share(state.buffer, ctx.classes)
        before = ctx.classes - ctx.new_classes
        if share is not None and (ctx.task == 0 or store.fair_share(state.buffer, before) is None):
            LOG.info("From task %d on: %s", ctx.task, share)  # said once, when the floor no longer fits
        if state.configured != settings.ratio:
            state.ratio = state.configured = settings.ratio

    def consolidate_batch(ctx: StepContext, state: ReplayState) -> None:
        """Offer the rows of a batch of the finished task to the buffer."""
        assert ctx.batch is not None
        batch = _per_row(ctx.batch)
        columns = {"inputs": batch.inputs, "targets": batch.targets, "meta": batch.meta}
        store.insert_(state.buffer, columns, batch.meta.get("class", batch.targets), derive("insert", ctx.key, ctx.step))

    def forget(state: ReplayState, ids: Tensor) -> int:
        """Remove the stored rows of these identifiers."""
        held = state.buffer.columns.get("meta", {}).get("id")
        if held is None:
            return 0
        gone = torch.isin(held[: state.buffer.filled], ids)
        store.remove_(state.buffer, gone)
        return int(gone.sum())

    return Method(
        name="replay",
        init=init,
        nbytes=lambda state: store.nbytes(state.buffer),
        allows=frozenset({"class-incremental", "micro-batching"}),
        mix=mix,
        sample=sample,
        begin_task=begin_task,
        consolidate_batch=consolidate_batch,
        forget=forget,
    )


def replayed_rows(ratio: float, new: int, before: int) -> int:
    """Rows to replay in a step: floor(ratio (before + new)) - floor(ratio before).

    Over any steps, whatever the size of their batches, the sum differs from ratio times their new rows by less than one row;
    1e-9 absorbs rounding.

    Args:
        ratio: replayed rows per new row.
        new: new rows of the step.
        before: new rows of the steps before it.
    """
    return math.floor(ratio * (before + new) + 1e-9) - math.floor(ratio * before + 1e-9)


def new_share(ctx: StepContext) -> float:
    """Share of the loss that the new rows have when every class counts the same: new classes / classes seen.

    The buffer has no rows of the new classes while they are learned. Where a task brings none, all tasks count the same.
    """
    if ctx.new_classes > 0:
        return ctx.new_classes / ctx.classes
    return 1 / (ctx.task + 1)


def row_weights(new: int, replayed: int, share: float, ratio: float, device: torch.device) -> Tensor:
    """Weights of a mixed batch, [new + replayed].

    With ratio r and share s of the new rows: s (1 + r) for each of n new rows and (1 - s)(1 + r) / r for each of r n
    replayed ones sum to n (1 + r), the number of rows, by which the loss is divided.
    """
    weights = torch.full((new + replayed,), share * (1 + ratio))
    weights[new:] = (1 - share) * (1 + ratio) / ratio
    return weights.to(device)


def _per_row(batch: Batch) -> Batch:
    """The batch with a tensor in place of each number that all rows share."""

    def spread(value: Column) -> Column:
        return torch.full((len(batch),), value, device=batch.targets.device) if isinstance(value, int) else value

    inputs, meta = ({name: spread(value) for name, value in columns.items()} for columns in (batch.inputs, batch.meta))
    return dataclasses.replace(batch, inputs=inputs, meta=meta)


def _check_unchanged(settings: ReplaySpec, buffer: Buffer) -> None:
    """Refuse what a buffer with rows in it cannot follow.

    Raises:
        ConfigError: capacity or policy are not the buffer's, or draws are balanced now and its classes are not known.
    """
    for name in ("capacity", "policy"):
        now, before = getattr(settings, name), getattr(buffer, name)
        if now != before:
            seen = f"replay.{name}={now}, but this run's buffer was made with {before}."
            raise ConfigError(f"{seen} Set it back, or start a new run.")
    if settings.draw == "class-balanced" and not buffer.by_class:
        raise ConfigError("replay.draw=class-balanced, but this run's buffer was made for uniform draws. Set it back.")
