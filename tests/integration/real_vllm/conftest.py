"""One model for all tests, and one server of each release."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.real_vllm.real_server import GIVEN, OLDEST, PYTHON, RealServer, write_model
from tests.required_programs import skip_or_fail

OLDEST_TOO = (
    [] if GIVEN else [pytest.param(OLDEST, marks=pytest.mark.soak(suite="vllm"), id="oldest")]
)


@pytest.fixture(scope="session", params=[pytest.param(PYTHON, id="newest"), *OLDEST_TOO])
def python(request: pytest.FixtureRequest) -> Path:
    """The Python of vLLM's environment."""
    if not request.param.exists():
        name = "vllm-oldest" if request.param == OLDEST else "vllm"
        skip_or_fail(f"scripts/real_environment.py {name} makes the environment of these tests")
    return request.param


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the base."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def server(
    python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    """A server that nobody ends."""
    started = RealServer(python, model, tmp_path_factory.mktemp("server"))
    started.begin()
    try:
        started.wait()
        yield started
    finally:
        started.end()
