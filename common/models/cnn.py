"""Image classifiers of torchvision and timm, with synthetic images as the reference suites use."""

from __future__ import annotations

import torch

from common.models import torchvision_cpu  # noqa: F401  (before torchvision)
from common.models.workload import Workload

import torchvision  # isort: skip

CLASSES = 1000
_IMAGE_SIZE = 224
_OTHER_IMAGE_SIZES = {"inception_v3": 227}  # as the references feed it
# Auxiliary classifiers would make the output a tuple, and training them is a matter of taste.
_ARGUMENTS = {
    "googlenet": {"aux_logits": False, "init_weights": False},
    "inception_v3": {"aux_logits": False, "init_weights": False},
}


def build_torchvision(
    name: str, batch_size: int, sentence_len: int | None, generator: torch.Generator
) -> Workload:
    """A torchvision classifier with random weights; input `[batch_size, 3, 224, 224]`."""
    model = torchvision.models.get_model(name, weights=None, **_ARGUMENTS.get(name, {}))
    return _workload(model, batch_size, _OTHER_IMAGE_SIZES.get(name, _IMAGE_SIZE), generator)


def build_timm(
    name: str, batch_size: int, sentence_len: int | None, generator: torch.Generator
) -> Workload:
    """A timm classifier with random weights; input `[batch_size, 3, 224, 224]`."""
    import timm

    timm_name = {"inceptionv4": "inception_v4"}.get(name, name)
    model = timm.create_model(timm_name, pretrained=False, num_classes=CLASSES)
    return _workload(model, batch_size, _IMAGE_SIZE, generator)


def _workload(
    model: torch.nn.Module, batch_size: int, image_size: int, generator: torch.Generator
) -> Workload:
    images = torch.randn(batch_size, 3, image_size, image_size, generator=generator)
    labels = torch.randint(CLASSES, (batch_size,), generator=generator)
    return Workload(
        model=model,
        inputs=(images,),
        targets=(labels,),
        criterion=torch.nn.functional.cross_entropy,
    )
