"""Every model by name, without importing torch: what makes it, and what one sample is called."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dear.errors import UserError, unknown

if TYPE_CHECKING:
    import torch

    from common.models.workload import Workload


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One line of the registry."""

    builder: str
    """`module:function`; the function takes (name, batch_size, sentence_len, generator)."""
    sample_unit: str = "img"
    """What throughput counts: `img`, or `sen` for sentences."""
    batch_size: int = 32
    """Samples per worker where an experiment does not say."""
    sentence_len: int | None = None
    """Default length in tokens; None for models that have no such thing."""

    @property
    def module(self) -> str:
        return self.builder.partition(":")[0]


# The classification models of torchvision 0.26 to 0.28 (checked against the library by a test).
_TORCHVISION = """
alexnet convnext_base convnext_large convnext_small convnext_tiny densenet121 densenet161
densenet169 densenet201 efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3
efficientnet_b4 efficientnet_b5 efficientnet_b6 efficientnet_b7 efficientnet_v2_l
efficientnet_v2_m efficientnet_v2_s googlenet inception_v3 maxvit_t mnasnet0_5 mnasnet0_75
mnasnet1_0 mnasnet1_3 mobilenet_v2 mobilenet_v3_large mobilenet_v3_small regnet_x_16gf
regnet_x_1_6gf regnet_x_32gf regnet_x_3_2gf regnet_x_400mf regnet_x_800mf regnet_x_8gf
regnet_y_128gf regnet_y_16gf regnet_y_1_6gf regnet_y_32gf regnet_y_3_2gf regnet_y_400mf
regnet_y_800mf regnet_y_8gf resnet101 resnet152 resnet18 resnet34 resnet50 resnext101_32x8d
resnext101_64x4d resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5
shufflenet_v2_x2_0 squeezenet1_0 squeezenet1_1 swin_b swin_s swin_t swin_v2_b swin_v2_s swin_v2_t
vgg11 vgg11_bn vgg13 vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn vit_b_16 vit_b_32 vit_h_14 vit_l_16
vit_l_32 wide_resnet101_2 wide_resnet50_2
""".split()  # noqa: SIM905  (one name per line would be 80 lines)

_BERT = ModelEntry(
    builder="common.models.bert:build", sample_unit="sen", batch_size=8, sentence_len=64
)

MODELS: dict[str, ModelEntry] = {
    **{name: ModelEntry(builder="common.models.cnn:build_torchvision") for name in _TORCHVISION},
    "inceptionv4": ModelEntry(builder="common.models.cnn:build_timm"),
    "bert_base": _BERT,
    "bert": _BERT,
    "mnist_cnn": ModelEntry(builder="common.models.mnist:build"),
}


def model_entry(name: str) -> ModelEntry:
    """The registry's line for `name`; raises `UserError` for an unknown name."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    return MODELS[name]


def sentence_len(name: str, given: int | None) -> int | None:
    """The sentence length to use; raises `UserError` if the model has none and one is given."""
    entry = model_entry(name)
    if given is None:
        return entry.sentence_len
    if entry.sentence_len is None:
        raise UserError(f"sentence_len: model {name} has no sentences")
    return given


def build(
    name: str, batch_size: int, sentence_len: int | None, generator: torch.Generator
) -> Workload:
    """Makes the model with random weights and one synthetic batch drawn from `generator`.

    Weights come from torch's global random state: seed it alike on all ranks.
    """
    module, _, function = model_entry(name).builder.partition(":")
    builder = getattr(importlib.import_module(module), function)
    return builder(name, batch_size, sentence_len, generator)
