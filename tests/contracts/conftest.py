"""Small runs spend their time on the disk and on rows drawn ahead; what those are for is tested elsewhere."""

import os

import pytest

from retain.forgetting import replay


@pytest.fixture(autouse=True)
def small_runs(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(replay, "BLOCK_BYTES", 2**9)  # a few steps, so that a task has several blocks
