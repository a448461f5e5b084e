"""Tests of what is asked of the machine while steps are timed, and what makes a number doubtful."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common import machine
from common.emulation import flow
from common.harness.running import notes
from common.harness.running.record import make_record
from common.harness.trial import Briefing
from common.harness.worker import rank
from common.harness.worker.timing import canary, strain
from common.harness.worker.timing.strain import Gauge, Pressure, strain_of, used_cores
from common.launch.job import Outcome
from common.machine import cgroups
from common.results.records import FabricFacts, Result
from common.results.records.trust import Check, Note, Strain
from common.results.validity import flag_text
from tests.system.made import make_trial
from tests.system.processes import may_be_real_time


def pressure(machine="one", **more):
    facts = {"elapsed_s": 2.0, "cpu_s": 1.0, "waited_s": {"main": 0.02, "comm": 0.04}}
    cores = {"busy_s": {"0": 1.5, "1": 1.0}, "steal_s": {"0": 0.0, "1": 0.1}}
    return Pressure(machine=machine, **{**facts, **cores, **more})


def test_virtual_hosts_are_held_together_against_their_machine():
    result = strain_of([pressure(), pressure(cpu_s=0.5, waited_s={"main": 0.5})], [0.1, 0.1])
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert result.foreign_cores == pytest.approx((2.5 - 1.5 - 2 * tick_s) / 2)
    assert result.steal_cores == pytest.approx((0.1 - 2 * tick_s) / 2)
    assert result.core_wait == pytest.approx(0.25)  # of the rank that waited longest
    assert result.canary_s == [0.1, 0.1]
    assert used_cores([pressure(), pressure(cpu_s=0.5)]) == pytest.approx(0.75)


def test_of_several_machines_each_has_its_own_ranks_and_the_worst_counts():
    quiet = pressure("two", cpu_s=2.5)  # which covers nothing on the other machine
    assert strain_of([pressure(), quiet]).foreign_cores == pytest.approx(0.75, rel=0.05)
    assert strain_of([quiet]).foreign_cores == 0.0


def test_a_clock_tick_in_a_short_block_is_nobody_else():
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    busy = {"busy_s": {"0": 2 * tick_s, "1": tick_s}, "steal_s": {"0": tick_s, "1": 0.0}}
    result = strain_of([pressure(elapsed_s=2 * tick_s, cpu_s=2 * tick_s, **busy)])
    assert result.foreign_cores == result.steal_cores == 0.0


def test_a_gauge_counts_all_threads_and_adds_up_blocks(monkeypatch):
    readings = iter(
        [
            {str(os.getpid()): (1.0, 0.5), "7": (1.0, 1.0), "8": (5.0, 5.0)},
            {str(os.getpid()): (1.5, 0.6), "7": (1.2, 1.3), "9": (0.1, 0.2)},  # 8 ended, 9 began
            {str(os.getpid()): (9.0, 9.0)},
            {str(os.getpid()): (9.0, 9.4)},
        ]
    )
    monkeypatch.setattr(strain, "_threads", lambda: next(readings))
    throttled_s = iter([0.1, 0.3, 0.5, 0.6])
    monkeypatch.setattr(strain.cgroups, "throttled_s", lambda: next(throttled_s))
    gauge = Gauge()
    for _ in range(2):
        with gauge.block():
            pass
    assert gauge.pressure.throttled_s == pytest.approx(0.3)
    assert gauge.pressure.waited_s == pytest.approx({"main": 0.5, "ended": 0.5})
    assert gauge.pressure.ran_s == pytest.approx({"main": 0.5, "ended": 0.3})


def test_processes_that_read_data_for_a_rank_are_its_own(monkeypatch):
    ran_s = iter([1.0, 3.5])
    monkeypatch.setattr(strain.multiprocessing, "active_children", lambda: [SimpleNamespace(pid=7)])
    monkeypatch.setattr(strain, "_ran_s", lambda pid: next(ran_s))
    monkeypatch.setattr(strain.time, "process_time", lambda: 2.0)
    gauge = Gauge()
    with gauge.block():
        pass
    assert gauge.pressure.cpu_s == pytest.approx(2.5)


def test_the_main_thread_is_found_where_proc_has_other_pids(monkeypatch):
    """A sandbox that cannot mount its own /proc is such a place."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert strain._name(Path("/proc/self").readlink().name) == "main"


def test_what_a_replay_has_not_made_up_for_is_late(monkeypatch):
    late_s = iter([0.1, 0.4, 0.3, 0.2])
    monkeypatch.setattr(strain.pace.current(), "late_s", lambda: next(late_s))
    gauge = Gauge()
    for _ in range(2):
        with gauge.block():
            pass
    assert gauge.pressure.fell_behind_s == pytest.approx(0.3 - 0.1)
    ahead, behind = pressure(fell_behind_s=-0.1), pressure(fell_behind_s=0.3)
    result = strain_of([ahead, behind])
    assert result.fell_behind == pytest.approx(0.05) and result.late is None


@pytest.mark.parametrize(("worst", "how"), [(0.08, "fell behind"), (-0.08, "caught up with")])
def test_each_launch_is_judged_by_what_its_hosts_lost_or_won(worst, how):
    """The two would cancel each other in the mean of all."""
    launches = [Strain(core_wait=0.1, fell_behind=share) for share in (worst, -worst / 2, 0.01)]
    assert notes.unfaithful(launches)
    text = notes.unfaithful_note(launches).text
    assert text.startswith(f"unfaithful: hosts {how} their devices by 8% of the time in a launch")
    assert notes.unfaithful(launches[2:]) is False
    assert notes.unfaithful([Strain(fell_behind=worst)]), "whatever is known of waits"


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count")
def test_a_gauge_reads_what_this_kernel_tells():
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    gauge = Gauge()
    with gauge.block():
        other.start()
        sum(range(10**6))
    done.set()
    other.join()
    result = gauge.pressure
    assert result.cpu_s > 0 and "main" in result.waited_s and len(result.waited_s) > 1
    assert result.busy_s.keys() == {str(core) for core in os.sched_getaffinity(0)}
    assert strain_of([result]).core_wait >= 0


def test_threads_are_read_in_seconds_and_one_that_has_ended_is_left_out(monkeypatch, tmp_path):
    for thread, lines in (("11", "2000000000 500000000 7"), ("12", "1 3000000000 1"), ("13", None)):
        (tmp_path / thread).mkdir()
        if lines:
            (tmp_path / thread / "schedstat").write_text(lines)
    monkeypatch.setattr(strain, "_TASKS", tmp_path)
    assert strain._threads() is None  # a thread that lives, of which this kernel tells nothing
    (tmp_path / "13").rmdir()
    assert strain._threads() == {"11": (2.0, 0.5), "12": (1e-9, 3.0)}


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count")
def test_the_program_that_is_the_links_is_not_somebody_else():
    busy = "import time\nwhile True: time.process_time()"
    with subprocess.Popen([sys.executable, "-c", busy]) as links:
        gauge = Gauge(links.pid)
        with gauge.block():
            time.sleep(0.3)
        links.kill()
    assert 0.01 < gauge.pressure.links_s < 0.5
    with Gauge(links.pid).block():  # it has ended
        pass
    # Two ranks have seen the same links.
    ranks = [pressure(cpu_s=1.0, links_s=0.5, busy_s={"0": 3.0}) for _ in range(2)]
    result = strain_of(ranks)
    elapsed_s = ranks[0].elapsed_s
    unsure_s = 1 / os.sysconf("SC_CLK_TCK")
    assert result.foreign_cores == pytest.approx((3.0 - 2.5 - unsure_s) / elapsed_s)
    assert used_cores(ranks) == pytest.approx(2.5 / elapsed_s)


@pytest.mark.parametrize("unknown", [0, 1])
def test_what_the_kernel_tells_only_once_is_unknown(monkeypatch, unknown):
    readings = [{"7": (1.0, 0.5)}, {"7": (1.5, 0.6)}]
    readings[unknown] = None
    lines = iter(readings)
    monkeypatch.setattr(strain, "_threads", lambda: next(lines))
    gauge = Gauge()
    with gauge.block():
        pass
    assert gauge.pressure.waited_s is None and gauge.pressure.ran_s == {}


STAT = """cpu  9 9 9 9 9 9 9 9
cpu0 1 2 3 1000 1000 4 5 6 0 0
cpu7 100 0 0 0 0 0 0 0 0 0
intr 1
"""


def test_busy_is_what_the_cores_do_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(flow.os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(flow.os, "sysconf", lambda name: 10)
    monkeypatch.setattr(flow.Path, "read_text", lambda path, encoding: STAT)
    assert flow.cores_s() == {0: (1.5, 0.6)}
    assert flow.cpu_s()[1:] == (1.5, 0.9)


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Makes `tmp_path` the only control group, of version 2."""
    monkeypatch.setattr(cgroups, "_groups", lambda controller: [(tmp_path, 2)])
    return tmp_path


@pytest.mark.parametrize(
    ("files", "cores", "stopped_s"),
    [
        ({"cpu.max": "150000 100000\n", "cpu.stat": "throttled_usec 2000000\n"}, 1.5, 2.0),
        ({"cpu.max": "max 100000\n"}, None, 0.0),
        (
            {
                "cpu.cfs_quota_us": "50000\n",
                "cpu.cfs_period_us": "100000\n",
                "cpu.stat": "nr_throttled 3\nthrottled_time 500000000\n",
            },
            0.5,
            0.5,
        ),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, None, 0.0),
        ({}, None, 0.0),
    ],
)
def test_a_limit_of_cores_and_how_long_it_stopped_the_process(groups, files, cores, stopped_s):
    for name, text in files.items():
        (groups / name).write_text(text)
    assert cgroups.cpu_limit() == cores and cgroups.throttled_s() == stopped_s


CALM, SHORT = {"core_wait": 0.4, "main_wait": 0.01}, {"core_wait": 0.9, "main_wait": 0.1}


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"foreign_cores": 0.2, "steal_cores": 0.01}, None),
        ({"foreign_cores": 1.0}, "other processes used 1.0 cores meanwhile"),
        ({"steal_cores": 0.2}, "other virtual machines took 0.20 cores meanwhile"),
    ],
)
@pytest.mark.parametrize("emulated", [True, False])
def test_others_disturb_where_threads_waited(facts, word, emulated):
    short, unknown = Strain(**SHORT, **facts), Strain(**facts)
    assert notes.others(short) == word
    result = word and Note(kind="disturbed", text=f"disturbed: {word}")
    assert notes.disturbed(short, emulated) == notes.disturbed(unknown, emulated) == result
    calm = Strain(**CALM, **facts)
    stolen = "steal_cores" in facts and word and not emulated  # a wait by itself
    assert notes.disturbed(calm, emulated) == (result if stolen else None)
    assert notes.beside([Strain(), calm]) == (
        word and Note(kind="beside", text=f"beside others: {word}")
    )
    assert (notes.invalid(calm, emulated) is None) == (not stolen)


@pytest.mark.parametrize("emulated", [True, False])
def test_a_limit_that_stopped_ranks_disturbs_whatever_else_they_waited(emulated):
    result = notes.disturbed(Strain(**CALM, throttled_s=0.5), emulated)
    assert result.text == "disturbed: a limit of the control group stopped ranks for 0.5 s"


def test_what_other_virtual_machines_took_is_waited_for_as_well():
    assert notes.unfaithful([Strain(core_wait=0.6)]) is False
    stolen = Strain(core_wait=0.6, steal_cores=0.2)
    assert notes.unfaithful([stolen]) is True
    assert "waited 0.80 s per second" in notes.unfaithful_note([stolen]).text


def test_what_is_not_valid_without_others_is_unfaithful_where_it_is_emulated():
    alone = Strain(core_wait=0.9, main_wait=0.5)
    assert notes.invalid(alone, True).text.startswith("unfaithful: a rank's threads together")
    assert notes.invalid(alone, False) is None, "there it is the machine that was asked for"


def test_only_ranks_that_wait_for_cores_are_unfaithful():
    # Horovod with BERT-Base at time scales 16, with the right step, and 8, with one 19 % too long;
    # and ddp beside another program, with the right step.
    right, wrong = Strain(core_wait=0.66), Strain(core_wait=0.78)
    assert notes.unfaithful([right, right]) is False and notes.unfaithful([right, wrong]) is True
    busy = Strain(core_wait=0.41, foreign_cores=0.9)
    assert notes.unfaithful([busy, busy]) is False
    assert notes.unfaithful([busy, Strain(core_wait=2.0)]) is True
    assert notes.unfaithful([busy, Strain(core_wait=None)]) is None
    assert notes.unfaithful_note([busy, Strain(core_wait=2.0)]).kind == "unfaithful"
    late = Strain(core_wait=0.1, late=0.03)  # real compute, which nothing makes up for
    assert notes.unfaithful([busy, late]) is True
    assert notes.unfaithful([busy, Strain(core_wait=0.1, late=0.01)]) is False
    assert notes.unfaithful_note([busy, late]).text.endswith("longer by 3% of the time")


def _record(fabric, *strain, iters=((0.5, 0.5),), period=1):
    results = [
        Result(
            cpu_s_per_s=1.0,
            loss=1.0,
            check=Check(replicas_agree=True, matches_reference=True),
            strain=item,
            iters=[list(block) for block in iters],
            untimed=[[0.4, 0.6]],
            period=period,
            evidence=f"evidence-{repeat}.json.gz",
        )
        for repeat, item in enumerate(strain)
    ]
    where = FabricFacts(kind=fabric)
    card = {"cores": 2}
    return make_record(make_trial("dear"), results, Outcome(status="ok"), card, "now", 1.0, where)


@pytest.mark.parametrize("fabric", ["emulated", "real"])
def test_the_record_says_how_the_machine_was_and_whether_to_believe_it(fabric):
    calm = Strain(core_wait=0.1, main_wait=0.01, foreign_cores=1.2)
    strained = Strain(core_wait=0.9, main_wait=0.3, foreign_cores=1.2)
    good, bad = _record(fabric, calm, calm), _record(fabric, calm, strained)
    assert (good.unfaithful, bad.unfaithful) == (
        (False, True) if fabric == "emulated" else (None,) * 2
    )
    assert bad.strain == [calm, strained]
    words = [note.kind for note in bad.notes]
    assert words.count("disturbed") == 1, "emulated or not"
    assert ("unfaithful" in words) == (fabric == "emulated")
    assert "beside others: other processes used 1.2 cores meanwhile" in [
        note.text for note in good.notes
    ]
    assert flag_text(bad) is not None and flag_text(good) is None
    assert [result.untimed for result in good.results] == [[[0.4, 0.6]]] * 2
    assert good.evidence == f"{good.id}/evidence-0.json.gz"
    off = _record(fabric, calm, calm, iters=[(0.4, 0.5, 0.5, 0.5), (0.41, 0.5, 0.51, 0.5)])
    assert flag_text(off).startswith("not stationary")
    assert flag_text(_record(fabric, calm, calm, iters=[(0.4, 0.5, 0.4, 0.5)], period=2)) is None


@pytest.mark.parametrize("wait", [None, 0.01, 0.08, 0.12])
def test_real_ranks_that_waited_for_cores_say_so_and_are_believed_up_to_a_limit(wait):
    crowd = "4 ranks x 1 threads on 2 cores"
    lines = wait is not None and wait > 0.02
    words = f"a rank's training thread waited {wait or 0:.0%} of the time for a core"
    record = _record("real", Strain(core_wait=3.0), Strain(core_wait=3.0, main_wait=wait))
    assert [note.text for note in record.notes] == [
        f"oversubscribed: {crowd}" + (f"; {words}" if lines else "")
    ]
    short = "short of cores: a rank's training thread waited 12% of the time for one"
    assert flag_text(record) == (short if wait == 0.12 else None)
    alone = notes.oversubscribed([Strain(main_wait=wait)], None)
    assert (alone and alone.text) == (f"oversubscribed: {words}" if lines else None)
    emulated = _record("emulated", Strain(core_wait=0.1, main_wait=0.12))
    assert emulated.notes == [] and flag_text(emulated) is None, "replayed compute makes up for it"


def test_the_threads_of_a_rank_wait_together_and_those_that_train_alone():
    assert strain_of([pressure()]).core_wait == pytest.approx(0.03)
    waited_s = {"main": 0.1, "pt_autograd_0": 0.05, "comm_core": 0.3}
    result = strain_of([pressure(waited_s=waited_s), pressure()])
    assert result.main_wait == pytest.approx(0.15 / 2)
    unknown = strain_of([pressure(), pressure(waited_s=None)])
    assert (unknown.core_wait, unknown.main_wait) == (None, None)


@pytest.mark.parametrize(("first", "told"), [(0.215, False), (0.25, True)])
def test_the_first_step_of_a_single_block_is_held_against_a_mean_that_is_not_exact(first, told):
    # t of 2 degrees of freedom is 20: 0.2, and with what the mean of three may be off 0.23.
    block = [math.exp(log) for log in (first, -0.01, 0.0, 0.01)]
    assert (notes.not_stationary([[block]], 1) is not None) == told


REST = [0.26, 0.26, 0.27, 0.73, 0.26, 0.27, 0.26]


@pytest.mark.parametrize(
    ("repeats", "period", "words"),
    [
        # Three starts of two steps, of a pipeline whose first step is spared a part.
        ([[[0.446, 0.558]], [[0.44, 0.551]], [[0.453, 0.56]]], 1, "19.8% shorter than the rest"),
        # The same difference within the noise, and a small one without any.
        ([[[0.4, 0.5]], [[0.5, 0.4]], [[0.45, 0.5]]], 1, None),
        ([[[0.49, 0.5]], [[0.491, 0.501]], [[0.49, 0.5]]], 1, None),
        ([[[0.75, *REST]]] * 2, 4, None),
        ([[[0.75, *REST]], [[0.76, *REST]], [[0.75, *REST]]], 1, ""),
        # What is left behind the last whole period does not count.
        ([[[1.0, 1.0, 1.0, 1 + noise / 1000, 1.0] for noise in (1, 2, 3, 4)]], 2, None),
        # One block alone is held against its own spread.
        ([[[0.38, 0.521, 0.517, 0.524, 0.519]]], 1, ""),
        ([[[0.38, 0.62, 0.41, 0.6, 0.52]]], 1, None),
        ([[[0.38, 0.5, 0.5]]], 1, None),  # too few to tell
        ([], 1, None),
    ],
)
def test_blocks_that_begin_otherwise_than_they_go_on_are_told(repeats, period, words):
    note = notes.not_stationary(repeats, period)
    if words is None:
        assert note is None
    else:
        assert note.text.startswith("not stationary: the first step of a block took ")
        assert note.text.endswith(words)


@pytest.mark.parametrize("noise", [0.011, 0.026, 0.091])
@pytest.mark.parametrize(("repeats", "steps"), [(5, 2), (12, 3), (1, 10)])
def test_at_most_one_table_in_twenty_has_a_row_that_is_not_stationary_by_chance(
    noise, repeats, steps
):
    """Noise of steps as of the sweeps in docs/records: emulated, and real on shared cores."""
    rng = np.random.default_rng(1)
    tables, rows = 60, 20
    times = np.exp(rng.normal(0, noise, (tables, rows, repeats, 1, steps))).tolist()
    result = sum(any(notes.not_stationary(row, 1) for row in table) for table in times)
    assert result <= 0.05 * tables + 2 * (0.05 * 0.95 * tables) ** 0.5


@pytest.mark.parametrize(("noise", "least", "most"), [(0.011, 80, 100), (0.026, 35, 70)])
def test_what_a_pipeline_is_spared_after_a_barrier_is_found_in_the_default_sweep(
    noise, least, most
):
    """Noise of emulated BERT-Base and ResNet-50, and of DenseNet-201, as in methodology.md."""
    rng = np.random.default_rng(1)
    times = np.exp(rng.normal(0, noise, (100, 5, 1, 2)))
    times[..., 0] *= 0.9
    flagged = sum(bool(notes.not_stationary(row, 1)) for row in times.tolist())
    assert least <= flagged <= most


def test_the_canary_is_the_same_work_on_one_core():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    assert canary.work_s() > 0 and torch.get_num_threads() == 2
    torch.set_num_threads(threads)


def test_each_piece_of_the_canary_computes_and_copies(monkeypatch):
    calls = []
    monkeypatch.setattr(canary.torch, "mm", lambda *_, out: calls.append("mm"))
    target = torch.zeros(3)
    assert canary._piece_s(torch.ones(1), torch.ones(1), torch.ones(3), target) > 0
    assert calls == ["mm"] * canary._PRODUCTS and target.tolist() == [1, 1, 1]


class _Rank:
    """A communicator of the second of three ranks, of which the first and the last share a host."""

    rank = 1

    def __init__(self, machines):
        self.calls, self._machines = [], machines

    def gather_objects(self, value):
        if isinstance(value, str):
            return self._machines
        return [0.3, value, 0.0]

    def barrier(self):
        self.calls.append("barrier")


@pytest.mark.parametrize(("machines", "works"), [("aba", True), ("aaa", False)])
def test_one_rank_of_each_machine_works_while_all_others_wait(monkeypatch, machines, works):
    result = [strain.machine_id() if name == machines[1] else name for name in machines]
    communicator = _Rank(result)
    monkeypatch.setattr(canary, "work_s", lambda: communicator.calls.append("work") or 0.5)
    assert canary.canary_s(communicator) == (0.5 if works else 0.3)
    assert communicator.calls == ["barrier", *["work"] * works, "barrier"]


def test_the_machine_card_tells_what_may_change_a_number(monkeypatch):
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "5")
    monkeypatch.setenv("SOME_SECRET", "x")
    card = json.loads(json.dumps(machine.machine_card()))
    assert card["environment"]["HOROVOD_CYCLE_TIME"] == "5"
    assert "SOME_SECRET" not in card["environment"]
    assert card["cpus"] == sorted(os.sched_getaffinity(0)) and len(card["load"]) == 3
    assert "net/ipv4/tcp_congestion_control" in card["sysctl"]
    assert {"core_limit", "smt", "turbo", "huge_pages", "mhz", "pressure", "comm_core"} <= set(card)


def test_a_changed_checkout_is_told_by_a_digest_of_its_changes(tmp_path, monkeypatch):
    def git(*args):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *args]
        subprocess.run(command, check=True, capture_output=True)

    monkeypatch.setattr(machine, "ROOT", tmp_path)
    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "one")
    # Texts, records and judgements are no code.
    for name in ("README.md", "docs/records/new.json", "tests/mutants/judged.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("new")
    assert machine._diff() is None and not machine._commit().endswith("+dirty")
    result = set()
    for text in ("2", "3"):
        (tmp_path / "file").write_text(text)
        result.add(machine._diff())
    (tmp_path / "new").write_text("4")
    result.add(machine._diff())
    assert len(result) == 3 and None not in result and machine._commit().endswith("+dirty")


_HELPERS = """
import os, threading
from pathlib import Path
from types import SimpleNamespace
from common.harness.trial import Briefing
from common.harness.worker.timing.priority import hurry_helpers
ready, ended = threading.Event(), threading.Event()
helper = threading.Thread(target=lambda: (ready.set(), ended.wait()))
helper.start()
ready.wait()
for hosts, backend, launcher, threads in [
    ((), "comm_core", "local", 1),
    (("host0",), "mpi", "local", 1),
    (("host0",), "comm_core", "mpirun", 1),
    (("host0",), "comm_core", "local", 2),
    (("host0",), "comm_core", "local", 1),
]:
    trial = SimpleNamespace(backend=backend, launcher=launcher, threads_per_rank=threads)
    hurried = hurry_helpers(trial, Briefing(folder=Path(), hosts=hosts))
    policies = [os.sched_getscheduler(tid) for tid in (0, helper.native_id)]
    print(hurried, [policy == os.SCHED_RR for policy in policies])
ended.set()
"""


def test_on_virtual_hosts_all_threads_but_the_training_thread_are_real_time():
    lines = subprocess.run(
        [sys.executable, "-c", _HELPERS], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert lines[:4] == ["None [False, False]"] * 4
    permitted = may_be_real_time()
    assert lines[4] == f"{permitted} [False, {permitted}]"


def test_a_row_says_if_the_system_gives_no_priority():
    for ranks, hurried in [((None, None), None), ((True, True), True), ((True, False), False)]:
        result = strain_of([pressure(helpers_hurried=each) for each in ranks])
        assert result.helpers_hurried is hurried
        note = notes.ordinary_priority([Strain(), result])
        assert (note is not None and note.kind == "ordinary priority") is (hurried is False)


def test_the_comm_core_knows_the_time_scale_when_it_starts(monkeypatch):
    class StartedError(Exception):
        pass

    def init(**_):
        raise StartedError(os.environ["COMM_CORE_TIME_SCALE"])

    monkeypatch.setenv("COMM_CORE_TIME_SCALE", "1")
    monkeypatch.setattr(rank.dear, "init", init)
    with pytest.raises(StartedError, match=r"^4\.0$"):
        rank.join(make_trial("dear"), Briefing(folder=Path(), time_scale=4.0))
