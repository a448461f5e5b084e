"""A layer profile: how long each module of a model takes on a device. No torch in here."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dear.errors import UserError

FOLDER = Path(__file__).parents[2] / "configs" / "profiles"
"""Profiles lie in `FOLDER/<device>/<model>-bs<N>.json`."""
SCHEMA = 1
_COLUMNS = {
    "modules": ["module", "calls", "parameters"],
    "calls": ["position in the forward pass", "forward ms", "backward ms"],
    "parameters": ["name", "shape", "position among the gradients", "ms from backward's start"],
}
_HEAD = (
    "model", "device", "device_name", "memory_bytes_per_s", "kind", "batch_size", "sentence_len",
    "sample_unit", "dtype", "rule",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Call:
    """A stretch of the forward pass in which no other module ran, and its backward pass."""

    module: str
    """Name in `named_modules()`; a container's stretches lie between the calls of its children."""
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class ProfiledParameter:
    """A parameter, and when in the backward pass its gradient is complete."""

    name: str
    """Name in `named_parameters()`."""
    shape: tuple[int, ...]
    position: int | None
    """Place in the order in which gradients become ready; None for one that never gets any."""
    ready_s: float | None
    """Seconds from the start of the backward pass."""

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model's training step on one device, layer by layer."""

    model: str
    device: str
    """Name of the folder; `MODEL@DEVICE` names the replayed model."""
    device_name: str
    """What the device calls itself."""
    memory_bytes_per_s: float
    """Bytes that the device reads and writes per second, in memory of its own. A replayed model's
    updates, and copies of gradients, take as long as this says."""
    kind: Literal["measured", "modelled"]
    batch_size: int
    sentence_len: int | None
    sample_unit: str
    dtype: str
    rule: str
    """How the times came about."""
    modules: tuple[str, ...]
    """Modules that take time or own parameters, in the model's order."""
    calls: tuple[Call, ...]
    """In the order of the forward pass."""
    parameters: tuple[ProfiledParameter, ...]
    """In the model's order."""
    shared: dict[str, str] = field(default_factory=dict)
    """Further names of parameters, with their first ones."""

    @functools.cached_property
    def digest(self) -> str:
        """Of all that a replay follows; `device_name` and `rule` are for people."""
        values = dataclasses.asdict(self)
        del values["device_name"], values["rule"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def forward_s(self) -> float:
        return sum(call.forward_s for call in self.calls)

    @property
    def backward_s(self) -> float:
        return sum(call.backward_s for call in self.calls)

    @property
    def step_s(self) -> float:
        """Forward and backward; the optimizer's update is no part of a profile."""
        return self.forward_s + self.backward_s

    @property
    def parameter_bytes(self) -> int:
        """Of all parameters as float32."""
        return 4 * sum(math.prod(param.shape) for param in self.parameters)

    def gradients(self) -> list[ProfiledParameter]:
        """The parameters that get gradients, in the order in which they get them."""
        ready = [param for param in self.parameters if param.position is not None]
        return sorted(ready, key=lambda param: param.position)

    def save(self, path: Path) -> None:
        """Writes JSON with one module per line."""
        rows: dict[str, list[Any]] = {name: [name, [], []] for name in self.modules}
        for position, call in enumerate(self.calls):
            rows[call.module][1].append([position, _ms(call.forward_s), _ms(call.backward_s)])
        for param in self.parameters:
            own = param.name.rpartition(".")[2]
            ready = None if param.ready_s is None else _ms(param.ready_s)
            rows[param.module][2].append([own, param.shape, param.position, ready])
        head = {"schema": SCHEMA} | {key: getattr(self, key) for key in _HEAD}
        head |= {"columns": _COLUMNS, "shared": self.shared}
        lines = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows.values())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{\n" + "\n".join(lines) + '\n"modules": [\n' + body + "\n]\n}\n")


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


@functools.lru_cache(maxsize=16)
def load(path: Path) -> Profile:
    """Reads a profile; raises `UserError` if the file is none."""
    try:
        values = json.loads(path.read_text())
        if values["schema"] != SCHEMA:
            raise UserError(f"profile {path}: schema {values['schema']}, this reads {SCHEMA}")
        if values.get("memory_bytes_per_s", 0) <= 0:
            raise UserError(
                f"profile {path}: says nothing of its device's memory; record it again, or add to "
                'its head a line such as "memory_bytes_per_s": 616e9'
            )
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
                    name=f"{name}.{own}" if name else own,
                    shape=tuple(shape),
                    position=position,
                    ready_s=None if ready is None else ready / 1e3,
                )
                for name, _, params in rows
                for own, shape, position, ready in params
            ),
            shared=values["shared"],
        )
    except OSError as error:
        raise UserError(f"profile {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"profile {path}: not a layer profile ({error!r})") from None


def path_of(model: str, device: str, batch_size: int) -> Path:
    """Where the profile lies or would lie."""
    return FOLDER / device / f"{model}-bs{batch_size}.json"


def batch_sizes() -> dict[str, list[int]]:
    """`MODEL@DEVICE` and the batch sizes there are profiles for; from the files' names alone."""
    found: dict[str, list[int]] = {}
    for path in sorted(FOLDER.glob("*/*-bs*.json")):
        model, _, batch = path.stem.rpartition("-bs")
        if batch.isdigit():
            found.setdefault(f"{model}@{path.parent.name}", []).append(int(batch))
    return {name: sorted(sizes) for name, sizes in found.items()}
