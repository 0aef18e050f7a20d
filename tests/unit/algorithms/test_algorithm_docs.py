"""The pages on algorithms list what there is, with its defaults; `acceptance/test_docs.py` runs its examples."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

from benchmarks.algorithms import FILE, VARIANTS, table
from groupwise.algorithms.registry import ALGORITHMS

DOCS = Path(__file__).parents[3] / "docs"
PAGE, FORMULAS, SETTINGS = (
    (DOCS / name).read_text(encoding="utf-8")
    for name in ("algorithms.md", "algorithm-formulas.md", "algorithm-settings.md")
)


def _rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its two head lines."""
    section = SETTINGS.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_algorithm_has_a_section() -> None:
    headings = re.findall(r"^## `(\w+)`", FORMULAS, re.MULTILINE)
    assert sorted(headings) == sorted(ALGORITHMS)


def test_the_table_has_every_default_that_differs_between_algorithms() -> None:
    written = {
        (algorithm, knob.strip("`"), default.strip("`"))
        for knob, default, algorithms in _rows("Defaults that differ")
        for algorithm in algorithms.split(", ")
    }
    existing = {
        (name, knob.name, json.dumps(knob.default).strip('"'))
        for name, kind in ALGORITHMS.items()
        for knob in fields(kind)
    }
    defaults = {(knob, default) for _, knob, default in existing}
    count = Counter(knob for knob, _ in defaults)
    assert written == {row for row in existing if count[row[1]] > 1}


def test_the_example_of_ones_own_is_the_file() -> None:
    file = Path(__file__).parents[3] / "examples" / "11_own_algorithm" / "asymmetric.py"
    assert f"```python\n{file.read_text(encoding='utf-8')}```" in PAGE


def test_the_table_of_all_on_one_task_is_that_of_the_stored_runs() -> None:
    runs = json.loads(FILE.read_text())["runs"]
    assert runs.keys() == VARIANTS.keys()
    assert {len(by_seed) for by_seed in runs.values()} == {5}
    assert f"\n\n{table(runs)}\n\n" in PAGE
