"""Two sweeps compared: what belongs together, which word it gets, and how the command ends."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from common.harness.cli import main
from common.results import stats
from common.results.stats import Difference
from common.results.timed import compare
from common.results.timed.rows import make_rows
from dear.errors import UserError
from tests.unit.made_record import record, sweep, with_iters


def trial(algorithm="ddp", step_s=0.1, noise=0.01, seed=0, repeats=5, **more):
    """Repeats that differ by chance, as launches do, and steps within them; each of its own run."""
    built = record(algorithm, step_s, run=f"run {seed}", **more)
    random = np.random.default_rng(seed)
    iters = [
        [[step_s * math.exp(noise * (luck + random.standard_normal() / 4)) for _ in range(6)]]
        for luck in random.standard_normal(repeats)
    ]
    return with_iters(built, iters)


def test_trials_are_matched_by_identity_then_by_label_then_by_place():
    same = [trial("ddp"), trial("dear"), trial("wfbp", world=4)]
    assert [(a.label, b.label) for a, b in compare.pairs(same, same[::-1])] == [
        ("ddp", "ddp"),
        ("dear", "dear"),
        ("wfbp", "wfbp"),
    ]
    changed = trial("dear", options={"threshold_mb": 5.0})  # another identity, the same label
    assert [b.hash for _, b in compare.pairs([trial("dear")], [changed])] == [changed.hash]
    ((item, other),) = compare.pairs([trial("ddp")], [trial("dear"), trial("dear", world=8)])
    assert (item.label, other.label) == ("ddp", "dear"), "the only ones of their place"
    # What has its own is not matched once more, and of two that would do none is.
    assert compare.pairs([trial("dear")], [trial("dear"), changed])[0][1].hash == same[1].hash
    two = [trial("dear"), changed]
    third = trial("dear", options={"threshold_mb": 10.0})
    for before, after in (([trial("ddp")], [trial("ddp", world=8)]), (two, [third])):
        assert {other for _, other in compare.pairs(before, after)} == {None}
    # A label is another's only if the user says so.
    assert compare.pairs([trial("ddp")], [trial("dear")], other_labels=False)[0][1] is None


def test_a_ratio_has_the_interval_of_the_repeats_and_a_word():
    slow, fast = trial("ddp", 0.1), trial("ddp", 0.08, seed=1)
    (row,) = compare.rows(compare.pairs([slow], [fast]))
    assert row.verdict == "FASTER" and row.ratio == pytest.approx(1.25, rel=0.03)
    assert row.ratio_low < 1.25 < row.ratio_high and row.ratio_high / row.ratio_low < 1.1
    assert row.u_test == pytest.approx(2 / math.comb(10, 5)), "no repeat of one is in the other"
    assert row.more_repeats is None
    (row,) = compare.rows(compare.pairs([fast], [slow]))
    assert row.verdict == "SLOWER"


def test_equal_sweeps_seldom_get_a_word():
    """A/A: 100 sweeps of 4 trials against the same again, each table one chance in 20 at most."""
    worded = 0
    for number in range(100):
        before, after = (
            [
                trial(name, noise=0.03, seed=8 * number + 4 * side + place, repeats=3)
                for place, name in enumerate(("ddp", "dear", "wfbp", "dadt"))
            ]
            for side in range(2)
        )
        rows = compare.rows(compare.pairs(before, after))
        worded += any(row.verdict in ("FASTER", "SLOWER") for row in rows)
    assert worded <= 0.05 * 100 + 2 * (0.05 * 0.95 * 100) ** 0.5


def test_the_ratio_is_the_one_of_a_table_whatever_single_steps_were():
    """Medians of steps would say 1.0: every fourth step of one of them waits."""
    waits = with_iters(trial(), [[[0.1, 0.1, 0.1, 0.3] * 2]] * 3)
    steady = with_iters(trial("dear"), [[[0.1] * 8]] * 3)
    (row,) = compare.rows([(waits, steady)])
    assert row.ratio == pytest.approx(1.5) == row.after / row.before
    (beside,) = [item for item in make_rows([waits, steady], "ddp") if item.speedup]
    assert (row.ratio, row.ratio_low, row.ratio_high) == pytest.approx(
        (beside.speedup, beside.speedup_low, beside.speedup_high)
    )


def test_rounds_of_two_sweeps_are_never_paired_though_there_are_as_many():
    """Both got slower from round to round; that tells nothing of the one by the other."""
    drift = [[[0.1 * factor] * 4] for factor in (1.0, 1.5, 2.0)]
    faster = [[[0.097 * factor] * 4] for factor in (1.0, 1.5, 2.0)]
    before = with_iters(record("ddp", run="A"), drift)
    after = with_iters(record("ddp", run="B"), faster)
    (row,) = compare.rows(compare.pairs([before], [after]))
    assert row.verdict == "UNSURE" and row.ratio_low < 0.7 < 1.5 < row.ratio_high
    # Two algorithms of one sweep took turns.
    beside = with_iters(record("dear", run="A"), faster)
    (row,) = compare.rows(compare.pairs([before], [beside]))
    assert row.verdict == "FASTER" and row.ratio_high / row.ratio_low == pytest.approx(1.0)


def test_how_many_repeats_would_decide():
    slow, close = trial("ddp", 0.1, 0.04, repeats=4), trial("ddp", 0.096, 0.04, 9, repeats=4)
    (row,) = compare.rows(compare.pairs([slow], [close]))
    assert row.verdict == "UNSURE" and 1 <= row.more_repeats < 60
    again = trial("ddp", 0.1, 0.04, repeats=4 + row.more_repeats)
    later = trial("ddp", 0.096, 0.04, 9, repeats=4 + row.more_repeats)
    (decided,) = compare.rows(compare.pairs([again], [later]))
    assert decided.verdict != "UNSURE"
    single = trial("ddp", repeats=1)
    (row,) = compare.rows(compare.pairs([single], [single]))
    assert (row.verdict, row.more_repeats) == ("UNSURE", 2)
    assert compare.u_test(single.repeats, slow.repeats) is None
    # Of 10 repeats: 5 % with an error of 1.2 %, and nothing within 5.8 %, which will be SAME.
    for log_ratio, error, more in ((0.05, 0.012, 1), (0.0, 0.025, 3)):
        ten = Difference(
            log_ratio=log_ratio, error=error, freedom=9, repeats=10, n=100, paired=True
        )
        assert compare.more_repeats(ten, 1) == more


def test_repeats_to_decide_are_those_of_all_comparisons():
    ten = Difference(log_ratio=0.05, error=0.012, freedom=9, repeats=10, n=100, paired=True)
    alone, among = compare.more_repeats(ten, 1), compare.more_repeats(ten, 20)
    assert alone == 1 < among
    later = ten.with_repeats(10 + among)
    assert stats.verdicts([later] * 20)[0] == "FASTER"
    assert stats.detectable(later, 20) < math.expm1(0.05) < stats.detectable(ten, 20)


def test_settings_in_which_a_pair_differs_are_named():
    (row,) = compare.rows(compare.pairs([trial("ddp")], [trial("ddp", dtype="bfloat16", seed=1)]))
    assert row.reason == "also different: dtype float32 -> bfloat16"
    (row,) = compare.rows(compare.pairs([trial("ddp")], [trial("dear", 0.08)]))
    assert row.reason is None, "the label tells it"
    changed = trial("dear", options={"threshold_mb": 5.0})
    (row,) = compare.rows(compare.pairs([trial("dear")], [changed]))
    assert row.reason == "also different: options.threshold_mb 25.0 -> 5.0"


def test_machines_of_all_records_are_compared():
    old, new = ({"cpu": "A", "packages": {"torch": version}} for version in ("1", "2"))
    first, second = record("ddp"), record("wfbp")
    for item in (first, second):
        object.__setattr__(item, "machine", old)
    continued = record("dear")
    object.__setattr__(continued, "machine", new)
    lines = compare.environment([first, second], [first, continued])
    assert lines == ["packages.torch: 1 -> 1, 2"]


def test_repeats_to_decide_are_a_number_or_many():
    (row,) = compare.rows(compare.pairs([trial("ddp", repeats=1)], [trial("ddp", repeats=1)]))
    endless = dataclasses.replace(row, more_repeats=None)
    decided = dataclasses.replace(endless, verdict="SAME")
    table = compare.table([row, endless, decided])
    column = table.titles.index("repeats to decide")
    assert [line[column] for line in table.body] == ["2 more", "many", ""]


def test_what_is_not_believed_is_not_compared():
    wrong = record("ddp", correct=False)
    (row,) = compare.rows(compare.pairs([record("ddp")], [wrong]))
    assert row.verdict is None and row.ratio is None and row.flag.startswith("the second: incorr")
    failed = record("ddp", status="failed")
    (row,) = compare.rows(compare.pairs([failed], [record("ddp")]))
    assert row.status == "failed" and "the first: it was a failed" in row.reason
    assert compare.geometric_mean([row]) is None


def test_what_differs_between_the_machines_is_said_and_other_machines_are_refused():
    item, other = record("ddp"), record("ddp")
    object.__setattr__(item, "machine", {"cpu": "A", "cores": 2, "packages": {"torch": "1"}})
    object.__setattr__(
        other, "machine", {"cpu": "A", "cores": 2, "packages": {"torch": "2"}, "load": [9]}
    )
    compare.refuse_mixed([item], [other])
    assert compare.environment([item], [other]) == ["packages.torch: 1 -> 2"]
    object.__setattr__(other, "machine", {"cpu": "B", "cores": 2})
    with pytest.raises(UserError, match=r"different machines: \('A', 2\) and \('B', 2\); --force"):
        compare.refuse_mixed([item], [other])


@pytest.fixture
def two(tmp_path):
    before = [trial("ddp"), trial("dear", 0.05)]
    after = [trial("ddp", 0.12, seed=5), trial("dear", 0.05, seed=6), trial("wfbp")]
    return str(sweep(tmp_path / "a", before)), str(sweep(tmp_path / "b", after))


def test_the_command_compares_and_fails_on_a_regression(two, capsys):
    assert main(["compare", *two]) == 0
    text = capsys.readouterr().out
    assert "SLOWER" in text and "geometric mean of 2 trials" in text
    assert "trials of the second sweep without a counterpart: 1" in text
    assert main(["compare", *two, "--markdown", "--fail-on", "regression:5%"]) == 3
    out, err = capsys.readouterr()
    assert out.startswith("| model") and err == ""
    assert "\n- slower: mnist_cnn, 2 workers, batch 8, ddp: 0.8" in out
    assert main(["compare", *two, "--fail-on", "regression:30%"]) == 0
    capsys.readouterr()
    assert main(["compare", f"{two[0]}@ddp", f"{two[0]}@algorithm=dear", "--json"]) == 0
    (pair,) = json.loads(capsys.readouterr().out)["pairs"]
    assert pair["algorithm"] == "ddp -> dear" and pair["verdict"] == "FASTER"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["nowhere", "nowhere"], "compare: no records in nowhere"),
        (["{a}@horovod", "{b}"], "no trial matches; there are ddp, dear"),
        (["{a}", "{b}", "--fail-on", "5%"], "--fail-on 5%: must be regression:N%"),
    ],
)
def test_mistakes_are_a_line(two, capsys, given, text):
    a, b = two
    assert main(["compare", *(word.format(a=a, b=b) for word in given)]) == 2
    output = capsys.readouterr().err
    assert text in output and output.count("\n") == 1


def test_a_fault_is_chosen_as_tables_show_it(tmp_path, capsys):
    fault = {"kind": "slow_host", "host": 1, "factor": 5.0}
    slow = record("ddp", 0.2, fault=fault)
    place = str(sweep(tmp_path / "s", [record("ddp"), slow]))
    for none in ("-", "None"):
        both = [f"{place}@fault={none}", f"{place}@fault={slow.fault}"]
        assert main(["compare", *both, "--json"]) == 0
        (pair,) = json.loads(capsys.readouterr().out)["pairs"]
        assert pair["across"] == f"fault - -> {slow.fault}"
    assert main(["compare", place, f"{place}@fault=none"]) == 2
    assert f"there are -, {slow.fault}" in capsys.readouterr().err


def test_an_operand_is_a_label_with_options_or_a_folder_with_an_at(tmp_path, capsys):
    item = record("dear", label="dear(fusion=none)", options={"fusion": "none"})
    place = str(sweep(tmp_path / "resnet50@h200", [record("ddp"), item]))
    sweep(tmp_path / "resnet50", [record("ddp")])
    for first, second in (("@ddp", "@dear(fusion=none)"), ("@algorithm=ddp", "@algorithm=dear")):
        assert main(["compare", place + first, place + second, "--json"]) == 0
        (pair,) = json.loads(capsys.readouterr().out)["pairs"]
        assert pair["algorithm"] == "ddp -> dear(fusion=none)"
    assert main(["compare", place, place]) == 0
    capsys.readouterr()
    for second in ("@netwrok=None", "@netwrok=10gbe"):
        assert main(["compare", place, place + second, "--fail-on", "regression:5%"]) == 2
        assert "'netwrok'; did you mean 'network'?" in capsys.readouterr().err
    assert main(["compare", place, f"{place}@"]) == 2
    assert "needs a label or key=value after the @" in capsys.readouterr().err
