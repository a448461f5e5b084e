"""Replayed models: the real one's parameters, and a profile's order and times."""

from __future__ import annotations

import copy
import time

import pytest
import torch

from common.models import pace, registry, replay
from common.models import profile as profiles
from common.models.replay import Body, Work, plan
from dear.errors import UserError
from dear.training.hooks import Hooks
from tests.system import replay_bodies

PROFILES = [(name, size) for name, sizes in profiles.batch_sizes().items() for size in sizes]


class Diary(pace.Pace):
    """Takes no time, and notes what it is asked for."""

    def __init__(self):
        super().__init__(1.0, None)
        self.notes = []

    def begin(self, seconds):
        self.notes.append(round(seconds * 1e3, 4))

    def finish(self):
        return

    def hold(self, seconds):
        self.notes.append("hold")


@pytest.fixture
def diary():
    made = Diary()
    pace.set_pace(made)
    yield made
    pace.set_pace(pace.Pace(1.0, None))


def works(body):
    for part in body.parts:
        if isinstance(part, Body):
            yield from works(part)
        else:
            yield part


@pytest.mark.parametrize("name", ["resnet50", "bert_base"])
def test_parameters_are_those_of_the_real_model(name):
    sentence_len = registry.sentence_len(name, None)
    with torch.device("meta"):
        real = registry.build(name, 2, sentence_len, torch.Generator()).model
        made = registry.build(f"{name}@rtx2080ti-modelled", 64, sentence_len, torch.Generator())
    theirs = [(key, tuple(p.shape)) for key, p in real.named_parameters()]
    assert [(key, tuple(p.shape)) for key, p in made.model.named_parameters()] == theirs
    buffers = {key for key, _ in real.named_buffers()}
    assert set(made.model.state_dict()) == set(real.state_dict()) - buffers


@pytest.mark.parametrize(("name", "batch_size"), PROFILES)
def test_a_plan_has_the_profiles_times_and_order(name, batch_size):
    profile = registry.profile_of(name, batch_size)
    parts = list(works(plan(profile)))
    units = [unit for work in parts for unit in work.units]
    forward_s = sum(work.forward_s for work in parts)
    backward_s = sum(unit.backward_s for unit in units)
    assert forward_s == pytest.approx(profile.forward_s, rel=1e-9)
    assert backward_s == pytest.approx(profile.backward_s, rel=1e-3)
    order = [key for unit in reversed(units) for key, _ in unit.params]
    assert order == [param.name for param in profile.gradients()]
    assert max(len(unit.params) for unit in units) <= 2


@pytest.mark.parametrize("name", ["resnet50", "densenet201", "inceptionv4", "mnist_cnn"])
def test_a_gradient_belongs_to_a_call_of_its_own_module(name):
    (batch_size,) = profiles.batch_sizes()[f"{name}@rtx2080ti-modelled"]
    profile = registry.profile_of(f"{name}@rtx2080ti-modelled", batch_size)
    for work in works(plan(profile)):
        for unit in work.units:
            assert {key.rpartition(".")[0] for key, _ in unit.params} <= {work.module}


def test_a_plan_calls_modules_inside_those_that_hold_them():
    def outline(body):
        inside = [p.module if isinstance(p, Work) else outline(p) for p in body.parts]
        return {body.module: inside}

    wanted = {
        "": [
            {"stem": ["stem"]},
            {"block": ["block", {"block.inner": ["block.inner"]}, "block"]},
            {"head": ["head"]},
        ]
    }
    assert outline(plan(replay_bodies.profile())) == wanted


def test_gradients_come_in_the_recorded_order_at_the_recorded_times(diary):
    workload = replay_bodies.workload(0)
    names = {param: name for name, param in workload.model.named_parameters()}
    loss = workload.loss()
    diary.notes.clear()
    with Hooks() as hooks:
        hooks.on_gradient(names, lambda param: diary.notes.append(names[param]))
        loss.backward()
    assert diary.notes == [
        *(0.5, "head.bias"),
        *(0.5, "block.inner.weight", "block.inner.bias"),
        *(0.5, "block.gain"),
        *(0.5, "scale"),
        *(0.5, "stem.bias"),
        *(0.5, "stem.weight"),
        0.2,  # the profile's backward pass goes on after the last gradient
    ]


def test_hooks_run_before_their_layer_takes_its_time(diary):
    workload = replay_bodies.workload(0)
    names = {module: name for name, module in workload.model.named_modules()}
    with Hooks() as hooks:
        hooks.before_forward(names, lambda module: diary.notes.append(names[module]))
        workload.loss()
    # `relu` has no parameters: its time goes to its neighbours.
    wanted = ["", "stem", 1.3, "block", 0.1, "block.inner", 0.5, 0.2, "head", 0.4]
    assert [note for note in diary.notes if note != "hold"] == wanted


def test_a_hook_that_works_long_delays_the_layer(diary):
    def update(module):
        time.sleep(0.01)

    workload = replay_bodies.workload(0)
    with Hooks() as hooks:
        hooks.before_forward([workload.model.block], update)
        workload.loss()
    assert diary.notes[:3] == [1.3, "hold", 0.1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_differ_by_rank_and_step_and_are_finite(diary, dtype):
    tasks = [replay_bodies.workload(rank).to(torch.device("cpu"), dtype) for rank in (0, 1)]
    torch.manual_seed(9)
    seen = []
    for task in (*tasks, tasks[0]):
        task.model.zero_grad()
        loss = task.loss()
        loss.backward()
        assert loss.isfinite()
        assert loss.shape == ()
        gradient = task.model.stem.weight.grad
        assert gradient.dtype == dtype
        assert gradient.isfinite().all()
        assert 0.05 < gradient.float().std() < 0.2
        seen.append(gradient.clone())
    assert not any(torch.equal(a, b) for a, b in zip(seen, seen[1:] + seen[:1], strict=True))


def test_the_same_seed_gives_the_same_gradients_again(diary):
    task = replay_bodies.workload(0)
    seen = []
    for _ in range(2):
        torch.manual_seed(3)
        task.model.zero_grad()
        task.loss().backward()
        seen.append([param.grad.clone() for param in task.model.parameters()])
    assert all(map(torch.equal, *seen))


def test_autograd_scales_accumulates_and_freezes_as_ever(diary):
    task = replay_bodies.workload(0)
    model = task.model
    model.stem.bias.requires_grad_(False)
    torch.manual_seed(3)
    task.loss().backward()
    once = model.head.bias.grad.clone()
    torch.manual_seed(3)
    (task.loss() / 4).backward()
    torch.testing.assert_close(model.head.bias.grad, once * 1.25)
    assert model.stem.bias.grad is None
    with torch.no_grad():
        assert not task.loss().requires_grad


def test_a_copy_trains_its_own_parameters(diary):
    task = replay_bodies.workload(0)
    twin = copy.deepcopy(task.model)
    twin(*task.inputs).backward()
    assert all(param.grad is not None for param in twin.parameters())
    assert all(param.grad is None for param in task.model.parameters())


def test_a_replay_refuses_a_gpu():
    with pytest.raises(UserError, match="replayed models wait on the CPU"):
        replay_bodies.workload(0).model.to(torch.device("cuda"), torch.float32)


def test_a_step_takes_the_profiles_time_at_least():
    task = replay_bodies.workload(0)
    pace.set_pace(pace.Pace(10.0, None))
    try:
        began = time.perf_counter()
        task.loss().backward()
        wall_s = time.perf_counter() - began
    finally:
        pace.set_pace(pace.Pace(1.0, None))
    assert wall_s > 0.98 * 10 * replay_bodies.profile().step_s


def test_building_through_the_registry_replays_the_profile(diary):
    workload = registry.build("mnist_cnn@rtx2080ti-modelled", 32, None, torch.Generator())
    assert isinstance(workload.model, replay.Replay)
    workload.loss().backward()
    wanted = registry.profile_of("mnist_cnn@rtx2080ti-modelled", 32).step_s * 1e3
    assert sum(diary.notes) == pytest.approx(wanted, abs=0.002)
