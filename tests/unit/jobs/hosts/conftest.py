"""The machine that the runner is asked on: with this Python, with each that it has to run on, or one that has never been asked."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runner_machine import EVERY_PYTHON, Machine, machine


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path) as made:
        yield made


@pytest.fixture(params=EVERY_PYTHON)
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path, request.param) as made:
        yield made
