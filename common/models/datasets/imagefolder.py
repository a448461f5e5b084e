"""Images in folders by class, as ImageNet's, read by torchvision: `train/CLASS/*.jpg`, and `val`.

They are read when they are needed. Training images are cut out at random, between 8 and 100 % of
each, and flipped; to judge by, the middle of each is taken (Szegedy et al. 2015, arXiv 1409.4842,
as torchvision's own training of its models does).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.models import torchvision_cpu  # noqa: F401  (before torchvision)
from common.models.datasets import Parts
from dear.errors import UserError
from dear.lazy import torch

_TEST_FOLDERS = ("val", "test")
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's training images
_MIDDLE = 224 / 256


@functools.cache
def digest(data: str, folder: Path) -> str:
    """Of names and sizes of all files in both parts; raises `UserError` if one is missing."""
    whole = hashlib.sha256()
    for part in _parts(folder):
        for path in sorted(path for path in part.rglob("*") if path.is_file()):
            whole.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
    return whole.hexdigest()[:16]


def _parts(folder: Path) -> tuple[Path, Path]:
    """Where the training images are, and those to judge by."""
    train = folder / "train"
    test = next((folder / name for name in _TEST_FOLDERS if (folder / name).is_dir()), None)
    if not train.is_dir() or test is None:
        raise UserError(f"{folder}: no folder of images: train/CLASS/ and val/CLASS/ must be there")
    return train, test


def load(data: str, folder: Path, size: int | None) -> Parts:
    """Images `[n, 3, size, size]`, normalized by the mean and deviation of ImageNet's colours.

    Raises:
        UserError: a part is missing or empty, or its classes are not those of the other one.
    """
    import torchvision
    from torchvision import transforms

    to_numbers = [transforms.ToTensor(), transforms.Normalize(_MEAN, _STD)]
    cut = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    middle = [transforms.Resize(round(size / _MIDDLE)), transforms.CenterCrop(size)]
    ways = [transforms.Compose([*some, *to_numbers]) for some in (cut, middle)]
    try:
        train, test = (
            torchvision.datasets.ImageFolder(str(part), way)
            for part, way in zip(_parts(folder), ways, strict=True)
        )
    except (FileNotFoundError, OSError) as error:
        raise UserError(f"{folder}: {error}") from None
    if train.classes != test.classes:
        raise UserError(f"{folder}: train and val have not the same classes")
    return Parts(train=Images(train), test=Images(test), classes=len(train.classes))


class Images:
    """A part, whose images are read when they are asked for.

    Args:
        dataset: gives an image as the model takes it, and its class.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(
        self, places: Sequence[int], generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.random.fork_rng(devices=[]):  # which torchvision's transforms draw from
            if generator is not None:
                torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
            images, labels = zip(*(self._dataset[place] for place in places), strict=True)
        return torch.stack(images), torch.tensor(labels)
