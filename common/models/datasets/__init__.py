"""Real data by name, without importing torch: where it is, a digest of it, and how it is loaded.

Nothing is downloaded: the files are there, in a folder that the experiment or the environment
names, in the form in which those who publish the data give it out.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from dear.errors import UserError, one_of
from dear.lazy import torch

Kind = Literal["digits", "small images", "images", "text"]
"""What a model must take: grey images of 28 x 28 pixels, coloured ones of 32 x 32, coloured ones of
its own size, sequences of words."""


class Samples(Protocol):
    """The training or the test part of the data."""

    def __len__(self) -> int: ...

    def batch(
        self, places: Sequence[int], generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the samples at these places, on the CPU.

        Args:
            generator: draws what a training set varies (crops, flips); None: nothing is varied.
        """


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What can be learned, whole."""

    train: Samples
    test: Samples
    classes: int
    """How many answers there are: classes of images, or different words."""
    split: str | None = None
    """Of what both are parts, in words; None where the data has parts of its own."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where data of a name comes from."""

    kinds: tuple[Kind, ...]
    """Of the models that can learn it."""
    variable: str | None
    """The environment variable with its folder or file; None: it comes with scikit-learn."""
    module: str
    """With `digest(path)` and `load(name, path, size)`."""
    file: bool = False
    """It is one file and no folder."""


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
"""By the name that `learn.data` has."""


def path_of(data: str, given: str | Path | None) -> Path | None:
    """Where the files of `data` are: `given`, else what the environment says; None: it has none.

    Raises:
        UserError: the place is not known, not there, or not wanted.
    """
    source = one_of("learn.data", data, SOURCES)
    if source.variable is None:
        if given is not None:
            raise UserError(f"data_dir: {data} comes with scikit-learn and has no folder")
        return None
    what = "file" if source.file else "folder"
    named = given or os.environ.get(source.variable)
    if not named:
        raise UserError(
            f"learn.data: where is {data}? Set data_dir={what.upper()} or {source.variable}"
        )
    path = Path(named).expanduser().resolve()
    if not (path.is_file() if source.file else path.is_dir()):
        raise UserError(f"learn.data: {data}: there is no {what} {path}")
    return path


def digest(data: str, path: Path | None) -> str:
    """A digest of what is there; of an image folder, which may be large, of names and sizes.

    Raises:
        UserError: the files are not there, or cannot be read.
    """
    return _module(data).digest(data, path_of(data, path))


def load(data: str, path: Path | None, size: int | None = None) -> Parts:
    """What is trained on, and what is judged by; imports torch.

    Args:
        size: pixels of an image's side, or words of a text's sample; None where the data has one.

    Raises:
        UserError: that is no place of such data, or a file is missing or damaged.
    """
    return _module(data).load(data, path_of(data, path), size)


def _module(data: str) -> Any:
    return importlib.import_module(f"{__name__}.{SOURCES[data].module}")


def __getattr__(name: str) -> Any:
    """`load_mnist` and `load_digits`, which import torch."""
    if name not in _LOADERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LOADERS[name]}"), name)


_LOADERS = {"load_mnist": "mnist", "load_digits": "digits"}
