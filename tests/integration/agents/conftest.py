"""One model and one server for all clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.agents import workplace
from tests.integration.agents.running import PYTHON
from tests.integration.server.server_process import Server, running
from tests.required_programs import skip_or_fail


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It runs in the folder of the model, which it finds by its name."""
    if not PYTHON.exists():
        skip_or_fail("scripts/real_environment.py agents makes the environment of these tests")
    folder = tmp_path_factory.mktemp("workplace")
    workplace.make(folder)
    with running(folder / "served", f'allowed_models=["{workplace.MODEL}"]', cwd=folder) as one:
        yield one
