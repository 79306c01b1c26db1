"""From a configuration to a stream of tasks: rows are read, divided, held out, and turned into tensors.

Which rows of a task are held out depends on the seed, the task's name and its own rows only, so that a stream that grows leaves
its older tasks as they were. What the first task fixes for all (scaling, categories, class ids, cut points, the seed) is given
back in `Stream.frozen`, and taken from there when the stream is opened again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from retain.data import encode, features, fraud, splits
from retain.data.encode import Labels
from retain.data.images import rotated
from retain.data.sources import TEST, TRAIN, VALIDATION, Source, read, unique
from retain.data.splits import Cut
from retain.data.task import Rows, Stream, Task
from retain.errors import ConfigError, DataError
from retain.params import derive, generator
from retain.spec import RunSpec, SplitSpec, StreamSpec, parse_metric

BINARY_METRICS = frozenset({"auc", "average_precision", "recall_at_fpr"})

Change = Callable[[Tensor], Tensor]
"""What a task does to the inputs that all tasks share."""


def build_stream(spec: RunSpec, frozen: Mapping[str, Any] | None = None) -> Stream:
    """The stream that a configuration describes.

    Args:
        spec: the configuration.
        frozen: `Stream.frozen` of the run that goes on; None for a new one.

    Returns:
        The stream, with everything in memory.

    Raises:
        ConfigError: the configuration does not fit the data.
        DataError: the data cannot be read or used.
    """
    split = resolved_split(spec.stream)
    stream = spec.stream.model_copy(update={"split": split})
    fixed = dict(frozen or {})
    seed = fixed.setdefault("seed", spec.training_params.seed)
    source = read(stream, seed, fixed)
    notes = list(source.notes)
    fixed["files"] = dict(source.files)

    original = encode.read_labels(pa.chunked_array([chunk for segment in source.segments for chunk in segment.labels.chunks]))
    labels = encode.relabelled(original, stream.relabel)
    kind = str(source.segments[0].labels.type)
    if fixed.setdefault("label_type", kind) != kind:
        notes.append(
            f"The labels are of type {kind}, and were {fixed['label_type']} when the run began: are they the same classes?"
        )
    changes: list[Change] = []
    if split.by in ("permutation", "rotation"):
        cuts, changes = _changed(source, len(labels.codes), split, seed)
    else:
        cuts = _divided(source, original, split, seed, fixed, notes)
    # a name must not depend on whether the rows of an old task are still there, so those are left out last
    cuts = [Cut(name, cut.rows) for name, cut in zip(unique([cut.name for cut in cuts]), cuts, strict=True) if len(cut.rows)]
    roles = _roles(source, labels, cuts, stream, seed, one_draw=bool(changes))
    _check_rows(cuts[:1] if changes else cuts, roles, labels, notes)
    ids = _class_ids(labels, cuts, stream, fixed)
    inputs = _inputs(source, cuts[0].rows[roles[0] == TRAIN], fixed, notes)
    if changes and "codes" in inputs:
        raise ConfigError("stream.split: permutation needs numbers, and the table has text columns. Drop them (stream.drop).")
    hashes = _ids(source, stream, fixed)

    local = split.task_id or spec.model.head == "per-task"
    tasks = []
    for place, (cut, role) in enumerate(zip(cuts, roles, strict=True)):
        classes = np.unique(ids[labels.codes[cut.rows]])
        parts = []
        for wanted in (TRAIN, VALIDATION, TEST):
            rows = cut.rows[role == wanted]
            index, targets = torch.from_numpy(rows), ids[labels.codes[rows]]
            mine = {name: values[index] for name, values in inputs.items()}
            if changes and len(rows):
                mine["x"] = changes[place](mine["x"])
            targets = np.searchsorted(classes, targets) if local else targets
            parts.append(Rows(mine, torch.tensor(targets), None if hashes is None else hashes[index]))
        tasks.append(Task(cut.name, parts[0], parts[1], parts[2], classes.tolist()))

    shape, scenario = tuple(inputs["x"].shape[1:]), _scenario(tasks, local)
    if source.kind != "table":
        return Stream(tasks, fixed["classes"], source.kind, shape, scenario, frozen=fixed, notes=notes)
    found = features.layout(fixed["columns"])
    sizes = [len(values) for _, values in found.categories]
    return Stream(tasks, fixed["classes"], "vector", shape, scenario, found.features, fixed, notes, found.gaps, sizes)


def resolved_split(stream: StreamSpec) -> SplitSpec:
    """The split that is meant: where nothing is asked for, tasks come as they are, one per file or as a function gave them."""
    split = stream.split
    own = stream.source in ("factory", "random")
    unasked = not split.model_fields_set - {"task_id"}
    if (own and split.by == "none") or (unasked and (own or isinstance(getattr(stream, stream.source), tuple))):
        return split.model_copy(update={"by": "file"})
    if unasked and stream.builtin == "fraud":
        return split.model_copy(update={"by": "time", "column": fraud.DATE, "every": "month"})
    if unasked and stream.source == "hf":
        return split.model_copy(update={"by": "none"})
    return split


# --- rows of the tasks ------------------------------------------------------------------------------------------------


def _divided(source: Source, original: Labels, split: SplitSpec, seed: int, fixed: dict[str, Any], notes: list[str]) -> list[Cut]:
    """Tasks of different rows."""
    if split.by == "class":
        return splits.by_class(original, split, fixed, notes)
    if split.by == "file":
        return splits.by_part([segment.part for segment in source.segments], [len(segment.labels) for segment in source.segments])
    if split.by == "none":
        return [Cut("all", np.arange(len(original.codes)))]
    key = pa.chunked_array([chunk for segment in source.segments if segment.key for chunk in segment.key.chunks])
    if split.by == "column":
        return splits.by_column(encode.read_labels(key), split, seed, fixed, notes)
    cuts, rule = splits.by_time(key, split, fixed.get("cuts"), notes)
    if rule is not None:
        fixed["cuts"] = rule
    return cuts


def _changed(source: Source, rows: int, split: SplitSpec, seed: int) -> tuple[list[Cut], list[Change]]:
    """Tasks of the same rows, with what is done to each one's inputs."""
    if split.by == "rotation":
        if source.kind != "image":
            kind = "vectors" if source.kind == "table" else f"{source.kind} rows"
            raise ConfigError(f"stream.split: rotation needs images, and the stream has {kind}. Use `by: permutation`.")
        angles = [place * split.max_angle / split.tasks for place in range(split.tasks)]
        names = [f"rotation-{angle:g}" for angle in angles]
        changes = [_turn(angle) for angle in angles]
    else:
        names = [f"permutation-{place}" for place in range(split.tasks)]
        changes = [_permute(derive("permutation", seed, place) if place else None) for place in range(split.tasks)]
    return [Cut(name, np.arange(rows)) for name in names], changes


def _turn(angle: float) -> Change:
    return lambda x: rotated(x, angle) if angle else x


def _permute(key: int | None) -> Change:
    """A fixed permutation of each row's elements; None for none."""

    def permute(x: Tensor) -> Tensor:
        if key is None:
            return x
        flat = x.reshape(len(x), -1)
        return flat[:, torch.randperm(flat.shape[1], generator=generator(key))].reshape(x.shape)

    return permute


def _roles(
    source: Source, labels: Labels, cuts: Sequence[Cut], stream: StreamSpec, seed: int, *, one_draw: bool
) -> list[np.ndarray]:
    """Which rows of each task are for training, validation and test.

    The source's own test rows stay what they are. Tasks of the same rows (`one_draw`) share one draw, so that no row is learned
    in one task and tested in another.
    """
    given = np.repeat([segment.role for segment in source.segments], [len(segment.labels) for segment in source.segments])
    test = 0.0 if (given == TEST).any() else stream.test
    validation = 0.0 if (given == VALIDATION).any() else stream.validation
    if one_draw:
        roles = _drawn(given, labels.codes, test, validation, derive("holdout", seed, "all"))
        return [roles] * len(cuts)
    return [_drawn(given[cut.rows], labels.codes[cut.rows], test, validation, derive("holdout", seed, cut.name)) for cut in cuts]


def _drawn(given: np.ndarray, codes: np.ndarray, test: float, validation: float, key: int) -> np.ndarray:
    roles = given.copy()
    undivided = given == TRAIN
    roles[undivided] = splits.hold_out(codes[undivided], test, validation, key)
    return roles


def _check_rows(cuts: Sequence[Cut], roles: Sequence[np.ndarray], labels: Labels, notes: list[str]) -> None:
    """Raise a DataError for a task that cannot be learned or measured; note classes that are only on one side."""
    for cut, role in zip(cuts, roles, strict=False):
        train, test = (set(labels.codes[cut.rows[role == wanted]].tolist()) for wanted in (TRAIN, TEST))
        seen = f"task {cut.name} has {len(cut.rows):,} rows"
        if not train:
            raise DataError(f"{seen} and none to learn from. Give it rows for training, or split into fewer tasks.")
        if not test:
            raise DataError(
                f"{seen} and none to be measured on: two rows of one class are needed at least. Give it more rows, or split into "
                "fewer tasks."
            )
        for classes, text in ((train - test, "learned but not measured"), (test - train, "measured but not learned")):
            if classes:
                names = encode.shortened([labels.names[code] for code in sorted(classes)])
                notes.append(f"Task {cut.name}: {text}, for lack of rows: class {names}.")


# --- values -----------------------------------------------------------------------------------------------------------


def _class_ids(labels: Labels, cuts: Sequence[Cut], stream: StreamSpec, fixed: dict[str, Any]) -> np.ndarray:
    """The class id of every label code, in order of first appearance; fixes `classes`.

    Raises:
        ConfigError: the metric needs two classes and there are more, or the positive class is not the run's.
        DataError: there is one class only.
    """
    codes = list(dict.fromkeys(code for cut in cuts for code in np.unique(labels.codes[cut.rows]).tolist()))
    known, names = list(fixed.get("classes", ())), labels.names
    classes = known + [names[code] for code in codes if names[code] not in known]
    if len(classes) < 2:
        raise DataError(f"stream.label: every row has the label {classes[0]}. Two classes are needed at least.")
    if parse_metric(stream.metric)[0] in BINARY_METRICS:
        if len(classes) > 2:
            raise ConfigError(
                f"stream.metric={stream.metric} needs two classes; the stream has {len(classes)} ({encode.shortened(classes)}). "
                "Use accuracy, or make two of them with stream.relabel."
            )
        positive = _positive(labels, classes, known, stream)
        if known and positive != known[1]:
            raise ConfigError(f"stream.positive: {positive} cannot replace {known[1]}, with which the run began. Start a new run.")
        classes.sort(key=lambda name: name == positive)
    fixed["classes"] = classes
    places = {name: place for place, name in enumerate(classes)}
    return np.array([places.get(name, -1) for name in names], dtype=np.int64)


def _positive(labels: Labels, classes: Sequence[str], known: Sequence[str], stream: StreamSpec) -> str:
    """The positive class's name: the one that is given, else the run's, else the larger label."""
    if stream.positive is not None:
        name = encode.name_of(stream.positive)
        return name if name in classes else labels.names[labels.find(stream.positive, "stream.positive")]
    return known[1] if len(known) == 2 else max(classes, key=labels.names.index)


def _inputs(source: Source, first: np.ndarray, fixed: dict[str, Any], notes: list[str]) -> dict[str, Tensor]:
    """All rows as the model's inputs; a table's plan is made from the first task's training rows, unless the run has one."""
    inputs = [segment.inputs for segment in source.segments]
    if source.kind != "table":
        return {"x": torch.from_numpy(np.concatenate(inputs))}
    table = pa.concat_tables(inputs)
    if "columns" not in fixed:
        fixed["columns"] = features.make_plan(table, first)
        notes += features.doubts(table, fixed["columns"], len(first))
    notes += _filled(table, fixed["columns"])
    texts = [f"{entry['name']} ({len(entry['categories'])})" for entry in fixed["columns"] if "categories" in entry]
    if texts:
        said = encode.shortened(texts)
        notes.append(f"Text columns became one indicator per category of the first task, and one for others: {said}.")
    if dates := [entry["name"] for entry in fixed["columns"] if "date" in entry]:
        notes.append(f"Dates became features (days, and the time of the week and of the year): {encode.shortened(dates)}.")
    return features.encode(table, fixed["columns"])


def _filled(table: pa.Table, plan: features.Plan) -> list[str]:
    """Sentences about missing values: which columns have an indicator for them, and which got their mean."""
    gaps = {entry["name"]: table.column(entry["name"]).null_count for entry in plan if len(entry) > 1}
    marked = {entry["name"] for entry in plan if entry.get("missing") or None in entry.get("categories", ())}
    parts = [
        [f"{name} ({count:,})" for name, count in gaps.items() if count and (name in marked) is known] for known in (True, False)
    ]
    said = []
    if parts[0]:
        said.append(f"Missing values, which an indicator tells the model of: {encode.shortened(parts[0])}.")
    if parts[1]:
        said.append(
            f"Missing values where the first task had none, so read as the mean or as (other): {encode.shortened(parts[1])}."
        )
    return said


def _ids(source: Source, stream: StreamSpec, fixed: dict[str, Any]) -> Tensor | None:
    """Hashes of all rows' identifiers; fixes the column's name, by which `retain purge` finds rows."""
    if stream.id is None:
        return None
    fixed["id"] = stream.id
    parts = [encode.id_hashes(segment.ids, fixed["seed"]) for segment in source.segments if segment.ids is not None]
    return torch.from_numpy(np.concatenate(parts))


def _scenario(tasks: Sequence[Task], local: bool) -> str:
    if local:
        return "task-incremental"
    grows = any(set(task.classes) - set(tasks[0].classes) for task in tasks)
    return "class-incremental" if grows else "domain-incremental"
