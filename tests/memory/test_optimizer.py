import math

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from retain.errors import ConfigError
from retain.memory.optimizer import load_optimizer_, lr_factor, make_optimizer, optimizer_tensors, set_lr_, step_sizes
from retain.models.heads import GrowingHead, grow_
from retain.spec import OPTIMIZERS, OptimizerSpec, ScheduleSpec

VARIANTS = [
    *(f"{name}(lr=0.01)" for name in OPTIMIZERS),
    *(
        f"{name}(lr=0.01, {way}=True{extra})"
        for name, extra in [("Adam", ""), ("AdamW", ""), ("SGD", ", momentum=0.9"), ("Adagrad", "")]
        for way in ("fused", "foreach")
    ),
    "AdamW(lr=0.01, amsgrad=True)",
    "SGD(lr=0.01, momentum=0.9, dampening=0.1)",
    "SGD(lr=0.01, momentum=0.9, nesterov=True, fused=True)",
    "Adagrad(lr=0.01, lr_decay=0.1, initial_accumulator_value=0.5)",
    "RMSprop(lr=0.01, momentum=0.9, centered=True)",
]


def optimizer_of(text, params, decay="matrices"):
    return make_optimizer(OptimizerSpec.model_validate(text), params, decay)


def start():
    values = torch.Generator().manual_seed(0)
    return {
        "body.weight": nn.Parameter(torch.randn(4, 3, generator=values)),
        "body.bias": nn.Parameter(torch.randn(4, generator=values)),
        "scale": nn.Parameter(torch.randn((), generator=values)),
    }


def train(optimizer, params, steps):
    for step in steps:
        values = torch.Generator().manual_seed(step)
        for param in params.values():
            param.grad = torch.randn(param.shape, generator=values)
        optimizer.step()


def copied(params):
    return {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}


# --- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", VARIANTS)
def test_a_step_after_resuming_is_bit_identical(text):
    params = start()
    optimizer = optimizer_of(text, params)
    train(optimizer, params, range(3))

    file = save({name: tensor.contiguous() for name, tensor in optimizer_tensors(optimizer, params).items()})
    again = copied(params)
    resumed = optimizer_of(text, again)
    load_optimizer_(resumed, again, load(file))
    train(optimizer, params, [3, 4])
    train(resumed, again, [3, 4])

    assert all(torch.equal(params[name], again[name]) for name in params)
    mine, theirs = optimizer_tensors(optimizer, params), optimizer_tensors(resumed, again)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype for name in mine)


@pytest.mark.parametrize("text", VARIANTS)
def test_loaded_state_is_a_copy(text):
    params = start()
    optimizer = optimizer_of(text, params)
    train(optimizer, params, range(2))
    tensors = optimizer_tensors(optimizer, params)
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    again = copied(params)
    resumed = optimizer_of(text, again)
    load_optimizer_(resumed, again, tensors)
    train(resumed, again, [2])
    assert all(torch.equal(tensors[name], values[name]) for name in tensors)


@pytest.mark.parametrize("text", VARIANTS)
def test_growth_keeps_old_rows_moments_and_trains_on(text):
    """Rows that were there before take the very steps that they would take in a head that never grew."""
    small, grown = ({"body": nn.Parameter(torch.ones(2)), **dict(head.named_parameters())} for head in (head_of(2), head_of(2)))
    optimizer, other = optimizer_of(text, small), optimizer_of(text, grown)
    train(optimizer, small, range(3))
    train(other, grown, range(3))

    head = head_of(2)
    with torch.no_grad():
        head.weight.copy_(grown["weight"])
        head.bias.copy_(grown["bias"])
    tensors = optimizer_tensors(other, grown)
    grow_(head, 5, key=1)
    grown = {"body": grown["body"], **dict(head.named_parameters())}
    other = optimizer_of(text, grown)
    load_optimizer_(other, grown, tensors)

    after = optimizer_tensors(other, grown)
    assert after.keys() == tensors.keys()
    for name, tensor in tensors.items():
        key = name.rpartition("/")[2]
        if tensor.ndim == 0:
            assert torch.equal(after[name], tensor)
        elif not name.startswith("body"):
            fill = 0.5 if key == "sum" and "0.5" in text else 0.0
            assert torch.equal(after[name][:2], tensor) and bool((after[name][2:] == fill).all())

    for name, param in small.items():
        param.grad = torch.full_like(param, 0.3)
        grown[name].grad = torch.full_like(grown[name], 0.3)
    optimizer.step()
    other.step()
    for name, param in small.items():
        torch.testing.assert_close(grown[name][:2], param, rtol=0, atol=1e-7)
        assert grown[name].isfinite().all()


def head_of(outputs):
    head = GrowingHead(3)
    grow_(head, outputs, key=0)
    return head


@pytest.mark.parametrize("text", VARIANTS)
def test_a_parameter_that_joins_later_starts_as_in_a_new_optimizer(text):
    params = start()
    optimizer = optimizer_of(text, params)
    train(optimizer, params, range(3))
    joined = {**params, "new": nn.Parameter(torch.ones(2, 2))}
    resumed = optimizer_of(text, joined)
    load_optimizer_(resumed, joined, optimizer_tensors(optimizer, params))
    alone = {"new": nn.Parameter(torch.ones(2, 2))}
    fresh = optimizer_of(text, alone)
    for group in (joined, alone):
        for param in group.values():
            param.grad = torch.full_like(param, 0.3)
    resumed.step()
    fresh.step()
    assert torch.equal(joined["new"], alone["new"])


def test_state_keeps_a_dtype_that_differs_from_the_parameter():
    params = start()
    optimizer = optimizer_of("AdamW", params)
    train(optimizer, params, range(2))
    tensors = {k: t.bfloat16() if k.endswith("exp_avg_sq") else t for k, t in optimizer_tensors(optimizer, params).items()}
    again = copied(params)
    resumed = optimizer_of("AdamW", again)
    load_optimizer_(resumed, again, tensors)
    after = optimizer_tensors(resumed, again)
    assert {name: t.dtype for name, t in after.items()} == {name: t.dtype for name, t in tensors.items()}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("AdamW(lr=0.01)", "AdamW(lr=0.01, amsgrad=True)"),
        ("AdamW(lr=0.01, fused=True)", "AdamW(lr=0.01, foreach=True)"),
        ("AdamW(lr=0.01)", "AdamW(lr=0.02, fused=True, weight_decay=0)"),
        ("RMSprop(lr=0.01)", "RMSprop(lr=0.01, momentum=0.9, centered=True)"),
        ("SGD(lr=0.01)", "SGD(lr=0.01, momentum=0.9)"),
        ("SGD(lr=0.01, momentum=0.9)", "SGD(lr=0.01)"),
    ],
)
def test_options_of_the_same_optimizer_may_change_between_tasks(before, after):
    params = start()
    optimizer = optimizer_of(before, params)
    train(optimizer, params, range(2))
    changed = optimizer_of(after, params)
    load_optimizer_(changed, params, optimizer_tensors(optimizer, params))
    train(changed, params, [2])
    assert all(param.isfinite().all() for param in params.values())


def test_state_without_a_parameter_is_an_error_that_names_it():
    params = start()
    optimizer = optimizer_of("Adam", params)
    train(optimizer, params, range(1))
    tensors = optimizer_tensors(optimizer, params)
    fewer = {"scale": params["scale"]}
    with pytest.raises(ValueError, match=r"body\.bias, body\.weight"):
        load_optimizer_(optimizer_of("Adam", fewer), fewer, tensors)
    with pytest.raises(ValueError, match="2 parameters not given here"):
        optimizer_tensors(optimizer, fewer)
    wrong = {**params, "body.weight": nn.Parameter(torch.ones(4, 2))}
    with pytest.raises(ValueError, match="does not fit"):
        load_optimizer_(optimizer_of("Adam", wrong), wrong, tensors)


def test_plain_numbers_become_tensors():
    params = start()
    optimizer = optimizer_of("SGD", params)
    optimizer.state[params["scale"]].update(step=3, nothing=None)
    tensors = optimizer_tensors(optimizer, params)
    assert tensors.keys() == {"scale/step"} and tensors["scale/step"].shape == () and int(tensors["scale/step"]) == 3


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "decay", "groups"),
    [
        ("AdamW", "matrices", {"body.weight": 0.01, "body.bias": 0.0, "scale": 0.0}),
        ("AdamW(weight_decay=0.2)", "all", {"body.weight": 0.2, "body.bias": 0.2, "scale": 0.2}),
        ("AdamW(weight_decay=0)", "matrices", {"body.weight": 0.0, "body.bias": 0.0, "scale": 0.0}),
        ("SGD", "matrices", {"body.weight": 0.0, "body.bias": 0.0, "scale": 0.0}),
        ("SGD(weight_decay=0.1)", "matrices", {"body.weight": 0.1, "body.bias": 0.0, "scale": 0.0}),
    ],
)
def test_decay_acts_on_matrices_or_on_all(text, decay, groups):
    params = start()
    optimizer = optimizer_of(text, params, decay)
    found = {id(param): group["weight_decay"] for group in optimizer.param_groups for param in group["params"]}
    assert {name: found[id(param)] for name, param in params.items()} == groups
    assert len(optimizer.param_groups) == len(set(groups.values()))


def test_no_group_is_empty_unless_there_are_no_parameters():
    params = {"bias": nn.Parameter(torch.ones(2))}
    assert [group["weight_decay"] for group in optimizer_of("AdamW", params).param_groups] == [0.0]
    assert [group["params"] for group in optimizer_of("AdamW", {}).param_groups] == [[]]


def test_arguments_reach_the_optimizer():
    optimizer = optimizer_of("AdamW(lr=0.5, betas=(0.8, 0.9), eps=1e-6)", start())
    group = optimizer.param_groups[0]
    assert type(optimizer) is torch.optim.AdamW
    assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.8, 0.9), 1e-6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("AdamW(fused=True, foreach=True)", "cannot be `True` together"),
        ("SGD(momentum=0.9, dampening=0.1, nesterov=True)", "dampening"),
        ("SGD(momentum=0.9, dampening=0.1, fused=True)", "not both"),
    ],
)
def test_arguments_that_do_not_go_together_are_a_config_error(text, said):
    with pytest.raises(ConfigError, match=said):
        optimizer_of(text, start())


# --- learning rate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "steps"), [(0.0, 10), (0.2, 10), (0.25, 10), (0.05, 100), (0.0, 1), (0.9, 1)])
def test_the_schedule_has_its_closed_form(name, warmup, steps):
    schedule = ScheduleSpec(name=name, warmup=warmup)
    length = warmup * steps
    for step in range(steps + 3):
        done = min((step - length) / (steps - length), 1)
        shape = {"constant": 1.0, "linear": 1 - done, "cosine": math.cos(math.pi * done / 2) ** 2}[name]
        expected = min((step + 1) / length, 1) if step < length else shape
        assert lr_factor(schedule, step, steps) == pytest.approx(expected, abs=1e-12)
    assert 0 < lr_factor(schedule, 0, steps) <= 1
    assert lr_factor(schedule, steps, steps) == pytest.approx(float(name == "constant"), abs=1e-12)


def test_set_lr_multiplies_the_base_rate_of_each_group():
    params = start()
    optimizer = optimizer_of("AdamW(lr=0.5)", params)
    optimizer.param_groups[1]["lr"] = optimizer.param_groups[1]["initial_lr"] = 0.25
    for factor in (0.5, 0.1, 0.1, 1.0):
        set_lr_(optimizer, factor)
        assert step_sizes(optimizer, params) == {
            "body.weight": 0.5 * factor,
            "body.bias": 0.25 * factor,
            "scale": 0.25 * factor,
        }
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.5, 0.25]


def test_set_lr_takes_an_optimizer_made_elsewhere_and_writes_only_changes():
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam(start().values(), lr=rate, foreach=False)
    set_lr_(optimizer, 1.0)
    assert optimizer.param_groups[0]["lr"] is rate
