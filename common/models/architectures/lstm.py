"""Language model of LSTMs that predicts the next word (Zaremba et al. 2014, arXiv 1409.2329)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from common.models.workload import Workload

VOCABULARY = 10_000
"""Usual vocabulary size for the Penn Treebank."""
_LAYERS, _RANGE = 2, {"lstm_small": 0.1, "lstm": 0.04}
_SIZES = {"lstm_small": (200, 0.0), "lstm": (1500, 0.65)}
"""Units per layer and dropout probability of the paper's small and large model."""


class LanguageModel(nn.Module):
    """Two LSTM layers between an embedding and a linear layer; each sample starts with state 0.

    Args:
        units: size of each layer and of the embedding.
        spread: weights are drawn uniformly between `-spread` and `spread`.
    """

    def __init__(self, words: int, units: int, dropout: float, spread: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, units)
        self.lstm = nn.LSTM(units, units, _LAYERS, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.scores = nn.Linear(units, words)
        for param in self.parameters():
            nn.init.uniform_(param, -spread, spread)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Maps word ids `[n, length]` to scores of the next word `[n, length, words]`."""
        hidden, _ = self.lstm(self.dropout(self.embedding(words)))
        return self.scores(self.dropout(hidden))


def build(
    name: str,
    batch_size: int,
    sentence_len: int | None,
    generator: torch.Generator,
    classes: int = VOCABULARY,
) -> Workload:
    """Builds `lstm` (66 million parameters with 10,000 words) or `lstm_small` (4.7 million), with
    random weights and random words `[batch_size, sentence_len]`."""
    units, dropout = _SIZES[name]
    shape = (batch_size, sentence_len)
    return Workload(
        model=LanguageModel(classes, units, dropout, _RANGE[name]),
        inputs=(torch.randint(classes, shape, generator=generator),),
        targets=(torch.randint(classes, shape, generator=generator),),
        criterion=_loss,
    )


def _loss(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), words.flatten())
