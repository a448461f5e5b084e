"""Every model by name, without importing torch: what makes it, and what one sample is called.

`resnet50` computes; `resnet50@rtx2080ti-modelled` replays the times that are recorded in
`configs/profiles/rtx2080ti-modelled/`.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass

from common.models import profile as profiles
from common.models.datasets import Kind
from common.models.profile import Profile
from common.models.workload import Workload
from dear.errors import UserError, unknown
from dear.lazy import torch

_MIXED = {"amp-bf16": "bfloat16", "amp-fp16": "float16"}
DTYPES = ("float32", "float64", "bfloat16", *_MIXED)
"""What parameters and inputs can be of; mixed precision: of float32, and autocast computes in
less."""


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
    learns: Kind | None = None
    """The data that it can learn; its builder then takes `classes`, too."""
    image_size: int | None = None
    """Pixels of a side, of images that are cut to its size."""

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

_CIFAR_DEPTHS = (20, 32, 44, 56, 110)
_OF_CIFAR = ModelEntry(
    builder="common.models.cifar:build", batch_size=128, learns="small images", image_size=32
)
_OF_WORDS = ModelEntry(
    builder="common.models.lstm:build",
    sample_unit="sen",
    batch_size=20,
    sentence_len=35,
    learns="text",
)


def _of_imagenet(builder: str, image_size: int = 224) -> ModelEntry:
    return ModelEntry(
        builder=f"common.models.cnn:{builder}", learns="images", image_size=image_size
    )


_COMPUTED: dict[str, ModelEntry] = {
    **{name: _of_imagenet("build_torchvision") for name in _TORCHVISION},
    "inception_v3": _of_imagenet("build_torchvision", 227),  # as the references feed it
    "inceptionv4": _of_imagenet("build_timm"),
    **{f"resnet{depth}": _OF_CIFAR for depth in _CIFAR_DEPTHS},
    "vgg16_cifar": _OF_CIFAR,
    "lstm": _OF_WORDS,
    "lstm_small": _OF_WORDS,
    "bert_base": _BERT,
    "bert": _BERT,
    "mnist_cnn": ModelEntry(builder="common.models.mnist:build", learns="digits"),
}
_REPLAY_BUILDER = "common.models.replay:build"


def _replayed() -> dict[str, ModelEntry]:
    """The models that profiles have been recorded for; the files are not read."""
    return {
        name: dataclasses.replace(
            _COMPUTED[name.partition("@")[0]], builder=_REPLAY_BUILDER, batch_size=sizes[0]
        )
        for name, sizes in profiles.batch_sizes().items()
        if name.partition("@")[0] in _COMPUTED
    }


MODELS: dict[str, ModelEntry] = {**_COMPUTED, **_replayed()}


def model_entry(name: str) -> ModelEntry:
    """The registry's line for `name`; raises `UserError` for an unknown name."""
    if name in MODELS:
        return MODELS[name]
    model, at, device = name.partition("@")
    if not at:
        raise unknown("model", name, MODELS)
    recorded = [known.split("@") for known in MODELS if "@" in known]
    devices = {known for _, known in recorded}
    if device not in devices:
        raise unknown("device of a recorded model", device, devices)
    raise unknown(f"model recorded on {device}", model, {m for m, d in recorded if d == device})


def is_replay(name: str) -> bool:
    """True for a model that waits recorded times instead of computing."""
    return model_entry(name).builder == _REPLAY_BUILDER


def profile_of(name: str, batch_size: int, sentence_len: int | None = None) -> Profile:
    """The profile that `name` (`MODEL@DEVICE`) replays at this batch size.

    Raises:
        UserError: no such model, no profile for that batch size or sentence length, or a file that
            is none.
    """
    if not is_replay(name):
        raise UserError(f"model {name} is computed, not replayed; a replayed one is MODEL@DEVICE")
    sizes = profiles.batch_sizes()[name]
    if batch_size not in sizes:
        raise UserError(
            f"batch_size: no profile of {name} for {batch_size}; "
            f"there are some for {', '.join(map(str, sizes))}"
        )
    model, _, device = name.partition("@")
    profile = profiles.load(profiles.path_of(model, device, batch_size))
    if sentence_len not in (None, profile.sentence_len):
        raise _other_sentences(name, sentence_len, [profile.sentence_len])
    return profile


def sentence_len(name: str, given: int | None) -> int | None:
    """The sentence length to use.

    Raises:
        UserError: the model has none and one is given, or a replayed model was recorded with
            others.
    """
    entry = model_entry(name)
    if given is not None and entry.sentence_len is None:
        raise UserError(f"sentence_len: model {name} has no sentences")
    if not is_replay(name) or entry.sentence_len is None:
        return entry.sentence_len if given is None else given
    recorded = [profile_of(name, size).sentence_len for size in profiles.batch_sizes()[name]]
    if given is not None and given not in recorded:
        raise _other_sentences(name, given, sorted(set(recorded)))
    return recorded[0] if given is None else given


def _other_sentences(name: str, given: int, recorded: list[int | None]) -> UserError:
    return UserError(
        f"sentence_len: no profile of {name} for {given}; "
        f"there are some for {', '.join(map(str, recorded))}"
    )


def build(
    name: str,
    batch_size: int,
    sentence_len: int | None,
    generator: torch.Generator,
    classes: int | None = None,
) -> Workload:
    """Makes the model with random weights and one synthetic batch drawn from `generator`.

    Weights come from torch's global random state: seed it alike on all ranks.

    Args:
        classes: of the data that it is to learn; None: as many as its authors had.
    """
    module, _, function = model_entry(name).builder.partition(":")
    builder = getattr(importlib.import_module(module), function)
    more = {} if classes is None else {"classes": classes}
    return builder(name, batch_size, sentence_len, generator, **more)


def precision(dtype: str) -> tuple[torch.dtype, torch.dtype | None]:
    """What parameters and inputs are of, and what autocast computes in (None: there is none)."""
    mixed = _MIXED.get(dtype)
    return (torch.float32, getattr(torch, mixed)) if mixed else (getattr(torch, dtype), None)


def sample_size(name: str, sentence_len: int | None) -> int | None:
    """Of what the model learns: pixels of a side, or words; None where its data has a size."""
    entry = model_entry(name)
    return sentence_len if entry.learns == "text" else entry.image_size
