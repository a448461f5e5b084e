"""`pytest --plugin FILE`: what every algorithm promises is asked of files from elsewhere, too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dear.errors import UserError
from dear.training.gradients import GradientEngine
from tests.system.processes import ROOT, python

EXAMPLE = ROOT / "examples" / "bring_your_own_algorithm.py"
WRONG = {
    "says_too_little": ("Bytes move:", "Bytes:"),
    "names_no_bound": ('bound = "wfbp"', "bound = None"),
    "starts_otherwise": ('starts="gradient"', 'starts="pass"'),
    "adds_up_otherwise": ("ranks.g = ranks.g.mean(0)", "ranks.g = ranks.g.sum(0)"),
}
"""Text of the example that is replaced."""
FAILING = {
    "says-too-little": "test_every_algorithm_file_defines_one_documented_algorithm",
    "names-no-bound": "test_every_algorithm_says_how_short_its_steps_can_be",
    "starts-otherwise": "test_an_algorithm_does_what_it_states",
    "adds-up-otherwise": "test_an_algorithm_equals_its_reference",
}


def ran(files: list[Path], chosen: str) -> str:
    """Returns pytest's output of the contract's tests with these plugins."""
    tests = [f"tests/contract/test_{name}.py" for name in ("files", "order", "reference")]
    plugins = [word for file in files for word in ("--plugin", file)]
    how = ("-p", "no:cacheprovider", "-m", "not full", "-k", chosen)
    return python("-m", "pytest", *tests, *plugins, *how).stdout


@pytest.mark.timeout(300)
def test_the_example_passes_all_that_every_algorithm_passes():
    words = ("-m", "pytest", "tests/contract", "--plugin", EXAMPLE, "-m", "not full")
    done = python(*words, "-p", "no:cacheprovider", "-k", "bring-your-own-algorithm")
    passed = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and int(passed[1]) >= 30, done.stdout


@pytest.mark.timeout(300)
def test_each_wrong_algorithm_fails_the_test_that_is_about_it(tmp_path):
    files = []
    for name, (right, wrong) in WRONG.items():
        text = EXAMPLE.read_text()
        assert right in text
        files.append(tmp_path / f"{name}.py")
        files[-1].write_text(text.replace(right, wrong))
    output = ran(
        files,
        "(says-too-little and documented) or (names-no-bound and short) or "
        "(starts-otherwise and does_what) or adds-up-otherwise-2-0.0",
    )
    for name, test in FAILING.items():
        assert re.search(rf"^FAILED \S*{test}\[{name}", output, re.MULTILINE), (name, output)


def test_a_moment_that_is_never_called_is_refused():
    with pytest.raises(UserError, match=r"Wrong overrides apply\(\), which only a DeferredEngine"):
        type("Wrong", (GradientEngine,), {"apply": lambda self, update: None})


def test_a_plugin_that_is_none_is_one_line(tmp_path):
    path = tmp_path / "empty.py"
    path.write_text("")
    done = python("-m", "pytest", "tests/contract/test_files.py", "--plugin", path)
    assert done.returncode == 4
    assert f"ERROR: {path}: must define one subclass" in done.stderr + done.stdout
