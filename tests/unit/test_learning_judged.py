"""Tests of what has been learned: copies of parameters, their judgement, tables and figures."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common.harness.running.record import make_record
from common.harness.settings import LearnConfig
from common.harness.worker import evaluation
from common.harness.worker.evaluation import Snapshots, set_floating
from common.harness.worker.timing import evidence
from common.launch.job import Outcome
from common.models.datasets import Parts
from common.models.datasets.tensors import Tensors
from common.models.registry import build
from common.results.learning import race, summary, tables
from common.results.records import Record, Result
from common.results.records.learned import Data, Evaluation, Learning, RankPace
from common.results.records.trust import Check, Note
from common.results.store import Comparison
from common.results.tables.table import csv_text
from common.results.timed import answers
from dear.errors import UserError
from plots.learning import draw
from tests.system.made import make_trial

RECORDS = Path(__file__).parents[2] / "docs" / "records"


def _saved(rows, *, steps, elapsed_s=2.0, behind=None, **more):
    """Writes the file as `Snapshots.save` does: `rows` are copies at the marks."""
    taken = [
        {
            **{"row": i, "seconds": float(i), "steps": steps * i},
            **{"behind": behind[i] if behind else {}, "train_loss": 3.0 - i if i else None},
        }
        for i in range(len(rows))
    ]
    return {
        "values": torch.stack(rows),
        "taken": taken,
        "steps": steps * (len(rows) - 1),
        "samples": 8 * steps,
        "elapsed_s": elapsed_s,
        "loss": 1.0,
        "pressure": {
            "machine": "one",
            "elapsed_s": 2.0,
            "cpu_s": 1.0,
            "waited_s": {"main": 0.5, "comm_core": 0.2},
            "absorbed_s": 0.4,
            "busy_s": {"0": 4.0},
            "steal_s": {"0": 0.0},
        },
        "canary_s": [0.1, 0.2],
        "network": {"eth0": {"rx_bytes": 9}},
        "bytes_sent": 800 * steps,
        "statistics": {},
        **more,
    }


@pytest.fixture
def model():
    torch.manual_seed(1)
    return build("mnist_cnn", 2, None, torch.Generator().manual_seed(1)).model


def _flat(model):
    return torch.cat([value.flatten() for value in model.state_dict().values()])


@pytest.fixture
def test_split():
    images = torch.randn(120, 1, 28, 28, generator=torch.Generator().manual_seed(2))
    samples = Tensors(images, torch.arange(120) % 10)
    return Parts(train=samples, test=samples, classes=10, split="made up")


NAMES = ("ddp", "dear")


def _learning_trial(algorithm="asyncddp", world=2, target=0.5, batch_sizes=None, **more):
    learn = LearnConfig(
        budget_s=2, eval_every_s=1, data="digits", target_accuracy=target, batch_sizes=batch_sizes
    )
    return make_trial(algorithm, world, learn=learn, **more)


def test_the_mean_model_is_judged_and_the_ranks_own(model, test_split):
    images, labels = test_split.test.inputs, test_split.test.targets
    start, off = _flat(model), 0.02 * torch.randn(_flat(model).shape)
    saved = [
        _saved([start, start + off, start - off], steps=4),
        _saved([start, start - off, start - off], steps=2, elapsed_s=2.5),
    ]
    trial = _learning_trial(target=0.001)
    result = evaluation.result(trial, saved, test_split)
    assert result.bytes_per_step == 800 * 4 // (4 * 2)

    def plain(values):
        set_floating(model, values)
        model.eval()
        with torch.no_grad():
            scores = model(images)
        loss = torch.nn.functional.cross_entropy(scores, labels).item()
        right = scores.argmax(1) == labels
        among = (scores.topk(5).indices == labels[:, None]).any(1)
        return right.float().mean().item(), loss, among.float().mean().item()

    first, middle, last = result.learning.evaluations
    for mark, wanted in ((first, start), (middle, start), (last, start - off)):
        accuracy, loss, among = plain(wanted)
        assert mark.accuracy_top5 == pytest.approx(among, abs=1e-6)
        assert mark.accuracy == pytest.approx(accuracy, abs=1e-6)
        assert mark.loss == pytest.approx(loss, rel=1e-4)
    assert last.accuracy_min == last.accuracy_max == last.accuracy
    assert (first.train_loss, middle.train_loss, last.train_loss) == (None, 2.0, 1.0)
    assert middle.accuracy_min is None and middle.loss_max is None
    apart = [_saved([start, start + sign * off], steps=4) for sign in (1, -1)]
    ends = LearnConfig(budget_s=1, eval_every_s=1, data="digits")
    short = make_trial("asyncddp", 2, learn=ends)
    end = evaluation.result(short, apart, test_split).learning.evaluations[-1]
    ours = sorted(plain(start + sign * off) for sign in (1, -1))
    assert [end.accuracy_min, end.accuracy_max] == pytest.approx([ours[0][0], ours[1][0]], abs=1e-6)
    losses = sorted(loss for _, loss, _ in ours)
    assert [end.loss_min, end.loss_max] == pytest.approx(losses, rel=1e-4)
    assert middle.consensus_distance == pytest.approx((off.norm() / start.norm()).item(), 1e-4)
    assert first.consensus_distance == last.consensus_distance == 0.0
    assert middle.steps == [4, 2] and last.steps == [8, 4]
    assert result.samples_per_s == pytest.approx((32 + 16) / 2.5)
    assert result.learning.seed == trial.seed
    assert (result.strain.core_wait, result.strain.late) == pytest.approx((0.35, 0.05))
    assert result.check.replicas_agree is True
    assert result.strain.foreign_cores > 0.9


def test_what_a_dead_rank_leaves_is_said_and_the_rest_judged(model, test_split):
    rows = [_flat(model)] * 3
    saved = [_saved(rows, steps=4), None]
    result = evaluation.result(_learning_trial(target=0.99), saved, test_split)
    assert result.learning.ranks[1] is None
    assert result.strain.canary_s == [0.1, 0.2]
    assert result.learning.evaluations[1].steps == [4, None]
    # The canary of a dead rank is not known.
    saved = [None, _saved(rows, steps=4, canary_s=[0.1, 0.0])]
    assert evaluation.result(_learning_trial(), saved, test_split).strain.canary_s is None
    saved = [_saved(rows, steps=4, canary_s=[0.1, 0.3]), saved[1]]
    assert evaluation.result(_learning_trial(), saved, test_split).strain.canary_s == [0.1, 0.3]
    result = evidence.learning([_saved(rows, steps=4), None])
    assert result["copies"] == [[[0.0, 0], [1.0, 4], [2.0, 8]], None]
    assert result["network"] == {"steps": [8, None], "ranks": [{"eth0": {"rx_bytes": 9}}, None]}
    assert result["pressure"][0]["waited_s"]["main"] == 0.5
    json.dumps(result)


def test_staleness_is_that_since_the_evaluation_before_and_of_the_stalest_neighbour(
    model, test_split
):
    rows = [_flat(model)] * 3
    # (2 uses, 4 steps) then (3 uses, 21 steps): means 2 and 7; the other falls back to 1.
    first = [{"1": [1, 1.0]}, {"1": [3, 5.0]}, {"1": [6, 26.0]}]
    second = [{}, {"0": [4, 20.0]}, {"0": [8, 24.0]}]
    saved = [_saved(rows, steps=4, behind=first), _saved(rows, steps=2, behind=second)]
    result = evaluation.result(_learning_trial(), saved, test_split).learning.evaluations
    assert result[0].staleness is None
    assert [e.staleness for e in result[1:]] == pytest.approx([5.0, 7.0])
    still = [{}, {"1": [2, 4.0]}, {"1": [2, 4.0]}]
    result = evaluation.result(_learning_trial(), [_saved(rows, steps=4, behind=still)], test_split)
    assert [e.staleness for e in result.learning.evaluations] == [None, 2.0, None]


def test_copies_hold_what_the_model_was(tmp_path, model):
    snapshots = Snapshots(model.state_dict(), 3)
    start = _flat(model).clone()
    snapshots.take([0], model.state_dict(), 0.0, 0, {})
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    snapshots.take([1, 2], model.state_dict(), 1.5, 7, {"1": [3, 9.0]})
    snapshots.save(tmp_path / "x.pt", {"steps": 7})
    saved = torch.load(tmp_path / "x.pt", weights_only=True)
    assert [item["row"] for item in saved["taken"]] == [0, 1, 1]
    assert [item["behind"] for item in saved["taken"]] == [{}, {"1": [3, 9.0]}, {"1": [3, 9.0]}]
    assert torch.equal(saved["values"][0], start)
    torch.testing.assert_close(saved["values"][1], start + 1)
    set_floating(model, saved["values"][0])
    assert torch.equal(_flat(model), start)


def test_more_copies_than_memory_should_hold_are_refused(model):
    with pytest.raises(UserError, match=r"learn: 1000 copies of 5 MiB per rank"):
        Snapshots(model.state_dict(), 1000)


DATA = Data(name="mnist", train=9000, test=1000, split="MNIST's 10,000 test images")


def _run(*rates, seed=1, loss=1.0, curve=(0.1, 0.2, 0.3)):
    """A repeat of 2 s, whose ranks make so many steps per second; None: they have died."""
    evaluations = [
        Evaluation(
            at_s=seconds,
            seconds=seconds,
            steps=[rate and int(rate * seconds) for rate in rates],
            accuracy=accuracy,
            accuracy_min=accuracy - 0.1,
            accuracy_max=accuracy + 0.1,
            loss=loss,
        )
        for seconds, accuracy in zip((0.0, 1.0, 2.0), curve, strict=True)
    ]
    ranks = [rate and RankPace(steps=2 * rate, samples=16 * rate, elapsed_s=2.0) for rate in rates]
    return Learning(evaluations=evaluations, ranks=ranks, seed=seed)


def _record(trial, *runs, statistics=None):
    results = [
        Result(
            samples_per_s=32.0,
            cpu_s_per_s=1.0,
            loss=1.0,
            check=Check(replicas_agree=True, matches_reference=True),
            statistics=statistics,
            learning=run,
            lost_ranks=run.lost,
            data=DATA,
        )
        for run in runs
    ]
    return make_record(trial, results, Outcome(status="ok"), {"cores": 2}, "now", 1.0, run="A")


def _target(record, at_s, missing=0, **more):
    """The record with curves that reach 50 % after `at_s` times 0.95 .. 1.05, with five seeds."""
    result = []
    for number, factor in enumerate((0.95, 1.05, 1.0, 0.98, 1.02)):
        rise = 0.4 / (at_s * factor)
        curve = [0.1, 0.1 + rise, 0.1 + 2 * rise]
        if number < missing:
            curve = [0.1, 0.2, 0.3]
        result.append(_run(10, 10, seed=100 * number, curve=curve))
    first = record.results[0]
    results = [dataclasses.replace(first, learning=run) for run in result]
    return dataclasses.replace(record, results=results, **more)


def test_rows_tell_how_much_of_its_pace_a_rank_keeps():
    place = {"network": "10gbe", "ranks_per_host": 1}
    fault = {"kind": "slow_host", "host": 1, "factor": 5.0}
    ages = {"staleness": {"1": {"uses": 2, "mean": 3.0, "max": 7, "last": 1}}}
    calm, slow = summary.make_rows(
        [
            _record(_learning_trial(**place), _run(10, 10), statistics=[ages, ages]),
            _record(_learning_trial(**place, fault=fault), _run(9, 2), statistics=[ages, {}]),
        ]
    )
    assert calm.steps_per_s == pytest.approx(10.0) and calm.kept is None
    assert slow.steps_per_s == pytest.approx(9.0) and slow.kept == pytest.approx(0.9)
    assert slow.slowed_steps_per_s == pytest.approx(2.0) and slow.kept_low is None
    assert (calm.staleness_mean, calm.staleness_max) == (3.0, 7)
    text = tables.table([calm, slow]).markdown()
    assert text.count("\n") == 4 and "not reached" in text and "slow_host h1 x5" in text
    assert "mnist_cnn" in csv_text(summary.LearnRow, [calm])
    assert tables.summary([calm, calm]) == ["mnist_cnn, 2 workers, 10gbe: none reaches 50% in 2 s"]


def test_repeats_give_rates_and_what_is_kept_an_interval():
    place = {"network": "10gbe", "ranks_per_host": 1, "learn": LearnConfig(budget_s=2)}
    fault = {"kind": "slow_host", "host": 1, "factor": 5.0}
    paces = (100, 104, 96)
    trials = [make_trial(name, 2, **place) for name in ("allreduce", "asyncddp")]
    runs = [_run(pace, pace, seed=seed) for seed, pace in enumerate(paces)]
    records = [_record(trials[0], *runs), _record(trials[1], *reversed(runs))]
    trial = make_trial("asyncddp", 2, **place, fault=fault)
    records.append(_record(trial, *(_run(pace // 2, pace // 5) for pace in paces)))
    base, ours, slow = summary.make_rows(records, "allreduce")  # pairs have the same seed
    assert ours.steps_per_s == pytest.approx(99.95, abs=0.01)
    assert ours.steps_per_s_low < 96 and ours.steps_per_s_high > 104
    assert ours.speedup == 1.0 and ours.verdict == "SAME" and base.verdict is None
    assert slow.kept == pytest.approx(0.5) and slow.kept_low < 0.48 and slow.kept_high > 0.52
    fewer = dataclasses.replace(records[2], results=records[2].results[:2])
    assert summary.make_rows([*records[:2], fewer], "allreduce")[2].kept == pytest.approx(
        0.51, abs=1e-3
    )
    text = tables.table([base, ours, slow], "allreduce").markdown()
    assert "0.50 (0.46-0.55)" in text and "99.9 (90.5-110)" in text and "to target" not in text


def test_what_is_compared_is_the_time_to_the_target_over_seeds():
    names = ("ddp", "dear", "wfbp", "dadt", "decentralized")
    plain = [_record(_learning_trial(name), _run(10, 10)) for name in names]
    ddp, dear, wfbp, dadt, decentralized = plain
    records = [
        _target(ddp, 1.5),
        _target(dear, 1.0),
        _target(wfbp, 1.52),
        _target(dadt, 1.5, missing=2),
        _target(decentralized, 1.0, missing=5),
    ]
    base, faster, same, some, none = summary.make_rows(records, "ddp")
    assert base.to_target_s == pytest.approx(1.5, rel=1e-3) and base.verdict is None
    assert 1.40 < base.to_target_low_s < 1.46 and 1.54 < base.to_target_high_s < 1.60
    assert base.steps_to_target == pytest.approx(15, rel=1e-3) and base.steps_to_target_low < 14.6
    assert faster.speedup == pytest.approx(1.5) and faster.verdict == "FASTER" and faster.leads
    assert same.verdict == "SAME" and not same.leads and same.compared_to == "ddp"
    assert (some.reached, some.runs, some.to_target_low_s) == (3, 5, None)
    assert some.to_target_s == pytest.approx(1.53) and some.speedup is None
    assert (none.reached, none.to_target_s, none.verdict) == (0, None, "SLOWER")
    text = tables.table([base, faster, same, some, none], "ddp").markdown()
    for words in ("1.5 s (1.4-1.6)", "1.5 s (3 of 5)", "not reached", "below 0.7", "1.50 (1.5"):
        assert words in text, text
    assert tables.summary([base, faster, same, some, none]) == [
        "mnist_cnn, 2 workers: dear is the first at 50%, after 1.0 s (1.0-1.0); 3 of 5 get there "
        "in every run"
    ]
    (line,) = answers.general_remarks([base, faster, same, some, none], records)
    assert "with 80 % probability" in line and "with Holm's correction for 4 comparisons" in line
    assert "% for dear" in line


def test_a_trial_that_misses_the_target_is_not_the_first():
    slow, missing = (_record(_learning_trial(name), _run(10, 10)) for name in ("ddp", "dear"))
    rows = summary.make_rows([_target(slow, 1.5), _target(missing, 1.0, missing=3)], "ddp")
    rows = [dataclasses.replace(row, leads=True) for row in rows]  # of few runs, both may lead
    assert tables.summary(rows) == [
        "mnist_cnn, 2 workers: ddp is the first at 50%, after 1.5 s (1.4-1.6); not distinguishable "
        "from it: dear; 1 of 2 get there in every run"
    ]


def test_that_the_fastest_missed_the_target_is_an_answer():
    slow, fast = (_record(_learning_trial(name, target=0.5), _run(10, 10)) for name in NAMES)
    rows = summary.make_rows([_target(slow, 1.5, missing=4), _target(fast, 1.0, missing=1)], "ddp")
    assert tables.summary(rows) == [
        "mnist_cnn, 2 workers: no first at 50%: ddp gets there in 1 of 5 runs, dear gets there in "
        "4 of 5 runs of 2 s"
    ]


@pytest.mark.parametrize(("target", "text"), [(0.975, "97.5%"), (0.995, "99.5%"), (0.57, "57%")])
def test_a_target_is_not_rounded(target, text):
    records = [_record(_learning_trial(name, target=target), _run(10, 10)) for name in NAMES]
    (line,) = tables.summary(summary.make_rows(records, "ddp"))
    assert line == f"mnist_cnn, 2 workers: none reaches {text} in 2 s"


def test_runs_that_miss_the_target_are_the_reason_why_nothing_is_detectable():
    slow, fast = (_record(_learning_trial(name), _run(10, 10)) for name in ("ddp", "dear"))
    records = [_target(slow, 1.5, missing=1), _target(fast, 1.0)]
    (line,) = answers.general_remarks(summary.make_rows(records, "ddp"), records)
    assert line == "mnist_cnn, 2 workers: runs missed the target, so no difference is detectable"


def test_a_median_is_that_of_all_runs():
    two = _record(_learning_trial(), _run(4, 4, loss=0.2), _run(4, 4, loss=0.4))
    assert summary.make_rows([two])[0].loss == pytest.approx(0.3)
    without = _record(_learning_trial(), _run(4, 4, loss=0.2), *[_run(4, 4, loss=None)] * 2)
    assert summary.make_rows([without])[0].loss is None
    assert race.typical([1.0, 2.0, 3.0], missing=1).value == 2.5
    assert race.typical([1.0, 2.0], missing=2) is None


def test_sentences_of_two_lengths_are_two_cells_and_a_word_is_an_answer():
    text = LearnConfig(budget_s=2, data="text", target_accuracy=0.5)

    def trained(length, name, *runs):
        return _record(make_trial(name, 2, learn=text, sentence_len=length), *runs or [_run(9, 9)])

    records = [
        _target(trained(length, name), seconds)
        for length, name, seconds in ((20, "ddp", 1.0), (20, "dear", 0.8), (35, "ddp", 1.6))
    ]
    rows = summary.make_rows(records, "ddp")
    assert [row.verdict for row in rows] == [None, "FASTER", None]
    assert rows[2].model == "mnist_cnn, 35 tokens" and rows[2].where.startswith(rows[2].model)
    (row,) = summary.make_rows([records[2]])
    accuracy = row.accuracy
    assert row.model == "mnist_cnn"
    assert row.accuracy_error == pytest.approx((accuracy * (1 - accuracy) / 35_000) ** 0.5)
    assert "number of test words" in tables.remarks([records[2]])[0]
    huge = trained(35, "ddp", _run(9, 9, loss=800.0))
    assert summary.make_rows([huge])[0].perplexity is None


def test_accuracy_has_an_interval_over_seeds_and_an_error_by_the_number_of_images():
    record = _record(_learning_trial(), *(_run(4, 4, curve=(0.1, 0.5, a)) for a in (0.6, 0.7, 0.8)))
    (row,) = summary.make_rows([record])
    assert row.accuracy == pytest.approx(0.7)
    # 0.1 / sqrt(3) times 4.303, Student's t of 2 degrees of freedom.
    assert (row.accuracy_low, row.accuracy_high) == pytest.approx((0.4516, 0.9484), abs=1e-3)
    assert row.accuracy_error == pytest.approx((0.7 * 0.3 / 1000) ** 0.5)
    assert "70.0% ±1.4 (45.2-94.8)" in tables.table([row]).markdown()
    assert tables.remarks([record]) == [
        "mnist: trained on 9,000 of MNIST's 10,000 test images, judged by the other 1,000; "
        "1 seed; accuracy ±: standard error by the number of test images, the same ones for all"
    ]


@pytest.mark.parametrize(
    ("amiss", "reason"),
    [
        *(
            ({"notes": [Note(kind=kind, text=f"{kind}: so it is")]}, f"{kind}: so it is")
            for kind in ("unfaithful", "disturbed")
        ),
        ({"check": Check(replicas_agree=False)}, "incorrect: replicas differ"),
    ],
)
def test_what_is_not_believed_has_its_reason_and_no_word_and_is_no_base(amiss, reason):
    fine = [_record(_learning_trial(name), _run(10, 10)) for name in ("ddp", "dear", "wfbp")]
    records = [_target(fine[0], 1.5), _target(fine[1], 1.0, **amiss), _target(fine[2], 1.4)]
    base, ours, other = summary.make_rows(records, "ddp")
    assert ours.flag.startswith(reason) and reason in ours.reason
    assert ours.verdict is None and ours.speedup is None and not ours.leads
    assert other.verdict is not None and other.leads
    assert "(1.0 s (1.0-1.0))" in tables.table([base, ours, other], "ddp").markdown()
    _, ours, other = summary.make_rows(records, "dear")
    assert other.verdict is None and other.speedup is None
    (line,) = answers.general_remarks([ours, other], records)
    assert line.startswith("mnist_cnn, 2 workers: no speed-ups or verdicts")


def test_a_record_is_json_and_says_who_died():
    record = _record(_learning_trial(), _run(4, None, loss=float("nan")))
    json.dumps(record.to_json(), allow_nan=False)
    assert any("rank 1 was killed" in note.text for note in record.notes)
    assert record.throughput.n == 1 and record.throughput.ci_low is None
    assert record.learning[0].evaluations[2].loss is None
    again = Record.from_json(json.loads(json.dumps(record.to_json())))
    assert record.first.data == again.first.data == DATA
    (row,) = summary.make_rows([record])
    assert row.lost_ranks == "1" and row.loss is None
    assert tables.table([row]).markdown().count("\n") == 3


def test_records_without_data_are_shown_with_their_rates():
    records = Comparison.load(RECORDS / "slow_host").results(RECORDS / "slow_host")
    rows = summary.make_rows(records, "allreduce")
    assert len(rows) == len(records) and all(row.runs for row in rows)
    assert "steps/s" in tables.table(rows, "allreduce").markdown()


def test_the_command_line_loads_nothing_that_starts_threads():
    """Ranks on virtual hosts are its children, and one that has threads cannot enter a host."""
    code = (
        "import sys; from common.harness import cli; cli.parse(['run', 'quick']); "
        "sys.exit(bool({'numpy', 'scipy', 'torch'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=RECORDS.parents[1]).returncode == 0


def test_a_row_names_the_batch_size_of_every_rank():
    trial = _learning_trial(batch_sizes=(4, 1))
    (row,) = summary.make_rows([_record(trial, _run(4, 4))])
    assert row.batch == "4,1" and "bs=4,1 " in trial.title
    assert "|   4,1 |" in tables.table([row]).markdown()


@pytest.mark.parametrize(
    "name", [pytest.param("time_to_accuracy", marks=pytest.mark.full), "slow_host"]
)
def test_figures_are_drawn_from_records(tmp_path, name):
    """Figures of what was learned, or of the pace where nothing was to be learned."""
    records = Comparison.load(RECORDS / name).results(RECORDS / name)
    learned = [result.learning for record in records for result in record.results]
    evaluations = sum(len(learning.evaluations) for learning in learned)
    paths = draw(RECORDS / name, tmp_path)
    assert [path.name for path in paths] == ["learning.png", "learning.pdf", "learning.csv"]
    assert all(path.stat().st_size > 100 for path in paths)
    lines = paths[2].read_text().splitlines()
    assert len(lines) == 1 + evaluations and lines[0].startswith(
        "model,batch,world_size,network,fault,algorithm,flag,repeat"
    )
