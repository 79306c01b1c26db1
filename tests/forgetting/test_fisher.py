"""Fisher information against closed forms and against a loop over single rows."""

from __future__ import annotations

import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from retain.forgetting import fisher as module
from retain.forgetting.fisher import Fisher, Labels, add_, evaluating, fisher_diagonal, label_gradients, mean, softmax_factor
from retain.params import pack, trainable, unpack_
from retain.seams import Batch, Objective
from retain.step import CLASSIFICATION
from tests.kit import allocator_peak

# --- models -----------------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """Embeddings of tokens and places, a layer used twice, scales, a norm, and an output layer that is the embedding."""

    def __init__(self, places: str) -> None:
        super().__init__()
        self.words, self.places, self.shape = nn.Embedding(11, 6, padding_idx=0), nn.Embedding(7, 6), places
        self.twice, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.scale, self.shift = nn.Parameter(torch.rand(6) + 0.5), nn.Parameter(torch.randn(1, 7, 6))

    def forward(self, x):
        places = torch.arange(7)[None] if self.shape == "[1, tokens]" else torch.arange(7)
        placed = self.places(places)[None] if self.shape == "[tokens][None]" else self.places(places)
        h = (self.words(x) + placed) * self.scale + self.shift
        h = self.norm(torch.tanh(self.twice(torch.tanh(self.twice(h)))))
        return F.linear(h.mean(1), self.words.weight)


class Encoder(nn.Module):
    """A transformer encoder with a class token, rows first or tokens first inside."""

    def __init__(self, rows_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=rows_first, norm_first=rows_first)
        self.layers, self.rows_first = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), rows_first
        self.token, self.head = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 3)

    def forward(self, x):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return self.head(self.layers(x)[:, 0] if self.rows_first else self.layers(x.transpose(0, 1))[0])


class Products(nn.Module):
    """Weights in the other orientation, tokens flattened into rows, a weight of which only a part is used, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b, self.v = (nn.Parameter(torch.randn(*shape)) for shape in ((5, 4), (4,), (4, 6)))
        self.norm, self.temperature = nn.RMSNorm(4), nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        h = torch.addmm(self.b, x.reshape(-1, 5), self.w).view(*x.shape[:2], 4)
        h = F.linear(torch.tanh(self.norm(h) @ self.v), self.v[:3])
        return h.mean(1) * self.temperature


class Cross(nn.Module):
    """Attention from a few tokens to all: its packed weight is used in parts, and transposed elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(6, 2, batch_first=True), nn.Parameter(torch.randn(5, 6))

    def forward(self, x):
        return (self.attention(x[:, :2], x, x, need_weights=False)[0] @ self.out.T).mean(1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 5, num_layers=2, batch_first=True, dropout=0.5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same", padding_mode="circular"),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, (2, 3), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2, bias=False),
        nn.GroupNorm(2, 4),
        nn.Dropout(0.5),
        nn.Conv2d(4, 3, 5, padding="same", dilation=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(3, 3),
    )


def cnn1d():
    layers = nn.Conv1d(2, 4, 3, padding=1, stride=2), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 3, groups=4, padding="valid")
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 3))


def coupled():
    """BatchNorm without running statistics: what it makes of a row depends on the others."""
    return nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3, track_running_stats=False), nn.Flatten(), nn.Linear(12, 3))


MODELS = {
    "MLP": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Dropout(0.4), nn.Linear(8, 4)), (5,)),
    "CNN with BatchNorm": (cnn, (2, 8, 9)),
    "CNN in one dimension": (cnn1d, (2, 10)),
    "transformer, rows first": (lambda: Encoder(True), (5, 8)),
    "transformer, tokens first": (lambda: Encoder(False), (5, 8)),
    "transformer of two tokens": (lambda: Encoder(False), (1, 8)),
    "tied and reused, places [1, tokens]": (lambda: Words("[1, tokens]"), "tokens"),
    "tied and reused, places [tokens]": (lambda: Words("[tokens]"), "tokens"),
    "tied and reused, places [tokens][None]": (lambda: Words("[tokens][None]"), "tokens"),
    "cross-attention": (Cross, (5, 6)),
    "products": (Products, (6, 5)),
    "recurrent": (Recurrent, (4, 3)),
    "rows coupled": (coupled, (2, 5)),
}
ROW_BY_ROW = {
    "recurrent": ["lstm"],
    "rows coupled": ["0", "1", "3"],
    "products": ["v"],
    "tied and reused, places [tokens][None]": ["places"],
}

every_model = pytest.mark.parametrize("name", MODELS)


def make(name: str, rows: int = 13):
    torch.manual_seed(3)
    factory, shape = MODELS[name]
    model = factory()
    x = torch.randint(0, 11, (rows, 7)) if shape == "tokens" else torch.randn(rows, *shape)
    for part in model.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats:
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    classes = model.eval()(x).shape[1]
    model.train()
    return model, Batch({"input" if isinstance(model, nn.Sequential) else "x": x}, torch.randint(0, classes, (rows,)))


def one_by_one(model, batch, estimator, losses=CLASSIFICATION.losses):
    """The definition: for every row by itself, every label's gradient, squared, times the label's probability."""
    params = trainable(model.eval())
    sums = {name: torch.zeros_like(param) for name, param in params.items()}
    for row in range(len(batch)):
        one = batch.rows(row, row + 1)
        logits = model(**one.inputs)
        for label, chance in enumerate(logits.detach().softmax(1)[0]):
            if estimator == "empirical":
                chance = float(label == one.targets[0])
            loss = losses(logits, Batch(one.inputs, torch.tensor([label]))).sum()
            grads = torch.autograd.grad(loss, list(params.values()), retain_graph=True, allow_unused=True)
            for name, grad in zip(params, grads, strict=True):
                if grad is not None:
                    sums[name] += grad**2 * chance
    return {name: value / len(batch) for name, value in sums.items()}


def cut(batch, size):
    return [batch.rows(start, min(len(batch), start + size)) for start in range(0, len(batch), size)]


# --- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("estimator", ["exact", "empirical", "sampled"])
def test_closed_form_of_a_linear_softmax_model(estimator, size):
    """Rows of the weight: E (p - e_y)_c^2 x_j^2, which over all labels is p_c (1 - p_c) x_j^2."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(6, 5), torch.randn(64, 6), torch.randint(0, 5, (64,))
    p = model(x).detach().softmax(1)
    if estimator == "exact":
        factor = p * (1 - p)
    else:
        labels = y if estimator == "empirical" else module._drawn(p, y, module.derive("labels", 0), 0)
        factor = (p - F.one_hot(labels, 5)) ** 2
    found = fisher_diagonal(model, cut(Batch({"input": x}, y), size), CLASSIFICATION, estimator=estimator)
    expected = {"weight": (factor[:, :, None] * x[:, None, :] ** 2).mean(0), "bias": factor.mean(0)}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-9)


@every_model
@pytest.mark.parametrize("estimator", ["exact", "empirical"])
@pytest.mark.parametrize("size", [1, 4, 13])
def test_a_loop_over_single_rows_gives_the_same(name, estimator, size, caplog):
    model, batch = make(name)
    model = model.double()
    batch = Batch(batch.inputs_as(torch.float64), batch.targets)
    expected = one_by_one(model, batch, estimator)
    with caplog.at_level(logging.INFO, "retain"):
        found = fisher_diagonal(model, cut(batch, size), CLASSIFICATION, estimator=estimator)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-14)
    if size > 1:  # the slow way is taken by those that need it, and is said
        said = " ".join(caplog.messages)
        slow = ROW_BY_ROW.get(name, [])
        if name == "rows coupled":
            assert "every row takes a pass of its own" in said
        else:
            named = re.search("pass of its own for (.*), used", said)
            assert {key.split(".")[0] for key in (named[1].split(", ") if named else [])} == set(slow)


@every_model
def test_fp32_agrees_to_1e_5(name):
    model, batch = make(name)
    expected = one_by_one(model, batch, "exact")
    found = fisher_diagonal(model, cut(batch, 7), CLASSIFICATION)
    for key, value in expected.items():
        assert (found[key] - value).abs().max() <= 1e-5 * value.abs().max() + 1e-13, key


def test_labels_of_an_objective_without_a_closed_form():
    """Label smoothing: the expectation is over the model's labels, the gradient is the objective's."""

    def losses(outputs, batch):
        return F.cross_entropy(outputs, batch.targets, reduction="none", label_smoothing=0.2)

    model, batch = make("MLP")
    for estimator in ("exact", "empirical"):
        expected = one_by_one(model, batch, estimator, losses)
        found = fisher_diagonal(model, [batch], Objective(losses), estimator=estimator)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-9)


def test_tokens_are_summed_before_they_are_squared():
    """The gradient of a row is that of the sum of its tokens' losses; tokens marked -100 count for nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5))
    x, y = torch.randint(0, 9, (6, 4)), torch.randint(0, 5, (6, 4))
    y[:, 3] = -100

    def losses(outputs, batch):
        return F.cross_entropy(outputs.transpose(1, 2), batch.targets, reduction="none")

    for objective in (Objective(losses), Objective(losses, categorical=True)):
        found = fisher_diagonal(model, [Batch({"input": x}, y)], objective, estimator="empirical")
        sums = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
        for row in range(6):
            model.zero_grad()
            losses(model(x[row : row + 1]), Batch({}, y[row : row + 1])).sum().backward()
            for name, param in model.named_parameters():
                sums[name] += param.grad**2 / 6
        for name, value in sums.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-9)
        model.zero_grad()
    drawn = label_gradients(model(x), Batch({"input": x}, y), Labels(Objective(losses, True)))  # auto: sampled
    assert drawn.shape == (1, 6, 4, 5)
    assert drawn[0, :, 3].eq(0).all()
    assert drawn[0, :, :3].abs().sum(-1).gt(0).all()


def test_drawn_labels_follow_the_model_and_depend_on_the_row_alone():
    p = torch.tensor([0.5, 0.0, 0.2, 0.3]).expand(20000, 4)
    y = torch.zeros(20000, dtype=torch.int64)
    counts = torch.bincount(module._drawn(p, y, 7, 0), minlength=4)
    expected = 20000 * p[0]
    assert counts[1] == 0
    assert ((counts - expected) ** 2 / expected)[[0, 2, 3]].sum() < 13.8  # chi-square, 2 degrees of freedom, p = 0.001
    whole = module._drawn(p, y, 7, 0)
    assert torch.equal(module._drawn(p[5:50], y[5:50], 7, 5), whole[5:50])
    assert not torch.equal(module._drawn(p, y, 8, 0), whole)


@pytest.mark.parametrize("logits", [[0.0, 0.0], [1.0, 2.0, 3.0], [90.0, -90.0, 0.0, 89.0], [0.0] * 100, [-200.0, 200.0, 0.0]])
def test_the_factor_of_the_softmax(logits):
    p = torch.tensor([logits]).softmax(1)
    factor = softmax_factor(p)
    assert factor.shape == (len(logits) - 1, 1, len(logits))
    product = torch.einsum("kri,krj->rij", factor, factor)[0]
    torch.testing.assert_close(product, torch.diag(p[0]) - torch.outer(p[0], p[0]), rtol=1e-5, atol=1e-7)


# --- scale and precision ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["exact", "empirical", "sampled"])
@pytest.mark.parametrize("exponent", [-20, -7, 3, 20])
@pytest.mark.parametrize("name", ["MLP", "transformer, rows first", "recurrent"])
def test_a_loss_times_c_gives_exactly_c_squared(name, exponent, estimator):
    model, batch = make(name)
    c = 2.0**exponent

    def scaled(outputs, batch):
        return c * CLASSIFICATION.losses(outputs, batch)

    plain = fisher_diagonal(model, [batch], Objective(CLASSIFICATION.losses), estimator=estimator)
    times = fisher_diagonal(model, [batch], Objective(scaled), estimator=estimator)
    for key, value in plain.items():
        assert torch.equal(times[key], value * c * c), key


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_neither_vanishes_nor_overflows(dtype):
    """Gradients of 1e-7 have squares of 1e-14, which fp16 cannot hold; those of a huge weight overflow on their way back."""
    batch = Batch({"input": torch.randn(64, 20)}, torch.randint(0, 4, (64,)))

    def tiny(outputs, batch):
        return 1e-7 * CLASSIFICATION.losses(outputs, batch)

    for objective in (Objective(tiny), CLASSIFICATION):
        for factor in (1.0, 3e3):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
            with torch.no_grad():
                model[2].weight *= factor
                model[0].weight /= factor
            expected = fisher_diagonal(model, [batch], objective, estimator="empirical")
            fisher = Fisher()
            labels = Labels(objective, "empirical")
            add_(fisher, model, trainable(model), batch, labels, autocast=lambda: torch.autocast("cpu", dtype))
            for key, value in mean(fisher).items():
                assert value.dtype is torch.float32
                assert (value - expected[key]).abs().max() <= 0.05 * expected[key].max(), key
                assert value.eq(0).sum() <= expected[key].eq(0).sum() + value.numel() * 0.02, key


def test_what_overflows_in_fp16_is_added_once(monkeypatch):
    """The layers behind the overflow have been added when it is seen: the second try adds the others only."""
    monkeypatch.setattr(module, "HALF_PRECISION_TOP", 12)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    with torch.no_grad():
        model[1].weight *= 1000
        model[0].weight /= 1000
        model[0].bias /= 1000
    batch = Batch({"input": torch.randn(32, 6)}, torch.randint(0, 4, (32,)))
    fisher = Fisher()
    tries = []
    real = module.Watch.backward

    def backward(self, *args, **kwargs):
        tries.append(real(self, *args, **kwargs))
        return tries[-1]

    monkeypatch.setattr(module.Watch, "backward", backward)
    add_(fisher, model, trainable(model), batch, Labels(CLASSIFICATION), autocast=lambda: torch.autocast("cpu", torch.float16))
    assert any({region.name for region in each} == {"0.weight", "0.bias"} for each in tries), tries
    for key, value in one_by_one(model, batch, "exact").items():
        assert (mean(fisher)[key] - value).abs().max() <= 0.02 * value.max(), key


def test_sums_are_kept_in_fp32_for_a_model_in_bf16():
    """Ten thousand equal squares: a sum in bf16 stalls after 256 of them."""
    model = nn.Linear(1, 2, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.zero_()
    batch = Batch({"input": torch.ones(10, 1)}, torch.zeros(10, dtype=torch.int64))
    fisher = Fisher()
    for _ in range(1000):
        add_(fisher, model, trainable(model), batch, Labels(CLASSIFICATION))
    assert fisher.sums["weight"].dtype is torch.float32
    assert mean(fisher)["weight"].flatten().tolist() == pytest.approx([0.25, 0.25], rel=1e-6)


# --- what it leaves alone, and what it costs --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["CNN with BatchNorm", "recurrent", "rows coupled"])
def test_modes_buffers_gradients_and_random_numbers_are_left_alone(name):
    model, batch = make(name)
    model[1 if isinstance(model, nn.Sequential) else 0].eval() if isinstance(model, nn.Sequential) else model.head.eval()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = [part.training for part in model.modules()]
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    weights = {key: value.clone() for key, value in model.named_parameters()}
    random = torch.get_rng_state()
    fisher_diagonal(model, cut(batch, 5), CLASSIFICATION)
    assert [part.training for part in model.modules()] == before
    assert all(torch.equal(value, buffers[key]) for key, value in model.named_buffers())
    assert all(torch.equal(value, weights[key]) and value.grad.eq(1).all() for key, value in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_modes_and_buffers_come_back_after_an_error():
    """Also those of a module that counts its calls in eval mode."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            if self.calls > 30:
                raise RuntimeError("broken")
            return self.layer(x)

    model = Counting()
    batches = [Batch({"x": torch.randn(4, 2)}, torch.zeros(4, dtype=torch.int64))] * 9
    fisher_diagonal(model, batches, CLASSIFICATION)
    assert model.calls == 0
    model.calls.fill_(30)
    with pytest.raises(RuntimeError, match="broken"):
        fisher_diagonal(model, batches, CLASSIFICATION)
    assert model.calls == 30
    assert model.training
    assert model.layer.training


def test_recurrent_layers_on_cuda_are_in_train_mode_without_dropout():
    """cuDNN's backward pass needs it; asked for by the device, so that it can be seen without one."""
    model = Recurrent()
    with evaluating(model, torch.device("cuda")):
        assert model.lstm.training
        assert model.lstm.dropout == 0.0
        assert not model.head.training
    assert model.lstm.dropout == 0.5
    assert model.head.training
    with evaluating(model, torch.device("cpu")):
        assert not model.lstm.training


def test_the_peak_does_not_grow_with_the_rows():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    batch = Batch({"input": torch.randn(10, 1, 8, 8)}, torch.zeros(10, dtype=torch.int64))
    fisher_diagonal(model, [batch], CLASSIFICATION)
    few, many = (allocator_peak(lambda n=n: fisher_diagonal(model, [batch] * n, CLASSIFICATION)) for n in (1, 100))
    assert few == many > 0


def test_micro_batches_change_memory_only():
    model, batch = make("CNN with BatchNorm", rows=40)
    whole, parts = Fisher(), Fisher()
    add_(whole, model, trainable(model), batch, Labels(CLASSIFICATION, "sampled"))
    seen = []
    with model[0].register_forward_hook(lambda part, args, output: seen.append(len(output))):
        saved = module.SMALL_BYTES
        module.SMALL_BYTES = 1
        try:
            add_(parts, model, trainable(model), batch, Labels(CLASSIFICATION, "sampled"), micro_batch=9)
        finally:
            module.SMALL_BYTES = saved
    assert max(seen) <= 9
    assert parts.rows == whole.rows == 40
    for key, value in mean(whole).items():
        torch.testing.assert_close(mean(parts)[key], value, rtol=1e-4, atol=1e-8)


def test_interrupted_and_resumed_gives_the_same_bits():
    model, batch = make("transformer, rows first", rows=40)
    labels, params, batches = Labels(CLASSIFICATION, "sampled"), trainable(model), cut(batch, 9)
    undisturbed, first, second = Fisher(), Fisher(), Fisher()
    for each in batches:
        add_(undisturbed, model, params, each, labels)
    for each in batches[:2]:
        add_(first, model, params, each, labels)
    unpack_(second, *pack(first))
    for each in batches[2:]:
        add_(second, model, params, each, labels)
    assert second.rows == 40
    assert all(torch.equal(value, second.sums[key]) for key, value in undisturbed.sums.items())


def test_frozen_parameters_cost_nothing_and_tied_ones_count_once():
    model, batch = make("tied and reused, places [1, tokens]")
    for name, param in model.named_parameters():
        param.requires_grad_(name in ("scale", "words.weight"))
    model.tied = model.words
    found = fisher_diagonal(model, [batch], CLASSIFICATION)
    assert set(found) == {"scale", "words.weight"}
    expected = one_by_one(model, batch, "exact")
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-9)


def test_a_model_that_takes_another_way_is_looked_at_again():
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.turned = nn.Linear(3, 3), nn.Linear(3, 3), False

        def forward(self, x):
            return self.second(self.first(x)) if self.turned else self.first(self.second(torch.relu(x)))

    model, batch = Gate(), Batch({"x": torch.randn(5, 3)}, torch.tensor([0, 1, 2, 0, 1]))
    for model.turned in (False, True, False):
        found, expected = fisher_diagonal(model, [batch], CLASSIFICATION), one_by_one(model, batch, "exact")
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-9)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused_with_a_reason():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    batch = Batch({"input": x}, torch.tensor([0, 1, 0, 1]))
    with pytest.raises(ValueError, match="zero rows"):
        fisher_diagonal(model, [], CLASSIFICATION)
    with pytest.raises(ValueError, match="no trainable parameters"):
        fisher_diagonal(nn.Linear(3, 2).requires_grad_(False), [batch], CLASSIFICATION)
    with pytest.raises(ValueError, match=r"of (weight|bias) is not finite"):
        fisher_diagonal(model, [Batch({"input": x * torch.nan}, batch.targets)], CLASSIFICATION)
    with pytest.raises(ValueError, match=r"needs class labels .*float32.* fisher: empirical"):
        fisher_diagonal(model, [Batch({"input": x}, torch.randn(4))], CLASSIFICATION)
    tokens = Batch({"input": x[:, None].expand(4, 5, 3)}, torch.zeros(4, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"exact takes logits \[rows, classes\], not \(4, 5, 2\)"):
        fisher_diagonal(model, [tokens], CLASSIFICATION, estimator="exact")

    class Twofold(nn.Linear):
        def forward(self, input):
            return super().forward(input), None

    with pytest.raises(ValueError, match="returns logits, not tuple"):
        fisher_diagonal(Twofold(3, 2), [batch], CLASSIFICATION)


def test_regression_by_its_own_targets():
    """The empirical estimator takes any loss: 2 (f - y) x squared."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 1), torch.randn(9, 3), torch.randn(9)
    objective = Objective(lambda outputs, batch: (outputs[:, 0] - batch.targets) ** 2)
    found = fisher_diagonal(model, cut(Batch({"input": x}, y), 4), objective, estimator="empirical")
    residual = 2 * (model(x).detach()[:, 0] - y)
    torch.testing.assert_close(found["weight"][0], ((residual[:, None] * x) ** 2).mean(0))
