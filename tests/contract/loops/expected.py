"""Loops that an algorithm refuses, and words of its message; all others are right."""

from __future__ import annotations

from tests.contract.loops import between, passes, states
from tests.contract.loops.runs import Loop, Subject

EARLY = "decentralized:update=backward"
"""Updates are made in the backward pass."""
LATER = "dear bytescheduler dadt"
"""Gradients are averages after `synchronize()`."""
TRACKING = "gradient-tracking exact-diffusion push-diging"
MIXING = f"{TRACKING} neighbor decentralized win-put pull-get push-sum asyncddp"
SENDING = "neighbor gradient-tracking"
"""Parameters are on their way between a forward pass and `step()`."""
ALL = ""

_TOO_LATE = {EARLY: "use the option update='step'"}
_ON_THE_WAY = {SENDING: "change them after step()"}
_SYNCHRONIZE = {LATER: "optimizer.synchronize()", **_TOO_LATE}
_NO_SCALER = {TRACKING: "without a scaler", **_TOO_LATE}
_FSDP_TWICE = {"fsdp": "cannot differentiate twice"}
_FSDP_PARTS = {"fsdp": "call model(...) itself"}

REFUSED: dict[Loop, dict[str, str]] = {
    states.unfrozen_later: {ALL: "close() and wrap again after unfreezing"},
    states.group_added: {ALL: "close() it, add the group, and wrap it again"},
    states.max_norm: {f"{SENDING} decentralized win-put pull-get asyncddp": "use max_norm=None"},
    states.assigned: {ALL: "assign=False"},
    states.lazy: {ALL: "run one forward pass before"},
    passes.graph_of_gradients: {
        f"allreduce wfbp {LATER} ddp mgwfbp mgs hierarchical horovod": "call backward() on the sum",
        "fsdp": "fsdp cannot differentiate twice",
        EARLY: "call backward() on the sum",
    },
    passes.penalty_before: _FSDP_TWICE,
    passes.lbfgs: {
        f"{LATER} fsdp {MIXING}": "use algorithm='allreduce'",
        "ddp:zero=True": "use zero=False",
    },
    passes.sam: _ON_THE_WAY,
    passes.sam_averaged: _ON_THE_WAY,
    passes.accumulated: {EARLY: "optimizer.no_sync()"},
    passes.penalty_after: {
        EARLY: "optimizer.no_sync()",
        "ddp": "call backward() once",
        **_FSDP_TWICE,
    },
    passes.two_passes_over_a_graph: _TOO_LATE,
    passes.another_method: _FSDP_PARTS,
    passes.forward_itself: _FSDP_PARTS,
    passes.in_parts: _FSDP_PARTS,
    between.failed_batch: {"ddp": "call backward() once"},
    passes.gan: {EARLY: "optimizer.no_sync()"},
    between.lookahead: _TOO_LATE,
    between.clipped: _TOO_LATE,
    between.clipped_by_torch: _TOO_LATE,
    between.clipped_by_value: _TOO_LATE,
    between.clipped_as_ever: _SYNCHRONIZE,
    between.changed_by_hand: _TOO_LATE,
    between.replaced_by_hand: _TOO_LATE,
    between.changed_unsynchronized: _SYNCHRONIZE,
    between.scaled: _NO_SCALER,
    between.scaled_and_clipped: {"dadt": "leave unscaling to scaler.step(optimizer)", **_NO_SCALER},
    between.scaled_as_ever: {**_SYNCHRONIZE, **_NO_SCALER},
}
"""Words by the labels of subjects; several labels are one text with spaces."""


_DDP = {"ddp": "DDP steps on own gradients"}
_IN_FLIGHT = {"dear bytescheduler exact-diffusion push-diging": "parameters in flight, by timing"}
_OVERLAPPED = {**_IN_FLIGHT, "decentralized": "parameters in flight, by timing"}
_FSDP = {"fsdp": "fsdp: torch's traceback, or a write that is lost"}
KNOWN: dict[Loop, dict[str, str]] = {
    passes.compiled: _IN_FLIGHT,
    between.ema: {**_IN_FLIGHT, **_FSDP},
    between.lookahead_around: _OVERLAPPED,
    between.clamped: _OVERLAPPED,
    between.data_assigned: {**_OVERLAPPED, **_FSDP},
    between.as_vector: {**_OVERLAPPED, **_FSDP},
    between.deep_copied: {**_IN_FLIGHT, **_FSDP},
    between.saved_whole: {**_IN_FLIGHT, **_FSDP},
    states.loaded_by_root: {"dear fsdp ddp:zero=True": "one rank loads"},
    states.max_norm: {"dear": "parameters in flight, by timing", **_FSDP},
    passes.another_method: _DDP,
    passes.forward_itself: _DDP,
    passes.in_parts: _DDP,
    passes.sub_module: _DDP,
    passes.compiled_later: _DDP,
    passes.two_passes_over_a_graph: _DDP,
    between.failed_batch: {EARLY: "a part is applied", **_FSDP},
    between.batch_left_out: {EARLY: "the backward pass has applied it"},
    states.used_by_turns: _FSDP,
    between.no_backward: {**_DDP, **_FSDP},
    states.normed_and_evaluated_by_root: {"ddp": "one rank alone, by timing", **_FSDP},
    states.parametrized_later: {**_DDP, **_FSDP},
    passes.sam: {EARLY: "parameters in flight, by timing", **_FSDP},
    passes.sam_averaged: {EARLY: "parameters in flight, by timing"},
    passes.penalty_of_gradients: _FSDP,
    states.evaluated_by_root: _FSDP,
    states.state_read_by_root: _FSDP,
    states.pruned_later: _FSDP,
}
"""Reasons why a loop is neither right nor refused yet."""
UNDEFINED: dict[Loop, str] = {
    states.frozen_later: TRACKING,
    states.used_by_turns: TRACKING,
}
"""Subjects whose reference does not say what becomes of parameters that have no gradient."""


def _of(table: dict[str, str], subject: Subject) -> str | None:
    """Returns the entry of the first labels that the subject has."""
    for labels, text in table.items():
        if labels == ALL or subject.labels & set(labels.split()):
            return text
    return None


def words_of(loop: Loop, subject: Subject) -> str | None:
    """Returns words of the message with which the subject refuses the loop; None: it is right."""
    return _of(REFUSED.get(loop, {}), subject)


def known(loop: Loop, subject: Subject) -> str | None:
    """Returns the reason for which the loop is known to fail, or None."""
    return _of(KNOWN.get(loop, {}), subject)
