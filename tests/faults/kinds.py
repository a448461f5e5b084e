"""Kinds of faults: how often each is drawn, under which launchers, and what must follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fate = Literal["dead", "silent", "disagrees", "unharmed", "endless", "gone", "swept"]
"""State of the rank that the fault hits, as the others see it.

dead: it has ended. silent: it answers no more, so that they hear of it when the time limit of the
operation is over. disagrees: it calls another collective. unharmed: the job must end well. endless:
nobody fails, and the time limit of the job is over. gone: nobody is left to report, since what
started the ranks has ended. swept: a whole sweep meets the fault, and is run again.
"""

_STARTED = (("local", "local"), ("torchrun", "local"), ("mpirun", "local"), ("ssh", "local"))
_EMULATED = (("local", "emulated"), ("ssh", "emulated"), ("mpirun", "emulated"))
# Ranks that nobody ends early: every survivor must report.
_BARE = (("bare", "local"),) * 6
_ANY = (*_BARE, *(_STARTED[:1] * 2), *_STARTED, *_EMULATED[:1], *_EMULATED)
_SWEPT = (("local", "local"),) * 4 + (("mpirun", "local"), ("local", "emulated"))
_PREDICTED = (("local", "predicted"),) * 2
_WAITING = ("collectives", "synchronous", "delayed", "decentralized")
_EVERY = (*_WAITING, "asynchronous")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Kind of faults."""

    what: str
    """Description for readers."""
    fate: Fate
    share: int
    """Relative frequency."""
    places: tuple[tuple[str, str], ...] = _ANY
    """Pairs of launcher and fabric."""
    families: tuple[str, ...] = _EVERY
    in_the_program: bool = False
    """True if the thread that trains must do it."""


KINDS = {
    "killed": Kind(what="kill -9 of a rank", fate="dead", share=8),
    "leaves": Kind(
        what="a rank ends with status 0 amid the job", fate="dead", share=2, families=_WAITING
    ),
    "raises": Kind(what="an exception at a random step", fate="dead", share=5, in_the_program=True),
    "out of memory": Kind(what="a rank cannot allocate", fate="dead", share=3, in_the_program=True),
    "stopped": Kind(what="SIGSTOP for ever", fate="silent", share=5),
    "stopped 30 s": Kind(what="SIGSTOP, SIGCONT after 30 s", fate="unharmed", share=2),
    "another shape": Kind(
        what="a collective with another shape", fate="disagrees", share=4, families=_WAITING
    ),
    "another dtype": Kind(
        what="a collective with another dtype", fate="disagrees", share=3, families=_WAITING
    ),
    "another operation": Kind(
        what="another collective than the others", fate="disagrees", share=3, families=_WAITING
    ),
    "another order": Kind(
        what="two collectives in another order", fate="disagrees", share=3, families=_WAITING
    ),
    "endless": Kind(what="a job that does not end", fate="endless", share=2),
    "cut link": Kind(what="a host's link is cut", fate="silent", share=5, places=_EMULATED),
    "half-open": Kind(
        what="a host's packets are lost, those to it are not",
        fate="silent",
        share=3,
        places=_EMULATED,
    ),
    "strangers": Kind(
        what="foreign connections that stay, silent or with half a greeting",
        fate="unharmed",
        share=3,
        places=(("bare", "local"), *_STARTED),
    ),
    "killed launcher": Kind(
        what="kill -9 of what started the ranks on a host",
        fate="gone",
        share=3,
        places=(*_STARTED[1:], *_EMULATED[1:]),
    ),
    "killed driver": Kind(
        what="kill -9 of the launcher's caller",
        fate="gone",
        share=3,
        places=(*_STARTED, *_EMULATED),
    ),
    "Ctrl-C twice": Kind(
        what="SIGINT to the caller, twice", fate="gone", share=3, places=(*_STARTED, *_EMULATED)
    ),
    "driver killed": Kind(
        what="kill -9 of benchmarks.py",
        fate="swept",
        share=2,
        places=(*_SWEPT, *_PREDICTED),
        families=_WAITING,
    ),
    "driver interrupted twice": Kind(
        what="Ctrl-C of benchmarks.py, twice",
        fate="swept",
        share=2,
        places=(*_SWEPT, *_PREDICTED),
        families=_WAITING,
    ),
    "rank of a sweep killed": Kind(
        what="kill -9 of a rank of a sweep", fate="swept", share=1, places=_SWEPT, families=_WAITING
    ),
    "full disk": Kind(
        what="the disk under logs/ is full",
        fate="swept",
        share=2,
        places=_SWEPT[:2],
        families=_WAITING,
    ),
    "two sweeps": Kind(
        what="the same sweep is started again",
        fate="swept",
        share=2,
        places=_SWEPT[:2],
        families=_WAITING,
    ),
}
