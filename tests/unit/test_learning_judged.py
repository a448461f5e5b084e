"""What has been learned: copies of parameters, their judgement, tables and figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from common.harness.record import Result, make_record
from common.harness.trial import LearnConfig
from common.harness.worker import judge
from common.harness.worker.judge import Snapshots, set_floating
from common.launch.job import Outcome
from common.models.registry import build
from common.results import learning
from common.results.records import Check, Evaluation, Learning, RankPace, Reached
from common.results.table import csv_text
from dear.errors import UserError
from plots.learning import draw
from tests.system.made import make_trial

RECORDS = Path(__file__).parents[2] / "docs" / "records"


def _saved(rows, *, steps, elapsed_s=2.0, behind=None, **more):
    """As `Snapshots.save` would leave it: `rows` are copies at the marks."""
    taken = [
        {"row": i, "seconds": float(i), "steps": steps * i, "behind": behind[i] if behind else {}}
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
            "waited_s": {"main": 0.5},
            "busy_s": {"0": 4.0},
            "steal_s": {"0": 0.0},
        },
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
    return images, torch.arange(120) % 10


def _learning_trial(algorithm="asyncddp", world=2, target=0.5, batch_sizes=None, **more):
    learn = LearnConfig(
        budget_s=2,
        eval_every_s=1,
        data="digits",
        target_accuracy=target,
        batch_sizes=batch_sizes,
    )
    return make_trial(algorithm, world, learn=learn, **more)


def test_the_mean_model_is_judged_and_the_ranks_own(model, test_split):
    images, labels = test_split
    start, off = _flat(model), 0.02 * torch.randn(_flat(model).shape)
    saved = [
        _saved([start, start + off, start - off], steps=4),
        _saved([start, start - off, start - off], steps=2, elapsed_s=2.5),
    ]
    trial = _learning_trial(target=0.001)
    result = judge.result(trial, saved, test_split)

    def plain(values):
        set_floating(model, values)
        model.eval()
        with torch.no_grad():
            scores = model(images)
        loss = torch.nn.functional.cross_entropy(scores, labels).item()
        return (scores.argmax(1) == labels).float().mean().item(), loss

    first, middle, last = result.learning.evaluations
    for evaluation, wanted in ((first, start), (middle, start), (last, start - off)):
        accuracy, loss = plain(wanted)
        assert evaluation.accuracy == pytest.approx(accuracy, abs=1e-6)
        assert evaluation.loss == pytest.approx(loss, rel=1e-4)
    own = sorted(plain(start + sign * off)[0] for sign in (1, -1))
    assert [middle.accuracy_min, middle.accuracy_max] == pytest.approx(own, abs=1e-6)
    assert middle.consensus_distance == pytest.approx((off.norm() / start.norm()).item(), 1e-4)
    assert first.consensus_distance == last.consensus_distance == 0.0
    assert middle.steps == [4, 2] and last.steps == [8, 4]
    assert result.samples_per_s == pytest.approx((32 + 16) / 2.5)
    assert result.learning.to_target == Reached(seconds=0.0, steps=0.0)
    assert result.check.replicas_agree is True
    assert result.strain.core_wait == 0.25 and result.strain.foreign_cores > 0.9


def test_what_a_dead_rank_leaves_is_said_and_the_rest_judged(model, test_split):
    start = _flat(model)
    result = judge.result(
        _learning_trial(target=0.99), [_saved([start] * 3, steps=4), None], test_split
    )
    assert result.learning.ranks[1] is None
    assert result.learning.evaluations[1].steps == [4, None]
    assert result.learning.to_target is None


def test_staleness_is_that_since_the_evaluation_before_and_of_the_stalest_neighbour(
    model, test_split
):
    rows = [_flat(model)] * 3
    # (2 uses, 4 steps) then (3 uses, 21 steps): means 2 and 7; the other falls back to 1.
    first = [{"1": [1, 1.0]}, {"1": [3, 5.0]}, {"1": [6, 26.0]}]
    second = [{}, {"0": [4, 20.0]}, {"0": [8, 24.0]}]
    saved = [_saved(rows, steps=4, behind=first), _saved(rows, steps=2, behind=second)]
    found = judge.result(_learning_trial(), saved, test_split).learning.evaluations
    assert found[0].staleness is None
    assert [e.staleness for e in found[1:]] == pytest.approx([5.0, 7.0])
    still = [{}, {"1": [2, 4.0]}, {"1": [2, 4.0]}]
    found = judge.result(_learning_trial(), [_saved(rows, steps=4, behind=still)], test_split)
    assert [e.staleness for e in found.learning.evaluations] == [None, 2.0, None]


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
    assert [one["row"] for one in saved["taken"]] == [0, 1, 1]
    assert [one["behind"] for one in saved["taken"]] == [{}, {"1": [3, 9.0]}, {"1": [3, 9.0]}]
    assert torch.equal(saved["values"][0], start)
    torch.testing.assert_close(saved["values"][1], start + 1)
    set_floating(model, saved["values"][0])
    assert torch.equal(_flat(model), start)


def test_more_copies_than_memory_should_hold_are_refused(model):
    with pytest.raises(UserError, match=r"learn\.eval_every_s: 1000 copies of 5 MiB per rank"):
        Snapshots(model.state_dict(), 1000)


def _record(trial, *rates, loss=1.0, statistics=None):
    """Of one repeat of 2 s, whose ranks make so many steps per second; None: they have died."""
    evaluations = [
        Evaluation(
            at_s=seconds,
            seconds=seconds,
            steps=[rate and int(rate * seconds) for rate in rates],
            accuracy=0.3,
            accuracy_min=0.2,
            accuracy_max=0.4,
            loss=loss,
        )
        for seconds in (0.0, 1.0, 2.0)
    ]
    ranks = [rate and RankPace(steps=2 * rate, samples=16 * rate, elapsed_s=2.0) for rate in rates]
    found = Learning(evaluations=evaluations, ranks=ranks, to_target=None)
    result = Result(
        samples_per_s=32.0,
        cpu_s_per_s=1.0,
        loss=1.0,
        check=Check(replicas_agree=True),
        statistics=statistics,
        learning=found,
        lost_ranks=found.lost,
    )
    return make_record(trial, [result], Outcome(status="ok"), {"cores": 2}, "now", 1.0)


def test_rows_tell_how_much_of_its_pace_a_rank_keeps():
    place = {"network": "10gbe", "ranks_per_host": 1}
    fault = {"kind": "slow_host", "host": 1, "factor": 5.0}
    ages = {"staleness": {"1": {"uses": 2, "mean": 3.0, "max": 7, "last": 1}}}
    calm, slow = learning.make_rows(
        [
            _record(_learning_trial(**place), 10, 10, statistics=[ages, ages]),
            _record(_learning_trial(**place, fault=fault), 9, 2, statistics=[ages, {}]),
        ]
    )
    assert calm.steps_per_s == pytest.approx(10.0) and calm.kept is None
    assert slow.steps_per_s == pytest.approx(9.0) and slow.kept == pytest.approx(0.9)
    assert slow.slowed_steps_per_s == pytest.approx(2.0)
    assert (calm.staleness_mean, calm.staleness_max) == (3.0, 7)
    text = learning.table([calm, slow]).markdown()
    assert text.count("\n") == 4 and "not reached" in text and "slow_host h1 x5" in text
    assert "mnist_cnn" in csv_text(learning.LearnRow, [calm])
    assert learning.summary([calm, calm]) == [
        "mnist_cnn, 2 workers, 10gbe: none reaches 50% in 2 s"
    ]


def test_a_record_is_json_and_says_who_died():
    record = _record(_learning_trial(), 4, None, loss=float("nan"))
    json.dumps(record.to_json(), allow_nan=False)
    assert any("rank 1 was killed" in note for note in record.notes)
    assert record.throughput.n == 1 and record.throughput.ci_low is None
    assert record.learning[0].evaluations[2].loss is None
    (row,) = learning.make_rows([record])
    assert row.lost_ranks == "1" and row.loss is None
    assert learning.table([row]).markdown().count("\n") == 3


def test_a_row_names_the_batch_size_of_every_rank():
    trial = _learning_trial(batch_sizes=(4, 1))
    (row,) = learning.make_rows([_record(trial, 4, 4)])
    assert row.batch == "4,1" and "bs=4,1 " in trial.title
    assert "|   4,1 |" in learning.table([row]).markdown()


@pytest.mark.parametrize(
    ("name", "evaluations"),
    [
        pytest.param("time_to_accuracy", 18 * 16, marks=pytest.mark.full),
        ("slow_host", 8 * 4),
    ],
)
def test_figures_are_drawn_from_records(tmp_path, name, evaluations):
    """Of what has been learned, or of the pace where nothing was to be learned."""
    paths = draw(RECORDS / name, tmp_path)
    assert [path.name for path in paths] == ["learning.png", "learning.pdf", "learning.csv"]
    assert all(path.stat().st_size > 100 for path in paths)
    lines = paths[2].read_text().splitlines()
    assert len(lines) == 1 + evaluations and lines[0].startswith("fault,algorithm,repeat,at_s")
