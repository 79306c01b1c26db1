import pytest
import torch

from retain.errors import ConfigError
from retain.forgetting import build
from retain.forgetting.replay import replay, replayed_rows
from retain.params import pack, unpack_
from retain.seams import Batch, Objective, StepContext
from retain.spec import MethodSpec, ReplaySpec


def context(**values):
    return StepContext(torch.nn.Identity(), {}, Objective(lambda outputs, batch: outputs.sum()), **values)


def make_batch(rows, classes=2, task=0, **meta):
    row = torch.arange(rows)
    x = torch.stack([torch.full((rows,), float(task)), row.float()], 1)
    return Batch({"x": x}, row % classes + 2 * task, None, {"row": row, "task": task, **meta})


def filled(rows=1000, **settings):
    """A replay method that has consolidated a first task."""
    method = replay(ReplaySpec(**{"capacity": 1000, **settings}))
    state = method.init({})
    method.consolidate_batch(context(batch=make_batch(rows), key=1), state)
    return method, state


def mixes(method, state, steps, rows=10, start=0, **values):
    ctx = context(**{"task": 1, "classes": 4, "new_classes": 2, **values})
    for step in range(start, start + steps):
        yield method.mix(make_batch(rows, task=1), ctx._replace(step=step), state)


def replayed(batch):
    return int((batch.inputs["x"][:, 0] == 0).sum())


# --- how many ---------------------------------------------------------------------------------------------------------


def test_ten_new_rows_and_a_thousand_stored_make_a_step_of_ten_and_two():
    method, state = filled(ratio=0.2)
    assert state.buffer.filled == 1000
    (batch,) = mixes(method, state, 1)
    assert len(batch) == 12
    assert batch.inputs["x"][:, 0].tolist() == [1] * 10 + [0] * 2
    assert torch.equal(batch.inputs["x"][:10], make_batch(10, task=1).inputs["x"])


@pytest.mark.parametrize("rows", [10, 32, 7])
@pytest.mark.parametrize("ratio", [0.2, 0.33, 1.5, 0.05])
def test_the_ratio_is_exact_over_a_thousand_steps(ratio, rows):
    """Every step has all its new rows, and the counts differ by one at most."""
    method, state = filled(ratio=ratio)
    batches = list(mixes(method, state, 1000, rows))
    assert all(len(batch) - replayed(batch) == rows for batch in batches)
    found = [replayed(batch) for batch in batches]
    assert abs(sum(found) - ratio * rows * 1000) < 1
    assert max(found) - min(found) <= 1


def test_a_ratio_changed_in_the_middle_is_exact_in_both_halves():
    method, state = filled(ratio=0.33)
    before = sum(map(replayed, mixes(method, state, 501)))
    state.ratio = 0.45
    after = sum(map(replayed, mixes(method, state, 499, start=501)))
    assert abs(before - 0.33 * 10 * 501) < 1
    assert abs(after - 0.45 * 10 * 499) < 1


def test_whole_numbers_are_not_lost_to_rounding():
    assert [replayed_rows(0.1, 10, 10 * step) for step in range(1000)] == [1] * 1000
    assert 0.29 * 100 < 29
    assert [replayed_rows(0.29, 100, 100 * step) for step in range(1000)] == [29] * 1000


def test_nothing_is_replayed_without_stored_rows_in_the_first_task_or_at_ratio_zero():
    method, _ = filled()
    batch = make_batch(10, task=1)
    for ctx, changed in (
        (context(task=0, classes=2, new_classes=2), {}),
        (context(task=1, classes=4, new_classes=2), {"ratio": 0.0}),
        (context(task=1, classes=4, new_classes=2), {"buffer": method.init({}).buffer}),
    ):
        state = method.init({})
        method.consolidate_batch(context(batch=make_batch(50), key=1), state)
        for name, value in changed.items():
            setattr(state, name, value)
        assert method.mix(batch, ctx, state) is batch
    assert method.sample(method.init({}), 5, 0) is None


# --- which rows -------------------------------------------------------------------------------------------------------


def test_draws_follow_the_key_and_nothing_else():
    method, state = filled()
    ctx = context(task=1, classes=4, new_classes=2, key=7)
    first = method.mix(make_batch(20, task=1), ctx, state)
    torch.manual_seed(4)
    again = method.mix(make_batch(20, task=1), ctx, state)
    assert torch.equal(first.inputs["x"], again.inputs["x"])
    other = method.mix(make_batch(20, task=1), ctx._replace(key=8), state)
    assert not torch.equal(first.inputs["x"][20:], other.inputs["x"][20:])


def test_a_replayed_row_is_the_stored_row_with_its_row_and_task():
    method, state = filled()
    (batch,) = mixes(method, state, 1, 50)
    old = batch.rows(50, 60)
    assert torch.equal(old.targets, old.inputs["x"][:, 1].long() % 2)
    drawn = method.sample(state, 9, 3)
    assert torch.equal(drawn.inputs["x"][:, 1].long(), drawn.meta["row"]) and drawn.meta["task"].tolist() == [0] * 9


def test_mixing_leaves_the_batch_that_it_was_given_alone():
    method, state = filled()
    batch = make_batch(10, task=1)
    method.mix(batch, context(task=1, classes=4, new_classes=2), state)
    assert len(batch) == 10 and batch.weights is None and batch.meta["task"] == 1


def test_stored_rows_go_to_the_device_of_the_batch():
    """The meta device stands for any other."""
    method, state = filled(ratio=1.0)
    batch = make_batch(4, task=1)
    batch.inputs["task"] = 1
    state.buffer.columns["inputs"]["task"] = torch.zeros(1000, dtype=torch.int64)
    mixed = method.mix(batch.to(torch.device("meta")), context(task=1, classes=4, new_classes=2), state)
    assert len(mixed) == 8
    tensors = [mixed.targets, mixed.weights, *mixed.inputs.values(), *mixed.meta.values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_rows_of_per_task_heads_carry_their_task_and_are_balanced_by_global_class():
    """Local targets 0 and 1 of both tasks are four classes."""
    method = replay(ReplaySpec(capacity=40, ratio=1.0))
    state = method.init({})
    for task in range(2):
        local = torch.arange(100) % 2
        batch = Batch({"x": torch.zeros(100, 1), "task": task}, local, None, {"row": torch.arange(100), "task": task})
        batch.meta["class"] = local + 2 * task
        method.consolidate_batch(context(batch=batch, key=task), state)
    assert {name: group["stored"] for name, group in state.buffer.classes.items()} == dict.fromkeys("0123", 10)
    new = Batch({"x": torch.zeros(5, 1), "task": 2}, torch.zeros(5, dtype=torch.int64), None, {"row": torch.arange(5), "task": 2})
    batch = method.mix(new, context(task=2, classes=6, new_classes=2, key=3), state)
    assert batch.inputs["task"].dtype == torch.int64
    assert batch.inputs["task"][:5].tolist() == [2] * 5
    assert set(batch.inputs["task"][5:].tolist()) <= {0, 1}


@pytest.mark.parametrize("policy", ["class-balanced", "reservoir", "ring"])
def test_class_balanced_draws_with_every_policy(policy):
    method = replay(ReplaySpec(capacity=100, ratio=0.2, policy=policy, draw="class-balanced"))
    state = method.init({})
    batch = make_batch(100)
    batch.targets = (torch.arange(100) == 0).long()
    method.consolidate_batch(context(batch=batch, key=1), state)
    drawn = method.sample(state, 2000, 5).targets
    assert 900 < int(drawn.sum()) < 1100


def test_ragged_inputs_are_stored_and_mixed():
    method = replay(ReplaySpec(capacity=10, ratio=0.5))
    state = method.init({})
    tokens = [torch.arange(n) for n in (1, 4, 2, 3)]
    old = Batch({"ids": tokens}, torch.tensor([0, 1, 0, 1]), None, {"row": torch.arange(4), "task": 0})
    method.consolidate_batch(context(batch=old, key=1), state)
    new = Batch({"ids": [torch.zeros(6), torch.ones(2)]}, torch.tensor([2, 3]), None, {"row": torch.arange(2), "task": 1})
    batch = method.mix(new, context(task=1, classes=4, new_classes=2), state)
    assert len(batch.inputs["ids"]) == 3
    assert any(torch.equal(batch.inputs["ids"][2], row) for row in tokens)


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "share"),
    [
        ({"task": 1, "classes": 4, "new_classes": 2}, 1 / 2),
        ({"task": 4, "classes": 10, "new_classes": 2}, 1 / 5),
        ({"task": 2, "classes": 5, "new_classes": 0}, 1 / 3),
    ],
)
@pytest.mark.parametrize("ratio", [0.2, 0.33, 1.5])
def test_every_class_or_task_has_the_same_share_of_the_loss(values, share, ratio):
    """Over a thousand steps the new rows' weights are their share of the total, and weights are 1 on average."""
    method, state = filled(ratio=ratio, weighting="classes")
    new = old = rows = 0.0
    for batch in mixes(method, state, 1000, **values):
        weights = batch.weights.double()
        new, old, rows = new + weights[:10].sum(), old + weights[10:].sum(), rows + len(batch)
    assert float(new / (new + old)) == pytest.approx(share, rel=1e-3)
    assert float((new + old) / rows) == pytest.approx(1, rel=1e-3)


def test_a_step_without_replayed_rows_keeps_its_weights():
    """At 0.05 and batch 10 every second step has none; its new rows still count by their share."""
    method, state = filled(ratio=0.05)
    none, one = mixes(method, state, 2)
    assert (replayed(none), replayed(one)) == (0, 1)
    assert torch.equal(none.weights, torch.full((10,), 0.5 * 1.05))
    assert torch.equal(one.weights[:10], none.weights)
    assert one.weights[10] == pytest.approx(0.5 * 1.05 / 0.05)


def test_weights_that_a_batch_has_already_are_multiplied():
    method, state = filled(ratio=1.0)
    batch = make_batch(2, task=1)
    batch.weights = torch.tensor([3.0, 0.5])
    mixed = method.mix(batch, context(task=1, classes=4, new_classes=1), state)
    assert mixed.weights.tolist() == [1.5, 0.25, 1.5, 1.5]


def test_rows_may_all_weigh_the_same():
    method, state = filled(weighting="rows")
    (batch,) = mixes(method, state, 1)
    assert len(batch) == 12 and batch.weights is None


# --- the method as a whole --------------------------------------------------------------------------------------------


def test_state_survives_and_replays_the_same():
    method, state = filled(capacity=300, ratio=0.5)
    state.ratio = 0.7
    twin = method.init({})
    unpack_(twin, *pack(state))
    for mine, other in zip(mixes(method, state, 5), mixes(method, twin, 5), strict=True):
        assert torch.equal(mine.inputs["x"], other.inputs["x"]) and torch.equal(mine.weights, other.weights)
    assert method.nbytes(twin) == method.nbytes(state) > 300 * (2 * 4 + 3 * 8)
    assert method.nbytes(method.init({})) == 0


def test_a_changed_configuration_wins_at_the_next_task_and_a_controllers_ratio_stays_otherwise():
    method, state = filled(ratio=0.2)
    state.ratio = 0.4
    method.begin_task(context(), state)
    assert state.ratio == 0.4
    replay(ReplaySpec(capacity=1000, ratio=0.6)).begin_task(context(), state)
    assert state.ratio == 0.6


@pytest.mark.parametrize("changed", [{"capacity": 500}, {"policy": "ring"}, {"policy": "reservoir", "draw": "class-balanced"}])
def test_what_a_filled_buffer_cannot_follow_is_refused(changed):
    _, state = filled(policy="reservoir")
    with pytest.raises(ConfigError, match="this run's buffer"):
        replay(ReplaySpec(**{"capacity": 1000, "policy": "reservoir", **changed})).begin_task(context(), state)


def test_methods_are_built_by_name_and_two_memories_are_an_error():
    spec = MethodSpec(replay=ReplaySpec(ratio=0.3))
    (method,) = build([spec])
    assert method.name == "replay" and method.init({}).ratio == 0.3
    assert build([]) == []
    with pytest.raises(ConfigError, match="replay and replay each keep a replay memory"):
        build([spec, spec])


def test_the_fair_share_is_said_once_when_the_floor_no_longer_fits(caplog):
    method = replay(ReplaySpec(capacity=200))
    state = method.init({})
    with caplog.at_level("INFO", logger="retain"):
        for task, classes in enumerate((2, 4, 6, 8)):
            method.begin_task(context(task=task, classes=classes, new_classes=2), state)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("From task 2 on: A replay buffer of 200 rows keeps 33 of each of 6 classes, not floor=50.")
