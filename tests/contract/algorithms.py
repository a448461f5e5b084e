"""Every algorithm that is discovered, its serial reference, and what it is expected to support."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from dear.algorithms import reference as references
from dear.training.algorithm import (
    Algorithm,
    algorithm_class,
    algorithm_names,
    algorithm_options,
    plugin_of,
)

TINY = 0.0002  # MB: many buckets

NOT_AVERAGING = frozenset({"steps=left out", "steps=twice", "model=freezing"})
"""Values that have a meaning only where all replicas are one: a step without its own gradient."""
IN_BACKWARD = frozenset(
    {"clip=own", "clip=torch", "scaler=overflow", "micros=two", "model=idle", "optimizer=own"}
)
"""Values that come too late where each bucket is updated as soon as its gradients are there."""


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """Expectations of an algorithm."""

    family: str
    options: tuple[dict[str, Any], ...] = ({},)
    """Settings to be tested; the first ones in everything."""
    lacks: frozenset[str] = frozenset()
    """Values that it refuses or does not define, as `axis=value`."""
    lacks_with: Callable[[dict[str, Any]], frozenset[str]] = lambda options: frozenset()
    """Values that it lacks with some options."""
    apart: tuple[frozenset[str], ...] = ()
    """Values that it lacks together."""
    worlds: Callable[[dict[str, Any], int], bool] = lambda options, size: True
    """Returns whether options and world go together."""
    state_in_groups: bool = False
    """All that it keeps is in the optimizer's parameter groups: a plain optimizer that has loaded a
    state can be wrapped."""
    in_turn: bool = False
    """Steps are taken by one rank after another, so that the order of messages is known."""

    @classmethod
    def of(cls, name: str) -> Meaning:
        return TABLE.get(name) or Meaning._of_file(algorithm_class(name))

    @classmethod
    def _of_file(cls, algorithm: type[Algorithm]) -> Meaning:
        """Returns what the file of an algorithm outside the table states as `CONTRACT`, if it does.

        `CONTRACT = {"options": [{"k": 1}, {}], "lacks": ["model=complex"]}`
        """
        stated = dict(getattr(sys.modules[algorithm.__module__], "CONTRACT", {}))
        meaning = cls(
            family=algorithm.capabilities.consistency,
            options=tuple(stated.pop("options", ({},))),
            lacks=frozenset(stated.pop("lacks", ())),
        )
        assert not stated, f"CONTRACT: unknown {', '.join(stated)} (allowed: options, lacks)"
        return meaning

    @property
    def averages_gradients(self) -> bool:
        """Clipping and scaling are of the average, the same on all ranks."""
        return self.family in ("synchronous", "delayed")

    def fits(self, options: dict[str, Any], size: int, script: dict[str, str]) -> bool:
        """Returns whether the algorithm supports the script."""
        values = {f"{axis}={value}" for axis, value in script.items()}
        lacks = self.lacks | self.lacks_with(options)
        if not self.averages_gradients:
            lacks |= NOT_AVERAGING
        if self.family != "synchronous" and not self.state_in_groups:
            lacks |= {"checkpoint=before"}
        return (
            not values & lacks
            and self.worlds(options, size)
            and not any(item in values and values & others for item, others in _APART.items())
            and not any(values >= together for together in self.apart)
        )


_REPEATED = {"steps=left out", "steps=twice"}
_CHANGED = {"clip=own", "clip=torch", "scaler=overflow"}
_APART: dict[str, set[str]] = {
    "call=closure": {*_CHANGED, *_REPEATED, "model=idle"},
    "steps=left out": {*_CHANGED, "model=idle"},
    "steps=twice": {*_CHANGED, "model=idle"},
    "zero=zeros": {"model=idle", "model=branches", "model=freezing"},
    # Ranks must make the same number of passes that communicate, and a rank without any takes part
    # in `step()`, not in `synchronize()`.
    "model=idle": {"micros=two", "clip=own", "clip=torch"},
    "scaler=overflow": {"model=idle", "model=complex"},
    "model=complex": {"optimizer=own", "optimizer=fused"},
    # torch's fused updates read memory as it lies, and take no group in which only some parameters
    # have momentum.
    "optimizer=fused": {"model=odd", "model=branches"},
    # It divides by the root of what is rounding in bfloat16.
    "model=types": {"optimizer=RMSprop"},
    # A bias of its attention has gradients that are rounding alone, of which these take the sign.
    "model=recurrent": {"optimizer=own", "optimizer=AdamW", "optimizer=Adagrad",
                        "optimizer=RMSprop"},
}  # fmt: skip
"""Values that a plain optimizer, too, cannot combine or does not define on several ranks."""
_NO_WINDOW = frozenset({"model=complex"})
"""Windows hold floating-point values."""
_NOT_SHARDED = frozenset(
    {"model=branches", "model=idle", "model=complex", "model=types", "optimizer=fused"}
)

_FUSIONS: tuple[dict[str, Any], ...] = (
    {"small_kb": 0},
    {"small_kb": 0, "fusion": "none"},
    {"small_kb": 0, "threshold_mb": 0.0005, "first_mb": 0.0005},
    {"small_kb": 0, "threshold_mb": 0.001, "first_mb": 0.0001},
    {"small_kb": 0, "fusion": "nearby_layers", "nearby_layers": 2},
    {"small_kb": 0, "fusion": "nearby_layers", "nearby_layers": -1},
    {"small_kb": 0, "fusion": "wait_time", "cycle_time_ms": 0.05},
    {"fusion": "none", "small_kb": 0.3},
    {"fusion": "threshold", "small_kb": 8},
    {"fusion": "planned", "small_kb": 0.05},
    {"fusion": "planned", "small_kb": 0.0001},
)
_UPDATES: tuple[dict[str, Any], ...] = (
    {"update": "sharded"},
    {"update": "replicated"},
    {"update": "sharded", "decouple": "reduce_broadcast"},
    {"update": "replicated", "decouple": "reduce_broadcast"},
)


def _of_dear() -> tuple[dict[str, Any], ...]:
    """Every rule of fusion, and every manner of updating."""
    chosen = [
        fusion | _UPDATES[i % 2 if fusion.get("small_kb") else i % 4]
        for i, fusion in enumerate(_FUSIONS)
    ]
    return ({"small_kb": 0}, *chosen)


def _sharded_lacks(options: dict[str, Any]) -> frozenset[str]:
    return frozenset({"optimizer=own"} if options.get("update") == "sharded" else ())


def _zero_lacks(options: dict[str, Any]) -> frozenset[str]:
    return frozenset({"model=complex", "model=types"} if options.get("zero") else ())


def _in_backward(options: dict[str, Any]) -> frozenset[str]:
    return IN_BACKWARD if options.get("update", "backward") == "backward" else frozenset()


def _groups(options: dict[str, Any], size: int) -> bool:
    """Worlds of `decentralized`."""
    name, per_node = options.get("topology", "complete"), options.get("ranks_per_node", 1)
    if name == "complete" or (size == 1 and per_node == 1):
        return True
    return size in (2, 4) and size > per_node


TABLE: dict[str, Meaning] = {
    "allreduce": Meaning(family="synchronous"),
    "wfbp": Meaning(family="synchronous", options=({}, {"channels": 2})),
    "hierarchical": Meaning(
        family="synchronous",
        options=(
            {"local_size": 2, "threshold_mb": TINY},
            {"local_size": 2},
            {"local_size": 1, "threshold_mb": 0.0},
            {},
        ),
        worlds=lambda options, size: size % options.get("local_size", 1) == 0,
    ),
    "mgwfbp": Meaning(
        family="synchronous",
        options=(
            {},
            {"merge": "asc"},
            {"channels": 2},
            {"merge": "optimal"},
            {"merge": "threshold", "threshold_mb": 0.0},
            {"costs": "10gbe", "profile_steps": 1},
        ),
    ),
    "mgs": Meaning(
        family="synchronous",
        options=({"density": 1.0}, {"density": 1.0, "merge": "optimal"}),
        lacks=frozenset({"model=complex"}),
    ),
    "bytescheduler": Meaning(
        family="synchronous",
        options=(
            {},
            {"partition_mb": 0.0001, "levels": 3},
            {"partition_mb": 0.0001, "credit_mb": 0.0003},
        ),
    ),
    "dear": Meaning(family="synchronous", options=_of_dear(), lacks_with=_sharded_lacks),
    "auto": Meaning(
        family="synchronous",
        options=(
            {"profile_steps": 1, "candidates": ("dear",)},
            {"profile_steps": 2, "candidates": ("mgwfbp", "wfbp")},
            {"profile_steps": 1, "candidates": ("bytescheduler",)},
        ),
    ),
    "ddp": Meaning(
        family="synchronous",
        options=(
            {"find_unused_parameters": True},
            {
                "find_unused_parameters": True,
                "bucket_cap_mb": TINY,
                "gradient_as_bucket_view": True,
            },
            {"find_unused_parameters": True, "zero": True},
        ),
        # torch's reducer marks a parameter twice that a reentrant checkpoint runs again.
        lacks=frozenset({"model=idle", "model=reentrant"}),
        lacks_with=_zero_lacks,
        # torch's reducer, which an evaluation with gradients has told to find unused parameters.
        apart=(frozenset({"model=branches", "evaluate=grad", "micros=paused"}),),
    ),
    "fsdp": Meaning(
        family="synchronous",
        options=({"min_mb": 0.00001}, {"stage": 2}),
        lacks=_NOT_SHARDED,
        # torch's scaler and its clipping take no sharded and whole gradients together.
        apart=tuple(
            frozenset({what, model})
            for what in ("scaler=overflow", "clip=torch")
            for model in ("model=odd", "model=channels_last")
        ),
    ),
    # Horovod 0.28.1 has no bfloat16 on CPUs.
    "horovod": Meaning(
        family="synchronous", lacks=frozenset({"model=complex", "model=bfloat16", "model=types"})
    ),
    "dadt": Meaning(
        family="delayed",
        options=(
            {},
            {"delay": 2},
            {"delay": 3, "buffer_mb": 0.0},
            {"buffer_mb": 0.0005},
            {"cycle_time_ms": 0.05, "average": False},
        ),
        lacks=frozenset({"steps=left out", "steps=twice"}),
        # The scale of the gradients that an update applies is not the present one.
        apart=(
            frozenset({"scaler=overflow", "clip=own"}),
            frozenset({"scaler=overflow", "clip=torch"}),
        ),
    ),
    "neighbor": Meaning(
        family="decentralized",
        options=(
            {"bucket_mb": 0.001},
            {"combine": "atc", "topology": "star"},
            {"combine": "awc", "topology": "ring-left", "every": 2},
            {"combine": "atc", "dynamic": "one-peer-exp"},
            {"combine": "awc", "hierarchical": True, "local_size": 2},
            {"combine": "atc", "hierarchical": True, "local_size": 2, "dynamic": "one-peer-exp"},
            {"hierarchical": True, "local_size": 1, "topology": "ring"},
        ),
        worlds=lambda options, size: size % options.get("local_size", 1) == 0,
    ),
    "gradient-tracking": Meaning(
        family="decentralized",
        options=({"bucket_mb": 0.001}, {"topology": "ring"}),
        # What nobody near has had a gradient for is left alone: the reference does not tell that.
        lacks=frozenset({"scaler=overflow", "model=idle", "model=branches"}),
    ),
    "exact-diffusion": Meaning(
        family="decentralized",
        options=({"bucket_mb": 0.001}, {"topology": "star"}),
        lacks=frozenset({"scaler=overflow"}),
    ),
    "push-diging": Meaning(
        family="decentralized",
        options=({"bucket_mb": 0.001}, {"topology": "star"}),
        # What nobody near has had a gradient for is left alone: the reference does not tell that.
        lacks=frozenset({"scaler=overflow", "model=idle", "model=branches"}),
    ),
    "decentralized": Meaning(
        family="decentralized",
        options=(
            {"update": "step", "topology": "ring", "bucket_mb": TINY},
            {"bucket_mb": TINY},
            {"topology": "ring", "bucket_mb": TINY, "adaptive_factor": 0.6},
            {"topology": "one-peer-exp", "update": "step"},
            {"topology": "alternating-exp-ring", "ranks_per_node": 2, "bucket_mb": TINY},
        ),
        lacks_with=_in_backward,
        worlds=_groups,
        state_in_groups=True,
    ),
    "win-put": Meaning(
        family="asynchronous",
        lacks=_NO_WINDOW,
        options=(
            {"barrier": True, "bucket_mb": 0.001},
            {"barrier": True, "topology": "star", "every": 2},
        ),
    ),
    "pull-get": Meaning(
        family="asynchronous",
        lacks=_NO_WINDOW,
        options=(
            {"barrier": True, "bucket_mb": 0.001},
            {"barrier": True, "topology": "ring-right", "every": 2},
        ),
    ),
    "push-sum": Meaning(
        family="asynchronous",
        options=(
            {"barrier": True, "bucket_mb": 0.001},
            {"barrier": True, "topology": "star"},
            {"barrier": True, "topology": "ring", "every": 2},
        ),
        lacks=_NO_WINDOW | {"model=bfloat16", "model=types"},  # p needs float32 or float64
    ),
    "asyncddp": Meaning(
        family="asynchronous",
        options=(
            {"bucket_mb": TINY, "update": "step"},
            {"bucket_mb": TINY, "topology": "ring-left"},
            {"topology": "star", "update": "step"},
        ),
        lacks=frozenset(
            {
                "checkpoint=before",
                "checkpoint=model first",
                "checkpoint=optimizer first",
                *_NO_WINDOW,
            }
        ),
        lacks_with=_in_backward,
        in_turn=True,
    ),
}


def dears_own() -> list[str]:
    """The algorithms that come with the project; `pytest --plugin FILE` brings others."""
    return [name for name in algorithm_names() if plugin_of(name) is None]


def reference_of(name: str, options: dict[str, Any]) -> Any:
    """The serial reference with these options, or with the first that are tested."""
    given = options or Meaning.of(name).options[0]
    return references.reference_of(name, algorithm_options(name, given))


def skip_if_unavailable(name: str) -> None:
    reason = algorithm_class(name).unavailable()
    if reason:
        pytest.skip(reason)


__all__ = ["TABLE", "Meaning", "algorithm_class", "algorithm_names", "algorithm_options"]
