"""One workplace and one server for all recipes; and the table of the recipes that pass, when the suite has run whole."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.server.tinker import compatibility
from tests.integration.cookbook import workplace as making
from tests.integration.cookbook.running import PYTHON, RELEASE, ROOT, SOURCE
from tests.integration.server.server_process import Server, running
from tests.required_programs import skip_or_fail

RESULTS = pytest.StashKey[dict[str, dict[str, Any]]]()


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current folder of the server and of the programs."""
    if not PYTHON.exists() or not SOURCE.exists():
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note how each recipe went; a fixture that trains counts with the test that asks for it first."""
    report = yield
    marker = item.get_closest_marker("recipe")
    if marker is not None and report.when != "teardown" and not report.skipped:
        recipe, seen = marker.args
        results = item.config.stash.setdefault(RESULTS, {})
        row = results.setdefault(
            item.nodeid, {"recipe": recipe, "passes": True, "seen": seen, "seconds": 0}
        )
        row["passes"] &= report.passed
        row["seconds"] += round(report.duration)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table and the page. If a part of the recipes has run, the rows of the others stay, unless they are of another release."""
    rows = [*session.config.stash.get(RESULTS, {}).values()]
    if not rows:
        return
    stored = json.loads(compatibility.COOKBOOK.read_text())
    files = Path(__file__).parent.glob("test_*.py")
    whole = sum(file.read_text().count("@pytest.mark.recipe(") for file in files)
    if len(rows) < whole and stored["release"] == RELEASE:
        by_recipe = {row["recipe"]: row for row in [*stored["recipes"], *rows]}
        rows = [*by_recipe.values()]
    write_table(
        compatibility.COOKBOOK,
        ROOT / "docs/operate/tinker.md",
        {"release": RELEASE, "recipes": rows},
    )


def write_table(stored: Path, page: Path, table: dict[str, Any]) -> None:
    """First what the page is made from, then the page."""
    stored.write_text(json.dumps(table, indent=1) + "\n")
    page.write_text(compatibility.page())
