"""Do the tests of docs/correctness.md fail when the mistake is made? Each mistake of `tests/mutations.py` is made in a copy of the package.

A text of a mutation that is not found exactly once fails its test: whoever changes the code writes the mistake anew, as it would be
made now. That the named tests pass without a mutation is seen in a tree without one.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutating import Mutation, Nursery, Outcomes, tree
from tests.mutations import MUTATIONS

pytestmark = pytest.mark.slow

SLICE = 12
"""One mistake of so many is made whenever the tests run; `make soak SUITE=mistake` makes the others."""
SLICED = [
    pytest.param(
        mutation,
        id=mutation.name,
        marks=[pytest.mark.soak(suite="mutations")] if number % SLICE else [],
    )
    for number, mutation in enumerate(MUTATIONS)
]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as started:
        yield started


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder for a tree, which is too large to be kept for later."""
    yield tmp_path / "tree"
    shutil.rmtree(tmp_path / "tree", ignore_errors=True)


def failed(test: str, outcomes: Outcomes) -> bool:
    """Whether a test failed in at least one of its cases."""
    return any(node == test or node.startswith(f"{test}[") for node in outcomes.failed)


@pytest.mark.parametrize("mutation", SLICED)
def test_a_mistake_is_noticed(nursery: Nursery, place: Path, mutation: Mutation) -> None:
    outcomes = nursery.run(tree(place, mutation.edits), mutation.tests)
    assert outcomes.package == str(place / "groupwise" / "__init__.py")
    assert not outcomes.broken, outcomes.talk
    assert outcomes.code == 1, outcomes.talk
    assert [test for test in mutation.tests if not failed(test, outcomes)] == [], outcomes.talk


@pytest.mark.parametrize(
    "mutations",
    [
        pytest.param(MUTATIONS[:: 3 * SLICE], id="some"),
        pytest.param(
            MUTATIONS,
            id="all",
            marks=[pytest.mark.soak(suite="mutations"), pytest.mark.timeout(3600)],
        ),
    ],
)
def test_without_a_mistake_they_pass(
    nursery: Nursery, place: Path, mutations: tuple[Mutation, ...]
) -> None:
    named = sorted({test for mutation in mutations for test in mutation.tests})
    outcomes = nursery.run(tree(place), named)
    assert outcomes.package == str(place / "groupwise" / "__init__.py")
    assert outcomes.code == 0, outcomes.talk
    assert len(outcomes.passed) >= len(named)


@pytest.mark.parametrize("text", ["no such text", "dataclass"])
def test_a_text_that_is_gone_or_stands_twice_is_told(place: Path, text: str) -> None:
    with pytest.raises(AssertionError, match=r"types\.py has the text of a mutation \d+ times"):
        tree(place, (("types.py", text, ""),))
    assert not place.exists()
