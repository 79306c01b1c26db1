"""The command as a user meets it: what it prints, where, and how it exits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from retain.cli import app
from retain.training import loop

TABLE = "x,colour,y\n" + "".join(f"{i * 0.1:.1f},{'red' if i % 3 else 'blue'},{'yes' if i % 2 else 'no'}\n" for i in range(40))
TRAIN = {"epochs": 1, "batch_size": 8}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text(TABLE)
    return tmp_path


def write(folder, config, name="retain.yaml"):
    (folder / name).write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    return str(folder / name)


def table(**stream):
    return {"stream": {"csv": "table.csv", "label": "y", "split": {"by": "none"}, **stream}, "training_params": TRAIN}


def retain(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result, *said, code=2):
    """Exit code, every word, one message and no traceback, nothing on standard output."""
    assert result.exit_code == code, result.output
    for word in said:
        assert word in result.stderr, result.stderr
    assert "Traceback" not in result.output and result.stdout == ""
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_training_prints_a_table_and_learns_nothing_twice(here):
    config = write(here, table())
    first = retain("train", config, "--run", "run")
    assert first.exit_code == 0 and "measures of accuracy" in first.stdout and "steps to go" in first.stderr
    second = retain("train", config, "--run", "run")
    assert second.exit_code == 0 and "0 steps to go" in second.stderr and second.stdout == first.stdout


def test_the_default_run_directory_is_named_after_the_file(here):
    assert retain("train", write(here, table(), "march.yaml")).exit_code == 0
    assert (here / "runs/march/summary.json").exists()


def test_json_is_one_object_and_equals_the_file(here):
    result = retain("train", write(here, table()), "--run", "run", "--json")
    assert json.loads(result.stdout) == json.loads((here / "run/summary.json").read_text())


def test_json_of_an_error_has_its_findings(here):
    result = retain("train", write(here, {"training_params": {"batch_size": 0}, "strem": {}}), "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["exit_code"] == 2 and len(error["findings"]) == 2 and error["findings"][0]["code"]


def test_a_dry_run_says_everything_and_writes_nothing(here):
    before = sorted(here.rglob("*"))
    config = write(here, table())
    result = retain("train", config, "--dry-run", "--run", "run")
    assert result.exit_code == 0 and "batch_size: 8" in result.stdout and "to learn" in result.stdout
    found = json.loads(retain("train", config, "--dry-run", "--json", "--run", "run").stdout)
    assert found["steps"] == found["tasks"][0]["steps"] == 4 and found["tasks"][0]["train"] == 32
    assert sorted(set(here.rglob("*")) - {here / "retain.yaml"}) == before
    retain("train", config, "--run", "run")
    assert json.loads(retain("train", config, "--dry-run", "--json", "--run", "run").stdout)["tasks"][0]["state"] == "learned"


def test_rollback_by_name_and_by_number(here):
    config = write(here, {"stream": {"random": {"tasks": 3}}, "training_params": TRAIN})
    retain("train", config, "--run", "run")
    assert "no longer counted" in retain("rollback", "run", "1").stdout
    assert "nothing was changed" in retain("rollback", "run", "1").stdout
    assert json.loads(retain("rollback", "run", "0", "--json").stdout)["dropped"]
    refused(retain("rollback", "run", "7"), "no learned task", code=1)
    refused(retain("rollback", "nowhere", "0"), "no such run", code=1)


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"batch_size": 0}, ["batch_size=0", ">= 1"]),
        ({"regularization": {"replay_ratio": -0.2}}, ["replay_ratio=-0.2", "replayed rows per new row"]),
        ({"optimizer": "AdmW(lr=1e-3)"}, ["did you mean AdamW?"]),
        ({"optimizer": "__import__('os').system('touch pwned')"}, ["plain numbers"]),
        ({"optimizer": "AdamW(lr=open('pwned', 'w'))"}, ["not a plain value"]),
        ({"device": "tpu"}, ["tpu", "cpu"]),
    ],
)
def test_settings_that_cannot_be(here, training, said):
    refused(retain("train", write(here, {"training_params": training}), "--run", "run"), *said)
    assert not (here / "pwned").exists() and not (here / "run").exists()


@pytest.mark.parametrize(
    ("content", "stream", "said"),
    [
        (None, {}, ["table.csv"]),
        ("", {}, ["table.csv", "empty"]),
        ("x,colour,y\n", {}, ["table.csv"]),
        (TABLE, {"label": "why"}, ["why", "y"]),
        (TABLE.replace("yes", "no"), {}, ["no"]),
        (TABLE.replace("0.3,", "inf,"), {}, ["x", "infinite"]),
        (TABLE, {"features": ["colur"]}, ["colur", "colour"]),
        (TABLE, {"split": {"by": "column", "column": "month"}}, ["month"]),
        (TABLE, {"split": {"by": "rotation"}}, ["rotation"]),
    ],
)
def test_data_that_cannot_be_used(here, content, stream, said):
    path = here / "table.csv"
    path.unlink() if content is None else path.write_text(content)
    refused(retain("train", write(here, table(**stream)), "--run", "run"), *said)
    assert not (here / "run").exists()


def test_a_run_of_another_model_or_label_is_refused(here):
    retain("train", write(here, table()), "--run", "run")
    refused(retain("train", write(here, table(label="colour", drop="y")), "--run", "run"), "another run", "label was y, is colour")
    other = {**table(), "model": {"mlp": {"hidden": [4]}}}
    refused(retain("train", write(here, other), "--run", "run"), "another run", "hidden", "--run")


def test_a_stream_that_lost_a_task(here):
    for name in ("a", "b"):
        (here / f"{name}.csv").write_text(TABLE)
    both = table(csv=["a.csv", "b.csv"], split={"by": "file"})
    for keep, run in ((True, "kept"), (False, "lost")):
        both["stream"]["keep_eval"] = keep
        assert retain("train", write(here, both), "--run", run).exit_code == 0
    less = table(csv=["b.csv"], split={"by": "file"})
    result = retain("train", write(here, less), "--run", "kept")
    assert result.exit_code == 0 and "a is no longer in the stream" in result.stderr
    less["stream"]["keep_eval"] = False
    refused(retain("train", write(here, less), "--run", "lost"), "'a'", "keep_eval")


def test_a_read_only_place(here):
    if os.geteuid() == 0:  # root may write anywhere but into the kernel's own file systems
        refused(retain("train", write(here, table()), "--run", "/proc/run"), "cannot be written", "--run", code=1)
        return
    (here / "locked").mkdir(mode=0o500)
    refused(retain("train", write(here, table()), "--run", "locked/run"), "cannot be written", "--run", code=1)


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 600 KiB, where the machine permits one."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_disk_that_is_full_from_the_start(here, small_disk):
    (small_disk / "ballast").write_bytes(b"x" * 590_000)
    result = retain("train", write(here, table()), "--run", small_disk / "run")
    refused(result, code=1)
    assert "free" in result.stderr


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_disk_that_fills_up_while_training(here, small_disk, foreseen, monkeypatch):
    """What was learned before is intact, and the same command goes on once there is room."""
    stream, model = {"random": {"tasks": 8, "shape": [40]}}, {"mlp": {"hidden": [200]}}
    config = write(here, {"stream": stream, "model": model, "training_params": TRAIN})
    with monkeypatch.context() as patched:
        if not foreseen:
            patched.setattr(loop, "check_disk", lambda job, task, path: None)
        stopped = retain("train", config, "--run", small_disk / "run")
    refused(stopped, "bytes are free" if foreseen else "No space left on device", code=1)
    learned = len((small_disk / "run/lineage.jsonl").read_text().splitlines())
    assert 1 <= learned < 8 and not list(small_disk.glob("run/*/.*.tmp"))
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    assert retain("train", config, "--run", small_disk / "run").exit_code == 0
    assert retain("train", config, "--run", here / "undisturbed").exit_code == 0
    last = [Path(run) / "tasks/0007/model.safetensors" for run in (small_disk / "run", here / "undisturbed")]
    assert last[0].read_bytes() == last[1].read_bytes()


def test_a_second_process_on_the_same_run(here):
    from retain.training.lineage import opened

    with opened(here / "run"):
        refused(retain("train", write(here, table()), "--run", "run"), "in use by another process", code=1)


def test_wrong_configurations_are_refused_before_torch_is_loaded(here):
    code = (
        "import sys; from retain.cli import app; app(['train', 'bad.yaml'], standalone_mode=False); print('torch' in sys.modules)"
    )
    write(here, "training_params: {batch_size: 0}", "bad.yaml")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "batch_size=0" in done.stderr and done.stdout.strip() == "False"


def test_a_pipe_gets_plain_lines_and_a_closed_one_is_no_error(here):
    config = write(here, table())
    done = subprocess.run([sys.executable, "-m", "retain", "train", config, "--run", "run"], capture_output=True, text=True)
    assert done.returncode == 0 and "\x1b" not in done.stdout + done.stderr
    command = f"{sys.executable} -m retain train {config} --run run | head -1"
    piped = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert piped.returncode == 0 and "Traceback" not in piped.stderr, piped.stderr


def test_a_pattern_that_matches_a_file_more_brings_a_task_more(here):
    (here / "table.csv").rename(here / "m1.csv")
    config = write(here, {"stream": {"csv": "m*.csv", "label": "y"}, "training_params": TRAIN})
    assert json.loads(retain("train", config, "--run", "run", "--json").stdout)["tasks"] == ["m1"]
    (here / "m2.csv").write_text(TABLE)
    assert json.loads(retain("train", config, "--run", "run", "--json").stdout)["tasks"] == ["m1", "m2"]
