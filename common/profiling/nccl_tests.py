"""Times of collectives in logs and JSON files of nccl-tests, and of rccl-tests.

The formats are those of src/common.cu and src/util.cu of nccl-tests 2.0 to 2.20. The size of a row
is the larger one of a rank's send and receive buffers: the full buffer of all_gather and
reduce_scatter, although their `count` is that of a shard. The times out-of-place and in-place count
as two repeats of a size.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from dear.cost.measurement import EXCHANGE, Operation
from dear.errors import UserError, unknown

COLLECTIVES: dict[str, Operation] = {
    name.replace("_", ""): name for name in get_args(Operation) if name != EXCHANGE
}
"""Operations by the collective's name in nccl-tests, without underscores and in small letters."""
_WORDS = {
    **dict.fromkeys(("int8", "char", "uint8", "f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16"), 2),
    **dict.fromkeys(("int32", "int", "uint32", "float"), 4),
    **dict.fromkeys(("int64", "uint64", "double"), 8),
}
"""Bytes of an element by type."""
_NUMBERS = ("time", "algbw", "busbw", "#wrong")
_JSON_NUMBERS = ("time", "alg_bw", "bus_bw")

# A launcher may write the rank before each line: `[1,0]<stdout>:`, ` 0: `, `[0] `.
_ROW = re.compile(rf"(?:^|[\s:>\]])(\d+)\s+(\d+)\s+({'|'.join(_WORDS)})\s+(\S.*)")
_CUT_ROW = re.compile(r"\d+(\s+\d+(\s+[a-z]\w*)?)?")
_NUMBER = re.compile(r"-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|inf|nan)", re.IGNORECASE)
_TIMESTAMP = re.compile(r"\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*$")
_STARTS = re.compile(r"-tests version|nThread|Using devices|\bsize\s+count\s+type\b")
_NAME = re.compile(r"(?<!concluded: )\b([a-z_]+)_perf(?:_mpi)?\b")
_RANK = re.compile(r"\bRank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device")
_COLUMNS = re.compile(r"\bsize\s+count\s+type\s+(\S.*)")
_MOST = re.compile(r"\bmaxBytes (\d+)")
_TESTS = re.compile(r"nccl-tests version (\S+)")
_NCCL = re.compile(r"nccl-library=(\d+)|\b[NR]CCL version\s*:?\s*(\d[\w.]*)")


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of one collective in one file."""

    file: str
    operation: Operation
    world_size: int | None
    """None: the file does not say how many ranks took part."""
    hosts: int | None
    """None: the file does not list all ranks."""
    versions: str
    """Versions of nccl-tests and NCCL, if the file has them, and whether the file ends early."""
    date: str
    """Day of the run, or of the file."""
    seconds: Mapping[int, Sequence[float]]
    """Times by bytes of the full buffer."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    place: str
    size: int
    count: int
    word: int
    reduces: bool
    """True if the row names a reduction; rows of old versions name it only where there is one."""
    blocks: list[tuple[str, ...]]
    """Time, algbw, busbw and #wrong, out-of-place and in-place, as printed."""


@dataclass(kw_only=True)
class _Header:
    name: str | None = None
    tests: str | None = None
    nccl: str | None = None
    date: str
    ranks: list[tuple[int, str, str]] = field(default_factory=list)
    """Rank, group and host."""
    columns: list[str] | None = None
    most: int = 0
    """Largest size that was asked for, in bytes; 0: unknown."""

    def read(self, line: str) -> None:
        if name := _NAME.search(line):
            self.name = name[1]
        if tests := _TESTS.search(line):
            self.tests = tests[1]
        if nccl := _NCCL.search(line):
            self.nccl = _version(nccl[1]) if nccl[1] else nccl[2]
        if rank := _RANK.search(line):
            self.ranks.append((int(rank[1]), rank[2] or "", rank[3]))
        if most := _MOST.search(line):
            self.most = int(most[1])
        if columns := _COLUMNS.search(line):
            self.columns = [word for word in columns[1].split() if word != "timestamp"]

    @property
    def versions(self) -> str:
        tests = f"nccl-tests {self.tests}" if self.tests else "nccl-tests"
        return f"{tests}, NCCL {self.nccl}" if self.nccl else tests

    @property
    def world_size(self) -> int | None:
        """Number of ranks; 1 if several jobs of one rank each have written the file."""
        if len({rank for rank, _, _ in self.ranks}) < len(self.ranks):
            return 1
        groups = [group for _, group, _ in self.ranks]
        return max(map(groups.count, groups)) if groups else None

    @property
    def hosts(self) -> int:
        return len({host for _, _, host in self.ranks})


def tables(given: str) -> list[Table]:
    """Reads a file; it may have tables of several collectives, one after the other.

    Args:
        given: path of the file, or `COLLECTIVE=PATH` for a file that does not name its collective.

    Raises:
        UserError: the file is missing, cut off, or has no times, wrong results or unknown columns;
            its collective is unknown, or cannot be inferred.
    """
    name, equals, rest = given.partition("=")
    stated = name if equals and not Path(given).exists() else None
    path = Path(rest if stated else given)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        date = time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime))
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    parts = _of_json if text.lstrip().startswith("{") else _of_text
    result = [_table(path, *part, stated) for part in parts(path, text, date)]
    if not result:
        raise UserError(
            f"{path}: has no rows of nccl-tests (size, count, type, ..., time, algbw, busbw)"
        )
    return result


def _of_text(path: Path, text: str, date: str) -> Iterator[tuple[_Header, list[_Row]]]:
    header, rows = _Header(date=date), list[tuple[str, re.Match[str]]]()
    # Lines after the rows belong to the table that follows.
    coming = _Header(date=date)
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if row := _ROW.search(_TIMESTAMP.sub("", line)):
            rows.append((f"{path}, line {number}", row))
            continue
        if rows and _STARTS.search(line):
            yield header, _rows(header, rows)
            header, coming, rows = coming, _Header(date=date), []
        (coming if rows else header).read(line)
    if (
        lines
        and not text.endswith("\n")
        and _CUT_ROW.fullmatch(re.split(r"[:>\]]", lines[-1])[-1].strip())
    ):
        raise UserError(f"{path}, line {len(lines)}: the log is cut off in this row")
    if rows:
        yield header, _rows(header, rows)


def _rows(header: _Header, matches: Sequence[tuple[str, re.Match[str]]]) -> list[_Row]:
    """Returns the rows; the columns are those of the header, or else follow from their number."""
    place, first = matches[0]
    width = len(first[4].split())
    columns = header.columns
    if columns is None:
        before = ["redop"] if re.match("[a-z]", first[4]) else []
        before += ["root"] if (width - len(before)) % len(_NUMBERS) == 1 else []
        columns = [*before, *_NUMBERS, *_NUMBERS][: max(width, len(before) + len(_NUMBERS))]
    if "cputime" in columns:
        raise UserError(f"{place}: has times of the CPU (-C 1), not of the network")
    times = [at for at, name in enumerate(columns) if name == "time"]
    if len(times) == 2 and width == len(columns) - (times[1] - times[0]):
        columns, times = columns[: times[1]], times[:1]  # only in-place
    rows = []
    for place, match in matches:
        cells = match[4].split()
        if len(cells) != len(columns):
            raise UserError(
                f"{place}: the row has {3 + len(cells)} columns instead of {3 + len(columns)}: the "
                "log is cut off, or several programs have written it"
            )
        # Before 2.11, the last number is an error such as 5e-07.
        checked = columns[times[0] + 3] == "#wrong" and "e-" not in match[4]
        if not all(_NUMBER.fullmatch(cells[at + k]) for at in times for k in range(3)):
            raise UserError(f"{place}: time, algbw and busbw must be numbers")
        wrong = [cells[at + 3] for at in times if checked]
        if not all(cell == "N/A" or _NUMBER.fullmatch(cell) for cell in wrong):
            raise UserError(f"{place}: #wrong must be a number or N/A: the log is cut off")
        blocks = [(*cells[at : at + 3], cells[at + 3] if checked else "N/A") for at in times]
        size, count, word = int(match[1]), int(match[2]), _WORDS[match[3]]
        reduces = "redop" in columns and cells[columns.index("redop")] != "none"
        rows.append(
            _Row(place=place, size=size, count=count, word=word, reduces=reduces, blocks=blocks)
        )
    return rows


def _of_json(path: Path, text: str, date: str) -> Iterator[tuple[_Header, list[_Row]]]:
    try:
        # As text, the numbers keep their digits.
        data = json.loads(text, parse_float=str)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON, or cut off: {error}") from None
    try:
        header = _Header(date=str(data.get("start_time", date))[:10])
        header.nccl = _version(str(data.get("nccl_version", "")))
        config, results = data.get("config", {}), data["results"]
        # Of each process, the file has only the first rank.
        each = int(config.get("nthreads", 1)) * int(config.get("ngpus", 1))
        devices = config.get("devices", [])
        each = 1 if any(int(device["rank"]) == 1 for device in devices) else each
        header.ranks = [
            (int(device["rank"]) + further, str(device["group"]), device["hostname"])
            for device in devices
            for further in range(each)
        ]
        for name in (*data.get("args", [])[:1], *(row.get("experiment_name") for row in results)):
            match = _NAME.search(name or "")
            header.name = header.name or (match[1] if match else name)
        rows = [_json_row(f"{path}, result {at}", row) for at, row in enumerate(results, 1)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not in the JSON form of nccl-tests: {error!r}") from None
    if rows:
        yield header, rows


def _json_row(place: str, row: dict[str, object]) -> _Row:
    blocks = []
    for key in ("out_of_place", "in_place"):
        block = row.get(key)
        if isinstance(block, dict):
            if "cpu_time" in block:
                raise UserError(f"{place}: has times of the CPU (-C 1), not of the network")
            numbers = [str(block[name]) for name in _JSON_NUMBERS]
            wrong = "0" if block["nwrong"] is None else str(block["nwrong"])
            if not all(map(_NUMBER.fullmatch, (*numbers, wrong))):
                raise ValueError(f"{numbers} must be numbers")
            blocks.append((*numbers, wrong))
    return _Row(
        place=place,
        size=int(str(row["size"])),
        count=int(str(row["count"])),
        word=_WORDS[str(row["type"])],
        reduces=row["redop"] != "none",
        blocks=blocks,
    )


def _table(path: Path, header: _Header, rows: Sequence[_Row], stated: str | None) -> Table:
    filled = [row for row in rows if row.size > 0]
    if not filled:
        raise UserError(f"{path}: all messages have 0 bytes")
    if stated and header.name and header.name != stated:
        raise UserError(f"{path}: has times of {header.name}, not of {stated}")
    name = header.name or stated or _inferred(path, filled)
    operation = COLLECTIVES.get(name.replace("_", "").lower())
    if operation is None:
        raise unknown(f"collective of {path}", name, COLLECTIVES.values())
    world_size = _world_size(operation, header.world_size, filled)
    if world_size == 1:
        raise UserError(
            f"{path}: each rank ran alone, so nothing was sent: was nccl-tests built without MPI=1?"
        )
    seconds: dict[int, list[float]] = {}
    for row in filled:
        seconds.setdefault(row.size, []).extend(_seconds(row))
    early = f", ends before {header.most} bytes" if 2 * max(seconds) <= header.most else ""
    return Table(
        file=path.name,
        operation=operation,
        world_size=world_size,
        hosts=header.hosts if len(header.ranks) == world_size else None,
        versions=header.versions + early,
        date=header.date,
        seconds=dict(sorted(seconds.items())),
    )


def _inferred(path: Path, rows: Sequence[_Row]) -> str:
    """Returns the collective of a table without a name, if the numbers fit only one."""
    whole, low = rows[-1].size == rows[-1].count * rows[-1].word, _bus_factor(rows)[0]
    if whole and low > 1:
        return "all_reduce"
    if not whole and rows[-1].reduces:
        return "reduce_scatter"
    raise UserError(
        f"{path}: does not name its collective; give NAME={path}, where NAME is one of "
        f"{', '.join(COLLECTIVES.values())}"
    )


def _seconds(row: _Row) -> list[float]:
    """Returns the times of a row; raises `UserError` for one that is wrong or not positive."""
    result = []
    for time_us, _, _, wrong in row.blocks:
        if wrong not in ("N/A", "0") and float(wrong) > 0:
            raise UserError(f"{row.place}: {wrong} values of the result are wrong")
        if not 0 < float(time_us) < math.inf:
            raise UserError(f"{row.place}: a time must be above 0, got {time_us} us")
        result.append(1e-6 * float(time_us))
    return result


def _bus_factor(rows: Sequence[_Row]) -> tuple[float, float]:
    """Returns the bounds of busbw / algbw that follow from the digits of these columns."""
    low, high = 0.0, math.inf
    for _, algbw, busbw, _ in itertools.chain.from_iterable(row.blocks for row in rows):
        (a, a_off), (b, b_off) = map(_with_rounding, (algbw, busbw))
        low = max(low, (b - b_off) / (a + a_off))
        high = min(high, (b + b_off) / (a - a_off)) if a > a_off else high
    return low, high


def _with_rounding(text: str) -> tuple[float, float]:
    """Returns a printed number, and the largest error of its rounding."""
    digits, _, power = text.lower().partition("e")
    last = 0.5 * 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
    return float(text), 1.01 * last


def _world_size(operation: str, listed: int | None, rows: Sequence[_Row]) -> int | None:
    """Returns the number of ranks that follows from the columns; else that of the listed devices.

    Lists of devices are often shortened, and one of several jobs of one rank lists them wrongly.
    """
    if operation in ("all_gather", "reduce_scatter"):
        return round(rows[-1].size / max(1, rows[-1].count * rows[-1].word))
    if operation == "all_reduce":
        # busbw / algbw = 2 (P - 1) / P, by doc/PERFORMANCE.md of nccl-tests.
        low, high = (2 / (2 - x) if x < 2 else math.inf for x in _bus_factor(rows))
        if high < math.inf and math.ceil(low) == math.floor(high):
            return math.ceil(low)
    return listed


def _version(number: str) -> str | None:
    """Returns NCCL's version from its number: 23007 is 2.30.7 (2.9 and later)."""
    if not number.isdecimal() or int(number) < 10_000:
        return number or None
    return f"{int(number) // 10_000}.{int(number) // 100 % 100}.{int(number) % 100}"
