"""MNIST's handwritten digits, read from its IDX files (http://yann.lecun.com/exdb/mnist)."""

from __future__ import annotations

import functools
import gzip
import hashlib
import math
from pathlib import Path

from common.models.datasets.sources import Parts
from common.models.datasets.tensors import Split, Tensors, split
from dear.errors import UserError
from dear.lazy import np, torch

MEAN, STD = 0.1307, 0.3081  # of MNIST's training images
PARTS = ("train", "t10k")
_KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")
_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


@functools.cache
def digest(data: str, folder: Path) -> str:
    """Returns a digest of the files' uncompressed contents; raises `UserError` as `pair` does."""
    hasher = hashlib.sha256()
    for part in PARTS:
        for path in pair(folder, part) or ():
            hasher.update(hashlib.sha256(contents(path)).digest())
        hasher.update(part.encode())
    return hasher.hexdigest()[:16]


def load(data: str, folder: Path, size: int | None) -> Parts:
    """Loads images `[n, 1, 28, 28]`, normalized; see `load_mnist`."""
    train, test = load_mnist(folder)
    complete = [name for name in PARTS if pair(folder, name) is not None]
    images = len(train[1]) + len(test[1])
    kind = {"train": "training", "t10k": "test"}[complete[0]]
    origin = None if len(complete) == len(PARTS) else f"MNIST's {images:,} {kind} images"
    return Parts(train=Tensors(*train), test=Tensors(*test), classes=10, split=origin)


def read_idx(path: Path) -> np.ndarray:
    """Returns the array in an IDX file, which is gzipped if its name ends in .gz.

    Raises:
        UserError: the file is no IDX file, or its length differs from the one in its header.
    """
    data = contents(path)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _DTYPES:
        raise UserError(f"{path}: not an IDX file")
    dtype, rank = np.dtype(_DTYPES[data[2]]), data[3]
    start = 4 + 4 * rank
    shape = tuple(int(n) for n in np.frombuffer(data[4:start], ">i4"))
    if len(data) - start != math.prod(shape) * dtype.itemsize:
        raise UserError(f"{path}: {len(data) - start} bytes of data, but its header says {shape}")
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def load_mnist(folder: Path) -> tuple[Split, Split]:
    """Returns MNIST's training and test images and labels.

    If the folder has only the training files or only the test files, they are split: 9 in 10 images
    are for training.

    Raises:
        UserError: the folder has no pair of image and label files, or a file is damaged.
    """
    train, test = (_load(folder, part) for part in PARTS)
    if train is None or test is None:
        return split(*(train or test))
    return train, test


def _load(folder: Path, part: str) -> Split | None:
    paths = pair(folder, part)
    if paths is None:
        return None
    images, labels = (read_idx(path) for path in paths)
    pixels = torch.from_numpy(images.astype(np.float32))[:, None] / 255
    return (pixels - MEAN) / STD, torch.from_numpy(labels.astype(np.int64))


def pair(folder: Path, part: str) -> tuple[Path, Path] | None:
    """Returns the image file and the label file of `part` (`train` or `t10k`), gzipped or not.

    Returns None if one is missing and the other part is complete.

    Raises:
        UserError: both parts are incomplete.
    """

    def find(name: str) -> Path | None:
        return next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)

    paths_of = {name: tuple(find(f"{name}-{kind}") for kind in _KINDS) for name in PARTS}
    complete = {name: paths for name, paths in paths_of.items() if all(paths)}
    if not complete:
        raise UserError(
            f"{folder}: no MNIST files (train- or t10k-images-idx3-ubyte, -labels-idx1-ubyte, "
            "gzipped or not)"
        )
    return complete.get(part)


def contents(path: Path) -> bytes:
    """Returns the content of a file, decompressed if its name ends in .gz.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
