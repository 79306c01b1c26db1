"""Killed at any moment, the same command ends with the weights of an undisturbed run, bit by bit."""

import json
import os
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
import yaml

from retain.errors import Stopped
from retain.forgetting import fisher
from retain.spec import RunSpec
from retain.training import loop
from tests.kit import Killed, moments, weights_of

CONFIG = {
    "stream": {"random": {"input": "vector", "shape": [6], "classes": 4, "samples": 40, "tasks": 3}, "split": {"by": "none"}},
    "model": {"mlp": {"hidden": [8], "dropout": 0.2}},
    "training_params": {
        "batch_size": 8,
        "epochs": 1,
        "precision": "amp_fp16",
        "optimizer": "Adam(lr=1e-2)",
        "schedule": "cosine",
        "regularization": {"ewc_lambda": 20.0, "replay_ratio": 0.5, "replay_capacity": 16},
        "eval_batch_size": 9,
    },
    "checkpoint": {"every_steps": 1, "keep": 2},
}


def train(path, config=CONFIG):
    return loop.train(RunSpec.parse(config), path)


def same(run, other):
    first, second = weights_of(run), weights_of(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    train(path)
    return path


def run_with(patches, path):
    for patch in patches:
        patch.start()
    try:
        train(path)
    finally:
        for patch in patches:
            patch.stop()


def test_killed_at_every_write(tmp_path, undisturbed):
    points: list[str] = []
    run_with(moments(points, None), tmp_path / "count")
    assert same(tmp_path / "count", undisturbed) and len(points) > 100
    stride = 1 if os.environ.get("RETAIN_ALL") else 7
    for at in range(1, len(points) + 1, stride):
        path = tmp_path / str(at)
        with pytest.raises(Killed):
            run_with(moments([], at), path)
        train(path)
        assert same(path, undisturbed), (at, points[at - 1])
        assert [json.loads(line)["status"] for line in (path / "lineage.jsonl").read_text().splitlines()] == ["learned"] * 3
        assert not list(path.glob("*/.*")) and not list((path / "partial").glob("*"))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "methods.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
)
def test_a_damaged_checkpoint_within_a_task_gives_way_to_the_one_before(tmp_path, undisturbed, name):
    from tests.kit import killed_after

    path = tmp_path / "run"
    with pytest.raises(Killed), killed_after(steps=3):
        train(path)
    newest, older = sorted((path / "partial").iterdir(), reverse=True)
    os.truncate(newest / name, (newest / name).stat().st_size // 2)
    heard = []
    loop.train(RunSpec.parse(CONFIG), path, listener=lambda kind, values: heard.append((kind, values)))
    notes = [values["text"] for kind, values in heard if kind == "note"]
    assert any(name in text for text in notes)
    assert f"Going on in task task-0 after step {int(older.name[5:])}." in notes
    assert same(path, undisturbed)


def test_sigterm_finishes_the_step_saves_and_exits(tmp_path, undisturbed):
    path, real = tmp_path / "run", loop.train_step
    calls = []

    def step(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **kwargs)

    before = signal.getsignal(signal.SIGTERM)
    with mock.patch.object(loop, "train_step", step), pytest.raises(Stopped, match="after step 3 of 4") as stopped:
        train(path)
    assert stopped.value.exit_code == 143 and len(calls) == 3 and signal.getsignal(signal.SIGTERM) == before
    assert [each.name for each in (path / "partial").iterdir()].count("0000-000000003") == 1
    train(path)
    assert same(path, undisturbed)


@pytest.mark.parametrize("end", ["killed", "SIGTERM"])
def test_a_look_back_at_a_task_is_interrupted_and_goes_on(tmp_path, undisturbed, end):
    """The Fisher information of the rows seen so far is in the checkpoint; no row counts twice."""
    path, real, looked = tmp_path / "run", fisher.add_, []

    def add_(state, model, params, batch, *args, **kwargs):
        looked.append(len(batch))
        if len(looked) == 3:
            if end == "killed":
                raise Killed
            os.kill(os.getpid(), signal.SIGTERM)
        real(state, model, params, batch, *args, **kwargs)

    stopped = pytest.raises(Killed) if end == "killed" else pytest.raises(Stopped, match="looking back on task task-0")
    with mock.patch.object(fisher, "add_", add_), stopped:
        train(path)
    done = 2 if end == "killed" else 3
    assert max(each.name for each in (path / "partial").iterdir()) == f"0000-000000004-{9 * done:09d}"
    looked.clear()
    with mock.patch.object(fisher, "add_", lambda *args, **kwargs: looked.append(len(args[3])) or real(*args, **kwargs)):
        train(path)
    assert looked == [9, 9, 9, 5][done:] + [9, 9, 9, 5] * 2
    assert same(path, undisturbed)


def test_a_look_back_goes_on_in_batches_of_another_size(tmp_path):
    """Every row is looked at once."""
    path, real, looked = tmp_path / "run", fisher.add_, []

    def add_(state, model, params, batch, *args, **kwargs):
        if len(looked) == 2:
            raise Killed
        looked.append(len(batch))
        real(state, model, params, batch, *args, **kwargs)

    with mock.patch.object(fisher, "add_", add_), pytest.raises(Killed):
        train(path)
    other = {**CONFIG, "training_params": {**CONFIG["training_params"], "eval_batch_size": 5}}
    counted = []
    with mock.patch.object(fisher, "add_", lambda *args, **kwargs: counted.append(len(args[3])) or real(*args, **kwargs)):
        train(path, other)
    assert looked == [9, 9]
    assert counted[:3] == [5, 5, 4]


@pytest.mark.timeout(240)
def test_kill_9_of_the_command(tmp_path, undisturbed):
    """Real processes; `benchmarks/kill.py` does this twenty times."""
    config = tmp_path / "retain.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    path = tmp_path / "run"
    command = [sys.executable, "-m", "retain", "train", str(config), "--run", str(path)]
    for files in (1, 3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while len(list(path.glob("*/*/manifest.json"))) < files and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        process.kill()
        process.wait()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert same(path, undisturbed)
