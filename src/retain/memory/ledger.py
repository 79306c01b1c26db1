"""Live bytes of tensors, event by event: on real tensors, and on fake ones, which have a shape and no memory.

A `Ledger` is a mode of torch's dispatcher: it sees every operation of forward, backward and optimizer, notes each storage that
one returns, and hears when it dies. Operations on fake tensors stay fake; those on real ones alone run, so that what is small
and decides something (indices, masks, counters) has its values. Sizes are rounded as the allocator rounds that is stood for.

Not seen: what an operation takes and gives back within itself; `workspace` may say how much that is.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "temporary", "methods", "data")
"""What a storage is for; each counts in one."""

_HINTS: dict[torch.dtype, Any] = {torch.bool: True}
_LIFT, _ITEM = torch.ops.aten.lift_fresh.default, torch.ops.aten._local_scalar_dense.default

Workspace = Callable[[Any, tuple[Any, ...], dict[str, Any]], int]
"""Bytes that an operation takes within itself, from the operation and its arguments."""


class Event(NamedTuple):
    """A storage that begins or ends: its number, its bytes (negative at its end), and the phase."""

    storage: int
    nbytes: int
    phase: str


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
        workspace: what operations take within themselves; None for nothing.
        real: whether real tensors count as well as fake ones.
    """

    def __init__(self, *, block: int = 1, workspace: Workspace | None = None, real: bool = True) -> None:
        super().__init__()
        self.block, self.workspace, self.real = block, workspace, real
        self.events: list[Event] = []
        self.labels: dict[int, str] = {}
        self.stage = ""
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ITEM and isinstance(args[0], FakeTensor):
            return _HINTS.get(args[0].dtype, 1)  # a fake tensor has no value: one that divides and is true
        if self.workspace is not None and (extra := self.workspace(func, args, kwargs)):
            phase = self._phase()
            self.events += [Event(-1, extra, phase), Event(-1, -extra, phase)]
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            self._note(tensor, func, args)
        if func._schema.is_mutable and isinstance(out, FakeTensor) and not isinstance(args[0], FakeTensor):
            return args[0]  # a real tensor changed in place by a fake one stays real; its values are not looked at
        return out

    def _phase(self) -> str:
        part = "backward" if torch._C._current_graph_task_id() != -1 else "forward" if torch.is_grad_enabled() else ""
        return f"{self.stage}, {part}" if part else self.stage

    def _note(self, tensor: Tensor, func: Any = None, args: Iterable[Any] = ()) -> int | None:
        """The number of a tensor's storage, which is new where it has not been seen; None where it does not count."""
        if tensor.layout is not torch.strided or not (self.real or isinstance(tensor, FakeTensor)):
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        if (known := self._live.get(key)) is not None:
            return known[1]
        if (
            func is not None
            and func is not _LIFT
            and any(arg.untyped_storage()._cdata == key for arg in args if isinstance(arg, Tensor) and arg.layout is torch.strided)
        ):
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

    def mark(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Say what storages are for, whenever they began; tensors that were not seen before begin now."""
        for tensor in tensors:
            if (number := self._note(tensor)) is not None:
                self.labels[number] = category

    @contextmanager
    def staged(self, stage: str) -> Iterator[None]:
        """A part of the run by name; a storage without a label that begins in ``data`` is data."""
        before, self.stage = self.stage, stage
        try:
            yield
        finally:
            self.stage = before

    def live_bytes(self) -> int:
        """Bytes live now."""
        return sum(event.nbytes for event in self.events)

    def account(self) -> Account:
        """What was live at the peak.

        Of storages without a label, those of a forward pass that live into a backward pass are activations; others are
        temporary.
        """
        ends = {event.storage: event.phase for event in self.events if event.nbytes < 0}
        live = peak = place = 0
        phases: dict[str, int] = {}
        for position, event in enumerate(self.events):
            live += event.nbytes
            phases[event.phase] = max(phases.get(event.phase, 0), live)
            if live > peak:
                peak, place = live, position
        if not peak:
            return Account()
        held: defaultdict[int, int] = defaultdict(int)
        born: dict[int, str] = {}
        for event in self.events[: place + 1]:
            held[event.storage] += event.nbytes
            if event.nbytes > 0:
                born[event.storage] = event.phase
        breakdown = dict.fromkeys(CATEGORIES, 0)
        for number, nbytes in held.items():
            if nbytes:
                breakdown[self.labels.get(number) or _kind(born[number], ends.get(number, ""))] += nbytes
        return Account(peak, self.events[place].phase, breakdown, phases)


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
