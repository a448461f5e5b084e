"""The GPU check: its plan, its budget, its verdicts, and its refusal where there is no GPU."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.harness import cli, gpu_check
from common.harness.budget import Budget, Ended, Result, Step
from common.harness.gpu_check import EXPERIMENT, Place, judge_sweep, judge_tests, plan
from common.results.records import Check, Failure, Record
from dear.errors import UserError
from tests.unit.test_budget import run_pretended

ROOT = Path(__file__).parents[2]
SCRIPTS = [ROOT / "scripts" / f"{name}.sh" for name in ("gpu_check", "setup")]


# The plan -----------------------------------------------------------------------------------------


def _place(tmp_path: Path, gpus: int = 1, device: str = "cuda") -> Place:
    return Place(
        python=sys.executable,
        venv=ROOT / ".venv",
        out=tmp_path,
        gpus=gpus,
        device=device,
        env={},
    )


def test_the_plan_goes_from_tests_over_algorithms_to_profiles(tmp_path):
    steps = plan(_place(tmp_path))
    assert [step.name for step in steps] == [
        "build the comm core",
        "CUDA tests",
        "2 ranks sharing the GPU, over comm_core",
        "2 ranks sharing the GPU, over gloo",
        "resnet50, 1 rank over NCCL",
        "bert_base, 1 rank over NCCL",
        "profile resnet50-bs64",
        "profile bert_base-bs64",
        "profile bert-bs8",
        "profile vgg16-bs64",
        "profile densenet201-bs32",
        "profile inceptionv4-bs64",
        "profile bert-bs32",
    ]
    assert sum(step.expected_s for step in steps) < gpu_check.BUDGET_S * 0.7


def test_with_several_gpus_every_one_gets_a_rank(tmp_path):
    steps = {step.name: step for step in plan(_place(tmp_path, gpus=4))}
    assert "world_sizes=[4]" in steps["resnet50, 4 ranks over NCCL"].command
    assert "world_sizes=[2]" in steps["2 ranks on a GPU each, over gloo"].command


def test_without_a_comm_core_only_what_stands_on_it_is_left_out(tmp_path):
    steps = plan(_place(tmp_path))
    results, _ = run_pretended(steps, missing={"c++": "no C++ compiler"})
    skipped = [result.name for result in results.values() if result.status == "skipped"]
    assert skipped[:2] == ["build the comm core", "2 ranks sharing the GPU, over comm_core"]
    assert results["build the comm core"].reason == "missing: c++ (no C++ compiler)"


def test_the_test_files_of_the_plan_exist(tmp_path):
    command = plan(_place(tmp_path))[1].command
    files = [word for word in command if word.startswith("tests/")]
    assert files == sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("tests/**/test_cuda*.py"))
    assert len(files) >= 3


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_sweeps_of_the_plan_are_experiments(tmp_path, device, capsys):
    sweeps = [step for step in plan(_place(tmp_path, device=device)) if EXPERIMENT in step.command]
    sizes = {"comm_core": 2, "gloo": 2, "nccl": 1}
    for step in sweeps:
        if device == "cpu" and "NCCL" in step.name:
            continue
        program = step.command.index("benchmarks.py")
        assert cli.main([*step.command[program + 1 :], "--dry-run", "--json"]) == 0
        trials = [entry["trial"] for entry in json.loads(capsys.readouterr().out)]
        assert {trial["device"] for trial in trials} == {device}
        assert {"allreduce", "wfbp", "ddp", "dear"} <= {trial["algorithm"] for trial in trials}
        assert all(
            t["world_size"] == sizes[t["backend"]] for t in trials if t["algorithm"] != "none"
        )


# Verdicts -----------------------------------------------------------------------------------------


def _junit(path: Path, *cases: str) -> Path:
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


_PASSED = '<testcase name="good"/>'
_FAILED = '<testcase name="bad"><failure message="no"/></testcase>'
_SKIPPED = '<testcase name="later"><skipped message="no timm"/></testcase>'


@pytest.mark.parametrize(
    ("cases", "status", "reason"),
    [
        ([_PASSED, _PASSED, _SKIPPED], "ok", "2 passed, 1 skipped (no timm)"),
        ([_PASSED, _FAILED], "failed", "1 failed (bad), 1 passed"),
        ([_SKIPPED], "failed", "no test ran: 0 passed, 1 skipped (no timm)"),
    ],
)
def test_the_verdict_on_tests(tmp_path, cases, status, reason):
    code = 1 if _FAILED in cases else 0
    ended = Ended(code=code, seconds=1, log=tmp_path / "log")
    assert judge_tests(_junit(tmp_path / "report.xml", *cases), ended) == (status, reason)


def test_tests_that_wrote_no_report_have_failed(tmp_path):
    (tmp_path / "log").write_text("no module named pytest\n")
    ended = Ended(code=1, seconds=1, log=tmp_path / "log")
    assert judge_tests(tmp_path / "none.xml", ended)[1].endswith("no module named pytest")


def _record(algorithm: str, status: str = "ok", right: bool = True, model: str = "resnet50") -> str:
    check = Check(
        replicas_agree=True, matches_reference=right, reference_error=0.0 if right else 0.7
    )
    name = f"{algorithm}-{model}"
    record = Record(
        id=name,
        hash=name,
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
    ("records", "code", "status", "reason"),
    [
        ([_record("ddp"), _record("dear")], 0, "ok", "2 right"),
        (
            [_record("ddp"), _record("horovod", "unsupported")],
            0,
            "ok",
            "1 right; unsupported: horovod: because",
        ),
        ([_record("ddp"), _record("dear", right=False)], 0, "failed", "dear: off plain training"),
        ([_record("ddp"), _record("dear", "failed")], 1, "failed", "dear: failed: because"),
        ([_record("ddp"), _record("dear", "oom", model="bert")], 0, "ok", "1 right"),
        ([], 0, "failed", "0 right"),
    ],
)
def test_the_verdict_on_a_sweep(tmp_path, records, code, status, reason):
    (tmp_path / "records.jsonl").write_text("".join(f"{line}\n" for line in records))
    ended = Ended(code=code, seconds=1, log=tmp_path / "log")
    found, why = judge_sweep(tmp_path, {"resnet50"}, ended)
    assert found == status and why.startswith(reason)


# The whole check ----------------------------------------------------------------------------------

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
    done = subprocess.run(
        [SCRIPTS[0], tmp_path / "venv"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: gpu-check needs an NVIDIA GPU: there is no NVIDIA driver here (libcuda.so.1)\n"
    )
    assert not (tmp_path / "venv").exists()
    assert not (tmp_path / "out").exists()


def test_the_check_needs_no_package():
    command = [sys.executable, "-S", "-c", "import common.harness.gpu_check"]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == 0


def test_the_probe_names_what_is_missing_and_how_to_get_it(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    requirements = "# comment\ntorch==2.13.0\nnot-a-package>=1.0\n\nnumpy>=2.0  # why\n"
    assert gpu_check.missing(requirements) == {
        "not-a-package": "pip install 'not-a-package>=1.0'",
        "c++": "no C++ compiler",
    }


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


def test_the_summary_names_every_step(pretended, capsys):
    code, out = pretended({"good": "true", "bad": "echo no GPU memory; exit 1"})
    assert code == 1
    summary = json.loads((out / "summary.json").read_text())
    found = [(s["name"], s["status"], s["reason"]) for s in summary["steps"]]
    assert found == [
        ("environment", "ok", ""),
        ("good", "ok", ""),
        ("bad", "failed", "exit status 1: no GPU memory"),
    ]
    assert summary["gpus"] == ["NVIDIA H200"]
    assert summary["missing"] == {"ruff": "?"}
    page = (out / "summary.md").read_text()
    assert page.startswith("# GPU check: 1 x NVIDIA H200\n")
    assert re.search(r"\| bad \| failed \| \d+ \| exit status 1: no GPU memory \|", page)
    assert "Not installed here: ruff (?)." in page
    assert "2 ok, 1 failed, 0 skipped" in capsys.readouterr().out


def test_nothing_failed_is_exit_status_0_even_if_time_ran_out(pretended):
    code, out = pretended({"good": "true"}, budget=0.9)
    assert code == 0
    assert "| good | skipped | 0 | no time: " in (out / "summary.md").read_text()


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


def test_tables_of_the_sweeps_are_part_of_the_page(tmp_path):
    folder = tmp_path / "sweeps" / "gpu"
    folder.mkdir(parents=True)
    (folder / "table.md").write_text("| a table |\n")
    machine = {"python": "3.12", "cores": 16, "cpu": "Xeon", "commit": "abc"}
    results = [Result(name="a|b", status="ok")]
    gpu_check.write_summary(tmp_path, {**FACTS, "missing": {}}, machine, results, Budget(480))
    page = (tmp_path / "summary.md").read_text()
    assert "## gpu\n\n| a table |\n" in page
    assert "| a/b | ok |" in page


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


def test_shellcheck():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", *SCRIPTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
