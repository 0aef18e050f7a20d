"""The suite of `tests/unit/jobs/fleet/machines/test_observation.py` on a real PostgreSQL."""

from tests.unit.jobs.fleet.machines.test_observation import *  # noqa: F403
