"""One loop, run by ranks with an algorithm, or by threads with plain torch and its reference."""

from __future__ import annotations

import contextlib
import functools
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import nn

import dear
from common.harness.worker.checking import serial
from dear.errors import UserError
from dear.topology import graph, matrix
from tests.contract.algorithms import Meaning, algorithm_options, reference_of
from tests.contract.loops import make_sgd

Loop = Callable[["Run"], None]
Seen = list[dict[str, torch.Tensor]]
Wrap = Callable[..., Any]


@dataclass(frozen=True)
class Subject:
    """Algorithm with options."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return " ".join([self.name, *[f"{key}={value}" for key, value in self.options]])

    @property
    def meaning(self) -> Meaning:
        return Meaning.of(self.name)

    @property
    def labels(self) -> set[str]:
        """The name, and the name with each option: `ddp`, `ddp:zero=True`."""
        typed = algorithm_options(self.name, dict(self.options))
        return {
            self.name,
            *[f"{self.name}:{f.name}={getattr(typed, f.name)}" for f in fields(typed)],
        }


class Run:
    """This rank's run of a loop. What it sees is compared with the same run by plain torch."""

    def __init__(self, rank: int, size: int, subject: Subject) -> None:
        self.rank, self.size, self.subject = rank, size, subject
        self.averages = subject.meaning.averages_gradients
        """True if `p.grad` is an average after `synchronize()`."""
        self.seen: Seen = []
        self.optimizers: list[Any] = []

    def see(self, what: nn.Module | torch.Tensor) -> None:
        state = what.state_dict() if isinstance(what, nn.Module) else {"": what}
        self.seen.append({name: value.detach().clone().double() for name, value in state.items()})

    def wrap(self, model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
        """Returns the optimizer, by default SGD with momentum, that trains with the algorithm."""
        optimizer = make_sgd(model) if optimizer is None else optimizer
        chosen = {**dict(self.subject.options), **options}
        dear.DistributedOptimizer(optimizer, model, algorithm=self.subject.name, **chosen)
        self.optimizers.append(optimizer)
        if self.subject.meaning.in_turn:
            _take_turns(optimizer)
        return optimizer

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the mean of all ranks' values."""
        return dear.allreduce(value)

    def from_root(self, model: nn.Module, optimizer: Any) -> None:
        """Gives all ranks the state that rank 0 has."""
        dear.broadcast_parameters(model.state_dict())
        dear.broadcast_optimizer_state(optimizer)

    def resumed(self, model: nn.Module, optimizer: Any, resume: Callable[[], Any]) -> Any:
        """Returns the model and optimizer of `resume`; plain torch goes on as if nothing was."""
        return resume()

    workers: ClassVar = {"num_workers": 1, "multiprocessing_context": "fork"}

    @staticmethod
    def compiled(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend="eager")

    def close(self) -> None:
        for optimizer in self.optimizers:
            if hasattr(optimizer, "_engine"):
                optimizer.close()


def _take_turns(optimizer: Any) -> None:
    """Lets ranks step one after another, so that it is known whose values are there.

    A first step, in which all must take part, moves nothing.
    """
    engine = optimizer._engine
    step = engine.step
    settings = [dict(group) for group in optimizer.param_groups]
    gradients = [(param, param.grad) for group in settings for param in group["params"]]
    optimizer.zero_grad()
    optimizer.step()
    optimizer.state.clear()
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
    for param, gradient in gradients:
        param.grad = gradient
    engine.synchronize()
    dear.allreduce(torch.zeros(1))

    def in_turn(update: Callable[[], object]) -> object:
        result = None
        for rank in range(dear.size()):
            if rank == dear.rank():
                result = step(update)
                engine.synchronize()
            dear.allreduce(torch.zeros(1))
        return result

    engine.step = in_turn


def on_rank(subject: Subject, loop: Loop) -> Seen | str:
    """Returns what the loop saw on this rank, or the text of its error."""
    run = Run(dear.rank(), dear.size(), subject)
    try:
        loop(run)
        run.close()
        return run.seen
    except UserError as error:
        text = str(error)
        with contextlib.suppress(UserError, RuntimeError):  # the group may have failed
            run.close()
        return text
    except Exception:
        return "broken: " + traceback.format_exc()


class Meeting:
    """Place where threads wait for each other; one of them runs at a time, and hands it on."""

    def __init__(self, size: int) -> None:
        self._turns = {rank: threading.Semaphore(0) for rank in range(size)}
        self._size, self._rounds = size, 0
        self._values: dict[int, Any] = {}
        self._results: Sequence[Any] = ()
        self.errors: list[BaseException] = []

    def meet(self, rank: int, value: Any, act: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Returns `act(values of all ranks)[rank]`; the last one to come calls `act`."""
        self._values[rank] = value
        if len(self._values) == self._size:
            values, self._values = [self._values[r] for r in range(self._size)], {}
            self._results = act(values)
            self._rounds += 1
        else:
            now = self._rounds
            self.hand_on(rank)
            self._turns[rank].acquire()
            if self.errors or self._rounds == now:
                raise AssertionError("another rank failed, or the loops of the ranks do not meet")
        return self._results[rank]

    def run(self, rank: int, loop: Callable[[], None]) -> None:
        self._turns[rank].acquire()
        try:
            loop()
        except BaseException as error:
            self.errors.append(error)
        del self._turns[rank]
        self.hand_on(rank)

    def hand_on(self, rank: int) -> None:
        later = [other for other in self._turns if other > rank] or [*self._turns]
        for next_one in later[:1]:
            self._turns[next_one].release()


class _Held(nn.Module):
    """Parameters of an optimizer, as if they were a model's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        groups = optimizer.param_groups
        self.held = [p for group in groups for p in group["params"] if p.requires_grad]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(self.held)


class _Ranks(serial.Ranks):
    """Ranks whose update can be held back, and whose zeros are zeros where a rank has gradients."""

    waits = due = False

    def update(self, rank: int | None = None) -> None:
        self.due = True
        if not self.waits:
            super().update(rank)

    @property
    def g(self) -> torch.Tensor:
        rows = zip(*self._params, strict=True)
        self._known = [any(p.grad is not None for p in params) for params in rows]
        return super().g

    @g.setter
    def g(self, values: torch.Tensor) -> None:
        serial.Ranks.g.fset(self, values)
        for params in self._params:
            for param, known in zip(params, self._known, strict=True):
                if known and param.grad is None:
                    param.grad = torch.zeros_like(param)


class _Step:
    """Optimizer whose step is the plain one."""

    def __init__(self, optimizer: Any) -> None:
        self.step = functools.partial(type(optimizer).__mro__[2].step, optimizer)


def _last_puts(ranks: Any, options: Any) -> Iterator[None]:
    """Asyncddp, rank after rank, of values as they were sent: x_i may change after its put."""
    weights = torch.as_tensor(matrix(graph(options.topology, len(ranks.x))))
    put = ranks.x
    while True:
        for rank in range(len(put)):
            x = ranks.x
            x[rank] = weights[:, rank] @ torch.cat(
                [put[:rank], x[rank : rank + 1], put[rank + 1 :]]
            )
            ranks.x = x
            ranks.update(rank)
            put[rank] = ranks.x[rank]
        yield


class _Reference:
    """Optimizers of all ranks, and the algorithm's reference."""

    def __init__(self, subject: Subject, optimizers: Sequence[Any]) -> None:
        options = dict(subject.options)
        self._ranks = _Ranks([_Held(o) for o in optimizers], [_Step(o) for o in optimizers])
        typed = algorithm_options(subject.name, options)
        reference = _last_puts if subject.meaning.in_turn else reference_of(subject.name, options)
        self._steps = reference(self._ranks, typed)
        self._final = self._stepped = False
        self.close = self._steps.close

    def synchronize(self) -> None:
        """Sets gradients to what the next step applies, unless a step has applied them."""
        if not self._final and not self._stepped:
            self._final = self._ranks.waits = True
            self._ranks.due = False
            next(self._steps)
            self._ranks.waits = False

    def step(self) -> None:
        if not self._final:
            next(self._steps)
        elif self._ranks.due:
            self._ranks.update()
        self._final, self._stepped = False, True

    def forget(self) -> None:
        self._final = self._stepped = False


class _Met:
    """Base class of optimizers whose steps are the reference's."""

    _run: InThread
    _reference: _Reference

    def step(self, closure: Any = None) -> Any:
        if closure is not None and isinstance(self, torch.optim.LBFGS):
            return super().step(lambda: self._averaged(closure))
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._run.together(self._reference.step)
        return loss

    def _averaged(self, closure: Any) -> Any:
        loss = closure()
        self.synchronize()
        self._run.together(self._reference.forget)
        return loss

    vars(step)["hooked"] = True

    def synchronize(self) -> None:
        if self._run.averages:
            self._run.together(self._reference.synchronize)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        self.synchronize()
        params = [p for group in self.param_groups for p in group["params"]]
        return nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def no_sync(self) -> Any:
        return contextlib.nullcontext()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._reference.forget()
        super().zero_grad(set_to_none)

    def close(self) -> None:
        self._run.together(self._reference.close)
        self.__class__ = type(self).__mro__[2]


class InThread(Run):
    """Run of one rank in a thread, with plain torch."""

    def __init__(self, rank: int, size: int, subject: Subject, meeting: Meeting) -> None:
        super().__init__(rank, size, subject)
        self.meeting = meeting

    def wrap(self, model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
        optimizer = make_sgd(model) if optimizer is None else optimizer
        vars(optimizer).pop("step", None)  # a scheduler's, of the plain class
        optimizer.__class__ = type("Met", (_Met, type(optimizer)), {})
        optimizer._run = self

        def start(optimizers: list[Any]) -> list[_Reference]:
            return [_Reference(self.subject, optimizers)] * self.size

        optimizer._reference = self.meeting.meet(self.rank, optimizer, start)
        self.optimizers.append(optimizer)
        return optimizer

    def together(self, act: Callable[[], None]) -> None:
        self.meeting.meet(self.rank, None, lambda _: [act()] * self.size)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        average = lambda values: [torch.stack(values).mean(0)] * self.size  # noqa: E731
        return self.meeting.meet(self.rank, value.detach(), average)

    def from_root(self, model: nn.Module, optimizer: Any) -> None:
        state = model.state_dict(), optimizer.state_dict()
        root = self.meeting.meet(self.rank, state, lambda values: [values[0]] * self.size)
        model.load_state_dict(root[0])
        optimizer.load_state_dict(root[1])

    def resumed(self, model: nn.Module, optimizer: Any, resume: Callable[[], Any]) -> Any:
        return model, optimizer

    workers: ClassVar = {}

    @staticmethod
    def compiled(model: nn.Module) -> nn.Module:
        return model

    def close(self) -> None:
        for optimizer in self.optimizers:
            if isinstance(optimizer, _Met):
                optimizer.close()


def by_threads(subject: Subject, size: int, loop: Loop) -> list[Seen]:
    """Returns what the loop sees on each rank, with plain torch and the algorithm's reference."""
    meeting = Meeting(size)
    runs = [InThread(rank, size, subject, meeting) for rank in range(size)]

    def whole(run: InThread) -> None:
        loop(run)
        run.close()

    given = [(run.rank, functools.partial(whole, run)) for run in runs]
    threads = [threading.Thread(target=meeting.run, args=args) for args in given]
    for thread in threads:
        thread.start()
    meeting.hand_on(size)
    for thread in threads:
        thread.join()
    if meeting.errors:
        raise meeting.errors[0]
    return [run.seen for run in runs]


def difference(got: Seen, wanted: Seen) -> float:
    """The largest difference of any tensor at any moment, relative to its norm."""
    assert [seen.keys() for seen in got] == [seen.keys() for seen in wanted]
    pairs = [(now[k], then[k]) for now, then in zip(got, wanted, strict=True) for k in then]
    far = [((a - b).norm() / b.norm().clamp_min(1e-3)).item() for a, b in pairs]
    return max(x if x == x else float("inf") for x in far)
