"""A fixed number of stored rows in native dtypes, for replay.

Policies: `reservoir`, algorithm R (Vitter 1985); `ring`, the oldest row is overwritten; `class-balanced`, a reservoir
within every class, the capacity shared as evenly as the rows seen allow (after Chrysakis & Moens 2020, whose "full" classes
never grow again; here a class of which every row is stored grows until none is larger by two). Rows are chosen one after
the other, exactly, and written in one go.

Which slots belong to a class is known from `members`: the slots class by class, each class with some room to grow, so that
a balanced draw or an eviction costs the same at any capacity. `class-balanced` needs nothing more; the other policies, which
overwrite a slot whatever its class, also keep each slot's class and position, and only where balanced draws are wanted.

Not here: priorities, and shards of one buffer on several ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retain import params
from retain.errors import ConfigError, Finding, RunError

Columns = Mapping[str, Any]
"""Rows by name: tensors [rows, ...], lists of tensors (one per row, lengths may differ), or dicts of these."""

Group = dict[str, int]
"""What is known of a class: its ``number``, rows ``seen`` (under ``class-balanced``) and ``stored``, and where its list of
slots lies in `Buffer.members`: ``start`` and ``room``."""

POLICIES = ("class-balanced", "reservoir", "ring")
VALUES, LENGTHS = "*values", "*lengths"
"""A column of variable length is stored as a padded slab, [capacity, longest, ...], and its lengths, [capacity]."""


@dataclass
class Buffer:
    """Stored rows, one in each slot from 0 to `filled`. Made by `empty`.

    Attributes:
        capacity: rows at most.
        policy: which rows stay: ``class-balanced``, ``reservoir`` or ``ring``.
        floor: rows that every class should keep under ``class-balanced``; see `fair_share`.
        by_class: whether the slots of each class are known, which balanced draws need.
        seen: rows inserted so far, kept or not; after a removal, an estimate of how many would have been without those removed.
        filled: rows stored.
        columns: the stored rows by name, [capacity, ...]; empty before the first insertion.
        classes: by class id, in order of appearance; empty unless `by_class`.
        members: slots arranged by class.
        owner: number of the class of each slot, in the order of `classes`, [capacity]; None under ``class-balanced``.
        position: place of each slot in its class's list, [capacity]; None under ``class-balanced``.
    """

    capacity: int
    policy: str
    floor: int
    by_class: bool
    seen: int = 0
    filled: int = 0
    columns: dict[str, Any] = field(default_factory=dict)
    classes: dict[str, Group] = field(default_factory=dict)
    members: Tensor | None = None
    owner: Tensor | None = None
    position: Tensor | None = None


def empty(capacity: int, policy: str = "class-balanced", *, floor: int = 50, by_class: bool = False) -> Buffer:
    """A buffer without rows; memory is taken at the first insertion, all of it.

    Args:
        capacity: rows at most.
        policy: ``class-balanced``, ``reservoir`` or ``ring``.
        floor: rows that every class should keep under ``class-balanced``.
        by_class: keep lists of the slots of each class, for `draw_balanced`; always kept under ``class-balanced``.

    Raises:
        ConfigError: the capacity is not positive or the policy is unknown.
    """
    if capacity < 1:
        raise ConfigError(f"capacity={capacity} must be >= 1. It is the number of rows that are kept.")
    if policy not in POLICIES:
        raise ConfigError(f"policy={policy!r} is not known; known: {', '.join(POLICIES)}.")
    return Buffer(capacity, policy, floor, by_class or policy == "class-balanced")


def insert_(buffer: Buffer, columns: Columns, labels: Tensor, key: int) -> None:
    """Offer rows to the buffer, in their order; the policy decides which stay. What stays is copied.

    Args:
        buffer: changed in place.
        columns: the rows, on any device; names, dtypes and shapes as at the first insertion.
        labels: class of each row, integers [rows]; read only where the buffer is `by_class`.
        key: random key: the same calls give the same buffer.

    Raises:
        ConfigError: ``class-balanced`` has seen more classes than it can hold rows.
        ValueError: the columns do not fit the stored ones, or a row has no class where one is needed.
    """
    rows = len(labels)
    if not rows:
        return
    buffer.columns = _fitted(buffer.columns or None, columns, buffer.capacity, rows)
    groups = _admit_(buffer, labels) if buffer.by_class else []
    places = _CHOOSE[buffer.policy](buffer, rows, groups, key)
    buffer.seen += rows
    if not places:
        return
    buffer.filled = max(buffer.filled, max(places) + 1)  # free slots are taken in order
    if buffer.owner is not None:
        _relabel_(buffer, places, groups)
    _write_(buffer.columns, columns, _integers(places), _integers(places.values()))


def draw(buffer: Buffer, rows: int, key: int) -> Tensor:
    """Slots drawn uniformly from those that hold a row, with replacement, int64 [rows].

    Raises:
        ValueError: the buffer is empty.
    """
    _check_filled(buffer)
    return torch.randint(buffer.filled, (rows,), generator=params.generator(key))


def draw_balanced(buffer: Buffer, rows: int, key: int) -> Tensor:
    """Slots drawn with replacement: a class uniformly from those stored, then a row uniformly within it, int64 [rows].

    Raises:
        ValueError: the buffer is empty or not `by_class`.
    """
    _check_filled(buffer)
    if buffer.members is None:
        raise ValueError("balanced draws need a buffer made with by_class=True or policy='class-balanced'")
    stored = [group for group in buffer.classes.values() if group["stored"]]
    members, uniform = _view(buffer.members), _uniforms(key, 2 * rows).tolist()
    slots = []
    for u, v in zip(uniform[:rows], uniform[rows:], strict=True):
        group = stored[int(u * len(stored))]
        slots.append(members[group["start"] + int(v * group["stored"])])
    return torch.from_numpy(_integers(slots))


def fetch(buffer: Buffer, slots: Tensor) -> dict[str, Any]:
    """The rows in slots, as copies: every column as it was inserted, lists with their own lengths."""

    def read(store: Any) -> Any:
        if isinstance(store, Tensor):
            return store.index_select(0, slots)
        if VALUES in store:
            lengths = store[LENGTHS].index_select(0, slots).tolist()
            longest = max(lengths, default=0)
            padded = store[VALUES][:, :longest].index_select(0, slots)
            return [row[:length] for row, length in zip(padded, lengths, strict=True)]
        return {name: read(part) for name, part in store.items()}

    return {name: read(store) for name, store in buffer.columns.items()}


def remove_(buffer: Buffer, gone: Tensor) -> None:
    """Take rows out as if they had never been offered: nothing of them stays, and later rows take their room.

    How many rows of each class, or of all, were seen without the removed ones is not known where some were not stored; they
    are taken to be as frequent there as among the stored ones, so that what is left goes on as a sample of what was seen.

    Args:
        buffer: changed in place.
        gone: which of the filled slots, bool [filled].
    """
    stored, capacity = buffer.filled, buffer.capacity
    order = torch.arange(stored)
    if buffer.policy == "ring":
        order = order.roll(-(buffer.seen % capacity) if stored == capacity else 0)  # the oldest first
    slots = order[~gone[order]]
    left = len(slots)
    if left == stored:
        return
    if not left:
        fresh = Buffer(capacity, buffer.policy, buffer.floor, buffer.by_class)
        vars(buffer).update(vars(fresh))
        return
    for tensor in _held(buffer.columns):
        tensor[:left] = tensor[slots]
        tensor[left:] = 0
    buffer.seen = left if buffer.policy == "ring" else _without(buffer.seen, stored, left)
    buffer.filled = left
    if buffer.members is None:
        return
    moved = torch.full((capacity,), -1)
    moved[slots] = torch.arange(left)
    lists = []
    for group in buffer.classes.values():
        places = moved[buffer.members[group["start"] : group["start"] + group["stored"]].long()]
        lists.append(places[places >= 0])
        if buffer.policy == "class-balanced":
            group["seen"] = _without(group["seen"], group["stored"], len(lists[-1]))
        group["stored"] = len(lists[-1])
    start, spare = 0, (len(buffer.members) - left) // len(lists)
    for group, places in zip(buffer.classes.values(), lists, strict=True):
        group["start"], group["room"] = start, len(places) + spare
        buffer.members[start : start + len(places)] = places
        start += len(places) + spare
        if buffer.owner is not None and buffer.position is not None:
            buffer.owner[places], buffer.position[places] = group["number"], torch.arange(len(places), dtype=buffer.position.dtype)
    if buffer.owner is not None:
        buffer.owner[left:] = -1


def _without(seen: int, stored: int, left: int) -> int:
    """Rows seen, less those that were removed; exact where every row seen was stored."""
    return max(left, round(seen * left / stored)) if stored else seen


def fair_share(buffer: Buffer, classes: int) -> Finding | None:
    """Under ``class-balanced``, what each class keeps when `floor` rows for every class do not fit; None when they do.

    Every class keeps all rows that it has shown, or capacity // classes of them if that is less. So the floor holds by
    itself wherever floor * classes <= capacity, and where it does not, this says which share is kept instead.
    """
    if buffer.policy != "class-balanced" or buffer.floor * classes <= buffer.capacity:
        return None
    share = buffer.capacity // classes
    seen = f"A replay buffer of {buffer.capacity} rows keeps {share} of each of {classes} classes, not floor={buffer.floor}."
    return Finding("replay-share", seen, "", f"replay capacity={buffer.floor * classes} keeps the floor.")


def nbytes(buffer: Buffer) -> int:
    """Bytes that the buffer holds."""
    return params.nbytes(_held(vars(buffer)))


def _held(value: Any) -> list[Tensor]:
    """The tensors in dicts of dicts of them."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value.values() for tensor in _held(part)] if isinstance(value, dict) else []


# --- policies: which rows go to which slots ---------------------------------------------------------------------------
# Each goes through the rows in order and returns {slot: row}; where several rows met in a slot, the last one is there.


def _ring(buffer: Buffer, rows: int, groups: Sequence[Group], key: int) -> dict[int, int]:
    return {(buffer.seen + row) % buffer.capacity: row for row in range(rows)}


def _reservoir(buffer: Buffer, rows: int, groups: Sequence[Group], key: int) -> dict[int, int]:
    """The first rows fill the slots in order. After that, row n (from 1) draws one of n numbers: that slot, if it exists."""
    capacity, seen, filled = buffer.capacity, buffer.seen, buffer.filled
    slots = (_uniforms(key, rows) * np.arange(seen + 1, seen + rows + 1)).astype(np.int64).tolist()
    free = max(0, min(rows, capacity - seen))
    slots[:free] = range(filled, filled + free)
    if filled + free == capacity:
        return {slot: row for row, slot in enumerate(slots) if slot < capacity}
    places = {}
    for row, slot in enumerate(slots):  # rows were removed: a row that draws one of the free slots takes the first of them
        if slot < capacity:
            places[slot if slot < filled else filled] = row
            filled = max(filled, min(slot, filled) + 1)
    return places


def _class_balanced(buffer: Buffer, rows: int, groups: Sequence[Group], key: int) -> dict[int, int]:
    """A class of which every row is stored grows while there is room or a larger class; otherwise it is a reservoir.

    Numbers of stored rows depend on the labels alone, and both an eviction and a replacement are uniform within their
    class: the rows stored of a class are a uniform sample of its rows seen.
    """
    assert buffer.members is not None
    members, filled, places = _view(buffer.members), buffer.filled, {}
    for row, group, u in zip(range(rows), groups, _uniforms(key, rows).tolist(), strict=True):
        stored, seen = group["stored"], group["seen"] + 1
        group["seen"] = seen
        if stored == seen - 1:
            slot = -1
            if filled < buffer.capacity:
                slot, filled = filled, filled + 1
            elif (largest := max(buffer.classes.values(), key=_stored))["stored"] > stored + 1:
                slot = _leave_(members, largest, int(u * largest["stored"]))
            if slot >= 0:
                _join_(buffer, members, group, slot)
                places[slot] = row
                continue
        place = int(u * seen)
        if place < stored:
            places[members[group["start"] + place]] = row
        elif place < stored + buffer.capacity - filled:  # rows were removed
            _join_(buffer, members, group, filled)
            places[filled], filled = row, filled + 1
    return places


def _stored(group: Group) -> int:
    return group["stored"]


_Choose = Callable[[Buffer, int, Sequence[Group], int], dict[int, int]]
_CHOOSE: dict[str, _Choose] = {"class-balanced": _class_balanced, "reservoir": _reservoir, "ring": _ring}


def _uniforms(key: int, count: int) -> np.ndarray:
    """Numbers in [0, 1). Times n and cut to an integer they are less than n: 53 bits do not round up."""
    return torch.rand(count, generator=params.generator(key), dtype=torch.float64).numpy()


# --- the slots of each class ------------------------------------------------------------------------------------------


def _admit_(buffer: Buffer, labels: Tensor) -> list[Group]:
    """The class of each row; a class that is new gets a list, and room for it."""
    if labels.ndim != 1 or labels.is_floating_point():
        seen = f"labels of shape {tuple(labels.shape)}, {labels.dtype}"
        raise ValueError(f"{seen}: a class id for each row is needed here. Use policy='reservoir' where there is none.")
    ids: list[int] = labels.tolist()
    distinct, known = set(ids), buffer.classes
    try:
        groups = {label: known[str(label)] for label in distinct}
    except KeyError:
        _add_classes_(buffer, [label for label in distinct if str(label) not in known])
        groups = {label: known[str(label)] for label in distinct}
    return [groups[label] for label in ids]


def _add_classes_(buffer: Buffer, labels: Sequence[int]) -> None:
    count, capacity = len(buffer.classes) + len(labels), buffer.capacity
    if buffer.policy == "class-balanced" and count > capacity:
        raise ConfigError(
            f"{count} classes do not fit into a class-balanced replay buffer of capacity={capacity}, which keeps a row of "
            f"each at least. Set capacity to {count} or more, or policy: reservoir."
        )
    for number, label in enumerate(labels, len(buffer.classes)):
        buffer.classes[str(label)] = {"number": number, "seen": 0, "stored": 0, "start": 0, "room": 0}
    slot_dtype = torch.int16 if capacity < 2**15 else torch.int32
    if buffer.members is None or len(buffer.members) < capacity + count:
        members = torch.zeros(capacity + max(capacity // 8, 2 * count, 64), dtype=slot_dtype)
        if buffer.members is not None:
            members[: len(buffer.members)] = buffer.members
        buffer.members = members
    if buffer.owner is None and buffer.policy != "class-balanced":
        buffer.owner = torch.full((capacity,), -1, dtype=torch.int32)
        buffer.position = torch.zeros(capacity, dtype=slot_dtype)


def _relabel_(buffer: Buffer, places: Mapping[int, int], groups: Sequence[Group]) -> None:
    """Move overwritten slots from the lists of their old classes to those of their new ones."""
    assert buffer.members is not None and buffer.owner is not None and buffer.position is not None
    members, owner, position = _view(buffer.members), _view(buffer.owner), _view(buffer.position)
    known = list(buffer.classes.values())
    for slot, row in places.items():
        group, before = groups[row], owner[slot]
        now = group["number"]
        if before == now:
            continue
        if before >= 0:
            left, place = known[before], position[slot]
            start, last = left["start"], left["stored"] - 1
            members[start + place] = moved = members[start + last]
            position[moved] = place
            left["stored"] = last
        stored = group["stored"]
        if stored == group["room"]:
            _spread_(buffer)
        members[group["start"] + stored] = slot
        owner[slot], position[slot], group["stored"] = now, stored, stored + 1


def _leave_(members: memoryview, group: Group, place: int) -> int:
    """Take the slot at a place out of a class's list; the last one takes its place."""
    start, last = group["start"], group["start"] + group["stored"] - 1
    slot = members[start + place]
    members[start + place] = members[last]
    group["stored"] -= 1
    return int(slot)


def _join_(buffer: Buffer, members: memoryview, group: Group, slot: int) -> None:
    """Put a slot at the end of a class's list."""
    if group["stored"] == group["room"]:
        _spread_(buffer)
    members[group["start"] + group["stored"]] = slot
    group["stored"] += 1


def _spread_(buffer: Buffer) -> None:
    """Lay the lists out anew, in place, with the free room shared evenly; rare enough to cost little per row."""
    assert buffer.members is not None
    old, groups, start = buffer.members.clone(), buffer.classes.values(), 0
    spare = (len(old) - sum(map(_stored, groups))) // len(groups)
    for group in groups:
        before, stored = group["start"], group["stored"]
        buffer.members[start : start + stored] = old[before : before + stored]
        group["start"], group["room"] = start, stored + spare
        start += stored + spare


def _view(tensor: Tensor) -> memoryview:
    """A tensor's elements for reading and writing one at a time, which is ten times faster than through torch."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]


def _integers(values: Collection[int]) -> np.ndarray:
    return np.fromiter(values, np.int64, len(values))


def _check_filled(buffer: Buffer) -> None:
    if not buffer.filled:
        raise ValueError("the replay buffer is empty: insert rows before drawing from it")


# --- columns ----------------------------------------------------------------------------------------------------------


def _fitted(store: Columns | None, columns: Columns, capacity: int, rows: int, path: str = "") -> dict[str, Any]:
    """The store with room for the columns: allocated at the first insertion, slabs widened for longer rows.

    Raises:
        ValueError: names, dtypes, shapes or numbers of rows do not fit.
    """
    if store is None:
        store = dict.fromkeys(columns)
    elif store.keys() != columns.keys():
        raise ValueError(f"{path or 'columns'}: the buffer stores {sorted(store)}, the rows have {sorted(columns)}")
    return {name: _fit(store[name], value, capacity, rows, path + name) for name, value in columns.items()}


def _fit(store: Any, value: Any, capacity: int, rows: int, path: str) -> Any:
    if isinstance(value, Mapping):
        return _fitted(store, value, capacity, rows, f"{path}.")
    if len(value) != rows:
        raise ValueError(f"{path}: {len(value)} rows, but there are {rows} labels")
    if isinstance(value, Tensor):
        if store is None:
            store = _allocated(value, (capacity, *value.shape[1:]), path)
        _check_same(store, value, path)
        return store
    longest = max(map(len, value))
    if store is None:
        values = _allocated(value[0], (capacity, longest, *value[0].shape[1:]), path)
        store = {VALUES: values, LENGTHS: torch.zeros(capacity, dtype=torch.int32)}
    for item in value:
        _check_same(store[VALUES][0], item, path)
    if longest > store[VALUES].shape[1]:
        narrow = store[VALUES]
        wide = narrow.new_zeros((capacity, longest, *narrow.shape[2:]))
        wide[:, : narrow.shape[1]] = narrow
        store = {VALUES: wide, LENGTHS: store[LENGTHS]}
    return store


def _allocated(like: Tensor, shape: tuple[int, ...], path: str) -> Tensor:
    try:
        return like.new_zeros(shape, device="cpu", requires_grad=False)
    except RuntimeError:
        needed = f"{math.prod(shape) * like.itemsize:,} bytes"
        raise RunError(f"The replay buffer cannot be made: capacity={shape[0]} needs {needed} for {path}. Lower it.") from None


def _check_same(store: Tensor, value: Tensor, path: str) -> None:
    if store.dtype != value.dtype or store.shape[1:] != value.shape[1:]:
        seen, kept = (f"{t.dtype} of shape {tuple(t.shape[1:])}" for t in (value, store))
        raise ValueError(f"{path}: rows are {seen}, the buffer stores {kept}")


def _write_(store: Columns, columns: Columns, slots: np.ndarray, rows: np.ndarray) -> None:
    """Copy some rows of the columns into slots. Through NumPy, whose calls take half as long for a few rows."""
    for name, value in columns.items():
        target = store[name]
        if isinstance(value, Tensor):
            _array(target)[slots] = _array(value).take(rows, 0)
        elif isinstance(value, Mapping):
            _write_(target, value, slots, rows)
        else:
            for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
                length = len(value[row])
                target[VALUES][slot, :length] = value[row].detach()
                target[LENGTHS][slot] = length


def _array(tensor: Tensor) -> np.ndarray:
    """A tensor's values as an array; where NumPy lacks the dtype (bfloat16, float8), their bits."""
    bits = _BITS.get(tensor.dtype)
    return (tensor if bits is None else tensor.detach().view(bits)).numpy(force=True)


_BITS = {
    dtype: torch.int16 if dtype.itemsize == 2 else torch.uint8
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
}
