"""Optimizer state of segments, from and to that of whole parameters (as plain torch has it)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dear.buckets.flat import shaped
from dear.buckets.sharding import Segment
from dear.lazy import torch

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer

    from dear.buckets.halves import Decoupled
    from dear.comm.communicator import Communicator

Whole = dict[str, Any]

# One number per parameter, in tensors without dimensions, as a parameter may have none.
_COUNTERS = ("step", "eta", "mu", "mu_product")


def cut(state: Whole, segment: Segment) -> Whole:
    """The segment's part of a parameter's state; what is not element by element is copied."""
    return {key: _cut(key, value, segment) for key, value in state.items()}


def shard(optimizer: Optimizer, segments: Sequence[Sequence[Segment]]) -> None:
    """Replaces the state of whole parameters by that of this rank's segments of them."""
    for segment in (segment for group in segments for segment in group):
        whole = optimizer.state.pop(segment.param, None)
        if whole:
            optimizer.state[segment.tensor] = cut(whole, segment)


def gather(
    optimizer: Optimizer,
    parts: Sequence[Decoupled],
    segments: Sequence[Sequence[Segment]],
    communicator: Communicator,
) -> Iterator[tuple[Parameter, Whole]]:
    """Every parameter that has state, with the whole of it, group by group; a collective call."""
    mine = [_describe(optimizer, part, owned) for part, owned in zip(parts, segments, strict=True)]
    everybody = communicator.gather_objects(mine)
    for index, (part, owned) in enumerate(zip(parts, segments, strict=True)):
        known: dict[int, dict[str, Any]] = {}
        for described in everybody:
            for place, keys in described[index].items():
                known.setdefault(place, {}).update(keys)
        if known:
            yield from _gather_group(optimizer, part, owned, known)


def _gather_group(
    optimizer: Optimizer,
    part: Decoupled,
    segments: Sequence[Segment],
    known: dict[int, dict[str, Any]],
) -> Iterator[tuple[Parameter, Whole]]:
    group = part.group
    whole: dict[tuple[str, torch.dtype], torch.Tensor] = {}
    for keys in known.values():
        for key, value in keys.items():
            if isinstance(value, torch.dtype):
                whole.setdefault((key, value), group.gradients.new_empty(0))
    for key, dtype in sorted(whole, key=str):
        flat = group.gradients.new_zeros(group.gradients.numel(), dtype=dtype)
        for segment in segments:
            value = optimizer.state.get(segment.tensor, {}).get(key)
            if _by_element(value, segment.tensor) and value.dtype == dtype:
                offset = group.offsets[group.place[segment.param]]
                flat[offset + segment.start : offset + segment.stop].copy_(value)
        part.start_gather(flat)
        part.finish_gather()
        whole[key, dtype] = flat
    for place, keys in sorted(known.items()):
        param, offset = group.params[place], group.offsets[place]
        state = {}
        for key, value in keys.items():
            if isinstance(value, torch.dtype):
                state[key] = shaped(whole[key, value], offset, param).clone()
            else:
                state[key] = _own(value, param)
        yield param, state


def _describe(
    optimizer: Optimizer, part: Decoupled, segments: Sequence[Segment]
) -> dict[int, dict[str, Any]]:
    """By place of the parameter: a dtype for what is kept by element, else the value itself."""
    result = {}
    for segment in segments:
        state = optimizer.state.get(segment.tensor)
        if state:
            result[part.group.place[segment.param]] = {
                key: value.dtype if _by_element(value, segment.tensor) else value
                for key, value in state.items()
            }
    return result


def _own(value: Any, param: Parameter) -> Any:
    if not torch.is_tensor(value):
        return value
    return value.clone() if value.device.type == "cpu" else value.to(param.device, copy=True)


def _by_element(value: Any, tensor: torch.Tensor) -> bool:
    return torch.is_tensor(value) and value.dim() == 1 and value.shape == tensor.shape


def _cut(key: str, value: Any, segment: Segment) -> Any:
    if not torch.is_tensor(value):
        return value
    param = segment.param
    if value.shape != param.shape or (value.dim() == 0 and key in _COUNTERS):
        return value.clone()
    flat = value.new_empty(param.numel())
    shaped(flat, 0, param).copy_(value)
    return flat[segment.start : segment.stop].clone()
