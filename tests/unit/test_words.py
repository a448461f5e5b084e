"""`bench/words.py`: verdicts on pairs of equal trials, and on simulated tables."""

from __future__ import annotations

import dataclasses
import itertools
from subprocess import CompletedProcess

from bench import words
from bench.rig import coverage, tables
from common.harness.experiment_file import load
from tests.unit import made_record
from tests.unit.made_record import sweep, with_iters, with_notes

MACHINE = {"cores": 2, "cpu": "CPU", "packages": {"torch": "2"}, "commit": "abc"}


def varied(*given):
    return dataclasses.replace(made_record.varied(*given), machine=MACHINE)


def twin(record, factor=1.0):
    trial = record.trial | {"label": f"{record.label} again", "twin": 1}
    iters = [
        [[step * factor for step in record.iters[i - 1][0]]] for i, _ in enumerate(record.iters)
    ]
    record = with_iters(record, iters)
    return dataclasses.replace(record, hash=f"{record.hash}-again", trial=trial)


def test_verdicts_of_twins_are_corrected_for_the_pairs_of_a_cell(tmp_path, capsys):
    ddp, dear = varied("ddp", (1, 1.01, 0.99)), varied("dear", (1, 1.002, 0.998))
    flagged = with_notes(varied("wfbp", (1, 1, 1)), "disturbed: very")
    folder = sweep(tmp_path, [ddp, twin(ddp), dear, twin(dear), flagged, twin(flagged)])
    assert words.main(["read", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "0 of 2 rows (0.0%) have a false verdict; SAME 2, UNSURE 0; 1 are flagged" in out
    assert "disturbed: very" in out
    folder = sweep(tmp_path, [ddp, twin(ddp), dear, twin(dear, 1.1)])
    assert words.main(["read", str(folder)]) == 3
    assert "1 of 2 rows (50.0%) have a false verdict" in capsys.readouterr().out
    assert words.main(["read", str(sweep(tmp_path, [ddp, dear]))]) == 1


def test_sweeps_of_twins_have_every_algorithm_twice_and_go_on(monkeypatch, tmp_path, capsys):
    ran = []

    def run(command, stdout):
        ran.append(command)
        overrides = [text for flag, text in itertools.pairwise(command) if flag == "--set"]
        ddp = varied("ddp", (1, 1.01, 0.99))
        again = twin(ddp, 1.2 if len(ran) == 2 else 1.0)
        if len(ran) == 3:  # stopped before its end
            again = dataclasses.replace(again, status="interrupted")
        sweep(tmp_path / load(words.DEFAULT, overrides).name, [ddp, again])
        return CompletedProcess(command, 2 if len(ran) == 3 else 1)

    monkeypatch.setattr(words.subprocess, "run", run)
    monkeypatch.setattr(words, "machine_card", lambda: MACHINE)
    asked = ["twins", "3", str(words.DEFAULT), "--logs", str(tmp_path)]
    assert words.main(asked) == 2, "the sweep was stopped"
    progress = capsys.readouterr().err
    assert "sweep 2 of 3: 1 of 1 rows (100.0%) have a false verdict" in progress
    assert "so far: 1 of 2 rows (50.0%) have a false verdict" in progress
    assert words.main(asked) == 3 and len(ran) == 4, "two are complete, the third begins again"
    assert "1 of 3 rows (33.3%)" in capsys.readouterr().out
    given = load(words.DEFAULT)
    for index, command in zip((0, 1, 2, 2), ran, strict=True):
        overrides = [text for flag, text in itertools.pairwise(command) if flag == "--set"]
        changed = load(words.DEFAULT, overrides)
        assert changed.name.startswith(f"{given.name}-twins-")
        assert changed.name.endswith(f"-{index}") and changed.measure == given.measure
        labels = [trial.label for trial in changed.trials()]
        titles = [choice.title for choice in given.algorithms]
        twice = [label for title in titles for label in (title, f"{title} again")]
        assert labels == twice * len(given.models)
        assert changed.base == given.base


def test_simulated_tables_are_judged(monkeypatch, capsys):
    monkeypatch.setattr(words, "NOISES", (words.EMULATED,))
    monkeypatch.setattr(words, "plans", lambda: (words.default_plan(),))
    monkeypatch.setattr(tables.stats, "detectable", lambda *_: None)  # no tally reads it
    assert words.main(["simulated", "--tables", "40"]) == 0
    assert "MISSED" not in capsys.readouterr().out
    rough = dataclasses.replace(words.EMULATED, step=0.08)
    monkeypatch.setattr(words, "EMULATED", rough)
    monkeypatch.setattr(words, "NOISES", (rough,))
    monkeypatch.setattr(tables.stats, "holm", list)
    assert words.main(["simulated", "--tables", "40"]) == 3
    out = capsys.readouterr().out
    missed = [line for line in out.splitlines() if line.startswith("MISSED: emulated")]
    bars = [line.split(": ")[2].split()[0] for line in missed]
    # So few tables say little about the coverage.
    assert [bar for bar in bars if bar != "coverage"] == ["false", "false", "5%"]


def test_an_interval_that_misses_its_run_is_reported(capsys, monkeypatch):
    wild = coverage.Machine(name="wild", rare=0.28, longer=0.3, step=0.001)
    assert coverage.cover(wild, (12, 12), None, runs=500).missed
    monkeypatch.setattr(coverage, "MACHINES", (wild,))
    assert [bar for bar in words.covered(300) if bar.startswith("wild, n = 12")]
