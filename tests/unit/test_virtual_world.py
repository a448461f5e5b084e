"""Files of algorithms on the virtual cluster."""

import dataclasses
import json
import math
import os
import subprocess
import sys

import pytest
import torch

from common.harness.cli import main
from common.harness.experiment_file import find_experiment, load
from common.harness.verbs import predict, validate
from common.machine.processes import spread
from common.models.profile import Call, Profile, ProfiledParameter
from common.models.registry import profile_of
from common.models.replay.plan import plan
from common.paths import ROOT
from common.results.store import Comparison
from common.results.tables.predicted import PredictedRow, overview
from common.virtual.costs.engines import costs_of
from common.virtual.costs.networks import platform_of
from common.virtual.costs.parts import Shape
from common.virtual.foresee import foresee, halved
from common.virtual.passes import UnmodelledError
from common.virtual.setting import Setting
from common.virtual.training import run
from common.virtual.training.run import predicted, slowest
from common.virtual.world.marks import LAST, SMALL, carried
from common.virtual.world.network import Costs
from dear.cost.collectives import table_costs
from dear.cost.event_model.events import Events
from dear.cost.event_model.link import Scaled
from dear.cost.fit import AlphaBeta, CollectiveCost, Regime
from dear.errors import UserError
from dear.options import Options
from dear.training.algorithm import algorithm_names, algorithm_options

TINY = ("mnist_cnn@rtx2080ti-modelled", 32)
OTHERS = {"exchange": AlphaBeta(alpha_s=1e-4, beta_s_per_byte=1e-9)}


def setting(model, batch, name, shape, costs, **options):
    """Returns the setting of an algorithm; `costs` is an AlphaBeta of an all-reduce, or a name of a
    network."""

    def of_shape(hosts, ranks_per_host):
        if isinstance(costs, str):
            return costs_of(
                "nccl",
                platform_of(costs, "pcie4"),
                Shape(hosts=hosts, ranks_per_host=ranks_per_host),
            )
        known = halved(costs)
        return {**known, "broadcast": known["all_gather"], "reduce": known["all_gather"], **OTHERS}

    profile = model if isinstance(model, Profile) else profile_of(model, batch)
    return Setting(
        profile=profile,
        algorithm=name,
        options=Options() if name is None else algorithm_options(name, options),
        shape=shape,
        costs=of_shape,
        engine="nccl" if isinstance(costs, str) else "comm_core",
    )


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_runs_and_gives_the_same_bits_twice(name):
    point = setting(*TINY, name, Shape(hosts=4, ranks_per_host=2), "10gbe")
    if getattr(point.options, "compression", "none") != "none":
        with pytest.raises(UnmodelledError, match="compute time of compression"):
            predicted(point)
        return
    first, second = predicted(point), predicted(point)
    assert first.step_s == second.step_s >= 0.999 * point.profile.step_s


def test_a_single_worker_only_computes():
    point = setting(*TINY, None, Shape(hosts=1), "10gbe")
    step = predicted(point)
    assert step.step_s == pytest.approx(point.profile.step_s + point.update_s, rel=1e-3)
    assert step.exposed_s == step.messages == 0


EXAMPLES = {
    "A": ([250, 250, 550, 250], [0.4, 4.5, 0.5, 1.0]),
    "B": ([250] * 4, [0.5] * 4),
}
"""Elements in thousands, and ms of backward passes, of the layers from the input on (MG-WFBP)."""


def toy(name):
    """Returns the profile of an example: one parameter per layer."""
    sizes, backward_ms = EXAMPLES[name]
    ready_s = [sum(backward_ms[layer:]) / 1e3 for layer in range(4)]
    layers = [f"l{layer}" for layer in range(4)]
    return Profile(
        model=f"toy{name}",
        device="toy",
        device_name="toy",
        memory_bytes_per_s=1e18,
        kind="modelled",
        batch_size=1,
        sentence_len=None,
        sample_unit="img",
        dtype="float32",
        rule="",
        modules=tuple(layers),
        calls=tuple(
            Call(module=layer, forward_s=0.0, backward_s=ms / 1e3)
            for layer, ms in zip(layers, backward_ms, strict=True)
        ),
        parameters=tuple(
            ProfiledParameter(
                name=f"{layer}.weight", shape=(1000 * size,), position=3 - place, ready_s=ready
            )
            for place, (layer, size, ready) in enumerate(zip(layers, sizes, ready_s, strict=True))
        ),
    )


@pytest.mark.parametrize(
    ("example", "name", "options", "finish_ms"),
    [
        ("A", "mgwfbp", {}, 9.4),
        ("A", "wfbp", {}, 10.2),
        ("A", "mgwfbp", {"merge": "asc"}, 10.2),
        ("B", "mgwfbp", {}, 7.0),
        ("B", "mgwfbp", {"merge": "asc"}, 6.5),
        ("B", "wfbp", {}, 8.5),
    ],
)
def test_the_examples_of_mgwfbp_to_the_microsecond(example, name, options, finish_ms):
    """Facts G-1 to G-3; bytes are a thousand times as many, so that marks do not count."""
    costs = AlphaBeta(alpha_s=1e-3, beta_s_per_byte=1e-9)
    point = setting(toy(example), 1, name, Shape(hosts=4), costs, **options)
    # Without priorities, the message that says who has gradients comes last.
    step = predicted(dataclasses.replace(point, engine="gloo"))
    gradients = [t for t in step.transfers if t.nbytes > 1000]
    finish_s = max(t.finished_s for t in gradients) - step.began_s - step.phases_s[0]
    assert 1e3 * finish_s == pytest.approx(finish_ms, abs=1e-3)


@pytest.mark.parametrize("name", ["ddp", "wfbp", "mgwfbp", "dear"])
def test_files_and_statements_agree(name):
    """The event model follows the statement of an algorithm, the virtual cluster its file."""
    costs = table_costs("10gbe", 16)
    options = {"fusion": "threshold"} if name == "dear" else {}
    point = setting("resnet50@rtx2080ti-modelled", 64, name, Shape(hosts=16), costs, **options)
    stated = foresee(point.profile, name, point.options, point.costs(16, 1), 16)
    assert predicted(point).step_s == pytest.approx(stated.step_s, rel=0.01)


def test_dear_hides_gathers_behind_the_forward_pass():
    """Without the next forward pass, the all-gathers would be exposed."""
    costs = table_costs("10gbe", 16)
    dear, plain = (
        predicted(setting("bert_base@rtx2080ti-modelled", 64, name, Shape(hosts=16), costs))
        for name in ("dear", "allreduce")
    )
    assert any(t.name == "all_gather" and t.nbytes > 4096 for t in dear.transfers)
    assert dear.exposed_s < plain.exposed_s - 0.5 * dear.phases_s[0]


def test_waiting_threads_share_the_clock():
    events, log = Events(), []

    def rank(name, period_s):
        for _ in range(3):
            events.run_for(period_s)
            log.append((name, round(events.now_s, 6)))

    events.start(lambda: rank("slow", 0.3))
    events.start(lambda: rank("fast", 0.1))
    events.run_until(lambda: len(log) == 6)
    assert log == [
        *(("fast", 0.1), ("fast", 0.2), ("slow", 0.3), ("fast", 0.3)),
        *(("slow", 0.6), ("slow", 0.9)),
    ]


def test_an_error_of_a_thread_reaches_who_waits():
    events = Events()

    def fails():
        raise UserError("no such wire")

    events.start(fails)
    with pytest.raises(UserError, match="no such wire"):
        events.run_until(lambda: False)
    with pytest.raises(UserError, match="waits for a gradient that never comes"):
        Events().run_until(lambda: False, "a gradient")


def test_an_event_that_waits_is_an_error_and_no_deadlock():
    events = Events()
    events.at(1.0, lambda: events.run_for(1.0))
    with pytest.raises(RuntimeError, match="must not take time"):
        events.run_for(2.0)


def test_the_slowest_of_many_ranks():
    assert slowest(1, 0.1) == 1 and slowest(64, 0) == 1
    # Expected largest of 64 standard normal values: 2.3439 (Harter 1961).
    assert slowest(64, 0.1) == pytest.approx(1 + 0.1 * 2.344, rel=1e-3)


@pytest.mark.full
def test_large_worlds_fit_into_little_memory():
    code = (
        "from tests.unit.test_virtual_world import *\n"
        "for name in ('ddp', 'dear'):\n"
        "    shape = Shape(hosts=4096, ranks_per_host=4)\n"
        "    predicted(setting('bert@rtx2080ti-modelled', 32, name, shape, '100gbib'))\n"
        "lines = open('/proc/self/status').read().splitlines()\n"
        "print(next(line.split()[1] for line in lines if line.startswith('VmHWM')))\n"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 1e6  # kB at the peak


def one_line(text, message):
    """Returns True if `text` is a single line with an error that contains `message`."""
    return text.startswith("error: ") and text.count("\n") == 1 and message in text


def test_a_step_that_its_second_method_denies_is_flagged():
    row = PredictedRow(
        **{"model": "m", "batch": 1, "world_size": 8, "samples": 8, "network": "10gbe"},
        algorithm="a",
        **{"step_s": 1.0, "step_low_s": 0.9, "step_high_s": 1.1, "event_model_s": 1.05},
    )
    assert row.flag is None
    denied = dataclasses.replace(row, event_model_s=1.2)
    assert denied.flag == "the event model gives 1200.0 ms, outside the range"
    text = overview([row, dataclasses.replace(denied, algorithm="b", step_s=0.95)], "a")
    assert "(1.05 (1.00-1.05))" in text and "b: the event model gives" in text
    assert text.splitlines()[2].split("|")[-2].strip() == "a"  # the fastest that is valid


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--network", "9gbe"], "9gbe"),
        (["--network", "wan"], "do not model `sites:`"),
        (["--set", "dtype=bfloat16"], "replays times that were measured in float32"),
        (["--ranks-per-host", "3", "--set", "world_sizes=[16]"], "do not fill hosts of 3 ranks"),
        (["--engine", "comm_core", "--inside", "nvlink3"], "cannot use nvlink"),
        (["--engine", "smoke"], "engine"),
        (["--inside", "10gbe"], "10gbe is not a network inside a host"),
        (["--alpha-ms", "1"], "given together"),
        (["--alpha-ms", "-1", "--beta-ns", "1"], "--alpha-ms"),
    ],
)
def test_bad_input_of_predict_is_one_line(arguments, message, capsys):
    assert main(["predict", "-k", "resnet50", "-k", "ddp", *arguments]) == 2
    assert one_line(capsys.readouterr().err, message)


def test_predict_has_a_range_and_a_baseline(capsys):
    status = main(["predict", "--json", "-k", "resnet50", "-k", "10gbe", "-k", "ddp|dear"])
    rows = {row["algorithm"]: row for row in json.loads(capsys.readouterr().out)}
    assert status == 0 and set(rows) == {"ddp", "dear"}
    for row in rows.values():
        assert row["step_low_s"] < row["step_s"] < row["step_high_s"]
        assert row["baseline_s"] == rows["ddp"]["step_s"] > row["compute_s"]
        assert row["event_model_s"] == pytest.approx(row["step_s"], rel=0.01)


def test_an_engine_on_cpus_has_links_of_its_own_inside_a_host(capsys):
    """The default experiment has links between GPUs."""
    filters = ["-k", "resnet50", "-k", "10gbe", "-k", "allreduce"]
    assert main(["predict", "--json", "--engine", "gloo", *filters]) == 0
    assert [row["step_s"] > 0 for row in json.loads(capsys.readouterr().out)] == [True]


def test_what_trials_share_in_a_process_changes_no_number():
    small = ["models.0.name=mnist_cnn@rtx2080ti-modelled", "models.0.batch_size=32"]
    experiment = load(find_experiment("predicted-64"), small)
    caches = (predict._slowed, predict._known_links, run._alone_s, plan)
    trials = [t for t in experiment.trials() if t.model.startswith("mnist") and t.world_size > 1]
    together = [predict._row(t.to_json(), None, experiment.cluster, None) for t in trials]
    hits = [cache.cache_info().hits for cache in caches]
    assert all(hits)
    for trial, row in zip(trials, together, strict=True):
        for cache in caches:
            cache.cache_clear()
        run.TAPES.clear()
        assert predict._row(trial.to_json(), None, experiment.cluster, None) == row


def test_processes_have_the_environment_of_their_call(monkeypatch):
    for word in ("first", "second"):  # when the fork server runs already
        monkeypatch.setenv("DEAR_WORD", word)
        assert spread(os.getenv, ["DEAR_WORD"] * 2) == [word] * 2


def test_messages_carry_all_values_of_small_tensors_and_the_last_ones_of_large_ones():
    for count, carries in ((SMALL, SMALL), (SMALL + 1, LAST)):
        output = torch.zeros(count)
        carried(output, output).fill_(1)
        assert output.sum() == output[-carries:].sum() == carries


def test_without_the_baseline_there_are_rows(capsys):
    assert main(["predict", "-k", "resnet50", "-k", "10gbe", "-k", "algorithm=dear"]) == 0
    assert "samples/s (range)" in capsys.readouterr().out


def test_validate_compares_with_a_record(capsys):
    status = main(["validate", "--json", str(ROOT / "docs" / "records" / "batches")])
    result = json.loads(capsys.readouterr().out)
    assert status == 0 and len(result["rows"]) == 16
    assert all(math.isfinite(row["error"]) for row in result["rows"])
    assert result["summary"]["mean_error"] < 0.05
    for row in result["rows"]:
        assert row["low_s"] < row["predicted_s"] < row["high_s"]
        assert row["inside"] == (row["low_s"] <= row["measured_s"] <= row["high_s"])
    assert result["summary"]["inside"] == sum(row["inside"] for row in result["rows"]) > 0
    assert 0.01 < result["summary"]["median_width"] < 0.3


def test_measured_costs_have_the_regimes_of_their_engine():
    """An algorithm that measures in the virtual world must find the same lines."""
    small = Regime(alpha_s=0.02, beta_s_per_byte=1e-9, name="direct", below_bytes=32768)
    line = {"alpha_s": 0.05, "beta_s_per_byte": 7e-9}
    named = CollectiveCost(**line, name="pipeline", smaller=(small,))
    unnamed = dataclasses.replace(named, smaller=(dataclasses.replace(small, name=None),))
    every = {
        "all_reduce": Scaled(cost=named, factor=1.1),
        "all_gather": unnamed,
        "broadcast": CollectiveCost(**line),
        "reduce": AlphaBeta(**line),
    }
    costs = Costs(lambda hosts, ranks_per_host: every, "comm_core")
    regimes = [costs.regimes(operation, Shape(hosts=4)) for operation in every]
    assert regimes == [(("direct", 0), ("pipeline", 32768)), None, None, None]


def test_steps_between_distant_sites_are_predicted(capsys):
    """`dear` made seven groups there without the regimes: 600 ms in place of 217 ms."""
    assert main(["validate", "--json", str(ROOT / "docs" / "records" / "sites")]) == 0
    rows = {row["algorithm"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows.keys() == {"ddp", "dear"}
    for row in rows.values():
        assert row["predicted_s"] == pytest.approx(row["measured_s"], rel=0.08)


@pytest.mark.full
def test_costs_come_from_another_model_of_another_sweep(capsys):
    names = ("fidelity-bert", "fidelity")
    assert (
        main(["validate", "--json", *(str(ROOT / "docs" / "records" / name) for name in names)])
        == 0
    )
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert all(row["costs_of"] != row["model"] for row in rows)


def test_the_groups_of_a_host_share_its_link():
    """A rank of each host and its peers all-reduce a quarter, and so do the three other groups."""
    costs = AlphaBeta(alpha_s=0.0, beta_s_per_byte=1e-9)
    shape, name = Shape(hosts=4, ranks_per_host=4), "hierarchical"
    point = setting(*TINY, name, shape, costs, threshold_mb=100.0)
    step = predicted(dataclasses.replace(point, engine="gloo"))
    whole = max(t.nbytes for t in step.transfers if t.name == "reduce_scatter")
    (between,) = (t for t in step.transfers if t.name == "all_reduce" and t.nbytes == whole // 4)
    times = between.times()
    assert times.finished_s - times.started_s == pytest.approx(1e-9 * whole)


def test_the_copies_of_fsdp_take_time():
    """Gradients are copied to be scattered, and gathered parameters to where they are used."""
    point = setting(*TINY, "fsdp", Shape(hosts=4), AlphaBeta(alpha_s=0.0, beta_s_per_byte=1e-12))
    fast, slow = (
        predicted(
            dataclasses.replace(
                point, profile=dataclasses.replace(point.profile, memory_bytes_per_s=rate)
            )
        ).step_s
        for rate in (1e18, 1e9)
    )
    assert slow - fast > 4 * point.profile.parameter_bytes / 1e9


def test_costs_are_those_of_as_many_ranks_per_host():
    folder = ROOT / "docs" / "records" / "fidelity"
    record, *_ = records = Comparison.load(folder).results(folder)
    elsewhere = [dataclasses.replace(r, trial=r.trial | {"ranks_per_host": 2}) for r in records]
    setting, donor = validate._setting(record, [*elsewhere, *records])
    assert donor in records and setting.shape == Shape(hosts=4)
    with pytest.raises(UserError, match="4 ranks, 1 per host"):
        validate._setting(record, elsewhere)
