"""The contract that every method keeps, in the trainer; `test_steps.py` has what holds in every step.

The reference is a plain PyTorch loop that calls the method's functions itself.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from retain.forgetting import build
from retain.params import derive, pack, unpack_
from retain.seams import StepContext
from retain.step import CLASSIFICATION
from tests.contracts.table import ROWS, every_method, every_scenario, make_spec, make_stream, run
from tests.kit import Killed, killed_after


@every_method
@every_scenario
def test_the_trainer_gives_the_weights_of_a_plain_loop(tmp_path, methods, scenario):
    """Nothing but torch and the method's own functions, in the order of the seams."""
    stream, spec = make_stream(scenario), make_spec(methods, scenario)
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
            order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(derive("rows", 0, number, epoch)))
            for place, index in enumerate(order.split(8)):
                ctx = base._replace(step=step, rows=ROWS * epoch + 8 * place, total_rows=2 * ROWS, key=derive("step", 0, number))
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
        ctx = base._replace(key=derive("consolidate", 0, number), rows=0, total_rows=ROWS)
        for method, state in zip(bundle, states, strict=True):
            if method.end_task:
                method.end_task(ctx, state)
            if method.consolidate_batch:
                method.consolidate_batch(ctx._replace(batch=_batch(task, torch.arange(ROWS), number, extra, per_task)), state)
            if method.consolidate:
                method.consolidate(ctx, state)
        moments = model.moments(optimizer)
    expected = {name: param.detach() for name, param in model.params().items()}
    found = run(tmp_path / "run", methods, scenario)
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.allclose(found[name], expected[name], atol=2e-6), name


@every_method
@every_scenario
def test_micro_batches_change_nothing(tmp_path, methods, scenario):
    whole = run(tmp_path / "whole", methods, scenario, precision="fp64")
    for limit in (5, 1):
        parts = run(tmp_path / str(limit), methods, scenario, precision="fp64", memory={"micro_batch": limit})
        assert max((whole[name] - parts[name]).abs().max() for name in whole) < 1e-9


@every_method
@every_scenario
def test_killed_and_resumed_ends_with_the_same_bits(tmp_path, methods, scenario):
    """Once in every task, and between two pulls of EWC: its checkpoints are after steps 3 and 6, and a pull is every 4."""
    settings = {"scenario": scenario, "dropout": 0.3, "precision": "amp_fp16", "every_steps": 3}
    undisturbed = run(tmp_path / "undisturbed", methods, **settings)
    for after in (4, 12, 7):  # in step 4 of the first task, 7 of the second, 5 of the third
        with pytest.raises(Killed), killed_after(steps=after):
            run(tmp_path / "killed", methods, **settings)
    resumed = run(tmp_path / "killed", methods, **settings)
    assert all(torch.equal(undisturbed[name], resumed[name]) for name in undisturbed)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 6)

    def forward(self, x):
        return self.layer(x)


@every_method
def test_states_survive_a_file_and_declare_their_bytes(methods):
    stream, spec = make_stream(), make_spec(methods)
    for method in build(spec.methods):
        model = Layer()
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
    first, again, other = (run(tmp_path / str(n), methods, seed=seed) for n, seed in enumerate((3, 3, 4)))
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
