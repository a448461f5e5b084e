"""Wrong programs in real sweeps of processes: each as an algorithm's file of its own."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

import pytest

from tests.contract.wrong_programs import FEW_TENSORS, PROGRAMS
from tests.system.processes import ROOT, finished
from tests.system.sweeps import Driver

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SPOILT = '''
"""Wrong."""
from dataclasses import dataclass

from dear.algorithms.synchronous.allreduce import AllReduce
from dear.training.algorithm import Capabilities


class Spoilt(AllReduce):
    @dataclass(frozen=True, kw_only=True)
    class Options(AllReduce.Options):
        program: str = ""

    capabilities = Capabilities(consistency="synchronous")

    def engine(self, replica):
        from tests.contract.wrong_programs import PROGRAMS, Wrong

        what, when = PROGRAMS[replica.options.program]
        made = type("Made", (Wrong,), {"name": what, "steps": staticmethod(when)})
        return made(replica)
'''

TENTH = '''
"""Averages every 10th step, or does not."""
from dataclasses import dataclass

from dear.options import Options as Plain
from dear.training.algorithm import Algorithm, Capabilities
from dear.training.engine import Engine


class Tenth(Algorithm):
    @dataclass(frozen=True, kw_only=True)
    class Options(Plain):
        how: str = "mean"

    capabilities = Capabilities(consistency="decentralized")

    def engine(self, replica):
        return TenthEngine(replica)


class TenthEngine(Engine):
    steps = 0

    def step(self, update):
        update()
        self.steps += 1
        if self.steps % 10 == 0 and self.options.how != "never":
            for param in self.params:
                self.communicator.all_reduce(param.data, op=self.options.how).wait()
'''
REFERENCE = '''

def reference(ranks, options):
    """The mean of all after every 10th step."""
    step = 0
    while True:
        ranks.update()
        step += 1
        if step % 10 == 0:
            ranks.x = ranks.x.mean(0).expand(len(ranks.x), -1)
        yield
'''
SWEEP = """
name: tiny
algorithms: {algorithms}
models: [{{name: {model}, batch_size: {batch}}}]
world_sizes: [2]
baseline: false
optimizer: {{name: sgd, lr: 0.01, momentum: 0.9}}
measure: {{repeats: 1, warmup_steps: 4, steps_per_iter: {steps}, check_steps: 2}}
timeout_s: 100
"""


class OwnTree(Driver):
    """Copy of the library with further algorithms in it."""

    def __init__(self, folder: Any, text: str, **files: str) -> None:
        self.tree = folder / "tree"
        self.tree.mkdir()
        for name in ("benchmarks.py", "common", "plots", "configs", "tests"):
            (self.tree / name).symlink_to(ROOT / name)
        shutil.copytree(ROOT / "dear", self.tree / "dear")
        for name, code in files.items():
            place, _, file = name.partition("__")
            (self.tree / "dear" / "algorithms" / place / f"{file}.py").write_text(code.lstrip())
        # Python takes a script's folder as it really is.
        (self.tree / "benchmarks.py").unlink()
        shutil.copy(ROOT / "benchmarks.py", self.tree)
        super().__init__(folder, text)

    def verdicts(self) -> dict[str, dict]:
        """Verdicts of a run, by label."""
        paths = os.pathsep.join([str(self.tree), str(self.tree / "common")])
        done = finished(
            [sys.executable, *self.command()],
            cwd=self.tree,
            env={**os.environ, "PYTHONPATH": paths},
            timeout=850,
        )
        self.status, self.output = done.returncode, done.stdout + done.stderr
        assert self.sweep.exists(), self.output
        return {record["trial"]["label"]: record["check"] for record in self.records()}


@pytest.mark.parametrize(
    ("model", "batch", "chosen"),
    [
        ("mnist_cnn", 8, FEW_TENSORS),
        *(("resnet50@rtx2080ti-modelled", 64, list(PROGRAMS)[part::4]) for part in range(4)),
    ],
)
def test_wrong_programs_are_found_in_a_sweep(tmp_path, model, batch, chosen):
    algorithms = [{"name": "spoilt", "label": n, "options": {"program": n}} for n in chosen]
    text = SWEEP.format(algorithms=algorithms, model=model, batch=batch, steps=4)
    driver = OwnTree(tmp_path, text, synchronous__spoilt=SPOILT)
    verdicts = driver.verdicts()
    assert verdicts.keys() == set(chosen), driver.output
    assert {name: check["matches_reference"] for name, check in verdicts.items()} == dict.fromkeys(
        chosen, False
    )
    assert driver.status == 1


@pytest.mark.parametrize("with_reference", [True, False])
def test_an_algorithm_of_ones_own_is_judged_by_its_reference_or_not_at_all(
    tmp_path, with_reference
):
    ways = ("mean", "sum", "never")
    algorithms = [{"name": "tenth", "label": way, "options": {"how": way}} for way in ways]
    text = SWEEP.format(algorithms=algorithms, model="mnist_cnn", batch=8, steps=12)
    code = TENTH + (REFERENCE if with_reference else "")
    driver = OwnTree(tmp_path, text, decentralized__tenth=code)
    verdicts = {name: check["matches_reference"] for name, check in driver.verdicts().items()}
    if with_reference:
        assert verdicts == {"mean": True, "sum": False, "never": False}, driver.output
    else:
        assert verdicts == dict.fromkeys(ways), driver.output
