"""EWC against what it stands for: one penalty per task, kept apart, in float64 and by autograd."""

import contextlib
import logging

import pytest
import torch
from torch import nn

from retain.errors import ConfigError
from retain.forgetting import build, quadratic
from retain.forgetting import fisher as information
from retain.forgetting.ewc import _chosen, ewc, penalty, stability_edge
from retain.forgetting.fisher import Fisher, Labels
from retain.memory.optimizer import make_optimizer, step_sizes
from retain.memory.precision import Precision
from retain.params import derive, nbytes, pack, trainable, unpack_
from retain.seams import Batch, StepContext
from retain.spec import EwcSpec, MethodSpec, OptimizerSpec
from retain.step import CLASSIFICATION, Job, train_step

SHAPES = {"large": (3, 40_000), "middle": (150, 300), "small": (7, 5), "bias": (7,), "scalar": ()}
"""More than a block, less than one, in groups, and one number."""
LAMBDA = 40.0


def make(**settings):
    """Unless said otherwise, in the form and the way of adding tasks up that have a closed form."""
    base = {} if {"decay", "refresh"} & settings.keys() else {"tasks": "separate"}
    method = ewc(EwcSpec(**{"form": "implicit", **base, **settings}))
    return method, method.init({})


def make_params(dtype=torch.float32, shapes=SHAPES, seed=0):
    made = torch.Generator().manual_seed(seed)
    params = {name: nn.Parameter(torch.randn(shape, generator=made).to(dtype)) for name, shape in shapes.items()}
    if "middle" in params:  # not contiguous, as with channels_last
        params["middle"] = nn.Parameter(params["middle"].detach().t().contiguous().t())
    return params


def move_(params, seed):
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in params.values():
            param += 0.1 * torch.randn(param.shape, generator=made).to(param.dtype)


def make_fisher(params, seed):
    """Fisher information over five orders of magnitude; a fifth of it zero."""
    made = torch.Generator().manual_seed(seed)
    found = {}
    for name, param in params.items():
        values = torch.exp(torch.randn(param.shape, generator=made, dtype=torch.float64) * 2)
        values *= torch.rand(param.shape, generator=made) > 0.2
        found[name] = values.to(torch.promote_types(param.dtype, torch.float32))
    return found


def context(params, **values):
    return StepContext(nn.Identity(), params, CLASSIFICATION, **values)


def consolidate(method, state, params, fisher, rows=4):
    """As if `rows` rows had been looked at."""
    state.fisher = Fisher({name: values * rows for name, values in fisher.items()}, rows)
    method.consolidate(context(params), state)


def normalized(fisher):
    fisher = {name: values.double() for name, values in fisher.items()}
    mean = sum(v.sum() for v in fisher.values()) / sum(v.numel() for v in fisher.values())
    return {name: values / mean for name, values in fisher.items()}


def double(params):
    return {name: param.detach().double().clone() for name, param in params.items()}


def learned(tasks=3, dtype=torch.float32, shapes=SHAPES, **settings):
    """A method that has learned some tasks, its parameters moved on since, and what was folded in: (F, theta) of each task."""
    method, state = make(**settings)
    params, kept = make_params(dtype, shapes), []
    for task in range(tasks):
        move_(params, task)
        fisher = make_fisher(params, 100 + task)
        kept.append((normalized(fisher), double(params)))
        consolidate(method, state, params, fisher)
    move_(params, 77)
    return method, state, params, kept


def separate_sum(params, kept, strength=LAMBDA):
    """The penalties of all tasks, kept apart; differentiable."""
    terms = [(F[name] * (params[name] - theta[name]) ** 2).sum() for F, theta in kept for name in F]
    return strength / 2 * torch.stack(terms).sum()


# --- what the state stands for ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("tasks", [1, 2, 6])
def test_two_tensors_are_the_sum_over_any_number_of_tasks(tasks, dtype, tolerance):
    _, state, params, kept = learned(tasks, dtype)
    for seed in range(3):  # the whole function, not its value at one place
        move_(params, seed)
        expected = separate_sum(double(params), kept)
        assert abs(penalty(params, state) - expected) <= tolerance * expected
    assert state.tasks == tasks


def test_the_anchor_of_what_does_not_matter_is_the_last_weight():
    _, state, _, kept = learned(3, torch.float64)
    for name, theta in kept[-1][1].items():
        idle = state.A[name] == 0
        assert torch.equal(state.m[name][idle], theta[idle])
    assert (state.A["large"] == 0).any()


def test_a_run_that_goes_online_forgets_the_constant():
    _, state, params, _ = learned(2, torch.float64)
    assert state.constant > 0
    consolidate(ewc(EwcSpec(tasks="online")), state, params, make_fisher(params, 9))
    assert penalty(params, state) == state.constant == 0


def test_a_raw_fisher_is_taken_as_it_is():
    method, state = make(normalize=False)
    params = make_params()
    fisher = make_fisher(params, 1)
    consolidate(method, state, params, fisher)
    assert all(torch.equal(state.A[name], fisher[name]) for name in fisher)


def test_the_mean_is_over_the_parameters_that_took_part():
    """A parameter that the task did not use neither counts nor is it scaled."""
    method, state = make()
    params = make_params(torch.float64)
    used = {name: values for name, values in make_fisher(params, 1).items() if name != "middle"}
    consolidate(method, state, params, used)
    assert "middle" not in state.A
    total, count = sum(A.sum() for A in state.A.values()), sum(A.numel() for A in state.A.values())
    assert total / count == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("moved", [0.5, -2.0])
def test_the_penalty_is_half_lambda_f_d_squared_after_a_move_by_d(moved):
    method, state = make(normalize=False, **{"lambda": 3.0})
    params = make_params(torch.float64)
    fisher = make_fisher(params, 1)
    consolidate(method, state, params, fisher)
    assert penalty(params, state) == 0
    with torch.no_grad():
        for param in params.values():
            param += moved
    expected = 3.0 / 2 * sum(F.sum() for F in fisher.values()) * moved**2
    assert penalty(params, state).item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("decay", [1.0, 0.7])
def test_online_decays_once_per_task_around_the_last_weights(decay):
    method, state = make(tasks="online", decay=decay)
    params, expected = make_params(torch.float64), None
    for task in range(4):
        move_(params, task)
        fisher = make_fisher(params, task)
        consolidate(method, state, params, fisher)
        new = normalized(fisher)
        expected = new if expected is None else {name: decay * expected[name] + new[name] for name in new}
        for name, param in params.items():
            assert torch.allclose(state.A[name], expected[name], rtol=1e-12)
            assert torch.equal(state.m[name], param)
    assert state.constant == 0 and penalty(params, state) == 0


def test_anchors_are_copies():
    """A snapshot that shares memory with the live weights pulls nothing."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for storage in ("device", "host"):
            method, state = make(storage=storage)
            params = make_params(dtype)
            consolidate(method, state, params, make_fisher(params, 0))
            before = {name: m.clone() for name, m in state.m.items()}
            move_(params, 1)
            assert all(torch.equal(state.m[name], before[name]) for name in before)
            assert penalty(params, state) > 0


def test_a_fisher_that_is_zero_everywhere_is_said_and_not_folded(caplog):
    method, state = make()
    params = make_params()
    consolidate(method, state, params, {name: torch.zeros_like(param) for name, param in params.items()})
    assert not state.A and state.tasks == 0 and state.fisher.rows == 0
    assert "zero everywhere, so nothing of it is protected" in caplog.text
    consolidate(method, state, params, {name: torch.full_like(param, 1e-41) for name, param in params.items()})
    assert not state.A, "fp32 cannot scale it to mean 1"


def test_the_last_steps_of_a_task_are_pulled_too():
    """Three of every four steps come after the last pull; what they did would become the anchor."""
    method, state = make(form="proximal", tasks="online", **{"lambda": 1e8})
    params = make_params(shapes={"small": (7, 5)})
    consolidate(method, state, params, make_fisher(params, 1))
    anchor = state.m["small"].clone()
    held = state.A["small"] > 1e-3
    for step in range(6):
        move_(params, step)
        method.project_(params, state, {})
    assert (params["small"] - anchor)[held].abs().max() > 1e-3
    method.end_task(context(params), state)
    assert (params["small"] - anchor)[held].abs().max() < 1e-3
    again = params["small"].detach().clone()
    method.end_task(context(params), state)
    assert torch.equal(params["small"], again), "nothing has moved since"


def test_raw_importance_does_not_join_importance_of_mean_one():
    _, state, params, _ = learned(1, shapes={"small": (7, 5)})
    with pytest.raises(ConfigError, match=r"normalize=False, but this run's .* made with True.*set it back"):
        make(normalize=False)[0].begin_task(context(params), state)


def test_the_state_follows_the_precision_of_the_model():
    method, state, params, _ = learned(1, torch.float32, shapes={"small": (7, 5)})
    finer = {name: nn.Parameter(param.detach().double()) for name, param in params.items()}
    method.begin_task(context(finer), state)
    assert state.m["small"].dtype is state.A["small"].dtype is torch.float64
    before = finer["small"].detach().clone()
    method.project_(finer, state, dict.fromkeys(finer, 0.1))
    none = state.A["small"] == 0
    assert torch.equal(finer["small"][none], before[none])


def test_no_rows_is_an_error():
    method, state = make()
    with pytest.raises(ValueError, match="zero rows"):
        method.consolidate(context(make_params()), state)


# --- the proximal form ------------------------------------------------------------------------------------------------


def steady(every, rounds, push, strength=LAMBDA, importance=(1.0, 4.0, 0.25, 0.0)):
    """Weights of these importances, pushed by `push(step)` in every step; how far they are from their anchors in the end."""
    method, state = make(**{"form": "proximal", "every": every, "lambda": strength})
    params = {"w": nn.Parameter(torch.zeros(len(importance), dtype=torch.float64))}
    fisher = torch.tensor(importance, dtype=torch.float64)
    state.fisher = Fisher({"w": fisher / fisher.mean()}, 1)
    method.consolidate(context(params), state)
    state.A["w"] = fisher
    for step in range(rounds):
        with torch.no_grad():
            params["w"] += push(step)
        method.project_(params, state, {})
    return params["w"].detach(), state


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("size", [1e-3, 1e-2, 1.0])
def test_a_weight_that_is_pushed_one_way_rests_one_lambda_th_of_its_importance_away(every, size):
    """d (1 + a A) = d + every * size with a = lambda * every * size: d = 1 / (lambda A), whatever the size of the steps is."""
    rounds = every * max(400, int(20 / (LAMBDA * size * every)))
    found, _ = steady(every, rounds, lambda step: size)
    assert found[:3].tolist() == pytest.approx([1 / LAMBDA, 1 / LAMBDA / 4, 4 / LAMBDA], rel=0.1)
    assert found[3] == pytest.approx(rounds * size)


def test_the_pull_counts_in_moves_of_the_optimizer():
    """By hand: between two pulls the moves' sizes, their running mean, and the fraction that follows."""
    made = torch.Generator().manual_seed(0)
    moves = torch.randn(12, 4, generator=made, dtype=torch.float64) * torch.tensor([1.0, 0.1, 3.0, 1.0]).double()
    found, state = steady(3, 12, lambda step: moves[step])
    p, A, mean = torch.zeros(4, dtype=torch.float64), torch.tensor([1.0, 4.0, 0.25, 0.0]).double(), 0.0
    for pull in range(4):
        move = moves[3 * pull : 3 * pull + 3].sum(0)
        mean = 0.9 * mean + 0.1 * float(move.abs().mean())
        a = LAMBDA * mean / (1 - 0.9 ** (pull + 1))
        p = (p + move) / (1 + a * A)
    assert torch.allclose(found, p, rtol=1e-5)
    assert state.pace.moves == 4
    assert state.pace.waited == 0


@pytest.mark.parametrize("strength", [0.0, 1e-300, 1e8, 1e300])
def test_the_proximal_form_is_stable_at_any_strength(strength):
    found, _ = steady(1, 50, lambda step: torch.tensor([1.0, -1e-3, 1e3, 1e-6]).double(), strength)
    assert found.isfinite().all()
    if strength >= 1e8:
        assert found[:3].abs().max() < 1e-5
    if strength == 0:
        assert found.tolist() == pytest.approx([50.0, -0.05, 5e4, 5e-5])


def learn_two_tasks(scale, optimizer, strength=LAMBDA, **settings):
    """Two tasks of a small net, its loss multiplied by `scale`; the weights, and how far the second task moved them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    params = trainable(net)
    tasks = [(torch.randn(64, 6), torch.randint(0, 3, (64,))) for _ in range(2)]
    method, state = make(**{"form": "proximal", "lambda": strength, **settings})
    made = optimizer(params.values())
    after = []
    for number, (x, y) in enumerate(tasks):
        ctx = context(params, task=number)._replace(model=net)
        method.begin_task(ctx, state)
        for step in range(60):
            rows = torch.arange(64).roll(7 * step)[:16]
            (scale * nn.functional.cross_entropy(net(x[rows]), y[rows])).backward()
            made.step()
            made.zero_grad()
            method.project_(params, state, dict.fromkeys(params, 1e-2))
        batch = Batch({"input": x}, y)
        method.consolidate_batch(ctx._replace(batch=batch), state)
        method.consolidate(ctx, state)
        after.append(torch.cat([param.detach().flatten() for param in params.values()]))
    return after[1], (after[1] - after[0]).norm()


def test_lambda_acts_alike_when_the_loss_is_multiplied():
    """By ten, under Adam and, with a tenth of the learning rate, under SGD; and more of it keeps more."""

    def adam(params):
        return torch.optim.Adam(params, lr=1e-2, eps=1e-30)

    (one, moved), (ten, _) = learn_two_tasks(1.0, adam), learn_two_tasks(10.0, adam)
    assert (one - ten).norm() < 1e-2 * moved
    (one, moved), (ten, _) = (learn_two_tasks(c, lambda params, c=c: torch.optim.SGD(params, lr=1.0 / c)) for c in (1.0, 10.0))
    assert (one - ten).norm() < 1e-2 * moved
    distances = [learn_two_tasks(1.0, adam, strength)[1] for strength in (0.0, 10.0, 40.0, 100.0)]
    assert distances == sorted(distances, reverse=True)
    assert distances[3] < 0.8 * distances[0]


def test_a_pull_that_is_waited_for_survives_a_file():
    """Between two pulls, with the names in another order afterwards."""
    method, state, params, _ = learned(1, shapes={"b": (5,), "a": (4, 3)}, form="proximal")
    _, again = make(form="proximal")
    move_(params, 1)
    method.project_(params, state, {})
    assert state.pace.waited == 1
    unpack_(again, *pack(state))
    again.A = {name: again.A[name] for name in ("a", "b")}
    twin = {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}
    for step in range(7):
        for each, where in ((params, state), (twin, again)):
            move_(each, step)
            method.project_(each, where, {})
    assert all(torch.equal(params[name], twin[name]) for name in params)
    assert state.pace.moves == again.pace.moves == 2


def test_a_large_model_is_measured_by_a_sample():
    method, state = make(form="proximal", every=1)
    params = {"large": nn.Parameter(torch.zeros(300, 1000)), "small": nn.Parameter(torch.zeros(7))}
    consolidate(method, state, params, {name: torch.ones_like(param) for name, param in params.items()})
    assert 2**12 <= len(state.pace.before) < 2**13
    assert method.nbytes(state) == 8 * 300_007 + 4 * len(state.pace.before)
    with torch.no_grad():
        params["large"] += 0.25
    method.project_(params, state, {})
    assert state.pace.mean == pytest.approx(0.1 * 0.25, rel=1e-2)


# --- the implicit form ------------------------------------------------------------------------------------------------


def pulled(params, state, sizes):
    """The minimum over q of lambda/2 A (q - m)^2 + (q - p)^2 / (2 lr), from the state's own numbers, in float64."""
    found = {}
    for name, param in params.items():
        p, A, m = (tensor.detach().double() for tensor in (param, state.A[name], state.m[name]))
        a = state.strength * sizes[name]
        found[name] = (p + a * A * m) / (1 + a * A)
    return found


@pytest.mark.parametrize(
    ("dtype", "settings", "tolerance"),
    [
        (torch.float64, {}, 1e-12),
        (torch.float32, {}, 1e-6),
        (torch.float32, {"importance_dtype": "bf16"}, 1e-6),
        (torch.float64, {"importance_dtype": "bf16"}, 1e-12),
        (torch.bfloat16, {}, 2**-8),
        (torch.bfloat16, {"importance_dtype": "bf16"}, 2**-8),
    ],
)
def test_the_pull_goes_to_the_minimum(dtype, settings, tolerance):
    method, state, params, _ = learned(dtype=dtype, **settings)
    sizes = {name: 1e-3 * (1 + place) for place, name in enumerate(params)}
    expected = pulled(params, state, sizes)
    method.project_(params, state, sizes)
    for name, param in params.items():
        assert torch.allclose(param.double(), expected[name], rtol=tolerance, atol=tolerance), name


def test_each_optimizer_group_pulls_with_its_own_learning_rate():
    method, state, params, _ = learned()
    before = double(params)
    method.project_(params, state, {name: 0.0 if name in ("small", "large") else 0.1 for name in params})
    assert [name for name in params if torch.equal(params[name].double(), before[name])] == ["large", "small"]


def assert_at(param, anchor, held):
    """To the bit in blocks and groups; as a whole, m - p is rounded in the first step."""
    exact = torch.equal(param[held], anchor.to(param.dtype)[held])
    assert exact or (not param.is_contiguous() and torch.allclose(param[held], anchor.to(param.dtype)[held], atol=5e-7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("strength", [1e8, 1e300, 1e-300, 0.0])
@pytest.mark.parametrize("lr", [0.0, 0.1, 1e30, 1e-300])
def test_the_pull_is_stable_at_any_strength(dtype, strength, lr):
    method, state, params, _ = learned(1, dtype, **{"lambda": strength})
    before = double(params)
    method.project_(params, state, dict.fromkeys(params, lr))
    for name, param in params.items():
        assert param.isfinite().all()
        none = state.A[name] == 0
        assert torch.equal(param[none].double(), before[name][none])
        low, high = torch.stack([before[name], state.m[name].to(param.dtype).double()]).aminmax(dim=0)
        assert ((param >= low - 1e-6) & (param <= high + 1e-6)).all()  # never beyond the anchor
        if strength * lr >= 1e29:
            held = state.A[name] > 1e-2
            assert_at(param, state.m[name], held)
        if strength * lr == 0:
            assert torch.equal(param.double(), before[name])


def test_lambda_1e8_holds_what_matters_and_leaves_the_rest():
    method, state, params, _ = learned(1, **{"lambda": 1e8})
    for _ in range(20):
        move_(params, 5)
        method.project_(params, state, dict.fromkeys(params, 0.1))
    for name, param in params.items():
        held = state.A[name] > 4  # 1/a = 1e-7 is nothing beside these in fp32
        assert_at(param, state.m[name], held)
        assert ((param - state.m[name])[state.A[name] == 0].abs() > 0.1).any() or name in ("scalar", "bias")


def test_weights_at_their_anchor_stay_there_to_the_bit():
    """Rounding the importance must not move the optimum, and neither must the pull itself."""
    for settings in ({}, {"importance_dtype": "bf16"}):
        method, state, params, _ = learned(**settings)
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(state.m[name])
        for _ in range(10):
            method.project_(params, state, dict.fromkeys(params, 0.03))
        assert all(torch.equal(param, state.m[name]) for name, param in params.items())


def test_a_missing_step_size_is_an_error():
    method, state, params, _ = learned()
    with pytest.raises(ValueError, match="no learning rate of bias, large"):
        method.project_(params, state, {})


def test_nothing_happens_before_there_is_something_to_protect():
    for form in ("implicit", "explicit"):
        method, state = make(form=form)
        params = make_params()
        before = double(params)
        for param in params.values():
            param.grad = torch.zeros_like(param)
        if form == "implicit":
            method.project_(params, state, {})
        else:
            method.add_grad_(context(params), state)
        assert all(torch.equal(params[name].double(), before[name]) for name in params)
        assert all(not param.grad.any() for param in params.values())
        assert method.nbytes(state) == 0 and stability_edge(state, {}) == torch.inf


# --- the explicit form ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "settings", "tolerance"),
    [
        (torch.float64, {}, 1e-11),
        (torch.float32, {}, 1e-5),
        (torch.float32, {"importance_dtype": "bf16"}, 1e-2),
        (torch.bfloat16, {}, 0.05),
    ],
)
def test_the_explicit_gradient_is_that_of_the_sum_over_tasks(dtype, settings, tolerance):
    method, state, params, kept = learned(dtype=dtype, form="explicit", **settings)
    leaves = {name: param.detach().double().requires_grad_() for name, param in params.items()}
    expected = dict(zip(leaves, torch.autograd.grad(separate_sum(leaves, kept), list(leaves.values())), strict=True))
    for param in params.values():
        param.grad = torch.ones_like(param)
    method.add_grad_(context(params), state)
    for name, param in params.items():
        scale = expected[name].abs().max()
        assert (param.grad.double() - 1 - expected[name]).abs().max() <= tolerance * scale, name


def test_a_parameter_without_a_gradient_takes_no_part():
    method, state, params, _ = learned(form="explicit")
    method.add_grad_(context(params), state)
    assert all(param.grad is None for param in params.values())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("share", "converges"), [(0.95, True), (1.05, False)])
def test_the_explicit_form_diverges_where_it_is_said_to(share, converges, momentum):
    """Gradient descent on the penalty alone, a quadratic, below and above the edge."""
    method, state, params, _ = learned(1, torch.float64, {"small": (7, 5), "bias": (7,)}, form="explicit")
    optimizer = torch.optim.SGD(
        [{"params": [params["small"]], "lr": 0.1}, {"params": [params["bias"]], "lr": 0.02}], momentum=momentum
    )
    state.strength = share * (1 + momentum) * stability_edge(state, step_sizes(optimizer, params))
    before = penalty(params, state)
    for _ in range(2000):
        for param in params.values():
            param.grad = torch.zeros_like(param)
        method.add_grad_(context(params), state)
        optimizer.step()
    after = penalty(params, state)
    assert (after < 1e-3 * before) if converges else (not after < 1e6 * before)


def test_the_edge_is_said_when_a_task_begins(caplog):
    caplog.set_level(logging.INFO, "retain")
    method, state, params, _ = learned(form="explicit")
    edge = stability_edge(state, dict.fromkeys(params, 0.01))
    top = max(A.max().item() for A in state.A.values())
    assert edge == pytest.approx(2 / (0.01 * top))
    method.begin_task(context(params, step_sizes=dict.fromkeys(params, 0.01)), state)
    assert f"stable for lambda < {edge:.4g}" in caplog.text
    assert ("lies beyond" in caplog.text) == (edge < LAMBDA)
    caplog.clear()
    state.strength = 1.1 * edge
    method.begin_task(context(params, step_sizes=dict.fromkeys(params, 0.01)), state)
    assert f"lambda={state.strength:.4g} lies beyond {edge:.4g}" in caplog.text and "form: proximal" in caplog.text


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tasks", [1, 5, 10])
@pytest.mark.parametrize(("settings", "each"), [({}, 8), ({"importance_dtype": "bf16"}, 6)])
def test_bytes_per_protected_parameter_do_not_grow_with_tasks(tasks, settings, each):
    method, state, _, _ = learned(tasks, shapes={"small": (7, 5), "bias": (7,)}, **settings)
    assert method.nbytes(state) == each * 42
    state.fisher.sums["small"] = torch.zeros(7, 5)
    assert method.nbytes(state) == each * 42 + 4 * 35


class Tied(nn.Module):
    """A frozen layer, and one whose weight is used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.second(self.first(self.frozen(x)).relu())


def test_frozen_parameters_cost_nothing_and_tied_ones_once():
    method, state = make()
    model = Tied()
    params = trainable(model)
    ctx = context(params)._replace(model=model, batch=Batch({"x": torch.randn(6, 4)}, torch.arange(6) % 4))
    method.consolidate_batch(ctx, state)
    assert state.fisher.rows == 6
    method.consolidate(ctx, state)
    assert set(state.A) == set(state.m) == {"first.weight", "first.bias", "second.bias"}
    assert method.nbytes(state) == 8 * nbytes(params.values()) // 4


L = {"0": (2000, 784), "1": (2000,), "2": (2000, 2000), "3": (2000,), "4": (10, 2000), "5": (10,)}
MANY = {str(number): (20_000,) for number in range(280)}


@pytest.mark.parametrize("form", ["implicit", "explicit"])
@pytest.mark.parametrize("shapes", [L, MANY], ids=["few large", "many small"])
def test_a_step_allocates_less_than_a_tenth_of_a_byte_per_parameter(form, shapes):
    """By torch's own record of the allocator; 5.6 million parameters."""
    method, state, params, _ = learned(1, shapes=shapes, form=form)
    for param in params.values():
        param.grad = torch.zeros_like(param)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        if form == "implicit":
            method.project_(params, state, dict.fromkeys(params, 0.1))
        else:
            method.add_grad_(context(params), state)
    live = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert 0 < peak <= 0.1 * sum(param.numel() for param in params.values())


def test_the_host_gives_the_same_result():
    (near, a, ours, _), (far, b, theirs, _) = learned(), learned(storage="host")
    for method, state, params in ((near, a, ours), (far, b, theirs)):
        method.begin_task(context(params), state)
        method.project_(params, state, dict.fromkeys(params, 0.1))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(A.device.type == "cpu" for A in b.A.values())


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["implicit", "explicit"])
@pytest.mark.parametrize("settings", [{}, {"storage": "host"}, {"importance_dtype": "bf16", "storage": "host"}, {"compile": True}])
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_gpu_gives_what_the_cpu_gives(form, settings):
    plain = {key: value for key, value in settings.items() if key == "importance_dtype"}
    found = []
    for device, chosen in (("cpu", plain), ("cuda", settings)):
        method, state = make(form=form, **chosen)
        params = {name: nn.Parameter(param.detach().to(device)) for name, param in make_params().items()}
        for task in range(2):
            fisher = {name: values.to(device) for name, values in make_fisher(params, task).items()}
            consolidate(method, state, params, fisher)
            with torch.no_grad():
                for param in params.values():
                    param.mul_(1.1)
        method.begin_task(context(params), state)
        kept = "cpu" if settings.get("storage") == "host" else device
        assert all(tensor.device.type == kept for tensor in (*state.A.values(), *state.m.values()))
        assert device == kept or all(A.is_pinned() for A in state.A.values())
        for param in params.values():
            param.grad = torch.zeros_like(param)
        if form == "implicit":
            method.project_(params, state, dict.fromkeys(params, 0.1))
        else:
            method.add_grad_(context(params), state)
        values = [param if form == "implicit" else param.grad for param in params.values()]
        found.append(torch.cat([value.detach().flatten().cpu() for value in values] + [penalty(params, state).float()[None]]))
    assert torch.allclose(*found, rtol=1e-4, atol=1e-5)


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(quadratic, "_COMPILED", {})


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own, when inductor loads
@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_compiled_is_the_same_arithmetic_and_another_learning_rate_needs_no_compiler(form, fresh):
    shapes = {**SHAPES, "also large": (90_000,)}
    found = {}
    for compiled in (False, True):
        method, state, params, _ = learned(1, shapes=shapes, form=form, compile=compiled)
        for step in range(3):
            for param in params.values():
                param.grad = torch.ones_like(param)
            with torch._dynamo.config.patch(error_on_recompile=step > 0) if compiled else contextlib.nullcontext():
                state.strength = 40.0 + step
                if form == "implicit":
                    method.project_(params, state, dict.fromkeys(params, 0.1 / (1 + step)))
                else:
                    method.add_grad_(context(params), state)
        found[compiled] = [param.detach() if form == "implicit" else param.grad for param in params.values()]
    assert [function is not None for function in quadratic._COMPILED.values()] == [True]
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(*found.values(), strict=True))


def test_without_a_compiler_the_same_is_done_and_said_once(fresh, monkeypatch, caplog):
    def failing(*args, **kwargs):
        raise RuntimeError("no C++ compiler found\nlong trace")

    monkeypatch.setattr(torch, "compile", failing)
    (plain, a, ours, _), (method, b, theirs, _) = learned(1), learned(1, compile=True)
    for _ in range(3):
        plain.project_(ours, a, dict.fromkeys(ours, 0.1))
        method.project_(theirs, b, dict.fromkeys(theirs, 0.1))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [record.getMessage() for record in caplog.records] == [
        "torch.compile failed, so the penalty runs without it: no C++ compiler found"
    ]


# --- parameters that come, grow and go --------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"importance_dtype": "bf16"}])
def test_new_rows_are_not_protected_and_old_ones_are_as_before(settings):
    method, state, params, _ = learned(2, shapes={"small": (7, 5), "bias": (7,)}, **settings)
    before = {name: (state.A[name].clone(), state.m[name].clone()) for name in params}
    grown = {name: nn.Parameter(torch.cat([param.detach(), torch.randn(3, *param.shape[1:])])) for name, param in params.items()}
    grown["heads.1.weight"] = nn.Parameter(torch.randn(2, 2))
    method.begin_task(context(grown), state)
    assert set(state.A) == {"small", "bias"}
    for name, (A, m) in before.items():
        assert state.A[name].shape == state.m[name].shape == grown[name].shape and state.A[name].dtype == A.dtype
        assert torch.equal(state.A[name][:7], A) and torch.equal(state.m[name][:7], m)
        assert not state.A[name][7:].any() and torch.equal(state.m[name][7:], grown[name][7:])
    there = double(grown)
    method.project_(grown, state, dict.fromkeys(grown, 0.1))
    assert all(torch.equal(grown[name][7:].double(), there[name][7:]) for name in before)
    assert torch.equal(grown["heads.1.weight"].double(), there["heads.1.weight"])


def test_what_does_not_fit_is_an_error_that_names_all_of_it():
    method, state, params, _ = learned(1)
    wrong = {**params, "small": nn.Parameter(torch.zeros(7, 6)), "bias": nn.Parameter(torch.zeros(6))}
    del wrong["scalar"]
    expected = (
        r"small \(7, 5\) \(the model has \(7, 6\)\), bias \(7,\) \(the model has \(6,\)\), scalar \(\) \(the model has none\)"
    )
    for call in (
        lambda: method.begin_task(context(wrong), state),
        lambda: method.project_(wrong, state, dict.fromkeys(params, 0.1)),
        lambda: penalty(wrong, state),
        lambda: consolidate(method, state, wrong, make_fisher(wrong, 0)),
    ):
        with pytest.raises(ValueError, match=expected):
            call()


def test_a_new_lambda_is_followed_and_a_controllers_own_is_kept():
    method, state, params, _ = learned(1)
    state.strength = 7.0
    method.begin_task(context(params), state)
    assert state.strength == 7.0
    ewc(EwcSpec(**{"lambda": 3.0})).begin_task(context(params), state)
    assert state.strength == state.configured == 3.0
    ewc(EwcSpec(importance_dtype="bf16")).begin_task(context(params), state)
    assert all(A.dtype == torch.bfloat16 for A in state.A.values()) and all(m.dtype == torch.float32 for m in state.m.values())


# --- a task, through the training step --------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)

    def forward(self, x):
        return self.layers(x)


def make_job(method=None, state=None, optimizer="SGD(lr=0.05)", dtype=torch.float64, scaler=None):
    model = Net(dtype)
    params = trainable(model)
    made = make_optimizer(OptimizerSpec.model_validate(optimizer), params, "all")
    precision = Precision("test", dtype, contextlib.nullcontext, scaler)
    methods = [] if method is None else [(method, state)]
    return Job(model, params, made, CLASSIFICATION, methods, precision, torch.device("cpu"))


def rows_of(task, count, dtype=torch.float64):
    made = torch.Generator().manual_seed(task)
    x = torch.randn(count, 6, generator=made, dtype=torch.float64)
    return Batch({"x": x.to(dtype)}, torch.randint(3, (count,), generator=made))


def learn(job, method, state, task, rows=64, batch_size=8, steps=None, **values):
    """One pass over a task, and its consolidation."""
    data = rows_of(task, rows, next(iter(job.params.values())).dtype)
    ctx = StepContext(job.model, job.params, CLASSIFICATION, total_rows=rows, key=task, task=task, **values)
    method.begin_task(ctx, state)
    for step, batch in enumerate(data.split([batch_size] * (rows // batch_size))):
        train_step(job, batch, ctx._replace(step=step, rows=step * batch_size), step_sizes(job.optimizer, job.params))
    for position, batch in enumerate(data.split([batch_size] * (rows // batch_size))):
        if method.consolidate_batch:
            method.consolidate_batch(ctx._replace(batch=batch, step=position, rows=position * batch_size), state)
    method.consolidate(ctx, state)


def test_three_tasks_end_with_the_weights_of_a_loop_with_the_penalty_in_its_loss():
    """The explicit form against autograd, with a Fisher information taken row by row and label by label."""
    method, state = make(form="explicit", **{"lambda": 5.0})
    job = make_job(method, state)
    for task in range(3):
        learn(job, method, state, task)
    model, kept = Net(), []
    params = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for task in range(3):
        data = rows_of(task, 64)
        for batch in data.split([8] * 8):
            loss = nn.functional.cross_entropy(model(batch.inputs["x"]), batch.targets)
            if kept:
                loss = loss + separate_sum(params, kept, 5.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        fisher = {name: torch.zeros_like(param) for name, param in params.items()}
        for x in data.inputs["x"]:
            log_p = model(x[None]).log_softmax(-1)[0]
            for label in range(3):
                grads = torch.autograd.grad(log_p[label], list(params.values()), retain_graph=True)
                for name, grad in zip(params, grads, strict=True):
                    fisher[name] += log_p[label].exp().detach() * grad**2
        kept.append((normalized(fisher), double(params)))
    for name, param in params.items():
        assert torch.allclose(job.params[name], param, rtol=1e-9, atol=1e-10), name


@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_the_state_is_fixed_while_a_task_trains(form):
    method, state = make(form=form)
    job = make_job(method, state)
    learn(job, method, state, 0)
    learn(job, method, state, 1)
    before, tree = pack(state)
    for step, batch in enumerate(rows_of(2, 64).split([8] * 8)):
        ctx = StepContext(job.model, job.params, CLASSIFICATION, step=step, rows=8 * step, total_rows=64)
        train_step(job, batch, ctx, step_sizes(job.optimizer, job.params))
        after, again = pack(state)
        assert before.keys() == after.keys() and tree == again
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_lambda_decides_the_weights():
    """A penalty that is quietly off would give the same ones."""
    ends = []
    for strength in (0.0, 1e6):
        method, state = make(**{"lambda": strength})
        job = make_job(method, state)
        for task in range(2):
            learn(job, method, state, task)
        ends.append(torch.cat([param.detach().flatten() for param in job.params.values()]))
    assert (ends[0] - ends[1]).abs().max() > 1e-3


@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_an_overflow_leaves_everything_as_it_is(form):
    """Fused AdamW behind a loss scaler: a skipped step is a step that EWC skips too."""
    method, state = make(form=form)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    job = make_job(method, state, "AdamW(lr=1e-2, fused=True)", torch.float32, scaler)
    learn(job, method, state, 0)
    for step, batch in enumerate(rows_of(1, 48, torch.float32).split([8] * 6)):
        before = double(job.params)
        if step == 3:
            batch.inputs["x"][0, 0] = torch.inf
        ctx = StepContext(job.model, job.params, CLASSIFICATION, step=step)
        result = train_step(job, batch, ctx, step_sizes(job.optimizer, job.params))
        assert result.skipped == (step == 3)
        unchanged = all(torch.equal(job.params[name].double(), before[name]) for name in before)
        assert unchanged == (step == 3)
    assert all(param.isfinite().all() for param in job.params.values())


# --- which rows are looked at -----------------------------------------------------------------------------------------


def looked_at(monkeypatch, fisher=None):
    """What is passed to the Fisher information: row numbers; instead of it, a given one may be added for every row."""
    rows = []

    def add_(total, model, params, batch, labels, **settings):
        rows.extend(batch.meta["row"].tolist())
        total.rows += len(batch)
        for name, values in (fisher or {name: torch.ones_like(param) for name, param in params.items()}).items():
            total.sums[name] = total.sums.get(name, 0) + len(batch) * values

    monkeypatch.setattr(information, "add_", add_)
    return rows


def task_rows(count, task=0):
    batch = rows_of(task, count)
    batch.meta = {"row": torch.arange(count), "list": [torch.full((1,), row) for row in range(count)], "task": task}
    return batch


@pytest.mark.parametrize("batch_size", [1, 7, 32])
@pytest.mark.parametrize("key", [3, 4])
def test_samples_are_drawn_from_the_whole_task_however_it_is_cut(batch_size, key, monkeypatch):
    rows = looked_at(monkeypatch)
    method, state = make(samples=20)
    data, params = task_rows(100), {"w": nn.Parameter(torch.zeros(2))}
    for start in range(0, 100, batch_size):
        batch = data.rows(start, min(100, start + batch_size))
        method.consolidate_batch(context(params, batch=batch, rows=start, total_rows=100, key=key), state)
    chosen = _chosen(100, 20, derive("fisher rows", key))
    assert rows == chosen.nonzero().flatten().tolist()
    assert len(rows) == 20 and rows[:20] != list(range(20)) and max(rows) > 60


def test_every_row_has_the_same_chance():
    drawn = sum(_chosen(50, 10, key).int() for key in range(4000))
    expected = 4000 * 10 / 50
    # 10 of 50 without replacement: the counts' variance is e (1 - 1/5), and their sum is fixed, so 49 degrees of freedom
    assert ((drawn - expected) ** 2 / (expected * 0.8)).sum() < 49 + 5 * (2 * 49) ** 0.5


def test_fewer_rows_than_samples_are_all_looked_at_and_without_a_count_the_first(monkeypatch):
    rows = looked_at(monkeypatch)
    params = {"w": nn.Parameter(torch.zeros(2))}
    method, state = make(samples=500)
    method.consolidate_batch(context(params, batch=task_rows(30), rows=0, total_rows=30), state)
    assert rows == list(range(30))
    rows.clear()
    method, state = make(samples=20)
    data = task_rows(100)
    for start in range(0, 100, 8):
        method.consolidate_batch(context(params, batch=data.rows(start, min(100, start + 8))), state)
    assert rows == list(range(20))


def test_the_fisher_information_is_that_of_the_rows_alone():
    """Not of micro-batches or batches; what is folded is what `fisher` gives for all of the task's rows."""
    folded = []
    for batch_size, limit in ((64, None), (8, 3), (1, None)):
        method, state = make(normalize=False, fisher="sampled")
        job = make_job()
        data = rows_of(0, 64)
        for position, batch in enumerate(data.split([batch_size] * (64 // batch_size))):
            ctx = StepContext(job.model, job.params, CLASSIFICATION, key=5, micro_batch=limit)
            method.consolidate_batch(ctx._replace(batch=batch, step=position, rows=position * batch_size, total_rows=64), state)
        method.consolidate(ctx, state)
        folded.append(state.A)
    expected = Fisher()
    information.add_(expected, job.model, job.params, data, Labels(CLASSIFICATION, "sampled", derive("fisher", 5)))
    for A in folded:
        assert all(torch.allclose(A[name], values / 64, rtol=1e-9) for name, values in expected.sums.items())


# --- refresh ----------------------------------------------------------------------------------------------------------


def refresh_task(method, state, params, rows=160, batch_size=8, task=0, first=0, stop=None, moves=True, end=True):
    data = task_rows(rows, task)
    ctx = context(params, total_rows=rows, key=task, task=task)
    if first == 0:
        method.begin_task(ctx, state)
    steps = rows // batch_size
    for step in range(first, stop or steps):
        batch = data.rows(step * batch_size, (step + 1) * batch_size)
        method.observe(ctx._replace(batch=batch, step=step, rows=step * batch_size), state)
        if moves:
            move_(params, 1000 * task + step)
    if end and stop is None:
        assert method.consolidate_batch is None
        method.consolidate(ctx, state)


@pytest.mark.parametrize("share", [0.25, 0.3, 1.0, 0.01])
def test_refreshing_counts_every_task_once(share, monkeypatch):
    """Parts of a task make up one fold at its end, where its Fisher information is the same throughout."""
    method, state = make(tasks="online", refresh=share)
    params = make_params(torch.float64, {"small": (7, 5), "bias": (7,)})
    expected = {name: torch.zeros_like(param) for name, param in params.items()}
    for task in range(3):
        fisher = make_fisher(params, task)
        looked_at(monkeypatch, fisher)
        refresh_task(method, state, params, task=task)
        expected = {name: expected[name] + F for name, F in normalized(fisher).items()}
        assert all(torch.allclose(state.A[name], expected[name], rtol=1e-9) for name in expected)
        assert state.tasks == task + 1 and (state.folded, state.looked, state.fisher.rows) == (0.0, 0, 0)


@pytest.mark.parametrize("share", [0.25, 0.3, 1.0, 0.01])
def test_refreshing_decays_once_per_task(share, monkeypatch):
    """A second task that brings next to nothing leaves decay times the first one's importance."""
    method, state = make(tasks="online", refresh=share, decay=0.6, normalize=False)
    params = make_params(torch.float64, {"small": (7, 5), "bias": (7,)})
    fisher = make_fisher(params, 0)
    looked_at(monkeypatch, fisher)
    refresh_task(method, state, params)
    before = {name: A.clone() for name, A in state.A.items()}
    looked_at(monkeypatch, {name: 1e-20 * F for name, F in fisher.items()})
    refresh_task(method, state, params, task=1)
    assert all(torch.allclose(state.A[name], 0.6 * before[name], rtol=1e-9, atol=1e-15) for name in before)


def test_refreshed_anchors_are_weighed_means_of_where_the_weights_were(monkeypatch):
    """Against windows kept apart: A = sum_k w_k F_k, m = sum_k w_k F_k theta_k / A; at the task's end m are its weights."""
    method, state = make(tasks="online", refresh=0.25, normalize=False)
    params = make_params(torch.float64, {"small": (7, 5)})
    fishers = [make_fisher(params, k)["small"] for k in range(4)]
    total, weighed = torch.zeros(7, 5, dtype=torch.float64), torch.zeros(7, 5, dtype=torch.float64)
    for window in range(4):
        looked_at(monkeypatch, {"small": fishers[window]})
        refresh_task(method, state, params, first=5 * window, stop=5 * (window + 1))
        if window < 3:  # it is folded where the next one begins, with the weights of that moment
            total += 0.25 * fishers[window]
            weighed += 0.25 * fishers[window] * params["small"].detach()
    held = total > 0
    assert torch.allclose(state.A["small"], total, rtol=1e-12)
    assert torch.allclose(state.m["small"][held], (weighed / total)[held], rtol=1e-12)
    method.consolidate(context(params), state)
    assert torch.allclose(state.A["small"], total + 0.25 * fishers[3], rtol=1e-12)
    assert torch.equal(state.m["small"], params["small"])


def test_short_windows_do_not_put_the_pull_off_for_ever(monkeypatch):
    """Two steps between folds and four between pulls."""
    method, state = make(tasks="online", refresh=0.1, form="proximal", every=4)
    params = make_params(torch.float64, {"small": (7, 5)})
    looked_at(monkeypatch, make_fisher(params, 1))
    refresh_task(method, state, params)
    pulls = []
    for step in range(20):
        refresh_task(method, state, params, task=1, first=step, stop=step + 1)
        method.project_(params, state, {})
        pulls.append(state.pace.waited == 0)
    assert pulls == [False, False, False, True] * 5


@pytest.mark.parametrize("samples", [None, 40, 16])
def test_refresh_looks_at_batches_evenly(samples, monkeypatch):
    rows = looked_at(monkeypatch)
    method, state = make(tasks="online", refresh=0.5, samples=samples)
    refresh_task(method, state, make_params(shapes={"small": (7, 5)}), rows=160)
    assert (samples or 160) <= len(rows) <= (samples or 160) + 8
    half = sum(row < 80 for row in rows)
    assert abs(half - len(rows) / 2) <= 8


def test_refresh_goes_on_from_a_file_in_the_middle_of_a_task():
    """Everything that matters is in the state: another process, another method, the same bits."""
    settings = {"tasks": "online", "refresh": 0.3, "samples": 50, "decay": 0.9}
    for stop in (1, 6, 7, 13, 19):
        ends = []
        for interrupted in (False, True):
            method, state = make(**settings)
            job = make_job()
            refresh_real(method, state, job, 0, 20)
            if interrupted:
                refresh_real(method, state, job, 1, stop)
                tensors, tree = pack(state)
                method, state = make(**settings)
                unpack_(state, tensors, tree)
                refresh_real(method, state, job, 1, 20, first=stop)
            else:
                refresh_real(method, state, job, 1, 20)
            ends.append(pack(state))
        (first, tree), (second, again) = ends
        assert tree == again and all(torch.equal(first[name], second[name]) for name in first)


def refresh_real(method, state, job, task, stop, first=0):
    data = rows_of(task, 160)
    ctx = StepContext(job.model, job.params, CLASSIFICATION, total_rows=160, key=task, task=task)
    for step in range(first, stop):
        batch = data.rows(step * 8, step * 8 + 8)
        method.observe(ctx._replace(batch=batch, step=step, rows=step * 8), state)
        move_(job.params, 1000 * task + step)
    if stop == 20:
        method.consolidate(ctx, state)


def test_a_method_is_made_from_its_name():
    (method,) = build([MethodSpec.model_validate("ewc")])
    assert method.name == "ewc" and method.project_ is not None and method.add_grad_ is None and method.observe is None
    (method,) = build([MethodSpec.model_validate({"ewc": {"form": "explicit", "lambda": 1}})])
    assert method.project_ is None and method.init({}).strength == 1
