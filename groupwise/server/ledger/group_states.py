"""The life of a group as the training server sees it, in one table.

A group is *open* from the moment it was sampled until its client posts rewards. Then it is *rewarded* and waits for a step, or *held*
until a step names it. A step's plan takes it (*planned*), and the step's commit ends it as *trained*. What does not come that far ends
as *expired* (its lease ran out), *given_up* (by its client), *stale* (the policy moved on) or *quarantined* (its step ended the engine
twice). Every other move is a mistake of the server: `after` refuses it here, and a trigger that is made from the same table refuses it
in the database (`groupwise.server.ledger.schema`).
"""

from __future__ import annotations

from typing import Literal

from groupwise.core.errors import UsageError

State = Literal[
    "open",
    "rewarded",
    "held",
    "planned",
    "trained",
    "expired",
    "given_up",
    "stale",
    "quarantined",
]

Event = Literal[
    "reward",
    "hold",
    "release",
    "expire",
    "give_up",
    "go_stale",
    "plan",
    "train",
    "quarantine",
]
"""Events that move a group. `release` lets a held group wait for the next step after all."""

TABLE: dict[State, dict[Event, State]] = {
    "open": {
        "reward": "rewarded",
        "hold": "held",
        "expire": "expired",
        "give_up": "given_up",
    },
    "rewarded": {"plan": "planned", "go_stale": "stale"},
    "held": {
        "plan": "planned",  # only where a step names it
        "release": "rewarded",
        "give_up": "given_up",
        "go_stale": "stale",
    },
    "planned": {"train": "trained", "quarantine": "quarantined"},
    "trained": {},
    "expired": {},
    "given_up": {},
    "stale": {},
    "quarantined": {},
}
"""State -> event -> the state afterwards. What is not here cannot happen."""

ENDS: tuple[State, ...] = tuple(state for state, events in TABLE.items() if not events)
"""The states that nothing leads out of."""


class MoveError(UsageError, ValueError):
    """An event that a group in this state cannot have. The message lists those that it can."""

    code = "group_state"


def after(state: State, event: Event) -> State:
    """The state that an event leads to; MoveError if it cannot happen."""
    events = TABLE[state]
    if event in events:
        return events[event]
    possible = ", ".join(f"{name} (-> {then})" for name, then in events.items())
    raise MoveError(
        f"a group that is {state} cannot {event}: "
        + (f"it can only {possible}." if possible else "that state is an end.")
    )


def before(event: Event) -> tuple[State, ...]:
    """The states in which an event can happen."""
    return tuple(state for state, events in TABLE.items() if event in events)


def moves() -> tuple[tuple[State, State], ...]:
    """All pairs of states that follow one another, each once, in the order of the table."""
    return tuple(dict.fromkeys((old, new) for old in TABLE for new in TABLE[old].values()))
