from dataclasses import fields
from unittest import mock

import numpy as np
import pytest

from retain.data import fraud
from retain.data.fraud import DAY, DELAY, HANDBOOK, WARM_UP, WINDOWS, Transactions
from retain.data.scenarios import build_stream
from retain.errors import RetainError
from retain.spec import RunSpec
from retain.training import loop

OFTEN = ((20, 60, 60),)
"""Weights that give a small simulation frauds of every kind."""


def simulated(rows=3000, days=60, seed=0, mix=OFTEN):
    return fraud.transactions(rows, days, np.random.default_rng(seed), mix)


def build(rows=3000, **keys):
    return build_stream(RunSpec.parse({"stream": {"builtin": "fraud", "fraud": {"rows": rows}, **keys}}))


def made_up(rows, seed=0, seconds=60 * DAY):
    """Few customers and terminals, so that windows hold several rows; times tie, also at the edges of windows."""
    draw = np.random.default_rng(seed)
    second = np.sort(draw.integers(0, seconds // (DAY // 4), rows) * (DAY // 4))
    ids = draw.integers(0, 4, (2, rows))
    return Transactions(second, ids[0], ids[1], draw.integers(0, 50_000, rows), draw.integers(0, 4, rows))


def slow_windows(rows):
    """The same features as loops over (time, customer, terminal, amount, fraud)."""
    columns = {}
    for days in WINDOWS:
        names = (f"customer_count_{days}d", f"customer_amount_{days}d", f"terminal_count_{days}d", f"terminal_risk_{days}d")
        lists = [columns.setdefault(name, []) for name in names]
        for place, (now, customer, terminal, _, _) in enumerate(rows):
            spent = [amount for t, c, _, amount, _ in rows[: place + 1] if c == customer and now - days * DAY < t <= now]
            end = now - DELAY * DAY
            known = [bad for t, _, other, _, bad in rows if other == terminal and end - days * DAY < t <= end]
            values = len(spent), sum(spent) / len(spent), len(known), sum(known) / len(known) if known else 0
            for column, value in zip(lists, values, strict=True):
                column.append(value)
    return columns


@pytest.mark.parametrize("found", [made_up(400), simulated(300, 30)], ids=["ties", "simulated"])
def test_window_features_match_loops_over_the_rows(found):
    rows = list(
        zip(
            *(found.second.tolist(), found.customer.tolist(), found.terminal.tolist(), (found.cents / 100).tolist()),
            (found.scenario > 0).tolist(),
            strict=True,
        )
    )
    expected, actual = slow_windows(rows), fraud.windows(found)
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, rtol=1e-12, atol=0, err_msg=name)
    assert max(expected["terminal_risk_7d"]) > 0


@pytest.mark.parametrize("now", [1, 150, 399])
def test_no_feature_depends_on_a_later_row(now):
    """Later rows are other rows, more or fewer: what came before is the same, bit by bit."""
    found, other = made_up(400), made_up(400, seed=1, seconds=90 * DAY)
    later = other.second >= found.second[now - 1]
    changed = Transactions(
        *(np.concatenate([getattr(found, f.name)[:now], getattr(other, f.name)[later]]) for f in fields(Transactions))
    )
    before, after = fraud.windows(found), fraud.windows(changed)
    assert len(changed.second) != len(found.second)
    assert all(np.array_equal(before[name][:now], after[name][:now]) for name in before)


def test_a_terminals_frauds_are_unknown_for_seven_days():
    found = Transactions(
        *(np.array(values) for values in ([0, DELAY * DAY - 1, DELAY * DAY], [0, 1, 2], [0] * 3, [100] * 3, [2, 0, 0]))
    )
    columns = fraud.windows(found)
    assert columns["terminal_risk_1d"].tolist() == [0, 0, 1] and columns["terminal_count_30d"].tolist() == [0, 0, 1]


# --- the rules --------------------------------------------------------------------------------------------------------


def test_every_amount_above_220_is_fraud_and_scenario_1_is_nothing_else():
    found = simulated(mix=((20, 0, 0),))
    assert np.array_equal(found.scenario, (found.cents > 22_000).astype(int)) and 0.01 < found.scenario.mean() < 0.04
    mixed = simulated()
    assert (mixed.cents[mixed.scenario == 1] > 22_000).all() and (mixed.scenario[mixed.cents > 22_000] > 0).all()


def test_all_transactions_of_a_compromised_terminal_are_fraud_for_28_days():
    """Every row of the terminal between a compromise's first and last row, and no other row, beside amounts above 220."""
    given = []

    def recorded(*args):
        given.append((args[-2], real(*args)))
        return given[-1][1]

    real = fraud._compromised
    with mock.patch.object(fraud, "_compromised", recorded):
        found = simulated(mix=((0, 60, 0),))
    (lasts, groups), (_, customers) = given
    assert lasts == 28 and not customers and not (found.scenario == 3).any()
    day, expected = found.second // DAY, found.scenario == 1
    for rows in filter(len, groups):
        terminal, begin, end = found.terminal[rows[0]], day[rows].min(), day[rows].max()
        assert end - begin < 28
        expected |= (found.terminal == terminal) & (begin <= day) & (day <= end)
    frauds = found.scenario > 0
    assert np.array_equal(frauds, expected) and (found.scenario == 2).sum() > 100


def test_a_compromise_begins_on_its_day_and_ends_after_its_last():
    """One row a day on one terminal; it is drawn on day 3 only."""
    second, group = np.arange(50) * DAY + 60, np.zeros(50, dtype=int)
    rate = np.zeros(50)
    rate[3] = 1
    (rows,) = fraud._compromised(group, second, 1, rate, 28, np.random.default_rng(0))
    assert rows.tolist() == list(range(3, 31))
    rate[3], rate[45] = 0, 1  # the last days are cut off by the end
    (rows,) = fraud._compromised(group, second, 1, rate, 28, np.random.default_rng(0))
    assert rows.tolist() == list(range(45, 50))


def test_a_third_of_a_compromised_customers_amounts_are_five_times_as_high():
    """The same draws without compromises are the amounts from before."""
    with mock.patch.object(fraud, "_compromised", return_value=[]):
        before = simulated(mix=((0, 0, 60),))
    with mock.patch.object(fraud, "_compromised", side_effect=[[], [np.arange(10, 41), np.arange(30, 61)]]):
        after = simulated(mix=((0, 0, 60),))
    assert np.array_equal(before.second, after.second)
    hit = after.scenario == 3
    assert hit[10:41].sum() >= 10 and hit.sum() <= 20 and not hit[:10].any() and not hit[61:].any()
    assert np.array_equal(after.cents, np.where(hit, 5 * before.cents, before.cents))
    assert np.array_equal(after.scenario[~hit], before.scenario[~hit])


def test_customers_pay_within_their_radius_as_often_and_as_much_as_the_handbook_says():
    found = simulated(60_000, 183, mix=HANDBOOK)
    late = found.second >= WARM_UP * DAY
    assert late.sum() == 60_000 and (np.diff(found.second) >= 0).all()
    assert found.second.max() < (WARM_UP + 183) * DAY and (found.second % DAY).min() > 0
    assert abs((found.second % DAY).mean() / DAY - 0.5) < 0.005
    customers = found.customer.max() + 1
    assert abs(60_000 / customers / 183 - 1.94) < 0.05
    honest = found.cents[found.scenario == 0] / 100
    assert honest.min() >= 0 and abs(honest.mean() - 54) < 3  # of 52.5, less the negative amounts
    terminals_of_one = [len(set(found.terminal[found.customer == one])) for one in range(customers)]
    assert np.median(terminals_of_one) < 80 < found.terminal.max()  # 78 in a radius of 5


def test_small_and_large_simulations_have_the_handbooks_shares_of_fraud():
    """1,754,155 rows of the handbook's own data have 978, 9,099 and 4,604 (its first month is half empty of them)."""
    table = fraud.simulate(rows=300_000, mix=HANDBOOK)
    shares = np.bincount(table["scenario"].to_numpy(), minlength=4)[1:] / 300_000
    np.testing.assert_allclose(shares, np.array([978, 9099, 4604]) / 1_754_155, rtol=0.3)


def test_the_mix_shifts_from_month_to_month():
    table = fraud.simulate(rows=100_000)
    months, scenario = table["date"].to_numpy().astype("datetime64[M]"), table["scenario"].to_numpy()
    prevails = [np.bincount(scenario[months == month], minlength=4)[1:].argmax() + 1 for month in np.unique(months)]
    assert prevails == [1, 2, 2, 2, 3, 3]


# --- the stream -------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_rows_and_the_training_seed_changes_none():
    one, again, other = (fraud.simulate(rows=2000, seed=seed) for seed in (1, 1, 2))
    assert one.equals(again) and not one.equals(other) and one.num_rows == 2000
    rows, stream = [], {"builtin": "fraud", "fraud": {"rows": 2000, "months": 2, "seed": 3}}
    for seed in (0, 1):
        with mock.patch.object(fraud, "simulate", wraps=fraud.simulate) as spied:
            build_stream(RunSpec.parse({"stream": stream, "training_params": {"seed": seed}}))
        rows.append(spied.call_args)
    assert rows[0] == rows[1] == mock.call(rows=2000, months=2, seed=3)


def test_without_a_split_every_month_is_a_task():
    stream = build()
    assert [task.name for task in stream.tasks] == [f"2018-0{month}" for month in range(4, 10)]
    assert stream.classes == ["0", "1"] and stream.scenario == "domain-incremental"
    assert sum(len(part.targets) for task in stream.tasks for part in (task.train, task.test)) == 3000
    assert len(stream.features) == 15 and not {"date", "fraud", "scenario"} & set(stream.features)
    assert any("simulated" in note for note in stream.notes)


def test_scenarios_can_be_the_tasks_and_no_column_gives_the_label_away():
    stream = build(20_000, split={"by": "column", "column": "scenario", "order": [1, 3, 2], "shared": [0]})
    assert [task.name for task in stream.tasks] == ["1", "3", "2"] and len(stream.features) == 15
    assert not {"fraud", "scenario"} & set(build(label="scenario", split={"by": "none"}).features)
    with pytest.raises(RetainError, match=r"stream.features: scenario"):
        build(features=["amount", "scenario"])
    assert build(features=["amount"]).features == ["amount"]


def test_a_run_learns_the_months_and_goes_on(tmp_path):
    values = {
        "stream": {"builtin": "fraud", "fraud": {"rows": 4000}, "metric": "average_precision", "id": "customer"},
        "model": {"mlp": {"hidden": [8]}},
        "training_params": {"max_steps": 3, "device": "cpu", "regularization": {"replay_ratio": 0.5, "replay_capacity": 100}},
    }
    first = loop.train(RunSpec.parse(values), tmp_path / "run")
    assert len(first["tasks"]) == 6
    assert loop.train(RunSpec.parse(values), tmp_path / "run") == first
