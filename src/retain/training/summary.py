"""`summary.json`: the machine-readable result of a run, made from its lineage."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from retain.forgetting import metrics
from retain.spec import RunSpec
from retain.training.evaluate import matrix

SCHEMA = 1


def summarize(spec: RunSpec, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of a run.

    Args:
        spec: its description.
        records: the lineage's lines of the tasks that count as learned, in order.

    Returns:
        Plain data; what was not measured is None.
    """
    primary = spec.stream.metric
    names = list(dict.fromkeys(name for record in records for name in record["row"])) or [primary]
    matrices = {
        name: {"values": matrix(records, name), "higher_is_better": name != "loss", **_around(records, name)} for name in names
    }
    measures = metrics.measures(**matrices[primary]) if records else dict.fromkeys(metrics.FORMULAS)
    last = records[-1] if records else {}
    seconds = sum(record["seconds"] for record in records)
    rows = sum(record["trained_rows"] for record in records)
    newest = matrices[primary]["values"][-1][-1] if records else None
    budget, higher = spec.budget, matrices[primary]["higher_is_better"]
    peak = max((record["memory"]["peak_bytes"] for record in records), default=0)
    return {
        "schema": SCHEMA,
        "tasks": [record["task"] for record in records],
        "primary": primary,
        "matrices": matrices,
        "measures": measures,
        "formulas": dict(metrics.FORMULAS),
        "memory": {
            "device": last.get("memory", {}).get("device"),
            "limit_bytes": None,
            "predicted_peak_bytes": None,
            "measured_peak_bytes": peak,
            "measured_by": last.get("memory", {}).get("measured_by"),
            "peak_phase": None,
            "state_bytes": last.get("state_bytes", {}),
        },
        "budgets": {
            "memory": {"limit": None, "measured": peak, "status": "none"},
            "forgetting": _kept(measures["forgetting"], budget.forgetting, at_most=True),
            "score": _kept(newest, budget.score, at_most=not higher),
        },
        "rejected": None,
        "throughput_items_per_s": rows / seconds if seconds else None,
        "seconds": round(seconds, 3),
        "skipped_steps": sum(record["skipped_steps"] for record in records),
        "decisions": 0,
        "oom_recovered": 0,
        "seed": last.get("seed", spec.training_params.seed),
        "versions": last.get("versions", {}),
    }


def to_json(summary: Mapping[str, Any]) -> bytes:
    """The summary as the bytes of its file."""
    return (json.dumps(summary, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def versions() -> dict[str, str]:
    """Versions of what the weights depend on."""
    retain = importlib.metadata.version("retain")
    return {"retain": retain, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}


def _around(records: Sequence[Mapping[str, Any]], name: str) -> dict[str, list[float | None]]:
    """The metric on each task just before it was learned, and by the model as it was at the very start."""
    at_init = (records[0]["at_init"] if records else None) or {}
    return {
        "before": [(record["before"] or {}).get(name) for record in records],
        "at_init": [at_init.get(record["task"], {}).get(name) for record in records],
    }


def _kept(measured: float | None, limit: float | None, *, at_most: bool) -> dict[str, Any]:
    """What became of a budget; nothing is known of one that was not set or not measured."""
    if limit is None or measured is None:
        status = "none"
    else:
        status = "kept" if (measured <= limit if at_most else measured >= limit) else "broken"
    return {"limit": limit, "measured": measured, "status": status}
