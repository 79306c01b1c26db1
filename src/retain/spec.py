"""The one description of a run: what `retain.yaml` may say, checked before anything is loaded.

Planner, trainer and controller read a `RunSpec`; nothing writes to it. A changed spec is a new one (`with_values`).
This module imports no torch, so that a wrong configuration is refused within a second.
"""

from __future__ import annotations

import ast
import datetime
import difflib
import glob
import math
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from retain.errors import ConfigError, Finding

NOT_YET = {
    "model.hf": "mlp, cnn, factory",
    "model.config": "mlp, cnn, factory",
    "model.task": "mlp, cnn, factory",
    "model.lora": "mlp, cnn, factory",
    "stream.text": "features, image",
    "stream.text_pair": "features, image",
    "training_params.memory.checkpointing": "micro_batch, allow_inexact",
    "training_params.memory.offload_threshold": "micro_batch, allow_inexact",
    "budget.memory": "forgetting",
    "control": "",
    "parallel": "",
}
"""Keys of parts that are announced but not built, and what can be used in their place today."""

METHODS_NOT_YET = frozenset("si mas lwf der der++ agem packnet supermask averaging generative".split())


class Strict(BaseModel):
    """A part of the spec: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True, protected_namespaces=())


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    return value


Finite = Annotated[float, AfterValidator(_finite)]
Positive = Annotated[float, Field(gt=0), AfterValidator(_finite)]
NonNegative = Annotated[float, Field(ge=0), AfterValidator(_finite)]
Count = Annotated[int, Field(ge=1, le=2**40, strict=True)]
Share = Annotated[float, Field(ge=0, lt=1)]
Label = str | bool | int | float


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, (str, os.PathLike)) else value


def _as_text(value: Any) -> Any:
    """Dates and numbers as YAML reads them, as texts."""
    return str(value) if isinstance(value, (int, float, datetime.date)) and not isinstance(value, bool) else value


def _text_keys(value: Any) -> Any:
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else value


def _as_widths(value: Any) -> Any:
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


Files = Annotated[tuple[str, ...], BeforeValidator(_as_list), Field(min_length=1)]
Columns = Annotated[tuple[str, ...], BeforeValidator(_as_list)]


def _factory(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", value):
        raise ValueError(f"{value!r} is not of the form package.module:function")
    return value


Factory = Annotated[str, AfterValidator(_factory)]


def _at_most_one(part: BaseModel, names: Sequence[str]) -> None:
    given = [name for name in names if getattr(part, name) is not None]
    if len(given) > 1:
        raise ValueError(f"give one of {', '.join(given)}")


def _said(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def suggest(value: str, known: typing.Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest known one, or all of them."""
    known = list(known)
    folded = {name.lower(): name for name in known}
    close = [name for name in folded if value and value.lower() in name] or difflib.get_close_matches(value.lower(), folded, 1)
    return f"; did you mean {folded[close[0]]}?" if close else f"; known: {', '.join(known)}"


# --- model ------------------------------------------------------------------------------------------------------------


class MlpSpec(Strict):
    """A multilayer perceptron with ReLU; images are flattened."""

    hidden: Annotated[tuple[Count, ...], BeforeValidator(_as_widths)] = (256, 256)
    dropout: Share = 0.0


class CnnSpec(Strict):
    """Three 3x3 convolutions with BatchNorm and ReLU (width, 2 x width, 4 x width), then global average pooling."""

    width: Count = 32
    dropout: Share = 0.0


class ModelSpec(Strict):
    """At most one of `mlp`, `cnn`, `factory`; none means: mlp for vectors, cnn for images."""

    mlp: MlpSpec | None = None
    cnn: CnnSpec | None = None
    factory: Factory | None = None
    weights: str | None = None
    head: Literal["auto", "single", "growing", "per-task"] = "auto"

    @model_validator(mode="after")
    def _one_kind(self) -> ModelSpec:
        _at_most_one(self, ("mlp", "cnn", "factory"))
        return self


# --- stream -----------------------------------------------------------------------------------------------------------


class RandomSpec(Strict):
    """Random rows for planning and benchmarks. Labels are `row number mod classes`."""

    input: Literal["vector", "image", "tokens"] = "vector"
    shape: tuple[Count, ...] = (16,)
    classes: Annotated[int, Field(ge=2)] = 2
    samples: Count = 64
    tasks: Count = 1


class FraudSpec(Strict):
    """How many simulated card transactions there are; the same ones for the same numbers."""

    rows: Annotated[int, Field(ge=1000, le=2**31, strict=True)] = 100_000
    months: Annotated[int, Field(ge=1, le=120, strict=True)] = 6
    """Calendar months from April 2018 on."""
    seed: Annotated[int, Field(ge=0, strict=True)] = 0


class SplitSpec(Strict):
    """How rows become tasks."""

    by: Literal["class", "column", "time", "file", "permutation", "rotation", "none"] = "class"
    groups: Count | None = None
    """by class: how many tasks (default 5, or one class each when there are fewer classes)."""
    column: str | None = None
    """by column and by time: the column; it is never a feature."""
    order: tuple[Label, ...] | None = None
    """by class: the order of the classes; by column: the order of the values (and which of them)."""
    shared: tuple[Label, ...] = ()
    """by column: values whose rows every task needs; dealt once, seeded, evenly over the tasks."""
    every: Literal["day", "week", "month", "quarter", "year"] | None = None
    periods: Count | None = None
    """by time: this many tasks of equal row count, in time order."""
    until: Annotated[str, BeforeValidator(_as_text)] | None = None
    """by time: later rows are left out, as if they were not there yet: 2018-07 keeps all of July, 2018-07-31 all of that day."""
    tasks: Count = 10
    """by permutation and by rotation: how many tasks."""
    max_angle: Annotated[float, Field(gt=0, le=360)] = 180.0
    """by rotation: task k is turned by k * max_angle / tasks degrees."""
    task_id: bool = False
    """The task of a row is known when predicting (task-incremental): one head per task."""

    @model_validator(mode="after")
    def _complete(self) -> SplitSpec:
        if self.by in ("column", "time") and not self.column:
            raise ValueError(f"split by {self.by} needs `column: NAME`")
        if self.by == "time" and (self.every is None) == (self.periods is None):
            raise ValueError("split by time needs one of `every: month` and `periods: 4`")
        if self.by != "time" and self.until is not None:
            raise ValueError("`until` goes with `by: time` only")
        if self.by != "column" and self.shared:
            raise ValueError("`shared` goes with `by: column` only")
        return self


SOURCES = ("builtin", "csv", "parquet", "jsonl", "arrow", "npz", "hf", "factory", "random")


class StreamSpec(Strict):
    """Where rows come from, which columns they have, how they become tasks and how tasks are scored."""

    builtin: Literal["digits", "fraud"] | None = None
    """`fraud`: card transactions, SIMULATED; its label is `fraud`, and its tasks are months unless `split` says otherwise."""
    fraud: FraudSpec | None = None
    csv: Files | None = None
    parquet: Files | None = None
    jsonl: Files | None = None
    arrow: Files | None = None
    npz: Files | None = None
    hf: str | None = None
    """A Hugging Face data set: a local directory in its format, or a hub name."""
    factory: Factory | None = None
    random: RandomSpec | None = None
    label: str | None = None
    features: Columns | None = None
    image: str | None = None
    drop: Columns = ()
    id: str | None = None
    """A table's column that says whom a row is about (a customer, a card). It is no feature; a keyed hash of it stays beside
    stored rows, so that `retain purge` finds them."""
    duplicates: Literal["keep", "drop"] = "keep"
    """drop: a table's rows that repeat an earlier one in every column are left out."""
    image_size: Count | None = None
    """Images are resized to this height and width (bilinear)."""
    image_mean: Finite | tuple[Finite, ...] = 0.0
    image_std: Positive | tuple[Positive, ...] = 1.0
    """uint8 pixels are divided by 255, then (x - mean) / std."""
    split: SplitSpec = SplitSpec()
    relabel: Literal["parity"] | Annotated[dict[str, Label], BeforeValidator(_text_keys)] | None = None
    """Labels are replaced before anything else uses them, but `by: class` still splits by the original ones."""
    test: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of each task's rows held out for the measures, stratified by label and seeded."""
    validation: Share = 0.0
    metric: Annotated[str, AfterValidator(lambda value: parse_metric(value) and value)] = "accuracy"
    positive: Label | None = None
    """The positive class of auc, average_precision and recall_at_fpr; default: the larger label."""
    keep_eval: bool = True
    """Keep each task's evaluation rows in the run, so that old files may go."""

    @model_validator(mode="after")
    def _one_source(self) -> StreamSpec:
        _at_most_one(self, SOURCES)
        if any((self.csv, self.parquet, self.jsonl, self.arrow)) and not self.label:
            raise ValueError("a table needs `label: COLUMN`")
        if self.features and self.image:
            raise ValueError("give `features` or `image`, not both")
        if self.fraud is not None and self.builtin != "fraud":
            raise ValueError("`fraud` goes with `builtin: fraud`")
        arrays = self.source in ("npz", "factory", "random") or (self.source == "builtin" and self.builtin != "fraud")
        if arrays and (self.id is not None or self.duplicates == "drop"):
            raise ValueError("`id` and `duplicates` need a table (csv, parquet, jsonl, arrow, hf, or builtin: fraud)")
        return self

    @property
    def source(self) -> str:
        """The name of the source key that is used; `builtin` when none is given."""
        return next((name for name in SOURCES if getattr(self, name) is not None), "builtin")


def parse_metric(text: str) -> tuple[str, float | None]:
    """Split a metric's name from its argument.

    Returns:
        ``("recall_at_fpr", 0.01)`` for ``recall_at_fpr=0.01``, ``("accuracy", None)`` for ``accuracy``.

    Raises:
        ValueError: the name is unknown or the rate is outside (0, 1).
    """
    name, _, argument = text.partition("=")
    known = ("accuracy", "auc", "average_precision", "recall_at_fpr", "loss")
    if name not in known:
        raise ValueError(f"{text!r} is not a metric{suggest(name, known)}")
    if (name == "recall_at_fpr") != bool(argument):
        raise ValueError("recall_at_fpr needs a rate, as in recall_at_fpr=0.01; the others take none")
    if not argument:
        return name, None
    try:
        rate = float(argument)
    except ValueError:
        rate = math.nan
    if not 0 < rate < 1:
        raise ValueError(f"recall_at_fpr={argument}: the false-positive rate must lie between 0 and 1")
    return name, rate


# --- optimizer --------------------------------------------------------------------------------------------------------

_COMMON = ("lr", "weight_decay", "foreach", "fused")
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "SGD": (*_COMMON, "momentum", "dampening", "nesterov"),
    "Adam": (*_COMMON, "betas", "eps", "amsgrad"),
    "AdamW": (*_COMMON, "betas", "eps", "amsgrad"),
    "NAdam": ("lr", "weight_decay", "foreach", "betas", "eps", "momentum_decay"),
    "RAdam": ("lr", "weight_decay", "foreach", "betas", "eps"),
    "Adamax": ("lr", "weight_decay", "foreach", "betas", "eps"),
    "Adagrad": (*_COMMON, "lr_decay", "initial_accumulator_value", "eps"),
    "RMSprop": ("lr", "weight_decay", "foreach", "alpha", "eps", "momentum", "centered"),
}
"""Optimizers of torch.optim by name, and the arguments that a config may set."""


class OptimizerSpec(Strict):
    """An optimizer of torch.optim; `AdamW(lr=5e-5)` is short for `{name: AdamW, lr: 5e-5}`."""

    name: str = "AdamW"
    lr: Positive = 1e-3
    weight_decay: NonNegative | None = None
    betas: tuple[Share, Share] | None = None
    eps: Positive | None = None
    momentum: Share | None = None
    dampening: Share | None = None
    nesterov: bool | None = None
    amsgrad: bool | None = None
    alpha: Share | None = None
    centered: bool | None = None
    momentum_decay: NonNegative | None = None
    lr_decay: NonNegative | None = None
    initial_accumulator_value: NonNegative | None = None
    foreach: bool | None = None
    fused: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return parse_optimizer(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _known(self) -> OptimizerSpec:
        if self.name not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {self.name!r}{suggest(self.name, OPTIMIZERS)}")
        wrong = [key for key in self.arguments if key not in OPTIMIZERS[self.name]]
        if wrong:
            allowed = ", ".join(OPTIMIZERS[self.name])
            raise ValueError(f"{self.name} takes no {', '.join(wrong)}; it takes {allowed}")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum > 0")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the optimizer's class: those that were given."""
        return {k: v for k, v in self.model_dump().items() if k != "name" and v is not None}


def parse_optimizer(text: str) -> dict[str, Any]:
    """Read `AdamW(lr=5e-5)` as data; the text is parsed, never evaluated.

    Raises:
        ValueError: anything but a name with literal keyword arguments.
    """
    form = "write it as AdamW(lr=5e-5): a name, and keywords with plain numbers"
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} cannot be read as an optimizer; {form}") from None
    if isinstance(node, ast.Name):
        return {"name": node.id}
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args):
        raise ValueError(f"{text!r} cannot be read as an optimizer; {form}")
    values: dict[str, Any] = {"name": node.func.id}
    for keyword in node.keywords:
        if keyword.arg in (None, "name"):
            raise ValueError(f"{text!r} cannot be read as an optimizer; {form}")
        try:
            values[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            raise ValueError(f"{keyword.arg} in {text!r} is not a plain value; {form}") from None
    return values


class ScheduleSpec(Strict):
    """The learning rate over one task: linear warm-up over a share of its steps, then constant, linear or cosine to 0."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Share = 0.0

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


# --- methods ----------------------------------------------------------------------------------------------------------


class ReplaySpec(Strict):
    """Stored replay: rows of earlier tasks come on top of every batch of new rows."""

    ratio: NonNegative = 0.2
    """Replayed rows per new row: 0.2 adds 20 to every 100."""
    capacity: Count = 2000
    """Rows kept, for all tasks together."""
    policy: Literal["class-balanced", "reservoir", "ring"] = "class-balanced"
    floor: Annotated[int, Field(ge=0)] = 50
    """class-balanced: rows that every class keeps; a fair share (capacity / classes) where they do not all fit."""
    draw: Literal["uniform", "class-balanced"] = "uniform"
    weighting: Literal["rows", "classes"] = "classes"
    """classes: every class seen (every task, where classes do not grow) has the same expected share of the loss;
    rows: every row of the mixed batch counts the same."""


class EwcSpec(Strict):
    """Elastic weight consolidation: weights are held near those of earlier tasks, each as firmly as its Fisher information says."""

    lambda_: NonNegative = Field(default=40.0, alias="lambda")
    """Strength; with `normalize`, 10-100 is a useful range whatever the loss and the optimizer are. 0 protects nothing."""
    form: Literal["proximal", "implicit", "explicit"] = "proximal"
    """proximal: a pull that counts in the optimizer's own steps; implicit: the penalty's at the learning rate; both are stable at
    any strength. explicit: the penalty's gradient beside the loss's."""
    every: Count = 4
    """proximal: optimizer steps between two pulls."""
    tasks: Literal["online", "separate"] = "online"
    """online: one penalty around the last weights; separate: the exact sum of one penalty per task."""
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """online: what the importance so far is multiplied by at every task."""
    fisher: Literal["auto", "exact", "sampled", "empirical"] = "auto"
    """Which labels the Fisher information is over; auto: exact up to 100 classes, else sampled."""
    samples: Count | None = None
    """Rows of each task that are looked at, at most; all when not given."""
    normalize: bool = True
    """Every task's Fisher information is scaled to mean 1, so that `lambda` means the same everywhere."""
    refresh: Annotated[float, Field(gt=0, le=1)] | None = None
    """online: fold the importance in after every such share of a task's rows, while it trains; not given: at its end."""
    importance_dtype: Literal["fp32", "bf16"] = "fp32"
    storage: Literal["device", "host"] = "device"
    """Where importance and anchor lie."""
    compile: bool = False
    """Run large parameters through torch.compile."""

    @model_validator(mode="after")
    def _goes_together(self) -> EwcSpec:
        if self.tasks != "online" and (self.decay != 1 or self.refresh is not None):
            raise ValueError("`decay` and `refresh` need `tasks: online`; `tasks: separate` keeps every task's penalty as it is")
        if self.refresh is not None and self.importance_dtype == "bf16":
            raise ValueError("`refresh` folds in small parts, which bf16 would round away: use importance_dtype: fp32")
        if self.form != "proximal" and "every" in self.model_fields_set:
            raise ValueError(f"`every` needs form: proximal; form: {self.form} acts at every step")
        return self


class MethodSpec(Strict):
    """One method with its settings: exactly one key."""

    replay: ReplaySpec | None = None
    ewc: EwcSpec | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {value: {}} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _exactly_one(self) -> MethodSpec:
        if len(self.model_fields_set) != 1 or self.settings is None:
            raise ValueError("each entry of methods names exactly one method, as in `- replay: {ratio: 0.2}`")
        return self

    @property
    def name(self) -> str:
        """The method's name."""
        return next(iter(self.model_fields_set))

    @property
    def settings(self) -> Any:
        """The method's own settings."""
        return getattr(self, self.name)


class RegularizationSpec(Strict):
    """Short form of the common methods."""

    replay_ratio: NonNegative | None = None
    replay_capacity: Count | None = None
    ewc_lambda: NonNegative | None = None

    @model_validator(mode="after")
    def _with_ratio(self) -> RegularizationSpec:
        if self.replay_capacity is not None and self.replay_ratio is None:
            raise ValueError("replay_capacity needs replay_ratio (replayed rows per new row)")
        return self


class MemorySpec(Strict):
    """What the step may do to need less memory; none of it changes what is learned."""

    micro_batch: Count | Literal["none"] = "none"
    """Rows of one forward pass at most; the rest accumulates, with the same gradient."""
    allow_inexact: bool = False
    """Permit micro-batches with BatchNorm in train mode, whose statistics depend on the micro-batch."""


class TrainingSpec(Strict):
    """How each task is learned."""

    batch_size: Count = 32
    """New rows per optimizer step; replayed rows come on top."""
    epochs: Count = 3
    max_steps: Count | None = None
    """Optimizer steps per task at most."""
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    precision: Literal["fp32", "amp_fp16", "amp_bf16", "bf16", "fp64"] = "fp32"
    max_norm: Positive | None = None
    """Gradients are clipped to this global norm."""
    decay: Literal["matrices", "all"] = "matrices"
    """What weight decay acts on: parameters of two or more dimensions, or also biases and norms."""
    class_weights: Literal["none", "balanced"] | Annotated[dict[str, Positive], BeforeValidator(_text_keys)] = "none"
    """Weight of each class's rows in the loss. balanced: every class of a task counts the same; or a weight for each class by
    name (1 for those not named). Scaled to mean 1 over the task's rows."""
    reset_optimizer: bool = False
    """Drop the optimizer's state at every new task."""
    seed: Annotated[int, Field(ge=0)] = 0
    device: str = "auto"
    eval_batch_size: Count = 512
    regularization: RegularizationSpec = RegularizationSpec()
    methods: tuple[MethodSpec, ...] = ()
    memory: MemorySpec = MemorySpec()

    @model_validator(mode="after")
    def _one_owner(self) -> TrainingSpec:
        names = [method.name for method in self.methods]
        if self.regularization.replay_ratio is not None:
            names.append("replay")
        if self.regularization.ewc_lambda is not None:
            names.append("ewc")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} is configured twice (methods and regularization count together)")
        return self


class BudgetSpec(Strict):
    """What the run must keep to; `summary.json` says whether it did."""

    forgetting: Annotated[float, Field(ge=0, le=1)] | None = None
    score: Finite | None = None
    """The newest task's metric, just after it was learned, is at least this (of `loss`: at most). Catches data that teach nothing,
    such as a month with wrong labels, which stored rows may keep from harming the others."""


class CheckpointSpec(Strict):
    """Checkpoints within a task; a finished task is always saved."""

    every_seconds: Positive = 600.0
    every_steps: Count | None = None
    keep: Count = 2
    """Checkpoints within a task that are kept."""
    keep_tasks: Count | Literal["all"] = "all"
    """Finished tasks whose model and optimizer are kept (their measures and evaluation rows always are)."""


class _Loader(yaml.SafeLoader):
    """YAML as plain data, in which a key that stands twice is an error: the last one would win without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class RunSpec(Strict):
    """The whole of `retain.yaml`."""

    model: ModelSpec = ModelSpec()
    stream: StreamSpec = StreamSpec()
    training_params: TrainingSpec = TrainingSpec()
    budget: BudgetSpec = BudgetSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()

    @model_validator(mode="after")
    def _head_fits_split(self) -> RunSpec:
        if self.stream.split.task_id and self.model.head in ("single", "growing"):
            raise ValueError(f"model.head={self.model.head} does not go with stream.split.task_id=true: use per-task or auto")
        return self

    @property
    def methods(self) -> tuple[MethodSpec, ...]:
        """Every method of the run: the list, then those of the short form."""
        short, methods = self.training_params.regularization, list(self.training_params.methods)
        if short.replay_ratio is not None:
            given: dict[str, Any] = {"ratio": short.replay_ratio}
            if short.replay_capacity is not None:
                given["capacity"] = short.replay_capacity
            methods.append(MethodSpec(replay=ReplaySpec(**given)))
        if short.ewc_lambda is not None:
            methods.append(MethodSpec(ewc=EwcSpec.model_validate({"lambda": short.ewc_lambda})))
        return tuple(methods)

    @classmethod
    def parse(cls, values: Mapping[str, Any] | None, *, base: Path | None = None) -> RunSpec:
        """Check a configuration.

        Args:
            values: what the YAML file holds, as plain data; None for an empty file.
            base: the folder that relative paths start from; None leaves them as they are.

        Raises:
            ConfigError: with one finding for every wrong key, type and value.
        """
        if values is not None and not isinstance(values, Mapping):
            raise ConfigError(f"the configuration must be a mapping of keys, not {_said(values)}")
        values = _without_nulls(values or {})
        missing: list[Finding] = []
        _resolve_paths(values, base, missing)
        try:
            spec = cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(missing + [_finding(item) for item in error.errors(include_url=False)]) from None
        if missing:
            raise ConfigError(missing)
        return spec

    @classmethod
    def load(cls, path: str | Path, settings: Sequence[str] = ()) -> RunSpec:
        """Read a YAML file, apply `key=value` settings on top, and check the result.

        Example:
            >>> RunSpec.parse({"training_params": {"optimizer": "SGD(lr=0.1)"}}).training_params.optimizer.lr
            0.1
        """
        path = Path(path)
        try:
            with path.open(encoding="utf-8") as file:
                values = yaml.load(file, _Loader)
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file. Give the path of a YAML configuration.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read ({error}).") from None
        except RecursionError:
            raise ConfigError(f"{path}: nested too deeply for a configuration.") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not valid YAML. {error}") from None
        if values is not None and not isinstance(values, dict):
            raise ConfigError(f"{path}: the configuration must be a mapping of keys, not {_said(values)}")
        return cls.parse(apply_settings(values or {}, settings), base=path.resolve().parent)

    def with_values(self, changes: Mapping[str, Any]) -> RunSpec:
        """A new spec that differs at dotted keys, checked as a whole.

        Raises:
            ConfigError: the changed spec would not be valid.
        """
        values = self.to_values()
        for key, value in changes.items():
            _set(values, key, value)
        return type(self).parse(values)

    def to_values(self) -> dict[str, Any]:
        """The spec as plain data, as `parse` reads it; keys that were never set are left out."""
        return self.model_dump(mode="json", exclude_unset=True)


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which a key without a value, as an empty section of a YAML file has it, is absent."""
    kept = {key: value for key, value in values.items() if value is not None}
    return {key: _without_nulls(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def differences(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ between two specs' plain data, with the value before and after."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*before, *after}):
        old, new = before.get(key), after.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found[f"{prefix}{key}"] = (old, new)
    return found


def apply_settings(values: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Put `a.b.c=value` settings (values as YAML) over the data of a configuration.

    Raises:
        ConfigError: a setting without `=`, or one whose value is not YAML.
    """
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"--set {setting}: expected key=value, as in --set training_params.seed=1")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"--set {setting}: the value is not valid YAML") from None
        _set(values, key.strip(), value)
    return values


def _set(values: Any, key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for position, name in enumerate(parents):
        if isinstance(values, list) and name.isdigit() and int(name) < len(values):
            values = values[int(name)]
            continue
        if isinstance(values, dict) and values.get(name) is None:
            values[name] = {}
        values = values.get(name) if isinstance(values, dict) else None
        if not isinstance(values, (dict, list)):
            raise ConfigError(f"{key}: {'.'.join(parents[: position + 1])} holds no keys")
    if isinstance(values, list) and last.isdigit() and int(last) < len(values):
        values[int(last)] = value
    elif isinstance(values, dict):
        values[last] = value
    else:
        raise ConfigError(f"{key}: not a position in a list of {len(values)}")


def matching(path: str) -> list[str]:
    """The files that a pattern such as data/*.csv matches, in order of their names; a path without a pattern as it is."""
    return sorted(glob.glob(path)) if glob.has_magic(path) and not Path(path).exists() else [path]


def _matching(path: Any, where: str, missing: list[Finding]) -> list[Any]:
    """The same for whatever a file holds; a pattern without a match is a finding."""
    if not isinstance(path, str):
        return [path]
    if not (found := matching(path)):
        missing.append(Finding("no-files", f"{where}: no file matches {path}.", "", "Correct the path or the pattern."))
    return found or [path]


_PATH_KEYS = (("model", "weights"), *(("stream", name) for name in ("csv", "parquet", "jsonl", "arrow", "npz", "hf")))


def _resolve_paths(values: dict[str, Any], base: Path | None, missing: list[Finding]) -> None:
    """Expand ${VARIABLES} and make relative paths start at `base`, in copies of the parts concerned."""
    for part, key in _PATH_KEYS:
        section = values.get(part)
        if not isinstance(section, Mapping) or section.get(key) is None:
            continue

        def resolve(text: Any, where: str = f"{part}.{key}", hub: bool = key == "hf") -> Any:
            if not isinstance(text, str):
                return text
            for name in re.findall(r"\$\{(\w+)\}", text):
                if name not in os.environ:
                    remedy = f"Set it, as in {name}=/path/to/data retain train …"
                    missing.append(Finding("variable", f"{where}: the environment has no variable {name}.", "", remedy))
            path = Path(os.path.expandvars(text))
            try:
                path = path.expanduser()
            except RuntimeError:
                missing.append(
                    Finding("home", f"{where}: {text} starts at the home of a user who is not known here.", "", "Write it out.")
                )
            if base is None or path.is_absolute() or (hub and not (base / path).exists()):
                return str(path) if not hub or path.is_absolute() else text
            return str(base / path)

        found = section[key]
        values[part] = section = dict(section)
        if key in ("weights", "hf"):
            section[key] = resolve(found)
        else:
            listed = [resolve(item) for item in (found if isinstance(found, list) else [found])]
            section[key] = [path for item in listed for path in _matching(item, f"{part}.{key}", missing)]


# --- errors a person can use ------------------------------------------------------------------------------------------

_RATIO = "It is replayed rows per new row: 0.2 adds 20 to every 100."
_LAMBDA = "It is how firmly earlier tasks hold the weights: useful range 10-100, 0 protects nothing."
_REMEDIES = {
    "training_params.regularization.replay_ratio": _RATIO,
    "training_params.methods.replay.ratio": _RATIO,
    "training_params.regularization.ewc_lambda": _LAMBDA,
    "training_params.methods.ewc.lambda": _LAMBDA,
    "training_params.methods.ewc.decay": "1 keeps the importance of earlier tasks, 0.9 takes a tenth of it away at every task.",
    "training_params.methods.ewc.refresh": "It is a share of the task's rows: 0.25 folds four times per task.",
    "training_params.batch_size": "It is the number of new rows per optimizer step.",
}


def _finding(item: Any) -> Finding:
    """One pydantic error as a finding with the key's path, what was seen and what to do."""
    keys = _keys_of(item["loc"])
    path = ".".join(keys)
    plain = ".".join(key for key in keys if not key.isdigit())
    value, context = item.get("input"), item.get("ctx", {})
    if item["type"] == "extra_forbidden":
        if plain in NOT_YET or (plain.startswith("training_params.methods.") and keys[-1] in METHODS_NOT_YET):
            instead = NOT_YET.get(plain, ", ".join(MethodSpec.model_fields))
            remedy = f"Available here: {instead}." if instead else "Leave it out."
            return Finding("not-available", f"{path}: not available yet in this release.", "", remedy)
        fields = _fields_at(RunSpec, keys[:-1])
        announced = [key.rpartition(".")[2] for key in NOT_YET if key.rpartition(".")[0] == plain.rpartition(".")[0]]
        close = difflib.get_close_matches(keys[-1], fields + announced, 1)
        remedy = f"did you mean {close[0]}?" if close else f"known here: {', '.join(fields)}."
        return Finding("unknown-key", f"{path}: unknown;", "", remedy)
    remedy = _REMEDIES.get(plain, "")
    if item["type"] in _BOUNDS:
        bound = next(iter(context.values()))
        return Finding("value", f"{path}={_said(value)} must be {_BOUNDS[item['type']]} {bound:g}.", "", remedy)
    if item["type"] == "literal_error":
        known = re.findall(r"'([^']*)'", str(context["expected"]))
        text = f"{path}: {value} is not known{suggest(str(value), known)}"
        return Finding("value", text if text.endswith("?") else f"{text}.")
    text = str(context["error"]) if item["type"] == "value_error" else f"{item['msg']} (seen: {_said(value)})"
    text = f"{path}: {text}" if path else text
    return Finding("value", text if text.endswith("?") else f"{text}.", "", remedy)


def _keys_of(location: Sequence[int | str]) -> list[str]:
    """The keys of an error's place, without pydantic's own marks for the members of a union."""
    keys: list[str] = []
    for key in map(str, location):
        if key.isdigit() or _fields_at(RunSpec, keys):
            keys.append(key)
    return keys


_BOUNDS = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}


def _fields_at(part: type[BaseModel], keys: Sequence[str]) -> list[str]:
    """Names of the fields of the spec's part at a path of keys."""
    for key in keys:
        if key.isdigit():
            continue
        found = _part_of(keys_of(part).get(key))
        if not found:
            return []
        part = found
    return list(keys_of(part))


def keys_of(part: type[BaseModel]) -> dict[str, Any]:
    """The keys of a part of the spec as YAML has them (`lambda` is no name in Python), each with its type."""
    return {field.alias or name: field.annotation for name, field in part.model_fields.items()}


def _part_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple, Annotated):
        return next((part for part in map(_part_of, typing.get_args(annotation)) if part), None)
    return None
