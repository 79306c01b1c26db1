import numpy as np
import pyarrow as pa
import pytest

from retain.data.encode import id_hashes, read_labels, relabelled
from retain.errors import ConfigError


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


def test_an_identifier_is_a_keyed_hash_of_what_it_says():
    """The same for 17 and 17.0; another key, another hash; a missing one is 0."""
    ids = id_hashes(pa.chunked_array([[17, None, 18, 17]]), 5)
    assert ids[0] == ids[3] != ids[2] and ids[1] == 0 and ids.dtype == np.int64
    assert id_hashes([17.0, "18"], 5).tolist() == ids[[0, 2]].tolist()
    assert id_hashes([17], 6)[0] != ids[0]
    many = id_hashes(pa.chunked_array([np.arange(100_000)]), -(2**63))
    assert len(np.unique(many)) == 100_000 and abs((many > 0).mean() - 0.5) < 0.01
