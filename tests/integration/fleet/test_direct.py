"""The suite of `tests/unit/fleet/test_direct.py` on a real PostgreSQL."""

from tests.unit.fleet.test_direct import *  # noqa: F403
