"""What each known operation contributes to the gradient of a row, and the sum over rows of its square.

For inputs a [rows, in] and output gradients g [rows, out] of a linear layer the gradient of a row is the outer product of its g
and a, so the sum of squares is (g * g)^T (a * a): one matrix product. With tokens, pixels or several uses a row's outer products
are summed before they are squared, a few rows at a time. The other operations are of that kind or elementwise.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from retain.forgetting.persample import Watch

SCRATCH_BYTES = 2**20
"""Per-row gradients are formed for as many rows at once as fit in here, one at least."""


class Region(NamedTuple):
    """Where a tensor that a call got lies in a parameter: rows start to stop of its first dimension, maybe transposed."""

    name: str
    start: int
    stop: int
    transposed: bool = False


class Layout(NamedTuple):
    """Where the rows of a batch are in a tensor: a dimension, alone or flattened together with the tokens of a row.

    Attributes:
        dim: the dimension.
        flat: how it is shared: ``rows`` (alone), ``rows-tokens`` (a row's tokens stand together) or ``tokens-rows``.
    """

    dim: int
    flat: str = "rows"

    def fits(self, values: Tensor, rows: int) -> bool:
        """Whether a tensor can hold so many rows in this way."""
        if values.ndim <= self.dim:
            return False
        return values.shape[self.dim] == rows if self.flat == "rows" else values.shape[0] % rows == 0

    def rows_first(self, values: Tensor, rows: int) -> Tensor:
        """A view [rows, ...] of values."""
        if self.flat == "rows":
            return values.movedim(self.dim, 0) if self.dim else values
        if self.flat == "rows-tokens":
            return values.unflatten(0, (rows, -1))
        return values.unflatten(0, (-1, rows)).transpose(0, 1)


ROWS = Layout(0)

SHARED = Layout(-1, "shared")
"""The same values for every row, as embeddings of positions are: they are copied for each row."""

LEFT = Layout(-1, "left")
"""Not handled here: its parameters are left to the caller."""


class Part(NamedTuple):
    """What one call contributes to one parameter.

    Attributes:
        region: of the parameter.
        grads: rows start to stop of its per-row gradients, [rows, *shape of the region as the call saw it].
        squares: adds alpha times the sum over rows of their squares to a tensor of the region's shape, where that takes less
            than forming them.
    """

    region: Region
    grads: Callable[[int, int], Tensor]
    squares: Callable[[Tensor, float], object] | None = None


def add_squares_(sums: Tensor, parts: Sequence[Part], rows: int, alpha: float) -> None:
    """Add alpha times the sum over rows of (the sum over parts of per-row gradients)^2."""
    first, *others = parts
    if not others and first.squares is not None:
        first.squares(sums, alpha)
        return
    count = max(1, SCRATCH_BYTES // max(1, sums.numel() * sums.itemsize))
    for start in range(0, rows, count):
        grads = first.grads(start, min(rows, start + count))
        for part in others:
            grads = grads + part.grads(start, min(rows, start + count))
        if grads.shape[0] == 1:
            sums.addcmul_(grads[0], grads[0], value=alpha)
        else:
            sums.add_(grads.square_().sum(0), alpha=alpha)


_HALF = (torch.float16, torch.bfloat16)


def precise(values: Tensor) -> Tensor:
    """At least fp32: squares of fp16 gradients below 1.7e-4 would vanish, and sums in bf16 stall."""
    return values.float() if values.dtype in _HALF else values


def _products(region: Region, left: Tensor, right: Tensor) -> Part:
    """Per-row gradients left^T right, of left [rows, (tokens,) m] and right [rows, (tokens,) n]: [rows, m, n]."""
    if left.ndim == 2:

        def squares(sums: Tensor, alpha: float) -> None:
            sums.addmm_(left.square().mT, right.square(), alpha=alpha)

        return Part(region, lambda start, stop: torch.einsum("ri,rj->rij", left[start:stop], right[start:stop]), squares)
    left, right = left.flatten(1, -2), right.flatten(1, -2)
    if left.shape[1] == 1:
        return _products(region, left[:, 0], right[:, 0])
    return Part(region, lambda start, stop: torch.bmm(left[start:stop].mT, right[start:stop]))


def _vectors(region: Region, grads: Tensor) -> Part:
    """Per-row gradients that are at hand, [rows, *shape]."""

    def squares(sums: Tensor, alpha: float) -> None:
        sums.add_(grads.square().sum(0), alpha=alpha)

    return Part(region, lambda start, stop: grads[start:stop].clone(), squares)


def _token_sum(grads: Tensor, dims: int) -> Tensor:
    """[rows, ..., *last `dims` dimensions] summed over what lies between."""
    between = tuple(range(1, grads.ndim - dims))
    return grads.sum(between) if between else grads


def _linear(watch: Watch, func: Any, args: Any, kwargs: Any) -> Tensor:
    def call(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.ndim != 2 or input.ndim < 2:
            return func(input, weight, bias)

        def parts(values: Tensor, grads: Tensor, regions: Any, layout: Layout) -> Iterator[Part]:
            if regions[0]:
                yield _products(regions[0], grads, precise(values))
            if regions[1]:
                yield _vectors(regions[1], _token_sum(grads, 1))

        return watch.tap("linear", (weight, bias), lambda w, b: func(input, w, b), input, parts)

    return call(*args, **kwargs)


def _matmul(watch: Watch, func: Any, args: Any, kwargs: Any) -> Tensor:
    def call(input: Tensor, other: Tensor, **more: Any) -> Tensor:
        if more or other.ndim != 2 or input.ndim < 2:
            return func(input, other, **more)

        def parts(values: Tensor, grads: Tensor, regions: Any, layout: Layout) -> Iterator[Part]:
            yield _products(regions[0], precise(values), grads)

        return watch.tap("matmul", (other,), lambda w: func(input, w), input, parts)

    return call(*args, **kwargs)


def _addmm(watch: Watch, func: Any, args: Any, kwargs: Any) -> Tensor:
    def call(input: Tensor, mat1: Tensor, mat2: Tensor, **more: Any) -> Tensor:
        if more or input.shape != mat2.shape[1:]:
            return func(input, mat1, mat2, **more)

        def parts(values: Tensor, grads: Tensor, regions: Any, layout: Layout) -> Iterator[Part]:
            if regions[0]:
                yield _products(regions[0], precise(values), grads)
            if regions[1]:
                yield _vectors(regions[1], _token_sum(grads, 1))

        return watch.tap("addmm", (mat2, input), lambda w, b: func(b, mat1, w), mat1, parts)

    return call(*args, **kwargs)


def _convolution(watch: Watch, func: Any, args: Any, kwargs: Any) -> Tensor:
    dims = 1 if func is torch.conv1d else 2

    def call(
        input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> Tensor:
        def run(w: Tensor, b: Tensor | None) -> Tensor:
            return func(input, w, b, stride, padding, dilation, groups)

        if input.ndim != dims + 2:
            return run(weight, bias)

        def parts(values: Tensor, grads: Tensor, regions: Any, layout: Layout) -> Iterator[Part]:
            if regions[0]:
                yield _of_kernel(regions[0], values, grads, weight.shape, stride, padding, dilation, groups)
            if regions[1]:
                yield _vectors(regions[1], grads.flatten(2).sum(2))

        return watch.tap("convolution", (weight, bias), run, input, parts)

    return call(*args, **kwargs)


def _of_kernel(
    region: Region, values: Tensor, grads: Tensor, shape: torch.Size, stride: Any, padding: Any, dilation: Any, groups: int
) -> Part:
    """Per-row gradients of a convolution's kernel: its input unfolded into patches, as many rows at a time as asked for."""
    if len(shape) == 3:
        values, grads, kernel = values.unsqueeze(2), grads.unsqueeze(2), (1, shape[2])
        stride, dilation = (1, *_pair(stride, 1)), (1, *_pair(dilation, 1))
        padding = padding if isinstance(padding, str) else (0, *_pair(padding, 1))
    else:
        kernel = (shape[2], shape[3])
        stride, dilation = _pair(stride, 2), _pair(dilation, 2)
    if padding == "valid":
        padding = 0
    if padding == "same":  # torch puts the odd one at the end
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        values, padding = F.pad(values, (reach[1] // 2, reach[1] - reach[1] // 2, reach[0] // 2, reach[0] - reach[0] // 2)), 0

    def kernels(start: int, stop: int) -> Tensor:
        patches = F.unfold(precise(values[start:stop]), kernel, dilation, padding, stride)
        patches = patches.unflatten(1, (groups, -1))
        outputs = grads[start:stop].flatten(2).unflatten(1, (groups, -1))
        return (outputs @ patches.mT).reshape(-1, *shape)

    return Part(region, kernels)


def _pair(value: Any, count: int) -> tuple[int, ...]:
    listed = (value,) if isinstance(value, int) else tuple(value)
    return listed * count if len(listed) == 1 else listed


def _embedding(watch: Watch, func: Any, args: Any, kwargs: Any) -> Tensor:
    def call(
        weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
    ) -> Tensor:
        def run(w: Tensor) -> Tensor:
            return func(w, indices, padding_idx, scale_grad_by_freq, sparse)

        if scale_grad_by_freq:
            return run(weight)

        def parts(values: Tensor, grads: Tensor, regions: Any, layout: Layout) -> Iterator[Part]:
            yield _of_embedding(regions[0], values.flatten(1), grads.flatten(1, -2), weight.shape, padding_idx)

        return watch.tap("embedding", (weight,), run, indices, parts)

    return call(*args, **kwargs)


def _of_embedding(region: Region, indices: Tensor, grads: Tensor, shape: torch.Size, padding: int) -> Part:
    """Per-row gradients of a table [entries, d]: sums over a row's tokens with the same index [rows, tokens]."""
    entries = shape[0]
    if padding >= 0:
        grads = grads * (indices != padding).unsqueeze(-1)

    def dense(start: int, stop: int) -> Tensor:
        rows = torch.arange(stop - start, device=indices.device).unsqueeze(1)
        flat = grads.new_zeros((stop - start) * entries, shape[1])
        places = (indices[start:stop] + rows * entries).flatten()
        return flat.index_add_(0, places, grads[start:stop].flatten(0, 1)).unflatten(0, (-1, entries))

    def squares(sums: Tensor, alpha: float) -> None:
        rows = torch.arange(indices.shape[0], device=indices.device).unsqueeze(1)
        places, position = torch.unique(indices + rows * entries, return_inverse=True)
        added = grads.new_zeros(len(places), shape[1]).index_add_(0, position.flatten(), grads.flatten(0, 1))
        sums.index_add_(0, places % entries, added.square_(), alpha=alpha)

    return Part(region, dense, squares)


def _norm(
    watch: Watch, kind: str, input: Tensor, weight: Any, bias: Any, run: Callable[..., Tensor], bare: Callable[[Tensor], Tensor]
) -> Tensor:
    """A norm whose weight and bias have the shape of the last dimensions, or (batch, group) of dimension 1.

    Args:
        watch: watches.
        kind: name of the operation.
        input: what is normalised.
        weight: scale of the normalised values.
        bias: what is added.
        run: the call, given weight and bias.
        bare: normalises values [rows, ...] without them.
    """

    def parts(values: Tensor, grads: Tensor, regions: Any, layout: Layout) -> Iterator[Part]:
        def summed(each: Tensor) -> Tensor:
            if kind in ("layer", "rms"):
                return _token_sum(each, weight.ndim if weight is not None else bias.ndim)
            return each.flatten(2).sum(2) if each.ndim > 2 else each

        if regions[0]:
            yield _vectors(regions[0], summed(grads * bare(precise(values))))
        if regions[1]:
            yield _vectors(regions[1], summed(grads))

    return watch.tap(kind, (weight, bias), run, input, parts)


def _layer_norm(watch: Watch, func: Any, args: Any, kwargs: Any) -> Tensor:
    def call(input: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *more: Any) -> Tensor:
        bare = functools.partial(F.layer_norm, normalized_shape=shape, eps=eps)
        return _norm(watch, "layer", input, weight, bias, lambda w, b: func(input, shape, w, b, eps, *more), bare)

    return call(*args, **kwargs)


def _rms_norm(watch: Watch, func: Any, args: Any, kwargs: Any) -> Tensor:
    def call(input: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Tensor:
        bare = functools.partial(F.rms_norm, normalized_shape=shape, eps=eps)
        return _norm(watch, "rms", input, weight, None, lambda w, _: func(input, shape, w, eps), bare)

    return call(*args, **kwargs)


def _group_norm(watch: Watch, func: Any, args: Any, kwargs: Any) -> Tensor:
    def call(input: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *more: Any) -> Tensor:
        bare = functools.partial(F.group_norm, num_groups=groups, eps=eps)
        return _norm(watch, "group", input, weight, bias, lambda w, b: func(input, groups, w, b, eps, *more), bare)

    return call(*args, **kwargs)


def _batch_norm(watch: Watch, func: Any, args: Any, kwargs: Any) -> Tensor:
    def call(
        input: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, *more: Any
    ) -> Tensor:
        def run(w: Any, b: Any) -> Tensor:
            return func(input, w, b, mean, var, training, momentum, eps, *more)

        if training:
            return run(weight, bias)

        def bare(values: Tensor) -> Tensor:
            return F.batch_norm(values, mean.to(values.dtype), var.to(values.dtype), eps=eps)

        return _norm(watch, "batch", input, weight, bias, run, bare)

    return call(*args, **kwargs)


def _elementwise(watch: Watch, func: Any, args: Any, kwargs: Any) -> Tensor:
    """A sum or product x + p, x * p, where p is broadcast over the rows."""
    if kwargs or len(args) != 2 or not all(isinstance(each, Tensor) for each in args):
        return func(*args, **kwargs)
    regions = [watch.region(each) for each in args]
    if sum(region is not None for region in regions) != 1:
        return func(*args)
    place = 0 if regions[0] else 1
    param, other = args[place], args[1 - place]
    product = func in _PRODUCTS

    def run(p: Tensor) -> Tensor:
        return func(p, other) if place == 0 else func(other, p)

    if product and (other.ndim < param.ndim or torch.broadcast_shapes(other.shape, param.shape) != other.shape):
        return run(param)
    kind = "product" if product else "sum"
    return watch.tap(kind, (param,), run, other if product else None, functools.partial(_of_broadcast, param.shape))


def _expand(watch: Watch, func: Any, args: Any, kwargs: Any) -> Tensor:
    if kwargs or watch.region(args[0]) is None:
        return func(*args, **kwargs)
    parts = functools.partial(_of_broadcast, args[0].shape)
    return watch.tap("expand", (args[0],), lambda p: func(p, *args[1:]), None, parts)


def _of_broadcast(shape: torch.Size, values: Tensor | None, grads: Tensor, regions: Any, layout: Layout) -> Iterator[Part]:
    """Per-row gradients of a parameter that was broadcast over the rows: those of the output, summed to its shape."""
    if values is not None:
        grads = grads * precise(values)
    dims = grads.ndim if layout.flat == "rows" else grads.ndim - 1
    padded = [1] * (dims - len(shape)) + list(shape)
    rest = [1, *padded[1:]] if layout.flat != "rows" else padded[: layout.dim] + padded[layout.dim + 1 :]
    summed = [d for d, size in enumerate(rest, 1) if size == 1 and grads.shape[d] != 1]
    yield _vectors(regions[0], (grads.sum(summed) if summed else grads).reshape(-1, *shape))


def _selection(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
    """A choice of elements by the values of a tensor: rows may differ in how many they keep."""
    indices = args[1:] if func is not Tensor.__getitem__ or not isinstance(args[1], tuple) else args[1]
    watch.selects |= func not in (Tensor.__getitem__,) or any(isinstance(index, (Tensor, list)) for index in indices)
    return func(*args, **kwargs)


_PRODUCTS = frozenset({torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__})
_SUMS = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__})


def _body(function: Any) -> Any:
    """A function of torch.nn.functional as it is where nothing watches, so that its own calls can be watched."""
    off = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), lambda *_: False)
    code, defaults, closure = function.__code__, function.__defaults__, function.__closure__
    body = types.FunctionType(code, {**function.__globals__, **off}, function.__name__, defaults, closure)
    body.__kwdefaults__ = function.__kwdefaults__

    def run(watch: Watch, func: Any, args: Any, kwargs: Any) -> Any:
        with watch:
            return body(*args, **kwargs)

    return run


_COMPOSITE = (F.embedding, F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm, F.multi_head_attention_forward)

_SELECTIONS = (
    Tensor.__getitem__,
    *(torch.index_select, Tensor.index_select, torch.masked_select, Tensor.masked_select, torch.take, Tensor.take),
    *(torch.gather, Tensor.gather, torch.nonzero, Tensor.nonzero, torch._C._VariableFunctions._pack_padded_sequence),
)

OPERATIONS: dict[Any, Callable[[Watch, Any, Any, Any], Any]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
    torch.conv1d: _convolution,
    torch.conv2d: _convolution,
    torch.embedding: _embedding,
    torch.layer_norm: _layer_norm,
    torch.rms_norm: _rms_norm,
    torch.group_norm: _group_norm,
    torch.batch_norm: _batch_norm,
    **dict.fromkeys(_PRODUCTS | _SUMS, _elementwise),
    Tensor.expand: _expand,
    **{function: _body(function) for function in _COMPOSITE},
    **dict.fromkeys(_SELECTIONS, _selection),
}
