"""Sandboxes and the virtual hosts in them: kept apart, shaped, and nothing left when they end."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from common.emulation import sandbox
from common.emulation.cluster import EmulatedCluster
from common.emulation.hosts.network import address_of
from common.emulation.links.profile import network_profile
from dear.errors import UserError
from tests.system.processes import LIMIT_S, ROOT, finished, wait_for
from tests.system.sandboxes import Outside, in_sandbox, needs_sandbox, start

users = pytest.mark.parametrize("user", ["me", "nobody"])

# Counts the signals that reach it, and leaves a process behind.
WAITING = """
import os, signal, subprocess, sys
count = 0
def handler(number, frame):
    global count
    count += 1
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, handler)
subprocess.Popen(["sleep", "1000"])
print("ready", flush=True)
signal.pause()
# A second delivery of the same signal would come at once.
signal.setitimer(signal.ITIMER_REAL, 0.3)
signal.sigwait([signal.SIGALRM])
print("signals", count, flush=True)
sys.exit(9)
"""


@pytest.fixture
def outside():
    return Outside()


def run(outside, user, *command, **options):
    return finished(in_sandbox(user, *command), cwd="/tmp", env=outside.environment, **options)


@needs_sandbox
@users
def test_the_status_of_the_command_is_returned_and_what_it_leaves_is_killed(outside, user):
    done = run(outside, user, "sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo out; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "")
    outside.check_clean()
    assert run(outside, user, "sh", "-c", "kill -9 $$").returncode == 137
    missing = run(outside, user, "/no/such/program")
    assert missing.returncode == 127
    assert missing.stderr == "error: cannot run /no/such/program: No such file or directory\n"


@needs_sandbox
@users
def test_inside_are_own_processes_names_links_and_memory(outside, user):
    program = """
    import os, socket
    from pathlib import Path
    from common.emulation import sandbox
    print(sandbox.inside(), os.getpid() < 100, socket.gethostname())
    print([name for _, name in socket.if_nameindex()], socket.gethostbyname("localhost"))
    print(os.listdir("/dev/shm"), Path("/proc/1").exists(), os.geteuid(), sep=" ")
    """
    name = "/usr/bin/python3" if user == "nobody" else sys.executable
    done = run(outside, user, name, "-c", textwrap.dedent(program))
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "True True switch",
        "['lo'] 127.0.0.1",
        "[] True 0",
    ]
    assert not sandbox.inside()


@needs_sandbox
def test_orphans_are_reaped(outside):
    script = "sh -c 'sleep 0.1 & exit' ; while grep -qs sleep /proc/[0-9]*/stat; do :; done"
    assert run(outside, "me", "sh", "-c", script).returncode == 0


def start_waiting(outside, user):
    # A process group of its own, as a terminal's foreground job has.
    process = start(outside, user, "-c", WAITING, start_new_session=True)
    assert process.stdout.readline() == "ready\n", process.communicate()
    # The caller, two of the sandbox, the command, sleep; one that begins a program cannot be read.
    wait_for(lambda: len(outside.processes()) >= 5)
    return process


@needs_sandbox
@users
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_command_once_and_its_status_is_returned(outside, user, number):
    process = start_waiting(outside, user)
    os.killpg(process.pid, number)  # what a terminal does at Ctrl-C
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, stdout, stderr) == (9, "signals 1\n", "")
    outside.check_clean()


@needs_sandbox
@users
@pytest.mark.parametrize("victim", ["the caller", "the sandbox's own process"])
def test_nothing_outlives_a_sigkill(outside, user, victim):
    process = start_waiting(outside, user)
    killed = psutil.Process(process.pid)
    (killed if victim == "the caller" else killed.children()[0]).kill()
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == (-9 if victim == "the caller" else 137)
    outside.check_clean()


@needs_sandbox
def test_run_restores_the_signal_handlers_of_its_caller():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert sandbox.run(["sh", "-c", "exit 3"]) == 3
    after = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert after == before


@needs_sandbox
def test_the_environment_is_the_one_given():
    probe = 'test "$GIVEN" = yes -a -z "$OTHER" -a "$PWD" = "$HERE"'
    environment = {"GIVEN": "yes", "PATH": os.environ["PATH"], "HERE": str(Path.cwd())}
    assert sandbox.run(["sh", "-c", probe], env=environment) == 0


@needs_sandbox
def test_root_without_privileges_uses_a_user_namespace(outside):
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    drop = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-all", "--"]
    command = [*drop, *in_sandbox("me", "cat", "/proc/self/uid_map")]
    done = finished(command, env=outside.environment)
    if "forbidden" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.stdout.split() == ["0", "0", "1"], done.stderr


@needs_sandbox
def test_where_a_new_proc_is_forbidden_the_old_one_serves(outside):
    if os.geteuid() != 0 or not Path("/proc/timer_list").exists():
        pytest.skip("needs root and /proc/timer_list")
    script = 'mount --bind /dev/null /proc/timer_list && exec "$@"'
    inner = "from common.emulation import sandbox; print(sandbox.inside())"
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    command += in_sandbox("nobody", "/usr/bin/python3", "-c", inner)
    done = finished(command, cwd="/tmp", env=outside.environment)
    assert (done.stdout, done.stderr) == ("True\n", "")
    outside.check_clean()


def test_missing_tools_are_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    assert sandbox.unable.__wrapped__() == "ip and tc missing; install iproute2"


def test_forbidden_namespaces_are_explained_in_one_line(monkeypatch):
    failed = subprocess.CompletedProcess(
        [], 125, "", "error: cannot make a sandbox: unshare: Operation not permitted\n"
    )
    monkeypatch.setattr(shutil, "which", lambda name, path: name)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    reason = sandbox.unable.__wrapped__()
    assert reason.startswith("namespaces are forbidden here (unshare: Operation not permitted); ")
    assert "root" in reason and "\n" not in reason
    monkeypatch.setattr(sandbox, "unable", lambda: reason)
    with pytest.raises(UserError, match="virtual hosts: namespaces are forbidden here"):
        sandbox.run(["true"])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("Operation not supported", "this kernel lacks"),
        ("Operation not permitted", "namespaces are"),
    ],
)
def test_a_kernel_without_bridges_is_told_from_forbidden_namespaces(monkeypatch, answer, words):
    line = f"error: cannot make a sandbox: {sandbox._PROBE[1]}: RTNETLINK answers: {answer}"
    failed = subprocess.CompletedProcess([], 1, stderr=line)
    monkeypatch.setattr(sandbox.subprocess, "run", lambda *_, **__: failed)
    assert sandbox.unable.__wrapped__().startswith(words)


@needs_sandbox
def test_the_setting_that_forbids_is_named_and_the_status_says_failed(outside):
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    # In a user namespace of its own that setting can be changed without changing the machine.
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv "$@"'
    drop = ["--bounding-set", "-sys_admin", "--"]
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", script, "sh", *drop]
    done = finished([*command, *in_sandbox("me", "true")], env=outside.environment)
    if any(words in done.stderr for words in ("write error", "cannot create", "unshare failed")):
        pytest.skip(f"cannot set it up: {done.stderr.strip()}")
    assert done.returncode == 125
    assert "sudo sysctl user.max_user_namespaces=10000, or run as root" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_wrong_command_line_is_a_mistake():
    command = [sys.executable, "-m", "common.emulation.sandbox", "true"]
    done = finished(command)
    assert done.returncode == 2 and done.stderr.startswith("usage:")


PROGRAM = str(ROOT / "tests" / "system" / "emulation_program.py")


def run_program(outside, user, name):
    process = start(outside, user, PROGRAM, *name.split())
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    outside.check_clean()
    return process.returncode, stdout, stderr


HOSTS = "hosts_have_names_addresses_and_memory_of_their_own"
QUICK = [
    *(("me", HOSTS), ("nobody", HOSTS), ("me", "the_switch_delays")),
    ("me", "what_a_killed_program_left_is_cleared"),
    ("me", "what_is_on_a_long_way_does_not_stop_what_is_on_a_short_one"),
    *(("me", "a_transfer_tells_what_a_byte_costs"), ("me", "what_is_urgent_has_the_link_first")),
]
SLOW = [
    *itertools.product(
        ("me", "nobody"),
        (
            "links_have_the_speed_asked_for tc",
            "links_have_the_speed_asked_for switch",
            "the_switch_loses_frames",
        ),
    ),
    ("me", "a_cut_link_carries_nothing_until_it_is_restored tc"),
    ("me", "a_cut_link_carries_nothing_until_it_is_restored switch"),
    ("nobody", "the_switch_delays"),
    ("me", "sites_are_far_from_each_other_and_share_a_line"),
    ("me", "a_dead_switch_is_told_and_replaced"),
    ("me", "there_may_be_65_hosts"),
]


@needs_sandbox
@pytest.mark.parametrize(
    ("user", "promise"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in SLOW)]
)
def test_in_a_sandbox(outside, user, promise):
    assert run_program(outside, user, promise) == (0, "", "")


@needs_sandbox
@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/usr/sbin/sshd").exists(),
    reason="needs root, and a server of ssh: scripts/system_packages.sh --ssh installs it",
)
def test_ssh_works_across_the_switch(outside):
    done = run_program(outside, "me", "a_server_of_ssh_answers_over_the_switch")
    assert done == (0, "", "")


@pytest.mark.full
@needs_sandbox
def test_delay_is_emulated_or_said_to_be_missing(outside):
    status, stdout, stderr = run_program(outside, "me", "the_kernel_delays_or_says_that_it_cannot")
    assert (status, stderr) == (0, "")
    notes = json.loads(stdout)
    assert "RDMA is emulated by TCP" in notes
    if len(notes) == 2 and not notes[0].startswith("packets are lost"):
        assert notes[0] == (
            "only bandwidth is shaped: this kernel has no netem for the latency of 20000 us, "
            "jitter of 100 us, loss of 0.01 %"
        )


@needs_sandbox
def test_nothing_is_left_after_an_exception(outside):
    status, _, stderr = run_program(outside, "me", "fail")
    assert status == 1 and "ZeroDivisionError" in stderr


@needs_sandbox
@users
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(outside, user, number):
    process = start(outside, user, PROGRAM, "wait")
    assert process.stdout.readline() == "ready\n", process.communicate()
    os.kill(process.pid, number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0
    outside.check_clean()


def test_addresses_are_unlike_also_for_many_hosts():
    addresses = [address_of(host) for host in range(4096)]
    assert len(set(addresses)) == 4096
    assert addresses[0] == "10.78.0.1" and addresses[250] == "10.78.1.1"
    assert "10.78.255.254" not in addresses


def test_a_cluster_outside_of_a_sandbox_is_refused():
    assert not sandbox.inside()
    cluster = EmulatedCluster(hosts=1, profile=network_profile("1gbe"))
    with pytest.raises(RuntimeError, match="only in a sandbox"), cluster:
        pass


def test_an_unknown_congestion_control_is_one_clear_line():
    with pytest.raises(UserError, match="unknown congestion control 'quick'"):
        EmulatedCluster(hosts=1, profile=network_profile("1gbe"), congestion="quick")
