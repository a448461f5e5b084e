"""Costs of `import dear`, and what every algorithm file must state."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import get_args

import pytest

import dear
import dear.algorithms
from dear.cost.bounds import Bound
from dear.training.algorithm import (
    Algorithm,
    algorithm_class,
    algorithm_names,
    algorithm_options,
    plugin_of,
)
from tests.contract.algorithms import dears_own
from tests.contract.loops import make_model, make_sgd
from tests.system.processes import finished

_FOLDER = Path(dear.algorithms.__file__).parent

_LIST_ALL = """
import sys
import dear
from dear.training.algorithm import algorithm_class, algorithm_names, algorithm_options
for name in algorithm_names():
    algorithm_class(name).unavailable()
    print(name, algorithm_options(name, {}))
loaded = {"torch", "numpy", "horovod"} & set(sys.modules)
sys.exit(f"imported {sorted(loaded)}" if loaded else 0)
"""


def test_listing_algorithms_and_their_options_imports_no_torch():
    ended = finished([sys.executable, "-c", _LIST_ALL])
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[0] for line in ended.stdout.splitlines()] == dears_own()


def test_every_public_name_can_be_had_and_no_other():
    assert all(getattr(dear, name) is not None for name in dear.__all__)
    assert set(dear.__all__) <= set(dir(dear))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = dear.nonsense


def test_every_file_is_an_algorithm():
    files = {path.stem.replace("_", "-") for path in _FOLDER.glob("*/[!_]*.py")}
    assert files == set(dears_own())
    assert {"allreduce", "wfbp", "ddp", "dear", "horovod"} <= files


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_file_defines_one_documented_algorithm(name):
    algorithm = algorithm_class(name)
    path = Path(sys.modules[algorithm_class(name).__module__].__file__)
    if plugin_of(name) is None:
        assert path.parent.name == algorithm_class(name).capabilities.consistency
    tree = ast.parse(path.read_text())
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    assert algorithm.__name__ in classes
    module = sys.modules[algorithm.__module__]
    others = [getattr(module, other) for other in classes if other != algorithm.__name__]
    assert not any(issubclass(other, Algorithm) for other in others)
    assert "capabilities" in vars(algorithm)
    for words in ("Invariant:", "Bytes move:", "Cost per step"):
        assert words in algorithm.__doc__


@pytest.mark.parametrize("name", algorithm_names())
def test_every_option_has_a_default_and_a_docstring(name):
    options = algorithm_class(name).Options
    options()
    tree = ast.parse(Path(sys.modules[algorithm_class(name).__module__].__file__).read_text())
    bodies = [
        node.body
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == "Options"
    ]
    for body in bodies:
        for field, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                text = after.value if isinstance(after, ast.Expr) else None
                assert isinstance(text, ast.Constant), f"{field.target.id} has no docstring"


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_says_how_short_its_steps_can_be(name):
    algorithm, options = algorithm_class(name), algorithm_options(name, {})
    assert algorithm.bound in (None, *get_args(Bound))
    rule = "`bound` (or `bound_of`) must name one of dear.cost.bounds.Bound"
    assert algorithm.bound_of(options) in get_args(Bound), rule


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_says_who_exchanges_with_whom(name):
    algorithm, options = algorithm_class(name), algorithm_options(name, {})
    alike = algorithm.capabilities.consistency in ("synchronous", "delayed")
    rule = "`traffic` must say who sends to whom, unless all take part in the same collectives"
    assert (algorithm.traffic(options, 4, 1) is None) == alike, rule


def _horovod_in_use() -> tuple[str, str, bool]:
    model = make_model()
    optimizer = dear.DistributedOptimizer(make_sgd(model), model, algorithm="horovod")
    optimizer.close()
    real = sys.modules["horovod.torch"]
    ours = sys.modules["dear.algorithms.synchronous.horovod"]
    return real.__file__, ours.__file__, real.is_initialized() and real.size() == dear.size()


def test_the_horovod_algorithm_runs_the_real_horovod(world):
    missing = algorithm_class("horovod").unavailable()
    if missing:
        pytest.skip(missing)
    for real, ours, running in world(2, "horovod").run(_horovod_in_use):
        assert Path(dear.__file__).parent not in Path(real).parents
        assert Path(ours).parents[1] == _FOLDER
        assert running
