"""Tables as they come, month after month: what is missing, what is new, what repeats, and that the future stays unknown."""

import datetime
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight

from retain.data.batches import TaskBatches, class_weights
from retain.data.encode import id_hashes
from retain.data.scenarios import build_stream
from retain.data.task import Rows
from retain.errors import RetainError
from retain.spec import RunSpec
from retain.training import loop
from retain.training.lineage import load_checkpoint
from tests.kit import weights_of

MONTHLY = {"by": "time", "column": "day", "every": "month"}


def month(number, rows=40, **columns):
    """Rows of one month of 2024 as plain columns."""
    draw = np.random.default_rng(number)
    amount = draw.normal(size=rows)
    return {
        "customer": (np.arange(rows) % 10).tolist(),
        "day": [datetime.date(2024, number, 1 + row % 28).isoformat() for row in range(rows)],
        "amount": amount.tolist(),
        "channel": [("web", "shop")[row % 2] for row in range(rows)],
        "y": ["yes" if value + draw.normal() > 0 else "no" for value in amount],
        **columns,
    }


def joined(*parts):
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


@pytest.fixture
def csv(tmp_path):
    def write(columns, name="data"):
        pyarrow.csv.write_csv(pa.table(columns), tmp_path / f"{name}.csv")
        return str(tmp_path / f"{name}.csv")

    return write


def parse(files, training=None, **stream):
    stream = {"csv": files, "label": "y", "drop": ["customer"], "split": MONTHLY, **stream}
    params = {"epochs": 1, "device": "cpu", **(training or {})}
    return RunSpec.parse({"stream": stream, "model": {"mlp": {"hidden": [8]}}, "training_params": params})


def build(files, frozen=None, **stream):
    return build_stream(parse(files, **stream), None if frozen is None else json.loads(json.dumps(frozen)))


def prints(stream):
    return [(task.name, task.fingerprint) for task in stream.tasks]


def rows_of(task):
    """Every row of a task as text, sorted."""
    parts = (task.train, task.validation, task.test)
    return sorted(f"{row.tolist()} {int(y)}" for part in parts for row, y in zip(part.inputs["codes"], part.targets, strict=True))


def test_rows_without_a_label_are_left_out_until_they_have_one(csv):
    june = month(6)
    waiting = {**june, "y": [None if row % 4 == 0 else label for row, label in enumerate(june["y"])]}
    stream = build(csv(joined(month(5), waiting)))
    assert [len(task.train) + len(task.test) for task in stream.tasks] == [40, 30]
    assert any(note.startswith("10 rows have no label (y)") for note in stream.notes)
    empty = build(csv(joined(month(5), {**june, "y": [None] * 40})))
    assert [task.name for task in empty.tasks] == ["2024-05"]  # the month is no task yet
    assert prints(build(csv(joined(month(5), june)), empty.frozen))[0] == prints(empty)[0]


def test_a_later_month_may_bring_columns_categories_and_gaps(csv):
    first = csv(month(1), "january")
    plain = build([first])
    wild = month(2, channel=["web", "fax"] * 20, amount=[None, 1e30] + [0.5] * 38, note=["new"] * 40)
    stream = build([first, csv(wild, "february")], plain.frozen)
    assert prints(stream)[0] == prints(plain)[0] and stream.features == plain.features
    both = (stream.tasks[1].train, stream.tasks[1].test)
    assert {int(code) for part in both for code in part.inputs["codes"].flatten()} == {1, 2}  # web, and (other)
    x = torch.cat([part.inputs["x"] for part in both])
    assert x.isfinite().all() and x.max() == 10.0
    assert any("february.csv: columns that the first file lacks are left out: note" in note for note in stream.notes)
    assert any("Missing values where the first task had none" in note and "amount (1)" in note for note in stream.notes)
    with pytest.raises(RetainError, match=r"stream.features: .*has no column amount"):
        build(csv({name: values for name, values in month(2).items() if name != "amount"}), plain.frozen)


def test_the_order_of_rows_does_not_matter_to_what_a_month_has(csv):
    table = joined(*(month(number) for number in (1, 2, 3)))
    order = np.random.default_rng(0).permutation(120)
    mixed = {name: [values[row] for row in order] for name, values in table.items()}
    streams = [build(csv(table), features=["channel"]), build(csv(mixed), features=["channel"])]
    assert [[task.name for task in stream.tasks] for stream in streams] == [["2024-01", "2024-02", "2024-03"]] * 2
    one, other = ([rows_of(task) for task in stream.tasks] for stream in streams)
    assert one == other


def test_repeated_rows_are_dropped_when_asked_also_across_files(csv):
    once = month(1)
    again = joined(month(2), {name: values[:15] for name, values in once.items()})
    files = [csv(once, "a"), csv(again, "b")]
    kept, dropped = build(files), build(files, duplicates="drop")
    size = {task.name: len(task.train) + len(task.test) for task in kept.tasks}
    assert size == {"2024-01": 55, "2024-02": 40}
    assert prints(dropped) == prints(build([files[0], csv(month(2), "c")]))
    assert any(note.startswith("15 rows that repeat an earlier one") for note in dropped.notes)


@pytest.mark.parametrize(
    ("values", "again"),
    [
        ([1.5, None, 1.5, None, math.nan], [False, False, True, True, True]),
        ([2**60, 2**60 + 1, 2**60, None], [False, False, True, False]),
        ([0.0, -0.0], [False, True]),
        (["a", "b", None, "a", "None"], [False, False, False, True, False]),
        ([True, False, True], [False, False, True]),
        ([[1], [2], [1]], [False, False, True]),
        ([datetime.date(2024, 1, 1), datetime.date(2024, 1, 2), datetime.date(2024, 1, 1)], [False, False, True]),
    ],
)
def test_what_repeats_by_type(values, again):
    from retain.data.tables import repeated

    table = pa.table({"same": [1] * len(values), "x": pa.array(values)})
    assert repeated([table])[0].tolist() == again


def test_until_is_as_if_later_rows_were_not_there_yet(csv):
    early, all_of_it = joined(month(1), month(2)), joined(month(1), month(2), month(3))
    for said in ("2024-02", "2024-02-29", datetime.date(2024, 2, 28)):
        stream = build(csv(all_of_it), split={**MONTHLY, "until": said})
        assert prints(stream) == prints(build(csv(early)))
        assert any(note.startswith("40 rows after 2024-02") for note in stream.notes)
    with pytest.raises(RetainError, match="until=2023-01: every row is later"):
        build(csv(early), split={**MONTHLY, "until": "2023-01"})
    with pytest.raises(RetainError, match="until=May: day needs a date such as 2018-07"):
        build(csv(early), split={**MONTHLY, "until": "May"})
    numbers = {"by": "time", "column": "amount", "periods": 2, "until": 0}
    assert sum(len(t.train) + len(t.test) for t in build(csv(early), split=numbers, drop=["day", "customer"]).tasks) == sum(
        value <= 0 for value in early["amount"]
    )


def test_the_future_cannot_leak(csv, tmp_path):
    """Weights after two months are the same, bit by bit, whatever the third month holds."""
    strange = month(3, amount=[1e6] * 40, channel=["fax"] * 40)
    training = {"methods": [{"replay": {"ratio": 0.5, "capacity": 20}}, {"ewc": {"lambda": 10}}]}
    loop.train(parse(csv(joined(month(1), month(2))), training), tmp_path / "two")
    loop.train(parse(csv(joined(month(1), month(2), strange)), training), tmp_path / "three")
    for number in (0, 1):
        runs = [load_checkpoint(tmp_path / run / "tasks" / f"{number:04d}", ["model.safetensors"]) for run in ("two", "three")]
        one, other = (found["model.safetensors"] for found in runs)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_six_commands_learn_what_one_command_learns(csv, tmp_path):
    file = csv(joined(*(month(number) for number in (1, 2, 3))))
    training = {"regularization": {"replay_ratio": 0.5, "replay_capacity": 20}}
    loop.train(parse(file, training), tmp_path / "once")
    for until in ("2024-01", "2024-02", "2024-03"):
        summary = loop.train(parse(file, training, split={**MONTHLY, "until": until}), tmp_path / "monthly")
        assert summary["tasks"][-1] == until
    one, other = weights_of(tmp_path / "once"), weights_of(tmp_path / "monthly")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_constant_columns_of_the_first_month_scale_nothing(csv):
    """A column without spread at first keeps its unit, so that a later value neither divides by zero nor explodes."""
    first, later = month(1, amount=[-1.0] * 40), month(2, amount=[3.0] * 40)
    stream = build(csv(joined(first, later)))
    column = [{float(value) for value in task.train.inputs["x"][:, 0]} for task in stream.tasks]
    assert column == [{0.0}, {4.0}]


def test_a_class_of_three_rows_is_learned_and_measured(csv):
    table = month(1, y=["rare"] * 3 + ["no", "yes"] * 18 + ["no"])
    task = build(csv(table)).tasks[0]
    assert [int((part.targets == task.classes[1]).sum()) for part in (task.train, task.test)] == [2, 1]


# --- imbalance --------------------------------------------------------------------------------------------------------


def test_balanced_weights_are_scikit_learns():
    targets = torch.tensor([0] * 500 + [1] + [3] * 20)
    weights = class_weights("balanced", targets, list("abcd"))
    want = compute_class_weight("balanced", classes=np.array([0, 1, 3]), y=targets.numpy())
    np.testing.assert_allclose(weights[[0, 1, 3]], want, rtol=1e-6)
    assert weights[2] == 1 and abs(weights[targets].mean() - 1) < 1e-6
    assert class_weights("none", targets, list("abcd")) is None
    named = class_weights({"b": 100.0}, targets, list("abcd"))
    assert abs(named[targets].mean() - 1) < 1e-6 and abs(named[1] / named[0] - 100) < 1e-4


def test_a_run_weighs_classes_as_torch_does(csv, tmp_path):
    """One step on the whole task gives the gradient of the weighted cross-entropy; twice the weights change nothing."""
    table = month(1, rows=501, y=["yes"] * 2 + ["no"] * 499)
    training = {"batch_size": 1000, "optimizer": "SGD(lr=0.1)", "precision": "fp64", "max_steps": 1}
    steps = {}
    for setting in ("none", "balanced", {"yes": 3.0}, {"yes": 6.0, "no": 2.0}):
        spec = parse(csv(table), {**training, "class_weights": setting})
        loop.train(spec, tmp_path / str(len(steps)))
        steps[len(steps)] = weights_of(tmp_path / str(len(steps)))
    assert not torch.equal(steps[0]["head.weight"], steps[1]["head.weight"])
    torch.testing.assert_close(steps[2], steps[3], rtol=1e-6, atol=1e-9)

    stream = build(csv(table))
    rows = stream.tasks[0].train
    from retain.models.build import build_model

    model = build_model(parse(csv(table), training), stream, []).double()
    logits = model(rows.inputs["x"].double(), codes=rows.inputs["codes"])
    weights = torch.tensor([1.0, 3.0] if stream.classes[1] == "yes" else [3.0, 1.0], dtype=torch.float64)
    F.cross_entropy(logits, rows.targets, weight=weights).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(steps[2][name], param.detach() - 0.1 * param.grad, rtol=1e-5, atol=1e-8)


def test_replayed_rows_weigh_by_class_unless_the_buffer_is_balanced():
    from retain.forgetting.replay import replay
    from retain.seams import Objective, StepContext
    from retain.spec import ReplaySpec

    old = Rows({"x": torch.zeros(100, 1)}, torch.tensor([0] * 98 + [1] * 2))
    weights = torch.tensor([0.5, 25.0])
    for policy, want in (("reservoir", {0.5, 25.0}), ("class-balanced", {1.0})):
        method = replay(ReplaySpec(ratio=1.0, capacity=100, policy=policy, weighting="rows"))
        state = method.init({})
        ctx = StepContext(None, {}, Objective(lambda outputs, batch: outputs), task=1, classes=2, class_weights=weights)
        for batch in TaskBatches(old, 10, seed=0, task=0).in_order(100):
            method.consolidate_batch(ctx._replace(batch=batch), state)
        new = TaskBatches(Rows({"x": torch.ones(100, 1)}, old.targets), 100, seed=0, task=1, class_weights=weights).at(0)
        mixed = method.mix(new, ctx._replace(rows=0), state)
        assert mixed.weights[:100].tolist() == weights[new.targets].tolist()
        assert set(mixed.weights[100:].tolist()) == want


def test_weights_of_classes_that_are_not_there_are_refused(csv, tmp_path):
    with pytest.raises(RetainError, match=r"class_weights: there is no class yess; did you mean yes\?"):
        loop.train(parse(csv(month(1)), {"class_weights": {"yess": 2.0}}), tmp_path / "run")


# --- identifiers ------------------------------------------------------------------------------------------------------


def test_identifiers_stay_beside_stored_rows_and_are_no_feature(csv, tmp_path):
    spec = parse(csv(joined(month(1), month(2))), {"regularization": {"replay_ratio": 0.5}}, id="customer", drop=[])
    stream = build_stream(spec)
    assert stream.features == build(csv(joined(month(1), month(2)))).features
    hashes = set(id_hashes(list(range(10)), 0).tolist())
    assert set(stream.tasks[0].train.ids.tolist()) == hashes
    loop.train(spec, tmp_path / "run")
    found = load_checkpoint(tmp_path / "run" / "tasks" / "0001", ["eval.safetensors", "methods.safetensors", "state.json"])
    assert set(found["eval.safetensors"]["ids"].tolist()) <= hashes
    stored = next(
        values for name, values in found["methods.safetensors"].items() if name.endswith("meta.id") or name.endswith("meta/id")
    )
    assert set(stored.tolist()) <= hashes | {0} and found["state.json"]["frozen"]["id"] == "customer"


def test_a_gap_is_told_to_the_model_and_survives_replay(csv, tmp_path):
    """Missing values are NaN in stored rows and nowhere in the model."""
    gaps = [month(number, amount=[None if row % 3 == 0 else float(row) for row in range(40)]) for number in (1, 2)]
    training = {"methods": [{"replay": {"ratio": 1.0, "capacity": 30}}, {"ewc": {"lambda": 10, "every": 1}}]}
    summary = loop.train(parse(csv(joined(*gaps)), training), tmp_path / "run")
    assert all(math.isfinite(value) for row in summary["matrices"]["loss"]["values"] for value in row if value is not None)
    assert all(values.isfinite().all() for values in weights_of(tmp_path / "run").values())
