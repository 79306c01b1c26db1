"""A quadratic penalty around an anchor, sum_i A_i (p_i - m_i)^2 / 2, over the parameters of a model: its value and its two forms.

    pull_    p += A / (A + c) (m - p), the proximal step with c = 1 / (strength * step size)
    push_    g += strength A (p - m), the gradient

What they cost is memory traffic: every tensor is read once, and nothing of a parameter's size is allocated. Large parameters pass
in blocks through one small room that stays in the cache, many small ones in one call, and those without a flat layout as a whole.
With `compiled`, torch.compile makes one loop of each large parameter and one call of all. p and g may be in half precision and A in
bf16, while m and what is computed are at least in fp32; A and m may lie on another device.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

LOG = logging.getLogger("retain")
CACHED = 2**16
"""Elements of a block on the CPU: in fp32, those of four tensors fit into the 1-2 MiB of a core's second cache."""

Term = tuple[list[Tensor], float]
"""Tensors of one shape, the first of them changed and the last the anchor; and a factor."""


@torch.no_grad()
def value(protected: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """The sum of A (p - m)^2 / 2 over tensors (p, A, m), 0-d, fp64."""
    total = torch.zeros((), dtype=torch.float64)
    for tensors in protected:
        for p, A, m in _pieces(tensors, CACHED):
            total += (p - m).square_().mul_(A).sum(dtype=torch.float64).cpu()
    return total / 2


def pull_(terms: Sequence[Term], *, compiled: bool = False) -> None:
    """Move p by A / (A + c) of the way to m, for terms of (p, A, m) and c > 0: not at all where A is 0 or p is m, to the bit."""
    _run_(_PULL, terms, compiled)


def push_(terms: Sequence[Term], *, compiled: bool = False) -> None:
    """Add strength A (p - m) to g, for terms of (g, p, A, m) and a strength."""
    _run_(_PUSH, terms, compiled)


# --- kernels ----------------------------------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """One elementwise change of its first tensor, in three ways.

    Attributes:
        whole: for any strides, with temporaries of the tensors' size; what torch.compile makes one loop of.
        block: for flat pieces, with room for one.
        group: for lists of tensors of one dtype, in few calls, with temporaries of their size.
    """

    whole: Callable[..., None]
    block: Callable[..., None]
    group: Callable[..., None]


def _pull_whole(p: Tensor, A: Tensor, m: Tensor, c: float | Tensor) -> None:
    A = A.to(m.dtype)
    p.copy_(p + A / (A + c) * (m - p))  # lerp would choose between two forms for every element


def _pull_block(p: Tensor, A: Tensor, m: Tensor, c: float, room: Tensor) -> None:
    if A.dtype == room.dtype:
        torch.add(A, c, out=room)
    else:
        room.copy_(A).add_(c)
    torch.div(A, room, out=room)
    if p.dtype == m.dtype:
        p.lerp_(m, room)
    else:
        p.copy_(torch.lerp(p.to(m.dtype), m, room, out=room))


def _pull_group(p: list[Tensor], A: list[Tensor], m: list[Tensor], c: list[float]) -> None:
    torch._foreach_lerp_(p, m, torch._foreach_div(A, torch._foreach_add(A, c)))


def _push_whole(g: Tensor, p: Tensor, A: Tensor, m: Tensor, strength: float | Tensor) -> None:
    g.copy_(g + strength * A.to(m.dtype) * (p - m))


def _push_block(g: Tensor, p: Tensor, A: Tensor, m: Tensor, strength: float, room: Tensor) -> None:
    torch.sub(p, m, out=room)
    if g.dtype == A.dtype == room.dtype:
        g.addcmul_(A, room, value=strength)
    else:
        g.add_(room.mul_(A).mul_(strength))


def _push_group(g: list[Tensor], p: list[Tensor], A: list[Tensor], m: list[Tensor], strength: list[float]) -> None:
    torch._foreach_addcmul_(g, A, torch._foreach_sub(p, m), strength)


_PULL = Kernel(_pull_whole, _pull_block, _pull_group)
_PUSH = Kernel(_push_whole, _push_block, _push_group)


# --- how they pass over a model ---------------------------------------------------------------------------------------


@torch.no_grad()
def _run_(kernel: Kernel, terms: Sequence[Term], compiled: bool) -> None:
    size = _block(terms)
    small: list[Term] = []
    large: list[Term] = []
    for tensors, factor in terms:
        alike = all(tensor.dtype == tensors[0].dtype and tensor.device == tensors[0].device for tensor in tensors)
        (small if alike and tensors[0].numel() <= size // 2 else large).append((tensors, factor))
    _run_large_(kernel, _run_compiled_(kernel.whole, large) if compiled else large, size)
    while small:
        ends = itertools.accumulate(tensors[0].numel() for tensors, _ in small)
        count = max(1, sum(end <= size // 2 for end in ends))
        columns = zip(*(tensors for tensors, _ in small[:count]), strict=True)
        kernel.group(*map(list, columns), [factor for _, factor in small[:count]])
        small = small[count:]


def _run_large_(kernel: Kernel, terms: Sequence[Term], size: int) -> None:
    room = torch.empty(0)
    for tensors, factor in terms:
        first, dtype = tensors[0], tensors[-1].dtype
        if room.device != first.device or room.dtype != dtype or not len(room):
            room = torch.empty(size, dtype=dtype, device=first.device)
        for piece in _pieces(tensors, size):
            if piece[0].ndim == 1 and (count := len(piece[0])) <= size:
                kernel.block(*piece, factor, room if count == size else room[:count])
            else:
                kernel.whole(*piece, factor)


_COMPILED: dict[Callable[..., None], Callable[..., None] | None] = {}
"""Compiled functions; None where compiling failed, so that it is tried and reported once."""


def _run_compiled_(function: Callable[..., None], terms: Sequence[Term]) -> list[Term]:
    """Run a function over all these tensors in one call of torch.compile, and give back the terms that are left to do."""

    def over_all(tensors: list[list[Tensor]], factors: Tensor) -> None:
        for each, factor in zip(tensors, factors, strict=True):
            function(*each, factor)

    if not terms or (function in _COMPILED and _COMPILED[function] is None):
        return list(terms)
    device = terms[0][0][0].device
    fused: list[Term] = []
    left: list[Term] = []
    for tensors, factor in terms:
        fits = all(tensor.is_contiguous() and tensor.device == device for tensor in tensors)
        (fused if fits else left).append((tensors, factor))
    if not fused:
        return left
    # a tensor: numbers would become part of the code, which would be compiled again whenever they change
    factors = torch.tensor([factor for _, factor in fused], dtype=fused[0][0][-1].dtype, device=device)
    try:
        if (compiled := _COMPILED.get(function)) is None:
            compiled = _COMPILED[function] = torch.compile(over_all, fullgraph=True)
        compiled([[tensor.detach().view(-1) for tensor in tensors] for tensors, _ in fused], factors)
    except Exception as error:  # whatever a compiler, and what it calls, may raise
        LOG.warning("torch.compile failed, so the penalty runs without it: %s", str(error).strip().partition("\n")[0])
        _COMPILED[function] = None
        return list(terms)
    return left


def _block(terms: Sequence[Term]) -> int:
    """Elements of a block: what the cache holds; on a GPU as many as keep it busy, but a 40th of all, 0.1 byte of each, at most."""
    if all(tensors[0].device.type == "cpu" for tensors, _ in terms):
        return CACHED
    return max(CACHED, min(2**22, sum(tensors[0].numel() for tensors, _ in terms) // 40))


def _pieces(tensors: Sequence[Tensor], size: int) -> Iterator[Sequence[Tensor]]:
    """Matching flat pieces of tensors of one shape, on the device of the first; as they are where one is not contiguous."""
    home = tensors[0].device
    pieces: Iterator[Sequence[Tensor]] = iter([tensors])
    if all(tensor.is_contiguous() for tensor in tensors):
        pieces = zip(*(tensor.detach().view(-1).split(size) for tensor in tensors), strict=True)
    if all(tensor.device == home for tensor in tensors):
        yield from pieces
    else:
        for piece in pieces:
            yield [tensor.to(home, non_blocking=True) for tensor in piece]
