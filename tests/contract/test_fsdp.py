"""FSDP: what is sharded, what is whole again and when, what is refused."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune

import dear
from common.harness.worker.checking.deviation import replica_spread
from common.models import registry
from dear.comm import runtime
from dear.training.wrapped.tensors import full
from tests.contract.loops import (
    difference,
    error,
    everybody,
    far_from_serial,
    leftovers,
    make_model,
    make_sgd,
    message,
    mine,
    steps,
    wrap,
)
from tests.ranks import on_ranks

# Every layer with parameters travels by itself.
_LAYERS = {"min_mb": 0.00001}


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_ranks_hold_parts_and_give_back_the_whole(stage: int) -> None:
    model = make_model()
    parameters = list(model.parameters())
    total = sum(param.numel() for param in parameters)
    optimizer = wrap(make_sgd(model), model, "fsdp", stage=stage, **_LAYERS)
    steps(model, optimizer, mine(), range(2))
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert sum(param.to_local().numel() for param in held) < total
    assert all(isinstance(param, DTensor) and isinstance(param.grad, DTensor) for param in held)
    assert all(isinstance(optimizer.state[p]["momentum_buffer"], DTensor) for p in held)
    assert all(param.numel() == 0 for param in parameters)
    # Three layers and the whole.
    assert sum(type(module).__name__.startswith("FSDP") for module in model.modules()) == 4
    state = model.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    optimizer.synchronize()
    assert replica_spread(model, runtime.communicator()) == 0.0
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    with torch.no_grad():  # what is written to whole parameters stays
        for param in model.parameters():
            param.mul_(2)
    doubled = model.state_dict()
    assert all(torch.equal(doubled[name], 2 * state[name]) for name in state)
    optimizer.close()
    held = [param for group in optimizer.param_groups for param in group["params"]]
    for back in (model.parameters(), held):
        assert all(a is b for a, b in zip(parameters, back, strict=True))
    assert leftovers(model) == []
    classes = [type(module).__name__ for module in model]
    assert classes == ["Linear", "Tanh", "Linear", "Tanh", "Linear"]


@pytest.mark.parametrize("root", [0, 1])
@on_ranks(2)
def test_a_broadcast_leaves_sharded_parameters_as_they_are(root: int) -> None:
    model = make_model()
    model.register_buffer("count", torch.tensor([dear.rank()]))
    optimizer = wrap(make_sgd(model), model, "fsdp", **_LAYERS)
    steps(model, optimizer, mine(), range(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dear.broadcast_parameters(model.named_parameters(), root_rank=root)
    dear.broadcast_parameters([*model.named_parameters(), *model.named_buffers()], root_rank=root)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    after = model.state_dict()
    assert after.pop("count").item() == root  # a buffer is whole on every rank
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    optimizer.close()


@on_ranks(2)
def test_units_are_told_with_what_is_freed_between_the_passes() -> None:
    model = Tied()
    nbytes = {name: param.nbytes for name, param in model.named_parameters()}
    optimizer = wrap(make_sgd(model), model, "fsdp", **_LAYERS)
    steps(model, optimizer, mine(), range(2))
    names = {id(param): name for name, param in model.named_parameters()}
    units = optimizer.groups()
    groups = [[names[id(param)] for param in params] for _, params in units]
    assert groups == [
        ["layers.0.bias", "layers.0.weight"],
        ["head.bias", "head.weight", "layers.1.bias", "layers.1.weight"],
        ["scale"],  # a scalar cannot be cut
    ]
    assert [size for size, _ in units] == [sum(nbytes[n] for n in group) for group in groups]
    assert optimizer.some_groups() == {0}
    optimizer.synchronize()  # the model has whole parameters now
    held = set(map(id, model.parameters()))
    assert all(id(param) in held for _, params in optimizer.groups()[:2] for param in params)
    optimizer.close()


@on_ranks(2)
def test_defaults_are_those_of_the_installed_torch() -> None:
    """Torch gets its own defaults, but for what says which parameters and ranks."""
    given: list[tuple[nn.Module, dict[str, Any]]] = []
    torchs = inspect.signature(fsdp.fully_shard).parameters
    real = fsdp.fully_shard

    def noted(module: nn.Module, **settings: Any) -> Any:
        given.append((module, settings))
        return real(module, **settings)

    model = make_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "fully_shard", noted)
        optimizer = wrap(make_sgd(model), model, "fsdp", **_LAYERS)
    optimizer.close()
    assert [module for module, _ in given] == [model[0], model[2], model[4], model]
    # None: all but the outermost module are freed after the forward pass.
    assert torchs["reshard_after_forward"].default is None
    assert [s["reshard_after_forward"] for _, s in given] == [True, True, True, None]
    for _, settings in given:
        chosen = {"mesh", "ignored_params", "reshard_after_forward"}
        assert settings.keys() - chosen == {"mp_policy"}
        policy = settings["mp_policy"]
        assert policy == torchs["mp_policy"].default == fsdp.MixedPrecisionPolicy()
    others = {"offload_policy": fsdp.OffloadPolicy(), "shard_placement_fn": None}
    assert {name: torchs[name].default for name in others} == others
    policies = inspect.signature(fsdp.MixedPrecisionPolicy).parameters
    assert {name: p.default for name, p in policies.items()} == {
        "param_dtype": None,
        "reduce_dtype": None,
        "output_dtype": None,
        "cast_forward_inputs": True,
    }


@on_ranks(2)
def test_rank_0s_parameters_are_sharded() -> None:
    model = make_model()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(dear.rank())
    optimizer = wrap(make_sgd(model), model, "fsdp")
    far = difference(model, make_model())
    optimizer.close()
    assert far == 0.0


class Tied(nn.Module):
    """Two large layers in a list share their weight with what is outside; one does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 4)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.layers[1].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.tied(x) * self.scale)


def test_shared_and_odd_parameters_equal_serial(world):
    assert far_from_serial(world(3), "fsdp", make_model=Tied, options=_LAYERS) < 1e-5


@on_ranks(2)
def test_a_replayed_model_whose_layers_are_sharded_has_the_same_gradients() -> None:
    def pass_of(shard: bool) -> tuple[dict[str, torch.Tensor], int]:
        torch.manual_seed(5)
        task = registry.build("mobilenet_v2@rtx2080ti-modelled", 64, None, torch.Generator())
        model = task.model
        optimizer = wrap(make_sgd(model), model, "fsdp") if shard else None
        torch.manual_seed(6)  # of the gradients
        model(*task.inputs).backward()
        gradients = {name: full(param.grad).clone() for name, param in model.named_parameters()}
        units = 0
        if optimizer is not None:
            units = len(optimizer.groups())
            optimizer.close()
        return gradients, units

    (wanted, _), (gradients, units) = pass_of(False), pass_of(True)
    assert units > 2
    assert gradients.keys() == wanted.keys()
    assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)


@on_ranks(2)
def test_checkpoints_are_whole_and_fit_other_groups() -> None:
    model, wanted = make_model(), make_model()
    optimizer, serial = wrap(make_sgd(model), model, "fsdp", **_LAYERS), make_sgd(wanted)
    steps(model, optimizer, mine(), range(2))
    steps(wanted, serial, everybody(), range(2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    optimizer.close()
    far = error(saved[0], wanted.state_dict())
    model = make_model()
    optimizer = wrap(make_sgd(model, lr=5.0), model, "fsdp", stage=2)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    steps(model, optimizer, mine(), range(2, 4))
    steps(wanted, serial, everybody(), range(2, 4))
    far = max(far, difference(model, wanted))
    optimizer.close()
    assert far < 1e-5


@on_ranks(2)
def test_zeroing_drops_what_was_not_sent() -> None:
    model, wanted = make_model(), make_model()
    optimizer, serial = wrap(make_sgd(model), model, "fsdp", **_LAYERS), make_sgd(wanted)
    with optimizer.no_sync():
        model(torch.ones(2, 6)).sum().backward()
    optimizer.zero_grad()
    steps(model, optimizer, mine())
    steps(wanted, serial, everybody())
    far = difference(model, wanted)
    optimizer.close()
    assert far < 1e-5


@on_ranks(2)
def test_what_cannot_be_sharded_is_refused_and_left_as_it_was() -> None:
    model = make_model()
    biases = [param for param in model.parameters() if param.dim() == 1]
    weights = [param for param in model.parameters() if param.dim() == 2]
    first = wrap(torch.optim.SGD(biases, 0.1), model, "fsdp")
    second = message(lambda: wrap(torch.optim.SGD(weights, 0.1), model, "fsdp"))
    assert "sharded already" in second
    first.close()
    pieces = nn.ModuleList([nn.Linear(2, 2)])
    words = nn.Embedding(4, 2, sparse=True)
    for text, optimizer, what, options in [
        ("fully_shard refuses this model", make_sgd(pieces), pieces, {}),
        ("sparse=False", make_sgd(words), words, {}),
        ("LBFGS", torch.optim.LBFGS(model.parameters()), model, {}),
        ("fused=False", make_sgd(model, fused=True), model, {}),
        ("fsdp option 'stage': unknown value 1", make_sgd(model), model, {"stage": 1}),
    ]:
        assert text in message(partial(wrap, optimizer, what, "fsdp", **options))
    left = str([*leftovers(model), *leftovers(pieces), *map(type, model)])
    assert "FSDP" not in left and "hooks" not in left


def _embedded(max_norm: float | None = None) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(8, 6, max_norm=max_norm), nn.Linear(6, 8), nn.Linear(8, 4))


def _trained(
    touch: Callable[[nn.Module, list[nn.Parameter]], object],
    model: nn.Module,
    kind: type[torch.optim.Optimizer] = torch.optim.SGD,
) -> torch.Tensor:
    """Returns the parameters after four steps, with `touch(model, held)` after the second."""
    held, algorithm = list(model.parameters()), "fsdp"
    optimizer = dear.DistributedOptimizer(kind(held, lr=0.1), model, algorithm=algorithm)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.arange(8)).square().mean().backward()
        optimizer.step()
        if step == 1:
            optimizer.synchronize()
            with torch.no_grad():
                touch(model, held)
    return torch.cat([value.flatten() for value in model.state_dict().values()])


def _move(model: nn.Module, held: object = None) -> None:
    model[2].weight.data = torch.full((4, 8), 0.1)


@on_ranks(2)
def test_writes_to_whole_parameters_are_kept_or_refused():
    plain, sgd = _embedded(), torch.optim.SGD
    optimizer = sgd(plain.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        plain(torch.arange(8)).square().mean().backward()
        optimizer.step()
        if step == 1:
            _move(plain)
    wanted = torch.cat([value.flatten() for value in plain.state_dict().values()])
    assert torch.allclose(_trained(_move, _embedded()), wanted, atol=1e-6)
    touches: dict[str, Callable[[nn.Module, list[nn.Parameter]], object]] = {
        "from model.parameters()": lambda model, held: held[0].clamp_(0, 1),
        "copy or save its state_dict()": lambda model, held: copy.deepcopy(model),
        "saved whole": lambda model, held: torch.save(model, io.BytesIO()),
        "was taken away": lambda model, held: prune.l1_unstructured(model[1], "weight", 0.3),
    }
    refused = {words: partial(_trained, touch, _embedded()) for words, touch in touches.items()}
    refused["max_norm"] = partial(_trained, lambda *_: None, _embedded(max_norm=0.5))
    refused["Adafactor"] = partial(_trained, lambda *_: None, _embedded(), torch.optim.Adafactor)
    for words, call in refused.items():
        assert words in message(call), words
