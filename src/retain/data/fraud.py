"""SIMULATED card transactions after the rules of the Fraud Detection Handbook (Le Borgne et al. 2022, chapter 3); no real data.

The handbook's rules: customers and terminals lie in a square; a customer pays at terminals within a radius of 5, a Poisson
number of times a day, around noon, amounts around a mean of its own. Three kinds of fraud: every amount above 220 (scenario 1);
all transactions of a terminal for 28 days (2); a third of a customer's transactions for 14 days, at 5 times the amount (3).

What differs, so that any size has the same shares and the mix of the three shifts from month to month:

- The number of rows is given; it is the handbook's process given its total. Fewer rows are a smaller square of the same density,
  with as many compromised terminals per 10,000 and customers per 5,000 as the handbook's.
- The daily numbers of compromised terminals and customers are multiplied by a weight per month, and a share of the month's
  transactions is drawn above 220 (`MIX`; `HANDBOOK` changes nothing).
- 37 days before the first month are simulated and left out, so that the first month's windows are full.
- An amount is multiplied by 5 once, also where two compromises of one customer overlap.

Windows look back only, and a terminal's frauds are known after a delay of 7 days. Amounts are summed in whole cents, so that
no value depends, not even by rounding, on rows that come later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

LABEL, DATE = "fraud", "date"
NO_FEATURES = (DATE, LABEL, "scenario", "customer")
"""Columns that the model never sees: `scenario` would give the label away."""

Mix = Sequence[tuple[float, float, float]]
HANDBOOK: Mix = ((0, 1, 1),)
MIX: Mix = ((8, 0.5, 0.5), (4, 2, 0.5), (1, 3, 1), (0.5, 2, 3), (1, 0.5, 5), (4, 0.5, 4))
"""Weights of scenarios 1, 2 and 3 in each month, from the first again after the last.

The first is how many transactions in 1,000 are drawn above 220 beside those that are anyway (some 6 in 10,000); the others
multiply the handbook's rates. Compromises last 28 and 14 days, so they reach into the next month.
"""

START = np.datetime64("2018-04-01")
DAY = 86_400
WINDOWS, DELAY = (1, 7, 30), 7
"""Days."""
WARM_UP = max(WINDOWS) + DELAY
RADIUS, LIMIT_CENTS = 5.0, 22_000
TERMINAL_DAYS, CUSTOMER_DAYS = 28, 14
_PER_DAY = 1.94
"""Transactions per customer and day: the mean of uniform(0, 4), and 3 in 100 fall outside of the day."""


@dataclass(frozen=True)
class Transactions:
    """Transactions in order of time; every field is [rows], int64.

    Attributes:
        second: since the first simulated day's midnight.
        customer: from 0.
        terminal: from 0.
        cents: the amount.
        scenario: of the fraud, 1 to 3; 0 is legitimate.
    """

    second: np.ndarray
    customer: np.ndarray
    terminal: np.ndarray
    cents: np.ndarray
    scenario: np.ndarray


def simulate(rows: int = 100_000, seed: int = 0, months: int = 6, mix: Mix = MIX) -> pa.Table:
    """Simulated transactions with the handbook's features, in order of time.

    Args:
        rows: how many.
        seed: of everything that is drawn.
        months: calendar months from April 2018 on.
        mix: weights of the scenarios in each month.

    Returns:
        Columns `date`, `amount`, `weekend`, `night`; per customer and window of d days `customer_count_{d}d` and
        `customer_amount_{d}d` (the mean); per terminal `terminal_count_{d}d` and `terminal_risk_{d}d` (the share of frauds);
        `fraud` (0 or 1), `scenario` and `customer`.

    Example:
        >>> simulate(rows=1000).select(["fraud", "scenario"]).num_rows
        1000
    """
    end = (START.astype("datetime64[M]") + months).astype("datetime64[D]")
    days = int((end - START).astype(np.int64))
    first = START - WARM_UP
    found = transactions(rows, days, np.random.default_rng(seed), mix)
    date = first.astype("datetime64[s]") + found.second
    weekday = (date.astype("datetime64[D]").astype(np.int64) + 3) % 7  # 1 January 1970 was a Thursday
    columns = {
        DATE: date,
        "amount": found.cents / 100,
        "weekend": (weekday >= 5).astype(np.int64),
        "night": (found.second % DAY // 3600 <= 6).astype(np.int64),
        **windows(found),
        LABEL: (found.scenario > 0).astype(np.int64),
        "scenario": found.scenario,
        "customer": found.customer,
    }
    kept = found.second >= WARM_UP * DAY
    return pa.table({name: column[kept] for name, column in columns.items()})


def transactions(rows: int, days: int, draw: np.random.Generator, mix: Mix = MIX) -> Transactions:
    """The simulation: `rows` transactions on `days` days from `START` on, and as many per day in the `WARM_UP` days before."""
    customers = max(10, round(rows / (days * _PER_DAY)))
    terminals = 2 * customers
    available, starts = _terminals_near(customers, terminals, draw)
    mean_cents, busy = draw.uniform(500, 10_000, customers), draw.uniform(0, 4, customers)

    early = round(rows * WARM_UP / days)
    customer = draw.choice(customers, rows + early, p=busy / busy.sum())
    day = np.concatenate([draw.integers(0, WARM_UP, early), draw.integers(WARM_UP, WARM_UP + days, rows)])
    time = draw.normal(DAY / 2, 20_000, len(day)).astype(np.int64)
    while len(outside := np.flatnonzero((time <= 0) | (time >= DAY))):
        time[outside] = draw.normal(DAY / 2, 20_000, len(outside)).astype(np.int64)
    second = day * DAY + time
    order = np.argsort(second, kind="stable")
    second, customer = second[order], customer[order]
    near = np.diff(starts)[customer]
    terminal = available[starts[customer] + draw.integers(0, near)]

    mean = mean_cents[customer]
    amount = draw.normal(mean, mean / 2)
    cents = np.rint(np.where(amount < 0, draw.uniform(0, 2 * mean), amount)).astype(np.int64)

    weights = _daily_weights(days, mix)
    large = draw.random(len(cents)) < weights[second // DAY, 0] / 1000
    cents[large] = draw.integers(LIMIT_CENTS + 1, 2 * LIMIT_CENTS + 1, int(large.sum()))
    scenario = (cents > LIMIT_CENTS).astype(np.int64)
    for at in _compromised(terminal, second, terminals, weights[:, 1] * 2 / 10_000, TERMINAL_DAYS, draw):
        scenario[at] = 2
    for at in _compromised(customer, second, customers, weights[:, 2] * 3 / 5_000, CUSTOMER_DAYS, draw):
        chosen = draw.choice(at, len(at) // 3, replace=False)
        cents[chosen[scenario[chosen] != 3]] *= 5
        scenario[chosen] = 3
    return Transactions(second, customer, terminal, cents, scenario)


def windows(found: Transactions) -> dict[str, np.ndarray]:
    """The window features of every row, by name.

    A customer's windows are (t - days, t] and end with the row itself; where a customer pays twice in one second, with the
    earlier row first. A terminal's are (t - DELAY - days, t - DELAY]; its risk is 0 where it had no transaction.
    """
    columns = {}
    reach = (max(WINDOWS) + DELAY) * DAY
    order, keys = _timeline(found.customer, found.second, reach)
    spent, stop = _sums(found.cents[order]), np.arange(1, len(order) + 1)
    for days in WINDOWS:
        start = np.searchsorted(keys, keys - days * DAY, "right")
        columns[f"customer_count_{days}d"] = _back(stop - start, order)
        columns[f"customer_amount_{days}d"] = _back((spent[stop] - spent[start]) / (100 * (stop - start)), order)
    order, keys = _timeline(found.terminal, found.second, reach)
    frauds, stop = _sums(found.scenario[order] > 0), np.searchsorted(keys, keys - DELAY * DAY, "right")
    for days in WINDOWS:
        start = np.searchsorted(keys, keys - (DELAY + days) * DAY, "right")
        columns[f"terminal_count_{days}d"] = _back(stop - start, order)
        columns[f"terminal_risk_{days}d"] = _back((frauds[stop] - frauds[start]) / np.maximum(stop - start, 1), order)
    return columns


def _terminals_near(customers: int, terminals: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The terminals within each customer's radius, the nearest at least; those of customer c from starts[c] to starts[c + 1]."""
    side = 100 * np.sqrt(terminals / 10_000)
    homes, places = draw.uniform(0, side, (customers, 2)), draw.uniform(0, side, (terminals, 2))
    found, counts = [], []
    for block in np.array_split(homes, -(-customers // 256)):  # 256 x 10,000 distances at once at most
        distance = np.hypot(block[:, None, 0] - places[:, 0], block[:, None, 1] - places[:, 1])
        near = distance <= np.maximum(RADIUS, distance.min(axis=1, keepdims=True))
        found.append(np.nonzero(near)[1])
        counts.append(near.sum(axis=1))
    return np.concatenate(found), np.concatenate([[0], np.cumsum(np.concatenate(counts))])


def _daily_weights(days: int, mix: Mix) -> np.ndarray:
    """The weights of the scenarios on each day, [WARM_UP + days, 3]; before the first month those of the first."""
    months = (START + np.arange(days)).astype("datetime64[M]").astype(np.int64)
    months = np.concatenate([np.repeat(months[0], WARM_UP), months])
    return np.array(mix, dtype=np.float64)[(months - months[0]) % len(mix)]


def _compromised(
    group: np.ndarray, second: np.ndarray, groups: int, rate: np.ndarray, lasts: int, draw: np.random.Generator
) -> list[np.ndarray]:
    """The rows of every compromise: each day some terminals (or customers) are drawn, for `lasts` days from that one on.

    Args:
        group: the terminal or customer of each row.
        second: the time of each row, ascending.
        groups: how many there are.
        rate: the share of them that is drawn on each day; fractions of one add up over days.
        lasts: days.
        draw: the generator.
    """
    order, keys = _timeline(group, second, 0)
    total = np.floor(np.cumsum(rate * groups) + 1e-9).astype(np.int64)
    found = []
    for day, count in enumerate(np.diff(total, prepend=0)):
        drawn = draw.choice(groups, min(int(count), groups), replace=False)
        base = drawn * _stride(second, 0)
        until = np.minimum((day + lasts) * DAY, _stride(second, 0))
        start, stop = np.searchsorted(keys, base + day * DAY), np.searchsorted(keys, base + until)
        found += [order[a:b] for a, b in zip(start, stop, strict=True)]
    return found


def _stride(second: np.ndarray, reach: int) -> int:
    return int(second.max()) + reach + 1


def _timeline(group: np.ndarray, second: np.ndarray, reach: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows ordered by group, then time, and one ascending number for both; times up to `reach` seconds back stay in the group."""
    keys = group * _stride(second, reach) + second
    order = np.argsort(keys, kind="stable")
    return order, keys[order]


def _sums(values: np.ndarray) -> np.ndarray:
    """Sums of the first 0, 1, 2 ... values, as whole numbers."""
    return np.concatenate([[0], np.cumsum(values, dtype=np.int64)])


def _back(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Values of ordered rows, put back into the order of the rows."""
    result = np.empty_like(values)
    result[order] = values
    return result
