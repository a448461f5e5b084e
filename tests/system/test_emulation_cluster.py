"""Virtual hosts: their names, links, speeds and end; as this user and as an ordinary one."""

import json
import os
import signal

import pytest

from common.emulation import sandbox
from common.emulation.cluster import EmulatedCluster
from common.emulation.config import network_profile
from common.emulation.network import address_of
from dear.errors import UserError
from tests.system.processes import LIMIT_S, ROOT
from tests.system.sandboxes import Outside, needs_sandbox, start

PROGRAM = str(ROOT / "tests" / "system" / "emulation_program.py")
users = pytest.mark.parametrize("user", ["me", "nobody"])


@pytest.fixture
def outside():
    return Outside()


def run(outside, user, name):
    process = start(outside, user, PROGRAM, name)
    stdout, stderr = process.communicate(timeout=LIMIT_S)
    outside.check_clean()
    return process.returncode, stdout, stderr


@needs_sandbox
@pytest.mark.parametrize(
    ("user", "promise"),
    [
        ("me", "hosts_have_names_addresses_and_memory_of_their_own"),
        ("nobody", "hosts_have_names_addresses_and_memory_of_their_own"),
        pytest.param("me", "links_have_the_speed_asked_for", marks=pytest.mark.full),
        pytest.param("nobody", "links_have_the_speed_asked_for", marks=pytest.mark.full),
        pytest.param(
            "me", "a_cut_link_carries_nothing_until_it_is_restored", marks=pytest.mark.full
        ),
        ("me", "a_transfer_tells_what_a_byte_costs"),
        pytest.param("me", "there_may_be_65_hosts", marks=pytest.mark.full),
    ],
)
def test_in_a_sandbox(outside, user, promise):
    assert run(outside, user, promise) == (0, "", "")


@pytest.mark.full
@needs_sandbox
def test_delay_is_emulated_or_said_to_be_missing(outside):
    status, stdout, stderr = run(outside, "me", "delay")
    assert (status, stderr) == (0, "")
    notes = json.loads(stdout)
    assert notes.pop() == "RDMA is emulated by TCP"
    for note in notes:
        assert note == (
            "only bandwidth is shaped: this kernel has no netem for the latency of 20000 us, "
            "jitter of 100 us, loss of 0.01 %"
        )


@needs_sandbox
def test_nothing_is_left_after_an_exception(outside):
    status, _, stderr = run(outside, "me", "fail")
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
