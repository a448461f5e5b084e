"""Small convolutional network for grey images of 28 x 28 pixels, such as MNIST."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from common.models.workload import Workload


class MnistCnn(nn.Module):
    """Two convolutions and two linear layers, 1.2 million parameters; input `[n, 1, 28, 28]`."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, classes)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns scores `[n, classes]`."""
        return self.classifier(self.features(images))


def build(
    name: str,
    batch_size: int,
    sentence_len: int | None,
    generator: torch.Generator,
    classes: int = 10,
) -> Workload:
    """Builds `MnistCnn` with random weights and random pixels."""
    return Workload(
        model=MnistCnn(classes),
        inputs=(torch.randn(batch_size, 1, 28, 28, generator=generator),),
        targets=(torch.randint(classes, (batch_size,), generator=generator),),
        criterion=functional.cross_entropy,
    )
