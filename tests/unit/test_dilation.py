"""The time scale follows from costs; links are recorded as asked and as measured."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from common.emulation.cluster import network_record
from common.emulation.config import NetworkProfile
from common.emulation.dilation import (
    Calibration,
    Load,
    check_scale,
    choose_time_scale,
    readable_scales,
)
from dear.errors import UserError

# About what a core of a small virtual machine does.
MACHINE = Calibration(cpu_s_per_byte=0.8e-9, memory_bytes_per_s=12e9)
BERT = Load(world_size=4, hosts=4, parameter_bytes=438_000_000, step_s=0.3)
RESNET = Load(world_size=4, hosts=4, parameter_bytes=102_000_000, step_s=0.253)


def network(gbps: float) -> NetworkProfile:
    return NetworkProfile(name=f"{gbps}", gbps=gbps)


def scale(load: Load, gbps: float = 10, machine: Calibration = MACHINE, cores: int = 2) -> float:
    return choose_time_scale(load, network(gbps), machine, cores).time_scale


def test_scales_are_readable_and_grow_for_ever():
    first = list(itertools.islice(readable_scales(), 40))
    assert first[:12] == [1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20]
    assert first == sorted(set(first))
    assert first[-1] > 1000


def test_scales_of_known_cases():
    assert 10 <= scale(BERT) <= 20, "two cores, 10 GbE"
    assert 2 <= scale(RESNET) < scale(BERT), "fewer bytes per second of compute"
    assert scale(BERT, gbps=0.1, cores=16) == 1, "slow links and many cores"
    alone = Load(world_size=1, hosts=1, parameter_bytes=438_000_000, step_s=0.3)
    assert 1 <= scale(alone) <= scale(BERT), "no links to wait for"


def test_the_scale_grows_with_the_load_and_shrinks_with_the_machine():
    base = scale(BERT)
    assert scale(dataclasses.replace(BERT, hosts=16, world_size=16)) > base
    assert scale(dataclasses.replace(BERT, world_size=16)) > base
    assert scale(BERT, gbps=100) > base
    assert scale(BERT, cores=8) < base
    slow = Calibration(cpu_s_per_byte=5e-9, memory_bytes_per_s=4e9)
    assert scale(BERT, machine=slow) > base


def test_the_reason_is_one_line_with_the_numbers():
    choice = choose_time_scale(BERT, network(10), MACHINE, 2)
    assert choice.reason == (
        "0.26 s of update and Python must stay within 5% of 0.53 s, on this machine: "
        "at least 9.9 times slower than real time"
    )
    fits = choose_time_scale(BERT, network(0.1), MACHINE, 16).reason
    assert fits.endswith("CPU seconds a step fit into 53 s of 16 cores")


def test_only_a_replayed_model_can_be_dilated():
    for replayed, given in ((True, None), (True, 10.0), (False, None), (False, 1.0)):
        check_scale(replayed, given)
    with pytest.raises(UserError, match=r"time_scale: 4 would slow the links but not a model"):
        check_scale(False, 4)


def measured(*rates: tuple[float, float]) -> list[dict]:
    return [
        {"host": f"h{i}", "up_gbps": up, "down_gbps": down} for i, (up, down) in enumerate(rates)
    ]


def test_links_near_enough_are_recorded_without_a_note():
    block = network_record(network(10), measured((9.9, 10.1), (9.7, 10.0)))
    assert block["requested"]["gbps"] == 10
    assert block["measured"][1] == {"host": "h1", "up_gbps": 9.7, "down_gbps": 10.0}
    assert (block["off_percent"], block["flagged"], block["notes"]) == (-3.0, False, [])
    assert json.loads(json.dumps(block)) == block


def test_the_worst_link_is_flagged_and_named():
    block = network_record(network(1), measured((1.0, 0.99), (1.02, 0.8)))
    assert (block["off_percent"], block["flagged"]) == (-20.0, True)
    assert block["notes"] == [
        "links are not as asked: h1 down 0.8 Gb/s instead of 1 (-20.0 %)",
    ]
    assert network_record(network(1), measured((1.2, 1.0)))["flagged"]


def test_without_links_there_is_nothing_to_flag():
    block = network_record(network(1), [])
    assert (block["off_percent"], block["flagged"], block["measured"]) == (None, False, [])
