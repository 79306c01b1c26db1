"""The plan of a table's columns, against scikit-learn's own estimators."""

import datetime
import json
import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from retain.data.features import CLIP, encode, layout, make_plan
from retain.errors import DataError
from retain.models.build import TableInput


def plan_of(table, rows=None):
    """The plan as a run keeps it."""
    return json.loads(json.dumps(make_plan(table, np.arange(table.num_rows) if rows is None else np.array(rows))))


def features_of(table, plan):
    """What the model's input layer makes of a table, and the names of its columns."""
    found, rows = layout(plan), encode(table, plan)
    layer = TableInput(found.gaps, [len(values) for _, values in found.categories])
    out = layer(**rows)
    assert out.dtype == rows["x"].dtype and out.isfinite().all() and out.shape[1] == len(found.features)
    return found.features, out.numpy()


def test_numbers_are_standardised_by_the_rows_of_the_plan_and_clipped():
    x = np.array([1.0, 2.0, 4.0, 1e9, -1e9])
    plan = plan_of(pa.table({"x": x, "constant": np.full(5, 0.1)}), [0, 1, 2])
    out = encode(pa.table({"x": x, "constant": [0.1, 0.1, 0.1, 0.1, 5.1]}), plan)
    want = StandardScaler().fit_transform(x[:3, None])[:, 0]
    assert out.keys() == {"x"} and out["x"].dtype == torch.float32
    np.testing.assert_allclose(out["x"][:, 0], [*want, CLIP, -CLIP], rtol=1e-6)
    np.testing.assert_allclose(out["x"][:, 1], [0, 0, 0, 0, 5], atol=1e-6)


def test_missing_numbers_are_the_mean_and_an_indicator_as_scikit_learn_fills_them():
    first = pa.table({"a": pa.array([1.0, None, 4.0, 7.0]), "b": [3.0, 1.0, 2.0, 2.0]})
    later = pa.table({"a": pa.array([None, 5.0]), "b": pa.array([None, 2.0])})
    plan = plan_of(first)
    columns = [np.column_stack([table["a"].to_numpy(), table["b"].to_numpy()]) for table in (first, later)]
    imputer = SimpleImputer(add_indicator=True).fit(columns[0])
    scaler = StandardScaler().fit(columns[0])  # scikit-learn's leaves missing values out, too
    for table, values in zip((first, later), columns, strict=True):
        names, out = features_of(table, plan)
        filled = imputer.transform(values)
        assert names == ["a", "b", "a is missing"]
        np.testing.assert_allclose(out[:, :2], scaler.transform(filled[:, :2]), atol=1e-6)
        np.testing.assert_array_equal(out[:, 2], filled[:, 2])


def test_texts_become_indicators_and_unseen_ones_are_others():
    table = pa.table({"job": ["nurse", "cook", "nurse", "pilot"], "age": [1.0, 2.0, 3.0, 4.0]})
    plan = plan_of(table, [0, 1, 2])
    names, out = features_of(table, plan)
    assert names == ["age", "job=cook", "job=nurse", "job=(other)"]
    encoder = OneHotEncoder(sparse_output=False, handle_unknown="ignore").fit([["nurse"], ["cook"], ["nurse"]])
    np.testing.assert_array_equal(out[:, 1:3], encoder.transform([["nurse"], ["cook"], ["nurse"], ["pilot"]]))
    assert out[:, 3].tolist() == [0, 0, 0, 1]


def test_a_missing_text_is_a_category_where_the_first_task_has_one():
    first, later = pa.table({"job": ["b", None, "a"]}), pa.table({"job": [None, "a", "z"]})
    names, out = features_of(later, plan_of(first))
    assert names == ["job=a", "job=b", "job=(missing)", "job=(other)"]
    assert out.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1]]
    assert features_of(later, plan_of(pa.table({"job": ["b", "a"]})))[1].tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 1]]


def test_names_that_look_like_our_own_marks_stay_apart():
    """A text that says (missing) or (other) is a category of its own."""
    table = pa.table({"job": ["(missing)", "(other)", None]})
    assert encode(table, plan_of(table))["codes"].tolist() == [[0], [1], [2]]
    assert encode(pa.table({"job": ["new"]}), plan_of(table))["codes"].tolist() == [[3]]


def test_dates_are_days_and_points_on_circles():
    days = [datetime.datetime(2024, 1, 1), datetime.datetime(2024, 1, 8), datetime.datetime(2024, 12, 31), None]
    table = pa.table({"d": pa.array(days, pa.timestamp("us"))})
    names, out = features_of(table, plan_of(table))
    circles = [f"d ({way} of {circle})" for circle in ("week", "year") for way in ("sine", "cosine")]
    assert names == ["d (days)", *circles, "d (days) is missing"]
    numbers = np.array([0, 7, 365]) + 19723.0
    np.testing.assert_allclose(out[:3, 0], (numbers - numbers.mean()) / numbers.std(), rtol=1e-5)
    np.testing.assert_allclose(out[0, 1:3], out[1, 1:3], atol=1e-6)  # both Mondays
    assert np.linalg.norm(out[0, 3:5] - out[2, 3:5]) < 0.05  # the year's two ends are neighbours
    np.testing.assert_allclose(np.hypot(out[:3, 3], out[:3, 4]), 1, atol=1e-6)
    assert out[3].tolist() == [0, 0, 0, 0, 0, 1]


def test_the_time_of_day_counts_where_dates_have_one():
    clock = pa.table({"d": pa.array([datetime.datetime(2024, 1, 1, 6), datetime.datetime(2024, 1, 2, 18)], pa.timestamp("us"))})
    names, out = features_of(clock, plan_of(clock))
    np.testing.assert_allclose(
        out[:, [names.index("d (sine of day)"), names.index("d (cosine of day)")]], [[1, 0], [-1, 0]], atol=1e-6
    )


def test_a_column_without_any_value_at_first_is_left_out_for_good():
    first = pa.table({"x": [1.0, 2.0], "empty": pa.array([None, None], pa.float64()), "null": pa.nulls(2)})
    later = pa.table({"x": [1.0], "empty": [3.0], "null": ["text"]})
    assert features_of(later, plan_of(first))[0] == ["x"]
    with pytest.raises(DataError, match=r"every feature is empty in the first task's 2 rows: empty, null"):
        plan_of(first.drop_columns(["x"]))


def test_a_column_that_is_empty_later_is_missing():
    plan = plan_of(pa.table({"x": [1.0, 3.0], "job": ["a", "b"]}))
    rows = encode(pa.table({"x": pa.nulls(1), "job": pa.nulls(1)}), plan)
    assert rows["x"].tolist() == [[0.0]] and rows["codes"].tolist() == [[2]]


def test_an_identifier_and_a_changed_type_are_refused():
    names = pa.table({"id": [f"n{row}" for row in range(1001)]})
    with pytest.raises(DataError, match=r"column id holds 1,001 distinct texts.*stream\.drop: \[id\]"):
        plan_of(names)
    plan = plan_of(pa.table({"x": [1.0, 2.0]}))
    with pytest.raises(DataError, match=r"column x held numbers when the run began and holds text now"):
        encode(pa.table({"x": ["a", "b"]}), plan)
    with pytest.raises(DataError, match=r"column x held numbers when the run began and holds dates now"):
        encode(pa.table({"x": pa.array([datetime.datetime(2024, 1, 1)])}), plan)


def test_the_plan_is_finite_for_one_row():
    assert all(math.isfinite(entry["std"]) for entry in plan_of(pa.table({"x": [3.0]})))


def test_categories_are_exact_in_bf16():
    """Codes are whole numbers, which a model in bf16 would round above 256 if they were floats."""
    table = pa.table({"job": [f"{row:04d}" for row in range(1000)], "x": np.arange(1000.0)})
    rows, found = encode(table, plan_of(table)), layout(plan_of(table))
    layer = TableInput(found.gaps, [len(values) for _, values in found.categories])
    out = layer(rows["x"].bfloat16(), rows["codes"])
    assert out.dtype == torch.bfloat16 and torch.equal(out[:, 1:-1], torch.eye(1000, dtype=torch.bfloat16))
