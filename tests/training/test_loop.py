"""The run as a whole: what is learned, what is not learned twice, and what is refused."""

import json
import subprocess
import sys
from unittest import mock

import pytest
import torch

from retain import api
from retain.data.task import Rows, Stream, Task
from retain.errors import ConfigError, DataError, RunError
from retain.seams import Method
from retain.spec import RunSpec
from retain.training import checks, loop
from tests.kit import weights_of

RANDOM = {"input": "vector", "shape": [6], "classes": 4, "samples": 40, "tasks": 2}


def spec(training=None, **parts):
    stream = {"random": RANDOM, "split": {"by": "none"}}
    model = {"mlp": {"hidden": [8]}}
    base = {"stream": stream, "model": model, "training_params": {"batch_size": 8, "epochs": 1, **(training or {})}}
    return RunSpec.parse({**base, **parts})


def vectors(groups, rows=24, **more):
    """A stream whose tasks have these classes, each class around its own centre."""
    tasks = []
    for number, group in enumerate(groups):
        parts = []
        for count, salt in ((rows, 0), (0, 0), (9, 1)):
            labels = torch.tensor(group)[torch.arange(count) % len(group)]
            made = torch.Generator().manual_seed(100 * number + salt)
            parts.append(Rows({"x": torch.eye(6)[labels] * 4 + torch.randn(count, 6, generator=made)}, labels))
        tasks.append(Task(f"t{number}", *parts, classes=group))
    names = [f"c{c}" for c in sorted({c for group in groups for c in group})]
    growing = len(names) > len(set(groups[0]))
    return Stream(tasks, names, "vector", (6,), "class-incremental" if growing else "domain-incremental", **more)


def notes(run_spec, path, **more):
    heard = []
    summary = loop.train(run_spec, path, listener=lambda kind, values: heard.append((kind, values)), **more)
    return [values["text"] for kind, values in heard if kind == "note"], summary, [kind for kind, _ in heard]


def test_learning_again_learns_nothing(tmp_path):
    first = loop.train(spec(), tmp_path / "run")
    before = weights_of(tmp_path / "run")
    with mock.patch.object(loop, "train_step", side_effect=AssertionError):
        second = loop.train(spec(), tmp_path / "run")
    assert first == second == json.loads((tmp_path / "run/summary.json").read_text())
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(tmp_path / "run").items())


def test_one_more_task_is_learned_as_if_it_had_been_there_from_the_start(tmp_path):
    """Buffer, optimizer, randomness and head go on in a new process's objects."""
    settings = {"regularization": {"replay_ratio": 0.5, "replay_capacity": 12}, "optimizer": "Adam(lr=1e-2)"}
    stream = vectors([[0, 1], [2, 3], [4, 5]])
    whole = spec(settings)
    loop.train(whole, tmp_path / "whole", stream=stream)
    for count in (1, 2, 3):
        loop.train(
            whole, tmp_path / "grown", stream=Stream(stream.tasks[:count], stream.classes, "vector", (6,), "class-incremental")
        )
    first, second = weights_of(tmp_path / "whole"), weights_of(tmp_path / "grown")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_new_classes_in_a_later_month_grow_a_head_that_was_single(tmp_path):
    loop.train(spec(), tmp_path / "run", stream=vectors([[0, 1]]))
    old = weights_of(tmp_path / "run")
    summary = loop.train(spec(), tmp_path / "run", stream=vectors([[0, 1], [0, 1, 2]]))
    assert old["head.weight"].shape[0] == 2 and weights_of(tmp_path / "run")["head.weight"].shape[0] == 3
    assert summary["tasks"] == ["t0", "t1"]


def test_measures_follow_from_the_matrix(tmp_path):
    summary = loop.train(spec(budget={"forgetting": 0.5}), tmp_path / "run", stream=vectors([[0, 1], [2, 3], [4, 5]]))
    values = summary["matrices"]["accuracy"]["values"]
    last = len(values) - 1
    forgetting = sum(max(values[i][j] for i in range(j, last)) - values[last][j] for j in range(last)) / last
    assert summary["measures"]["forgetting"] == pytest.approx(forgetting)
    assert summary["budgets"]["forgetting"] == {
        "limit": 0.5,
        "measured": summary["measures"]["forgetting"],
        "status": "kept" if forgetting <= 0.5 else "broken",
    }
    assert values[0][1:] == [None, None] and summary["measures"]["forward_transfer"] is None


def test_forward_transfer_where_the_head_allows_it(tmp_path):
    summary = loop.train(spec(), tmp_path / "run", stream=vectors([[0, 1, 2, 3]] * 3))
    around = summary["matrices"]["accuracy"]
    assert around["before"][0] is None and None not in around["before"][1:] and None not in around["at_init"]
    gains = [around["before"][j] - around["at_init"][j] for j in (1, 2)]
    assert summary["measures"]["forward_transfer"] == pytest.approx(sum(gains) / 2)


def test_a_task_that_is_gone_is_measured_on_the_rows_kept(tmp_path):
    stream = vectors([[0, 1]] * 2)
    loop.train(spec(), tmp_path / "run", stream=stream)
    alone = Stream([stream.tasks[1], vectors([[0, 1]] * 3).tasks[2]], stream.classes, "vector", (6,), "domain-incremental")
    said, summary, _ = notes(spec(), tmp_path / "run", stream=alone)
    assert any("t0 is no longer in the stream" in text for text in said)
    assert summary["tasks"] == ["t0", "t1", "t2"] and None not in summary["matrices"]["accuracy"]["values"][2]


def test_a_task_that_is_gone_without_its_rows_is_an_error(tmp_path):
    stream = vectors([[0, 1]] * 2)
    forgetful = spec(stream={"random": RANDOM, "split": {"by": "none"}, "keep_eval": False})
    loop.train(forgetful, tmp_path / "run", stream=stream)
    assert not (tmp_path / "run/tasks/0000/eval.safetensors").exists()
    with pytest.raises(DataError, match=r"'t0'.*Put its data back"):
        loop.train(
            forgetful, tmp_path / "run", stream=Stream(stream.tasks[1:], stream.classes, "vector", (6,), "domain-incremental")
        )


def test_changed_rows_of_a_learned_task_are_said(tmp_path):
    loop.train(spec(), tmp_path / "run", stream=vectors([[0, 1]]))
    said, _, kinds = notes(spec(), tmp_path / "run", stream=vectors([[0, 1]], rows=30))
    assert any("t0 has other rows now" in text for text in said) and "task" not in kinds


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"mlp": {"hidden": [9]}}}, "mlp.hidden"),
        ({"stream": {"random": {**RANDOM, "shape": [7]}, "split": {"by": "none"}}}, "input.shape"),
        ({"stream": {"random": RANDOM, "split": {"by": "none"}, "metric": "loss"}}, "metric was accuracy, is loss"),
    ],
)
def test_another_model_or_metric_is_another_run(tmp_path, change, said):
    loop.train(spec(), tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"belongs to another run.*{said}.*another directory"):
        loop.train(spec(**change), tmp_path / "run")


def test_other_settings_may_change_and_the_change_is_logged(tmp_path):
    loop.train(spec(), tmp_path / "run", stream=vectors([[0, 1]]))
    said, _, _ = notes(spec({"optimizer": "SGD(lr=0.1)"}), tmp_path / "run", stream=vectors([[0, 1]] * 2))
    assert any("The optimizer is SGD now" in text for text in said)
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert any(event.get("changes", {}).get("training_params.optimizer.name") == ["AdamW", "SGD"] for event in events)


def test_a_method_added_later_starts_with_what_it_sees(tmp_path):
    loop.train(spec(), tmp_path / "run", stream=vectors([[0, 1]]))
    replay = spec({"regularization": {"replay_ratio": 0.5}})
    said, summary, _ = notes(replay, tmp_path / "run", stream=vectors([[0, 1]] * 2))
    assert any("replay was not part of this run before" in text for text in said)
    assert summary["memory"]["state_bytes"]["replay"] > 0


@pytest.mark.parametrize(("first", "then"), [("fp32", "fp64"), ("fp64", "fp32"), ("fp32", "bf16"), ("amp_fp16", "fp32")])
def test_the_precision_may_change_between_tasks(tmp_path, first, then):
    """Moments, importance and anchors follow."""
    stream = vectors([[0, 1], [0, 1], [0, 1]])
    kept = {"optimizer": "Adam(lr=1e-2)", "epochs": 8, "regularization": {"ewc_lambda": 10.0, "replay_ratio": 0.5}}
    part = Stream(stream.tasks[:2], stream.classes, "vector", (6,), stream.scenario)
    loop.train(spec({**kept, "precision": first}), tmp_path / "run", stream=part)
    summary = loop.train(spec({**kept, "precision": then}), tmp_path / "run", stream=stream)
    assert summary["measures"]["average"] > 0.6


def test_where_no_method_can_help_it_is_said(tmp_path):
    """Two blobs at a time under one head: at no strength does EWC know old and new classes, which is no fault; replay does."""
    stream = vectors([[0, 1], [2, 3]], rows=200)

    def learned(name, stream=stream, **regularization):
        training = {"optimizer": "SGD(lr=0.1)", "epochs": 5, "regularization": regularization}
        said, summary, _ = notes(spec(training), tmp_path / name, stream=stream)
        return any("class-incremental" in text for text in said), min(summary["matrices"]["accuracy"]["values"][1])

    for strength in (0.1, 10.0, 1000.0):
        said, least = learned(f"ewc {strength}", ewc_lambda=strength)
        assert said
        assert least < 0.6
    fixed = spec({"regularization": {"ewc_lambda": 1.0}}, model={"mlp": {"hidden": [8]}, "head": "single"})
    assert any("class-incremental" in text for text in notes(fixed, tmp_path / "fixed", stream=stream)[0])
    said, least = learned("both", ewc_lambda=0.1, replay_ratio=1.0)
    assert not said
    assert least > 0.9
    assert not learned("domains", vectors([[0, 1], [0, 1]]), ewc_lambda=1.0)[0]


def test_a_diverged_task_is_not_kept(tmp_path):
    loop.train(spec(), tmp_path / "run", stream=vectors([[0, 1]]))
    good = weights_of(tmp_path / "run")
    with pytest.raises(RunError, match=r"diverged in task t1.*learning rate"):
        loop.train(spec({"optimizer": "SGD(lr=1e30)"}), tmp_path / "run", stream=vectors([[0, 1]] * 2))
    assert all(torch.equal(tensor, good[name]) for name, tensor in weights_of(tmp_path / "run").items())
    assert loop.train(spec(), tmp_path / "run", stream=vectors([[0, 1]] * 2))["tasks"] == ["t0", "t1"]


def test_a_changed_setting_starts_the_task_again(tmp_path):
    from tests.kit import Killed, killed_after

    slow = spec({"optimizer": "SGD(lr=0.01)"}, checkpoint={"every_steps": 1})
    with pytest.raises(Killed), killed_after(steps=3):
        loop.train(slow, tmp_path / "run")
    fast = spec({"optimizer": "SGD(lr=0.1)"})
    said, _, _ = notes(fast, tmp_path / "run")
    assert any("starts again from its beginning: training_params.optimizer" in text for text in said)
    loop.train(fast, tmp_path / "other")
    first, second = weights_of(tmp_path / "run"), weights_of(tmp_path / "other")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_little_free_disk_is_refused_before_training(tmp_path):
    usage = mock.Mock(free=1000)
    with mock.patch.object(checks.shutil, "disk_usage", return_value=usage), pytest.raises(RunError, match="1,000 bytes are free"):
        loop.train(spec(), tmp_path / "run")


def test_micro_batches_with_batch_norm_are_refused_unless_allowed(tmp_path):
    stream = {"random": {**RANDOM, "input": "image", "shape": [1, 8, 8]}, "split": {"by": "none"}}
    settings = {"memory": {"micro_batch": 4}}
    with pytest.raises(ConfigError, match="allow_inexact: true"):
        loop.train(spec(settings, stream=stream, model={"cnn": {"width": 4}}), tmp_path / "run")
    settings["memory"]["allow_inexact"] = True
    loop.train(spec(settings, stream=stream, model={"cnn": {"width": 4}}), tmp_path / "run")


def test_the_module_seam_is_applied_while_training_and_undone_last_in_first_out(tmp_path):
    seen = []

    def made(name):
        def apply_(model, state):
            seen.append(f"apply {name}")
            return lambda: seen.append(f"undo {name}")

        return Method(name, init=lambda params: api_state(), nbytes=lambda state: 0, allows=frozenset(), apply_=apply_)

    with mock.patch("retain.training.job.build", return_value=[made("a"), made("b")]):
        loop.train(spec(), tmp_path / "run")
    assert seen == ["apply a", "apply b", "undo b", "undo a"]


def api_state():
    import dataclasses

    @dataclasses.dataclass
    class Empty:
        pass

    return Empty()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp_bf16", "amp_fp16", "fp64"])
@pytest.mark.parametrize("kind", ["vector", "image"])
def test_every_precision_trains_and_loads(tmp_path, precision, kind):
    shape = [6] if kind == "vector" else [3, 8, 8]
    stream = {"random": {**RANDOM, "input": kind, "shape": shape}, "split": {"by": "none"}}
    model = {"cnn": {"width": 4}} if kind == "image" else {"mlp": {"hidden": [8]}}
    run_spec = spec({"precision": precision, "regularization": {"replay_ratio": 0.5}}, stream=stream, model=model)
    summary = loop.train(run_spec, tmp_path / "run")
    assert len(summary["tasks"]) == 2
    learned = api.load(tmp_path / "run")
    weights = weights_of(tmp_path / "run")
    assert learned.module.state_dict().keys() == weights.keys()
    expected = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(precision, torch.float32)
    assert weights["head.weight"].dtype == expected


def test_load_gives_the_model_as_it_was_measured(tmp_path):
    stream = vectors([[0, 1], [2, 3]])
    summary = loop.train(spec({"epochs": 20}), tmp_path / "run", stream=stream)
    learned = api.load(tmp_path / "run")
    assert learned.classes == ("c0", "c1", "c2", "c3") and learned.tasks == ("t0", "t1") and learned.summary == summary
    test = stream.tasks[1].test
    accuracy = (learned.module(test.inputs["x"]).argmax(1) == test.targets).double().mean().item()
    assert accuracy == pytest.approx(summary["matrices"]["accuracy"]["values"][1][1])
    assert api.load(tmp_path / "run", task=0).tasks == ("t0",)


def test_rolled_back_tasks_are_learned_again_to_the_same_weights(tmp_path):
    loop.train(spec(), tmp_path / "run")
    before = weights_of(tmp_path / "run")
    names = api.load(tmp_path / "run").tasks
    assert api.rollback(tmp_path / "run", names[0]) == [names[1]]
    assert api.load(tmp_path / "run").tasks == names[:1]
    loop.train(spec(), tmp_path / "run")
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(tmp_path / "run").items())
    with pytest.raises(RunError, match="no learned task 'x'"):
        api.rollback(tmp_path / "run", "x")
    with pytest.raises(RunError, match="no such run"):
        api.load(tmp_path / "nothing")


def test_classes_may_come_in_any_order(tmp_path):
    """Ids that the stream gives early and a task brings late: the head has a row for each."""
    stream = vectors([[4, 5], [0, 1], [2, 3]])
    summary = loop.train(spec(), tmp_path / "run", stream=stream)
    assert len(summary["tasks"]) == 3 and weights_of(tmp_path / "run")["head.weight"].shape[0] == 6


def test_a_class_that_comes_when_old_data_is_gone(tmp_path):
    loop.train(spec(), tmp_path / "run", stream=vectors([[0, 1], [0, 1]]))
    late = vectors([[0, 1], [0, 1], [0, 1, 2]])
    alone = Stream(late.tasks[2:], late.classes, "vector", (6,), "domain-incremental")
    summary = loop.train(spec(), tmp_path / "run", stream=alone)
    assert summary["tasks"] == ["t0", "t1", "t2"] and weights_of(tmp_path / "run")["head.weight"].shape[0] == 3


def test_two_tasks_of_one_name_are_refused(tmp_path):
    task = vectors([[0, 1]]).tasks[0]
    with pytest.raises(ConfigError, match="'t0'"):
        loop.train(spec(), tmp_path / "run", stream=Stream([task, task], ["a", "b"], "vector", (6,), "domain-incremental"))
    assert not (tmp_path / "run").exists()


def test_a_run_in_which_every_step_overflows_is_an_error(tmp_path):
    stream = vectors([[0, 1]], rows=900)
    stream.tasks[0].train.inputs["x"].mul_(1e30)
    with pytest.raises(RunError, match="last 100 steps is not finite"):
        loop.train(spec({"precision": "amp_fp16"}), tmp_path / "run", stream=stream)


def test_a_changed_setting_on_a_finished_run_is_said_and_changes_nothing(tmp_path):
    first = loop.train(spec(), tmp_path / "run")
    said, second, _ = notes(spec({"seed": 5}), tmp_path / "run")
    assert any("a changed setting does nothing (training_params.seed: 0 → 5)" in text for text in said)
    assert second == first and second["seed"] == 0


@pytest.mark.parametrize("change", [{"split": {"by": "class"}}, {"image_mean": 0.5}, {"features": ["x"]}, {"test": 0.3}])
def test_another_division_of_the_rows_is_another_run(tmp_path, change):
    loop.train(spec(), tmp_path / "run")
    with pytest.raises(ConfigError, match="belongs to another run"):
        loop.train(spec(stream={"random": RANDOM, "split": {"by": "none"}, **change}), tmp_path / "run", stream=vectors([[0, 1]]))


def test_replay_is_exact_over_the_new_rows_with_a_smaller_last_batch(tmp_path):
    """60 rows in batches of 50 and 10 at a ratio of 0.01, 100 epochs: 60 rows are replayed, not 40 or 100."""
    rows = []
    real = loop.train_step

    def step(job, batch, ctx, sizes):
        result = real(job, batch, ctx, sizes)
        rows.append((ctx.task, result.rows - len(batch)))
        return result

    replay = {"epochs": 100, "batch_size": 50, "regularization": {"replay_ratio": 0.01}, "optimizer": "SGD(lr=0.01)"}
    with mock.patch.object(loop, "train_step", step):
        loop.train(spec(replay), tmp_path / "run", stream=vectors([[0, 1]] * 2, rows=60))
    assert sum(count for task, count in rows if task == 1) == 60


def test_a_buffer_smaller_than_the_classes_is_refused_before_the_task_is_learned(tmp_path):
    small = spec({"regularization": {"replay_ratio": 0.5, "replay_capacity": 1}})
    with (
        mock.patch.object(loop, "train_step", side_effect=AssertionError),
        pytest.raises(ConfigError, match="capacity=1 cannot hold"),
    ):
        loop.train(small, tmp_path / "run", stream=vectors([[0, 1]]))


@pytest.mark.skipif(sys.platform != "linux", reason="reads resident memory from /proc")
def test_memory_stays_flat_over_two_hundred_tasks(tmp_path):
    """In a process of its own. What grows is the matrix: 200 rows of at most 200 numbers, three metrics."""
    code = """
import resource, sys
from pathlib import Path
from retain.spec import RunSpec
from retain.training import loop

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

seen = []
def listen(kind, values):
    if kind == "evaluated":
        seen.append(resident())

random = {"input": "vector", "shape": [6], "classes": 2, "samples": 10, "tasks": 200}
training = {"epochs": 1, "batch_size": 8, "regularization": {"replay_ratio": 0.5, "replay_capacity": 50}}
spec = RunSpec.parse({"stream": {"random": random}, "model": {"mlp": {"hidden": [8]}}, "training_params": training})
loop.train(spec, Path(sys.argv[1]), listener=listen)
print(seen[199] - seen[99])
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "run"], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 * 2**20
