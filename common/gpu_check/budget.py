"""Runs a list of commands, most valuable first, within a fixed time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from common.launch.ranks import Ranks

# Time after SIGINT in which a program may write what it has (pytest its report); then it is killed.
GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """End of a command."""

    code: int | None
    """Exit status, minus the signal's number for a signal; None: stopped at its time limit."""
    seconds: float
    log: Path
    """File with what the command printed."""


Verdict = tuple[str, str]
"""Meaning of a step's end: ok, failed or skipped, and the reason."""


def by_exit_status(ended: Ended) -> Verdict:
    """Returns `ok` if the command exited with 0; else its last printed line is the reason."""
    if ended.code == 0:
        return "ok", ""
    lines = (
        ended.log.read_text(errors="replace", encoding="utf-8").split("\n")
        if ended.log.exists()
        else []
    )
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    code = "" if ended.code is None else f"exit status {ended.code}: "
    return "failed", f"{code}{last[:300]}"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command of the list."""

    name: str
    command: Sequence[str]
    expected_s: float = 0.0
    """Expected duration in seconds; with less time left, the step does not begin."""
    limit_s: float
    """Longest it may take, in seconds; more is a failure."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""
    needs: tuple[str, ...] = ()
    """Required packages and compilers; without one of them, the step is skipped."""
    after: tuple[str, ...] = ()
    """Steps that must have ended well."""
    judge: Callable[[Ended], Verdict] = by_exit_status
    """Returns the meaning of an end; of a stopped command only the reason counts."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a step."""

    name: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    log: str | None = None
    """Path of what it printed; None if it was not begun."""


class Budget:
    """Seconds that may be spent in all, counted from construction."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._began = clock()

    @property
    def spent_s(self) -> float:
        return self._clock() - self._began

    @property
    def left_s(self) -> float:
        return self.seconds - self.spent_s


def run_steps(
    steps: Sequence[Step],
    budget: Budget,
    missing: Mapping[str, str],
    start: Callable[[Step, float], Ended],
) -> Iterator[Result]:
    """Runs the steps in order and yields what became of each.

    Args:
        missing: what is not there, and why or how to get it.
        start: runs the step's command for at most the given seconds.
    """
    not_ok: set[str] = set()
    for step in steps:
        status, reason, spent = "skipped", _obstacle(step, budget, missing, not_ok), {}
        if reason is None:
            left = budget.left_s
            ended = start(step, min(step.limit_s, left))
            spent = {"seconds": round(ended.seconds, 1), "log": str(ended.log)}
            if ended.code is not None:
                status, reason = step.judge(ended)
            elif step.limit_s <= left:
                status, reason = "failed", f"not finished after {step.limit_s:.0f} s"
            else:
                reason = f"no time: stopped after {ended.seconds:.0f} s, at the end of the budget"
            if ended.code is None:
                reason += f"; until then: {step.judge(ended)[1]}"
        if status != "ok":
            not_ok.add(step.name)
        yield Result(name=step.name, status=status, reason=reason, **spent)


def _obstacle(
    step: Step, budget: Budget, missing: Mapping[str, str], not_ok: set[str]
) -> str | None:
    lacking = [f"{name} ({missing[name]})" for name in step.needs if name in missing]
    if lacking:
        return f"missing: {', '.join(lacking)}"
    blocking = [name for name in step.after if name in not_ok]
    if blocking:
        return f"needs: {', '.join(blocking)}"
    if budget.left_s < step.expected_s:
        return (
            f"no time: {max(budget.left_s, 0):.0f} s of the {budget.seconds:.0f} s are left, it "
            f"takes about {step.expected_s:.0f} s"
        )
    return None


def run_command(step: Step, limit_s: float, log: Path) -> Ended:
    """Runs the step's command with its output in `log`; none of its processes stays behind."""
    began = time.monotonic()
    code: int | None = None
    with Ranks() as ranks:
        ranks.command(step.command, env=step.env, log=log)
        group = ranks.pid(0)
        try:
            if ranks.wait(limit_s):
                code = ranks.codes[0]
            else:
                os.killpg(group, signal.SIGINT)
                ranks.wait(GRACE_S)
        finally:
            # Also after Ctrl-C, and also what outlived the command itself.
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
    return Ended(code=code, seconds=time.monotonic() - began, log=log)
