"""Hostfiles: the lines that are taken, the line that is at fault, and who gets which ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.launch.hosts import Block, Host, blocks, read_hostfile
from dear.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
CLUSTERS = sorted(CONFIGS.glob("cluster[0-9]*"))


@pytest.fixture
def hostfile(tmp_path):
    """`hostfile(text)` is the path of a file that holds `text`."""

    def write(text):
        path = tmp_path / "hosts"
        path.write_text(text)
        return path

    return write


def test_hosts_are_read_in_order_with_their_slots(hostfile):
    path = hostfile("node-a slots=4\nnode-b slots=2\n")
    assert read_hostfile(path, 6) == [Host(name="node-a", slots=4), Host(name="node-b", slots=2)]


def test_a_host_without_slots_takes_one_rank(hostfile):
    assert read_hostfile(hostfile("node-a\nnode-b\n"), 2) == [
        Host(name="node-a", slots=1),
        Host(name="node-b", slots=1),
    ]


def test_comments_blank_lines_and_spaces_are_skipped(hostfile):
    path = hostfile("# hosts of rack 1\n\n  node-a\tslots=2   # the first\n#node-b slots=9\n")
    assert read_hostfile(path, 2) == [Host(name="node-a", slots=2)]


def test_slots_that_just_suffice_are_enough(hostfile):
    path = hostfile("node-a slots=2\nnode-b slots=2\n")
    assert len(read_hostfile(path, 4)) == 2
    with pytest.raises(UserError, match="has 4 slots, fewer than the 5 workers"):
        read_hostfile(path, 5)


def test_an_empty_file_has_no_slots(hostfile):
    with pytest.raises(UserError, match="has 0 slots"):
        read_hostfile(hostfile("# nobody\n"), 1)


@pytest.mark.parametrize(
    "line",
    [
        "node-b slots=0",
        "node-b slots=-1",
        "node-b slots=two",
        "node-b slots=\u00b2",
        "node-b slots=",
        "node-b slots",
        "node-b cores=4",
        "node-b node-c",
        "node-b slots = 4",
    ],
)
def test_a_bad_line_is_quoted_with_its_number(hostfile, line):
    path = hostfile(f"node-a slots=4\n\n{line}  # why\n")
    with pytest.raises(UserError, match="line 3") as caught:
        read_hostfile(path, 1)
    text = str(caught.value)
    assert line in text
    assert "HOST slots=N" in text
    assert str(path) in text
    assert "\n" not in text


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere: No such file"):
        read_hostfile(tmp_path / "nowhere", 1)


def test_a_folder_is_no_hostfile(tmp_path):
    with pytest.raises(UserError, match="directory"):
        read_hostfile(tmp_path, 1)


def test_a_host_that_stands_twice_is_named(hostfile):
    with pytest.raises(UserError, match="line 2: host node-a stands twice"):
        read_hostfile(hostfile("node-a slots=4\nnode-a slots=2\n"), 1)


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


def test_there_is_a_cluster_file_for_each_size_of_the_references():
    names = {path.name for path in CLUSTERS}
    assert names == {f"cluster{n}" for n in (1, 2, 4, 8, 16, 32, 48, 64)}
    emulated = read_hostfile(CONFIGS / "cluster.emulated", 4)
    assert [host.name for host in emulated] == ["h0", "h1", "h2", "h3"]


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.name)
def test_shipped_cluster_files_have_the_slots_of_their_name(path):
    workers = int(path.name.removeprefix("cluster"))
    assert sum(host.slots for host in read_hostfile(path, workers)) == workers
