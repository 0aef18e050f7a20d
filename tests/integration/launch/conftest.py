"""A project with a task, and a user who launches its commands."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet_databases import migrated_file
from tests.integration.launch.person import Person

__all__ = ["migrated_file", "person"]

TOY = Path(__file__).parents[1] / "toy_task.py"
HELD = """

def get_reward_funcs(config, tokenizer):
    return [held]


def held(completions, wanted, trainer_state, **kwargs):
    import pathlib, time
    holds = pathlib.Path({holds!r})
    while holds.exists() and trainer_state.global_step >= int(holds.read_text()):
        time.sleep(0.02)
    return share(completions, wanted)
"""
"""A training that goes no further than to a step, so that it cannot end before somebody has come to it."""


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Person]:
    project = tmp_path / "project"
    project.mkdir()
    (tmp_path / "home").mkdir()
    shutil.copy(TOY, project / "task.py")
    found = Person(project, tmp_path / "home")
    with (project / "task.py").open("a") as task:
        task.write(HELD.format(holds=str(found.holding_step)))
    yield found
    found.leaves()
