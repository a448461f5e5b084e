"""Loops with checkpoints, and with models whose parameters are shared, frozen, cut or added."""

from __future__ import annotations

import io
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.data import DataLoader, TensorDataset

from dear.comm import runtime
from tests.contract.loops import batch, make_model, make_sgd
from tests.contract.loops.passes import STEPS, Net, ordinary_but, train, trained
from tests.contract.loops.runs import Run

HALF = range(2)


def rest(run: Run, *, new: bool = False) -> range:
    """Returns the steps after `HALF`; none with new objects whose neighbours' values are lost."""
    return range(0) if new and run.subject.meaning.in_turn else range(2, STEPS)


States = dict[str, Any]


def _resume(
    run: Run, save: Any, load: Any, ranks: str = "all", *, wrapped_later: bool = False
) -> None:
    """Training stops after two steps, and new objects go on."""
    model = make_model()
    optimizer = run.wrap(model)
    train(run, model, optimizer, HALF)

    def resume() -> Any:
        saved = save(model, optimizer)
        optimizer.close()
        fresh = make_model()
        again = make_sgd(fresh)
        if not wrapped_later:
            again = run.wrap(fresh, again)
            train(run, fresh, again, range(7, 8))  # on which nothing may depend
        if ranks == "all" or run.rank == 0:
            load(saved, fresh, again)
        if wrapped_later:
            again = run.wrap(fresh, again)
        if ranks == "root":
            run.from_root(fresh, again)
        return fresh, again

    model, optimizer = run.resumed(model, optimizer, resume)
    train(run, model, optimizer, rest(run, new=True))
    run.see(model)


def _states(model: nn.Module, optimizer: Any) -> States:
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _load(states: States, model: nn.Module, optimizer: Any) -> None:
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])


def saved_by_all(run: Run) -> None:
    _resume(run, _states, _load)


def loaded_by_root(run: Run) -> None:
    if run.averages:
        _resume(run, _states, _load, ranks="root")
    else:
        _adopt(run)


def loaded_by_root_and_wrapped(run: Run) -> None:
    if run.averages:
        _resume(run, _states, _load, ranks="root", wrapped_later=True)
    else:
        _adopt(run)


def _adopt(run: Run) -> None:
    """Replicas that differ become the root's, and stay what they are where nothing is learnt."""
    model = make_model()
    optimizer = run.wrap(model)
    train(run, model, optimizer, HALF)
    run.from_root(model, optimizer)
    run.see(model)


def assigned(run: Run) -> None:
    def load(states: States, model: nn.Module, optimizer: Any) -> None:
        optimizer.load_state_dict(states["optimizer"])
        model.load_state_dict(states["model"], assign=True)

    _resume(run, _states, load)


def distributed_checkpoint(run: Run) -> None:
    """`torch.distributed.checkpoint`: of all ranks together, or of each where replicas differ."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that a rank saves alone

        def save(model: nn.Module, optimizer: Any) -> Any:
            where = runtime.communicator().broadcast_object(folder) if run.averages else folder
            states = _states(model, optimizer)
            checkpoint.save(states, checkpoint_id=where, no_dist=not run.averages)
            for value in states["model"].values():
                value.zero_()
            checkpoint.load(states, checkpoint_id=where, no_dist=not run.averages)
            return states

        _resume(run, save, _load)


def _evaluated(run: Run, model: nn.Module) -> list[torch.Tensor]:
    """Rank 0's result."""
    if run.rank:
        return []
    model.eval()
    with torch.no_grad():
        result = model(torch.ones(2, 6))
    model.train()
    return [result]


@ordinary_but("after")
def evaluated_by_root(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    for result in _evaluated(run, model):
        run.see(result)


def normed_and_evaluated_by_root(run: Run) -> None:
    model = nn.Sequential(make_model()[:2], nn.BatchNorm1d(8), make_model()[4:])
    optimizer = run.wrap(model)
    train(run, model, optimizer, after=lambda step: _evaluated(run, model))
    optimizer.synchronize()
    for param in model.parameters():
        run.see(param)


@ordinary_but("after")
def state_read_by_root(run: Run, model: nn.Module, optimizer: Any, step: int) -> None:
    """Rank 0 saves alone."""
    if run.rank == 0:
        run.see(model)


def workers(run: Run) -> None:
    """A DataLoader forks while transfers are under way."""
    model = make_model()
    optimizer = run.wrap(model)
    x = torch.cat([batch(run.rank, step)[0] for step in range(STEPS)])
    y = torch.cat([batch(run.rank, step)[1] for step in range(STEPS)])
    for _ in range(2):
        for inputs, classes in DataLoader(TensorDataset(x, y), 6, **run.workers):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), classes).backward()
            optimizer.step()
    run.see(model)


# --- frozen and added ---------------------------------------------------------------------------


def frozen(run: Run) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    trained(run, model)


def _changed_later(
    run: Run,
    model: nn.Module,
    change: Callable[[Any], Any],
    optimizer: Any = None,
    *,
    again: bool = False,
) -> None:
    """Training goes on after `change(optimizer)`.

    Args:
        optimizer: the plain one.
        again: the optimizer is closed before, and wrapped again.
    """
    optimizer = run.wrap(model, optimizer)
    train(run, model, optimizer, HALF)
    if again:
        optimizer.close()
        model.zero_grad()
    change(optimizer)
    steps = rest(run, new=again)
    if again and steps:
        optimizer = run.wrap(model, optimizer)
    train(run, model, optimizer, steps)
    run.see(model)


def frozen_later(run: Run) -> None:
    model = make_model()
    _changed_later(run, model, lambda _: model[0].requires_grad_(False))


def unfrozen_later(run: Run, again: bool = False) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    _changed_later(run, model, lambda _: model[0].requires_grad_(True), again=again)


def unfrozen_and_wrapped(run: Run) -> None:
    unfrozen_later(run, again=True)


def group_added(run: Run, again: bool = False) -> None:
    model = make_model()
    group = {"params": list(model[0].parameters())}
    add = lambda optimizer: optimizer.add_param_group(group)  # noqa: E731
    _changed_later(run, model, add, make_sgd(model[2:]), again=again)


def group_added_and_wrapped(run: Run) -> None:
    group_added(run, again=True)


# --- kinds of models ----------------------------------------------------------------------------


def pruned(run: Run) -> None:
    model = make_model()
    prune.l1_unstructured(model[2], "weight", 0.3)
    trained(run, model)


def pruned_later(run: Run) -> None:
    model = make_model()

    def cut(optimizer: Any) -> None:
        optimizer.synchronize()
        prune.l1_unstructured(model[2], "weight", 0.3)

    _changed_later(run, model, cut)


def lazy(run: Run) -> None:
    """A lazy layer, wrapped before its first forward pass."""
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), make_model()[4])
    torch.manual_seed(3)
    trained(run, model)


def lazy_run_before(run: Run) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), make_model()[4])
    model(torch.ones(1, 6))
    trained(run, model)


def tied(run: Run) -> None:
    model = make_model()
    model[2].weight = nn.Parameter(model[0].weight @ model[0].weight.t())
    model[4] = nn.Linear(8, 8, bias=False)
    model[4].weight = model[2].weight
    trained(run, model, out=lambda model, x: model(x)[:, :4])


def shared(run: Run) -> None:
    """A layer that runs twice."""
    layers = make_model()
    trained(run, nn.Sequential(layers[0], layers[2], layers[1], layers[2], layers[4]))


def unused(run: Run) -> None:
    model = Net()
    model.never = nn.Linear(6, 8)
    trained(run, model)


class Turns(Net):
    """Net with a branch that runs on a rank now and then."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.branch = nn.Linear(6, 4)
        self.rank, self.size, self.step = rank, size, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        out = super().forward(x)
        return out + self.branch(x) if self.step % self.size == self.rank else out


def used_by_turns(run: Run) -> None:
    trained(run, Turns(run.rank, run.size))


class Adapter(nn.Module):
    """Frozen layer, and a product of two small matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        torch.manual_seed(4)
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


def adapters(run: Run) -> None:
    model = make_model()
    model[2], model[4] = Adapter(model[2]), Adapter(model[4])
    model[0].requires_grad_(False)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = run.wrap(model, torch.optim.SGD(params, lr=0.1, momentum=0.9))
    train(run, model, optimizer)
    run.see(model)


def weight_norm(run: Run) -> None:
    model = make_model()
    parametrizations.weight_norm(model[2])
    trained(run, model)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def parametrized_later(run: Run) -> None:
    model = make_model()

    def double(optimizer: Any) -> None:
        optimizer.synchronize()
        parametrize.register_parametrization(model[2], "weight", Doubled())

    _changed_later(run, model, double)


def max_norm(run: Run) -> None:
    """An embedding that rescales its rows in its forward pass."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(8, 6, max_norm=0.5), make_model())
    optimizer = run.wrap(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        words = torch.arange(8)  # all on each rank, or replicas would differ by torch's own doing
        nn.functional.cross_entropy(model(words), (words + run.rank) % 4).backward()
        optimizer.step()
    run.see(model)


def in_double(run: Run) -> None:
    trained(run, make_model().double(), out=lambda model, x: model(x.double()))


# --- changes after wrapping -----------------------------------------------------------------------


def _in_groups(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.01}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def moved_between_groups(run: Run) -> None:
    model = make_model()

    def move(optimizer: Any) -> None:
        first, second = optimizer.param_groups
        second["params"].append(first["params"].pop())

    _changed_later(run, model, move, _in_groups(model))


def taken_out_of_group(run: Run) -> None:
    model = make_model()
    take = lambda optimizer: optimizer.param_groups[0]["params"].pop()  # noqa: E731
    _changed_later(run, model, take, _in_groups(model))


def group_taken_out(run: Run) -> None:
    model = make_model()
    take = lambda optimizer: optimizer.param_groups.pop(0)  # noqa: E731
    _changed_later(run, model, take, _in_groups(model))


def state_cleared(run: Run) -> None:
    _changed_later(run, make_model(), lambda optimizer: optimizer.state.clear())


def state_of_layer_cleared(run: Run) -> None:
    model = make_model()

    def clear(optimizer: Any) -> None:
        for param in model[2].parameters():
            optimizer.state.pop(param, None)

    _changed_later(run, model, clear)


def _moved(run: Run, move: Callable[[nn.Module], Any]) -> None:
    """A model with a convolution is moved when gradients are there, and when they are not; where
    ranks take turns, only after the last step."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 4))
    optimizer = run.wrap(model)
    for step in HALF if run.subject.meaning.in_turn else range(STEPS):
        x, y = batch(run.rank, step)
        nn.functional.cross_entropy(model(x.repeat(1, 2).view(3, 3, 2, 2)), y).backward()
        optimizer.step()
        if step == 2:
            move(model)
        optimizer.zero_grad()
        if step == 1:
            move(model)
    run.see(model)


def in_double_and_back(run: Run) -> None:
    _moved(run, lambda model: model.double().float())


def channels_last(run: Run) -> None:
    _moved(run, lambda model: model.to(memory_format=torch.channels_last))
