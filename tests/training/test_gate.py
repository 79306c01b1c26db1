"""The gate: a task that breaks a budget is not learned, and what was learned before stays."""

import json
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from retain import api
from retain.cli import app
from retain.data.task import Rows, Stream, Task
from retain.errors import RunError
from retain.spec import RunSpec
from retain.training import lineage, loop
from retain.training.checks import config_of
from tests.kit import Killed, weights_of

SPEC = {
    "model": {"mlp": {"hidden": [8]}},
    "training_params": {"batch_size": 8, "epochs": 10, "optimizer": "SGD(lr=0.1)"},
    "budget": {"forgetting": 0.1},
}


def month(number, sabotaged=False):
    """Two classes at the same places every month; sabotaged, with their labels exchanged."""
    parts = []
    for count, salt in ((40, 0), (0, 0), (20, 1)):
        made = torch.Generator().manual_seed(10 * number + salt)
        labels = torch.arange(count) % 2
        x = torch.randn(count, 4, generator=made) + 4 * labels[:, None] - 2
        parts.append(Rows({"x": x}, 1 - labels if sabotaged else labels))
    return Task(f"m{number}", *parts, classes=[0, 1])


def train(path, *months, gate=True, **settings):
    stream = Stream(months, ["no", "yes"], "vector", (4,), "domain-incremental")
    heard = []
    spec = RunSpec.parse(SPEC).with_values(settings)
    summary = loop.train(spec, path, stream=stream, gate=gate, listener=lambda kind, values: heard.append((kind, values)))
    return summary, [values["text"] for kind, values in heard if kind == "note"]


def statuses(path):
    return [(record["task"], record["status"]) for record in map(json.loads, (path / "lineage.jsonl").read_text().splitlines())]


def test_a_sabotaged_month_is_refused_and_the_next_good_one_is_learned(tmp_path):
    good, bad, next_one = month(0), month(1, sabotaged=True), month(2)
    summary, _ = train(tmp_path / "run", good)
    assert summary["rejected"] is None
    before = weights_of(tmp_path / "run")
    summary, notes = train(tmp_path / "run", good, bad)
    assert summary["rejected"] == "m1"
    assert summary["tasks"] == ["m0"]
    assert any("m1 is refused by the gate: forgetting" in text for text in notes)
    assert statuses(tmp_path / "run") == [("m0", "learned"), ("m1", "rejected")]
    assert (tmp_path / "run" / "latest").read_text() == "tasks/0000\n"
    assert not list((tmp_path / "run" / "partial").glob("*"))
    now = weights_of(tmp_path / "run")
    assert all(torch.equal(before[name], now[name]) for name in before)

    summary, notes = train(tmp_path / "run", good, bad)
    assert summary["rejected"] is None
    assert any("m1 was refused by the gate, and neither its rows" in text for text in notes)

    summary, _ = train(tmp_path / "run", good, bad, next_one)
    assert summary["tasks"] == ["m0", "m2"]
    assert summary["budgets"]["forgetting"]["status"] == "kept"
    assert [len(row) for row in summary["matrices"]["accuracy"]["values"]] == [2, 2]
    assert [name for name, _ in statuses(tmp_path / "run")] == ["m0", "m1", "m2"]
    train(tmp_path / "alone", good, next_one)
    assert all(torch.equal(value, weights_of(tmp_path / "alone")[name]) for name, value in weights_of(tmp_path / "run").items())


def test_a_task_that_teaches_nothing_is_refused_by_its_own_score(tmp_path):
    """Labels without a pattern harm nothing that stored rows protect; the new task's own score gives them away."""
    noise = month(1)
    for rows in (noise.train, noise.test):
        rows.targets[:] = rows.targets[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    settings = {"budget": {"score": 0.8}}
    train(tmp_path / "run", month(0), **settings)
    summary, notes = train(tmp_path / "run", month(0), noise, **settings)
    assert summary["rejected"] == "m1" and summary["budgets"]["score"]["status"] == "kept"  # of what stays learned
    assert any("m1 is refused by the gate: score 0." in text and "breaks the budget of 0.8" in text for text in notes)
    summary, _ = train(tmp_path / "run", month(0), month(2), **settings)
    assert summary["tasks"] == ["m0", "m2"] and summary["budgets"]["score"]["limit"] == 0.8


def test_a_score_of_loss_is_at_most_the_budget(tmp_path):
    for limit, rejected in ((10.0, None), (0.0001, "m0")):
        summary, _ = train(tmp_path / str(limit), month(0), **{"budget.score": limit, "stream.metric": "loss"})
        assert summary["rejected"] == rejected


def test_new_files_do_not_bring_a_refused_task_back():
    """What a refusal holds for is how a task is learned and judged, not where rows come from."""

    def config(**changes):
        return config_of(RunSpec.parse({"stream": {"csv": ["a.csv"], "label": "y"}}).with_values(changes))

    assert config() == config(**{"stream.csv": ["a.csv", "b.csv"]}) == config(**{"training_params.device": "cpu"})
    assert config() != config(**{"budget.score": 0.5}) and config() != config(**{"training_params.epochs": 4})


def test_without_the_gate_it_is_learned_and_the_budget_is_broken(tmp_path):
    summary, _ = train(tmp_path / "run", month(0), month(1, sabotaged=True), gate=False)
    assert summary["tasks"] == ["m0", "m1"]
    assert summary["budgets"]["forgetting"]["status"] == "broken"


@pytest.mark.parametrize("change", ["rows", "configuration"])
def test_it_is_tried_again_when_something_has_changed(tmp_path, change):
    train(tmp_path / "run", month(0), month(1, sabotaged=True))
    mended = month(1, sabotaged=change == "configuration")
    settings = {"budget.forgetting": 1.0} if change == "configuration" else {}
    summary, _ = train(tmp_path / "run", month(0), mended, **settings)
    assert summary["tasks"] == ["m0", "m1"]
    assert statuses(tmp_path / "run") == [("m0", "learned"), ("m1", "rejected"), ("m1", "learned")]


def test_promoted_it_counts_and_the_run_goes_on_from_it(tmp_path):
    months = month(0), month(1, sabotaged=True)
    train(tmp_path / "run", *months)
    train(tmp_path / "plain", *months, gate=False)
    api.promote(tmp_path / "run", "m1")
    assert statuses(tmp_path / "run") == [("m0", "learned"), ("m1", "promoted"), ("m1", "learned")]
    for path in ("run", "plain"):
        train(tmp_path / path, *months, month(2), gate=False)
    assert all(torch.equal(value, weights_of(tmp_path / "plain")[name]) for name, value in weights_of(tmp_path / "run").items())
    assert api.load(tmp_path / "run").tasks == ("m0", "m1", "m2")


def test_what_cannot_be_promoted_is_said(tmp_path):
    months = month(0), month(1, sabotaged=True), month(2)
    train(tmp_path / "run", *months)
    with pytest.raises(RunError, match="no refused task 'm7'; refused: m1"):
        api.promote(tmp_path / "run", "m7")
    train(tmp_path / "run", *months)
    with pytest.raises(RunError, match="m1 was refused before m2 was learned"):
        api.promote(tmp_path / "run", "m1")
    with pytest.raises(RunError, match="no such run"):
        api.promote(tmp_path / "none", "m1")
    api.rollback(tmp_path / "run", "m0")
    api.promote(tmp_path / "run", "m1")
    assert api.load(tmp_path / "run").tasks == ("m0", "m1")


@pytest.mark.parametrize("where", ["save_checkpoint", "write_file"])
def test_killed_while_it_is_refused_it_is_refused_again(tmp_path, where):
    months = month(0), month(1, sabotaged=True)
    train(tmp_path / "run", months[0])
    real, path = getattr(lineage, where), tmp_path / "run"

    def dying(target, *args):
        if where == "save_checkpoint" or target.name == "lineage.jsonl":
            real(target, *args) if where == "save_checkpoint" else None
            raise Killed
        return real(target, *args)

    with mock.patch.object(lineage, where, dying), pytest.raises(Killed):
        train(path, *months)
    summary, _ = train(path, *months)
    assert summary["rejected"] == "m1"
    assert statuses(path) == [("m0", "learned"), ("m1", "rejected")]


def test_killed_while_it_is_promoted_it_counts_or_it_does_not(tmp_path):
    months = month(0), month(1, sabotaged=True)
    train(tmp_path / "run", *months)
    with mock.patch.object(lineage.RunDirectory, "write_records", side_effect=Killed), pytest.raises(Killed):
        api.promote(tmp_path / "run", "m1")
    assert api.load(tmp_path / "run").tasks == ("m0", "m1")
    summary, _ = train(tmp_path / "run", *months)
    assert summary["tasks"] == ["m0", "m1"]


def test_the_commands_and_their_exit_codes(tmp_path):
    """Two files; in the second the labels are exchanged."""
    for number, exchanged in ((0, False), (1, True)):
        task = month(number, exchanged)
        rows = zip(task.train.inputs["x"].tolist(), task.train.targets.tolist(), strict=True)
        lines = [",".join(map(str, [*x, ("no", "yes")[y]])) for x, y in rows]
        (tmp_path / f"{number}.csv").write_text("\n".join(["a,b,c,d,left", *lines]) + "\n")
    config, run = tmp_path / "retain.yaml", str(tmp_path / "run")
    spec = {**SPEC, "stream": {"csv": "*.csv", "label": "left"}}
    config.write_text(json.dumps(spec))
    (tmp_path / "1.csv").rename(tmp_path / "1.later")
    assert CliRunner().invoke(app, ["train", str(config), "--run", run, "--gate"]).exit_code == 0
    (tmp_path / "1.later").rename(tmp_path / "1.csv")
    refused = CliRunner().invoke(app, ["train", str(config), "--run", run, "--gate"])
    assert refused.exit_code == 3, refused.output
    assert "refused by the gate" in refused.stderr
    accepted = CliRunner().invoke(app, ["promote", run, "1"])
    assert accepted.exit_code == 0, accepted.output
    assert CliRunner().invoke(app, ["promote", run, "1"]).exit_code == 1
    assert CliRunner().invoke(app, ["train", str(config), "--run", run]).exit_code == 0
    assert CliRunner().invoke(app, ["train", str(config), "--run", run, "--gate"]).exit_code == 3
