"""The rounds of a cell on a made-up fabric: order, time scale, repetitions, and when it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.emulation.config import Fault
from common.emulation.dilation import Calibration, Choice
from common.emulation.links.profile import network_profile
from common.harness.experiment_file import load
from common.harness.running import fabric as fabrics
from common.harness.running import launches
from common.harness.running.cell import Cell
from common.harness.running.fabric import Fabric
from common.harness.running.launches import CellContext
from common.harness.running.turn import Turn, order_seed, planned
from common.harness.running.ui import Progress
from common.harness.running.underway import Standing, Underway
from common.harness.settings import MeasureConfig
from common.harness.trial import Trial
from common.launch.job import Outcome
from common.results.records import FabricFacts, Result
from common.results.records.trust import Check, Strain
from tests.system.made import make_trial

NAMES = ("ddp", "wfbp", "dear", "allreduce")


def result(step_s: float = 1.0) -> Result:
    return Result(
        iters=[[step_s, step_s]],
        cpu_s_per_s=1.0,
        loss=1.0,
        check=Check(replicas_agree=True, matches_reference=True),
    )


class Scaled(Fabric):
    """Trials need the time scale that `needs` says, or have enough at any."""

    def __init__(self, needs: dict[str, float] | None = None) -> None:
        self.needs, self.scales = needs or {}, [4.0]
        self.settled: Choice | None = None

    def enter_cell(self, trials: Sequence[Trial], settled: Choice | None = None) -> None:
        self.settled = settled
        if settled is not None:
            self.scales = [settled.time_scale]

    def slow_down(self, choice: Choice) -> None:
        self.scales.append(choice.time_scale)
        self.reason = choice.reason

    @property
    def time_scale(self) -> float:
        return self.scales[-1]

    @property
    def max_time_scale(self) -> float:
        return 40.0

    def needed(self, trial: Trial, result: Result) -> Choice | None:
        scale = self.needs.get(trial.algorithm, 1.0)
        if scale <= self.time_scale:
            return None
        return Choice(time_scale=scale, reason=f"{trial.algorithm} is heavy")

    def describe(self, trial: Trial) -> FabricFacts:
        return FabricFacts(kind="emulated", time_scale=self.time_scale)


class Rounds:
    """Runs a cell of `NAMES`; each launch takes no time and gives `times[name]`, or 1 s a step."""

    def __init__(self, measure: MeasureConfig, needs: dict[str, float] | None = None) -> None:
        self.trials = [make_trial(name, measure=measure) for name in NAMES]
        self.fabric = Scaled(needs)
        self.launched: list[tuple[str, int, float]] = []
        self.recorded: dict[str, tuple[Turn, Outcome]] = {}
        self.etas: list[float | None] = []
        self.whys: list[str] = []
        """Returns what the progress line showed beside launches, once each."""
        self._why = ""
        self.outcome: Callable[[Trial, int], Outcome | Result] = lambda trial, repeat: result()
        self.progress = Progress(total=0)
        self.settled: Choice | None = None
        self.timeout_s = 600.0
        self.kept: dict[str, Standing] = {}
        self.standing: dict[str, Standing] = {}

    def launch(self, trial: Trial, repeat: int, slower: float) -> tuple[Outcome, Result | None]:
        self.launched.append((trial.algorithm, repeat, self.fabric.time_scale))
        matches = self.outcome(trial, repeat)
        if isinstance(matches, Result):
            return Outcome(status="ok"), matches
        return matches, None

    def run(self, fail_fast: bool = False) -> bool:
        left = planned(self.trials, self.kept)
        self.progress = Progress(total=len(left), left=left)
        context = CellContext(
            sweep="sweep",
            fabric=self.fabric,
            base="ddp",
            timeout_s=self.timeout_s,
            launch=self.launch,
            record=self.record,
            progress=self.progress,
            report=self.report,
        )
        cell = Cell(
            self.trials,
            context,
            settled=self.settled,
            kept=self.kept,
            keep=lambda standing: setattr(self, "standing", standing),
        )
        return cell.run(lambda trial: None, fail_fast)

    def report(self, progress: Progress) -> None:
        self.etas.append(progress.eta_s())
        if progress.why and progress.why != self._why:
            self.whys.append(progress.why)
        self._why = progress.why

    def record(self, turn: Turn, outcome: Outcome) -> None:
        assert turn.trial.algorithm not in self.recorded, "each trial is recorded once"
        self.recorded[turn.trial.algorithm] = turn, outcome

    def order(self, repeat: int) -> list[str]:
        return [name for name, index, _ in self.launched if index == repeat]

    def statuses(self) -> dict[str, str]:
        return {name: outcome.status for name, (_, outcome) in self.recorded.items()}


def ran(
    needs: dict[str, float] | None = None,
    outcome: Callable[[Trial, int], Outcome | Result] = lambda trial, repeat: result(),
    **measure: object,
) -> Rounds:
    """Rounds that have run, two of them unless `repeats` says otherwise."""
    rounds = Rounds(MeasureConfig(**({"repeats": 2} | measure)), needs)
    rounds.outcome = outcome
    assert rounds.run()
    return rounds


def test_rounds_are_in_random_order_that_the_seed_repeats():
    rounds = ran(repeats=6)
    orders = [rounds.order(repeat) for repeat in range(6)]
    assert all(sorted(order) == sorted(NAMES) for order in orders)
    assert len(set(map(tuple, orders))) > 2, "not the same in each round, nor one and its reverse"
    # Neighbours change, which a rotation would not do.
    behind = {order[i + 1] for order in orders for i in range(3) if order[i] == "ddp"}
    assert len(behind) > 1
    for name in NAMES:
        turn, outcome = rounds.recorded[name]
        assert outcome.status == "ok" and len(turn.results) == 6
        assert turn.order.positions == [order.index(name) for order in orders]
        assert turn.order.seed == order_seed("sweep", rounds.trials[0])
    assert ran(repeats=6).launched == rounds.launched
    other = make_trial("ddp", measure=MeasureConfig(repeats=6), seed=2)
    assert order_seed("sweep", other) != order_seed("sweep", rounds.trials[0])
    assert order_seed("again", other) != order_seed("sweep", other)


def test_a_heavy_trial_slows_the_whole_cell_and_what_was_measured_before_is_set_aside():
    rounds = ran({"dear": 16.0})
    assert rounds.fabric.scales == [4.0, 16.0]
    assert rounds.fabric.reason == "dear: dear is heavy; found in the cell's first round"
    early = [name for name, _, scale in rounds.launched if scale == 4.0]
    assert early == rounds.order(0)[: rounds.order(0).index("dear") + 1]
    assert [scale for _, _, scale in rounds.launched[len(early) :]] == [16.0] * 8
    for name in NAMES:
        turn, outcome = rounds.recorded[name]
        assert outcome.status == "ok" and len(turn.results) == len(turn.order.positions) == 2
        assert turn.facts.time_scale == 16.0
        aside = [(item.repeat, item.time_scale, item.iters) for item in turn.set_aside]
        assert aside == ([(0, 4.0, [[1.0, 1.0]])] if name in early else [])
    assert (rounds.progress.done, rounds.progress.left) == (rounds.progress.total, [])


def test_processes_do_not_start_more_slowly_at_a_larger_scale(monkeypatch):
    rounds = Rounds(MeasureConfig(repeats=1, warmup_steps=1), needs={"dear": 20.0})
    rounds.timeout_s = 58.0
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(launches.time, "monotonic", lambda: next(clock))
    assert rounds.run()
    assert rounds.statuses() == dict.fromkeys(NAMES, "ok")


def test_a_first_round_that_is_done_again_begins_with_the_trial_for_which_it_is():
    """Runs first: if its scale is too small, no other trial has been launched in vain."""
    rounds = Rounds(MeasureConfig(repeats=2), needs={"dear": 16.0})
    needed = rounds.fabric.needed

    def step_by_step(trial: Trial, one: Result) -> Choice | None:
        matches = needed(trial, one)
        return matches and dataclasses.replace(matches, time_scale=2 * rounds.fabric.time_scale)

    rounds.fabric.needed = step_by_step
    assert rounds.run()
    assert [name for name, _, scale in rounds.launched if scale == 8.0] == ["dear"]
    first = [name for name, repeat, scale in rounds.launched if (repeat, scale) == (0, 16.0)]
    assert first[0] == "dear" and sorted(first) == sorted(NAMES)
    assert rounds.recorded["dear"][0].order.positions[0] == 0


@pytest.mark.parametrize("limit", ["scale", "time"])
def test_a_trial_that_is_too_heavy_has_no_number_and_slows_nobody(limit, monkeypatch):
    measure = MeasureConfig(repeats=2, warmup_steps=1)
    rounds = Rounds(measure, needs={"dear": 50.0 if limit == "scale" else 20.0})
    if limit == "time":
        # 3 steps of 1 s, which take 16 times 3 s longer at 20 than at 4; whatever else a launch
        # does takes what it takes.
        rounds.timeout_s = 57.0
        clock = iter(range(0, 1000, 10))  # each launch takes 10 s
        monkeypatch.setattr(launches.time, "monotonic", lambda: next(clock))
    assert rounds.run()
    assert rounds.fabric.scales == [4.0]
    turn, outcome = rounds.recorded["dear"]
    assert outcome.status == "unsupported" and turn.results == []
    assert outcome.error["message"].startswith("too heavy for this machine: dear is heavy")
    wanted = "cluster.max_time_scale is 40" if limit == "scale" else "up to 58 s for a repeat"
    assert wanted in outcome.error["message"]
    assert len(turn.set_aside) == 1, "what it was judged by"
    assert sorted(rounds.statuses().values()) == ["ok", "ok", "ok", "unsupported"]
    assert (rounds.progress.done, rounds.progress.left) == (rounds.progress.total, [])


def test_an_incorrect_trial_is_not_called_too_heavy():
    wrong = Check(replicas_agree=True, matches_reference=False)

    def outcome(trial: Trial, repeat: int) -> Result:
        return dataclasses.replace(result(), check=wrong) if trial.algorithm == "dear" else result()

    rounds = ran({"dear": 50.0}, outcome=outcome)
    turn, ended = rounds.recorded["dear"]
    assert ended.status == "ok" and turn.results[0].check.verdict == "NO"
    assert rounds.fabric.scales == [4.0]


def test_the_largest_scale_there_may_be_is_not_too_large():
    rounds = ran({"dear": 40.0})
    assert rounds.fabric.scales == [4.0, 40.0]
    assert rounds.statuses() == dict.fromkeys(NAMES, "ok")


def test_a_cell_that_goes_on_keeps_its_scale():
    rounds = Rounds(MeasureConfig(repeats=2), needs={"dear": 16.0, "wfbp": 80.0})
    rounds.settled = Choice(time_scale=8.0, reason="as the others")
    rounds.timeout_s = 1.0  # a scale that is not taken takes no time either
    assert rounds.run()
    assert rounds.fabric.scales == [8.0]
    assert rounds.statuses() == dict.fromkeys(NAMES, "ok") | {"wfbp": "unsupported"}


def test_a_cell_stops_together_when_its_intervals_are_narrow():
    measure = {"repeats": (3, 8), "precision": 0.02}
    assert len(ran(**measure).launched) == 3 * len(NAMES)
    noise = [1.0, 1.3, 0.8, 1.2, 0.9, 1.1, 1.4, 0.7]
    noisy = ran(
        outcome=lambda trial, repeat: result(noise[repeat] if trial.algorithm == "dear" else 1.0),
        **measure,
    )
    assert len(noisy.launched) == 8 * len(NAMES), "one wide interval keeps all of them going"
    assert (noisy.progress.done, noisy.progress.left) == (noisy.progress.total, [])


def test_a_large_difference_does_not_stop_a_cell():
    """Stopping as soon as something is significant would make false words of luck."""
    noise = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0]

    def outcome(trial: Trial, repeat: int) -> Result:
        fast = 0.2 * (1 + 0.1 * (repeat % 2))
        return result(noise[repeat] * (fast if trial.algorithm == "dear" else 1.0))

    rounds = ran(outcome=outcome, repeats=(3, 6), precision=0.02)
    assert len(rounds.launched) == 6 * len(NAMES)


BUSY = Strain(core_wait=1.0, foreign_cores=1.0)
SHORT = Strain(core_wait=1.0)
BESIDE = Strain(core_wait=0.4, foreign_cores=1.0)


def held_up(strain: Strain, step_s: float = 7.0) -> Result:
    return dataclasses.replace(result(step_s), strain=strain)


def ddp_is_short(trial: Trial, repeat: int) -> Result:
    return held_up(SHORT) if trial.algorithm == "ddp" else result()


def test_what_passes_is_done_again_once_kept_as_evidence_and_told():
    rounds = Rounds(MeasureConfig(repeats=2))
    others_come = {("dear", 1), ("wfbp", 0)}

    def outcome(trial: Trial, repeat: int) -> Result:
        place = (trial.algorithm, repeat)
        if place not in others_come:
            return result()
        others_come.remove(place)
        return held_up(BUSY)

    rounds.outcome = outcome
    assert rounds.run()
    assert rounds.statuses() == dict.fromkeys(NAMES, "ok")
    assert len(rounds.launched) == 2 * len(NAMES) + 2
    busy = "disturbed: other processes used 1.0 cores meanwhile"
    for name, repeat in (("dear", 1), ("wfbp", 0)):
        turn = rounds.recorded[name][0]
        assert [item.steps[0] for item in turn.results] == [1.0, 1.0]
        assert [(item.repeat, item.reason, item.iters) for item in turn.set_aside] == [
            (repeat, busy, [[7.0, 7.0]])
        ]
    assert rounds.whys == [f"again: {busy}"] * 2
    assert (rounds.progress.done, rounds.progress.left) == (rounds.progress.total, [])


def test_load_that_leaves_threads_their_cores_repeats_and_flags_nothing():
    rounds = Rounds(MeasureConfig(repeats=3))
    rounds.fabric.foreign_cores = 1.0
    rounds.outcome = lambda trial, repeat: held_up(BESIDE)
    assert rounds.run()
    assert len(rounds.launched) == 3 * len(NAMES) and rounds.whys == [
        "other programs use 1.0 cores"
    ]
    assert all(turn.notes == turn.set_aside == [] for turn, _ in rounds.recorded.values())


@pytest.mark.parametrize("before", [0.0, 1.0])
def test_load_that_stays_takes_a_larger_scale_and_no_repeats(before):
    """The launch that notices it may be done again once; who knew it before need not."""
    rounds = Rounds(MeasureConfig(repeats=2), needs=dict.fromkeys(NAMES, 16.0))
    rounds.fabric.foreign_cores = before
    rounds.outcome = lambda trial, repeat: held_up(
        BUSY if rounds.fabric.time_scale < 16 else BESIDE
    )
    assert rounds.run()
    assert rounds.fabric.scales == [4.0, 16.0]
    assert len(rounds.launched) == 2 * len(NAMES) + (2 if before == 0 else 1)
    assert rounds.whys[-1].startswith("all trials begin again at time scale 16: ")
    assert rounds.statuses() == dict.fromkeys(NAMES, "ok")
    assert all(len(turn.results) == 2 for turn, _ in rounds.recorded.values())


@pytest.mark.parametrize("strain", [BUSY, SHORT])
def test_a_cell_whose_base_cannot_be_valid_ends_after_its_first_round_and_says_why(strain):
    """A given time scale is used: nothing larger may be chosen."""
    rounds = ran(
        outcome=lambda trial, _: held_up(strain) if trial.algorithm == "ddp" else result(),
        repeats=(5, 12),
        precision=0.02,
    )
    assert len(rounds.launched) == len(NAMES) + (strain is BUSY)
    assert rounds.statuses() == dict.fromkeys(NAMES, "ok")
    word = "disturbed: other processes" if strain is BUSY else "unfaithful: a rank's threads"
    for name in NAMES:
        turn, _ = rounds.recorded[name]
        assert len(turn.results) == 1
        if name != "ddp":
            text = f"stopped: no verdict is possible, for ddp is not valid: {word}"
            assert turn.notes[-1].text.startswith(text)
    assert rounds.whys[-1].startswith("stopped: no verdict is possible")
    assert (rounds.progress.done, rounds.progress.left) == (rounds.progress.total, [])


def test_a_base_that_is_too_heavy_for_this_machine_ends_its_cell():
    rounds = ran({"ddp": 50.0}, ddp_is_short, repeats=5)
    assert len(rounds.launched) == len(NAMES)
    assert rounds.statuses() == dict.fromkeys(NAMES, "ok") | {"ddp": "unsupported"}
    assert "too heavy for this machine" in rounds.recorded["dear"][0].notes[-1].text


def test_a_base_that_becomes_too_heavy_keeps_what_it_had_and_is_flagged():
    """Others came, and no scale is large enough for what they leave."""
    quiet = Strain(core_wait=0.4)

    def outcome(trial: Trial, repeat: int) -> Result:
        return held_up(SHORT if (trial.algorithm, repeat) == ("ddp", 1) else quiet)

    rounds = ran({"ddp": 50.0}, outcome, repeats=5)
    assert rounds.statuses() == dict.fromkeys(NAMES, "ok")
    assert {len(turn.results) for turn, _ in rounds.recorded.values()} == {2}
    assert "ddp is not valid: unfaithful" in rounds.recorded["dear"][0].notes[-1].text


def test_a_trial_that_is_valid_at_the_largest_scale_keeps_its_number():
    """A first round asks for more than a record must have; what cannot be had is not missed."""
    rounds = ran({"dear": 50.0}, lambda trial, repeat: held_up(Strain(core_wait=0.65)))
    assert rounds.fabric.scales == [4.0]
    assert rounds.statuses() == dict.fromkeys(NAMES, "ok")


def test_another_trial_that_is_not_valid_ends_alone():
    rounds = Rounds(MeasureConfig(repeats=3))
    rounds.outcome = lambda trial, repeat: (
        held_up(SHORT) if (trial.algorithm, repeat) == ("dear", 1) else result()
    )
    larger = Choice(time_scale=8.0, reason="threads waited")
    rounds.fabric.needed = lambda trial, one: larger if one.strain == SHORT else None
    assert rounds.run()
    assert rounds.fabric.scales == [4.0], "the others need not begin again for it"
    counts = {name: len(turn.results) for name, (turn, _) in rounds.recorded.items()}
    assert counts == dict.fromkeys(NAMES, 3) | {"dear": 2}
    again = [place for place in rounds.launched if place[:2] == ("dear", 1)]
    assert len(again) == 2, "it had been valid: that may have passed"
    assert rounds.recorded["ddp"][0].notes == []


def test_a_base_that_is_not_valid_ends_those_of_its_world_size_alone():
    measure = MeasureConfig(repeats=3)
    worlds = {"dear": 2, "ddp": 2, "wfbp": 4}
    rounds = Rounds(measure)
    rounds.trials = [make_trial(name, world, measure=measure) for name, world in worlds.items()]
    rounds.outcome = ddp_is_short
    assert rounds.run()
    launches = [name for name, *_ in rounds.launched]
    assert {name: launches.count(name) for name in worlds} == {"dear": 1, "ddp": 1, "wfbp": 3}


def test_what_was_disturbed_is_better_than_a_launch_that_fails():
    answers = iter([held_up(BUSY), Outcome.of("failed", "a rank died")])

    def answer(trial: Trial, repeat: int) -> Outcome | Result:
        return next(answers) if (trial.algorithm, repeat) == ("dear", 1) else result()

    rounds = ran(outcome=answer)
    turn, outcome = rounds.recorded["dear"]
    assert outcome.status == "ok" and [item.steps[0] for item in turn.results] == [1.0, 7.0]
    assert turn.set_aside == [] and "the second one ended as failed" in turn.notes[0].text


def test_a_base_that_is_disturbed_later_begins_again_once_at_a_scale_that_can():
    """Somebody opens a browser in the middle, so to speak."""
    rounds = Rounds(MeasureConfig(repeats=3))
    needed = rounds.fabric.needed

    def needs(trial: Trial, item: Result) -> Choice | None:
        if item.strain == BUSY:
            return Choice(time_scale=2 * rounds.fabric.time_scale, reason="others came")
        return needed(trial, item)

    rounds.fabric.needed = needs
    rounds.outcome = lambda trial, repeat: (
        held_up(BUSY)
        if repeat == 1 and trial.algorithm == "ddp" and rounds.fabric.time_scale == 4.0
        else result()
    )
    assert rounds.run()
    assert rounds.fabric.scales == [4.0, 8.0]
    assert "found in round 2" in rounds.fabric.reason
    for turn, outcome in rounds.recorded.values():
        assert outcome.status == "ok" and len(turn.results) == 3
        assert {item.time_scale for item in turn.set_aside} == {4.0}
    rounds = Rounds(MeasureConfig(repeats=3))
    rounds.fabric.needed = needs
    rounds.outcome = lambda trial, repeat: held_up(BUSY) if repeat == 1 else result()
    assert rounds.run()
    assert rounds.fabric.scales == [4.0, 8.0], "once"
    assert {len(turn.results) for turn, _ in rounds.recorded.values()} == {2}


def test_a_variant_of_the_bases_algorithm_is_not_the_base():
    """The base itself may be on record already."""
    rounds = Rounds(MeasureConfig(repeats=2))
    rounds.settled = Choice(time_scale=4.0, reason="as the others")
    rounds.trials[0] = dataclasses.replace(rounds.trials[0], label="ddp(bucket_cap_mb=1)")
    rounds.outcome = lambda trial, _: held_up(SHORT) if trial.algorithm == "ddp" else result()
    assert rounds.run()
    assert [len(rounds.recorded[name][0].results) for name in NAMES] == [1, 2, 2, 2]


def test_launches_that_are_done_again_are_few():
    """However often others come and go."""
    rounds = Rounds(MeasureConfig(repeats=8))

    def outcome(trial: Trial, repeat: int) -> Result:
        first = rounds.launched.count(rounds.launched[-1]) == 1
        return held_up(BUSY) if first and trial.algorithm != "ddp" else result()

    rounds.outcome = outcome
    assert rounds.run()
    assert sum(why.startswith("again") for why in rounds.whys) == 8, "a quarter of 8 x 4"


def test_an_incorrect_trial_has_no_further_repeats_and_is_never_the_best():
    wrong = Check(replicas_agree=True, matches_reference=False)
    checks = {"dear": wrong, "wfbp": Check(replicas_agree=True)}
    speed = {"dear": 0.1, "wfbp": 0.2, "allreduce": 0.5}

    def outcome(trial: Trial, repeat: int) -> Result:
        return dataclasses.replace(
            result(speed.get(trial.algorithm, 1.0)),
            check=checks.get(trial.algorithm, result().check if repeat == 0 else Check()),
            strain=Strain(core_wait=0.9 if trial.algorithm == "allreduce" else 0.1),
        )

    rounds = ran(outcome=outcome, repeats=3)
    counts = {name: len(turn.results) for name, (turn, _) in rounds.recorded.items()}
    assert counts["dear"] == 1 and counts["wfbp"] == counts["ddp"] == 3
    assert rounds.progress.best.startswith("ddp "), "the others are wrong, unchecked, and not valid"
    assert "dear: trained incorrectly, no further repeats" in rounds.whys


def test_replicas_that_part_later_end_a_trial_as_well():
    def outcome(trial: Trial, repeat: int) -> Result:
        check = Check(replicas_agree=(trial.algorithm, repeat) != ("dear", 1))
        return dataclasses.replace(result(), check=check)

    assert len(ran(outcome=outcome, repeats=4).recorded["dear"][0].results) == 2


def test_what_needs_more_than_the_others_on_record_says_how_to_get_it():
    rounds = Rounds(MeasureConfig(repeats=3), needs={"dear": 16.0})
    rounds.settled = Choice(time_scale=8.0, reason="as the others")
    rounds.outcome = lambda trial, repeat: held_up(SHORT) if trial.algorithm == "dear" else result()
    assert rounds.run()
    turn, _ = rounds.recorded["dear"]
    assert len(turn.results) == 1
    assert [note.text for note in turn.notes] == [
        "it needs time scale 16, but the records of its cell have 8; --rerun all measures all of "
        "them again"
    ]


BERT_SWEEP = """
algorithms: [ddp]
models: [{name: bert_base@rtx2080ti-modelled, batch_size: 64}]
cluster: {hosts: 4, network: 10gbe}
baseline: false
"""


def test_what_a_launch_needs_follows_from_its_waits(tmp_path, monkeypatch):
    """Nothing is stopped where nothing may be chosen, or a fault makes it slow."""
    (tmp_path / "x.yaml").write_text(BERT_SWEEP)
    experiment = load(tmp_path / "x.yaml")
    (trial,) = experiment.trials()
    monkeypatch.setattr(fabrics, "_cores", lambda: 2)
    fabric = fabrics.EmulatedFabric(experiment, [trial])
    fabric._choice = Choice(time_scale=5.0, reason="")
    busy = dataclasses.replace(result(1.3), cpu_s_per_s=1.85, strain=Strain(core_wait=3.0))
    idle = dataclasses.replace(busy, cpu_s_per_s=0.5)
    assert fabric.needed(trial, busy).time_scale == 16
    assert fabric.needed(trial, idle).time_scale == 10
    rested = dataclasses.replace(busy, strain=Strain(core_wait=0.3))
    assert fabric.needed(trial, rested) is None
    beside = dataclasses.replace(idle, strain=Strain(core_wait=1.2, foreign_cores=1.0))
    alone = dataclasses.replace(idle, strain=Strain(core_wait=0.7, foreign_cores=0.1))
    assert fabric.needed(trial, alone).time_scale == 6
    assert fabric.needed(trial, beside).time_scale == 10
    busier = dataclasses.replace(busy, strain=Strain(core_wait=3.0, foreign_cores=2.0))
    assert fabric.needed(trial, busier).time_scale == 20, "12 CPU seconds, 4 / 3 cores"
    for share in (0.018, -0.018):
        off = dataclasses.replace(busy, strain=Strain(core_wait=0.3, fell_behind=share))
        choice = fabric.needed(trial, off)
        assert choice.time_scale == 6 and "1.8% of the time" in choice.reason
    far = dataclasses.replace(busy, strain=Strain(fell_behind=0.1, core_wait=0.3))
    assert fabric.needed(trial, far).time_scale == 10, "twice, and it looks again"
    near = dataclasses.replace(busy, strain=Strain(fell_behind=0.01, core_wait=0.3))
    assert fabric.needed(trial, near) is None
    given = dataclasses.replace(trial, time_scale=5.0)
    faulty = dataclasses.replace(trial, fault=Fault(kind="kill_rank", rank=1))
    real = dataclasses.replace(trial, model="mnist_cnn")
    for other in (given, faulty, real):
        assert fabric.needed(other, busy) is None


@pytest.mark.parametrize("happened", [True, False])
def test_a_trial_whose_fault_did_not_happen_has_failed(tmp_path, monkeypatch, happened):
    (tmp_path / "x.yaml").write_text(BERT_SWEEP)
    experiment = load(tmp_path / "x.yaml")
    trial = dataclasses.replace(experiment.trials()[0], fault=Fault(kind="link_down", host=1))
    event = {"what": "link cut", "ok": happened, "message": None if happened else "tc: refused"}
    injector = SimpleNamespace(start=lambda: None, stop=lambda: [event])
    monkeypatch.setattr(fabrics, "FaultInjector", lambda *given: injector)
    monkeypatch.setattr(fabrics.Fabric, "run", lambda *given: Outcome(status="ok"))
    fabric = fabrics.EmulatedFabric(experiment, [trial])
    fabric._choice = Choice(time_scale=5.0, reason="")
    outcome = fabric._run(trial, SimpleNamespace(folder=tmp_path, repeat=0))
    if happened:
        assert outcome.status == "ok"
    else:
        assert outcome.error["message"] == "the fault did not happen: tc: refused"


def test_the_scale_that_is_chosen_is_not_below_the_least(tmp_path, monkeypatch):
    monkeypatch.setattr(fabrics, "_cores", lambda: 2)

    def chosen(network="100mbit", foreign=0.0, **keys):
        pairs = "".join(f", {name}: {value}" for name, value in keys.items())
        text = BERT_SWEEP.replace("network: 10gbe", f"network: {network}{pairs}")
        (tmp_path / "x.yaml").write_text(text)
        experiment = load(tmp_path / "x.yaml")
        (trial,) = experiment.trials()
        fabric = fabrics.EmulatedFabric(experiment, [trial])
        fabric._calibration = Calibration(cpu_s_per_byte=1e-10, memory_bytes_per_s=1e10)
        fabric._links = network_profile(network)
        fabric.foreign_cores = foreign
        return fabric._choose(trial)

    assert chosen().time_scale == 1
    assert chosen(min_time_scale=3) == Choice(time_scale=3, reason="cluster.min_time_scale")
    assert chosen(min_time_scale=3, time_scale=2) == Choice(time_scale=2, reason="given")
    quiet = chosen("10gbe")
    assert chosen("10gbe", foreign=0.2) == quiet
    beside = chosen("10gbe", foreign=1.0)
    assert quiet.time_scale < beside.time_scale <= 2 * quiet.time_scale
    assert beside.reason.endswith("; other programs use 1.0 cores")
    assert chosen("10gbe", foreign=2.0).time_scale > beside.time_scale
    assert chosen(min_time_scale=3, foreign=1.0) == chosen(min_time_scale=3)


def test_virtual_hosts_begin_with_the_network_of_the_first_trial(tmp_path):
    (tmp_path / "x.yaml").write_text(f"{BERT_SWEEP}networks: [100mbit, 1gbe]\n")
    experiment = load(tmp_path / "x.yaml")
    fabric = fabrics.EmulatedFabric(experiment, experiment.trials())
    assert fabric._cluster.profile.name == "100mbit"


def test_repeats_at_twice_the_scale_give_the_systematic_error():
    def outcome(trial: Trial, repeat: int) -> Result:  # the last two repeats are at 2k
        return result(0.97 if trial.algorithm == "dear" and repeat >= 2 else 1.0)

    rounds = ran(outcome=outcome, repeats_at_2k=2)
    assert [scale for _, _, scale in rounds.launched] == [4.0] * 8 + [8.0] * 8
    assert [repeat for _, repeat, _ in rounds.launched] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    turn, _ = rounds.recorded["dear"]
    assert turn.facts.time_scale == 4.0 and len(turn.results) == 2, "they are no result"
    assert turn.systematic.time_scale == 8.0
    assert turn.systematic.iters == [[[0.97, 0.97]]] * 2
    assert turn.systematic.relative == pytest.approx(0.03)
    assert rounds.recorded["ddp"][0].systematic.relative == 0.0


def test_what_goes_wrong_at_twice_the_scale_costs_no_result():
    def outcome(trial: Trial, repeat: int) -> Outcome | Result:
        if repeat < 2:
            return result()
        if trial.algorithm == rounds.order(2)[-1] and len(rounds.order(2)) == len(NAMES):
            raise KeyboardInterrupt
        if trial.algorithm == "dear":
            return Outcome.of("timeout", "longer than 2 s")
        return result()

    rounds = Rounds(MeasureConfig(repeats=2, repeats_at_2k=1))
    rounds.outcome = outcome
    with pytest.raises(KeyboardInterrupt):
        rounds.run()
    assert rounds.statuses() == dict.fromkeys(NAMES, "ok")
    turn, _ = rounds.recorded["dear"]
    assert turn.systematic is None
    assert [note.text for note in turn.notes] in ([], ["at time scale 8: timeout: longer than 2 s"])


def test_a_launch_at_twice_the_scale_counts_only_if_it_is_valid():
    def outcome(trial: Trial, repeat: int) -> Result:
        if repeat >= 2 and trial.algorithm == "dear":
            return dataclasses.replace(result(1.3), strain=BUSY)
        return result()

    recorded = ran(outcome=outcome, repeats_at_2k=1).recorded
    turn, _ = recorded["dear"]
    assert turn.systematic is None
    assert [note.text for note in turn.notes if "at time scale 8 does not count" in note.text]
    assert all(recorded[name][0].systematic for name in NAMES if name != "dear")


def test_the_time_to_go_counts_rounds_at_twice_the_scale_twice(monkeypatch):
    clock = iter(range(0, 10_000, 5))  # each launch takes 5 s
    monkeypatch.setattr(launches.time, "monotonic", lambda: next(clock))
    # Before the second launch: 3 at k and 4 at 2k are to come.
    assert ran(repeats=1, repeats_at_2k=1).etas[:2] == [None, 3 * 5 + 4 * 10]


def test_fail_fast_stops_and_keeps_what_is_finished():
    broken = Outcome.of("failed", "broken")
    rounds = Rounds(MeasureConfig(repeats=3))
    rounds.outcome = lambda trial, repeat: (
        broken if (trial.algorithm, repeat) == ("dear", 1) else result()
    )
    assert not rounds.run(fail_fast=True)
    assert rounds.statuses() == dict.fromkeys(NAMES, "interrupted") | {"dear": "failed"}
    before = rounds.order(1)[:-1]
    for name in NAMES:
        turn, ended = rounds.recorded[name]
        assert len(turn.results) == 1 + (name in before)
        assert "fail-fast" in ended.error["message"] or name == "dear"


@pytest.mark.parametrize(
    ("raised", "message"),
    [(KeyboardInterrupt(), "Ctrl-C or SIGTERM"), (OSError(28, "no space"), "no space")],
)
def test_what_ends_a_cell_early_costs_no_finished_repeat(raised, message):
    def outcome(trial: Trial, repeat: int) -> Result:
        if repeat == 1 and len(rounds.order(1)) == 2:
            raise raised
        return result()

    rounds = Rounds(MeasureConfig(repeats=2))
    rounds.outcome = outcome
    with pytest.raises(type(raised)):
        rounds.run()
    assert rounds.statuses() == dict.fromkeys(NAMES, "interrupted")
    assert sorted(len(turn.results) for turn, _ in rounds.recorded.values()) == [1, 1, 1, 2]
    assert all(message in ended.error["message"] for _, ended in rounds.recorded.values())


def test_trials_go_on_when_one_has_failed():
    broken = Outcome.of("failed", "broken")
    rounds = ran(outcome=lambda trial, _: broken if trial.algorithm == "dear" else result())
    assert rounds.statuses() == dict.fromkeys(NAMES, "ok") | {"dear": "failed"}
    assert rounds.recorded["dear"][0].results == []
    assert dataclasses.asdict(rounds.recorded["ddp"][0].order)["positions"] != []
    kept = {trial.algorithm for trial in rounds.trials if trial.hash in rounds.standing}
    assert kept == set(NAMES) - {"dear"}, "of trials that have not ended"


def test_what_is_forgotten_of_a_cell_promises_nothing():
    trials = [make_trial(name) for name in NAMES]
    left = planned(trials, {})
    progress = Progress(total=len(left), left=list(left))
    assert progress.eta_s() is None
    progress.end(left[0], 3.0)
    assert progress.eta_s() == pytest.approx(3.0 * (len(left) - 1)) and progress.done == 1
    progress.forget(trials[0].cell)
    assert progress.eta_s() is None and progress.done == 1
    progress.forget(trials[0].cell)  # of which nothing is known


def stopped(measure: MeasureConfig, launches: int, needs: dict[str, float] | None = None) -> Rounds:
    """Rounds that Ctrl-C has ended in this launch; what they have kept has been through a file."""

    def outcome(trial: Trial, repeat: int) -> Result:
        if len(rounds.launched) == launches:
            raise KeyboardInterrupt
        return result(1.0 + len(rounds.launched))

    rounds = Rounds(measure, needs)
    rounds.outcome = outcome
    with pytest.raises(KeyboardInterrupt):
        rounds.run()
    return rounds


def gone_on(before: Rounds, folder: Path) -> Rounds:
    Underway(standing=before.standing).save(folder / "underway.json")
    rounds = Rounds(before.trials[0].measure, before.fabric.needs)
    rounds.kept = Underway.load(folder / "underway.json").standing
    assert rounds.run()
    return rounds


@pytest.mark.parametrize("launches", [2, 4, 5, 8, 11, 12, 13, 16])
def test_a_cell_that_was_stopped_goes_on_at_the_repeat_where_it_stood(launches, tmp_path):
    measure = MeasureConfig(repeats=3, repeats_at_2k=1)
    before = stopped(measure, launches)
    after = gone_on(before, tmp_path)
    whole = Rounds(measure)
    assert whole.run()
    assert before.launched[:-1] + after.launched == whole.launched, "in the same order"
    assert (after.progress.done, after.progress.left) == (after.progress.total, [])
    assert after.progress.total == len(after.launched)
    for name in NAMES:
        turn, outcome = after.recorded[name]
        assert outcome.status == "ok" and len(turn.results) == 3 and len(turn.at_2k) == 1
        assert turn.order == whole.recorded[name][0].order
        kept = before.recorded[name][0] if name in before.recorded else None
        if kept is not None and kept.results:
            assert turn.results[: len(kept.results)] == kept.results
            text = f"the run was stopped after repeat {len(kept.results)} and went on later"
            assert [note.text for note in turn.notes] == [text]
        assert turn.systematic is not None


def test_a_cell_that_goes_on_has_its_time_scale_and_what_was_set_aside(tmp_path):
    before = stopped(MeasureConfig(repeats=3), launches=8, needs={"dear": 16.0})
    after = gone_on(before, tmp_path)
    assert after.fabric.settled.time_scale == 16.0 and after.fabric.scales == [16.0]
    assert {scale for _, _, scale in after.launched} == {16.0}
    for name in NAMES:
        turn, _ = after.recorded[name]
        assert len(turn.results) == 3
        assert turn.set_aside == before.recorded[name][0].set_aside


def test_a_round_that_was_torn_is_ended_before_anything_is_decided(tmp_path):
    """Else trials of one cell would have unequal numbers of repeats."""
    before = stopped(MeasureConfig(repeats=(2, 4), precision=0.5), launches=6)
    for trial, item in before.standing.items():
        equal = dataclasses.replace(item, results=[result() for _ in item.results])
        before.standing[trial] = equal
    after = gone_on(before, tmp_path)
    assert [len(turn.results) for turn, _ in after.recorded.values()] == [2] * 4


def test_results_of_another_version_are_not_read(tmp_path):
    path = tmp_path / "underway.json"
    assert Underway.load(path) == Underway()
    facts = FabricFacts(kind="emulated")
    whole = Underway(standing={n: Standing(started=n, duration_s=1.0, facts=facts) for n in "ab"})
    whole.save(path)
    assert Underway.load(path) == whole
    assert list(whole.without("a").standing) == ["b"]
    whole.without("ab").save(path)
    assert not path.exists()
    whole.save(path)
    path.write_text(path.read_text().replace('"schema": 3', '"schema": 7', 1))
    assert Underway.load(path).standing == {}
