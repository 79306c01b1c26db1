"""Where rows come from: table files, arrays, Hugging Face data sets, a user's own function, and what ships with the library.

Every source gives segments: rows that one file, one array or one split holds, with labels and the split column beside them.
"""

from __future__ import annotations

import logging
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
import torch

from retain.data import fraud, images, tables
from retain.data.encode import shortened
from retain.data.features import texts
from retain.errors import ConfigError, DataError
from retain.factory import blaming, load_factory
from retain.params import derive, generator
from retain.spec import FraudSpec, RandomSpec, StreamSpec

LOG = logging.getLogger("retain")

TRAIN, VALIDATION, TEST = range(3)
_SUFFIXES = ("train", "val", "test")
"""Names of the three roles in arrays: x_train, x_val, x_test."""

TOO_LARGE = "too large (more than 3.4e38)"
"""The fault of a number that float32 cannot hold."""

VOCABULARY = 100
"""Random tokens are below this, so that any tokenizer's model takes them."""


@dataclass(frozen=True)
class Segment:
    """Rows as one file, one array or one split holds them.

    Attributes:
        where: names the place in messages.
        part: the file's or task's name; the segments of one part share it.
        role: TRAIN, VALIDATION or TEST as the source says; rows that are still to be divided are TRAIN.
        inputs: a table of features, or an array [rows, ...].
        labels: bool, int64 or string, none missing.
        key: the column that splits; None where no column does.
        ids: identifiers; None where no column is named.
    """

    where: str
    part: str
    role: int
    inputs: pa.Table | np.ndarray
    labels: pa.ChunkedArray
    key: pa.ChunkedArray | None = None
    ids: pa.ChunkedArray | None = None


@dataclass(frozen=True)
class Source:
    """All rows of a stream before they are divided into tasks.

    Attributes:
        segments: at least one; inputs are all tables or all arrays of one shape.
        kind: ``table``, ``vector``, ``image`` or ``tokens``.
        notes: sentences for the user.
        files: the task's name of every file that the run knows, by path.
    """

    segments: Sequence[Segment]
    kind: str
    notes: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)


def read(stream: StreamSpec, seed: int, frozen: Mapping[str, Any]) -> Source:
    """Read the source that a configuration names.

    Args:
        stream: the configuration's part.
        seed: of random rows.
        frozen: what an earlier run fixed: its columns (`columns`), and its files by path (`files`), which may be gone by now.

    Raises:
        ConfigError: the configuration does not fit the data.
        DataError: the data cannot be read or used.
    """
    name = stream.source
    if name in ("csv", "parquet", "jsonl", "arrow", "npz"):
        return _from_files(stream, name, frozen)
    if name == "hf":
        from retain.data.huggingface import load

        found, notes = load(stream)
        return _from_tables(stream, found, Path(str(stream.hf)), frozen, notes)
    if stream.builtin == "fraud":
        return _fraud(stream, frozen)
    segments = {"builtin": _digits, "factory": _factory, "random": _random}[name](stream, seed)
    return _of_one_kind(segments)


# --- files ------------------------------------------------------------------------------------------------------------


def _from_files(stream: StreamSpec, form: str, frozen: Mapping[str, Any]) -> Source:
    """Tables or arrays from files, some of which may be gone where a run goes on."""
    listed, known, notes = list(getattr(stream, form)), frozen.get("files", {}), []
    if twice := [path for path, count in Counter(listed).items() if count > 1]:
        raise ConfigError(f"stream.{form}: {', '.join(twice)} is listed twice. List each file once.")
    names = _file_names(listed, known)
    gone = [path for path in listed if path in known and not Path(path).exists()] if stream.keep_eval else []
    files = [path for path in listed if path not in gone]
    if gone and files:
        notes.append(f"Files of earlier tasks are gone: {', '.join(gone)}. Their evaluation rows are in the run.")
    files = files or listed
    if form == "npz":
        source = _of_one_kind([segment for path in files for segment in _npz(path, names[path], stream)], notes)
    else:
        categories = texts(frozen.get("columns", ()))
        read_all, mixed = tables.read_tables(form, files, categories)
        notes += [f"Column {name} {said}; it is read as text in all." for name, said in mixed.items() if name not in stream.drop]
        found = [(path, names[path], TRAIN, table) for path, table in zip(files, read_all, strict=True)]
        source = _from_tables(stream, found, Path(files[0]).parent, frozen, notes)
    return replace(source, files=names)


def _file_names(listed: Sequence[str], known: Mapping[str, str]) -> dict[str, str]:
    """The name of each file, by path: those of a list and those that the run knows.

    A known path keeps its name. A path that differs from a known one, which is not listed any more, in nothing but the folders
    above the last takes that one's name. Any other file is new, and is called by its stem; by folder and stem where another
    file has that name.
    """
    names = dict(known)
    for path in listed:
        tail = Path(path).parts[-2:]
        moved = [old for old in sorted(names) if old not in listed and Path(old).parts[-2:] == tail]
        if path not in names and moved:
            names[path] = names.pop(moved[0])
    new = [path for path in listed if path not in names]
    stems = {path: Path(path.removesuffix(".gz")).stem for path in (*names, *new)}
    often = Counter([*names.values(), *stems.values()])
    wanted = [stems[path] if often[stems[path]] == 1 else f"{Path(path).absolute().parent.name}-{stems[path]}" for path in new]
    return names | dict(zip(new, unique([*names.values(), *wanted])[len(names) :], strict=True))


# --- tables -----------------------------------------------------------------------------------------------------------


def _from_tables(
    stream: StreamSpec,
    found: Sequence[tuple[str, str, int, pa.Table]],
    folder: Path,
    frozen: Mapping[str, Any],
    notes: Iterable[str],
) -> Source:
    """Choose the columns of tables, given as (where, part, role, table), and check them."""
    notes, first = list(notes), found[0][3].column_names
    label, key = stream.label or ("label" if "label" in first else None), stream.split.column
    if label is None:
        raise ConfigError(f"stream.label: name the column of labels; {found[0][0]} has {', '.join(first)}.")
    special = {label, key, stream.image, stream.id, *stream.drop}
    for name in stream.drop:
        if not any(name in table.column_names for *_, table in found):
            tables.column_of(found[0][3], name, found[0][0], "stream.drop")
    if twice := [name for name in (stream.features or ()) if name in special]:
        seen = f"stream.features: {', '.join(twice)} is also the label, the split column, the id or dropped"
        raise ConfigError(f"{seen}; it is no feature.")
    planned = [entry["name"] for entry in frozen.get("columns", ())]
    _keep_features(stream, planned)
    chosen = planned or stream.features
    features: list[str] = list(chosen or [name for name in first if name not in special])
    if not features and stream.image is None:
        raise ConfigError(f"stream.features: {found[0][0]} has no columns beside the label, the split column and those dropped.")
    used, segments = {*features, *special}, []
    for (where, part, role, _), table in zip(found, _usable_rows(found, label, stream, notes), strict=True):
        labels = _labels(tables.column_of(table, label, where, "stream.label"), label, where)
        keys = None
        if key is not None:
            column = tables.plain(tables.column_of(table, key, where, "stream.split.column"), key, where)
            keys = tables.present(column, key, where, "The column splits, so every row needs a value: fill it in.")
        inputs = _image(table, stream, where, folder) if stream.image else features_of(table, features, where)
        ids = None if stream.id is None else tables.plain(tables.column_of(table, stream.id, where, "stream.id"), stream.id, where)
        segments.append(Segment(where, part, role, inputs, labels, keys, ids))
        extra = [name for name in table.column_names if name not in used]
        if extra and not stream.image and not stream.features:
            notes.append(f"{where}: columns that the first file lacks are left out: {shortened(extra)}.")
    segments = _with_empty_columns(segments, features)
    source = _of_one_kind(segments, notes)
    _same_types(label, [(segment.where, segment.labels.type) for segment in segments])
    _same_types(key, [(segment.where, segment.key.type) for segment in segments if segment.key is not None])
    return source


def _usable_rows(
    found: Sequence[tuple[str, str, int, pa.Table]], label: str, stream: StreamSpec, notes: list[str]
) -> list[pa.Table]:
    """The tables without rows that have no label yet and, where they are not wanted, without repeated rows."""
    repeated = [None] * len(found) if stream.duplicates == "keep" else tables.repeated([table for *_, table in found])
    usable, lost, unlabelled = [], 0, 0
    for (where, *_, table), again in zip(found, repeated, strict=True):
        column = tables.column_of(table, label, where, "stream.label")
        keep = pc.invert(pc.is_null(column, nan_is_null=True)).to_numpy()
        if again is not None:
            lost += int((again & keep).sum())
            unlabelled += int((~again & ~keep).sum())
            keep &= ~again
        else:
            unlabelled += int((~keep).sum())
        usable.append(table if keep.all() else table.filter(pa.array(keep)))
    if not any(table.num_rows for table in usable):
        raise DataError(f"stream.label: no row of {found[0][0]} has a value in {label}. Rows without a label cannot be learned.")
    if unlabelled:
        notes.append(f"{unlabelled:,} rows have no label ({label}) and are left out until they have one.")
    if lost:
        notes.append(f"{lost:,} rows that repeat an earlier one in every column are left out (stream.duplicates: drop).")
    return usable


def _with_empty_columns(segments: Sequence[Segment], features: Sequence[str]) -> list[Segment]:
    """Segments whose tables have one schema: a column without any value in one file has the type that it has in others."""
    schemas = [(segment.where, segment.inputs.schema) for segment in segments if isinstance(segment.inputs, pa.Table)]
    if not schemas:
        return list(segments)
    fields = []
    for name in features:
        found = [(where, kind) for where, schema in schemas if not kinds.is_null(kind := schema.field(name).type)]
        _same_types(name, found)
        fields.append(pa.field(name, found[0][1] if found else pa.null()))
    return [replace(segment, inputs=segment.inputs.cast(pa.schema(fields))) for segment in segments]  # type: ignore[union-attr]


def _keep_features(stream: StreamSpec, planned: Sequence[str]) -> None:
    """Raise a ConfigError where a run that goes on would lose or gain features; `planned` are its features, if any."""
    lost = [(f"stream.drop: [{name}]", name) for name in stream.drop if name in planned]
    if stream.split.column in planned:
        lost.append((f"stream.split.column={stream.split.column}", str(stream.split.column)))
    if lost:
        raise ConfigError(f"{lost[0][0]}: the column {lost[0][1]} is a feature of this run. Put it back, or start a new run.")
    if planned and stream.features and set(stream.features) != set(planned):
        seen = f"stream.features: {', '.join(stream.features)} are given, and the features of this run are {', '.join(planned)}"
        raise ConfigError(f"{seen}. Put them back, or start a new run.")


def features_of(table: pa.Table, names: Sequence[str], where: str) -> pa.Table:
    """The feature columns as float64, string, timestamp or null, missing values included; every fault of every column at once."""
    columns, findings = {}, []
    for name in names:
        try:
            column = tables.plain(tables.column_of(table, name, where, "stream.features"), name, where)
            if not (kinds.is_string(column.type) or kinds.is_timestamp(column.type) or kinds.is_null(column.type)):
                column = column.cast(pa.float64(), safe=False)
                numbers = column.to_numpy()
                rows = np.flatnonzero(np.abs(numbers) > np.finfo(np.float32).max)  # false for a missing value
                if len(rows):
                    fault = "infinite" if np.isinf(numbers[rows]).any() else TOO_LARGE
                    remedy = f"Leave such fields empty, scale the column or drop it (stream.drop: [{name}])."
                    raise DataError(f"{where}: column {name} has {tables.missing(rows, fault)}. {remedy}")
                if np.isnan(numbers).any():
                    column = pa.chunked_array([pa.array(numbers, from_pandas=True)])  # NaN and null are one thing from here on
            columns[name] = column
        except DataError as error:
            findings += error.findings
    if findings:
        raise DataError(findings)
    return pa.table(columns)


def _image(table: pa.Table, stream: StreamSpec, where: str, folder: Path) -> np.ndarray:
    """The image column as an array [rows, channels, height, width]."""
    name = str(stream.image)
    column = tables.column_of(table, name, where, "stream.image")
    where = f"{where}: column {name}"
    if tables.is_list(column.type):
        return _sized(_array(tables.nested(column, name, where), where)[0], where, stream)
    return images.decoded(column, where, folder, stream.image_size)


def _same_types(name: str | None, found: Sequence[tuple[str, pa.DataType]]) -> None:
    """Raise a DataError where files disagree about a column's type."""
    for where, kind in found[1:]:
        if kind != found[0][1]:
            seen = f"column {name} holds {found[0][1]} in {found[0][0]} and {kind} in {where}"
            raise DataError(f"{seen}. Use one type in all files.")


def _labels(column: pa.ChunkedArray, name: str, where: str) -> pa.ChunkedArray:
    """Labels as bool, int64 or string; none may be missing or infinite."""
    column = tables.plain(column, name, where)
    tables.present(column, name, where, "A label is a text or a whole number: mend them or leave the fields empty.")
    if kinds.is_timestamp(column.type):
        raise DataError(f"{where}: the label column {name} holds dates. Labels are texts or whole numbers.")
    if kinds.is_floating(column.type):
        if not pc.all(pc.equal(column, pc.floor(column))).as_py():
            raise DataError(f"{where}: the label column {name} holds fractions. Labels are classes: texts or whole numbers.")
        try:
            column = column.cast(pa.int64())
        except pa.ArrowInvalid:
            largest = pc.max(pc.abs(column)).as_py()
            seen = f"the label column {name} holds numbers as large as {largest:g}"
            raise DataError(f"{where}: {seen}. Labels are texts, or whole numbers below 2**63.") from None
    return column


# --- arrays -----------------------------------------------------------------------------------------------------------


def _npz(path: str, part: str, stream: StreamSpec) -> list[Segment]:
    """A file of arrays; pickled objects are refused."""
    tables.require_file(path, "stream.npz")
    if not zipfile.is_zipfile(path):
        remedy = "Save x_train, y_train ... with numpy.savez; a table belongs under stream.csv or stream.parquet."
        raise DataError(f"{path}: cannot be read as npz: it is no npz archive of arrays. {remedy}")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: cannot be read as npz: {error}. Plain arrays saved by numpy.savez are expected.") from None
    return _from_arrays(arrays, path, part, stream)


def _factory(stream: StreamSpec, seed: int) -> list[Segment]:
    """A user's function: an iterable of dicts of arrays, each one task."""
    name = str(stream.factory)
    function = load_factory("stream.factory", name)
    with blaming("stream.factory", name):
        given = function()
        given = [given] if (single := isinstance(given, Mapping)) else list(given)
    if single:
        raise DataError(f"stream.factory={name}: gave one dict, and a list of them was expected. Return it in a list: [task].")
    wrong = [type(task).__name__ for task in given if not isinstance(task, Mapping)]
    if wrong or not given:
        seen = f"gave a {wrong[0]}" if wrong else "gave no task"
        raise DataError(f"stream.factory={name}: {seen}. An iterable of dicts with x_train, y_train, x_test, y_test was expected.")
    names = unique([str(task.get("name", f"task-{number}")) for number, task in enumerate(given)])
    segments = []
    for task, part in zip(given, names, strict=True):
        segments += _from_arrays(task, f"stream.factory={name}: task {part}", part, stream, integers_are_tokens=True)
    return segments


def _digits(stream: StreamSpec, seed: int) -> list[Segment]:
    """scikit-learn's handwritten digits, their 17 grey levels spread over 0 to 255."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = np.round(digits.images * 255 / 16).astype(np.uint8)
    return _from_arrays({"x_train": x, "y_train": digits.target}, "digits", "digits", stream)


def _fraud(stream: StreamSpec, frozen: Mapping[str, Any]) -> Source:
    """Simulated card transactions, the same ones in every run; columns that give the label away are never features."""
    label = stream.label or fraud.LABEL
    hidden = [name for name in fraud.NO_FEATURES if name not in (label, stream.split.column, stream.id)]
    stream = stream.model_copy(update={"label": label, "drop": (*stream.drop, *hidden)})
    notes = ["The transactions are simulated (Fraud Detection Handbook); nobody paid them."]
    table = fraud.simulate(**(stream.fraud or FraudSpec()).model_dump())
    return _from_tables(stream, [("fraud", "fraud", TRAIN, table)], Path(), frozen, notes)


def _random(stream: StreamSpec, seed: int) -> list[Segment]:
    """Random rows; the label is the row's number modulo the classes."""
    spec = stream.random or RandomSpec()
    ranks = {"vector": (1,), "tokens": (1,), "image": (2, 3)}[spec.input]
    if len(spec.shape) not in ranks:
        raise ConfigError(f"stream.random.shape={list(spec.shape)}: {spec.input} has {' or '.join(map(str, ranks))} dimensions.")
    segments = []
    for number in range(spec.tasks):
        draw, shape = generator(derive("random", seed, number)), (spec.samples, *spec.shape)
        if spec.input == "vector":
            x = torch.randn(shape, generator=draw)
        else:
            x = torch.randint(256 if spec.input == "image" else VOCABULARY, shape, generator=draw)
        if spec.input == "image":
            x = x.to(torch.uint8)
        arrays = {"x_train": x, "y_train": np.arange(spec.samples) % spec.classes}
        name = f"task-{number}"
        segments += _from_arrays(arrays, f"random {name}", name, stream, integers_are_tokens=True)
    return segments


def _from_arrays(
    arrays: Mapping[str, Any], where: str, part: str, stream: StreamSpec, *, integers_are_tokens: bool = False
) -> list[Segment]:
    """Segments of x_train, y_train and, where they are given, x_val, x_test and group_..."""
    segments = []
    for role, suffix in enumerate(_SUFFIXES):
        names = [f"{prefix}_{suffix}" for prefix in ("x", "y", "group")]
        found = [arrays.get(name) for name in names]
        if role != TRAIN and found[0] is None and found[1] is None:
            continue
        for name, value in zip(names[:2], found, strict=False):
            if value is None:
                expected = "x_train, y_train, x_test, y_test were expected"
                raise DataError(f"{where}: there is no {name}; {expected}, seen: {', '.join(arrays) or 'nothing'}.")
        x, integral = _array(np.asarray(found[0]), f"{where}: {names[0]}")
        if integral and not integers_are_tokens:
            x = x.astype(np.float32)
        labels = _labels(_column(found[1], names[1], where), names[1], where)
        _same_length(x, labels, names[0], names[1], where)
        key = None
        if stream.split.column is not None:
            if stream.split.column != "group":
                raise ConfigError(f"stream.split.column={stream.split.column}: arrays are split by group only ({names[2]}).")
            if found[2] is None:
                raise DataError(f"stream.split.column=group: {where} has no {names[2]}; seen: {', '.join(arrays)}.")
            key = tables.plain(_column(found[2], names[2], where), names[2], where)
            tables.present(key, names[2], where, "Every row needs a group.")
            _same_length(x, key, names[0], names[2], where)
        segments.append(Segment(f"{where}: {names[0]}", part, role, _sized(x, f"{where}: {names[0]}", stream), labels, key))
    return segments


def _array(x: np.ndarray, where: str) -> tuple[np.ndarray, bool]:
    """An array of inputs in one of the dtypes that models take, and whether it is a matrix of whole numbers.

    uint8 is kept, other whole numbers of images become uint8; a matrix of whole numbers becomes int64; all else float32.
    """
    if x.dtype.kind not in "biuf":
        raise DataError(f"{where} holds {x.dtype}. An array of numbers was expected.")
    if x.ndim not in (2, 3, 4) or not x.size:
        raise DataError(
            f"{where} has shape {x.shape}. Rows [rows, features] or images [rows, height, width, channels] were expected."
        )
    if x.ndim == 2:
        if x.dtype == np.uint64 and x.max() >= 2**63:
            raise DataError(f"{where} holds whole numbers up to {x.max()}, and at most 2**63 - 1 is read. Save it as float64.")
        integral = x.dtype.kind in "iu" and x.dtype != np.uint8
        return (x.astype(np.int64), True) if integral else (_finite(x, where), False)
    if x.dtype.kind == "f":
        return images.channels_first(_finite(x, where)), False
    if x.dtype != np.uint8 and (x.min() < 0 or x.max() > 255):
        raise DataError(f"{where} holds whole numbers from {x.min()} to {x.max()}. Images of whole numbers run from 0 to 255.")
    return images.channels_first(x.astype(np.uint8, copy=False)), False


def _finite(x: np.ndarray, where: str) -> np.ndarray:
    rows = np.flatnonzero(~np.isfinite(x).reshape(len(x), -1).all(axis=1))
    if len(rows):
        raise DataError(f"{where} has {tables.missing(rows)}. Fill them or leave the rows out.")
    if len(rows := _too_large(x)):
        raise DataError(f"{where} has {tables.missing(rows, TOO_LARGE)}. Scale the numbers.")
    return x.astype(np.float32, copy=False)


def _too_large(x: np.ndarray) -> np.ndarray:
    """The rows in which a number would become infinite in float32."""
    with np.errstate(over="ignore"):
        return np.flatnonzero(np.isinf(x.astype(np.float32, copy=False)).reshape(len(x), -1).any(axis=1))


def _column(values: Any, name: str, where: str) -> pa.ChunkedArray:
    """One value per row, from an array [rows] or [rows, 1]."""
    array = np.asarray(values)
    array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    try:
        return pa.chunked_array([pa.array(array)])
    except (pa.ArrowException, TypeError, UnicodeError) as error:
        raise DataError(
            f"{where}: {name} of shape {array.shape} and type {array.dtype} is no column of values ({error})."
        ) from None


def _same_length(x: np.ndarray, column: pa.ChunkedArray, x_name: str, name: str, where: str) -> None:
    if len(x) != len(column):
        raise DataError(f"{where}: {x_name} has {len(x):,} rows and {name} has {len(column):,}. They must have as many.")


def _sized(x: np.ndarray, where: str, stream: StreamSpec) -> np.ndarray:
    if stream.image_size is None:
        return x
    if x.ndim != 4:
        raise ConfigError(f"stream.image_size: {where} has rows of shape {x.shape[1:]}, which are no images. Leave the key out.")
    return images.resized(torch.tensor(x), stream.image_size).numpy()


# --- all sources ------------------------------------------------------------------------------------------------------


def _of_one_kind(segments: Sequence[Segment], notes: Sequence[str] = ()) -> Source:
    """The source, if all inputs have one shape and type."""

    def said(inputs: pa.Table | np.ndarray) -> str:
        return "a table" if isinstance(inputs, pa.Table) else f"{inputs.dtype} rows of shape {inputs.shape[1:]}"

    first = segments[0]
    for segment in segments[1:]:
        if said(segment.inputs) != said(first.inputs):
            seen = f"{first.where} has {said(first.inputs)}, {segment.where} has {said(segment.inputs)}"
            remedy = " Set stream.image_size." if getattr(first.inputs, "ndim", 0) == 4 else ""
            raise DataError(f"{seen}. Rows of one shape and type were expected.{remedy}")
    if isinstance(first.inputs, pa.Table):
        return Source(segments, "table", notes)
    kind = "image" if first.inputs.ndim == 4 else "tokens" if first.inputs.dtype == np.int64 else "vector"
    return Source(segments, kind, notes)


def unique(names: Sequence[str]) -> list[str]:
    """The names, with -2, -3 ... after those that came before."""
    found: list[str] = []
    for name in names:
        number, new = 1, name
        while new in found:
            number += 1
            new = f"{name}-{number}"
        found.append(new)
    return found
