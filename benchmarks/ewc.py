"""What EWC costs: a training step with it beside a plain loop, its arithmetic alone beside the bandwidth floor, and its bytes.

The step is `retain.step.train_step` on L (MLP 784-2000-2000-10, SGD, batch 32), the plain loop what a user would write, on the same
rows in the same process. The proximal form pulls at every fourth step, the other two act at every one. The floor is a loop in C,
compiled here, that does the same arithmetic and reads every tensor once, over 109 million fp32 parameters in the shapes of
BERT-base's 197 tensors.

Run: python benchmarks/ewc.py [--json] [--rounds 7]     (one thread, CPU time, interleaved, median of the ratios; 3 GB of memory)
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import logging
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from retain.forgetting import quadratic
from retain.forgetting.ewc import EwcState, ewc
from retain.forgetting.fisher import Fisher
from retain.memory.optimizer import step_sizes
from retain.memory.precision import Precision
from retain.params import trainable
from retain.seams import Batch, Method, StepContext
from retain.spec import EwcSpec
from retain.step import CLASSIFICATION, Job, train_step

STEPS, BATCH, ROWS, LR = 32, 32, 3200, 0.05

FLOOR = """
extern "C" void pull(float* p, const float* A, const float* m, float c, long n) {
    for (long i = 0; i < n; i++) p[i] += A[i] / (A[i] + c) * (m[i] - p[i]);
}
extern "C" void push(float* g, const float* p, const float* A, const float* m, float s, long n) {
    for (long i = 0; i < n; i++) g[i] += s * A[i] * (p[i] - m[i]);
}
"""


class Timed:
    """Seconds of several alternatives, each beside the same reference, round by round."""

    def __init__(self, reference: Callable[[], float], rounds: int) -> None:
        self.reference, self.rounds, self.references = reference, rounds, []

    def ratios(self, cases: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {name: [] for name in cases}
        for run in (self.reference, *cases.values()):
            run()  # compilers, caches and pages
        for _ in range(self.rounds):
            for name, run in cases.items():
                before, mine, after = self.reference(), run(), self.reference()
                self.references += [before, after]
                found[name].append(2 * mine / (before + after))
        return found


# --- a training step --------------------------------------------------------------------------------------------------


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 2000), nn.ReLU(), nn.Linear(2000, 2000), nn.ReLU(), nn.Linear(2000, 10))


def plain_steps(after: Callable[[], object] = lambda: None, model: nn.Module | None = None) -> Callable[[], float]:
    """Steps of a plain loop, with something done after each."""
    model = model or make_model()
    x, y = torch.randn(ROWS, 784), torch.arange(ROWS) % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def run() -> float:
        began = time.process_time()
        for index in torch.randperm(ROWS).split(BATCH)[:STEPS]:
            loss = F.cross_entropy(model(x[index]), y[index])
            loss.backward()
            optimizer.step()
            after()
            optimizer.zero_grad()
        return time.process_time() - began

    return run


def plain_and_floor() -> Callable[[], float]:
    """Plain steps, each with the least that a pull can cost behind it; without a C compiler, plain steps."""
    model = make_model()
    params = [param.detach() for param in model.parameters()]
    floor = floor_of("pull", [([p, torch.rand_like(p), torch.randn_like(p)], 0.5) for p in params])
    return plain_steps(model=model) if floor is None else plain_steps(floor, model)


def fold_tasks(method: Method, state: EwcState, params: dict[str, nn.Parameter], tasks: int) -> None:
    ctx = StepContext(nn.Identity(), params, CLASSIFICATION)
    for _ in range(tasks):
        state.fisher = Fisher({name: torch.rand_like(param).square_() for name, param in params.items()}, 1)
        method.consolidate(ctx, state)


def ewc_steps(tasks: int, **settings) -> Callable[[], float]:
    """Steps of retain, with EWC that protects these many earlier tasks; without EWC for none."""
    model = make_model()
    params = trainable(model)
    x, y = torch.randn(ROWS, 784), torch.arange(ROWS) % 10
    methods = []
    if tasks:
        method = ewc(EwcSpec(**settings))
        state = method.init(params)
        fold_tasks(method, state, params, tasks)
        methods = [(method, state)]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    precision = Precision("fp32", torch.float32, contextlib.nullcontext)
    job = Job(model, params, optimizer, CLASSIFICATION, methods, precision, torch.device("cpu"))
    ctx = StepContext(model, params, CLASSIFICATION, task=tasks)

    def run() -> float:
        began = time.process_time()
        for step, index in enumerate(torch.randperm(ROWS).split(BATCH)[:STEPS]):
            batch = Batch({"input": x[index]}, y[index])
            train_step(job, batch, ctx._replace(step=step), step_sizes(optimizer, params))
        return time.process_time() - began

    return run


# --- the arithmetic alone ---------------------------------------------------------------------------------------------


def bert_shapes() -> list[tuple[int, ...]]:
    """BERT-base's 197 tensors (embeddings, 12 blocks, a classifier in place of the pooler): 109 million parameters."""
    block = [(768, 768), (768,)] * 4 + [(768,), (768,), (3072, 768), (3072,), (768, 3072), (768,), (768,), (768,)]
    return [(30522, 768), (512, 768), (2, 768), (768,), (768,), *(block * 12)]


def floor_of(form: str, terms: list) -> Callable[[], object] | None:
    """A loop in C over these tensors; None without a compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "floor.cpp", Path(folder) / "floor.so"
        source.write_text(FLOOR)
        subprocess.run([compiler, "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(target)], check=True)
        library = ctypes.CDLL(str(target))
    kernel = getattr(library, form)
    calls = [
        [*(ctypes.c_void_p(t.data_ptr()) for t in each), ctypes.c_float(factor), ctypes.c_long(each[0].numel())]
        for each, factor in terms
    ]

    def run(alive: list = terms) -> None:  # the calls hold addresses only
        for call in calls:
            kernel(*call)

    return run


def timed(run: Callable[[], object]) -> Callable[[], float]:
    def once() -> float:
        began = time.process_time()
        run()
        return time.process_time() - began

    return once


def arithmetic(form: str, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Ratios of a form over its floor, uncompiled and compiled, and the floor's seconds; empty without a C compiler."""
    params = [torch.randn(shape) for shape in bert_shapes()]
    importance, anchors = [torch.rand_like(p) for p in params], [torch.randn_like(p) for p in params]
    tensors = list(zip(params, importance, anchors, strict=True))
    if form == "push":
        tensors = [(torch.zeros_like(p), p, A, m) for p, A, m in tensors]
    run_ = quadratic.pull_ if form == "pull" else quadratic.push_
    terms = [(list(each), 0.5 if form == "pull" else 1e-6) for each in tensors]
    if (floor := floor_of(form, terms)) is None:
        return {}, 0.0
    timer = Timed(timed(floor), rounds)
    cases = {"blocked": timed(lambda: run_(terms)), "compiled": timed(lambda: run_(terms, compiled=True))}
    return timer.ratios(cases), statistics.median(timer.references)


# --- bytes ------------------------------------------------------------------------------------------------------------


def peak_bytes(run: Callable[[], object]) -> int:
    """What the CPU allocator holds at most during a call, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    live = peak = 0
    events = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def bytes_per_parameter(**settings) -> tuple[float, float]:
    """Extra peak of a step, and of the state, on L."""
    params = trainable(make_model())
    method = ewc(EwcSpec(**settings))
    state = method.init(params)
    fold_tasks(method, state, params, 1)
    for param in params.values():
        param.grad = torch.zeros_like(param)
    count = sum(param.numel() for param in params.values())
    sizes, ctx = dict.fromkeys(params, LR), StepContext(nn.Identity(), params, CLASSIFICATION)
    act = (lambda: method.project_(params, state, sizes)) if method.project_ else (lambda: method.add_grad_(ctx, state))
    return peak_bytes(act) / count, method.nbytes(state) / count


def main() -> None:
    """Print every figure beside its bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    found: list[dict] = []

    def add(name: str, value: float, bar: float | None, values: list[float] | None = None) -> None:
        found.append({"name": name, "value": value, "bar": bar, "min": min(values or [value]), "max": max(values or [value])})
        if not arguments.json:
            spread = f"({min(values):.2f} .. {max(values):.2f})" if values else ""
            verdict = "" if bar is None else f"bar {bar}  {'reached' if value <= 1.001 * bar else 'SHORT'}"
            print(f"{name:58} {value:7.3f} {spread:16} {verdict}", flush=True)

    steps = {
        "plain step and the floor of a pull, L": (plain_and_floor(), None),
        "train_step without a method, L": (ewc_steps(0), None),
        "EWC proximal, one earlier task, L": (ewc_steps(1), 1.7),
        "EWC proximal, five earlier tasks, L": (ewc_steps(5), 1.7),
        "EWC proximal, compiled, L": (ewc_steps(1, compile=True), 1.35),
        "EWC implicit (a pull at every step), L": (ewc_steps(1, form="implicit"), 1.7),
        "EWC implicit, compiled, L": (ewc_steps(1, form="implicit", compile=True), 1.35),
        "EWC explicit, one earlier task, L": (ewc_steps(1, form="explicit", **{"lambda": 0.01}), 1.7),
        "EWC explicit, compiled, L": (ewc_steps(1, form="explicit", compile=True, **{"lambda": 0.01}), 1.35),
    }
    timer = Timed(plain_steps(), arguments.rounds)
    ratios = timer.ratios({name: run for name, (run, _) in steps.items()})
    add("plain step, ms", statistics.median(timer.references) / STEPS * 1e3, None)
    for name, values in ratios.items():
        add(name, statistics.median(values), steps[name][1], values)
    del steps, timer
    for form, of in (("pull", "proximal, implicit"), ("push", "explicit")):
        ratios, floor = arithmetic(form, arguments.rounds)
        add(f"floor of a {form} ({of}), 109 M parameters, ms", floor * 1e3, None)
        for name, values in ratios.items():
            add(f"{form} alone, {name}, over the floor", statistics.median(values), 1.3 if name == "blocked" else 1.05, values)
    for form in ("proximal", "explicit"):
        for dtype, bar in (("fp32", 8), ("bf16", 6)):
            peak, state = bytes_per_parameter(form=form, importance_dtype=dtype, **({"every": 1} if form == "proximal" else {}))
            add(f"extra peak of a step, {form}, {dtype}, bytes a parameter", peak, 0.1)
            add(f"state, {form}, {dtype}, bytes a parameter", state, bar)
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
