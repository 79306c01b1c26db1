import gc
import weakref
from collections import Counter
from itertools import pairwise

import pytest
import torch
from scipy import stats

from retain.errors import ConfigError
from retain.forgetting import buffer as store
from retain.params import derive, pack, unpack_

P_VALUE = 1e-4
"""A correct sampler fails a chi-square test this rarely; the keys are fixed, so the outcome is too."""


def stream_(held, labels, key=0, batch=7):
    """Insert rows that hold their own number, a batch at a time."""
    labels = torch.as_tensor(labels)
    for number, rows in enumerate(torch.arange(len(labels)).split(batch)):
        store.insert_(held, {"row": rows, "y": labels[rows]}, labels[rows], derive(key, number))
    return held


def stored(held, name="row"):
    return store.fetch(held, torch.arange(held.filled))[name].tolist()


def counts(held):
    return dict(Counter(stored(held, "y")))


def p_value(observed, expected):
    return stats.chisquare(observed, expected).pvalue


def check_lists(held):
    """Every filled slot is in the list of its own class, once, and the lists do not overlap."""
    labels, found = stored(held, "y"), []
    spans = sorted((group["start"], group["start"] + group["room"]) for group in held.classes.values())
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    assert spans[-1][1] <= len(held.members)
    for name, group in held.classes.items():
        assert group["stored"] <= group["room"]
        slots = held.members[group["start"] : group["start"] + group["stored"]].tolist()
        assert all(labels[slot] == int(name) for slot in slots)
        found += slots
    assert sorted(found) == list(range(held.filled))


# --- policies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 7, 40])
def test_a_reservoir_keeps_every_row_with_the_same_probability(batch):
    """In any slicing: also where several rows of one batch meet in a slot."""
    capacity, rows, streams = 5, 40, 2400
    seen = Counter()
    for key in range(streams):
        kept = stored(stream_(store.empty(capacity, "reservoir"), [0] * rows, key, batch))
        assert len(set(kept)) == capacity
        seen.update(kept)
    # Sampling without replacement has less variance than a multinomial: scale to the exact one.
    expected = streams * capacity / rows
    statistic = sum((seen[row] - expected) ** 2 for row in range(rows)) / (expected * (1 - capacity / rows)) * (rows - 1) / rows
    assert stats.chi2.sf(statistic, rows - 1) > P_VALUE
    assert stats.chi2.cdf(statistic, rows - 1) > P_VALUE


def test_pairs_of_rows_are_kept_together_as_often_as_in_a_uniform_subset():
    """All C(6, 2) subsets are equally likely: more than equal marginals."""
    seen = Counter(tuple(sorted(stored(stream_(store.empty(2, "reservoir"), [0] * 6, key, 4)))) for key in range(3000))
    assert len(seen) == 15
    assert p_value(list(seen.values()), [200] * 15) > P_VALUE


def test_a_ring_holds_the_latest_rows_and_overwrites_the_oldest():
    held = stream_(store.empty(10, "ring"), [0] * 7, batch=7)
    assert stored(held) == [0, 1, 2, 3, 4, 5, 6]
    held = stream_(store.empty(10, "ring"), [0] * 23, batch=7)
    assert stored(held) == [20, 21, 22, 13, 14, 15, 16, 17, 18, 19]
    assert sorted(stored(stream_(store.empty(10, "ring"), [0] * 64, batch=64))) == list(range(54, 64))


def test_one_class_uses_the_whole_capacity_until_others_come():
    assert counts(stream_(store.empty(100), [3] * 500)) == {3: 100}
    assert counts(stream_(store.empty(100), [3] * 500 + [4] * 20)) == {3: 80, 4: 20}
    assert counts(stream_(store.empty(100), [3] * 500 + [4] * 500)) == {3: 50, 4: 50}
    assert counts(stream_(store.empty(100), [3] * 500 + [4] * 10 + [5] * 500)) == {3: 45, 4: 10, 5: 45}


@pytest.mark.parametrize("seed", range(4))
def test_every_class_keeps_its_rows_or_its_share_after_every_batch(seed):
    """min(rows seen, capacity // classes) of each class, and no free slot while there are rows."""
    made = torch.Generator().manual_seed(seed)
    weights = torch.rand(12, generator=made) ** 4
    labels = torch.cat([torch.multinomial(weights[: k + 1], 60, replacement=True, generator=made) for k in range(12)])
    held, seen = store.empty(90), Counter()
    for number, rows in enumerate(torch.arange(len(labels)).split(9)):
        store.insert_(held, {"row": rows, "y": labels[rows]}, labels[rows], number)
        seen.update(labels[rows].tolist())
        kept, share = counts(held), 90 // len(seen)
        assert sum(kept.values()) == held.filled == min(90, sum(seen.values()))
        assert all(kept[label] >= min(count, share) for label, count in seen.items())
        assert len(set(stored(held))) == held.filled
        check_lists(held)


def test_fifty_rows_of_every_class_are_kept_wherever_they_fit():
    made = torch.Generator().manual_seed(1)
    common = torch.randint(39, (8000,), generator=made)
    held = stream_(store.empty(2000), torch.cat([common, torch.full((60,), 39), common]), batch=64)
    assert min(counts(held).values()) >= 50 and len(counts(held)) == 40
    assert store.fair_share(held, len(held.classes)) is None


def test_more_classes_than_fifty_each_get_a_stated_fair_share():
    held = stream_(store.empty(100), torch.arange(8).repeat(60), batch=16)
    assert all(12 <= count <= 13 for count in counts(held).values()) and held.filled == 100
    finding = store.fair_share(held, 8)
    assert "12 of each of 8 classes" in finding.seen and "capacity=400" in finding.remedy
    assert counts(stream_(store.empty(8), torch.arange(8).repeat(60), batch=16)) == dict.fromkeys(range(8), 1)


def test_more_classes_than_rows_is_an_error_that_names_both_and_changes_nothing():
    held = stream_(store.empty(4), [0, 1, 2, 3, 0])
    before = pack(held)[1], stored(held)
    with pytest.raises(ConfigError, match=r"5 classes .* capacity=4"):
        stream_(held, [3, 4])
    assert (pack(held)[1], stored(held)) == before


def test_a_rare_class_of_one_in_five_hundred_is_kept():
    labels = (torch.arange(50_000) % 500 == 499).long()
    held = stream_(store.empty(200), labels, batch=128)
    assert counts(held) == {0: 100, 1: 100}
    assert counts(stream_(store.empty(200), labels[:20_000], batch=128)) == {0: 160, 1: 40}


@pytest.mark.parametrize("batch", [1, 5, 60])
def test_the_stored_rows_of_a_class_are_a_uniform_sample_of_its_rows(batch):
    """Through growth, eviction (class 0 shrinks from 8 to 3 rows) and replacement."""
    labels = torch.tensor([0] * 12 + [1, 0] * 8 + [2, 1, 0] * 10 + [2, 2])
    seen, streams = Counter(), 2400
    for key in range(streams):
        held = stream_(store.empty(8), labels, key, batch)
        seen.update(stored(held))
    assert sum(counts(held).values()) == 8
    for label in range(3):
        rows = (labels == label).nonzero().flatten().tolist()
        observed = [seen[row] for row in rows]
        kept = sum(observed) / streams
        assert kept == counts(held)[label]
        expected = streams * kept / len(rows)
        statistic = sum((n - expected) ** 2 for n in observed) / (expected * (1 - kept / len(rows))) * (len(rows) - 1) / len(rows)
        assert stats.chi2.sf(statistic, len(rows) - 1) > P_VALUE


@pytest.mark.parametrize("policy", ["reservoir", "ring"])
def test_the_lists_of_classes_follow_whatever_is_overwritten(policy):
    made = torch.Generator().manual_seed(2)
    for capacity, classes in ((1, 3), (30, 4), (50, 200)):
        held = store.empty(capacity, policy, by_class=True)
        for number in range(60):
            labels = torch.randint(classes, (11,), generator=made)
            store.insert_(held, {"row": torch.arange(11), "y": labels}, labels, number)
            check_lists(held)


def test_same_calls_give_the_same_buffer_whatever_was_drawn_in_between():
    labels = torch.arange(5).repeat(100)
    for policy in store.POLICIES:
        first, second = stream_(store.empty(40, policy), labels), store.empty(40, policy)
        torch.manual_seed(3)
        stream_(second, labels)
        assert stored(first) == stored(second)
    assert stored(stream_(store.empty(40), labels, 1)) != stored(stream_(store.empty(40), labels, 2))


# --- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", store.POLICIES)
def test_only_filled_slots_are_drawn(policy):
    held = stream_(store.empty(100, policy, by_class=True), [0, 1, 1, 2, 2] * 5)
    for draw in (store.draw, store.draw_balanced):
        slots = torch.cat([draw(held, 10, key) for key in range(100)])
        assert slots.dtype == torch.int64
        assert set(slots.tolist()) == set(range(25))
        assert set(store.fetch(held, slots)["row"].tolist()) == set(range(25))


def test_uniform_draws_are_uniform():
    held = stream_(store.empty(20, "ring"), [0] * 33)
    drawn = Counter(torch.cat([store.draw(held, 32, derive(key)) for key in range(500)]).tolist())
    assert p_value([drawn[slot] for slot in range(20)], [800] * 20) > P_VALUE


@pytest.mark.parametrize("policy", store.POLICIES)
def test_balanced_draws_take_a_class_uniformly_then_a_row_within_it(policy):
    """On counts as unequal as 1 to 20."""
    held = stream_(store.empty(30, policy, by_class=True), [0] * 20 + [1] * 9 + [2])
    drawn = Counter(torch.cat([store.draw_balanced(held, 32, derive(key)) for key in range(500)]).tolist())
    shares = {0: 1 / 60, 1: 1 / 27, 2: 1 / 3}
    expected = [16_000 * shares[label] for label in stored(held, "y")]
    assert p_value([drawn[slot] for slot in range(30)], expected) > P_VALUE


def test_classes_that_left_a_ring_are_not_drawn():
    held = stream_(store.empty(10, "ring", by_class=True), [0] * 10 + [1] * 10)
    assert set(stored(held, "y")) == {1}
    drawn = Counter(torch.cat([store.draw_balanced(held, 32, derive(key)) for key in range(100)]).tolist())
    assert p_value([drawn[slot] for slot in range(10)], [320] * 10) > P_VALUE


def test_draws_need_rows_and_balanced_draws_need_classes():
    with pytest.raises(ValueError, match="empty"):
        store.draw(store.empty(5), 1, 0)
    with pytest.raises(ValueError, match="by_class"):
        store.draw_balanced(stream_(store.empty(5, "ring"), [0]), 1, 0)


# --- what is stored ---------------------------------------------------------------------------------------------------


def make_columns(rows, made):
    return {
        "inputs": {
            "ids": torch.randint(2**62, (rows, 3), generator=made),
            "image": torch.randint(256, (rows, 2, 4, 4), generator=made, dtype=torch.uint8),
            "half": torch.randn(rows, 2, generator=made).bfloat16(),
            "deep": {"mask": torch.rand(rows, 5, generator=made) < 0.5},
        },
        "tokens": [torch.randint(-(2**40), 2**40, (int(n),), generator=made) for n in torch.randint(9, (rows,), generator=made)],
        "frames": [torch.randn(int(n), 2, generator=made) for n in torch.randint(1, 6, (rows,), generator=made)],
        "row": torch.arange(rows),
    }


@pytest.mark.parametrize("policy", store.POLICIES)
def test_rows_come_back_bit_identical_in_their_own_dtypes(policy):
    """Nested fields and variable lengths too; longer rows come later and widen the slab."""
    made = torch.Generator().manual_seed(0)
    columns, labels = make_columns(60, made), torch.arange(60) % 3
    columns["tokens"][41] = torch.arange(50)
    held = store.empty(25, policy)
    for rows in torch.arange(60).split(8):
        part = _take(columns, rows.tolist())
        store.insert_(held, part, labels[rows], derive(int(rows[0])))
    slots = torch.tensor([3, 24, 0, 3])
    back = store.fetch(held, slots)
    _assert_same(back, _take(columns, back["row"].tolist()))
    back = store.fetch(held, torch.arange(25))
    _assert_same(back, _take(columns, back["row"].tolist()))


def _take(columns, rows):
    if isinstance(columns, dict):
        return {name: _take(value, rows) for name, value in columns.items()}
    return columns[rows] if isinstance(columns, torch.Tensor) else [columns[row] for row in rows]


def _assert_same(found, expected):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            _assert_same(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_same(one, other)
    else:
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_rows_that_do_not_fit_are_refused_by_name():
    held = store.empty(5)
    labels = torch.zeros(2, dtype=torch.int64)
    store.insert_(held, {"a": {"x": torch.zeros(2, 3)}}, labels, 0)
    for columns, said in (
        ({"a": {"x": torch.zeros(2, 4)}}, r"a\.x: .*\(4,\)"),
        ({"a": {"x": torch.zeros(2, 3).double()}}, r"a\.x: .*float64"),
        ({"a": {"x": torch.zeros(3, 3)}}, r"a\.x: 3 rows"),
        ({"a": {"y": torch.zeros(2, 3)}}, r"stores \['x'\]"),
    ):
        with pytest.raises(ValueError, match=said):
            store.insert_(held, columns, labels, 0)
    with pytest.raises(ValueError, match="class id for each row"):
        store.insert_(held, {"a": {"x": torch.zeros(2, 3)}}, torch.zeros(2, 4), 0)
    assert held.seen == held.filled == 2


def test_a_stored_row_keeps_nothing_of_the_data_set_alive():
    data = torch.randn(5000, 64)
    ragged = [torch.arange(100)[:7] for _ in range(5000)]
    held = store.empty(20, "reservoir")
    labels = torch.zeros(5000, dtype=torch.int64)
    for rows in torch.arange(5000).split(500):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        store.insert_(held, {"x": data[part], "t": ragged[part]}, labels[part], derive(part.start))
    gone = weakref.ref(data), weakref.ref(ragged[0]), weakref.ref(data.untyped_storage())
    del data, ragged, labels
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]
    assert store.nbytes(held) == 20 * (64 * 4 + 7 * 8 + 4)


def test_gradients_are_not_stored():
    held = store.empty(4, "ring")
    x = torch.randn(3, 2, requires_grad=True)
    store.insert_(held, {"x": x * 2, "t": list(x * 2)}, torch.zeros(3), 0)
    back = store.fetch(held, torch.arange(3))
    assert not back["x"].requires_grad and not back["t"][0].requires_grad


@pytest.mark.parametrize("policy", store.POLICIES)
@pytest.mark.parametrize("capacity", [200, 2000, 40_000])
def test_all_memory_is_taken_at_once_and_is_the_rows_plus_five_percent(policy, capacity):
    """With ten classes, and with as many classes as a class-balanced buffer has rows."""
    for classes in (10, capacity):
        held = store.empty(capacity, policy, by_class=classes == 10)
        assert store.nbytes(held) == 0
        labels = torch.arange(capacity + 64) % classes
        columns = {"x": torch.zeros(len(labels), 64), "y": labels}
        first = {name: value[:32] for name, value in columns.items()}
        store.insert_(held, first, labels[:32], 0)
        at_once = store.nbytes(held)
        store.insert_(held, columns, labels, 1)
        assert capacity * 264 <= at_once <= store.nbytes(held) <= capacity * 264 * 1.05
        if classes == 10:
            assert store.nbytes(held) == at_once


@pytest.mark.parametrize("policy", store.POLICIES)
@pytest.mark.parametrize("first", [0, 10, 300])
def test_a_packed_buffer_goes_on_bit_identically(policy, first):
    """Empty, partly filled and full."""
    labels = torch.arange(8).repeat(80)
    held = stream_(store.empty(50, policy, by_class=True), labels[:first], 1)
    twin = store.empty(50, policy, by_class=True)
    unpack_(twin, *pack(held))
    for each in (held, twin):
        stream_(each, labels, 2)
    (tensors, tree), (other_tensors, other_tree) = pack(held), pack(twin)
    assert tree == other_tree
    assert tensors.keys() == other_tensors.keys()
    assert all(torch.equal(tensors[name], other_tensors[name]) for name in tensors)
    assert torch.equal(store.draw_balanced(held, 40, 9), store.draw_balanced(twin, 40, 9))


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="capacity=0"):
        store.empty(0)
    with pytest.raises(ConfigError, match="'fifo'"):
        store.empty(5, "fifo")


# --- removal ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", store.POLICIES)
@pytest.mark.parametrize("rows", [30, 400])
def test_removed_rows_are_gone_and_the_others_stay(policy, rows):
    labels = torch.arange(rows) % 5
    held = stream_(store.empty(60, policy, by_class=True), labels)
    before = stored(held)
    gone = torch.tensor([row % 3 == 0 for row in before])
    store.remove_(held, gone)
    assert sorted(stored(held)) == sorted(row for row in before if row % 3)
    assert all(column[held.filled :].eq(0).all() for column in held.columns.values())
    check_lists(held)
    store.remove_(held, torch.zeros(held.filled, dtype=torch.bool))
    assert held.filled == sum(row % 3 != 0 for row in before)
    tensors, tree = pack(held)
    again = store.empty(60, policy, by_class=True)
    unpack_(again, tensors, tree)
    assert stored(again) == stored(held)


@pytest.mark.parametrize("policy", store.POLICIES)
def test_rows_that_come_later_take_the_room(policy):
    held = stream_(store.empty(60, policy, by_class=True), torch.arange(400) % 5)
    store.remove_(held, torch.arange(60) % 4 == 0)
    assert held.filled == 45
    for number in range(400, 1200, 8):
        rows = torch.arange(number, number + 8)
        store.insert_(held, {"row": rows, "y": rows % 5}, rows % 5, number)
        check_lists(held)
    assert 50 < held.filled == len(set(stored(held)))  # a row that draws a free slot takes it, so the last ones wait long


def test_a_ring_forgets_the_oldest_first_after_a_removal():
    held = stream_(store.empty(10, "ring"), [0] * 23, batch=7)  # 13 to 22, the oldest in slot 3
    store.remove_(held, torch.tensor([row in (14, 21) for row in stored(held)]))
    assert stored(held) == [13, 15, 16, 17, 18, 19, 20, 22]
    store.insert_(held, {"row": torch.arange(23, 26), "y": torch.zeros(3).long()}, torch.zeros(3).long(), 0)
    assert sorted(stored(held)) == [15, 16, 17, 18, 19, 20, 22, 23, 24, 25]


def test_after_a_removal_a_reservoir_is_still_a_sample_of_all_rows():
    """Half of 400 rows removed, 200 more: each of those left and of the new ones is stored about as often."""
    seen, streams = Counter(), 400
    for key in range(streams):
        held = stream_(store.empty(40, "reservoir"), [0] * 400, key)
        store.remove_(held, torch.tensor([row % 2 == 0 for row in stored(held)]))
        assert held.seen == pytest.approx(400 * held.filled / 40, abs=1)
        for number, rows in enumerate(torch.arange(400, 600).split(7)):
            store.insert_(held, {"row": rows, "y": rows * 0}, rows * 0, derive(key, "later", number))
        seen.update("old" if row < 400 else "new" for row in stored(held))
    # 40 slots for 200 old and 200 new rows: the free half goes to new ones first, so they are between half and three quarters
    assert 0.5 < seen["new"] / (seen["old"] + seen["new"]) < 0.75


def test_a_class_or_a_buffer_may_become_empty():
    held = stream_(store.empty(20), [0] * 50 + [1] * 50)
    store.remove_(held, torch.tensor([label == 0 for label in stored(held, "y")]))
    assert counts(held) == {1: 10}
    store.draw_balanced(held, 5, 0)
    stream_(held, [0] * 30, key=9)
    assert counts(held) == {0: 10, 1: 10}
    store.remove_(held, torch.ones(20, dtype=torch.bool))
    assert (held.filled, held.seen, held.columns, held.classes) == (0, 0, {}, {})
    stream_(held, [2] * 30)
    assert counts(held) == {2: 20}
