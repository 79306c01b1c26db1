import pytest
import torch
import torch.nn.functional as F

from retain.errors import ConfigError
from retain.models.heads import GrowingHead, NoHead, PerTaskHead, SingleHead, grow_

D = 6


def grown(head, *outputs):
    for number, count in enumerate(outputs):
        grow_(head, count, key=number)
    return head


@pytest.fixture
def features():
    return torch.randn(8, D, generator=torch.Generator().manual_seed(0))


def test_growth_keeps_old_rows_bitwise_and_old_logits(features):
    head = grown(GrowingHead(D), 3)
    weight, bias, logits = head.weight.detach().clone(), head.bias.detach().clone(), head(features).detach()
    grow_(head, 7, key=1)
    assert head.sizes == [7]
    assert torch.equal(head.weight[:3], weight) and torch.equal(head.bias[:3], bias)
    torch.testing.assert_close(head(features)[:, :3], logits, rtol=0, atol=1e-6)


def test_new_rows_start_as_a_linear_layer_and_depend_on_their_key_only(features):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    head = grown(GrowingHead(D), 3, 7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    reference = torch.nn.Linear(D, 4)
    assert torch.equal(head.weight[3:], reference.weight) and torch.equal(head.bias[3:], reference.bias)


def test_growing_to_the_same_size_or_less_changes_nothing():
    head = grown(GrowingHead(D), 4)
    weight = head.weight
    grow_(head, 4, key=9)
    grow_(head, 2, key=9)
    assert head.weight is weight and head.sizes == [4]


@pytest.mark.parametrize("head", [GrowingHead(D), PerTaskHead(D)])
def test_new_parameters_take_the_dtype_that_the_head_was_moved_to(head):
    head.to(torch.bfloat16)
    grow_(head, 3, key=0)
    assert {param.dtype for param in head.parameters()} == {torch.bfloat16}


def test_a_frozen_growing_head_stays_frozen():
    head = grown(GrowingHead(D), 2).requires_grad_(False)
    grow_(head, 3, key=1)
    assert not head.weight.requires_grad and not head.bias.requires_grad


def test_growing_one_per_task_head_leaves_the_others_untouched():
    head = grown(PerTaskHead(D), 2, 3)
    before = list(head.named_parameters())
    values = [param.detach().clone() for _, param in before]
    grow_(head, 5, key=2)
    assert head.sizes == [2, 3, 5]
    after = dict(head.named_parameters())
    for (name, param), value in zip(before, values, strict=True):
        assert after[name] is param and torch.equal(param, value)


def test_a_batch_of_mixed_tasks_equals_one_call_per_task(features):
    head = grown(PerTaskHead(D), 2, 4, 3)
    task = torch.tensor([2, 0, 1, 1, 0, 2, 2, 0])
    logits = head(features, task)
    assert logits.shape == (8, 4)
    for number, outputs in enumerate(head.sizes):
        rows = task == number
        torch.testing.assert_close(logits[rows][:, :outputs], head(features[rows], number))
        assert (logits[rows][:, outputs:] == torch.finfo(logits.dtype).min).all()


@pytest.mark.parametrize("task", [1, torch.tensor([1, 1, 1, 1, 1, 1, 1, 1])])
def test_heads_of_absent_tasks_get_no_gradient(features, task):
    head = grown(PerTaskHead(D), 2, 3, 2)
    head(features, task).sum().backward()
    assert [layer.weight.grad is None for layer in head.heads] == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_filled_positions_give_finite_gradients_equal_to_those_of_separate_calls(features, dtype):
    head = grown(PerTaskHead(D), 2, 5).to(dtype)
    rows = features.to(dtype).requires_grad_()
    task, targets = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1]), torch.tensor([1, 4, 0, 2, 1, 3, 0, 0])
    F.cross_entropy(head(rows, task).float(), targets, reduction="sum").backward()
    mixed = {name: param.grad.clone() for name, param in head.named_parameters()} | {"rows": rows.grad.clone()}
    assert all(grad.isfinite().all() for grad in mixed.values())

    head.zero_grad()
    rows.grad = None
    for number in (0, 1):
        here = task == number
        F.cross_entropy(head(rows[here], number).float(), targets[here], reduction="sum").backward()
    separate = {name: param.grad for name, param in head.named_parameters()} | {"rows": rows.grad}
    torch.testing.assert_close(mixed, separate)


def test_filled_positions_under_autocast_take_the_dtype_of_the_logits(features):
    head = grown(PerTaskHead(D), 1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(features, torch.tensor([0, 1] * 4))
    assert logits.dtype == torch.bfloat16 and logits[0, 1] == torch.finfo(torch.bfloat16).min


@pytest.mark.parametrize("head", [SingleHead(D, 3), NoHead(3)])
def test_a_head_of_fixed_size_is_only_checked(head):
    assert head.sizes == [3]
    grow_(head, 3, key=0)
    assert head.sizes == [3]
    with pytest.raises(ConfigError, match=r"3 outputs and 4 classes.*model\.head: growing"):
        grow_(head, 4, key=0)
