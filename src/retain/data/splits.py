"""How rows become tasks: which rows each task has, by class, column, time or part; and which rows of a task are held out."""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
import torch

from retain.data.encode import Labels, shortened
from retain.data.sources import TEST, TRAIN, VALIDATION
from retain.errors import ConfigError, DataError
from retain.params import derive, generator
from retain.spec import SplitSpec


class Cut(NamedTuple):
    """The rows of one task, ascending; none where those of an old task are gone."""

    name: str
    rows: np.ndarray


def by_class(labels: Labels, split: SplitSpec, fixed: dict[str, Any], notes: list[str]) -> list[Cut]:
    """Groups of classes; equal groups, the remainder one by one to the first ones.

    Args:
        labels: the class of each row.
        split: how many groups, in which order.
        fixed: what the run fixed: its `groups`, names of classes, stay as they are, and new classes make one more.
        notes: gets sentences for the user.

    Raises:
        ConfigError: more groups than classes, or an unknown class in `order`.
    """
    names, order = labels.names, _ordered(labels, split, "stream.split.order")
    groups: list[list[str]] = [list(group) for group in fixed.get("groups", ())]
    if groups:
        known = {name for group in groups for name in group}
        if new := [names[code] for code in order if names[code] not in known]:
            groups.append(new)
            notes.append(f"New classes make one new task: {shortened(new)}.")
    else:
        count = min(5, len(order)) if split.groups is None else split.groups
        if count > len(order):
            seen = f"stream.split.groups={count}: there are {len(order)} classes ({shortened(names)})"
            raise ConfigError(f"{seen}. Use at most as many groups.")
        groups = [[names[code] for code in codes] for codes in np.array_split(np.array(order), count)]
    fixed["groups"] = groups
    owner = {name: place for place, group in enumerate(groups) for name in group}
    _note_dropped(labels, [code for code, name in enumerate(names) if name in owner], notes)
    places = np.array([owner.get(name, -1) for name in names])[labels.codes]
    return [Cut(_group_name(group), np.flatnonzero(places == place)) for place, group in enumerate(groups)]


def by_column(values: Labels, split: SplitSpec, seed: int, fixed: dict[str, Any], notes: list[str]) -> list[Cut]:
    """One task per value; rows with shared values are dealt evenly over the tasks, once.

    Args:
        values: the value of each row.
        split: the column, the order of its values, and the shared ones.
        seed: of the deal.
        fixed: what the run fixed: its shared values (`shared`) and how many rows were dealt to which tasks (`deals`).
        notes: gets sentences for the user.

    Raises:
        ConfigError: an unknown value in `order` or `shared`, or one in both; other shared values than the run's; nearly as
            many values as rows.
    """
    shared = [values.find(value, "stream.split.shared") for value in split.shared]
    order = [code for code in _ordered(values, split, "stream.split.order") if split.order or code not in shared]
    if both := [values.names[code] for code in order if code in shared]:
        raise ConfigError(f"stream.split: {', '.join(both)} is in order and in shared. Each value goes into one of them.")
    if not order:
        raise ConfigError(f"stream.split: every value of {split.column} is shared, so there is no task.")
    if 2 * len(order) > len(values.codes):  # a task needs two rows
        seen = f"stream.split.column={split.column}: the column has {len(order):,} values in {len(values.codes):,} rows"
        raise ConfigError(f"{seen}, and each value makes a task. Split by a column of few values, or by time with periods: 4.")
    _note_dropped(values, [*order, *shared], notes)
    said = sorted(values.names[code] for code in shared)
    if said != (before := fixed.setdefault("shared", said)):
        raise ConfigError(
            f"stream.split.shared is {shortened(said) or 'empty'} and was {shortened(before) or 'empty'} when this run dealt the "
            "rows. Put it back, or start a new run."
        )
    own = {values.names[code]: [np.flatnonzero(values.codes == code)] for code in order}
    if shared:
        common, start = np.flatnonzero(np.isin(values.codes, shared)), 0
        fixed["deals"] = _deals(fixed.get("deals", ()), list(own), len(common), notes)
        for deal in fixed["deals"]:
            rows, tasks = common[start : start + deal["rows"]], deal["tasks"]
            turn, start = _deal(len(rows), len(tasks), derive("deal", seed)), start + len(rows)
            for place, name in enumerate(tasks):
                own.get(name, []).append(rows[turn == place])
        text = f"{len(common):,} rows with {split.column} {', '.join(said)} are shared: dealt evenly over {len(order)} tasks."
        notes.append(text if len(fixed["deals"]) == 1 else f"{text[:-1]}, those that came later over the tasks of their time.")
    return [Cut(name, np.sort(np.concatenate(rows))) for name, rows in own.items()]


def _deals(dealt: Sequence[Mapping[str, Any]], tasks: list[str], rows: int, notes: list[str]) -> list[dict[str, Any]]:
    """How many shared rows, in row order, are dealt over which tasks.

    Those of earlier deals stay; the rest goes to the new tasks, or to all where none is new.
    """
    deals = [dict(deal) for deal in dealt]
    known = {name for deal in deals for name in deal["tasks"]}
    new, rest = [name for name in tasks if name not in known], rows - sum(deal["rows"] for deal in deals)
    if rest < 0:
        notes.append(
            f"{rows:,} shared rows are there, and {rows - rest:,} were dealt: tasks that are not learned yet may get others."
        )
    if new:
        deals.append({"tasks": new, "rows": max(rest, 0)})
        if dealt and rest <= 0:
            notes.append(f"No shared rows are left for {shortened(new)}: earlier tasks have them all. Append new ones to the data.")
    elif rest > 0 and set(deals[-1]["tasks"]) == set(tasks):
        deals[-1]["rows"] += rest
    elif rest > 0:
        deals.append({"tasks": tasks, "rows": rest})
    return deals


def by_time(
    key: pa.ChunkedArray, split: SplitSpec, frozen: Mapping[str, Any] | None, notes: list[str]
) -> tuple[list[Cut], dict[str, Any] | None]:
    """One task per calendar period, or a number of periods of equal row count.

    Args:
        key: the time of each row: dates, texts such as 2018-05 or 2018-05-31, or numbers.
        split: `every` needs dates; `periods` takes numbers too.
        frozen: cut points of an earlier run, as returned.
        notes: gets sentences for the user.

    Returns:
        The tasks in time order, and the cut points of `periods` as plain data (None for `every`). A cut is a value and how many
        of the rows with just that value come before it, so that ties are cut the same way again.

    Raises:
        ConfigError: the column does not fit, or there are more periods than rows.
    """
    times = _times(key, split)
    if split.until is not None:
        kept = np.flatnonzero(_not_after(times, split))
        if len(kept) < len(times):
            notes.append(f"{len(times) - len(kept):,} rows after {split.until} are left out (stream.split.until).")
            key = key.take(pa.array(kept))
            found, rule = by_time(key, split.model_copy(update={"until": None}), frozen, notes)
            return [Cut(cut.name, kept[cut.rows]) for cut in found], rule
    if split.every is not None:
        starts, codes = np.unique(_floor(times, split.every), return_inverse=True)
        return [Cut(_period_name(start, split.every), np.flatnonzero(codes == place)) for place, start in enumerate(starts)], None
    count = int(split.periods or 1)
    if count > len(times):
        raise ConfigError(f"stream.split.periods={count}: there are {len(times)} rows. Use fewer periods.")
    order = np.argsort(times, kind="stable")
    ordered = times[order]
    if frozen is not None and frozen["column"] == split.column and len(frozen["values"]) == count - 1:
        values = np.array(frozen["values"], dtype=times.dtype)
        cuts = np.searchsorted(ordered, values, "left") + np.array(frozen["before"], dtype=np.int64)
        cuts = np.minimum(cuts, np.searchsorted(ordered, values, "right"))
    else:
        if frozen is not None:
            notes.append("The cut points of the run's earlier periods do not fit stream.split and were made anew.")
        cuts = np.cumsum([len(part) for part in np.array_split(order, count)])[:-1]
        values = ordered[cuts]
    before = cuts - np.searchsorted(ordered, values, "left")
    plain = [str(value) if times.dtype.kind == "M" else value.item() for value in values]
    rule = {"column": split.column, "values": plain, "before": before.tolist()}
    found = [Cut(f"period-{place}", np.sort(rows)) for place, rows in enumerate(np.split(order, cuts), 1)]
    return found, rule


def by_part(parts: Sequence[str], rows: Sequence[int]) -> list[Cut]:
    """One task per file, or per task of a factory.

    Args:
        parts: the part of each segment.
        rows: the number of rows of each segment.
    """
    names = list(dict.fromkeys(parts))
    owner = np.repeat([names.index(part) for part in parts], rows)
    return [Cut(name, np.flatnonzero(owner == place)) for place, name in enumerate(names)]


def hold_out(codes: np.ndarray, test: float, validation: float, key: int) -> np.ndarray:
    """Which rows of a task are held out: TRAIN, VALIDATION or TEST, [rows]; a function of nothing but the arguments.

    Of each class the same share is drawn, rounded; a class of two rows or more has one in the test at least (if `test` is not
    0) and one in training; a single row is for training.

    Args:
        codes: the class of each row.
        test: share of the test rows.
        validation: share of the validation rows.
        key: random key.
    """
    order = torch.randperm(len(codes), generator=generator(key)).numpy()
    _, group, counts = np.unique(codes[order], return_inverse=True, return_counts=True)
    rank = np.empty(len(codes), dtype=np.int64)
    rank[np.argsort(group, kind="stable")] = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    tests = np.minimum(np.maximum(_share(counts, test), 1), counts - 1) if test else np.zeros_like(counts)
    validations = np.clip(_share(counts, validation), 0, counts - tests - 1)
    roles = np.empty(len(codes), dtype=np.int64)
    roles[order] = np.where(rank < tests[group], TEST, np.where(rank < (tests + validations)[group], VALIDATION, TRAIN))
    return roles


def _share(counts: np.ndarray, share: float) -> np.ndarray:
    return np.floor(counts * share + 0.5).astype(np.int64)


def _ordered(values: Labels, split: SplitSpec, key: str) -> list[int]:
    """Codes in the order that the split gives, or sorted."""
    if split.order is None:
        return list(range(len(values.values)))
    order = [values.find(value, key) for value in split.order]
    if len(set(order)) < len(order):
        raise ConfigError(f"{key}={list(split.order)}: a value stands twice. Each value makes one task at most.")
    if not order:
        raise ConfigError(f"{key} is empty. Leave the key out for the sorted order.")
    return order


def _note_dropped(values: Labels, kept: Sequence[int], notes: list[str]) -> None:
    lost = [code for code in range(len(values.values)) if code not in kept]
    if lost:
        count = int(np.isin(values.codes, lost).sum())
        notes.append(
            f"{count:,} rows are left out: stream.split.order does not name {shortened([values.names[code] for code in lost])}."
        )


def _group_name(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    numbers = all(re.fullmatch(r"0|-?[1-9][0-9]*", name) for name in names)
    if numbers and all(int(after) == int(before) + 1 for before, after in itertools.pairwise(names)):
        return f"{names[0]}-{names[-1]}"
    return ",".join(names) if len(names) <= 4 else f"{names[0]}..{names[-1]}"


def _deal(rows: int, tasks: int, key: int) -> np.ndarray:
    """The task that each of the rows goes to: every run of `tasks` rows is dealt one each, in a random order.

    Rows that are appended later do not change where the earlier ones went.
    """
    draws = np.random.Generator(np.random.PCG64(key)).random((-(-rows // tasks), tasks))
    return draws.argsort(axis=1).ravel()[:rows]


# --- time -------------------------------------------------------------------------------------------------------------


def _times(key: pa.ChunkedArray, split: SplitSpec) -> np.ndarray:
    """Numbers, or dates as datetime64[us]."""
    if kinds.is_string(key.type):
        months = pc.match_substring_regex(key, r"^\d{4}-\d{2}$")
        try:
            key = pc.if_else(months, pc.binary_join_element_wise(key, "01", "-"), key).cast(pa.timestamp("us"))
        except pa.ArrowInvalid:
            texts = pc.unique(key).to_pylist()
            odd = next((text for text in texts if not re.match(r"\d{4}-\d{2}(-\d{2}|$)", text)), texts[0])
            raise DataError(
                f"stream.split.column={split.column} holds {odd!r}, which is no date. Write dates as 2018-05 or 2018-05-31."
            ) from None
    if kinds.is_boolean(key.type):
        raise ConfigError(f"stream.split.column={split.column} holds true and false, which have no order in time.")
    if split.every is not None and not kinds.is_timestamp(key.type):
        raise ConfigError(
            f"stream.split.every={split.every} needs dates, and {split.column} holds numbers. Use periods: 4 for equal row counts "
            f"in the order of the numbers, or split by column for one task per number."
        )
    return np.asarray(key.to_numpy())


def _not_after(times: np.ndarray, split: SplitSpec) -> np.ndarray:
    """Which rows are not after `until`, bool [rows]: a number, or a day, a month or a year, which counts as a whole."""
    said = str(split.until)
    try:
        if times.dtype.kind != "M":
            kept = times <= float(said)
        else:
            kept = times < (np.datetime64(said) + 1 if re.fullmatch(r"\d{4}(-\d\d){0,2}", said) else np.datetime64(said, "us"))
    except ValueError:
        expected = "a date such as 2018-07 or 2018-07-31" if times.dtype.kind == "M" else "a number"
        raise ConfigError(f"stream.split.until={said}: {split.column} needs {expected} here.") from None
    if not kept.any():
        raise ConfigError(f"stream.split.until={said}: every row is later. The first is of {times.min()}.")
    return np.asarray(kept)


_UNITS = {"day": "D", "month": "M", "year": "Y"}


def _floor(times: np.ndarray, every: str) -> np.ndarray:
    """The first day of the calendar period of each time."""
    if every == "week":  # day 0, 1 January 1970, was a Thursday; weeks start on Monday
        days = times.astype("datetime64[D]")
        return days - (days.astype(np.int64) + 3) % 7
    if every == "quarter":
        months = times.astype("datetime64[M]")
        return (months - months.astype(np.int64) % 3).astype("datetime64[D]")
    return times.astype(f"datetime64[{_UNITS[every]}]").astype("datetime64[D]")


def _period_name(start: np.datetime64, every: str) -> str:
    day = start.astype(datetime.date)
    if every == "week":
        year, week, _ = day.isocalendar()
        return f"{year}-W{week:02d}"
    if every == "quarter":
        return f"{day.year}-Q{(day.month + 2) // 3}"
    return str(day)[: {"day": 10, "month": 7, "year": 4}[every]]
