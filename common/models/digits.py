"""Reads images of handwritten digits: MNIST's IDX files, or the digits that scikit-learn brings."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from common.models import mnist_files
from dear.errors import UserError

Split = tuple[torch.Tensor, torch.Tensor]
"""Images `[n, 1, 28, 28]`, float32, normalized; labels `[n]`, int64."""

_DTYPES = {0x08: np.uint8, 0x09: np.int8, 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MEAN, STD = 0.1307, 0.3081  # of MNIST's training images


def read_idx(path: Path) -> np.ndarray:
    """The array in an IDX file (http://yann.lecun.com/exdb/mnist), gzipped if it ends in .gz.

    Raises:
        UserError: the file is no IDX file or shorter than its header says.
    """
    data = mnist_files.contents(path)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _DTYPES:
        raise UserError(f"{path}: not an IDX file")
    dtype, rank = np.dtype(_DTYPES[data[2]]), data[3]
    start = 4 + 4 * rank
    shape = tuple(int(n) for n in np.frombuffer(data[4:start], ">i4"))
    if len(data) - start != math.prod(shape) * dtype.itemsize:
        raise UserError(f"{path}: {len(data) - start} bytes of data, but its header says {shape}")
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def load_mnist(folder: Path) -> tuple[Split, Split]:
    """Training and test images of MNIST; with the 10,000 test images alone, 9 in 10 for training.

    Raises:
        UserError: no pair of image and label files is there, or a file is damaged.
    """
    train, test = (_load(folder, part) for part in mnist_files.PARTS)
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


def _load(folder: Path, part: str) -> Split | None:
    paths = mnist_files.pair(folder, part)
    if paths is None:
        return None
    images, labels = (read_idx(path) for path in paths)
    pixels = torch.from_numpy(images.astype(np.float32))[:, None] / 255
    return (pixels - MEAN) / STD, torch.from_numpy(labels.astype(np.int64))


def _split(images: torch.Tensor, labels: torch.Tensor) -> tuple[Split, Split]:
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[len(order) // 10 :], order[: len(order) // 10]
    return (images[train], labels[train]), (images[test], labels[test])
