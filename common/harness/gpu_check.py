"""Tries everything that needs a GPU, on a machine that has one: `make gpu-check`.

Run by the Python whose torch is to be used; needs the standard library only. What it runs is in
`gpu_steps`, how it keeps to its time in `budget`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.harness import gpu_report
from common.harness.budget import Budget, Ended, Result, Step, run_command, run_steps
from common.harness.gpu_steps import Place, plan
from common.harness.machine import machine_card
from dear.errors import UserError

ROOT = Path(__file__).parents[2]
OK, STEP_FAILED, USER_ERROR, INTERRUPTED = 0, 1, 2, 130
BUDGET_S = 480.0


def main(arguments: Sequence[str]) -> int:
    """Runs the check; the exit status is 1 if a step failed, 2 where there is no GPU."""
    options = _parse(arguments)
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
    out = Path(os.environ.get("OUT") or ROOT / "logs" / "gpu-check")
    parser.add_argument("venv", type=Path, nargs="?", default=Path(".venv"), help="made if missing")
    parser.add_argument("--out", type=Path, default=out, help="folder of results ($OUT)")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for everything")
    return parser.parse_args(arguments)


def _check(venv: Path, out: Path, seconds: float) -> int:
    refuse_without_driver()
    budget = Budget(seconds)
    python = venv / "bin" / "python"
    env = _environment(venv)
    refuse_without_gpu(probe(python if python.exists() else Path(sys.executable), env))
    _clear(out)

    def start(step: Step, limit_s: float) -> Ended:
        print(f"== {step.name}", flush=True)
        return run_command(step, limit_s, out / "steps" / f"{_file_name(step.name)}.txt")

    made = Step(
        name="environment",
        command=[sys.executable, "-m", "common.harness.gpu_environment", str(venv)],
        expected_s=0,
        limit_s=seconds,
        env=env,
    )
    results = list(run_steps([made], budget, {}, start))
    _say(results[-1])
    facts = probe(python if python.exists() else Path(sys.executable), env)
    machine = machine_card()
    gpu_report.write(out, facts, machine, results, budget)
    if results[-1].status == "ok":
        refuse_without_gpu(facts)
        place = Place(python=str(python), venv=venv, out=out, gpus=len(facts["gpus"]), env=env)
        for result in run_steps(plan(place), budget, facts["missing"], start):
            results.append(result)
            _say(result)
            gpu_report.write(out, facts, machine, results, budget)
        began = (out / "steps" / "environment.txt").stat().st_mtime
        collect_profiles(ROOT / "configs" / "profiles", out, began)
    print(f"== {gpu_report.counts(results)} in {budget.spent_s:.0f} s: {out / 'summary.md'}")
    return STEP_FAILED if any(result.status == "failed" for result in results) else OK


def probe(python: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """What `gpu_probe` finds out with that Python."""
    command = [str(python), "-m", "common.harness.gpu_probe"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True
    )
    if done.returncode != 0:
        last = (done.stderr.strip().split("\n") or [""])[-1]
        raise UserError(f"gpu-check: {python} cannot look for GPUs: {last}")
    return json.loads(done.stdout.strip().split("\n")[-1])


def refuse_without_driver() -> None:
    """Raises `UserError` where no CUDA program can run; quick, unlike an import of torch."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise UserError(
            "gpu-check needs an NVIDIA GPU: there is no NVIDIA driver here (libcuda.so.1)"
        ) from None


def refuse_without_gpu(facts: Mapping[str, Any]) -> None:
    """Raises `UserError` if there is a torch and it can use no GPU."""
    if facts["torch"] is None or facts["gpus"]:
        return
    if facts["cuda"] is None:
        why = (
            f"torch {facts['torch']} is built without CUDA; remove .venv or name a Python whose "
            "torch has it (make PYTHON=/path/to/python3 gpu-check)"
        )
    else:
        why = f"torch {facts['torch']} (CUDA {facts['cuda']}) finds none here"
    raise UserError(f"gpu-check needs an NVIDIA GPU: {why}")


def _environment(venv: Path) -> dict[str, str]:
    # Programs such as cmake may lie beside the machine's own Python.
    folders = [str(venv / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return {"PATH": os.pathsep.join(folders), "PYTHONUNBUFFERED": "1"}


def _clear(out: Path) -> None:
    """Removes what an earlier check left in `out`, and nothing else."""
    out.mkdir(parents=True, exist_ok=True)
    old = [out / name for name in ("steps", "sweeps", "profiles") if (out / name).exists()]
    if old and not (out / "summary.json").exists():
        raise UserError(f"--out {out}: {old[0]} is not from an earlier check; name another folder")
    for folder in old:
        shutil.rmtree(folder)
    (out / "cuda-tests.xml").unlink(missing_ok=True)
    (out / "steps").mkdir()


def collect_profiles(profiles: Path, out: Path, since: float) -> None:
    """Copies the layer profiles that were written after `since` (seconds of the file system's
    clock): the folder may hold older ones, of other machines too."""
    for path in sorted(profiles.glob("*/*.json")):
        if path.stat().st_mtime >= since:
            (out / "profiles").mkdir(exist_ok=True)
            shutil.copy(path, out / "profiles")


def _say(result: Result) -> None:
    reason = f": {result.reason}" if result.reason else ""
    print(f"   {result.name}: {result.status}, {result.seconds:.0f} s{reason}", flush=True)


def _file_name(title: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in title)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
