"""The lines that the reference suites print: to the letter, and as their parser reads them."""

from __future__ import annotations

import pytest

from common.harness.ui import log_header as header
from common.harness.ui import log_results as results
from common.harness.ui import rate_lines
from tests.system.made_trials import make_trial


def trial(model="resnet50", device="cuda", world_size=64, sentence_len=None, batch_size=64):
    feed = {"batch_size": batch_size, "sentence_len": sentence_len}
    return make_trial("dear", world_size, model=model, device=device, **feed)


def around(mean, spread):
    """Two rates with this mean and 1.96 population standard deviations of `spread`."""
    return [mean - spread / 1.96, mean + spread / 1.96]


def reference_total(lines, device="GPU"):
    """The references' parser: the word after the last colon of a line with both marks."""
    (line,) = [line for line in lines if "Total " in line and f"{device}(s)" in line]
    return float(line.split(": ")[-1].split()[0])


def test_image_rates_as_the_references_print_them():
    lines = rate_lines(around(123.4, 5.6), 64, "img", "GPU")
    assert lines == [
        "Img/sec per GPU: 123.4 +-5.6",
        "Total img/sec on 64 GPU(s): 7897.6 +-358.4",
    ]
    assert reference_total(lines) == 7897.6


def test_sentence_rates_as_the_references_print_them():
    lines = rate_lines(around(12.3, 0.4), 64, "sen", "GPU")
    assert lines == [
        "Sen/sec per GPU: 12.3 +-0.4",
        "Total sen/sec on 64 GPU(s): 787.2 +-25.6",
    ]
    assert reference_total(rate_lines(around(196.8, 6.4), 4, "sen", "GPU")) == 787.2


def test_totals_on_processors_can_be_parsed_too():
    lines = rate_lines(around(196.8, 6.4), 4, "img", "CPU")
    assert lines[1] == "Total img/sec on 4 CPU(s): 787.2 +-25.6"
    assert reference_total(lines, "CPU") == 787.2


def test_spread_is_that_of_the_population():
    assert rate_lines([100, 102, 98, 101, 99], 4, "img", "GPU") == [
        "Img/sec per GPU: 100.0 +-2.8",
        "Total img/sec on 4 GPU(s): 400.0 +-11.1",
    ]


def test_a_single_iteration_has_no_spread():
    assert rate_lines([7.0], 2, "img", "CPU") == [
        "Img/sec per CPU: 7.0 +-0.0",
        "Total img/sec on 2 CPU(s): 14.0 +-0.0",
    ]


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


def test_header_of_an_image_model():
    assert header(trial(), 25557032) == [
        "Model: resnet50",
        "Batch size: 64",
        "Number of GPUs: 64",
        "# of parameters:  25557032",
        "Running warmup...",
    ]


def test_header_counts_processors_where_there_are_no_gpus():
    assert "Number of CPUs: 2" in header(trial(device="cpu", world_size=2), 1)


@pytest.mark.parametrize("sentence_len", [64, 128])
def test_header_of_bert_large_is_that_of_the_references(sentence_len):
    lines = header(trial("bert", sentence_len=sentence_len), 1)
    assert lines[0] == f"BERT Large Pretraining, Sentence len: {sentence_len}"


def test_header_of_bert_base_says_the_sentence_length():
    first = header(trial("bert_base", sentence_len=64), 1)[0]
    assert first.startswith("BERT ")
    assert first.endswith(" Pretraining, Sentence len: 64")
