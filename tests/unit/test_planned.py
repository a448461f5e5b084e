"""Groups from a search under the event model: the search, fusion=planned, and what it gains."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

import dear
from common.virtual.costs.parts import Shape
from common.virtual.world.run import predicted
from dear.cost.event_model.passes import Passes
from dear.cost.event_model.planning import Legs, exposed_s, planned
from dear.cost.fit import AlphaBeta
from dear.training.tuning import WATCHED_STEPS, LayerTimes
from tests.contract.loops import difference, everybody, make_model, mine, steps, wrap
from tests.unit.test_virtual_world import setting

HALF = AlphaBeta(alpha_s=0.7, beta_s_per_byte=0.1, queued_alpha_s=0.5)
WHOLE = AlphaBeta(alpha_s=1.4, beta_s_per_byte=0.2, queued_alpha_s=1.0)


def some_passes(seed: int, count: int = 9) -> Passes:
    """Returns passes whose layers run in the reverse order of their gradients."""
    chance = random.Random(seed)
    ready_s = list(itertools.accumulate(chance.uniform(0.1, 2.0) for _ in range(count)))
    reads_s = list(itertools.accumulate(chance.uniform(0.1, 1.0) for _ in range(count)))
    return Passes.of(
        [chance.choice([0, 1, 5, 20]) for _ in range(count)],
        ready_s,
        reads_s[::-1],
        forward_s=reads_s[-1] + 0.5,
        backward_s=ready_s[-1] + 0.1,
    )


def all_groups(count: int) -> list[list[list[int]]]:
    plans = []
    for cut in itertools.product([False, True], repeat=count - 1):
        plan = [[0]]
        for index, ends in enumerate(cut, 1):
            if ends:
                plan.append([])
            plan[-1].append(index)
        plans.append(plan)
    return plans


LEGS = {
    "two halves": Legs(first=HALF, second=HALF),
    "small groups at once": Legs(first=HALF, second=HALF, at_once=WHOLE, small_bytes=6),
    "one message": Legs(first=WHOLE),
    "second halves alone": Legs(first=None, second=HALF),
}


@pytest.mark.parametrize("legs", LEGS.values(), ids=LEGS)
@pytest.mark.parametrize("seed", range(8))
def test_the_search_finds_the_best_of_all_groups(seed, legs):
    passes = some_passes(seed)
    plans = all_groups(len(passes.gradients))
    best_s = min(exposed_s(plan, passes, legs) for plan in plans)
    result = planned(passes, legs)
    assert result in plans
    assert exposed_s(result, passes, legs) == pytest.approx(best_s, rel=1e-9)


def test_a_group_has_one_kind_and_no_candidate_is_better():
    passes = some_passes(3)
    kinds = ["half"] * 4 + ["float"] * 5
    free = Legs(first=AlphaBeta(alpha_s=9.0, beta_s_per_byte=0.0))
    assert planned(passes, free, kinds=kinds) == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    # Layers that run in the order of their gradients: the search does not expect them.
    behind = [dataclasses.replace(g, layer=i) for i, g in enumerate(passes.gradients)]
    other = dataclasses.replace(passes, gradients=tuple(behind))
    plans = all_groups(9)
    legs = LEGS["two halves"]
    best = min(plans, key=lambda plan: exposed_s(plan, other, legs))
    assert exposed_s(planned(other, legs, [best]), other, legs) == exposed_s(best, other, legs)


def test_modules_are_timed_from_the_start_of_the_forward_pass():
    clock = [0.0]

    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            clock[0] += 2.0
            return super().forward(x)

    model = nn.Sequential(Slow(2, 2), Slow(2, 2), Slow(2, 2))
    readers = dear.training.hooks.ReaderMap(model, list(model.parameters()))
    run: Any = type("Run", (), {"clock": staticmethod(lambda: clock[0])})
    times = LayerTimes(model, list(model.parameters()), run, readers)
    for _ in range(2):
        clock[0] += 100
        model(torch.ones(1, 2)).sum().backward()
    profile = times.stop()
    assert profile.entered_s == {model[0]: 0.0, model[1]: 2.0, model[2]: 4.0}
    assert profile.forward_s == 6.0


def _trained(update: str, small_kb: float) -> tuple[float, list[list[int]], int]:
    model, wanted = make_model(), make_model()
    make = torch.optim.AdamW
    optimizer, serial = make(model.parameters(), 0.01), make(wanted.parameters(), 0.01)
    wrap(optimizer, model, "dear", fusion="planned", update=update, small_kb=small_kb)
    if dear.size() > 1:
        # Ranks measure differently: gradients of rank 0 come one by one, those of others at once.
        times = optimizer._engine._rule._times
        stop = times.stop

        def stop_otherwise() -> Any:
            profile = stop()
            apart_s = 1.0 if dear.rank() == 0 else 0.0
            return dataclasses.replace(
                profile,
                arrivals_s=[apart_s * (place + 1) for place in range(len(profile.order))],
                backward_s=apart_s * len(profile.order),
                entered_s={layer: apart_s * i for i, layer in enumerate(model)},
                forward_s=apart_s * len(model),
            )

        times.stop = stop_otherwise
    counts = []
    names = {param: i for i, param in enumerate(model.parameters())}
    steps(
        model,
        optimizer,
        mine(),
        range(WATCHED_STEPS + 4),
        after_step=lambda *_: counts.append(len(optimizer.groups())),
    )
    steps(wanted, serial, everybody(), range(WATCHED_STEPS + 4))
    far = difference(model, wanted)
    groups = [sorted(names[param] for param in params) for _, params in optimizer.groups()]
    planned_at = next((i + 1 for i, count in enumerate(counts) if count > 1), 0)
    assert len(set(counts[WATCHED_STEPS - 1 :])) == 1, "it plans once"
    optimizer.close()
    return far, groups, planned_at


@pytest.mark.parametrize(("update", "small_kb"), [("sharded", 0), ("replicated", 0), ("auto", 0.1)])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_training_is_serial_training_and_all_ranks_have_the_plan_of_rank_0(
    world, size, update, small_kb
):
    ranks = world(size).run(_trained, update, small_kb)
    assert max(far for far, _, _ in ranks) < 1e-4
    assert all(groups == ranks[0][1] for _, groups, _ in ranks)
    if size > 1:
        assert all(planned_at == WATCHED_STEPS for _, _, planned_at in ranks)


MODELS = [("resnet50", 64), ("densenet201", 32), ("bert_base", 64)]


@pytest.mark.parametrize(("model", "batch"), MODELS)
def test_planned_groups_are_never_slower_than_other_rules_on_64_gpus(model, batch):
    shape = Shape(hosts=16, ranks_per_host=4)
    rules = {
        "planned": {"fusion": "planned"},
        "threshold": {},
        "flat threshold": {"first_mb": 25.0},
        "none": {"fusion": "none"},
        "tuned": {"fusion": "tuned"},
    }
    step_s = {
        rule: predicted(
            setting(f"{model}@rtx2080ti-modelled", batch, "dear", shape, "10gbe", **options)
        ).step_s
        for rule, options in rules.items()
    }
    for rule, seconds in step_s.items():
        print(f"{model}: dear {rule} {1e3 * seconds:.2f} ms, x {seconds / step_s['planned']:.3f}")
    assert min(step_s.values()) == pytest.approx(step_s["planned"], rel=1e-3)
