"""The job of a run: made from its spec, carried into the next task, saved and restored exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from retain.data.task import Stream
from retain.errors import ConfigError, RunError
from retain.forgetting import build
from retain.memory.optimizer import load_optimizer_, make_optimizer, optimizer_tensors
from retain.memory.precision import load_scaler_, make_precision, scaler_state
from retain.models.build import Classifier, build_model
from retain.models.heads import Head, grow_
from retain.params import derive, pack, trainable, unpack_
from retain.seams import Method, State
from retain.spec import RunSpec
from retain.step import CLASSIFICATION, Job

FILES = ("model.safetensors", "methods.safetensors", "optimizer.safetensors")
"""What `job_files` makes beside the state."""


def make_job(spec: RunSpec, stream: Stream, device: torch.device, sizes: list[int]) -> Job:
    """A new job: model, methods' states and optimizer as they are before the first step.

    Args:
        spec: the run's description.
        stream: tells the kind and shape of the inputs and the scenario.
        device: where steps run.
        sizes: outputs of the head (of each head), as `model.head.sizes` gave them; empty for a new model.

    Raises:
        ConfigError: the parts do not go together.
    """
    training = spec.training_params
    if sizes:  # what was learned takes the place of the weights that the run started from
        spec = spec.with_values({"model.weights": None})
    precision = make_precision(training.precision, device)
    try:
        model = build_model(spec, stream, sizes).to(device=device, dtype=precision.dtype).train()
    except RuntimeError as error:
        if "alloc" not in str(error) and "memory" not in str(error):
            raise
        raise RunError(f"The model does not fit into the memory of {device}: {str(error).splitlines()[0]}") from None
    params = trainable(model)
    _check_micro_batches(spec, model)
    methods = [(method, method.init(params)) for method in build(spec.methods)]
    optimizer = make_optimizer(training.optimizer, params, training.decay)
    limit = training.memory.micro_batch
    return Job(
        model=model,
        params=params,
        optimizer=optimizer,
        objective=CLASSIFICATION,
        methods=methods,
        precision=precision,
        device=device,
        micro_batch=None if limit == "none" else limit,
        max_norm=training.max_norm,
    )


def grow_job(job: Job, spec: RunSpec, outputs: int, number: int) -> None:
    """Give the head room for a task and carry the optimizer's state over: moments are kept, new rows start at zero.

    Args:
        job: changed in place.
        spec: the run's description.
        outputs: outputs of a growing head, or of the task's own head.
        number: tasks learned before this one.
    """
    training = spec.training_params
    tensors = {} if training.reset_optimizer else optimizer_tensors(job.optimizer, job.params)
    grow_(_head(job), outputs, derive("head", training.seed, number))
    job.model.to(device=job.device, dtype=job.precision.dtype)
    job.params = trainable(job.model)
    if not job.params:
        raise ConfigError("The model has no trainable parameters, so nothing can be learned. Unfreeze some of them.")
    job.optimizer = make_optimizer(training.optimizer, job.params, training.decay)
    load_optimizer_(job.optimizer, job.params, tensors)


def job_files(job: Job) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """What a checkpoint keeps of a job: tensors by file and name, and the rest as plain data."""
    held, trees = pack_methods(job.methods)
    files = {
        "model.safetensors": job.model.state_dict(),
        "methods.safetensors": held,
        "optimizer.safetensors": optimizer_tensors(job.optimizer, job.params),
    }
    state = {
        "sizes": _head(job).sizes,
        "optimizer": type(job.optimizer).__name__,
        "scaler": None if job.precision.scaler is None else scaler_state(job.precision.scaler),
        "methods": trees,
    }
    return files, state


def pack_methods(methods: Sequence[tuple[Method, State]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Methods' states as the tensors of `methods.safetensors`, and what else they hold by method."""
    packed = {method.name: pack(state) for method, state in methods}
    tensors = {f"{name}/{key}": tensor for name, (held, _) in packed.items() for key, tensor in held.items()}
    return tensors, {name: tree for name, (_, tree) in packed.items()}


def unpack_method_(method: Method, state: State, tensors: Mapping[str, Tensor], trees: Mapping[str, Any]) -> None:
    """Put a method's state of `pack_methods` back into one made by its `init`."""
    prefix = f"{method.name}/"
    own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    unpack_(state, own, trees[method.name])


def restore_job(job: Job, files: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> list[str]:
    """Put a checkpoint back into a job made with its `sizes`.

    Returns:
        What could not be carried over because the configuration has changed, as sentences.
    """
    notes = []
    job.model.load_state_dict(files["model.safetensors"])
    if state["optimizer"] == type(job.optimizer).__name__:
        stored = files["optimizer.safetensors"]
        old, new = _dtype(files["model.safetensors"]), job.precision.dtype
        if old != new:  # the precision has changed; counters, which are single numbers, keep theirs
            stored = {name: t.to(new) if t.ndim and t.dtype == old else t for name, t in stored.items()}
        load_optimizer_(job.optimizer, job.params, stored)
    else:
        notes.append(f"The optimizer is {type(job.optimizer).__name__} now, {state['optimizer']} before: it starts anew.")
    if job.precision.scaler is not None and state["scaler"] is not None:
        load_scaler_(job.precision.scaler, state["scaler"])
    for method, method_state in job.methods:
        if method.name not in state["methods"]:
            notes.append(f"{method.name} was not part of this run before: it knows nothing of the tasks learned so far.")
            continue
        unpack_method_(method, method_state, files["methods.safetensors"], state["methods"])
    dropped = sorted(set(state["methods"]) - {method.name for method, _ in job.methods})
    notes += [f"{name} is no longer configured: its state is dropped." for name in dropped]
    return notes


def _dtype(tensors: dict[str, Tensor]) -> torch.dtype | None:
    """Of a model's weights."""
    return next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), None)


def _head(job: Job) -> Head:
    return cast(Classifier, job.model).head


def _check_micro_batches(spec: RunSpec, model: nn.Module) -> None:
    memory = spec.training_params.memory
    if memory.micro_batch == "none" or memory.allow_inexact:
        return
    norms = [name for name, part in model.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if norms:
        raise ConfigError(
            f"training_params.memory.micro_batch={memory.micro_batch} with BatchNorm ({norms[0]}): its statistics would depend on "
            "the micro-batch, so other weights would be learned. Set training_params.memory.allow_inexact: true to accept that, "
            "or leave micro_batch out."
        )
