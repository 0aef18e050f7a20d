"""Small groups and ledgers for the tests of the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from groupwise.core.retry import Timing
from groupwise.core.types import Example, Group, Rollout, Segment
from groupwise.server.ledger.groups import NewGroup, add_groups
from groupwise.server.ledger.rewards import Post, Posted, accept_rewards
from groupwise.server.ledger.runs import add_run
from groupwise.server.ledger.transaction import Transaction

RUN = "letters"
LEASE = 600.0
REWARDS = (1.0, 0.25)


@dataclass
class FakeTime:
    """A clock that stands still until it is moved."""

    wall: float = 1_700_000_000.0
    monotonic: float = 50.0
    timing: Timing = field(init=False)

    def __post_init__(self) -> None:
        self.timing = Timing(clock=lambda: self.monotonic, today=lambda: self.wall)

    def pass_(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds


def group(draw: int, text: str = "abc", members: int = 2) -> Group:
    """A group as it is sampled; what a client could echo depends on `text` and the number of members alone."""
    rollouts = tuple(
        Rollout(
            draw,
            member,
            0,
            (1, 2),
            (Segment("policy", (3 + member, 4), (-0.1, -1 / 3), 0, "f0", seed=2**63 + draw),),
            f"{text}{member}",
        )
        for member in range(members)
    )
    return Group(draw, Example(draw, [{"role": "user", "content": text}]), rollouts)


def new(draw: int, step: int = 0, text: str = "abc", name: str = "") -> NewGroup:
    """Group `g-<draw>`, or of another name."""
    return NewGroup(name or f"g-{draw}", group(draw, text), step, step, f"f{step}")


def begin(transaction: Transaction, run: str = RUN) -> None:
    add_run(transaction, run, f"/runs/{run}", {"model_id": "tiny"}, {"run": {"name": run}})


def open_groups(transaction: Transaction, *draws: int, step: int = 0, run: str = RUN) -> None:
    add_groups(transaction, run, [new(draw, step) for draw in draws], key_id="k", lease=LEASE)


def post(
    transaction: Transaction, name: str, rewards: tuple[float | None, ...] = REWARDS, **more: Any
) -> Posted:
    answer = {"status": "accepted", "time": transaction.now}
    return accept_rewards(transaction, RUN, Post(name, rewards, answer, **more))
