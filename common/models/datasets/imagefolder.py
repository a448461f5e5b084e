"""Images in one folder per class, as in ImageNet (`train/CLASS/*.jpg`, `val/CLASS/*.jpg`).

torchvision reads each image when it is needed. As in torchvision's training scripts, training
images are random crops of 8 to 100 % of the area (Szegedy et al. 2015, arXiv 1409.4842), flipped
with probability 0.5; test images are center crops.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.models import torchvision_cpu  # noqa: F401  (before torchvision)
from common.models.datasets.sources import Parts
from dear.errors import UserError
from dear.lazy import torch

_TEST_FOLDERS = ("val", "test")
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's training images
_MIDDLE = 224 / 256
"""Side of the center crop, divided by the shorter side of the resized image."""


@functools.cache
def digest(data: str, folder: Path) -> str:
    """Returns a digest of the names and sizes of all files.

    Raises:
        UserError: the training or the test folder is missing.
    """
    hasher = hashlib.sha256()
    for part in _parts(folder):
        for path in sorted(path for path in part.rglob("*") if path.is_file()):
            hasher.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
    return hasher.hexdigest()[:16]


def _parts(folder: Path) -> tuple[Path, Path]:
    train = folder / "train"
    test = next((folder / name for name in _TEST_FOLDERS if (folder / name).is_dir()), None)
    if not train.is_dir() or test is None:
        raise UserError(f"{folder}: no folder of images: train/CLASS/ and val/CLASS/ must exist")
    return train, test


def load(data: str, folder: Path, size: int | None) -> Parts:
    """Opens images `[n, 3, size, size]`, normalized by ImageNet's mean and standard deviation.

    Raises:
        UserError: a part is missing or empty, or the two parts have different classes.
    """
    import torchvision
    from torchvision import transforms

    normalize = [transforms.ToTensor(), transforms.Normalize(_MEAN, _STD)]
    augment = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    center = [transforms.Resize(round(size / _MIDDLE)), transforms.CenterCrop(size)]
    pipelines = [transforms.Compose([*crop, *normalize]) for crop in (augment, center)]
    try:
        train, test = (
            torchvision.datasets.ImageFolder(str(part), pipeline)
            for part, pipeline in zip(_parts(folder), pipelines, strict=True)
        )
    except (FileNotFoundError, OSError) as error:
        raise UserError(f"{folder}: {error}") from None
    if train.classes != test.classes:
        raise UserError(f"{folder}: train and val have different classes")
    return Parts(train=Images(train), test=Images(test), classes=len(train.classes))


class Images:
    """Samples whose images are read when a batch needs them.

    Args:
        dataset: sequence of pairs (image tensor for the model, class).
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(
        self, indices: Sequence[int], generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.random.fork_rng(devices=[]):  # torchvision's transforms use the global state
            if generator is not None:
                torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
            images, labels = zip(*(self._dataset[index] for index in indices), strict=True)
        return torch.stack(images), torch.tensor(labels)
