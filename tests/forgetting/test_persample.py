"""Models that a watch over torch's calls could misread: each gets what a loop over single rows gives, or an error that says why."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from retain.forgetting.fisher import Fisher, Labels, add_, fisher_diagonal, mean
from retain.params import trainable
from retain.seams import Batch
from retain.step import CLASSIFICATION
from tests.forgetting.test_fisher import one_by_one


class Model(nn.Module):
    """Two linear layers a and h, an embedding e, and a forward function of one's own."""

    def __init__(self, forward) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.h, self.e = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3), nn.Embedding(6, 4)
        self.norm, self.lstm = nn.LayerNorm(4), nn.LSTM(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.other = forward

    def forward(self, x):
        return self.other(self, x)


def second_use_is_not_in_the_logits(s, x):
    x = s.a(x).tanh()
    s.aux = s.a(x)
    return s.h(x)


def second_use_without_gradient(s, x):
    x = s.a(x)
    with torch.no_grad():
        gate = s.a(x)
    return s.h(x * torch.sigmoid(gate))


def shared_norm_over_what_is_not_used(s, x):
    first = s.norm(s.a(x))
    last = s.norm(s.b(first))
    s.kept = [first, last]
    return s.h(last)


def one_position_for_all(s, x):
    return s.h(x + s.e(torch.tensor([1])))


def first_copy_only(s, x):
    return s.h(x + s.e(torch.tensor([[1]]))[0])


def mean_over_positions(s, x):
    return s.h(x * s.e(torch.tensor([2])).mean(0))


def less_the_first_row(s, x):
    return s.h(s.a(x) - s.a(x)[:1])


def cumulated(s, x):
    return s.h(s.a(x).cumsum(0))


def hooked(s, x):
    y = s.a(x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 0.5)
        y.retain_grad()
    return s.h(y)


def recomputed(s, x):
    return s.h(checkpoint(lambda x: s.a(x).tanh(), x, use_reentrant=False))


def energy(s, x):
    x = x.detach().requires_grad_()
    return s.h(torch.autograd.grad(s.a(x).tanh().sum(), x, create_graph=True)[0])


def mapped(s, x):
    return torch.vmap(s.h)(s.a(x))


def sliced_without_gradient(s, x):
    with torch.no_grad():
        w = s.a.weight[:3]
    return F.linear(s.b(x), w)


def bias_in_place(s, x):
    x = x.clone()
    x += F.linear(x, s.a.weight.detach(), s.a.bias)
    return s.h(x)


def experts(s, x):
    out = torch.zeros_like(x)
    for number, expert in enumerate((s.a, s.b)):
        chosen = (x[:, 0] > 0) == bool(number)
        out[chosen] = expert(x[chosen])
    return s.h(out)


def sorted_rows(s, x):
    order = x[:, 0].argsort()
    y = s.a(s.a(x)[order])
    return s.h(y[order.argsort()])


def transposed(s, x):
    return s.h(F.linear(s.a(x), s.a.weight.T))


def one_dimensional_weight(s, x):
    return s.h(x) + F.linear(x, s.a.weight[0])[:, None]


FORWARDS = [
    second_use_is_not_in_the_logits,
    second_use_without_gradient,
    shared_norm_over_what_is_not_used,
    one_position_for_all,
    first_copy_only,
    mean_over_positions,
    hooked,
    recomputed,
    energy,
    mapped,
    sliced_without_gradient,
    bias_in_place,
    experts,
    sorted_rows,
    transposed,
    one_dimensional_weight,
    less_the_first_row,
    cumulated,
]


def assert_same(model, batches, estimator="exact"):
    found = fisher_diagonal(model, batches, CLASSIFICATION, estimator=estimator)
    rows = sum(len(batch) for batch in batches)
    expected: dict = {}
    for batch in batches:
        for name, value in one_by_one(model, batch, estimator).items():
            expected[name] = expected.get(name, 0) + value * len(batch) / rows
    for name, value in expected.items():
        torch.testing.assert_close(found.get(name, torch.zeros_like(value)), value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda function: function.__name__)
def test_unusual_models(forward):
    torch.manual_seed(0)
    x = torch.randn(11, 4)
    batches = [Batch({"x": part}, torch.randint(0, 3, (len(part),))) for part in x.split([5, 4, 2])]
    assert_same(Model(forward), batches)


def flattened(s, x):
    """[rows, tokens, 4] as [rows * tokens, 4]."""
    return s.h(s.a(x.reshape(-1, 4)).view(x.shape).mean(1))


def flattened_tokens_first(s, x):
    return s.h(s.a(x.transpose(0, 1).reshape(-1, 4)).view(x.shape[1], x.shape[0], 4).mean(0))


def only_tokens_that_count(s, x):
    """Rows of as many tokens as have a positive first element, one at least."""
    counts = x[..., 0] > 0
    counts[:, 0] = True
    y = torch.zeros_like(x)
    y[counts] = s.a(x[counts])
    return s.h(y.sum(1))


def tokens_first(s, x):
    """Recurrent layers that take [tokens, rows, 4]; given rows first, they mix the rows."""
    return s.h(s.lstm(x)[0][:, -1])


@pytest.mark.parametrize(
    "forward", [flattened, flattened_tokens_first, only_tokens_that_count, tokens_first], ids=lambda function: function.__name__
)
@pytest.mark.parametrize("tokens", [(1, 3, 2), (3, 1, 4), (2, 2, 2)])
def test_rows_with_a_changing_number_of_tokens(forward, tokens):
    torch.manual_seed(0)
    batches = [
        Batch({"x": torch.randn(rows, count, 4)}, torch.randint(0, 3, (rows,)))
        for rows, count in zip((4, 5, 3), tokens, strict=True)
    ]
    assert_same(Model(forward), batches)


def test_equal_rows_do_not_hide_that_one_depends_on_another():
    """The first two rows are the same; less the mean of the batch they are zero, and so they are alone."""
    x = torch.randn(6, 4)
    x[1] = x[0]
    assert_same(Model(lambda s, x: s.h(s.a(x - x.mean(0)))), [Batch({"x": x}, torch.tensor([0, 1, 2, 0, 1, 2]))])


def test_gradients_that_a_hook_of_the_parameter_changes():
    model = Model(lambda s, x: s.h(s.a(x)))
    model.a.weight.register_hook(lambda grad: grad * (torch.arange(4) > 1))
    assert_same(model, [Batch({"x": torch.randn(6, 4)}, torch.tensor([0, 1, 2, 0, 1, 2]))])


def test_sparse_gradients():
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.h = nn.EmbeddingBag(9, 4, sparse=True, mode="sum"), nn.Linear(4, 3)

        def forward(self, x):
            return self.h(self.bag(x))

    assert_same(Bag(), [Batch({"x": torch.randint(0, 9, (5, 3))}, torch.tensor([0, 1, 2, 0, 1]))])


def test_one_class_says_nothing_and_is_no_error():
    model = nn.Linear(3, 1)
    batch = Batch({"input": torch.randn(4, 3)}, torch.zeros(4, dtype=torch.int64))
    for size in (1, 4):
        found = fisher_diagonal(model, [batch.rows(k, k + size) for k in range(0, 4, size)], CLASSIFICATION)
        assert not any(value.any() for value in found.values())


@pytest.mark.parametrize("margin", [60.0, 90.0, 97.0, 200.0])
@pytest.mark.parametrize("estimator", ["exact", "empirical", "sampled"])
def test_rows_that_the_model_is_certain_of(margin, estimator):
    """Gradients down to the smallest numbers that there are."""
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[margin], [0.0]]))
    found = fisher_diagonal(
        model, [Batch({"input": torch.ones(4, 1)}, torch.zeros(4, dtype=torch.int64))], CLASSIFICATION, estimator=estimator
    )
    assert found["weight"].isfinite().all()


def test_items_that_count_for_nothing_in_one_dimension():
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    y = torch.tensor([0, -100, 2, -100, 1])
    some, kept = Batch({"input": x}, y), Batch({"input": x[y >= 0]}, y[y >= 0])
    found = fisher_diagonal(model, [some], CLASSIFICATION, estimator="empirical")
    expected = fisher_diagonal(model, [kept], CLASSIFICATION, estimator="empirical")
    torch.testing.assert_close(found["weight"] * 5, expected["weight"] * 3)


def test_buffers_that_forward_replaces_come_back():
    def counting(s, x):
        s.count = s.count + 1
        return s.h(x)

    model = Model(counting)
    before = model.count
    fisher_diagonal(model, [Batch({"x": torch.randn(4, 4)}, torch.zeros(4, dtype=torch.int64))], CLASSIFICATION)
    assert model.count is before
    assert model.count == 0


def test_a_model_that_changes_its_inputs_is_refused():
    model = Model(lambda s, x: s.h(x.mul_(2)))
    with pytest.raises(ValueError, match="changes its inputs in place"):
        fisher_diagonal(model, [Batch({"x": torch.randn(4, 4)}, torch.zeros(4, dtype=torch.int64))], CLASSIFICATION)


def test_complex_parameters_are_refused():
    model = Model(lambda s, x: s.h(x))
    model.z = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="z is complex"):
        add_(
            Fisher(),
            model,
            trainable(model),
            Batch({"x": torch.randn(2, 4)}, torch.zeros(2, dtype=torch.int64)),
            Labels(CLASSIFICATION),
        )


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own, when it compiles
def test_a_compiled_model_is_looked_at_as_it_was():
    model = Model(lambda s, x: s.h(s.a(x).tanh()))
    batch = Batch({"x": torch.randn(6, 4)}, torch.tensor([0, 1, 2, 0, 1, 2]))
    found = Fisher()
    add_(found, torch.compile(model), trainable(model), batch, Labels(CLASSIFICATION))
    for name, value in one_by_one(model, batch, "exact").items():
        torch.testing.assert_close(mean(found).get(name, torch.zeros_like(value)), value, rtol=1e-4, atol=1e-8)
