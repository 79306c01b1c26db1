"""What is checked before training time is spent: that run, stream and disk fit together; and the error of a diverged task."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from retain.data.scenarios import resolved_split
from retain.data.task import Stream, Task
from retain.errors import ConfigError, DataError, RunError
from retain.models.heads import resolve_head
from retain.params import nbytes
from retain.spec import SOURCES, RunSpec, differences, suggest
from retain.step import Job
from retain.training.lineage import RunDirectory, has_file

Listener = Callable[[str, dict[str, Any]], None]
"""Hears what happens: `listener(kind, values)`, kind being stream, task, progress, evaluated, note or done."""


ROW_IDENTITY = {"features", "image", "image_size", "image_mean", "image_std", "relabel", "test", "validation", "positive", "id"}
"""Keys of the stream that make other rows or labels of the same data."""

SPLIT_IDENTITY = {"by", "column", "groups", "every", "periods", "max_angle", "task_id"}
"""Keys of the split that make other tasks of the same rows; the others may grow with the stream."""


def identity_of(spec: RunSpec, stream: Stream) -> dict[str, Any]:
    """What must stay the same for one run to go on: model, inputs, label and metric."""
    model = spec.model.model_dump(mode="json", exclude_none=True, exclude={"weights", "head"})
    return {
        "model": model,
        "head": "per-task" if resolve_head(spec, stream) == "per-task" else "shared",
        "input": {"kind": stream.kind, "shape": list(stream.shape)},
        "features": list(stream.features),
        "label": spec.stream.label,
        "rows": spec.stream.model_dump(mode="json", include=ROW_IDENTITY, exclude_none=True),
        "split": resolved_split(spec.stream).model_dump(mode="json", include=SPLIT_IDENTITY, exclude_none=True),
        "metric": spec.stream.metric,
    }


def check_names(spec: RunSpec, stream: Stream) -> None:
    """Refuse two tasks of one name, since a run knows its tasks by them, and weights of classes that are not there."""
    names = [task.name for task in stream.tasks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"Two tasks of the stream are called {twice[0]!r}. Give every task a name of its own.")
    weights = spec.training_params.class_weights
    for name in weights if not isinstance(weights, str) else ():
        if name not in stream.classes:
            raise ConfigError(f"training_params.class_weights: there is no class {name}{suggest(name, stream.classes)}")


def check_identity(path: Path, identity: dict[str, Any], prior: dict[str, Any] | None) -> None:
    """Refuse to go on with a run of another model, label or metric.

    Args:
        path: the run's directory.
        identity: of the configuration and the stream; see `identity_of`.
        prior: state of the last learned task; None for a new run.

    Raises:
        ConfigError: names what differs.
    """
    if prior is None or prior["identity"] == identity:
        return
    changes = differences(prior["identity"], identity)
    said = "; ".join(f"{key} was {_short(old)}, is {_short(new)}" for key, (old, new) in changes.items())
    raise ConfigError(f"{path} belongs to another run: {said}. Give --run another directory, or put the setting back.")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def config_of(spec: RunSpec) -> str:
    """A hash of all that a configuration says of how a task is learned and judged, defaults included.

    Where its rows come from is left out: they have a fingerprint of their own, and a stream that grows lists new files.
    """
    values = spec.model_dump(mode="json")
    for name in (*SOURCES, "keep_eval"):
        del values["stream"][name]
    del values["stream"]["split"]["until"], values["checkpoint"], values["training_params"]["device"]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def pending_tasks(stream: Stream, run: RunDirectory, listener: Listener, config: str) -> list[Task]:
    """Tasks to learn: neither learned nor refused as they are; speaks of refused ones, and of learned ones that have changed.

    Args:
        stream: what there is.
        run: what was learned and refused.
        listener: hears it.
        config: `config_of` the configuration.
    """
    learned = {record["task"]: record for record in run.learned}
    current = {task.name: task for task in stream.tasks}
    for name, record in learned.items():
        kept = has_file(run.task_path(record["number"]), "eval.safetensors")
        if name not in current and not kept:
            raise DataError(
                f"Task {name!r} was learned by this run and is no longer in the stream, and its evaluation rows were not kept "
                "(stream.keep_eval: false), so it cannot be measured. Put its data back, or start a new run."
            )
        if name not in current:
            listener("note", {"text": f"Task {name} is no longer in the stream; it is measured on the rows kept in the run."})
        elif current[name].fingerprint != record["fingerprint"]:
            rows = "the rows kept in the run" if kept else "the rows that the stream has now"
            text = (
                f"Task {name} has other rows now than when it was learned; it is measured on {rows}, and new rows are not learned."
            )
            listener("note", {"text": text})
    refused = {
        record["task"]
        for record in run.records
        if record["status"] == "rejected" and record["config"] == config and record["task"] not in learned
        if record["task"] in current and current[record["task"]].fingerprint == record["fingerprint"]
    }
    for name in sorted(refused):
        text = f"Task {name} was refused by the gate, and neither its rows nor the configuration have changed: it is left out."
        listener("note", {"text": f"{text} retain promote {run.path} {name} accepts it."})
    return [task for task in stream.tasks if task.name not in learned and task.name not in refused]


def check_disk(job: Job, task: Task, path: Path) -> None:
    """Refuse to start a task whose checkpoints would not fit on the disk."""
    model = nbytes(job.model.state_dict().values())
    methods = sum(method.nbytes(state) for method, state in job.methods)
    checkpoint = 3 * model + methods  # weights and at most two moments
    needed = checkpoint * 2 + nbytes(task.test.tensors().values())
    free = shutil.disk_usage(path).free
    if free < needed:
        raise RunError(
            f"{path}: {free:,} bytes are free, and task {task.name} needs about {needed:,} for its checkpoints. "
            "Free space, give --run another disk, or set checkpoint.keep_tasks: 1."
        )


def diverged(task: Task, name: str) -> RunError:
    """The error of a task whose weights or loss are no longer finite; `name` is the first of them."""
    return RunError(
        f"Training diverged in task {task.name}: {name} is not finite. Nothing of this task was saved over good weights. "
        "Lower the learning rate, set training_params.max_norm: 1.0, or check the inputs' range."
    )
