"""Do tests fail when a guard of the fleet is taken away? Each of `tests/fleet_mutations.py` is, in a copy of the package.

A run of the tests takes some of them, drawn by a seed that is printed (SEED repeats it); `make soak SUITE=mutations` takes all.
A text of a mutation that is not found exactly once is told at once, for all of them: whoever changes the code writes the mistake anew, as
it would be made now.
"""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet_mutations import GUARDS, QUICK, SLOW_IMPORTS
from tests.mutating import Mutation, Nursery, Outcomes, changed, tree

pytestmark = pytest.mark.fleet

DRAWN = 5
"""Half a minute's worth of the quick ones."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery(SLOW_IMPORTS) as started:
        yield started


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """For trees, which are too large to be kept for later."""
    yield tmp_path / "trees"
    shutil.rmtree(tmp_path / "trees", ignore_errors=True)


def failed(test: str, outcomes: Outcomes) -> bool:
    """In at least one of its cases."""
    return any(node == test or node.startswith(f"{test}[") for node in outcomes.failed)


def survives(nursery: Nursery, folder: Path, guard: Mutation) -> str:
    """Why nobody would have missed the guard; empty: its tests did."""
    folder.parent.mkdir(exist_ok=True)
    outcomes = nursery.run(tree(folder, guard.edits), guard.tests)
    assert outcomes.package == str(folder / "groupwise" / "__init__.py")
    silent = [test for test in guard.tests if not failed(test, outcomes)]
    if outcomes.broken:
        return f"{guard.name}: broken instead of failed: {sorted(outcomes.broken)}\n{outcomes.talk}"
    return f"{guard.name}: {silent} did not fail\n{outcomes.talk}" if silent else ""


def pass_unchanged(nursery: Nursery, folder: Path, guards: tuple[Mutation, ...]) -> None:
    folder.parent.mkdir(exist_ok=True)
    named = sorted({test for guard in guards for test in guard.tests})
    outcomes = nursery.run(tree(folder), named)
    assert outcomes.code == 0, outcomes.talk
    assert len(outcomes.passed) >= len(named)


def test_every_text_stands_once() -> None:
    for guard in GUARDS:
        assert changed(guard.edits), guard.name
    names = [guard.name for guard in GUARDS]
    assert len(set(names)) == len(names)


@pytest.mark.timeout(600)
def test_some_guards_are_missed(nursery: Nursery, place: Path) -> None:
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(2**31))
    drawn = random.Random(seed).sample(QUICK, DRAWN)
    print(f"SEED={seed}", *(guard.name for guard in drawn), sep="\n")
    pass_unchanged(nursery, place / "whole", tuple(drawn))
    for number, guard in enumerate(drawn):
        problem = survives(nursery, place / str(number), guard)
        assert not problem, f"SEED={seed}\n{problem}"
        shutil.rmtree(place / str(number))


@pytest.mark.soak(suite="mutations")
@pytest.mark.parametrize("guard", [pytest.param(guard, id=guard.name) for guard in GUARDS])
def test_fleet_mutations(nursery: Nursery, place: Path, guard: Mutation) -> None:
    problem = survives(nursery, place / "changed", guard)
    assert not problem, problem


@pytest.mark.soak(suite="mutations")
@pytest.mark.timeout(3600)
def test_without_fleet_mutations_they_pass(nursery: Nursery, place: Path) -> None:
    pass_unchanged(nursery, place / "whole", GUARDS)
