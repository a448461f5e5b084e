"""Places in a job for the engines of a notebook's cluster (its own test runs real ones)."""

from __future__ import annotations

import pytest

from dear import interactive
from dear.comm.environment import RankFacts, rank_facts
from dear.errors import UserError


class Engine:
    """Stands for an engine on a host: answers what is asked there, keeps what is told."""

    def __init__(self, host: str, joined: bool = False) -> None:
        self.host, self.joined = host, joined
        self.environment: dict[str, str] = {}

    def apply_sync(self, function, *args):
        if function is interactive._place:
            return self.host, self.joined
        if function is interactive._free_port:
            return function()
        assert function is interactive._enter
        self.environment.update(*args)
        return None


class Client(dict):
    """Engines by number."""

    @property
    def ids(self) -> list[int]:
        return sorted(self)


def test_engines_of_one_host_are_ranks_by_their_numbers():
    client = Client({number: Engine("one") for number in (0, 1, 4)})
    assert interactive.assign_ranks(client) == [0, 1, 4]
    for rank, number in enumerate((0, 1, 4)):
        facts = rank_facts(client[number].environment)
        assert facts == RankFacts(
            launcher="torchrun", rank=rank, world_size=3, local_rank=rank, local_world_size=3
        )
        assert client[number].environment["MASTER_ADDR"] == "127.0.0.1"
    assert len({client[n].environment["MASTER_PORT"] for n in client}) == 1


def test_engines_of_several_hosts_are_grouped_by_host():
    client = Client(enumerate(Engine(host) for host in ("one", "two", "one", "two", "three")))
    order = interactive.assign_ranks(client)
    assert order == [0, 2, 1, 3, 4]
    facts = [rank_facts(client[number].environment) for number in order]
    assert [fact.rank for fact in facts] == [0, 1, 2, 3, 4]
    assert [fact.local_rank for fact in facts] == [0, 1, 0, 1, 0]
    assert [fact.local_world_size for fact in facts] == [2, 2, 2, 2, 1]
    assert {client[n].environment["MASTER_ADDR"] for n in client} == {"one"}


@pytest.mark.parametrize(
    ("client", "words"),
    [
        (Client(), "no engines"),
        (Client({0: Engine("one"), 1: Engine("one", joined=True)}), "engine 1 has joined a job"),
    ],
)
def test_what_cannot_be_a_job_is_refused_in_one_line(client, words):
    with pytest.raises(UserError, match=words) as caught:
        interactive.assign_ranks(client)
    assert "\n" not in str(caught.value)
    assert not any(engine.environment for engine in client.values())


def test_an_engine_forgets_the_store_of_another_job(monkeypatch):
    monkeypatch.setenv("DEAR_STORE", "elsewhere")
    monkeypatch.setenv("RANK", "7")
    interactive._enter({"RANK": "1"})
    assert interactive.os.environ["RANK"] == "1"
    assert "DEAR_STORE" not in interactive.os.environ


def test_a_process_that_has_joined_no_job_says_so():
    assert interactive._place()[1] is False
