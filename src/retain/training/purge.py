"""Removing a person's rows from what a run keeps: the replay memory and the evaluation rows of every checkpoint.

The rows leave the files for good; the weights that have learned from them stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retain.data.encode import id_hashes
from retain.data.task import Rows
from retain.errors import RunError
from retain.forgetting import build
from retain.spec import RunSpec
from retain.training.job import pack_methods, unpack_method_
from retain.training.lineage import RunDirectory, file_names, load_checkpoint, sweep, update_checkpoint

EVAL, METHODS, STATE = "eval.safetensors", "methods.safetensors", "state.json"


def purge(run: RunDirectory, column: str, values: Sequence[Any]) -> dict[str, dict[str, int]]:
    """Remove the rows of some identifiers.

    Each checkpoint changes at once: a process killed on the way leaves some as they were, and the same call goes on.

    Args:
        run: opened, so that nothing else writes to it.
        column: the run's `stream.id`.
        values: identifiers; 17, 17.0 and "17" are the same.

    Returns:
        Rows removed by checkpoint, such as ``tasks/0002``, and by what held them, such as ``evaluation`` and ``replay``; only
        where there were some.

    Raises:
        RunError: the run keeps no identifiers, or those of another column. Nothing was changed.
    """
    paths = run.checkpoints()
    states = [load_checkpoint(path, [STATE])[STATE] for path in paths]
    known = {state["frozen"].get("id") for state in states}
    if not known - {None}:
        remedy = "Set stream.id before the first task is learned."
        raise RunError(f"{run.path} keeps no identifiers, so no row can be found by {column}. {remedy}")
    if column not in known:
        raise RunError(f"{run.path} finds rows by {', '.join(sorted(filter(None, known)))}, not by {column}.")
    found = {}
    for path, state in zip(paths, states, strict=True):
        ids = torch.from_numpy(id_hashes(list(values), state["frozen"]["seed"]))
        if rows := _purge(path, state, ids):
            found[path.relative_to(run.path).as_posix()] = rows
    run.log("purge", column=column, values=len(values), rows=found)
    return found


def _purge(path: Path, state: dict[str, Any], ids: Tensor) -> dict[str, int]:
    """Remove rows from one checkpoint; how many, by what held them."""
    kept, files, removed = file_names(path), {}, {}
    if EVAL in kept:
        rows = Rows.from_tensors(load_checkpoint(path, [EVAL])[EVAL])
        gone = torch.isin(rows.ids, ids) if rows.ids is not None else torch.zeros(len(rows), dtype=torch.bool)
        if gone.any():
            files[EVAL], removed["evaluation"] = rows.take((~gone).nonzero().flatten()).tensors(), int(gone.sum())
    storing = [method for method in build(RunSpec.parse(state["spec"]).methods) if method.forget is not None]
    if METHODS in kept and storing:
        tensors = load_checkpoint(path, [METHODS])[METHODS]
        for method in storing:
            assert method.forget is not None
            held = method.init({})
            unpack_method_(method, held, tensors, state["methods"])
            if count := method.forget(held, ids):
                own, trees = pack_methods([(method, held)])
                tensors = {key: t for key, t in tensors.items() if not key.startswith(f"{method.name}/")} | own
                files[METHODS], removed[method.name] = tensors, count
                state = {**state, "methods": {**state["methods"], **trees}}
                files[STATE] = state
    if files:
        update_checkpoint(path, files)
    else:
        sweep(path)  # of a call that was killed
    return removed
