"""Words of a text file, to foretell the next one of: the Penn Treebank's form, or any text.

Words stand between white space, and each line ends with a word of its own, `<eos>`. A sample is a
piece of so many words, with the words that follow each of them as targets; pieces follow each other
and know nothing of those before.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from pathlib import Path

from common.models.datasets import Parts
from common.models.datasets.tensors import Tensors
from dear.errors import UserError
from dear.lazy import torch

END = "<eos>"
_JUDGED = 10
"""The last of so many parts of the text is what is judged by."""


@functools.cache
def digest(data: str, path: Path) -> str:
    """Of the file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def load(data: str, path: Path, size: int | None) -> Parts:
    """Numbers of words `[n, size]`, int64, and those of the words that follow them.

    Raises:
        UserError: the file is no text, or too short for a sample to train on and one to judge by.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: no text: {error}") from None
    words = [word for line in lines for word in (*line.split(), END)]
    order = [word for word, _ in Counter(words).most_common()]
    number = {word: place for place, word in enumerate(order)}
    numbers = torch.tensor([number[word] for word in words], dtype=torch.int64)
    cut = len(words) - len(words) // _JUDGED
    pieces = [_pieces(part, size) for part in (numbers[:cut], numbers[cut:])]
    if any(len(inputs) == 0 for inputs, _ in pieces):
        raise UserError(f"{path}: {len(words)} words are too few for samples of {size}")
    train, test = (Tensors(*part) for part in pieces)
    total = len(train) + len(test)
    return Parts(
        train=train, test=test, classes=len(order), split=f"{total:,} samples of {path.name}"
    )


def _pieces(numbers: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    count = (len(numbers) - 1) // size
    inputs, targets = numbers[: count * size], numbers[1 : count * size + 1]
    return inputs.view(count, size), targets.view(count, size)
