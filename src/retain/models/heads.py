"""Heads from features to logits: of fixed size, growing by rows, one per task; and which of them a run needs.

Every head is called with features [rows, d] and a task, and has `sizes`: its outputs, in the form that rebuilds it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from retain.data.task import Stream
from retain.errors import ConfigError
from retain.factory import blaming, load_factory
from retain.spec import ModelSpec, RunSpec


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """A region whose CPU random numbers start at a key; the caller's generator does not notice."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key)  # torch.manual_seed would reseed every accelerator too
        yield


# --- heads ------------------------------------------------------------------------------------------------------------


class SingleHead(nn.Linear):
    """One linear layer of fixed size for all tasks; `forward` does not look at the task."""

    @property
    def sizes(self) -> list[int]:
        """The number of classes, alone in a list."""
        return [self.out_features]

    def forward(self, features: Tensor, task: int | Tensor = 0) -> Tensor:
        """Logits [rows, classes]."""
        return super().forward(features)


class NoHead(nn.Module):
    """Stands where a head would, above a body that makes the logits itself."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.sizes = [classes]

    def forward(self, logits: Tensor, task: int | Tensor = 0) -> Tensor:
        """The logits as they are."""
        return logits


class GrowingHead(nn.Module):
    """One weight [classes, d] and one bias [classes], to which `grow_` adds rows; none at first."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, d))
        self.bias = nn.Parameter(torch.empty(0))

    @property
    def sizes(self) -> list[int]:
        """The number of classes, alone in a list."""
        return [self.weight.shape[0]]

    def forward(self, features: Tensor, task: int | Tensor = 0) -> Tensor:
        """Logits [rows, classes]; the task does not matter."""
        return F.linear(features, self.weight, self.bias)


class PerTaskHead(nn.Module):
    """One linear layer per task, added by `grow_`; none at first."""

    like: Tensor

    def __init__(self, d: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList()
        self.register_buffer("like", torch.empty(0, d), persistent=False)  # follows .to(): what new heads are made like

    @property
    def sizes(self) -> list[int]:
        """The outputs of each task's head, in the order of the tasks."""
        return [int(head.out_features) for head in self.heads]  # type: ignore[arg-type]

    def forward(self, features: Tensor, task: int | Tensor = 0) -> Tensor:
        """Logits of one task's head, or of every row's own.

        Args:
            features: [rows, d].
            task: number of the task, or of each row's task, int64 [rows].

        Returns:
            [rows, outputs of the head] for a number. For a tensor [rows, outputs of the widest head]: what a narrower
            head lacks is the dtype's lowest finite value, so that its softmax is 0 and gradients stay finite; heads of
            tasks that do not occur take no part and get no gradient.
        """
        if not isinstance(task, Tensor):
            return self.heads[task](features)
        widest = max(self.sizes)
        rows, parts = [], []
        for number in sorted(set(task.tolist())):
            index = (task == number).nonzero().squeeze(1)
            logits = self.heads[number](features[index])
            rows.append(index)
            parts.append(F.pad(logits, (0, widest - logits.shape[1]), value=torch.finfo(logits.dtype).min))
        return torch.cat(parts)[torch.cat(rows).argsort()]


Head = SingleHead | NoHead | GrowingHead | PerTaskHead


def grow_(head: Head, outputs: int, key: int) -> None:
    """Make room for a task: rows in a growing head, one more head per task; a head of fixed size is only checked.

    A growing head's parameters are replaced by new ones whose old rows are bitwise the same: take the optimizer's
    tensors before and load them into a new optimizer after.

    Args:
        head: changed in place.
        outputs: classes in total for a growing head (it never shrinks), outputs of the added head for per-task heads.
        key: random key of the new rows, which start as `nn.Linear` would start them.

    Raises:
        ConfigError: a head of fixed size is too small.
    """
    if isinstance(head, PerTaskHead):
        with seeded(key):
            head.heads.append(nn.Linear(head.like.shape[1], outputs).to(head.like))
    elif isinstance(head, GrowingHead):
        rows, d = head.weight.shape
        if outputs > rows:
            with seeded(key):
                new = nn.Linear(d, outputs - rows).to(head.weight)
            for name, added in new.named_parameters():
                old: nn.Parameter = getattr(head, name)
                setattr(head, name, nn.Parameter(torch.cat([old.detach(), added.detach()]), old.requires_grad))
    elif outputs > head.sizes[0]:
        raise ConfigError(
            f"The head has {head.sizes[0]} outputs and {outputs} classes are needed. "
            "A head of fixed size takes no new ones: set model.head: growing."
        )


# --- which head -------------------------------------------------------------------------------------------------------


def resolve_head(spec: RunSpec, stream: Stream) -> str:
    """The kind of head that a run has: ``single``, ``growing`` or ``per-task``.

    `head: auto` is per-task where a row's task is known, growing where classes are added, else single; and single where
    a factory makes the logits itself.

    Raises:
        ConfigError: the factory cannot be imported, or the head asked for does not go with it.
    """
    kind = spec.model.head
    if makes_logits(spec.model):
        if kind in ("growing", "per-task"):
            raise ConfigError(
                f"model.factory={spec.model.factory} takes `classes` and so makes the logits, not model.head={kind}. "
                "Drop the `classes` argument and return features [rows, d]: the head is then put on top."
            )
        return "single"
    if kind != "auto":
        return kind
    return {"task-incremental": "per-task", "class-incremental": "growing"}.get(stream.scenario, "single")


def makes_logits(model: ModelSpec) -> bool:
    """Whether the model is a factory whose signature takes `classes`: then it makes the logits, else features."""
    return model.factory is not None and "classes" in taken_by_factory(model.factory)[1]


def taken_by_factory(name: str) -> tuple[Callable[..., Any], set[str]]:
    """The function of `model.factory`, and which of the keywords `input_shape` and `classes` its signature takes.

    Raises:
        ConfigError: there is no such module or function, or its import fails.
    """
    function = load_factory("model.factory", name)
    with blaming("model.factory", name):
        return function, {"input_shape", "classes"} & set(inspect.signature(function).parameters)
