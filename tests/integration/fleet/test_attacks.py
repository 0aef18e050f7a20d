"""On a real PostgreSQL: hostile values in every field of the fleet's API, and machines that lie in several places at once."""

import copy
import random

import pytest

from groupwise.jobs.fleet.machines import observation
from groupwise.jobs.hosts import answers
from groupwise.jobs.hosts.framing import BadAnswer
from tests.unit.jobs.fleet.api.test_hostile_values import *  # noqa: F403
from tests.unit.jobs.fleet.machines.test_observation import SAID, Fleet, fleet, leaves

__all__ = ["fleet"]
pytestmark = pytest.mark.soak(suite="attacks")
LIES = (
    2**31, 2**63, -1, -(2**63), 10**400, 1e308, float("nan"), "x" * 100_000, "\N{REPLACEMENT CHARACTER}'; --", "", None, [], {}, True,
    [{}], "../..", "GPU-0", "running", ["x"] * 2_000,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_observations_with_several_forged_values_do_no_harm(fleet: Fleet, seed: int) -> None:
    rng = random.Random(seed)
    believed = 0
    for number in range(500):
        document = copy.deepcopy(SAID)
        for _ in range(rng.randint(1, 3)):
            within, key = rng.choice(list(leaves(document)))
            within[key] = copy.deepcopy(rng.choice(LIES))
        try:
            seen = answers.parse_observation(document)
        except BadAnswer:
            continue
        believed += 1
        at = fleet.start + number
        fleet.database.run(lambda s, at=at, seen=seen: observation.apply(s, "vm", at, seen))
    assert believed > 20
