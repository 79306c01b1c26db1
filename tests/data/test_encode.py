import json
import math

import numpy as np
import pyarrow as pa
import pytest

from retain.data.encode import CLIP, encode, feature_names, make_plan, read_labels, relabelled
from retain.errors import ConfigError, DataError


def column(values):
    return pa.chunked_array([values[:2], values[2:]])


def test_labels_are_sorted_numbers_by_size_and_texts_by_alphabet():
    numbers, texts = read_labels(column([10, 9, 10, -1])), read_labels(column(["b", "a", "b", "10"]))
    assert numbers.names == ["-1", "9", "10"] and numbers.codes.tolist() == [2, 1, 2, 0]
    assert texts.names == ["10", "a", "b"] and texts.codes.tolist() == [2, 1, 2, 0]
    assert read_labels(column([True, False, True])).names == ["false", "true"]


def test_a_value_is_found_as_yaml_writes_it():
    assert read_labels(column([1, 2, 3])).find(2.0, "key") == 1 == read_labels(column([False, True, True])).find(True, "key")
    with pytest.raises(ConfigError, match=r"no row has the value setosae\. Did you mean setosa\?"):
        read_labels(column(["setosa", "virginica", "x"])).find("setosae", "key")
    with pytest.raises(ConfigError, match=r"yes, no, on and off without quotes"):
        read_labels(column(["yes", "no", "no"])).find(True, "stream.positive")


def test_labels_are_replaced_by_parity_or_a_mapping():
    numbers = read_labels(column([3, 0, 1, 2]))
    parity = relabelled(numbers, "parity")
    assert [parity.names[code] for code in parity.codes] == ["odd", "even", "odd", "even"]
    mapped = relabelled(numbers, {"0": "none", "1": "some", "2": "some", "3": "some"})
    assert [mapped.names[code] for code in mapped.codes] == ["some", "none", "some", "some"]
    with pytest.raises(ConfigError, match=r"the labels 2, 3 are not in the mapping"):
        relabelled(numbers, {"0": "a", "1": "b"})
    with pytest.raises(ConfigError, match=r"the labels a, b are no whole numbers"):
        relabelled(read_labels(column(["a", "b", "a"])), "parity")


def test_numbers_are_standardised_by_the_rows_of_the_plan_and_clipped():
    x = np.array([1.0, 2.0, 4.0, 1e9, -1e9])
    plan = make_plan(pa.table({"x": x, "constant": np.full(5, 0.1)}), np.array([0, 1, 2]))
    out = encode(pa.table({"x": x, "constant": [0.1, 0.1, 0.1, 0.1, 5.1]}), plan)
    want = (x[:3] - x[:3].mean()) / x[:3].std()
    assert out.dtype == np.float32
    np.testing.assert_allclose(out[:, 0], [*want, CLIP, -CLIP], rtol=1e-6)
    np.testing.assert_allclose(out[:, 1], [0, 0, 0, 0, 5], atol=1e-6)


def test_texts_become_indicators_and_unseen_ones_are_others():
    table = pa.table({"job": ["nurse", "cook", "nurse", "pilot"], "age": [1.0, 2.0, 3.0, 4.0]})
    plan = json.loads(json.dumps(make_plan(table, np.array([0, 1, 2]))))
    assert feature_names(plan) == ["job=cook", "job=nurse", "job=(other)", "age"]
    assert encode(table, plan)[:, :3].tolist() == [[0, 1, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_an_identifier_and_a_changed_type_are_refused():
    names = pa.table({"id": [f"n{row}" for row in range(1001)]})
    with pytest.raises(DataError, match=r"column id holds 1,001 distinct texts.*stream\.drop: \[id\]"):
        make_plan(names, np.arange(1001))
    plan = make_plan(pa.table({"x": [1.0, 2.0]}), np.arange(2))
    with pytest.raises(DataError, match=r"column x held numbers when the run began and holds text now"):
        encode(pa.table({"x": ["a", "b"]}), plan)


def test_the_plan_is_finite_for_one_row():
    assert all(math.isfinite(entry["std"]) for entry in make_plan(pa.table({"x": [3.0]}), np.arange(1)))
