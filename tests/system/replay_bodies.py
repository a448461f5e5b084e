"""A small profile, and what ranks do with its replay."""

from __future__ import annotations

import torch

from common.models import replay
from common.models.profile import Call, Profile, ProfiledParameter
from common.models.workload import Workload

_SHAPES = {
    "scale": (3,),
    "stem.weight": (600, 500),
    "stem.bias": (600,),
    "block.gain": (7,),
    "block.inner.weight": (9, 9),
    "block.inner.bias": (9,),
    "head.bias": (600,),
}
# In the order in which gradients come; milliseconds from the start of the backward pass.
_READY_MS = {
    "head.bias": 0.5,
    "block.inner.weight": 1.0,
    "block.inner.bias": 1.0,
    "block.gain": 1.5,
    "scale": 2.0,
    "stem.bias": 2.5,
    "stem.weight": 3.0,
}
_CALLS_MS = (
    ("relu", 0.1, 0.0),
    ("stem", 1.0, 1.5),
    ("relu", 0.2, 0.3),
    ("block", 0.1, 0.1),
    ("block.inner", 0.5, 0.6),
    ("block", 0.2, 0.1),
    ("head", 0.4, 0.6),
)


def profile() -> Profile:
    """Nested modules, a shared weight, a parameter of the root, and no time in `scale`'s owner."""
    order = list(_READY_MS)
    return Profile(
        model="tiny",
        device="test",
        device_name="none",
        kind="modelled",
        batch_size=2,
        sentence_len=None,
        sample_unit="img",
        dtype="float32",
        rule="made up",
        modules=("", "relu", "stem", "block", "block.inner", "head"),
        calls=tuple(
            Call(module=name, forward_s=forward / 1e3, backward_s=backward / 1e3)
            for name, forward, backward in _CALLS_MS
        ),
        parameters=tuple(
            ProfiledParameter(
                name=name,
                shape=shape,
                position=order.index(name),
                ready_s=_READY_MS[name] / 1e3,
            )
            for name, shape in _SHAPES.items()
        ),
        shared={"head.weight": "stem.weight"},
    )


def workload(rank: int) -> Workload:
    """The same weights on all ranks, and gradients of this rank."""
    torch.manual_seed(5)
    return replay.workload(profile(), torch.Generator().manual_seed(rank))
