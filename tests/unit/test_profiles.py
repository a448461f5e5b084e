"""Layer profiles: files, the modelled ones, and recording on this machine."""

from __future__ import annotations

import json
import re
import time

import pytest
import torch
from torch import nn
from torch.nn import functional

from common.harness import commands
from common.models import profile as profiles
from common.models import registry
from common.models.workload import Workload
from common.profiling import layers, modelled, recorder
from common.profiling.modelled import Device, Roofline
from common.profiling.recorder import Stretches
from dear.errors import UserError
from tests.system import replay_bodies

ALL = [(name, size) for name, sizes in profiles.batch_sizes().items() for size in sizes]


class Small(nn.Module):
    """Work outside modules, a module that runs twice, and a shared weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.act = nn.ReLU(inplace=True)
        self.last = nn.Linear(64, 64)
        self.last.weight = self.first.weight
        self.idle = nn.Linear(3, 3)

    def forward(self, x):
        x = self.act(self.first(x))
        x = functional.softmax(x, dim=1)
        return self.act(self.last(x))


@pytest.fixture
def small():
    torch.manual_seed(1)
    inputs = (torch.randn(8, 64),)
    return Workload(model=Small(), inputs=inputs, targets=(), criterion=torch.mean)


def split_by_operations(workload):
    clock = Roofline(Device(name="test", flops=1.0, bandwidth=1e300))
    stretches = Stretches(workload.model, clock)
    with clock:
        step = recorder.hooked_step(workload, stretches)
    stretches.remove()
    return step, clock.mark()


def test_a_file_holds_what_was_saved(tmp_path):
    made = replay_bodies.profile()
    path = tmp_path / "dev" / "tiny-bs2.json"
    made.save(path)
    assert profiles.load(path) == made
    values = json.loads(path.read_text())
    lines = path.read_text().splitlines()
    assert [json.loads(line.rstrip(",")) for line in lines[-len(made.modules) - 2 : -2]] == (
        values["modules"]
    )


def test_totals_are_sums_of_the_calls():
    made = replay_bodies.profile()
    assert made.forward_s == pytest.approx(2.5e-3)
    assert made.backward_s == pytest.approx(3.2e-3)
    assert made.step_s == pytest.approx(5.7e-3)
    assert made.parameter_bytes == 4 * (3 + 300_000 + 600 + 7 + 81 + 9 + 600)
    assert made.gradients()[0].name == "head.bias"


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 1}', '{"schema": 99}', "[1]"])
def test_a_file_that_is_no_profile_is_a_user_error(tmp_path, text):
    path = tmp_path / "x-bs1.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"profile .*x-bs1\.json: "):
        profiles.load(path)


def test_replayed_models_are_listed_with_their_units_and_first_batch():
    listed = commands.listing()["models"]
    assert {"resnet50@rtx2080ti-modelled", "bert@rtx2080ti-modelled"} <= set(listed)
    bert = registry.model_entry("bert@rtx2080ti-modelled")
    assert (bert.batch_size, bert.sample_unit, bert.sentence_len) == (8, "sen", 64)
    assert registry.model_entry("resnet50@rtx2080ti-modelled").batch_size == 64
    assert registry.is_replay("bert@rtx2080ti-modelled")
    assert not registry.is_replay("bert")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: registry.profile_of("bert@rtx2080ti-modelled", 16),
            "batch_size: no profile of bert@rtx2080ti-modelled for 16; there are some for 8, 32",
        ),
        (
            lambda: registry.model_entry("resnet50@rtx2080ti"),
            "unknown device of a recorded model 'rtx2080ti'; did you mean 'rtx2080ti-modelled'",
        ),
        (
            lambda: registry.model_entry("resnet5@rtx2080ti-modelled"),
            "unknown model recorded on rtx2080ti-modelled 'resnet5'; did you mean 'resnet50'",
        ),
        (lambda: registry.profile_of("resnet50", 64), "model resnet50 is computed, not replayed"),
        (
            lambda: registry.sentence_len("bert@rtx2080ti-modelled", 128),
            "sentence_len: no profile of bert@rtx2080ti-modelled for 128; there are some for 64",
        ),
        (
            lambda: registry.profile_of("bert@rtx2080ti-modelled", 8, 128),
            "sentence_len: no profile of bert@rtx2080ti-modelled for 128",
        ),
        (
            lambda: registry.sentence_len("resnet50@rtx2080ti-modelled", 64),
            "sentence_len: model resnet50@rtx2080ti-modelled has no sentences",
        ),
    ],
)
def test_bad_requests_name_what_there_is(call, message):
    with pytest.raises(UserError) as caught:
        call()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("case", modelled.CASES.values(), ids=lambda case: case.name)
def test_modelled_profiles_are_committed_and_have_the_published_speed(case):
    made = registry.profile_of(f"{case.model}@{modelled.FOLDER_NAME}", case.batch_size)
    assert made.kind == "modelled"
    assert f"{case.published or modelled.CASES[case.like].published:g} samples/s" in made.rule
    if case.published:
        assert made.batch_size / made.step_s == pytest.approx(case.published, rel=1e-3)
    else:
        assert case.like in made.rule


@pytest.mark.parametrize(("name", "batch_size"), ALL)
def test_committed_profiles_are_consistent(name, batch_size):
    made = registry.profile_of(name, batch_size)
    assert (f"{made.model}@{made.device}", made.batch_size) == (name, batch_size)
    chain = made.gradients()
    assert [param.position for param in chain] == list(range(len(chain)))
    times = [param.ready_s for param in chain]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= made.backward_s * 1.001
    assert made.forward_s < made.backward_s


def test_the_committed_profile_is_what_the_rule_makes(tmp_path, monkeypatch):
    # Counting the larger model, whose factor this one borrows, would take long.
    rule = registry.profile_of("resnet50@rtx2080ti-modelled", 64).rule
    counted_ms = float(re.search(r"; ([\d.]+) ms in all", rule)[1])
    monkeypatch.setattr(modelled, "_factor", lambda case: 64 / 253.1 / counted_ms * 1e3)
    made = modelled.model_profile(modelled.CASES["mnist_cnn-bs32"])
    path = tmp_path / "again.json"
    made.save(path)
    again, committed = profiles.load(path), registry.profile_of(f"{made.model}@{made.device}", 32)
    assert again.parameters == committed.parameters
    assert again.modules == committed.modules
    assert again.rule == committed.rule
    for new, old in zip(again.calls, committed.calls, strict=True):
        assert new.module == old.module
        assert new.forward_s == pytest.approx(old.forward_s, rel=1e-3, abs=2e-7)
        assert new.backward_s == pytest.approx(old.backward_s, rel=1e-3, abs=2e-7)


def test_operations_are_attributed_to_the_modules_that_run_them(small):
    step, total = split_by_operations(small)
    product = 2 * 8 * 64 * 64
    by_module = dict.fromkeys(step.modules, 0.0)
    for name, forward, backward in zip(step.modules, step.forward_s, step.backward_s, strict=True):
        by_module[name] += forward + backward
    assert sum(by_module.values()) == pytest.approx(total)
    # `first` has no gradient of its input to compute.
    assert by_module["first"] == pytest.approx(2 * product)
    assert by_module["last"] == pytest.approx(3 * product)
    assert by_module["act"] == by_module[""] == 0


def test_gradients_are_noted_in_the_order_in_which_they_are_complete(small):
    step, _ = split_by_operations(small)
    assert [name for name, _ in step.ready][:1] == ["last.bias"]
    assert sorted(name for name, _ in step.ready) == ["first.bias", "first.weight", "last.bias"]
    fields = recorder.Layers(small.model, [step]).fields()
    assert fields["shared"] == {"last.weight": "first.weight"}
    idle = [param for param in fields["parameters"] if param.name == "idle.weight"]
    assert idle[0].position is None


def test_bytes_count_where_they_take_longer(small):
    clock = Roofline(Device(name="test", flops=1e300, bandwidth=1.0))
    with clock:
        torch.ones(10) + 1
    assert clock.mark() == pytest.approx(40 + 80)


def test_hooks_are_removed(small):
    split_by_operations(small)
    modules = list(small.model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in modules)
    assert not any(param._post_accumulate_grad_hooks for param in small.model.parameters())


def test_wall_time_of_the_stretches_is_that_of_the_step(small):
    stretches = Stretches(small.model, recorder.Clock())
    began = time.perf_counter()
    step = recorder.hooked_step(small, stretches)
    wall_s = time.perf_counter() - began
    total_s = sum(step.forward_s) + sum(step.backward_s)
    assert 0.3 * wall_s < total_s <= wall_s
    assert min(step.forward_s) >= 0
    assert min(step.backward_s) >= 0


def test_recording_a_real_model_on_the_cpu(tmp_path, capsys):
    path = tmp_path / "mnist.json"
    arguments = ["--model", "mnist_cnn", "--batch", "4", "--device", "cpu", "--name", "here"]
    assert layers.main([*arguments, "--warmup", "1", "--steps", "3", "--out", str(path)]) == 0
    made = profiles.load(path)
    assert (made.kind, made.batch_size, made.device) == ("measured", 4, "here")
    assert made.device_name
    times = {call.module: (call.forward_s, call.backward_s) for call in made.calls}
    assert all(min(times[name]) > 0 for name in ("features.0", "features.2", "classifier.0"))
    real = registry.build("mnist_cnn", 4, None, torch.Generator()).model
    assert [(p.name, p.shape) for p in made.parameters] == [
        (name, tuple(param.shape)) for name, param in real.named_parameters()
    ]
    assert {param.module for param in made.gradients()[:2]} == {"classifier.3"}
    assert {param.module for param in made.gradients()[-2:]} == {"features.0"}
    assert made.gradients()[-1].ready_s <= made.backward_s * 1.001
    assert "forward" in capsys.readouterr().out


def test_a_device_has_a_short_name():
    assert layers.folder_name("NVIDIA H200") == "h200"
    assert layers.folder_name("NVIDIA GeForce RTX 2080 Ti") == "rtx-2080-ti"
    assert (
        layers.folder_name("Intel(R) Xeon(R) CPU E5-2680 v4 @ 2.40GHz") == "intel-xeon-e5-2680-v4"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet5"], "unknown model 'resnet5'; did you mean 'resnet50'"),
        (["--model", "mnist_cnn", "--batch", "0"], "--batch must be at least 1, got 0"),
        (["--model", "mnist_cnn", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["--model", "mnist_cnn@rtx2080ti-modelled"], "a replayed model computes nothing"),
        (["--model", "mnist_cnn", "--sentence-len", "8"], "sentence_len: model mnist_cnn has no"),
        (["--model", "mnist_cnn", "--device", "tpu"], "invalid choice: 'tpu'"),
        ([], "required: --model"),
    ],
)
def test_mistakes_are_one_line_and_status_two(capsys, arguments, message):
    assert layers.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
