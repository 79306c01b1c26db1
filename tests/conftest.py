"""What every test relies on: one torch thread, property tests without a clock, a GPU only where there is one."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded, and for the processes that tests start

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

hypothesis.settings.register_profile("retain", deadline=None)  # shared cores: a time limit per example only flickers
hypothesis.settings.load_profile("retain")

ROOT = Path(__file__).parents[1]


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data sets: $RETAIN_DATA, else shared/data beside the repository."""
    folder = Path(os.environ.get("RETAIN_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data sets in {folder}; set RETAIN_DATA")
    return folder
