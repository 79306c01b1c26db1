"""Named tensors: the trainable parameters of a model, sizes in bytes, states as plain tensors; counter-based random keys."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# --- random keys ------------------------------------------------------------------------------------------------------


def derive(*counters: int | str) -> int:
    """A 63-bit random key from counters: the same counters give the same key on every machine.

    Randomness without state: what is drawn in a step is a function of (seed, purpose, task, epoch, step), so that resuming,
    retrying and resharding recompute it. Words are hashed once; numbers are folded in by the finaliser of SplitMix64 (Steele et
    al. 2014), which costs a step next to nothing.

    Example:
        >>> derive("rows", 0, 1) == derive("rows", 0, 1) != derive("rows", 1, 0)
        True
    """
    key = 0
    for counter in counters:
        value = counter if isinstance(counter, int) else _hashed(counter)
        key = (key ^ value) + 0x9E3779B97F4A7C15 & _MASK
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        key = (key ^ key >> 27) * 0x94D049BB133111EB & _MASK
        key ^= key >> 31
    return key >> 1


_MASK = 2**64 - 1


@functools.cache
def _hashed(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def uniform(key: int, counters: Tensor) -> Tensor:
    """Numbers in [0, 1), each a function of the key and its counter alone: fp64, in the shape of the counters (int64)."""
    with np.errstate(over="ignore"):
        value = (counters.numpy().astype(np.uint64) ^ np.uint64(key)) + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        value ^= value >> np.uint64(31)
    return torch.from_numpy((value >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def generator(key: int) -> torch.Generator:
    """A CPU generator that starts at a key."""
    return torch.Generator().manual_seed(key)


def seed_dropout(key: int, device: torch.device) -> None:
    """Start the default generator that dropout uses on a device at a key."""
    torch.default_generator.manual_seed(key)
    if device.type != "cpu":
        module = torch.get_device_module(device)
        generators = getattr(module, "default_generators", None)  # one per device; mps has one for all
        (generators[device.index or 0] if generators else module).manual_seed(key)


# --- parameters -------------------------------------------------------------------------------------------------------


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters with `requires_grad`, by name; a tied tensor once, under its first name."""
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def nbytes(tensors: Tensor | Iterable[Tensor]) -> int:
    """Bytes of the storages behind tensors, each storage once."""
    tensors = [tensors] if isinstance(tensors, Tensor) else tensors
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def bytes_per_row(columns: Mapping[str, Any]) -> int:
    """Bytes of one row of columns [rows, ...]; of a list of tensors, those of the longest."""
    sizes = [
        max((len(v) for v in value), default=0) * value[0].itemsize if isinstance(value, list) else value[0].nbytes
        for value in columns.values()
        if isinstance(value, (Tensor, list)) and len(value)
    ]
    return max(1, sum(sizes))


def check_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor that holds a NaN or an infinity, or None."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name
    return None


def fit_rows(tensor: Tensor, like: Tensor, fill: float = 0.0) -> Tensor:
    """A state tensor for a parameter that has grown: old rows as they are, new rows filled.

    Raises:
        ValueError: the shapes differ in more than added rows.
    """
    if tensor.shape == like.shape or tensor.ndim == 0:
        return tensor
    if tensor.shape[1:] != like.shape[1:] or tensor.shape[0] > like.shape[0]:
        raise ValueError(f"a state of shape {tuple(tensor.shape)} does not fit a parameter of shape {tuple(like.shape)}")
    grown = tensor.new_full((like.shape[0], *tensor.shape[1:]), fill)
    grown[: tensor.shape[0]] = tensor
    return grown


# --- states as tensors and plain data ---------------------------------------------------------------------------------


def pack(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Take a state apart into named tensors (for safetensors) and plain data (for json).

    Args:
        state: dataclasses, dicts with string keys, lists, tensors, numbers, strings, None, nested at will.

    Returns:
        The tensors (on the CPU, contiguous, sharing nothing) and a tree in which each stands as ``{"tensor": name}``.

    Raises:
        TypeError: something else is in the state.
    """
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value.detach().to("cpu", copy=True).contiguous()
            return {"tensor": path}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return {"dict": {key: walk(item, f"{path}.{key}") for key, item in fields.items()}}
        if isinstance(value, Mapping):
            return {"dict": {str(key): walk(item, f"{path}.{key}") for key, item in value.items()}}
        if isinstance(value, (list, tuple)):
            return [walk(item, f"{path}.{position}") for position, item in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(f"{path}: a state holds tensors and plain data, not {type(value).__name__}")

    return tensors, walk(state, "state")


def unpack_(state: Any, tensors: Mapping[str, Tensor], tree: Any, device: torch.device | str = "cpu") -> None:
    """Put packed values back into a state dataclass made by the same `init`, in place.

    Tensors go to the device of the tensor that they replace, to `device` where the state has none there.

    Raises:
        ValueError: a field of the state is not in the packed tree, or the other way round.
    """
    names = {field.name for field in dataclasses.fields(state)}
    if names != set(tree["dict"]):
        raise ValueError(f"{type(state).__name__} has {sorted(names)}, the file has {sorted(tree['dict'])}")

    def build(node: Any, now: Any) -> Any:
        if isinstance(node, dict) and "tensor" in node:
            return tensors[node["tensor"]].to(now.device if isinstance(now, Tensor) else device, copy=True)
        if dataclasses.is_dataclass(now) and not isinstance(now, type):
            unpack_(now, tensors, node, device)
            return now
        if isinstance(node, dict):
            before = now if isinstance(now, Mapping) else {}
            return {key: build(item, before.get(key)) for key, item in node["dict"].items()}
        if isinstance(node, list):
            return [build(item, None) for item in node]
        return node

    for name in names:
        setattr(state, name, build(tree["dict"][name], getattr(state, name)))
