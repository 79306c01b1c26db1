"""Measuring a model on the tasks of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from retain.data.batches import TaskBatches
from retain.forgetting.metrics import score
from retain.step import Job, eval_step


def predict(job: Job, batches: TaskBatches, batch_size: int) -> tuple[Tensor, Tensor]:
    """Logits and labels of all rows of a task, on the CPU, with the model in eval mode.

    Returns:
        logits [rows, classes] in fp32 or fp64 and targets [rows].
    """
    was_training = job.model.training
    job.model.eval()
    try:
        pairs = [(eval_step(job, batch.to(job.device)).cpu(), batch.targets) for batch in batches.in_order(batch_size)]
    finally:
        job.model.train(was_training)
    return torch.cat([logits for logits, _ in pairs]), torch.cat([targets for _, targets in pairs])


def measure(job: Job, batches: TaskBatches, metrics: Sequence[str], batch_size: int) -> dict[str, float | None]:
    """Every metric on one task's rows; None where it is not defined: no rows, or a class that the head lacks."""
    if not len(batches.rows):
        return dict.fromkeys(metrics)
    logits, targets = predict(job, batches, batch_size)
    if int(targets.max()) >= logits.shape[1]:
        return dict.fromkeys(metrics)
    return {metric: score(metric, logits.numpy(), targets.numpy()) for metric in metrics}


def matrix(records: Sequence[Mapping[str, object]], metric: str) -> list[list[float | None]]:
    """values[i][j]: the metric on task j after learning task i; None above the diagonal."""
    size = len(records)
    rows: list[list[float | None]] = []
    for record in records:
        measured = record["row"][metric]  # type: ignore[index]
        rows.append([*measured, *[None] * (size - len(measured))])
    return rows
