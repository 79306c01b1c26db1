"""What only a GPU can show, in under two minutes: the same learning as on the CPU, exact resuming, and the cost around a step.

Run on a machine with a CUDA device: python benchmarks/gpu_check.py
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from retain.spec import RunSpec
from retain.training import loop
from retain.training.lineage import load_checkpoint


class Killed(BaseException):
    """Stands for a kill."""


def spec(device: str, **training: Any) -> RunSpec:
    """Digits class by class with replay, three epochs a task."""
    settings = {"epochs": 3, "optimizer": "SGD(lr=0.1)", "regularization": {"replay_ratio": 1.0, "replay_capacity": 200}}
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


if __name__ == "__main__":
    main()
