"""Hugging Face data sets: from a local folder in one of their formats, or from the hub by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from retain.data.sources import TEST, TRAIN, VALIDATION
from retain.errors import ConfigError, DataError
from retain.spec import StreamSpec

_ROLES = {"train": TRAIN, "validation": VALIDATION, "test": TEST}


def load(stream: StreamSpec) -> tuple[list[tuple[str, str, int, pa.Table]], list[str]]:
    """Read the data set that the configuration names.

    Returns:
        (where, part, role, table) for each split, and notes. A data set of a single split is still to be divided; without a
        test split, the validation split is the test.

    Raises:
        ConfigError: the library is missing, or the hub has no such data set or cannot be reached.
        DataError: the folder does not exist or is no data set.
    """
    name = str(stream.hf)
    splits = _splits(name)
    if len(splits) == 1:
        roles = dict.fromkeys(splits, TRAIN)
    else:
        roles = {split: _ROLES[split] for split in splits if split in _ROLES}
        if TRAIN not in roles.values():
            raise DataError(f"stream.hf: {name} has the splits {', '.join(splits)} and none called train.")
        if "test" not in roles:
            roles = {split: TEST if role == VALIDATION else role for split, role in roles.items()}
    unused = [split for split in splits if split not in roles]
    notes = [f"Splits of {name} that are not used: {', '.join(unused)}."] if unused else []
    part = Path(name).name
    return [(f"{name} ({split})", part, role, _table(splits[split])) for split, role in roles.items()], notes


def _splits(name: str) -> dict[str, Any]:
    """The splits of a data set, by name."""
    try:
        import datasets
    except ImportError:
        raise ConfigError("stream.hf needs the library datasets. Install it: pip install 'retain[hf]'") from None
    folder = Path(name)
    local = folder.is_dir()
    if not local and (folder.is_absolute() or name.startswith(".") or name.count("/") > 1):
        raise DataError(f"stream.hf: {name}: no such folder. Give a data set's folder, or its name on the hub.")
    try:
        if local and any((folder / mark).exists() for mark in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(name)
        else:
            found = datasets.load_dataset(name)
    except Exception as error:  # the library raises its own, huggingface_hub's, pyarrow's and built-in errors
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if local:
            raise DataError(f"stream.hf: {name} cannot be read as a data set ({said}).") from None
        raise ConfigError(
            f"stream.hf: {name} cannot be loaded from the hub ({said}). Without a network, save it once where there is one, "
            "with datasets.load_dataset(NAME).save_to_disk(FOLDER), and set stream.hf: FOLDER."
        ) from None
    return dict(found) if isinstance(found, dict) else {"all": found}


def _table(data: Any) -> pa.Table:
    """A split as one table; numbered classes as their names, a class of -1 as missing."""
    from datasets import ClassLabel

    table = data.with_format("arrow")[:]
    for name, feature in data.features.items():
        if isinstance(feature, ClassLabel):
            names = feature.names
            texts = [None if code is None or code < 0 else names[code] for code in table.column(name).to_pylist()]
            table = table.set_column(table.column_names.index(name), name, pa.array(texts, pa.string()))
    return table
