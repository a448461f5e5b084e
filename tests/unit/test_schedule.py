"""The learning rate of each step, and what of it cannot be."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch

from common.harness.settings import LearnConfig, OptimizerConfig, ScheduleConfig
from common.harness.trial import Briefing
from common.harness.worker.learning import learn
from common.harness.worker.lr_schedule import make_schedule
from common.models.datasets import Parts
from common.models.datasets.tensors import Tensors
from common.models.registry import build
from common.results.records.trust import Check
from dear.errors import UserError
from dear.options import build_options
from tests.system.made import make_trial


def rates(world_size=4, epochs=4, steps_per_epoch=10, **config):
    """Counts of every step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = make_schedule(
        optimizer,
        ScheduleConfig(**config),
        steps_per_epoch=steps_per_epoch,
        epochs=epochs,
        world_size=world_size,
    )
    result = []
    for _ in range(epochs * steps_per_epoch):
        result.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return result


def test_milestones_count_from_the_beginning_also_after_a_warm_up():
    result = rates(kind="multistep", milestones=(2, 3), gamma=0.5)
    assert result == pytest.approx([0.1] * 20 + [0.05] * 10 + [0.025] * 10)
    warmed = rates(kind="multistep", milestones=(2, 3), gamma=0.5, warmup_epochs=1)
    assert warmed[10:] == pytest.approx(result[10:])
    assert warmed[0] == pytest.approx(0.01), "a tenth, where nothing is scaled"


@pytest.mark.parametrize(("scale", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_it_grows_with_the_workers_and_the_warm_up_begins_where_one_worker_would(scale, factor):
    result = rates(scale=scale, warmup_epochs=2)
    start = 0.1 if factor > 1 else 0.01
    assert result[0] == pytest.approx(start)
    assert result[10] == pytest.approx((start + 0.1 * factor) / 2)  # halfway
    assert result[20:] == pytest.approx([0.1 * factor] * 20)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, [0.1] * 30),
        ({"kind": "exponential", "gamma": 0.5}, [0.1 * 0.5 ** (1 + s / 10) for s in range(30)]),
        (
            {"kind": "cosine", "warmup_epochs": 1},
            [0.05 * (1 + math.cos(math.pi * s / 30)) for s in range(30)],
        ),
    ],
)
def test_it_falls_in_each_step_as_its_kind_says(config, wanted):
    assert rates(**config)[10:] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"schedule": {}}, "learn.schedule: needs learn.epochs"),
        ({"epochs": 3, "data": None}, "learn.epochs: needs learn.data"),
        ({"epochs": 0}, "learn.epochs"),
        ({"epochs": 3, "budget_s": 9}, "learn.budget_s and learn.epochs exclude each other"),
        ({"eval_every_epochs": 2}, "learn.eval_every_epochs: needs learn.epochs"),
        ({"epochs": 3, "schedule": {"warmup_epochs": 3}}, "warmup_epochs must be below"),
        ({"epochs": 3, "schedule": {"kind": "multistep"}}, "`milestones` and `kind: multistep`"),
        ({"epochs": 3, "schedule": {"milestones": [1]}}, "`milestones` and `kind: multistep`"),
        (
            {"epochs": 3, "schedule": {"kind": "multistep", "milestones": [2, 1]}},
            "milestones must ascend",
        ),
        (
            {"epochs": 3, "schedule": {"kind": "multistep", "milestones": [1, 3]}},
            "must lie between 0 and learn.epochs=3",
        ),
        (
            {"epochs": 3, "schedule": {"kind": "multistep", "milestones": [0, 2]}},
            "must lie between 0 and learn.epochs=3",
        ),
        (
            {
                "epochs": 9,
                "schedule": {"kind": "multistep", "milestones": [3, 6], "warmup_epochs": 5},
            },
            "milestones must come after warmup_epochs=5",
        ),
        ({"epochs": 3, "schedule": {"kind": "step"}}, "schedule.*kind"),
        ({"epochs": 3, "schedule": {"gamma": 0}}, "learn.schedule.gamma"),
        ({"data": "imagenet"}, "learn.data"),
        ({"loader_workers": -1}, "learn.loader_workers"),
    ],
)
def test_what_cannot_be_is_said(given, text):
    with pytest.raises(UserError, match=text):
        build_options(LearnConfig, {"data": "digits"} | given, "key of learn")


def _losses():
    schedule = ScheduleConfig(kind="multistep", milestones=(1,), gamma=1e-9)
    trial = make_trial(
        "allreduce",
        1,
        optimizer=OptimizerConfig(lr=0.1),
        learn=LearnConfig(data="digits", epochs=3, schedule=schedule),
    )
    workload = build(trial.model, trial.batch_size, None, torch.Generator().manual_seed(1))
    with mock.patch("dear.shutdown"), tempfile.TemporaryDirectory() as folder:
        briefing = Briefing(folder=Path(folder), time_scale=1.0, costs={})
        images = torch.randn(40, 1, 28, 28, generator=torch.Generator().manual_seed(2))
        samples = Tensors(images, torch.arange(40) % 10)
        data = Parts(train=samples, test=samples, classes=10, split="random")
        result = learn(trial, briefing, workload, data, Check(), 0, lambda phase: None)
    return [evaluation.loss for evaluation in result.learning.evaluations]


def test_a_training_follows_its_schedule(world):
    start, first, *rest = world(1).run(_losses)[0]
    assert first != start and rest == pytest.approx([first] * 2, rel=1e-6)
