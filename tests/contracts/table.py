"""The table that every method enters, small tasks, and training as a plain loop. A new method is one more row of METHODS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retain.data.batches import TaskBatches
from retain.data.task import Rows, Stream, Task
from retain.memory.optimizer import step_sizes
from retain.params import derive
from retain.seams import Batch, StepContext
from retain.spec import RunSpec
from retain.step import CLASSIFICATION, Job, train_step
from retain.training import loop
from retain.training.job import grow_job, make_job
from tests.kit import weights_of

METHODS = {
    "naive": [],
    "replay": [{"replay": {"ratio": 0.7, "capacity": 24}}],
    "replay, reservoir, every row alike": [{"replay": {"ratio": 0.7, "capacity": 24, "policy": "reservoir", "weighting": "rows"}}],
    "replay, ring, class-balanced draws": [{"replay": {"ratio": 1.5, "capacity": 24, "policy": "ring", "draw": "class-balanced"}}],
    "ewc": [{"ewc": {"lambda": 20.0}}],
    "ewc, explicit, of sampled labels": [{"ewc": {"lambda": 0.5, "form": "explicit", "fisher": "sampled", "samples": 20}}],
    "ewc, implicit, tasks apart": [{"ewc": {"lambda": 20.0, "form": "implicit", "tasks": "separate"}}],
    "ewc, in bf16 on the host": [{"ewc": {"lambda": 20.0, "importance_dtype": "bf16", "storage": "host", "every": 3}}],
    "ewc, online, refreshed": [{"ewc": {"decay": 0.9, "refresh": 0.4}}],  # twice in a task, with a pull in between
    "ewc and replay": [{"ewc": {"lambda": 5.0}}, {"replay": {"ratio": 0.7, "capacity": 24}}],
}

SCENARIOS = {
    "class-incremental": ([[0, 1], [2, 3], [4, 5]], "auto"),
    "domain-incremental": ([[0, 1], [0, 1], [0, 1]], "auto"),
    "task-incremental": ([[0, 1], [2, 3, 4], [0, 5]], "per-task"),
}

ROWS, BATCH = 27, 8
STEPS = 2 * 4
"""Of a task: two epochs; the last batch of each is smaller."""

every_method = pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS.keys())
every_scenario = pytest.mark.parametrize("scenario", SCENARIOS)

Step = Callable[[Job, Batch, StepContext, dict[str, float]], object]


def make_stream(scenario: str = "class-incremental") -> Stream:
    """Three small tasks of vectors around their class's centre."""
    groups, head = SCENARIOS[scenario]
    made = torch.Generator().manual_seed(5)
    centres = torch.randn(6, 5, generator=made) * 2
    tasks = []
    for number, group in enumerate(groups):
        parts = []
        for count in (ROWS, 0, 12):
            local = torch.arange(count) % len(group)
            labels = torch.tensor(group)[local]
            x = centres[labels] + torch.randn(count, 5, generator=made)
            parts.append(Rows({"x": x}, local if head == "per-task" else labels))
        tasks.append(Task(f"t{number}", *parts, classes=group))
    names = [str(c) for c in sorted({c for group in groups for c in group})]
    return Stream(tasks, names, "vector", (5,), scenario)


def make_spec(
    methods: list,
    scenario: str = "class-incremental",
    *,
    dropout: float = 0.0,
    factory: str | None = None,
    every_steps: int | None = None,
    **training,
) -> RunSpec:
    body = {"mlp": {"hidden": [12], "dropout": dropout}} if factory is None else {"factory": f"{__name__}:{factory}"}
    settings = {"batch_size": BATCH, "epochs": 2, "optimizer": "AdamW(lr=1e-2)", "max_norm": 1.0, "methods": methods, **training}
    values = {"model": {**body, "head": SCENARIOS[scenario][1]}, "training_params": settings}
    return RunSpec.parse(values if every_steps is None else {**values, "checkpoint": {"every_steps": every_steps}})


def run(path, methods, scenario="class-incremental", **settings) -> dict[str, Tensor]:
    """The weights that the trainer ends with."""
    loop.train(make_spec(methods, scenario, **settings), path, stream=make_stream(scenario))
    return weights_of(path)


def learn(spec: RunSpec, stream: Stream, step: Step = train_step, ended: Callable[[Job], object] = id) -> Job:
    """All tasks, without a trainer: the job after them; `ended` is called when a task's weights are final."""
    job = make_job(spec, stream, torch.device("cpu"), [])
    per_task, seen = stream.scenario == "task-incremental", set()
    for number, task in enumerate(stream.tasks):
        new = set(task.classes) - seen
        seen |= new
        grow_job(job, spec, len(task.classes) if per_task else len(seen), number)
        local = torch.tensor(task.classes) if per_task else None
        batches = TaskBatches(task.train, BATCH, seed=0, task=number, with_task=per_task, classes=local)
        base = StepContext(job.model, job.params, job.objective, task=number, classes=len(seen), new_classes=len(new))
        base = base._replace(step_sizes=step_sizes(job.optimizer, job.params), autocast=job.precision.autocast)
        base = base._replace(micro_batch=job.micro_batch, key=derive("step", 0, number), total_rows=2 * ROWS)
        for method, state in job.methods:
            if method.begin_task:
                method.begin_task(base, state)
        for position in range(STEPS):
            ctx = base._replace(step=position, rows=batches.rows_before(position))
            step(job, batches.at(position), ctx, step_sizes(job.optimizer, job.params))
        base = base._replace(key=derive("consolidate", 0, number), total_rows=ROWS, rows=0)
        for method, state in job.methods:
            if method.end_task:
                method.end_task(base, state)
        ended(job)
        for method, state in job.methods:
            if method.consolidate_batch:
                method.consolidate_batch(base._replace(batch=next(batches.in_order(ROWS))), state)
            if method.consolidate:
                method.consolidate(base, state)
    return job


def plain_step(job: Job, batch: Batch, ctx: StepContext, sizes: dict[str, float], scale: float = 1.0) -> None:
    """One step of a loop without retain: nothing but torch and the methods' own functions; a loss scale by hand."""
    params = job.params.values()
    for method, state in job.methods:
        if method.mix:
            batch = method.mix(batch, ctx, state)
    inputs = {
        name: x.to(job.precision.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in batch.inputs.items()
    }
    with ctx.autocast():
        logits = job.model(**inputs)
    losses = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), batch.targets, reduction="none")
    weights = torch.ones_like(losses) if batch.weights is None else batch.weights
    parts, shares = [losses], [weights.to(losses.dtype) / len(batch)]
    for method, state in job.methods:
        if method.penalty:
            parts.append(method.penalty(ctx._replace(batch=batch, outputs=logits), state))
            shares.append(torch.ones_like(parts[-1]) / len(batch))
    torch.autograd.backward(parts, [share.to(part.dtype) * scale for part, share in zip(parts, shares, strict=True)])
    for param in params:
        if param.grad is not None:
            param.grad /= scale
    for seam in ("observe", "add_grad_", "project_grad_"):
        for method, state in job.methods:
            if getattr(method, seam):
                getattr(method, seam)(ctx._replace(batch=batch), state)
    torch.nn.utils.clip_grad_norm_(params, job.max_norm)
    job.optimizer.step()
    for method, state in job.methods:
        if method.project_:
            method.project_(job.params, state, sizes)
    job.optimizer.zero_grad()


def difference(first: Job, second: Job) -> float:
    """The largest between two weights of the same name."""
    assert first.params.keys() == second.params.keys()
    return max((first.params[name] - second.params[name]).abs().max().item() for name in first.params)


def moved(stream: Stream, through: nn.Module) -> Stream:
    """The stream whose rows have passed through a module."""

    def rows(before: Rows) -> Rows:
        return Rows({"x": through(before.inputs["x"]).detach()}, before.targets)

    tasks = [replace(task, train=rows(task.train), validation=rows(task.validation), test=rows(task.test)) for task in stream.tasks]
    return replace(stream, tasks=tasks)


# --- bodies -----------------------------------------------------------------------------------------------------------


class Body(nn.Module):
    """Two layers, behind a frozen one or behind nothing."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first.requires_grad_(False)
        self.trunk = nn.Sequential(nn.Linear(5, 12), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(self.first(x))


def bare() -> nn.Module:
    return Body(nn.Identity())


def frozen() -> nn.Module:
    body = bare()
    body.first = nn.Linear(5, 5).requires_grad_(False)
    return body


class Tied(nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu())


class Once(Tied):
    """The same with one name: a function that takes the weight twice."""

    def __init__(self) -> None:
        super().__init__()
        del self.two.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.one(x).relu(), self.one.weight, self.two.bias)


def tied() -> nn.Module:
    return Tied()


def once() -> nn.Module:
    return Once()


HUGE = CLASSIFICATION._replace(losses=lambda outputs, batch: CLASSIFICATION.losses(outputs, batch) * 2.0**60)
"""A finite loss whose gradient overflows in fp16."""
