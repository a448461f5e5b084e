"""scikit-learn's 1,797 images of digits (8 x 8 pixels), which need no extra files."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from common.models.datasets.mnist import MEAN, STD, contents
from common.models.datasets.sources import Parts
from common.models.datasets.tensors import Split, Tensors, split
from dear.errors import UserError
from dear.lazy import torch


def digest(data: str, path: None) -> str:
    """Returns a digest of scikit-learn's file; raises `UserError` without scikit-learn."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise UserError(f"learn.data: {data} comes with scikit-learn, which is not installed")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return hashlib.sha256(contents(path)).hexdigest()[:16]


def load(data: str, path: None, size: int | None) -> Parts:
    """Loads the digits; the two parts of `load_digits` become training set and test set."""
    train, test = load_digits()
    images = len(train[1]) + len(test[1])
    origin = f"scikit-learn's {images:,} digits"
    return Parts(train=Tensors(*train), test=Tensors(*test), classes=10, split=origin)


def load_digits() -> tuple[Split, Split]:
    """Returns the digits, scaled and padded to `[n, 1, 28, 28]`, 9 in 10 of them for training."""
    from sklearn.datasets import load_digits as bundled

    images, labels = bundled(return_X_y=True)
    pixels = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
    pixels = torch.nn.functional.interpolate(pixels, size=(20, 20), mode="bilinear")
    return split(
        (torch.nn.functional.pad(pixels, (4, 4, 4, 4)) - MEAN) / STD,
        torch.from_numpy(labels).long(),
    )
