"""Steps within a budget: what runs, what is skipped, what has failed, and that nothing stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.harness import budget
from common.harness.budget import Budget, Ended, Step, run_command, run_steps
from tests.system.processes import alive, wait_for


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _step(name: str, expected_s: float = 10, limit_s: float = 100, **kind: object) -> Step:
    return Step(name=name, command=["true"], expected_s=expected_s, limit_s=limit_s, **kind)


def run_pretended(steps, seconds=480.0, took=None, codes=None, missing=None):
    """Results of steps that take `took[name]` seconds (10) and exit with `codes[name]` (0)."""
    clock = Clock()
    limits = {}

    def start(step: Step, limit_s: float) -> Ended:
        limits[step.name] = limit_s
        wanted = (took or {}).get(step.name, 10)
        clock.now += min(wanted, limit_s)
        code = None if wanted > limit_s else (codes or {}).get(step.name, 0)
        return Ended(code=code, seconds=min(wanted, limit_s), log=Path("/nonexistent/log"))

    results = list(run_steps(steps, Budget(seconds, clock), missing or {}, start))
    return {result.name: result for result in results}, limits


def test_steps_run_in_order_and_each_gets_its_limit_or_what_is_left():
    results, limits = run_pretended([_step("a"), _step("b"), _step("c")], seconds=115)
    assert [(r.name, r.status) for r in results.values()] == [("a", "ok"), ("b", "ok"), ("c", "ok")]
    assert limits == {"a": 100, "b": 100, "c": 95}


@pytest.mark.parametrize(
    ("step", "given", "status", "reason"),
    [
        (_step("b", expected_s=50), {"seconds": 40}, "skipped", "no time: 30 s of the 40 s are"),
        (_step("b", limit_s=20), {"took": {"b": 30}}, "failed", "not finished after 20 s"),
        (
            _step("b"),
            {"seconds": 40, "took": {"b": 60}},
            "skipped",
            "no time: stopped after 30 s, at the end of the budget",
        ),
        (
            _step("b", needs=("timm", "numpy")),
            {"missing": {"timm": "pip install 'timm>=1.0'"}},
            "skipped",
            "missing: timm (pip install 'timm>=1.0')",
        ),
        (_step("b", after=("a",)), {"codes": {"a": 2}}, "skipped", "needs: a"),
        (_step("b", judge=lambda ended: ("failed", "wrong")), {}, "failed", "wrong"),
    ],
)
def test_a_step_that_does_not_end_well_says_why_and_what_is_smaller_still_runs(
    step, given, status, reason
):
    results, _ = run_pretended([_step("a"), step, _step("c", expected_s=5)], **given)
    assert results["b"].status == status and results["b"].reason.startswith(reason)
    assert results["c"].status == ("skipped" if "took" in given and "seconds" in given else "ok")


def _shell(text: str, **kind: object) -> Step:
    return Step(name="x", command=["bash", "-c", text], expected_s=0, limit_s=60, **kind)


def test_a_failed_commands_last_line_is_the_reason(tmp_path):
    step = _shell('echo one; echo "two $WORD" >&2; echo; exit 3', env={"WORD": "words"})
    ended = run_command(step, 60, tmp_path / "log")
    assert ended.code == 3
    assert step.judge(ended) == ("failed", "exit status 3: two words")


def test_nothing_of_a_command_over_its_time_stays_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "GRACE_S", 0.1)
    # The child ignores SIGTERM; the inner process must be gone, too.
    text = f"trap '' TERM; (trap '' TERM; echo $BASHPID > {tmp_path}/pid; exec sleep 600) & wait"
    assert run_command(_shell(text), 2, tmp_path / "log").code is None
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not alive(pid))
