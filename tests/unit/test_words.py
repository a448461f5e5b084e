"""Verdicts on pairs of equal trials."""

from __future__ import annotations

import dataclasses
import itertools
from subprocess import CompletedProcess

import pytest

from bench import words
from common.harness.experiment import load
from common.results.store import Comparison, append
from tests.unit.made_record import record, with_iters, with_notes

MACHINE = {"cores": 2, "cpu": "CPU", "packages": {"torch": "2"}, "commit": "abc"}


def varied(algorithm, factors, step_s=0.1, **more):
    made = record(algorithm, step_s, **more)
    iters = [[[step_s * factor] * 2] for factor in factors]
    return dataclasses.replace(with_iters(made, iters), machine=MACHINE)


@pytest.fixture
def sweep(tmp_path):
    """`sweep(records)` is the folder of a sweep that holds them."""

    def sweep(records, compare_to="ddp"):
        for one in records:
            append(tmp_path / "records.jsonl", one)
        trials = tuple(one.hash for one in records)
        Comparison(compare_to=compare_to, trials=trials).save(tmp_path)
        return tmp_path

    return sweep


def twin(made, factor=1.0):
    trial = made.trial | {"label": f"{made.label} again", "twin": 1}
    iters = [[[step * factor for step in made.iters[i - 1][0]]] for i, _ in enumerate(made.iters)]
    made = with_iters(made, iters)
    return dataclasses.replace(made, hash=f"{made.hash}-again", trial=trial)


def test_words_of_twins_are_judged_among_the_pairs_of_a_cell(sweep, capsys):
    ddp, dear = varied("ddp", (1, 1.01, 0.99)), varied("dear", (1, 1.002, 0.998))
    doubted = with_notes(varied("wfbp", (1, 1, 1)), "disturbed: very")
    folder = sweep([ddp, twin(ddp), dear, twin(dear), doubted, twin(doubted)])
    assert words.main(["read", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "0 of 2 rows (0.0%) have a false word; SAME 2, UNSURE 0; 1 are not believed" in out
    assert "disturbed: very" in out
    folder = sweep([ddp, twin(ddp), dear, twin(dear, 1.1)])
    assert words.main(["read", str(folder)]) == 3
    assert "1 of 2 rows (50.0%) have a false word" in capsys.readouterr().out
    assert words.main(["read", str(sweep([ddp, dear]))]) == 1


def test_sweeps_of_twins_have_every_algorithm_twice_and_go_on(monkeypatch, tmp_path, capsys):
    ran = []

    def run(command, stdout):
        ran.append(command)
        overrides = [text for flag, text in itertools.pairwise(command) if flag == "--set"]
        folder = tmp_path / load(words.DEFAULT, overrides).name
        folder.mkdir(exist_ok=True)
        ddp = varied("ddp", (1, 1.01, 0.99))
        again = twin(ddp, 1.2 if len(ran) == 2 else 1.0)
        if len(ran) == 3:  # stopped before its end
            again = dataclasses.replace(again, status="interrupted")
        for one in (ddp, again):
            append(folder / "records.jsonl", one)
        Comparison(compare_to="ddp", trials=(ddp.hash, again.hash)).save(folder)
        return CompletedProcess(command, 2 if len(ran) == 3 else 1)

    monkeypatch.setattr(words.subprocess, "run", run)
    monkeypatch.setattr(words, "machine_card", lambda: MACHINE)
    asked = ["twins", "3", str(words.DEFAULT), "--logs", str(tmp_path)]
    assert words.main(asked) == 2, "the sweep was stopped"
    said = capsys.readouterr().err
    assert "sweep 2 of 3: 1 of 1 rows (100.0%) have a false word" in said
    assert "so far: 1 of 2 rows (50.0%) have a false word" in said
    assert words.main(asked) == 3 and len(ran) == 4, "two are complete, the third begins again"
    assert "1 of 3 rows (33.3%)" in capsys.readouterr().out
    given = load(words.DEFAULT)
    for index, command in zip((0, 1, 2, 2), ran, strict=True):
        overrides = [text for flag, text in itertools.pairwise(command) if flag == "--set"]
        changed = load(words.DEFAULT, overrides)
        assert changed.name.startswith(f"{given.name}-twins-")
        assert changed.name.endswith(f"-{index}") and changed.measure == given.measure
        labels = [trial.label for trial in changed.trials()]
        titles = [one.title for one in given.algorithms]
        twice = [label for one in titles for label in (one, f"{one} again")]
        assert labels == twice * len(given.models)
        assert changed.base == given.base


def test_simulated_tables_are_judged(monkeypatch, capsys):
    monkeypatch.setattr(words, "NOISES", (words.EMULATED,))
    monkeypatch.setattr(words, "plans", lambda: (words.default_plan(),))
    assert words.main(["simulated", "--tables", "40"]) == 0
    assert "MISSED" not in capsys.readouterr().out
    rough = dataclasses.replace(words.EMULATED, step=0.08)
    monkeypatch.setattr(words, "EMULATED", rough)
    monkeypatch.setattr(words, "NOISES", (rough,))
    monkeypatch.setattr(words.stats, "holm", list)
    assert words.main(["simulated", "--tables", "40"]) == 3
    said = capsys.readouterr().out
    missed = [line for line in said.splitlines() if line.startswith("MISSED: emulated")]
    found = [line.split(": ")[2].split()[0] for line in missed]
    # So few tables tell too little of the coverage.
    assert [word for word in found if word != "coverage"] == ["false", "false", "5%"]
