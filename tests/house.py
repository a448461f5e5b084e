"""Size and style of each folder, held against the limits in house.yaml.

python -m tests.house            # today's numbers; * marks what is above its limit
python -m tests.house --lower    # lowers the limits to today's numbers where these are smaller
python -m tests.house --list openings dear      # places that count
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
LIMITS = Path(__file__).with_suffix(".yaml")
LONG_FUNCTION, LARGE_CLASS, WIDE_DATACLASS = 60, 20, 25
_CODE = (".py", ".cc", ".h", ".sh", ".html", ".css", ".js")
_NAMES = {"one", "found", "told", "said", "own", "made"}
"""Names of variables that say nothing."""
_PREPOSITIONS = (
    "about above across after against along among around as at before behind below beneath beside "
    "besides between beyond by despite down during except for from in inside into like near of off "
    "on onto out outside over past per since through throughout till to toward towards under "
    "unlike until up upon via with within without"
)
_OTHERS = (
    "he her his it its one's she that their these they this those what whatever which whichever "
    "who whoever whom whose although and because but if nor or so than then though unless whether "
    "while yet how when whenever where wherever why"
)
_OPENINGS = {*_PREPOSITIONS.split(), *_OTHERS.split()}
"""Prepositions, pronouns, conjunctions and question words: no docstring starts with one."""


def code_files() -> list[Path]:
    """Returns the files of code that git knows or would know, relative to the top."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    return [Path(name) for name in names if name.endswith(_CODE) and (ROOT / name).exists()]


def folder_of(path: Path, folders: list[str]) -> str | None:
    """Returns the longest of the listed folders that contains the path."""
    return max((str(p) for p in path.parents if str(p) in folders), key=len, default=None)


def places(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yields what counts in a Python file: the rule, the line and the name or text."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.end_lineno - node.lineno + 1 > LONG_FUNCTION:
                yield "long functions", node.lineno, node.name
        elif isinstance(node, ast.ClassDef):
            kinds = Counter(type(statement) for statement in node.body)
            if kinds[ast.FunctionDef] + kinds[ast.AsyncFunctionDef] > LARGE_CLASS:
                yield "large classes", node.lineno, node.name
            if kinds[ast.AnnAssign] > WIDE_DATACLASS:
                yield "wide dataclasses", node.lineno, node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in _NAMES:
            yield "names", node.lineno, node.id
        for line, text in _docstrings(node):
            if re.split(r"[^\w'-]", text.strip().lower(), maxsplit=1)[0] in _OPENINGS:
                yield "openings", line, text.strip().partition("\n")[0]


def _docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the docstring of a definition, and the notes below assignments of its body."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    before: ast.AST = node
    for statement in node.body:
        text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        described = before is node or isinstance(before, ast.Assign | ast.AnnAssign)
        if text and described and isinstance(statement.value.value, str):
            yield statement.lineno, statement.value.value
        before = statement


def measured(folders: list[str]) -> dict[str, dict[str, int]]:
    """Returns today's numbers of each folder, by rule."""
    counts: dict[str, Counter[str]] = {folder: Counter() for folder in folders}
    entries: dict[str, dict[Path, set[str]]] = {folder: {} for folder in folders}
    for path in code_files():
        folder, text = folder_of(path, folders), (ROOT / path).read_text()
        if folder is None:
            continue
        counts[folder].update({"files": 1, "lines": text.count("\n")})
        for child in (path, *path.parents):
            parent = folder_of(child, folders)
            if parent is not None:
                entries[parent].setdefault(child.parent, set()).add(child.name)
        if path.suffix == ".py":
            counts[folder]["Any"] += len(re.findall(r"\bAny\b", text))
            counts[folder].update(rule for rule, _, _ in places(ROOT / path))
    for folder, children in entries.items():
        counts[folder]["entries"] = max(map(len, children.values()))
    return {folder: dict(count) for folder, count in counts.items()}


def limits() -> dict[str, dict[str, int]]:
    """Returns the limits by folder and rule."""
    return yaml.safe_load(LIMITS.read_text())


def excess(today: dict[str, dict[str, int]]) -> list[str]:
    """Returns a line for each number above its limit."""
    return [
        f"{folder}: {rule} {today[folder].get(rule, 0)}, the limit is {limit}"
        for folder, rules in limits().items()
        for rule, limit in rules.items()
        if today[folder].get(rule, 0) > limit
    ]


def lower(today: dict[str, dict[str, int]]) -> None:
    """Lowers limits in the file, line by line, so that comments stay."""
    lines = LIMITS.read_text().splitlines()
    folder = ""
    for index, line in enumerate(lines):
        if match := re.match(r"(\S+):$", line):
            folder = match[1].strip('"')
        elif match := re.match(r"  ([\w ]+): (\d+)", line):
            value = min(int(match[2]), today[folder].get(match[1], 0))
            lines[index] = line.replace(match[0], f"  {match[1]}: {value}")
    LIMITS.write_text("\n".join(lines) + "\n")


def main(arguments: list[str]) -> None:
    """Runs the command in the module's docstring."""
    folders = list(limits())
    if arguments[:1] == ["--list"]:
        rule, chosen = arguments[1], arguments[2]
        for path in code_files():
            if path.suffix == ".py" and folder_of(path, folders) == chosen:
                for kind, line, text in places(ROOT / path):
                    if kind == rule:
                        print(f"{path}:{line}: {text}")
        return
    today = measured(folders)
    if arguments == ["--lower"]:
        lower(today)
    rules = list(next(iter(limits().values())))
    print(f"{'':22}", *(f"{rule:>17}" for rule in rules), sep="")
    for folder, limit in limits().items():
        cells = [(today[folder].get(rule, 0), limit[rule]) for rule in rules]
        print(f"{folder:22}", *(f"{n:>16}{'*' if n > most else ' '}" for n, most in cells), sep="")


if __name__ == "__main__":
    main(sys.argv[1:])
