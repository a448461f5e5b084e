"""Where everything of a DeAR engine lies: learnt while the first step runs, then laid out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dear.algorithms.synchronous._dear_groups import Groups, Manner
from dear.buckets.flat import adopt
from dear.buckets.run_order import RunOrder, agree, group, launch_order
from dear.training.readers import ReaderMap

if TYPE_CHECKING:
    import torch
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from dear.comm.communicator import Communicator
    from dear.training.regrouping import Regrouping


class Layout:
    """The groups, and what is known of the order in which they are read and complete."""

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        communicator: Communicator,
        params: list[Parameter],
        manner: Manner,
        regrouping: Regrouping,
    ) -> None:
        self._model = model
        self._params = params
        self._communicator = communicator
        self._regrouping = regrouping
        self._arrivals: dict[Parameter, float] = {}
        self._views: dict[Parameter, torch.Tensor] = {}
        self._watching = True
        self._order = RunOrder(reads=[], arrivals=[], waits_s=[])
        self.groups = Groups(optimizer, communicator, manner)
        self.readers = ReaderMap(model, params)
        self.members: list[list[Parameter]] = []
        """Parameters of each group, in the order in which forward passes need the groups."""
        self.arrival: list[int] = []
        """Groups in the order in which backward passes complete them."""
        self.made = False

    def arrived(self, param: Parameter) -> None:
        """Its gradient is there; takes it into the flat buffer."""
        if self.made:
            adopt(param, self._views[param])
        if self._watching:
            self._arrivals.pop(param, None)
            self._arrivals[param] = self._communicator.clock()

    def make(self) -> None:
        """Lays everything out in the order seen so far; a collective call."""
        self._agree()
        self.made = True
        self.remake()

    def remake(self) -> None:
        """Lays everything out anew where parameters are now; nothing may be in flight."""
        members = group(self._model, self._params, self._order, self._regrouping.fusion())
        self.members = members
        self.arrival = launch_order(members, self._params, self._order)
        self.groups.lay_out(members, self.arrival[-1])
        self.readers.set_groups(members)
        self._views = {
            param: view
            for part in self.groups.parts
            for param, view in zip(part.group.params, part.group.gradient_views, strict=True)
        }

    def after_step(self) -> bool:
        """A step has ended; true if `remake` is due."""
        due = self._regrouping.after_step()
        if due and self._watching:
            self._agree()
        return due

    def reclaimed(self) -> bool:
        """Takes parameters back that got other memory; False if `remake` must do that."""
        return all(part.group.reclaim() for part in self.groups.parts)

    def _agree(self) -> None:
        place = {param: i for i, param in enumerate(self._params)}
        end = max(self._arrivals.values(), default=0.0)
        seen = RunOrder(
            reads=[place[param] for param in self.readers.order()],
            arrivals=[place[param] for param in self._arrivals],
            waits_s=[end - at for at in self._arrivals.values()],
        )
        self._order = agree(seen, self._communicator)
        self._watching = self._regrouping.watches
