"""Claims of the reference systems beside the figures of this project: the tables of docs/claims.md.

`configs/published/claims.yaml` has the claims by system: what is claimed, in which setting, and the
rows of records whose ratio is our figure. No figure of ours is typed: all come from records, and
the word of a row is computed. `common/results/readme.py` puts the tables into the page.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import yaml

from common.paths import CONFIGS
from common.results import stats
from common.results.committed import catalogue
from common.results.committed.ratios import Figure, Source, figure, missing
from common.results.tables.table import markdown
from dear.errors import UserError, one_of
from dear.options import build_options

PATH = CONFIGS / "published" / "claims.yaml"
NOTABLE = 1 + stats.NOTABLE
"""Smallest ratio that makes an algorithm faster."""
EVERY = "all"
"""Name of the block that counts the rows of all systems by word."""
NEAR = 0.1
"""Largest relative distance from a claim that agrees: about the error of predictions of published
throughputs (docs/validation.md)."""

Word = Literal["agrees", "less", "more", "differs", "undecided", "not yet"]
NOT_YET: Word = "not yet"
_NUMBER = r"(\d+(?:\.\d+)?)"
_CLAIMED = re.compile(
    rf"{_NUMBER}(?:(?P<to> to |(?P<over> / )){_NUMBER})?|(?P<below>below ){_NUMBER}"
    rf"|(?P<least>at least ){_NUMBER}"
)


@dataclass(frozen=True, kw_only=True)
class Claimed:
    """Claimed ratio, from `low` to `high`; None: no limit on this side."""

    low: float | None
    high: float | None

    @classmethod
    def of(cls, text: str) -> Claimed:
        """Reads `1.83`, `1.2 to 1.8`, `301.8 / 213`, `below 1` or `at least 0.95`."""
        match = _CLAIMED.fullmatch(text)
        if match is None:
            allowed = "1.83, 1.2 to 1.8, 301.8 / 213, below 1, at least 0.95"
            raise UserError(f"{text!r} is not of the form {allowed}")
        numbers = [float(number) for number in re.findall(_NUMBER, text)]
        if match["over"]:
            numbers = [numbers[0] / numbers[1]]
        low, high = numbers[0], numbers[-1]
        if low > high:
            raise UserError(f"{text!r}: the smaller number comes first")
        return cls(low=None if match["below"] else low, high=None if match["least"] else high)

    def word(self, figure: Figure | None, within: float = 0.0) -> Word:
        """Returns how a figure stands to the ratio; `within` is the largest relative distance that
        agrees."""
        if figure is None:
            return NOT_YET
        if figure.low is None or figure.high is None or figure.doubt:
            return "undecided"
        # A claim about which is faster has no tolerance.
        near = within if None not in (self.low, self.high) else 0
        least = 0.0 if self.low is None else self.low
        most = float("inf") if self.high is None else self.high
        lowest, highest = least * (1 - near), most * (1 + near)
        if lowest <= figure.low and figure.high <= highest:
            return "agrees"
        if figure.high < lowest:
            return "differs" if figure.high < 1 / NOTABLE and least >= 1 else "less"
        if figure.low > highest:
            return "differs" if figure.low > NOTABLE and most <= 1 else "more"
        return "undecided"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Entry of claims.yaml."""

    claim: str
    claimed: str
    """Ratio, in a form of `Claimed.of`."""
    setting: str
    source: str
    within: float = NEAR
    """Largest relative distance from the claim that agrees."""
    emulated: Source | None = None
    predicted: Source | None = None
    changed: tuple[Source, ...] = ()
    """The same prediction with one assumption changed, which `what` names."""
    why: str = ""
    """Sentences: the assumption that decides the claim, and what cannot be settled here."""

    def __post_init__(self) -> None:
        Claimed.of(self.claimed)
        if self.emulated is not None and self.emulated.file is not None:
            raise UserError(f"claims.yaml: {self.claim}: an emulated figure is that of a sweep")
        for source in (self.predicted, *self.changed):
            if source is not None and source.file is None:
                raise UserError(f"claims.yaml: {self.claim}: a predicted figure needs `file`")
        if not all(source.what for source in self.changed):
            raise UserError(f"claims.yaml: {self.claim}: each changed assumption needs `what`")

    @property
    def sources(self) -> list[Source]:
        return [each for each in (self.emulated, self.predicted, *self.changed) if each is not None]

    @property
    def ratio(self) -> str:
        """Claimed ratio for a table; that of two rates with its value."""
        low = Claimed.of(self.claimed).low
        return f"{self.claimed} = {low:.2f}" if "/" in self.claimed else self.claimed

    def word(self, figure: Figure | None) -> Word:
        """Returns how a figure stands to the claim."""
        return Claimed.of(self.claimed).word(figure, self.within)

    def standing(self, folder: Path) -> Word:
        """Returns the word of the row: of the figure that is emulated in the setting of the claim,
        else predicted in it, else predicted or emulated in another one. A figure that decides
        nothing comes last."""
        given = [source for source in (self.emulated, self.predicted) if source is not None]
        exact = [source for source in given if not source.what]
        known = [each for each in (figure(s, folder) for s in exact) if each is not None]
        if known or not exact:
            others = [figure(s, folder) for s in reversed(given) if s.what]
            known += [each for each in others if each is not None]
        sure = [each for each in known if each.doubt is None]
        return self.word(next(iter([*sure, *known]), None))


def claims(path: Path = PATH) -> dict[str, list[Claim]]:
    """Reads the claims by system; raises `UserError` for an entry that is not valid."""
    listed = yaml.safe_load(path.read_bytes())
    return {
        system: [build_options(Claim, entry, "key of a claim") for entry in entries]
        for system, entries in listed.items()
    }


@functools.cache
def _listed() -> dict[str, list[Claim]]:
    return claims()


def section(system: str, place: Path, folder: Path = catalogue.FOLDER) -> str:
    """Returns the table and the notes of a system for a page in the folder `place`; for `EVERY`,
    the number of rows by word."""
    if system == EVERY:
        return _tally(folder)
    listed = one_of("system of claims.yaml", system, _listed())
    lines = [["", "claim, or changed assumption", "claimed", "emulated", "predicted", "word"]]
    for number, claim in enumerate(listed, 1):
        emulated, predicted = (
            _cell(source, folder) for source in (claim.emulated, claim.predicted)
        )
        word = f"**{claim.standing(folder)}**"
        lines.append([str(number), claim.claim, claim.ratio, emulated, predicted, word])
        for source in claim.changed:
            word = claim.word(figure(source, folder))
            lines.append(["", f"... if {source.what}", "", "", _cell(source, folder), word])
    table = markdown(lines, [True, False, False, False, False, False], padded=False)
    notes = "".join(f"{number}. {_note(claim)}\n" for number, claim in enumerate(listed, 1))
    used = [source for claim in listed for source in claim.sources]
    names = [source.record for source in used if not missing(source, folder)]
    return f"{table}\n{notes}\n{catalogue.origins(names, place, folder)}\n"


def _cell(source: Source | None, folder: Path) -> str:
    if source is None:
        return ""
    known = figure(source, folder)
    return f"{NOT_YET} (`{source.record}`)" if known is None else known.text


def _note(claim: Claim) -> str:
    parts = [f"{claim.setting} ({claim.source})."]
    if claim.within != NEAR:
        parts.append(f"Figures within {claim.within:.0%} of the claim agree.")
    for source, kind in ((claim.emulated, "Emulated"), (claim.predicted, "Predicted")):
        if source is not None and source.what:
            parts.append(f"{kind}: {source.what}.")
    return " ".join([*parts, claim.why]).rstrip()


def _tally(folder: Path) -> str:
    words = get_args(Word)
    lines = [["system", "claims", *words]]
    for system, listed in _listed().items():
        counts = Counter(claim.standing(folder) for claim in listed)
        texts = [str(counts[word] or "") for word in words]
        lines.append([f"[{system}](#{system.lower()})", str(len(listed)), *texts])
    return markdown(lines, [False, *[True] * (1 + len(words))], padded=False)
