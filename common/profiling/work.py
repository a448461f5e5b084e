"""Counts what an operator of torch does on a device: operations, and bytes of memory.

An operator is one kernel or several. `FLOPS` has formulas where the counter of torch
(`torch.utils.flop_counter`) is wrong or has none. The tables below it say which operators are
several kernels, and which tensors are read in part or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from common.profiling.recorder import tensors

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What one kernel does."""

    flops: int = 0
    """Multiplications and additions; 0 where they are few beside the bytes."""
    nbytes: int
    """Read from memory and written to it."""


def kernels(func: Any, args: Any, kwargs: Any, out: Any) -> list[Kernel]:
    """The work of one call of the operator `func`, which returned `out`."""
    packet = func.overloadpacket
    if _is_free(func):
        return []
    if packet in _SEVERAL:
        return _SEVERAL[packet](args, out)
    count = FLOPS.get(packet) or flop_registry.get(packet)
    flops = count(*args, **kwargs, out_val=out) if count else 0
    return [Kernel(flops=flops, nbytes=_moved(func, args, kwargs, out))]


def _is_free(func: Any) -> bool:
    """True for operators that only describe memory: views, and memory not yet written."""
    name = func.overloadpacket.__name__
    if name.startswith(("empty", "new_empty")) or name == "_unsafe_view":
        return True
    results = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in results)


# Operations


def _convolution_backward(
    grad: Any, x: Any, weight: Any, *rest: Any, out_val: Any, **_: Any
) -> int:
    """Each of the two gradients multiplies all elements of the weight at every position of the
    output, or of the input if the convolution is transposed. A weight of groups is (channels,
    channels of one group, *kernel), so that groups need no factor; torch counts them as dense."""
    transposed, mask = rest[4], rest[7]
    place = x if transposed else grad
    return 2 * sum(mask[:2]) * weight.numel() * place.shape[0] * math.prod(place.shape[2:])


def _attention(query: Any, key: Any, value: Any, *_: Any, out_val: Any, **__: Any) -> int:
    """Two products of matrices for each head."""
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *_: Any, out_val: Any, **__: Any
) -> int:
    """Five products of matrices for each head: the scores once more, and the four gradients."""
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


def _times_vector(matrix: Any, *_: Any, out_val: Any, **__: Any) -> int:
    return 2 * matrix.numel()


def _added_times_vector(_: Any, matrix: Any, *__: Any, out_val: Any, **___: Any) -> int:
    return 2 * matrix.numel()


def _added_products(_: Any, left: Any, right: Any, *__: Any, out_val: Any, **___: Any) -> int:
    return 2 * left.numel() * right.shape[-1]


def _trilinear(*args: Any, out_val: Any, **_: Any) -> int:
    """Two multiplications and an addition for each element of three tensors that are expanded to
    one shape; `args` are these, and the dimensions in which each is expanded."""
    shapes = []
    for tensor, expanded in zip(args[:3], args[3:6], strict=True):
        shape = list(tensor.shape)
        for dim in sorted(expanded):
            shape.insert(dim, 1)
        shapes.append(shape)
    return 3 * math.prod(torch.broadcast_shapes(*shapes))


def _distances(left: Any, _: Any, *__: Any, out_val: Any, **___: Any) -> int:
    """A difference, its power and a sum for each feature of each pair of vectors."""
    return 3 * out_val.numel() * left.shape[-1]


def _distances_backward(grad: Any, left: Any, *_: Any, out_val: Any, **__: Any) -> int:
    return 3 * grad.numel() * left.shape[-1]


def _distances_by_product(left: Any, *_: Any, out_val: Any, **__: Any) -> int:
    """A product of matrices, which have two columns more than features."""
    return 2 * out_val.numel() * (left.shape[-1] + 2)


def _recurrent(x: Any, *weights: Any, out_val: Any, **_: Any) -> int:
    """Two matrices, the first two of `weights`, at each step of each sample (steps, samples,
    features)."""
    return 2 * x.shape[0] * x.shape[1] * sum(weight.numel() for weight in weights[:2])


def _recurrent_backward(x: Any, *weights: Any, out_val: Any, **_: Any) -> int:
    return 2 * _recurrent(x, *weights, out_val=out_val)


FLOPS: dict[Any, Callable[..., int]] = {
    aten.convolution_backward: _convolution_backward,
    # The rest is counted as nothing by torch.
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.mv: _times_vector,
    aten.dot: _times_vector,
    aten.addmv: _added_times_vector,
    aten.addbmm: _added_products,
    aten._trilinear: _trilinear,
    aten._cdist_forward: _distances,
    aten._cdist_backward: _distances_backward,
    aten._euclidean_dist: _distances_by_product,
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: _recurrent_backward,
}
"""Operations by operator, called with its arguments and `out_val`: what `FlopCounterMode` of torch
takes as `custom_mapping`."""
for _formula in FLOPS.values():
    _formula._get_raw = True  # type: ignore[attr-defined]  # torch hands over tensors, not shapes


# Bytes


def _nbytes(*values: Any) -> int:
    """Bytes of all tensors in `values`; what is expanded is in memory once."""
    total = 0
    for tensor in tensors(values):
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        total += tensor.element_size() * math.prod(size for size, stride in dims if stride)
    return total


_READ_IN_ROWS = {
    aten.embedding: 0, aten.index_select: 0, aten.gather: 0, aten.index: 0, aten.take: 0,
    aten.nll_loss_forward: 0, aten.nll_loss2d_forward: 0,
}  # fmt: skip
"""Operators that read as much of one argument, by its position, as they return."""
_NOT_READ = {
    aten.nll_loss_backward: 1, aten.nll_loss2d_backward: 1,
    aten.max_pool2d_with_indices_backward: 1, aten.max_pool3d_with_indices_backward: 1,
    aten.adaptive_max_pool2d_backward: 1, aten._adaptive_avg_pool2d_backward: 1,
    aten.avg_pool2d_backward: 1, aten.avg_pool3d_backward: 1,
}  # fmt: skip
"""Operators that need of one argument, by its position, no more than its shape."""
_OVERWRITES = {
    "copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_",
}  # fmt: skip
"""Operators that write their first argument without having read it."""


def _moved(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Each tensor is read or written once."""
    packet = func.overloadpacket
    name = packet.__name__
    if packet in _READ_IN_ROWS:
        position = _READ_IN_ROWS[packet]
        return _nbytes(args[:position], args[position + 1 :], kwargs, out, out)
    if packet in _NOT_READ:
        position = _NOT_READ[packet]
        return _nbytes(args[:position], args[position + 1 :], kwargs, out)
    if name in _OVERWRITES:
        return _nbytes(args, kwargs)
    if name.endswith("_like") or name.startswith("new_"):
        return _nbytes(out)
    return _nbytes(args, kwargs, out)


# Operators of several kernels


def _convolution_gradients(args: Any, out: Any) -> list[Kernel]:
    """A kernel for each gradient, of the input, the weight and the bias, that is asked for."""
    grad, x, weight, *_ = args
    of_input, of_weight, of_bias = out
    both = _convolution_backward(*args, out_val=out)
    flops = both // max(1, sum(args[10][:2]))
    made = []
    if of_input is not None:
        made.append(Kernel(flops=flops, nbytes=_nbytes(grad, weight, of_input)))
    if of_weight is not None:
        made.append(Kernel(flops=flops, nbytes=_nbytes(grad, x, of_weight)))
    if of_bias is not None:
        made.append(Kernel(nbytes=_nbytes(grad, of_bias)))
    return made


def _statistics_then(args: Any, out: Any) -> list[Kernel]:
    """Of a batch or a group, mean and variance are known after a pass over all of it."""
    return [Kernel(nbytes=_nbytes(args[0])), Kernel(nbytes=_nbytes(args[0], out[0]))]


def _batch_norm(args: Any, out: Any) -> list[Kernel]:
    """`args`: input, weight, bias, running mean and variance, whether in training, ..."""
    return _statistics_then(args, out)[0 if args[5] else 1 :]


def _norm_gradients(args: Any, out: Any) -> list[Kernel]:
    """Sums over the batch, the group or (of the weight's gradient) the samples, then the input's
    gradient: gradient and input are read twice."""
    grad, x = args[:2]
    return [Kernel(nbytes=_nbytes(grad, x, out[1:])), Kernel(nbytes=_nbytes(grad, x, out[0]))]


def _embedding_gradient(args: Any, out: Any) -> list[Kernel]:
    """All rows become 0, then gradients are added to the rows that were used."""
    grad, indices = args[:2]
    return [Kernel(nbytes=_nbytes(out)), Kernel(nbytes=_nbytes(indices, grad, grad, grad))]


def _embedding_bag(args: Any, out: Any) -> list[Kernel]:
    """Reads a row of the table, the first argument, for each index."""
    table, indices = args[:2]
    rows = indices.numel() * table.shape[1] * table.element_size()
    return [Kernel(nbytes=rows + _nbytes(indices, out))]


_SEVERAL: dict[Any, Callable[[Any, Any], list[Kernel]]] = {
    aten.convolution_backward: _convolution_gradients,
    aten.native_batch_norm: _batch_norm,
    aten.native_batch_norm_backward: _norm_gradients,
    aten.native_group_norm: _statistics_then,
    aten.native_group_norm_backward: _norm_gradients,
    aten.native_layer_norm_backward: _norm_gradients,
    aten.embedding_dense_backward: _embedding_gradient,
    aten._embedding_bag: _embedding_bag,
}
