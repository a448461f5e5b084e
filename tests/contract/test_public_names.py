"""Names that users may rely on: imports, options, flags, and keys of experiment files.

`public_names.json` is a list of promises. New names may be added. A name is removed only if the
changelog says so.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import operator
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from common.harness.cli import main
from dear import dadt
from dear.training.algorithm import algorithm_class

HERE = Path(__file__).parent
PUBLIC = json.loads((HERE / "public_names.json").read_text())


def _missing(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        home = importlib.import_module(module)
        operator.attrgetter(path)(home)
    except (ImportError, AttributeError):
        return True
    # An installed copy of this repository must not answer for what this tree lacks.
    return not Path(home.__file__).is_relative_to(HERE.parents[1])


def test_every_documented_name_can_be_imported():
    assert [name for name in PUBLIC["names"] if _missing(name)] == []


def test_functions_can_be_pickled():
    functions = [getattr(dadt, name) for name in dadt.__all__]
    assert pickle.loads(pickle.dumps(functions)) == functions


@pytest.mark.parametrize("algorithm", PUBLIC["options"])
def test_options_keep_their_names_and_defaults(algorithm):
    usual = algorithm_class(algorithm).Options()
    current = json.loads(json.dumps(dataclasses.asdict(usual)))
    promised = PUBLIC["options"][algorithm]
    assert {name: current.get(name, "gone") for name in promised} == promised


@pytest.mark.parametrize("verb", PUBLIC["flags"])
def test_a_verb_keeps_its_flags(verb, capsys):
    with pytest.raises(SystemExit):
        main([*verb.split(), "--help"])
    flags = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", capsys.readouterr().out))
    assert set(PUBLIC["flags"][verb]) - flags == set()


@pytest.mark.parametrize("name", PUBLIC["plans"])
def test_every_key_of_an_experiment_makes_the_same_trials(name, capsys):
    """Names of options count, too: records are found again by them."""
    assert main(["run", str(HERE / f"experiments/{name}.yaml"), "--dry-run", "--json"]) == 0
    plan: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [{key: trial[key] for key in ("id", "trial")} for trial in plan] == PUBLIC["plans"][name]
