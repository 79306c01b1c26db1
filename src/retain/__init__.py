"""retain: train a model on a stream of tasks inside a memory budget and without forgetting.

Public names are loaded when they are first used, so that `import retain` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retain.api import init, load, predict, promote, purge, rollback, train
    from retain.data.task import Rows, Stream, Task
    from retain.errors import ConfigError, DataError, RetainError, RunError, Stopped
    from retain.forgetting.ewc import ewc
    from retain.forgetting.fisher import fisher_diagonal
    from retain.forgetting.replay import replay
    from retain.seams import Batch, Method, Objective, StepContext
    from retain.spec import EwcSpec, ReplaySpec, RunSpec
    from retain.step import CLASSIFICATION

_HOME = {
    "init": "retain.api",
    "load": "retain.api",
    "predict": "retain.api",
    "promote": "retain.api",
    "purge": "retain.api",
    "rollback": "retain.api",
    "train": "retain.api",
    "Rows": "retain.data.task",
    "Stream": "retain.data.task",
    "Task": "retain.data.task",
    "ConfigError": "retain.errors",
    "DataError": "retain.errors",
    "RetainError": "retain.errors",
    "RunError": "retain.errors",
    "Stopped": "retain.errors",
    "ewc": "retain.forgetting.ewc",
    "fisher_diagonal": "retain.forgetting.fisher",
    "replay": "retain.forgetting.replay",
    "Batch": "retain.seams",
    "Method": "retain.seams",
    "Objective": "retain.seams",
    "StepContext": "retain.seams",
    "EwcSpec": "retain.spec",
    "ReplaySpec": "retain.spec",
    "RunSpec": "retain.spec",
    "CLASSIFICATION": "retain.step",
}

__all__ = [
    "CLASSIFICATION",
    "Batch",
    "ConfigError",
    "DataError",
    "EwcSpec",
    "Method",
    "Objective",
    "ReplaySpec",
    "RetainError",
    "Rows",
    "RunError",
    "RunSpec",
    "StepContext",
    "Stopped",
    "Stream",
    "Task",
    "ewc",
    "fisher_diagonal",
    "init",
    "load",
    "predict",
    "promote",
    "purge",
    "replay",
    "rollback",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("retain")
    if name not in _HOME:
        raise AttributeError(f"module 'retain' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
