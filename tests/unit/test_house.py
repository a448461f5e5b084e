"""Limits of size and style, see house.yaml."""

from __future__ import annotations

import pytest

from tests import house


@pytest.fixture(scope="module")
def today():
    return house.measured(list(house.limits()))


def test_no_folder_is_above_its_limits(today):
    assert house.excess(today) == []


def test_each_folder_has_a_limit_for_each_rule(today):
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
