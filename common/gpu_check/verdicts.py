"""Verdicts on the steps of the GPU check, from the files that their commands have written."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from common.gpu_check.budget import Ended, Verdict, by_exit_status


def judge_tests(report: Path, ended: Ended) -> Verdict:
    """Returns the verdict from pytest's report: also `failed` if no test ran."""
    if not report.exists():
        return by_exit_status(ended)
    cases = list(ElementTree.parse(report).iter("testcase"))
    if ended.code is None:
        cases = cases[:-1]  # the one that was stopped has no outcome, like one that passed
    bad = [case for case in cases if {"failure", "error"} & {child.tag for child in case}]
    skips = [case.find("skipped") for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(bad) - len(skips)
    text = f"{passed} passed"
    if skips:
        reasons = {(skip.get("message") or "").strip() for skip in skips}
        text += f", {len(skips)} skipped ({'; '.join(sorted(reasons))})"
    if bad:
        names = ", ".join(str(case.get("name")) for case in bad[:5])
        return "failed", f"{len(bad)} failed ({names}), {text}"
    if not passed:
        return "failed", f"no test ran: {text}"
    if ended.code is None:
        return "failed", text
    return ("ok", text) if ended.code == 0 else by_exit_status(ended)


def judge_horovod(note: Path, ended: Ended) -> Verdict:
    """Returns `skipped` if the script has written why Horovod cannot be built."""
    return (
        ("skipped", note.read_text(encoding="utf-8").strip())
        if note.exists()
        else by_exit_status(ended)
    )


def judge_sweep(folder: Path, models: set[str], ended: Ended) -> Verdict:
    """Returns the verdict from a sweep's records of `models`; incorrect training is a failure."""
    from common.results import store

    good, bad, unchecked, without = [], [], [], []
    newest = store.latest(store.load(folder / "records.jsonl")).values()
    for record in (record for record in newest if record.trial["model"] in models):
        label, check = record.label, record.check
        if record.status == "unsupported":
            without.append(f"{label}: {record.error.message}")
        elif not record.ok:
            bad.append(f"{label}: {record.status}: {record.error.message}")
        elif check.verdict == "yes":
            good.append(label)
        elif check.verdict == "NO":
            bad.append(f"{label}: wrong: {check.finding or 'the replicas differ'}")
        else:
            unchecked.append(f"{label}: {check.finding or 'nothing was compared'}")
    text = f"{len(good)} right"
    for word, labels in (("unchecked", unchecked), ("unsupported", without)):
        text += f"; {word}: {'; '.join(labels)}" if labels else ""
    if bad:
        return "failed", f"{'; '.join(bad)[:600]} ({text})"
    if ended.code != 0 or not good:
        return by_exit_status(ended) if ended.code else ("failed", text)
    return "ok", text
