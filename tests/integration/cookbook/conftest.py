"""One workplace and one server for all recipes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cookbook import workplace as making
from tests.integration.cookbook.running import PYTHON
from tests.integration.server.server_process import Server, running
from tests.required_programs import skip_or_fail


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current folder of the server and of the programs."""
    if not PYTHON.exists():
        skip_or_fail("scripts/real_environment.py cookbook makes the environment of these tests")
    folder = tmp_path_factory.mktemp("workplace")
    making.make(folder)
    return folder


@pytest.fixture(scope="session")
def server(workplace: Path) -> Iterator[Server]:
    """It may be killed, and must be begun again then."""
    words = (f'allowed_models=["{making.MODEL}"]', "max_models=32", "max_context_length=4096")
    with running(workplace / "served", *words, cwd=workplace) as one:
        yield one
