"""The suite of `tests/unit/jobs/fleet/test_direct.py` on a real PostgreSQL."""

from tests.unit.jobs.fleet.test_direct import *  # noqa: F403
