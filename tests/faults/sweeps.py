"""Runs a whole sweep that a fault meets, runs it again, and says what was lost or done twice."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.results import store
from common.results.validity import passing_flag
from tests.faults.drawing import COLLECTIVES, Fault
from tests.system.processes import ROOT, finished
from tests.system.sweeps import Driver

LIMIT_S = 150.0
DISK = "8m"
LATE_S = 20.0
"""Longest time in which a driver ends; until then its ranks hold its output, too."""

_SWEEP = """
name: tiny
algorithms: {algorithms}
models: [{{name: mnist_cnn, batch_size: 2}}]
{where}
baseline: false
collective_timeout_s: 20
learn: {{budget_s: 0.3, eval_every_s: 0.3}}
measure: {{repeats: {repeats}, warmup_steps: 1}}
timeout_s: 60
"""
_PREDICTED = """
name: tiny
algorithms: [{program}]
models: [{{name: resnet50@rtx2080ti-modelled, batch_size: 64}}]
cluster: {{kind: predicted, hosts: {world}, network: 10gbe}}
"""


@dataclass
class Swept:
    """End of a sweep.

    Attributes:
        misses: sentences, one for each bar that was missed.
        after_s: seconds from the fault to the end of the driver that met it.
    """

    misses: list[str] = field(default_factory=list)
    after_s: float = 0.0


def run(fault: Fault, folder: Path) -> Swept:
    """Runs a sweep, or a prediction, that meets the fault; `folder` is empty."""
    folder.mkdir(parents=True)
    fault.save(folder)
    if fault.fabric == "predicted":
        return _predicted(fault, folder)
    driver = Driver(folder, _text(fault))
    driver.logs.mkdir()
    with _disk(fault, driver.logs):
        return _swept(fault, driver)


def _text(fault: Fault) -> str:
    program = "dear" if fault.program == COLLECTIVES else fault.program
    where = f"world_sizes: [2]\nlauncher: {fault.launcher}"
    if fault.fabric == "emulated":
        where = f"cluster: {{hosts: 2, network: 1gbit}}\nlauncher: {fault.launcher}"
    drawn = f"{{name: {program}, label: drawn}}"
    trials, repeats = _shape(fault)
    algorithms = f"[{', '.join([drawn, 'wfbp'][:trials])}]"
    return _SWEEP.format(algorithms=algorithms, where=where, repeats=repeats)


def _shape(fault: Fault) -> tuple[int, int]:
    """Trials and repeats: two launches, of one trial or of two."""
    return (1, 2) if fault.index % 2 else (2, 1)


def _swept(fault: Fault, driver: Driver) -> Swept:
    swept = Swept()
    process = _start(driver)
    try:
        _await(fault, driver, process)
        before = _lines(driver)
        began = time.monotonic()
        expected = _FAULTS[fault.kind](fault, driver, process)
        output, errors = process.communicate(timeout=LIMIT_S)
        swept.after_s = time.monotonic() - began
    finally:
        process.kill()
        process.wait()
    if process.returncode not in expected:
        swept.misses.append(f"ended with status {process.returncode}: {_last(output, errors)}")
    if "Traceback" in errors:
        swept.misses.append(f"a traceback: {_last('', errors)}")
    ends_itself = fault.kind in ("driver killed", "driver interrupted twice")
    if ends_itself and swept.after_s > LATE_S:
        swept.misses.append(f"the driver ended {swept.after_s:.0f} s after the fault")
    swept.misses += _lost(before, driver)
    (driver.logs / "ballast").unlink(missing_ok=True)
    swept.misses += _again(fault, driver)
    return swept


def _start(driver: Driver) -> subprocess.Popen[str]:
    return driver.start(interrupts=signal.SIG_DFL)


def _await(fault: Fault, driver: Driver, process: subprocess.Popen[str]) -> None:
    """Returns some time after a drawn number of launches and records have begun or ended."""
    until = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < until:
        begun = len(list(driver.sweep.glob("*/phase-*-rank0"))) + len(_lines(driver))
        if begun >= fault.step % 4:
            break
        time.sleep(0.02)
    time.sleep(fault.delay_ms / 60)


def _lines(driver: Driver) -> list[str]:
    """Finished records."""
    path = driver.sweep / "records.jsonl"
    text = path.read_text() if path.exists() else ""
    return text.split("\n")[:-1]


def _lost(before: list[str], driver: Driver) -> Iterator[str]:
    now = _lines(driver)
    if now[: len(before)] != before:
        yield f"of {len(before)} finished records some are lost"
    for line in now:
        try:
            json.loads(line)
        except ValueError:
            yield f"a torn record: {line[:60]}...{line[-60:]}"


def _again(fault: Fault, driver: Driver) -> Iterator[str]:
    """The next run must do what is missing, no more and no less."""
    before, kept = _lines(driver), _kept(fault, driver)
    done = _run_again(driver)
    if done.returncode != 0:
        yield f"the next run ended with status {done.returncode}: {_last(done.stdout, done.stderr)}"
        return
    yield from _lost(before, driver)
    repeated = [path for path, stamp in kept.items() if _stamp(driver, path) != stamp]
    if repeated:
        yield f"the next run repeated what was finished: {', '.join(repeated)}"
    records = store.latest(store.load(driver.sweep / "records.jsonl"))
    bad = [f"{record.label} {record.status}" for record in records.values() if not record.ok]
    trials, _ = _shape(fault)
    if bad or len(records) != trials:
        yield f"after the next run {len(records)} of {trials} trials have records; not ok: {bad}"
    known = {run.run for run in store.runs(driver.sweep)}
    if unknown := {record.run for record in records.values()} - known:
        yield f"runs.jsonl does not have the runs {', '.join(unknown)} of its records"
    if stray := [path.name for path in driver.sweep.rglob("*.partial")]:
        yield f"left in the logs: {', '.join(stray)}"


def _run_again(driver: Driver) -> subprocess.CompletedProcess[str]:
    return finished([sys.executable, *driver.command()], timeout=LIMIT_S)


def _kept(fault: Fault, driver: Driver) -> dict[str, int]:
    """Results of repeats that the next run need not make again, with their times."""
    kept = set()
    path = driver.sweep / "records.jsonl"
    newest = store.latest(store.load(path)) if path.exists() else {}
    names = {}
    for trial in driver.sweep.glob("*/trial.json"):
        names[trial.parent.name.rpartition("-")[2]] = trial.parent.name
    for record in newest.values():
        if record.ok and passing_flag(record) is None:
            kept |= {f"{names[record.hash[:8]]}/repeat-{k}.json" for k in range(_shape(fault)[1])}
    for standing in driver.sweep.glob("underway-*.json"):
        for trial, values in json.loads(standing.read_text())["standing"].items():
            count = len(values["results"])
            kept |= {f"{names[trial[:8]]}/repeat-{k}.json" for k in range(count)}
    return {name: _stamp(driver, name) for name in kept}


def _stamp(driver: Driver, name: str) -> int:
    path = driver.sweep / name
    return path.stat().st_mtime_ns if path.exists() else 0


def _last(output: str, errors: str) -> str:
    return " | ".join((output + errors).strip().splitlines()[-3:])[-500:]


def _kill(fault: Fault, driver: Driver, process: subprocess.Popen[str]) -> tuple[int, ...]:
    process.kill()
    return (-signal.SIGKILL, 0)


def _interrupt(fault: Fault, driver: Driver, process: subprocess.Popen[str]) -> tuple[int, ...]:
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(fault.delay_ms / 100)
    return (130, 0, -signal.SIGINT)


def _kill_rank(fault: Fault, driver: Driver, process: subprocess.Popen[str]) -> tuple[int, ...]:
    phases = sorted(driver.sweep.glob(f"*/phase-*-rank{fault.victim % 2}"), key=_modified)
    if phases and process.poll() is None:
        pid = int(phases[-1].read_text().split()[0])
        with contextlib.suppress(ProcessLookupError):
            command = Path(f"/proc/{pid}/cmdline")
            if command.exists() and b"python" in command.read_bytes():
                os.kill(pid, signal.SIGKILL)
    return (0, 1)


def _modified(path: Path) -> int:
    return path.stat().st_mtime_ns


def _fill(fault: Fault, driver: Driver, process: subprocess.Popen[str]) -> tuple[int, ...]:
    with contextlib.suppress(OSError), (driver.logs / "ballast").open("wb", 0) as ballast:
        while True:
            ballast.write(bytes(4096))
    return (2, 1, 0)


def _second(fault: Fault, driver: Driver, process: subprocess.Popen[str]) -> tuple[int, ...]:
    """Another one at once: of two that run, the one that comes second is refused in a line."""
    other = _start(driver)
    _, errors = other.communicate(timeout=LIMIT_S)
    refused = other.returncode == 2 and "in use by another run" in errors
    if refused:
        return (0,)
    return (0, 2) if other.returncode == 0 else ()


_FAULTS: dict[str, Callable[[Fault, Driver, subprocess.Popen[str]], tuple[int, ...]]] = {
    "driver killed": _kill,
    "driver interrupted twice": _interrupt,
    "rank of a sweep killed": _kill_rank,
    "full disk": _fill,
    "two sweeps": _second,
}
"""Acts by kind; each returns the statuses with which the driver may end."""


@contextlib.contextmanager
def _disk(fault: Fault, logs: Path) -> Iterator[None]:
    """A small disk under the logs; room is made there before the next run."""
    if fault.kind != "full disk":
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "faults", logs], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", logs], check=True)


def _predicted(fault: Fault, folder: Path) -> Swept:
    """A prediction that is killed or interrupted; later ones say the same as each other."""
    program = "dear" if fault.program == COLLECTIVES else fault.program
    path = folder / "predicted.yaml"
    path.write_text(_PREDICTED.format(program=program, world=2**fault.world))
    command = [sys.executable, "benchmarks.py", "predict", str(path), "--json"]
    swept = Swept()
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    time.sleep(fault.delay_ms / 10)
    began = time.monotonic()
    kill = fault.kind == "driver killed"
    expected = _kill(fault, None, process) if kill else _interrupt(fault, None, process)
    _, errors = process.communicate(timeout=LIMIT_S)
    swept.after_s = time.monotonic() - began
    if process.returncode not in expected or b"Traceback" in errors:
        words = _last("", errors.decode())
        swept.misses.append(f"ended with status {process.returncode}: {words}")
    first, second = (finished(command, timeout=LIMIT_S) for _ in range(2))
    if first.returncode or first.stdout != second.stdout:
        swept.misses.append(f"the next predictions differ or fail: {_last('', first.stderr)}")
    return swept
