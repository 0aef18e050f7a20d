"""The suite of `tests/unit/jobs/fleet/test_local.py` on a real PostgreSQL."""

from tests.unit.jobs.fleet.test_local import *  # noqa: F403
