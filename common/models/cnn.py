"""Image classifiers of torchvision and timm, with synthetic images as the reference suites use."""

from __future__ import annotations

import torch

from common.models import torchvision_cpu  # noqa: F401  (before torchvision)
from common.models.registry import model_entry
from common.models.workload import Workload

import torchvision  # isort: skip

CLASSES = 1000
# Auxiliary classifiers would make the output a tuple, and training them is a matter of taste.
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
    """A torchvision classifier with random weights; input `[batch_size, 3, 224, 224]`."""
    more = _ARGUMENTS.get(name, {})
    model = torchvision.models.get_model(name, weights=None, num_classes=classes, **more)
    return images_for(model, batch_size, model_entry(name).image_size, classes, generator)


def build_timm(
    name: str,
    batch_size: int,
    sentence_len: int | None,
    generator: torch.Generator,
    classes: int = CLASSES,
) -> Workload:
    """A timm classifier with random weights; input `[batch_size, 3, 224, 224]`."""
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
    """A classifier with random pixels `[batch_size, 3, image_size, image_size]` and labels."""
    images = torch.randn(batch_size, 3, image_size, image_size, generator=generator)
    labels = torch.randint(classes, (batch_size,), generator=generator)
    return Workload(
        model=model,
        inputs=(images,),
        targets=(labels,),
        criterion=torch.nn.functional.cross_entropy,
    )
