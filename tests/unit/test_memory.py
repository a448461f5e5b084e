"""Will the ranks fit: what is needed, what there is, and what a user is told."""

from __future__ import annotations

import pytest

from common import machine as memory
from dear.errors import UserError

GIB = 1 << 30


def test_a_rank_needs_several_copies_of_its_parameters():
    small, large = memory.required_bytes(0, 2), memory.required_bytes(GIB, 2)
    assert small < 0.5 * GIB
    assert 5 * GIB <= large - small <= 8 * GIB
    assert memory.required_bytes(GIB, 2, optimizer_copies=2) == large + 2 * GIB


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
    with pytest.raises(UserError, match="not even 1 would fit"):
        memory.check_memory(GIB, hosts=1, ranks_per_host=1, available=GIB)


@pytest.mark.parametrize(
    ("limit", "files", "rest"),
    [
        ("max", {"max": "1000", "current": "700", "stat": "anon 5\ninactive_file 200\n"}, 500),
        ("max", {"max": "max", "current": "700", "stat": "inactive_file 200\n"}, None),
        ("max", {"max": "1000", "current": "1300", "stat": "inactive_file 0\n"}, 0),
        ("max", {}, None),
        (
            "limit_in_bytes",  # version 1
            {
                "limit_in_bytes": "1000\n",
                "usage_in_bytes": "900\n",
                "stat": "inactive_file 20\ntotal_inactive_file 100\n",
            },
            200,
        ),
    ],
)
def test_a_control_group_limits(tmp_path, limit, files, rest):
    for name, text in files.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory.group_rest(tmp_path, limit) == rest
