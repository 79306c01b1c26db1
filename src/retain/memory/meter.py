"""What the device itself says about the memory that was used, and which device that is."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from retain.errors import ConfigError


def peak_bytes(device: torch.device) -> tuple[int, str]:
    """The most memory in use at once since `reset_peak`, as the device reports it.

    Returns:
        Bytes, and what they count: ``allocator peak`` (CUDA), ``resident memory`` (the CPU: of the whole process) or
        ``driver memory`` (MPS, which keeps no peak: what the process holds now).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "allocator peak"
    if device.type == "mps":
        return torch.mps.driver_allocated_memory(), "driver memory"
    return _peak_resident_bytes(), "resident memory"


def reset_peak(device: torch.device) -> None:
    """Let `peak_bytes` start from what is in use now, where the system can (CUDA; the CPU under Linux)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _peak_resident_bytes() -> int:
    # A child process inherits ru_maxrss from the one that started it, so the kernel's own figure comes first.
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resolve_device(text: str) -> torch.device:
    """The device of a name, with its index, as tensors on it report it.

    Args:
        text: ``auto`` (cuda where there is one, then mps, else cpu), or a device such as ``cpu`` or ``cuda:1``.

    Raises:
        ConfigError: this machine has no such device.
    """
    present = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        present.append(torch.device("mps", 0))
    present.append(torch.device("cpu"))
    for device in present:
        if text in ("auto", device.type, str(device)):
            return device
    names = ", ".join(str(device) for device in present)
    raise ConfigError(f"training_params.device={text}: there is no such device here. Use auto, or one of: {names}.")
