"""The suite of `tests/unit/jobs/fleet/test_requeue.py` on a real PostgreSQL."""

from tests.unit.jobs.fleet.test_requeue import *  # noqa: F403
