"""The known cost of a job's machines so far: each from its start to its end, at its price at the start.

AWS reports machines for about an hour after their end; the machine that launches or fetches stores what it has seen (`aws_state.py`). If
a machine's end was never reported, it counts until it was found to be missing, or until its deadline: its cost is never underestimated.
Disks, network traffic, and changes of a spot price are only in AWS's bill.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from groupwise.jobs.clouds.backend import Cost
from groupwise.jobs.clouds.ec2 import Machine


@dataclass(frozen=True, slots=True)
class InstanceUsage:
    """The lifetime of a machine, and its price. Times are seconds since the epoch."""

    since: float
    until: float
    """Its end, or the time when it was last seen."""
    price: float | None
    """Dollars per hour; None: not known."""
    ended: bool
    deadline: float | None = None
    """Time at which it ends by itself at the latest."""

    @property
    def hours(self) -> float:
        return max(0.0, self.until - self.since) / 3600


def usage_of(machines: Iterable[Machine], now: float) -> dict[str, InstanceUsage]:
    """The usage of each machine by id, as AWS reports it."""
    usage: dict[str, InstanceUsage] = {}
    for machine in machines:
        tags, price = machine.tags, machine.tags.get("price")
        since = float(tags.get("since", now))
        ended_at, has_ended = now, machine.state in ("shutting-down", "terminated")
        if has_ended:
            latest = min(now, max(since, float(tags.get("deadline", now))))
            ended_at = latest if machine.ended_at is None else machine.ended_at
        deadline = None if "deadline" not in tags else float(tags["deadline"])
        dollars = None if price is None else float(price)
        usage[machine.id] = InstanceUsage(since, ended_at, dollars, has_ended, deadline)
    return usage


def merge_usage(
    known: Mapping[str, InstanceUsage], seen: Mapping[str, InstanceUsage]
) -> dict[str, InstanceUsage]:
    """Merge earlier usage with the current one. The first recorded end of a machine is kept, as the most exact."""
    ends = {name: instance for name, instance in known.items() if instance.ended}
    return {**known, **seen, **ends}


def with_forgotten(
    usage: Mapping[str, InstanceUsage], reported: Collection[str], now: float
) -> dict[str, InstanceUsage]:
    """Extend the usage of machines that AWS no longer reports and whose end was not seen: they may have existed until their deadlines."""
    extended = dict(usage)
    for name, instance in usage.items():
        if not instance.ended and name not in reported and instance.deadline is not None:
            extended[name] = replace(
                instance, until=max(instance.until, min(now, instance.deadline))
            )
    return extended


def cost_of(usage: Mapping[str, InstanceUsage]) -> Cost | None:
    """The total cost of these machines; None if no price is known."""
    priced = {
        name: (instance, instance.price)
        for name, instance in usage.items()
        if instance.price is not None
    }
    if not priced:
        return None
    dollars = sum(price * instance.hours for instance, price in priced.values())
    listed = [
        f"{name} {instance.hours:.2f} h at ${price:.2f}"
        for name, (instance, price) in priced.items()
    ]
    unknown = [
        f"{name} has no known price and is not counted" for name in sorted(set(usage) - set(priced))
    ]
    not_counted = (
        "without disks, and without machines that AWS has forgotten and this machine has never seen"
    )
    return Cost(round(dollars, 2), "; ".join((", ".join(listed), *unknown, not_counted)))
