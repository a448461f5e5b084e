"""The verb `list`: names of everything that an experiment can ask for."""

from __future__ import annotations

import argparse
import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import yaml

from common.harness import own
from common.harness.verbs.run import add_plugin
from common.models.registry import MODELS
from common.paths import EXPERIMENTS, ROOT
from common.profiling import gpus
from dear.algorithms.aliases import ALIASES
from dear.training.algorithm import algorithm_class, algorithm_names

HELP = "algorithms, models, experiments"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    parser.add_argument("--json", action="store_true", help="as JSON on stdout")
    add_plugin(parser)


def main(options: argparse.Namespace) -> int:
    """Prints all names with a line on each; the exit status is 0."""
    own.load_plugins(options.plugin, Path())
    names = listing()
    if options.json:
        print(json.dumps(names, indent=2))
        return 0
    for heading, entries in names.items():
        print(f"{heading}:")
        if isinstance(entries, dict):
            width = max(map(len, entries))
            for name, text in entries.items():
                print(f"  {name:{width}}  {text}")
        else:
            print(textwrap.fill(" ".join(entries), 98, initial_indent="  ", subsequent_indent="  "))
    return 0


def listing() -> dict[str, Any]:
    """Returns the names by heading, most of them with a text."""
    return {
        "algorithms": {name: _about(name) for name in algorithm_names()},
        "other names": {name: _alias(*meaning) for name, meaning in ALIASES.items()},
        "models": sorted(MODELS),
        "GPUs": {
            name: f"{gpu.name}: {gpu.fp32_tflops:g} TFLOP/s, {gpu.memory_gb_per_s:g} GB/s"
            for name, gpu in gpus.table().items()
        },
        "experiments": {
            str(path.relative_to(ROOT)): yaml.safe_load(path.read_text()).get("description", "")
            for path in sorted(EXPERIMENTS.glob("*.yaml"))
        },
    }


def _about(algorithm: str) -> str:
    cls = algorithm_class(algorithm)
    first = (inspect.getdoc(cls) or "").split("\n")[0]
    missing = cls.unavailable()
    return first + (f"  [unsupported here: {missing}]" if missing else "")


def _alias(algorithm: str, options: dict[str, Any]) -> str:
    given = ", ".join(f"{key}={value}" for key, value in options.items())
    return algorithm + (f" with {given}" if given else "")
