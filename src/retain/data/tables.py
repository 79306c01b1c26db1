"""Tables: files read by pyarrow's own readers, and their columns in a few plain types, checked for missing values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.ipc
import pyarrow.json
import pyarrow.parquet
import pyarrow.types as kinds

from retain.errors import DataError
from retain.spec import suggest

NOT_UTF8 = "Text is read as UTF-8. If the file is in Latin-1, convert it: iconv -f latin1 -t utf-8 OLD.csv > NEW.csv"
"""What to do about other encodings."""


def read_table(form: str, path: str, text: Collection[str] = ()) -> pa.Table:
    """Read one file.

    Args:
        form: ``csv``, ``parquet``, ``jsonl`` or ``arrow``; csv and jsonl may be compressed (.gz).
        path: the file.
        text: columns of a csv file that are text whatever they look like.

    Raises:
        DataError: there is no such file, it cannot be read, or it holds no rows.
    """
    require_file(path, f"stream.{form}")
    try:
        table = _READERS[form](path, text)
    except (pa.ArrowException, OSError, ValueError) as error:
        said = " ".join(str(error).split())
        if said.startswith("Empty"):
            raise DataError(f"{path}: the file is empty. A header (or keys) and rows were expected.") from None
        remedy = " Every row must have as many fields as the header." if "columns, got" in said else ""
        remedy = f" {NOT_UTF8}" if "utf" in said.lower() else remedy
        raise DataError(f"{path}: cannot be read as {form}: {said}.{remedy}") from None
    if not table.num_rows:
        raise DataError(f"{path}: the file has no rows, only columns ({', '.join(table.column_names)}). Leave it out or fill it.")
    return table


def require_file(path: str, key: str) -> None:
    """Raise a DataError unless there is a file at a path that the configuration's key names."""
    if Path(path).is_dir():
        raise DataError(f"{key}: {path} is a folder. List the files in it, one by one.")
    if not Path(path).exists():
        raise DataError(f"{key}: {path}: no such file. Relative paths start at the folder of the YAML file.")


def _csv(path: str, text: Collection[str]) -> pa.Table:
    options = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(text, pa.string()))
    parsing = pyarrow.csv.ParseOptions(newlines_in_values=True)
    table = pyarrow.csv.read_csv(path, convert_options=options, parse_options=parsing)
    for position, name in enumerate(table.column_names):
        column = table.column(position)
        if column.type == pa.string():  # an empty field is missing; a text such as NA may be meant
            table = table.set_column(position, name, pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column))
    return table


def _arrow(path: str, text: Collection[str]) -> pa.Table:
    with pa.memory_map(path) as source:
        try:
            return pyarrow.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:  # the other of the two formats, which Hugging Face's own files are in
            source.seek(0)
            return pyarrow.ipc.open_stream(source).read_all()


_READERS = {
    "csv": _csv,
    "parquet": lambda path, text: pyarrow.parquet.ParquetFile(path).read(),
    "jsonl": lambda path, text: pyarrow.json.read_json(path),
    "arrow": _arrow,
}


def read_tables(form: str, paths: Sequence[str], text: Collection[str] = ()) -> tuple[list[pa.Table], dict[str, str]]:
    """Read files whose columns agree: a csv column that is text in one file is read as text in all.

    Returns:
        The tables; and for each column that is text in some files only, where it is and where it is not, in words.
    """
    tables = [read_table(form, path, text) for path in paths]
    if form != "csv":
        return tables, {}
    found = [{field.name: field.type == pa.string() for field in table.schema} for table in tables]
    # the first file in which a column is text, and the first in which it is not
    texts, others = (
        {name: path for path, names in reversed(list(zip(paths, found, strict=True))) for name in names if names[name] is is_text}
        for is_text in (True, False)
    )
    mixed = sorted(texts.keys() & others.keys())
    again = [any(not is_text for name, is_text in names.items() if name in mixed) for names in found]
    tables = [
        read_table(form, path, {*text, *mixed}) if reread else table
        for path, table, reread in zip(paths, tables, again, strict=True)
    ]
    return tables, {name: f"holds text in {texts[name]} and no text in {others[name]}" for name in mixed}


def table_bytes(table: pa.Table, form: str) -> bytes:
    """A table as the content of a ``csv``, ``parquet``, ``jsonl`` or ``arrow`` file."""
    sink = pa.BufferOutputStream()
    if form == "csv":
        pyarrow.csv.write_csv(table, sink)
    elif form == "parquet":
        pyarrow.parquet.write_table(table, sink)
    elif form == "arrow":
        with pyarrow.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in table.to_pylist()]
        sink.write("".join(lines).encode())
    return sink.getvalue().to_pybytes()


def column_of(table: pa.Table, name: str, where: str, key: str) -> pa.ChunkedArray:
    """The column that a key of the configuration names.

    Raises:
        DataError: the table has no such column, or several.
    """
    positions = table.schema.get_all_field_indices(name)
    if len(positions) == 1:
        return table.column(positions[0])
    if positions:
        raise DataError(f"{where}: {len(positions)} columns are called {name}. Rename them apart.")
    names = table.column_names
    if len(names) == 1 and any(sign in names[0] for sign in ";\t|"):
        raise DataError(f"{where}: the header {names[0]!r} holds no comma. Separate the fields by commas.")
    hint = suggest(name, names)
    raise DataError(f"{key}: {where} has no column {name}{hint}{'' if hint.endswith('?') else '.'}")


def plain(column: pa.ChunkedArray, name: str, where: str) -> pa.ChunkedArray:
    """A column as bool, int64, float64, string or timestamp without a time zone (UTC).

    Raises:
        DataError: it holds something else.
    """
    kind = column.type
    if kinds.is_dictionary(kind):
        return plain(column.cast(kind.value_type), name, where)
    if kinds.is_boolean(kind) or kinds.is_null(kind):
        return column
    if kinds.is_integer(kind):
        large = kind == pa.uint64() and (pc.max(column).as_py() or 0) >= 2**63
        return column.cast(pa.float64() if large else pa.int64(), safe=False)
    if kinds.is_floating(kind) or kinds.is_decimal(kind):
        return column.cast(pa.float64())
    if kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            raise DataError(f"{where}: column {name} holds texts that are not valid Unicode. {NOT_UTF8}") from None
        return column.cast(pa.string())
    if kinds.is_binary(kind):
        raise DataError(f"{where}: column {name} holds bytes that are not UTF-8. {NOT_UTF8} Or drop it: stream.drop: [{name}]")
    if kinds.is_date(kind) or kinds.is_timestamp(kind):
        return column.cast(pa.timestamp("us"), safe=False)
    raise DataError(f"{where}: column {name} holds {kind}, not numbers or text. Drop it: stream.drop: [{name}]")


def present(column: pa.ChunkedArray, name: str, where: str, remedy: str) -> pa.ChunkedArray:
    """The column, if none of its values is missing.

    Raises:
        DataError: values are null, NaN or infinite; says how many, and in which rows.
    """
    bad = pc.is_null(column, nan_is_null=True)
    if kinds.is_floating(column.type):
        bad = pc.or_kleene(bad, pc.is_inf(column))
    rows = np.flatnonzero(bad.to_numpy())
    if len(rows):
        raise DataError(f"{where}: column {name} has {missing(rows)}. {remedy}")
    return column


def missing(rows: np.ndarray, fault: str = "missing or infinite") -> str:
    """How many values are missing (or have another fault) and where, in words; rows count from 1."""
    first = ", ".join(str(row + 1) for row in rows[:5]) + (", …" if len(rows) > 5 else "")
    s = "s" if len(rows) > 1 else ""
    return f"{len(rows):,} {fault} value{s} (row{s} {first})"


def repeated(tables: Sequence[pa.Table]) -> list[np.ndarray]:
    """Which rows repeat an earlier one, of the same or an earlier table, in every column, each bool [rows].

    Rows are compared by a 64-bit hash over the columns that all tables have: among a million different rows two would be taken
    for the same with a chance of 1 in 30 million.
    """
    shared = [name for name in tables[0].column_names if all(len(t.schema.get_all_field_indices(name)) == 1 for t in tables)]
    hashes = np.concatenate([_row_hashes(table, shared) for table in tables])
    again = np.ones(len(hashes), dtype=bool)
    again[np.unique(hashes, return_index=True)[1]] = False
    return np.split(again, np.cumsum([table.num_rows for table in tables])[:-1])


def _row_hashes(table: pa.Table, names: Sequence[str]) -> np.ndarray:
    """One uint64 per row, mixed from the bits of its values (SplitMix64's finaliser, column after column)."""
    mixed = np.zeros(table.num_rows, dtype=np.uint64)
    for name in names:
        mixed = (mixed ^ _bits(table.column(name))) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed


def _bits(column: pa.ChunkedArray) -> np.ndarray:
    """64 bits that tell a column's values apart, uint64 [rows]."""
    kind = column.type
    if kinds.is_floating(kind):
        return (column.cast(pa.float64()).to_numpy() + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    if kinds.is_integer(kind) or kinds.is_boolean(kind) or kinds.is_timestamp(kind):
        return pc.fill_null(column.cast(pa.int64(), safe=False), -(2**63)).to_numpy().view(np.uint64)
    if kinds.is_string(kind) or kinds.is_large_string(kind):
        distinct = pc.unique(column)
        place = pc.index_in(column, value_set=distinct).to_numpy()
        return np.array([_text_bits(value) for value in distinct.to_pylist()], dtype=np.uint64)[place]
    return np.array([_text_bits(value) for value in column.to_pylist()], dtype=np.uint64)


def _text_bits(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")


def nested(column: pa.ChunkedArray, name: str, where: str) -> np.ndarray:
    """A column of equally long (nested) lists of numbers as an array [rows, ...].

    Raises:
        DataError: lengths differ or something is missing.
    """
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    array = array.storage if isinstance(array, pa.ExtensionArray) else array
    shape = [len(array)]
    while is_list(array.type):
        lengths = pc.unique(pc.list_value_length(array)).to_pylist()
        if len(lengths) != 1 or lengths[0] is None:
            raise DataError(f"{where}: column {name} holds lists of different lengths. Lists of one length were expected.")
        shape.append(lengths[0])
        array = pc.list_flatten(array)
    if array.null_count:
        raise DataError(f"{where}: column {name} has {array.null_count:,} missing values. Fill them or leave such rows out.")
    return array.to_numpy(zero_copy_only=False).reshape(shape)


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type holds lists."""
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))
