"""What holds for every method in every step: overflows, micro-batches, the optimizer's form, frozen and tied weights, heads.

The reference is `plain_step`: torch and the methods' own functions.
"""

from __future__ import annotations

import copy

import pytest
import torch

from retain.memory.optimizer import optimizer_tensors
from retain.params import pack
from retain.step import CLASSIFICATION, train_step
from tests.contracts.table import HUGE, difference, every_method, learn, make_spec, make_stream, moved, plain_step

OVERFLOWS = [(0, 0), (1, 3)]
"""Task and step, from 0: the first of all, which a momentum must survive, and with `every: 4` where a pull would be."""


def everything(job):
    """Bitwise copies of weights, of the methods' states, and of what in the optimizer's is not zero."""
    packed = [pack(state) for _, state in job.methods]
    tensors = {f"{number}/{name}": tensor for number, (found, _) in enumerate(packed) for name, tensor in found.items()}
    tensors |= {f"weight/{name}": tensor for name, tensor in job.model.state_dict().items()}
    moments = optimizer_tensors(job.optimizer, job.params).items()
    tensors |= {f"optimizer/{name}": tensor for name, tensor in moments if tensor.any()}
    return {name: tensor.clone() for name, tensor in tensors.items()}, copy.deepcopy([tree for _, tree in packed])


def same(first, second):
    if first[0].keys() != second[0].keys() or first[1] != second[1]:
        return False
    return all(torch.equal(tensor, second[0][name]) for name, tensor in first[0].items())


ADAPTIVE = ["AdamW(lr=1e-2, fused=True)", "AdamW(lr=1e-2, foreach=True)"]
MOMENTUM = ["SGD(lr=0.1, momentum=0.9)", "SGD(lr=0.1, momentum=0.9, fused=True)"]


@every_method
@pytest.mark.parametrize("optimizer", ADAPTIVE + MOMENTUM)
def test_an_overflow_changes_nothing_and_the_rest_is_as_if_the_step_were_left_out(methods, optimizer):
    """Weights, optimizer and methods stay bitwise the same in it; the loss scale is a power of two, so the end is bitwise too."""
    spec, stream, skipped = make_spec(methods, optimizer=optimizer, precision="amp_fp16"), make_stream(), []

    def overflowing(job, batch, ctx, sizes):
        if (ctx.task, ctx.step) == (0, 0):
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=10**6)
            job.precision = job.precision._replace(scaler=scaler)
        here = (ctx.task, ctx.step) in OVERFLOWS
        job.objective = HUGE if here else CLASSIFICATION
        before = everything(job)
        if train_step(job, batch, ctx, sizes).skipped:
            skipped.append((ctx.task, ctx.step))
        assert same(before, everything(job)) == here

    def left_out(job, batch, ctx, sizes):
        if (ctx.task, ctx.step) not in OVERFLOWS:
            plain_step(job, batch, ctx, sizes, scale=128.0 if (ctx.task, ctx.step) < OVERFLOWS[1] else 64.0)

    assert difference(learn(spec, stream, overflowing), learn(spec, stream, left_out)) == 0
    assert skipped == OVERFLOWS


@every_method
@pytest.mark.parametrize("optimizer", ["AdamW(lr=1e-2)", "SGD(lr=0.1, momentum=0.9)", "RMSprop(lr=1e-3)"])
def test_micro_batches_of_any_size_give_the_weights_of_the_whole_batch(methods, optimizer):
    """Under clipping; batches of 8 rows and of 3, and what a method adds to them."""
    settings, stream = {"optimizer": optimizer, "precision": "fp64"}, make_stream()
    whole = learn(make_spec(methods, **settings), stream, plain_step)
    for limit in (8, 5, 3, 1):
        parts = learn(make_spec(methods, **settings, memory={"micro_batch": limit}), stream)
        assert difference(whole, parts) < 1e-9, limit


@every_method
@pytest.mark.parametrize("optimizer", ["AdamW(lr=1e-3{})", "SGD(lr=1e-2, momentum=0.9{})"])
def test_the_form_of_an_optimizer_changes_nothing(methods, optimizer):
    stream, plain = make_stream(), make_spec(methods, optimizer=optimizer.format(", foreach=False"))
    one_by_one = learn(plain, stream, plain_step)
    for form in ("", ", foreach=True", ", fused=True"):
        found = learn(make_spec(methods, optimizer=optimizer.format(form)), stream)
        assert difference(one_by_one, found) < 1e-6, form


def state_names(job):
    return {name for _, state in job.methods for name in pack(state)[0]}


def state_bytes(job):
    return [method.nbytes(state) for method, state in job.methods]


@every_method
def test_a_frozen_layer_stays_and_costs_nothing(methods):
    """As if its outputs were the rows, and there were no such layer."""
    stream, start = make_stream(), []

    def watched(job, batch, ctx, sizes):
        start.append(copy.deepcopy(job.model.body.first))
        train_step(job, batch, ctx, sizes)
        assert same((dict(start[0].named_parameters()), 0), (dict(job.model.body.first.named_parameters()), 0))

    job = learn(make_spec(methods, factory="frozen"), stream, watched)
    bare = learn(make_spec(methods, factory="bare"), moved(stream, start[0]), plain_step)
    assert difference(job, bare) < 1e-5
    assert state_bytes(job) == state_bytes(bare) and not any("first" in name for name in state_names(job))


@every_method
def test_a_tied_weight_counts_once(methods):
    """As a function that takes the same parameter twice."""
    tied, once = (
        learn(make_spec(methods, factory=kind), make_stream(), step) for kind, step in (("tied", train_step), ("once", plain_step))
    )
    assert difference(tied, once) < 1e-5 and tied.model.body.two.weight is tied.model.body.one.weight
    assert state_bytes(tied) == state_bytes(once) and state_names(tied) == state_names(once)
    for state in (state for _, state in tied.methods if hasattr(state, "A")):
        assert state.A.keys() == state.m.keys() == tied.params.keys()


@every_method
def test_growth_keeps_old_rows_and_leaves_new_ones_free(methods):
    """Nothing of a task is protected before it is looked at: importance 0, and no seam moves its rows or adds to their gradient."""
    ends, touched = [], {"new": False, "old": False}

    def guarded(function, tensors, old, state):
        def seam(*args):
            before = [tensor.clone() for tensor in tensors()]
            function(*args)
            for earlier, now in zip(before, tensors(), strict=True):
                touched["old"] |= not torch.equal(earlier[:old], now[:old])
                touched["new"] |= not getattr(state, "folded", 0.0) and not torch.equal(earlier[old:], now[old:])

        return seam

    def watched(job, batch, ctx, sizes):
        rows = [job.params["head.weight"], job.params["head.bias"]]
        old, methods = ctx.classes - ctx.new_classes, job.methods
        if ctx.step == 0 and ctx.task > 0:
            for before, now in zip(ends[-1], rows, strict=True):
                assert len(now) == ctx.classes and torch.equal(before, now[:old])
            for state in [state for _, state in methods if hasattr(state, "A")]:
                for name, now in zip(("head.weight", "head.bias"), rows, strict=True):
                    assert state.A[name].shape == now.shape and not state.A[name][old:].any() and state.A[name][:old].any()
        seams = {"project_": lambda: rows, "add_grad_": lambda: [row.grad for row in rows]}
        for name, tensors in seams.items() if ctx.task > 0 else ():
            job.methods = [
                (m._replace(**{name: guarded(getattr(m, name), tensors, old, s)}) if getattr(m, name) else m, s)
                for m, s in job.methods
            ]
        train_step(job, batch, ctx, sizes)
        job.methods = methods

    def ended(job):
        ends.append([job.params[name].detach().clone() for name in ("head.weight", "head.bias")])

    job = learn(make_spec(methods), make_stream(), watched, ended)
    acts = any(method.project_ or method.add_grad_ for method, _ in job.methods)
    assert touched == {"new": False, "old": acts}


@every_method
def test_heads_of_tasks_without_rows_stay_bitwise_the_same(methods):
    """Without rows since the task began: those of earlier tasks where nothing is replayed, and each until its first row is.

    Unless an anchor lies elsewhere: `refresh` leaves it behind the weights.
    """
    seen, kept, rested = set(), {}, 0

    def spied(mix):
        def seam(batch, ctx, state):
            batch = mix(batch, ctx, state)
            present = batch.inputs["task"]
            seen.update([present] if isinstance(present, int) else present.tolist())
            return batch

        return seam

    def rests(job, number):
        anchors = [getattr(state, "m", {}) for _, state in job.methods]
        names = {f"head.heads.{number}.{name}": tensor for name, tensor in kept[number].items()}
        return all(torch.equal(m[name], tensor) for m in anchors for name, tensor in names.items() if name in m)

    def watched(job, batch, ctx, sizes):
        nonlocal rested
        if ctx.step == 0:
            seen.clear()
            seen.add(ctx.task)
            kept.update({number: copy.deepcopy(head.state_dict()) for number, head in enumerate(job.model.head.heads)})
        methods = job.methods
        job.methods = [(m._replace(mix=spied(m.mix)) if m.mix else m, s) for m, s in methods]
        train_step(job, batch, ctx, sizes)
        job.methods = methods
        for number, head in enumerate(job.model.head.heads):
            unchanged = same((kept[number], 0), (head.state_dict(), 0))
            if number in seen:
                assert not unchanged
            elif rests(job, number):
                assert unchanged
                rested += 1

    job = learn(make_spec(methods, "task-incremental"), make_stream("task-incremental"), watched)
    if not any(method.mix or method.observe for method, _ in job.methods):
        assert rested == 8 * (0 + 1 + 2)  # steps of a task x heads before its own
