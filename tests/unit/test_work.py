"""Counted operations and bytes of operators, beside counts by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from common.profiling.work import kernels


class Recording(TorchDispatchMode):
    """Keeps the kernels of each operator that runs inside it, by its name."""

    def __init__(self):
        super().__init__()
        self.kernels = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.kernels.setdefault(name, []).extend(kernels(func, args, kwargs or {}, out))
        return out

    @property
    def flops(self):
        return sum(kernel.flops for each in self.kernels.values() for kernel in each)

    def nbytes(self, name):
        return [kernel.nbytes for kernel in self.kernels[name]]


def passes(module, *inputs):
    """Operations of the forward pass, and of the backward pass."""
    with Recording() as forward:
        out = module(*inputs)
    total = (out[0] if isinstance(out, tuple) else out).sum()
    with Recording() as backward:
        total.backward()
    return forward, backward


def image(channels, side, *, samples=2, dims=2, device="meta"):
    return torch.randn(samples, channels, *[side] * dims, device=device, requires_grad=True)


# Convolutions: multiplications and additions of the forward pass by hand. Each of the two gradients
# has as many.
CONVOLUTIONS = {
    "dense": (nn.Conv2d(8, 6, 3, device="meta"), image(8, 10), 2 * (2 * 6 * 8 * 8) * (8 * 3 * 3)),
    "grouped": (
        nn.Conv2d(8, 6, 3, groups=2, device="meta"),
        image(8, 10),
        2 * (2 * 6 * 8 * 8) * (8 // 2 * 3 * 3),
    ),
    "depthwise": (
        nn.Conv2d(8, 8, 3, padding=1, groups=8, device="meta"),
        image(8, 10),
        2 * (2 * 8 * 10 * 10) * (3 * 3),
    ),
    "depthwise, two of each, stride 2": (
        nn.Conv2d(8, 16, 3, stride=2, groups=8, device="meta"),
        image(8, 11),
        2 * (2 * 16 * 5 * 5) * (3 * 3),
    ),
    "one-dimensional, dilated": (
        nn.Conv1d(4, 6, 3, dilation=2, groups=2, device="meta"),
        image(4, 10, dims=1),
        2 * (2 * 6 * 6) * (4 // 2 * 3),
    ),
    "three-dimensional": (
        nn.Conv3d(4, 4, 3, groups=4, device="meta"),
        image(4, 5, dims=3),
        2 * (2 * 4 * 3 * 3 * 3) * (3 * 3 * 3),
    ),
    "transposed": (
        nn.ConvTranspose2d(8, 6, 3, stride=2, device="meta"),
        image(8, 5),
        2 * (2 * 8 * 5 * 5) * (6 * 3 * 3),
    ),
    "transposed, grouped": (
        nn.ConvTranspose2d(8, 6, 3, stride=2, groups=2, device="meta"),
        image(8, 5),
        2 * (2 * 8 * 5 * 5) * (6 // 2 * 3 * 3),
    ),
}


@pytest.mark.parametrize(("module", "x", "by_hand"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions_are_counted_as_by_hand(module, x, by_hand):
    forward, backward = passes(module, x)
    assert forward.flops == by_hand
    gradients = backward.kernels["convolution_backward"]
    assert [kernel.flops for kernel in gradients] == [by_hand, by_hand, 0], "input, weight, bias"


@pytest.mark.parametrize("kind", ["grouped", "depthwise", "transposed, grouped"])
def test_torch_counts_the_gradient_of_a_grouped_weight_as_dense(kind):
    # If this fails, torch has been repaired, and our formula can go.
    module, x, by_hand = CONVOLUTIONS[kind]
    with FlopCounterMode(display=False) as counter:
        module(x).sum().backward()
    assert counter.get_total_flops() == (2 + module.groups) * by_hand


def test_each_gradient_of_a_convolution_reads_what_it_needs():
    forward, backward = passes(nn.Conv2d(3, 6, 3, groups=3, device="meta"), image(3, 8).detach())
    assert backward.flops == forward.flops, "an input without gradient costs nothing"
    module = nn.Conv2d(8, 8, 3, padding=1, groups=8, device="meta")
    _, backward = passes(module, image(8, 10))
    x, weight, bias = 4 * 2 * 8 * 10 * 10, 4 * 8 * 3 * 3, 4 * 8
    # The gradient of a sum is one number, expanded.
    assert backward.nbytes("convolution_backward") == [4 + weight + x, 4 + x + weight, 4 + bias]


# Attention


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "MATH"])
@pytest.mark.parametrize(("heads", "length", "keys"), [(3, 8, 8), (2, 5, 12)])
def test_attention_is_counted_as_by_hand(backend, heads, length, keys):
    query = torch.randn(2, heads, length, 16, requires_grad=True)
    key, value = (torch.randn(2, heads, keys, 16, requires_grad=True) for _ in range(2))
    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
        forward, backward = passes(functional.scaled_dot_product_attention, query, key, value)
    product = 2 * (2 * heads * length * keys) * 16
    assert forward.flops == 2 * product
    again = 1 if backend == "FLASH_ATTENTION" else 0  # it does not keep the scores
    assert backward.flops == (4 + again) * product


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention_on_cpu_and_without_memory_is_the_same_work(need_weights):
    counted = []
    for device in ("meta", "cpu"):
        module = nn.MultiheadAttention(16, 2, device=device)
        x = torch.randn(5, 3, 16, device=device, requires_grad=True)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            forward, backward = passes(
                lambda x, module=module: module(x, x, x, need_weights=need_weights), x
            )
        counted.append((forward.flops, backward.flops))
    projections, products = 2 * (5 * 3) * 16 * (4 * 16), 2 * 2 * (3 * 2 * 5 * 5) * 8
    assert counted == [(projections + products, 2 * (projections + products))] * 2


# Other products


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_recurrent_layers_are_counted_as_by_hand(device):
    steps, samples, features, hidden = 5, 3, 8, 16
    for kind, gates in ((nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)):
        module = kind(features, hidden, device=device)
        x = torch.randn(steps, samples, features, device=device, requires_grad=True)
        forward, backward = passes(module, x)
        by_hand = 2 * steps * samples * gates * hidden * (features + hidden)
        # Nobody asks for the gradient of the first hidden state, and its own is 0.
        first = 2 * samples * gates * hidden * hidden
        assert forward.flops == by_hand
        assert 2 * by_hand - 2 * first <= backward.flops <= 2 * by_hand


@pytest.mark.parametrize(
    ("call", "shapes", "by_hand"),
    [
        (torch.mv, [(4, 5), (5,)], 2 * 4 * 5),
        (torch.dot, [(5,), (5,)], 2 * 5),
        (torch.addmv, [(4,), (4, 5), (5,)], 2 * 4 * 5),
        (torch.addbmm, [(4, 6), (3, 4, 5), (3, 5, 6)], 2 * 3 * 4 * 5 * 6),
        (torch.baddbmm, [(3, 4, 6), (3, 4, 5), (3, 5, 6)], 2 * 3 * 4 * 5 * 6),
        (torch.cdist, [(4, 7), (3, 7)], 3 * 4 * 3 * 7),
        (torch.cdist, [(40, 7), (30, 7)], 2 * 40 * 30 * (7 + 2)),
        (functional.bilinear, [(3, 4), (3, 5), (6, 4, 5)], 3 * 3 * 6 * 4 * 5),
        (lambda a, b: torch.einsum("ij,kj->ik", a, b), [(4, 5), (6, 5)], 2 * 4 * 5 * 6),
    ],
)
def test_other_products_are_counted_as_by_hand(call, shapes, by_hand):
    with Recording() as work:
        call(*(torch.randn(shape, device="meta") for shape in shapes))
    assert work.flops == by_hand


# Bytes


def test_an_embedding_moves_the_rows_that_are_asked_for():
    table = nn.Embedding(1000, 8, device="meta")
    words = torch.zeros(3, 4, dtype=torch.long, device="meta")
    forward, backward = passes(table, words)
    rows, indices, all_rows = 4 * 12 * 8, 8 * 12, 4 * 1000 * 8
    assert forward.nbytes("embedding") == [indices + 2 * rows]
    # All becomes 0; then expanded gradients of one number are added to rows.
    assert backward.nbytes("embedding_dense_backward") == [all_rows, indices + 3 * 4]
    with Recording() as bag:
        nn.EmbeddingBag(1000, 8, device="meta")(words)
    (nbytes,) = bag.nbytes("_embedding_bag")
    assert indices + rows + 4 * 3 * 8 <= nbytes < all_rows


@pytest.mark.parametrize(
    ("call", "by_hand"),
    [
        (lambda x: x.index_select(0, torch.zeros(2, dtype=torch.long, device="meta")), 8 * 2 + 80),
        (lambda x: x[torch.zeros(2, dtype=torch.long, device="meta")], 8 * 2 + 80),
        (lambda x: x.zero_(), 4 * 40),
        (lambda x: x.copy_(x.clone()), 4 * 160),
        (lambda x: torch.zeros_like(x), 4 * 40),
        (lambda x: x.add_(1), 4 * 80),
        (lambda x: x + 1, 4 * 80),
        (lambda x: x.view(-1).unsqueeze(0), 0),
        (lambda x: torch.ops.aten._unsafe_view(x, [40]), 0),
        (lambda x: x[:1].expand(8, 5) + 1, 4 * (5 + 40)),
    ],
)
def test_bytes_are_counted_as_by_hand(call, by_hand):
    x = torch.randn(8, 5, device="meta")
    with Recording() as work:
        call(x)
    work.kernels.pop("zeros", None)  # made by torch
    assert sum(kernel.nbytes for each in work.kernels.values() for kernel in each) == by_hand


def test_statistics_of_a_batch_need_a_pass_of_their_own():
    x, channels = 4 * 2 * 8 * 10 * 10, 4 * 8
    module = nn.BatchNorm2d(8, device="meta")
    forward, backward = passes(module, image(8, 10))
    assert forward.nbytes("native_batch_norm") == [x, 2 * x]
    sums, of_input = backward.nbytes("native_batch_norm_backward")
    # The gradient of a sum is one number, expanded.
    assert (sums, of_input) == (4 + x + 2 * channels, 4 + 2 * x)
    module.eval()
    with Recording() as inference:
        module(image(8, 10))
    assert sum(inference.nbytes("native_batch_norm")) == 2 * x


def test_groups_and_layers_are_normalized_in_passes():
    x = 4 * 2 * 8 * 10 * 10
    forward, backward = passes(nn.GroupNorm(2, 8, device="meta"), image(8, 10))
    assert forward.nbytes("native_group_norm") == [x, 2 * x]
    assert len(backward.nbytes("native_group_norm_backward")) == 2
    forward, backward = passes(nn.LayerNorm(10, device="meta"), image(8, 10))
    assert len(forward.nbytes("native_layer_norm")) == 1, "a row stays in the cache"
    assert len(backward.nbytes("native_layer_norm_backward")) == 2
    # A pooling gradient does not read the input.
    _, backward = passes(nn.MaxPool2d(2), image(8, 10))
    indices = 8 * 2 * 8 * 5 * 5
    assert backward.nbytes("max_pool2d_with_indices_backward") == [4 + indices + x]
