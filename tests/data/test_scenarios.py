import datetime
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from retain.data.scenarios import build_stream
from retain.data.sources import TEST, TRAIN, VALIDATION
from retain.data.splits import hold_out
from retain.errors import ConfigError, RetainError
from retain.spec import RunSpec

DATA = Path(os.environ.get("RETAIN_DATA", Path(__file__).parents[2] / "../shared/data"))


def build(frozen=None, head="auto", seed=0, **stream):
    values = {"stream": stream, "model": {"head": head}, "training_params": {"seed": seed}}
    return build_stream(RunSpec.parse(values), None if frozen is None else json.loads(json.dumps(frozen)))


def refused(text, **keys):
    with pytest.raises(RetainError, match=text) as caught:
        build(**keys)
    assert caught.value.exit_code == 2


@pytest.fixture
def parquet(tmp_path):
    def write(columns, name="rows"):
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
        return str(tmp_path / f"{name}.parquet")

    return write


def numbered(rows, **columns):
    """Rows that can be told apart by their one feature."""
    return {"n": np.arange(rows, dtype=np.float64), **columns}


def months(count, each=10):
    days = [datetime.date(2018, 1 + place, 1 + row) for place in range(count) for row in range(each)]
    return numbered(count * each, day=days, y=["no", "yes"] * (count * each // 2))


def prints(stream):
    return [task.fingerprint for task in stream.tasks]


def names(stream):
    return [task.name for task in stream.tasks]


def size(task):
    return len(task.train) + len(task.validation) + len(task.test)


# --- held-out rows ----------------------------------------------------------------------------------------------------


def test_held_out_rows_are_stratified_and_every_class_of_two_rows_has_one():
    codes = np.repeat([5, 2, 9, 7], [100, 50, 2, 1])
    roles = hold_out(codes, 0.2, 0.1, key=3)
    counts = {code: np.bincount(roles[codes == code], minlength=3).tolist() for code in (5, 2, 9, 7)}
    assert (TRAIN, VALIDATION, TEST) == (0, 1, 2)
    assert counts == {5: [70, 10, 20], 2: [35, 5, 10], 9: [1, 0, 1], 7: [1, 0, 0]}
    assert np.array_equal(roles, hold_out(codes, 0.2, 0.1, key=3)) and not np.array_equal(roles, hold_out(codes, 0.2, 0.1, key=4))


def test_every_row_is_in_one_part_of_one_task(parquet):
    path = parquet(numbered(100, y=[0, 1] * 50, c=["a", "a", "b", "b"] * 25))
    stream = build(parquet=path, label="y", validation=0.1, split={"by": "column", "column": "c"})
    mean, std = stream.frozen["columns"][0]["mean"], stream.frozen["columns"][0]["std"]
    x = torch.cat([part.inputs["x"] for task in stream.tasks for part in (task.train, task.validation, task.test)])
    assert sorted((x[:, 0].double() * std + mean).round().int().tolist()) == list(range(100))
    train = stream.tasks[0].train.inputs["x"]
    assert abs(float(train.mean())) < 1e-6 and abs(float(train.std(correction=0)) - 1) < 1e-6


# --- a stream that grows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["time", "file", "column"])
def test_a_growing_stream_leaves_older_tasks_bit_identical(parquet, kind):
    whole = months(3)
    parts = [{name: values[10 * k : 10 * k + 10] for name, values in whole.items()} for k in range(3)]
    split = {
        "time": {"by": "time", "column": "day", "every": "month"},
        "file": {"by": "file"},
        "column": {"by": "column", "column": "day"},
    }[kind]
    drop = ["day"] if kind == "file" else []
    if kind == "column":
        parts = [{**part, "day": [place] * 10} for place, part in enumerate(parts)]
    paths = [parquet(part, f"part{place}") for place, part in enumerate(parts)]
    before = build(parquet=paths[:2], label="y", drop=drop, split=split, seed=1)
    after = build(before.frozen, parquet=paths, label="y", drop=drop, split=split, seed=2)
    assert len(after.tasks) == 3 and prints(after)[:2] == prints(before)
    assert after.frozen["columns"] == before.frozen["columns"] and after.frozen["seed"] == 1
    assert float(after.tasks[2].train.inputs["x"].min()) > float(after.tasks[0].train.inputs["x"].max())


def test_classes_keep_their_ids_and_new_ones_are_appended(parquet):
    first = parquet(numbered(8, y=["m", "z"] * 4), "first")
    second = parquet(numbered(8, y=["a", "m"] * 4), "second")
    before = build(parquet=[first], label="y", split={"by": "file"})
    after = build(before.frozen, parquet=[first, second], label="y", split={"by": "file"})
    assert before.classes == ["m", "z"] and after.classes == ["m", "z", "a"]
    assert [task.classes for task in after.tasks] == [[0, 1], [0, 2]] and after.scenario == "class-incremental"


def test_shared_rows_that_come_later_do_not_move_earlier_ones(parquet):
    keys = {"label": "y", "split": {"by": "column", "column": "c", "order": [1, 2], "shared": [0]}}
    rows = {"c": [0] * 20 + [1] * 4 + [2] * 4, "y": [0] * 20 + [1] * 8}
    small = build(parquet=parquet(numbered(28, **rows), "a"), **keys)
    more = {"c": rows["c"] + [0] * 11, "y": rows["y"] + [0] * 11}
    large = build(small.frozen, parquet=parquet(numbered(39, **more), "b"), **keys)
    assert [size(task) for task in small.tasks] == [14, 14] and sorted(size(task) for task in large.tasks) == [19, 20]
    for old, new in zip(small.tasks, large.tasks, strict=True):
        rows = [{*torch.cat([t.train.inputs["x"], t.test.inputs["x"]])[:, 0].tolist()} for t in (old, new)]
        assert rows[0] <= rows[1]
    assert any("20 rows with c 0 are shared" in note for note in small.notes)


# --- tasks keep their names and rows -------------------------------------------------------------------------------------


def test_files_of_the_same_name_in_other_folders_are_other_tasks(tmp_path):
    def file(folder, form="parquet"):
        path = tmp_path / folder / f"data.{form}"
        path.parent.mkdir(parents=True, exist_ok=True)
        k = int(folder[-1])
        if form == "parquet":
            pq.write_table(pa.table({"n": np.arange(8.0) + k, "y": [0, 1] * 4}), path)
        else:
            np.savez(path, x_train=np.arange(8.0)[:, None] + k, y_train=[0, 1] * 4)
        return str(path)

    for form in ("parquet", "npz"):
        keys = {"label": "y", "split": {"by": "file"}}
        paths = [file(f"202{k}", form) for k in (3, 4, 5)]
        before = build(**{form: paths[:2]}, **keys)
        assert names(before) == ["2023-data", "2024-data"]
        after = build(before.frozen, **{form: paths[1:]}, **keys)
        assert names(after) == ["2024-data", "2025-data"] and prints(after)[0] == prints(before)[1]
        back = build(after.frozen, **{form: [paths[0], paths[2]]}, **keys)
        assert names(back) == ["2023-data", "2025-data"]
        moved = [file(f"moved/202{k}", form) for k in (3, 4)] + [file("other/2023", form)]
        later = build(before.frozen, **{form: moved}, **keys)
        assert names(later) == ["2023-data", "2024-data", "2023-data-2"] and prints(later)[:2] == prints(before)
        Path(paths[0]).unlink()
        gone = build(before.frozen, **{form: paths}, **keys)
        assert names(gone) == ["2024-data", "2025-data"] and "2023" in gone.notes[0]
        with pytest.raises(ConfigError, match="no such file"):
            build(before.frozen, **{form: [paths[1], str(tmp_path / "elsewhere" / f"data.{form}")]}, **keys)


def test_a_file_of_a_known_name_is_called_by_its_folder_too(tmp_path):
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        pq.write_table(pa.table({"n": np.arange(8.0), "y": [0, 1] * 4}), path := tmp_path / folder / "data.parquet")
        paths.append(str(path))
    before = build(parquet=paths[:1], label="y", split={"by": "file"})
    assert names(before) == ["data"] and before.frozen["files"] == {paths[0]: "data"}
    assert names(build(before.frozen, parquet=paths[1:], label="y", split={"by": "file"})) == ["b-data"]


def test_new_classes_make_one_new_task(parquet):
    keys = {"label": "y", "split": {"by": "class", "groups": 2}}
    before = build(parquet=parquet(numbered(32, y=list("bdfh") * 8), "a"), **keys)
    more = numbered(56, y=list("bdfh") * 8 + list("acg") * 8)
    after = build(before.frozen, parquet=parquet(more, "b"), **keys)
    assert names(before) == ["b,d", "f,h"] and names(after) == ["b,d", "f,h", "a,c,g"] and prints(after)[:2] == prints(before)
    assert after.frozen["groups"] == [["b", "d"], ["f", "h"], ["a", "c", "g"]]
    fewer = {"n": np.arange(32.0, 56), "y": list("acg") * 8}
    assert names(build(after.frozen, parquet=parquet(fewer, "c"), **keys)) == ["a,c,g"]


def test_shared_rows_are_dealt_once(parquet):
    split = {"by": "column", "column": "c", "shared": [0]}
    first = {"c": [0] * 30 + [1] * 6 + [2] * 6, "y": [0] * 30 + [1] * 12}
    second = {"c": [*first["c"], *[3] * 6, *[0] * 10], "y": [*first["y"], *[1] * 6, *[0] * 10]}
    third = {"c": [*second["c"], *[0] * 9], "y": [*second["y"], *[0] * 9]}

    def numbers(task, part):
        entry = before.frozen["columns"][0]
        return {*(getattr(task, part).inputs["x"][:, 0].double() * entry["std"] + entry["mean"]).round().int().tolist()}

    before = build(parquet=parquet(numbered(42, **first), "a"), label="y", split=split)
    after = build(before.frozen, parquet=parquet(numbered(58, **second), "b"), label="y", split=split)
    last = build(after.frozen, parquet=parquet(numbered(67, **third), "c"), label="y", split=split)
    assert names(after) == ["1", "2", "3"] and prints(after)[:2] == prints(before) and size(after.tasks[2]) == 16
    assert after.frozen["deals"] == [{"tasks": ["1", "2"], "rows": 30}, {"tasks": ["3"], "rows": 10}]
    assert [size(task) for task in last.tasks] == [24, 24, 19] and len(last.frozen["deals"]) == 3
    for stream in (after, last):
        for one in stream.tasks:
            assert not any(numbers(one, "train") & numbers(other, "test") for other in stream.tasks)
    again = build(last.frozen, parquet=parquet(numbered(67, **third), "d"), label="y", split=split)
    assert prints(again) == prints(last)
    none = build(
        before.frozen, parquet=parquet(numbered(48, **{k: v[:48] for k, v in second.items()}), "e"), label="y", split=split
    )
    assert size(none.tasks[2]) == 6 and any("No shared rows are left for 3" in note for note in none.notes)
    less = build(after.frozen, parquet=parquet(numbered(42, **first), "g"), label="y", split=split)
    assert names(less) == ["1", "2"] and any("30 shared rows are there, and 40 were dealt" in note for note in less.notes)
    with pytest.raises(ConfigError, match=r"shared is 0, 3 and was 0 when this run dealt"):
        build(before.frozen, parquet=parquet(numbered(58, **second), "f"), label="y", split={**split, "shared": [0, 3]})


def test_names_of_tasks_are_unique(parquet):
    path = parquet(numbered(24, y=["a", "b", "a,b"] * 8))
    split = {"by": "class", "groups": 2, "order": ["a", "b", "a,b"]}
    stream = build(parquet=path, label="y", split=split)
    assert names(stream) == ["a,b", "a,b-2"]
    rest = parquet(numbered(8, y=["a,b", "c"] * 4), "rest")
    frozen = build(stream.frozen, parquet=rest, label="y", split={"by": "class", "groups": 2})
    assert names(frozen) == ["a,b-2", "c"]


def test_a_feature_of_the_run_stays_one(parquet):
    path = parquet(numbered(16, m=[1, 2] * 8, y=[0, 0, 1, 1] * 4))
    frozen = build(parquet=path, label="y").frozen
    for keys in ({"split": {"by": "column", "column": "m"}}, {"drop": ["m"]}):
        with pytest.raises(ConfigError, match=r"the column m is a feature of this run"):
            build(frozen, parquet=path, label="y", **keys)
    with pytest.raises(ConfigError, match=r"features: n are given, and the features of this run are n, m"):
        build(frozen, parquet=path, label="y", features=["n"])
    assert build(frozen, parquet=path, label="y", features=["m", "n"]).features == ["n", "m"]


def test_a_column_of_many_values_makes_no_tasks(parquet):
    path = parquet(numbered(20, income=[*range(19), 0], y=[0, 1] * 10))
    said = "income: the column has 19 values in 20 rows"
    refused(said, parquet=path, label="y", split={"by": "column", "column": "income"})


def test_columns_that_were_probably_meant_otherwise_are_noted(parquet):
    ages = ["unknown", "n/a", *map(str, range(20, 38))] * 2
    columns = numbered(40, age=ages, code=[f"c{row}" for row in range(40)], y=[0, 1] * 20)
    notes = " ".join(build(parquet=parquet(columns), label="y").notes)
    assert "Column age is read as text. 4 of its 40 values are no numbers (such as 'unknown', 'n/a')" in notes
    assert "Column code has 32 values in the 32 rows that the first task learns from: it looks like an identifier" in notes
    many = numbered(3000, age=["unknown", *map(str, range(2999))], y=[0, 1] * 1500)
    refused("1 of its 3,000 values are no numbers|such as 'unknown'", parquet=parquet(many), label="y", test=0.001)


def test_labels_that_change_their_type_are_noted(tmp_path):
    for name, labels in (("a", ["no", "yes"]), ("b", ["0", "1"])):
        rows = "".join(f"{row},{labels[row % 2]}\n" for row in range(8))
        (tmp_path / f"{name}.csv").write_text(f"x,y\n{rows}")
    paths = [str(tmp_path / f"{name}.csv") for name in "ab"]
    assert "y holds text in " in build(csv=paths, label="y").notes[0]
    alone = build(build(csv=paths[0], label="y").frozen, csv=paths[1], label="y")
    assert alone.classes == ["no", "yes", "0", "1"] and "The labels are of type int64, and were string" in alone.notes[0]


# --- splits -----------------------------------------------------------------------------------------------------------


def test_by_class_gives_equal_groups_and_the_remainder_to_the_first(parquet):
    path = parquet(numbered(28, y=[*range(7)] * 4))
    stream = build(parquet=path, label="y", split={"by": "class", "groups": 3})
    assert names(stream) == ["0-2", "3-4", "5-6"] and stream.scenario == "class-incremental"
    assert names(build(parquet=path, label="y", split={"by": "class"})) == ["0-1", "2-3", "4", "5", "6"]
    stream = build(parquet=path, label="y", split={"by": "class", "groups": 2, "order": [6, 0, 3, 4]})
    assert names(stream) == ["6,0", "3-4"] and stream.classes == ["0", "6", "3", "4"]
    assert stream.notes == ["12 rows are left out: stream.split.order does not name 1, 2, 5."]
    refused("groups=8: there are 7 classes", parquet=path, label="y", split={"by": "class", "groups": 8})
    refused("order: no row has the value 9", parquet=path, label="y", split={"by": "class", "order": [9]})
    refused("a value stands twice", parquet=path, label="y", split={"by": "class", "order": [1, 1]})


def test_parity_splits_by_the_original_label_and_shares_two_classes():
    stream = build(builtin="digits", relabel="parity")
    assert names(stream) == ["0-1", "2-3", "4-5", "6-7", "8-9"] and stream.classes == ["even", "odd"]
    assert stream.scenario == "domain-incremental" and all(task.classes == [0, 1] for task in stream.tasks)


def test_with_the_task_known_labels_are_positions_in_the_task():
    for keys in ({"split": {"by": "class", "task_id": True}}, {"head": "per-task"}):
        stream = build(builtin="digits", **keys)
        assert stream.scenario == "task-incremental" and stream.tasks[3].classes == [6, 7]
        assert stream.tasks[3].train.targets.unique().tolist() == [0, 1]


def test_by_column_gives_one_task_per_value(parquet):
    path = parquet(numbered(24, c=["b", "a", "c"] * 8, y=[0, 0, 0, 1, 1, 1] * 4))
    split = {"by": "column", "column": "c"}
    assert names(build(parquet=path, label="y", split=split)) == ["a", "b", "c"]
    stream = build(parquet=path, label="y", split={**split, "order": ["c", "b"]})
    assert names(stream) == ["c", "b"] and "8 rows are left out" in stream.notes[0]
    refused("shared: no row has the value d", parquet=path, label="y", split={**split, "shared": ["d"]})
    refused("is in order and in shared", parquet=path, label="y", split={**split, "order": ["a", "b"], "shared": ["a"]})


@pytest.mark.parametrize(
    ("every", "want"),
    [
        ("day", ["2018-12-30", "2018-12-31", "2019-01-01", "2019-04-01"]),
        ("week", ["2018-W52", "2019-W01", "2019-W14"]),
        ("month", ["2018-12", "2019-01", "2019-04"]),
        ("quarter", ["2018-Q4", "2019-Q1", "2019-Q2"]),
        ("year", ["2018", "2019"]),
    ],
)
def test_every_calendar_period_is_a_task(parquet, every, want):
    days = ["2019-04-01", "2018-12-30", "2018-12-31", "2019-01-01"] * 4
    path = parquet(numbered(16, day=days, y=[0] * 8 + [1] * 8))
    stream = build(parquet=path, label="y", split={"by": "time", "column": "day", "every": every})
    assert names(stream) == want and sum(map(size, stream.tasks)) == 16


@pytest.mark.parametrize("kind", ["int", "date", "text"])
def test_periods_have_equal_row_counts_and_ties_are_cut_again_the_same_way(parquet, kind):
    month = np.sort(np.random.default_rng(0).integers(1, 5, 42))
    column = {
        "int": month,
        "date": [datetime.datetime(2018, m, 1, 12) for m in month],
        "text": [f"2018-{m:02d}" for m in month],
    }[kind]
    rows = np.random.default_rng(1).permutation(42)
    columns = numbered(42, t=[column[row] for row in rows], y=[0, 1] * 21)
    keys = {"label": "y", "split": {"by": "time", "column": "t", "periods": 4}}
    stream = build(parquet=parquet(columns), **keys)
    assert names(stream) == ["period-1", "period-2", "period-3", "period-4"] and list(map(size, stream.tasks)) == [11, 11, 10, 10]
    assert prints(build(stream.frozen, parquet=parquet(columns), **keys)) == prints(stream)
    late = "2018-09" if kind == "text" else datetime.datetime(2018, 9, 1) if kind == "date" else 9
    grown = {"n": np.arange(46.0), "t": [*columns["t"], *[late] * 4], "y": [0, 1] * 23}
    later = build(stream.frozen, parquet=parquet(grown), **keys)
    assert prints(later)[:3] == prints(stream)[:3] and size(later.tasks[3]) == 14
    order = np.argsort(np.array(columns["t"]), kind="stable")[:11]
    entry = stream.frozen["columns"][0]
    x = torch.cat([stream.tasks[0].train.inputs["x"], stream.tasks[0].test.inputs["x"]])[:, 0].double()
    assert sorted((x * entry["std"] + entry["mean"]).round().int().tolist()) == sorted(order.tolist())


def test_time_columns_that_cannot_be_cut(parquet):
    path = parquet(numbered(4, m=[1, 2, 3, 4], t=["soon", "now", "2018-01", "2018-02"], y=[0, 1, 0, 1]))
    refused(
        "every=month needs dates, and m holds numbers",
        parquet=path,
        label="y",
        split={"by": "time", "column": "m", "every": "month"},
    )
    refused("holds 'soon', which is no date", parquet=path, label="y", split={"by": "time", "column": "t", "every": "month"})
    refused("periods=9: there are 4 rows", parquet=path, label="y", split={"by": "time", "column": "m", "periods": 9})
    refused("none to be measured on", parquet=path, label="y", drop=["t"], split={"by": "time", "column": "m", "periods": 4})


def test_several_files_are_tasks_unless_a_split_is_given(parquet):
    paths = [parquet(numbered(8, y=[0, 1] * 4), name) for name in ("may", "june")]
    assert names(build(parquet=paths, label="y")) == ["may", "june"]
    refused("may.parquet is listed twice", parquet=[paths[0], paths[0]], label="y")
    assert names(build(parquet=paths, label="y", split={"by": "none"})) == ["all"]


def test_a_permutation_is_fixed_shared_by_all_rows_and_the_first_is_none():
    keys = {"builtin": "digits", "validation": 0.1}
    base = build(**keys, split={"by": "none"}).tasks[0]
    stream = build(**keys, split={"by": "permutation", "tasks": 3})
    assert stream.scenario == "domain-incremental" and names(stream) == ["permutation-0", "permutation-1", "permutation-2"]
    assert stream.tasks[0].fingerprint == base.fingerprint
    orders = []
    for task in stream.tasks[1:]:
        plain, turned = (part.train.inputs["x"].numpy().reshape(len(part.train), 64) for part in (base, task))
        columns = {plain[:, place].tobytes(): place for place in range(64)}
        orders.append([columns[turned[:, place].tobytes()] for place in range(64) if plain[:, place].any()])
        assert task.train.inputs["x"].shape == base.train.inputs["x"].shape
        assert np.array_equal(np.sort(plain, axis=1), np.sort(turned, axis=1))
        assert torch.equal(task.test.targets, base.test.targets) and task.train.inputs["x"].dtype == torch.uint8
    assert orders[0] != orders[1] and orders[0] != sorted(orders[0])


def test_rotation_turns_images_and_refuses_vectors(parquet):
    base = build(builtin="digits", split={"by": "none"}).tasks[0].test.inputs["x"]
    stream = build(builtin="digits", split={"by": "rotation", "tasks": 4, "max_angle": 360})
    assert names(stream) == ["rotation-0", "rotation-90", "rotation-180", "rotation-270"]
    for quarters, task in enumerate(stream.tasks):
        assert np.array_equal(task.test.inputs["x"].numpy(), np.rot90(base.numpy(), quarters, axes=(2, 3)))
    path = parquet(numbered(4, y=[0, 1, 0, 1]))
    refused("rotation needs images, and the stream has vectors", parquet=path, label="y", split={"by": "rotation"})


# --- classes and metrics ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "positive", "want"),
    [
        (["yes", "no"], None, ["no", "yes"]),
        (["yes", "no"], "no", ["yes", "no"]),
        ([1, 0], None, ["0", "1"]),
        ([10, 9], None, ["9", "10"]),
    ],
)
def test_the_positive_class_has_id_one_for_binary_metrics(parquet, labels, positive, want):
    path = parquet(numbered(8, y=labels * 4))
    stream = build(parquet=path, label="y", metric="auc", positive=positive, split={"by": "none"})
    assert stream.classes == want
    with pytest.raises(ConfigError, match="with which the run began"):
        build(stream.frozen, parquet=path, label="y", metric="auc", positive=want[0], split={"by": "none"})


def test_binary_metrics_need_two_classes(parquet):
    path = parquet(numbered(9, y=[0, 1, 2] * 3))
    refused(r"auc needs two classes; the stream has 3 \(0, 1, 2\)", parquet=path, label="y", metric="auc")
    path = parquet(numbered(8, y=["yes", "no"] * 4))
    refused("YAML reads yes", parquet=path, label="y", metric="auc", positive=True, split={"by": "none"})
    refused("positive: no row has the value maybe", parquet=path, label="y", metric="auc", positive="maybe", split={"by": "none"})


def test_a_class_that_is_not_measured_is_noted_and_a_task_without_training_rows_refused(parquet, tmp_path):
    stream = build(parquet=parquet(numbered(9, y=[0] * 8 + [1])), label="y", split={"by": "none"})
    assert stream.notes == ["Task all: learned but not measured, for lack of rows: class 1."]
    given = {"x_train": np.zeros((4, 2)), "y_train": [0, 0, 1, 1], "x_test": np.zeros((3, 2)), "y_test": [0, 1, 2]}
    np.savez(tmp_path / "d.npz", **given)
    refused("task 2 has 1 rows and none to learn from", npz=str(tmp_path / "d.npz"), split={"by": "class"})


# --- real data --------------------------------------------------------------------------------------------------------


def real(name):
    path = DATA / name
    return str(path) if path.exists() else pytest.skip(f"no {path}")


def test_bank_marketing_in_four_periods():
    path = real("bank_marketing/bank_full_date_ordered.csv.gz")
    split = {"by": "time", "column": "month_idx", "periods": 4}
    stream = build(csv=path, label="deposit", drop=["duration"], metric="auc", split=split)
    rates = [float(torch.cat([t.train.targets, t.test.targets]).float().mean()) for t in stream.tasks]
    assert [round(100 * rate, 1) for rate in rates] == [3.6, 6.0, 9.4, 27.8]
    assert not any(name.startswith(("month_idx", "duration", "deposit")) for name in stream.features)


def test_fraud_by_scenario():
    path = real("fraud_handbook_sim/fraud_sim_may_sep_2018.parquet")
    split = {"by": "column", "column": "scenario", "order": [1, 3, 2], "shared": [0]}
    stream = build(parquet=path, label="fraud", metric="recall_at_fpr=0.01", split=split)
    frauds = [int(torch.cat([t.train.targets, t.test.targets]).sum()) for t in stream.tasks]
    assert names(stream) == ["1", "3", "2"] and frauds == [766, 3824, 7752] and "scenario" not in stream.features
    assert sum(map(size, stream.tasks)) == 95493 and stream.scenario == "domain-incremental"


def test_mnist_by_class():
    stream = build(npz=real("mnist/mnist_20k_10k.npz"), split={"by": "class"})
    assert stream.shape == (1, 28, 28) and names(stream) == ["0-1", "2-3", "4-5", "6-7", "8-9"]
    assert all(len(task.train) == 4000 for task in stream.tasks) and sum(len(task.test) for task in stream.tasks) == 10000


def test_a_hundred_thousand_rows_with_texts_become_tasks(parquet):
    draw = np.random.default_rng(0)
    columns = {f"n{k}": draw.normal(size=100_000) for k in range(8)}
    columns |= {f"t{k}": np.array(list("abcdef"))[draw.integers(0, 6, 100_000)] for k in range(8)}
    path = parquet({**columns, "y": draw.integers(0, 10, 100_000)})
    assert len(build(parquet=path, label="y", split={"by": "class"}).tasks) == 5
