"""What the device itself says about the memory that was used, and which device that is."""

from __future__ import annotations

import itertools
import os
import resource
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

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


def allocator_peaks(calls: Sequence[Callable[[], Callable[[], object]]]) -> list[int | None]:
    """Bytes that torch's CPU allocator gave out at most during each call, above what was out before: by its own record.

    Args:
        calls: each makes what it needs and returns the function whose bytes count; what that returns is kept until its end.

    Returns:
        A figure for each; None for one that raised, and for all of them where a profiler is running already.
    """
    if not calls or torch._C._autograd._profiler_enabled():
        return [None] * len(calls)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes to the terminal
    failed = set()
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for number, call in enumerate(calls):
            try:
                function = call()
                with record_function(f"{_MARK}{number}"):
                    kept = function()
                del kept, function
            except Exception:
                failed.add(number)
    events = sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    spans = {
        event.name(): (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.name().startswith(_MARK)
    }
    peaks: list[int | None] = []
    allocations = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    starts = [start for start, _ in allocations]
    for number in range(len(calls)):
        if number in failed or f"{_MARK}{number}" not in spans:
            peaks.append(None)
            continue
        begin, end = spans[f"{_MARK}{number}"]
        running = itertools.accumulate(
            (size for _, size in allocations[bisect_left(starts, begin) : bisect_right(starts, end)]), initial=0
        )
        peaks.append(max(running))
    return peaks


_MARK = "retain::call "


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
