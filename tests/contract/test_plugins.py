"""`pytest --plugin FILE`: what every algorithm promises is asked of files from elsewhere, too."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from dear.errors import UserError
from dear.training.gradients import GradientEngine
from tests.conftest import pytest_configure
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


CHOSEN = (
    "bring-your-own-algorithm or (says-too-little and documented) or (names-no-bound and short) or "
    "(starts-otherwise and does_what) or adds-up-otherwise-2-0.0"
)
"""Tests of these files: all of the example's, and of each other one those that are about it."""


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_example_passes_all_and_each_wrong_algorithm_fails_the_test_that_is_about_it(tmp_path):
    files = [EXAMPLE]
    for name, (right, wrong) in WRONG.items():
        text = EXAMPLE.read_text()
        assert right in text
        files.append(tmp_path / f"{name}.py")
        files[-1].write_text(text.replace(right, wrong))
    plugins = [word for file in files for word in ("--plugin", file)]
    how = ("-p", "no:cacheprovider", "-m", "not full", "-k", CHOSEN)
    output = python("-m", "pytest", "tests/contract", *plugins, *how).stdout
    failed = re.findall(r"^(?:FAILED|ERROR) .*", output, re.MULTILINE)
    for name, test in FAILING.items():
        assert any(f"::{test}[{name}" in line for line in failed), (name, output)
    assert not [line for line in failed if "bring-your-own" in line], output
    assert int(re.search(r"(\d+) passed", output)[1]) >= 100, output


def test_a_moment_that_is_never_called_is_refused():
    with pytest.raises(UserError, match=r"Wrong overrides apply\(\), which only a DeferredEngine"):
        type("Wrong", (GradientEngine,), {"apply": lambda self, update: None})


def test_a_plugin_that_is_none_is_one_line(tmp_path):
    path = tmp_path / "empty.py"
    path.write_text("")
    config = SimpleNamespace(getoption=lambda option: [path])
    with pytest.raises(pytest.UsageError, match=f"^{path}: must define one subclass.*$"):
        pytest_configure(config)
