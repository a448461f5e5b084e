"""Operations and memory traffic of torch's operators on a device.

An operator runs one kernel or several. `_FLOPS` has formulas for operators that torch's counter
(`torch.utils.flop_counter`) lacks or counts wrongly. Other tables list the operators with several
kernels, and the arguments that an operator reads in part or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from common.profiling.recorder import tensors

aten = torch.ops.aten

Args = Sequence[Any]
"""Arguments of an operator, in the order of its schema."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Work of one kernel."""

    flops: int = 0
    """Multiplications and additions; 0 if the time depends on the bytes only."""
    nbytes: int
    """Bytes read from memory and written to it."""


def kernels(func: OpOverload, args: Args, kwargs: Mapping[str, object], out: Any) -> list[Kernel]:
    """Returns the kernels of one call of the operator `func`, which returned `out`."""
    packet = func.overloadpacket
    if _is_free(func):
        return []
    if packet in _SEVERAL:
        return _SEVERAL[packet](args, out)
    flops = 0
    if packet in _FLOPS:
        flops = _FLOPS[packet](args, out)
    elif packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=out)
    return [Kernel(flops=flops, nbytes=_moved(packet, args, kwargs, out))]


def _is_free(func: OpOverload) -> bool:
    """Returns True for operators without memory access: views, and uninitialized tensors."""
    name = func.overloadpacket.__name__
    if name.startswith(("empty", "new_empty")) or name == "_unsafe_view":
        return True
    results = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in results)


# Operations


def _convolution_backward(args: Args, out: object) -> int:
    """Returns the operations of a convolution's backward pass.

    Each of the two gradients multiplies all elements of the weight at every position of the output
    (transposed: of the input). torch's own formula is wrong for groups: it ignores that the shape
    of the weight, (channels, channels of one group, *kernel), contains them already.
    """
    grad, x, weight = args[:3]
    transposed, mask = args[7], args[10]
    positions = x if transposed else grad
    return 2 * sum(mask[:2]) * weight.numel() * positions.shape[0] * math.prod(positions.shape[2:])


def _trilinear(args: Args, out: object) -> int:
    """Counts two multiplications and an addition per element of three tensors of one shape.

    `args` are the three tensors, and the dimensions in which each is expanded.
    """
    shapes = []
    for tensor, expanded in zip(args[:3], args[3:6], strict=True):
        shape = list(tensor.shape)
        for dim in sorted(expanded):
            shape.insert(dim, 1)
        shapes.append(shape)
    return 3 * math.prod(torch.broadcast_shapes(*shapes))


def _recurrent(args: Args, out: object) -> int:
    """Counts the products with two matrices, for each step of each sample.

    The first argument has the shape (steps, samples, features); the matrices follow.
    """
    x, *weights = args[:3]
    return 2 * x.shape[0] * x.shape[1] * sum(weight.numel() for weight in weights)


_FLOPS: dict[object, Callable[[Args, Any], int]] = {
    aten.convolution_backward: _convolution_backward,
    # torch has no formulas for the following operators.
    # Attention: two matrix products for each head. The backward pass has five: it computes the
    # scores again, and four gradients.
    aten._scaled_dot_product_flash_attention_for_cpu: lambda args, _: sdpa_flop_count(
        *(tensor.shape for tensor in args[:3])
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda args, _: (
        sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4]))
    ),
    aten.mv: lambda args, _: 2 * args[0].numel(),
    aten.dot: lambda args, _: 2 * args[0].numel(),
    aten.addmv: lambda args, _: 2 * args[1].numel(),
    aten.addbmm: lambda args, _: 2 * args[1].numel() * args[2].shape[-1],
    aten._trilinear: _trilinear,
    # A difference, its power and a sum for each feature of each pair of vectors.
    aten._cdist_forward: lambda args, out: 3 * out.numel() * args[0].shape[-1],
    aten._cdist_backward: lambda args, _: 3 * args[0].numel() * args[1].shape[-1],
    # A product of matrices that have two more columns than features.
    aten._euclidean_dist: lambda args, out: 2 * out.numel() * (args[0].shape[-1] + 2),
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: lambda args, out: 2 * _recurrent(args, out),
}
"""Formula by operator."""


# Bytes


def _nbytes(*values: object) -> int:
    """Returns the bytes of all tensors in `values`; expanded dimensions count once."""
    total = 0
    for tensor in tensors(values):
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        total += tensor.element_size() * math.prod(size for size, stride in dims if stride)
    return total


_READS_ROWS = {
    aten.embedding,
    aten.index_select,
    aten.gather,
    aten.index,
    aten.take,
    aten.nll_loss_forward,
    aten.nll_loss2d_forward,
}
"""Operators that read as many bytes of their first argument as they return."""
_READS_SHAPE = {
    aten.nll_loss_backward,
    aten.nll_loss2d_backward,
    aten.max_pool2d_with_indices_backward,
    aten.max_pool3d_with_indices_backward,
    aten.adaptive_max_pool2d_backward,
    aten._adaptive_avg_pool2d_backward,
    aten.avg_pool2d_backward,
    aten.avg_pool3d_backward,
}
"""Operators that need only the shape of their second argument."""
_OVERWRITES = {
    aten.copy_,
    aten.fill_,
    aten.zero_,
    aten.normal_,
    aten.uniform_,
    aten.bernoulli_,
    aten.random_,
    aten.exponential_,
}
"""Operators that write their first argument without reading it."""


def _moved(packet: Any, args: Args, kwargs: Mapping[str, object], out: object) -> int:
    """Returns the bytes of a kernel that reads or writes each tensor once."""
    name = packet.__name__
    if packet in _READS_ROWS:
        return _nbytes(args[1:], kwargs, out, out)
    if packet in _READS_SHAPE:
        return _nbytes(args[0], args[2:], kwargs, out)
    if packet in _OVERWRITES:
        return _nbytes(args, kwargs)
    if name.endswith("_like") or name.startswith("new_"):
        return _nbytes(out)
    return _nbytes(args, kwargs, out)


# Operators of several kernels


def _convolution_gradients(args: Args, out: Args) -> list[Kernel]:
    grad, x, weight, *_ = args
    of_input, of_weight, of_bias = out
    flops = _convolution_backward(args, out) // max(1, sum(args[10][:2]))
    kernels = []
    if of_input is not None:
        kernels.append(Kernel(flops=flops, nbytes=_nbytes(grad, weight, of_input)))
    if of_weight is not None:
        kernels.append(Kernel(flops=flops, nbytes=_nbytes(grad, x, of_weight)))
    if of_bias is not None:
        kernels.append(Kernel(nbytes=_nbytes(grad, of_bias)))
    return kernels


def _normalization(args: Args, out: Args) -> list[Kernel]:
    """Returns a kernel that computes mean and variance, and one that applies them."""
    return [Kernel(nbytes=_nbytes(args[0])), Kernel(nbytes=_nbytes(args[0], out[0]))]


def _batch_norm(args: Args, out: Args) -> list[Kernel]:
    training = args[5]
    return _normalization(args, out)[0 if training else 1 :]


def _norm_gradients(args: Args, out: Args) -> list[Kernel]:
    """Returns a kernel for sums and one for the input's gradient; both read gradient and input."""
    grad, x = args[:2]
    return [Kernel(nbytes=_nbytes(grad, x, out[1:])), Kernel(nbytes=_nbytes(grad, x, out[0]))]


def _embedding_gradient(args: Args, out: object) -> list[Kernel]:
    """Returns a kernel that clears all rows, and one that adds gradients to the rows in use."""
    grad, indices = args[:2]
    return [Kernel(nbytes=_nbytes(out)), Kernel(nbytes=_nbytes(indices, grad, grad, grad))]


def _embedding_bag(args: Args, out: object) -> list[Kernel]:
    """Returns a kernel that reads a row of the table, the first argument, for each index."""
    table, indices = args[:2]
    rows = indices.numel() * table.shape[1] * table.element_size()
    return [Kernel(nbytes=rows + _nbytes(indices, out))]


_SEVERAL: dict[object, Callable[[Args, Any], list[Kernel]]] = {
    aten.convolution_backward: _convolution_gradients,
    aten.native_batch_norm: _batch_norm,
    aten.native_batch_norm_backward: _norm_gradients,
    aten.native_group_norm: _normalization,
    aten.native_group_norm_backward: _norm_gradients,
    aten.native_layer_norm_backward: _norm_gradients,
    aten.embedding_dense_backward: _embedding_gradient,
    aten._embedding_bag: _embedding_bag,
}
