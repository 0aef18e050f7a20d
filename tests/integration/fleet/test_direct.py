"""The same suite on SQLite and on a real PostgreSQL."""

import pytest

from tests.unit.fleet.test_direct import *  # noqa: F403

pytestmark = pytest.mark.fleet
