"""What an algorithm says passes between ranks: worked by hand, and as its program counts it."""

from __future__ import annotations

import pytest
import torch

import dear
from dear.comm import runtime
from dear.cost.bounds import exchange_wire_limit_s
from dear.errors import UserError
from dear.topology.traffic import GroupMean, Load, Message, Traffic
from dear.training.algorithm import algorithm_class, algorithm_names, algorithm_options


def traffic(name: str, world_size: int, local_size: int = 1, **options) -> Traffic:
    return algorithm_class(name).traffic(algorithm_options(name, options), world_size, local_size)


def swapped(*pairs: tuple[int, int]) -> set[Message]:
    both = [*pairs, *((b, a) for a, b in pairs)]
    return {Message(source=source, target=target) for source, target in both}


def test_one_peer_exp_is_one_message_each_way_per_step():
    found = traffic("decentralized", 4, topology="one-peer-exp").steps
    assert [set(step) for step in found] == [swapped((0, 1), (2, 3)), swapped((0, 2), (1, 3))]
    loads = traffic("decentralized", 8, topology="one-peer-exp").loads()
    assert loads == [[Load(sent=1, received=1)] * 3] * 8


def test_of_two_nodes_of_two_each_other_step_is_within_the_node():
    found = traffic("decentralized", 4, 2, topology="alternating-exp-ring")
    inside, between = found.steps
    assert set(inside) == swapped((0, 1), (2, 3))
    assert between == (GroupMean(ranks=(0, 1, 2, 3)),)
    assert found.loads(2) == [[Load(), Load(reduced=1)]] * 2
    # With four nodes the pairs take turns: 2 (2-1)/2 of the buffer each way, every other step.
    four = traffic("decentralized", 8, topology="alternating-exp-ring", ranks_per_node=2).loads(2)
    assert [[load.sent for load in host] for host in four] == [
        [0, 1, 0, 1],
        [0, 1, 1, 0],
        [1, 0, 0, 1],
        [1, 0, 1, 0],
    ]


def test_b9_b12_dynamic_schedules_repeat_after_their_period():
    for world, local, name in ((8, 1, "one-peer-exp"), (6, 3, "inner-outer-ring")):
        found = traffic("neighbor", world, local, dynamic=name)
        assert len(found.steps) == 3
        assert all(len(step) == world for step in found.steps)
    # Rank 0 sends to 3, 2, 1 and hears 3, 2, 1 (B-12): between hosts in the first step only.
    assert [load.sent for load in found.loads(3)[0]] == [1, 1, 1]
    assert {(m.source, m.target) for m in found.steps[0]} >= {(0, 3), (3, 0)}
    exp2 = traffic("neighbor", 16, 4, dynamic="inner-outer-exp2")
    assert len(exp2.steps) == 4 and all(len(step) == 16 for step in exp2.steps)


def test_hierarchical_averaging_sends_each_place_its_share():
    found = traffic("neighbor", 4, 2, hierarchical=True, topology="ring")
    inside = {GroupMean(ranks=(0, 1)), GroupMean(ranks=(2, 3))}
    half = {Message(source=m.source, target=m.target, share=0.5) for m in swapped((0, 2), (1, 3))}
    assert set(found.steps[0]) == inside | half
    assert found.loads(2) == [[Load(sent=1, received=1)]] * 2
    # One machine: a mean of all, and no link carries any of it.
    alone = traffic("neighbor", 2, 2, hierarchical=True).loads(2)
    assert alone == [[Load(reduced=1)]] and exchange_wire_limit_s(1, alone, 1) == 0


COUNTED = [
    ("decentralized", {"topology": "one-peer-exp"}),
    ("decentralized", {"topology": "ring"}),
    ("decentralized", {"topology": "complete"}),
    ("decentralized", {"topology": "alternating-exp-ring", "ranks_per_node": 1}),
    ("neighbor", {"topology": "exp2"}),
    ("neighbor", {"topology": "star", "combine": "atc"}),
    ("neighbor", {"dynamic": "one-peer-exp", "every": 2}),
    ("gradient-tracking", {"topology": "ring"}),
    ("exact-diffusion", {"topology": "ring"}),
    ("push-diging", {"topology": "ring-left"}),
    ("win-put", {"topology": "ring", "barrier": True}),
    ("push-sum", {"topology": "exp2", "barrier": True}),
    ("asyncddp", {"topology": "ring", "max_staleness": 0}),
]


def _sent(name: str, options: dict, steps: int) -> float:
    """Bytes that a rank hands over per step, in units of all parameters."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 30))
    optimizer = dear.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model, algorithm=name, **options
    )
    nbytes = sum(param.nbytes for param in model.parameters())

    def train(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(2, 30)).sum().backward()
            optimizer.step()

    train(2)
    optimizer.synchronize()
    communicator = runtime.communicator()
    before = communicator.bytes_sent
    train(steps)
    optimizer.synchronize()
    sent = (communicator.bytes_sent - before) / steps / nbytes
    optimizer.close()
    return sent


@pytest.mark.parametrize(("name", "options"), COUNTED)
def test_programs_send_what_their_algorithms_say(world, name, options):
    stated = traffic(name, 4, **options)
    period = len(stated.steps)
    counted = world(4).run(_sent, name, options, 2 * period)
    for rank, (host, found) in enumerate(zip(stated.loads(), counted, strict=True)):
        wanted = sum(load.sent + load.reduced for load in host) / period
        # Push-sum's weight, and the number of steps that a put carries, come on top.
        assert found == pytest.approx(wanted, rel=0.01), rank


def test_impossible_worlds_are_refused():
    with pytest.raises(UserError, match="even number of ranks"):
        traffic("decentralized", 3, topology="ring")
    with pytest.raises(UserError, match="ranks_per_host"):
        traffic("neighbor", 2).loads(0)
    with pytest.raises(UserError, match="count"):
        traffic("neighbor", 2).every(0)


def test_every_algorithm_says_how_short_its_steps_can_be():
    for name in algorithm_names():
        found, options = algorithm_class(name), algorithm_options(name, {})
        assert found.bound_of(options) is not None, name
        alike = found.capabilities.consistency in ("synchronous", "delayed")
        assert (found.traffic(options, 4, 1) is None) == alike, name
