"""The diagonal of the Fisher information of a model, exact for every row (Kirkpatrick et al. 2017; Martens 2020, section 5).

    F_i = 1/N sum_n E_y [(d log p(y | x_n) / d theta_i)^2]

The square is of one row's gradient, never of a batch's mean. Which labels y are meant is the estimator:

    exact      y over all labels, each with its probability under the model. The default up to 100 classes
    sampled    one label drawn from the model for every row: unbiased, one backward pass. The default above, and for tokens
    empirical  the label in the data: small where the model fits it, whatever the parameters matter (Kunstner et al. 2019)

Gradients are scaled by a power of two before they go through the model and taken back exactly, squared and summed in fp32 (fp64
for a model in fp64). The model runs in eval mode; its modes and buffers are put back. Rows stream through, so that memory does
not depend on their number, and the sums are a plain state that can be saved between batches.

Not here: blocks and Kronecker factors; targets that are not classes, but for the empirical estimator.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from retain.forgetting.layers import LEFT, SHARED, precise
from retain.forgetting.persample import Plan, Unknown, Watch, close, find_sites, leaves, same_end
from retain.params import check_finite, derive, generator, trainable, uniform
from retain.seams import Batch, Objective, concatenated

LOG = logging.getLogger("retain")
EXACT_AT_MOST = 100
"""Labels up to which the exact estimator is the default: it takes a backward pass for each but one."""
HALF_PRECISION_TOP = 8
"""Gradients of fp16 outputs start below 2^8: 2^8 below the largest fp16 number, and 2^32 above the smallest."""
RETRIES = 8
LARGEST_EXPONENT = 100
"""Of the scale: a gradient below 2^-100 is of a model that is certain of everything."""
SMALL_BYTES = 2**23

Estimator = Literal["auto", "exact", "sampled", "empirical"]


@dataclass
class Fisher:
    """Sums over the rows seen so far.

    Attributes:
        sums: of squared gradients, at least fp32, by parameter name; parameters that took no part are not there.
        rows: how many.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    rows: int = 0


class Labels(NamedTuple):
    """Which labels the expectation is over.

    Attributes:
        objective: `losses` of a label is minus its log-likelihood.
        estimator: of the module's table.
        key: random key of labels that are drawn; what a row draws depends on it and the row's number only.
    """

    objective: Objective
    estimator: Estimator = "auto"
    key: int = 0


def fisher_diagonal(
    model: nn.Module, batches: Iterable[Batch], objective: Objective, *, estimator: Estimator = "auto", seed: int = 0
) -> dict[str, Tensor]:
    """The diagonal Fisher information of a model's trainable parameters over batches.

    Args:
        model: gives logits [rows, classes].
        batches: rows of one device, that of the model. How they are cut does not matter.
        objective: what the model is trained with, such as `retain.CLASSIFICATION`.
        estimator: which labels are meant.
        seed: of the labels that are drawn.

    Returns:
        By parameter name, in fp32; parameters that the outputs do not depend on are not there.

    Raises:
        ValueError: no rows, no trainable parameters, outputs that the estimator cannot use, or values that are not finite.

    Example:
        >>> from retain import CLASSIFICATION
        >>> model, rows = nn.Linear(3, 2), Batch({"input": torch.eye(3)}, torch.tensor([0, 1, 1]))
        >>> sorted(fisher_diagonal(model, [rows], CLASSIFICATION))
        ['bias', 'weight']
    """
    fisher, params, labels = Fisher(), trainable(model), Labels(objective, estimator, derive("labels", seed))
    for batch in batches:
        add_(fisher, model, params, batch, labels)
    return mean(fisher)


def mean(fisher: Fisher) -> dict[str, Tensor]:
    """The Fisher information of the rows seen so far, by parameter name.

    Raises:
        ValueError: there were no rows, or a value is not finite.
    """
    if fisher.rows == 0:
        raise ValueError("Fisher information of zero rows: pass at least one row of the task before it is used.")
    if (name := check_finite(fisher.sums)) is not None:
        raise ValueError(f"The Fisher information of {name} is not finite: the model has diverged, or its inputs are not finite.")
    return {name: values / fisher.rows for name, values in fisher.sums.items()}


def add_(
    fisher: Fisher,
    model: nn.Module,
    params: Mapping[str, nn.Parameter],
    batch: Batch,
    labels: Labels,
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    micro_batch: int | None = None,
) -> None:
    """Add the rows of a batch; their weights do not count.

    Args:
        fisher: changed in place.
        model: its modes and buffers are put back, and the parameters' `grad` is not touched.
        params: the parameters to look at, by name; tied tensors once.
        batch: on the model's device.
        labels: which labels are meant.
        autocast: region in which the forward pass runs.
        micro_batch: rows of one forward pass at most; more where all their layers' outputs together take less than `SMALL_BYTES`.

    Raises:
        ValueError: there are no parameters, or the estimator cannot use the model's outputs.
    """
    if not params:
        raise ValueError("The model has no trainable parameters, so it has no Fisher information. Unfreeze some of them.")
    if name := next((name for name, param in params.items() if param.is_complex()), None):
        raise ValueError(f"{name} is complex: the Fisher information here is of real parameters. Leave it out of `params`.")
    model = getattr(model, "_orig_mod", model)  # of torch.compile: one row and another would be compiled apart
    versions = [value._version for value in batch.inputs.values() if isinstance(value, Tensor)]
    with torch.enable_grad(), evaluating(model, batch.targets.device):
        plan = _plan(model, params, batch, again=False)
        if plan is not None and micro_batch is not None:  # small rows go together, which costs next to no memory
            micro_batch = max(micro_batch, SMALL_BYTES // max(1, plan.row_bytes))
        for part in batch.parts(micro_batch):
            watch, logits = _watched(model, params, part, autocast)
            if watch is None:
                _row_by_row_(fisher, model, params, part, labels)
            else:
                _together_(fisher, model, params, part, labels, watch, logits)
            fisher.rows += len(part)
    if versions != [value._version for value in batch.inputs.values() if isinstance(value, Tensor)]:
        raise ValueError("The model changes its inputs in place, so rows would be seen changed. Copy them first: x = x.clone().")


def _together_(
    fisher: Fisher,
    model: nn.Module,
    params: Mapping[str, nn.Parameter],
    batch: Batch,
    labels: Labels,
    watch: Watch,
    logits: Tensor,
) -> None:
    """All rows at once; parameters that are used in unknown ways row by row."""
    seeds = label_gradients(logits, batch, labels, fisher.rows)
    left = watch.leave(logits)
    _sums_for_(fisher, params, [region.name for region in watch.plan.uses])
    if not len(seeds):  # one class, which is certain
        return
    scale, half = _scale(seeds, logits.dtype), logits.dtype is torch.float16
    for number, seed in enumerate(seeds):
        last = number == len(seeds) - 1 and not half
        for _ in range(RETRIES):
            overflowed = watch.backward(logits, seed * scale, fisher.sums, scale**-2, last=last)
            if not overflowed:
                break
            scale /= 2**HALF_PRECISION_TOP
        else:
            name = overflowed[0].name
            raise ValueError(f"The gradient of {name} is not finite, however small the loss is made: the model has diverged.")
    if left:
        del logits
        _say_once(model, f"every row takes a pass of its own for {', '.join(sorted(left))}, used in ways that are not known here")
        _row_by_row_(fisher, model, {name: params[name] for name in left}, batch, labels)


def _row_by_row_(fisher: Fisher, model: nn.Module, params: Mapping[str, nn.Parameter], batch: Batch, labels: Labels) -> None:
    """The same sums by a forward pass for every row, at full precision: right for any model, and slow."""
    for row in range(len(batch)):
        one = batch.rows(row, row + 1)
        logits = _logits(model(**one.inputs_as(_dtype(params))))
        used = {id(leaf) for leaf in leaves(logits)}
        chosen = {name: param for name, param in params.items() if id(param) in used}
        if not chosen:
            continue
        _sums_for_(fisher, params, chosen)
        seeds = label_gradients(logits, one, labels, fisher.rows + row)
        if len(seeds):
            scale = _scale(seeds, logits.dtype)
            _add_squares_(fisher.sums, chosen, logits, seeds * scale, scale**-2)


def _add_squares_(
    sums: Mapping[str, Tensor], params: Mapping[str, nn.Parameter], logits: Tensor, seeds: Iterable[Tensor], alpha: float
) -> None:
    """Add alpha times the squares of the gradients of a row's logits times each seed."""
    for seed in seeds:
        grads = torch.autograd.grad(logits, list(params.values()), seed.to(logits.dtype), retain_graph=True, allow_unused=True)
        for name, grad in zip(params, grads, strict=True):
            if grad is not None:
                values = (grad.to_dense() if grad.is_sparse else grad).to(sums[name].dtype)
                sums[name].addcmul_(values, values, value=alpha)


def _scale(seeds: Tensor, dtype: torch.dtype) -> float:
    """The power of two that brings the largest gradient of the outputs to about 1 (fp16: 2^8).

    So that the square of a small loss does not vanish, and one multiplied by a power of two takes exactly the same way.
    """
    top = HALF_PRECISION_TOP if dtype is torch.float16 else 0
    return float(2.0 ** min(LARGEST_EXPONENT, top - math.frexp(float(seeds.abs().max()))[1]))


def _sums_for_(fisher: Fisher, params: Mapping[str, nn.Parameter], names: Iterable[str]) -> None:
    """Make room for these names; sums that were read from a file follow the parameters to their device."""
    for name in names:
        param, sums = params[name], fisher.sums.get(name)
        if sums is None:
            dtype = torch.promote_types(param.dtype, torch.float32)
            fisher.sums[name] = torch.zeros(param.shape, dtype=dtype, device=param.device)
        elif sums.device != param.device:
            fisher.sums[name] = sums.to(param.device)


def _dtype(params: Mapping[str, nn.Parameter]) -> torch.dtype:
    return next(iter(params.values())).dtype


def _logits(outputs: Any) -> Tensor:
    if not isinstance(outputs, Tensor):
        raise ValueError(f"The Fisher information needs a model that returns logits, not {type(outputs).__name__}.")
    return outputs


# --- labels -----------------------------------------------------------------------------------------------------------


def label_gradients(logits: Tensor, batch: Batch, labels: Labels, first: int = 0) -> Tensor:
    """Gradients of the logits whose squares, taken through the model and summed, are the Fisher information.

    Args:
        logits: [rows, classes] or [rows, tokens, classes].
        batch: with targets [rows] or [rows, tokens].
        labels: which labels are meant.
        first: number of the batch's first row among those of the pass.

    Returns:
        [passes, *logits.shape], at least fp32.

    Raises:
        ValueError: the estimator cannot use logits or targets of this kind.
    """
    objective, estimator, _ = labels
    logits, targets = precise(logits.detach()), batch.targets
    classes = not targets.is_floating_point() and logits.ndim == targets.ndim + 1
    if estimator == "auto":
        estimator = "exact" if logits.ndim == 2 and logits.shape[-1] <= EXACT_AT_MOST else "sampled"
    if estimator != "empirical" and not classes:
        seen = f"targets of {targets.dtype} {tuple(targets.shape)} and outputs {tuple(logits.shape)}"
        raise ValueError(f"fisher={labels.estimator} needs class labels and their logits, not {seen}. Use fisher: empirical.")
    if estimator == "exact" and logits.ndim != 2:
        raise ValueError(f"fisher=exact takes logits [rows, classes], not {tuple(logits.shape)}. Use fisher: sampled for tokens.")

    p = logits.softmax(-1) if classes else logits
    if estimator == "sampled":
        targets = _drawn(p, targets, labels.key, first)
    if objective.categorical and classes:
        return softmax_factor(p) if estimator == "exact" else _minus_label(p, targets)[None]

    def gradient(targets: Tensor) -> Tensor:
        free = logits.clone().requires_grad_()
        losses = objective.losses(free, Batch(batch.inputs, targets, None, batch.meta))
        return torch.autograd.grad(losses.sum(), free)[0]

    if estimator != "exact":
        return gradient(targets)[None]
    return torch.stack([gradient(torch.full_like(targets, y)) * p[:, y, None].sqrt() for y in range(logits.shape[1])])


def softmax_factor(p: Tensor) -> Tensor:
    """Vectors s_k with sum_k s_k s_k^T = diag(p) - p p^T, the Fisher information of softmax's logits.

    The Cholesky factor in closed form (Tanabe and Sagae 1992): with q_k the probability of the labels after k,
    s_k = sqrt(p_k q_k / (p_k + q_k)) (e_k - sum_{i>k} p_i / q_k e_i). One vector fewer than there are labels; only positive
    numbers are added, so that nothing cancels.

    Args:
        p: probabilities, [rows, classes].

    Returns:
        [classes - 1, rows, classes].
    """
    tiny = torch.finfo(p.dtype).tiny
    onwards = p.flip(1).cumsum(1).flip(1)
    q = onwards[:, 1:]
    lengths = (p[:, :-1] * (q / onwards[:, :-1].clamp_min(tiny))).sqrt()
    after = (p[:, None, :] / q[:, :, None].clamp_min(tiny)).triu(1)  # [rows, k, i]
    factor = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)[:-1] - after
    return (factor * lengths[:, :, None]).transpose(0, 1)


def _minus_label(p: Tensor, targets: Tensor) -> Tensor:
    """The gradient p - e_y of the cross-entropy; 0 where an item counts for nothing."""
    index = targets.unsqueeze(-1)
    grads = p.scatter_add(-1, index.clamp_min(0), -torch.ones_like(index, dtype=p.dtype))
    return grads.masked_fill_(index == -100, 0.0)


def _drawn(p: Tensor, targets: Tensor, key: int, first: int) -> Tensor:
    """A label for every item, drawn by p from the row's number and the item's place; items that count for nothing stay so."""
    counters = (torch.arange(first, first + targets.shape[0]) << 32).view(-1, *[1] * (targets.ndim - 1))
    if targets.ndim > 1:
        counters = counters + torch.arange(targets[0].numel()).view(targets.shape[1:])
    cumulated = p.double().cumsum(-1)
    chance = uniform(key, counters).to(targets.device).unsqueeze(-1) * cumulated[..., -1:]
    drawn = torch.searchsorted(cumulated, chance, right=True).squeeze(-1).clamp_max(p.shape[-1] - 1)
    return torch.where(targets == -100, targets, drawn)


# --- the model while it is looked at ----------------------------------------------------------------------------------


@contextmanager
def evaluating(model: nn.Module, device: torch.device) -> Iterator[None]:
    """A region in which a model is in eval mode; modes and buffers are put back, whatever happens.

    The backward pass of cuDNN's recurrent layers needs train mode: there they are in it, without dropout.
    """
    parts = list(model.modules())
    recurrent = [part for part in parts if isinstance(part, nn.RNNBase)] if device.type == "cuda" else []
    modes = [(part, part.training) for part in parts if part.training or part in recurrent]
    dropout = [(part, part.dropout) for part in recurrent]
    buffers = [(part, name, each, None if each is None else each.clone()) for part in parts for name, each in part._buffers.items()]
    try:
        for part, _ in modes:
            part.training = part in recurrent
        for part in recurrent:
            part.dropout = 0.0
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        for part, share in dropout:
            part.dropout = share
        with torch.no_grad():
            for part, name, buffer, before in buffers:
                part._buffers[name] = buffer  # forward may have put another in its place
                if buffer is not None and before is not None and buffer.shape == before.shape:
                    buffer.copy_(before)
                elif buffer is not None and before is not None:
                    buffer.data = before


_PLANS: WeakKeyDictionary[nn.Module, tuple[Any, Plan]] = WeakKeyDictionary()
"""What was found out about a model, with the names, identities and shapes of its parameters then."""

_SAID: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
HALF_TOLERANCE = 0.05
"""How far equal values may lie apart, relative to the largest: products of one row and of several round differently."""


def _say_once(model: nn.Module, text: str) -> None:
    said = _SAID.setdefault(model, set())
    if text not in said:
        said.add(text)
        LOG.info("Fisher information: %s.", text)


def _watched(
    model: nn.Module, params: Mapping[str, nn.Parameter], batch: Batch, autocast: Callable[[], AbstractContextManager[Any]]
) -> tuple[Watch | None, Any]:
    """The logits of a batch, and what watched them being made; None where every row needs a pass of its own.

    The last row is looked at alone where inputs have another shape than before, and always where the model chooses by values.
    """
    dtype = _dtype(params)
    last = batch.rows(len(batch) - 1, len(batch))
    for again in (False, True):
        plan = _plan(model, params, batch, again)
        if plan is None:
            break
        watch, alone = Watch(plan, len(batch)), Watch(Plan(params), 1)
        try:
            with autocast(), watch:
                logits = _logits(model(**batch.inputs_as(dtype)))
            shapes = tuple(value.shape[1:] for value in batch.inputs.values() if isinstance(value, Tensor))
            if len(batch) == 1 or (shapes in plan.checked and not watch.selects):
                return watch, logits
            with autocast(), alone:
                own = _logits(model(**last.inputs_as(dtype)))
        except (Unknown, RuntimeError, IndexError):  # the model takes another way than for the rows that the plan is from
            continue
        tolerance = _TOLERANCE.get(logits.dtype, HALF_TOLERANCE)
        if close(own, logits[-1:], tolerance) and same_end(watch, alone, tolerance):
            plan.checked.add(shapes)
            return watch, logits
    return None, None


def _plan(model: nn.Module, params: Mapping[str, nn.Parameter], batch: Batch, again: bool) -> Plan | None:
    """The model's watched calls and where they have their rows; None where there is no such plan."""
    signature = [(name, id(param), param.shape) for name, param in params.items()]
    before = _PLANS.get(model)
    if before is not None and before[0] == signature and not again:
        return before[1]
    if len(batch) < 2:
        return None
    plan, reason = _find_plan(model, params, _pair(batch))
    if plan is not None:
        _PLANS[model] = signature, plan
    else:
        _say_once(model, f"every row takes a pass of its own, since {reason}")
    return plan


def _pair(batch: Batch) -> Batch:
    """The last row and one that differs from it, if any does: equal rows would hide that one depends on the other."""
    rows = len(batch)
    differs = torch.zeros(rows - 1, dtype=torch.bool)
    for value in batch.inputs.values():
        if isinstance(value, Tensor) and value.shape[:1] == (rows,):
            differs |= (value[:-1] != value[-1:]).flatten(1).any(1).cpu() if value.ndim > 1 else (value[:-1] != value[-1]).cpu()
    first = int(differs.int().argmax())
    return concatenated(batch.rows(first, first + 1), batch.rows(rows - 1, rows))


def _find_plan(model: nn.Module, params: Mapping[str, nn.Parameter], pair: Batch) -> tuple[Plan | None, str]:
    """A plan that was tried: on two rows it gives the squares that each row gives by itself. Or the reason why there is none."""
    dtype = _dtype(params)
    tolerance = _TOLERANCE.get(dtype, HALF_TOLERANCE)
    rows = [pair.rows(k, k + 1) for k in range(2)]
    one, two = (Watch(Plan(params), count) for count in (1, 2))
    try:
        with one:
            alone = [_logits(model(**rows[0].inputs_as(dtype)))]
        alone.append(_logits(model(**rows[1].inputs_as(dtype))))
        with two:
            together = _logits(model(**pair.inputs_as(dtype)))
    except (RuntimeError, IndexError) as error:  # what torch says of a model that cannot be watched
        return None, f"watched calls fail in it ({str(error).strip().splitlines()[0]})"
    if not (close(alone[0], together[:1], tolerance) and close(alone[1], together[1:], tolerance)):
        return None, "what the model makes of it depends on the rows around it"
    if (sites := find_sites(one, two, tolerance)) is None:
        return None, "the calls of the model depend on the number of rows"
    row_bytes = sum(output.nbytes for *_, output in two.seen) // 2 + together.itemsize * together.shape[-1] ** 2

    seed = torch.randn(together.shape, generator=generator(0), dtype=torch.float64).to(together)
    expected = _zeros(params)
    for each, own in zip(alone, seed.split(1), strict=True):
        _add_squares_(expected, params, each, [own], 1.0)
    reason = ""
    for known in (sites, [site._replace(layout=LEFT) if site.layout is SHARED else site for site in sites]):
        plan, found = Plan(params, known, row_bytes), _zeros(params)
        watch = Watch(plan, 2)
        try:
            with watch:
                logits = _logits(model(**pair.inputs_as(dtype)))
            left = watch.leave(logits)
            watch.backward(logits, seed, found, 1.0, last=True)
        except Exception as error:  # whatever a model, or torch within it, says to calls that are tapped
            reason = f"it does not bear to be watched ({str(error).strip().splitlines()[:1]})"
            continue
        plan.left |= {name for name in params.keys() - left if not close(found[name], expected[name], tolerance)}
        return plan, ""
    return None, reason


def _zeros(params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    fisher = Fisher()
    _sums_for_(fisher, params, params)
    return fisher.sums
