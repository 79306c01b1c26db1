"""The run directory: what was learned, kept so that a kill at any moment loses nothing that was finished.

A checkpoint is a directory that is written under a temporary name, synced and renamed; `manifest.json` in it holds the size and
hash of every file (and its name, where that is another), so that a damaged file is never read as good. `tasks/NNNN` is the
truth about a task; `lineage.jsonl` and `latest` can be rebuilt from it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from retain.errors import RunError

SCHEMA = 1
MANIFEST = "manifest.json"
HEAVY = ("model.safetensors", "methods.safetensors", "optimizer.safetensors")
"""Files of a finished task that `checkpoint.keep_tasks` may remove."""


STALE = (
    *(f".{name}.tmp" for name in ("lineage.jsonl", "latest", "summary.json")),
    *(f"{place}.{end}" for place in ("tasks/.[0-9]*", "partial/.[0-9]*", "rejected/.[0-9]*") for end in ("tmp", "removed")),
    f"tasks/[0-9]*/.{MANIFEST}.tmp",
)
"""What a killed process may have left half written; nothing else in the directory is ever removed."""


class Damaged(RunError):
    """A file of the run directory is missing, truncated or changed."""


class RunDirectory:
    """One run on disk. Open it with `opened`, which takes the lock.

    Attributes:
        path: the directory.
        records: one per task in order of learning, as in `lineage.jsonl`; also rejected and rolled-back ones.
        notes: what was found damaged and recovered when the run was opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self.records: list[dict[str, Any]] = []

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def learned(self) -> list[dict[str, Any]]:
        """Records of the tasks that count as learned, by number."""
        return sorted((record for record in self.records if record["status"] == "learned"), key=lambda record: record["number"])

    def task_path(self, number: int) -> Path:
        """Where a task's checkpoint lies."""
        return self.path / "tasks" / f"{number:04d}"

    def partials(self) -> list[Path]:
        """Checkpoints within a task, the newest first."""
        found = [path for path in self.path.glob("partial/*-*") if not path.name.startswith(".")]
        return sorted(found, key=lambda path: path.name, reverse=True)

    def read_records(self, *, repair: bool = True) -> None:
        """Read the lineage. What it says of learned tasks comes from their directories; its own lines add the others.

        Args:
            repair: write the lineage anew where it says something else.

        Raises:
            Damaged: a task's record is damaged, or a task in the middle of the lineage is gone.
        """
        lines = []
        for text in _lines(self.path / "lineage.jsonl"):
            try:
                record = json.loads(text)
                lines.append(record if isinstance(record["number"], int) and isinstance(record["status"], str) else None)
            except (ValueError, TypeError, KeyError):
                lines.append(None)
        names = [path.name for path in self.path.glob("tasks/[0-9]*") if path.name.isdigit()]
        on_disk = {
            int(name): load_checkpoint(self.path / "tasks" / name, ("record.json",))["record.json"] for name in sorted(names)
        }
        gone = [line["number"] for line in lines if line and line["status"] == "learned" and line["number"] not in on_disk]
        if missing := [number for number in range(max(on_disk, default=-1)) if number not in on_disk]:
            raise Damaged(f"{self.task_path(missing[0])} is missing, but later tasks are there. Put it back from a copy.")
        self.records = []
        for line in lines:
            if line and line["status"] == "learned":
                line = on_disk.pop(line["number"], None) or {**line, "status": "rolled back"}
            if line:
                self.records.append(line)
        self.records += on_disk.values()
        if self.records == lines:
            return
        self.records.sort(key=lambda record: record["number"])
        if gone or None in lines[:-1]:
            self.notes.append("lineage.jsonl did not agree with the task directories; they were followed.")
        if repair:
            self.write_records()

    def latest(self) -> int | None:
        """The number of the promoted task, the last learned one, or None before the first.

        The file `latest` tells other programs; a process killed before it was written leaves an old one, so it is not asked here.
        """
        return self.learned[-1]["number"] if self.learned else None

    # --- writing ------------------------------------------------------------------------------------------------------

    def write_records(self) -> None:
        """Replace `lineage.jsonl`."""
        write_file(self.path / "lineage.jsonl", b"".join(map(_line, self.records)))

    def point_latest(self, number: int) -> None:
        """Promote a task: `latest` names it from now on."""
        write_file(self.path / "latest", f"tasks/{number:04d}\n".encode())

    def add_task(self, record: dict[str, Any], files: Mapping[str, Any]) -> None:
        """Keep a finished task: its checkpoint, then its line in the lineage, then the pointer."""
        save_checkpoint(self.task_path(record["number"]), files)
        self.records.append(record)
        with self.path.joinpath("lineage.jsonl").open("ab") as file:
            file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())
        self.point_latest(record["number"])

    def add_rejected(self, record: dict[str, Any], files: Mapping[str, Any]) -> None:
        """Keep a task that the gate refused: its checkpoint, as it would count if it were promoted, and a line in the lineage."""
        save_checkpoint(self.rejected_path(record["number"]), files)
        self.records.append({**record, "status": "rejected"})
        self.write_records()

    def promote(self, record: dict[str, Any]) -> None:
        """Count a rejected task as learned.

        Raises:
            RunError: other tasks were learned since, or its checkpoint is gone.
        """
        number, path = record["number"], self.rejected_path(record["number"])
        if number != len(self.learned):
            since = ", ".join(each["task"] for each in self.learned[number:])
            raise RunError(f"{record['task']} was refused before {since} was learned. Roll back to the task before first.")
        if not path.exists() or load_checkpoint(path, ["record.json"])["record.json"]["task"] != record["task"]:
            raise RunError(f"the model of {record['task']} is no longer kept: a later task was refused in its place.")
        load_checkpoint(path, HEAVY)
        self.drop_partials()
        self.task_path(number).parent.mkdir(exist_ok=True)
        path.rename(self.task_path(number))
        record["status"] = "promoted"
        self.records.append(load_checkpoint(self.task_path(number), ["record.json"])["record.json"])
        self.write_records()
        self.point_latest(number)

    def rejected_path(self, number: int) -> Path:
        """Where the checkpoint of a rejected task lies."""
        return self.path / "rejected" / f"{number:04d}"

    def checkpoints(self) -> list[Path]:
        """Every checkpoint that is kept: of learned and of refused tasks, and within a task."""
        return sorted(path for place in ("tasks", "rejected", "partial") for path in self.path.glob(f"{place}/[0-9]*"))

    def drop_partials(self, keep: int = 0) -> None:
        """Remove checkpoints within a task, all but the newest `keep`."""
        for path in self.partials()[keep:]:
            remove_directory(path)

    def prune_tasks(self, keep: int) -> None:
        """Remove model, methods' state and optimizer of all but the last `keep` finished tasks; the promoted one stays."""
        promoted = self.latest()
        for record in self.learned[:-keep]:
            path = self.task_path(record["number"])
            manifest = _manifest(path)
            heavy = [name for name in HEAVY if name in manifest]
            if record["number"] == promoted or not heavy:
                continue
            write_file(path / MANIFEST, _json({name: entry for name, entry in manifest.items() if name not in heavy}))
            for name in heavy:
                (path / manifest[name].get("file", name)).unlink(missing_ok=True)

    def roll_back(self, number: int) -> list[dict[str, Any]]:
        """Count every task after `number` as not learned; returns their records.

        Raises:
            RunError: the task is not learned, or its model is no longer kept.
        """
        later = [record for record in self.learned if record["number"] > number]
        if not any(record["number"] == number for record in self.learned):
            raise RunError(f"task {number} is not learned in {self.path}.")
        if HEAVY[0] not in _manifest(self.task_path(number)):
            raise RunError(f"the model of task {number} is no longer kept (checkpoint.keep_tasks); nothing was changed.")
        load_checkpoint(self.task_path(number), HEAVY)
        self.drop_partials()
        for record in reversed(later):
            remove_directory(self.task_path(record["number"]))
            record["status"] = "rolled back"
        self.write_records()
        self.point_latest(number)
        return later

    def log(self, kind: str, **values: Any) -> None:
        """Append one line to `events.jsonl`."""
        with self.path.joinpath("events.jsonl").open("ab") as file:
            file.write(_line({"event": kind, **values}))

    def events_size(self) -> int:
        """Bytes of `events.jsonl`."""
        path = self.path / "events.jsonl"
        return path.stat().st_size if path.exists() else 0

    def cut_events(self, size: int) -> None:
        """Forget events after a checkpoint from which training goes on, and a last line that was cut off."""
        path = self.path / "events.jsonl"
        if path.exists():
            kept = path.read_bytes()[:size]
            os.truncate(path, kept.rfind(b"\n") + 1)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[RunDirectory]:
    """Open or create a run directory, with the lock that keeps other processes out.

    Raises:
        RunError: another process has it, it cannot be written, or it is of a newer release.
    """
    run = RunDirectory(path)
    _check_is_run(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path / ".lock", timeout=0)
        lock.acquire()
    except filelock.Timeout:
        raise RunError(f"{path} is in use by another process. Wait for it, or give --run another directory.") from None
    except NotADirectoryError:
        raise RunError(f"{path} is not a directory. Give --run another path.") from None
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}. Give --run another directory.") from None
    try:
        with disk_errors(path):
            for pattern in STALE:
                for stale in path.glob(pattern):
                    shutil.rmtree(stale) if stale.is_dir() and not stale.is_symlink() else stale.unlink()
            run.read_records()
            run.cut_events(run.events_size())
            if (latest := run.latest()) is not None:
                run.point_latest(latest)
        yield run
    finally:
        lock.release()
        with contextlib.suppress(OSError):
            if [entry.name for entry in path.iterdir()] == [".lock"]:  # nothing came of it
                (path / ".lock").unlink()
                path.rmdir()


def _check_is_run(path: Path) -> None:
    """Refuse a directory that holds other things: a run's files would be mixed with them.

    Raises:
        RunError: it is not empty, and nothing in it is of a run.
    """
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError:
        return  # not there yet, or not a directory: said when it is made
    if names and not names & {"lineage.jsonl", "tasks", "partial", "events.jsonl", ".lock"}:
        listed = ", ".join(sorted(names)[:3])
        raise RunError(f"{path} is no run directory: it holds {listed}. Give --run a new or empty directory.")


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or read-only disk into an error that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EROFS,
            errno.EACCES,
            errno.EPERM,
            errno.EIO,
            errno.EISDIR,
            errno.ENOTDIR,
        ):
            raise
        raise RunError(
            f"{path}: writing failed ({error.strerror}). What was saved before is intact: "
            "free space or permit writing there, and give the same command again."
        ) from error


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save_checkpoint(path: Path, files: Mapping[str, Any]) -> None:
    """Write a directory of files all or nothing.

    Args:
        path: the directory; it takes the place of one of that name.
        files: tensors by name for ``*.safetensors``, text for ``*.yaml``, plain data for ``*.json``.
    """
    part = path.parent / f".{path.name}.tmp"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        manifest = {}
        for name, content in files.items():
            _write(part / name, content)
            manifest[name] = _seal(part / name)
        _write_synced(part / MANIFEST, _json(manifest))
        _sync_directory(part)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if path.exists():
        remove_directory(path)
    part.rename(path)
    _sync_directory(path.parent)


def update_checkpoint(path: Path, files: Mapping[str, Any]) -> None:
    """Give files of a checkpoint another content, all at once, and remove what they held.

    The new ones have names of their own, which the manifest tells; replacing the manifest is what counts.

    Args:
        path: the directory.
        files: as in `save_checkpoint`; other files stay.
    """
    sweep(path)
    manifest = _manifest(path)
    for name, content in files.items():
        own = Path(name)
        numbered = (path / f"{own.stem}.{number}{own.suffix}" for number in itertools.count(1))
        new = next(each for each in numbered if not each.exists())
        _write(new, content)
        manifest[name] = {**_seal(new), "file": new.name}
    write_file(path / MANIFEST, _json(manifest))
    sweep(path)


def sweep(path: Path) -> None:
    """Remove files of a checkpoint that its manifest does not name: a killed process may have left them."""
    named = {MANIFEST, *(entry.get("file", name) for name, entry in _manifest(path).items())}
    for file in path.iterdir():
        if file.name not in named:
            file.unlink()
    _sync_directory(path)


def file_names(path: Path) -> list[str]:
    """The files that a checkpoint keeps, by the names that `load_checkpoint` takes."""
    return list(_manifest(path))


def load_checkpoint(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Read files of a checkpoint after checking their size and hash.

    Raises:
        Damaged: a file is missing, truncated or changed; the message names it and what to do.
    """
    manifest = _manifest(path)
    found: dict[str, Any] = {}
    for name in names:
        if name not in manifest:
            raise Damaged(f"{path / name} is not kept (checkpoint.keep_tasks, stream.keep_eval).")
        wanted = manifest[name]
        file = path / wanted.pop("file", name)
        seal: dict[str, Any]
        try:
            seal = _seal(file)
        except OSError as error:
            seal = {"bytes": 0, "error": error.strerror}
        if seal != wanted:
            raise Damaged(
                f"{file} is damaged: {seal['bytes']} bytes seen, {wanted['bytes']} written, and the hash differs. "
                "Put it back from a copy, or go back to an earlier task with `retain rollback`."
            )
        if name.endswith(".safetensors"):
            found[name] = load_file(file)
        else:
            text = file.read_text(encoding="utf-8")
            found[name] = json.loads(text) if name.endswith(".json") else text
    return found


def has_file(path: Path, name: str) -> bool:
    """Whether a checkpoint keeps a file."""
    return name in _manifest(path)


def remove_directory(path: Path) -> None:
    """Remove a checkpoint at once (by renaming it), then its files."""
    part = path.parent / f".{path.name}.removed"
    shutil.rmtree(part, ignore_errors=True)
    path.rename(part)
    _sync_directory(path.parent)
    shutil.rmtree(part, ignore_errors=True)


def write_file(path: Path, data: bytes) -> None:
    """Replace a file all or nothing."""
    part = path.parent / f".{path.name}.tmp"
    try:
        _write_synced(part, data)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        return {str(name): dict(entry) for name, entry in manifest.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        raise Damaged(f"{path / MANIFEST} is missing or damaged. Put it back from a copy.") from None


def _write(path: Path, content: Any) -> None:
    """A file of a checkpoint, synced."""
    if path.suffix == ".safetensors":
        _write_tensors(path, content)
    else:
        _write_synced(path, content.encode() if isinstance(content, str) else _json(content))


def _seal(path: Path) -> dict[str, Any]:
    """Size and hash of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    try:
        save_file(_savable(tensors), path)
    except SafetensorError as error:  # it hides the operating system's error in its text
        code = re.search(r"(?:os error|code:) (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _savable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors of which no two share memory, as safetensors needs them."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        pointer = tensor.untyped_storage().data_ptr()
        found[name] = (
            tensor.clone(memory_format=torch.contiguous_format) if pointer in seen or not tensor.is_contiguous() else tensor
        )
        seen.add(pointer)
    return found


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _line(value: Any) -> bytes:
    return (json.dumps(value, ensure_ascii=False) + "\n").encode()


def _lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some file systems cannot sync a directory; the rename is still atomic there
        pass
    finally:
        os.close(handle)
