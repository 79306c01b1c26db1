"""The run directory: whole or not there, never read when damaged, one process at a time."""

import json
import os
import subprocess
import sys

import pytest
import torch

from retain.errors import RunError
from retain.training import lineage
from retain.training.lineage import Damaged, load_checkpoint, opened, save_checkpoint

FILES = {
    "model.safetensors": {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(3)},
    "methods.safetensors": {},
    "optimizer.safetensors": {"w/step": torch.tensor(1.0)},
    "state.json": {"sizes": [2]},
    "record.json": {"number": 0, "status": "learned"},
    "spec.yaml": "a: 1\n",
}


def files(number):
    return {**FILES, "record.json": record(number)}


def record(number):
    return {"number": number, "task": f"t{number}", "status": "learned", "classes": []}


def learned(path, tasks=3):
    with opened(path) as run:
        for number in range(tasks):
            run.add_task(record(number), files(number))
    return path


def test_a_checkpoint_comes_back_bit_identical(tmp_path):
    tied = torch.randn(4, 4)
    tensors = {
        "a": tied,
        "b": tied,
        "view": tied.T,
        "ids": torch.arange(5),
        "half": torch.randn(3).bfloat16(),
        "none": torch.empty(0, 3),
    }
    save_checkpoint(tmp_path / "c", {"model.safetensors": tensors, "state.json": {"x": [1, None, "ü"]}, "spec.yaml": "a: 1\n"})
    found = load_checkpoint(tmp_path / "c", ["model.safetensors", "state.json", "spec.yaml"])
    for name, tensor in tensors.items():
        assert torch.equal(found["model.safetensors"][name], tensor) and found["model.safetensors"][name].dtype == tensor.dtype
    assert found["state.json"] == {"x": [1, None, "ü"]} and found["spec.yaml"] == "a: 1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("name", [*FILES, lineage.MANIFEST])
@pytest.mark.parametrize("damage", ["truncated", "changed", "gone", "empty"])
def test_a_damaged_file_is_never_read_as_good(tmp_path, name, damage):
    save_checkpoint(tmp_path / "c", FILES)
    path = tmp_path / "c" / name
    data = path.read_bytes()
    match damage:
        case "truncated":
            path.write_bytes(data[: len(data) // 2])
        case "changed":
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        case "gone":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
    with pytest.raises(Damaged, match=name):
        load_checkpoint(tmp_path / "c", list(FILES))


def test_tasks_are_counted_and_the_last_one_is_promoted(tmp_path):
    learned(tmp_path / "run")
    with opened(tmp_path / "run") as run:
        assert [each["task"] for each in run.learned] == ["t0", "t1", "t2"] and run.latest() == 2 and not run.notes


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        '{"number": 0, "sta',
        "[1]\n",
        "\x00\x00\n",
        '{"number": 1, "task": "other", "status": "learned"}\n',
        '{"number": 0, "status": "learned"}\n{"num',
    ],
)
def test_a_damaged_lineage_is_rebuilt_from_the_tasks(tmp_path, content):
    path = learned(tmp_path / "run") / "lineage.jsonl"
    path.unlink() if content is None else path.write_text(content)
    (path.parent / "latest").write_text("garbage")
    for _ in range(2):
        with opened(path.parent) as run:
            assert [each["task"] for each in run.learned] == ["t0", "t1", "t2"] and run.latest() == 2
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_a_task_that_is_gone_from_the_middle_is_refused(tmp_path):
    path = learned(tmp_path / "run")
    (path / "tasks" / "0001").rename(tmp_path / "elsewhere")
    with pytest.raises(Damaged, match="0001 is missing"), opened(path):
        pass


def test_rolling_back_counts_later_tasks_as_not_learned(tmp_path):
    path = learned(tmp_path / "run")
    with opened(path) as run:
        assert [each["task"] for each in run.roll_back(0)] == ["t1", "t2"]
        with pytest.raises(RunError, match="not learned"):
            run.roll_back(2)
    with opened(path) as run:
        assert [each["status"] for each in run.records] == ["learned", "rolled back", "rolled back"] and run.latest() == 0
        run.add_task(record(1), files(1))
    with opened(path) as run:
        assert [each["task"] for each in run.learned] == ["t0", "t1"] and run.latest() == 1


def test_old_tasks_lose_their_weights_and_keep_their_record(tmp_path):
    path = learned(tmp_path / "run", 4)
    with opened(path) as run:
        run.prune_tasks(2)
        assert not (path / "tasks/0001/model.safetensors").exists()
        load_checkpoint(path / "tasks/0001", ["state.json", "record.json", "spec.yaml"])
        load_checkpoint(path / "tasks/0002", list(FILES))
        with pytest.raises(Damaged, match="keep_tasks"):
            load_checkpoint(path / "tasks/0001", ["model.safetensors"])
        with pytest.raises(RunError, match="no longer kept"):
            run.roll_back(1)
        assert run.latest() == 3


def test_events_after_a_checkpoint_are_forgotten_and_cut_lines_too(tmp_path):
    with opened(tmp_path / "run") as run:
        run.log("one")
        size = run.events_size()
        run.log("two")
        run.cut_events(size)
        with (run.path / "events.jsonl").open("a") as file:
            file.write('{"event": "thr')
    with opened(tmp_path / "run") as run:
        run.log("four")
        lines = (run.path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["one", "four"]


def test_a_second_process_is_kept_out(tmp_path):
    code = "import sys; from pathlib import Path; from retain.training.lineage import opened\nwith opened(Path(sys.argv[1])): pass"
    with opened(tmp_path / "run"):
        second = subprocess.run([sys.executable, "-c", code, tmp_path / "run"], capture_output=True, text=True)
    assert second.returncode == 1 and "in use by another process" in second.stderr
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "run"]).returncode == 0


def test_what_a_killed_process_left_half_written_is_removed(tmp_path):
    path = learned(tmp_path / "run")
    (path / "tasks" / ".0003.tmp").mkdir()
    (path / "tasks" / ".0003.tmp" / "model.safetensors").write_bytes(b"half")
    (path / ".latest.tmp").write_text("tasks/")
    with opened(path) as run:
        assert len(run.learned) == 3
    assert not (path / "tasks" / ".0003.tmp").exists() and not (path / ".latest.tmp").exists()


def test_a_failed_write_leaves_nothing_and_says_so(tmp_path, monkeypatch):
    path = learned(tmp_path / "run")

    def full(*args):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(lineage, "_write_synced", full)
    with pytest.raises(RunError, match=r"No space left on device.*free space"), opened(path) as run, lineage.disk_errors(path):
        run.add_task(record(3), files(3))
    monkeypatch.undo()
    with opened(path) as run:
        assert len(run.learned) == 3 and not list(path.glob("tasks/.*"))


def test_a_path_that_cannot_be_a_run(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="Give --run another"), opened(tmp_path / "file"):
        pass
    with pytest.raises(RunError, match="Give --run another"), opened(tmp_path / "file" / "run"):
        pass


def test_only_what_a_run_writes_is_ever_removed(tmp_path):
    """A user's hidden files beside, and under, a run stay where they are."""
    path = learned(tmp_path / "run")
    mine = [path / "project" / ".git", path / ".ssh", path / "tasks" / ".git"]
    for folder in mine:
        folder.mkdir(parents=True)
    (path / "project" / ".env").write_text("secret")
    (path / ".env.tmp").write_text("secret")
    with opened(path) as run:
        run.roll_back(0)
    assert all(folder.is_dir() for folder in mine) and (path / "project" / ".env").exists() and (path / ".env.tmp").exists()


def test_a_directory_of_other_things_is_no_run(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"no run directory: it holds notes\.txt"), opened(tmp_path):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_a_pointer_left_behind_by_a_kill_is_not_believed(tmp_path):
    """Killed between the task's rename and the pointer's: the next task goes on from the newest one."""
    path = learned(tmp_path / "run")
    (path / "latest").write_text("tasks/0001\n")
    with opened(path) as run:
        assert run.latest() == 2
    assert (path / "latest").read_text() == "tasks/0002\n"
