"""The checks of the emulation's fidelity: their arithmetic and their manners."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from bench import fidelity_collective, fidelity_links, fidelity_scales
from bench.fidelity_report import verdict

SCRIPT = Path(__file__).parents[1] / "bench" / "fidelity.py"


def test_a_deviation_counts_in_both_directions():
    assert [verdict(off, 2.0) for off in (1.9, -1.9, 2.1, -2.1)] == ["ok", "ok", "MISSED", "MISSED"]


def test_a_link_is_judged_by_the_median_of_its_rounds():
    rounds = [
        [{"host": "h0", "up_gbps": up, "down_gbps": 1.0}] for up in (0.5, 0.99, 0.97, 0.985, 1.0)
    ]
    case = fidelity_links.Case(gbps=1.0, time_scale=1, rounds=rounds)
    assert case.links() == {"h0 up": 0.985, "h0 down": 1.0}
    assert case.off_percent() == pytest.approx(-1.5)
    assert fidelity_links.table([case]).splitlines()[1].split()[-1] == "ok"


def test_an_all_reduce_is_compared_with_its_payload_and_with_its_frames():
    case = fidelity_collective.Case(
        engine="comm_core", mtu=1500, payload_s=1.0, rounds=[[1.05, 1.07], [1.2]]
    )
    assert case.framed_s == pytest.approx(1514 / 1448)
    assert case.over_percent == pytest.approx(7.0)
    jumbo = fidelity_collective.Case(engine="comm_core", mtu=9000, payload_s=1.0)
    assert jumbo.framed_s < 1.01


def test_scales_are_compared_by_their_medians():
    case = fidelity_scales.Case(algorithm="ddp", at_k_s=[1.0, 1.03, 1.2], at_2k_s=[0.9, 1.0, 1.0])
    assert case.off_percent == pytest.approx(3.0)
    assert "ddp" in fidelity_scales.table([case])


@pytest.mark.parametrize("ended", ["at_k_s", "at_2k_s"])
def test_a_round_that_ended_early_is_left_out_of_the_spread(ended):
    times = {"at_k_s": [1.0, 1.0], "at_2k_s": [2.0, 2.0]}
    times[ended].pop()
    case = fidelity_scales.Case(algorithm="ddp", **times)
    assert "(0.50..0.50, 1 rounds)" in fidelity_scales.table([case])


def test_both_scales_run_the_same_trial():
    args = argparse.Namespace(
        algorithms=["ddp"], model="m@d", batch_size=8, hosts=4, network="10gbe", steps=3
    )
    slow, fast = (fidelity_scales.experiment(args, scale, "x") for scale in (10, 20))
    assert slow.pop("cluster")["time_scale"] == 10
    assert fast.pop("cluster")["time_scale"] == 20
    assert slow == fast


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["links", "--repeats", "0"], "--repeats 0: must be at least 1"),
        (["scales", "--time-scale", "0"], "--time-scale must be greater than 0"),
        (["scales", "--algorithms", "ddp", "ddp"], "--algorithms names one twice"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(arguments, said):
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {said}")
    assert len(done.stderr.splitlines()) == 1
