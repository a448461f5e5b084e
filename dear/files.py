"""A Python file of the user's as a module: imported by its path, and told apart by its digest."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from dear.errors import UserError

_OWN = Path(__file__).parents[1]


def digest_of(path: Path) -> str:
    """Of the file, and of the modules beside it that it imports, and those import; 16 digits.

    Nothing is executed. Installed packages do not count, nor do those beside `dear`.

    Raises:
        UserError: the file cannot be read.
    """
    found = hashlib.sha256()
    for one in sorted(_sources(path)):
        name = one.name if one == path else str(one.relative_to(path.parent))
        found.update(f"{name}\0{len(_read(one))}\0".encode())
        found.update(_read(one))
    return found.hexdigest()[:16]


def module_of(path: Path, package: str) -> ModuleType:
    """The file as the module `package.STEM`, imported once in a process.

    Modules beside it can be imported, too: its folder comes last where Python looks for them.

    Raises:
        UserError: the file cannot be read, or raises an exception when it is imported, in one line.
    """
    name = f"{package}.{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known
    text = _read(path)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))
    sys.modules[name] = module  # dataclasses look their module up
    try:
        # Not by the loader, which would leave compiled files beside the user's.
        exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserError(f"{path}: cannot be imported: {told(error, path)}") from None
    return module


def told(error: BaseException, path: Path) -> str:
    """What has been raised, in one line, and in which line of the file."""
    text = " ".join(str(error).split())
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(path):
            line = frame.lineno
    where = f" (line {line})" if line and f"line {line}" not in text else ""
    return f"{type(error).__name__}{f': {text}' if text else ''}{where}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def _sources(path: Path) -> set[Path]:
    found, waiting = {path}, [path]
    while waiting and path.parent != _OWN:
        for name in _imports(waiting.pop()):
            near = [one for one in _beside(path.parent, name) if one not in found]
            found.update(near)
            waiting += near
    return found


def _imports(path: Path) -> set[str]:
    """First parts of the names of modules that a file imports anywhere."""
    try:
        tree = ast.parse(_read(path))
    except (SyntaxError, ValueError):
        return set()  # importing it says what is wrong
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def _beside(folder: Path, name: str) -> list[Path]:
    file = folder / f"{name}.py"
    if file.exists():
        return [file]
    package = folder / name
    return list(package.rglob("*.py")) if (package / "__init__.py").exists() else []
