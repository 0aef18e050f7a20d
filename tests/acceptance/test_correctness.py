"""docs/correctness.md names tests that exist, for every item, and says which of them are tried by mutation."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.mutating import TABLE, read_table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "correctness.md"
MUTATIONS = read_table(TABLE.read_text())
ITEMS = [*map(str, range(1, 25)), "24b", *map(str, range(25, 38))]


@dataclass(frozen=True)
class Row:
    """One line of the tables."""

    item: str
    promise: str
    folded: str
    tests: tuple[str, ...]
    mutated: bool


def rows() -> list[Row]:
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if re.match(r"\| \d", line)
    ]
    return [
        Row(item, promise, tests, tuple(re.findall(r"`([^`]+)`", tests)), mutated == "✓")
        for item, promise, tests, mutated in lines
    ]


ROWS = rows()


@cache
def named_in(file: str) -> frozenset[str]:
    """The tests of a file in `tests`, those of classes as `Class::test`."""
    found: set[str] = set()
    for node in ast.parse((ROOT / "tests" / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{each.name}" for each in node.body if hasattr(each, "name")}  # type: ignore[attr-defined]
    return frozenset(name for name in found if name.rpartition("::")[2].startswith("test_"))


def test_every_item_has_its_row() -> None:
    assert [row.item for row in ROWS] == ITEMS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.item)
def test_the_named_in_an_item_exist(row: Row) -> None:
    assert row.tests
    count = len(set(row.tests))
    assert count == len(row.tests)
    assert row.folded.startswith(f"<details><summary>{count} tests</summary>`"), f"{count} tests"
    for test in row.tests:
        file, _, name = test.partition("::")
        assert name in named_in(file), f"{test} is not there; {file} has {sorted(named_in(file))}"


def test_items_with_mutations_are_marked_and_name_their_tests() -> None:
    tried: dict[str, set[str]] = {}
    for mutation in MUTATIONS:
        item, _, mistake = mutation.mistake.partition(": ")
        if mistake and item in ITEMS:
            tried.setdefault(item, set()).update(mutation.tests)
    assert [row.item for row in ROWS if row.mutated] == [item for item in ITEMS if item in tried]
    for row in ROWS:
        named = {f"tests/{test.partition('::')[0]}" for test in row.tests}
        assert tried.get(row.item, set()) <= named, row.item


def test_the_page_is_linked() -> None:
    assert "](correctness.md)" in (ROOT / "docs" / "index.md").read_text()
