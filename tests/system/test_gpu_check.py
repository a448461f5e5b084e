"""The GPU check: its budget, plan and verdicts, and its refusal where there is no GPU."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.gpu_check import budget
from common.gpu_check import check as gpu_check
from common.gpu_check.budget import Budget, Ended, Step, run_command, run_steps
from common.gpu_check.check import EXPERIMENT, Place, plan
from common.gpu_check.verdicts import judge_horovod, judge_sweep, judge_tests
from common.harness import cli
from common.results.records import Failure, Record
from common.results.records.trust import Check
from dear.errors import UserError
from tests.system.processes import alive, finished, wait_for


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
        (
            _step("b", limit_s=20),
            {"took": {"b": 30}},
            "failed",
            "not finished after 20 s; until then: it",
        ),
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


ROOT = Path(__file__).parents[2]
SCRIPTS = [ROOT / "scripts" / f"{name}.sh" for name in ("gpu_check", "setup")]


def _place(tmp_path: Path, gpus: int = 1, device: str = "cuda") -> Place:
    there = {"python": sys.executable, "venv": ROOT / ".venv", "out": tmp_path}
    return Place(**there, gpus=gpus, device=device, env={})


def test_the_plan_goes_from_the_basis_over_algorithms_to_profiles(tmp_path):
    steps = plan(_place(tmp_path))
    names = [step.name for step in steps]
    assert names[:6] == [
        *("build the comm core", "2 ranks on CPUs, over comm_core"),
        *("2 ranks sharing the GPU, over comm_core", "CUDA tests", "build Horovod"),
        "resnet50, 1 rank over NCCL",
    ]
    assert all(name.startswith("profile ") for name in names[6:13])
    assert names[13:] == ["2 ranks sharing the GPU, over gloo", "bert_base, 1 rank over NCCL"]
    assert sum(step.expected_s for step in steps) < gpu_check.BUDGET_S
    files = [word for word in steps[3].command if word.startswith("tests/")]
    assert files == sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("tests/**/test_cuda*.py"))
    # Without a comm core only what stands on it is left out.
    results, _ = run_pretended(steps, missing={"c++": "no C++ compiler"})
    skipped = [result for result in results.values() if result.status == "skipped"]
    assert [result.name for result in skipped[:2]] == names[:2]
    assert skipped[0].reason == "missing: c++ (no C++ compiler)"


def test_with_several_gpus_every_one_gets_a_rank(tmp_path):
    steps = {step.name: step for step in plan(_place(tmp_path, gpus=4))}
    assert "world_sizes=[4]" in steps["resnet50, 4 ranks over NCCL"].command
    assert "world_sizes=[2]" in steps["2 ranks on a GPU each, over gloo"].command


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_sweeps_of_the_plan_are_experiments(tmp_path, device, capsys):
    sweeps = [step for step in plan(_place(tmp_path, device=device)) if EXPERIMENT in step.command]
    sizes = {"comm_core": 2, "gloo": 2, "nccl": 1}
    for step in sweeps:
        if "on CPUs" in step.name or (device == "cpu" and "NCCL" in step.name):
            continue
        program = step.command.index("benchmarks.py")
        assert cli.main([*step.command[program + 1 :], "--dry-run", "--json"]) == 0
        trials = [entry["trial"] for entry in json.loads(capsys.readouterr().out)]
        assert {trial["device"] for trial in trials} == {device}
        assert {"allreduce", "wfbp", "ddp", "dear"} <= {trial["algorithm"] for trial in trials}
        assert all(
            t["world_size"] == sizes[t["backend"]] for t in trials if t["algorithm"] != "none"
        )


@pytest.mark.parametrize(
    ("cases", "status", "reason"),
    [
        ("good good later", "ok", "2 passed, 1 skipped (no timm)"),
        ("good bad", "failed", "1 failed (bad), 1 passed"),
        ("later", "failed", "no test ran: 0 passed, 1 skipped (no timm)"),
        (None, "failed", "exit status 1: no module named pytest"),
    ],
)
def test_the_verdict_on_tests(tmp_path, cases, status, reason):
    contents = {
        "good": "",
        "bad": "<failure message='no'/>",
        "later": "<skipped message='no timm'/>",
    }
    report, log = tmp_path / "report.xml", tmp_path / "log"
    log.write_text("no module named pytest\n")
    if cases is not None:
        elements = (
            f"<testcase name='{case}'>{contents[case]}</testcase>" for case in cases.split()
        )
        report.write_text(f"<testsuites><testsuite>{''.join(elements)}</testsuite></testsuites>")
    code = int(cases is None or "bad" in cases)
    assert judge_tests(report, Ended(code=code, seconds=1, log=log)) == (status, reason)


def _record(
    algorithm: str, status: str = "ok", right: bool | None = True, model: str = "resnet50"
) -> str:
    check = Check(replicas_agree=True, matches_reference=right, finding=None if right else "why")
    record = Record(
        id=f"{algorithm}-{model}",
        hash=f"{algorithm}-{model}",
        trial={"label": algorithm, "model": model},
        status=status,
        error=None if status == "ok" else Failure(message="because"),
        started="now",
        duration_s=1.0,
        machine={},
        check=check if status == "ok" else None,
    )
    return json.dumps(record.to_json())


@pytest.mark.parametrize(
    ("other", "code", "status", "reason"),
    [
        (_record("dear"), 0, "ok", "2 right"),
        (_record("horovod", "unsupported"), 0, "ok", "1 right; unsupported: horovod: because"),
        (_record("dear", right=False), 0, "failed", "dear: wrong: why (1 right)"),
        (_record("mgs", right=None), 0, "ok", "1 right; unchecked: mgs: why"),
        (_record("dear", "failed"), 1, "failed", "dear: failed: because"),
        (_record("dear", "oom", model="bert"), 0, "ok", "1 right"),
        (None, 0, "failed", "0 right"),
    ],
    ids=lambda value: None if value is None or str(value).startswith("{") else value,
)
def test_the_verdict_on_a_sweep(tmp_path, other, code, status, reason):
    records = [] if other is None else [_record("ddp"), other]
    (tmp_path / "records.jsonl").write_text("".join(f"{line}\n" for line in records))
    ended = Ended(code=code, seconds=1, log=tmp_path / "log")
    verdict, why = judge_sweep(tmp_path, {"resnet50"}, ended)
    assert verdict == status and why.startswith(reason)


@pytest.mark.full
def test_a_sweep_with_an_algorithm_that_has_no_reference_passes_on_cpus(tmp_path):
    changes = {"algorithms": ["ddp", "mgs"], "backend": "gloo", "world_sizes": [2]}
    changes |= {"baseline": False, "models": [{"name": "mnist_cnn", "batch_size": 4}]}
    changes["measure"] = {"repeats": 1, "warmup_steps": 2, "check_steps": 2, "min_iter_s": 0.05}
    place = _place(tmp_path, device="cpu")
    step = gpu_check._sweep(place, "sweep", "mnist_cnn", changes, limit_s=280)
    ended = run_command(step, step.limit_s, tmp_path / "log")
    status, reason = step.judge(ended)
    assert status == "ok" and reason.startswith("1 right; unchecked: mgs: only replicas"), reason


def test_a_failed_build_of_horovod_is_no_failure_of_the_check(tmp_path):
    note, ended = tmp_path / "note", Ended(code=0, seconds=1, log=tmp_path / "log")
    assert judge_horovod(note, ended) == ("ok", "")
    note.write_text("cannot download its source\n")
    assert judge_horovod(note, ended) == ("skipped", "cannot download its source")


def test_a_stopped_pytest_still_writes_its_report(tmp_path):
    report, tests = tmp_path / "report.xml", tmp_path / "test_it.py"
    tests.write_text(
        "import time\ndef test_good(): pass\n"
        f"def test_long():\n    open({str(tmp_path / 'begun')!r}, 'w'); time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    step = Step(name="x", command=[*command, f"--junitxml={report}"], limit_s=30)
    ended = run_command(step, 8, tmp_path / "log")
    assert ended.code is None and (tmp_path / "begun").exists()
    assert judge_tests(report, ended)[1].startswith("1 passed")


FACTS = {"torch": "2.11.0+cu130", "cuda": "13.0", "nccl": "2.28.9", "gpus": ["NVIDIA H200"]}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"torch": "2.13.0+cpu", "cuda": None, "gpus": []}, "torch 2.13.0+cpu is built without"),
        ({"torch": "2.13.0", "cuda": "13.0", "gpus": []}, "torch 2.13.0 (CUDA 13.0) finds none"),
    ],
)
def test_no_gpu_is_refused(facts, words):
    with pytest.raises(UserError, match="gpu-check needs an NVIDIA GPU: ") as refusal:
        gpu_check.refuse_without_gpu(facts)
    assert words in str(refusal.value)
    gpu_check.refuse_without_gpu(FACTS)


def test_the_script_says_in_one_line_that_there_is_no_gpu(tmp_path):
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("there is an NVIDIA driver here")
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    done = finished([SCRIPTS[0], tmp_path / "venv"], env=environment)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: gpu-check needs an NVIDIA GPU: there is no NVIDIA driver here (libcuda.so.1)\n"
    )
    assert not (tmp_path / "venv").exists()
    assert not (tmp_path / "out").exists()


def test_the_check_needs_no_package():
    command = [sys.executable, "-S", "-c", "import common.gpu_check.check"]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == 0


def test_the_probe_names_what_is_missing_and_how_to_get_it(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    missing = gpu_check.missing(
        "# comment\ntorch==2.13.0\nnot-a-package>=1.0\n\nnumpy>=2.0  # why\n"
    )
    how = "pip install 'not-a-package>=1.0'"
    assert missing == {"not-a-package": how, "c++": "no C++ compiler"}


@pytest.fixture
def pretended(monkeypatch, tmp_path):
    """`pretended(commands)`: the check on a machine with a GPU, with these commands as its plan."""
    monkeypatch.setattr(gpu_check, "refuse_without_driver", lambda: None)
    monkeypatch.setattr(gpu_check, "ask", lambda python, env: {**FACTS, "missing": {"ruff": "?"}})
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / "ready").touch()

    def run(commands: dict[str, str], budget: float = 60.0) -> tuple[int, Path]:
        steps = [
            Step(name=name, command=["bash", "-c", text], expected_s=1, limit_s=30)
            for name, text in commands.items()
        ]
        monkeypatch.setattr(gpu_check, "plan", lambda place: steps)
        out = tmp_path / "out"
        code = gpu_check.main([str(venv), "--out", str(out), "--budget", str(budget)])
        return code, out

    return run


def test_the_summary_names_every_step_and_holds_the_tables_of_sweeps(pretended, tmp_path, capsys):
    folder = tmp_path / "out" / "sweeps" / "gpu"
    sweep = f"mkdir -p {folder}; echo '| a table |' > {folder}/table.md"
    code, out = pretended({"a|b": sweep, "bad": "echo no GPU memory; exit 1"})
    assert code == 1
    summary = json.loads((out / "summary.json").read_text())
    assert [(s["name"], s["status"], s["reason"]) for s in summary["steps"]] == [
        ("environment", "ok", ""),
        ("a|b", "ok", ""),
        ("bad", "failed", "exit status 1: no GPU memory"),
    ]
    assert (summary["gpus"], summary["missing"]) == (["NVIDIA H200"], {"ruff": "?"})
    page = (out / "summary.md").read_text()
    assert page.startswith("# GPU check: 1 x NVIDIA H200\n")
    assert re.search(r"\| bad \| failed \| \d+ \| exit status 1: no GPU memory \|", page)
    assert "| a/b | ok |" in page and "## gpu\n\n| a table |\n" in page
    assert "Not installed here: ruff (?)." in page
    assert "2 ok, 1 failed, 0 skipped" in capsys.readouterr().out
    # Nothing failed is exit status 0, even if time ran out.
    code, out = pretended({"good": "true"}, budget=0.9)
    assert code == 0 and "| good | skipped | 0 | no time: " in (out / "summary.md").read_text()


def test_a_second_check_replaces_the_first_and_strangers_are_left_alone(pretended, tmp_path):
    _, out = pretended({"good": "true"})
    (out / "sweeps" / "gpu").mkdir(parents=True)
    (out / "mine.txt").touch()
    assert pretended({"good": "true"})[0] == 0
    assert not (out / "sweeps").exists()
    assert (out / "mine.txt").exists()
    (out / "summary.json").unlink()
    assert pretended({"good": "true"})[0] == 2
    assert (out / "steps").exists()


def test_only_profiles_of_this_run_are_collected(tmp_path):
    profiles = tmp_path / "profiles"
    for device, age in (("old", 1000), ("h200", 0)):
        (profiles / device).mkdir(parents=True)
        path = profiles / device / f"{device}-bs8.json"
        path.write_text("{}")
        os.utime(path, (time.time() - age,) * 2)
    out = tmp_path / "out"
    out.mkdir()
    gpu_check.collect_profiles(profiles, out, time.time() - 500)
    assert [path.name for path in (out / "profiles").iterdir()] == ["h200-bs8.json"]
