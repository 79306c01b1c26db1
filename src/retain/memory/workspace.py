"""What operations of the CPU take and give back within themselves, measured by running each once.

A convolution may copy its images into another layout, an LSTM keeps a workspace, a softmax over masked rows makes a mask: fake
tensors see none of it (they miss 84 % of an LSTM's bytes). What is measured is the allocator's own record, as torch's profiler
keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retain.memory.ledger import Call, TensorLike, call_bytes
from retain.memory.meter import allocator_peaks

SMALLEST, LARGEST = 2**10, 2**30
"""Bytes of a call's tensors: what smaller ones need does not matter, and larger ones are not run."""

_PLAIN = frozenset("mm addmm bmm baddbmm t view _unsafe_view clone copy_ zero_ fill_ cat stack detach alias".split())
"""Operations that take nothing within themselves where all their tensors have one dtype of 4 or 8 bytes."""


def call_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """An operation and what its workspace depends on; None where it has none to speak of, or cannot be run by itself."""
    if func.is_view or func.namespace not in ("aten", "mkldnn"):
        return None
    like = tuple(map(_like, args)) + tuple((name, _like(value)) for name, value in kwargs.items())
    call = (func, *like)
    if not SMALLEST <= call_bytes(call) <= LARGEST or not _known(like):
        return None
    dtypes = {part.dtype for part in like if isinstance(part, TensorLike)}
    plain = torch.Tag.pointwise in func.tags or func.overloadpacket.__name__ in _PLAIN or func.name().startswith("aten::_foreach")
    return None if plain and len(dtypes) <= 1 and all(dtype.itemsize >= 4 for dtype in dtypes) else call


def mend_recurrent(args: tuple[Any, ...], output: Any) -> Any:
    """The outputs of a recurrent layer of oneDNN with a workspace as large as the real one, which the layer keeps."""
    *others, workspace = output
    real = _RECURRENT(*(_real(_like(arg)) for arg in args))[-1]
    return (*others, workspace.new_empty(real.shape, dtype=real.dtype))


_RECURRENT = torch.ops.aten.mkldnn_rnn_layer.default
_RECURRENT_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default
BLIND = {_RECURRENT: mend_recurrent}
"""For `retain.memory.ledger.Ledger`: operations whose fake outputs are too small."""


def _recurrent_backward(args: list[Any]) -> list[Any]:
    """The arguments with the workspace that the forward pass makes: the operation reads it, and crashes on another."""
    start, (reverse, mode, size, layers, biases, train, both, sizes, batch_first) = args[:7], args[13:22]
    with torch.enable_grad():  # else there is none
        workspace = _RECURRENT(*start, reverse, sizes, mode, size, layers, biases, both, batch_first, train)[-1]
    return [*args[:22], workspace]


def measured(calls: Sequence[Call]) -> dict[Call, int]:
    """The most bytes that each call has live within itself, its outputs included; those that fail are left out."""
    peaks = allocator_peaks([partial(_made, call) for call in calls])
    return {call: peak for call, peak in zip(calls, peaks, strict=True) if peak is not None}


def _made(call: Call) -> Any:
    """A function that runs a call on tensors of its shapes, made here."""
    func, *parts = call
    args = [_real(part) for part in parts if not _named(part)]
    if func is _RECURRENT_BACKWARD:
        args = _recurrent_backward(args)
    kwargs = {part[0]: _real(part[1]) for part in parts if _named(part)}
    return lambda: func(*args, **kwargs)


def _named(part: Any) -> bool:
    return isinstance(part, tuple) and not isinstance(part, TensorLike) and len(part) == 2 and isinstance(part[0], str)


def _like(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorLike(tuple(value.shape), tuple(value.stride()), value.dtype)
    return tuple(map(_like, value)) if isinstance(value, (tuple, list)) else value


def _known(parts: tuple[Any, ...]) -> bool:
    """Whether all that is not a tensor can be compared and given again."""
    plain = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, TensorLike)
    return all(isinstance(part, plain) or (isinstance(part, tuple) and _known(part)) for part in parts)


def _real(part: Any) -> Any:
    if isinstance(part, TensorLike):
        tensor = torch.empty_strided(part.shape, part.stride, dtype=part.dtype)
        return tensor.fill_(0.5) if part.dtype.is_floating_point else tensor.zero_()
    return [_real(item) for item in part] if isinstance(part, tuple) else part
