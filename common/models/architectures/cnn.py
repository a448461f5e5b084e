"""Image classifiers of torchvision and timm, with synthetic images as in the reference suites."""

from __future__ import annotations

import torch

from common.models import torchvision_cpu  # noqa: F401  (before torchvision)
from common.models.registry import model_entry
from common.models.workload import Workload

import torchvision  # isort: skip

CLASSES = 1000
# With auxiliary classifiers, the output would be a tuple. Training works without them.
_ARGUMENTS = {
    "googlenet": {"aux_logits": False, "init_weights": False},
    "inception_v3": {"aux_logits": False, "init_weights": False},
}


def build_torchvision(
    name: str,
    batch_size: int,
    sentence_len: int | None,
    generator: torch.Generator,
    classes: int = CLASSES,
) -> Workload:
    """Builds a torchvision classifier with random weights; input `[batch_size, 3, side, side]`,
    where side is the `image_size` of the registry entry (224; 227 for inception_v3)."""
    extra = _ARGUMENTS.get(name, {})
    model = torchvision.models.get_model(name, weights=None, num_classes=classes, **extra)
    return images_for(model, batch_size, model_entry(name).image_size, classes, generator)


def build_timm(
    name: str,
    batch_size: int,
    sentence_len: int | None,
    generator: torch.Generator,
    classes: int = CLASSES,
) -> Workload:
    """Builds a timm classifier with random weights; input `[batch_size, 3, 224, 224]`."""
    import timm

    timm_name = {"inceptionv4": "inception_v4"}.get(name, name)
    model = timm.create_model(timm_name, pretrained=False, num_classes=classes)
    return images_for(model, batch_size, model_entry(name).image_size, classes, generator)


def images_for(
    model: torch.nn.Module,
    batch_size: int,
    image_size: int,
    classes: int,
    generator: torch.Generator,
) -> Workload:
    """Combines a classifier with random float32 images `[batch_size, 3, image_size, image_size]`,
    random int64 labels `[batch_size]` and cross entropy."""
    images = torch.randn(batch_size, 3, image_size, image_size, generator=generator)
    labels = torch.randint(classes, (batch_size,), generator=generator)
    return Workload(
        model=model,
        inputs=(images,),
        targets=(labels,),
        criterion=torch.nn.functional.cross_entropy,
    )
