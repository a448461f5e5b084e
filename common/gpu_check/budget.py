"""Runner of a list of commands (steps) within a fixed time; the most valuable come first."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from common.launch.ranks import Ranks

# Time after SIGINT in which a program may write its results; then it is killed.
GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Facts about a command that has ended."""

    code: int | None
    """Exit status (-N for signal N); None: stopped at its time limit."""
    seconds: float
    log: Path
    """File with what the command printed."""


Verdict = tuple[str, str]
"""Status of a step (ok, failed or skipped), and the reason."""


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
    """Time limit in seconds; a step that takes longer has failed."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that are added to the environment."""
    needs: tuple[str, ...] = ()
    """Required packages and compilers; without one of them, the step is skipped."""
    after: tuple[str, ...] = ()
    """Names of the steps that must have ended with `ok` before this step."""
    judge: Callable[[Ended], Verdict] = by_exit_status
    """Function that judges an ended command; if it was stopped, only the reason is used."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a step."""

    name: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    log: str | None = None
    """Path of the step's output; None if it was not started."""


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
    """Runs the steps in order, and yields the result of each.

    Args:
        missing: reason or remedy by name of each missing package, compiler or device.
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
    """Runs the step's command with its output in `log`, and kills all processes that it leaves."""
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
            # This kills the whole group, also after Ctrl-C.
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
    return Ended(code=code, seconds=time.monotonic() - began, log=log)
