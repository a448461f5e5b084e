"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), read by torchvision from their Python files.

Training images are varied as He et al. 2016 do (arXiv 1512.03385, section 4.2): framed by 4 pixels
of the mean, cut out again anywhere, and every other one flipped.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from pathlib import Path
from typing import Any

from common.models import torchvision_cpu  # noqa: F401  (before torchvision)
from common.models.datasets import Parts
from common.models.datasets.tensors import Tensors
from dear.errors import UserError
from dear.lazy import torch

_FRAME = 4
_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
# Of the training images' colours.
MEAN = {"cifar10": (0.4914, 0.4822, 0.4465), "cifar100": (0.5071, 0.4865, 0.4409)}
STD = {"cifar10": (0.2470, 0.2435, 0.2616), "cifar100": (0.2673, 0.2564, 0.2762)}


def digest(data: str, folder: Path) -> str:
    """Of all files of the data's own folder, which `folder` holds; raises `UserError` if it has
    none."""
    return _digest(_own_folder(data, folder))


@functools.cache
def _digest(folder: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        whole.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()[:16]


def _own_folder(data: str, folder: Path) -> Path:
    own = folder / _FOLDERS[data]
    if not own.is_dir():
        raise UserError(
            f"{folder}: no {data} there: its folder {_FOLDERS[data]} is that of "
            f"{data.replace('cifar', 'cifar-')}-python.tar.gz, unpacked"
        )
    return own


def load(data: str, folder: Path, size: int | None) -> Parts:
    """Images `[n, 3, 32, 32]`, normalized by the mean and deviation of each colour.

    Raises:
        UserError: a file is missing or damaged.
    """
    _own_folder(data, folder)
    try:
        train, test = (_dataset(data, folder, train=train) for train in (True, False))
    except (RuntimeError, OSError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(f"{folder / _FOLDERS[data]}: no {data}: {error}") from None
    shape = (1, 3, 1, 1)
    mean, std = (torch.tensor(found[data]).view(shape) for found in (MEAN, STD))

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
        """Files of the same form with other images are data, too."""

        train_list = [[name, None] for name, _ in kind[data].train_list]  # noqa: RUF012
        test_list = [[name, None] for name, _ in kind[data].test_list]  # noqa: RUF012
        meta = {**kind[data].meta, "md5": None}  # noqa: RUF012

    return Unhashed(str(folder), train=train, download=False)


def _tensors(dataset: Any) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.from_numpy(dataset.data).permute(0, 3, 1, 2).contiguous()
    return pixels, torch.tensor(dataset.targets)


def crop_and_flip(pixels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each image moved by up to 4 pixels each way, and perhaps mirrored.

    Args:
        pixels: `[n, 3, height, width]`, 0 to 255; grey comes in at the edges.
    """
    count, _, height, width = pixels.shape
    framed = torch.nn.functional.pad(pixels, [_FRAME] * 4, value=128)
    tops, lefts = torch.randint(2 * _FRAME + 1, (2, count), generator=generator).tolist()
    mirrored = (torch.rand(count, generator=generator) < 0.5).tolist()
    found = []
    for image, top, left, turned in zip(framed, tops, lefts, mirrored, strict=True):
        part = image[:, top : top + height, left : left + width]
        found.append(part.flip(-1) if turned else part)
    return torch.stack(found)
