"""What the machines of a job have cost so far, as far as that is known: each from its start to its end, at the price that it began with.

AWS tells of machines for about an hour after their end; the machine that launches or fetches keeps what it has seen (`aws_state.py`). One
whose end nobody has told is counted until it was found to be gone, or to its deadline: at most what it has cost, then. Disks, traffic and
what a spot machine cost at another hour are in the bill of the cloud alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from groupwise.jobs.clouds.backend import Cost
from groupwise.jobs.clouds.ec2 import Machine


@dataclass(frozen=True, slots=True)
class InstanceUsage:
    """A machine, while it was there. Moments are seconds since the epoch."""

    since: float
    until: float
    """Its end, or when it was seen last."""
    price: float | None
    """Dollars an hour; None: nobody could say."""
    ended: bool
    deadline: float | None = None
    """When it ends by itself at the latest."""

    @property
    def hours(self) -> float:
        return max(0.0, self.until - self.since) / 3600


def stays_of(machines: Iterable[Machine], now: float) -> dict[str, InstanceUsage]:
    """What AWS says of them, by their ids."""
    return {each.id: _stay(each, now) for each in machines}


def _stay(machine: Machine, now: float) -> InstanceUsage:
    tags, price = machine.tags, machine.tags.get("price")
    since = float(tags.get("since", now))
    until, ended = now, machine.state in ("shutting-down", "terminated")
    if ended:
        latest = min(now, max(since, float(tags.get("deadline", now))))
        until = latest if machine.ended_at is None else machine.ended_at
    deadline = None if "deadline" not in tags else float(tags["deadline"])
    return InstanceUsage(since, until, None if price is None else float(price), ended, deadline)


def together(
    known: Mapping[str, InstanceUsage], seen: Mapping[str, InstanceUsage]
) -> dict[str, InstanceUsage]:
    """What was seen before, and now; the end that was found first is nearest to the truth."""
    ends = {name: stay for name, stay in known.items() if stay.ended}
    return {**known, **seen, **ends}


def with_forgotten(
    stays: Mapping[str, InstanceUsage], told: Collection[str], now: float
) -> dict[str, InstanceUsage]:
    """Those of which AWS tells nothing any more, and whose end nobody saw: they may have been there to their deadlines."""
    return {
        name: each if each.ended or name in told else replace(each, until=_at_most(each, now))
        for name, each in stays.items()
    }


def _at_most(stay: InstanceUsage, now: float) -> float:
    return stay.until if stay.deadline is None else max(stay.until, min(now, stay.deadline))


def cost_of(stays: Mapping[str, InstanceUsage]) -> Cost | None:
    """Of all of them; None where there is no price that is known."""
    priced = {name: (each, each.price) for name, each in stays.items() if each.price is not None}
    if not priced:
        return None
    dollars = sum(price * each.hours for each, price in priced.values())
    listed = [
        f"{name} {each.hours:.2f} h at ${price:.2f}" for name, (each, price) in priced.items()
    ]
    unknown = [
        f"{name} has no known price and is not counted" for name in sorted(set(stays) - set(priced))
    ]
    beyond = (
        "without disks, and without machines that AWS has forgotten and this machine has never seen"
    )
    return Cost(round(dollars, 2), "; ".join((", ".join(listed), *unknown, beyond)))
