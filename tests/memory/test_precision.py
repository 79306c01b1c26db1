import pytest
import torch

from retain.errors import ConfigError
from retain.memory.optimizer import make_optimizer
from retain.memory.precision import load_scaler_, make_precision, scaler_state, step_was_skipped
from retain.spec import OptimizerSpec

CPU = torch.device("cpu")
OVERFLOW_AT = 3
OPTIMIZERS = [
    "AdamW(lr=0.1, fused=True)",
    "AdamW(lr=0.1, fused=False)",
    "SGD(lr=0.1, fused=True)",
    "SGD(lr=0.1, momentum=0.9, fused=True)",
    "SGD(lr=0.1, momentum=0.9, foreach=True)",
]


@pytest.mark.parametrize(
    ("name", "weights", "computes", "scaled"),
    [
        ("fp32", torch.float32, torch.float32, False),
        ("fp64", torch.float64, torch.float64, False),
        ("bf16", torch.bfloat16, torch.bfloat16, False),
        ("amp_bf16", torch.float32, torch.bfloat16, False),
        ("amp_fp16", torch.float32, torch.float16, True),
    ],
)
def test_each_precision_computes_in_its_dtype(name, weights, computes, scaled):
    precision = make_precision(name, CPU)
    assert (precision.name, precision.dtype, precision.scaler is not None) == (name, weights, scaled)
    layer = torch.nn.Linear(2, 2).to(precision.dtype)
    for _ in range(2):  # the region can be opened again and again
        with precision.autocast():
            assert layer(torch.ones(1, 2, dtype=precision.dtype)).dtype == computes


def test_what_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="amp_fp8"):
        make_precision("amp_fp8", CPU)
    with pytest.raises(ConfigError, match="64-bit"):
        make_precision("fp64", torch.device("mps"))


@pytest.mark.parametrize("first", [1, OVERFLOW_AT])
@pytest.mark.parametrize("text", OPTIMIZERS)
def test_an_overflow_is_seen_and_leaves_parameters_and_state_as_they_would_be_without_it(text, first):
    """Steps 1..5 with an overflow in step `first` end like the four other steps alone."""

    def run(steps):
        scaler = make_precision("amp_fp16", CPU).scaler
        params = {"w": torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)), "b": torch.nn.Parameter(torch.ones(3))}
        optimizer = make_optimizer(OptimizerSpec.model_validate(text), params, "matrices")
        seen = []
        for step in steps:
            before = [param.detach().clone() for param in params.values()]
            loss = (params["w"] * step).square().sum() + params["b"].sum()
            scaler.scale(loss * (float("inf") if step == first else 1.0)).backward()
            scaler.unscale_(optimizer)
            early = step_was_skipped(scaler, optimizer)
            scaler.step(optimizer)
            skipped = step_was_skipped(scaler, optimizer)
            scaler.update()
            optimizer.zero_grad()
            same = all(torch.equal(param, old) for param, old in zip(params.values(), before, strict=True))
            assert early == skipped == same
            seen.append(skipped)
        return seen, params

    seen, params = run(range(1, 6))
    assert seen == [step == first for step in range(1, 6)]
    _, reference = run([step for step in range(1, 6) if step != first])
    assert all(torch.equal(params[name], reference[name]) for name in params)


def test_an_overflow_of_one_of_several_gradients_is_enough():
    scaler = make_precision("amp_fp16", CPU).scaler
    one, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [one]}, {"params": [other]}], lr=0.1)
    scaler.scale(one.sum() + other.sum() * float("nan")).backward()
    scaler.unscale_(optimizer)
    assert step_was_skipped(scaler, optimizer)


@pytest.mark.parametrize("used", [False, True])
def test_the_scaler_goes_on_from_its_plain_state(used):
    def step(scaler, factor=1.0):
        param = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([param], lr=0.1)
        scaler.scale(param.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    first = make_precision("amp_fp16", CPU).scaler
    for factor in (1.0, float("inf"), 1.0, 1.0):
        step(first, factor)
    state = scaler_state(first)
    assert all(type(value) in (int, float) for value in state.values())
    assert state["scale"] == 32768.0 and state["_growth_tracker"] == 2
    second = make_precision("amp_fp16", CPU).scaler
    if used:
        step(second)
    load_scaler_(second, state)
    assert scaler_state(second) == state
    step(first)
    step(second)
    assert scaler_state(second) == scaler_state(first)
