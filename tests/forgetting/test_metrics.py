import math

import numpy as np
import pytest

from retain.forgetting import metrics
from retain.forgetting.metrics import measures, score

MATRIX = [
    [0.90, None, None, None],
    [0.94, 0.80, None, None],
    [0.70, 0.84, 1.00, None],
    [0.60, 0.72, 0.90, 0.88],
]
"""Task 0 and 1 are best after a later task. Final row: .60 .72 .90 .88; diagonal: .90 .80 1.00 .88."""


def test_measures_of_a_known_matrix():
    found = measures(MATRIX, True, before=[None, 0.5, 0.3, 0.1], at_init=[0.2, 0.1, 0.1, 0.3])
    assert found == pytest.approx(
        {
            "average": 0.775,  # (.60 + .72 + .90 + .88) / 4
            "forgetting": (0.34 + 0.12 + 0.10) / 3,  # from .94, .84 and 1.00
            "backward_transfer": (-0.30 - 0.08 - 0.10) / 3,
            "forward_transfer": (0.4 + 0.2 - 0.2) / 3,
            "retention": (0.60 / 0.90 + 0.72 / 0.80 + 0.90) / 3,
            "plasticity": 0.895,
        }
    )
    assert found.keys() == metrics.FORMULAS.keys()


def test_forgetting_is_none_of_the_other_two_meanings():
    """Measured from the diagonal it would be .16; with the last task counted, .14; ours is .1867."""
    found = metrics.forgetting(MATRIX)
    assert found == pytest.approx(0.56 / 3)
    assert abs(found - 0.48 / 3) > 0.02
    assert abs(found - 0.56 / 4) > 0.02


def test_the_best_is_taken_before_the_last_task_only():
    """A task that is best at the very end has negative forgetting."""
    assert metrics.forgetting([[0.5, None], [0.7, 0.9]]) == pytest.approx(-0.2)


def test_what_a_task_was_before_it_was_learned_is_not_its_best():
    matrix = [[0.9, 0.99, 0.1], [0.8, 0.6, 0.1], [0.7, 0.5, 0.9]]
    assert metrics.forgetting(matrix) == pytest.approx((0.2 + 0.1) / 2)
    assert metrics.plasticity(matrix) == pytest.approx(0.8)


def test_signs_are_turned_where_lower_is_better():
    losses = [[None if value is None else 1 - value for value in row] for row in MATRIX]
    before, at_init = [None, 0.5, 0.7, 0.9], [0.8, 0.9, 0.9, 0.7]
    found = measures(losses, False, before, at_init)
    assert found["forgetting"] == pytest.approx(0.56 / 3)
    assert found["backward_transfer"] == pytest.approx(-0.48 / 3)
    assert found["forward_transfer"] == pytest.approx(0.4 / 3)
    assert found["retention"] is None
    assert found["average"] == pytest.approx(0.225)


def test_what_was_not_measured_is_none_and_never_zero():
    one = measures([[0.9]])
    assert one == {**dict.fromkeys(metrics.FORMULAS), "average": 0.9, "plasticity": 0.9}
    assert measures([]) == dict.fromkeys(metrics.FORMULAS)
    assert measures([[None, None], [None, None]]) == dict.fromkeys(metrics.FORMULAS)
    assert metrics.forward_transfer([None, None], [0.1, 0.2]) is None
    assert metrics.forward_transfer([0.3], [0.1]) is None


def test_a_task_that_was_not_measured_is_left_out_of_the_mean():
    matrix = [[0.9, None, None], [0.8, math.nan, None], [0.6, None, 0.7]]
    found = measures(matrix, before=[None, math.nan, 0.5], at_init=[0.1, 0.1, 0.2])
    assert found["average"] == pytest.approx(0.65)
    assert found["forgetting"] == pytest.approx(0.3)
    assert found["backward_transfer"] == pytest.approx(-0.3)
    assert found["forward_transfer"] == pytest.approx(0.3)
    assert found["plasticity"] == pytest.approx(0.8)


def test_retention_of_a_task_that_was_never_learned_is_none():
    assert metrics.retention([[0.0, None], [0.5, 1.0]]) is None


# --- the metric of one task -------------------------------------------------------------------------------------------


def make_scores(rows=400, seed=0):
    """Logits of two classes with ties, a third of the rows positive."""
    made = np.random.default_rng(seed)
    targets = (made.random(rows) < 0.3).astype(np.int64)
    margin = np.round(made.normal(size=rows) + 1.2 * targets, 1)
    return np.stack([-margin / 2, margin / 2], 1), targets


def test_accuracy_and_loss():
    logits = np.array([[2.0, 0.0, 1.0], [0.0, 1.0, 3.0], [1.0, 0.5, 0.0], [0.0, 0.0, 5.0]])
    targets = np.array([0, 1, 0, 2])
    assert score("accuracy", logits, targets) == 0.75
    by_hand = [math.log(sum(map(math.exp, row))) - row[target] for row, target in zip(logits, targets, strict=True)]
    assert score("loss", logits, targets) == pytest.approx(sum(by_hand) / 4)
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert score("loss", np.log(probabilities), targets) == pytest.approx(sum(by_hand) / 4)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rate", [0.001, 0.01, 0.05, 0.2, 0.7])
def test_recall_at_a_false_positive_rate_is_that_of_the_best_threshold(rate, seed):
    logits, targets = make_scores(seed=seed)
    margin, positive = logits[:, 1] - logits[:, 0], targets == 1
    best = 0.0
    for threshold in [*np.unique(margin), np.inf]:
        flagged = margin >= threshold
        if flagged[~positive].mean() <= rate:
            best = max(best, flagged[positive].mean())
    assert score(f"recall_at_fpr={rate}", logits, targets) == pytest.approx(best, abs=1e-12)


def test_auc_is_the_share_of_pairs_in_the_right_order():
    logits, targets = make_scores()
    margin = logits[:, 1] - logits[:, 0]
    above = margin[targets == 1][:, None] - margin[targets == 0][None]
    assert score("auc", logits, targets) == pytest.approx((above > 0).mean() + (above == 0).mean() / 2)


def test_average_precision_of_a_known_ranking():
    """Positives at ranks 1 and 3 of 4: 1/2 * 1 + 1/2 * 2/3."""
    logits = np.stack([np.zeros(4), np.array([3.0, 2.0, 1.0, 0.0])], 1)
    assert score("average_precision", logits, np.array([1, 0, 1, 0])) == pytest.approx(5 / 6)


def test_ranks_survive_where_probabilities_round_to_one():
    logits = np.stack([np.zeros(4), np.array([60.0, 50.0, 48.0, 47.0])], 1).astype(np.float32)
    assert score("auc", logits, np.array([1, 1, 0, 0])) == 1.0


def test_one_class_against_the_rest_ranks_as_its_probability_does():
    made = np.random.default_rng(1)
    logits, targets = made.normal(size=(300, 4)), made.integers(4, size=300)
    probability = np.exp(logits)[:, 1] / np.exp(logits).sum(1)
    above = probability[targets == 1][:, None] - probability[targets != 1][None]
    assert score("auc", logits, targets) == pytest.approx((above > 0).mean())


def test_what_is_not_defined_is_none():
    logits, targets = make_scores(20)
    for metric in ("auc", "average_precision", "recall_at_fpr=0.1"):
        assert score(metric, logits, np.zeros(20, np.int64)) is None
        assert score(metric, logits, np.ones(20, np.int64)) is None
        assert score(metric, logits[:, :1], targets) is None
    for metric in ("accuracy", "loss", "auc"):
        assert score(metric, logits * np.nan, targets) is None
        assert score(metric, np.empty((0, 2)), np.empty(0, np.int64)) is None
    with pytest.raises(ValueError, match="not a metric"):
        score("f1", logits, targets)
