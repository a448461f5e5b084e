"""Elements of tensors as the arguments of MPI calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .engine import TYPES, the_engine

if TYPE_CHECKING:
    from mpi4py import MPI

Tensors = Sequence[torch.Tensor]

_LIMIT = 2**31 - 1  # largest number of elements in one MPI call


class Row:
    """Elements of one or more CPU tensors in contiguous memory, with a count for each rank.

    A single contiguous tensor is used in place. Several tensors, a non-contiguous tensor, and one
    that shares memory with `other` are copied, because the arguments of an MPI call must not
    overlap: `fill` writes the copy, `spill` reads it back.

    Args:
        other: the other argument of the same operation, if any.
        output: True if this is the output and `other` the input. Used in messages only.

    Raises:
        ValueError, TypeError: MPI cannot carry the tensors, or `other` has another dtype.
    """

    def __init__(
        self, name: str, tensors: Tensors, other: Row | None = None, *, output: bool = False
    ) -> None:
        if not tensors:
            raise ValueError(f"{name}: at least one tensor is needed, got none")
        self.name, self.tensors, self.dtype = name, list(tensors), tensors[0].dtype
        for tensor in tensors:
            if tensor.device.type != "cpu":
                raise ValueError(
                    f"{name}: the tensor is on {tensor.device}, but the MPI backend takes CPU "
                    "tensors"
                )
            if tensor.layout != torch.strided:
                raise TypeError(
                    f"{name}: the tensor is {tensor.layout}, but the MPI backend takes dense ones"
                )
            if tensor.dtype != self.dtype:
                raise TypeError(
                    f"{name}: the tensors differ in dtype: {self.dtype} and {tensor.dtype}"
                )
        if self.dtype not in TYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES)
            raise TypeError(
                f"{name}: the MPI backend does not support {self.dtype}; allowed: {names}"
            )
        if other is not None and other.dtype != self.dtype:
            target, source = (self, other) if output else (other, self)
            raise TypeError(f"{name}: output of {target.dtype}, but input of {source.dtype}")
        self.counts = [tensor.numel() for tensor in tensors]
        self.elements = sum(self.counts)
        if self.elements > _LIMIT:
            raise ValueError(
                f"{name}: {self.elements} elements exceed MPI's limit of {_LIMIT} elements per "
                "call; split the tensor"
            )
        self.nbytes = self.elements * self.dtype.itemsize
        # `.data`: autograd neither records the copies nor rejects a copy into a leaf tensor.
        self._memory, first = tensors[0].data, tensors[0]
        plain = len(tensors) == 1 and first.is_contiguous() and not first.is_conj()
        plain = plain and not first.is_neg()
        storages = [
            t.untyped_storage().data_ptr() for row in (self, other) if row for t in row.tensors
        ]
        # An empty tensor has a null address, which MPI would take for MPI_BOTTOM: copy it too.
        self._copied = not plain or not self.elements or len(set(storages)) < len(storages)
        if self._copied:
            self._memory = torch.empty(max(self.elements, 1), dtype=self.dtype)

    def fill(self) -> None:
        """Copies the tensors into the memory that MPI uses, unless that is the tensor itself."""
        for part, tensor in self._pairs():
            part.copy_(tensor)

    def spill(self) -> None:
        """Copies that memory back into the tensors."""
        for part, tensor in self._pairs():
            tensor.copy_(part)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if not self._copied:
            return []
        parts = torch.split(self._memory[: self.elements], [t.numel() for t in self.tensors])
        return [(part.view(t.shape), t.data) for part, t in zip(parts, self.tensors, strict=True)]

    def divide(self, by: int) -> None:
        """Divides every element in place."""
        self._memory.div_(by)

    def share(self, ranks: int, part: Row) -> None:
        """Sets every rank's count to that of `part`; ValueError unless the sum is all elements."""
        if self.elements != ranks * part.elements:
            raise ValueError(
                f"{self.name}: {self.elements} elements, but must be {ranks} ranks with "
                f"{part.elements} elements each"
            )
        self.counts = [part.elements] * ranks

    def split(self, splits: list[int], ranks: int) -> None:
        """Sets every rank's count from `splits`, in rows; equal parts if `splits` is empty."""
        tensor = self.tensors[0]
        if tensor.dim() == 0:
            raise ValueError(f"{self.name}: a tensor without dimensions cannot be split into rows")
        rows = tensor.shape[0]
        if not splits and rows % ranks:
            raise ValueError(f"{self.name}: {rows} rows do not divide evenly among {ranks} ranks")
        splits = splits or [rows // ranks] * ranks
        if len(splits) != ranks or min(splits) < 0 or sum(splits) != rows:
            raise ValueError(
                f"{self.name}: the splits must be {ranks} counts that sum to the tensor's {rows} "
                f"rows, got {splits}"
            )
        self.counts = [split * (tensor.numel() // max(rows, 1)) for split in splits]

    def message(self) -> tuple[MPI.buffer, MPI.Datatype]:
        """Returns the argument for mpi4py's calls."""
        engine = the_engine()
        memory = engine.mpi.buffer.fromaddress(self._memory.data_ptr(), self.nbytes)
        return memory, engine.types[self.dtype]

    def blocks(self) -> tuple[MPI.buffer, list[int], MPI.Datatype]:
        """Returns the argument for MPI's "v" calls, in which rank i has `counts[i]` elements."""
        memory, kind = self.message()
        return memory, self.counts, kind
