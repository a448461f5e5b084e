"""A clock that counts what operations would cost on a device that is not there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True, kw_only=True)
class Device:
    """A processor's limits."""

    name: str
    flops: float
    """Single-precision operations per second."""
    bandwidth: float
    """Bytes per second to and from its memory."""


class Roofline(TorchDispatchMode):
    """Adds up max(operations / peak, bytes / bandwidth) of what runs inside it.

    Tensors may be on the `meta` device: nothing is computed then. Each operation reads its inputs
    and writes its outputs once; views cost nothing.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._total_s = 0.0

    def mark(self) -> float:
        return self._total_s

    def seconds(self, earlier: float, later: float) -> float:
        return later - earlier

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not _is_free(func):
            count = flop_registry.get(func.overloadpacket)
            flops = count(*args, **kwargs, out_val=out) if count else 0
            nbytes = _bytes((args, kwargs)) + _bytes(out)
            self._total_s += max(flops / self._device.flops, nbytes / self._device.bandwidth)
        return out


def _is_free(func: Any) -> bool:
    """True for operations that only describe memory: views, and memory not yet written."""
    if func.overloadpacket.__name__.startswith(("empty", "new_empty")):
        return True
    results = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in results)


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_bytes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_bytes(item) for item in value)
    return 0
