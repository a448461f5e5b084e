"""Training trials: what an experiment may say, who ends when, and what is judged."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import yaml

from common.harness.experiment_file import find_experiment, load
from common.harness.settings import LearnConfig
from common.harness.trial import Trial
from common.harness.worker import rank as worker
from common.harness.worker.evaluation import MOST_BYTES
from common.harness.worker.loop import Loop, Schedule, TrainingClock
from common.launch import job as launch_job
from common.launch.job import Job, LeftBehind, outcome_of
from common.launch.ranks import Ranks
from common.models import datasets, registry
from common.models.datasets.batches import Batches
from common.models.datasets.tensors import Tensors
from common.paths import EXPERIMENTS
from common.results.records.learned import Data
from dear.comm import runtime
from dear.errors import UserError
from tests.system.made import make_trial, write_cifar, write_images, write_mnist

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
        ({"learn": {"target_accuracy": 0.9}}, "learn.target_accuracy: needs learn.data"),
        ({"learn": {"sampler": "own"}}, "learn.sampler: needs learn.data"),
        ({"learn": {"data": "digits", "batch_sizes": [4, 0]}}, "learn.batch_sizes.1 must be at"),
        (
            {"learn": {"data": "digits", "batch_sizes": [4, 2, 1]}, "world_sizes": [2]},
            "one number for each of 2 workers, got 3",
        ),
        ({"learn": {"data": "digits", "sampler": "mine"}}, "'learn.sampler': unknown value 'mine'"),
        ({"learn": {"data": "mnist"}}, "set data_dir=FOLDER or MNIST_DIR"),
        ({"learn": {"data": "mnist"}, "data_dir": "/nonexistent"}, "no folder /nonexistent"),
        ({"data_dir": "/tmp"}, "digits comes with scikit-learn and has no folder"),
        ({"learn": {}, "data_dir": "/tmp"}, "data_dir: used only with `learn`"),
        ({"models": ["resnet18"]}, "resnet18 cannot learn digits; models that can: mnist_cnn"),
        ({"measure": {"check_steps": 3}}, "measure.check_steps: has no effect with learn"),
        ({"measure": {"warmup_steps": 9}}, "allowed: repeats"),
        ({"report_lines": True}, "report_lines: has no effect with learn"),
        ({"timeout_s": 4}, "timeout_s: 4 s leave no time for learn.budget_s=4"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(read, change, words):
    with pytest.raises(UserError) as caught:
        read(change).trials()
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_workers_are_told_where_the_data_is(read, tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}: no MNIST files"):
        read({"learn": {"data": "mnist"}, "data_dir": str(tmp_path)}).trials()
    folder = write_mnist(tmp_path / "a")
    assert read({"learn": {"data": "digits"}}).worker_env == {}
    result = read({"learn": {"data": "mnist"}, "data_dir": str(folder)}).worker_env
    assert result == {"MNIST_DIR": str(folder)}


def test_data_is_part_of_a_trial_by_its_digest_not_by_its_path(read, tmp_path):
    def trial(folder):
        change = {"learn": {"data": "mnist"}, "data_dir": str(folder), "algorithms": ["dear"]}
        return read(change).trials()[0]

    plain = trial(write_mnist(tmp_path / "a"))
    assert trial(write_mnist(tmp_path / "b", zipped=True)).hash == plain.hash
    assert trial(write_mnist(tmp_path / "c", shift=1)).hash != plain.hash
    assert str(tmp_path) not in json.dumps(plain.to_json())
    assert Trial.from_json(json.loads(json.dumps(plain.to_json()))) == plain


def test_batch_sizes_are_those_of_ranks_and_part_of_a_trial(read):
    learn = {"data": "digits", "batch_sizes": [4, 1]}
    change = {"learn": learn, "world_sizes": [2], "baseline": True}
    trials = {trial.algorithm: trial for trial in read(change).trials()}
    trial = trials["asyncddp"]
    assert (trial.batch, trial.rank_batches) == ("4,1", (4, 1))
    assert (trials["none"].batch, trials["none"].rank_batches) == ("2", (2,))
    assert Trial.from_json(json.loads(json.dumps(trial.to_json()))) == trial
    equal = dataclasses.replace(trial, learn=dataclasses.replace(trial.learn, batch_sizes=None))
    assert equal.hash != trial.hash


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


def looped(marks, time_scale: float) -> tuple[Loop, list, list]:
    """A loop of steps of a quarter of a second of this machine, its copies, and when it settled."""
    world, taken, settled = World(), [], []

    def step() -> int:
        world.now += 0.25
        return 4

    def take(marks, seconds, steps):
        taken.append((list(marks), seconds, steps))
        world.now += 100.0

    loop = Loop(
        step=step,
        settle=lambda: settled.append(1),
        take=take,
        schedule=Schedule(marks),
        clock=TrainingClock(world.clock, time_scale=time_scale),
        communicator=world,
    )
    return loop, taken, settled


@pytest.mark.parametrize("own", [True, False])
def test_a_copy_costs_no_time_and_emulated_seconds_count(own):
    loop, taken, settled = looped((0.0, 0.25, 0.5, 1.0), time_scale=2.0)
    pace = loop.own_pace() if own else loop.in_step()
    assert (pace.steps, pace.samples, pace.elapsed_s) == (8, 32, 1.0)
    assert taken == [([0], 0.0, 0), ([1], 0.25, 2), ([2], 0.5, 4), ([3], 1.0, 8)]
    # Few words of rank 0: as many as copies, and while the step time is not known yet.
    assert len(settled) == (0 if own else 4)


@pytest.mark.parametrize("own", [True, False])
def test_epochs_are_the_same_steps_for_all_and_end_where_they_are_judged(own):
    marks = LearnConfig(data="digits", epochs=3, eval_every_epochs=2).marks
    loop, taken, settled = looped(marks, time_scale=1.0)
    pace = loop.for_epochs(5, own_pace=own)
    assert (pace.steps, pace.samples, pace.elapsed_s) == (15, 60, 3.75)
    assert taken == [([0], 0.0, 0), ([1], 2.5, 10), ([2], 3.75, 15)]
    assert len(settled) == (0 if own else 3)


def _in_step(budget_s: float) -> dict:
    communicator = runtime.communicator()
    taken = []

    def step() -> int:
        time.sleep(0.02 if communicator.rank == 1 else 0.002)
        return 3

    loop = Loop(
        step=step,
        settle=lambda: None,
        take=lambda marks, seconds, steps: taken.append((list(marks), seconds, steps)),
        schedule=Schedule((0.0, budget_s / 2, budget_s)),
        clock=TrainingClock(communicator.clock, 1.0),
        communicator=communicator,
    )
    pace = loop.in_step()
    return {"steps": pace.steps, "elapsed_s": pace.elapsed_s, "taken": taken}


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_in_step_end_and_copy_at_the_same_steps_in_time(world, size):
    results = world(size).run(_in_step, 0.4)
    assert all(result == results[0] for result in results)
    assert results[0]["elapsed_s"] >= 0.4
    marks = [mark for marks, _, _ in results[0]["taken"] for mark in marks]
    assert marks == [0, 1, 2]


def test_ranks_share_a_round_or_have_one_of_their_own():
    samples = Tensors(10 * torch.arange(24), torch.arange(24))

    def seen(rank, sampler, batches):
        built = Batches(samples, batch_size=4, sampler=sampler, seed=3, rank=rank, size=3)
        assert built.per_round == (2 if sampler == "shared" else 6)
        result = []
        for _ in range(batches):
            inputs, targets = next(built)
            assert len(targets) == 4 and torch.equal(inputs, 10 * targets)
            result += targets.tolist()
        return result

    shared = [seen(rank, "shared", 2) for rank in range(3)]
    assert sorted(label for order in shared for label in order) == list(range(24))
    assert seen(0, "shared", 4)[8:] != shared[0]  # another order in the next round
    ours = [seen(rank, "own", 6) for rank in range(3)]
    assert all(sorted(order) == list(range(24)) for order in ours)
    assert ours[0] != ours[1]
    few = Tensors(torch.arange(9), torch.arange(9))
    with pytest.raises(UserError, match="batch_size: 4 is more than the 3 samples"):
        Batches(few, batch_size=4, sampler="shared", seed=3, rank=0, size=3)


def test_what_is_drawn_for_a_batch_is_the_same_however_it_is_read():
    """Samples do not depend on processes that read ahead; they differ by rank and batch."""

    def noisy(inputs, generator):
        return inputs + torch.rand(len(inputs), generator=generator)

    samples = Tensors(torch.zeros(24), torch.arange(24), vary=noisy)

    def drawn(rank, workers):
        given = {"batch_size": 3, "sampler": "own", "seed": 3, "size": 2}
        batches = Batches(samples, rank=rank, workers=workers, **given)
        result = [next(batches)[0].tolist() for _ in range(10)]
        batches.close()
        return result

    alone = drawn(0, 0)
    assert alone == drawn(0, 2) == drawn(0, 0)
    assert len({value for batch in alone + drawn(1, 0) for value in batch}) == 60
    inputs, _ = samples.batch(range(3), None)
    assert inputs.tolist() == [0.0] * 3, "what is judged by is left as it is"


def test_each_repeat_has_a_seed_of_its_own_and_no_round_of_another(read):
    trial = read({"measure": {"repeats": 5}}).trials()[0]
    repeats = [trial.of_repeat(number) for number in range(5)]
    assert [item.seed for item in repeats] == [1, 101, 201, 301, 401]
    # An order is drawn with the seed plus the number of the round (and 10,000 per rank).
    rounds = [{item.seed + number for number in range(50)} for item in repeats]
    assert len(set.union(*rounds)) == 5 * 50
    timed = dataclasses.replace(trial, learn=None)
    assert timed.of_repeat(4) == timed


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
    facts = {"folder": tmp_path, "repeat": 0, "world_size": 3, "timeout_s": 9}
    job = Job(**facts, worker_module="worker", may_lose_ranks=may_lose)
    job.result_path.write_text("{}")
    outcome = outcome_of(job, codes)
    assert outcome.status == status
    if codes == {1: -9}:  # noted by what stands for the rank, whose launcher knows of nothing
        job.killed_path(1).write_text("9")
        assert outcome_of(job, {}).result == {"lost_ranks": [1]}
        assert outcome_of(job, {0: 1}).error["message"] == "rank 1 was killed by signal 9"
        job.clear()
        assert not job.killed_path(1).exists()
    if status == "ok":
        assert outcome.result == {"lost_ranks": [1]}
    else:
        assert "rank 1 " in outcome.error["message"]


@pytest.mark.parametrize("phase", ["measuring", "judging"])
def test_a_rank_without_which_the_others_have_ended_is_killed(tmp_path, phase, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(launch_job, "time", SimpleNamespace(monotonic=lambda: now[0]))
    job = Job(folder=tmp_path, repeat=0, world_size=3, timeout_s=9, worker_module="worker")
    job.phase_path(1).write_text("1 done")
    job.phase_path(0).write_text(f"1 {phase}")
    os.utime(job.phase_path(1), (0, 0))  # by the clock of another host
    left_behind = LeftBehind(job)
    assert not any(map(left_behind, range(3)))  # the others have only just ended
    now[0] += launch_job.LEFT_S + 1
    left = list(filter(left_behind, range(3)))
    assert left == ([0, 2] if phase == "measuring" else [2])
    with Ranks() as ranks:
        for rank in range(3):
            ranks.command(["sleep", "600" if rank in left else "0"])
        assert ranks.wait(60, left_behind=left.__contains__, matters=lambda _: False)
        assert ranks.codes == {rank: -signal.SIGKILL if rank in left else 0 for rank in range(3)}
    job.clear()
    assert not LeftBehind(job)(2)


def test_the_oldest_error_is_the_cause_of_the_others(tmp_path):
    job = Job(folder=tmp_path, repeat=0, world_size=2, timeout_s=9, worker_module="worker")
    for rank, (age_s, message) in enumerate([(1, "lost rank 1"), (2, "the cause")]):
        path = tmp_path / f"error-0-rank{rank}.json"
        error = {"kind": "failed", "message": message, "rank": rank, "where": "measuring"}
        path.write_text(json.dumps(error))
        os.utime(path, (1000 - age_s, 1000 - age_s))
    assert outcome_of(job, {0: 1, 1: 1}).error["message"] == "the cause"


def test_a_lack_of_memory_is_named_whoever_has_asked_for_it():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert [worker._kind(error) for error in (caught.value, MemoryError())] == ["oom", "oom"]
    assert worker._kind(RuntimeError("another")) == "failed"


def test_what_is_trained_on_is_said_and_true_training_images_are_used(tmp_path, monkeypatch):
    monkeypatch.delenv("MNIST_DIR", raising=False)
    folder = write_mnist(tmp_path, images=20)
    parts = datasets.load("mnist", folder)
    assert (len(parts.train), len(parts.test), parts.classes) == (18, 2, 10)
    assert parts.split == "MNIST's 20 test images"
    result = Data(name="mnist", train=9000, test=1000, split="MNIST's 10,000 test images")
    assert result.title == "9,000 of MNIST's 10,000 test images, judged by the other 1,000"

    for path in write_mnist(tmp_path / "more", images=30, shift=1).iterdir():
        path.rename(folder / path.name.replace("t10k", "train"))
    parts = datasets.load("mnist", folder)
    assert (len(parts.train), len(parts.test), parts.split) == (30, 20, None)
    result = Data(name="mnist", train=60000, test=10000, split=None)
    assert result.title == "60,000 training images of mnist, judged by 10,000 others"
    assert datasets.load("digits", None).split == "scikit-learn's 1,797 digits"


@pytest.mark.parametrize("ask", [datasets.load, datasets.digest])
def test_data_is_what_its_name_says_not_what_a_folder_suggests(ask, tmp_path, monkeypatch):
    monkeypatch.delenv("MNIST_DIR", raising=False)
    with pytest.raises(UserError, match="mnist needs a path"):
        ask("mnist", None)
    with pytest.raises(UserError, match="digits comes with scikit-learn and has no folder"):
        ask("digits", write_mnist(tmp_path))


def _write_text(folder):
    (folder / "words").write_text("to be or not " * 500)
    return folder / "words"


@pytest.mark.parametrize(
    "path", sorted(EXPERIMENTS.glob("recipes/*.yaml")), ids=lambda path: path.stem
)
def test_a_recipe_trains_the_model_of_its_name(path, tmp_path, monkeypatch):
    write = {"cifar10": write_cifar, "imagefolder": write_images, "mnist": write_mnist}
    data = yaml.safe_load(path.read_bytes())["learn"]["data"]
    folder = write.get(data, _write_text)(tmp_path)
    monkeypatch.setenv(datasets.SOURCES[data].variable, str(folder))
    monkeypatch.setattr("common.machine.available_bytes", lambda: 1 << 40)
    trials = load(find_experiment(path.stem)).trials()
    assert [trial.algorithm for trial in trials] == ["ddp", "mgwfbp", "dear"]
    assert {(t.model, t.world_size, t.learn.data) for t in trials} == {(path.stem, 4, data)}
    with torch.device("meta"):
        model = registry.build(path.stem, 1, trials[0].sentence_len, None).model
    copies = len(trials[0].learn.marks)
    assert copies * sum(value.nbytes for value in model.state_dict().values()) < MOST_BYTES
