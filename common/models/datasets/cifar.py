"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), read from their Python files.

A Python file of the data set is a pickle, which could run any program. So nothing but arrays,
lists, numbers and texts is read from it.

Training images are augmented as in He et al. 2016 (arXiv 1512.03385, section 4.2): 4 pixels of grey
padding on each side, a random crop, and a horizontal flip with probability 0.5.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from common.models.datasets.sources import Parts
from common.models.datasets.tensors import Tensors
from dear.errors import UserError
from dear.lazy import torch

_FRAME = 4
_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]
_FILES = {"cifar10": (_BATCHES, ["test_batch"]), "cifar100": (["train"], ["test"])}
_LABELS = {"cifar10": "labels", "cifar100": "fine_labels"}
_NAMES = {
    "cifar10": ("batches.meta", "label_names"),
    "cifar100": ("meta", "fine_label_names"),
}
_PARTS_OF_ARRAYS = {
    *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
    *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
    *(("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")),
}
"""Names that a pickle of arrays refers to."""
_WRONG = (OSError, EOFError, LookupError, ValueError, TypeError, AttributeError, ImportError)
"""Errors of damaged files, besides `pickle.UnpicklingError`."""
# Mean and standard deviation of the training images, per colour.
MEAN = {"cifar10": (0.4914, 0.4822, 0.4465), "cifar100": (0.5071, 0.4865, 0.4409)}
STD = {"cifar10": (0.2470, 0.2435, 0.2616), "cifar100": (0.2673, 0.2564, 0.2762)}


def digest(data: str, folder: Path) -> str:
    """Returns a digest of the data's files; raises `UserError` if their folder is missing.

    The files are in a subfolder of `folder` with the published name, such as cifar-10-batches-py.
    """
    return _digest(_own_folder(data, folder))


@functools.cache
def _digest(folder: Path) -> str:
    hasher = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        hasher.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return hasher.hexdigest()[:16]


def _own_folder(data: str, folder: Path) -> Path:
    data_folder = folder / _FOLDERS[data]
    if not data_folder.is_dir():
        raise UserError(
            f"{folder}: has no {data}; it needs the folder {_FOLDERS[data]} from "
            f"{data.replace('cifar', 'cifar-')}-python.tar.gz"
        )
    return data_folder


def load(data: str, folder: Path, size: int | None) -> Parts:
    """Loads images `[n, 3, 32, 32]`, normalized by the mean and standard deviation of each colour.

    Raises:
        UserError: a file is missing or damaged.
    """
    _own_folder(data, folder)
    files, key = _FILES[data], _NAMES[data][1]
    try:
        train, test = (_tensors(data, folder, names) for names in files)
        classes = len(_unpickled(_own_folder(data, folder) / _NAMES[data][0])[key])
    except (*_WRONG, pickle.UnpicklingError) as error:
        raise UserError(f"{folder / _FOLDERS[data]}: no {data}: {error}") from None
    shape = (1, 3, 1, 1)
    mean, std = (torch.tensor(table[data]).view(shape) for table in (MEAN, STD))

    def finish(pixels: torch.Tensor) -> torch.Tensor:
        return (pixels.float() / 255 - mean) / std

    return Parts(
        train=Tensors(*train, vary=crop_and_flip, finish=finish),
        test=Tensors(*test, finish=finish),
        classes=classes,
    )


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PARTS_OF_ARRAYS:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is no array")
        return super().find_class(module, name)


def _unpickled(path: Path) -> Any:
    with path.open("rb") as file:
        return _ArraysOnly(file, encoding="latin1").load()


def _tensors(data: str, folder: Path, names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    batches = [_unpickled(_own_folder(data, folder) / name) for name in names]
    pixels = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
    labels = [label for batch in batches for label in batch[_LABELS[data]]]
    if pixels.dtype != np.uint8 or len(labels) != len(pixels):
        raise ValueError(f"{len(pixels)} images of {pixels.dtype} for {len(labels)} labels")
    return torch.from_numpy(pixels), torch.tensor(labels)


def crop_and_flip(pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Shifts each image by up to 4 pixels in both directions and flips it with probability 0.5.

    Args:
        pixels: `[n, 3, height, width]`, 0 to 255; the edges are filled with grey (128).
    """
    count, _, height, width = pixels.shape
    padded = torch.nn.functional.pad(pixels, [_FRAME] * 4, value=128)
    tops, lefts = torch.randint(2 * _FRAME + 1, (2, count), generator=generator).tolist()
    mirrored = (torch.rand(count, generator=generator) < 0.5).tolist()
    augmented = []
    for image, top, left, flipped in zip(padded, tops, lefts, mirrored, strict=True):
        part = image[:, top : top + height, left : left + width]
        augmented.append(part.flip(-1) if flipped else part)
    return torch.stack(augmented)
