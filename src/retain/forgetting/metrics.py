"""Measures of a stream of tasks, by the formulas of their papers, and the metric of one task.

R[i][j] is the metric on task j after learning task i, from 0; T is the last task. What was not measured is None (or NaN)
and is left out of a mean; a mean of nothing is None, never 0. "Forgetting" alone has several meanings in use, so `FORMULAS`
goes with the figures wherever they are printed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from retain.spec import parse_metric

Matrix = Sequence[Sequence[float | None]]
Row = Sequence[float | None]

FORMULAS: dict[str, str] = {
    "average": "mean over j of R[T][j]",
    "forgetting": "mean over j < T of max over j <= i < T of R[i][j], minus R[T][j] (Chaudhry et al. 2018)",
    "backward_transfer": "mean over j < T of R[T][j] - R[j][j] (Lopez-Paz & Ranzato 2017)",
    "forward_transfer": "mean over j > 0 of R[j-1][j] - the metric on j before any training (Lopez-Paz & Ranzato 2017)",
    "retention": "mean over j < T of R[T][j] / R[j][j]",
    "plasticity": "mean over j of R[j][j]",
}
"""What each measure means, in a line. Where lower is better, forgetting and the transfers have their signs turned, and
retention is not defined."""


def measures(values: Matrix, higher_is_better: bool = True, before: Row = (), at_init: Row = ()) -> dict[str, float | None]:
    """All measures of a run.

    Args:
        values: R, [tasks][tasks].
        higher_is_better: False for a loss.
        before: the metric on each task just before it was learned, [tasks].
        at_init: the metric on each task by the model as it was at the very start, [tasks].

    Returns:
        A value for each name in `FORMULAS`.
    """
    return {
        "average": average(values),
        "forgetting": forgetting(values, higher_is_better),
        "backward_transfer": backward_transfer(values, higher_is_better),
        "forward_transfer": forward_transfer(before, at_init, higher_is_better),
        "retention": retention(values, higher_is_better),
        "plasticity": plasticity(values),
    }


def average(values: Matrix) -> float | None:
    """Mean over j of R[T][j]: the metric after the last task, over all tasks (ACC of Lopez-Paz & Ranzato 2017)."""
    return _mean(_known(values[-1])) if values else None


def forgetting(values: Matrix, higher_is_better: bool = True) -> float | None:
    """How far each earlier task has fallen from its best (Chaudhry et al. 2018, eq. 3, after the last task).

    Mean over j < T of max_{j <= i < T} R[i][j] - R[T][j]; where lower is better, of R[T][j] - min_{j <= i < T} R[i][j].

    Args:
        values: R, [tasks][tasks].
        higher_is_better: False for a loss.

    Returns:
        Negative where tasks got better; None with one task.
    """
    sign = 1 if higher_is_better else -1
    falls = []
    for j in range(len(values) - 1):
        last = _known([values[-1][j]])
        earlier = _known(row[j] for row in values[j:-1])
        if last and earlier:
            falls.append(max(sign * value for value in earlier) - sign * last[0])
    return _mean(falls)


def backward_transfer(values: Matrix, higher_is_better: bool = True) -> float | None:
    """How much later tasks changed earlier ones (BWT of Lopez-Paz & Ranzato 2017).

    Mean over j < T of R[T][j] - R[j][j]; the sign is turned where lower is better, so that positive is always good.
    """
    sign = 1 if higher_is_better else -1
    return _mean(sign * (last - first) for first, last in _first_and_last(values))


def forward_transfer(before: Row, at_init: Row, higher_is_better: bool = True) -> float | None:
    """How much earlier tasks helped a task not learned yet (FWT of Lopez-Paz & Ranzato 2017).

    Mean over j > 0 of before[j] - at_init[j]; the sign is turned where lower is better.

    Args:
        before: the metric on each task just before it was learned, R[j-1][j], [tasks].
        at_init: the metric on each task before any training, [tasks].
        higher_is_better: False for a loss.

    Returns:
        None where the head allows no such measurement.
    """
    sign = 1 if higher_is_better else -1
    pairs = [_known(pair) for pair in list(zip(before, at_init, strict=False))[1:]]
    return _mean(sign * (pair[0] - pair[1]) for pair in pairs if len(pair) == 2)


def retention(values: Matrix, higher_is_better: bool = True) -> float | None:
    """What is left of each earlier task: mean over j < T of R[T][j] / R[j][j].

    None where lower is better, and where some R[j][j] is 0: a task that was never learned cannot be retained.
    """
    pairs = _first_and_last(values)
    if not higher_is_better or any(first == 0 for first, _ in pairs):
        return None
    return _mean(last / first for first, last in pairs)


def plasticity(values: Matrix) -> float | None:
    """How well each task was learned when it was learned: mean over j of R[j][j]."""
    return _mean(_known(row[j] for j, row in enumerate(values)))


def _first_and_last(values: Matrix) -> list[tuple[float, float]]:
    """(R[j][j], R[T][j]) of each j < T for which both were measured."""
    pairs = [_known((values[j][j], values[-1][j])) for j in range(len(values) - 1)]
    return [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]


def _known(values: Iterable[float | None]) -> list[float]:
    return [float(value) for value in values if value is not None and not math.isnan(value)]


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return math.fsum(values) / len(values) if values else None


# --- the metric of one task -------------------------------------------------------------------------------------------


def score(metric: str, logits: npt.ArrayLike, targets: npt.ArrayLike) -> float | None:
    """A metric on the rows of one task.

    ``accuracy``; ``loss``, the mean cross-entropy; and for class 1 against the rest, ``auc`` (area under the ROC curve),
    ``average_precision`` and ``recall_at_fpr=x``: the largest recall at a threshold whose false-positive rate is at most x.

    Args:
        metric: as in the configuration.
        logits: [rows, classes]; logarithms of probabilities will do.
        targets: class ids, [rows].

    Returns:
        None where it is not defined: no rows, rows of one class (for the last three), or logits that are not finite.

    Raises:
        ValueError: the metric is not known.
    """
    name, rate = parse_metric(metric)
    scores, labels = np.asarray(logits, np.float64), np.asarray(targets)
    if not len(labels) or np.isnan(scores).any():
        return None
    if name == "accuracy":
        return float(np.mean(scores.argmax(axis=1) == labels))
    if name == "loss":
        loss = float(np.mean(_log_sum_exp(scores) - scores[np.arange(len(labels)), labels]))
        return loss if math.isfinite(loss) else None
    positive = labels == 1
    if positive.all() or not positive.any() or scores.shape[1] < 2:
        return None
    # Log odds: probabilities of well-separated rows round to 1 and become ties.
    odds = scores[:, 1] - _log_sum_exp(np.delete(scores, 1, axis=1))
    return _ranked(name, rate, positive, odds) if np.isfinite(odds).all() else None


def _ranked(name: str, rate: float | None, positive: np.ndarray, odds: np.ndarray) -> float:
    from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

    if name == "auc":
        return float(roc_auc_score(positive, odds))
    if name == "average_precision":
        return float(average_precision_score(positive, odds))
    # With drop_intermediate, the threshold just below the rate may be among those dropped.
    false_positive_rate, recall, _ = roc_curve(positive, odds, drop_intermediate=False)
    return float(recall[false_positive_rate <= rate].max())


def _log_sum_exp(scores: np.ndarray) -> np.ndarray:
    return np.asarray(np.logaddexp.reduce(scores, axis=1))
