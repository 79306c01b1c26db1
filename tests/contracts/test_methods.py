"""The contract that every method keeps. A new method is one more row of METHODS.

The reference is a plain PyTorch loop that calls the method's functions itself.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from retain.data.task import Rows, Stream, Task
from retain.forgetting import build
from retain.params import derive, pack, unpack_
from retain.seams import StepContext
from retain.spec import RunSpec
from retain.step import CLASSIFICATION
from retain.training import loop
from tests.kit import Killed, killed_after, weights_of

METHODS = {
    "naive": [],
    "replay": [{"replay": {"ratio": 0.7, "capacity": 24}}],
    "replay, reservoir, every row alike": [{"replay": {"ratio": 0.7, "capacity": 24, "policy": "reservoir", "weighting": "rows"}}],
    "replay, ring, class-balanced draws": [{"replay": {"ratio": 1.5, "capacity": 24, "policy": "ring", "draw": "class-balanced"}}],
    "ewc": [{"ewc": {"lambda": 20.0}}],
    "ewc, explicit, of sampled labels": [{"ewc": {"lambda": 0.5, "form": "explicit", "fisher": "sampled", "samples": 30}}],
    "ewc, in bf16 on the host": [{"ewc": {"lambda": 20.0, "importance_dtype": "bf16", "storage": "host"}}],
    "ewc, online, refreshed": [{"ewc": {"tasks": "online", "decay": 0.9, "refresh": 0.2}}],
    "ewc and replay": [{"ewc": {"lambda": 5.0, "tasks": "online"}}, {"replay": {"ratio": 0.7, "capacity": 24}}],
}

SCENARIOS = {
    "class-incremental": ([[0, 1], [2, 3], [4, 5]], "auto"),
    "domain-incremental": ([[0, 1], [0, 1], [0, 1]], "auto"),
    "task-incremental": ([[0, 1], [2, 3, 4], [0, 5]], "per-task"),
}

every_method = pytest.mark.parametrize("methods", METHODS.values(), ids=METHODS.keys())
every_scenario = pytest.mark.parametrize("scenario", SCENARIOS)


def make_stream(scenario: str, rows: int = 43) -> Stream:
    """Three small tasks of vectors around their class's centre."""
    groups, head = SCENARIOS[scenario]
    made = torch.Generator().manual_seed(5)
    centres = torch.randn(6, 5, generator=made) * 2
    tasks = []
    for number, group in enumerate(groups):
        parts = []
        for count in (rows, 0, 12):
            local = torch.arange(count) % len(group)
            labels = torch.tensor(group)[local]
            x = centres[labels] + torch.randn(count, 5, generator=made)
            parts.append(Rows({"x": x}, local if head == "per-task" else labels))
        tasks.append(Task(f"t{number}", *parts, classes=group))
    names = [str(c) for c in sorted({c for group in groups for c in group})]
    return Stream(tasks, names, "vector", (5,), scenario)


def make_spec(scenario: str, methods: list, **training) -> RunSpec:
    settings = {"batch_size": 8, "epochs": 2, "optimizer": "AdamW(lr=1e-2)", "max_norm": 1.0, "methods": methods, **training}
    model = {"mlp": {"hidden": [12], "dropout": training.pop("dropout", 0.0)}, "head": SCENARIOS[scenario][1]}
    settings.pop("dropout", None)
    return RunSpec.parse({"model": model, "training_params": settings, "checkpoint": {"every_steps": 4}})


def run(path, scenario, methods, **training):
    stream = make_stream(scenario)
    loop.train(make_spec(scenario, methods, **training), path, stream=stream)
    return weights_of(path)


@every_method
@every_scenario
def test_the_trainer_gives_the_weights_of_a_plain_loop(tmp_path, methods, scenario):
    """Nothing but torch and the method's own functions, in the order of the seams."""
    stream, spec = make_stream(scenario), make_spec(scenario, methods)
    per_task = scenario == "task-incremental"
    bundle = build(spec.methods)
    model = _Reference(stream, spec, per_task)
    states = [method.init(model.params()) for method in bundle]
    seen: set[int] = set()
    moments: dict = {}
    for number, task in enumerate(stream.tasks):
        new = set(task.classes) - seen
        seen |= new
        model.make_room(number, task, seen)
        params = model.params()
        optimizer = model.optimizer(moments)
        known = {"task": number, "classes": len(seen), "new_classes": len(new), "step_sizes": dict.fromkeys(params, 1e-2)}
        base = StepContext(model.net, params, CLASSIFICATION, **known)
        for method, state in zip(bundle, states, strict=True):
            if method.begin_task:
                method.begin_task(base, state)
        extra = {"task": number} if per_task else {}
        step = 0
        for epoch in range(2):
            order = torch.randperm(43, generator=torch.Generator().manual_seed(derive("rows", 0, number, epoch)))
            for place, index in enumerate(order.split(8)):
                ctx = base._replace(step=step, rows=43 * epoch + 8 * place, total_rows=86, key=derive("step", 0, number))
                batch = _batch(task, index, number, extra, per_task)
                for method, state in zip(bundle, states, strict=True):
                    if method.mix:
                        batch = method.mix(batch, ctx, state)
                logits = model.net(**batch.inputs)
                losses = F.cross_entropy(logits, batch.targets, reduction="none")
                weights = torch.ones(len(batch)) if batch.weights is None else batch.weights
                loss = (losses * weights).sum()
                for method, state in zip(bundle, states, strict=True):
                    if method.penalty:
                        loss = loss + method.penalty(ctx._replace(batch=batch, outputs=logits), state)
                optimizer.zero_grad()
                (loss / len(batch)).backward()
                for seam in ("observe", "add_grad_", "project_grad_"):
                    for method, state in zip(bundle, states, strict=True):
                        if getattr(method, seam):
                            getattr(method, seam)(ctx._replace(batch=batch), state)
                torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
                optimizer.step()
                for method, state in zip(bundle, states, strict=True):
                    if method.project_:
                        method.project_(params, state, dict.fromkeys(params, 1e-2))
                step += 1
        ctx = base._replace(key=derive("consolidate", 0, number), rows=0, total_rows=43)
        for method, state in zip(bundle, states, strict=True):
            if method.consolidate_batch:
                method.consolidate_batch(ctx._replace(batch=_batch(task, torch.arange(43), number, extra, per_task)), state)
            if method.consolidate:
                method.consolidate(ctx, state)
        moments = model.moments(optimizer)
    expected = {name: param.detach() for name, param in model.params().items()}
    found = run(tmp_path / "run", scenario, methods)
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.allclose(found[name], expected[name], atol=2e-6), name


@every_method
@every_scenario
@pytest.mark.parametrize("limit", [5, 1])
def test_micro_batches_change_nothing(tmp_path, methods, scenario, limit):
    whole = run(tmp_path / "whole", scenario, methods, precision="fp64")
    parts = run(tmp_path / "parts", scenario, methods, precision="fp64", memory={"micro_batch": limit})
    assert max((whole[name] - parts[name]).abs().max() for name in whole) < 1e-9


@every_method
@every_scenario
def test_killed_and_resumed_ends_with_the_same_bits(tmp_path, methods, scenario):
    settings = {"dropout": 0.3, "precision": "amp_fp16"}
    undisturbed = run(tmp_path / "undisturbed", scenario, methods, **settings)
    for after in (6, 17, 29):
        path = tmp_path / f"killed{after}"
        with pytest.raises(Killed), killed_after(steps=after):
            run(path, scenario, methods, **settings)
        resumed = run(path, scenario, methods, **settings)
        assert all(torch.equal(undisturbed[name], resumed[name]) for name in undisturbed)


@every_method
def test_states_survive_a_file_and_declare_their_bytes(methods):
    stream, spec = make_stream("class-incremental"), make_spec("class-incremental", methods)
    for method in build(spec.methods):
        model = torch.nn.ModuleDict({"layer": torch.nn.Linear(5, 6)})
        model.forward = lambda x: model["layer"](x)
        params = dict(model.named_parameters())
        state, again = method.init(params), method.init(params)
        ctx = StepContext(model, params, CLASSIFICATION, classes=2, new_classes=2)
        for position in range(3):
            if method.consolidate_batch:
                batch = _batch(stream.tasks[position], torch.arange(20), position, {}, False)
                method.consolidate_batch(ctx._replace(batch=batch, key=position), state)
            if method.consolidate and position < 2 and method.consolidate_batch:
                method.consolidate(ctx._replace(key=position), state)
        tensors, tree = pack(state)
        unpack_(again, tensors, tree)
        first, second = pack(state)[0], pack(again)[0]
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
        assert method.nbytes(state) == method.nbytes(again)
        assert dataclasses.is_dataclass(state)


@every_method
def test_a_run_is_a_function_of_its_seed(tmp_path, methods):
    first, again, other = (run(tmp_path / str(n), "class-incremental", methods, seed=seed) for n, seed in enumerate((3, 3, 4)))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def _batch(task, index, number, extra, per_task):
    from retain.seams import Batch

    meta = {"row": index, "task": number}
    if per_task:
        meta["class"] = torch.tensor(task.classes)[task.train.targets[index]]
    return Batch({"x": task.train.inputs["x"][index], **extra}, task.train.targets[index], None, meta)


class _Reference:
    """The model by hand: a torch network whose head grows by concatenation, and AdamW's moments carried by hand."""

    def __init__(self, stream, spec, per_task):
        from retain.models.build import build_model

        self.net, self.per_task = build_model(spec, stream, []), per_task

    def params(self):
        return dict(self.net.named_parameters())

    def make_room(self, number, task, seen):
        from retain.models.heads import grow_

        grow_(self.net.head, len(task.classes) if self.per_task else len(seen), derive("head", 0, number))

    def optimizer(self, moments):
        params = self.params()
        matrices, rest = ([p for p in params.values() if (p.ndim > 1) == two] for two in (True, False))
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
        for name, old in moments.items():
            param, state = params[name], {"step": old["step"].clone()}
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(param)
                state[key][: len(old[key])] = old[key]
            optimizer.state[param] = state
        return optimizer

    def moments(self, optimizer):
        return {name: optimizer.state[param] for name, param in self.params().items() if param in optimizer.state}
