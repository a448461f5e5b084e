"""Image classifiers of timm by name (`timm:resnet50d`), with random weights and random images.

The images have the size that the model expects. Nothing is downloaded.
"""

from __future__ import annotations

import torch

from common.models import torchvision_cpu  # noqa: F401  (before timm, which imports torchvision)
from common.models.architectures.cnn import CLASSES, images_for
from common.models.registry import TIMM, ModelEntry
from common.models.workload import Workload
from dear.errors import unknown

import timm  # isort: skip


def entry(name: str) -> ModelEntry:
    """Returns the registry entry of `timm:NAME`; raises `UserError` if timm has no such model."""
    kind = name.removeprefix(TIMM)
    if not timm.is_model(kind):
        raise unknown("model of timm", kind, timm.list_models(), "see timm.list_models()")
    return ModelEntry(builder="common.models.architectures.any_timm:build")


def build(
    name: str, batch_size: int, sentence_len: int | None, generator: torch.Generator
) -> Workload:
    """Returns the model with 1000 classes and a batch of float32 images.

    The images are `[batch_size, 3, side, side]`, where `side` comes from timm's configuration.
    """
    kind = name.removeprefix(TIMM)
    model = timm.create_model(kind, pretrained=False, num_classes=CLASSES)
    side = model.pretrained_cfg["input_size"][-1]
    return images_for(model, batch_size, side, CLASSES, generator)
