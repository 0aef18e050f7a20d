"""The same suite on SQLite and on a real PostgreSQL."""

import pytest

from tests.unit.fleet.machines.test_observation import *  # noqa: F403

pytestmark = pytest.mark.fleet
