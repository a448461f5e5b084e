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
from common.harness.experiment_file import NOTHING_RUNS, load
from common.harness.running import fabric
from common.harness.verbs import predict
from common.models.registry import profile_of
from common.paths import COMMAND, EXPERIMENTS, ROOT
from common.virtual.costs.engines import costs_of
from common.virtual.costs.networks import platform_of
from common.virtual.costs.parts import Shape
from common.virtual.foresee import foresee
from common.virtual.over import Point
from common.virtual.training.run import slowest
from dear.errors import UserError
from dear.training.algorithm import algorithm_options


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


def test_an_experiment_with_much_time_is_predicted():
    """The time limit of its trials is left out, so it is not compared with the time to learn."""
    long = ["timeout_s=3000", "learn={budget_s: 900}"]
    overrides = [*long, "cluster={kind: predicted, hosts: 4}", *NOTHING_RUNS]
    experiment = load(EXPERIMENTS / "quick.yaml", overrides)
    assert experiment.learn.budget_s == 900 and experiment.timeout_s == 600


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shard", "1/2"], "--shard: has no meaning on a predicted cluster"),
        (["--dry-run"], "--dry-run: has no meaning on a predicted cluster"),
        (["--set", "measure.repeats=7"], "a predicted cluster has nothing to measure"),
        (["--set", "backend=gloo"], "use cluster.engine"),
        (["--set", "launcher=slurm"], "launcher: slurm does not run"),
        (["--set", "launcher=torchrun"], "launcher: a predicted cluster runs nothing"),
        (["--set", "timeout_s=60"], "timeout_s: a predicted cluster runs nothing"),
        (["--set", "report_lines=true"], "report_lines: a predicted cluster runs nothing"),
        (["--set", "seed=2"], "seed: a predicted cluster runs nothing"),
        (["--set", "faults=[{kind: link_down, host: 0}]"], "but not link_down"),
    ],
)
def test_what_only_a_run_has_is_refused_by_a_prediction(arguments, message, capsys):
    assert main(["run", "--predict", "-k", "resnet50", *arguments]) == 2
    assert one_line(capsys.readouterr().err, message)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("predict quick --set cluster.kind=emulated", "a prediction needs cluster.kind=predicted"),
        ("predict quick --set cluster=null", "a prediction needs cluster.kind=predicted"),
        ("advise --model resnet50 --set cluster=null", "a prediction needs cluster.kind"),
        ("advise --model resnet50 --set algorithms=[ddp,dear]", "--set algorithms: advise chooses"),
        (
            "predict --over workers=1e9",
            "--over workers: must be whole numbers above 0, at most 65536,",
        ),
        (
            "predict --over workers=2,nan",
            "--over workers: must be whole numbers above 0, at most 65536,",
        ),
        ("predict --over bandwidth=inf", "--over bandwidth: must be numbers above 0"),
        (
            "predict --alpha-ms 1 --beta-ns 1 --set cluster.network=1gbe",
            "--set cluster.network=1gbe: no effect with --alpha-ms",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(command, message, capsys):
    assert main(command.split()) == 2
    assert one_line(capsys.readouterr().err, message)


def test_a_refusal_for_memory_has_the_command_that_predicts(monkeypatch, capsys):
    def refuse(trials):
        raise UserError("cluster.hosts: 32 hosts need more memory; 9 would fit")

    monkeypatch.setattr(sandbox, "inside", lambda: True)
    monkeypatch.setattr(fabric, "check_fit", refuse)
    model = ["--model", "mnist_cnn@rtx2080ti-modelled", "--batch", "32"]
    emulated = ["--time-scale", "9", "--set", "cluster.links=switch", "--set", "seed=2"]
    emulated += ["--set", "measure.repeats=5", "--set", "backend=gloo"]
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
    overrides = ["cluster.kind=predicted", *NOTHING_RUNS, "world_sizes=[64]"]
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
    experiment = load(EXPERIMENTS / "reference.yaml", [*overrides, *NOTHING_RUNS])
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


TINY = ("mnist_cnn@rtx2080ti-modelled", 32)


def planned(*overrides, model=TINY):
    """Returns the cluster and the trials of `predicted-64` with one model on 10gbe."""
    name, batch = model
    models = f"models=[{{name: {name}, batch_size: {batch}}}]"
    given = [models, "networks=[]", "baseline=false", *overrides]
    experiment = load(EXPERIMENTS / "predicted-64.yaml", given)
    return experiment.cluster, experiment.trials()


def row(trial, cluster, point=None):
    return predict._row(trial.to_json(), point, cluster, None)


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
@pytest.mark.parametrize("engine", ["gloo", "mpi", "comm_core"])
def test_horovod_sends_by_its_own_library_unless_it_is_nccl(engine, controller):
    options = {"controller": controller}
    here = ["cluster.inside=null", "cluster.hosts=4", "cluster.ranks_per_host=1"]
    algorithms = f"algorithms=[ddp, {{name: horovod, options: {{controller: {controller}}}}}]"
    cluster, (ddp, trial) = planned(*here, algorithms, f"cluster.engine={engine}")
    if controller == "gloo":  # the event model does not know the cycles over MPI
        costs = costs_of("horovod_gloo", platform_of("10gbe"), Shape(hosts=4))
        kind = algorithm_options("horovod", options)
        plain = foresee(profile_of(*TINY), "horovod", kind, costs, 4)
        assert row(trial, cluster).step_s == pytest.approx(plain.step_s)
    assert predict.setting_of(trial, cluster, 0, None).engine == f"horovod_{controller}"
    assert predict.setting_of(ddp, cluster, 0, None).engine == engine
    cluster, (_, trial) = planned(algorithms)
    assert predict.setting_of(trial, cluster, 0, None).engine == "nccl"


def test_efficiency_is_relative_to_a_worker_that_waits_for_nobody():
    model = ("inceptionv4@h200-tf32", 64)
    cluster, (trial,) = planned(
        "algorithms=[dear]", "compare_to=dear", "cluster.network=400gbib", model=model
    )
    profile = profile_of(*model)
    alone = predict._setting(trial, cluster, None, 0, alone=True)
    waiting = predict._setting(trial, cluster, None, 0)
    assert alone.profile == profile
    late = slowest(64, profile.jitter.relative_std)
    assert waiting.profile.step_s == pytest.approx(late * profile.step_s) and late > 1.3
    result = row(trial, cluster)
    assert result.compute_s / result.step_s < 1.02 / late


def test_faster_gpus_have_faster_memory():
    cluster, (trial,) = planned("algorithms=[ddp]")
    usual, fast = (
        row(trial, cluster, Point(axis="compute", value=speed)).compute_s for speed in (1, 4)
    )
    assert usual == pytest.approx(4 * fast, rel=1e-6)


def test_given_costs_have_no_network(capsys):
    given = ["predict", "--alpha-ms", "1", "--beta-ns", "1", "--json"]
    model = ["--model", TINY[0], "--batch", str(TINY[1]), "-k", "algorithm=horovod"]
    assert main([*given, *model]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert line["network"] is None and line["step_s"] > 0
    for flag in (["--network", "10gbe"], ["--inside", "nvlink3"]):
        assert main([*given, *model, *flag]) == 2
        assert one_line(capsys.readouterr().err, f"{flag[0]}: no effect with --alpha-ms")
