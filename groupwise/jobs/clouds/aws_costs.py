"""The cost of a job's machines so far, as far as it is known: each from its start to its end, at the price that it began with.

AWS reports machines for about an hour after their end; the machine that launches or fetches keeps what it has seen (`aws_state.py`). A
machine whose end was never reported is counted until it was found to be gone, or until its deadline, so its cost is never underestimated.
Disks, traffic, and changes of a spot price stand in the cloud's bill alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from groupwise.jobs.clouds.backend import Cost
from groupwise.jobs.clouds.ec2 import Machine


@dataclass(frozen=True, slots=True)
class InstanceUsage:
    """The time in which a machine existed, and its price. Times are seconds since the epoch."""

    since: float
    until: float
    """Its end, or when it was seen last."""
    price: float | None
    """Dollars an hour; None: not known."""
    ended: bool
    deadline: float | None = None
    """When it ends by itself at the latest."""

    @property
    def hours(self) -> float:
        return max(0.0, self.until - self.since) / 3600


def usage_of(machines: Iterable[Machine], now: float) -> dict[str, InstanceUsage]:
    """The usage of each machine by its id, as AWS reports it."""
    found: dict[str, InstanceUsage] = {}
    for machine in machines:
        tags, price = machine.tags, machine.tags.get("price")
        since = float(tags.get("since", now))
        until, ended = now, machine.state in ("shutting-down", "terminated")
        if ended:
            latest = min(now, max(since, float(tags.get("deadline", now))))
            until = latest if machine.ended_at is None else machine.ended_at
        deadline = None if "deadline" not in tags else float(tags["deadline"])
        dollars = None if price is None else float(price)
        found[machine.id] = InstanceUsage(since, until, dollars, ended, deadline)
    return found


def merge_usage(
    known: Mapping[str, InstanceUsage], seen: Mapping[str, InstanceUsage]
) -> dict[str, InstanceUsage]:
    """Join what was seen before with what is seen now; the end that was found first is nearest to the truth."""
    ends = {name: each for name, each in known.items() if each.ended}
    return {**known, **seen, **ends}


def with_forgotten(
    usage: Mapping[str, InstanceUsage], reported: Collection[str], now: float
) -> dict[str, InstanceUsage]:
    """Extend machines that AWS reports no longer and whose end was not seen: they may have existed until their deadlines."""
    found = dict(usage)
    for name, each in usage.items():
        if not each.ended and name not in reported and each.deadline is not None:
            found[name] = replace(each, until=max(each.until, min(now, each.deadline)))
    return found


def cost_of(usage: Mapping[str, InstanceUsage]) -> Cost | None:
    """The cost of all of them; None if no price is known."""
    priced = {name: (each, each.price) for name, each in usage.items() if each.price is not None}
    if not priced:
        return None
    dollars = sum(price * each.hours for each, price in priced.values())
    listed = [
        f"{name} {each.hours:.2f} h at ${price:.2f}" for name, (each, price) in priced.items()
    ]
    unknown = [
        f"{name} has no known price and is not counted" for name in sorted(set(usage) - set(priced))
    ]
    beyond = (
        "without disks, and without machines that AWS has forgotten and this machine has never seen"
    )
    return Cost(round(dollars, 2), "; ".join((", ".join(listed), *unknown, beyond)))
