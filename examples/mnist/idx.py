"""Reads images of handwritten digits: MNIST's IDX files, or the digits that scikit-learn brings."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import torch

import dear

Split = tuple[torch.Tensor, torch.Tensor]
"""Images `[n, 1, 28, 28]`, float32, normalized; labels `[n]`, int64."""

_DTYPES = {0x08: np.uint8, 0x09: np.int8, 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MEAN, STD = 0.1307, 0.3081  # of MNIST's training images


def read_idx(path: Path) -> np.ndarray:
    """The array in an IDX file (http://yann.lecun.com/exdb/mnist), gzipped if it ends in .gz.

    Raises:
        dear.UserError: the file is no IDX file or shorter than its header says.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError) as error:
        raise dear.UserError(f"{path}: cannot be read: {error}") from None
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _DTYPES:
        raise dear.UserError(f"{path}: not an IDX file")
    dtype, rank = np.dtype(_DTYPES[data[2]]), data[3]
    start = 4 + 4 * rank
    shape = tuple(int(n) for n in np.frombuffer(data[4:start], ">i4"))
    if len(data) - start != math.prod(shape) * dtype.itemsize:
        raise dear.UserError(
            f"{path}: {len(data) - start} bytes of data, but its header says {shape}"
        )
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def load_mnist(folder: Path) -> tuple[Split, Split]:
    """Training and test images of MNIST; with the 10,000 test images alone, 9 in 10 for training.

    Raises:
        dear.UserError: no pair of image and label files is there, or a file is damaged.
    """
    test = _pair(folder, "t10k")
    train = _pair(folder, "train")
    if train is None and test is None:
        raise dear.UserError(
            f"{folder}: no MNIST files (train- or t10k-images-idx3-ubyte, -labels-idx1-ubyte, "
            "gzipped or not)"
        )
    if train is None or test is None:
        return _split(*(train or test))
    return train, test


def load_digits() -> tuple[Split, Split]:
    """scikit-learn's 1,797 digits of 8 x 8 pixels, enlarged and framed to 28 x 28."""
    from sklearn.datasets import load_digits as bundled

    images, labels = bundled(return_X_y=True)
    pixels = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
    pixels = torch.nn.functional.interpolate(pixels, size=(20, 20), mode="bilinear")
    return _split(
        (torch.nn.functional.pad(pixels, (4, 4, 4, 4)) - MEAN) / STD,
        torch.from_numpy(labels).long(),
    )


def _pair(folder: Path, prefix: str) -> Split | None:
    images = _find(folder, f"{prefix}-images-idx3-ubyte")
    labels = _find(folder, f"{prefix}-labels-idx1-ubyte")
    if images is None or labels is None:
        return None
    pixels = torch.from_numpy(read_idx(images).astype(np.float32))[:, None] / 255
    return (pixels - MEAN) / STD, torch.from_numpy(read_idx(labels).astype(np.int64))


def _find(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)


def _split(images: torch.Tensor, labels: torch.Tensor) -> tuple[Split, Split]:
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[len(order) // 10 :], order[: len(order) // 10]
    return (images[train], labels[train]), (images[test], labels[test])
