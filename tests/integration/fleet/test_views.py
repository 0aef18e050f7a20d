"""The suite of `tests/unit/jobs/fleet/store/test_views.py` on a real PostgreSQL."""

from tests.unit.jobs.fleet.store.test_views import *  # noqa: F403
