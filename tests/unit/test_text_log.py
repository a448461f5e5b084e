"""The lines that the reference suites print: to the letter, and as their parser reads them."""

from __future__ import annotations

import datetime
import re

import pytest

from common.harness.running.ui import log_header, rate_lines
from common.harness.running.ui import log_results as results
from tests.system.made import make_trial


def trial(model="resnet50", device="cuda", world_size=64, sentence_len=None, batch_size=64):
    feed = {"batch_size": batch_size, "sentence_len": sentence_len}
    return make_trial("dear", world_size, model=model, device=device, **feed)


def around(mean, spread):
    """Two rates with this mean and 1.96 population standard deviations of `spread`."""
    return [mean - spread / 1.96, mean + spread / 1.96]


@pytest.mark.parametrize(
    ("rates", "size", "unit", "device", "each", "total", "spread"),
    [
        (around(123.4, 5.6), 64, "img", "GPU", "123.4 +-5.6", 7897.6, "358.4"),
        (around(12.3, 0.4), 64, "sen", "GPU", "12.3 +-0.4", 787.2, "25.6"),
        (around(196.8, 6.4), 4, "sen", "GPU", "196.8 +-6.4", 787.2, "25.6"),
        (around(196.8, 6.4), 4, "img", "CPU", "196.8 +-6.4", 787.2, "25.6"),
        # The spread is that of the population; a single iteration has none.
        ([100, 102, 98, 101, 99], 4, "img", "GPU", "100.0 +-2.8", 400.0, "11.1"),
        ([7.0], 2, "img", "CPU", "7.0 +-0.0", 14.0, "0.0"),
    ],
)
def test_rates_as_the_references_print_and_parse_them(
    rates, size, unit, device, each, total, spread
):
    lines = rate_lines(rates, size, unit, device)
    assert lines == [
        f"{unit.capitalize()}/sec per {device}: {each}",
        f"Total {unit}/sec on {size} {device}(s): {total} +-{spread}",
    ]
    # Their parser takes the word after the last colon of a line with both marks.
    (line,) = [line for line in lines if "Total " in line and f"{device}(s)" in line]
    assert float(line.split(": ")[-1].split()[0]) == total


def test_results_of_an_image_model():
    # Batch 10: iterations of two steps with 100 and 102 samples per second and worker.
    iters = [[0.12, 0.08], [10 / 102, 10 / 102]]
    assert results(trial(world_size=4, batch_size=10), iters) == [
        "Iter #0: 100.0 img/sec per GPU",
        "Iter #1: 102.0 img/sec per GPU",
        "Iteraction time: 0.099 +-0.002",
        "Img/sec per GPU: 101.0 +-2.0",
        "Total img/sec on 4 GPU(s): 404.0 +-7.8",
    ]


def test_results_of_a_sentence_model():
    bert = trial("bert_base", device="cpu", world_size=2, sentence_len=64, batch_size=8)
    assert results(bert, [[0.5, 0.5]]) == [
        "Iter #0: 16.0 sentences/sec per CPU",
        "Iteraction time: 0.500 +-0.000",
        "Sen/sec per CPU: 16.0 +-0.0",
        "Total sen/sec on 2 CPU(s): 32.0 +-0.0",
    ]


def header(made, parameters):
    return log_header(made, parameters, "python x", datetime.datetime(2022, 3, 3, 10, 20, 30))


def test_headers_are_those_of_the_references():
    assert header(trial(), 25557032) == [
        "#Date: Mar 03 2022 10:20:30",
        "#CMD: python x",
        "Model: resnet50",
        "FP16: False",
        "Batch size: 64",
        "Number of GPUs: 64",
        "# of parameters:  25557032",
        "Running warmup...",
    ]
    assert "Number of CPUs: 2" in header(trial(device="cpu", world_size=2), 1)
    for size in (64, 128):
        first = header(trial("bert", sentence_len=size), 1)[2]
        assert first == f"BERT Large Pretraining, Sentence len: {size}"
    first = header(trial("bert_base", sentence_len=64), 1)[2]
    assert re.fullmatch("BERT .*Pretraining, Sentence len: 64", first)
