"""Choice of the parameters that are sharded, and of those that travel together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dear.lazy import torch

if TYPE_CHECKING:
    Place = tuple[torch.nn.Module, str, torch.nn.Parameter]
    """Module, name and parameter of a registration."""


def places_of(model: torch.nn.Module) -> list[Place]:
    """Returns all registrations of parameters; a shared parameter has several."""
    return [
        (module, name, param)
        for module in model.modules()
        for name, param in module._parameters.items()
        if param is not None
    ]


def registered(module: torch.nn.Module, name: str) -> torch.nn.Parameter:
    param = module._parameters[name]
    assert param is not None
    return param


def shardable(
    places: Sequence[Place],
    trained: set[torch.nn.Parameter],
) -> dict[torch.nn.Parameter, None]:
    """Returns the parameters that can be cut along their first dimension and share a type."""
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for param in trained:
        kind = param.dtype, param.device
        sizes[kind] = sizes.get(kind, 0) + param.nbytes
    main = max(sizes, key=lambda kind: (sizes[kind], str(kind)))
    return {
        param: None
        for _, _, param in places
        if (param in trained or not param.requires_grad)
        and (param.dtype, param.device) == main
        and param.is_floating_point()
        and param.dim() > 0
        and param.numel() > 0
        and param.is_contiguous()
    }


def units_of(
    blocks: Sequence[torch.nn.Module], places: Sequence[Place]
) -> tuple[list[list[Place]], frozenset[int]]:
    """Returns the registrations of trained parameters by unit, and the indices of the blocks.

    Units are the blocks, the last one first, and the rest of the model.
    """
    first: dict[torch.nn.Parameter, Place] = {}
    for place in places:
        if place[2].requires_grad:
            first.setdefault(place[2], place)
    left = dict(reversed(first.items()))
    units = []
    for block in reversed(blocks):
        modules = set(block.modules())
        inside = [param for param, (module, _, _) in left.items() if module in modules]
        units.append([left.pop(param) for param in inside])
    units = [unit for unit in units if unit]
    return [*units, *[list(left.values())] * bool(left)], frozenset(range(len(units)))


def blocks_of(
    model: torch.nn.Module,
    min_bytes: float,
    places: Sequence[Place],
) -> Iterator[torch.nn.Module]:
    """Yields large layers of lists and sequences that share no parameter with other modules."""
    listed = isinstance(model, (torch.nn.ModuleList, torch.nn.Sequential))
    for child in model.children():
        inside = set(child.modules())
        params = {param for module, _, param in places if module in inside}
        alone = not any(param in params and module not in inside for module, _, param in places)
        large = sum(param.nbytes for param in params) >= min_bytes
        runs = type(child).forward is not torch.nn.Module.forward
        if listed and params and large and alone and runs:
            yield child
        else:
            yield from blocks_of(child, min_bytes, places)
