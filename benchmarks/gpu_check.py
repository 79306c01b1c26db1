"""What only a GPU can show, in under four minutes: the same learning as on the CPU, exact resuming, the Fisher information through
cuDNN and in half precision, and what a step, a Fisher pass and a pull cost.

Run on a machine with a CUDA device: python benchmarks/gpu_check.py
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from retain.forgetting.fisher import Fisher, Labels, add_, fisher_diagonal, mean
from retain.forgetting.quadratic import pull_
from retain.params import trainable
from retain.seams import Batch
from retain.spec import RunSpec
from retain.step import CLASSIFICATION
from retain.training import loop
from retain.training.lineage import load_checkpoint


class Killed(BaseException):
    """Stands for a kill."""


def spec(device: str, **training: Any) -> RunSpec:
    """Digits class by class with replay and EWC, three epochs a task."""
    kept = {"replay_ratio": 1.0, "replay_capacity": 200, "ewc_lambda": 1.0}
    settings = {"epochs": 3, "optimizer": "SGD(lr=0.1)", "regularization": kept}
    model = {"mlp": {"hidden": [256, 256], "dropout": training.pop("dropout", 0.0)}}
    described = {"model": model, "training_params": {**settings, "device": device, **training}}
    return RunSpec.parse({**described, "checkpoint": {"every_steps": 20}})


def weights(run: Path) -> torch.Tensor:
    """All weights after the last task, as one vector."""
    last = max((run / "tasks").glob("[0-9]*"))
    tensors = load_checkpoint(last, ["model.safetensors"])["model.safetensors"]
    return torch.cat([tensor.flatten().double() for _, tensor in sorted(tensors.items())])


def resumed(run_spec: RunSpec, run: Path, steps: int) -> None:
    """Die after a number of steps, then go on."""
    real, done = loop.train_step, 0

    def step(*arguments: Any) -> Any:
        nonlocal done
        done += 1
        if done > steps:
            raise Killed
        return real(*arguments)

    with mock.patch.object(loop, "train_step", step), contextlib.suppress(Killed):
        loop.train(run_spec, run)
    loop.train(run_spec, run)


def framework_ratio(device: torch.device) -> float:
    """Seconds of a step in a run over those of a plain loop, MLP 1024-2048-2048-10, batch 256; synchronised at both ends."""
    stream = {"random": {"input": "vector", "shape": [1024], "classes": 10, "samples": 12800}, "split": {"by": "none"}}
    training = {"batch_size": 256, "epochs": 20, "optimizer": "SGD(lr=0.1)", "device": str(device), "decay": "all"}
    described = RunSpec.parse({"stream": stream, "training_params": training, "model": {"mlp": {"hidden": [2048, 2048]}}})
    marks: dict[str, float] = {}

    def listen(kind: str, values: dict[str, Any]) -> None:
        torch.cuda.synchronize()
        marks[kind] = time.perf_counter()

    def plain() -> float:
        model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = torch.randn(10240, 1024), torch.arange(10240) % 10
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            for index in torch.randperm(10240).split(256):
                F.cross_entropy(model(x[index].to(device)), y[index].to(device)).backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    ratios = []
    for _ in range(4):
        with tempfile.TemporaryDirectory() as folder:
            loop.train(described, Path(folder) / "run", listener=listen)
        ratios.append((marks["evaluated"] - marks["task"]) / plain())
    return statistics.median(ratios[1:])


class Encoder(nn.Module):
    """Four transformer layers over 64 tokens of 512: 13 M parameters; or an LSTM, which cuDNN runs."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.recurrent, self.head = recurrent, nn.Linear(512, 10)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True)
        self.body = nn.LSTM(512, 512, 2, batch_first=True, dropout=0.1) if recurrent else nn.TransformerEncoder(layer, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [rows, 10]."""
        return self.head(self.body(x)[0][:, -1] if self.recurrent else self.body(x).mean(1))


def fisher_gap(device: torch.device, recurrent: bool, dtype: torch.dtype | None) -> float:
    """Largest difference of the Fisher information here and on the CPU in fp32, over the largest value of its parameter."""
    torch.manual_seed(0)
    model, batch = Encoder(recurrent), Batch({"x": torch.randn(8, 16, 512)}, torch.arange(8))
    expected = fisher_diagonal(model, [batch], CLASSIFICATION)
    model, found = model.to(device), Fisher()
    autocast = contextlib.nullcontext if dtype is None else (lambda: torch.autocast(device.type, dtype))
    add_(found, model, trainable(model), batch.to(device), Labels(CLASSIFICATION), autocast=autocast)
    gaps = [((value.cpu() - expected[name]).abs().max() / expected[name].max()).item() for name, value in mean(found).items()]
    return max(gaps)


def seconds(device: torch.device, run: Callable[[], object], repetitions: int = 5) -> float:
    """Median seconds of a call, synchronised at both ends."""
    found = []
    for _ in range(repetitions + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[2:])


def fisher_ratio(device: torch.device) -> float:
    """The empirical Fisher information of 64 rows of the encoder over a forward and backward pass."""
    model, batch = Encoder(False).to(device), Batch({"x": torch.randn(64, 64, 512)}, torch.arange(64) % 10).to(device)
    params, labels, found = trainable(model), Labels(CLASSIFICATION, "empirical"), Fisher()

    def plain() -> None:
        F.cross_entropy(model(**batch.inputs), batch.targets).backward()
        model.zero_grad()

    return seconds(device, lambda: add_(found, model, params, batch, labels)) / seconds(device, plain)


def pull_bandwidth(device: torch.device, elements: int = 2**27) -> dict[str, float]:
    """GB/s of a pull of one large parameter, in blocks and compiled; it reads three tensors and writes one."""
    p, importance, anchor = (torch.rand(elements, device=device) for _ in range(3))
    found = {}
    for compiled in (False, True):
        took = seconds(device, lambda c=compiled: pull_([([p, importance, anchor], 0.5)], compiled=c))
        found["compiled" if compiled else "in blocks"] = 16 * elements / took / 1e9
    return found


def main() -> None:
    """Print each check with its figure."""
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here")
    device = torch.device("cuda", 0)
    print(torch.cuda.get_device_name(device), "torch", torch.__version__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        summaries = {kind: loop.train(spec(kind), folder / kind) for kind in ("cpu", "cuda")}
        gap = (weights(folder / "cpu") - weights(folder / "cuda")).abs().max().item()
        scores = {kind: round(summary["measures"]["average"], 3) for kind, summary in summaries.items()}
        print(f"cpu and cuda, fp32 SGD: largest difference of a weight {gap:.2e}; average accuracy {scores}")
        for precision in ("fp32", "amp_fp16", "amp_bf16", "bf16"):
            described = spec("cuda", precision=precision, dropout=0.2)
            summary = loop.train(described, folder / precision)
            resumed(described, folder / f"{precision}-resumed", 130)
            same = torch.equal(weights(folder / precision), weights(folder / f"{precision}-resumed"))
            peak = summary["memory"]
            print(
                f"{precision:9} average {summary['measures']['average']:.3f}, {summary['skipped_steps']} steps skipped, peak "
                f"{peak['measured_peak_bytes']:,} bytes ({peak['measured_by']}), resumed {'bit-identical' if same else 'DIFFERS'}"
            )
    print(f"framework around a step: {framework_ratio(device):.2f} of a plain loop")
    for recurrent in (False, True):
        gaps = {str(dtype): f"{fisher_gap(device, recurrent, dtype):.1e}" for dtype in (None, torch.float16, torch.bfloat16)}
        print(f"Fisher information of {'an LSTM' if recurrent else 'a transformer'}, largest gap to the CPU's: {gaps}")
    print(f"empirical Fisher information: {fisher_ratio(device):.2f} of a forward and backward pass")
    print("a pull of 134 M weights:", ", ".join(f"{rate:.0f} GB/s {how}" for how, rate in pull_bandwidth(device).items()))


if __name__ == "__main__":
    main()
