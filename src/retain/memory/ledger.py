"""Live bytes of tensors, event by event: on real tensors, and on fake ones, which have a shape and no memory.

A `Ledger` is a mode of torch's dispatcher: it sees every operation of forward, backward and optimizer, notes each storage that
one returns, and hears when it dies. Operations on fake tensors stay fake; those on real ones alone run, so that what is small
and decides something (indices, masks, counters) has its values. Sizes are rounded as the allocator rounds that is stood for.

What an operation takes and gives back within itself is not seen: such calls are noted, to be measured by
`retain.memory.workspace` where they can matter.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporary", "methods", "data")
"""What a storage is for; each counts in one."""
HOST = "host"
"""Label of storages that lie in the host's memory and so do not count on another device."""

_HINTS: dict[torch.dtype, Any] = {torch.bool: True}
_ADD = torch.ops.aten.add.Tensor
_IN_PLACE = {
    _ADD: torch.ops.aten.add_.Tensor,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
    torch.ops.aten.index_add.default: torch.ops.aten.index_add_.default,
}
"""What the backward pass does in place, but not while a mode of the dispatcher is active."""
_LIFT, _ITEM = torch.ops.aten.lift_fresh.default, torch.ops.aten._local_scalar_dense.default

Call = tuple[Any, ...]
"""An operation with the shapes, strides and dtypes of its arguments: what its workspace depends on."""


class Event(NamedTuple):
    """A storage that begins, or ends (negative bytes); or, with a call, an operation that may need more within itself."""

    storage: int
    nbytes: int
    phase: str
    call: Call | None = None


@dataclass
class Account:
    """What was live when the most was.

    Attributes:
        peak_bytes: the most at once.
        phase: in which phase that was, such as ``task 0: second step, backward``.
        breakdown: its bytes by category, all of `CATEGORIES`.
        phases: the most at once in each phase, in their order.
    """

    peak_bytes: int = 0
    phase: str = ""
    breakdown: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    phases: dict[str, int] = field(default_factory=dict)


class Ledger(TorchDispatchMode):
    """Notes every storage while it is active.

    Args:
        block: sizes are rounded up to multiples of this: 1 for the CPU's allocator, 512 for CUDA's.
        call: the part of an operation and its arguments on which its workspace depends; None where there is none to speak of.
        blind: operations whose fake outputs are not of the right size, with what mends them: ``(args, output) -> output``.

    Attributes:
        events: in order of time.
        stage: the part of the run that is under way.
        part: the part of a step, where it is neither forward nor backward.
        host: whether real tensors lie in the host's memory now, and so are not noted.
    """

    def __init__(
        self,
        *,
        block: int = 1,
        call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Call | None] | None = None,
        blind: Mapping[Any, Callable[[tuple[Any, ...], Any], Any]] | None = None,
    ) -> None:
        super().__init__()
        self.block, self.call, self.blind = block, call, blind or {}
        _held_once()  # while autograd can still be asked
        self.events: list[Event] = []
        self.stage, self.part, self.host = "", "", False
        self._labels: dict[int, str] = {}
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ITEM and isinstance(args[0], FakeTensor):
            return _HINTS.get(args[0].dtype, 1)  # a fake tensor has no value: one that divides and is true
        if func in _IN_PLACE and torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled():
            func, args = _in_place(func, args)
        if self.call is not None and (call := self.call(func, args, kwargs)) is not None:
            self.events.append(Event(-1, 0, self._phase(), call))
        out = func(*args, **kwargs)
        if func in self.blind and isinstance(out[0], FakeTensor):
            out = self.blind[func](args, out)
        for tensor in _tensors(out):
            self._note(tensor, func, args)
        if func._schema.is_mutable and isinstance(out, FakeTensor) and args and not isinstance(args[0], FakeTensor):
            return args[0]  # a real tensor changed in place by a fake one stays real; its values are not looked at
        return out

    def _phase(self) -> str:
        part = self.part
        if not part and (backward := torch._C._current_graph_task_id() != -1) | torch.is_grad_enabled():
            part = "backward" if backward else "forward"
        return f"{self.stage}, {part}" if part else self.stage

    def _note(self, tensor: Tensor, func: Any = None, args: Iterable[Any] = ()) -> int | None:
        """The number of a tensor's storage, which is new where it has not been seen; None where it does not count."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        if (known := self._live.get(key)) is not None:
            return known[1]
        if self.host and not isinstance(tensor, FakeTensor):
            return None
        if func is not None and func is not _LIFT and key in _storages(args):
            return None  # a view of memory that no operation made, such as an array's
        if not (nbytes := -(-storage.nbytes() // self.block) * self.block):
            return None
        number, self._count = self._count, self._count + 1
        self.events.append(Event(number, nbytes, self._phase()))

        def ended(_: object) -> None:
            del self._live[key]
            self.events.append(Event(number, -nbytes, self._phase()))

        self._live[key] = weakref.ref(storage, ended), number
        return number

    def mark(self, label: str, tensors: Iterable[Tensor]) -> None:
        """Say what storages are for, whenever they began; tensors that were not seen before begin now.

        Args:
            label: one of `CATEGORIES`, or `HOST`.
            tensors: any.
        """
        for tensor in tensors:
            if (number := self._note(tensor)) is not None:
                self._labels[number] = label

    @contextmanager
    def staged(self, stage: str) -> Iterator[None]:
        """A part of the run by name. What begins in a stage called ``data...`` and has no label is data."""
        before, self.stage = self.stage, stage
        try:
            yield
        finally:
            self.stage = before

    @contextmanager
    def on_host(self, host: bool = True) -> Iterator[None]:
        """A region whose real tensors lie in the host's memory and are not noted."""
        before, self.host = self.host, host
        try:
            yield
        finally:
            self.host = before

    def account(self, workspaces: Mapping[Call, int] | None = None) -> Account:
        """What was live at the peak.

        Of storages without a label, those of a forward pass that live into a backward pass are activations; others are
        temporary.

        Args:
            workspaces: the most that a call has live within itself, its outputs included.
        """
        workspaces = workspaces or {}
        ends = {event.storage: event.phase for event in self.events if event.nbytes < 0}
        live = peak = place = within = 0
        phases: dict[str, int] = {}
        for position, event in enumerate(self.events):
            if self._labels.get(event.storage) == HOST:
                continue
            live += event.nbytes
            inner = 0 if event.call is None else workspaces.get(event.call, 0)
            phases[event.phase] = max(phases.get(event.phase, 0), live + inner)
            if live + inner > peak:
                peak, place, within = live + inner, position, inner
        if not peak:
            return Account()
        held: defaultdict[int, int] = defaultdict(int)
        born: dict[int, str] = {}
        for event in self.events[: place + 1]:
            held[event.storage] += event.nbytes
            if event.nbytes > 0:
                born[event.storage] = event.phase
        breakdown = dict.fromkeys(CATEGORIES, 0)
        breakdown["temporary"] = within
        for number, nbytes in held.items():
            label = self._labels.get(number)
            if nbytes and label != HOST:
                breakdown[label or _kind(born[number], ends.get(number, ""))] += nbytes
        return Account(peak, self.events[place].phase, breakdown, phases)

    def near_the_peak(self, factor: int) -> list[Call]:
        """The calls that could set the peak if they took this many times the bytes of their arguments within themselves."""
        peak, live = self.account().peak_bytes, 0
        found: dict[Call, None] = {}
        for event in self.events:
            if event.call is None:
                live += 0 if self._labels.get(event.storage) == HOST else event.nbytes
            elif live + factor * call_bytes(event.call) > peak:
                found[event.call] = None
        return list(found)


def call_bytes(call: Call) -> int:
    """Bytes of a call's tensors."""
    return sum(_part_bytes(part) for part in call[1:])


def _part_bytes(part: Any) -> int:
    if isinstance(part, TensorLike):
        return part.nbytes
    return sum(map(_part_bytes, part)) if isinstance(part, tuple) else 0


class TensorLike(NamedTuple):
    """What a call needs to know of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


def _in_place(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """An operation of the backward pass as it runs without a mode: into a buffer that nothing else holds, where there is one.

    Autograd adds two gradients that meet into one of them, and scatters into the zeros it made; under a mode it makes another
    buffer for the result, which would be counted though training has none.
    """
    for order in ((0, 1), (1, 0))[: 2 if func is _ADD and len(args) == 2 else 1]:
        one, other = (args[place] for place in order)
        if not isinstance(one, Tensor) or (func is _ADD and (one.shape, one.dtype) != (other.shape, other.dtype)):
            continue
        held = one._use_count(), torch._C._storage_Use_Count(one.untyped_storage()._cdata)  # type: ignore[attr-defined]
        if held <= _held_once() and _dense(one):
            return _IN_PLACE[func], (one, other, *args[2:])
    return func, args


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory, each element once, in whatever order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@functools.cache
def _held_once() -> tuple[int, int]:
    """Counts of references to a gradient, and to its storage, as a mode sees them where nothing else holds it."""
    counts: list[tuple[int, int]] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            if func is _ADD and torch._C._current_graph_task_id() != -1:
                storage = args[1].untyped_storage()
                counts.append((args[1]._use_count(), torch._C._storage_Use_Count(storage._cdata)))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with torch.enable_grad(), Look():
        y = x * 2
        torch.autograd.backward([y.sin() + y.cos()], [torch.ones(2)])
    return counts[0]


def _kind(born: str, ended: str) -> str:
    """What a storage without a label was for, from the phases in which it began and ended."""
    if born.startswith("data"):
        return "data"
    return "activations" if born.endswith("forward") and ended != born else "temporary"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _storages(args: Iterable[Any]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in _tensors(list(args)) if tensor.layout is torch.strided}
