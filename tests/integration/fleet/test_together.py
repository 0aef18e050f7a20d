"""The suite of `tests/unit/fleet/attempts/test_together.py` on a real PostgreSQL."""

import pytest

from tests.fleet_databases import new_fleet
from tests.postgres import Postgres
from tests.unit.fleet.attempts.test_together import *  # noqa: F403

pytestmark = pytest.mark.fleet


@pytest.fixture
def ready_url(postgres: Postgres) -> str:
    """Not on SQLite once more."""
    return new_fleet(postgres)
