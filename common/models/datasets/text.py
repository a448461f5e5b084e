"""Words of a text file for next-word prediction: the Penn Treebank's format, or any text.

White space separates words, and an extra word `<eos>` is added to each line. A sample has `size`
consecutive words; the target of each word is the word after it. Samples do not overlap.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from pathlib import Path

from common.models.datasets.sources import Parts
from common.models.datasets.tensors import Tensors
from dear.errors import UserError
from dear.lazy import torch

END = "<eos>"
_JUDGED = 10
"""Number of equal parts of the text; the last part is the test set."""


@functools.cache
def digest(data: str, path: Path) -> str:
    """Returns a digest of the file's contents."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def load(data: str, path: Path, size: int | None) -> Parts:
    """Returns inputs and targets: word ids `[n, size]`, int64, ordered by frequency.

    Raises:
        UserError: the file is no UTF-8 text, or too short for one training and one test sample.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is no text file: {error}") from None
    words = [word for line in lines for word in (*line.split(), END)]
    order = [word for word, _ in Counter(words).most_common()]
    ids = {word: index for index, word in enumerate(order)}
    numbers = torch.tensor([ids[word] for word in words], dtype=torch.int64)
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
