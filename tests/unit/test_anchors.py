"""Published rates beside ours: docs/validation.md, and what goes into it."""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest

from common.models.profile import load, path_of
from common.results.committed import published
from common.results.committed.pages import with_block
from common.results.records import REAL, FabricFacts
from tests.unit import made_record

PLACE = {
    "model": "resnet50@rtx2080ti-modelled",
    "batch_size": 64,
    "network": "10gbe",
    "ranks_per_host": 4,
    "world": 8,
    "profile_digest": load(path_of("resnet50", "rtx2080ti-modelled", 64)).digest,
}


def emulated(algorithm, step_s, **more):
    built = made_record.record(algorithm, step_s, **{**PLACE, **more})
    return dataclasses.replace(built, fabric=FabricFacts(kind="emulated"))


@functools.cache
def computed():
    return published.rates([])


def resnet(rates):
    return {
        rate.method: rate
        for rate in rates
        if (rate.model, rate.network, rate.gpus) == ("ResNet-50", "10GbE", 8)
    }


def test_the_page_is_what_the_command_makes():
    text = published.PAGE.read_text()
    assert published.page(text) == text, "python -m common.results.committed.published makes it"
    assert len(computed()) == 48
    assert all(rate.published > 0 and rate.computed > 0 for rate in computed())
    assert len(re.findall(r"^\| (?:ResNet-50|BERT-Base), 64 \|", text, re.MULTILINE)) == 12


def test_bsp_is_compute_and_one_message_by_hand():
    profile = load(path_of("resnet50", "rtx2080ti-modelled", 64))
    nbytes = profile.parameter_bytes
    # A ring of 8 on lines of 10 Gb/s, and the start-up that MG-WFBP's authors found.
    reduced_s = 5.230272768511732e-4 + 2 * 7 / 8 * nbytes / (10e9 / 8 * 1448 / 1514)
    update_s = 5 * nbytes / profile.memory_bytes_per_s
    by_hand = 8 * 64 / (profile.step_s + reduced_s + update_s)
    assert resnet(computed())["BSP-A2A"].computed == pytest.approx(by_hand, rel=1e-3)
    # No time per byte is less than the line takes.
    for workers in (8, 16, 64):
        least = 2 * (workers - 1) / workers / (10e9 / 8)
        assert published.cost("10GbE", workers).beta_s_per_byte > least


def test_a_believed_record_of_the_same_place_takes_the_place_of_a_computed_rate():
    same = emulated("wfbp", 0.3)
    others = [
        emulated("wfbp", 0.4, ranks_per_host=1),
        emulated("wfbp", 0.4, network="1gbe"),
        emulated("wfbp", 0.4, world=4),
        emulated("wfbp", 0.4, options={"channels": 2}),
        emulated("wfbp", 0.4, profile_digest="of an earlier profile"),
        emulated("wfbp", 0.4, correct=False),
        emulated("ddp", 0.4),
        dataclasses.replace(same, fabric=REAL),
        emulated("wfbp", 0.4, fault={"kind": "kill_rank", "rank": 1}),
    ]
    older = emulated("wfbp", 0.5)
    before, rates = resnet(computed()), resnet(published.rates([older, same, *others]))
    assert rates["WFBP-A2A"].measured == pytest.approx(same.throughput.value)
    assert rates["WFBP-A2A"].ours == rates["WFBP-A2A"].measured != rates["WFBP-A2A"].computed
    for method in set(rates) - {"WFBP-A2A"}:
        assert rates[method] == before[method] and rates[method].measured is None


def test_a_ratio_has_a_star_only_where_both_of_its_rates_were_emulated():
    wfbp = emulated("wfbp", 0.3)
    bsp = emulated("mgwfbp", 0.4, options={"merge": "threshold", "threshold_mb": 512.0})

    def line(records):
        (result,) = [
            line
            for line in published.table(published.rates(records)).splitlines()
            if line.startswith("| ResNet-50, 64 | 10GbE | 8 |")
        ]
        return result

    assert "*" not in line([wfbp])
    # 64 samples of 8 workers in 0.3 and in 0.4 s.
    assert "1.40, 1.33*, -5%" in line([wfbp, bsp])
    assert "1282, 1280*, -0%" in line([wfbp, bsp])


def test_a_page_without_the_place_is_no_page():
    text = with_block("<!-- a -->\nold\n<!-- end -->", "a", "n\\1")
    assert text == "<!-- a -->\nn\\1\n<!-- end -->"
    for text in ("", "<!-- a -->\n<!-- end -->" * 2):
        with pytest.raises(ValueError, match="once, not"):
            with_block(text, "a", "")
