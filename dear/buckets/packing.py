"""Tensors as bytes: several of different types in one, and eight signs in a byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dear.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 8
"""Parts start at multiples of so many bytes, so that they can be viewed as any type."""


def joined(*parts: Tensor) -> Tensor:
    """The bytes of 1-D tensors one after another, each padded to a multiple of 8."""
    return torch.cat([_padded(part.view(torch.uint8)) for part in parts])


def split(payload: Tensor, *parts: tuple[int | None, torch.dtype]) -> list[Tensor]:
    """What `joined` has joined, as views.

    Args:
        parts: the number of elements and the type of each; None: all that are left, with padding.
    """
    result, start = [], 0
    for count, dtype in parts:
        nbytes = payload.numel() - start if count is None else count * dtype.itemsize
        result.append(payload[start : start + nbytes].view(dtype))
        start += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return result


def pack_signs(values: Tensor) -> Tensor:
    """One bit per element, set where it is not negative; padded to a multiple of 64 bits.

    Element i is bit `i % 8` (from the lowest) of byte `i // 8`.
    """
    bits = (values >= 0).to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % (8 * ALIGNMENT)))
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=values.device)
    return (bits.view(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)


def unpack_signs(packed: Tensor, numel: int) -> Tensor:
    """The first `numel` signs of `pack_signs` as int8: 1 or -1."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.view(-1, 1) >> shifts) & 1
    return bits.view(-1)[:numel].to(torch.int8).mul_(2).sub_(1)


def _padded(data: Tensor) -> Tensor:
    return torch.nn.functional.pad(data, (0, -data.numel() % ALIGNMENT))
