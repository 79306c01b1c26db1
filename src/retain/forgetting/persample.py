"""Sums over rows of squared per-row gradients, from one forward and one backward pass over a batch.

For a linear layer with inputs a [rows, in] and output gradients g [rows, out] the gradient of one row is the outer product of
its g and a, so the sum of their squares is (g * g)^T (a * a): one matrix product, and no gradient of a weight is ever computed.
Where a row uses a weight several times (tokens, pixels, tied and reused layers), its gradients are summed before they are squared.

Calls of torch functions are watched while the model runs (a `TorchFunctionMode`), so that it does not matter which module makes
them. A watched call gets its parameters detached and its output tapped; a parameter that the outputs still depend on was used in
a way that is not known here, and is left to the caller. What is known: linear, addmm, matmul, conv1d, conv2d, embedding, layer,
RMS, group and batch (eval) norm, and parameters that are added, multiplied or expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from retain.forgetting.layers import LEFT, OPERATIONS, ROWS, SHARED, Layout, Part, Region, add_squares_, precise


class Site(NamedTuple):
    """A watched call: its operation, its parameters by role (None for a role that no tracked one plays), where its rows are."""

    kind: str
    regions: tuple[Region | None, ...]
    layout: Layout


class Plan:
    """What is known about the calls of a model.

    Attributes:
        wholes: the tracked parameters by `id`, as regions.
        sites: the watched calls in their order; None while they are being looked for.
        uses: how many calls use a region.
        left: parameters that are left to the caller whatever the outputs depend on: their regions overlap in part, or the
            caller says so.
        row_bytes: of the watched outputs of one row.
        checked: shapes of a row's inputs for which the caller has seen that the plan holds.
    """

    def __init__(self, params: Mapping[str, Tensor], sites: Sequence[Site] | None = None, row_bytes: int = 0) -> None:
        self.row_bytes = row_bytes
        self.checked: set[tuple[torch.Size, ...]] = set()
        self.wholes = {id(param): Region(name, 0, param.shape[0] if param.ndim else 1) for name, param in params.items()}
        self.sites = sites
        used = [region for site in sites or () if site.layout != LEFT for region in site.regions if region]
        self.uses = {region: used.count(region) for region in used}
        self.left: set[str] = set()
        for first in self.uses:
            for second in self.uses:
                apart = first.stop <= second.start or second.stop <= first.start
                if first.name == second.name and first != second and not (apart and first.transposed == second.transposed):
                    self.left.add(first.name)


class Unknown(Exception):
    """A call differs from the one that was planned for its place; the layouts have to be found again."""


class _Tap(torch.autograd.Function):
    """The identity; hands the gradient of its output to a function, with what was saved for it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor, values: Tensor | None, receive: Callable[..., None]) -> Tensor:
        ctx.receive = receive
        ctx.save_for_backward(values)
        return output.data  # an alias, which the model may change in place; a view of `output` it may not

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.receive(ctx.saved_tensors[0], grads)
        return grads, None, None, None


class Watch(TorchFunctionMode):
    """Watches a model's forward pass; afterwards `backward` adds the sums of squares.

    Args:
        plan: of the model; one without sites to look for them.
        rows: of the batch.

    Attributes:
        seen: operation, regions and output of every call, where sites are looked for.
        ends: place and output of the last row of every watched call, else.
        selects: whether the model chose elements by the values of a tensor.
    """

    def __init__(self, plan: Plan, rows: int) -> None:
        super().__init__()
        self.plan, self.rows = plan, rows
        self.seen: list[tuple[str, tuple[Region | None, ...], Tensor]] = []
        self.ends: list[tuple[int, Tensor]] = []
        self.selects = False
        self.place = 0
        self.token = torch.zeros((), requires_grad=True)
        self.left: frozenset[str] = frozenset()
        self._pass = _Pass({}, 1.0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call, watched if it is known and one of its tensors is tracked."""
        operation = OPERATIONS.get(func)
        if operation is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return operation(self, func, args, kwargs or {})

    # --- forward ------------------------------------------------------------------------------------------------------

    def region(self, value: Any) -> Region | None:
        """The tracked parameter that a tensor is, or lies in; None for any other."""
        wholes = self.plan.wholes
        whole = wholes.get(id(value))
        if whole is not None or not isinstance(value, Tensor) or (base := value._base) is None or not value.requires_grad:
            return whole
        if (whole := wholes.get(id(base))) is None:
            return None
        if base.ndim == 2 and value.shape == base.mT.shape and value.stride() == base.mT.stride():
            return whole._replace(transposed=True)
        if value.ndim == base.ndim > 0 and value.shape[1:] == base.shape[1:] and value.stride() == base.stride():
            start = (value.storage_offset() - base.storage_offset()) // max(1, base.stride(0))
            return Region(whole.name, start, start + value.shape[0])
        return None

    def tap(self, kind: str, roles: Sequence[Any], run: Callable[..., Tensor], values: Tensor | None, parts: Any) -> Tensor:
        """Run a call whose tensors `roles` may be parameters, and tap its output.

        Args:
            kind: name of the operation.
            roles: the call's tensors that may be parameters, in the order in which `run` takes them.
            run: the call, given these.
            values: what the per-row gradients need beside those of the output, with rows where the output has them.
            parts: `parts(values, grads, regions, layout)` gives the `Part` of each region, from values and gradients [rows, ...].
        """
        regions = tuple([self.region(role) for role in roles])
        if not any(regions):
            return run(*roles)
        sites, place = self.plan.sites, self.place
        self.place = place + 1
        if sites is None:
            output = run(*roles)
            self.seen.append((kind, regions, output.detach()))
            return output
        if place >= len(sites) or sites[place].regions != regions or sites[place].kind != kind:
            raise Unknown
        layout = sites[place].layout
        if layout is LEFT:
            return run(*roles)  # not detached: the outputs depend on its parameters, which is how they are found
        output = run(*[role if region is None else role.detach() for role, region in zip(roles, regions, strict=True)])
        if layout is SHARED:  # one copy for each row, so that the gradient of each arrives by itself
            assert values is not None
            alone = values.ndim == 1 or values.shape[0] != 1
            values, output = (each.unsqueeze(0) if alone else each for each in (values, output))
            values, output = (each.expand(self.rows, *each.shape[1:]) for each in (values, output))
            layout = ROWS
        if not layout.fits(output, self.rows):
            raise Unknown
        self.ends.append((place, layout.rows_first(output, self.rows)[-1].detach().clone()))
        if regions[0] is None:
            values = None  # only what the first role's gradient needs

        def receive(values: Tensor | None, grads: Tensor) -> None:
            if grads.dtype is torch.float16 and not bool(torch.isfinite(grads).all()):
                self._pass.overflowed = True
                return
            grads = precise(grads)
            if layout is not ROWS:
                grads = layout.rows_first(grads, self.rows)
                values = None if values is None else layout.rows_first(values, self.rows)
            self._add(parts(values, grads, regions, layout))

        tapped: Tensor = _Tap.apply(output, self.token, None if values is None else values.detach(), receive)
        return tapped

    # --- backward -----------------------------------------------------------------------------------------------------

    def leave(self, outputs: Tensor) -> frozenset[str]:
        """Names of the parameters that the outputs depend on outside the watched calls: `backward` leaves them out."""
        wholes = self.plan.wholes
        unwatched = {wholes[id(leaf)].name for leaf in leaves(outputs) if id(leaf) in wholes}
        self.left = frozenset(unwatched | self.plan.left)
        return self.left

    def backward(self, outputs: Tensor, seed: Tensor, sums: Mapping[str, Tensor], alpha: float, *, last: bool) -> list[Region]:
        """Add alpha times the sum over rows of squared gradients of `(outputs * seed).sum()`.

        Args:
            outputs: of the watched forward pass.
            seed: gradient of the outputs.
            sums: where to add, by parameter name; those in `left` are not touched.
            alpha: takes back the square of the scale of `seed`.
            last: whether the graph may be freed.

        Returns:
            Regions whose gradient overflowed in half precision, to which nothing was added; call again with a smaller seed,
            and only they are added to.
        """
        uses = self.plan.uses
        if all(region.name in self.left for region in uses):
            return []
        now = self._pass = _Pass(sums, alpha, self._pass.done if self._pass.overflowed else set())
        with torch.autocast(outputs.device.type, enabled=False):
            torch.autograd.grad(outputs, self.token, seed.to(outputs.dtype), retain_graph=not last, allow_unused=True)
        if not now.overflowed:
            for region, waiting in list(now.waiting.items()):  # the outputs do not depend on all uses
                self._finish(region, waiting)
            return []
        return [region for region in uses if region not in now.done and region.name not in self.left]

    def _add(self, parts: Iterator[Part]) -> None:
        now, uses = self._pass, self.plan.uses
        for part in parts:
            region = part.region
            if region.name in self.left or region in now.done:
                continue
            waiting = now.waiting.setdefault(region, [])
            waiting.append(part)
            if len(waiting) == uses[region]:
                self._finish(region, waiting)

    def _finish(self, region: Region, parts: Sequence[Part]) -> None:
        sums = self._pass.sums[region.name]
        if sums.ndim and region.stop - region.start != sums.shape[0]:
            sums = sums[region.start : region.stop]
        add_squares_(sums.mT if region.transposed else sums, parts, self.rows, self._pass.alpha)
        self._pass.done.add(region)
        self._pass.waiting.pop(region)


@dataclass
class _Pass:
    """One backward pass: where it adds, and what has been added."""

    sums: Mapping[str, Tensor]
    alpha: float
    done: set[Region] = field(default_factory=set)
    waiting: dict[Region, list[Part]] = field(default_factory=dict)
    overflowed: bool = False


def leaves(outputs: Tensor) -> list[Tensor]:
    """The leaves with `requires_grad` that a tensor was computed from."""
    seen, found, waiting = set(), [], [outputs.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        waiting += [each for each, _ in node.next_functions]
    return found


# --- where the rows are -----------------------------------------------------------------------------------------------


def find_sites(one: Watch, two: Watch, tolerance: float) -> list[Site] | None:
    """The watched calls with the places of their rows, from a forward pass of one row and one of that row and another.

    Args:
        one: watched the first row.
        two: watched the two.
        tolerance: how far equal values may lie apart, relative to the largest.

    Returns:
        None where the two passes do not make the same calls.
    """
    if [seen[:2] for seen in one.seen] != [seen[:2] for seen in two.seen]:
        return None
    found = []
    for (kind, regions, alone), (_, _, together) in zip(one.seen, two.seen, strict=True):
        layout = layout_of(alone, together, tolerance)
        if (layout is SHARED and kind != "embedding") or (layout is not ROWS and kind in _ROWS_FIRST):
            layout = LEFT
        if layout.flat in ("rows-tokens", "tokens-rows") and two.selects:  # a row may have fewer tokens than another
            layout = LEFT
        found.append(Site(kind, regions, layout))
    return found


def same_end(watch: Watch, alone: Watch, tolerance: float) -> bool:
    """Whether the last row of a watched batch is where the plan says, in every call, given a pass of that row alone."""
    if len(alone.seen) != watch.place:
        return False
    gaps = []
    for place, end in watch.ends:
        layout = watch.plan.sites[place].layout if watch.plan.sites else ROWS
        own = alone.seen[place][2]
        own = own.reshape(end.shape) if layout is SHARED and own.numel() == end.numel() else own
        first = own if layout is SHARED else layout.rows_first(own, 1)[0]
        if first.shape != end.shape:
            return False
        gaps.append(gap(first, end, tolerance))
    return not gaps or bool(torch.stack(gaps).max() <= 0)


_ROWS_FIRST = frozenset({"convolution", "group", "batch"})
"""Operations whose dimensions have a fixed meaning, the first one that of rows."""


def layout_of(alone: Tensor, together: Tensor, tolerance: float) -> Layout:
    """Where two rows are in a tensor, given that of the first by itself; LEFT where no place fits, or two do."""
    if alone.ndim != together.ndim or not alone.ndim:
        return LEFT
    if alone.shape == together.shape:
        return SHARED if close(alone, together, tolerance) else LEFT
    dims = [d for d, (a, b) in enumerate(zip(alone.shape, together.shape, strict=True)) if a != b]
    if len(dims) > 1 or together.shape[dims[0]] != 2 * alone.shape[dims[0]]:
        return LEFT
    if alone.shape[dims[0]] == 1:
        layout = Layout(dims[0]) if dims[0] else ROWS
        return layout if close(alone, together.narrow(dims[0], 0, 1), tolerance) else LEFT
    if dims[0] != 0:
        return LEFT
    fits = [
        layout
        for layout in (Layout(0, "rows-tokens"), Layout(0, "tokens-rows"))
        if close(alone, layout.rows_first(together, 2)[0], tolerance)
    ]
    return fits[0] if len(fits) == 1 else LEFT


def close(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Whether two tensors have one shape and are equal up to a share of their largest value."""
    return first.shape == second.shape and (not first.numel() or bool(gap(first, second, tolerance) <= 0))


def gap(first: Tensor, second: Tensor, tolerance: float) -> Tensor:
    """How much farther two tensors of one shape lie apart than a share of their largest value allows, 0-d."""
    first, second = first.detach().float(), second.detach().float()
    if not first.numel():
        return first.new_zeros(())
    return (first - second).abs().max() - tolerance * torch.maximum(first.abs().max(), second.abs().max())
