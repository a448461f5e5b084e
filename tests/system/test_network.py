"""The command that measures the network, run small."""

from __future__ import annotations

import json

import pytest

from common.profiling.network import record, table
from dear.cost.collectives import Measurement
from dear.errors import UserError
from tests.system.processes import python


def test_network_starts_its_own_ranks_and_writes_the_fit(tmp_path):
    path = tmp_path / "network.json"
    arguments = ["--ranks", "2", "--largest", "65536", "--repeats", "2", "--json", str(path)]
    done = python("-m", "common.profiling.network", *arguments)
    assert done.returncode == 0, done.stderr
    assert "all_reduce: alpha" in done.stdout
    kept = json.loads(path.read_text())
    assert (kept["kind"], kept["ranks"]) == ("network", 2)
    assert set(kept["collectives"]) == {"all_reduce", "reduce_scatter", "all_gather", "exchange"}
    for found in kept["collectives"].values():
        assert found["nbytes"] == [4096, 8192, 16384, 32768, 65536]
        assert found["alpha_s"] >= 0 and found["beta_s_per_byte"] >= 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--ranks", "1"], "--ranks"),
        (["--repeats", "0"], "--repeats"),
        (["--largest", "5"], "--largest"),
        (["--operations", "all_reduse"], "did you mean 'all_reduce'"),
        (["--json", "/nowhere/at/all.json"], "/nowhere/at"),
    ],
)
def test_network_refuses_mistakes_in_one_line(arguments, named, monkeypatch):
    from common.profiling import network

    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError) as caught:
        network.main(arguments)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


LINE = Measurement(
    operation="all_reduce",
    nbytes=[4096, 65536, 1048576],
    seconds=[[1e-4 + 1e-9 * n] * 3 for n in (4096, 65536, 1048576)],
)


def test_the_table_says_what_the_fit_is_and_the_record_keeps_every_time():
    lines = table([LINE])
    assert lines[0].split() == ["bytes", "all_reduce", "us"]
    assert lines[1].split() == ["4096", "104.1"]
    assert lines[-1].endswith("alpha 100.0 us, beta 1.0000 ns/byte (1.000 GB/s), median error 0 %")
    kept = json.loads(json.dumps(record([LINE], 4, "gloo")))
    assert kept["collectives"]["all_reduce"]["seconds"] == LINE.seconds
    assert kept["collectives"]["all_reduce"]["alpha_s"] == pytest.approx(1e-4)
