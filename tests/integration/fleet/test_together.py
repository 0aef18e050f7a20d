"""The suite of `tests/unit/fleet/attempts/test_together.py` on a real PostgreSQL."""

from tests.unit.fleet.attempts.test_together import *  # noqa: F403
