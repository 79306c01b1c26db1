import subprocess
import sys

import pytest
import torch

from retain.errors import ConfigError
from retain.memory.meter import peak_bytes, reset_peak, resolve_device

CPU = torch.device("cpu")
MIB = 2**20

CHILD = """
from retain.memory.meter import peak_bytes
import torch
print(peak_bytes(torch.device("cpu"))[0])
"""


def test_the_peak_on_the_cpu_counts_what_is_no_longer_held():
    before, what = peak_bytes(CPU)
    torch.ones(200 * MIB, dtype=torch.uint8)
    after, _ = peak_bytes(CPU)
    assert what == "resident memory"
    assert after >= before
    assert after >= 200 * MIB


AGAIN = """
from retain.memory.meter import peak_bytes, reset_peak
import torch
cpu = torch.device("cpu")
torch.ones(100 * 2**20, dtype=torch.uint8)
reset_peak(cpu)
start = peak_bytes(cpu)[0]
torch.ones(60 * 2**20, dtype=torch.uint8)
print(peak_bytes(cpu)[0] - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset it")
def test_the_peak_starts_anew_and_grows_by_what_is_used():
    """In a process of its own: here, freed memory of other tests would be used again without a trace."""
    child = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, check=True)
    assert 55 * MIB < int(child.stdout) < 75 * MIB


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the figure is the shell's")
def test_a_child_does_not_report_the_memory_of_its_parent():
    held = torch.ones(800 * MIB, dtype=torch.uint8)
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert int(child.stdout) < held.nbytes


@pytest.mark.gpu
def test_the_peak_on_cuda_is_the_allocators():
    device = resolve_device("cuda")
    reset_peak(device)
    start, what = peak_bytes(device)
    torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    assert (peak_bytes(device)[0] - start, what) == (64 * MIB, "allocator peak")


def test_devices_have_the_name_that_their_tensors_report():
    assert resolve_device("cpu") == CPU
    for text in ("cpu", "auto"):
        device = resolve_device(text)
        assert torch.ones(1, device=device).device == device


def test_auto_prefers_cuda_then_mps(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert resolve_device("auto") == torch.device("mps", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 0)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"cuda:2.*cuda:0, cuda:1, mps:0, cpu"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("text", ["tpu", "", "meta", "cpu:0:1", "cuda:99"])
def test_a_device_that_is_not_here_is_an_error_that_names_those_that_are(text):
    with pytest.raises(ConfigError, match=r"Use auto, or one of: .*cpu"):
        resolve_device(text)
