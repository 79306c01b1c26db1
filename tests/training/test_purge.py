"""A person's rows leave what a run keeps; nothing else changes, and a kill on the way breaks nothing."""

import datetime
import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch
from typer.testing import CliRunner

import retain
from retain.cli import app
from retain.data.encode import id_hashes
from retain.data.task import Rows
from retain.errors import ConfigError, RunError
from retain.spec import RunSpec
from retain.training import loop
from retain.training.lineage import load_checkpoint
from tests.kit import Killed, moments, weights_of


def month(number, rows=40):
    draw = np.random.default_rng(number)
    amount = draw.normal(size=rows)
    return {
        "customer": [f"C{row % 8}" if row < rows - 8 else f"only-{number}" for row in range(rows)],
        "day": [datetime.date(2024, number, 1 + row % 28).isoformat() for row in range(rows)],
        "amount": amount,
        "y": ["yes" if value + draw.normal() > 0 else "no" for value in amount],
    }


def write(path, *months):
    tables = [pa.table(month(number)) for number in months]
    pyarrow.csv.write_csv(pa.concat_tables(tables), path)


def spec(path, **more):
    stream = {"csv": str(path), "label": "y", "split": {"by": "time", "column": "day", "every": "month"}, "id": "customer"}
    training = {"epochs": 1, "device": "cpu", "regularization": {"replay_ratio": 1.0, "replay_capacity": 30}}
    values = {"stream": {**stream, **more}, "model": {"mlp": {"hidden": [8]}}, "training_params": training}
    return RunSpec.parse(values)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of two months, and their file."""
    folder = tmp_path_factory.mktemp("purge")
    write(folder / "data.csv", 1, 2)
    loop.train(spec(folder / "data.csv"), folder / "run")
    return folder


@pytest.fixture
def run(made, tmp_path):
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


def held(run):
    """Hashes of the identifiers that the run keeps, by file and holder."""
    found = {}
    for path in sorted([*run.glob("tasks/*"), *run.glob("partial/*"), *run.glob("rejected/*")]):
        files = load_checkpoint(path, ["methods.safetensors", "state.json"])
        stored = files["methods.safetensors"]["replay/state.buffer.columns.meta.id"]
        found[path.name, "replay"] = stored[: files["state.json"]["methods"]["replay"]["dict"]["buffer"]["dict"]["filled"]]
        if path.parent.name != "partial":
            found[path.name, "evaluation"] = Rows.from_tensors(load_checkpoint(path, ["eval.safetensors"])["eval.safetensors"]).ids
    return found


def of(run, customer):
    seed = load_checkpoint(run / "tasks/0000", ["state.json"])["state.json"]["frozen"]["seed"]
    hashed = int(id_hashes([customer], seed)[0])
    return {key: int((ids == hashed).sum()) for key, ids in held(run).items()}


def test_every_row_of_the_person_goes_and_no_other(run):
    before, others = of(run, "C3"), of(run, "C4")
    assert sum(before.values()) > 6
    removed = retain.purge(run, {"customer": "C3"})
    assert {(place[6:], holder): count for place, rows in removed.items() for holder, count in rows.items()} == {
        key: count for key, count in before.items() if count
    }
    assert not any(of(run, "C3").values()) and of(run, "C4") == others
    assert retain.purge(run, {"customer": ["C3"]}) == {}


def test_what_is_written_does_not_name_the_person(run):
    retain.purge(run, {"customer": "C3"})
    for path in run.rglob("*"):
        if path.is_file():
            assert b"C3" not in path.read_bytes(), path
    event = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    assert event["event"] == "purge" and event["column"] == "customer" and event["rows"]["tasks/0001"]["replay"] > 0
    assert not list(run.glob("*/.*"))


def test_the_run_goes_on_and_learns_the_next_month_only(made, run):
    weights = weights_of(run)
    retain.purge(run, {"customer": ["C3", "C4"]})
    assert all(torch.equal(weights[name], value) for name, value in weights_of(run).items())
    data = run.parent / "data.csv"
    write(data, 1, 2)
    assert len(loop.train(spec(data), run)["tasks"]) == 2  # the file still has the person's rows: nothing is new
    write(data, 1, 2, 3)
    summary = loop.train(spec(data), run)
    assert summary["tasks"] == ["2024-01", "2024-02", "2024-03"] and summary["measures"]["forgetting"] is not None
    counts = of(run, "C3")
    assert counts["0002", "replay"] > 0 == counts["0001", "replay"]  # the new month's rows are stored as they come


def test_an_evaluation_set_without_rows_is_not_measured(tmp_path):
    data, run = tmp_path / "data.csv", tmp_path / "run"
    write(data, 1, 2)
    loop.train(spec(data), run)
    everyone = sorted({*month(1)["customer"]})
    assert retain.purge(run, {"customer": everyone})["tasks/0000"]["evaluation"] == 8
    write(data, 2, 3)  # the first month's file is gone
    summary = loop.train(spec(data), run)
    values = summary["matrices"]["accuracy"]["values"]
    assert values[0][0] is not None and values[2][0] is None and values[2][1] is not None
    assert summary["measures"]["forgetting"] is not None


def test_numbers_match_however_they_are_written(tmp_path):
    data, run = tmp_path / "data.csv", tmp_path / "run"
    pyarrow.csv.write_csv(pa.table({**month(1), "customer": [row % 8 for row in range(40)]}), data)
    loop.train(spec(data), run)
    assert retain.purge(run, {"customer": 3}) and not retain.purge(run, {"customer": "3"})
    assert retain.purge(run, {"customer": 4.0}) and not retain.purge(run, {"customer": [4, "4"]})


def test_what_cannot_be_purged_is_said(run, tmp_path):
    with pytest.raises(RunError, match="finds rows by customer, not by amount"):
        retain.purge(run, {"amount": 3})
    with pytest.raises(ConfigError, match="one column"):
        retain.purge(run, {"customer": 3, "amount": 4})
    with pytest.raises(RunError, match="no such run"):
        retain.purge(tmp_path / "none", {"customer": 3})
    data = tmp_path / "data.csv"
    write(data, 1)
    loop.train(spec(data, id=None, drop=["customer"]), tmp_path / "nameless")
    with pytest.raises(RunError, match=r"keeps no identifiers.*stream.id"):
        retain.purge(tmp_path / "nameless", {"customer": "C3"})


def test_the_command(run):
    said = CliRunner().invoke(app, ["purge", str(run), "--where", "customer=C3", "--where", "customer=C4"])
    assert said.exit_code == 0 and "tasks/0001: " in said.stdout and "not unlearned" in said.stdout
    said = CliRunner().invoke(app, ["purge", str(run), "--where", "customer=C3"])
    assert said.exit_code == 0 and "no row is kept of customer=C3" in said.stdout
    found = CliRunner().invoke(app, ["purge", str(run), "--where", "customer=C5", "--json"])
    assert json.loads(found.stdout)["removed"]["tasks/0000"]["evaluation"] >= 1
    for wrong in ("customer", "=C3"):
        said = CliRunner().invoke(app, ["purge", str(run), "--where", wrong])
        assert said.exit_code == 2 and "COLUMN=VALUE" in said.stderr


def test_killed_at_every_write_the_same_command_finishes(made, tmp_path):
    def purged(path, at, points):
        patches = moments(points, at)
        for patch in patches:
            patch.start()
        try:
            retain.purge(path, {"customer": "C3"})
        finally:
            for patch in patches:
                patch.stop()

    points: list[str] = []
    shutil.copytree(made / "run", tmp_path / "count")
    purged(tmp_path / "count", None, points)
    expected = held(tmp_path / "count")
    for at in range(1, len(points) + 1):
        path = tmp_path / str(at)
        shutil.copytree(made / "run", path)
        with pytest.raises(Killed):
            purged(path, at, [])
        retain.load(path)  # at any moment the model can be read, without the lock
        retain.purge(path, {"customer": "C3"})
        found = held(path)
        assert found.keys() == expected.keys() and all(torch.equal(found[key], ids) for key, ids in expected.items()), points[
            at - 1
        ]
        assert not list(path.glob("*/.*")) and len(list(path.glob("tasks/*"))) == 2
        shutil.rmtree(path)
