"""A folder of made-up images in MNIST's format, for tests that read files and learn nothing."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np


def idx(array: np.ndarray) -> bytes:
    """The array as an IDX file of bytes."""
    header = struct.pack(">HBB", 0, 0x08, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_mnist(folder: Path, *, zipped: bool = False, images: int = 10, shift: int = 0) -> Path:
    """Test images with the labels 0, 1, 2, ...; `shift` changes every pixel."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = (np.arange(images * 28 * 28).reshape(images, 28, 28) + shift) % 256
    for name, array in (("images-idx3", pixels), ("labels-idx1", np.arange(images) % 10)):
        data = idx(array)
        path = folder / f"t10k-{name}-ubyte{'.gz' if zipped else ''}"
        path.write_bytes(gzip.compress(data) if zipped else data)
    return folder
