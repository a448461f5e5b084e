"""Will the ranks fit: what is needed, what there is, and what a user is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from common import machine as memory
from dear.errors import UserError

GIB = 1 << 30


def test_a_rank_needs_several_copies_of_its_parameters():
    small, large = memory.required_bytes(0, 2), memory.required_bytes(GIB, 2)
    assert small < 0.5 * GIB
    assert 5 * GIB <= large - small <= 8 * GIB
    assert memory.required_bytes(GIB, 2, optimizer_copies=2) == large + 2 * GIB


def test_what_fits_is_let_through():
    memory.check_memory(GIB, hosts=2, ranks_per_host=1, available=14 * GIB)


def test_what_does_not_fit_is_refused_with_what_would():
    with pytest.raises(UserError) as refusal:
        memory.check_memory(GIB, hosts=64, ranks_per_host=2, available=30 * GIB)
    text = str(refusal.value)
    assert "64 hosts of 2 x 6." in text
    assert "30.0 GiB are available" in text
    assert text.endswith("; 2 would fit")
    assert "\n" not in text
    memory.check_memory(GIB, hosts=2, ranks_per_host=2, available=30 * GIB)
    with pytest.raises(UserError):
        memory.check_memory(GIB, hosts=3, ranks_per_host=2, available=30 * GIB)


def test_it_is_said_that_not_even_one_host_fits():
    with pytest.raises(UserError, match="not even 1 would fit"):
        memory.check_memory(GIB, hosts=1, ranks_per_host=1, available=GIB)


def test_more_hosts_than_any_machine_has_memory_for_are_refused_here():
    with pytest.raises(UserError, match=r"\d+ would fit"):
        memory.check_memory(GIB, hosts=4096, ranks_per_host=1)


def test_this_machine_has_some_memory_and_no_more_than_it_was_built_with():
    total = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    assert 0 < memory.available_bytes() <= total


@pytest.mark.parametrize(
    ("files", "rest"),
    [
        ({"max": "1000", "current": "700", "stat": "anon 5\ninactive_file 200\n"}, 500),
        ({"max": "max", "current": "700", "stat": "inactive_file 200\n"}, None),
        ({"max": "1000", "current": "1300", "stat": "inactive_file 0\n"}, 0),
        ({}, None),
    ],
)
def test_a_control_group_of_version_2_limits(tmp_path, files, rest):
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory.group_rest(tmp_path, "max") == rest


def test_a_control_group_of_version_1_limits(tmp_path):
    files = {
        "limit_in_bytes": "1000\n",
        "usage_in_bytes": "900\n",
        "stat": "inactive_file 20\ntotal_inactive_file 100\n",
    }
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory.group_rest(tmp_path, "limit_in_bytes") == 200
