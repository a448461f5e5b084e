"""Comparison of two sweeps in JUnit's XML format, which CI systems display."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from common.results.timed import gate
from common.results.timed.gate import Summary

_FORBIDDEN = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot contain, such as the escape codes of a terminal's colours."""


def text(summary: Summary) -> str:
    """Returns the XML, with a test case for each trial of the first sweep. The test case fails if
    the second sweep's trial is worse, and is skipped if the two trials cannot be compared. If no
    trials were compared at all, an additional test case has an error."""
    suite = ElementTree.Element("testsuite", name=f"compare {summary.first} {summary.second}")
    if summary.environment:
        properties = ElementTree.SubElement(suite, "properties")
        for line in summary.environment:
            name, _, value = line.partition(": ")
            ElementTree.SubElement(properties, "property", name=name, value=value)
    for pair in summary.pairs:
        case = _case(suite, pair.where, gate.name(pair))
        result = gate.text(pair)
        if pair.worse:
            ElementTree.SubElement(case, "failure", type=pair.worse, message=result)
        elif pair.ratio is None:
            ElementTree.SubElement(case, "skipped", message=result)
        else:
            ElementTree.SubElement(case, "system-out").text = result
    if summary.outcome == "nothing compared":
        case = _case(suite, "compare", "any trial")
        ElementTree.SubElement(case, "error", type=summary.outcome, message=summary.why)
    for count, tag in (("tests", ""), ("failures", "/failure"), ("errors", "/error")):
        suite.set(count, str(len(suite.findall(f"testcase{tag}"))))
    suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    for element in suite.iter():
        element.text = element.text and _FORBIDDEN.sub("?", element.text)
        for key, value in element.items():
            element.set(key, _FORBIDDEN.sub("?", value))
    ElementTree.indent(suite)
    body = ElementTree.tostring(suite, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _case(suite: ElementTree.Element, place: str, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=place, name=name)
