"""The suite of `tests/unit/fleet/test_requeue.py` on a real PostgreSQL."""

from tests.unit.fleet.test_requeue import *  # noqa: F403
