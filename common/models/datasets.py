"""Real data by name, without importing torch: where it is, a digest of it, and how it is loaded."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from common.models import mnist_files
from dear.errors import UserError

if TYPE_CHECKING:
    from common.models.digits import Split

MNIST_DIR = "MNIST_DIR"
"""The environment variable with the folder of MNIST's files."""


def folder_of(data: str, given: str | None) -> Path | None:
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
    if folder is not None:
        return mnist_files.digest(folder)
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise UserError(f"learn.data: {data} comes with scikit-learn, which is not installed")
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return hashlib.sha256(mnist_files.contents(path)).hexdigest()[:16]


def load(data: str, folder: Path | None) -> tuple[Split, Split]:
    """Images and labels to train on, and those to judge by; imports torch.

    Raises:
        UserError: a file is missing or damaged.
    """
    from common.models import digits

    return digits.load_digits() if folder is None else digits.load_mnist(folder)
