"""Pages of the repository for MkDocs, where they stand, so that their links hold.

A link of a page may also lead to a file of code or data, which becomes a page, or to a folder,
which becomes a list of its files. Files of other kinds, and those of the folder, are copied.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from dear.training.algorithm import algorithm_class, algorithm_names

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?<=\]\()(?![\w.+-]+:|#)([^)\s#]+)")
_FIGURE = re.compile(r"!\[[^]]*\]\(([^)]+)\)")
_INDENTED = re.compile(r"^( +)(?=\S)", re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json", ".csv": "text"}
_CARD = re.compile(r"\n(?=(?:Update|Invariant|Bytes move|Cost[^:\n]*): )")
_DROP_IN = ("dear", "dear.bluefog", "dear.dadt")
"""Modules whose names are partly defined by a table or a call."""


class Docstrings(griffe.Extension):
    """Extension that describes names which exist only when a module runs, and splits cards.

    A card is the part of an algorithm's docstring in which each line has its title; each becomes a
    paragraph.
    """

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _CARD.sub("\n\n", obj.docstring.value)

    def on_module(self, *, mod: griffe.Module, **_: object) -> None:
        if mod.path not in _DROP_IN:
            return
        module = importlib.import_module(mod.path)
        mod.exports = list(module.__all__)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value):
                mod.set_member(name, _function(name, value))
            elif inspect.isclass(value):
                mod.set_member(name, griffe.Alias(name, f"{value.__module__}.{value.__name__}"))


def _function(name: str, function: Callable[..., object]) -> griffe.Function:
    """Returns the description of a function, as Python has it."""

    def text(annotation: object) -> str | None:
        return None if annotation is inspect.Signature.empty else str(annotation)

    signature = inspect.signature(function)
    parameters = griffe.Parameters()
    for each in signature.parameters.values():
        kind = griffe.ParameterKind(each.kind.description)
        default = None if each.default is inspect.Parameter.empty else repr(each.default)
        annotation = text(each.annotation)
        parameters.add(
            griffe.Parameter(each.name, annotation=annotation, kind=kind, default=default)
        )
    described = inspect.getdoc(function) or ""
    docstring = griffe.Docstring(described, parser="google", parser_options={"warnings": False})
    returns = text(signature.return_annotation)
    return griffe.Function(name, parameters=parameters, returns=returns, docstring=docstring)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the navigation, and all that they link to."""
    pages = [name for name in _named(config.nav) if (ROOT / name).is_file()]
    for name in pages:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for name in pages:
        text = _FENCED.sub("", (ROOT / name).read_text(encoding="utf-8"))
        for target in sorted(set(_LINK.findall(text))):
            for uri, source in _needed(normpath(PurePosixPath(name).parent / target)).items():
                if files.get_file_from_path(uri) is None:
                    there = InclusionLevel.NOT_IN_NAV
                    files.append(File.generated(config, uri, inclusion=there, **source))
    files.append(File.generated(config, "api/algorithms.md", content=_algorithms()))
    return files


def _algorithms() -> str:
    """Returns the page of all algorithms, and of their options."""
    lines = ["# Algorithms and their options"]
    for name in algorithm_names():
        cls = algorithm_class(name)
        fields = [field.name for field in dataclasses.fields(cls.Options)]
        hidden = {"show_root_heading": False, "show_root_toc_entry": False, "members": False}
        shown = {"heading_level": 3, "inherited_members": True, "members": fields}
        lines.append(f"\n## {name}\n")
        for path, options in ((cls.__name__, hidden), (f"{cls.__name__}.Options", shown)):
            lines += [f"::: {cls.__module__}.{path}", f"    options: {json.dumps(options)}\n"]
    return "\n".join(lines)


def _named(nav: object) -> Iterator[str]:
    """Yields the files that the navigation names."""
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _named(part)


def _needed(name: str) -> dict[str, dict[str, str]]:
    """Returns the files of the site for the target of a link, with their text or source.

    There is none for a target that does not exist; MkDocs reports the link.
    """
    path = ROOT / name
    if path.is_dir():
        command = ["git", "-C", str(path), "ls-files"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        copied = {f"{name}/{other}": {"abs_src_path": str(path / other)} for other in listed}
        lines = [f"- [{other}]({other})" for other in listed]
    elif path.is_file() and _shown(name) != name:
        copied, text = {}, path.read_text(encoding="utf-8").rstrip("\n")
        lines = [f"````{_LANGUAGES[path.suffix]}", text, "````"]
    else:
        return {name: {"abs_src_path": str(path)}} if path.is_file() else {}
    text = "\n".join(["---\nsearch: {exclude: true}\n---", f"# {name}\n", *lines])
    return {**copied, _shown(name): {"content": text}}


def _shown(name: str) -> str:
    """Returns the page that shows a file or folder; the file itself if none does."""
    if (ROOT / name).is_dir():
        return f"{name}/index.md"
    return f"{name}.md" if PurePosixPath(name).suffix in _LANGUAGES else name


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Leads links to the pages that show their targets, and figures to their files.

    Comments are removed, which would split the text. What belongs to the item of a list gets the
    indentation that Python's Markdown needs: twice that of GitHub's.
    """
    uri = page.file.src_uri
    if not (ROOT / uri).is_file():
        return markdown
    here = PurePosixPath(uri).parent

    def shown(link: re.Match[str]) -> str:
        return relpath(_shown(normpath(here / link[1])), here)

    parts = _FENCED.split(markdown)
    for index in range(0, len(parts), 2):
        text = _LINK.sub(shown, _COMMENT.sub("", parts[index]))
        text = _FIGURE.sub(r"[\g<0>](\1)", text)
        parts[index] = _INDENTED.sub(r"\1\1", text)
    return "".join(parts)
