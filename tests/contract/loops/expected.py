"""Loops that an algorithm refuses, and words of its message; all others are right."""

from __future__ import annotations

from tests.contract.loops import between, passes, states
from tests.contract.loops.runs import Loop, Subject

EARLY = "decentralized:update=backward"
"""Updates are made in the backward pass."""
AUTO_LATER = "auto:candidates=('dear',) auto:candidates=('bytescheduler',)"
LATER = f"dear bytescheduler dadt {AUTO_LATER}"
"""Gradients are averages after `synchronize()`."""
AVERAGING = "allreduce wfbp mgwfbp mgs hierarchical horovod"
"""Gradients are averages after `backward()`."""
TRACKING = "gradient-tracking exact-diffusion push-diging"
TOGETHER = f"{TRACKING} neighbor decentralized win-put pull-get push-sum"
MIXING = f"{TOGETHER} asyncddp"
SENDING = "neighbor:combine=awc gradient-tracking"
"""Parameters are on their way between a forward pass and `step()`."""
ALL = ""

_TOO_LATE = {EARLY: "use the option update='step'"}
_SENT = {"decentralized": "use an algorithm whose averages end"}
_ON_THE_WAY = {SENDING: "between step() and the next training forward", **_SENT}
_OWN = {"ddp": "DDP averages only in the first backward pass after a call of model(...)"}
_TAKEN = {"fsdp": "close() the optimizer first"}
_WHOLE = {"fsdp": "copy or save its state_dict()"}
_SYNCHRONIZE = {LATER: "optimizer.synchronize()", **_TOO_LATE}
_NO_SCALER = {TRACKING: "without a scaler", **_TOO_LATE}
_FSDP_TWICE = {"fsdp": "cannot differentiate twice"}
_FSDP_PARTS = {"fsdp": "call model(...) itself"}
_FSDP_WHOLE = {"fsdp": "call optimizer.synchronize() before"}
_FSDP_GRAD = {"fsdp": "has no gradients of sharded parameters"}
_FSDP_ALONE = {"fsdp": "each rank holds a part"}
_ZERO_GROUPS = {"ddp:zero=True": "change its groups, and wrap it again"}

REFUSED: dict[Loop, dict[str, str]] = {
    states.unfrozen_later: {ALL: "close() the optimizer and wrap it again"},
    states.group_added: {ALL: "close() it, add the group, and wrap it again"},
    states.max_norm: {
        f"{SENDING} decentralized win-put pull-get asyncddp": "use max_norm=None",
        "fsdp": "use another algorithm",
    },
    states.assigned: {ALL: "assign=False"},
    states.lazy: {ALL: "run one forward pass before"},
    passes.graph_of_gradients: {
        f"{AVERAGING} {LATER} ddp": "call backward() on the sum",
        "auto": "call backward() on the sum",
        "fsdp": "fsdp cannot differentiate twice",
        EARLY: "call backward() on the sum",
    },
    passes.penalty_before: _FSDP_TWICE,
    passes.lbfgs: {
        f"{LATER} fsdp {MIXING}": "use algorithm='allreduce'",
        "ddp:zero=True": "use zero=False",
    },
    passes.sam: {**_ON_THE_WAY, **_FSDP_WHOLE},
    passes.penalty_of_gradients: {"fsdp:stage=2": "cannot differentiate twice", **_FSDP_GRAD},
    passes.sam_averaged: {**_TOO_LATE, **_ON_THE_WAY},
    passes.accumulated: {EARLY: "optimizer.no_sync()"},
    passes.penalty_after: {
        EARLY: "optimizer.no_sync()",
        "ddp": "call backward() once",
        **_FSDP_TWICE,
    },
    passes.two_passes_over_a_graph: {**_TOO_LATE, **_OWN},
    passes.another_method: {**_FSDP_PARTS, **_OWN},
    passes.forward_itself: {**_FSDP_PARTS, **_OWN},
    passes.in_parts: {**_FSDP_PARTS, **_OWN},
    between.failed_batch: {
        "ddp": "call backward() once",
        "fsdp": "the last backward pass ended with an error",
        **_TOO_LATE,
    },
    between.failed_batch_kept: {
        "ddp fsdp": "the last backward pass ended with an error",
        **_TOO_LATE,
    },
    between.batch_left_out: _TOO_LATE,
    passes.gan: {EARLY: "optimizer.no_sync()"},
    between.lookahead: {
        **_TOO_LATE,
        "ddp:zero=True": "use zero=False",
        "dear:update=sharded": "use update='replicated'",
    },
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
    passes.sub_module: {"fsdp:min_mb=1.0": "call model(...) itself", **_OWN},
    passes.compiled_later: _OWN,
    between.no_backward: {**_OWN, **_FSDP_GRAD},
    between.ema: _FSDP_WHOLE,
    between.lookahead_around: _SENT,
    between.clamped: _SENT,
    between.data_assigned: {**_SENT, **_FSDP_WHOLE},
    between.as_vector: {**_SENT, **_FSDP_WHOLE},
    between.deep_copied: _WHOLE,
    between.saved_whole: _WHOLE,
    states.pruned_later: _TAKEN,
    states.loaded_by_root: _FSDP_ALONE,
    states.loaded_by_root_and_wrapped: {**_FSDP_ALONE, "dadt": "flush() before the state is saved"},
    states.evaluated_by_root: _FSDP_ALONE,
    states.normed_and_evaluated_by_root: {"ddp": "broadcast_buffers=False", **_FSDP_ALONE},
    states.state_read_by_root: _FSDP_ALONE,
    states.used_by_turns: _FSDP_ALONE,
    passes.stepped_without_sync: _OWN,
    passes.hooked_later: {f"{AVERAGING} {LATER} auto fsdp {EARLY}": "register it before"},
    between.scaled_and_fused: _NO_SCALER,
    between.own_step: {ALL: "replace step() afterwards"},
    between.own_step_later: _SENT,
    states.moved_between_groups: _ZERO_GROUPS,
    states.taken_out_of_group: _ZERO_GROUPS,
    states.group_taken_out: _ZERO_GROUPS,
    states.state_of_layer_cleared: {
        "dear:update=sharded dear:update=auto auto:candidates=('dear',)": "load it by load_state",
    },
    states.in_double_and_back: {"ddp": "wrap again", **_SENT},
    states.channels_last: {
        "ddp fsdp": "wrap again",
        TOGETHER: "close() the optimizer first",
    },
    states.parametrized_later: {**_TAKEN, **_SENT, "ddp": "wrap again"},
}
"""Words by the labels of subjects; several labels are one text with spaces."""


UNDEFINED: dict[Loop, str] = {
    between.failed_batch_kept: "dadt",
    between.scaled_and_fused: "dadt",
    states.frozen_later: TRACKING,
    states.used_by_turns: TRACKING,
}
"""Subjects whose reference does not say what becomes of parameters that have no gradient, or of
gradients with an older scale."""


def _of(table: dict[str, str], subject: Subject) -> str | None:
    """Returns the entry of the first labels that the subject has."""
    for labels, text in table.items():
        if labels == ALL or subject.labels & set(labels.split()):
            return text
    return None


def words_of(loop: Loop, subject: Subject) -> str | None:
    """Returns words of the message with which the subject refuses the loop; None: it is right."""
    return _of(REFUSED.get(loop, {}), subject)
