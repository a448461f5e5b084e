"""Every model by name, without importing torch: what makes it, and what one sample is called.

`resnet50` computes; `resnet50@rtx2080ti-modelled` replays the times that are recorded in
`configs/profiles/rtx2080ti-modelled/`. Others are brought along (`bring`): by a file of the user's,
by their type in transformers, or with a profile that lies elsewhere.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from pathlib import Path

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
    """What throughput counts: `img`, `sen` for sentences, or `sample` where nobody knows."""
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


FILE, HF, TIMM = "file:", "hf:", "timm:"
"""How names of models begin that the registry does not have: a file's path, a type of transformers,
a name of timm."""
_LIBRARIES = {HF: "common.models.huggingface", TIMM: "common.models.any_timm"}
_FILE_ENTRY = ModelEntry(builder="common.models.own_file:build", sample_unit="sample")
_OF_ANY_SIZE = 0


@dataclass(frozen=True, kw_only=True)
class Brought:
    """Where a model is from that the registry, as it ships, does not have: what workers need."""

    source: str
    """`file:PATH` (absolute, on every host the same), `hf:TYPE`, `timm:NAME`, or a name of the
    registry."""
    digest: str | None = None
    """Of the file, and of what it imports from beside it."""
    profile: str | None = None
    """The file whose times are replayed, absolute; None: the model computes."""


_brought: dict[str, dict[int, Brought]] = {}
"""By name and batch size (computed: any)."""


def bring(name: str, brought: Brought) -> None:
    """Makes `name` a model, in this process.

    Raises:
        UserError: another one is called that already, or its file or profile is none.
    """
    known = _brought.get(name, {})
    for other in known.values():
        if (other.source, other.digest) != (brought.source, brought.digest):
            raise UserError(f"model {name}: there are two, {other.source} and {brought.source}")
    size = _OF_ANY_SIZE
    if brought.profile is not None:
        size = profiles.load(Path(brought.profile)).batch_size
    if known.get(size, brought) != brought:
        raise UserError(f"model {name}: stands twice with batch_size {size}, but other sentences")
    _brought[name] = known | {size: brought}


def brought_of(name: str, batch_size: int) -> Brought | None:
    """What `bring` was told of the model at this batch size; None: it is the registry's own."""
    known = _brought.get(name, {})
    return known.get(batch_size) or known.get(_OF_ANY_SIZE)


def _brought_entry(name: str) -> ModelEntry | None:
    known = _brought.get(name)
    if not known:
        return None
    size, brought = next(iter(known.items()))
    if brought.profile is not None:
        made = profiles.load(Path(brought.profile))
        return ModelEntry(
            builder=_REPLAY_BUILDER,
            sample_unit=made.sample_unit,
            batch_size=size,
            sentence_len=made.sentence_len,
        )
    if brought.source.startswith(FILE):
        return _FILE_ENTRY
    module = next(one for prefix, one in _LIBRARIES.items() if brought.source.startswith(prefix))
    return importlib.import_module(module).entry(brought.source)


def _paths(name: str) -> dict[int, Path]:
    """The profiles of a replayed model, by batch size."""
    model, _, device = name.partition("@")
    sizes = profiles.batch_sizes().get(name, ())
    shipped = {size: profiles.path_of(model, device, size) for size in sizes}
    brought = _brought.get(name, {}).items()
    return shipped | {size: Path(one.profile) for size, one in brought if one.profile}


def model_entry(name: str) -> ModelEntry:
    """The registry's line for `name`; raises `UserError` for an unknown name."""
    known = MODELS.get(name) or _brought_entry(name)
    if known is not None:
        return known
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
    paths = _paths(name)
    if batch_size not in paths:
        raise UserError(
            f"batch_size: no profile of {name} for {batch_size}; "
            f"there are some for {', '.join(map(str, sorted(paths)))}"
        )
    profile = profiles.load(paths[batch_size])
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
    recorded = [profile_of(name, size).sentence_len for size in _paths(name)]
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
