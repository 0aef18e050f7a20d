"""What a job has cost: all machines that it had, each from its start to its end, and words that say what was counted."""

from groupwise.jobs.clouds.aws_costs import cost_of, usage_of, with_forgotten
from groupwise.jobs.clouds.backend import Cost
from groupwise.jobs.clouds.ec2 import Machine

HOUR = 3600.0


def machine(name: str, state: str, ended_at: float | None = None, **tags: str) -> Machine:
    return Machine(name, state, tags, ended_at=ended_at)


def cost(*machines: Machine, now: float) -> Cost:
    found = cost_of(usage_of(machines, now))
    assert found is not None
    return found


def test_all_machines_are_counted_each_to_its_end_and_what_has_no_price_is_told() -> None:
    gone = machine("i-1", "terminated", 2 * HOUR, since="0", price="1.5")
    lives = machine("i-2", "running", since=f"{4 * HOUR}", price="2")
    unknown = machine("i-3", "running", since="0")
    found = cost(gone, lives, unknown, now=5 * HOUR)
    assert found.dollars == 1.5 * 2 + 2 * 1
    assert "i-1 2.00 h at $1.50, i-2 1.00 h at $2.00" in found.counts
    assert "i-3 has no known price" in found.counts
    assert cost_of(usage_of([unknown], HOUR)) is None


def test_one_that_was_forgotten_unseen_may_have_been_there_to_its_deadline() -> None:
    """As where the laptop was shut as soon as it began."""
    lives = machine("i-1", "running", since="0", price="1", deadline=f"{24 * HOUR}")
    seen = usage_of([lives], HOUR)
    assert with_forgotten(seen, {"i-1"}, 3 * HOUR)["i-1"].hours == 1
    assert with_forgotten(seen, (), 3 * HOUR)["i-1"].hours == 3
    assert with_forgotten(seen, (), 48 * HOUR)["i-1"].hours == 24
    ended = usage_of([machine("i-1", "terminated", HOUR, since="0", price="1")], 2 * HOUR)
    assert with_forgotten(ended, (), 48 * HOUR)["i-1"].hours == 1
