"""Tapes of virtual ranks: calls of a program, played on other clocks."""

import dataclasses
import json
import math

import pytest

from common.models.registry import profile_of
from common.virtual.costs.engines import costs_of
from common.virtual.costs.networks import platform_of
from common.virtual.costs.parts import Shape
from common.virtual.setting import Setting, shifted
from common.virtual.training import run
from common.virtual.training.moment import Moment
from common.virtual.training.tape import program_of
from dear.errors import UserError
from dear.training.algorithm import algorithm_options

TAPED = ("ddp", "fsdp", "wfbp", "allreduce")


def setting(name, network="10gbe", engine="nccl", **options):
    def of_shape(hosts, ranks_per_host):
        shape = Shape(hosts=hosts, ranks_per_host=ranks_per_host)
        return costs_of(engine, platform_of(network, "pcie4"), shape)

    return Setting(
        profile=profile_of("mnist_cnn@rtx2080ti-modelled", 32),
        algorithm=name,
        options=algorithm_options(name, options),
        shape=Shape(hosts=4, ranks_per_host=2),
        costs=of_shape,
        engine=engine,
    )


@pytest.fixture(autouse=True)
def no_tapes():
    run.TAPES.clear()


def facts(step):
    transfers = [
        (each.name, each.nbytes, each.enqueued_s, each.finished_s) for each in step.transfers
    ]
    return dataclasses.replace(step, transfers=()), transfers


@pytest.mark.parametrize("name", [*TAPED, "dear", "mgwfbp", "bytescheduler", "hierarchical"])
def test_a_tape_gives_the_bits_of_a_run(name, monkeypatch):
    points = [setting(name), setting(name, "100gbib"), setting(name, "1gbe")]
    points += [shifted(points[0], costs=sign / 10, compute=sign / 50) for sign in (-1, 1)]
    runs = []
    for point in points:
        run.TAPES.clear()
        runs.append(facts(run.predicted(point)))
    trained = []
    plain = run._Training.step
    monkeypatch.setattr(run._Training, "step", lambda it: trained.append(it) or plain(it))
    run.TAPES.clear()
    assert [facts(run.predicted(point)) for point in points] == runs
    assert len(set(map(id, trained))) == (1 if name in TAPED else len(points))


def test_settings_in_which_a_program_differs_share_no_tape():
    point = setting("ddp")
    others = [
        dataclasses.replace(point, shape=Shape(hosts=8)),
        dataclasses.replace(point, momentum=0.0),
        dataclasses.replace(point, optimizer="adamw"),
        dataclasses.replace(point, profile=profile_of("mobilenet_v2@rtx2080ti-modelled", 64)),
        setting("ddp", engine="comm_core"),
        setting("ddp", bucket_cap_mb=1.0),
        setting("fsdp"),
    ]
    assert len({program_of(each) for each in [point, *others]}) == 1 + len(others)
    assert program_of(shifted(point, costs=0.1, compute=0.1)) == program_of(point)


def test_a_tape_that_is_too_short_is_made_again():
    point = setting("wfbp")
    step = facts(run.predicted(point))
    program = program_of(point)
    tape = run.TAPES.of(program)
    run.TAPES.keep(program, tape[:5])
    assert facts(run.predicted(point)) == step
    assert run.TAPES.of(program) == tape


def test_errors_are_those_of_a_run():
    point = setting("ddp")
    run.predicted(point)
    lacking = dataclasses.replace(point, costs=lambda hosts, ranks_per_host: {})
    for _ in range(2):
        with pytest.raises(UserError, match="engine nccl has no cost of"):
            run.predicted(lacking)


USES = {
    "compared": lambda moment: moment > 1,
    "a condition": lambda moment: 1 if moment else 2,
    "a number": float,
    "text": lambda moment: f"{moment:.1f}",
    "a key": lambda moment: {moment: 1},
    "the largest": lambda moment: max(moment, 3.0),
    "a sum in C": lambda moment: math.fsum([moment]),
    "a method": lambda moment: moment.is_integer(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_moments_notice_that_a_program_acts_on_them(use):
    looks = []
    moment = 2.0 * (Moment(1.5, lambda: looks.append(1)) - 0.25) / 2 + 1
    assert isinstance(moment, Moment) and not looks
    use(moment)
    assert looks and float(moment) == 2.25


def test_moments_do_not_leave_the_process_unnoticed():
    with pytest.raises(TypeError):
        json.dumps(Moment(1.0, lambda: None))
