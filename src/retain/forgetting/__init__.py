"""Methods against forgetting: one file each, built here by the name that the configuration gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from retain.errors import ConfigError, Finding
from retain.forgetting.ewc import ewc
from retain.forgetting.replay import replay
from retain.seams import Method
from retain.spec import MethodSpec

METHODS: dict[str, Callable[[Any], Method]] = {"replay": replay, "ewc": ewc}
"""Factories by name: `factory(settings) -> Method`."""


def build(methods: Sequence[MethodSpec]) -> list[Method]:
    """Make the methods of a run, in the order of the configuration.

    Args:
        methods: each with its settings.

    Raises:
        ConfigError: more than one method keeps a replay memory that the others may draw from.
    """
    built = [METHODS[method.name](method.settings) for method in methods]
    owners = [method.name for method in built if method.sample is not None]
    if len(owners) > 1:
        seen = f"methods: {' and '.join(owners)} each keep a replay memory; a run has one."
        raise ConfigError(Finding("two-replay-memories", seen, "", "Keep one of them."))
    return built
