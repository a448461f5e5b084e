"""A report as a program reads it: what is in it, what it refers to, and what a click would save."""

from __future__ import annotations

import base64
import gzip
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from urllib.parse import unquote_to_bytes

_VOID = {"meta", "link", "input", "br", "hr", "img", "col", "source", "wbr"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    text: str = ""
    """Text of the element and of those in it."""
    above: tuple[str, ...] = ()


@dataclass
class Page(HTMLParser):
    """Every element in order; what is opened must be closed."""

    html: str
    elements: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[Element] = []
        self.feed(self.html)
        self.close()
        assert self._open == [], f"never closed: {self._open[-1].tag}"

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} has an attribute twice"
        above = tuple(item.tag for item in self._open)
        self.elements.append(Element(tag, dict(attrs), above=above))
        if tag not in _VOID:
            self._open.append(self.elements[-1])

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self._open.pop()

    def handle_endtag(self, tag):
        last = self._open.pop()
        assert last.tag == tag, f"</{tag}> closes {last.tag}"

    def handle_data(self, data):
        for item in self._open:
            item.text += data

    def all(self, tag: str, kind: str | None = None) -> list[Element]:
        """Elements of a tag, those of a class."""
        return [
            item
            for item in self.elements
            if item.tag == tag
            and (kind is None or kind in (item.attributes.get("class") or "").split())
        ]

    def section(self, name: str) -> str:
        """The words of a section."""
        (result,) = [item for item in self.all("section") if item.attributes["id"] == name]
        return " ".join(result.text.split())

    @property
    def references(self) -> list[str]:
        """All that a browser would load or go to."""
        kinds = ("src", "href", "xlink:href", "srcset", "action", "formaction", "poster", "data")
        result = [item.attributes[k] or "" for item in self.elements for k in kinds
                 if k in item.attributes]  # fmt: skip
        styles = [item.text for item in self.all("style")]
        styles += [value or "" for item in self.elements for value in item.attributes.values()]
        for text in styles:
            result += re.findall(r"url\(\s*['\"]?([^'\")]*)", text)
            result += re.findall(r"@import\s+(\S+)", text)
        return result

    def file(self, name: str) -> bytes:
        """Returns what a click on a download saves."""
        (link,) = {
            item.attributes["href"]
            for item in self.all("a", "file")
            if item.attributes["download"] in (name, f"{name}.gz")
        }
        head, _, data = link.partition(",")
        held = base64.b64decode(data) if head.endswith(";base64") else unquote_to_bytes(data)
        return gzip.decompress(held) if "gzip" in head else held
