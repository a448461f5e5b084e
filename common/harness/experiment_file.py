"""Reads experiment files, strictly, with `--set` overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from common.harness.experiment import Experiment
from dear.errors import UserError
from dear.options import build_options


class _StrictLoader(yaml.SafeLoader):
    """YAML that refuses a key that stands twice; plain YAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands twice", key_node.start_mark
                )
            seen.add(str(key))
        return super().construct_mapping(node, deep)


def load(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Reads an experiment file; `overrides` are `key=value` with dots and list indices in keys.

    Raises:
        UserError: no such file, no YAML, an unknown key, or a value that is not allowed.
    """
    try:
        values = yaml.load(path.read_text(), _StrictLoader)
    except OSError as error:
        raise UserError(f"experiment {path}: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or a date that does not exist
        raise UserError(f"experiment {path}: not valid YAML: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not readable"
        raise UserError(f"experiment {path}{where}: not valid YAML: {problem}") from None
    if not isinstance(values, dict):
        raise UserError(f"experiment {path}: must be a mapping of keys to values")
    for override in overrides:
        _override(values, override)
    values.setdefault("name", path.stem)
    return build_options(Experiment, values, "experiment key")


def _override(values: dict[str, Any], text: str) -> None:
    key, equals, value_text = text.partition("=")
    if not equals or not key:
        raise UserError(f"--set {text!r}: must be key=value, e.g. --set measure.repeats=5")
    try:
        value = yaml.safe_load(value_text)
    except (yaml.YAMLError, ValueError):
        raise UserError(f"--set {text!r}: the value is not valid YAML") from None
    *path, last = key.split(".")
    here: Any = values
    for part in path:
        here = _descend(here, part, text)
    here[_index(here, last, text) if isinstance(here, list) else last] = value


def _descend(here: Any, part: str, text: str) -> Any:
    inner = here[_index(here, part, text)] if isinstance(here, list) else here.setdefault(part, {})
    if not isinstance(inner, (dict, list)):
        raise UserError(f"--set {text!r}: {part!r} is a value, not a mapping or a list")
    return inner


def _index(here: list[Any], part: str, text: str) -> int:
    if not part.isdigit() or int(part) >= len(here):
        raise UserError(f"--set {text!r}: {part!r} is no index of a list of {len(here)}")
    return int(part)
