"""Layer profile: the time of each module of a model on a device. Imports no torch."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from common.paths import CONFIGS
from dear.errors import UserError

FOLDER = CONFIGS / "profiles"
"""Folder of the profiles `<device>/<model>-bs<N>.json`."""
SCHEMA = 1
_COLUMNS = {
    "modules": ["module", "calls", "parameters"],
    "calls": ["position in the forward pass", "forward ms", "backward ms"],
    "parameters": ["name", "shape", "position among the gradients", "ms from backward's start"],
}


@dataclass(frozen=True, kw_only=True)
class Call:
    """Part (stretch) of the forward pass in which one module runs, with its backward time."""

    module: str
    """Name in `named_modules()`; the stretches of a container are those between its children."""
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class ProfiledParameter:
    """Parameter, with the time in the backward pass at which its gradient is complete."""

    name: str
    """Name in `named_parameters()`."""
    shape: tuple[int, ...]
    position: int | None
    """Index in the order in which gradients become ready; None for a parameter without gradient."""
    ready_s: float | None
    """Seconds from the start of the backward pass."""

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """Distribution of a step's compute around its median."""

    relative_std: float
    """Standard deviation of the sum of both passes / mean."""
    steps: int
    """Number of steps that were measured."""

    @classmethod
    def of(cls, steps_s: Sequence[float]) -> Jitter | None:
        """Returns the jitter of steps with these durations; None for fewer than two."""
        if len(steps_s) < 2:
            return None
        spread = statistics.stdev(steps_s) / statistics.mean(steps_s)
        return cls(relative_std=round(spread, 6), steps=len(steps_s))


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Training step of a model on one device, layer by layer."""

    model: str
    device: str
    """Name of the folder; `MODEL@DEVICE` names the replayed model."""
    device_name: str
    """Full name of the device."""
    memory_bytes_per_s: float
    """Bytes per second that the device reads from and writes to its memory. The replayed model's
    updates and copies of gradients take the time that follows from it."""
    kind: Literal["measured", "modelled"]
    batch_size: int
    sentence_len: int | None
    sample_unit: str
    dtype: str
    flops: int | None = None
    """Multiplications and additions of a step; None: not counted."""
    jitter: Jitter | None = None
    """Spread of a step's compute; None: not measured."""
    rule: str
    """Description of how the times were obtained."""
    modules: tuple[str, ...]
    """Modules that take time or own parameters, in the model's order."""
    calls: tuple[Call, ...]
    """Stretches in the order of the forward pass."""
    parameters: tuple[ProfiledParameter, ...]
    """Parameters in the model's order."""
    shared: dict[str, str] = field(default_factory=dict, hash=False)
    """First name of each shared parameter, by its other names."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained. They have no gradient, as others that are not used."""
    model_digest: str | None = None
    """Digest of the user's file with the model; None: the model is not from a file, or unknown."""

    @functools.cached_property
    def digest(self) -> str:
        """Hash of all fields that affect a replay (not `_NOT_REPLAYED`)."""
        values = dataclasses.asdict(self)
        for key in _NOT_REPLAYED:
            del values[key]
        if not self.frozen:  # as in profiles of versions without this field
            del values["frozen"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def forward_s(self) -> float:
        return sum(call.forward_s for call in self.calls)

    @property
    def backward_s(self) -> float:
        return sum(call.backward_s for call in self.calls)

    @property
    def step_s(self) -> float:
        """Time of forward and backward pass; a profile does not contain the optimizer's update."""
        return self.forward_s + self.backward_s

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters as float32."""
        return 4 * sum(math.prod(param.shape) for param in self.parameters)

    def gradients(self) -> list[ProfiledParameter]:
        """Returns the parameters with gradients, in the order in which these become ready."""
        ready = [param for param in self.parameters if param.position is not None]
        return sorted(ready, key=lambda param: param.position)

    @functools.cached_property
    def first_calls(self) -> dict[str, int]:
        """Index of the first call that reads a parameter, by the parameter's name.

        If a module is never called, the module around it reads the parameters.
        """
        calls: dict[str, int] = {}
        for position, call in enumerate(self.calls):
            calls.setdefault(call.module, position)

        def call_of(module: str) -> int:
            while module not in calls and module:
                module = module.rpartition(".")[0]
            return calls.get(module, 0)

        first = {param.name: call_of(param.module) for param in self.parameters}
        for alias, name in self.shared.items():
            first[name] = min(first[name], call_of(alias.rpartition(".")[0]))
        return first

    def slowed(self, factor: float) -> Profile:
        """Returns the profile of a device that computes `factor` times as long."""
        calls = tuple(
            dataclasses.replace(
                call, forward_s=factor * call.forward_s, backward_s=factor * call.backward_s
            )
            for call in self.calls
        )
        parameters = tuple(
            param
            if param.ready_s is None
            else dataclasses.replace(param, ready_s=factor * param.ready_s)
            for param in self.parameters
        )
        return dataclasses.replace(self, calls=calls, parameters=parameters)

    def save(self, path: Path) -> None:
        """Writes JSON with one module per line."""
        rows: dict[str, list[Any]] = {name: [name, [], []] for name in self.modules}
        for position, call in enumerate(self.calls):
            rows[call.module][1].append([position, _ms(call.forward_s), _ms(call.backward_s)])
        for param in self.parameters:
            short_name = param.name.rpartition(".")[2]
            ready = None if param.ready_s is None else _ms(param.ready_s)
            rows[param.module][2].append([short_name, param.shape, param.position, ready])
        head = {"schema": SCHEMA} | {key: getattr(self, key) for key in _HEAD}
        head["jitter"] = self.jitter and dataclasses.asdict(self.jitter)
        head |= {"columns": _COLUMNS, "shared": self.shared}
        head |= {"frozen": self.frozen} if self.frozen else {}
        head |= {"model_digest": self.model_digest} if self.model_digest else {}
        lines = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows.values())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "{\n" + "\n".join(lines) + '\n"modules": [\n' + body + "\n]\n}\n", encoding="utf-8"
        )


_HEAD = [
    entry.name
    for entry in dataclasses.fields(Profile)
    if entry.name not in ("modules", "calls", "parameters", "shared", "frozen", "model_digest")
]
_NOT_REPLAYED = ("device_name", "flops", "jitter", "rule", "model_digest")
"""Fields that do not affect a replay."""


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


@functools.lru_cache(maxsize=16)
def load(path: Path) -> Profile:
    """Reads a profile; raises `UserError` if the file does not contain one."""
    try:
        # Older files lack two fields.
        values = {"flops": None, "jitter": None} | json.loads(path.read_bytes())
        if values["schema"] != SCHEMA:
            raise UserError(f"profile {path}: schema {values['schema']}; allowed: {SCHEMA}")
        values["jitter"] = values["jitter"] and Jitter(**values["jitter"])
        rows = values["modules"]
        calls = sorted(
            (position, Call(module=name, forward_s=forward / 1e3, backward_s=backward / 1e3))
            for name, stretches, _ in rows
            for position, forward, backward in stretches
        )
        return Profile(
            **{key: values[key] for key in _HEAD},
            modules=tuple(name for name, _, _ in rows),
            calls=tuple(call for _, call in calls),
            parameters=tuple(
                ProfiledParameter(
                    name=f"{name}.{short_name}" if name else short_name,
                    shape=tuple(shape),
                    position=position,
                    ready_s=None if ready is None else ready / 1e3,
                )
                for name, _, params in rows
                for short_name, shape, position, ready in params
            ),
            shared=values["shared"],
            frozen=tuple(values.get("frozen", ())),
            model_digest=values.get("model_digest"),
        )
    except OSError as error:
        raise UserError(f"profile {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"profile {path}: not a layer profile ({error!r})") from None


def path_of(model: str, device: str, batch_size: int) -> Path:
    """Returns the path of a profile in `FOLDER`, whether it exists or not."""
    return FOLDER / device / f"{model}-bs{batch_size}.json"


def batch_sizes() -> dict[str, list[int]]:
    """Returns the batch sizes that have a profile, by `MODEL@DEVICE`; reads only file names."""
    sizes: dict[str, list[int]] = {}
    for path in sorted(FOLDER.glob("*/*-bs*.json")):
        model, _, batch = path.stem.rpartition("-bs")
        if batch.isdigit():
            sizes.setdefault(f"{model}@{path.parent.name}", []).append(int(batch))
    return {name: sorted(batches) for name, batches in sizes.items()}
