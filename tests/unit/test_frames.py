"""Records as tables of pandas."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import pytest

import common.results
from common.results.store import Comparison
from common.results.timed import rows
from dear.errors import UserError

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "docs/records"


def test_a_sweep_is_a_table_with_a_row_per_trial_and_typed_columns():
    result = common.results.frame(RECORDS / "merging")
    comparison = Comparison.load(RECORDS / "merging")
    records = comparison.results(RECORDS / "merging")
    wanted = rows.make_rows(records, comparison.compare_to)
    assert result["algorithm"].tolist() == [row.algorithm for row in wanted]
    assert result["throughput"].tolist() == [row.throughput for row in wanted]
    assert result["hash"].tolist() == [record.hash for record in records]
    kinds = result.dtypes
    assert pd.api.types.is_float_dtype(kinds["step_s"])
    assert pd.api.types.is_integer_dtype(kinds["world_size"])
    assert pd.api.types.is_string_dtype(kinds["verdict"])
    assert pd.api.types.is_bool_dtype(kinds["leads"])
    assert pd.isna(result.loc[0, "speedup"]) and result["option_merge"].iloc[1] == "greedy"
    assert str(result["started"].dt.tz) == "UTC"


def test_every_timed_step_is_a_row():
    result = common.results.steps(str(RECORDS / "merging"))
    comparison = Comparison.load(RECORDS / "merging")
    records = comparison.results(RECORDS / "merging")
    assert len(result) == sum(len(repeat) for record in records for repeat in record.repeats)
    mean = result.groupby(["id", "repeat"])["step_s"].mean().groupby("id").mean()
    assert {i: pytest.approx(s) for i, s in mean.items()} == {r.id: r.step_s for r in records}


def test_what_is_no_sweep_is_said(tmp_path):
    with pytest.raises(UserError, match=r"has no experiment\.json"):
        common.results.frame(tmp_path)
    Comparison(compare_to="ddp", trials=("x",)).save(tmp_path)
    (tmp_path / "records.jsonl").write_text("")
    with pytest.raises(UserError, match="no trial has ended yet"):
        common.results.steps(tmp_path)


def test_it_needs_no_torch_and_a_sweep_no_pandas():
    script = (
        "import sys, common.results; common.results.frame('docs/records/merging');"
        "assert 'torch' not in sys.modules;"
        "import common.harness.cli; print('ok')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "ok\n", done.stderr
    script = "import sys, common.harness.cli; assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_the_notebook_shows_what_it_says(monkeypatch):
    """Every cell, in order; what a cell ends with is shown, and none of it is empty."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(ROOT / "examples" / "notebooks")
    matplotlib.use("Agg")
    notebook = json.loads(Path("results.ipynb").read_text())
    names: dict[str, Any] = {}
    shown = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        *first, last = tree.body
        exec(compile(ast.Module(first, []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
        else:
            exec(compile(ast.Module([last], []), "cell", "exec"), names)
    assert len(shown) == 5 and all(len(item) for item in shown[:4])
    assert len(names["trials"]) == 6 and names["axis"].get_xlabel() == "throughput (img/s)"
    assert (names["between"] > 0).all()
