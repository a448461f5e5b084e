"""Check of everything that needs a GPU, on a machine with a GPU: `make gpu-check`.

It is run by the Python whose torch will be used, and needs only the standard library. It creates an
environment, then runs tests, sweeps and profiles, the most valuable first, within a time limit.
Steps that cannot run or have no time are skipped; the summary has the reasons.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common.gpu_check.budget import Budget, Ended, Result, Step, run_command, run_steps
from common.gpu_check.verdicts import judge_horovod, judge_sweep, judge_tests
from common.machine import machine_card, version
from common.paths import CONFIGS, LOGS, ROOT
from dear.errors import UserError
from dear.training.algorithm import algorithm_class, algorithm_names

OK, STEP_FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
BUDGET_S = 720.0
TESTS_REPORT = "cuda-tests.xml"
EXPERIMENT = "configs/experiments/gpu.yaml"
PROFILES = (("resnet50", 64), ("bert_base", 64), ("bert", 8), ("vgg16", 64))
PROFILES += (("densenet201", 32), ("inceptionv4", 64), ("bert", 32))
_LIBRARIES = {"bert": ("transformers",), "bert_base": ("transformers",), "inceptionv4": ("timm",)}
_SWEEP = ("numpy", "scipy", "rich", "PyYAML", "torchvision")
# Short time limits of pip: a machine may have no network.
_PIP = {"PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "10", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
# Programs that a machine may have without the package of that name.
_PROGRAMS = ("cmake", "ninja")


def main(arguments: Sequence[str]) -> int:
    """Runs the check; the exit status is 1 if a step failed, 2 where there is no GPU."""
    options = _parse(arguments)
    if options.probe:
        print(json.dumps(probe()))
        return OK
    try:
        return _check(options.venv.absolute(), options.out.absolute(), options.budget)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"interrupted; what has ended is in {options.out}", file=sys.stderr)
        return INTERRUPTED


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", allow_abbrev=False)
    out = Path(os.environ.get("OUT") or LOGS / "gpu-check")
    parser.add_argument("venv", type=Path, nargs="?", default=Path(".venv"), help="made if missing")
    parser.add_argument("--out", type=Path, default=out, help="folder of results ($OUT)")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for everything")
    # What the check itself runs, by another Python.
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _check(venv: Path, out: Path, seconds: float) -> int:
    refuse_without_driver()
    budget = Budget(seconds)
    python = venv / "bin" / "python"
    # Programs such as cmake may lie beside the machine's own Python.
    folders = [str(venv / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    env = {"PATH": os.pathsep.join(folders), "PYTHONUNBUFFERED": "1"}
    refuse_without_gpu(ask(python if python.exists() else Path(sys.executable), env))
    _clear(out)

    def start(step: Step, limit_s: float) -> Ended:
        print(f"== {step.name}", flush=True)
        name = "".join(c if c.isalnum() else "-" for c in step.name)
        return run_command(step, limit_s, out / "steps" / f"{name}.txt")

    environment = Step(
        name="environment",
        command=[str(ROOT / "scripts" / "setup.sh"), str(venv), "--what-can-be"],
        limit_s=seconds,
        env={**env, **_PIP, "PYTHON": sys.executable},
    )
    results: list[Result] = []

    def note(result: Result) -> None:
        results.append(result)
        reason = f": {result.reason}" if result.reason else ""
        print(f"   {result.name}: {result.status}, {result.seconds:.0f} s{reason}", flush=True)

    note(next(run_steps([environment], budget, {}, start)))
    facts = ask(python if python.exists() else Path(sys.executable), env)
    machine = machine_card()
    write_summary(out, facts, machine, results, budget)
    if results[-1].status == "ok":
        refuse_without_gpu(facts)
        place = Place(python=str(python), venv=venv, out=out, gpus=len(facts["gpus"]), env=env)
        for result in run_steps(plan(place), budget, facts["missing"], start):
            note(result)
            write_summary(out, facts, machine, results, budget)
        began = (out / "steps" / "environment.txt").stat().st_mtime
        collect_profiles(CONFIGS / "profiles", out, began)
    number = Counter(result.status for result in results)
    counts = ", ".join(f"{number[status]} {status}" for status in ("ok", "failed", "skipped"))
    print(f"== {counts} in {budget.spent_s:.0f} s: {out / 'summary.md'}")
    return STEP_FAILED if number["failed"] else OK


def _clear(out: Path) -> None:
    """Removes what an earlier check left in `out`, and nothing else."""
    out.mkdir(parents=True, exist_ok=True)
    old = [out / name for name in ("steps", "sweeps", "profiles") if (out / name).exists()]
    if old and not (out / "summary.json").exists():
        raise UserError(f"--out {out}: {old[0]} is not from an earlier check; name another folder")
    for folder in old:
        shutil.rmtree(folder)
    (out / TESTS_REPORT).unlink(missing_ok=True)
    (out / "steps").mkdir()


def collect_profiles(profiles: Path, out: Path, since: float) -> None:
    """Copies the layer profiles that were written after `since` (seconds of the file system's
    clock): the folder may hold older profiles, also of other machines."""
    for path in sorted(profiles.glob("*/*.json")):
        if path.stat().st_mtime >= since:
            (out / "profiles").mkdir(exist_ok=True)
            shutil.copy(path, out / "profiles")


# What there is -----------------------------------------------------------------------------------


def ask(python: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """Returns the result of `probe` with the Python at `python`."""
    command = [str(python), "-m", "common.gpu_check.check", "--probe"]
    how = {"cwd": ROOT, "env": {**os.environ, **env}, "capture_output": True, "text": True}
    done = subprocess.run(command, **how)
    if done.returncode != 0:
        last = (done.stderr.strip().split("\n") or [""])[-1]
        raise UserError(f"gpu-check: {python} cannot look for GPUs: {last}")
    return json.loads(done.stdout.strip().split("\n")[-1])


def refuse_without_driver() -> None:
    """Raises `UserError` if there is no NVIDIA driver. This is faster than an import of torch."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise UserError(
            "gpu-check needs an NVIDIA GPU: there is no NVIDIA driver here (libcuda.so.1)"
        ) from None


def refuse_without_gpu(facts: Mapping[str, Any]) -> None:
    """Raises `UserError` if torch is installed but cannot use a GPU."""
    if facts["torch"] is None or facts["gpus"]:
        return
    why = f"torch {facts['torch']} (CUDA {facts['cuda']}) finds none here"
    if facts["cuda"] is None:
        why = (
            f"torch {facts['torch']} is built without CUDA; remove .venv or name a Python whose "
            "torch has it (make PYTHON=/path/to/python3 gpu-check)"
        )
    raise UserError(f"gpu-check needs an NVIDIA GPU: {why}")


def probe() -> dict[str, Any]:
    """Returns this Python's torch and GPUs, and missing packages, as JSON values."""
    facts: dict[str, Any] = {"torch": None, "cuda": None, "nccl": None, "gpus": []}
    facts["missing"] = missing((ROOT / "requirements.txt").read_text(encoding="utf-8"))
    try:
        import torch
    except ImportError:
        return facts
    facts |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if torch.distributed.is_nccl_available():
            facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def missing(requirements: str) -> dict[str, str]:
    """Returns missing packages of `requirements`, and a missing compiler, each with a remedy."""
    lacking = {}
    for requirement in (line.partition("#")[0].strip() for line in requirements.splitlines()):
        name = re.split(r"[<>=!~ ]", requirement, maxsplit=1)[0]
        there = not name or version(name) or (name in _PROGRAMS and shutil.which(name))
        if not there:
            lacking[name] = f"pip install '{requirement}'"
    if not shutil.which(os.environ.get("CXX", "c++")):
        lacking["c++"] = "no C++ compiler"
    return lacking


# What is run --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Place:
    """Python, folders and GPUs of the check."""

    python: str
    venv: Path
    out: Path
    gpus: int
    device: str = "cuda"
    env: Mapping[str, str]


def plan(place: Place) -> list[Step]:
    """Returns the steps after the one that makes the environment."""
    alone = place.gpus == 1
    build = Step(
        name="build the comm core",
        command=[str(ROOT / "scripts" / "build.sh"), str(place.venv)],
        expected_s=65,
        limit_s=240,
        needs=("c++", "cmake", "ninja"),
        env=place.env,
    )
    # Without a network and a cached wheel, this step ends within seconds.
    horovod = Step(
        name="build Horovod",
        command=[str(ROOT / "scripts" / "horovod.sh"), str(place.venv)],
        expected_s=60,
        limit_s=240,
        needs=("c++",),
        env={**place.env, **_PIP},
        judge=partial(judge_horovod, place.venv / "horovod-build-failed.txt"),
    )
    few = {"repeats": 1, "warmup_steps": 2, "check_steps": 3, "min_iter_s": 0.2}
    shared = {"models": [{"name": "resnet18", "batch_size": 8}], "baseline": False, "measure": few}

    def pair(backend: str, after: tuple[str, ...]) -> Step:
        title = f"2 ranks {'sharing the GPU' if alone else 'on a GPU each'}, over {backend}"
        changes = {"name": f"gpu-2-ranks-{backend}", "backend": backend, "world_sizes": [2]}
        limits = {"expected_s": 50, "limit_s": 150, "after": after}
        return _sweep(place, title, "resnet18", changes | shared, **limits)

    def over_nccl(model: str, expected_s: float) -> Step:
        title = f"{model}, {place.gpus} rank{'' if alone else 's'} over NCCL"
        changes = {"world_sizes": [place.gpus]}
        return _sweep(place, title, model, changes, expected_s=expected_s, limit_s=2 * expected_s)

    profiles = [_profile(place, *profile) for profile in PROFILES]
    cpu = {"name": "gpu-check-cpu", "device": "cpu", "backend": "comm_core", "world_sizes": [2]}
    cpu |= {"models": [{"name": "mnist_cnn", "batch_size": 32}], "baseline": False, "measure": few}
    any_one = algorithms("cpu")[0]
    cpu |= {"algorithms": [any_one], "compare_to": any_one}
    limits = {"expected_s": 15, "limit_s": 60, "after": (build.name,)}
    # If this fails, too, the GPU has no part in it.
    on_cpu = _sweep(place, "2 ranks on CPUs, over comm_core", "mnist_cnn", cpu, **limits)
    return [
        *(build, on_cpu, pair("comm_core", (build.name,)), _tests(place), horovod),
        *(over_nccl("resnet50", 65), *profiles),
        *(pair("gloo", ()), over_nccl("bert_base", 80)),
    ]


def _tests(place: Place) -> Step:
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_cuda*.py"))
    report = f"--junitxml={place.out / TESTS_REPORT}"
    # Few workers, because their processes take turns on the GPU.
    pytest = [place.python, "-m", "pytest", *(["-n", "3"] if version("pytest-xdist") else [])]
    return Step(
        name="CUDA tests",
        command=[*pytest, "-q", "-rs", "-k", "not on_cpu", report, *files],
        expected_s=170,
        limit_s=300,
        needs=("pytest",),
        env=place.env,
        judge=partial(judge_tests, place.out / TESTS_REPORT),
    )


def _sweep(place: Place, title: str, model: str, changes: Mapping[str, Any], **limits: Any) -> Step:
    settings = {"device": place.device, **changes}
    command = [place.python, "benchmarks.py", "run", EXPERIMENT, "--rerun", "all", "--no-plot"]
    command += ["--quiet", "--logs", str(place.out / "sweeps"), "-k", f"model={model}"]
    for key, value in settings.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    folder = place.out / "sweeps" / settings.get("name", Path(EXPERIMENT).stem)
    return Step(
        name=title,
        command=command,
        needs=(*_SWEEP, *_LIBRARIES.get(model, ())),
        env=place.env,
        judge=partial(judge_sweep, folder, {model}),
        **limits,
    )


def _profile(place: Place, model: str, batch_size: int) -> Step:
    command = [place.python, "-m", "common.profiling.layers", "--model", model]
    return Step(
        name=f"profile {model}-bs{batch_size}",
        command=[*command, "--batch", str(batch_size), "--device", place.device],
        expected_s=19,
        limit_s=60,
        needs=("numpy", *_LIBRARIES.get(model, ("torchvision",))),
        env=place.env,
    )


def algorithms(device: str) -> list[str]:
    """Returns the names of all algorithms that can run on `device`."""
    return [n for n in algorithm_names() if device in algorithm_class(n).capabilities.devices]


# The summary --------------------------------------------------------------------------------------


def write_summary(
    out: Path,
    facts: Mapping[str, Any],
    machine: Mapping[str, Any],
    results: Sequence[Result],
    budget: Budget,
) -> None:
    """Writes `summary.json` and `summary.md`; called after every step, so that nothing is lost."""
    summary = {
        **{name: facts[name] for name in ("gpus", "torch", "cuda", "nccl", "missing")},
        "machine": machine,
        "budget_s": budget.seconds,
        "spent_s": round(budget.spent_s, 1),
        "steps": [dataclasses.asdict(result) for result in results],
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (out / "summary.md").write_text(
        _markdown(summary, sorted(out.glob("sweeps/*/table.md"))), encoding="utf-8"
    )


def _markdown(summary: Mapping[str, Any], tables: Sequence[Path]) -> str:
    machine = summary["machine"]
    gpus = ", ".join(f"{n} x {name}" for name, n in Counter(summary["gpus"]).items())
    lines = [
        f"# GPU check: {gpus}",
        "",
        f"torch {summary['torch']}, CUDA {summary['cuda']}, NCCL {summary['nccl']}, Python "
        f"{machine['python']}; {machine['cores']} cores ({machine['cpu']}); commit "
        f"{machine['commit']}; {summary['spent_s']:.0f} s of {summary['budget_s']:.0f} s used.",
        "",
        "| step | outcome | seconds | |",
        "|---|---|---:|---|",
    ]
    for step in summary["steps"]:
        cells = (step["name"], step["status"], f"{step['seconds']:.0f}", step["reason"])
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    if summary["missing"]:
        how = "; ".join(f"{name} ({how})" for name, how in summary["missing"].items())
        lines += ["", f"Not installed here: {how}."]
    for table in tables:
        lines += ["", f"## {table.parent.name}", "", table.read_text(encoding="utf-8").strip()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
