"""Launchers by name, their options and commands, and the hosts that get the ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from common.launch import hosts as hosts_module
from common.launch.hosts import (
    Block,
    Envs,
    Host,
    NetworkOptions,
    blocks,
    interface,
    network_env,
    read_envs,
    read_hostfile,
)
from common.launch.job import Job, launcher_names, make_launcher, outcome_of
from dear.errors import UserError

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Virtual:
    name: str
    ifname: str = "eth0"
    pid: int = 1

    def command(self, argv):
        return ["enter", self.name, *argv]


def real(*names: str, slots: int = 2) -> list[Host]:
    return [Host(name=name, slots=slots) for name in names]


def virtual(*names: str, slots: int = 2) -> list[Host]:
    return [Host(name=name, slots=slots, virtual=Virtual(name)) for name in names]


def a_job(world_size: int = 4) -> Job:
    facts = {"folder": Path("/logs/t"), "repeat": 0, "timeout_s": 60, "worker_module": "worker"}
    return Job(world_size=world_size, **facts)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """`tools(name, script)` puts a program in front of the PATH."""

    def add(name: str, script: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return add


@pytest.fixture
def conf(tmp_path, monkeypatch):
    """`conf(text)` makes the launchers read this instead of configs/envs.conf."""
    path = tmp_path / "envs.conf"
    monkeypatch.setattr(hosts_module.read_envs, "__defaults__", (path,))
    return path.write_text


NAMES = ["local", "mpirun", "nodes", "slurm", "ssh", "torchrun"]
A, AB, LOCAL_B = real("a"), real("a", "b"), real("localhost", "b")


@pytest.mark.parametrize(
    ("name", "hosts", "options", "words"),
    [
        ("mpirn", None, {}, r"unknown launcher 'mpirn'; did you mean 'mpirun'\?"),
        # Files of the same folder that are none.
        *((name, None, {}, "unknown launcher") for name in ("job", "node", "ranks")),
        *((name, A, {"rmda": 1}, f"unknown {name} launcher option 'rmda'") for name in NAMES),
        ("ssh", A, {"port": 70000}, "port must be in 1..65535, got 70000"),
        ("ssh", A, {"agent": " "}, "option agent: must be a command"),
        ("ssh", A, {"rdma": 3}, "'rdma': unknown value 3"),
        ("mpirun", A, {"mca": "btl=tcp"}, "'mca': must be a mapping"),
        ("slurm", None, {"queue_s": 0}, "queue_s must be greater than 0"),
        ("slurm", None, {"gpus_per_node": 0}, "gpus_per_node must be at least 1, got 0"),
        ("slurm", None, {"queue_s": 9}, "set the option tasks_per_node"),
        ("nodes", A, {}, "takes no hosts"),
        ("nodes", None, {"nnodes": 2, "node_rank": 2}, r"node_rank must be in 0..1 \(nnodes=2"),
        ("nodes", None, {"nnodes": 0}, "nnodes must be at least 1"),
        ("nodes", None, {"nnodes": 2, "control_port": 65535}, "must leave 2 ports below 65536"),
        ("nodes", None, {"agent": "rsh"}, "'agent'"),
        ("local", A, {}, "runs on this machine only"),
        ("ssh", None, {}, "needs hosts"),
        ("slurm", A, {}, "does not support a hostfile"),
        ("slurm", virtual("h0"), {}, "does not run on virtual hosts"),
        ("ssh", [], {}, "list of hosts is empty"),
        ("ssh", LOCAL_B, {}, "cannot reach the first host as 'localhost'"),
        ("ssh", real("a", slots=1), {}, "have 1 slots, fewer than the 2 workers"),
    ],
)
def test_what_does_not_fit_is_refused(name, hosts, options, words, tools):
    assert launcher_names() == NAMES
    tools("mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    tools("srun", "true")
    hosts = None if name == "slurm" and options else hosts
    with pytest.raises(UserError, match=words):
        make_launcher(name, hosts=hosts, world_size=2, options=options).command(a_job())


def test_two_node_torchrun(conf):
    conf('ETH_INTERFACE=eth7\nPY="/opt/python -W ignore"\n')
    printed = make_launcher("torchrun", hosts=real("a", "b"), world_size=4).command(a_job(3))
    first, second = printed.split(" & ")
    for place, (host, text) in enumerate((("a", first), ("b", second))):
        words = shlex.split(text)
        assert words[0] == "ssh" and words[-2] == host
        assert f"--nnodes 2 --node-rank {place} --master-addr a --master-port 29500" in words[-1]
        ranks = "--no-python /opt/python -W ignore -u -m worker /logs/t 0"
        assert f"--nproc-per-node {2 - place} {ranks}" in words[-1]
        assert "GLOO_SOCKET_IFNAME=eth7" in words[-1]


def test_ssh_passes_the_jobs_environment_quoted():
    launcher = make_launcher("ssh", hosts=real("a"), world_size=2, options={"agent": "rsh -x"})
    extra = dataclasses.replace(a_job(2), env={"NOTE": "two words"})
    words = shlex.split(launcher.command(extra))
    assert words[:3] == ["rsh", "-x", "a"]
    assert "'NOTE=two words'" in words[3]


def mpirun(tools, version: str, hosts, **options) -> list[str]:
    tools("mpirun", f"echo 'mpirun (Open MPI) {version}'")
    launcher = make_launcher("mpirun", hosts=hosts, world_size=4, options=options)
    return shlex.split(launcher.command(a_job()))


def settings_of(words: list[str]) -> dict[str, tuple[str, str]]:
    """Flag and value by name."""
    return {
        words[i + 1]: (words[i], words[i + 2])
        for i in range(len(words))
        if words[i] in ("--mca", "--prtemca")
    }


def test_open_mpi_4_and_5_get_their_own_words(tools, conf):
    conf("ETH_INTERFACE=eth7\n")
    old, new = (mpirun(tools, version, real("a", "b")) for version in ("4.1.4", "5.0.3"))
    assert "--oversubscribe" in old and "slot:OVERSUBSCRIBE" in new
    for words in (old, new):
        assert words[words.index("--hostfile") + 1] == "/logs/t/hostfile"
        assert "MASTER_ADDR=a" in words and "COMM_CORE_IFNAME=eth7" in words
    four, five = settings_of(old), settings_of(new)
    assert four["btl"] == ("--mca", "tcp,vader,self") and five["btl"] == ("--mca", "tcp,sm,self")
    assert four["btl_tcp_if_include"] == five["btl_tcp_if_include"] == ("--mca", "eth7")
    assert four["oob_tcp_if_include"] == ("--mca", "eth7")
    assert five["prte_if_include"] == ("--prtemca", "eth7")
    assert four["plm_rsh_agent"][0] == "--mca" and five["plm_ssh_agent"][0] == "--prtemca"


def test_rdma_chooses_the_network(tools, conf):
    conf("ETH_INTERFACE=eth7\nIB_INTERFACE=ib5\nETH_MPI_BTC_TCP_IF_INCLUDE=10.0.0.0/8\n")
    tcp, verbs, ipoib = (
        mpirun(tools, "4.1.4", real("a", "b"), rdma=rdma, mca={"mpi_yield_when_idle": 1})
        for rdma in (0, 1, 2)
    )
    assert settings_of(tcp)["btl_tcp_if_include"][1] == "10.0.0.0/8"
    assert settings_of(verbs)["pml"][1] == "ucx" and "btl" not in settings_of(verbs)
    assert settings_of(ipoib)["btl_tcp_if_include"][1] == "ib5"
    for words, name, disabled in ((tcp, "eth7", 1), (verbs, "ib5", 0), (ipoib, "ib5", 1)):
        assert f"GLOO_SOCKET_IFNAME={name}" in words
        assert f"NCCL_IB_DISABLE={disabled}" in words
        assert settings_of(words)["mpi_yield_when_idle"] == ("--mca", "1")
    assert "NCCL_NET_GDR_LEVEL=0" in ipoib and "NCCL_NET_GDR_LEVEL=0" not in tcp + verbs


def test_virtual_hosts_use_their_own_interface_and_shell(tools, conf):
    conf("ETH_INTERFACE=eth7\n")
    words = mpirun(tools, "4.1.4", virtual("h0", "h1"))
    assert settings_of(words)["btl_tcp_if_include"][1] == "eth0"
    assert settings_of(words)["plm_rsh_agent"][1].endswith("-m common.emulation.hosts.rsh")
    printed = make_launcher("ssh", hosts=virtual("h0", "h1"), world_size=4).command(a_job())
    assert "common.emulation.hosts.rsh h1" in printed and "COMM_CORE_HOST_ID=h1" in printed
    with pytest.raises(UserError, match="rdma=1: virtual hosts have Ethernet only"):
        mpirun(tools, "4.1.4", virtual("h0", "h1"), rdma=1)


def test_an_mpirun_of_another_kind_or_in_no_place_is_refused(tools, conf):
    tools("mpirun", "echo 'HYDRA build details:'")
    for text, words in (
        ("", "must be Open MPI 4 or 5, got 'HYDRA build details:'"),
        ("MPIPATH=/opt/nowhere\n", "no mpirun in /opt/nowhere/bin"),
        ("# facts\nIB_INTERFACE='ib1'  # quoted\nETH_INTERFACE eth0\n", "must be KEY=VALUE"),
        ("ETH_IFACE=eth0\n", "did you mean 'ETH_INTERFACE'"),
    ):
        conf(text)
        with pytest.raises(UserError, match=words):
            make_launcher("mpirun", hosts=None, world_size=2)


@pytest.mark.parametrize("allocated", [True, False])
def test_slurm_uses_the_allocation_that_there_is(tools, monkeypatch, allocated):
    with monkeypatch.context() as patch, pytest.raises(UserError, match="no srun on the PATH"):
        patch.setenv("PATH", "/nonexistent")
        make_launcher("slurm", hosts=None, world_size=2).check()
    tools("srun", "true")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if allocated:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    options = {"tasks_per_node": 2, "partition": "long", "srun_args": ["--mpi=none"]}
    launcher = make_launcher("slurm", hosts=None, world_size=4, options=options)
    words = shlex.split(launcher.command(a_job()))
    assert words[0] == ("srun" if allocated else "sbatch")
    srun = words if allocated else shlex.split(words[-1])
    assert "--mpi=none" in srun and srun[srun.index("--nodes") + 1] == "2"
    if not allocated:
        assert words[words.index("--partition") + 1] == "long"
        assert int(words[words.index("--time") + 1]) > a_job().timeout_s / 60
    # Before the command itself, since sbatch and srun may be told to export nothing.
    assert "NCCL_IB_DISABLE=1" in srun[srun.index("env") :]
    start = srun.index(sys.executable)
    assert [word.rstrip(";") for word in srun[start + 1 : start + 5]] == (
        ["-m", "worker", "/logs/t", "0"]
    )


def test_slurm_does_not_start_where_its_srun_would_wait_for_ever(tools, monkeypatch):
    tools("srun", "true")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for step, options, waits in (
        ("0", {}, True),
        ("0", {"srun_args": ["--overlap"]}, False),
        ("4294967291", {}, False),  # a batch script
    ):
        monkeypatch.setenv("SLURM_STEP_ID", step)
        launcher = make_launcher("slurm", hosts=None, world_size=1, options=options)
        with pytest.raises(UserError, match="step 0 of job 7") if waits else nullcontext():
            launcher.check()


@pytest.mark.parametrize(
    ("world", "nodes", "tasks"), [(4, "1", "4"), (8, "1", "8"), (9, "2", "8"), (32, "4", "8")]
)
def test_slurm_takes_as_many_nodes_as_the_ranks_fill(world, nodes, tasks):
    options = {"tasks_per_node": 8, "gpus_per_node": 8}
    launcher = make_launcher("slurm", hosts=None, world_size=world, options=options)
    words = shlex.split(launcher.command(a_job(world)))
    for result in (words, shlex.split(words[-1])):  # sbatch, and srun in its script
        assert result[result.index("--nodes") + 1] == nodes
        assert result[result.index("--ntasks-per-node") + 1] == tasks
        assert result[result.index("--gpus-per-node") + 1] == "8"


@pytest.mark.parametrize("sweep", ["slurm", "torchrun"])
def test_the_example_of_4_nodes_with_8_gpus_plans_without_any_of_them(tmp_path, sweep):
    """A dry run on a machine without srun prints the script for one allocation."""
    example = f"examples/clusters/{sweep}_4x8.yaml"
    done = subprocess.run(
        [sys.executable, "benchmarks.py", "run", example, "--dry-run", "--logs", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PATH": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "32 trials, 32 to run" in done.stdout and "resnet50 bs=64 n=32 dear" in done.stdout
    if sweep == "torchrun":
        assert "ssh" in done.stdout and "node1" in done.stdout
        assert "--nnodes 4 --node-rank 0 --master-addr node1" in done.stdout
        assert "#!/bin/bash" not in done.stdout
        return
    script = done.stdout[done.stdout.index("#!/bin/bash") :]
    (tmp_path / "sweep.sbatch").write_text(script)
    subprocess.run(["/bin/bash", "-n", tmp_path / "sweep.sbatch"], check=True)
    flags = re.findall(r"^#SBATCH (\S+)$", script, re.MULTILINE)
    assert flags == [
        *("--job-name=dear-bench-slurm-4x8", "--ntasks=32", "--nodes=4"),
        *("--ntasks-per-node=8", "--gpus-per-node=8", "--exclusive", "--time=04:00:00"),
    ]
    assert script.rstrip().endswith(f"benchmarks.py run {example} --logs {tmp_path}")


def test_variables_of_libraries_reach_the_ranks_on_other_hosts(tools, monkeypatch):
    tools("mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("COMM_CORE_SECRET_FILE", "/shared/secret")
    monkeypatch.setenv("COMM_CORE_HOST_ID", "this")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # of this host
    for name in ("ssh", "torchrun", "mpirun", "slurm"):
        hosts, options = (None, {"tasks_per_node": 2}) if name == "slurm" else (AB, {})
        launcher = make_launcher(name, hosts=hosts, world_size=4, options=options)
        command = launcher.command(a_job())
        for variable in ("NCCL_ALGO=Ring", "COMM_CORE_SECRET_FILE=/shared/secret"):
            assert command.count(variable) == (2 if name in ("ssh", "torchrun") else 1), name
        assert "CUDA_VISIBLE" not in command and "COMM_CORE_HOST_ID" not in command
    assert "NCCL_ALGO" not in make_launcher("local", hosts=None, world_size=2).command(a_job(2))


def test_a_variable_that_contradicts_the_options_is_refused(monkeypatch, conf):
    conf("ETH_INTERFACE=eth1\n")
    for name, value, words in (
        ("NCCL_IB_DISABLE", "0", "NCCL_IB_DISABLE=0: the launcher's options rdma=0"),
        ("NCCL_SOCKET_IFNAME", "eth1", None),
        ("NCCL_SOCKET_IFNAME", "eth10", "need =eth1; unset the variable"),
    ):
        launcher = make_launcher("ssh", hosts=AB, world_size=4)
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(UserError, match=words) if words else nullcontext():
                assert "NCCL_SOCKET_IFNAME==eth1" in launcher.command(a_job())
    on_virtual_hosts = make_launcher("ssh", hosts=virtual("h0", "h1"), world_size=4)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert "GLOO_SOCKET_IFNAME=eth0" in on_virtual_hosts.command(a_job())


def test_mpirun_stays_on_this_machine_without_a_hostfile(tools):
    tools("mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    command = make_launcher("mpirun", hosts=None, world_size=2).command(a_job(2))
    assert "--host localhost:2" in command


def test_a_user_without_a_name_is_no_problem(monkeypatch):
    def unknown():
        raise KeyError("getpwuid(): uid not found: 1000")

    monkeypatch.setattr(hosts_module.getpass, "getuser", unknown)
    assert real("localhost")[0].here


def test_an_aborted_rank_is_not_the_cause_if_another_had_no_memory(tmp_path):
    job = dataclasses.replace(a_job(2), folder=tmp_path)
    error = {"kind": "oom", "message": "out of memory", "rank": 1}
    for number, kind in ((-6, "oom"), (-9, "failed")):
        (tmp_path / "error-0-rank1.json").write_text(json.dumps(error))
        assert outcome_of(job, {0: number, 1: 1}).status == kind
    (tmp_path / "error-0-rank1.json").write_text(json.dumps({**error, "kind": "failed"}))
    assert "rank 0 was killed by signal 6" in outcome_of(job, {0: -6, 1: 1}).error["message"]


def test_the_shipped_facts_are_readable_by_us_and_by_a_shell():
    assert read_envs(ROOT / "configs/envs.conf") == Envs(IB_INTERFACE="ib0")
    show = "set -u; . configs/envs.conf; echo $PY$ETH_INTERFACE$IB_INTERFACE$MPIPATH"
    done = subprocess.run(["sh", "-c", show], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "ib0\n" and not done.stderr
    assert read_envs(ROOT / "none") == Envs()


def test_the_references_own_file_is_understood(conf, capsys):
    references = (
        'export PY="/opt/py/bin/python -W ignore"\nexport IB_INTERFACE=ib0\n'
        "ETH_INTERFACE=enp136s0f0\n"
        "ETH_MPI_BTC_TCP_IF_INCLUDE=192.168.0.1/24\n# parameter servers\n"
        "LAUNCHBIN=/opt/byteps/launcher\nCODEHOME=/home/me/code\nETH_SCHEDULER_IP=192.168.0.1\n"
        "NVIDIA_VISIBLE_DEVICES=0,1,2,3\nWORKER_HOST_PREFIX=gpu\n"
    )
    conf(references)
    result = read_envs()
    assert result.python == ["/opt/py/bin/python", "-W", "ignore"]
    assert (result.IB_INTERFACE, result.ETH_INTERFACE) == ("ib0", "enp136s0f0")
    conf("PY='/my env/bin/python'  # mine\nMPIPATH=\"/opt/m#pi\"\n")
    with_spaces = read_envs()
    assert with_spaces.python == ["/my env/bin/python"]
    assert (with_spaces.PY, with_spaces.MPIPATH) == ("/my env/bin/python", "/opt/m#pi")
    conf(references)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("LAUNCHBIN, CODEHOME, ETH_SCHEDULER_IP, WORKER_HOST_PREFIX")
    assert read_envs() == result and capsys.readouterr().err == "", "said once"
    command = make_launcher("ssh", hosts=AB, world_size=4, options={"interface": "lo"})
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3" in command.command(a_job())


def test_an_interface_that_this_host_does_not_have_is_refused():
    here = real("localhost")
    with pytest.raises(UserError, match=r"no interface 'ib9' \(allowed: .*lo"):
        interface(NetworkOptions(rdma=1), Envs(IB_INTERFACE="ib9"), here)
    assert interface(NetworkOptions(interface="lo"), Envs(), here) == "lo"
    with pytest.raises(UserError, match="set IB_INTERFACE"):
        interface(NetworkOptions(rdma=2), Envs(), None)
    # No interface leaves the choice to the libraries.
    assert network_env(NetworkOptions(), "") == {"NCCL_IB_DISABLE": "1"}


def plan(script: str, *flags: str, **variables: str) -> subprocess.CompletedProcess:
    """A dry run of one of the scripts."""
    return subprocess.run(
        [ROOT / "scripts" / script, "configs/experiments/quick.yaml", "--dry-run", *flags],
        cwd=ROOT,
        env={**os.environ, "nworkers": "2", **variables},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("local", "torchrun --standalone --nproc-per-node 2"),
        ("torchrun", "-m torch.distributed.run --standalone --nproc-per-node 2"),
        ("mpi", "-np 2"),
        ("ssh", "common.launch.node"),
        ("slurm", "srun --ntasks 2"),
    ],
)
def test_the_scripts_plan_a_sweep(tools, tmp_path, script, words):
    tools("mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    tools("srun", "true")
    name = f"run_{script}.sh"
    assert len((ROOT / "scripts" / name).read_text().splitlines()) <= 40
    more = ["--set", "launcher_options.tasks_per_node=2"] if script == "slurm" else []
    done = plan(name, *more, "--logs", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert words in done.stdout and "mnist_cnn bs=32 n=2" in done.stdout


@pytest.mark.parametrize("name", ["dnn", "bs", "nworker", "nnodes", "threshold"])
def test_a_variable_that_the_scripts_would_ignore_is_refused(name):
    done = plan("run_torchrun.sh", **{name: "4"})
    assert done.returncode == 2 and done.stderr.startswith(f"error: variable {name}: ")


CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node-a slots=4\nnode-b slots=2\n", {"node-a": 4, "node-b": 2}),
        ("node-a\nnode-b\n", {"node-a": 1, "node-b": 1}),
        ("# rack 1\n\n  node-a\tslots=2   # the first\n#node-b slots=9\r\n", {"node-a": 2}),
        ("10.0.0.7 slots=2\nfd00::1\n[fd00:0::2]\n", {"10.0.0.7": 2, "fd00::1": 1, "fd00::2": 1}),
    ],
)
def test_hosts_are_read_with_their_slots(tmp_path, text, hosts):
    path = tmp_path / "hosts"
    path.write_text(text)
    total = sum(hosts.values())
    wanted = [Host(name=name, slots=slots) for name, slots in hosts.items()]
    assert read_hostfile(path, total) == wanted
    with pytest.raises(UserError, match=f"has {total} slots, fewer than the {total + 1} workers"):
        read_hostfile(path, total + 1)


@pytest.mark.parametrize(
    ("line", "login", "address"),
    [
        ("me@node1", "me@node1", "node1"),
        ("[fd00::1]", "fd00::1", "fd00::1"),
        ("me@[fd00::1]", "me@fd00::1", "fd00::1"),
        ("another@localhost", "another@localhost", None),  # not this process's user
    ],
)
def test_the_user_of_a_line_logs_in_and_is_no_part_of_the_address(tmp_path, line, login, address):
    (tmp_path / "hosts").write_text(f"{line}\nnode9\n")
    hosts = read_hostfile(tmp_path / "hosts", 2)
    if address is None:
        address, hosts = "node9", hosts[::-1]
    for name in ("ssh", "torchrun"):
        printed = make_launcher(name, hosts=hosts, world_size=2).command(a_job(2))
        assert f" {login} 'cd " in printed
        assert re.search(rf"(MASTER_ADDR=|--master-addr ){address} ", printed)


VALUES = ("0", "-1", "two", "\u00b2", "")


@pytest.mark.parametrize(
    "line",
    [
        *(f"node-b slots={value}" for value in VALUES),
        "node-b slots=1 slots=2",
        *("node-b slots", "node-b cores=4", "node-b node-c", "node-b slots = 4"),
        *("node-b:4", "node-b:2222", "[node-b]", "@node-b", "me@", "-oProxyCommand=x", "1:2"),
    ],
)
def test_a_bad_line_is_quoted_with_its_number(tmp_path, line):
    path = tmp_path / "hosts"
    path.write_text(f"node-a slots=4\n\n{line}  # why\n")
    with pytest.raises(UserError) as caught:
        read_hostfile(path, 1)
    text = str(caught.value)
    assert all(words in text for words in ("line 3", line, "must be", str(path)))
    assert "\n" not in text
    path.write_text("node-a slots=4\nme@node-a slots=2\n")
    emptied = tmp_path / "emptied"
    emptied.write_text("# node-a slots=4\n\n")
    for given, words in (
        (path, "line 2: duplicate host node-a"),
        (emptied, r"no host in it; write lines `HOST slots=N`"),
        (tmp_path / "nowhere", "nowhere: No such file"),
        (tmp_path, "directory"),
    ):
        with pytest.raises(UserError, match=words):
            read_hostfile(given, 1)


def test_ranks_fill_the_hosts_in_their_order():
    hosts = [Host(name=name, slots=slots) for name, slots in (("a", 2), ("b", 1), ("c", 4))]
    assert blocks(hosts, 5) == [
        Block(host=hosts[0], first=0, count=2),
        Block(host=hosts[1], first=2, count=1),
        Block(host=hosts[2], first=3, count=2),
    ]
    assert [list(block.ranks) for block in blocks(hosts, 2)] == [[0, 1]]
    with pytest.raises(UserError, match="the hosts have 7 slots, fewer than the 8 workers"):
        blocks(hosts, 8)


def test_the_shipped_cluster_files_have_the_slots_of_their_name():
    sizes = [int(path.name.removeprefix("cluster")) for path in CONFIGS.glob("cluster[0-9]*")]
    assert sorted(sizes) == [1, 2, 4, 8, 16, 32, 48, 64]
    for size in sizes:
        hosts = read_hostfile(CONFIGS / f"cluster{size}", size)
        assert sum(host.slots for host in hosts) == size
    emulated = read_hostfile(CONFIGS / "cluster.emulated", 4)
    assert [host.name for host in emulated] == ["h0", "h1", "h2", "h3"]
