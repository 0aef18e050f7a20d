"""The suite of `tests/unit/jobs/fleet/attempts/test_write_batching.py` on a real PostgreSQL."""

from tests.unit.jobs.fleet.attempts.test_write_batching import *  # noqa: F403
