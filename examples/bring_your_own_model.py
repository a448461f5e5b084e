"""Example of a user's model; docs/bring_your_own.md explains it.

python benchmarks.py run --model-file examples/bring_your_own_model.py --batch 32 --gpu rtx2080ti

A small image classifier: patches become tokens of a transformer, as in ViT (arXiv 2010.11929).
"""

import torch
from torch import nn
from torch.nn import functional

IMAGE, PATCH, WIDTH, LAYERS, HEADS, CLASSES = 96, 8, 512, 8, 8, 100


class PatchTransformer(nn.Module):
    """Transformer with 25 million parameters; images `[n, 3, 96, 96]` -> scores `[n, 100]`."""

    def __init__(self) -> None:
        super().__init__()
        tokens = (IMAGE // PATCH) ** 2
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.randn(1, tokens, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS)
        self.scores = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.scores(self.layers(tokens).mean(dim=1))


def model() -> nn.Module:
    """Returns the model with random weights; all ranks call this with the same random state."""
    return PatchTransformer()


def batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and targets of one rank for one step; random numbers suffice."""
    images = torch.randn(batch_size, 3, IMAGE, IMAGE)
    return images, torch.randint(CLASSES, (batch_size,))


def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the loss, a scalar. A file without a function `loss` gets this one."""
    return functional.cross_entropy(scores, labels)
