"""Verb `list`: the names that experiments may use, and the keys of an experiment file.

python -m common.harness.verbs.list     # writes the table of keys into docs/experiments.md
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import inspect
import json
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from common.emulation.links.profile import network_names, network_profile
from common.harness.experiment import Experiment
from common.harness.experiment_file import load_plugins
from common.harness.verbs.run import add_plugin
from common.models.registry import MODELS
from common.paths import EXPERIMENTS, ROOT
from common.profiling import gpus
from common.results.committed.pages import with_block
from dear.algorithms.aliases import ALIASES
from dear.training.algorithm import algorithm_class, algorithm_names

HELP = "list algorithms, models, networks and experiments"
KEYS = "keys of an experiment"
"""Mark of the table in docs/experiments.md."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the verb."""
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")
    parser.add_argument("--keys", action="store_true", help="print the keys of an experiment file")
    add_plugin(parser)


def main(options: argparse.Namespace) -> int:
    """Prints all names, each with a line of text; the exit status is 0."""
    with contextlib.redirect_stdout(sys.stderr):  # for what the files print
        load_plugins(options.plugin, Path())
    names = {"keys": list(map(dataclasses.asdict, keys()))} if options.keys else listing()
    if options.json:
        print(json.dumps(names, indent=2))
        return 0
    if options.keys:
        for key in keys():
            print(f"{key.name}: {key.type} = {key.default}")
            print(textwrap.indent(textwrap.fill(key.meaning, 94), "    "))
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """Key of an experiment file."""

    name: str
    """Path of the key, such as `measure.repeats` or `models[].name`."""
    type: str
    default: str
    meaning: str


def keys(cls: type[Any] | None = None, prefix: str = "") -> Iterator[Key]:
    """Yields the keys of an experiment file, or of the part of it that `cls` describes."""
    cls = cls or Experiment
    hints, meanings = typing.get_type_hints(cls), _meanings(cls)
    for field in dataclasses.fields(cls):
        part, many = _part_of(hints[field.name])
        yield Key(
            name=prefix + field.name,
            type=_type_name(hints[field.name]),
            default="its file's name" if prefix + field.name == "name" else _default(field),
            meaning=meanings[field.name],
        )
        if part is not None:
            yield from keys(part, f"{prefix}{field.name}{'[]' if many else ''}.")


def _meanings(cls: type[Any]) -> dict[str, str]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    pairs = zip(node.body, node.body[1:], strict=False)
    return {
        field.target.id: " ".join(ast.literal_eval(note.value).split())
        for field, note in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(note, ast.Expr)
    }


def _part_of(hint: Any) -> tuple[type[Any] | None, bool]:
    if dataclasses.is_dataclass(hint):
        return hint, False
    parts = [_part_of(inner)[0] for inner in typing.get_args(hint)]
    part = next(filter(None, parts), None)
    return part, part is not None and typing.get_origin(hint) is tuple


def _type_name(hint: Any) -> str:
    names = {bool: "true or false", int: "integer", float: "number", str: "text"}
    names |= {type(None): "null", dict: "mapping", tuple: "list"}
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(hint))
    if typing.get_origin(hint) in (tuple, dict):
        return names[typing.get_origin(hint)]
    if typing.get_args(hint):
        return " or ".join(dict.fromkeys(map(_type_name, typing.get_args(hint))))
    return names.get(hint, "mapping")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING or field.default == ():
        return "empty" if field.type.startswith(("tuple", "dict")) else "its defaults"
    if field.default is dataclasses.MISSING:
        return "required"
    return json.dumps(field.default)


def keys_table() -> str:
    """Returns the keys as a Markdown table."""
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key in keys():
        lines.append(f"| `{key.name}` | {key.type} | {key.default} | {key.meaning} |")
    return "\n".join(lines)


def listing() -> dict[str, Any]:
    """Returns the names by heading, each with a text or None."""
    return {
        "algorithms": {name: _about(name) for name in algorithm_names()},
        "other names": {name: _alias(*meaning) for name, meaning in ALIASES.items()},
        "models": sorted(MODELS),
        "GPUs": {
            name: f"{gpu.name}: {gpu.fp32_tflops:g} TFLOP/s, {gpu.memory_gb_per_s:g} GB/s"
            for name, gpu in gpus.table().items()
        },
        "networks": {name: network_profile(name).summary for name in network_names()},
        "experiments": {
            str(path.relative_to(ROOT)): yaml.safe_load(path.read_bytes()).get("description", "")
            for path in sorted(EXPERIMENTS.rglob("*.yaml"))
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


if __name__ == "__main__":
    page = ROOT / "docs" / "experiments.md"
    page.write_text(
        with_block(page.read_text(encoding="utf-8"), KEYS, keys_table()), encoding="utf-8"
    )
