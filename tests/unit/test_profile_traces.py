"""Layer profiles from traces of torch.profiler: made-up traces with known times, and a real one."""

from __future__ import annotations

import copy
import gzip
import inspect
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from common.models import profile as profiles
from common.models import registry
from common.models.profile import Jitter
from common.models.workload import Workload
from common.profiling import layers, modelled
from common.profiling.traces import kineto
from common.profiling.traces.traced import Traced
from dear.errors import UserError

MAIN, ENGINE = 7, 8
NODE = "autograd::engine::evaluate_function: "
GRADIENT = "torch::autograd::AccumulateGrad"


BATCH = """
def batch(size):
    return torch.ones(size, 3), ()

def loss(output):
    return output.mean()
"""


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(self.first(x).relu())


def workload():
    inputs = (torch.ones(5, 3),)
    return Workload(model=Two(), inputs=inputs, targets=(), criterion=torch.mean)


class Recording:
    """Trace under construction. On a GPU, operations last 0.1 us and launch a kernel."""

    def __init__(self, gpu: bool) -> None:
        self.gpu, self.events, self.now, self.device_now = gpu, [], 1000.0, 1000.0

    def event(self, cat, name, start, end, thread=MAIN, pid=1, **args):
        times = {"ts": round(start, 3), "dur": round(end - start, 3)}
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": thread, "args": args} | times
        )

    def kernel(self, name, us, stream=7, thread=MAIN, **args):
        number = len(self.events)
        at = self.now
        self.event("cuda_runtime", "cudaLaunchKernel", at, at + 0.01, thread, correlation=number)
        start = self.device_now = max(self.device_now, at + 50)
        args |= {"correlation": number, "device": 0}
        self.event("kernel", name, start, start + us, stream, 0, **args)
        self.device_now += us

    def operation(self, name, us, sequence=-1, thread=MAIN, dims=(), inner=None):
        number = {} if sequence is None else {"Sequence number": sequence}
        start, self.now = self.now, self.now + 0.02
        identity = {"External id": len(self.events) // 2}  # may be that of a call, too
        if self.gpu:
            self.kernel("some_kernel", us, thread=thread, **identity)
        self.now = start + (0.1 if self.gpu else us)
        shapes = {"Input Dims": [dims], "Input type": ["float"]}
        if inner:
            self.event("cpu_op", inner, start + 0.01, self.now, thread, **shapes)
        self.event("cpu_op", name, start, self.now, thread, **shapes, **number, **identity)
        self.now += 1

    def module(self, name, body):
        start = self.now
        body()
        self.event("python_function", f"nn.Module: {name}", start - 0.5, self.now - 0.3)
        self.now += 1

    def range(self, name, body):
        start = self.now
        body()
        self.event("user_annotation", name, start - 0.5, self.now)
        self.now += 1

    def backward(self, numbers, scale):
        engine = ENGINE if self.gpu else MAIN
        for name, us, sequence in numbers:
            if isinstance(sequence, tuple):
                self.operation(NODE + GRADIENT, us * scale, None, engine, sequence, GRADIENT)
            else:
                self.operation(NODE + name, us * scale, sequence, engine)

    def step(self, scale: float, first: int) -> None:
        def linear() -> None:
            self.operation("l", 10 * scale, first, dims=(5, 3))
            self.operation("aten::detach", 0, first + 1)  # creates no node

        def root() -> None:
            self.module("Linear_0", linear)
            self.operation("aten::relu", 5 * scale, first + 1)
            self.module("Linear_1", lambda: self.operation("l", 20 * scale, first + 2))

        def update() -> None:
            self.operation("aten::add_", 8.4)

        self.operation("aten::copy_", 100)  # the batch
        self.module("Two_0", root)
        self.operation("aten::mean", 3 * scale, first + 3)
        self.backward(backward_of(first), scale)
        if self.gpu:
            self.kernel("ncclDevKernel_AllReduce", 500, stream=20)
        self.range("Optimizer.step#SGD.step", update)

    def content(self):
        gpus = [{"id": 0, "name": "NVIDIA Test 9"}] if self.gpu else []
        return {"deviceProperties": gpus, "traceEvents": self.events}


def backward_of(first):
    return [
        ("MeanBackward0", 4, first + 3),
        ("AddmmBackward0", 11, first + 2),
        (GRADIENT, 1, (2,)),
        (GRADIENT, 2, (2, 4)),
        ("ReluBackward0", 6, first + 1),
        ("AddmmBackward0", 9, first),
        (GRADIENT, 1, (4,)),
        (GRADIENT, 2, (4, 3)),
    ]


def recording(gpu=False):
    made_up = Recording(gpu)
    made_up.step(100, 90)  # not in the range of a step
    for index, scale in enumerate((1, 1.1, 0.9)):
        made_up.range(f"ProfilerStep#{index}", partial(made_up.step, scale, 10 * index))
    return made_up.content()


def read(content, path: Path):
    path.write_text(json.dumps(content))
    counted = modelled.counted("two", workload)
    return Traced(kineto.load(path), counted, [(5, 3)], "two")


def without(*kinds):
    def change(content):
        events = content["traceEvents"]
        content["traceEvents"] = [
            e for e in events if e["cat"] not in kinds and not e["name"].startswith(kinds)
        ]

    return change


def older(content):
    """Counts calls in `External id`, as torch 1.12 did."""
    for event in content["traceEvents"]:
        if event["cat"] == "kernel":
            event["args"]["External id"] = event["args"]["correlation"]


@pytest.mark.parametrize(
    ("gpu", "change"),
    [(False, None), (True, None), (True, older), (True, without("cuda_runtime"))],
    ids=["cpu", "gpu", "by_call", "by_operation"],
)
def test_known_times_come_back_exactly(tmp_path, gpu, change):
    content = recording(gpu)
    if change:
        change(content)
    traced = read(content, tmp_path / "t.json")
    fields = traced.layers().fields()
    times = [
        (call.module, *(round(s * 1e6, 3) for s in (call.forward_s, call.backward_s)))
        for call in fields["calls"]
    ]
    assert times == [
        ("", 0, 0), ("first", 10, 12), ("", 5, 6), ("second", 20, 14), ("", 3, 4),
    ][-len(times) :]  # fmt: skip
    ready = {param.name: round(param.ready_s * 1e6, 3) for param in fields["parameters"]}
    assert ready == {
        "second.bias": 16, "second.weight": 18, "first.bias": 34, "first.weight": 36,
    }  # fmt: skip
    assert [param.position for param in fields["parameters"]] == [3, 2, 1, 0]
    assert fields["jitter"] == Jitter(relative_std=0.1, steps=3)
    assert traced.dtype == "float32"
    assert traced.update_s == pytest.approx(8.4e-6)
    # SGD without momentum reads or writes three values of four bytes for each of 26 parameters.
    assert traced.updated_bytes_per_s() == pytest.approx(3 * 4 * 26 / 8.4e-6)


def test_an_update_with_momentum_has_five_values_per_parameter(tmp_path):
    content = recording()
    renamed("aten::add_", "aten::mul_")(content)
    traced = read(content, tmp_path / "t.json")
    assert traced.updated_bytes_per_s() == pytest.approx(5 * 4 * 26 / 8.4e-6)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Writes a trace of a model in a file, and runs the command; its profile is in `p.json`."""
    monkeypatch.setattr(registry, "_brought", {})

    def run(content, *options):
        trace, file = tmp_path / "t.json.gz", tmp_path / "two.py"
        trace.write_bytes(gzip.compress(json.dumps(content).encode()))
        file.write_text("import torch\nfrom torch import nn\n" + inspect.getsource(Two) + BATCH)
        arguments = ["--from-trace", str(trace), "--model", f"file:{file}", "--batch", "5"]
        return layers.main([*arguments, "-o", str(tmp_path / "p.json"), *options])

    return run


def test_the_command_reads_the_trace_of_a_model_in_a_file(command, tmp_path, capsys):
    assert command(recording(gpu=True)) == 0
    assert "jitter 10.0% over 3 steps" in capsys.readouterr().out
    built = profiles.load(tmp_path / "p.json")
    assert (built.model, built.device, built.device_name) == ("two.py", "test-9", "NVIDIA Test 9")
    assert (built.forward_s, built.backward_s) == pytest.approx((38e-6, 36e-6))
    assert built.memory_bytes_per_s == round(3 * 4 * 26 / 8.4e-6)
    assert built.flops and built.jitter == Jitter(relative_std=0.1, steps=3)


def test_the_memory_bandwidth_without_an_update_is_that_of_a_known_gpu(command, tmp_path, capsys):
    content = recording(gpu=True)
    without("user_annotation")(content)
    assert command(content) == 2
    error = capsys.readouterr().err
    assert "bandwidth of NVIDIA Test 9 is not known; give --memory-gb-per-s" in error
    assert command(content, "--memory-gb-per-s", "5") == 0
    assert profiles.load(tmp_path / "p.json").memory_bytes_per_s == 5e9
    content["deviceProperties"][0]["name"] = "Tesla V100-SXM2-16GB"
    profiles.load.cache_clear()
    assert command(content) == 0
    assert profiles.load(tmp_path / "p.json").memory_bytes_per_s == 900e9


def test_kernels_of_two_gpus_are_refused(tmp_path):
    content = recording(gpu=True)
    next(e for e in content["traceEvents"] if e["cat"] == "kernel")["args"]["device"] = 1
    with pytest.raises(UserError, match="kernels of 2 GPUs; give one rank's trace"):
        read(content, tmp_path / "t.json")


def test_kernels_that_overlap_count_once(tmp_path):
    content = recording(gpu=True)
    kernel = next(e for e in content["traceEvents"] if e["cat"] == "kernel" and e["dur"] == 20)
    content["traceEvents"].append(kernel | {"tid": 9, "ts": kernel["ts"] + 5, "dur": 15})
    traced = read(content, tmp_path / "t.json")
    assert sum(traced.steps[0].forward_s) == pytest.approx(38e-6)


def test_ranges_with_the_names_of_modules_do_as_well(tmp_path):
    content = recording()
    for event in content["traceEvents"]:
        names = {"nn.Module: Linear_0": "first", "nn.Module: Linear_1": "second"}
        if event["name"] in names:
            event |= {"cat": "user_annotation", "name": names[event["name"]]}
    content["traceEvents"] = [e for e in content["traceEvents"] if e["cat"] != "python_function"]
    traced = read(content, tmp_path / "t.json")
    assert traced.steps[0].modules == ["", "first", "", "second", ""]
    assert traced.steps[0].forward_s == pytest.approx([0, 10e-6, 5e-6, 20e-6, 3e-6])
    assert traced.steps[0].backward_s == pytest.approx([0, 12e-6, 6e-6, 14e-6, 4e-6])


def renamed(before, after):
    def change(content):
        for event in content["traceEvents"]:
            event["name"] = event["name"].replace(before, after)

    return change


def argument(name, key, value):
    def change(content):
        for event in content["traceEvents"]:
            if event["name"] == name:
                event["args"][key] = value

    return change


def mixed(content):
    content["traceEvents"] += [e | {"pid": 2} for e in content["traceEvents"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("python_function"), "has no information on modules; record it with"),
        (without(NODE), "has no backward pass"),
        (without("cpu_op"), "has no operation of torch"),
        (argument(GRADIENT, "Input Dims", []), "has no shapes; record it with"),
        (argument("l", "Input Dims", [[6, 3]]), "no operation has an input of shape (5, 3), "),
        (renamed(NODE + GRADIENT, "none"), "has 0 gradients, where two has 4; the first without "),
        (mixed, "mixes 2 processes; give the trace of one rank"),
        (renamed("Two", "Three"), "never calls Two, the class of model two; the outermost "),
        (renamed("Linear_1", "Conv2d_0"), "is in Conv2d, where two has Linear (second)"),
        (argument(GRADIENT, "Input Dims", [[7]]), "has the shape (7,), where two has (2,)"),
        (argument(NODE + "ReluBackward0", "Sequence number", 0), "several forward passes for "),
    ],
)
def test_a_trace_that_gives_no_profile_is_one_line(tmp_path, change, message):
    content = copy.deepcopy(recording())
    change(content)
    with pytest.raises(UserError) as caught:
        read(content, tmp_path / "t.json")
    assert str(caught.value).startswith(f"trace {tmp_path / 't.json'}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gzip.compress(json.dumps(recording()).encode())[:-40], "the gzip file is cut off"),
        (json.dumps(recording())[:-40].encode(), "not JSON, or cut off: "),
        (b"[]", "not a trace of torch.profiler (no list traceEvents)"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a"}]}', "'ts'"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_that_is_no_trace_is_one_line(tmp_path, data, message, capsys):
    path = tmp_path / "t.json.gz"
    if data is not None:
        path.write_bytes(data)
    assert layers.main(["--from-trace", str(path), "--model", "mnist_cnn"]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith(f"error: trace {path}: ") and message in error and error.count("\n") == 1
    )


def test_options_of_the_recorder_are_refused(capsys):
    arguments = ["--from-trace", "t.json", "--model", "mnist_cnn"]
    assert layers.main([*arguments, "--steps", "3"]) == 2
    assert "--steps: has no effect with --from-trace" in capsys.readouterr().err
    assert layers.main(["--model", "mnist_cnn", "--memory-gb-per-s", "3"]) == 2
    assert "--memory-gb-per-s: needs --from-trace" in capsys.readouterr().err


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A trace of three steps of a model of the registry, on the CPU."""
    path = tmp_path_factory.mktemp("trace") / "trace.json.gz"
    run = registry.build("mnist_cnn", 4, None, torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
    run.loss().backward()
    with torch.profiler.profile(record_shapes=True, with_stack=True) as profiler:
        for _ in range(3):
            optimizer.zero_grad()
            run.loss().backward()
            optimizer.step()
    profiler.export_chrome_trace(str(path))
    return path


def test_a_recorded_trace_gives_a_profile_with_its_own_sums(real, tmp_path, capsys):
    out = tmp_path / "p.json"
    arguments = ["--from-trace", str(real), "--model", "mnist_cnn", "--batch", "4"]
    assert layers.main([*arguments, "-o", str(out)]) == 0
    assert "over 3 steps" in capsys.readouterr().out
    built = profiles.load(out)
    assert (built.kind, built.dtype, built.jitter.steps) == ("measured", "float32", 3)
    trace = kineto.load(real)
    build = partial(registry.build, "mnist_cnn", 4, None, torch.Generator())
    counted = modelled.counted("mnist_cnn", build)
    traced = Traced(trace, counted, [(4, 1, 28, 28)], "mnist_cnn")
    nodes = [e for e in kineto.outermost(trace.operations) if e.name.startswith(NODE)]
    backward_s = [sum(step.backward_s) for step in traced.steps]
    assert sum(backward_s) == pytest.approx(sum(e.end - e.start for e in nodes) / 1e6)
    assert built.backward_s == pytest.approx(sorted(backward_s)[1], rel=1e-3, abs=1e-6)
    times = {call.module: (call.forward_s, call.backward_s) for call in built.calls}
    assert all(min(times[name]) > 0 for name in ("features.0", "features.2", "classifier.0"))
    assert {param.module for param in built.gradients()[:2]} == {"classifier.3"}
    assert {param.module for param in built.gradients()[-2:]} == {"features.0"}
    assert 0 < built.gradients()[0].ready_s <= built.gradients()[-1].ready_s
    assert built.gradients()[-1].ready_s <= built.backward_s * 1.001
    assert built.memory_bytes_per_s > 1e6


def test_a_trace_of_another_batch_or_model_is_refused(real, capsys):
    arguments = ["--from-trace", str(real), "--model"]
    assert layers.main([*arguments, "mnist_cnn", "--batch", "8"]) == 2
    assert "no operation has an input of shape (8, 1, 28, 28)" in capsys.readouterr().err
    assert layers.main([*arguments, "resnet20"]) == 2
    assert "never calls CifarResNet" in capsys.readouterr().err
