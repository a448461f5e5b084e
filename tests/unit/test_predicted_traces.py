"""Traces of predicted steps: timelines for Perfetto, and Chakra's execution traces."""

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
import torch

from common.harness.cli import main
from common.results.exports import chakra, traces
from common.results.exports.spans import aligned, joined
from common.virtual.costs.parts import Shape
from common.virtual.passes import UnmodelledError
from common.virtual.training.run import predicted, traced
from common.virtual.world.alike import Alike
from common.virtual.world.communicator import _Worker
from common.virtual.world.network import Group
from common.virtual.world.trace import Computation, Recorder, Sent
from dear.cost.event_model.events import Events
from dear.cost.event_model.link import Link
from dear.errors import UserError
from dear.training.algorithm import algorithm_names
from tests.unit.test_traces import analysed
from tests.unit.test_virtual_world import setting

TINY = ("mnist_cnn@rtx2080ti-modelled", 32)
NEEDED = "mlc-chakra is not installed; scripts/setup.sh installs it"
SHAPE = Shape(hosts=4, ranks_per_host=2)


def tiny(name, **options):
    return setting(*TINY, name, SHAPE, "10gbe", **options)


def times(node):
    """Returns when a node could start, and when it ended."""
    if isinstance(node, Computation):
        return node.start_s, node.end_s
    return node.transfer.times().enqueued_s, node.transfer.times().finished_s


@pytest.mark.parametrize("name", algorithm_names())
def test_each_node_starts_when_the_last_node_before_it_ends(name):
    """No dependency is missing: those of a node explain when it could start."""
    try:
        trace = traced(tiny(name))
    except UnmodelledError:
        return
    except UserError as error:
        assert "library does not run" in str(error)
        return
    begin_s = trace.phases_s[0][-1]  # earlier nodes follow transfers from before the trace
    late = [node for node in trace.nodes if times(node)[0] > begin_s]
    assert {type(node) for node in late} >= {Computation}
    for node in late:
        ends = [times(before)[1] for before in node.after]
        assert times(node)[0] == pytest.approx(max(ends), abs=1e-9), (node, node.after)


@pytest.mark.parametrize("name", ["ddp", "dear", "hierarchical"])
def test_the_training_computes_or_waits(name):
    """Threads that only pass messages on wait, too, but do not hold the training up."""
    point = setting("resnet50@rtx2080ti-modelled", 64, name, SHAPE, "10gbe")
    step, trace = predicted(point), traced(point)
    work = [node for node in trace.nodes if isinstance(node, Computation)]
    compute_s = sum(node.end_s - node.start_s for node in work) / len(trace.phases_s)
    assert step.exposed_s > 1e-4
    assert compute_s + step.exposed_s == pytest.approx(step.step_s)


@pytest.mark.parametrize("name", ["ddp", "dear", "wfbp", "fsdp", "hierarchical"])
def test_a_timeline_shows_the_predicted_step(name, tmp_path):
    point = tiny(name)
    step = predicted(point)
    traces.write_predicted(traced(point), SHAPE.ranks, tmp_path / "trial")
    content = json.loads((tmp_path / "trial" / "merged.json").read_text())
    assert content["metadata"]["predicted"] and content["metadata"]["equal_ranks"] == SHAPE.ranks
    events = content["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    rows = {name: [e for e in events if names.get(e.get("tid")) == name] for name in names.values()}
    rows = {name: [e for e in row if e["ph"] == "X"] for name, row in rows.items()}
    for row in rows.values():
        for before, after in pairwise(sorted(row, key=lambda e: e["ts"])):
            assert after["ts"] >= before["ts"] + before["dur"] - 0.002
    steps = [(e["ts"], e["ts"] + e["dur"]) for e in rows["steps"]]
    assert len(steps) == 3
    for start, end in steps:
        assert end - start == pytest.approx(1e6 * step.step_s, abs=0.01)

        def within(title, start=start, end=end):
            return [e for e in rows[title] if start - 0.01 <= e["ts"] < end - 0.01]

        waits = sum(e["dur"] for e in within("waits for communication"))
        phases = sum(e["dur"] for e in within("training"))
        assert waits + phases == pytest.approx(end - start, abs=0.1)
        work = Counter(e["name"] for e in within("layers 0"))
        assert work["update"] >= 1 and work["features.0"] == work["classifier.0"] == 2
    sent = [e for title, row in rows.items() if title.startswith("transfers") for e in row]
    assert len(sent) == 3 * step.messages


@pytest.mark.full  # only `make test-all` installs the package
@pytest.mark.parametrize("name", ["ddp", "dear", "wfbp", "fsdp", "hierarchical", "bytescheduler"])
@pytest.mark.parametrize("model", [TINY, ("resnet50@rtx2080ti-modelled", 64)])
def test_holistic_trace_analysis_tells_the_same_exposed_communication(name, model, tmp_path):
    point = setting(*model, name, SHAPE, "10gbe")
    step, trace = predicted(point), traced(point)
    traces.write_predicted(trace, SHAPE.ranks, tmp_path)
    (row,) = analysed(tmp_path)
    idle_us, sent_alone_us = row["idle_time(us)"], row["non_compute_time(us)"]
    exposed_us = pytest.approx(2e6 * step.exposed_s, rel=1e-4, abs=4)  # rounded kernel by kernel
    assert idle_us + sent_alone_us == exposed_us
    assert row["kernel_time(us)"] == pytest.approx(2e6 * step.step_s, abs=2)
    (rank,), _ = aligned({"traces": [trace.to_json()], "time_scale": 1.0})
    begin_us, end_us = rank.steps[1].start_us, rank.steps[2].end_us
    sent_us = sum(
        max(0.0, min(end, end_us) - max(start, begin_us)) for start, end in joined(rank.transfers)
    )
    hidden = 1 - 2e6 * step.exposed_s / sent_us
    assert row["comp_comm_overlap_pctg"] == pytest.approx(100 * hidden, abs=0.1)


def decoded(path):
    """Returns the metadata and the nodes of a file, as Chakra's own tool prints them."""
    text = path.with_suffix(".json")
    command = [sys.executable, "-m", "chakra.src.jsonizer.jsonizer"]
    subprocess.run(
        [*command, "--input_filename", path, "--output_filename", text], check=True, timeout=60
    )
    content, messages, at = text.read_text(), [], 0
    while at < len(content):
        message, at = json.JSONDecoder().raw_decode(content, at)
        messages.append(message)
    for node in messages[1:]:
        node["attr"] = {
            attr["name"]: next(value for key, value in attr.items() if key.endswith("Val"))
            for attr in node["attr"]
        }
    return messages[0], messages[1:]


def test_the_chakra_tool_reads_what_dear_computes_and_sends(tmp_path):
    pytest.importorskip("chakra", reason=NEEDED)
    point = tiny("dear")
    trace = traced(point)
    chakra.write(trace, SHAPE.ranks, tmp_path)
    assert not (tmp_path / "comm_groups.json").exists()  # all are the world
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"step.{rank}.et" for rank in range(8)]
    assert len({file.read_bytes() for file in files}) == 1
    metadata, nodes = decoded(files[3])
    assert metadata == {"version": "1.0.0"} and len(nodes) == len(trace.nodes)
    assert [int(node.get("id", 0)) for node in nodes] == list(range(len(nodes)))
    by_type = Counter(node["type"] for node in nodes)
    assert set(by_type) == {"COMP_NODE", "COMM_COLL_NODE"}
    sizes = Counter()
    for operation, kind in (("all_reduce", 0), ("reduce_scatter", 7), ("all_gather", 2)):
        sent = [node for node in nodes if node["name"] == operation]
        assert {int(node["attr"]["comm_type"]) for node in sent} == {kind}
        assert {node["attr"]["pg_name"] for node in sent} == {"0"}
        sizes[operation] = sum(int(node["attr"]["comm_size"]) for node in sent) / 3
    whole = sizes["all_reduce"] + sizes["reduce_scatter"]
    assert point.profile.parameter_bytes <= whole <= 1.01 * point.profile.parameter_bytes
    assert sizes["all_gather"] == sizes["reduce_scatter"] / SHAPE.ranks  # what a rank puts in

    def before(node):
        return [nodes[int(number)] for number in node.get("dataDeps", [])]

    for number, node in enumerate(nodes):
        assert all(int(earlier) < number for earlier in node.get("dataDeps", []))
        if node["name"] == "reduce_scatter":
            assert [item["name"] for item in before(node)] == ["backward copy"]
    awaiting = {
        node["name"] for node in nodes for item in before(node) if item["name"] == "all_gather"
    }
    assert awaiting == {"forward features.2", "forward classifier.0"}  # their first uses
    compute_us = sum(int(n.get("durationMicros", 0)) for n in nodes if n["type"] == "COMP_NODE")
    assert compute_us == pytest.approx(
        3e6 * (predicted(point).step_s - predicted(point).exposed_s), abs=len(nodes)
    )


def test_groups_of_other_ranks_are_like_those_of_rank_0(tmp_path):
    pytest.importorskip("chakra", reason=NEEDED)
    trace = traced(tiny("hierarchical"))
    chakra.write(trace, SHAPE.ranks, tmp_path)
    groups = json.loads((tmp_path / "comm_groups.json").read_text())
    inside = [[0, 1], [2, 3], [4, 5], [6, 7]]
    between = [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert sorted(groups.values()) == sorted(inside + between)
    _, nodes = decoded(tmp_path / "step.5.et")
    used = {node["attr"]["pg_name"] for node in nodes if node["type"] == "COMM_COLL_NODE"}
    assert sorted(groups[name] for name in used) == [[1, 3, 5, 7], [4, 5]]


def test_what_has_no_chakra_trace_says_why(tmp_path):
    with pytest.raises(UserError, match="with exchange: it has messages between single ranks"):
        chakra.write(traced(tiny("neighbor")), SHAPE.ranks, tmp_path)
    trace = traced(tiny("wfbp"))
    with pytest.raises(UserError, match="2048 ranks need as many"):
        chakra.write(trace, 2048, tmp_path)
    with pytest.raises(UserError, match="library does not run"):
        traced(tiny("horovod"))
    sent = next(node for node in trace.nodes if isinstance(node, Sent))
    odd = dataclasses.replace(trace, nodes=(dataclasses.replace(sent, ranks=(0, 1, 5)),))
    with pytest.raises(UserError, match=r"group of ranks \[0, 1, 5\] of 8"):
        chakra.write(odd, SHAPE.ranks, tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_the_package_the_command_that_installs_it_is_named(monkeypatch, tmp_path, capsys):
    for module in ("chakra", "chakra.schema.protobuf"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["predict", "--chakra", str(tmp_path)]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: --chakra: ") and text.count("\n") == 1
    assert chakra.INSTALL in text and not list(tmp_path.iterdir())


def test_predict_writes_a_folder_for_each_trial(tmp_path, capsys):
    model = ["--model", TINY[0], "--batch", "32", "-k", "10gbe", "-k", "ddp|horovod"]
    assert main(["predict", *model, "--trace", str(tmp_path), "--over", "workers"]) == 2
    assert "leave --over out" in capsys.readouterr().err
    assert main(["predict", "--json", *model, "--trace", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert len(json.loads(output.out)) == 2
    assert "1 traces in" in output.err and "its library does not run" in output.err
    (folder,) = tmp_path.iterdir()
    assert "-n64-ddp-" in folder.name and (folder / "merged.json").exists()


def test_threads_and_callbacks_pass_on_what_they_have_awaited():
    network = Alike(SHAPE, tiny("wfbp").costs, engine="nccl", priorities=False)
    nodes = (recorder := Recorder()).nodes
    network.recorder, worker = recorder, _Worker(network)

    def send():
        group = Group("all", tuple(range(SHAPE.ranks)))
        return network.meet("all_reduce", group, 1 << 20, torch.zeros(1, 0), lambda parts: None)

    first = send()
    worker.submit(first.wait).result()
    send().wait()
    third = worker.submit(send).result()
    third.on_end(send)
    third.wait()
    before = [[nodes.index(earlier) for earlier in node.after] for node in nodes]
    assert before == [[], [0], [0, 1], [2]]


def again(trace, shape, costs):
    """Runs the nodes of a trace by their dependencies alone; returns the end of each."""
    events, ends, left, later = Events(), {}, {}, {}
    link = Link(events)

    def start(node):
        def end():
            ends[node] = events.now_s
            for follower in later.get(node, []):
                left[follower] -= 1
                if not left[follower]:
                    start(follower)

        if isinstance(node, Computation):
            events.at(events.now_s + node.end_s - node.start_s, end)
        else:
            sent = node.transfer
            queue = {"channel": node.channel, "priority": node.priority}
            link.send(costs[sent.name], sent.nbytes, **queue, then=end)

    for node in trace.nodes:
        left[node] = len(node.after)
        for before in node.after:
            later.setdefault(before, []).append(node)
    for node in trace.nodes:
        if not node.after:
            start(node)
    events.run_until(lambda: len(ends) == len(trace.nodes))
    return ends


@pytest.mark.parametrize("name", ["ddp", "wfbp", "bytescheduler", "dear", "fsdp"])
def test_the_dependencies_of_a_step_hold_on_another_network(name):
    near, far = (setting(*TINY, name, SHAPE, network) for network in ("100gbib", "10gbe"))
    trace = traced(near)
    ends = again(trace, SHAPE, far.costs(SHAPE.hosts, SHAPE.ranks_per_host))
    last = [
        max(ends[n] for n in trace.nodes if isinstance(n, Computation) and n.start_s < step[-1])
        for step in trace.phases_s
    ]
    assert predicted(far).step_s > 2 * predicted(near).step_s
    assert last[2] - last[1] == pytest.approx(predicted(far).step_s, rel=1e-6)
