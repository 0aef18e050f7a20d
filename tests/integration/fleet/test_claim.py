"""The suite of `tests/unit/jobs/fleet/queue/test_claim.py` on a real PostgreSQL."""

from tests.unit.jobs.fleet.queue.test_claim import *  # noqa: F403
