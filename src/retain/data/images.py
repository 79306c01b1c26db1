"""Images as arrays: layout, size, rotation, and decoding of image files inside a table."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor

from retain.errors import ConfigError, DataError

CHUNK = 1024
"""Images that are resized or rotated at a time, so that the float copy stays small."""


def channels_first(x: np.ndarray) -> np.ndarray:
    """Images as [rows, channels, height, width], from [rows, height, width] with or without channels on either side.

    Up to four channels are expected; where both sides could be channels, the first counts.
    """
    if x.ndim == 3:
        return x[:, None]
    return np.moveaxis(x, 3, 1) if x.shape[3] <= 4 < x.shape[1] else x


def resized(images: Tensor, size: int) -> Tensor:
    """Images [rows, channels, height, width] at size x size (bilinear, antialiased), in their own dtype.

    Raises:
        ConfigError: the result does not fit into memory.
    """
    if images.shape[-2:] == (size, size):
        return images

    def resize(chunk: Tensor) -> Tensor:
        return F.interpolate(chunk, size=(size, size), mode="bilinear", antialias=True, align_corners=False)

    try:
        return _in_chunks(images, resize)
    except (RuntimeError, MemoryError) as error:
        said = f"images of {size:,} x {size:,} pixels do not fit into memory"
        raise ConfigError(f"stream.image_size={size}: {said}. Choose a smaller size.") from error


def rotated(images: Tensor, degrees: float) -> Tensor:
    """Images [rows, channels, height, width] turned counter-clockwise about their centre; corners become 0."""
    height, width = images.shape[-2:]
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    # affine_grid's coordinates run from -1 to 1 along both sides, so a turn of a rectangle needs the ratio of its sides
    theta = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])

    def turn(chunk: Tensor) -> Tensor:
        grid = F.affine_grid(theta.to(chunk.dtype).expand(len(chunk), 2, 3), list(chunk.shape), align_corners=False)
        return F.grid_sample(chunk, grid, mode="bilinear", padding_mode="zeros", align_corners=False)

    return _in_chunks(images, turn)


def _in_chunks(images: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a change to floats, chunk by chunk; uint8 images are rounded back."""

    def changed() -> Iterator[Tensor]:
        for chunk in images.split(CHUNK):
            if images.dtype == torch.uint8:
                yield change(chunk.float()).round().clamp(0, 255).to(torch.uint8)
            else:
                yield change(chunk)

    return torch.cat(list(changed()))


def decoded(column: pa.ChunkedArray, where: str, folder: Path, size: int | None) -> np.ndarray:
    """Decode a column of image files to uint8 [rows, channels, height, width].

    All images become grey when all are grey, else RGB.

    Args:
        column: encoded bytes, paths, or structs of `bytes` and `path` as Hugging Face data sets hold them.
        where: names the column in messages.
        folder: relative paths start here.
        size: height and width to resize to; None needs images of one size.

    Raises:
        ConfigError: Pillow is not installed.
        DataError: an image cannot be read, or sizes differ.
    """
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(f"{where}: images are decoded by Pillow, which is missing. Install it: pip install pillow") from None

    def opened(value: Any, row: int) -> Image.Image:
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if value is None or value in (b"", ""):
            raise DataError(f"{where}: row {row} has no image. Leave such rows out.")
        if not isinstance(value, bytes | str):
            seen = f"row {row} holds {type(value).__name__}, which is no image"
            raise DataError(f"{where}: {seen}. Name a column of encoded images, paths or lists of pixels in stream.image.")
        try:
            image = Image.open(io.BytesIO(value) if isinstance(value, bytes) else folder / value)
            image.load()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{where}: row {row} cannot be read as an image ({error}).") from None
        return image

    pictures = [opened(value, row) for row, value in enumerate(column.to_pylist(), 1)]
    mode = "L" if all(picture.mode in ("L", "1") for picture in pictures) else "RGB"
    arrays = [channels_first(np.asarray(picture.convert(mode))[None]) for picture in pictures]
    if size is not None:
        arrays = [resized(torch.tensor(array), size).numpy() for array in arrays]
    shapes = sorted({array.shape[2:] for array in arrays})
    if len(shapes) > 1:
        raise DataError(f"{where}: images of {len(shapes)} sizes, such as {shapes[0]} and {shapes[-1]}. Set stream.image_size.")
    return np.concatenate(arrays)
