"""The step: what batch size, accumulation, loss scale and clipping must never change."""

import contextlib

import pytest
import torch
from torch import nn

from retain.memory.optimizer import make_optimizer
from retain.memory.precision import Precision
from retain.params import trainable
from retain.seams import Batch, Method, StepContext, concatenated
from retain.spec import OptimizerSpec
from retain.step import CLASSIFICATION, Job, train_step


class Net(nn.Module):
    def __init__(self, dtype=torch.float32, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))
        self.layers = layers.to(dtype)

    def forward(self, x):
        return self.layers(x)


def make_job(optimizer="SGD(lr=0.1, momentum=0.9)", *, dtype=torch.float32, scaler=None, methods=(), dropout=0.0, **settings):
    model = Net(dtype, dropout)
    params = trainable(model)
    made = make_optimizer(OptimizerSpec.model_validate(optimizer), params, "matrices")
    precision = Precision("test", dtype, contextlib.nullcontext, scaler)
    return Job(model, params, made, CLASSIFICATION, list(methods), precision, torch.device("cpu"), **settings)


def batches(count, rows=16, dtype=torch.float32, seed=1):
    made = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(rows, 6, generator=made, dtype=torch.float64).to(dtype)
        yield Batch({"x": x}, torch.randint(3, (rows,), generator=made), torch.rand(rows, generator=made) + 0.5)


def run(job, count=20, **kind):
    results = []
    for step, batch in enumerate(batches(count, **kind)):
        ctx = StepContext(job.model, job.params, job.objective, step=step, key=step)
        results.append(train_step(job, batch, ctx))
    return results


def weights(job):
    return torch.cat([param.detach().flatten().double() for param in job.params.values()])


def method(name="probe", **seams):
    return Method(name, init=lambda params: None, nbytes=lambda state: 0, allows=frozenset(), **seams), None


@pytest.mark.parametrize("limit", [8, 6, 5, 1])
@pytest.mark.parametrize("optimizer", ["SGD(lr=0.1, momentum=0.9)", "AdamW(lr=1e-3)", "RMSprop(lr=1e-3)"])
def test_micro_batches_of_any_size_give_the_weights_of_the_whole_batch(optimizer, limit):
    whole, parts = (make_job(optimizer, dtype=torch.float64, micro_batch=m, max_norm=1.0) for m in (None, limit))
    for job in (whole, parts):
        run(job, dtype=torch.float64)
    assert (weights(whole) - weights(parts)).abs().max() < 1e-9


def test_micro_batches_in_fp32_with_sgd():
    whole, parts = make_job(), make_job(micro_batch=5)
    losses = [run(job, 200)[-1].loss for job in (whole, parts)]
    assert (weights(whole) - weights(parts)).abs().max() < 1e-5
    assert torch.isclose(*losses, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "limit", "sizes"), [(16, 8, [8, 8]), (16, 6, [6, 6, 4]), (16, 5, [4, 4, 4, 4]), (10, 3, [3, 3, 3, 1]), (4, 9, [4])]
)
def test_micro_batches_are_as_few_and_as_equal_as_possible(rows, limit, sizes):
    batch = next(batches(1, rows))
    parts = batch.parts(limit)
    assert [len(part) for part in parts] == sizes
    assert torch.equal(torch.cat([part.inputs["x"] for part in parts]), batch.inputs["x"])


@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**20])
def test_the_loss_scale_changes_nothing(scale):
    plain, scaled = make_job(max_norm=0.5), make_job(max_norm=0.5, scaler=torch.amp.GradScaler("cpu", init_scale=scale))
    for job in (plain, scaled):
        run(job)
    assert torch.equal(weights(plain), weights(scaled))


def test_clipping_sees_unscaled_gradients():
    job = make_job("SGD(lr=1.0)", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**16), max_norm=1.0)
    before = weights(job)
    batch = next(batches(1))
    batch.inputs["x"] *= 1e3
    train_step(job, batch, StepContext(job.model, job.params, job.objective))
    assert (weights(job) - before).norm().item() == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["SGD(lr=0.1, momentum=0.9)", "AdamW(lr=1e-3, fused=True)", "AdamW(lr=1e-3, foreach=True)"])
def test_an_overflow_skips_the_step_and_the_parameter_seam_and_nothing_else(optimizer):
    projected, observed = [], []

    def observe(ctx, state):
        observed.append(all(bool(param.grad.isfinite().all()) for param in ctx.params.values()))

    job = make_job(
        optimizer,
        scaler=torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000),
        methods=[method(project_=lambda params, state, sizes: projected.append(1), observe=observe)],
    )
    for step, batch in enumerate(batches(6)):
        before = weights(job)
        if step == 3:
            batch.inputs["x"][0, 0] = torch.inf
        result = train_step(job, batch, StepContext(job.model, job.params, job.objective, step=step))
        assert result.skipped == (step == 3)
        assert torch.equal(weights(job), before) == (step == 3)
        assert all(param.grad is None for param in job.params.values())
    assert len(projected) == 5 and observed == [True] * 5 and job.precision.scaler.get_scale() == 2.0


def test_a_penalty_is_a_sum_over_items_and_counts_once_under_accumulation():
    """A penalty of a constant per item must give that constant, however the batch is cut."""

    def penalty(ctx, state):
        return len(ctx.batch) * sum((param**2).sum() for param in ctx.params.values())

    whole, parts = (make_job(dtype=torch.float64, methods=[method(penalty=penalty)], micro_batch=m) for m in (None, 3))
    for job in (whole, parts):
        run(job, dtype=torch.float64)
    assert (weights(whole) - weights(parts)).abs().max() < 1e-9


def test_a_penalty_that_is_a_constant_changes_nothing():
    plain, constant = make_job(), make_job(methods=[method(penalty=lambda ctx, state: torch.zeros(()))])
    for job in (plain, constant):
        run(job, 3)
    assert torch.equal(weights(plain), weights(constant))


def test_the_reported_loss_is_the_weighted_mean_with_its_penalties():
    job = make_job(
        methods=[method(penalty=lambda ctx, state: 3.0 * len(ctx.batch) + 0 * next(iter(ctx.params.values())).sum())], micro_batch=5
    )
    batch = next(batches(1))
    expected = CLASSIFICATION.mean(job.model(batch.inputs["x"]), batch) + 3.0
    result = train_step(job, batch, StepContext(job.model, job.params, job.objective))
    assert torch.allclose(result.loss, expected)


def test_rows_that_are_mixed_in_count_as_items():
    extra = next(batches(1, rows=8, seed=9))
    mixed = make_job(methods=[method(mix=lambda batch, ctx, state: concatenated(batch, extra))])
    joined = make_job()
    for batch in batches(5):
        ctx = StepContext(mixed.model, mixed.params, mixed.objective)
        assert train_step(mixed, batch, ctx).rows == 24
        train_step(joined, concatenated(batch, extra), ctx)
    assert torch.equal(weights(mixed), weights(joined))


def test_seams_run_in_their_order_once_per_step_on_raw_gradients():
    seen = []

    def hear(name):
        def seam(ctx, state):
            grad = next(iter(ctx.params.values())).grad
            seen.append((name, len(ctx.batch), grad.norm().item()))

        return seam

    names = ("observe", "add_grad_", "project_grad_")
    job = make_job(
        methods=[
            method(
                **{name: hear(name) for name in names}, project_=lambda params, state, sizes: seen.append(("project_", sizes, 0))
            )
        ],
        micro_batch=4,
        max_norm=1e-3,
        scaler=torch.amp.GradScaler("cpu", init_scale=1024.0),
    )
    ctx = StepContext(job.model, job.params, job.objective)
    train_step(job, next(batches(1)), ctx, {"w": 0.1})
    assert [entry[0] for entry in seen] == [*names, "project_"]
    assert {entry[1] for entry in seen[:3]} == {16} and seen[3][1] == {"w": 0.1}
    assert seen[0][2] == pytest.approx(seen[2][2]) and 1e-3 < seen[0][2] < 10


def test_dropout_is_a_function_of_the_key():
    first, again, other = (make_job(dropout=0.5) for _ in range(3))
    for job, key in ((first, 7), (again, 7), (other, 8)):
        torch.rand((job is first and 3) or 5)
        train_step(job, next(batches(1)), StepContext(job.model, job.params, job.objective, key=key))
    assert torch.equal(weights(first), weights(again)) and not torch.equal(weights(first), weights(other))


def test_ragged_tokens_are_divided_by_the_tokens_of_the_whole_step():
    """Ten sequences of different lengths in micro-batches of three: the mean over tokens, not a mean of means."""

    def loss(outputs, batch):
        return nn.functional.cross_entropy(
            outputs.flatten(0, 1), batch.targets.flatten(), ignore_index=-100, reduction="none"
        ).view(batch.targets.shape)

    made = torch.Generator().manual_seed(3)
    x, targets = torch.randn(10, 7, 6, generator=made, dtype=torch.float64), torch.randint(3, (10, 7), generator=made)
    for row in range(10):
        targets[row, 1 + row % 7 :] = -100
    found = []
    for limit in (None, 3):
        job = make_job("SGD(lr=0.1)", dtype=torch.float64, micro_batch=limit)
        job.objective = job.objective._replace(losses=loss)
        result = train_step(job, Batch({"x": x}, targets), StepContext(job.model, job.params, job.objective))
        found.append((weights(job), result.loss))
    mean = nn.functional.cross_entropy(Net(torch.float64)(x).flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert torch.allclose(found[0][1], mean) and torch.allclose(found[1][1], mean)
    assert (found[0][0] - found[1][0]).abs().max() < 1e-12
