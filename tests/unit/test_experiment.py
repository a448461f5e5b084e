"""Experiment files: what they expand to, and one clear line for every mistake in them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from common.emulation import config as emulation
from common.emulation.config import Fault
from common.emulation.links.profile import network_profile
from common.harness import cli
from common.harness import experiment as experiments
from common.harness.experiment_file import load
from common.harness.settings import LearnConfig, MeasureConfig, OptimizerConfig
from common.harness.trial import BASELINE, Cuda, Trial, options_of
from common.harness.verbs import run
from common.harness.verbs.run import cluster_overrides
from common.launch import hosts
from common.models.registry import Brought
from dear.errors import UserError
from dear.training.algorithm import Plugin
from tests.system.made import write_mnist

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "experiments").glob("*.yaml"))

TRIALS = json.loads((Path(__file__).parent / "trials.json").read_text())

GOOD = {
    "algorithms": ["dear", {"name": "ddp", "options": {"bucket_cap_mb": 1}}],
    "models": [{"name": "mnist_cnn", "batch_size": 8}],
    "world_sizes": [1, 2],
}


VARIANTS = [
    {"name": "dear", "options": {"fusion": "none"}},
    {"name": "dear", "options": {"fusion": "tuned"}, "label": "tuned"},
]


@pytest.fixture
def read(tmp_path):
    """`read(content, *overrides)` loads an experiment file that holds `content`."""

    def read(content, *overrides):
        path = tmp_path / "demo.yaml"
        if not isinstance(content, bytes):
            content = yaml.safe_dump(content).encode()
        path.write_bytes(content)
        return load(path, overrides)

    return read


@pytest.fixture
def trial(read):
    """The dear trial of two workers."""
    return read(GOOD).trials()[3]


def one_line(read, content, *overrides):
    with pytest.raises(UserError) as caught:
        read(content, *overrides).trials()
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"world_size": [2]}, ["'world_size'", "did you mean 'world_sizes'?"]),
        ({"models": [{"name": "mnist_cnn", "batch_size": 0}]}, ["batch_size", "at least 1"]),
        ({"models": [{"name": "mnist_cnn", "batch_size": 2.5}]}, ["'models.0.batch_size'", "2.5"]),
        ({"models": [{"name": "mnist_cnn", "sentence_len": 9}]}, ["sentence_len", "mnist_cnn"]),
        ({"models": ["resnt50"]}, ["model 'resnt50'; did you mean 'resnet50'?"]),
        ({"models": [{"batch_size": 1}]}, ["'models.0.name' is missing"]),
        ({"models": []}, ["models", "empty"]),
        ({"algorithms": ["daer"]}, ["algorithm 'daer'", "did you mean 'dear'?"]),
        ({"algorithms": [BASELINE]}, ["algorithm 'none'"]),
        ({"algorithms": []}, ["algorithms", "empty"]),
        (
            {"algorithms": [{"name": "dear", "options": {"threshold": 3}}]},
            ["dear option 'threshold'", "did you mean 'threshold_mb'?"],
        ),
        (
            {"algorithms": [{"name": "dear", "options": {"threshold_mb": 0}}]},
            ["dear option 'threshold_mb'", "greater than 0"],
        ),
        ({"algorithms": ["dear", "dear"]}, ["dear", "twice"]),
        (
            {"algorithms": ["ddp", {"name": "dear", "label": "ddp"}]},
            ["algorithms: ddp is listed twice", "label"],
        ),
        (
            {"algorithms": VARIANTS, "compare_to": "dear"},
            ["compare_to: 'dear' names several trials", ": dear(fusion=none), tuned"],
        ),
        ({"world_sizes": [0]}, ["world_sizes", "at least 1"]),
        ({"world_sizes": []}, ["world_sizes", "empty"]),
        ({"world_sizes": [2, 2]}, ["n=2", "twice"]),
        ({"dtype": "float31"}, ["dtype 'float31'", "did you mean 'float32'?"]),
        (
            {"models": [{"name": "resnet50@rtx2080ti-modelled"}], "dtype": "bfloat16"},
            ["resnet50@rtx2080ti-modelled replays times that were measured in float32"],
        ),
        (
            {"world_sizes": [2], "learn": {"epochs": 1, "data": "digits", "batch_sizes": [8, 4]}},
            ["learn.batch_sizes: with learn.epochs, ranks would make different numbers of steps"],
        ),
        ({"device": "gpu"}, ["'device': unknown value 'gpu'", "cuda"]),
        ({"launcher": "slumr"}, ["launcher 'slumr'", "slurm"]),
        ({"hostfile": "hosts"}, ["hostfile", "use mpirun or ssh"]),
        ({"name": "a/b"}, ["name", "'a/b'"]),
        ({"name": ".."}, ["name", "'..'"]),
        ({"seed": True}, ["'seed'", "whole number"]),
        ({"seed": -1}, ["seed", "-1"]),
        ({"timeout_s": 0}, ["timeout_s", "greater than 0"]),
        ({"threads_per_rank": 0}, ["threads_per_rank", "at least 1"]),
        ({"optimizer": {"lr": 0}}, ["optimizer.lr", "greater than 0"]),
        ({"optimizer": {"lr": float("inf")}}, ["optimizer.lr", "inf"]),
        ({"optimizer": {"name": "lion"}}, ["'optimizer.name': unknown value 'lion'", "adamw"]),
        ({"optimizer": {"name": "adamw", "momentum": 0.9}}, ["optimizer.momentum", "adamw"]),
        ({"measure": {"repeats": 0}}, ["measure.repeats", "at least 1"]),
        ({"measure": {"repeats": [5, 3]}}, ["measure.repeats", "[least, most]", "[5, 3]"]),
        ({"measure": {"repeats": [1, 2, 3]}}, ["measure.repeats", "[1, 2, 3]"]),
        ({"measure": {"repeats": [5, 12]}}, ["`precision`", "need each other"]),
        ({"measure": {"precision": 0.02}}, ["`precision`", "need each other"]),
        ({"measure": {"repeats": [0, 2], "precision": 0.1}}, ["measure.repeats", "at least 1"]),
        ({"measure": {"repeats": [5, 9], "precision": -1}}, ["measure.precision", "-1"]),
        ({"measure": {"repeats_at_2k": 1}}, ["repeats_at_2k", "only virtual hosts"]),
        (
            {"measure": {"repeats_at_2k": 1}, "cluster": {"hosts": 2}},
            ["repeats_at_2k", "mnist_cnn computes for real"],
        ),
        ({"measure": 3}, ["'measure'", "mapping"]),
        (
            {"learn": {"data": "mnist", "epochs": 2, "schedule": {"kind": "cosine", "gamma": 0.5}}},
            ["learn.schedule.gamma", "cosine has no factor"],
        ),
        ({"launcher": "ssh", "hostfile": "nowhere"}, ["hostfile nowhere", "No such file"]),
    ],
    ids=lambda value: next(iter(value)),
)
def test_a_bad_value_is_one_line_that_names_it(read, change, words):
    text = one_line(read, GOOD | change)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({k: v for k, v in GOOD.items() if k != "algorithms"}, "'algorithms' is missing"),
        ({k: v for k, v in GOOD.items() if k != "models"}, "'models' is missing"),
        (b"name: x\nmodels: [a\nseed: 1\n", "demo.yaml line 3, column"),
        *((content, "must be a mapping") for content in (b"", b"- 1\n", b"text")),
        *(
            (content, "demo.yaml")
            for content in (b"\xff\xfe\x00", b"name: 2024-13-45\n", b"a: \x07", b"[" * 3000)
        ),
    ],
)
def test_a_file_that_is_no_experiment_is_refused(read, content, words):
    assert words in one_line(read, content)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.yaml: No such file"):
        load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_experiments_make_the_trials_that_they_made(path, tmp_path, monkeypatch):
    """Checks names, hashes and JSON: committed records belong to these trials."""
    monkeypatch.setenv("MNIST_DIR", str(write_mnist(tmp_path)))
    monkeypatch.setattr("common.harness.experiment.usable_cores", lambda: 1)
    trials = load(path).trials()
    texts = [json.dumps(trial.to_json(), sort_keys=True) for trial in trials]
    kept = re.compile(r'"profile": "[^"]*"')  # in the user's cache, by the versions of libraries
    digests = [hashlib.sha256(kept.sub("", text).encode()).hexdigest()[:12] for text in texts]
    result = {t.id: f"{t.hash} {digest}" for t, digest in zip(trials, digests, strict=True)}
    assert result == TRIALS.get(path.stem, {})
    assert [Trial.from_json(json.loads(text)) for text in texts] == trials


def test_the_file_names_the_experiment_that_has_no_name(read):
    assert read(GOOD).name == "demo"
    assert read(GOOD | {"name": "own"}).name == "own"


def test_trials_are_all_combinations_with_the_baseline_first(read):
    models = [{"name": "mnist_cnn", "batch_size": 8}, "alexnet"]
    trials = read(GOOD | {"models": models}).trials()
    per_model = [("none", 1), ("dear", 1), ("ddp", 1), ("dear", 2), ("ddp", 2)]
    assert [(t.model, t.algorithm, t.world_size) for t in trials] == [
        (model, *rest) for model in ("mnist_cnn", "alexnet") for rest in per_model
    ]
    assert [t.batch_size for t in trials] == [8] * 5 + [32] * 5
    assert len({t.id for t in trials}) == 10
    assert "none" not in [t.algorithm for t in read(GOOD | {"baseline": False}).trials()]


def test_trials_hold_all_options_and_labels_show_the_given_ones(read):
    _, dear, ddp = read(GOOD | {"world_sizes": [2]}).trials()
    assert dear.label == "dear"
    assert (dear.options.fusion, dear.options.threshold_mb) == ("threshold", 25.0)
    assert dear.to_json()["options"]["exclude_parts"] == []
    assert ddp.label == "ddp(bucket_cap_mb=1)"
    assert ddp.options.bucket_cap_mb == 1.0
    assert ddp.options.broadcast_buffers is True


def test_ways_to_write_the_same_value_are_the_same_trial(read):
    short, long = GOOD | {"algorithms": ["dear"]}, GOOD | {"algorithms": [{"name": "dear"}]}
    long = long | {"optimizer": {"lr": "1e-2"}, "dtype": "float32"}
    assert [t.hash for t in read(short).trials()] == [t.hash for t in read(long).trials()]


def test_overrides_change_nested_keys_and_list_items(read):
    experiment = read(
        GOOD,
        "measure.repeats=5",
        "optimizer.lr=1e-3",
        "models.0.batch_size=16",
        "algorithms.0=wfbp",
        "world_sizes=[4]",
        "seed=7",
    )
    assert experiment.measure.repeats == 5
    assert experiment.optimizer.lr == 1e-3
    assert experiment.models[0].batch_size == 16
    assert [a.name for a in experiment.algorithms] == ["wfbp", "ddp"]
    assert experiment.world_sizes == (4,)
    assert experiment.seed == 7


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", "must be key=value"),
        ("=3", "must be key=value"),
        ("seed=[", "not valid YAML"),
        ("measure={repeats: 1, repeats: 2}", "not valid YAML"),
        ("seed=2024-13-45", "not valid YAML"),
        ("models.1.batch_size=3", "'1' is no index of a list of 1"),
        ("world_sizes.x=3", "'x' is no index"),
        ("world_sizes.-1=3", "'-1' is no index"),
        ("sede=3", "did you mean 'seed'?"),
        ("measure.repaets=3", "did you mean 'repeats'?"),
        ("seed=three", "'seed': must be a whole number"),
        ("algorithms.0.label=x", "--set 'algorithms.0.label=x'"),
        ("algorithms.0.options.fusion=none", "--set 'algorithms.0.options.fusion=none'"),
    ],
)
def test_a_bad_override_is_one_line_that_names_it(read, override, words):
    assert words in one_line(read, GOOD, override)


def test_what_stands_there_under_two_labels_is_measured_twice(read):
    again = {"name": "dear", "label": "dear again"}
    trials = read(GOOD | {"algorithms": ["dear", again], "world_sizes": [2]}).trials()
    assert [trial.label for trial in trials] == ["single worker", "dear", "dear again"]
    _, first, second = trials
    assert first.hash != second.hash and first.id != second.id and first.cell == second.cell
    assert Trial.from_json(second.to_json()) == second
    assert (first.twin, second.twin) == (0, 1)


def test_hash_changes_with_every_field_but_the_label(trial):
    other = {
        "twin": 1,
        "algorithm": "ddp",
        "options": options_of("dear", {"fusion": "none"}),
        "model": "resnet18",
        "batch_size": 5,
        "sentence_len": 64,
        "world_size": 4,
        "launcher": "mpirun",
        "backend": "mpi",
        "device": "cuda",
        "dtype": "float64",
        "seed": 2,
        "threads_per_rank": 2,
        "optimizer": OptimizerConfig(lr=0.02),
        "measure": MeasureConfig(steps_per_iter=6),
        "launcher_options": {"rdma": 1},
        "network": "1gbe",
        "ranks_per_host": 2,
        "time_scale": 2.0,
        "collective_timeout_s": 5.0,
        "fault": Fault(kind="kill_rank", rank=1),
        "learn": LearnConfig(),
    }
    grouped = {
        "cuda": {"tf32": True, "cudnn_benchmark": True},
        "sources": {
            "data_digest": "0123456789abcdef",
            "profile_digest": "0123456789abcde0",
            "network_digest": "0123456789abcde1",
            "plugin": Plugin(path="/own.py", digest="0123456789abcdef"),
            "brought": Brought(source="file:/own.py", digest="0123456789abcdef"),
            "hosts_digest": "0123456789abcde2",
            "envs": {"ETH_INTERFACE": "eth1"},
        },
    }
    assert {*other, *grouped, "label"} == {field.name for field in dataclasses.fields(Trial)}
    changes = [{key: value} for key, value in other.items()]
    for name, fields in grouped.items():
        group = getattr(trial, name)
        assert {*fields} == {field.name for field in dataclasses.fields(group)}
        changes += [{name: dataclasses.replace(group, **{k: v})} for k, v in fields.items()]
    hashes = [dataclasses.replace(trial, **change).hash for change in changes]
    assert len({trial.hash, *hashes}) == len(changes) + 1
    assert dataclasses.replace(trial, label="other").hash == trial.hash


def test_switches_of_gpus_are_of_gpus(read):
    asked = GOOD | {"device": "cuda", "tf32": True, "cudnn_benchmark": True}
    built = read(asked).trials()[0]
    assert built.cuda == Cuda(tf32=True, cudnn_benchmark=True)
    assert Trial.from_json(built.to_json()) == built
    assert not read(GOOD).trials()[0].cuda.tf32
    for key in ("tf32", "cudnn_benchmark"):
        assert one_line(read, GOOD | {key: True}) == f"{key}: needs device: cuda"


def test_hash_changes_with_what_the_profile_and_the_network_stand_for(read, monkeypatch):
    """Not only with their names: what was measured of other definitions is not finished."""
    content = GOOD | {
        "models": [{"name": "resnet50@rtx2080ti-modelled", "batch_size": 64}],
        "cluster": {"hosts": 2, "network": "10gbe"},
        "baseline": False,
    }
    first = read(content).trials()[0]
    profile, network = first.sources.profile_digest, first.sources.network_digest
    assert read(content).trials()[0].hash == first.hash

    loaded = experiments.profile_of("resnet50@rtx2080ti-modelled", 64)
    text = dataclasses.replace(loaded, rule="in other words")
    faster = dataclasses.replace(loaded, calls=loaded.calls[:-1])
    monkeypatch.setattr(experiments, "profile_of", lambda *of: text)
    assert read(content).trials()[0].sources.profile_digest == profile
    monkeypatch.setattr(experiments, "profile_of", lambda *of: faster)
    changed = read(content).trials()[0]
    assert changed.sources.profile_digest != profile and changed.hash != first.hash
    monkeypatch.undo()

    links = network_profile("10gbe")
    text = dataclasses.replace(links, source="elsewhere")
    slower = dataclasses.replace(links, latency_us=11)
    monkeypatch.setattr(emulation, "network_profile", lambda name: text)
    assert read(content).trials()[0].sources.network_digest == network
    monkeypatch.setattr(emulation, "network_profile", lambda name: slower)
    changed = read(content).trials()[0]
    assert changed.sources.network_digest != network and changed.hash != first.hash
    monkeypatch.undo()

    for other in ({"links": "tc"}, {"congestion": "cubic"}):
        asked = content | {"cluster": {**content["cluster"], **other}}
        assert read(asked).trials()[0].hash != first.hash


def test_trials_of_earlier_records_keep_their_hash(trial):
    """Older records have none of the keys that came later."""
    values = trial.to_json()
    for key in ("learn", "data_digest", "profile_digest", "network_digest"):
        assert values.pop(key) is None
    for key in ("precision", "repeats_at_2k"):
        assert not values["measure"].pop(key)
    assert Trial.from_json(values).hash == trial.hash


def test_a_range_of_repeats_stays_one_through_json(read):
    measure = {"repeats": [5, 12], "precision": 0.02}
    trial = read(GOOD | {"measure": measure}).trials()[0]
    assert (trial.measure.least_repeats, trial.measure.most_repeats) == (5, 12)
    again = Trial.from_json(json.loads(json.dumps(trial.to_json())))
    assert again == trial and again.hash == trial.hash
    plain = read(GOOD | {"measure": {"repeats": 5}}).trials()[0].measure
    assert (plain.least_repeats, plain.most_repeats) == (5, 5)


def test_cell_joins_trials_that_differ_in_algorithm_or_world_size_only(trial):
    ours = {"algorithm": "ddp", "options": options_of("ddp", {}), "label": "ddp", "world_size": 8}
    assert dataclasses.replace(trial, **ours).cell == trial.cell
    for other in ({"seed": 2}, {"batch_size": 5}, {"model": "alexnet"}, {"dtype": "float64"}):
        assert dataclasses.replace(trial, **other).cell != trial.cell


def test_a_key_that_stands_twice_is_refused_with_its_line(read):
    text = one_line(read, b"algorithms: [dear]\nmodels: [mnist_cnn]\nseed: 1\nseed: 2\n")
    assert "line 4" in text and "'seed' stands twice" in text


def test_merge_keys_are_yaml_and_what_stands_beside_them_counts(read):
    merged = (
        b".two: &two {repeats: 2, warmup_steps: 1}\n.more: &more {<<: *two, repeats: 4}\n"
        b"algorithms: [dear]\nmodels: [mnist_cnn]\nmeasure: {<<: *more, check_steps: 5}\n"
    )
    wanted = MeasureConfig(repeats=4, warmup_steps=1, check_steps=5)
    assert read(merged).measure == wanted
    assert "'repeats' stands twice" in one_line(read, merged + b".x: {repeats: 1, repeats: 2}")


def test_an_override_changes_one_place_though_a_merge_key_shares_it(read):
    shared = (
        b".more: &more {options: {compression: fp16}}\nmodels: [mnist_cnn]\n"
        b"algorithms: [{name: dear, <<: *more}, {name: wfbp, <<: *more}]\n"
    )
    built = read(shared, "algorithms.0.options.compression=none").algorithms
    assert [choice.options["compression"] for choice in built] == ["none", "fp16"]


def test_hosts_are_a_part_of_a_trial_and_trials_without_a_hostfile_have_no_key(read, tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\n")
    plain, far = GOOD | {"launcher": "ssh"}, {"hostfile": str(tmp_path / "hosts")}
    trial, there = read(plain).trials()[1], read(plain | far).trials()[1]
    assert "hosts_digest" not in trial.to_json() and there.to_json()["hosts_digest"]
    assert Trial.from_json(there.to_json()) == there and there.hash != trial.hash


def test_settings_of_the_cluster_are_a_part_of_a_trial(read, tmp_path, monkeypatch):
    conf = tmp_path / "envs.conf"
    monkeypatch.setattr(hosts.read_envs, "__defaults__", (conf,))
    conf.write_text("IB_INTERFACE=ib0\n")
    plain, remote = read(GOOD).trials()[1], read(GOOD | {"launcher": "torchrun"})
    trial = remote.trials()[1]
    assert "envs" not in plain.to_json() and "envs" not in trial.to_json(), "ib0 is not used"
    conf.write_text("IB_INTERFACE=ib0\nETH_INTERFACE=eth1\n")
    there = remote.trials()[1]
    assert there.to_json()["envs"] == {"ETH_INTERFACE": "eth1"} and there.hash != trial.hash
    assert Trial.from_json(there.to_json()) == there and read(GOOD).trials()[1] == plain
    rdma = read(GOOD | {"launcher": "torchrun", "launcher_options": {"rdma": 1}}).trials()[1]
    assert rdma.to_json()["envs"] == {"IB_INTERFACE": "ib0"}


def test_options_that_change_no_measurement_do_not_make_another_trial(read):
    def hashes(launcher, **options):
        given = {"launcher": launcher, "launcher_options": options}
        return [trial.hash for trial in read(GOOD | given).trials()]

    same = hashes("slurm", tasks_per_node=2)
    assert hashes("slurm", tasks_per_node=2, queue_s=60) == same
    assert hashes("slurm", tasks_per_node=1) != same
    assert hashes("torchrun", port=4000) == hashes("torchrun") != hashes("torchrun", rdma=2)


@pytest.mark.parametrize(
    ("launcher", "options", "slots", "threads"),
    [
        ("local", {}, None, 1),
        ("ssh", {}, 8, 2),
        ("slurm", {"tasks_per_node": 4}, None, 4),
        ("nodes", {"nnodes": 2, "master": "a"}, None, 2),
    ],
)
def test_the_ranks_of_a_machine_share_its_cores(
    read, tmp_path, monkeypatch, launcher, options, slots, threads
):
    monkeypatch.setattr(experiments, "usable_cores", lambda: 16)
    given = {"launcher": launcher, "launcher_options": options, "world_sizes": [16]}
    if slots:
        (tmp_path / "hosts").write_text(f"a slots={slots}\nb slots={slots}\n")
        given["hostfile"] = str(tmp_path / "hosts")
    assert {trial.threads_per_rank for trial in read(GOOD | given).trials()} == {threads}


def test_a_fixed_number_of_repeats_needs_no_precision(read):
    ranged = GOOD | {"measure": {"repeats": [5, 12], "precision": 0.02}}
    assert read(ranged, "measure.repeats=12").measure == MeasureConfig(repeats=12)
    for refused in ("measure.precision=0.1", "measure={repeats: 1, precision: 0.1}"):
        assert "need each other" in one_line(read, ranged, "measure.repeats=12", refused)
    assert read(ranged, "measure.repeats=[6, 9]").measure.precision == 0.02


def test_speed_ups_are_relative_to_an_algorithm_of_the_experiment(read):
    assert read(GOOD | {"algorithms": ["wfbp", "dear"]}).base == "wfbp"
    assert read(GOOD | {"algorithms": ["wfbp", "dear"], "compare_to": "dear"}).base == "dear"
    # The exact label comes first, then the only variant of an algorithm.
    chosen = GOOD | {"algorithms": [*VARIANTS, "dear"]}
    assert read(chosen).base == "dear(fusion=none)"
    for wanted in ("dear", "dear(fusion=none)", "tuned"):
        assert read(chosen | {"compare_to": wanted}).base == wanted
    chosen = GOOD | {"algorithms": ["ddp", VARIANTS[0]], "compare_to": "dear"}
    assert read(chosen).base == "dear(fusion=none)"
    text = one_line(read, GOOD | {"algorithms": ["wfbp", "dear"], "compare_to": "dera"})
    assert "unknown compare_to 'dera'; did you mean 'dear'?" in text


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("--hosts 2", ["cluster.hosts=2", "world_sizes=null"]),
        ("--ranks-per-host 3", ["cluster.ranks_per_host=3", "world_sizes=null"]),
        ("--network 10gbe", ["cluster.network=10gbe", "networks=[]"]),
        ("--time-scale 4", ["cluster.time_scale=4"]),
        ("", []),
    ],
)
def test_flags_about_virtual_hosts_are_overrides(given, wanted):
    options = cli.parse(["run", "some.yaml", *given.split()])
    assert cluster_overrides(options) == wanted


@pytest.mark.parametrize("name", ["emulated-quick", "quick"])
def test_the_default_sweep_names_its_axes_and_flags_that_change_them(
    name, tmp_path, monkeypatch, capsys
):
    logs = ["-n", "--json", "--logs", str(tmp_path)]

    def planned(*flags):
        assert cli.main([*flags, *logs]) == 0
        output = capsys.readouterr()
        return [entry["trial"] for entry in json.loads(output.out)], output.err

    monkeypatch.setattr(run, "default_experiment", lambda: CONFIGS[0].parent / f"{name}.yaml")
    trials, text = planned()
    first, *lines = text.splitlines()
    assert first.startswith(f"{name} sweeps these axes")
    keys = {"models": "model", "batch sizes": "batch_size", "workers": "world_size"}
    keys |= {"networks": "network", "algorithms": "label"}
    for (axis, key), line in zip(keys.items(), lines, strict=False):
        there = {trial[key] for trial in trials if trial["algorithm"] != BASELINE}
        assert line.strip().startswith(f"{axis}: ")
        assert all(str(value) in line for value in there - {None})
        flags = re.search(r"\((--set .*)\)", line)
        if flags is None:
            assert (name, axis) == ("quick", "networks") and "virtual hosts" in line
            continue
        changed, _ = planned(*shlex.split(flags[1]))
        assert {trial[key] for trial in changed} - there - {"single worker"}
