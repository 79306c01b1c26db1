"""Optimizers by spec, their state as named tensors (for resuming and for growth), and the learning rate of a step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from retain.errors import ConfigError
from retain.params import fit_rows
from retain.spec import OptimizerSpec, ScheduleSpec

_COUNTERS = frozenset({"step", "mu_product"})
"""State entries that are one number per parameter; torch keeps them on the CPU unless the optimizer is fused."""

_BUFFER_OF_OPTION = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
"""State entries that exist only under an option, which may have been off when the state was saved."""


def make_optimizer(spec: OptimizerSpec, params: Mapping[str, nn.Parameter], decay: str) -> Optimizer:
    """The optimizer of a spec.

    Args:
        spec: name and arguments.
        params: trainable parameters by name.
        decay: ``matrices``: weight decay acts on parameters of two or more dimensions only; ``all``: on all.

    Raises:
        ConfigError: arguments that do not go together.
    """
    kind = getattr(torch.optim, spec.name)
    arguments = spec.arguments
    if spec.fused and spec.momentum and spec.dampening:
        raise ConfigError("training_params.optimizer: SGD takes fused or dampening, not both.")
    # AdamW decays by default, so it is the class that says what an absent value means.
    decays = arguments.get("weight_decay", inspect.signature(kind).parameters["weight_decay"].default) > 0
    groups: list[dict[str, Any]] = [{"params": list(params.values())}]
    if decay == "matrices" and decays:
        matrices = {"params": [param for param in params.values() if param.ndim >= 2]}
        rest = {"params": [param for param in params.values() if param.ndim < 2], "weight_decay": 0.0}
        groups = [group for group in (matrices, rest) if group["params"]] or groups
    try:
        optimizer: Optimizer = kind(groups, **arguments)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"training_params.optimizer: {spec.name}: {error}") from None
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
        if spec.name == "SGD" and spec.fused and spec.momentum:
            # torch 2.13 keeps uninitialised momentum when the first step is skipped, and raises for parameters that
            # join later; zeros give the same first step.
            for param in group["params"]:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
    return optimizer


# --- state ------------------------------------------------------------------------------------------------------------


def optimizer_tensors(optimizer: Optimizer, params: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Every entry of the optimizer's state as ``"parameter/entry" -> tensor``.

    Args:
        optimizer: over `params`.
        params: the same parameters by name, as they were when the optimizer was made.

    Returns:
        The live tensors, not copies; plain numbers as 0-d tensors.

    Raises:
        ValueError: the optimizer has state of a parameter that is not among `params`.
    """
    names: dict[Tensor, str] = {param: name for name, param in params.items()}
    strangers = sum(param not in names for param, entries in optimizer.state.items() if entries)
    if strangers:
        raise ValueError(f"the optimizer has state of {strangers} parameters not given here: take it before the head grows")
    return {
        f"{names[param]}/{key}": torch.as_tensor(value)
        for param, entries in optimizer.state.items()
        for key, value in entries.items()
        if value is not None
    }


def load_optimizer_(optimizer: Optimizer, params: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Put tensors of `optimizer_tensors` into a new optimizer, by parameter name, as copies of the same dtype.

    A parameter that has grown by rows keeps its old rows' state; new rows start as those of a new parameter. Parameters
    without stored state start anew.

    Args:
        optimizer: as `make_optimizer` returned it, of the class that the tensors come from.
        params: its parameters by name.
        tensors: may have been made with fewer rows, or with other options of the same class.

    Raises:
        ValueError: a tensor belongs to no parameter, or its shape differs in more than rows.
    """
    stored: dict[str, dict[str, Tensor]] = {}
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        stored.setdefault(name, {})[key] = tensor
    if unknown := sorted(stored.keys() - params.keys()):
        raise ValueError(f"optimizer state of parameters that the model does not have: {', '.join(unknown)}")
    groups = {param: group for group in optimizer.param_groups for param in group["params"]}
    for name, entries in stored.items():
        param = params[name]
        group, state = groups[param], optimizer.state[param]
        for key, tensor in entries.items():
            if key in _COUNTERS:
                device = param.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
                state[key] = tensor.to(device, copy=True)
                continue
            fill = group["initial_accumulator_value"] if key == "sum" else 0.0
            state[key] = fit_rows(tensor.to(param.device, copy=True), param, fill)
        for option, key in _BUFFER_OF_OPTION.items():
            if group.get(option) and key not in state:
                state[key] = torch.zeros_like(param)


# --- learning rate ----------------------------------------------------------------------------------------------------


def lr_factor(schedule: ScheduleSpec, step: int, steps: int) -> float:
    """What the learning rate of a step is multiplied by.

    With w = warmup * steps: (step + 1) / w, at most 1, while step < w; then 1, or 1 - u, or (1 + cos(pi u)) / 2 with
    u = (step - w) / (steps - w), so that 0 is reached when the last step is done.

    Args:
        schedule: its shape and its warm-up's share of the steps.
        step: steps done before this one, from 0.
        steps: steps of the task in all.
    """
    warmup = schedule.warmup * steps
    if step < warmup:
        return min(1.0, (step + 1) / warmup)
    done = min(1.0, (step - warmup) / (steps - warmup))
    match schedule.name:
        case "linear":
            return 1.0 - done
        case "cosine":
            return (1.0 + math.cos(math.pi * done)) / 2
    return 1.0


def set_lr_(optimizer: Optimizer, factor: float) -> None:
    """Set each group's learning rate to its base rate (kept in the group as ``initial_lr``) times a factor."""
    for group in optimizer.param_groups:
        lr = group.setdefault("initial_lr", group["lr"]) * factor
        if lr != group["lr"]:
            group["lr"] = lr


def step_sizes(optimizer: Optimizer, params: Mapping[str, nn.Parameter], rate: str = "lr") -> dict[str, float]:
    """The learning rate of each parameter by name: the current one, or with ``initial_lr`` the one before any schedule."""
    rates = {param: float(group[rate]) for group in optimizer.param_groups for param in group["params"]}
    return {name: rates[param] for name, param in params.items()}
