"""The regimes of collectives as Python is told of them; `regimes_test.cc` counts what goes out."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import comm_core
from tests.comm import worlds

MIB = 1 << 20


def _of_group(operation: str) -> tuple[comm_core.Regime, ...]:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return tuple(comm_core.Regime(*row) for row in backend.regimes(operation))


@pytest.mark.parametrize(
    ("world", "size", "hosts"), [("tcp3", 3, 3), ("shm2", 2, 1), ("hosts0011", 4, 2)]
)
def test_a_group_has_the_regimes_of_its_hosts(world: str, size: int, hosts: int) -> None:
    with worlds.pool(world) as ranks:
        for operation in ("all_reduce", "broadcast"):
            expected = comm_core.regimes(operation, size, hosts)
            assert ranks.run(_of_group, operation) == [expected] * size


def test_a_group_of_unequal_hosts_goes_over_lanes_alone() -> None:
    with worlds.pool("hosts001") as ranks:
        assert ranks.run(_of_group, "all_gather")[0] == comm_core.regimes("all_gather", 3)


def test_the_environment_moves_a_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    before = comm_core.regimes("all_reduce", 4)
    assert [regime.name for regime in before] == ["direct", "two_hops", "pieces", "pipeline"]
    for regime in before[1:]:
        if regime.setting:
            monkeypatch.setenv(regime.setting, str(MIB // 2))
    after = {regime.name: regime.first_nbytes for regime in comm_core.regimes("all_reduce", 4)}
    assert after == {"direct": 0, "pieces": MIB // 2, "pipeline": 8 * MIB}


@pytest.mark.parametrize("arguments", [("all_to_all", 4), ("all_reduce", 1), ("all_reduce", 4, 3)])
def test_what_has_no_regimes_is_refused(arguments: tuple[str, int]) -> None:
    with pytest.raises(ValueError, match=r"regimes|ranks"):
        comm_core.regimes(*arguments)
