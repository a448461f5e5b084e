"""Claims of other systems: which figure stands beside one, and the word of its row."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from bench.records import todays_trials
from common.results import readme
from common.results.committed import catalogue, claims, ratios
from common.results.committed.claims import Claim, Claimed
from common.results.committed.ratios import Figure, Source
from common.results.records import Record
from common.results.records.learned import Evaluation, Learning, RankPace
from common.results.records.trust import Strain
from common.results.tables.predicted import PredictedRow
from common.virtual.over import Point
from dear.errors import UserError
from tests.unit.made_record import record, sweep, varied, with_first, with_notes

LISTED = claims.claims()
SOURCES = [source for listed in LISTED.values() for each in listed for source in each.sources]
SWEPT = "emulated-quick"  # names of records, whose files the tests make anew
COMPUTED, FILE = "dear-64", "10gbe.json"


def title(source: Source) -> str:
    return f"{source.record}-{source.of}-{source.what[:20]}"


@pytest.mark.parametrize("source", SOURCES, ids=title)
def test_a_figure_is_there_unless_its_record_is_missing(source):
    absent = not (catalogue.FOLDER / source.record).is_dir()
    absent |= source.record in catalogue.withdrawn()
    assert (ratios.figure(source) is None) == absent  # raises if nothing matches
    recipe = catalogue.recipes()[source.record]
    if recipe.sweep is not None:
        trials = [t for t in todays_trials(recipe, []) if t.model.startswith(source.model)]
        trials = [t for t in trials if source.network in (None, t.network)]
        labels = {t.label for t in trials if source.workers in (None, t.world_size)}
        assert {source.of, *source.over} <= labels, "the record will have no such row"


def test_the_page_has_every_system():
    page = (readme.ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    for system in (claims.EVERY, *LISTED):
        assert f"<!-- claims of {system} -->" in page


def row(algorithm: str, step_s: float, *, off: float = 0.1, **more: object) -> PredictedRow:
    place = {"model": "m@gpu", "batch": 8, "world_size": 64, "samples": 512, "network": "10gbe"}
    low, high = step_s * (1 - off), step_s * (1 + off)
    steps = {"step_s": step_s, "step_low_s": low, "step_high_s": high, "compute_s": 0.5}
    return PredictedRow(**(place | steps | {"algorithm": algorithm} | more))


def shelf(folder: Path, rows: list[PredictedRow], records=()) -> Path:
    """Writes a computed record and a sweep."""
    (folder / COMPUTED).mkdir()
    text = json.dumps([asdict(each) for each in rows])
    (folder / COMPUTED / FILE).write_text(text)
    sweep(folder / SWEPT, list(records))
    for name in (COMPUTED, SWEPT):
        manifest = {"started": "2026-01-02T03:04:05", "commit": "0123456789ab"}
        (folder / name / catalogue.MANIFEST).write_text(json.dumps(manifest))
    return folder


ROWS = [row("ddp", 1.2), row("wfbp", 2.0), row("dear", 1.0)]
ROWS += [row("ddp", 3.0, model="n@gpu"), row("dear", 1.5, model="n@gpu")]
PREDICTED = {"record": COMPUTED, "file": FILE, "of": "dear", "over": ("ddp",)}


def test_a_predicted_figure_is_the_ratio_to_the_fastest_rival(tmp_path):
    folder = shelf(tmp_path, ROWS)
    best = Source(**(PREDICTED | {"over": ("wfbp", "ddp"), "model": "m"}))
    assert ratios.figure(best, folder).value == pytest.approx(1.2)
    largest = ratios.figure(Source(**PREDICTED, take="largest"), folder)
    assert (largest.value, largest.of) == (2.0, "n")
    assert ratios.figure(Source(**PREDICTED, take="smallest"), folder).of == "m"
    alone = Source(record=COMPUTED, file=FILE, of="dear", model="m", measure="efficiency")
    figure = ratios.figure(alone, folder)
    known = (figure.value, figure.low, figure.high)
    assert known == pytest.approx((0.5, 0.5 * 1.02 / 1.1, 0.5 * 0.98 / 0.9))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"of": "nobody"}, "no rows match"),
        ({"over": ("ddp", "nobody")}, "no single row of each label"),
        ({"network": "1gbe"}, "no rows match"),
        ({"workers": 8}, "no rows match"),
        ({"at": "1 ms"}, "no rows match"),
        ({"fault": True}, "no rows match"),
        ({}, "2 settings match"),
    ],
)
def test_rows_that_do_not_match_are_an_error(tmp_path, changed, message):
    with pytest.raises(UserError, match=message):
        ratios.figure(Source(**(PREDICTED | changed)), shelf(tmp_path, ROWS))


def test_a_point_of_a_series_and_a_fault_choose_rows(tmp_path):
    point = Point(axis="bandwidth", value=10)
    slow = {"fault": "slow_host h3", "samples": 128}
    rows = [row("ddp", 4.0, point=point), row("dear", 1.0, point=point), *ROWS[:3]]
    folder = shelf(tmp_path, [*rows, row("dear", 0.5, **slow)])
    assert ratios.figure(Source(**PREDICTED, at="10 Gb/s"), folder).value == 4
    kept = PREDICTED | {"over": ("dear",), "fault": True, "over_fault": False, "at": ""}
    assert ratios.figure(Source(**kept), folder).value == 0.5  # a quarter of the samples, twice


def test_a_doubted_or_missing_result_decides_nothing(tmp_path):
    rows = [
        row("ddp", 1.2, event_model_s=9.0),
        row("dear", 1.0),
        replace(row("wfbp", 1.0), step_s=None),
    ]
    folder = shelf(tmp_path, rows)
    figure = ratios.figure(Source(**PREDICTED), folder)
    assert figure.doubt.startswith("the event model") and figure.text.startswith("[1.20")
    claim = Claim(claim="c", claimed="1.2", setting="s", source="s")
    assert claim.word(figure) == "undecided"
    failed = ratios.figure(Source(**(PREDICTED | {"over": ("ddp", "wfbp")})), folder)
    assert (failed.text, claim.word(failed)) == ("[no result]", "undecided")
    flagged = [record("ddp"), with_notes(record("dear"), "disturbed: by somebody")]
    (tmp_path / "second").mkdir()
    folder = shelf(tmp_path / "second", rows, flagged)
    assert ratios.figure(Source(record=SWEPT, of="dear", over=("ddp",)), folder).doubt


def test_a_rival_or_a_larger_figure_that_is_in_doubt_is_told(tmp_path):
    flagged = with_notes(record("horovod", 0.15), "disturbed: by somebody")
    folder = shelf(tmp_path, ROWS, [record("ddp", 0.11), record("dear", 0.1), flagged])
    figure = ratios.figure(Source(record=SWEPT, of="dear", over=("ddp", "horovod")), folder)
    assert figure.value == pytest.approx(1.1) and figure.doubt and figure.text.startswith("[1.10")
    (tmp_path / "second").mkdir()
    doubted = [row("ddp", 3.0, model="n@gpu", event_model_s=99.0), row("dear", 1.5, model="n@gpu")]
    largest = Source(**PREDICTED, take="largest")
    figure = ratios.figure(largest, shelf(tmp_path / "second", [*ROWS[:3], *doubted]))
    assert (figure.of, figure.without, figure.doubt) == ("m", "n", None)
    assert figure.text.endswith(", m; without n")


@pytest.mark.parametrize(
    ("value", "word"),
    [(0.89, "less"), (0.905, "agrees"), (1.095, "agrees"), (1.105, "more")],
)
def test_what_agrees_is_at_most_a_tenth_away_on_either_side(value, word):
    figure = Figure(value=value, low=value, high=value)
    other = "more" if value > 1 else "less"
    assert Claimed.of("1").word(figure, 0.1).replace("differs", other) == word


def test_a_measured_figure_is_that_of_the_tables(tmp_path):
    records = [varied("ddp", (1.0, 1.01, 0.99), 0.12), varied("dear", (1.0, 1.0, 1.0), 0.1)]
    records.append(record("none", 0.06, 1))
    folder = shelf(tmp_path, ROWS, records)
    figure = ratios.figure(Source(record=SWEPT, of="dear", over=("ddp",)), folder)
    shown = readme.value_of(folder / SWEPT, "speedup of dear, mnist as .6f")
    assert figure.value == pytest.approx(float(shown), abs=1e-5) and figure.low < 1.2 < figure.high
    alone = ratios.figure(Source(record=SWEPT, of="dear", measure="efficiency"), folder)
    assert alone.value == pytest.approx(0.6)


def trained(algorithm: str, rates: list[float], accuracy: float, *, target=None, **more):
    """A training trial with a run for each rate (steps per second of rank 0)."""
    plain = record(algorithm, **more)
    learn = {"budget_s": 2.0, "data": "mnist", "target_accuracy": target, "eval_every_s": 1.0}
    marks = [
        Evaluation(at_s=at, seconds=at, steps=[9, 9], accuracy=accuracy * at / 2)
        for at in (0.0, 1.0, 2.0)
    ]
    results = []
    for seed, rate in enumerate(rates):
        ranks = [
            RankPace(steps=int(100 * r), samples=int(800 * r), elapsed_s=100.0) for r in (rate, 1.0)
        ]
        learning = Learning(evaluations=marks, ranks=ranks, seed=seed)
        per_s = sum(pace.samples for pace in ranks) / 100.0
        run = with_first(plain, learning=learning, iters=[], samples_per_s=per_s)
        results += run.results[:1]
    trial = plain.trial | {"learn": learn}
    return replace(plain, trial=trial, results=results)


def test_trainings_are_compared_by_accuracy_throughput_or_time_to_the_target(tmp_path):
    fault = {"kind": "slow_host", "host": 1, "factor": 5.0, "at_s": 0.0}
    records = [trained("ddp", [3, 3.1, 3], 0.8), trained("dear", [7, 7.1, 7], 0.9)]
    slowed = trained("dear", [1, 1.1, 1], 0.9, seed=5)
    slowed = replace(slowed, trial=slowed.trial | {"fault": fault, "ranks_per_host": 1})
    folder = shelf(tmp_path, ROWS, [*records, slowed])
    source = Source(record=SWEPT, of="dear", over=("ddp",), measure="accuracy")
    assert ratios.figure(source, folder).value == pytest.approx(0.9 / 0.8)
    kept = Source(record=SWEPT, of="dear", over=("dear",), measure="throughput", fault=True,
                  over_fault=False)  # fmt: skip
    figure = ratios.figure(kept, folder)
    assert figure.value == pytest.approx(0.25, rel=0.02) and figure.low < 0.25 < figure.high

    (tmp_path / "second").mkdir()
    records = [trained("ddp", [1, 1], 0.4, target=0.4), trained("dear", [1, 1], 0.8, target=0.4)]
    folder = shelf(tmp_path / "second", ROWS, records)
    race = Source(record=SWEPT, of="dear", over=("ddp",))
    figure = ratios.figure(race, folder)
    assert figure.value == pytest.approx(2.0) and figure.doubt is None
    (tmp_path / "third").mkdir()
    records[0] = trained("ddp", [1, 1], 0.3, target=0.4)
    assert "missed the target" in ratios.figure(race, shelf(tmp_path / "third", [], records)).doubt


def test_too_few_cores_make_doubtful_what_a_training_takes_but_not_what_its_epochs_reach(tmp_path):
    def starved(label: str, accuracy: float, epochs: int | None) -> Record:
        plain = trained(label, [1, 1], accuracy)
        results = [replace(result, strain=Strain(main_wait=0.3)) for result in plain.results]
        trial = plain.trial | {"learn": plain.trial["learn"] | {"epochs": epochs}}
        fabric = replace(plain.fabric, kind="real")
        return replace(plain, trial=trial, results=results, fabric=fabric)

    for name, epochs in (("epochs", 5), ("seconds", None)):
        records = [starved("ddp", 0.8, epochs), starved("dear", 0.9, epochs)]
        (tmp_path / name).mkdir()
        folder = shelf(tmp_path / name, ROWS, records)
        assert "short of cores" in ratios.figure(_source("throughput"), folder).doubt
        doubt = ratios.figure(_source("accuracy"), folder).doubt
        assert doubt is None if epochs else "short of cores" in doubt


def _source(measure: str) -> Source:
    return Source(record=SWEPT, of="dear", over=("ddp",), measure=measure)


@pytest.mark.parametrize(
    ("claimed", "low", "high", "word"),
    [
        ("1.5", 1.40, 1.60, "agrees"),
        ("1.5", 1.30, 1.60, "undecided"),
        ("1.5", 1.60, 1.70, "undecided"),
        ("1.5", 1.10, 1.30, "less"),
        ("1.5", 0.98, 1.30, "less"),
        ("1.5", 0.90, 0.99, "less"),
        ("1.5", 0.80, 0.90, "differs"),
        ("1.5", 1.70, 1.80, "more"),
        ("0.5", 0.60, 0.70, "more"),
        ("0.5", 1.03, 1.30, "differs"),
        ("3 / 2", 1.45, 1.55, "agrees"),
        ("1.2 to 1.8", 1.10, 1.97, "agrees"),
        ("1.2 to 1.8", 1.05, 1.50, "undecided"),
        ("below 1", 0.90, 1.00, "agrees"),
        ("below 1", 0.99, 1.01, "undecided"),
        ("below 1", 1.01, 1.02, "more"),
        ("below 1", 1.03, 1.04, "differs"),
        ("below 1.25", 1.26, 1.30, "more"),
        ("at least 1", 1.00, 9.00, "agrees"),
        ("at least 1", 0.99, 1.01, "undecided"),
        ("at least 0.95", 0.60, 0.70, "less"),
        ("at least 1", 0.60, 0.70, "differs"),
    ],
)
def test_the_word_follows_from_the_numbers(claimed, low, high, word):
    claim = Claim(claim="c", claimed=claimed, setting="s", source="s")
    assert claim.word(Figure(value=(low + high) / 2, low=low, high=high)) == word
    assert claim.word(Figure(value=1.0)) == "undecided", "a single repeat"
    assert claim.word(None) == "not yet"


def test_a_claim_may_allow_less_than_the_usual_distance():
    claim = Claim(claim="c", claimed="1", setting="s", source="s", within=0.01)
    assert claim.word(Figure(value=1.0, low=0.98, high=1.01)) == "undecided"
    assert claim.word(Figure(value=1.0, low=0.995, high=1.005)) == "agrees"


ENTRY = {"claim": "DeAR is fast", "claimed": "2", "setting": "Here", "source": "A paper"}
EMULATED = {"record": SWEPT, "of": "dear", "over": "ddp"}


def listed(tmp_path: Path, **keys: object) -> dict[str, list[Claim]]:
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump({"DeAR": [ENTRY | keys]}))
    return claims.claims(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"claimed": "fast"}, "'fast' is not of the form 1.83, "),
        ({"claimed": "2 to 1"}, "the smaller number comes first"),
        ({"claimd": "1"}, "unknown key of a claim 'claimd'"),
        ({"emulated": EMULATED | {"record": "nothing"}}, "unknown record of claims.yaml 'nothing'"),
        ({"emulated": PREDICTED}, "an emulated figure is that of a sweep"),
        ({"predicted": EMULATED}, "a predicted figure needs `file`"),
        ({"predicted": PREDICTED | {"file": "x.json"}}, "no command of dear-64 writes x.json"),
        ({"emulated": EMULATED | {"file": FILE}}, "emulated-quick is not computed"),
        ({"emulated": {"record": COMPUTED, "of": "a", "over": "b"}}, "dear-64 is no sweep"),
        ({"emulated": EMULATED | {"over": []}}, "`over` is needed except for efficiency"),
        ({"changed": [PREDICTED]}, "each changed assumption needs `what`"),
    ],
)
def test_an_entry_that_is_wrong_is_one_line(tmp_path, keys, message):
    values = {key: json.loads(json.dumps(value)) for key, value in keys.items()}
    with pytest.raises(UserError, match=message):
        listed(tmp_path, **values)


def test_a_table_has_figures_and_words_and_nothing_of_a_withdrawn_record(tmp_path, monkeypatch):
    changed = json.loads(json.dumps(PREDICTED | {"model": "n", "what": "the model is n"}))
    predicted = json.loads(json.dumps(PREDICTED | {"model": "m"}))
    known = listed(tmp_path, emulated=EMULATED | {"what": "two hosts"}, predicted=predicted,
                   changed=[changed])  # fmt: skip
    monkeypatch.setattr(claims, "_listed", lambda: known)
    (tmp_path / "shelf").mkdir()
    folder = shelf(tmp_path / "shelf", ROWS, [record("ddp", 0.4), record("dear", 0.2)])
    page = "<!-- claims of all -->\n<!-- end -->\n# DeAR\n<!-- claims of DeAR -->\n<!-- end -->\n"
    text = readme.filled(page, folder, folder)
    assert "| [DeAR](#dear) | 1 |  | 1 |  |  |  |  |" in text
    assert (
        "| 1 | DeAR is fast | 2 | 2.00 (2.00 to 2.00) | 1.20 (1.20 to 1.20) | **less** |\n"
        "|  | ... if the model is n |  |  | 2.00 (2.00 to 2.00) | agrees |\n" in text
    )
    assert "1. Here (A paper). Emulated: two hosts.\n" in text
    assert f"[{COMPUTED}]({COMPUTED}) (2026-01-02, commit 0123456789ab)" in text
    assert readme.filled(text, folder, folder) == text and readme.quoted(text) == []

    (folder / catalogue.WITHDRAWN).write_text(f"{COMPUTED}: it is old\n")
    text = readme.filled(text, folder, folder)
    assert f"| 2.00 (2.00 to 2.00) | not yet (`{COMPUTED}`) | **not yet** |" in text
    assert f"|  | ... if the model is n |  |  | not yet (`{COMPUTED}`) | not yet |" in text
    assert "1.20" not in text and f"[{COMPUTED}]" not in text
    with pytest.raises(UserError, match=r"unknown system of claims.yaml 'Dear'"):
        readme.filled(page.replace("of DeAR", "of Dear"), folder, folder)


def test_the_word_of_a_row_is_that_of_the_claims_own_setting(tmp_path):
    doubted = [row("ddp", 2.0, model="o@gpu", event_model_s=9.0), row("dear", 1.0, model="o@gpu")]
    folder = shelf(tmp_path, ROWS + doubted, [record("ddp", 0.4), record("dear", 0.2)])
    near, far = Source(**PREDICTED, model="m"), Source(record=SWEPT, of="dear", over=("ddp",))
    scaled = replace(far, what="two hosts")
    claim = Claim(**ENTRY, emulated=far, predicted=near)
    assert claim.standing(folder) == "agrees", "emulated in the setting of the claim"
    assert replace(claim, emulated=scaled).standing(folder) == "less"
    (folder / catalogue.WITHDRAWN).write_text(f"{SWEPT}: it is old\n")
    assert claim.standing(folder) == "less", "predicted, since nothing is emulated"
    (folder / catalogue.WITHDRAWN).write_text(f"{COMPUTED}: it is old\n")
    assert replace(claim, emulated=scaled).standing(folder) == "not yet", "its own setting first"
    doubted = replace(claim, emulated=scaled, predicted=replace(near, model="o"))
    (folder / catalogue.WITHDRAWN).write_text("")
    assert doubted.standing(folder) == "agrees", "what is predicted in its setting decides nothing"


def test_claimed_ratios_are_read():
    assert Claimed.of("301.8 / 213").low == pytest.approx(1.4169, abs=1e-4)
    assert Claimed.of("below 1") == Claimed(low=None, high=1.0)
    assert Claimed.of("at least 0.95") == Claimed(low=0.95, high=None)
