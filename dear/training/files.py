"""Import of a user's Python file by its path, and a digest that identifies the file's version."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from dear.errors import UserError

_PACKAGES = Path(__file__).parents[2]
"""Folder with the packages of this project."""
_OWN = ("bench", "benchmarks", "common", "dear", "dear_bench", "plots", "setup", "tests")
"""Modules of this project in `_PACKAGES`."""


def digest_of(path: Path) -> str:
    """Returns a digest (16 hex digits) of the file and of the modules in its folder that it uses.

    Imports are followed through these modules; nothing is executed. Installed packages and the
    packages of this project are not included.

    Raises:
        UserError: the file cannot be read, or another module has the name of a module in its
            folder and is imported in its place.
    """
    digest = hashlib.sha256()
    for source in sorted(_sources(path)):
        name = source.name if source == path else str(source.relative_to(path.parent))
        digest.update(f"{name}\0{len(_read(source))}\0".encode())
        digest.update(_read(source))
    return digest.hexdigest()[:16]


def module_of(path: Path, package: str) -> ModuleType:
    """Imports the file as the module `package.STEM`, once per process.

    Its folder is appended to `sys.path`, so the file can import modules in the same folder.

    Raises:
        UserError: the file cannot be read, or raises an exception on import.
    """
    name = f"{package}.{path.stem}"
    imported = sys.modules.get(name)
    if imported is not None and imported.__file__ == str(path):
        return imported
    text = _read(path)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"{path} ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    try:
        # The loader would write compiled files into the user's folder.
        exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        reason = f"{described(error, path)}{_advice(error, path)}"
        raise UserError(f"{path}: cannot be imported: {reason}") from None
    return module


def _advice(error: BaseException, path: Path) -> str:
    if not isinstance(error, ImportError):
        return ""
    if any(node.level for node in _import_nodes(path) if isinstance(node, ast.ImportFrom)):
        return "; the file belongs to no package: write `from x import y`, without a dot before x"
    top = (error.name or "").partition(".")[0]
    if top != error.name and (_PACKAGES / top / "__init__.py").exists():
        return f"; {_PACKAGES / top} comes before other packages called {top}: rename yours"
    return ""


def described(error: BaseException, path: Path) -> str:
    """Describes `error` in one line, with the line number in the file."""
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
    sources, unread = {path}, [path]
    root = path.parent == _PACKAGES
    if root and _PACKAGES.name in ("site-packages", "dist-packages"):
        return sources  # all beside it is installed
    while unread:
        for name in _imports(unread.pop()):
            if root and name in _OWN:
                continue
            files = _beside(path.parent, name)
            if files:
                _check_visible(path, name, files)
            added = [file for file in files if file not in sources]
            sources.update(added)
            unread += added
    return sources


def _check_visible(path: Path, name: str, files: list[Path]) -> None:
    """Raises `UserError` if `import name` finds another module than the one in the folder."""
    spec = importlib.util.find_spec(name)
    origin = None if spec is None else spec.origin
    if origin is not None and Path(origin).resolve() not in [file.resolve() for file in files]:
        raise UserError(
            f"{path}: `import {name}` finds {origin}, not the module in its own folder; rename "
            "the module in the folder"
        )


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in _import_nodes(path):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def _import_nodes(path: Path) -> list[ast.Import | ast.ImportFrom]:
    try:
        tree = ast.parse(_read(path))
    except (SyntaxError, ValueError):
        return []  # the import reports the error
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def _beside(folder: Path, name: str) -> list[Path]:
    file = folder / f"{name}.py"
    if file.exists():
        return [file]
    package = folder / name
    return list(package.rglob("*.py")) if (package / "__init__.py").exists() else []
