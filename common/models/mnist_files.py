"""MNIST's files: which of them a folder has, their contents and a digest; without torch."""

from __future__ import annotations

import functools
import gzip
import hashlib
from pathlib import Path

from dear.errors import UserError

PARTS = ("train", "t10k")
_KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")


def pair(folder: Path, part: str) -> tuple[Path, Path] | None:
    """Image and label file of a part (`train` or `t10k`), gzipped or not; None if one is missing.

    Raises:
        UserError: there is no complete part in the folder at all.
    """
    found = {name: _pair(folder, name) for name in PARTS}
    if not any(found.values()):
        raise UserError(
            f"{folder}: no MNIST files (train- or t10k-images-idx3-ubyte, -labels-idx1-ubyte, "
            "gzipped or not)"
        )
    return found[part]


def contents(path: Path) -> bytes:
    """The file's bytes, unpacked if it ends in .gz; raises `UserError` if it cannot be read."""
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


@functools.cache
def digest(folder: Path) -> str:
    """Of all that is in the folder's files, gzipped or not; raises `UserError` as `pair` does."""
    whole = hashlib.sha256()
    for part in PARTS:
        for path in pair(folder, part) or ():
            whole.update(hashlib.sha256(contents(path)).digest())
        whole.update(part.encode())
    return whole.hexdigest()[:16]


def _pair(folder: Path, part: str) -> tuple[Path, Path] | None:
    found = [_find(folder, f"{part}-{kind}") for kind in _KINDS]
    images, labels = found
    return None if images is None or labels is None else (images, labels)


def _find(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
