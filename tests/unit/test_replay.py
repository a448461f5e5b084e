"""Layer profiles and their replay: files, the modelled ones, recording, order and times."""

from __future__ import annotations

import json
import re
import shutil
import time

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from common.harness.verbs import validate
from common.harness.verbs.list import listing
from common.models import profile as profiles
from common.models import registry
from common.models.replay import pace
from common.models.replay.gradients import SEEN, fingerprint
from common.models.replay.plan import Body, Work, plan
from common.models.workload import Workload
from common.paths import ROOT
from common.profiling import compared, layers, modelled, published, recorder
from common.profiling.modelled import Device, Roofline
from common.profiling.recorder import Stretches
from common.results.committed.pages import with_block
from dear.errors import UserError
from dear.training.hooks import Hooks
from tests.contract.pairs import one_in
from tests.system import made as made_up

PROFILES = [(name, size) for name, sizes in profiles.batch_sizes().items() for size in sizes]


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


class Checkpointed(nn.Module):
    def __init__(self, again: bool):
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(2))
        self.again = again

    def forward(self, x):
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False) if self.again else part(x)
        return x


def test_what_is_recomputed_belongs_to_the_backward_pass():
    steps = []
    for again in (False, True):
        torch.manual_seed(1)
        inputs = (torch.randn(8, 64),)
        model = Checkpointed(again)
        steps.append(
            split_by_operations(
                Workload(model=model, inputs=inputs, targets=(), criterion=torch.mean)
            )[0]
        )
    plain, repeated = steps
    assert repeated.modules == plain.modules
    assert repeated.forward_s == pytest.approx(plain.forward_s)
    assert sum(repeated.backward_s) >= sum(plain.backward_s) + 0.9 * sum(plain.forward_s)
    assert min(repeated.backward_s) >= 0


def test_a_file_holds_what_was_saved(tmp_path):
    built = made_up.profile()
    path = tmp_path / "dev" / "tiny-bs2.json"
    built.save(path)
    assert profiles.load(path) == built
    values = json.loads(path.read_text())
    lines = path.read_text().splitlines()
    assert [json.loads(line.rstrip(",")) for line in lines[-len(built.modules) - 2 : -2]] == (
        values["modules"]
    )


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 1}', '{"schema": 99}', "[1]"])
def test_a_file_that_is_no_profile_is_a_user_error(tmp_path, text):
    path = tmp_path / "x-bs1.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"profile .*x-bs1\.json: "):
        profiles.load(path)


def test_replayed_models_are_listed_with_their_units_and_first_batch():
    listed = listing()["models"]
    assert {"resnet50@rtx2080ti-modelled", "bert@rtx2080ti-modelled"} <= set(listed)
    bert = registry.model_entry("bert@rtx2080ti-modelled")
    assert (bert.batch_size, bert.sample_unit, bert.sentence_len) == (8, "sen", 64)
    assert registry.model_entry("resnet50@rtx2080ti-modelled").batch_size == 64
    assert registry.is_replay("bert@rtx2080ti-modelled")
    assert not registry.is_replay("bert")


BERT, RESNET = "bert@rtx2080ti-modelled", "resnet50@rtx2080ti-modelled"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: registry.profile_of(BERT, 16),
            f"batch_size: {BERT} has no profile for 16; allowed: 8, 32",
        ),
        (
            lambda: registry.model_entry("resnet50@rtx2080ti"),
            "unknown device of a recorded model 'rtx2080ti'; did you mean 'rtx2080ti-modelled'",
        ),
        (
            lambda: registry.model_entry("resnet5@rtx2080ti-modelled"),
            "unknown model recorded on rtx2080ti-modelled 'resnet5'; did you mean 'resnet50'",
        ),
        (lambda: registry.profile_of("resnet50", 64), "model resnet50 computes, but a"),
        *(
            (call, f"sentence_len: {BERT} has no profile for 128; allowed: 64")
            for call in (
                lambda: registry.sentence_len(BERT, 128),
                lambda: registry.profile_of(BERT, 8, 128),
            )
        ),
        (
            lambda: registry.sentence_len(RESNET, 6),
            f"sentence_len: model {RESNET} has no sentences",
        ),
    ],
)
def test_bad_requests_name_what_there_is(call, message):
    with pytest.raises(UserError) as caught:
        call()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("case", modelled.CASES.values(), ids=lambda case: case.name)
def test_modelled_profiles_are_committed_and_follow_their_rule(case):
    built = registry.profile_of(f"{case.model}@{modelled.FOLDER_NAME}", case.batch_size)
    assert built.kind == "modelled"
    passes = re.findall(r"(forward|backward) ([\d.]+) ms times ([\d.]+)", built.rule)
    counted = {name: (float(ms), float(factor)) for name, ms, factor in passes}
    factors = modelled.EFFICIENCIES[case.like or case.name]
    for name, seconds in (("forward", built.forward_s), ("backward", built.backward_s)):
        ms, factor = counted[name]
        assert factor == getattr(factors, name)
        assert seconds * 1e3 == pytest.approx(ms * factor, rel=1e-3, abs=2e-3)
    if case.like:
        assert f"the factors of {case.like}" in built.rule
    if case.total == case.batch_size:
        total = published.find(case.model, "rtx2080ti", case.total)
        assert built.step_s * 1e3 == pytest.approx(total.training_ms, rel=1e-3)


@pytest.mark.parametrize("name", one_in(2, list(modelled.EFFICIENCIES)))
def test_efficiencies_are_what_published_times_say(name):
    text = modelled.efficiency(modelled.CASES[name])
    for part in ("forward", "backward"):
        kept = getattr(modelled.EFFICIENCIES[name], part)
        assert getattr(text, part) == pytest.approx(kept, abs=6e-5)


def test_the_page_has_the_profiles_beside_what_is_published():
    text = compared.PAGE.read_text()
    assert with_block(text, "profiles: times", compared.times()) == text, (
        "make it again: python -m common.profiling.compared"
    )


def test_the_page_has_what_is_counted_for_other_gpus(monkeypatch):
    # Counting the larger models would take long.
    some = ("resnet50", "mobilenet_v2")
    rows = tuple(row for row in published.rows() if row.model in some)
    monkeypatch.setattr(published, "rows", lambda: rows)
    for line in compared.elsewhere().splitlines():
        assert line in compared.PAGE.read_text().splitlines()


def test_the_page_has_what_was_measured_beside_what_is_modelled(monkeypatch, tmp_path):
    # Counting all models would take long.
    (tmp_path / "h200-tf32").mkdir()
    for kept in ("resnet50", "vgg16"):
        file = f"h200-tf32/{kept}-bs64.json"
        shutil.copy(profiles.FOLDER / file, tmp_path / file)
    monkeypatch.setattr(profiles, "FOLDER", tmp_path)
    lines = compared.measured().splitlines()
    assert len(lines) == 4
    for line in lines:
        assert line in compared.PAGE.read_text().splitlines()


@pytest.mark.parametrize(("name", "batch_size"), PROFILES)
def test_committed_profiles_are_consistent(name, batch_size):
    built = registry.profile_of(name, batch_size)
    assert (f"{built.model}@{built.device}", built.batch_size) == (name, batch_size)
    chain = built.gradients()
    assert [param.position for param in chain] == list(range(len(chain)))
    times = [param.ready_s for param in chain]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= built.backward_s * 1.001
    assert built.forward_s < built.backward_s
    assert (built.jitter is None) == (built.kind == "modelled")


def test_the_committed_profile_is_what_the_rule_makes(tmp_path):
    built = modelled.model_profile(modelled.CASES["mnist_cnn-bs32"])
    path = tmp_path / "again.json"
    built.save(path)
    again, committed = profiles.load(path), registry.profile_of(f"{built.model}@{built.device}", 32)
    assert again.parameters == committed.parameters
    assert again.modules == committed.modules
    assert (again.rule, again.flops) == (committed.rule, committed.flops)
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


def test_recording_a_real_model_on_the_cpu(tmp_path, capsys):
    path = tmp_path / "mnist.json"
    arguments = ["--model", "mnist_cnn", "--batch", "4", "--device", "cpu", "--name", "here"]
    assert layers.main([*arguments, "--warmup", "1", "--steps", "3", "--out", str(path)]) == 0
    built = profiles.load(path)
    assert (built.kind, built.batch_size, built.device) == ("measured", 4, "here")
    assert built.device_name
    assert 1e8 < built.memory_bytes_per_s < 1e13
    assert built.jitter.steps == 3 and built.jitter.relative_std > 0
    times = {call.module: (call.forward_s, call.backward_s) for call in built.calls}
    assert all(min(times[name]) > 0 for name in ("features.0", "features.2", "classifier.0"))
    real = registry.build("mnist_cnn", 4, None, torch.Generator()).model
    assert [(p.name, p.shape) for p in built.parameters] == [
        (name, tuple(param.shape)) for name, param in real.named_parameters()
    ]
    assert {param.module for param in built.gradients()[:2]} == {"classifier.3"}
    assert {param.module for param in built.gradients()[-2:]} == {"features.0"}
    assert built.gradients()[-1].ready_s <= built.backward_s * 1.001
    assert "forward" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnt50"], "unknown model 'resnt50'; did you mean 'resnet50'"),
        (["--model", "mnist_cnn", "--batch", "0"], "--batch must be at least 1, got 0"),
        (["--model", "mnist_cnn", "--dtype", "int8"], "unknown dtype 'int8'"),
        (["--model", "mnist_cnn", "--device", "cpu", "--tf32"], "--tf32: is for float32 on a GPU"),
        (["--model", "mnist_cnn@rtx2080ti-modelled"], "a replayed model has no compute"),
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


class Diary(pace.Pace):
    """Takes no time, and notes what it is asked for."""

    def __init__(self):
        super().__init__(1.0, None)
        self.notes = []

    def begin(self, seconds, lead_s=0.0):
        if seconds:
            self.notes.append(round(seconds * 1e3, 4))

    def finish(self):
        return


@pytest.fixture
def diary():
    built = Diary()
    pace.set_pace(built)
    yield built
    pace.set_pace(pace.Pace(1.0, None))


def works(body):
    for part in body.parts:
        if isinstance(part, Body):
            yield from works(part)
        else:
            yield part


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2", "bert_base"])
def test_parameters_and_lists_of_layers_are_those_of_the_real_model(name):
    """Algorithms take lists and sequences of layers apart, as `fsdp` does."""
    sentence_len = registry.sentence_len(name, None)
    with torch.device("meta"):
        real = registry.build(name, 2, sentence_len, torch.Generator()).model
        built = registry.build(f"{name}@rtx2080ti-modelled", 64, sentence_len, torch.Generator())
    theirs = [(key, tuple(p.shape)) for key, p in real.named_parameters()]
    assert [(key, tuple(p.shape)) for key, p in built.model.named_parameters()] == theirs
    buffers = {key for key, _ in real.named_buffers()}
    assert set(built.model.state_dict()) == set(real.state_dict()) - buffers
    kinds = torch.nn.ModuleList, torch.nn.Sequential

    def lists(model):
        """Layers without a parameter are left out."""
        named = model.named_modules()
        return {key for key, item in named if isinstance(item, kinds) and [*item.parameters()]}

    assert lists(built.model) == lists(real)


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
    assert outline(plan(made_up.profile())) == wanted


def test_gradients_come_in_the_recorded_order_at_the_recorded_times(diary):
    workload = made_up.workload(0)
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
    workload = made_up.workload(0)
    names = {module: name for name, module in workload.model.named_modules()}
    with Hooks() as hooks:
        hooks.before_forward(names, lambda module: diary.notes.append(names[module]))
        workload.loss()
    # `relu` has no parameters: its time goes to its neighbours.
    assert diary.notes == ["", "stem", 1.3, "block", 0.1, "block.inner", 0.5, 0.2, "head", 0.4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_differ_by_rank_and_step_and_are_finite(diary, dtype):
    tasks = [made_up.workload(rank).to(torch.device("cpu"), dtype) for rank in (0, 1)]
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


def _gradients(task):
    torch.manual_seed(9)
    task.model.zero_grad()
    task.loss().backward()
    return {name: p.grad.clone() for name, p in task.model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_depend_on_the_parameters_that_the_forward_pass_has_read(diary, dtype):
    task = made_up.workload(0).to(torch.device("cpu"), dtype)
    before, again = _gradients(task), _gradients(task)
    assert all(torch.equal(before[name], again[name]) for name in before)
    with torch.no_grad():
        for param in task.model.parameters():
            param += 0.002  # about a step of the shipped experiments
    after = _gradients(task)
    for name, gradient in before.items():
        off = ((after[name] - gradient).norm() / gradient.norm()).item()
        assert off > (1e-3 if gradient.numel() < 1 << 18 else 2e-4), name
        assert off < 1, name
    # What changes once the layer has run is too late.
    torch.manual_seed(9)
    loss = task.loss()
    with torch.no_grad():
        for param in task.model.parameters():
            param -= 0.1
    task.model.zero_grad()
    loss.backward()
    late = {name: p.grad for name, p in task.model.named_parameters()}
    assert all(torch.equal(late[name], after[name]) for name in after)


def test_no_value_of_a_parameter_counts_for_much_more_than_another():
    zero = torch.zeros(SEEN)
    assert fingerprint(zero) == 1
    changes = []
    for index in range(SEEN):
        moved = zero.clone()
        moved[index] = 0.001
        changes.append(fingerprint(moved) - 1)
    assert all(1e-4 < abs(change) < 0.01 for change in changes)
    together = fingerprint(zero + 0.001) - 1
    assert together == pytest.approx(sum(changes), abs=1e-6) and abs(together) > 1e-3


def test_a_replay_refuses_a_gpu():
    with pytest.raises(UserError, match="replayed models wait on the CPU"):
        made_up.workload(0).model.to(torch.device("cuda"), torch.float32)


def test_a_step_takes_the_profiles_time_at_least():
    task = made_up.workload(0)
    pace.set_pace(pace.Pace(10.0, None))
    try:
        began = time.perf_counter()
        task.loss().backward()
        wall_s = time.perf_counter() - began
    finally:
        pace.set_pace(pace.Pace(1.0, None))
    assert wall_s > 0.98 * 10 * made_up.profile().step_s


def test_a_record_of_another_machine_brings_its_modelled_profile(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(registry, "_brought", {})  # another test may have brought it from elsewhere
    lines = (ROOT / "docs" / "records" / "grid-1gbe" / "records.jsonl").read_text().splitlines()
    trial = next(
        trial
        for trial in (json.loads(line)["trial"] for line in lines)
        if trial["model"] == "resnet18@rtx2080ti-modelled"
    )
    validate._load(trial)
    assert list(tmp_path.rglob("resnet18-bs64-*.json"))
    assert registry.profile_of(trial["model"], 64).gradients()
