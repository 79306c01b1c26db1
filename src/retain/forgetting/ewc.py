"""Elastic weight consolidation with a diagonal Fisher information (Kirkpatrick et al. 2017, eq. 3).

    penalty(p) = lambda/2 sum_k sum_i F_ki (p_i - theta_ki)^2 = lambda/2 sum_i A_i (p_i - m_i)^2 + lambda c

over the tasks k, with A = sum_k F_k and m the mean of the tasks' weights theta_k, weighed by F_k. Two tensors stand for any number
of tasks, exactly: folding in a task (F, theta) is

    tasks: separate    c += sum A F / (A + F) (theta - m)^2 / 2,   m += F / (A + F) (theta - m),   A += F
    tasks: online      m = theta,   A = decay A + F     (Huszar 2018; Schwarz et al. 2018, who normalise F as well)

The penalty acts in one of three forms, never through the loss:

    proximal    every few steps, p += a A / (1 + a A) (m - p), a = lambda s, with s the mean |move| of the optimizer since the last
    implicit    after every step, the same with a = lambda * learning rate: the minimum over q of
                lambda/2 A (q - m)^2 + (q - p)^2 / (2 lr) (Parikh and Boyd 2014, section 1.1)
    explicit    gradient += lambda A (p - m), before every step; diverges beyond `stability_edge`

The first two are stable at any lambda. The last two follow the penalty's gradient, so that lambda stands against the loss's: what
is right for SGD is a thousand times off for Adam, and for the loss times ten. Counted in the optimizer's moves it means the same
for both: a weight of mean importance that is pushed one way all the time comes to rest 1/lambda from its anchor.

Each F is scaled to mean 1 over the parameters that took part in its pass, or left as it is. m is never rounded to half precision:
the rounding would pull like a task of its own. With `refresh`, A and m follow a task while it trains, in parts of one fold.

Not here: Kronecker-factored importance; importance along the path (SI) or of the outputs (MAS).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from retain.errors import ConfigError
from retain.forgetting import fisher as information
from retain.forgetting import quadratic
from retain.forgetting.fisher import Fisher, Labels
from retain.params import derive, fit_rows, generator, nbytes
from retain.seams import Batch, Column, Method, StepContext
from retain.spec import EwcSpec

LOG = logging.getLogger("retain")
SAMPLE = 2**12
"""Weights whose moves are measured: the mean of so many is within a few percent of that of all."""
TINY = 1e-30
"""A mean of the Fisher information below this is that of a model that is certain of everything: fp32 has no digits left."""
MEMORY = 0.9
"""Of the running mean: it follows the last ten pulls."""


@dataclass
class Pace:
    """How far the optimizer moves between two pulls.

    Attributes:
        mean: running mean of the sizes of its moves, without the correction for its start.
        moves: how many went into it.
        waited: steps since the last pull.
        before: a sample of the protected weights as the last pull left them.
    """

    mean: float = 0.0
    moves: int = 0
    waited: int = 0
    before: Tensor | None = None


@dataclass
class EwcState:
    """What EWC keeps: 8 bytes per protected parameter in fp32, 6 with `importance_dtype: bf16`, for any number of tasks.

    Attributes:
        strength: lambda, now; a controller may change it at any step.
        configured: the lambda that the configuration gave.
        A: importance by parameter name; empty before the first task is consolidated.
        m: anchor by parameter name, at least fp32.
        constant: the part of the penalty that does not depend on the weights, over lambda.
        normalized: whether the importance was scaled to mean 1.
        tasks: folded so far.
        fisher: of rows that are not folded yet.
        pace: proximal: how far the optimizer moves between two pulls.
        folded: refresh: share of the task that is folded.
        looked: refresh: rows of the task that the Fisher information has seen.
    """

    strength: float
    configured: float
    normalized: bool = True
    A: dict[str, Tensor] = field(default_factory=dict)
    m: dict[str, Tensor] = field(default_factory=dict)
    constant: float = 0.0
    tasks: int = 0
    fisher: Fisher = field(default_factory=Fisher)
    pace: Pace = field(default_factory=Pace)
    folded: float = 0.0
    looked: int = 0


def ewc(settings: EwcSpec) -> Method:
    """EWC as a method.

    Args:
        settings: strength, form, how tasks come together, the Fisher information, where and how the state is kept.

    Example:
        >>> method = ewc(EwcSpec(form="explicit"))
        >>> method.init({}).strength
        40.0
    """

    def init(params: object) -> EwcState:
        return EwcState(settings.lambda_, settings.lambda_, settings.normalize)

    def begin_task(ctx: StepContext, state: EwcState) -> None:
        """Follow new head rows and a changed configuration; say up to which lambda the explicit form is stable."""
        if state.A and state.normalized != settings.normalize:
            seen = f"ewc.normalize={settings.normalize}, but this run's importance was made with {state.normalized}."
            raise ConfigError(f"{seen} The two do not add up: set it back, or start a new run.")
        state.normalized = settings.normalize
        _fit_(state, ctx.params, settings)
        _set_out_(ctx.params, state, settings)
        if state.configured != settings.lambda_:
            state.strength = state.configured = settings.lambda_
        if settings.form == "explicit" and ctx.step_sizes is not None and state.A:
            edge = stability_edge(state, ctx.step_sizes)
            LOG.info("EWC, form: explicit: plain gradient descent at this learning rate is stable for lambda < %.4g.", edge)
            if state.strength > edge:
                text = "EWC: lambda=%.4g lies beyond %.4g, so plain gradient descent diverges. Lower it, or use form: proximal."
                LOG.warning(text, state.strength, edge)

    def pull_(params: Mapping[str, nn.Parameter], state: EwcState, sizes: Mapping[str, float]) -> None:
        if state.strength > 0:
            _place_(state, params, settings)
            terms = [([p, A, m], _inverse(state.strength * sizes[name])) for name, p, A, m in _protected(params, state)]
            quadratic.pull_(terms, compiled=settings.compile)

    def proximal_(params: Mapping[str, nn.Parameter], state: EwcState, sizes: Mapping[str, float]) -> None:
        state.pace.waited += 1
        if state.A and state.pace.waited >= settings.every:
            pull_(params, state, dict.fromkeys(state.A, _moved_(params, state)))
            _set_out_(params, state, settings)

    def end_task(ctx: StepContext, state: EwcState) -> None:
        """A last pull: what the steps since the one before have done would become the anchor as it is."""
        if state.A and state.pace.waited:
            pull_(ctx.params, state, dict.fromkeys(state.A, _size(state.pace)))
            _set_out_(ctx.params, state, settings)

    def implicit_(params: Mapping[str, nn.Parameter], state: EwcState, sizes: Mapping[str, float]) -> None:
        if missing := state.A.keys() - sizes.keys():
            names = ", ".join(sorted(missing))
            raise ValueError(f"EWC, form: implicit: no learning rate of {names}. Pass one for every protected parameter by name.")
        pull_(params, state, sizes)

    def add_grad_(ctx: StepContext, state: EwcState) -> None:
        """Without a gradient, a parameter takes no part in this step."""
        if state.strength > 0:
            _place_(state, ctx.params, settings)
            held = _protected(ctx.params, state)
            terms = [([p.grad, p, A, m], state.strength) for _, p, A, m in held if p.grad is not None]
            quadratic.push_(terms, compiled=settings.compile)

    def look(ctx: StepContext, state: EwcState, batch: Batch, key: int) -> None:
        labels = Labels(ctx.objective, settings.fisher, key)
        information.add_(state.fisher, ctx.model, ctx.params, batch, labels, autocast=ctx.autocast, micro_batch=ctx.micro_batch)

    def observe(ctx: StepContext, state: EwcState) -> None:
        """refresh: fold at every share of the task; look at about `samples` rows of it, and a batch before every fold."""
        assert ctx.batch is not None and settings.refresh is not None
        share, due = 0.0, math.inf if settings.samples is None else float(settings.samples)
        if ctx.rows is not None and ctx.total_rows is not None:
            share = ctx.rows / ctx.total_rows
            due *= share
        passed, before = (math.floor(part / settings.refresh + 1e-9) for part in (share, state.folded))
        if passed > before and _fold_(state, ctx.params, settings, share - state.folded, end=False):
            state.folded = share
        if state.fisher.rows == 0 or state.looked <= due:
            look(ctx, state, ctx.batch, derive("fisher", ctx.key, ctx.step))
            state.looked += len(ctx.batch)

    def consolidate_batch(ctx: StepContext, state: EwcState) -> None:
        """Add the rows of a batch of the finished task to its Fisher information."""
        if (batch := _sampled(ctx, settings.samples, state.fisher.rows)) is not None:
            look(ctx, state, batch, derive("fisher", ctx.key))

    def consolidate(ctx: StepContext, state: EwcState) -> None:
        """Fold in the task, or what is left of it."""
        if _fold_(state, ctx.params, settings, 1.0 - state.folded, end=True) or state.folded > 0:
            state.tasks += 1
        else:
            text = "EWC: the Fisher information of task %d is as good as zero everywhere, so nothing of it is protected. %s"
            LOG.warning(text, ctx.task, "The outputs do not depend on the weights, or the model is certain of every label.")
        state.fisher, state.folded, state.looked = Fisher(), 0.0, 0
        _set_out_(ctx.params, state, settings)

    return Method(
        name="ewc",
        init=init,
        nbytes=_nbytes,
        allows=frozenset({"without-old-data", "micro-batching"}),
        observe=None if settings.refresh is None else observe,
        add_grad_=add_grad_ if settings.form == "explicit" else None,
        project_={"proximal": proximal_, "implicit": implicit_}.get(settings.form),
        begin_task=begin_task,
        end_task=end_task if settings.form == "proximal" else None,
        consolidate_batch=consolidate_batch if settings.refresh is None else None,
        consolidate=consolidate,
    )


def penalty(params: Mapping[str, nn.Parameter], state: EwcState) -> Tensor:
    """lambda/2 sum A (p - m)^2 + lambda c, 0-d, fp64: for a report; training never needs the value.

    Args:
        params: by name; those that the state does not know count for nothing.
        state: what is protected.

    Raises:
        ValueError: a protected parameter is not there, or has another shape.
    """
    return state.strength * (quadratic.value([(p, A, m) for _, p, A, m in _protected(params, state)]) + state.constant)


def stability_edge(state: EwcState, step_sizes: Mapping[str, float]) -> float:
    """The lambda beyond which the explicit form diverges under plain gradient descent: min over parameters of 2 / (lr max A).

    Momentum beta multiplies it by (1 + beta). The loss's own curvature comes on top of the penalty's, so stay well below.

    Args:
        state: what is protected.
        step_sizes: learning rate of each parameter by name.

    Returns:
        Infinity where nothing is protected.
    """
    tops = [float(A.max()) * step_sizes.get(name, 0.0) for name, A in state.A.items() if A.numel()]
    return min((2 / top for top in tops if top > 0), default=math.inf)


def _inverse(a: float) -> float:
    """1/a for a pull of A / (A + 1/a): infinite at a = 0, where nothing moves, and never 0, where A = 0 would give 0/0."""
    fp32 = torch.finfo(torch.float32)
    return max(1 / a, fp32.tiny) if a * fp32.max > 1 else math.inf


def _moved_(params: Mapping[str, nn.Parameter], state: EwcState) -> float:
    """The size of the moves between two pulls, with this one: a running mean of mean |move| over a sample of weights."""
    pace, now = state.pace, _sample(params, state)
    if pace.before is not None and now is not None and pace.before.shape == now.shape:
        moved = float((now - pace.before.to(now.device)).abs_().mean())
        pace.mean, pace.moves = MEMORY * pace.mean + (1 - MEMORY) * moved, pace.moves + 1
    return _size(pace)


def _size(pace: Pace) -> float:
    return pace.mean / (1 - MEMORY**pace.moves) if pace.moves else 0.0


def _set_out_(params: Mapping[str, nn.Parameter], state: EwcState, settings: EwcSpec) -> None:
    """A move begins here."""
    if settings.form == "proximal":
        state.pace.before, state.pace.waited = _sample(params, state), 0


def _sample(params: Mapping[str, nn.Parameter], state: EwcState) -> Tensor | None:
    """About `SAMPLE` of the protected weights, evenly spaced; None where nothing is protected."""
    held = [params[name].detach() for name in sorted(state.A) if name in params]  # sorted: a file may change their order
    if not held:
        return None
    stride = max(1, sum(param.numel() for param in held) // SAMPLE)
    return torch.cat([param.flatten()[::stride].to(held[0].device, torch.float32) for param in held])


# --- the state --------------------------------------------------------------------------------------------------------


def _nbytes(state: EwcState) -> int:
    sample = [] if state.pace.before is None else [state.pace.before]
    return nbytes([*state.A.values(), *state.m.values(), *state.fisher.sums.values(), *sample])


def _protected(params: Mapping[str, nn.Parameter], state: EwcState) -> Iterator[tuple[str, nn.Parameter, Tensor, Tensor]]:
    """Name, parameter, importance and anchor of everything that is protected.

    Raises:
        ValueError: a parameter is not there, or has another shape.
    """
    for name, A in state.A.items():
        param = params.get(name)
        if param is None or param.shape != A.shape:
            raise _mismatch(params, state)
        yield name, param, A, state.m[name]


def _mismatch(params: Mapping[str, nn.Parameter], state: EwcState) -> ValueError:
    """What does not fit, by name."""
    wrong = []
    for name, A in state.A.items():
        shape = tuple(params[name].shape) if name in params else None
        if shape != tuple(A.shape):
            wrong.append(f"{name} {tuple(A.shape)} (the model has {shape or 'none'})")
    return ValueError(
        f"EWC protects parameters that do not fit the model's: {', '.join(wrong)}. Only rows may be added, before begin_task. "
        "Train the model that the state was made with, or start with a new state."
    )


def _fit_(state: EwcState, params: Mapping[str, nn.Parameter], settings: EwcSpec) -> None:
    """Make the state fit the parameters at a task's start: new rows have importance 0, and all lies where the settings say.

    Raises:
        ValueError: a parameter is not there, or its shape differs in more than added rows.
    """
    for name, A in state.A.items():
        shape = params[name].shape if name in params else None
        if shape is None or len(shape) != A.ndim or shape[1:] != A.shape[1:] or shape[:1] < A.shape[:1]:
            raise _mismatch(params, state)
    for name, A in state.A.items():
        param, m = params[name], state.m[name]
        if param.shape != A.shape:
            m = fit_rows(m, param)
            m[len(A) :] = param.detach()[len(A) :]
        state.A[name] = _placed(fit_rows(A, param).to(_dtype(param, settings)), param, settings)
        state.m[name] = _placed(m.to(torch.promote_types(param.dtype, torch.float32)), param, settings)


def _dtype(param: Tensor, settings: EwcSpec) -> torch.dtype:
    """Of the importance."""
    return torch.bfloat16 if settings.importance_dtype == "bf16" else torch.promote_types(param.dtype, torch.float32)


def _place_(state: EwcState, params: Mapping[str, nn.Parameter], settings: EwcSpec) -> None:
    """Bring the state where it belongs: read from a file in the middle of a task, it lies on the host."""
    name = next(iter(state.A), None)
    if name is not None and name in params and settings.storage == "device" and state.A[name].device != params[name].device:
        _fit_(state, params, settings)


def _placed(tensor: Tensor, param: Tensor, settings: EwcSpec) -> Tensor:
    """A tensor of the state where it belongs: beside its parameter, or on the host, pinned for a GPU."""
    if settings.storage == "device":
        return tensor.to(param.device)
    return tensor.cpu().pin_memory() if param.is_cuda else tensor.cpu()


@torch.no_grad()
def _fold_(state: EwcState, params: Mapping[str, nn.Parameter], settings: EwcSpec, weight: float, *, end: bool) -> bool:
    """Fold in the Fisher information gathered so far, with a weight; False, with nothing done, where it is as good as zero.

    While a task trains its weights are no anchor yet: the old one moves towards them as far as the new importance weighs.
    """
    found = information.mean(state.fisher)
    total = sum(float(F.sum(dtype=torch.float64)) for F in found.values())
    count = sum(F.numel() for F in found.values())
    if total < TINY * count:
        return False
    scale = weight * (count / total if settings.normalize else 1.0)
    online = settings.tasks == "online"
    keep = settings.decay**weight if online else 1.0
    for name, F in found.items():
        if name not in state.A:
            param = params[name]
            state.A[name] = _placed(torch.zeros_like(param, dtype=_dtype(param, settings)), param, settings)
            state.m[name] = _placed(param.detach().to(F.dtype, copy=True), param, settings)
    for name, param, A, m in _protected(params, state):
        before, anchor, theta = A.to(param.device, m.dtype) * keep, m.to(param.device), param.detach().to(m.dtype)
        new = found.pop(name).mul_(scale) if name in found else torch.zeros_like(before)
        both = before + new
        share = torch.where(both > 0, new / both, 1.0)
        if not online:
            state.constant += float((theta - anchor).square_().mul_(before).mul_(share).sum(dtype=torch.float64)) / 2
        A.copy_(both)
        m.copy_(theta if online and end else torch.lerp(anchor, theta, share))
    if online:
        state.constant = 0.0
    state.fisher = Fisher()
    return True


def _sampled(ctx: StepContext, samples: int | None, looked: int) -> Batch | None:
    """The rows of a batch that are looked at; None for none of them.

    Which rows of the task they are depends on the key of the pass alone, and each has the same chance; where the number of the
    task's rows is not known, they are the first ones.
    """
    assert ctx.batch is not None
    batch, rows = ctx.batch, len(ctx.batch)
    if samples is None:
        return batch
    if ctx.rows is None or ctx.total_rows is None:
        count = min(rows, samples - looked)
        return batch.rows(0, count) if count > 0 else None
    mask = _chosen(ctx.total_rows, samples, derive("fisher rows", ctx.key))
    index = mask[ctx.rows : ctx.rows + rows].nonzero().flatten()
    return _take(batch, index.to(batch.targets.device)) if len(index) else None


@functools.lru_cache(maxsize=1)
def _chosen(total: int, samples: int, key: int) -> Tensor:
    """Which rows of a task are looked at, [total]."""
    mask = torch.zeros(total, dtype=torch.bool)
    mask[torch.randperm(total, generator=generator(key))[:samples]] = True
    return mask


def _take(batch: Batch, index: Tensor) -> Batch:
    """Some rows of a batch."""

    def take(column: Column) -> Column:
        if isinstance(column, list):
            return [column[row] for row in index.tolist()]
        return column[index] if isinstance(column, Tensor) else column

    inputs, meta = ({name: take(column) for name, column in columns.items()} for columns in (batch.inputs, batch.meta))
    return Batch(inputs, batch.targets[index], None, meta)
