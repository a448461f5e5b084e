"""Checks that all ranks have the same tensors before collectives pair these by position.

Averages and broadcasts pair tensors by their place in the model, and elements by their place in
memory. Without the check, different models would be mixed up without an error.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dear.comm.communicator import Communicator
from dear.errors import UserError
from dear.lazy import torch


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Description of a tensor, which must be the same on all ranks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Steps in memory, in elements; 0 for a dimension of size 1, and empty for a sparse tensor."""

    def __str__(self) -> str:
        return f"{self.name!r} (shape {self.shape}, strides {self.strides}, {self.dtype})"


def described(named: Iterable[tuple[str, torch.Tensor]]) -> list[Tensor]:
    """Returns the descriptions of named tensors, in their order."""
    return [
        Tensor(name=name, dtype=str(t.dtype), shape=tuple(t.shape), strides=_strides(t))
        for name, t in named
    ]


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    if tensor.layout is not torch.strided:
        return ()
    return tuple(s if n > 1 else 0 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def tables(mine: Sequence[Tensor] | str, communicator: Communicator) -> list[list[Tensor] | str]:
    """Returns the descriptions of all ranks in rank order, or [] if all are the same. Collective.

    Ranks first exchange a digest; they send the descriptions only if the digests differ.

    Args:
        mine: descriptions of this rank's tensors, or the reason why it has none.
    """
    if communicator.size == 1:
        return []
    digest = hashlib.sha256(repr(mine).encode()).digest()
    if len(set(communicator.gather_objects(digest))) == 1:
        return []
    return communicator.gather_objects(mine if isinstance(mine, str) else list(mine))


def agree(mine: Sequence[Tensor], communicator: Communicator) -> None:
    """Checks that all ranks train the same parameters; collective.

    Args:
        mine: descriptions of this rank's trained parameters. A rank that cannot train calls
            `tables` instead.

    Raises:
        UserError: on all ranks, with the first difference.
    """
    everyone = tables(mine, communicator)
    for rank, other in enumerate(everyone):
        if isinstance(other, str):
            raise UserError(f"rank {rank} cannot train: {other}")
    first = everyone[0] if everyone else ()
    for rank, other in enumerate(everyone):
        for place, (a, b) in enumerate(itertools.zip_longest(first, other)):
            if a != b:
                raise UserError(
                    f"the ranks train different parameters: parameter {place + 1} is "
                    f"{a or 'missing'} on rank 0, but {b or 'missing'} on rank {rank}; make the "
                    "same model on every rank: the same order of layers, memory format and frozen "
                    "parameters"
                )
