"""Report of all mutants: a table by folder and the survivors with their diffs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

BAR = 0.85
"""The least share of mutants that tests must catch."""
JUDGED = Path(__file__).parent / "judged.yaml"
_CAUGHT = ("failed", "hang", "unstartable")


def share(results: Sequence[Mapping[str, Any]]) -> float:
    """Caught mutants over all; what survives counts as such whatever is said of it."""
    return sum(result["outcome"] in _CAUGHT for result in results) / len(results)


def judgements() -> dict[str, dict[str, str]]:
    """Returns, by path and mutant's id, somebody's judgement of a survivor."""
    return yaml.safe_load(JUDGED.read_text()) or {} if JUDGED.exists() else {}


def write(folder: Path, facts: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """Writes `mutants.json` and `mutants.md`; returns the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {**facts, "caught": round(share(results), 4), "mutants": list(results)}
    (folder / "mutants.json").write_text(json.dumps(values, indent=1) + "\n")
    text = markdown(facts, results, judgements())
    (folder / "mutants.md").write_text(text)
    return text


def markdown(
    facts: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    judged: Mapping[str, Mapping[str, str]],
) -> str:
    """The report for people."""
    survivors = [result for result in results if result["outcome"] not in _CAUGHT]
    lines = [
        f"# {len(results)} small changes of meaning",
        "",
        f"Commit {facts['commit']}, seed {facts['seed']}, drawn from {facts['candidates']} places' "
        f"changes in {facts['files']} files. Tests caught {share(results):.1%}; at least {BAR:.0%} "
        "are asked for. *failed*: a test failed, twice. *hang*: a test or all of them ran out of "
        "time. *unstartable*: no test could begin. *unseen*: survived, since no test executes it.",
        "",
        "| folder | mutants | failed | hang | unstartable | survived | of these unseen | caught |",
        "| ------ | ------: | -----: | ---: | ----------: | -------: | --------------: | -----: |",
    ]
    folders = sorted({_folder(result["path"]) for result in results})
    for folder in folders:
        lines.append(
            _row(folder, [result for result in results if _folder(result["path"]) == folder])
        )
    lines += [_row("all", results), "", "## Survivors", ""]
    if not survivors:
        lines.append("None.")
    for result in survivors:
        judgement = judged.get(result["path"], {}).get(result["id"], "Not judged.")
        seen = f"{result['asked']} tests asked" if result["asked"] else "no test executes it"
        lines += [
            f"### {result['path']}:{result['line']} ({result['id']})",
            "",
            f"{judgement} ({result['operator']}, {seen})",
            "",
            "```diff",
            result["diff"],
            "```",
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _row(name: str, results: Sequence[Mapping[str, Any]]) -> str:
    count = Counter(result["outcome"] for result in results)
    unseen = sum(result["outcome"] == "survived" and not result["asked"] for result in results)
    numbers = [len(results), *(count[kind] for kind in (*_CAUGHT, "survived")), unseen]
    return f"| {name} | {' | '.join(map(str, numbers))} | {share(results):.0%} |"
