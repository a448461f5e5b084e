"""Data sets by name: location, digest and loader. Imports no torch.

Nothing is downloaded. The experiment or an environment variable names a folder (or file) with the
data in their published format.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from common.models.registry import Kind
from dear.errors import UserError, one_of
from dear.lazy import torch


class Samples(Protocol):
    """Samples of the training set or of the test set."""

    def __len__(self) -> int: ...

    def batch(
        self, indices: Sequence[int], generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the inputs and targets of the samples at these indices, on the CPU.

        Args:
            generator: source of random augmentation (crops, flips); None: no augmentation.
        """


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Training set and test set of the data."""

    train: Samples
    test: Samples
    classes: int
    """Number of possible targets: classes of images, or distinct words."""
    split: str | None = None
    """Name of the data set that was split; None if the data set has separate test samples."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Origin of a data set."""

    kinds: tuple[Kind, ...]
    """Kinds of models that can train on it."""
    variable: str | None
    """Environment variable that names the folder or file; None: scikit-learn contains the data."""
    module: str
    """Module of this package with `digest(data, path)` and `load(data, path, size)`."""
    file: bool = False
    """True for a single file, False for a folder."""


SOURCES: dict[str, Source] = {
    "mnist": Source(kinds=("digits",), variable="MNIST_DIR", module="mnist"),
    "digits": Source(kinds=("digits",), variable=None, module="digits"),
    "cifar10": Source(kinds=("small images",), variable="CIFAR_DIR", module="cifar"),
    "cifar100": Source(kinds=("small images",), variable="CIFAR_DIR", module="cifar"),
    "imagefolder": Source(
        kinds=("images", "small images"), variable="IMAGE_DIR", module="imagefolder"
    ),
    "text": Source(kinds=("text",), variable="TEXT_FILE", module="text", file=True),
}
"""Sources by their name in `learn.data`."""


def path_of(data: str, given: str | Path | None) -> Path | None:
    """Returns the folder or file of `data`: `given`, or else the value of its variable.

    Returns None for data that scikit-learn contains.

    Raises:
        UserError: no path is given, it does not exist, or the data need no path.
    """
    source = one_of("learn.data", data, SOURCES)
    if source.variable is None:
        if given is not None:
            raise UserError(f"data_dir: {data} comes with scikit-learn and has no folder")
        return None
    kind = "file" if source.file else "folder"
    named = given or os.environ.get(source.variable)
    if not named:
        raise UserError(
            f"learn.data: {data} needs a path; set data_dir={kind.upper()} or {source.variable}"
        )
    path = Path(named).expanduser().resolve()
    if not (path.is_file() if source.file else path.is_dir()):
        raise UserError(f"learn.data: {data}: there is no {kind} {path}")
    return path


def digest(data: str, path: Path | None) -> str:
    """Returns a digest of the files' contents (of image folders: of the names and sizes only).

    Raises:
        UserError: the files are missing or cannot be read.
    """
    return _module(data).digest(data, path_of(data, path))


def load(data: str, path: Path | None, size: int | None = None) -> Parts:
    """Loads the training set and the test set; imports torch.

    Args:
        size: side of an image in pixels, or words per sample of a text; None: fixed by the data.

    Raises:
        UserError: the path does not contain such data, or a file is missing or damaged.
    """
    return _module(data).load(data, path_of(data, path), size)


def _module(data: str) -> Any:
    return importlib.import_module(f"{__package__}.{SOURCES[data].module}")
