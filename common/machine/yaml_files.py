"""YAML files that a user writes: experiments and networks."""

from __future__ import annotations

from pathlib import Path

import yaml

from dear.errors import UserError


class StrictLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys; the usual one silently takes the last."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        # This runs before `<<: *base` is resolved; afterwards, its keys would look like duplicates.
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(
                    None, None, f"key {key.value!r} stands twice", key.start_mark
                )
            seen.add((key.tag, str(key.value)))
        return node


def read_mapping(path: Path, what: str) -> dict[str, object]:
    """Reads a file that has a mapping of keys to values.

    Args:
        what: name of the file's kind, for messages.

    Raises:
        UserError: the file cannot be read, or is no valid YAML, or has no mapping.
    """
    try:
        values = yaml.load(path.read_bytes(), StrictLoader)
    except OSError as error:
        raise UserError(f"{what} {path}: {error.strerror}") from None
    except RecursionError:
        raise UserError(f"{what} {path}: has too many nested brackets") from None
    except ValueError as error:  # not UTF-8, or a date that does not exist
        raise UserError(f"{what} {path}: not valid YAML: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not readable"
        raise UserError(f"{what} {path}{where}: not valid YAML: {problem}") from None
    if not isinstance(values, dict):
        raise UserError(f"{what} {path}: must be a mapping of keys to values")
    return values
