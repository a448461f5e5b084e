"""Limits of size and style, see house.yaml."""

from __future__ import annotations

import ast
from pathlib import Path

from tests import house


def test_each_folder_has_a_limit_for_each_rule_and_none_is_above_it():
    today = house.measured(list(house.limits()))
    assert house.excess(today) == []
    rules = {rule for counts in today.values() for rule in counts}
    for folder, limits in house.limits().items():
        assert rules <= set(limits), folder
        assert (house.ROOT / folder).is_dir()


def test_a_number_above_its_limit_is_one_line():
    grown = house.limits()
    grown["dear"]["lines"] += 1
    (line,) = house.excess(grown)
    assert line.startswith("dear: lines ")


def test_the_rules_find_what_they_count(tmp_path):
    path = tmp_path / "wrong.py"
    body = "\n".join(f"    x{number} = 1" for number in range(house.LONG_FUNCTION))
    methods = "\n".join(f"    def m{number}(self): ..." for number in range(21))
    fields = "\n".join(f"    f{number}: int" for number in range(26))
    path.write_text(
        f'"""Of the bar."""\ndef long():\n{body}\n    found = 2\n'
        f'class Large:\n{methods}\nclass Wide:\n{fields}\n    """What it is."""\n'
        'def good():\n    """Returns it."""\n'
    )
    counted = [rule for rule, _, _ in house.places(path)]
    expected = {"openings": 2, "long functions": 1, "names": 1}
    expected |= {"large classes": 1, "wide dataclasses": 1}
    assert {rule: counted.count(rule) for rule in counted} == expected


def in_the_locale(path: Path) -> list[int]:
    """Returns the lines that read or write text in the encoding of the user's locale."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = getattr(getattr(node, "func", None), "attr", "")
        name = name or getattr(getattr(node, "func", None), "id", "")
        if name not in ("read_text", "write_text", "open") or ast.unparse(node.func) == "os.open":
            continue
        texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
        writes = name == "open" and node.args and not texts and isinstance(node.func, ast.Attribute)
        binary = name == "open" and any("b" in str(text) for text in texts)
        if not (binary or writes or "encoding" in [word.arg for word in node.keywords]):
            lines.append(node.lineno)
    return lines


def test_text_is_utf_8_in_every_locale(tmp_path):
    (tmp_path / "wrong.py").write_text("p.read_text()\np.open('rb')\nopen(p)\nopen(p, 'w')\n")
    assert in_the_locale(tmp_path / "wrong.py") == [1, 3, 4]
    code = [p for p in house.code_files() if p.suffix == ".py" and "tests" not in p.parts]
    assert {path: lines for path in code if (lines := in_the_locale(house.ROOT / path))} == {}
