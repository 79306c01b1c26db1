"""What several tests need: runs that are killed, and the weights of a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from retain.training import loop
from retain.training.lineage import load_checkpoint


class Killed(BaseException):
    """Stands for SIGKILL: nothing handles it."""


@contextmanager
def killed_after(steps: int) -> Iterator[None]:
    """Die after this many optimizer steps, before anything of the next one is done."""
    done = 0

    def step(*args, **kwargs):
        nonlocal done
        if done == steps:
            raise Killed
        done += 1
        return real(*args, **kwargs)

    real = loop.train_step
    with mock.patch.object(loop, "train_step", step):
        yield


def moments(points: list[str], at: int | None) -> list[Any]:
    """Patches that record every write to the disk and die at one of them, before or after it has happened."""

    def around(where, name):
        real = getattr(where, name)

        def call(*args, **kwargs):
            for moment in ("before", "after"):
                points.append(f"{moment} {name}")
                if at is not None and len(points) == at:
                    raise Killed
                if moment == "before":
                    result = real(*args, **kwargs)
            return result

        return mock.patch.object(where, name, call)

    return [around(os, "fsync"), around(os, "replace"), around(Path, "rename"), around(shutil, "rmtree"), around(Path, "unlink")]


def weights_of(run: Path) -> dict[str, Tensor]:
    """The weights of a run's last task."""
    last = max((run / "tasks").glob("[0-9]*"))
    return load_checkpoint(last, ["model.safetensors"])["model.safetensors"]


def allocator_peak(function: Callable[[], object]) -> int:
    """Bytes that torch's CPU allocator had given out at most while a function ran, from the profiler's own record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = function()
    del kept
    live = peak = 0
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda each: each.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
