"""From a spec to a model: an input layer for images and tables, a body that makes features, a head that makes logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from retain.data.task import Stream
from retain.errors import ConfigError
from retain.factory import LOG, blaming
from retain.models.heads import (
    GrowingHead,
    Head,
    NoHead,
    PerTaskHead,
    SingleHead,
    grow_,
    makes_logits,
    resolve_head,
    seeded,
    taken_by_factory,
)
from retain.params import derive
from retain.spec import CnnSpec, MlpSpec, ModelSpec, RunSpec, StreamSpec


class Classifier(nn.Module):
    """Rows to logits.

    Attributes:
        inputs: what stands between a row as it is stored and the body: `ImageInput`, `TableInput`, or None.
        body: prepared rows to features [rows, d].
        head: features to logits; see `retain.models.heads`.
    """

    head: Head

    def __init__(self, inputs: nn.Module | None, body: nn.Module, head: Head) -> None:
        super().__init__()
        self.inputs, self.body, self.head = inputs, body, head

    def forward(self, x: Tensor, task: int | Tensor = 0, codes: Tensor | None = None) -> Tensor:
        """Logits [rows, outputs].

        Args:
            x: rows; images as uint8 or floats [rows, channels, height, width].
            task: number of the task, or of each row's task (int64 [rows]); only per-task heads look at it.
            codes: categories of a table's text columns, whole numbers [rows, text columns]; None where it has none.
        """
        if self.inputs is not None:
            x = self.inputs(x) if codes is None else self.inputs(x, codes)
        return self.head(self.body(x), task)


class ImageInput(nn.Module):
    """(x - mean) / std in the body's dtype, per channel; uint8 pixels are divided by 255 first."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        super().__init__()
        for name, value in (("mean", mean), ("std", std)):
            # They come from the configuration and are no part of the weights, but follow the module's device and dtype.
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32).reshape(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalised images of the same shape; the arithmetic is at least fp32."""
        values = x.to(torch.promote_types(self.mean.dtype, torch.float32))
        if x.dtype == torch.uint8:
            values = values / 255
        return ((values - self.mean) / self.std).to(self.mean.dtype)


class TableInput(nn.Module):
    """Numbers, an indicator for each column that may have missing values, and one for every category.

    Args:
        gaps: columns of ``x`` that may be NaN.
        categories: how many values each column of ``codes`` has.
    """

    places: Tensor
    starts: Tensor

    def __init__(self, gaps: Sequence[int], categories: Sequence[int]) -> None:
        super().__init__()
        self.width = sum(categories)
        self.gaps = bool(gaps)
        starts = [sum(categories[:place]) for place in range(len(categories))]
        for name, values in (("places", gaps), ("starts", starts)):
            self.register_buffer(name, torch.tensor(list(values), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, codes: Tensor | None = None) -> Tensor:
        """Features [rows, numbers + gaps + categories], in the dtype of ``x``."""
        parts = [x]
        if self.gaps:
            parts = [x.nan_to_num(), x.index_select(1, self.places).isnan().to(x.dtype)]
        if codes is not None:
            parts.append(x.new_zeros(len(x), self.width).scatter_(1, codes.long() + self.starts, 1.0))
        return torch.cat(parts, 1)


def build_model(spec: RunSpec, stream: Stream, sizes: Sequence[int]) -> Classifier:
    """The model of a run, in fp32 on the CPU; its weights depend on the seed only, or come from `model.weights`.

    Args:
        spec: the run's description.
        stream: tells the kind and shape of the inputs, the classes and the scenario.
        sizes: the head's `sizes`, to build a model that saved weights fit into; empty for a new one, whose growing or
            per-task head then has no outputs before `grow_`.

    Raises:
        ConfigError: the parts do not go together, the factory fails or the weights do not fit.
    """
    kind = resolve_head(spec, stream)
    seed, classes = spec.training_params.seed, len(stream.classes)
    fixed = sizes[0] if sizes and kind == "single" else classes
    with seeded(derive("init", seed)):
        body, d = _body(spec.model, stream, fixed)

    head: Head
    if kind == "single" and sizes and sizes[0] < classes and not makes_logits(spec.model):
        kind = "growing" if spec.model.head == "auto" else kind  # the run began before some of the classes were there
    if kind == "single":
        with seeded(derive("head", seed, 0)):
            head = NoHead(fixed) if makes_logits(spec.model) else SingleHead(d, fixed)
        grow_(head, classes, 0)
    else:
        head = PerTaskHead(d) if kind == "per-task" else GrowingHead(d)
        for number, outputs in enumerate(sizes):
            grow_(head, outputs, derive("head", seed, number))

    model = Classifier(_inputs(spec.stream, stream), body, head)
    if spec.model.weights is not None:
        _load_weights_(model, Path(spec.model.weights))
    return model


# --- parts ------------------------------------------------------------------------------------------------------------


def _inputs(spec: StreamSpec, stream: Stream) -> nn.Module | None:
    if stream.kind != "image":
        return TableInput(stream.gaps, stream.categories) if stream.gaps or stream.categories else None
    for name in ("image_mean", "image_std"):
        value = getattr(spec, name)
        if isinstance(value, tuple) and len(value) not in (1, stream.shape[0]):
            raise ConfigError(f"stream.{name} has {len(value)} values; the images have {stream.shape[0]} channels.")
    return ImageInput(spec.image_mean, spec.image_std)


def _body_shape(stream: Stream) -> tuple[int, ...]:
    """Shape of one row as the body takes it."""
    first, *others = stream.shape
    return (first + len(stream.gaps) + sum(stream.categories), *others)


def _body(model: ModelSpec, stream: Stream, classes: int) -> tuple[nn.Module, int]:
    """The body and its number of features."""
    if model.factory is not None:
        return _from_factory(model.factory, stream, classes)
    if stream.kind not in ("vector", "image"):
        raise ConfigError(f"mlp and cnn take vectors or images; for {stream.kind} set model.factory: package.module:function.")
    if model.cnn is None and (model.mlp is not None or stream.kind == "vector"):
        return _mlp(model.mlp or MlpSpec(), _body_shape(stream))
    if stream.kind == "vector" or len(stream.shape) != 3:
        seen = f"{stream.kind} rows of shape {tuple(stream.shape)}"
        raise ConfigError(f"cnn takes images [channels, height, width], not {seen}. Use model.mlp.")
    return _cnn(model.cnn or CnnSpec(), stream.shape[0])


def _mlp(spec: MlpSpec, shape: Sequence[int]) -> tuple[nn.Module, int]:
    d = math.prod(shape)
    layers: list[nn.Module] = [nn.Flatten()] if len(shape) > 1 else []
    for width in spec.hidden:
        layers += [nn.Linear(d, width), nn.ReLU(), *_dropout(spec.dropout)]
        d = width
    return nn.Sequential(*layers), d


def _dropout(share: float) -> list[nn.Module]:
    return [nn.Dropout(share)] if share else []


def _cnn(spec: CnnSpec, channels: int) -> tuple[nn.Module, int]:
    layers: list[nn.Module] = []
    for width in (spec.width, 2 * spec.width, 4 * spec.width):
        if layers:
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *_dropout(spec.dropout)), channels


def _from_factory(name: str, stream: Stream, classes: int) -> tuple[nn.Module, int]:
    factory, taken = taken_by_factory(name)
    known = {"input_shape": _body_shape(stream), "classes": classes}
    with blaming("model.factory", name):
        body = factory(**{key: known[key] for key in taken})
    if not isinstance(body, nn.Module):
        raise ConfigError(f"model.factory={name} must return a torch.nn.Module; it returned {type(body).__name__}.")
    body.to("cpu", torch.float32)

    modes = {part: part.training for part in body.modules()}
    body.eval()  # so that BatchNorm leaves its buffers alone
    with torch.no_grad(), blaming("model.factory", name):
        dtype = torch.int64 if stream.kind == "tokens" else torch.float32
        outputs = body(torch.zeros(2, *_body_shape(stream), dtype=dtype))
    for part, mode in modes.items():
        part.training = mode
    seen = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or outputs.shape[0] != 2:
        raise ConfigError(f"model.factory={name}: 2 rows must give features [2, d]; they gave {seen}.")
    if "classes" in taken and outputs.shape[1] != classes:
        raise ConfigError(f"model.factory={name}: 2 rows must give logits [2, {classes}]; they gave {seen}.")
    return body, outputs.shape[1]


# --- weights ----------------------------------------------------------------------------------------------------------


def _load_weights_(model: Classifier, path: Path) -> None:
    """Start from a checkpoint: every name of the body must be there and fit; a head that does not fit keeps its init.

    Names are those of the whole model (``body.…``, ``head.…``) or of the body alone.
    """
    if path.suffix != ".safetensors":
        raise ConfigError(
            f"model.weights={path}: only .safetensors files are read, since a pickle can run code. Convert it: "
            'safetensors.torch.save_file(torch.load(FILE, weights_only=True), "weights.safetensors").'
        )
    try:
        file = load_file(path)
    except FileNotFoundError:
        raise ConfigError(f"model.weights={path}: no such file.") from None
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.weights={path}: cannot be read ({error}).") from None

    own = model.state_dict()
    of_body = {f"body.{name}": tensor for name, tensor in file.items()}
    if len(of_body.keys() & own.keys()) > len(file.keys() & own.keys()):
        file = of_body
    fits = {name for name in own.keys() & file.keys() if own[name].shape == file[name].shape}
    there = {own[name].data_ptr() for name in fits}  # a tied tensor is stored under one of its names
    body = {name for name in own if not name.startswith("head.")}
    missing = [name for name in sorted(body - file.keys()) if own[name].data_ptr() not in there]
    unexpected = sorted(name for name in file.keys() - own.keys() if not name.startswith("head."))
    differ = [f"{n} {tuple(file[n].shape)} not {tuple(own[n].shape)}" for n in sorted((body & file.keys()) - fits)]
    faults = {"missing": missing, "unexpected": unexpected, "of another shape": differ}
    if any(faults.values()):
        listed = "; ".join(f"{fault}: {_some(names)}" for fault, names in faults.items() if names)
        raise ConfigError(f"model.weights={path} does not fit the model. {listed}.")

    model.load_state_dict({name: file[name] for name in fits}, strict=False)
    if kept := sorted(own.keys() - body - fits):
        LOG.info("model.weights=%s: the head keeps its initial weights (%s)", path, _some(kept))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
