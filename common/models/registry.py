"""Registry of models by name: builder, default sizes and sample unit. Imports no torch.

`resnet50` computes. `resnet50@rtx2080ti-modelled` replays, that is, it waits for the times in
`configs/profiles/rtx2080ti-modelled/` instead of computing. `bring` adds models that the project
does not contain: from a user's file, from transformers or timm, or with a profile elsewhere.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.models import profile as profiles
from common.models.profile import Profile
from common.models.workload import Workload
from dear.errors import UserError, unknown
from dear.lazy import torch
from dear.training.files import digest_of

Kind = Literal["digits", "small images", "images", "text"]
"""Kind of a model's input. digits: grey, 28 x 28 pixels. small images: colour, 32 x 32 pixels.
images: colour, of the model's size. text: sequences of words."""

_MIXED = {"amp-bf16": "bfloat16", "amp-fp16": "float16"}
DTYPES = ("float32", "float64", "bfloat16", *_MIXED)
"""Types of parameters and inputs. Mixed precision (amp) means float32 with autocast."""


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """Entry of the registry."""

    builder: str
    """`module:function`; the function takes (name, batch_size, sentence_len, generator)."""
    sample_unit: str = "img"
    """Unit of throughput: `img`, `sen` for sentences, or `sample` if it is not known."""
    batch_size: int = 32
    """Default number of samples per worker."""
    sentence_len: int | None = None
    """Default length in tokens; None for models without sentences."""
    longest: int | None = None
    """Largest length in tokens; None: not known."""
    learns: Kind | None = None
    """Kind of data that the model can be trained on; its builder then also takes `classes`."""
    image_size: int | None = None
    """Side of an image in pixels, for data whose images are cropped to this size."""

    @property
    def module(self) -> str:
        return self.builder.partition(":")[0]


# Classifiers of torchvision 0.26 to 0.28 (a test compares the list with the library).
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

_PACKAGE = "common.models.architectures"
_BERT = ModelEntry(
    builder=f"{_PACKAGE}.bert:build",
    sample_unit="sen",
    batch_size=8,
    sentence_len=64,
    longest=512,
)

_CIFAR_DEPTHS = (20, 32, 44, 56, 110)
_CIFAR = ModelEntry(
    builder=f"{_PACKAGE}.cifar:build",
    batch_size=128,
    learns="small images",
    image_size=32,
)
_LSTM = ModelEntry(
    builder=f"{_PACKAGE}.lstm:build",
    sample_unit="sen",
    batch_size=20,
    sentence_len=35,
    learns="text",
)


def _imagenet(builder: str, image_size: int = 224) -> ModelEntry:
    return ModelEntry(builder=f"{_PACKAGE}.cnn:{builder}", learns="images", image_size=image_size)


_COMPUTED: dict[str, ModelEntry] = {
    **{name: _imagenet("build_torchvision") for name in _TORCHVISION},
    "inception_v3": _imagenet("build_torchvision", 227),  # the size that the reference suites use
    "inceptionv4": _imagenet("build_timm"),
    **{f"resnet{depth}": _CIFAR for depth in _CIFAR_DEPTHS},
    "vgg16_cifar": _CIFAR,
    "lstm": _LSTM,
    "lstm_small": _LSTM,
    "bert_base": _BERT,
    "bert": _BERT,
    "mnist_cnn": ModelEntry(builder=f"{_PACKAGE}.mnist:build", learns="digits"),
}
_REPLAY_BUILDER = "common.models.replay.model:build"
_USUAL_BATCH = 64
"""Default batch size of replayed models that have a profile for it; else their smallest one."""


def _replayed() -> dict[str, ModelEntry]:
    """Returns the entries of models with a profile; reads no profile."""
    return {
        name: dataclasses.replace(
            _COMPUTED[name.partition("@")[0]],
            builder=_REPLAY_BUILDER,
            batch_size=_USUAL_BATCH if _USUAL_BATCH in sizes else sizes[0],
        )
        for name, sizes in profiles.batch_sizes().items()
        if name.partition("@")[0] in _COMPUTED
    }


MODELS: dict[str, ModelEntry] = {**_COMPUTED, **_replayed()}


FILE, HF, TIMM = "file:", "hf:", "timm:"
"""Prefixes of models that the registry does not contain: of a file's path, of a model type of
transformers, and of a model name of timm."""


def names_gpu(name: str) -> bool:
    """Returns True if a model is named with the device that it replays, as `resnet50@h200`."""
    return "@" in name and not name.startswith(FILE)


_LIBRARIES = {
    HF: f"{_PACKAGE}.huggingface",
    TIMM: f"{_PACKAGE}.any_timm",
}
_FILE_ENTRY = ModelEntry(builder="common.models.user_file:build", sample_unit="sample")
_ANY_SIZE = 0


@dataclass(frozen=True, kw_only=True)
class Brought:
    """Origin of a model that the project does not contain; workers build the model from it."""

    source: str
    """`file:PATH` (absolute, the same on every host), `hf:TYPE`, `timm:NAME`, or a name of the
    registry."""
    digest: str | None = None
    """Digest of the file, and of the modules in its folder that the file imports."""
    profile: str | None = None
    """Absolute path of the profile that is replayed; None: the model computes."""


_brought: dict[str, dict[int, Brought]] = {}
"""Added models by name and batch size (`_ANY_SIZE` for models that compute)."""


def bring(name: str, brought: Brought) -> None:
    """Adds the model `name` to the registry of this process.

    Raises:
        UserError: the name belongs to another model, or the profile is invalid.
    """
    known = _brought.get(name, {})
    for other in known.values():
        if (other.source, other.digest) != (brought.source, brought.digest):
            raise UserError(
                f"model {name}: two models have this name: {other.source} and {brought.source}"
            )
    size = _ANY_SIZE
    if brought.profile is not None:
        size = profiles.load(Path(brought.profile)).batch_size
    if known.get(size, brought) != brought:
        raise UserError(
            f"model {name}: there are two profiles for batch_size {size}, with different "
            "sentence_len"
        )
    _brought[name] = known | {size: brought}


def register(name: str) -> tuple[str, Brought | None]:
    """Adds the model that a user has named to the registry of this process.

    Returns:
        Its name in the registry, and its origin (None for models that the registry contains).

    Raises:
        UserError: the model does not exist, or its file cannot be read.
    """
    if name.startswith(FILE):
        path = Path(name.removeprefix(FILE)).absolute()
        if re.fullmatch(r"[\w.+-]+\.py", path.name) is None:
            raise UserError(
                f"{path}: a model's file ends in .py, and its name has letters, digits, '_', '.', "
                "'+' and '-' only"
            )
        brought = Brought(source=f"{FILE}{path}", digest=digest_of(path))
        name = path.name
    elif name.startswith((HF, TIMM)):
        brought = Brought(source=name)
    else:
        return name, None
    bring(name, brought)
    model_entry(name)
    return name, brought


def brought_of(name: str, batch_size: int) -> Brought | None:
    """Returns the origin of a model that `bring` has added for this batch size; None for others."""
    known = _brought.get(name, {})
    return known.get(batch_size) or known.get(_ANY_SIZE)


def _brought_entry(name: str) -> ModelEntry | None:
    known = _brought.get(name)
    if not known:
        return None
    size, brought = next(iter(known.items()))
    if brought.profile is not None:
        profile = profiles.load(Path(brought.profile))
        return ModelEntry(
            builder=_REPLAY_BUILDER,
            sample_unit=profile.sample_unit,
            batch_size=size,
            sentence_len=profile.sentence_len,
        )
    if brought.source.startswith(FILE):
        return _FILE_ENTRY
    module = _LIBRARIES[brought.source.partition(":")[0] + ":"]
    return importlib.import_module(module).entry(brought.source)


def _paths(name: str) -> dict[int, Path]:
    model, _, device = name.partition("@")
    sizes = profiles.batch_sizes().get(name, ())
    paths = {size: profiles.path_of(model, device, size) for size in sizes}
    for size, brought in _brought.get(name, {}).items():
        if brought.profile:
            paths[size] = Path(brought.profile)
    return paths


def model_entry(name: str) -> ModelEntry:
    """Returns the entry of the model `name`; raises `UserError` for an unknown name."""
    entry = MODELS.get(name) or _brought_entry(name)
    if entry is not None:
        return entry
    model, at, device = name.partition("@")
    if not at:
        raise unknown("model", name, MODELS)
    recorded = [known.split("@") for known in MODELS if "@" in known]
    devices = {known for _, known in recorded}
    if device not in devices:
        raise unknown("device of a recorded model", device, devices)
    raise unknown(f"model recorded on {device}", model, {m for m, d in recorded if d == device})


def is_replay(name: str) -> bool:
    """Returns True for a model that waits for recorded times instead of computing."""
    return model_entry(name).builder == _REPLAY_BUILDER


def profile_of(name: str, batch_size: int, sentence_len: int | None = None) -> Profile:
    """Returns the profile that the model `name` (`MODEL@DEVICE`) replays at this batch size.

    Raises:
        UserError: the model does not exist, has no profile for this batch size or sentence length,
            or its file is invalid.
    """
    if not is_replay(name):
        raise UserError(
            f"model {name} computes, but a replayed model is needed: MODEL@DEVICE, for example "
            "resnet50@rtx2080ti-modelled"
        )
    paths = _paths(name)
    if batch_size not in paths:
        raise UserError(
            f"batch_size: {name} has no profile for {batch_size}; "
            f"allowed: {', '.join(map(str, sorted(paths)))}"
        )
    profile = profiles.load(paths[batch_size])
    if sentence_len not in (None, profile.sentence_len):
        raise _wrong_length(name, sentence_len, [profile.sentence_len])
    return profile


def sentence_len(name: str, given: int | None, batch_size: int | None = None) -> int | None:
    """Returns the sentence length to use.

    Args:
        given: the requested length; None: the model's default.
        batch_size: of a replayed model: only the profile of this size counts, if there is one.

    Raises:
        UserError: the model has no sentences, or a replayed model has no profile for this length.
    """
    entry = model_entry(name)
    if given is not None and entry.sentence_len is None:
        raise UserError(f"sentence_len: model {name} has no sentences")
    if given is not None and entry.longest is not None and given > entry.longest:
        raise UserError(f"sentence_len: {name} has {entry.longest} positions, fewer than {given}")
    if not is_replay(name) or entry.sentence_len is None:
        return entry.sentence_len if given is None else given
    sizes = [size for size in _paths(name) if size == batch_size] or _paths(name)
    recorded = [profile_of(name, size).sentence_len for size in sizes]
    if given is not None and given not in recorded:
        raise _wrong_length(name, given, sorted(set(recorded)))
    return recorded[0] if given is None else given


def _wrong_length(name: str, given: int, recorded: list[int | None]) -> UserError:
    return UserError(
        f"sentence_len: {name} has no profile for {given}; allowed: {', '.join(map(str, recorded))}"
    )


def build(
    name: str,
    batch_size: int,
    sentence_len: int | None,
    generator: torch.Generator,
    classes: int | None = None,
) -> Workload:
    """Returns the model with random weights and one synthetic batch drawn from `generator`.

    Weights come from torch's global random state, which must have the same seed on all ranks.

    Args:
        classes: number of classes of the data; None: the model's default.
    """
    module, _, function = model_entry(name).builder.partition(":")
    builder = getattr(importlib.import_module(module), function)
    if classes is None:
        return builder(name, batch_size, sentence_len, generator)
    return builder(name, batch_size, sentence_len, generator, classes)


def precision(dtype: str) -> tuple[torch.dtype, torch.dtype | None]:
    """Returns the type of parameters and inputs, and the type of autocast (None: no autocast)."""
    mixed = _MIXED.get(dtype)
    return (torch.float32, getattr(torch, mixed)) if mixed else (getattr(torch, dtype), None)


def sample_size(name: str, sentence_len: int | None) -> int | None:
    """Returns the size of a sample: pixels of a side, or words; None if the data fixes it."""
    entry = model_entry(name)
    return sentence_len if entry.learns == "text" else entry.image_size
