"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), read by torchvision from their Python files.

Training images are augmented as in He et al. 2016 (arXiv 1512.03385, section 4.2): 4 pixels of grey
padding on each side, a random crop, and a horizontal flip with probability 0.5.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from pathlib import Path
from typing import Any

from common.models import torchvision_cpu  # noqa: F401  (before torchvision)
from common.models.datasets.sources import Parts
from common.models.datasets.tensors import Tensors
from dear.errors import UserError
from dear.lazy import torch

_FRAME = 4
_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
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
    try:
        train, test = (_dataset(data, folder, train=train) for train in (True, False))
    except (RuntimeError, OSError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(f"{folder / _FOLDERS[data]}: no {data}: {error}") from None
    shape = (1, 3, 1, 1)
    mean, std = (torch.tensor(table[data]).view(shape) for table in (MEAN, STD))

    def finish(pixels: torch.Tensor) -> torch.Tensor:
        return (pixels.float() / 255 - mean) / std

    return Parts(
        train=Tensors(*_tensors(train), vary=crop_and_flip, finish=finish),
        test=Tensors(*_tensors(test), finish=finish),
        classes=len(train.classes),
    )


def _dataset(data: str, folder: Path, train: bool) -> Any:
    import torchvision

    kind = {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}

    class Unhashed(kind[data]):
        """Data set without checks of hashes, so that other images in this format can be loaded."""

        train_list = [[name, None] for name, _ in kind[data].train_list]  # noqa: RUF012
        test_list = [[name, None] for name, _ in kind[data].test_list]  # noqa: RUF012
        meta = {**kind[data].meta, "md5": None}  # noqa: RUF012

    return Unhashed(str(folder), train=train, download=False)


def _tensors(dataset: Any) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous()
    return pixels, torch.tensor(dataset.targets)


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
