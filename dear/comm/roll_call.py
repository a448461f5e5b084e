"""The check that every rank of a job is there exactly once, before anything is sent.

Without it two processes with the same number hang, or train apart, and nobody says why.
"""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta

import torch.distributed as dist

from dear.comm.environment import RankFacts
from dear.errors import UserError

_VERDICT = "verdict"
_FAREWELL_S = 5.0


def call_roll(store: dist.Store, facts: RankFacts, timeout_s: float) -> None:
    """Waits until all ranks have answered once.

    Raises:
        UserError: as `meet` does.
    """
    times = store.add(f"rank{facts.rank}", 1)
    store.set(f"who{facts.rank}.{times}", f"{socket.gethostname()} process {os.getpid()}")
    if times > 1:
        store.set(_VERDICT, json.dumps(_twice(store, facts)))
    elif store.add("present", 1) == facts.world_size:
        store.set(_VERDICT, json.dumps(None))
    try:
        try:
            store.wait([_VERDICT], timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            store.set(_VERDICT, json.dumps(_missing(store, facts, timeout_s)))
        verdict = json.loads(store.get(_VERDICT))
        if verdict is not None:
            _let_the_others_read(store, facts)
    except dist.DistNetworkError:
        raise UserError(
            f"rank {facts.rank} of {facts.world_size} lost rank 0 while the ranks were joining; "
            "see what that one said"
        ) from None
    if verdict is not None:
        raise UserError(verdict)


def _twice(store: dist.Store, facts: RankFacts) -> str:
    times = store.add(f"rank{facts.rank}", 0)
    # `get` waits for those who have counted themselves and not yet signed.
    keys = [f"who{facts.rank}.{i}" for i in range(1, times + 1)]
    who = " and ".join(store.get(key).decode() for key in keys)
    return (
        f"rank {facts.rank} of {facts.world_size} was started more than once: on {who}; every "
        "process needs a RANK of its own"
    )


def _missing(store: dist.Store, facts: RankFacts, timeout_s: float) -> str:
    present = [(rank, _who(store, rank)) for rank in range(facts.world_size)]
    missing = ", ".join(str(rank) for rank, who in present if not who)
    here = "; ".join(f"{rank} on {who}" for rank, who in present[:64] if who)
    return (
        f"rank {missing} of {facts.world_size} did not come within {timeout_s:g} s (there are: "
        f"{here}); was each started, with the same MASTER_ADDR, MASTER_PORT and world size?"
    )


def _who(store: dist.Store, rank: int) -> str | None:
    """Host and process that has come as this rank, if one has."""
    key = f"who{rank}.1"
    return store.get(key).decode() if store.check([key]) else None


def _let_the_others_read(store: dist.Store, facts: RankFacts) -> None:
    # The store ends with rank 0, and with it what the others are to hear.
    heard = store.add("heard", 1)
    came = sum(store.add(f"rank{rank}", 0) for rank in range(facts.world_size))
    if heard == came:
        store.set("all heard", "")
    try:
        store.wait(["all heard"], timedelta(seconds=_FAREWELL_S))
    except dist.DistError:
        return  # the ones who have not heard are gone or late; nobody waits for them any longer
