"""The suite of `tests/unit/jobs/fleet/queue/test_capacity.py` on a real PostgreSQL."""

from tests.unit.jobs.fleet.queue.test_capacity import *  # noqa: F403
