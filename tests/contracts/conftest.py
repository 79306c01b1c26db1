"""Small runs spend their time on the disk and on rows drawn ahead; what those are for is tested elsewhere."""

import importlib
import os

import pytest


@pytest.fixture(autouse=True)
def small_runs(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)
    replay = importlib.import_module("retain.forgetting.replay")  # the package has a function of the module's name
    monkeypatch.setattr(replay, "BLOCK_BYTES", 2**9)  # a few steps, so that a task has several blocks
