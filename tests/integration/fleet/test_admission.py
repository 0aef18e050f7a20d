"""The suite of `tests/unit/jobs/fleet/queue/test_admission.py` on a real PostgreSQL."""

from tests.unit.jobs.fleet.queue.test_admission import *  # noqa: F403
