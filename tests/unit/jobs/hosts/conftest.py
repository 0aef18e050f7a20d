"""The machine on which the runner is tested: with this Python, with each that it must support, or a new one without runner."""

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
