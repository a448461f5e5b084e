"""Training for real through the command line: images, texts, epochs, schedules, mixed precision."""

from __future__ import annotations

import csv
import math

import pytest

from common.harness import cli
from tests.system.made import write_cifar, write_images
from tests.system.sweeps import Driver

CIFAR = """
name: tiny
algorithms: [ddp, dear]
models: [{{name: resnet20, batch_size: 8}}]
world_sizes: [2]
baseline: false
data_dir: {folder}
dtype: amp-bf16
optimizer: {{name: sgd, lr: 0.005}}
learn:
  data: cifar10
  epochs: 3
  schedule: {{kind: cosine, warmup_epochs: 1, scale: linear}}
measure: {{repeats: 1}}
timeout_s: 180
"""
OTHERS = """
name: tiny
algorithms: [{algorithm}]
models: [{model}]
world_sizes: [2]
baseline: false
data_dir: {place}
dtype: {dtype}
optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}
learn: {{data: {data}, epochs: 2, loader_workers: {workers}}}
measure: {{repeats: 1}}
timeout_s: 120
"""


def _curve(record, key):
    return [evaluation[key] for evaluation in record["results"][0]["learning"]["evaluations"]]


# Processors that cannot compute in bf16 take several times as long.
@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_cifar_resnet_learns_the_same_with_amp_and_a_schedule_whoever_averages(tmp_path):
    driver = Driver(tmp_path, CIFAR.format(folder=write_cifar(tmp_path / "cifar", images=20)))
    done = driver.run()
    records = driver.records()
    assert [record["status"] for record in records] == ["ok", "ok"], done.stderr
    for record in records:
        (run,) = [result["learning"] for result in record["results"]]
        assert _curve(record, "epoch") == [0, 1, 2, 3]
        assert _curve(record, "steps") == [[6 * epoch] * 2 for epoch in range(4)]
        assert _curve(record, "train_loss")[0] is None
        assert _curve(record, "train_loss")[3] < _curve(record, "train_loss")[1]
        assert all(
            a <= b
            for a, b in zip(
                _curve(record, "accuracy"), _curve(record, "accuracy_top5"), strict=True
            )
        )
        assert [rank["steps"] for rank in run["ranks"]] == [18, 18]
        assert record["check"]["matches_reference"] and record["check"]["replicas_agree"]
        assert (
            record["results"][0]["data"]["train"] == 100 and record["trial"]["dtype"] == "amp-bf16"
        )
    ddp, dear = records
    losses = [_curve(record, "train_loss")[1:] for record in (dear, ddp)]
    assert losses[0] == pytest.approx(losses[1], rel=2**-8), "but for rounding in bf16"
    # DDP copies rank 0's running averages of batch normalization; else each rank has its own.
    losses = [_curve(record, "loss") for record in (dear, ddp)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    shown = driver.show().stdout
    assert "training loss" in shown and "top 5" in shown
    rows = list(csv.DictReader((driver.sweep / "table.csv").open()))
    assert {row["epochs"] for row in rows} == {"3"} and not rows[0]["budget_s"]


@pytest.mark.full
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("data", "model", "algorithm", "dtype", "workers"),
    [
        ("cifar100", "{name: vgg16_cifar, batch_size: 4}", "decentralized", "float32", 0),
        ("imagefolder", "{name: resnet20, batch_size: 2}", "dear", "amp-fp16", 1),
        ("imagefolder", "{name: mobilenet_v3_small, batch_size: 2}", "dear", "float32", 2),
        ("text", "{name: lstm_small, batch_size: 2, sentence_len: 12}", "asyncddp", "float32", 0),
    ],
)
def test_everything_that_learns(tmp_path, data, model, algorithm, dtype, workers):
    place = tmp_path / "data"
    if data == "text":
        place.write_text("one two three four five six seven\n" * 60)
    elif data == "imagefolder":
        write_images(place)
    else:
        write_cifar(place, name=data)
    given = {"data": data, "model": model, "algorithm": algorithm, "dtype": dtype}
    driver = Driver(tmp_path, OTHERS.format(place=place, workers=workers, **given))
    done = driver.run()
    (record,) = driver.records()
    assert record["status"] == "ok", done.stderr
    assert _curve(record, "epoch") == [0, 1, 2]
    losses = _curve(record, "loss")
    assert all(map(math.isfinite, losses))
    shown = driver.show().stdout
    if data == "text":
        assert losses[-1] < losses[0] and "perplexity" in shown
        assert record["throughput"]["unit"] == "sen/s"
    if dtype == "amp-fp16":
        assert record["check"]["judged_by"] == "replicas"
        assert "a GradScaler may skip steps" in record["check"]["finding"]
    assert record["check"]["replicas_agree"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("data_dir={empty}",), "has no cifar10; it needs the folder cifar-10-batches-py"),
        (("data_dir={empty}/nowhere",), "there is no folder"),
        (("models=[mnist_cnn]",), "mnist_cnn cannot learn cifar10; models that can: resnet20"),
        (("learn.data=text",), "resnet20 cannot learn text; models that can: lstm, lstm_small"),
        (("dtype=amp-fp8",), "unknown dtype 'amp-fp8'"),
    ],
)
def test_what_cannot_be_learned_is_one_line(tmp_path, capsys, change, text):
    driver = Driver(tmp_path, CIFAR.format(folder=write_cifar(tmp_path / "cifar")))
    (tmp_path / "empty").mkdir()
    settings = [flag.format(empty=tmp_path / "empty") for flag in change]
    flags = [part for setting in settings for part in ("--set", setting)]
    assert cli.main(driver.command("--dry-run", *flags)[1:]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1, error
