"""One model and one server for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.real_vllm.real_server import PYTHON, RealServer, write_model
from tests.required_programs import skip_or_fail


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the base."""
    if not PYTHON.exists():
        skip_or_fail("scripts/real_environment.py vllm makes the environment of these tests")
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server that nobody ends."""
    started = RealServer(model, tmp_path_factory.mktemp("server"))
    started.begin()
    try:
        started.wait()
        yield started
    finally:
        started.end()
