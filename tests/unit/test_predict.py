"""Predictions through `run`, refusals and the launchers' scripts."""

import json
import os
import shlex
import subprocess

import pytest

from common.emulation import sandbox
from common.emulation.config import ClusterConfig
from common.harness import variables
from common.harness.cli import main
from common.harness.experiment_file import load
from common.harness.running import fabric
from common.harness.verbs import predict
from common.paths import COMMAND, EXPERIMENTS, ROOT
from dear.errors import UserError


def one_line(text, message):
    """Returns True if `text` is a single line with an error that contains `message`."""
    return text.startswith("error: ") and text.count("\n") == 1 and message in text


def test_run_predicts_what_predict_does(capsys):
    chosen = ["-k", "resnet50", "-k", "10gbe", "-k", "algorithm=horovod", "--json"]
    outputs = []
    for command in (["predict"], ["run", "--predict"], ["run", "predicted-64"]):
        assert main([*command, *chosen]) == 0
        outputs.append(json.loads(capsys.readouterr().out))
    assert outputs[0] == outputs[1] == outputs[2] and len(outputs[0]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard", "1/2"], "--shard: has no meaning on a predicted cluster"),
        (["--dry-run"], "--dry-run: has no meaning on a predicted cluster"),
        (["--set", "measure.repeats=7"], "a predicted cluster has nothing to measure"),
        (["--set", "launcher=slurm"], "launcher: slurm does not run"),
        (["--set", "faults=[{kind: link_down, host: 0}]"], "but not link_down"),
    ],
)
def test_what_only_a_run_has_is_refused_by_a_prediction(arguments, message, capsys):
    assert main(["run", "--predict", "-k", "resnet50", *arguments]) == 2
    assert one_line(capsys.readouterr().err, message)


def test_a_refusal_for_memory_has_the_command_that_predicts(monkeypatch, capsys):
    def refuse(trials):
        raise UserError("cluster.hosts: 32 hosts need more memory; 9 would fit")

    monkeypatch.setattr(sandbox, "inside", lambda: True)
    monkeypatch.setattr(fabric, "check_fit", refuse)
    model = ["--model", "mnist_cnn@rtx2080ti-modelled", "--batch", "32"]
    emulated = ["--time-scale", "9", "--set", "cluster.links=switch", "--set", "seed=2"]
    asked = ["--hosts", "32", "--network", "25gbe", "-k", "algorithm=wfbp"]
    assert main(["run", *model, *asked, *emulated]) == 2
    line = capsys.readouterr().err
    assert one_line(line, "9 would fit; without so much memory: `")
    command = line.partition(f"memory: `{COMMAND} ")[2].rstrip("`\n")
    assert main([*shlex.split(command), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["world_size"], row["network"], row["batch"]) == (32, "25gbe", 32)


def test_models_of_an_experiment_are_replayed_on_a_predicted_cluster():
    path = EXPERIMENTS / "reference.yaml"
    overrides = ["cluster.kind=predicted", *predict.NOTHING_RUNS, "world_sizes=[64]"]
    (trial,) = load(path, overrides).trials()
    assert trial.model == "resnet50@rtx2080ti-modelled" and trial.world_size == 64


def test_more_hosts_than_can_be_emulated_are_predicted():
    with pytest.raises(UserError, match=r"at most 4096, got 4097; `.* predict` takes more"):
        ClusterConfig(hosts=4097)
    assert ClusterConfig(kind="predicted", hosts=4097).hosts == 4097


def test_variables_choose_a_predicted_cluster():
    given = {"cluster": "predicted", "nworkers": "64", "ngpu_per_node": "4", "rdma": "1"}
    flags, words = variables.trial_flags(given)
    assert words == "predicted: 16 hosts on 100gbib"
    overrides = [flag.removeprefix("--set=") for flag in flags]
    experiment = load(EXPERIMENTS / "reference.yaml", [*overrides, *predict.NOTHING_RUNS])
    (trial,) = experiment.trials()
    assert experiment.cluster.kind == "predicted" and trial.world_size == 64
    assert (trial.model, trial.network) == ("resnet50@rtx2080ti-modelled", "100gbib")


def script(**given):
    """Runs scripts/run_mpi.sh with variables; returns the process that has ended."""
    command = [ROOT / "scripts" / "run_mpi.sh", "predicted-64", "--json", "-k", "algorithm=horovod"]
    command += ["-k", "resnet50", "-k", "10gbe"]
    environment = {**os.environ, **given}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def test_a_launcher_script_predicts():
    done = script(cluster="predicted", nworkers="32")
    (row,) = json.loads(done.stdout)
    assert done.returncode == 0 and row["world_size"] == 32 and row["step_s"] > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cluster": "real"}, "cluster=real: must be predicted"),
        ({"cluster": "predicted", "rdma": "1"}, "variable rdma: cluster=predicted has no hosts"),
        ({"cluster": "predicted", "hostfile": "x"}, "variable hostfile: cluster=predicted has no"),
    ],
)
def test_a_launcher_script_refuses_what_a_prediction_ignores(given, message):
    done = script(**given)
    assert done.returncode == 2 and one_line(done.stderr, message)
