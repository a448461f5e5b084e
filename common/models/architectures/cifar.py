"""Classifiers for images of 32 x 32 pixels: ResNets for CIFAR, and VGG-16."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from common.models.architectures.cnn import images_for
from common.models.registry import model_entry
from common.models.workload import Workload

_WIDTHS = (16, 32, 64)
# Output channels of VGG-16's 3 x 3 convolutions; 0: max pooling over 2 x 2.
_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


class Residual(nn.Module):
    """Residual block: two convolutions and a shortcut without parameters.

    If the block halves the resolution, the shortcut takes every second pixel and adds channels of
    zeros (He et al. 2016, section 4.2, option A; arXiv 1512.03385).
    """

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self._stride = 1 if before == after else 2
        self._zeros = (after - before) // 2
        self.conv1 = nn.Conv2d(before, after, 3, self._stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Maps `[n, before, h, w]` to `[n, after, h / stride, w / stride]`."""
        residual = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(images)))))
        if self._stride > 1:
            strided = images[:, :, :: self._stride, :: self._stride]
            images = functional.pad(strided, (0, 0, 0, 0, self._zeros, self._zeros))
        return functional.relu(residual + images)


class CifarResNet(nn.Sequential):
    """ResNet of `6 n + 2` layers for images `[batch, 3, 32, 32]`.

    It has 0.27 million (20 layers) to 1.7 million (110 layers) parameters.

    Args:
        depth: number of layers.
    """

    def __init__(self, depth: int, classes: int) -> None:
        blocks = (depth - 2) // 6
        widths = [_WIDTHS[0]] + [width for width in _WIDTHS for _ in range(blocks)]
        super().__init__(
            nn.Conv2d(3, _WIDTHS[0], 3, padding=1, bias=False),
            nn.BatchNorm2d(_WIDTHS[0]),
            nn.ReLU(),
            *(Residual(*pair) for pair in pairwise(widths)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(_WIDTHS[-1], classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)


def vgg16(classes: int) -> nn.Module:
    """VGG-16 (Simonyan and Zisserman 2015, arXiv 1409.1556) with batch normalization and a single
    linear layer, for images `[batch, 3, 32, 32]`; 14.7 million parameters."""
    layers: list[nn.Module] = []
    before = 3
    for after in _VGG16:
        if after:
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
            before = after
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before, classes))


def build(
    name: str,
    batch_size: int,
    sentence_len: int | None,
    generator: torch.Generator,
    classes: int = 10,
) -> Workload:
    """Builds `resnet20`, `resnet32`, `resnet44`, `resnet56`, `resnet110` or `vgg16_cifar`, with
    random weights and random pixels."""
    if name == "vgg16_cifar":
        model = vgg16(classes)
    else:
        model = CifarResNet(int(name.removeprefix("resnet")), classes)
    return images_for(model, batch_size, model_entry(name).image_size, classes, generator)
