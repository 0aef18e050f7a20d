"""The life cycle of a group in the training server, in one table.

A group is *open* from its sampling until its client posts rewards. Then it is *rewarded* and waits for a step, or *held* until a step names
it. A step's plan takes it (*planned*), and the step's commit ends it as *trained*. All other groups end as *expired* (the lease ran out),
*given_up* (by the client), *stale* (the policy moved on) or *quarantined* (the step ended the engine twice). Every other transition is a
bug in the server: `next_state` refuses it here, and a trigger made from the same table refuses it in the database
(`schema.sql`).
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
"""Events that move a group. `release` returns a held group to those that wait for the next step."""

TABLE: dict[State, dict[Event, State]] = {
    "open": {
        "reward": "rewarded",
        "hold": "held",
        "expire": "expired",
        "give_up": "given_up",
    },
    "rewarded": {"plan": "planned", "go_stale": "stale"},
    "held": {
        "plan": "planned",  # only if a step names it
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
"""State -> event -> next state. Missing entries are impossible transitions."""

FINAL_STATES: tuple[State, ...] = tuple(state for state, events in TABLE.items() if not events)
"""The final states."""

FREE: tuple[State, ...] = ("expired", "given_up")
"""States in which a group no longer occupies its draw."""

WITHOUT_REWARDS: tuple[State, ...] = ("open", "expired")
"""States without rewards. `given_up` is not among them, because such a group may have been held before."""

IN_A_PLAN: tuple[State, ...] = ("planned", "trained", "quarantined")


class MoveError(UsageError, ValueError):
    """An event that is impossible in this state of a group. The message lists the possible ones."""

    code = "group_state"


def next_state(state: State, event: Event) -> State:
    """The state after an event; MoveError if the event is impossible."""
    events = TABLE[state]
    if event in events:
        return events[event]
    possible = ", ".join(f"{name} (-> {state_after})" for name, state_after in events.items())
    raise MoveError(
        f"a group that is {state} cannot {event}: "
        + (f"it can only {possible}." if possible else "that state is an end.")
    )


def states_before(event: Event) -> tuple[State, ...]:
    """The states in which an event is possible."""
    return tuple(state for state, events in TABLE.items() if event in events)


def transitions() -> tuple[tuple[State, State], ...]:
    """All transitions as pairs of states, each once, in the order of the table."""
    return tuple(dict.fromkeys((old, new) for old in TABLE for new in TABLE[old].values()))


def sql_list(states: tuple[State, ...]) -> str:
    """States for SQL's `IN (…)`, without the parentheses."""
    return ", ".join(f"'{state}'" for state in states)
