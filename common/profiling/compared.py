"""Tables in docs/emulation.md that compare modelled profiles with published times.

`python -m common.profiling.compared` writes them; a test checks that the page is up to date.
"""

from __future__ import annotations

import sys

from common.models import profile as profiles
from common.paths import ROOT
from common.profiling import gpus, modelled, published
from common.profiling.gpus import DEFAULT, find
from common.profiling.published import Published
from common.results.committed.pages import with_block

PAGE = ROOT / "docs" / "emulation.md"
_REFERENCE = "resnet50"
_ELSEWHERE = ("rtx3090-fp16", "l4-tf32")


def times() -> str:
    """Returns a table of all profiles; below the first profile of a model are published times."""
    lines = [
        "| model | of what | batch | forward ms | backward ms | backward / forward | samples/s |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    models = set()
    for case in modelled.CASES.values():
        path = profiles.path_of(case.model, modelled.FOLDER_NAME, case.batch_size)
        profile = profiles.load(path)
        what = f"our profile, factors of {case.like}" if case.like else "our profile"
        lines.append(
            _line(
                case.model,
                what,
                case.batch_size,
                profile.forward_s * 1e3,
                profile.backward_s * 1e3,
            )
        )
        lines += [
            _published_line(row, case)
            for row in published.rows()
            if row.model == case.model not in models and row.device not in _ELSEWHERE
        ]
        models.add(case.model)
    return "\n".join(lines)


def _published_line(row: Published, case: modelled.Case) -> str:
    what = f"{row.device}, {row.framework}"
    if row.side not in (None, 224):
        what += f", images of {row.side} x {row.side}"
    if row.device == DEFAULT and row.batch_size in (case.total, case.split):
        what += " (scaled to it)"
    if row.inference_ms is None:
        return f"|  | {what} | {row.batch_size} | | | | {_rate(row)} |"
    return _line("", what, row.batch_size, row.inference_ms, row.training_ms - row.inference_ms)


def _line(model: str, what: str, batch: int, forward_ms: float, backward_ms: float) -> str:
    step_s = (forward_ms + backward_ms) / 1e3
    return (
        f"| {model} | {what} | {batch} | {forward_ms:.2f} | {backward_ms:.2f} | "
        f"{backward_ms / forward_ms:.2f} | {batch / step_s:.4g} |"
    )


def _rate(row: Published) -> str:
    return f"{row.batch_size / row.training_ms * 1e3:.4g}"


def elsewhere() -> str:
    """Returns a table of speeds relative to ResNet-50, for GPUs that have not given any factor."""
    lines = [
        f"| GPU | model | published, beside {_REFERENCE} | counted, beside {_REFERENCE} | off |",
        "|---|---|--:|--:|--:|",
    ]
    for device in _ELSEWHERE:
        rows = [row for row in published.rows() if row.device == device]
        published_rates = {row.model: row.batch_size / row.training_ms for row in rows}
        counted_rates = {row.model: row.batch_size / _step_ms(row) for row in rows}
        for row in rows:
            if row.model == _REFERENCE:
                continue
            measured = published_rates[row.model] / published_rates[_REFERENCE]
            counted = counted_rates[row.model] / counted_rates[_REFERENCE]
            side = "" if row.side == 224 else f", images of {row.side} x {row.side}"
            lines.append(
                f"| {device}, {row.framework} | {row.model}{side} | {measured:.3f} | "
                f"{counted:.3f} | {counted / measured - 1:+.0%} |"
            )
    return "\n".join(lines)


def _step_ms(row: Published) -> float:
    """Returns the counted milliseconds of a step, with ResNet-50's factors for all models."""
    factors = modelled.EFFICIENCIES[f"{_REFERENCE}-bs64"]
    layers = modelled.count(row.model, row.batch_size, find(row.device), row.side)
    return 1e3 * (layers.forward_s * factors.forward + layers.backward_s * factors.backward)


def measured() -> str:
    """Returns a table of measured profiles of GPUs, beside the modelled ones of the same GPU."""
    lines = [
        "| profile | batch | measured forward + backward, ms | modelled, ms | off | jitter |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for path in sorted(profiles.FOLDER.glob("*/*.json")):
        profile = profiles.load(path)
        gpu = gpus.choice_of(profile.device_name, profile.dtype)
        if profile.kind != "measured" or gpu is None:
            continue
        model = modelled.profile_on(gpu, profile.model, profile.batch_size, profile.sentence_len)
        times = [
            f"{each.forward_s * 1e3:.1f} + {each.backward_s * 1e3:.1f}" for each in (profile, model)
        ]
        jitter = f"{profile.jitter.relative_std:.1%}" if profile.jitter else ""
        off = f"{model.step_s / profile.step_s - 1:+.0%}"
        name = f"{profile.model}@{profile.device}"
        cells = (name, str(profile.batch_size), *times, off, jitter)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    for name, block in (("times", times), ("elsewhere", elsewhere), ("measured", measured)):
        text = with_block(text, f"profiles: {name}", block())
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
