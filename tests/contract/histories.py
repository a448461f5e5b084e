"""Parameter histories: what training computed before a change of the code, bit for bit.

`python -m tests.contract.histories --write` trains every case below and writes what came out to
`histories/`, one file per algorithm and one for the other interfaces; `test_histories.py` compares.
A case is an algorithm with options, a number of ranks, and a way to write the training loop. Axes
are combined pairwise. Only what users may call is called here.

The model is made of sums and products of small tensors, so that what it computes does not depend
on the kernels for matrices of a machine. What remains (how sums are vectorised) is told by
`machine()`: elsewhere, parameters are compared to a relative 1e-6 (and 1e-7 of those near 0).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import platform
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dear
from dear.training.algorithm import algorithm_class
from tests.ranks import RankPool

FOLDER = Path(__file__).parent / "histories"
STEPS = 6
SAVED_AFTER = 3
WIDTH = 6
TINY = 0.0001
"""MB: about one layer of the model."""


@dataclass(frozen=True)
class Case:
    """One training run; `options` are the algorithm's, or the interface's."""

    subject: str
    options: dict[str, Any]
    world: int
    loop: str
    kind: str

    @property
    def name(self) -> str:
        options = ",".join(f"{key}={value}" for key, value in self.options.items()) or "default"
        return f"{options} {self.loop} {self.kind} {self.world} ranks".replace("'", "")


class Layer(nn.Module):
    """Sums of products, and a bend; all of it exact to the rules of IEEE 754."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(rows, WIDTH) - 0.5)
        self.bias = nn.Parameter(torch.rand(WIDTH) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return bend((x.unsqueeze(1) * self.weight).sum(1) + self.bias)


def bend(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + x.abs())


class Model(nn.Module):
    """Layers of different sizes; `awkward`: one runs twice, one never, one is frozen, the root has
    a parameter of its own, and one layer's weight is read by the code of the root."""

    def __init__(self, awkward: bool) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.awkward = awkward
        self.last = Layer(2)  # registered first, runs last
        self.first = Layer(4)
        self.middle = Layer(7)
        if awkward:
            self.scale = nn.Parameter(torch.full((WIDTH,), 1.1))
            self.unused = Layer(3)
            self.frozen = Layer(3).requires_grad_(False)
            self.tied = Layer(7)
            self.tied.weight = self.middle.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.awkward:
            return self.last(self.middle(self.first(x)))
        x = self.tied(self.middle(self.frozen(self.first(x * self.scale))))
        return self.last(self.middle(x) * self.last.weight[0])


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [{"params": params[::2], "lr": 0.1}, {"params": params[1::2], "lr": 0.03}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-2)
    return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.05)


def loss_of(model: nn.Module, step: int, micro: int = 0) -> torch.Tensor:
    """Loss of this rank's rows in a step."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + dear.rank())
    x, y = torch.rand(2, 3, WIDTH, generator=generator) - 0.5
    return (model(x) - y).square().mean()


def as_file(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def barrier() -> None:
    dear.allreduce(torch.zeros(1))


def history(case: Case, *checkpoint: Any) -> dict[str, Any]:
    """Trains a case on this rank; returns one digest per step, and some parameters at the end.

    A refusal by all ranks is a result, too.

    Args:
        checkpoint: arguments of the body, see `algorithm`.
    """
    torch.manual_seed(5)
    try:
        return BODIES.get(case.subject, algorithm)(case, *checkpoint)
    except dear.UserError as refusal:
        return {"refused": str(refusal)}


class Record:
    """Collects digests."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.values: list[float] = []

    def read(self, state: dict[str, torch.Tensor]) -> None:
        """`state`: of the model, or any tensors by name."""
        digest = hashlib.sha256()
        for name in sorted(state):
            digest.update(state[name].detach().contiguous().numpy().tobytes())
        self.digests.append(digest.hexdigest()[:10])
        flat = torch.cat([state[name].detach().flatten().double() for name in sorted(state)])
        self.values = flat[:: max(1, len(flat) // 5)].tolist()

    def result(self) -> dict[str, Any]:
        return {"steps": " ".join(self.digests), "end": [value.hex() for value in self.values]}


# --- algorithms behind the ordinary loop ----------------------------------------------------------

BARRIER = {"barrier": True, "bucket_mb": TINY}
# Nobody waits for anybody: here ranks step one after another.
TURNS = {"bucket_mb": TINY}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "allreduce": [{}, {"compression": "topk", "density": 0.3}, {"compression": "fp16"}],
    "wfbp": [{}, {"channels": 2, "compression": "bf16"}, {"compression": "eftopk", "density": 0.3}],
    "ddp": [
        {"find_unused_parameters": True},
        {"static_graph": True, "bucket_cap_mb": TINY, "gradient_as_bucket_view": True},
        {"find_unused_parameters": True, "zero": True},
        {"find_unused_parameters": True, "compression": "efsignum"},
        {"find_unused_parameters": True, "compression": "powersgd", "powersgd_start_step": 2},
    ],
    "fsdp": [{}, {"stage": 2}, {"min_mb": 0.0, "compression": "bf16"}],
    "mgwfbp": [
        {"merge": "threshold", "threshold_mb": TINY},
        {"merge": "asc"},
        {"merge": "optimal", "costs": "10gbe", "profile_steps": 1},
        {"merge": "threshold", "threshold_mb": 0.0, "compression": "signum"},
    ],
    "hierarchical": [
        {"local_size": 2, "threshold_mb": TINY},
        {"local_size": 2, "compression": "fp16"},
    ],
    "mgs": [
        {"density": 0.3, "profile_steps": 1},
        {"density": 0.3, "compression": "topk", "profile_steps": 2},
        {"density": 1.0, "profile_steps": 1},
        {"density": 1.0, "merge": "optimal", "profile_steps": 1},
    ],
    "bytescheduler": [
        {},
        {"partition_mb": TINY / 4, "levels": 3},
        {"partition_mb": TINY / 4, "credit_mb": TINY, "compression": "fp16"},
    ],
    "dear": [
        {"small_kb": 0},
        {},
        {"threshold_mb": TINY, "small_kb": 0.1},
        {"fusion": "none", "small_kb": 0, "update": "replicated"},
        {"fusion": "nearby_layers", "nearby_layers": 2, "small_kb": 0},
        {"fusion": "nearby_layers", "nearby_layers": -1, "small_kb": 0, "update": "replicated"},
        {"threshold_mb": TINY, "first_mb": TINY, "decouple": "reduce_broadcast", "small_kb": 0},
        {"fusion": "none", "decouple": "reduce_broadcast", "update": "replicated", "small_kb": 0},
        # What top-k picks depends on groups, and `first_mb` on what messages cost here.
        {"compression": "eftopk", "density": 0.3, "first_mb": 25.0, "small_kb": 0},
        {"compression": "fp16", "threshold_mb": TINY, "small_kb": 0},
        {"exclude_parts": ["reducescatter"], "small_kb": 0},
        {"exclude_parts": ["allgather"], "update": "replicated", "small_kb": 0},
        {"fusion": "wait_time", "cycle_time_ms": 0.05, "small_kb": 0},
    ],
    "dadt": [{}, {"delay": 2, "buffer_mb": 0.0}, {"average": False, "buffer_mb": TINY}],
    "decentralized": [
        {"update": "step"},
        {"bucket_mb": TINY},
        {"topology": "one-peer-exp", "update": "step", "bucket_mb": TINY},
        {"topology": "ring", "adaptive_factor": 0.6},
        {"topology": "alternating-exp-ring", "ranks_per_node": 2, "update": "step"},
    ],
    "neighbor": [
        {"bucket_mb": TINY},
        {"combine": "atc", "topology": "star", "bucket_mb": TINY},
        {"dynamic": "one-peer-exp", "combine": "atc"},
        {"topology": "ring-left", "every": 2},
        {"hierarchical": True, "local_size": 2},
    ],
    "gradient-tracking": [{"bucket_mb": TINY}, {"topology": "ring-left"}],
    "exact-diffusion": [{"bucket_mb": TINY}, {"topology": "ring"}],
    "push-diging": [{"bucket_mb": TINY}, {"topology": "star"}],
    "win-put": [BARRIER, TURNS, {"barrier": True, "every": 2, "topology": "ring"}],
    "pull-get": [BARRIER, TURNS, {"barrier": True, "every": 2, "topology": "ring"}],
    "push-sum": [BARRIER, TURNS, {"barrier": True, "every": 2, "topology": "star"}],
    "asyncddp": [{"update": "step", "topology": "complete"}, TURNS],
    # Last, since its threads never rest.
    "horovod": [{}, {"compression": "fp16"}],
}
LOOPS = ("plain", "accumulate", "awkward", "clip", "scaler", "resume")
KINDS = ("sgd", "adamw")
ASYNCHRONOUS = ("win-put", "pull-get", "push-sum", "asyncddp")


def algorithm_cases() -> list[Case]:
    cases = []
    for subject, sets in OPTIONS.items():
        combined = [(0, 2, loop) for loop in range(len(LOOPS))]
        combined += [(i, w, (w - i) % 6) for i in range(len(sets)) for w in (1, 2, 3, 4)]
        for number, (which, world, loop) in enumerate(dict.fromkeys(combined)):
            kind = KINDS[(number + number // 6) % 2]
            case = Case(subject, sets[which], world, LOOPS[loop], kind)
            if not left_out(case):
                cases.append(case)
    return cases


def left_out(case: Case) -> bool:
    """Returns whether the bits of a case depend on time, or ranks part ways in it."""
    # A sum over three or more ranks depends on where in a message a value stands, and what is
    # merged depends on measured times. (A sum of two does not depend on it.)
    timed = case.subject in ("mgwfbp", "mgs") and case.options.get("merge") != "threshold"
    timed &= not alone(case)
    timed |= case.subject == "horovod" or case.options.get("fusion") == "wait_time"
    return timed and case.world > 2


def alone(case: Case) -> bool:
    """Returns whether only one parameter is trained: what mgs sends depends on what it merges."""
    return case.subject == "mgs" and case.options["density"] < 1


def _one_step(
    case: Case, model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler, step: int
) -> None:
    optimizer.zero_grad()
    if case.loop == "accumulate":
        with optimizer.no_sync():
            loss_of(model, step, micro=1).backward()
    loss = loss_of(model, step)
    if case.loop == "scaler":
        if (dear.rank(), step) == (dear.size() - 1, 2):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update()
        return
    loss.backward()
    if case.loop == "clip":
        optimizer.clip_grad_norm_(0.1)
    optimizer.step()


def algorithm(
    case: Case, checkpoint: bytes | None = None, only_save: bool = False
) -> dict[str, Any]:
    """The ordinary loop.

    Args:
        checkpoint: begin with it, where `resume` goes on from its own.
        only_save: end where `resume` saves, and return the checkpoint.
    """
    record, loop = Record(), case.loop
    in_turns = case.subject in ASYNCHRONOUS and not case.options.get("barrier")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Model(awkward=loop == "awkward")
        if alone(case):
            model.requires_grad_(False).middle.weight.requires_grad_(True)
        optimizer = make_optimizer(case.kind, model)
        dear.DistributedOptimizer(optimizer, model, algorithm=case.subject, **case.options)
        if case.subject == "asyncddp":  # its first step, which sets up memory, is one of all ranks
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            _one_step(case, model, optimizer, scaler, 0)
            optimizer.synchronize()
            barrier()  # or the first turn would begin in the first step of a rank that is late
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        return model, optimizer

    model, optimizer = make()
    for step in range(SAVED_AFTER if checkpoint else 0, STEPS):
        if loop == "resume" and step == SAVED_AFTER:
            if checkpoint is None:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                checkpoint = as_file(state)
                optimizer.close()
                if only_save:
                    return {"checkpoint": checkpoint}
                model, optimizer = make()
            saved = torch.load(io.BytesIO(checkpoint), weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for turn in range(dear.size()) if in_turns else [dear.rank()]:
            if turn == dear.rank():
                _one_step(case, model, optimizer, scaler, step)
            if in_turns:
                optimizer.synchronize()
                barrier()
        if loop != "plain":  # to read brings forward what an algorithm has put off
            record.read(model.state_dict())
    record.read(model.state_dict())
    optimizer.close()
    record.read(model.state_dict())
    return record.result()


# --- the interface whose checkpoints are its own --------------------------------------------------


def interface_cases() -> list[Case]:
    def case(subject: str, world: int, loop: str, **options: Any) -> Case:
        return Case(subject, options, world, loop, "")

    return [
        case("decentralized-ddp", 1, "plain", fn="adam", topology="complete"),
        case("decentralized-ddp", 2, "accumulate", fn="adamw", topology="ring"),
        case("decentralized-ddp", 3, "awkward", fn="accum_adam", topology="complete"),
        case("decentralized-ddp", 4, "resume", fn="accum_adamw", topology="one-peer-exp"),
        case("decentralized-ddp", 2, "resume", fn="adam", topology="complete"),
        case("decentralized-ddp", 4, "plain", fn="adamw", grad_clip_norm=0.1, topology="ring"),
        case("decentralized-ddp", 2, "scaler", fn="adam", param_as_bucket_view=False),
        case("decentralized-ddp", 3, "average", fn="accum_adam", param_as_bucket_view=False),
        case("decentralized-ddp", 4, "average", fn="adam", topology="alternating-exp-ring"),
    ]


def decentralized_ddp(
    case: Case, checkpoint: bytes | None = None, only_save: bool = False
) -> dict[str, Any]:
    """Decent-DP's: backward passes train. Arguments are as for `algorithm`."""
    import dear.decentralized as decent

    options, record = dict(case.options), Record()
    make = partial(getattr(decent, f"optim_fn_{options.pop('fn')}"), lr=0.05)
    schedule = partial(decent.lr_scheduler_fn_cosine_with_warmup, t_max=8, t_warmup=2)

    def wrap() -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        model = decent.DecentralizedDataParallel(
            Model(awkward=case.loop == "awkward"),
            make,
            schedule,
            scaler=scaler if case.loop == "scaler" else None,
            bucket_size_in_mb=TINY,
            _local_world_size=2 if case.world == 4 else 1,
            **options,
        )
        return model, scaler

    model, scaler = wrap()
    for step in range(SAVED_AFTER if checkpoint else 0, STEPS):
        if case.loop == "resume" and step == SAVED_AFTER:
            if checkpoint is None:
                checkpoint = as_file(model.checkpoint())
                model.close()
                if only_save:
                    return {"checkpoint": checkpoint}
                model, scaler = wrap()
            model.load_checkpoint(torch.load(io.BytesIO(checkpoint), weights_only=True))
        if case.loop == "average" and step == SAVED_AFTER:
            model.set_adaptive_factor(0.5)
            model.global_avg()
            record.read(model.state_dict())
            model.revert_global_avg()
        if case.loop == "accumulate":
            model.set_accumulate_grad(True)
            loss_of(model, step, micro=1).backward()
            model.set_accumulate_grad(False)
        loss = loss_of(model, step)
        if case.loop == "scaler":
            if (dear.rank(), step) == (0, 2):
                loss = loss * float("inf")
            loss = scaler.scale(loss)
        loss.backward()
        record.read(model.state_dict())
    model.close()
    record.read(model.state_dict())
    return record.result()


BODIES = {"decentralized-ddp": decentralized_ddp}


# --- fixtures -------------------------------------------------------------------------------------


def all_cases() -> list[Case]:
    return interface_cases() + algorithm_cases()


def machine() -> dict[str, str]:
    """Facts that results depend on: with the same, bits are the same. MKL has a code for each maker
    of CPUs, and adam's roots come from it."""
    cpu = Path("/proc/cpuinfo").read_text()
    vendor = re.search(r"^vendor_id\s*: (.*)", cpu, re.MULTILINE)
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "torch": torch.__version__,
        "cpu": capability,
        "vendor": vendor[1] if vendor else platform.machine(),
    }


def unavailable(subject: str) -> str | None:
    """Returns why this installation cannot run the algorithm, or None."""
    return None if subject in BODIES else algorithm_class(subject).unavailable()


def compact(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry for all ranks where all have the same."""
    return results[:1] if all(result == results[0] for result in results) else results


def checkpoint_cases() -> list[Case]:
    """One of each algorithm, whose checkpoint is kept as a file."""
    resumed = [case for case in all_cases() if (case.loop, case.world) == ("resume", 2)]
    return list({case.subject: case for case in reversed(resumed)}.values())


def checkpoint_files(case: Case) -> list[Path]:
    """Returns the files of rank 0, or of every rank where they differ."""
    return sorted((FOLDER.parent / "checkpoints").glob(f"{case.subject}.rank*.pt"))


def write(folder: Path, only: str) -> None:
    """Trains every case and writes the fixtures."""
    folder.mkdir(exist_ok=True)
    by_subject: dict[str, dict[str, Any]] = {}
    kept = checkpoint_cases()
    with contextlib.ExitStack() as stack:
        pools: dict[int, RankPool] = {}
        for case in all_cases():
            if only not in ("", case.subject) or unavailable(case.subject):
                continue
            if case.world not in pools:
                pools[case.world] = RankPool(case.world, backend="comm_core")
                stack.callback(pools[case.world].close)
            result = compact(pools[case.world].run(history, case))
            by_subject.setdefault(case.subject, {})[case.name] = result
            if case in kept:
                saved = compact(pools[case.world].run(history, case, None, True))
                place = folder.parent / "checkpoints"
                place.mkdir(exist_ok=True)
                for rank, entry in enumerate(saved):
                    (place / f"{case.subject}.rank{rank}.pt").write_bytes(entry["checkpoint"])
    for subject, histories in by_subject.items():
        lines = ",\n".join(f"{json.dumps(n)}: {json.dumps(r)}" for n, r in histories.items())
        text = f'{{"machine": {json.dumps(machine())},\n"histories": {{\n{lines}\n}}}}\n'
        (folder / f"{subject}.json").write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", required=True)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="another place for them")
    parser.add_argument("--only", default="", help="one algorithm")
    given = parser.parse_args()
    write(given.folder, given.only)
