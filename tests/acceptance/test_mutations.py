"""Do tests notice mistakes? Each of `tests/mutations.txt` is made in a copy of the package, and tests of the files beside it must fail.

A mistake that can no longer be made, because the code has changed, fails here too: write it as it would be made now.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutating import TABLE, ForkServer, Mutation, changed, read_table, tree

MUTATIONS = read_table(TABLE.read_text())
SOAK = pytest.mark.soak(suite="mutations")


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder for a tree, which is too large to be kept for later."""
    yield tmp_path / "tree"
    shutil.rmtree(tmp_path / "tree", ignore_errors=True)


def test_every_mistake_can_be_made() -> None:
    faults = []
    for mutation in MUTATIONS:
        try:
            changed(mutation.edits)
        except ValueError as error:
            faults.append(f"{mutation.mistake}: {error}")
    assert faults == []
    assert len({mutation.mistake for mutation in MUTATIONS}) == len(MUTATIONS)


@SOAK
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.mistake)
def test_a_mistake_is_noticed(fork_server: ForkServer, place: Path, mutation: Mutation) -> None:
    outcomes = fork_server.run(tree(place, mutation.edits), mutation.tests, "-x")
    assert outcomes.package == str(place / "groupwise" / "__init__.py")
    assert outcomes.failed, f"{mutation.tests} did not notice it:\n{outcomes.printed[-4000:]}"


@SOAK
@pytest.mark.timeout(1800)
def test_without_a_mistake_all_pass(fork_server: ForkServer, place: Path) -> None:
    files = sorted({test for mutation in MUTATIONS for test in mutation.tests})
    outcomes = fork_server.run(tree(place), files)
    assert outcomes.code == 0, outcomes.printed
