"""Messages of delayed all-reduce: their groups, the gradients of a step (a lap), and a timeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dear.buckets.carriers import SparseSum
from dear.buckets.flat import Bucket, packed_buckets
from dear.buckets.grouping import RunOrder, agree, ready_groups
from dear.comm.communicator import Communicator
from dear.comm.work import Work
from dear.errors import UserError
from dear.lazy import torch
from dear.options import Options
from dear.training.engine import Replica
from dear.training.gradients import gradient_of
from dear.training.trace import Timeline

if TYPE_CHECKING:
    Gradients = dict[torch.nn.Parameter, torch.Tensor | None]
    Groups = tuple[list[list[torch.nn.Parameter]], list[torch.nn.Parameter]]
    """Groups of dense parameters, and the sparse parameters."""


class DenseMessage(Bucket):
    """All-reduce of a group's gradients, with one mark per parameter (1: it has a gradient)."""

    work: Work | None = None
    packed_s: tuple[float, float] | None = None
    """Start and end of the copy, in seconds on the communicator's clock."""

    @property
    def nbytes(self) -> int:
        return self.gradients.nbytes

    def pack(self, divisor: int = 1) -> None:
        for param in self.params:
            gradient = param.grad
            if gradient is not None and gradient.layout is not torch.strided:
                raise UserError(_changed_kind(param, "sparse", "dense"))
        super().pack(divisor)

    def send(self, communicator: Communicator) -> None:
        self.work = communicator.all_reduce(self.gradients, op="sum")


class SparseMessage:
    """All-gather of the entries of one sparse gradient."""

    def __init__(self, param: torch.nn.Parameter) -> None:
        self.params = [param]
        self.work: Work | None = None
        self.packed_s: tuple[float, float] | None = None
        self.mine: torch.Tensor | None = None
        self._sum: SparseSum | None = None

    @property
    def nbytes(self) -> int:
        return self.work.nbytes if self.work is not None else 0

    def pack(self, divisor: int) -> None:
        self._divisor = divisor
        (param,) = self.params
        gradient = param.grad
        if gradient is not None and gradient.layout is not torch.sparse_coo:
            raise UserError(_changed_kind(param, "dense", "sparse"))
        self.mine = None if gradient is None else gradient.detach().coalesce()

    def send(self, entries: tuple[list[int], int], communicator: Communicator) -> None:
        """Sends the packed gradient; `entries` is a result of `gather_entries`."""
        (param,) = self.params
        self._sum = SparseSum(self.mine, param, entries, communicator, divisor=self._divisor)
        self.work = self._sum.work

    def means(self) -> Gradients:
        assert self._sum is not None, "sent before"
        return {self.params[0]: self._sum.result()}


def _changed_kind(param: torch.nn.Parameter, now: str, before: str) -> str:
    return (
        f"the gradient of a parameter of shape {tuple(param.shape)} is {now} now, but was {before} "
        "before or on another rank; it must be of one kind in all steps and on all ranks"
    )


@dataclass(kw_only=True)
class Lap:
    """Gradients of one step, from their copy into messages to the update that applies them."""

    dense: list[DenseMessage] = field(default_factory=list)
    sparse: list[SparseMessage] = field(default_factory=list)
    loaded: Gradients = field(default_factory=dict)
    """Gradients from a checkpoint; None for a parameter without one on any rank."""
    step: int = 0
    scale: torch.Tensor | None = None
    """Loss scale of these gradients; None: 1."""

    @classmethod
    def of(cls, groups: Groups, communicator: Communicator) -> Lap:
        """Returns a lap with an empty message for each group."""
        dense, sparse = groups
        buckets = packed_buckets(dense, communicator, kind=DenseMessage)
        return cls(dense=buckets, sparse=[SparseMessage(param) for param in sparse])

    @property
    def messages(self) -> list[DenseMessage | SparseMessage]:
        return [*self.dense, *self.sparse]

    def wait(self) -> None:
        """Waits until every transfer has ended."""
        for message in self.messages:
            if message.work is not None:
                message.work.wait()

    def gradients(self) -> Gradients:
        """Waits for the transfers; returns the averages or sums."""
        self.wait()
        gradients = dict(self.loaded)
        for message in self.messages:
            gradients |= message.means()
        return gradients

    def due(self) -> Gradients:
        """Returns gradients for an update, with None for parameters that were frozen meanwhile."""
        gradients = self.gradients().items()
        return {param: mean if param.requires_grad else None for param, mean in gradients}


class Arrivals:
    """Arrival times of gradients in the first pass, and groups that are made from them.

    Args:
        buffer_bytes, cycle_s: as for `ready_groups`.
    """

    def __init__(
        self, replica: Replica[Options], *, buffer_bytes: float, cycle_s: float | None
    ) -> None:
        self._model, self._params = replica.model, replica.params
        self._communicator = replica.communicator
        self._buffer_bytes, self._cycle_s = buffer_bytes, cycle_s
        self._times_s: dict[torch.nn.Parameter, float] = {}

    def note(self, param: torch.nn.Parameter) -> None:
        """Records the arrival of a gradient; of several passes, the last one counts."""
        self._times_s.pop(param, None)
        self._times_s[param] = self._communicator.clock()

    def groups(self) -> Groups | None:
        """Returns the groups, the same on all ranks, or None if the pass was empty.

        Collective, at the end of a pass.

        Raises:
            UserError: on all ranks, if a gradient is sparse on one rank and dense on another.
        """
        now = self._communicator.clock()
        index_of = {param: i for i, param in enumerate(self._params)}
        for param in self._params:
            if param.grad is not None and param not in self._times_s:
                self._times_s[param] = now  # the script has set this gradient
        seen = [param for param in self._times_s if param.grad is not None]
        observed = RunOrder(
            reads=[],
            arrivals=[index_of[param] for param in seen],
            waits_s=[now - self._times_s[param] for param in seen],
        )
        order = agree(observed, self._communicator)
        if not order.arrivals:
            return None
        sparse = self._agreed_sparse(
            {index_of[param]: gradient_of(param).layout is torch.sparse_coo for param in seen}
        )
        if sparse:
            self._communicator.ensure_channels(2)
        dense = [param for param in self._params if param not in set(sparse)]
        groups = ready_groups(
            self._params,
            dense,
            order,
            buffer_bytes=self._buffer_bytes,
            cycle_s=self._cycle_s,
        )
        return groups, sparse

    def _agreed_sparse(self, kinds: dict[int, bool]) -> list[torch.nn.Parameter]:
        sparse: dict[int, bool] = {}
        for kinds_of_rank in self._communicator.gather_objects(kinds):
            for index, kind in kinds_of_rank.items():
                if sparse.setdefault(index, kind) != kind:
                    raise UserError(
                        f"the gradient of a parameter of shape {tuple(self._params[index].shape)} "
                        "is sparse on some ranks and dense on others; make the same model on all"
                    )
        # Weights of sparse embeddings count as sparse until a rank has used them.
        declared = {
            module._parameters.get("weight")
            for module in self._model.modules()
            if getattr(module, "sparse", None) is True
        }
        return [p for i, p in enumerate(self._params) if sparse.get(i, p in declared)]


class UpdateTimes:
    """Timeline of copies, transfers and updates.

    The times of works are read only at the end, since reading makes the host wait for a GPU.
    """

    def __init__(self, path: str, communicator: Communicator) -> None:
        self._timeline = Timeline(path, communicator.rank)
        self._clock = communicator.clock
        self._applied: list[
            tuple[dict[str, int], tuple[float, float] | None, Work | None, float | None]
        ] = []
        communicator.record_times = True

    def note(self, lap: Lap, applied_s: float | None) -> None:
        """Records an update that began at `applied_s` and ends now; None: there was no update."""
        if applied_s is not None:
            self._timeline.add("update", f"step {lap.step}", applied_s, self._clock())
        for index, message in enumerate(lap.messages):
            facts = {"step": lap.step, "group": index, "bytes": message.nbytes}
            self._applied.append((facts, message.packed_s, message.work, applied_s))

    def write(self, device: torch.device) -> None:
        """Writes the timeline of all updates so far; waits for their transfers."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        add = self._timeline.add
        while self._applied:
            facts, packed_s, work, applied_s = self._applied.pop()
            name = f"step {facts['step']} group {facts['group']}"
            if packed_s is not None:
                add("pack", name, *packed_s, **facts)
            if work is not None:
                times = work.times()
                add("in queue", name, times.enqueued_s, times.started_s, **facts)
                add("transfer", name, times.started_s, times.finished_s, **facts)
                if applied_s is not None:
                    add("waits for update", name, times.finished_s, applied_s, **facts)
        self._timeline.write()
