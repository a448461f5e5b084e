"""Starts communication while the backward pass still runs, in one order on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from dear.errors import UserError
from dear.lazy import torch
from dear.training.hooks import Hooks, at_end_of_backward

if TYPE_CHECKING:
    from torch.nn import Parameter

    from dear.comm.communicator import Communicator


class _Slot:
    """A parameter's unit, and the last pass in which its gradient arrived."""

    __slots__ = ("seen", "unit")

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.seen = 0


class BackwardSchedule:
    """Calls `launch(unit)` as units of parameters get their gradients, `finish()` after the pass.

    A unit is a group of parameters that travel together. Ranks may see gradients in different
    orders or lack some; collectives must still match. So units are launched in one agreed order,
    each when it and all before it are complete; what is missing at the end of the pass is launched
    then. The order is the reverse of registration in the first pass and afterwards the order in
    which rank 0's units were complete in it.

    Args:
        finish: called when a pass has ended and every unit is launched.
        arrived: called for each gradient that arrives, also under `paused`, before all else.
        learn: take the order from the first pass; without it the owner gives one to `regroup`.
        sparse: the owner communicates sparse gradients too; otherwise they are refused.

    A pass is one `backward()` outside `paused()`. Gradients accumulate in `p.grad` over passes as
    in plain torch.
    """

    def __init__(
        self,
        hooks: Hooks,
        units: Sequence[Sequence[Parameter]],
        communicator: Communicator,
        *,
        launch: Callable[[int], None],
        finish: Callable[[], None] = lambda: None,
        arrived: Callable[[Parameter], None] | None = None,
        learn: bool = True,
        sparse: bool = False,
    ) -> None:
        self._communicator = communicator
        self._launch = launch
        self._finish = finish
        self._arrived = arrived
        self._sparse = sparse
        self._set_units(units)
        self.order: Sequence[int] = list(reversed(range(len(units))))
        """Units as they are launched, on all ranks."""
        self._learnt = not learn
        self._in_pass = False
        self._number = 0
        self._paused = False
        self.passed = False
        """True if a pass has ended since `restart`."""
        self.unsent = False
        """True if gradients have been added under `paused` since the last pass."""
        hooks.on_gradient(self._slots, self._on_gradient)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Backward passes inside communicate nothing; the next pass outside carries their sum."""
        self._paused, before = True, self._paused
        try:
            yield
        finally:
            self._paused = before

    def regroup(self, units: Sequence[Sequence[Parameter]], order: Sequence[int]) -> None:
        """Other units of the same parameters, launched in `order` from the next pass on."""
        self._set_units(units)
        self.order = order
        self._learnt = True

    def restart(self) -> None:
        """Forgets the last pass: the next step needs a new one."""
        self.passed = False

    def forget(self) -> None:
        """Forgets gradients that have been discarded, also those of a pass that an error ended."""
        self._in_pass = self.passed = self.unsent = False

    def run_if_missing(self) -> None:
        """Communicates the gradients there are if no pass since `restart` has carried them all.

        So gradients accumulated under `paused` are never lost, and a rank whose loss did not depend
        on the model still takes part in the step.
        """
        if not self.passed or self.unsent:
            self._begin()
            self._end()

    def _set_units(self, units: Sequence[Sequence[Parameter]]) -> None:
        self._units = units
        self._slots = {param: _Slot(i) for i, unit in enumerate(units) for param in unit}

    def _begin(self) -> None:
        self._in_pass = True
        self.unsent = False
        self._next = 0
        self._number += 1
        self._missing = [len(unit) for unit in self._units]
        self._completed: list[int] = []

    def _on_gradient(self, param: Parameter) -> None:
        if param.grad.layout is not torch.strided and not self._sparse:
            raise UserError(
                f"sparse gradient of shape {tuple(param.shape)}: only dense gradients are "
                "communicated; build the embedding with sparse=False"
            )
        if self._arrived is not None:
            self._arrived(param)
        if self._paused:
            self.unsent = True
            return
        if not self._in_pass:
            self._begin()
            at_end_of_backward(self._end)
        slot = self._slots[param]
        if slot.seen == self._number:
            self._in_pass = False
            raise UserError(
                f"a parameter of shape {tuple(param.shape)} got its gradient twice in one backward "
                "pass (reentrant checkpointing?); use torch.utils.checkpoint with "
                "use_reentrant=False"
            )
        slot.seen = self._number
        unit = slot.unit
        self._missing[unit] -= 1
        if self._missing[unit] == 0:
            self._completed.append(unit)
        while self._next < len(self.order) and self._missing[self.order[self._next]] == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        self._next += 1
        self._launch(self.order[self._next - 1])

    def _end(self) -> None:
        if not self._in_pass:  # an error in the pass has ended it already
            return
        while self._next < len(self.order):
            self._launch_next()
        self._in_pass = False
        self.passed = True
        self._finish()
        if not self._learnt:
            self._learn()

    def _learn(self) -> None:
        seen = set(self._completed)
        rest = [unit for unit in self.order if unit not in seen]
        self.order = self._communicator.broadcast_object(self._completed + rest)
        self._learnt = True
