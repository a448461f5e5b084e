"""Findings of this project for the top of a page: sentences whose figures come from records.

`configs/published/findings.yaml` has the sentences. `{name}` in a sentence is a figure: a ratio of
rows of a record, or a number that a file of a record has. Each ratio names what the sentence
claims of it. `common/results/readme.py` puts the list into the page, and fails if a record that was
made again contradicts a sentence.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from common.paths import CONFIGS
from common.results.committed import catalogue
from common.results.committed.claims import Claimed
from common.results.committed.ratios import Source, figure
from dear.errors import UserError
from dear.options import build_options

PATH = CONFIGS / "published" / "findings.yaml"


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ratio in a sentence."""

    name: str
    holds: str
    """Values that the sentence allows for the whole interval, in a form of `Claimed.of`."""
    rows: Source


@dataclass(frozen=True, kw_only=True)
class Number:
    """Number in a sentence, from a JSON file of a record."""

    name: str
    record: str
    file: str
    key: str
    """Names of the keys that lead to the number, with dots between them."""
    form: str = ""
    """Format, as `format` takes it."""

    def text(self, folder: Path) -> str:
        """Returns the number; raises `UserError` if the record is withdrawn or lacks it."""
        if self.record in catalogue.withdrawn(folder):
            raise UserError(f"findings.yaml: {self.record} is withdrawn: drop {{{self.name}}}")
        try:
            value = json.loads((folder / self.record / self.file).read_bytes())
            for key in self.key.split("."):
                value = value[key]
        except (KeyError, FileNotFoundError):
            raise UserError(f"{self.record}/{self.file} has no {self.key}") from None
        return format(value, self.form)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Entry of findings.yaml."""

    finding: str
    limit: str
    """Sentence: where the finding ends."""
    ratios: tuple[Ratio, ...] = ()
    numbers: tuple[Number, ...] = ()

    def text(self, folder: Path) -> str:
        """Returns the sentences with their figures.

        Raises:
            UserError: a record is missing or withdrawn, a figure is in doubt, or it is not what its
                sentence claims.
        """
        texts = {number.name: number.text(folder) for number in self.numbers}
        for ratio in self.ratios:
            known = figure(ratio.rows, folder)
            if known is None or Claimed.of(ratio.holds).word(known) != "agrees":
                shown = "no figure" if known is None else known.text
                raise UserError(
                    f"findings.yaml: {{{ratio.name}}} of {ratio.rows.record} is {shown}, not "
                    f"{ratio.holds}: rewrite {self.finding!r}"
                )
            # The sentence says which model has the largest ratio, if it matters.
            texts[ratio.name] = replace(known, of="").text
        try:
            return f"{self.finding} {self.limit}".format_map(texts)
        except KeyError as error:
            raise UserError(f"findings.yaml: {self.finding!r} has no figure {error}") from None

    @property
    def records(self) -> list[str]:
        ratios = [ratio.rows.record for ratio in self.ratios]
        return ratios + [number.record for number in self.numbers]


def findings(path: Path = PATH) -> list[Finding]:
    """Reads all findings; raises `UserError` for an entry that is not valid."""
    listed = yaml.safe_load(path.read_bytes())
    return [build_options(Finding, entry, "key of a finding") for entry in listed]


def section(listed: Sequence[Finding], place: Path, folder: Path = catalogue.FOLDER) -> str:
    """Returns numbered findings, and their records, for a page in the folder `place`."""
    lines = [f"{number}. {each.text(folder)}\n" for number, each in enumerate(listed, 1)]
    names = [name for each in listed for name in each.records]
    return f"{''.join(lines)}\n{catalogue.origins(names, place, folder)}\n"
