"""The step that training runs and planning traces; there is no second description of it.

Every item's loss counts for its weight divided by the items of the whole step, so that micro-batches of any size give the gradient
of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retain.memory.precision import Precision, step_was_skipped
from retain.params import derive, seed_dropout
from retain.seams import Batch, Method, Objective, State, StepContext


@dataclass
class Job:
    """Everything that a step changes or needs.

    Attributes:
        model: on `device`, in the precision's dtype.
        params: its trainable parameters by name; tied tensors once.
        optimizer: over `params`.
        objective: the loss.
        methods: each with its state, in the order of the configuration.
        precision: dtype, autocast region and scaler.
        device: where the step runs.
        micro_batch: rows of one forward pass at most; None for all.
        max_norm: global gradient norm to clip to; None for no clipping.
    """

    model: nn.Module
    params: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    objective: Objective
    methods: Sequence[tuple[Method, State]]
    precision: Precision
    device: torch.device
    micro_batch: int | None = None
    max_norm: float | None = None


class StepResult(NamedTuple):
    """What a step reports: its losses with the share of each, its rows, and whether the scaler skipped the update."""

    heard: list[tuple[Tensor, Tensor]]
    rows: int
    skipped: bool

    @property
    def loss(self) -> Tensor:
        """Mean loss per item, penalties included, 0-d; summed only when it is asked for."""
        return torch.stack([(losses * shares).sum() for losses, shares in self.heard]).sum()


def train_step(job: Job, batch: Batch, ctx: StepContext, step_sizes: Mapping[str, float] | None = None) -> StepResult:
    """One optimizer step: mix, count, forward and backward per micro-batch, gradient seam, clip, step, parameter seam.

    Args:
        job: changed in place.
        batch: the new rows, on the job's device.
        ctx: the step's context without batch and outputs.
        step_sizes: learning rate of each parameter by name, for the parameter seam.
    """
    for method, state in job.methods:
        if method.mix is not None:
            batch = method.mix(batch, ctx, state)
    items = batch.items
    scaler, optimizer = job.precision.scaler, job.optimizer

    heard: list[tuple[Tensor, Tensor]] = []
    for number, micro in enumerate(batch.parts(job.micro_batch)):
        seed_dropout(derive(ctx.key, ctx.step, number), job.device)
        outputs = forward(job, micro)
        losses = job.objective.losses(outputs, micro)
        parts, shares = [losses], [item_shares(losses, micro.weights, items)]
        for method, state in job.methods:
            if method.penalty is not None:
                penalty = method.penalty(ctx._replace(batch=micro, outputs=outputs), state)
                if penalty.requires_grad:  # a constant, such as 0 before there is anything to protect, has no gradient
                    parts.append(penalty)
                    shares.append(item_shares(penalty, None, items))
        heard.extend((part.detach(), share) for part, share in zip(parts, shares, strict=True))
        torch.autograd.backward(parts, shares if scaler is None else scaler.scale(shares))

    skipped = False
    if scaler is not None:
        scaler.unscale_(optimizer)
        skipped = step_was_skipped(scaler, optimizer)
    if not skipped:  # no method sees a gradient that overflowed
        for seam in ("observe", "add_grad_", "project_grad_"):
            for method, state in job.methods:
                if (function := getattr(method, seam)) is not None:
                    function(ctx._replace(batch=batch), state)
        if job.max_norm is not None:
            nn.utils.clip_grad_norm_(job.params.values(), job.max_norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    if not skipped:
        for method, state in job.methods:
            if method.project_ is not None:
                method.project_(job.params, state, step_sizes or {})
    for param in job.params.values():
        param.grad = None
    return StepResult(heard, len(batch), skipped)


def forward(job: Job, batch: Batch) -> Any:
    """The model's outputs on a batch, under the job's precision."""
    with job.precision.autocast():
        return job.model(**batch.inputs_as(job.precision.dtype))


@torch.no_grad()
def eval_step(job: Job, batch: Batch) -> Tensor:
    """Outputs on a batch for measuring, at least in fp32; the model must be in eval mode."""
    return full_precision(forward(job, batch))


def item_shares(losses: Tensor, weights: Tensor | None, items: int | Tensor) -> Tensor:
    """What each loss counts for in the mean over the step's items, in the shape of the losses.

    Given to the backward pass as the gradient of the losses: the weighted sum itself, and its division, need no operation.

    Args:
        losses: one per item, [rows] or [rows, tokens], or a sum over items, [].
        weights: of each row, [rows]; None means 1.
        items: of the whole step.
    """
    if weights is None:
        return torch.full_like(losses, 1 / items) if isinstance(items, int) else torch.ones_like(losses) / items
    shares = weights.to(losses.dtype) / items
    return shares if losses.ndim == 1 else shares[:, None].expand_as(losses)


def cross_entropy(outputs: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of each row, [rows].

    Args:
        outputs: logits, [rows, classes].
        batch: with targets [rows].
    """
    return F.cross_entropy(full_precision(outputs), batch.targets, reduction="none")


CLASSIFICATION = Objective(cross_entropy, categorical=True)


def full_precision(values: Tensor) -> Tensor:
    """Half-precision values as fp32; others as they are."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
