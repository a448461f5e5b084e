"""Hostfiles: the lines that are taken, the line that is at fault, and who gets which ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.launch.hosts import Block, Host, blocks, read_hostfile
from dear.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def hostfile(tmp_path):
    """`hostfile(text)` is the path of a file that holds `text`."""

    def write(text):
        path = tmp_path / "hosts"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node-a slots=4\nnode-b slots=2\n", {"node-a": 4, "node-b": 2}),
        ("node-a\nnode-b\n", {"node-a": 1, "node-b": 1}),
        ("# rack 1\n\n  node-a\tslots=2   # the first\n#node-b slots=9\n", {"node-a": 2}),
    ],
    ids=["in order", "one slot if none is said", "comments and spaces"],
)
def test_hosts_are_read_with_their_slots(hostfile, text, hosts):
    total = sum(hosts.values())
    found = read_hostfile(hostfile(text), total)
    assert found == [Host(name=name, slots=slots) for name, slots in hosts.items()]
    with pytest.raises(UserError, match=f"has {total} slots, fewer than the {total + 1} workers"):
        read_hostfile(hostfile(text), total + 1)


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
    with pytest.raises(UserError) as caught:
        read_hostfile(path, 1)
    text = str(caught.value)
    assert all(words in text for words in ("line 3", line, "HOST slots=N", str(path)))
    assert "\n" not in text


def test_a_file_that_cannot_be_used_is_named(hostfile, tmp_path):
    with pytest.raises(UserError, match="nowhere: No such file"):
        read_hostfile(tmp_path / "nowhere", 1)
    with pytest.raises(UserError, match="directory"):
        read_hostfile(tmp_path, 1)
    with pytest.raises(UserError, match="has 0 slots"):
        read_hostfile(hostfile("# nobody\n"), 1)
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


def test_the_shipped_cluster_files_have_the_slots_of_their_name():
    sizes = [int(path.name.removeprefix("cluster")) for path in CONFIGS.glob("cluster[0-9]*")]
    assert sorted(sizes) == [1, 2, 4, 8, 16, 32, 48, 64]
    for size in sizes:
        hosts = read_hostfile(CONFIGS / f"cluster{size}", size)
        assert sum(host.slots for host in hosts) == size
    emulated = read_hostfile(CONFIGS / "cluster.emulated", 4)
    assert [host.name for host in emulated] == ["h0", "h1", "h2", "h3"]
