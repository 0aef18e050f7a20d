"""A project with a task, and somebody who launches its commands."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet_databases import migrated_file
from tests.integration.launch.person import Person

__all__ = ["migrated_file", "person"]

TOY = Path(__file__).parents[1] / "toy_task.py"


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    project = tmp_path / "project"
    project.mkdir()
    (tmp_path / "home").mkdir()
    shutil.copy(TOY, project / "task.py")
    found = Person(project, tmp_path / "home")
    yield found
    found.leaves()
