"""The loop: for each task of the stream that the lineage does not have, learn, measure, consolidate, save.

Nothing here names a method; a technique that needs an edit in this file needs another seam.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from retain.data.batches import TaskBatches, class_weights, steps_per_epoch
from retain.data.scenarios import build_stream
from retain.data.task import Rows, Stream, Task
from retain.errors import Stopped
from retain.forgetting import build
from retain.memory.meter import peak_bytes, reset_peak, resolve_device
from retain.memory.optimizer import lr_factor, set_lr_, step_sizes
from retain.models.heads import resolve_head
from retain.params import check_finite, derive
from retain.seams import StepContext
from retain.spec import SOURCES, RunSpec, differences
from retain.step import Job, train_step
from retain.training.checks import (
    Listener,
    check_disk,
    check_identity,
    check_names,
    config_of,
    diverged,
    identity_of,
    pending_tasks,
)
from retain.training.evaluate import measure
from retain.training.job import FILES, grow_job, job_files, make_job, restore_job
from retain.training.lineage import (
    SCHEMA,
    Damaged,
    RunDirectory,
    disk_errors,
    has_file,
    load_checkpoint,
    opened,
    remove_directory,
    save_checkpoint,
    write_file,
)
from retain.training.summary import summarize, to_json, versions

NO_METHOD = (
    "No method against forgetting is configured, so earlier tasks will be forgotten. training_params.regularization: "
    "{replay_ratio: 1.0, replay_capacity: 2000} keeps rows of them, {ewc_lambda: 40.0} holds the weights that they need."
)
CANNOT_HELP = (
    "{} cannot keep old classes apart from new ones that share their head (class-incremental): without rows of both, nothing says "
    "how they differ. Store some (replay_ratio: 1.0 under training_params.regularization), or, where the task of a row is known, "
    "set stream.split.task_id: true."
)
REFUSED = (
    "Task {task} is refused by the gate: {why}. The model before it stays. retain promote {run} {task} accepts it; it is tried "
    "again when its rows or the configuration have changed."
)
MAX_SKIPPED = 100
"""Steps in a row that the loss scaler may skip: it halves the scale each time, so after these no scale would have helped."""
TICK_SECONDS = 0.2
MAY_CHANGE_WITHIN_TASK = (
    "checkpoint.",
    "budget.",
    "training_params.device",
    "training_params.eval_batch_size",
    *(f"stream.{name}" for name in (*SOURCES, "keep_eval", "split.until")),
)
"""Keys with which a checkpoint within a task still goes on; the rows have a fingerprint of their own."""


@dataclass
class Progress:
    """Where a task stands, as its checkpoints keep it."""

    step: int = 0
    looked: int = 0
    skipped: int = 0
    rows: int = 0
    seconds: float = 0.0
    before: dict[str, float | None] | None = None
    at_init: dict[str, dict[str, float | None]] | None = None


@dataclass
class Training:
    """A run under way: what it was told, where it is kept, and the job that its steps change."""

    spec: RunSpec
    stream: Stream
    run: RunDirectory
    job: Job
    identity: dict[str, Any]
    listener: Listener
    stop: StopRequest
    gate: bool = False
    metrics: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        """Tasks learned so far."""
        return len(self.run.learned)

    @property
    def head(self) -> str:
        """Kind of the model's head."""
        return resolve_head(self.spec, self.stream)

    def note(self, text: str) -> None:
        """Tell the user, and the run's events."""
        self.run.log("note", text=text)
        self.listener("note", {"text": text})


class StopRequest:
    """Which signal asked the run to stop, if any."""

    signal: int | None = None


# --- the run ----------------------------------------------------------------------------------------------------------


def train(
    spec: RunSpec, path: Path, *, stream: Stream | None = None, listener: Listener | None = None, gate: bool = False
) -> dict[str, Any]:
    """Learn the tasks of the stream that the run does not have yet.

    Args:
        spec: the run's description.
        path: its directory; created when it does not exist.
        stream: tasks made in Python; default: what `spec.stream` describes.
        listener: hears progress.
        gate: refuse a task with which a budget is broken: the run stops there, the model before it stays, and the task is tried
            again only when its rows or the configuration have changed.

    Returns:
        The summary, as in `summary.json`, with the task that was refused, if one was (`rejected`).

    Raises:
        ConfigError: the spec, the data and the run directory do not go together.
        RunError: the directory cannot be used, the disk is full, or training diverged.
        Stopped: after SIGTERM or SIGINT; a checkpoint was saved and the same call goes on from it.
    """
    listener = listener or (lambda kind, values: None)
    device = resolve_device(spec.training_params.device)
    if stream is None and not path.exists():
        stream = build_stream(spec)  # data that cannot be used leaves no directory behind
    with opened(path) as run, disk_errors(path), _stop_signals() as stop:
        latest = run.latest()
        prior = None if latest is None else load_checkpoint(run.task_path(latest), ["state.json"])["state.json"]
        if stream is None:
            stream = build_stream(spec, prior["frozen"] if prior else None)
        check_names(spec, stream)
        identity = identity_of(spec, stream)
        check_identity(path, identity, prior)
        for text in (*run.notes, *stream.notes):
            listener("note", {"text": text})
        pending = pending_tasks(stream, run, listener, config_of(spec))
        rejected = None
        listener("stream", {"stream": stream, "pending": pending, "learned": run.learned, "steps": total_steps(spec, pending)})
        if prior and (changes := _without_new_files(_changes(prior["spec"], spec))):
            _say_changes(run, changes, bool(pending), listener)
        if pending:
            for text in _advice(spec, stream):
                listener("note", {"text": text})
            job = make_job(spec, stream, device, prior["sizes"] if prior else [])
            training = Training(spec, stream, run, job, identity, listener, stop, gate, _metrics(spec))
            if prior and latest is not None:
                files = load_checkpoint(run.task_path(latest), FILES)
                for text in restore_job(job, files, prior):
                    training.note(text)
            rejected = _learn_all(training, pending)
        run.drop_partials()
        summary = summarize(spec, run.learned) | {"rejected": rejected}
        write_file(path / "summary.json", to_json(summary))
        listener("done", {"summary": summary})
        return summary


def look(spec: RunSpec, path: Path) -> dict[str, Any]:
    """What `train` would do, without writing anything: the resolved spec, the tasks, their rows and steps."""
    run, prior = RunDirectory(path), None
    if path.exists():
        run.read_records(repair=False)
        if (latest := run.latest()) is not None:
            prior = load_checkpoint(run.task_path(latest), ["state.json"])["state.json"]
    stream = build_stream(spec, prior["frozen"] if prior else None)
    check_names(spec, stream)
    check_identity(path, identity_of(spec, stream), prior)
    make_job(spec, stream, resolve_device(spec.training_params.device), prior["sizes"] if prior else [])
    notes = [*stream.notes, *_advice(spec, stream)]
    pending = pending_tasks(stream, run, lambda kind, values: notes.append(values["text"]), config_of(spec))
    tasks = [
        {
            "task": task.name,
            "train": len(task.train),
            "validation": len(task.validation),
            "test": len(task.test),
            "steps": task_steps(spec, task),
            "state": "to learn" if task in pending else "learned",
        }
        for task in stream.tasks
    ]
    return {
        "schema": SCHEMA,
        "spec": spec.model_dump(mode="json", exclude_none=True),
        "scenario": stream.scenario,
        "head": resolve_head(spec, stream),
        "classes": list(stream.classes),
        "tasks": tasks,
        "steps": total_steps(spec, pending),
        "notes": notes,
    }


def _advice(spec: RunSpec, stream: Stream) -> list[str]:
    """What can be said before anything is learned about the methods and the stream."""
    if len(stream.tasks) < 2:
        return []
    methods = build(spec.methods)
    if not methods:
        return [NO_METHOD]
    shared = stream.scenario == "class-incremental" and resolve_head(spec, stream) != "per-task"
    if shared and not any("class-incremental" in method.allows for method in methods):
        return [CANNOT_HELP.format(" and ".join(method.name for method in methods))]
    return []


def _learn_all(training: Training, pending: list[Task]) -> str | None:
    """Learn these tasks; the name of the one that the gate refused, where it stops."""
    reset_peak(training.job.device)
    undos = [method.apply_(training.job.model, state) for method, state in training.job.methods if method.apply_ is not None]
    try:
        for task in pending:
            if not _learn(training, task):
                return task.name
            if training.stop.signal is not None and task is not pending[-1]:
                raise Stopped(training.stop.signal, f"Stopped after task {task.name}; the same command goes on with the next one.")
    finally:
        for undo in reversed(undos):
            undo()
    return None


def total_steps(spec: RunSpec, tasks: list[Task]) -> int:
    """Optimizer steps of all these tasks."""
    return sum(task_steps(spec, task) for task in tasks)


def task_steps(spec: RunSpec, task: Task) -> int:
    """Optimizer steps of one task."""
    training = spec.training_params
    steps = training.epochs * steps_per_epoch(len(task.train), training.batch_size)
    return steps if training.max_steps is None else min(steps, training.max_steps)


# --- one task ---------------------------------------------------------------------------------------------------------


def _learn(training: Training, task: Task) -> bool:
    """Learn one task from where its last checkpoint stands, and keep it; False where the gate refuses it."""
    run, number = training.run, training.number
    progress = _resume(training, task)
    if progress is None:
        progress = begin(training, task)
    check_disk(training.job, task, run.path)
    batches = batches_of(training, number, task.train, task.classes, weighted=True)
    run_steps(training, task, batches, progress)
    if not progress.looked:  # else a checkpoint was made after it
        for method, state in training.job.methods:
            if method.end_task is not None:
                method.end_task(_context(training, task), state)
    if (name := check_finite(training.job.model.state_dict())) is not None:
        raise diverged(task, name)

    row = _measure_all(training, task)
    peak = peak_bytes(training.job.device)
    training.listener("evaluated", {"number": number, "task": task, "row": row, "peak": peak})
    consolidate(training, task, batches, progress)

    files, state = job_files(training.job)
    record = _record(training, task, progress, row)
    content: dict[str, Any] = {**files, "state.json": _state(training, state), "record.json": record}
    content["spec.yaml"] = _spec_yaml(training.spec)
    if training.spec.stream.keep_eval:
        content["eval.safetensors"] = task.test.tensors()
    budgets = summarize(training.spec, [*run.learned, record])["budgets"]
    if training.gate and (broken := {name: budget for name, budget in budgets.items() if budget["status"] == "broken"}):
        run.add_rejected({**record, "config": config_of(training.spec)}, content)
        run.drop_partials()
        run.log("rejected", task=task.name, number=number, budgets=broken)
        why = " and ".join(
            f"{name} {budget['measured']:.3f} breaks the budget of {budget['limit']:g}" for name, budget in broken.items()
        )
        training.listener("note", {"text": REFUSED.format(task=task.name, run=run.path, why=why)})
        return False
    run.add_task(record, content)
    run.drop_partials()
    if training.spec.checkpoint.keep_tasks != "all":
        run.prune_tasks(training.spec.checkpoint.keep_tasks)
    run.log("learned", task=task.name, number=number)
    return True


def begin(training: Training, task: Task) -> Progress:
    """The task's start: what the model can do before, a head for it, and the methods' preparations."""
    number, progress = training.number, Progress()
    if training.head == "single":
        if number == 0:
            tasks = enumerate(training.stream.tasks)
            progress.at_init = {each.name: measure_rows(training, k, each.test, each.classes) for k, each in tasks}
        else:
            progress.before = measure_rows(training, number, task.test, task.classes)
    outputs = len(task.classes) if training.head == "per-task" else max(_seen(training, task)) + 1
    grow_job(training.job, training.spec, outputs, number)
    ctx = _context(training, task)
    for method, state in training.job.methods:
        if method.begin_task is not None:
            method.begin_task(ctx, state)
    training.run.log("task", task=task.name, number=number, rows=len(task.train))
    return progress


def run_steps(training: Training, task: Task, batches: TaskBatches, progress: Progress) -> None:
    """The optimizer steps that are left, with checkpoints."""
    job, spec, stop = training.job, training.spec.training_params, training.stop
    every_seconds, every_steps = training.spec.checkpoint.every_seconds, training.spec.checkpoint.every_steps
    steps, first, carried = task_steps(training.spec, task), progress.step, progress.seconds
    training.listener("task", {"number": training.number, "task": task, "steps": steps, "step": first})
    base = _context(training, task)._replace(
        key=derive("step", spec.seed, training.number),
        total_rows=batches.rows_before(steps),
        micro_batch=job.micro_batch,
        class_weights=None if batches.class_weights is None else batches.class_weights.to(job.device),
    )
    uses_sizes = any(method.project_ is not None for method, _ in job.methods)
    job.model.train()
    began = saved = time.monotonic()
    next_tick, skipped_in_a_row = began + TICK_SECONDS, 0
    for step in range(first, steps):
        set_lr_(job.optimizer, lr_factor(spec.schedule, step, steps))
        ctx = base._replace(step=step, rows=batches.rows_before(step))
        sizes = step_sizes(job.optimizer, job.params) if uses_sizes else None
        result = train_step(job, batches.at(step).to(job.device), ctx, sizes)
        progress.step = step + 1
        progress.rows += result.rows
        progress.skipped += result.skipped
        skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
        if skipped_in_a_row == MAX_SKIPPED:
            raise diverged(task, f"a gradient of each of the last {MAX_SKIPPED} steps")
        now = time.monotonic()
        asked = stop.signal is not None
        due = asked or now - saved >= every_seconds or (every_steps is not None and progress.step % every_steps == 0)
        if due or now >= next_tick:
            loss = result.loss.item()
            if not math.isfinite(loss) and not result.skipped:
                raise diverged(task, check_finite(job.model.state_dict()) or "the loss")
            rate = (now - began) / (progress.step - first)
            heard = {"step": progress.step, "steps": steps, "loss": loss, "seconds_per_step": rate}
            training.listener("progress", {**heard, "peak": peak_bytes(job.device)})
            next_tick = now + TICK_SECONDS
        if due:
            progress.seconds = carried + now - began
            _save_partial(training, task, progress)
            saved = time.monotonic()
        if asked:
            text = f"Stopped in task {task.name} after step {progress.step} of {steps}; the same command goes on from there."
            raise Stopped(int(stop.signal or 0), text)
    progress.seconds = carried + time.monotonic() - began


def _measure_all(training: Training, task: Task) -> dict[str, list[float | None]]:
    """Every metric on every task learned so far and on this one."""
    current = {each.name: each for each in training.stream.tasks}
    measured = []
    for record in training.run.learned:
        name = record["task"]
        if name in current and current[name].test.fingerprint == record["test_fingerprint"]:
            rows = current[name].test
        elif has_file(path := training.run.task_path(record["number"]), "eval.safetensors"):
            rows = Rows.from_tensors(load_checkpoint(path, ["eval.safetensors"])["eval.safetensors"])
        else:
            rows = current[name].test
        measured.append(measure_rows(training, record["number"], rows, record["classes"]))
    measured.append(measure_rows(training, training.number, task.test, task.classes))
    return {metric: [values[metric] for values in measured] for metric in training.metrics}


def measure_rows(training: Training, number: int, rows: Rows, classes: Any) -> dict[str, float | None]:
    """The run's metrics on rows of a task."""
    batch_size = training.spec.training_params.eval_batch_size
    return measure(training.job, batches_of(training, number, rows, classes), training.metrics, batch_size)


def consolidate(training: Training, task: Task, batches: TaskBatches, progress: Progress) -> None:
    """Let the methods keep what they need of the task: once per batch of its rows, then once; with checkpoints."""
    job, spec, checkpoint = training.job, training.spec.training_params, training.spec.checkpoint
    base = _context(training, task)._replace(
        key=derive("consolidate", spec.seed, training.number),
        total_rows=len(task.train),
        micro_batch=min(job.micro_batch or spec.batch_size, spec.batch_size),
    )
    began = saved = heard = time.monotonic()
    carried = progress.seconds
    takers = [(method, state) for method, state in job.methods if method.consolidate_batch is not None]
    for position, batch in enumerate(batches.in_order(spec.eval_batch_size, progress.looked) if takers else ()):
        ctx = base._replace(batch=batch.to(job.device), step=progress.looked, rows=progress.looked)
        for method, state in takers:
            method.consolidate_batch(ctx, state)  # type: ignore[misc]
        progress.looked += len(batch)
        now, asked = time.monotonic(), training.stop.signal is not None
        progress.seconds = carried + now - began
        if now >= heard + TICK_SECONDS:
            training.listener("consolidating", {"rows": progress.looked, "of": len(task.train)})
            heard = now
        every = checkpoint.every_steps is not None and (position + 1) % checkpoint.every_steps == 0
        if asked or every or now - saved >= checkpoint.every_seconds:
            _save_partial(training, task, progress)
            saved = time.monotonic()
        if asked:
            text = f"Stopped while looking back on task {task.name}; the same command goes on from there."
            raise Stopped(int(training.stop.signal or 0), text)
    for method, state in job.methods:
        if method.consolidate is not None:
            method.consolidate(base, state)
    progress.seconds = carried + time.monotonic() - began


def _context(training: Training, task: Task) -> StepContext:
    """What the seams may read, before a batch is there."""
    job, seen = training.job, _seen(training, task)
    owner = next(((method, state) for method, state in job.methods if method.sample is not None), None)
    sample = None if owner is None else lambda rows, key: owner[0].sample(owner[1], rows, key)  # type: ignore[misc]
    return StepContext(
        model=job.model,
        params=job.params,
        objective=job.objective,
        step_sizes=step_sizes(job.optimizer, job.params, "initial_lr"),
        task=training.number,
        classes=len(seen),
        new_classes=len(seen) - len(_seen(training)),
        autocast=job.precision.autocast,
        sample=sample,
    )


def _seen(training: Training, task: Task | None = None) -> set[int]:
    """Ids of the classes of all learned tasks, and of this one."""
    seen = {c for record in training.run.learned for c in record["classes"]}
    return seen if task is None else seen | set(task.classes)


def batches_of(training: Training, number: int, rows: Rows, classes: Any, *, weighted: bool = False) -> TaskBatches:
    """The batches of a task's rows; `weighted` by class, where the configuration says so."""
    stream, spec = training.stream, training.spec.training_params
    local = list(classes) if stream.scenario == "task-incremental" else None
    names = [stream.classes[place] for place in local] if local else stream.classes
    return TaskBatches(
        rows,
        spec.batch_size,
        seed=spec.seed,
        task=number,
        with_task=training.head == "per-task",
        classes=torch.tensor(local) if local else None,
        class_weights=class_weights(spec.class_weights, rows.targets, names) if weighted else None,
    )


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _save_partial(training: Training, task: Task, progress: Progress) -> None:
    files, state = job_files(training.job)
    here = {
        "task": task.name,
        "fingerprint": task.fingerprint,
        "progress": dataclasses.asdict(progress),
        "events_bytes": training.run.events_size(),
    }
    name = f"{training.number:04d}-{progress.step:09d}" + (f"-{progress.looked:09d}" if progress.looked else "")
    save_checkpoint(training.run.path / "partial" / name, {**files, "state.json": _state(training, state), "record.json": here})
    training.run.drop_partials(keep=training.spec.checkpoint.keep)


def _resume(training: Training, task: Task) -> Progress | None:
    """Go on from the newest checkpoint of this task that is whole and fits; None to start it from its beginning."""
    run = training.run
    for path in run.partials():
        try:
            found = load_checkpoint(path, [*FILES, "state.json", "record.json"])
        except Damaged as error:
            training.note(f"A checkpoint within a task is not used: {error}")
            continue
        state, mine = found["state.json"], found["record.json"]
        if path.name.split("-")[0] != f"{training.number:04d}" or mine["task"] != task.name:
            continue
        changed = _changes(state["spec"], training.spec)
        changed = {key: pair for key, pair in changed.items() if not key.startswith(MAY_CHANGE_WITHIN_TASK)}
        if changed or mine["fingerprint"] != task.fingerprint or state["identity"] != training.identity:
            why = ", ".join(changed) or "its rows"
            training.note(f"Task {task.name} starts again from its beginning: {why} changed since its last checkpoint.")
            break
        training.job = make_job(training.spec, training.stream, training.job.device, state["sizes"])
        restore_job(training.job, found, state)
        progress = Progress(**mine["progress"])
        run.cut_events(mine["events_bytes"])
        training.note(f"Going on in task {task.name} after step {progress.step}.")
        return progress
    for path in run.partials():
        remove_directory(path)
    return None


def _state(training: Training, state: dict[str, Any]) -> dict[str, Any]:
    """`state.json`: what the tensors of a checkpoint do not say."""
    return {
        "schema": SCHEMA,
        "identity": training.identity,
        "scenario": training.stream.scenario,
        "frozen": {**training.stream.frozen, "classes": list(training.stream.classes)},
        "spec": training.spec.to_values(),
        **state,
    }


def _record(training: Training, task: Task, progress: Progress, row: dict[str, Any]) -> dict[str, Any]:
    """The task's line in the lineage."""
    measured, measured_by = peak_bytes(training.job.device)
    return {
        "schema": SCHEMA,
        "number": training.number,
        "task": task.name,
        "status": "learned",
        "fingerprint": task.fingerprint,
        "test_fingerprint": task.test.fingerprint,
        "classes": list(task.classes),
        "class_names": [training.stream.classes[c] for c in task.classes],
        "rows": {"train": len(task.train), "validation": len(task.validation), "test": len(task.test)},
        "steps": progress.step,
        "skipped_steps": progress.skipped,
        "trained_rows": progress.rows,
        "seed": training.spec.training_params.seed,
        "seconds": round(progress.seconds, 3),
        "row": row,
        "before": progress.before,
        "at_init": progress.at_init,
        "memory": {"device": str(training.job.device), "peak_bytes": measured, "measured_by": measured_by},
        "state_bytes": {method.name: method.nbytes(state) for method, state in training.job.methods},
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
    }


def _say_changes(run: RunDirectory, changes: Mapping[str, tuple[Any, Any]], pending: bool, listener: Listener) -> None:
    """Tell, and log where it matters, which keys of the configuration differ from the last task's."""
    said = ", ".join(f"{key}: {old} → {new}" for key, (old, new) in changes.items())
    if pending:
        run.log("configuration", changes={key: list(pair) for key, pair in changes.items()})
        listener("note", {"text": f"The configuration differs from the last task's: {said}."})
    else:
        remedy = "Give --run another directory to learn the stream with it."
        listener("note", {"text": f"Every task is learned already, so a changed setting does nothing ({said}). {remedy}"})


def _changes(values: Mapping[str, Any], spec: RunSpec) -> dict[str, tuple[Any, Any]]:
    """Keys in which a spec differs from the one of a checkpoint, defaults included."""
    return differences(RunSpec.parse(values).model_dump(mode="json"), spec.model_dump(mode="json"))


def _without_new_files(changes: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """The changes without those that a growing stream makes every time: more files, and a later end."""
    grown = {f"stream.{name}" for name in SOURCES}
    return {
        key: (old, new)
        for key, (old, new) in changes.items()
        if key != "stream.split.until" and not (key in grown and isinstance(new, list) and set(old or ()) <= set(new))
    }


# --- small things -----------------------------------------------------------------------------------------------------


def _metrics(spec: RunSpec) -> tuple[str, ...]:
    return tuple(dict.fromkeys([spec.stream.metric, "accuracy", "loss"]))


def _spec_yaml(spec: RunSpec) -> str:
    return yaml.safe_dump(spec.model_dump(mode="json", exclude_none=True), sort_keys=False, allow_unicode=True)


@contextlib.contextmanager
def _stop_signals() -> Iterator[StopRequest]:
    """While open, SIGTERM and SIGINT ask the run to stop after the step; a second one stops it at once."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before: Mapping[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def ask(number: int, frame: Any) -> None:
        stop.signal = number
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
