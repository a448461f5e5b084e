"""Real data by name, without importing torch: where it is, a digest of it, and how it is loaded."""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.util
import math
import os
from pathlib import Path

from dear.errors import UserError
from dear.lazy import np, torch

Split = tuple["torch.Tensor", "torch.Tensor"]
"""Images `[n, 1, 28, 28]`, float32, normalized; labels `[n]`, int64."""

MNIST_DIR = "MNIST_DIR"
"""The environment variable with the folder of MNIST's files."""
MEAN, STD = 0.1307, 0.3081  # of MNIST's training images
PARTS = ("train", "t10k")
_KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")
_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def folder_of(data: str, given: str | Path | None) -> Path | None:
    """Where the files of `data` are: `given`, else what the environment says; None: it has none.

    Raises:
        UserError: the folder is not known, not there, or not wanted.
    """
    if data != "mnist":
        if given is not None:
            raise UserError(f"data_dir: {data} comes with scikit-learn and has no folder")
        return None
    named = given or os.environ.get(MNIST_DIR)
    if not named:
        raise UserError(f"learn.data: where is mnist? Set data_dir=FOLDER or {MNIST_DIR}")
    folder = Path(named).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"learn.data: mnist: there is no folder {folder}")
    return folder


def digest(data: str, folder: Path | None) -> str:
    """A digest of what the files hold.

    Raises:
        UserError: they are not there, or cannot be read.
    """
    folder = folder_of(data, folder)
    if folder is not None:
        return _digest_of_files(folder)
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise UserError(f"learn.data: {data} comes with scikit-learn, which is not installed")
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return hashlib.sha256(contents(path)).hexdigest()[:16]


@functools.cache
def _digest_of_files(folder: Path) -> str:
    """Of all that is in the folder's files, gzipped or not; raises `UserError` as `pair` does."""
    whole = hashlib.sha256()
    for part in PARTS:
        for path in pair(folder, part) or ():
            whole.update(hashlib.sha256(contents(path)).digest())
        whole.update(part.encode())
    return whole.hexdigest()[:16]


def load(data: str, folder: Path | None) -> tuple[Split, Split]:
    """Images and labels to train on, and those to judge by; imports torch.

    Raises:
        UserError: the folder is not that of `data`, or a file is missing or damaged.
    """
    folder = folder_of(data, folder)
    return load_digits() if folder is None else load_mnist(folder)


def read_idx(path: Path) -> np.ndarray:
    """The array in an IDX file (http://yann.lecun.com/exdb/mnist), gzipped if it ends in .gz.

    Raises:
        UserError: the file is no IDX file or shorter than its header says.
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
    """Training and test images of MNIST; with the 10,000 test images alone, 9 in 10 for training.

    Raises:
        UserError: no pair of image and label files is there, or a file is damaged.
    """
    train, test = (_load(folder, part) for part in PARTS)
    if train is None or test is None:
        return _split(*(train or test))
    return train, test


def split_of(data: str, folder: Path | None, images: int) -> str | None:
    """Of what `load` gives both parts, in words; None where the data has parts of its own.

    Args:
        images: of both parts together.
    """
    folder = folder_of(data, folder)
    if folder is None:
        return f"scikit-learn's {images:,} digits"
    found = [name for name in PARTS if pair(folder, name) is not None]
    if len(found) == len(PARTS):
        return None
    kind = {"train": "training", "t10k": "test"}[found[0]]
    return f"MNIST's {images:,} {kind} images"


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
    paths = pair(folder, part)
    if paths is None:
        return None
    images, labels = (read_idx(path) for path in paths)
    pixels = torch.from_numpy(images.astype(np.float32))[:, None] / 255
    return (pixels - MEAN) / STD, torch.from_numpy(labels.astype(np.int64))


def _split(images: torch.Tensor, labels: torch.Tensor) -> tuple[Split, Split]:
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[len(order) // 10 :], order[: len(order) // 10]
    return (images[train], labels[train]), (images[test], labels[test])


def pair(folder: Path, part: str) -> tuple[Path, Path] | None:
    """Image and label file of a part (`train` or `t10k`), gzipped or not; None if one is missing.

    Raises:
        UserError: there is no complete part in the folder at all.
    """

    def find(name: str) -> Path | None:
        return next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)

    found = {name: tuple(find(f"{name}-{kind}") for kind in _KINDS) for name in PARTS}
    complete = {name: paths for name, paths in found.items() if all(paths)}
    if not complete:
        raise UserError(
            f"{folder}: no MNIST files (train- or t10k-images-idx3-ubyte, -labels-idx1-ubyte, "
            "gzipped or not)"
        )
    return complete.get(part)


def contents(path: Path) -> bytes:
    """The file's bytes, unpacked if it ends in .gz; raises `UserError` if it cannot be read."""
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
