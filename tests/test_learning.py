"""Training for a time: what an experiment may say, who ends when, and what is judged."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from pathlib import Path

import pytest
import torch
import yaml

from common.harness import judging
from common.harness.batches import Batches
from common.harness.experiment_file import load
from common.harness.learning_clock import Schedule, TrainingClock
from common.harness.learning_config import LearnConfig
from common.harness.learning_loop import Loop
from common.harness.recording import make_record
from common.harness.snapshots import Snapshots, set_floating
from common.harness.trial import Trial
from common.launch.job import Job, outcome_of
from common.models import datasets
from common.models.registry import build
from common.results import learning, learning_table
from dear import runtime
from dear.errors import UserError
from tests.made_mnist import write_mnist
from tests.made_trials import make_trial

GOOD = {
    "algorithms": ["dear", "asyncddp"],
    "models": [{"name": "mnist_cnn", "batch_size": 2}],
    "learn": {"budget_s": 4, "data": "digits"},
    "baseline": False,
}


@pytest.fixture
def read(tmp_path, monkeypatch):
    """`read(change, *overrides)`: the experiment `GOOD` with a change."""
    monkeypatch.delenv("MNIST_DIR", raising=False)

    def read(change, *overrides):
        path = tmp_path / "demo.yaml"
        path.write_text(yaml.safe_dump(GOOD | change))
        return load(path, overrides)

    return read


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"learn": {"budget": 3}}, "did you mean 'budget_s'?"),
        ({"learn": {"budget_s": 0}}, "learn.budget_s must be greater than 0"),
        ({"learn": {"eval_every_s": -1}}, "learn.eval_every_s must be greater than 0"),
        ({"learn": {"budget_s": 1, "eval_every_s": 2}}, "must be at most learn.budget_s, got 2"),
        ({"learn": {"data": "mnits"}}, "did you mean 'mnist'?"),
        ({"learn": {"data": "digits", "target_accuracy": 97}}, "above 0 and at most 1, got 97"),
        ({"learn": {"target_accuracy": 0.9}}, "learn.target_accuracy: goes with learn.data"),
        ({"learn": {"sampler": "own"}}, "learn.sampler: goes with learn.data"),
        ({"learn": {"data": "digits", "sampler": "mine"}}, "'sampler' 'mine'"),
        ({"learn": {"data": "mnist"}}, "Set data_dir=FOLDER or MNIST_DIR"),
        ({"learn": {"data": "mnist"}, "data_dir": "/nonexistent"}, "no folder /nonexistent"),
        ({"data_dir": "/tmp"}, "digits comes with scikit-learn and has no folder"),
        ({"learn": {}, "data_dir": "/tmp"}, "data_dir: nothing is learned"),
        ({"models": ["resnet18"]}, "resnet18 cannot learn digits; use model mnist_cnn"),
        ({"measure": {"check_steps": 3}}, "measure.check_steps: means nothing with learn"),
        ({"measure": {"warmup_steps": 9}}, "allowed: repeats"),
        ({"timeout_s": 4}, "timeout_s: 4 s leave no time for learn.budget_s=4"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(read, change, words):
    with pytest.raises(UserError) as caught:
        read(change).trials()
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_without_mnist_is_named(read, tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}: no MNIST files"):
        read({"learn": {"data": "mnist"}, "data_dir": str(tmp_path)}).trials()


def test_data_is_part_of_a_trial_by_its_digest_not_by_its_path(read, tmp_path):
    def trial(folder):
        change = {"learn": {"data": "mnist"}, "data_dir": str(folder), "algorithms": ["dear"]}
        return read(change).trials()[0]

    plain = trial(write_mnist(tmp_path / "a"))
    assert trial(write_mnist(tmp_path / "b", zipped=True)).hash == plain.hash
    assert trial(write_mnist(tmp_path / "c", shift=1)).hash != plain.hash
    assert str(tmp_path) not in json.dumps(plain.to_json())
    assert Trial.from_json(json.loads(json.dumps(plain.to_json()))) == plain


def test_trials_that_do_not_learn_have_the_identity_that_they_had_before():
    trial = make_trial("dear")
    values = {
        k: v for k, v in trial.to_json().items() if k not in ("label", "learn", "data_digest")
    }
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    assert trial.hash == hashlib.sha256(text.encode()).hexdigest()[:12]
    old = {k: v for k, v in trial.to_json().items() if k not in ("learn", "data_digest")}
    assert Trial.from_json(old) == trial


@pytest.mark.parametrize(
    ("algorithm", "options", "own"),
    [
        ("asyncddp", {}, True),
        ("asyncddp", {"max_staleness": 3}, True),
        ("win-put", {}, True),
        ("push-sum", {"barrier": True}, False),
        ("decentralized", {}, False),
        ("dadt", {}, False),
        ("ddp", {}, False),
        ("none", {}, False),
    ],
)
def test_only_who_waits_for_nobody_runs_at_own_pace(algorithm, options, own):
    trial = make_trial(algorithm, options=options, learn=LearnConfig())
    assert trial.own_pace == own
    assert not dataclasses.replace(trial, learn=None).own_pace


def test_marks_begin_with_the_start_and_end_with_the_end():
    assert LearnConfig(budget_s=1, eval_every_s=0.25).marks == (0, 0.25, 0.5, 0.75, 1)
    assert LearnConfig(budget_s=1, eval_every_s=0.4).marks == (0, 0.4, 0.8, 1)
    schedule = Schedule((0.0, 0.4, 0.8, 1.0))
    assert list(schedule.passed(0.0)) == [0]
    assert schedule.next_after(0.0) == 0.4
    assert list(schedule.passed(0.9)) == [1, 2]
    assert schedule.next_after(0.9) == 1.0
    assert list(schedule.passed(0.95)) == []
    assert list(schedule.passed(2.0)) == [3] and schedule.next_after(2.0) is None


class World:
    """One rank and a clock that steps and copies move."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.now = 50.0

    def clock(self) -> float:
        return self.now

    def barrier(self) -> None:
        return None

    def broadcast_object(self, value):
        return value


@pytest.mark.parametrize("own", [True, False])
def test_a_copy_costs_no_time_and_emulated_seconds_count(own):
    world, taken, settled = World(), [], []

    def step() -> int:
        world.now += 0.25  # of this machine, 0.125 emulated
        return 4

    def take(marks, seconds, steps):
        taken.append((list(marks), seconds, steps))
        world.now += 100.0

    loop = Loop(
        budget_s=1.0,
        step=step,
        settle=lambda: settled.append(1),
        take=take,
        schedule=Schedule((0.0, 0.25, 0.5, 1.0)),
        clock=TrainingClock(world.clock, time_scale=2.0),
        communicator=world,
    )
    pace = loop.own_pace() if own else loop.in_step()
    assert (pace.steps, pace.samples) == (8, 32)
    assert pace.elapsed_s == 1.0
    assert taken == [([0], 0.0, 0), ([1], 0.25, 2), ([2], 0.5, 4), ([3], 1.0, 8)]
    # Few words of rank 0: as many as copies, and while the step time is not known yet.
    assert len(settled) == (0 if own else 4)


def _in_step(budget_s: float) -> dict:
    communicator = runtime.communicator()
    taken = []

    def step() -> int:
        time.sleep(0.02 if communicator.rank == 1 else 0.002)
        return 3

    loop = Loop(
        budget_s=budget_s,
        step=step,
        settle=lambda: None,
        take=lambda marks, seconds, steps: taken.append((list(marks), seconds, steps)),
        schedule=Schedule((0.0, budget_s / 2, budget_s)),
        clock=TrainingClock(communicator.clock, 1.0),
        communicator=communicator,
    )
    pace = loop.in_step()
    return {"steps": pace.steps, "elapsed_s": pace.elapsed_s, "taken": taken}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_in_step_end_and_copy_at_the_same_steps_in_time(world, size):
    results = world(size).run(_in_step, 0.4)
    assert all(result == results[0] for result in results)
    assert 0.4 <= results[0]["elapsed_s"] < 0.8
    marks = [mark for marks, _, _ in results[0]["taken"] for mark in marks]
    assert marks == [0, 1, 2]


def _saved(rows, *, steps, elapsed_s=2.0, **more):
    """As `Snapshots.save` would leave it: `rows` are copies at the marks."""
    return {
        "values": torch.stack(rows),
        "taken": [{"row": i, "seconds": float(i), "steps": steps * i} for i in range(len(rows))],
        "steps": steps * (len(rows) - 1),
        "samples": 8 * steps,
        "elapsed_s": elapsed_s,
        "loss": 1.0,
        "cpu_s": 1.0,
        "busy_s": 4.0,
        "wall_s": 2.0,
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
    images = torch.randn(250, 1, 28, 28, generator=torch.Generator().manual_seed(2))
    return images, torch.arange(250) % 10


def _learning_trial(algorithm="asyncddp", world=2, target=0.5, **more):
    learn = LearnConfig(budget_s=2, eval_every_s=1, data="digits", target_accuracy=target)
    return make_trial(algorithm, world, learn=learn, **more)


def test_the_mean_model_is_judged_and_the_ranks_own(model, test_split):
    images, labels = test_split
    start, off = _flat(model), 0.02 * torch.randn(_flat(model).shape)
    saved = [
        _saved([start, start + off, start - off], steps=4),
        _saved([start, start - off, start - off], steps=2, elapsed_s=2.5),
    ]
    trial = _learning_trial(target=0.001)
    result = judging.result(trial, saved, test_split)

    def plain(values):
        set_floating(model, values)
        model.eval()
        with torch.no_grad():
            scores = model(images)
        loss = torch.nn.functional.cross_entropy(scores, labels).item()
        return (scores.argmax(1) == labels).float().mean().item(), loss

    first, middle, last = result["learning"]["evaluations"]
    for evaluation, wanted in ((first, start), (middle, start), (last, start - off)):
        accuracy, loss = plain(wanted)
        assert evaluation["accuracy"] == pytest.approx(accuracy, abs=1e-6)
        assert evaluation["loss"] == pytest.approx(loss, rel=1e-4)
    own = sorted(plain(start + sign * off)[0] for sign in (1, -1))
    assert [middle["accuracy_min"], middle["accuracy_max"]] == pytest.approx(own, abs=1e-6)
    assert middle["consensus_distance"] == pytest.approx((off.norm() / start.norm()).item(), 1e-4)
    assert first["consensus_distance"] == last["consensus_distance"] == 0.0
    assert middle["steps"] == [4, 2] and last["steps"] == [8, 4]
    assert result["samples_per_s"] == pytest.approx((32 + 16) / 2.5)
    assert result["learning"]["to_target"] == {"seconds": 0.0, "steps": 0.0}
    assert result["check"]["replicas_agree"] is True


def test_what_a_dead_rank_leaves_is_said_and_the_rest_judged(model, test_split):
    start = _flat(model)
    result = judging.result(
        _learning_trial(target=0.99), [_saved([start] * 3, steps=4), None], test_split
    )
    assert result["learning"]["ranks"][1] is None
    assert result["learning"]["evaluations"][1]["steps"] == [4, None]
    assert result["learning"]["to_target"] is None


def test_copies_hold_what_the_model_was(tmp_path, model):
    snapshots = Snapshots(model.state_dict(), 3)
    start = _flat(model).clone()
    snapshots.take([0], model.state_dict(), 0.0, 0)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    snapshots.take([1, 2], model.state_dict(), 1.5, 7)
    snapshots.save(tmp_path / "x.pt", {"steps": 7})
    saved = torch.load(tmp_path / "x.pt", weights_only=True)
    assert [one["row"] for one in saved["taken"]] == [0, 1, 1]
    assert torch.equal(saved["values"][0], start)
    torch.testing.assert_close(saved["values"][1], start + 1)
    set_floating(model, saved["values"][0])
    assert torch.equal(_flat(model), start)


def test_more_copies_than_memory_should_hold_are_refused(model):
    with pytest.raises(UserError, match=r"learn\.eval_every_s: 1000 copies of 5 MiB per rank"):
        Snapshots(model.state_dict(), 1000)


def _workload():
    return build("mnist_cnn", 4, None, torch.Generator().manual_seed(1))


def test_ranks_share_a_round_or_have_one_of_their_own():
    labels = torch.arange(24)
    images = labels.float().view(-1, 1, 1, 1).expand(-1, 1, 28, 28)

    def seen(rank, sampler, batches):
        learn = LearnConfig(data="digits", sampler=sampler)
        made = Batches(learn, (images, labels), batch_size=4, seed=3, rank=rank, size=3)
        workload, found = _workload(), []
        for _ in range(batches):
            assert made.feed(workload) == 4
            (inputs,), (targets,) = workload.inputs, workload.targets
            assert torch.equal(inputs[:, 0, 0, 0].long(), targets)
            found += targets.tolist()
        return found

    shared = [seen(rank, "shared", 2) for rank in range(3)]
    assert sorted(label for order in shared for label in order) == list(range(24))
    assert seen(0, "shared", 4)[8:] != shared[0]  # another order in the next round
    own = [seen(rank, "own", 6) for rank in range(3)]
    assert all(sorted(order) == list(range(24)) for order in own)
    assert own[0] != own[1]
    with pytest.raises(UserError, match="batch_size: 4 is more than the 3 images"):
        learn = LearnConfig(data="digits")
        Batches(learn, (images[:9], labels[:9]), batch_size=4, seed=3, rank=0, size=3)


def test_data_that_has_changed_is_noticed(tmp_path):
    folder = write_mnist(tmp_path / "a")
    other = write_mnist(tmp_path / "b", images=20)
    assert datasets.digest("mnist", folder) != datasets.digest("mnist", other)
    assert datasets.digest("digits", None) == datasets.digest("digits", None)
    (images, labels), (test_images, _) = datasets.load("mnist", other)
    assert len(images) == len(labels) == 18 and len(test_images) == 2


@pytest.mark.parametrize(
    ("may_lose", "codes", "status"),
    [
        (True, {0: 0, 1: -9, 2: 0}, "ok"),
        (False, {0: 0, 1: -9, 2: 0}, "failed"),
        (True, {0: 0, 1: -9, 2: 1}, "failed"),
        (True, {0: 0, 1: -9, 2: None}, "failed"),
        (True, {0: 0, 1: 1, 2: 0}, "failed"),
        (True, {1: -9}, "failed"),
    ],
)
def test_a_killed_rank_is_survived_only_where_the_others_end_well(
    tmp_path, may_lose, codes, status
):
    job = Job(folder=tmp_path, repeat=0, world_size=3, timeout_s=9, may_lose_ranks=may_lose)
    job.result_path.write_text("{}")
    outcome = outcome_of(job, codes)
    assert outcome.status == status
    if status == "ok":
        assert outcome.result == {"lost_ranks": [1]}
    else:
        assert "rank 1 " in outcome.error["message"]


def _record(trial, result):
    from common.launch.job import Outcome

    machine = {
        "cores": 2,
        "cpu": "CPU",
        "packages": {"torch": "2"},
        "commit": "abc",
    }
    more = {"lost_ranks": [1]} if None in result["learning"]["ranks"] else {}
    outcome = Outcome(status="ok", result=result)
    return make_record(trial, [result | more], outcome, machine, "now", 1.0)


def _pair(model, test_split):
    """Records of a trial undisturbed and with a slow host, whose rank 1 is three times slower."""
    start = _flat(model)
    ages = {"staleness": {"1": {"uses": 2, "mean": 3.0, "max": 7, "last": 1}}}
    calm = [_saved([start] * 3, steps=10, statistics=ages) for _ in range(2)]
    slow = [
        _saved([start] * 3, steps=9, statistics=ages),
        _saved([start + 0.01] * 3, steps=2, statistics={}),
    ]
    fault = {"kind": "slow_host", "host": 1, "factor": 5.0, "rank": None, "at_s": 0.0}
    fault |= {"for_s": None, "rate": None}
    place = {"network": "10gbe", "ranks_per_host": 1}
    trials = [_learning_trial(**place), _learning_trial(**place, fault=fault)]
    made = (calm, slow)
    return [
        _record(trial, judging.result(trial, saved, test_split))
        for trial, saved in zip(trials, made, strict=True)
    ]


def test_rows_tell_how_much_of_its_pace_a_rank_keeps(model, test_split):
    calm, slow = learning.rows(_pair(model, test_split))
    assert calm.steps_per_s == pytest.approx(10.0) and calm.kept is None
    assert slow.steps_per_s == pytest.approx(9.0) and slow.kept == pytest.approx(0.9)
    assert slow.slowed_steps_per_s == pytest.approx(2.0)
    assert (calm.staleness_mean, calm.staleness_max) == (3.0, 7)
    text = learning_table.markdown([calm, slow])
    assert text.count("\n") == 4 and "not reached" in text and "slow_host h1 x5" in text
    assert "mnist_cnn" in learning_table.csv_text([calm])
    assert learning_table.summary([calm, calm]) == [
        "mnist_cnn, 2 workers, 10gbe: none reaches 50% in 2 s"
    ]


def test_a_record_is_json_and_says_who_died(model, test_split):
    trial = _learning_trial()
    start = _flat(model)
    broken = start.clone()
    broken[0] = float("nan")
    saved = [_saved([start, start, broken], steps=4), None]
    record = _record(trial, judging.result(trial, saved, test_split))
    json.dumps(record, allow_nan=False)
    assert any("rank 1 was killed" in note for note in record["notes"])
    assert record["throughput"]["n"] == 1 and record["throughput"]["ci_low"] is None
    assert record["learning"][0]["evaluations"][2]["loss"] is None
    (row,) = learning.rows([record])
    assert row.lost_ranks == "1" and row.loss is None
    assert learning_table.markdown([row]).count("\n") == 3


@pytest.mark.parametrize("judged", [True, False])
def test_figures_are_drawn_from_records(tmp_path, model, test_split, judged):
    from common.results import records
    from common.results.comparison import Comparison
    from plots.learning import draw

    made = _pair(model, test_split)
    for record in made:
        if not judged:
            for evaluation in record["learning"][0]["evaluations"]:
                for key in list(evaluation):
                    if key not in ("at_s", "seconds", "steps"):
                        del evaluation[key]
        records.append(tmp_path / "records.jsonl", record)
    Comparison(compare_to="asyncddp", trials=tuple(r["hash"] for r in made)).save(tmp_path)
    paths = draw(tmp_path, tmp_path / "out")
    assert [path.name for path in paths] == ["learning.png", "learning.pdf", "learning.csv"]
    assert all(path.stat().st_size > 100 for path in paths)
    lines = Path(paths[2]).read_text().splitlines()
    assert len(lines) == 1 + 2 * 3 and lines[0].startswith("fault,algorithm,repeat,at_s")
