"""Tests of the references' names of methods and settings, and of the trials of their variables."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from common.harness import cli, variables
from common.harness.experiment import AlgorithmChoice
from common.harness.experiment_file import NOTHING_RUNS, find_experiment, load
from common.harness.running import fabric
from common.harness.trial import Trial
from dear.algorithms import aliases
from dear.errors import UserError
from dear.training.algorithm import algorithm_names, algorithm_options

ROOT = Path(__file__).parents[2]
WHOLE = {"merge": "threshold", "threshold_mb": 2048.0}


@pytest.mark.parametrize("name", aliases.ALIASES)
def test_an_alias_is_an_algorithm_with_options_that_it_has(name):
    algorithm, options = aliases.resolved(name, {})
    assert algorithm in algorithm_names() and name not in algorithm_names()
    algorithm_options(algorithm, options)


def test_an_experiment_names_an_algorithm_as_it_was_asked_for():
    built = AlgorithmChoice(name="asc2", options={"channels": 3})
    assert (built.name, built.options) == ("mgwfbp", {"merge": "asc", "channels": 3})
    assert built.title == "asc2(channels=3)"
    assert AlgorithmChoice(name="pytorch-ddp").title == "pytorch-ddp"
    assert AlgorithmChoice(name="wfbp", label="own").title == "own"
    with pytest.raises(UserError, match="method bspps needs a parameter server"):
        AlgorithmChoice(name="bspps")


@pytest.mark.parametrize(
    ("method", "given", "algorithm", "options"),
    [
        ("dear", {}, "dear", {}),
        ("dear", {"threshold": "262144"}, "dear", {"threshold_mb": 1.0}),
        ("dear", {"threshold": "536870912", "mgwfbp": "0", "nstreams": "1"}, "dear", {}),
        ("ddp", {"threshold": "536870912"}, "ddp", {}),
        ("dear", {"exclude_parts": "allgather"}, "dear", {"exclude_parts": ["allgather"]}),
        (
            "dear",
            {"exclude_parts": "reducescatter,allgather"},
            "dear",
            {"exclude_parts": ["reducescatter", "allgather"]},
        ),
        ("dear", {"compressor": "eftopk"}, "dear", {"compression": "eftopk"}),
        ("wfbp", {}, "wfbp", {}),
        ("wfbp", {"nstreams": "2"}, "wfbp", {"channels": 2}),
        ("wfbp", {"threshold": "1048576"}, "mgwfbp", {"merge": "threshold", "threshold_mb": 4.0}),
        ("wfbp", {"mgwfbp": "1"}, "mgwfbp", {}),
        ("wfbp2", {"threshold": "0", "mgwfbp": "0"}, "wfbp", {"channels": 2}),
        ("mgwfbp", {}, "mgwfbp", {}),
        ("mgwfbp", {"threshold": "536870912", "mgwfbp": "1", "asc": "0"}, "mgwfbp", {}),
        ("mgwfbp", {"asc": "1"}, "mgwfbp", {"merge": "asc"}),
        ("mgwfbp", {"mgwfbp": "0"}, "wfbp", {}),
        ("mgwfbp2", {}, "mgwfbp", {"channels": 2}),
        ("asc", {}, "mgwfbp", {"merge": "asc"}),
        ("asc2", {"asc": "1", "nstreams": "2"}, "mgwfbp", {"merge": "asc", "channels": 2}),
        ("signum", {}, "mgwfbp", {**WHOLE, "compression": "signum"}),
        (
            "eftopk",
            {"compressor": "eftopk", "threshold": "536870912", "density": "0.01"},
            "mgwfbp",
            {**WHOLE, "compression": "eftopk", "density": 0.01},
        ),
        ("dgcsampling", {}, "mgwfbp", {**WHOLE, "compression": "dgcsampling"}),
        (
            "wfbp",
            {"compressor": "topk"},
            "mgwfbp",
            {"merge": "threshold", "threshold_mb": 256.0, "compression": "topk"},
        ),
        ("mgwfbp", {"compressor": "gaussian"}, "mgwfbp", {"compression": "gaussian"}),
        ("bspa2a", {"threshold": "0"}, "allreduce", {}),
        ("horovod", {}, "horovod", {}),
        ("horovod", {"autotune": "--autotune"}, "horovod", {"autotune": True}),
        ("pytorch-ddp", {"use_zero": "1"}, "ddp", {"zero": True}),
        (
            "bytescheduler",
            {},
            "bytescheduler",
            {"credit_mb": 16e6 * 4 / 2**20, "partition_mb": 4e6 * 4 / 2**20},
        ),
        (
            "bytescheduler",
            {"CREDIT": "524288", "PARTITION": "262144"},
            "bytescheduler",
            {"credit_mb": 2.0, "partition_mb": 1.0},
        ),
        (
            "bytescheduler",
            {"CREDIT": "524288", "PARTITION": "262144", "CREDIT_TUNING": "1"},
            "bytescheduler",
            {"credit_mb": 2.0, "partition_mb": 1.0, "tune": "credit"},
        ),
        ("bytescheduler", {"USE_BYTESCHEDULER": "0"}, "horovod", {}),
        ("decentralized", {"threshold": "0", "mgwfbp": "0"}, "decentralized", {}),
    ],
)
def test_variables_of_a_method_are_options(method, given, algorithm, options):
    result = aliases.method(method, given)
    assert result == (algorithm, options)
    algorithm_options(*result)


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        ("dear", {"mgwfbp": "1"}, "mgwfbp=1: method dear has no such variable"),
        ("dear", {"nstreams": "2"}, "nstreams=2: method dear has no such variable"),
        ("ddp", {"threshold": "5"}, "threshold=5: method ddp has no such variable"),
        ("horovod", {"compressor": "topk"}, "compressor=topk: method horovod has no such variable"),
        ("decentralized", {"compressor": "topk"}, "methods that compress are wfbp, mgwfbp, dear"),
        ("wfbp", {"asc": "1"}, "asc=1: needs mgwfbp=1"),
        ("mgwfbp", {"threshold": "5"}, "threshold=5: needs mgwfbp=0"),
        ("mgwfbp", {"asc": "yes"}, "asc=yes: must be 0 or 1"),
        ("wfbp", {"nstreams": "0"}, "nstreams=0: must be a whole number, at least 1"),
        ("wfbp", {"density": "0.1"}, "density=0.1: needs a compressor"),
        ("wfbp", {"compressor": "topk", "density": "much"}, "density=much: must be a number"),
        ("bytescheduler", {"CREDIT_TUNING": "often"}, "CREDIT_TUNING=often: must be 0 or 1"),
        ("bytescheduler", {"CREDIT": "much"}, "CREDIT=much: must be a whole number"),
        ("horovod", {"autotune": "soon"}, "autotune=soon: must be 1 or --autotune"),
        ("byteps", {}, "method byteps needs a parameter server"),
    ],
)
def test_what_cannot_be_is_one_line(method, given, words):
    with pytest.raises(UserError, match=words) as error:
        aliases.method(method, given)
    assert "\n" not in str(error.value)


@pytest.fixture
def machine(monkeypatch):
    """Machine without MPI, with two cores, and hosts n1 and n2 that can be found."""
    monkeypatch.setattr(variables, "_has_mpirun", lambda: False)
    monkeypatch.setattr(variables, "usable_cores", lambda: 2)
    monkeypatch.setattr(variables, "_gpus", lambda: 0)

    def found(name, port):
        if name not in ("n1", "n2"):
            raise OSError("unknown")
        return [name]

    monkeypatch.setattr(variables.socket, "getaddrinfo", found)
    return monkeypatch


def trial(environ):
    flags, words = variables.trial_flags(environ)
    # As `predict` does, which the script then calls.
    rest = NOTHING_RUNS if environ.get("cluster") == "predicted" else ()
    given = [*(flag[6:] for flag in flags), *rest]
    (built,) = load(ROOT / "configs/experiments/reference.yaml", given).trials()
    return built, words


def test_the_trial_of_the_variables_runs_on_this_machine(machine):
    built, words = trial({"dnn": "resnet50", "bs": "4", "nworkers": "2", "method": "asc"})
    assert (built.model, built.batch_size, built.world_size) == ("resnet50", 4, 2)
    assert (built.algorithm, built.label, built.options.merge) == ("mgwfbp", "asc", "asc")
    assert (built.launcher, words) == ("local", "launcher: local processes")
    built, _ = trial({"dnn": "bert_base", "nworkers": "2", "bs": "2"})
    assert (built.label, built.sentence_len) == ("dear", 64)
    assert trial({"dnn": "bert", "senlen": "32", "nworkers": "1"})[0].sentence_len == 32


def test_a_timeline_may_be_asked_for(machine):
    flags, _ = variables.trial_flags({"nworkers": "2", "WFSGD_TIMELINE": "/tmp/traces"})
    assert flags[-1] == "--trace=/tmp/traces"


def test_where_there_are_gpus_they_are_used_and_counted(machine):
    machine.setattr(variables, "_gpus", lambda: 4)
    built, _ = trial({"nworkers": "3"})
    assert (built.device, built.backend) == ("cuda", "nccl")
    with pytest.raises(UserError, match="nworkers=5: this machine has 4 GPUs, and there is no"):
        trial({"nworkers": "5"})
    assert trial({"nworkers": "3", "cluster": "emulated"})[0].device == "cpu"


def test_the_trial_of_the_variables_runs_on_virtual_hosts(machine):
    given = {"cluster": "emulated", "nworkers": "4", "rdma": "1"}
    built, words = trial(given)
    assert (built.model, built.hosts) == ("resnet50@rtx2080ti-modelled", 4)
    assert built.network == "100gbib" and words == "launcher: 4 virtual hosts on 100gbib"
    assert trial({**given, "ngpu_per_node": "2"})[0].hosts == 2
    assert trial({**given, "dnn": "mnist_cnn@rtx2080ti-modelled", "bs": "32"})[0].batch_size == 32


def test_the_trial_of_the_variables_runs_on_the_hosts_of_its_cluster_file(machine, tmp_path):
    machine.setattr(variables, "CONFIGS", tmp_path / "configs")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/cluster8").write_text("n1 slots=4\nn2 slots=4\n")
    flags, words = variables.trial_flags({"rdma": "2"})
    values = {key: yaml.safe_load(text) for key, _, text in (f[6:].partition("=") for f in flags)}
    path = str(tmp_path / "configs/cluster8")
    assert (values["launcher"], values["hostfile"]) == ("ssh", path)
    assert values["launcher_options"] == {"rdma": 2} and words.startswith(
        f"launcher: ssh with {path}; device: cpu"
    )
    with pytest.raises(UserError, match=r"ngpu_per_node=2: .*cluster8 has other slots"):
        variables.trial_flags({"ngpu_per_node": "2"})
    machine.setattr(variables, "_has_mpirun", lambda: True)
    assert variables.trial_flags({})[1].startswith(f"launcher: mpirun with {path}; ")


BY_HAND = {"nnodes": "2", "master": "n1"}


def test_the_same_command_on_each_node_differs_in_its_number(machine):
    leader, words = trial(BY_HAND)
    assert leader.launcher_options == {"nnodes": 2, "master": "n1"} and leader.world_size == 8
    assert words == "launcher: node 0 of 2, started by hand"
    assert trial(BY_HAND | {"node_rank": "0"})[0].hash == leader.hash
    follower, words = trial(BY_HAND | {"node_rank": "1", "rdma": "2"})
    assert follower.launcher_options == {"nnodes": 2, "master": "n1", "rdma": 2}
    assert words == "launcher: node 1 of 2, started by hand"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {},
            r"nworkers=8: the hosts of .*/cluster8 \(gpu1, gpu2\) cannot be resolved here; write ",
        ),
        (
            {"nworkers": "64"},
            r"gpu1, gpu2, gpu3, \.\.\.\) cannot be resolved here; write your hosts into",
        ),
        ({"nworkers": "3"}, "nworkers=3: this machine has 2 cores, and there is no configs/clust"),
        ({"nworkers": "2", "rdma": "1"}, "rdma=1: no effect, as all workers are on"),
        ({"nworkers": "2", "rdma": "3"}, "unknown rdma '3'"),
        ({"nworkers": "no"}, "nworkers=no: must be a whole number"),
        ({"nworkers": "0"}, "nworkers=0: must be a whole number, at least 1"),
        ({"nworkers": "2", "bs": "0"}, "bs=0: must be a whole number, at least 1"),
        ({"cluster": "real"}, r"unknown cluster 'real' \(allowed: emulated, predicted\)"),
        ({"cluster": "emulated", "ngpu_per_node": "3"}, "ngpu_per_node=3 does not divide it"),
        ({"node_rank": "1"}, r"^node_rank=1: nodes .* by hand need nnodes and master too"),
        ({"nnodes": "2"}, r"^nnodes=2: nodes .* by hand need master too"),
        (BY_HAND | {"node_rank": "one"}, "node_rank=one: must be a whole number, at least 0"),
        (BY_HAND | {"nnodes": "0"}, "nnodes=0: must be a whole number, at least 1"),
        (BY_HAND | {"cluster": "emulated"}, "cluster=emulated: cannot be used with nnodes, master"),
    ],
)
def test_a_trial_without_a_place_is_one_line_that_says_the_ways_on(machine, given, words):
    with pytest.raises(UserError, match=words) as error:
        variables.trial_flags(given)
    assert "\n" not in str(error.value)


def test_workers_that_do_not_fit_into_memory_are_refused(machine):
    machine.setattr(variables.machine, "available_bytes", lambda: 2 << 30)
    words = r"nworkers=4: the ranks of resnet50 need 2\.\d GiB of memory .* 2\.0 GiB are available"
    with pytest.raises(UserError, match=words):
        variables.trial_flags({"nworkers": "4"})


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_the_script_says_at_once_what_cannot_be_and_shows_it_in_a_dry_run(tmp_path, flags):
    script = [ROOT / "dear/horovod_mpi_cj.sh", *flags, "--logs", tmp_path]
    environ = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "nworkers": "64"}
    done = subprocess.run(script, env=environ, capture_output=True, text=True, timeout=60)
    lost = "nworkers=64: the hosts of "
    if flags:
        assert done.returncode == 0 and f"before it can run: {lost}" in done.stderr
        assert "resnet50 bs=64 n=64 dear" in done.stdout
        return
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {lost}") and "or say cluster=emulated" not in line
    assert all(way in line for way in ("cluster=emulated", "node_rank=", "configs/cluster64"))


def _table() -> list[tuple[dict[str, str], dict[str, object]]]:
    """The rows of docs/references.md: variables, and what the record's trial then holds."""
    text = (ROOT / "docs/references.md").read_text().partition("| `trial` in the record |\n")[2]
    rows = []
    for line in text.partition("\n\n")[0].splitlines()[1:]:
        given, held = re.fullmatch(r"\| `([^`]*)` \| (.*) \|", line).groups()
        wanted = re.findall(r"`([\w.]+)` = `([^`]*)`", held)
        rows.append(
            (
                dict(pair.split("=", 1) for pair in given.split()),
                {key: json.loads(value) for key, value in wanted},
            )
        )
    return rows


@pytest.mark.parametrize(("given", "wanted"), _table(), ids=lambda held: " ".join(map(str, held)))
def test_the_record_of_a_trial_holds_what_the_page_says_of_its_variables(machine, given, wanted):
    held = trial({"nworkers": "2", **given})[0].to_json()
    for path, value in wanted.items():
        result = held
        for key in path.split("."):
            result = result[key]
        assert result == value, path


def test_the_page_says_of_every_variable_what_it_does():
    shown = {name for given, _ in _table() for name in given}
    elsewhere = {"WFSGD_TIMELINE", "node_rank"}
    assert set(variables.DEFAULTS) | set(aliases.VARIABLES) == shown | elsewhere


DEFAULTS = {
    "compression": None,
    "is_sparse": False,
    "density": 0.001,
    "seq_layernames": None,
    "layerwise_times": None,
    "threshold": 0,
    "writer": None,
    "gradient_path": None,
    "fp16": False,
    "mgwfbp": False,
    "rdma": False,
    "multi_job_scheduling": False,
    "exclude_parts": "",
}
"""Arguments of DeAR's first `DistributedOptimizer`, without `norm_clip`, which is ours as well."""


@pytest.mark.parametrize(
    ("algorithm", "given", "found"),
    [
        ("dear", {}, ("dear", {"exclude_parts": ()})),
        ("wfbp", {}, ("wfbp", {})),
        ("dear", {"threshold": 8}, ("dear", {"threshold_mb": 8, "exclude_parts": ()})),
        (
            "dear",
            {"threshold": None, "exclude_parts": "allgather"},
            ("dear", {"fusion": "nearby_layers", "exclude_parts": ("allgather",)}),
        ),
        ("wfbp", {"mgwfbp": True}, ("mgwfbp", {})),
        ("wfbp", {"mgwfbp": True, "asc": True, "rdma": True}, ("mgwfbp", {"merge": "asc"})),
        ("asc2", {}, ("mgwfbp", {"merge": "asc", "channels": 2})),
        (
            "mgwfbp",
            {"compression": SimpleNamespace(name="eftopk"), "is_sparse": True, "density": 0.01},
            ("mgwfbp", {"compression": "eftopk", "density": 0.01}),
        ),
    ],
)
def test_arguments_of_dears_optimizer_are_options(algorithm, given, found):
    assert aliases.arguments(algorithm, {**DEFAULTS, **given}, halves=False) == found
    algorithm_options(*found)


@pytest.mark.parametrize(
    ("algorithm", "given", "words"),
    [
        ("dear", {"mgwfbp": True}, "mgwfbp=True: needs algorithm='mgwfbp' or 'wfbp', got 'dear'"),
        ("dear", {"is_sparse": True}, "is_sparse=True: needs a compression"),
        ("dear", {"compression": 3}, "compression=3: must be a name"),
        ("dear", {"fp16": True}, "fp16=True: the model's parameters do not have 16 bits"),
        ("dear", {"seq_layernames": ["a"]}, "seq_layernames and layerwise_times need each other"),
        ("mgwfbp", {"layerwise_times": [1.0]}, "layerwise_times need each other"),
        (
            "dear",
            {"seq_layernames": ["a", "b"], "layerwise_times": [1.0]},
            "one time for each name",
        ),
        ("dear", {"writer": object()}, "writer: writing to TensorBoard is not supported"),
        ("dear", {"multi_job_scheduling": True}, "multi_job_scheduling: scheduling across jobs"),
    ],
)
def test_arguments_that_cannot_be_had_are_refused_by_their_names(algorithm, given, words):
    with pytest.raises(UserError, match=words):
        aliases.arguments(algorithm, {**DEFAULTS, **given}, halves=False)
    assert aliases.arguments("dear", {"fp16": True}, halves=True) == ("dear", {})


def test_every_variable_and_name_stands_in_the_documents():
    text = (ROOT / "docs/references.md").read_text()
    for name in (*aliases.VARIABLES, *variables.DEFAULTS, *aliases.ALIASES):
        assert f"`{name}`" in text or f"`{name}=" in text, name
    assert all(f"`{name}`" in text for name in aliases.SERVERS)


def _again(command: str, capsys) -> list[str]:
    """Identities of the trials that the command would run, without running it."""
    words = shlex.split(command.removeprefix("cd dear;"))
    place = words.index("./horovod_mpi_cj.sh")
    environ = dict(word.split("=", 1) for word in words[:place])
    assert cli.run_variables([*words[place + 1 :], "--dry-run", "--json"], environ) == 0
    plan = json.loads(capsys.readouterr().out)
    return [Trial.from_json(entry["trial"]).hash for entry in plan]


@pytest.mark.parametrize("name", ["suite", "emulated-quick", "quick", "slow_host", "sites"])
def test_the_command_of_a_trial_makes_this_trial(name, monkeypatch, capsys):
    monkeypatch.setattr(fabric, "misfit", lambda trial: None)
    monkeypatch.setattr(variables, "usable_cores", lambda: 8)
    experiment = load(find_experiment(name))
    trials = [trial for trial in experiment.trials() if trial.algorithm != "none"]
    assert len(trials) > 3
    for trial in trials:
        assert _again(variables.command(experiment, trial), capsys) == [trial.hash], trial.title


def test_a_trial_that_no_variables_make_has_no_command():
    twice = [{"name": "dear"}, {"name": "dear", "label": "again"}]
    experiment = load(
        find_experiment("quick"), ["compare_to=dear", f"algorithms={json.dumps(twice)}"]
    )
    with pytest.raises(UserError, match="repeats another one under another label"):
        variables.command(experiment, experiment.trials()[-1])


def test_another_programs_variable_beside_the_right_one_is_left_alone(machine):
    given = {"method": "ddp", "METHOD": "dear", "methods": "all", "cluster": "predicted"}
    flags, _ = variables.trial_flags(given)
    assert any('"name": "ddp"' in flag for flag in flags)


@pytest.mark.parametrize("name", ["METHOD", "Method", "DNN", "CREDIT_TUNNING", "nworker"])
def test_a_variable_with_nearly_the_name_of_a_known_one_is_refused(name):
    with pytest.raises(UserError, match=f"unknown variable '{name}'"):
        variables.trial_flags({name: "1"}, planned=True)


def test_bytescheduler_that_is_off_says_so_and_has_no_credit(machine):
    flags, _ = variables.trial_flags(
        {"method": "bytescheduler", "USE_BYTESCHEDULER": "0", "cluster": "predicted"}
    )
    assert any('"name": "horovod", "label": "bytescheduler(horovod)"' in flag for flag in flags)
    with pytest.raises(UserError, match="CREDIT: no effect with USE_BYTESCHEDULER=0"):
        aliases.method("bytescheduler", {"USE_BYTESCHEDULER": "0", "CREDIT": "5"})
