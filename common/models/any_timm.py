"""Any image classifier of timm by its name, `timm:resnet50d`: random weights, images of its size.

Nothing is downloaded.
"""

from __future__ import annotations

import torch

from common.models import torchvision_cpu  # noqa: F401  (before timm, which imports torchvision)
from common.models.cnn import CLASSES, images_for
from common.models.registry import TIMM, ModelEntry
from common.models.workload import Workload
from dear.errors import unknown

import timm  # isort: skip


def entry(name: str) -> ModelEntry:
    """The registry's line for `timm:NAME`; raises `UserError` if timm has no such model."""
    kind = name.removeprefix(TIMM)
    if not timm.is_model(kind):
        raise unknown("model of timm", kind, timm.list_models(), "see timm.list_models()")
    return ModelEntry(builder="common.models.any_timm:build")


def build(
    name: str, batch_size: int, sentence_len: int | None, generator: torch.Generator
) -> Workload:
    """The model with 1000 classes; images `[batch_size, 3, side, side]`, as large as its authors
    had them."""
    kind = name.removeprefix(TIMM)
    model = timm.create_model(kind, pretrained=False, num_classes=CLASSES)
    side = model.pretrained_cfg["input_size"][-1]
    return images_for(model, batch_size, side, CLASSES, generator)
