"""What the arguments of a collective must be."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def check_tensor(
    name: str, tensor: torch.Tensor, backends: Mapping[str, str], written: bool
) -> torch.Tensor:
    """Returns the tensor cut off from autograd (same memory).

    Args:
        name: of the operation, for the message.
        backends: device type -> backend.
        written: the operation writes into the tensor.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is sparse, on a device that no backend serves, or to be written though
            several of its elements share memory.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} needs a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} needs a dense tensor, got layout {tensor.layout}")
    if tensor.device.type not in backends or tensor.device.type not in ("cpu", "cuda"):
        served = ", ".join(f"{device} ({backend})" for device, backend in backends.items())
        raise ValueError(f"{name}: no backend for tensors on {tensor.device}; there is {served}")
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    if written and any(length > 1 and step == 0 for length, step in steps):
        raise ValueError(
            f"{name} cannot write into an expanded tensor (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}): its elements share memory; clone it"
        )
    return tensor.detach()


def check_pair(name: str, first: torch.Tensor, second: torch.Tensor) -> None:
    """Both must be of one dtype (else TypeError) and on one device (else ValueError)."""
    if first.dtype != second.dtype:
        raise TypeError(f"{name} needs tensors of one dtype, got {first.dtype} and {second.dtype}")
    if first.device != second.device:
        raise ValueError(
            f"{name} needs tensors on one device, got {first.device} and {second.device}"
        )


def check_rank(what: str, rank: int, size: int) -> None:
    """Raises TypeError if `rank` is no int, ValueError if no rank of a group of `size`."""
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise TypeError(f"{what} must be a rank, an int; got {rank!r}")
    if not 0 <= rank < size:
        raise ValueError(f"{what} {rank} is no rank of a group of {size}")
