"""The cookbook's own tests of its recipes, which need a service: from its source distribution, run by pytest as they stand.

They check that a recipe ends well, and some read what it has written. A server serves the very small model by the name that a recipe takes
when none is given.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cookbook.running import run_own_tests
from tests.integration.cookbook.workplace import MODEL
from tests.integration.server.server_process import running

pytestmark = [pytest.mark.soak(suite="cookbook"), pytest.mark.timeout(1200)]

LARGE, SMALL = "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-4B"
SMOKE_FOLDER = Path("/tmp/tinker-smoke-test")
"""Where some of these tests have their recipes write."""


@pytest.fixture
def empty_smoke_folder() -> Iterator[None]:
    shutil.rmtree(SMOKE_FOLDER, ignore_errors=True)
    yield
    shutil.rmtree(SMOKE_FOLDER, ignore_errors=True)


def serve_and_test(workplace: Path, base: str, file: str) -> None:
    """Serve the model as `base`, and run the tests of a file."""
    name = workplace / base
    if not name.exists():
        name.symlink_to(workplace / MODEL, target_is_directory=True)
    folder = workplace / f"served-{Path(file).stem}"
    words = (f'allowed_models=["{base}"]', "max_models=8", "max_context_length=4096")
    with running(folder, *words, cwd=workplace) as server:
        run_own_tests(workplace, server.url, file)


@pytest.mark.recipe("test_recipe_chat_sl.py", "its own tests: trains, and resumes")
@pytest.mark.usefixtures("empty_smoke_folder")
def test_chat_sl(workplace: Path) -> None:
    serve_and_test(workplace, LARGE, "test_recipe_chat_sl.py")


@pytest.mark.recipe(
    "test_recipe_rolling_checkpoints.py",
    "its own tests: rolling, periodic and final checkpoints; resumes from them",
)
@pytest.mark.usefixtures("empty_smoke_folder")
def test_rolling_checkpoints(workplace: Path) -> None:
    serve_and_test(workplace, LARGE, "test_recipe_rolling_checkpoints.py")


@pytest.mark.recipe("test_recipe_dpo.py", "its own test: ends well")
def test_dpo(workplace: Path) -> None:
    serve_and_test(workplace, LARGE, "test_recipe_dpo.py")


@pytest.mark.recipe(
    "test_recipe_math_rl.py",
    "its own tests: synchronous, asynchronous, and with minibatches that are trained on as they come",
)
def test_math_rl(workplace: Path) -> None:
    serve_and_test(workplace, SMALL, "test_recipe_math_rl.py")
