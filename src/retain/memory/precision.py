"""In which number formats a step computes: dtype of the weights, autocast region, loss scaler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from retain.errors import ConfigError


class Precision(NamedTuple):
    """How a step computes.

    Attributes:
        name: as in the configuration.
        dtype: of weights and floating inputs.
        autocast: opens the region in which the forward pass runs.
        scaler: scales the loss so that fp16 gradients do not vanish; None where none is needed.
    """

    name: str
    dtype: torch.dtype
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    scaler: torch.amp.GradScaler | None = None


def make_precision(name: str, device: torch.device) -> Precision:
    """The precision of a name on a device.

    Args:
        name: ``fp32``, ``fp64``, ``bf16`` (weights too), ``amp_bf16`` or ``amp_fp16`` (autocast over fp32 weights).
        device: where the step runs.

    Raises:
        ConfigError: the name is unknown, or the device has no such numbers.
    """
    if name == "fp64" and device.type == "mps":
        raise ConfigError("training_params.precision=fp64: mps has no 64-bit floats. Use fp32, or device: cpu.")
    match name:
        case "fp32":
            return Precision(name, torch.float32)
        case "fp64":
            return Precision(name, torch.float64)
        case "bf16":
            return Precision(name, torch.bfloat16)
        case "amp_bf16":
            return Precision(name, torch.float32, partial(torch.autocast, device.type, dtype=torch.bfloat16))
        case "amp_fp16":
            autocast = partial(torch.autocast, device.type, dtype=torch.float16)
            return Precision(name, torch.float32, autocast, torch.amp.GradScaler(device.type))
    raise ConfigError(f"training_params.precision={name} is not one of fp32, fp64, bf16, amp_bf16, amp_fp16.")


def step_was_skipped(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the gradients overflowed, so that the scaler's step leaves the parameters alone.

    Asks the scaler itself; valid between its `unscale_` and its `update`. Hooks of a fused optimizer run on skipped
    steps too, and a scale that has reached its floor does not fall.
    """
    found = scaler._found_inf_per_device(optimizer)
    return any(bool(value) for value in found.values())


def scaler_state(scaler: torch.amp.GradScaler) -> dict[str, float]:
    """The scaler's state as plain numbers; take it after `update`."""
    return dict(scaler.state_dict())


def load_scaler_(scaler: torch.amp.GradScaler, state: dict[str, float]) -> None:
    """Put a state of `scaler_state` back, whether or not the scaler has been used."""
    scaler.load_state_dict(state)
