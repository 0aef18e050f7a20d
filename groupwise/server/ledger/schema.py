"""The tables of `server.db`, as a list of migrations that only go forward: the sections of `schema.sql`.

`PRAGMA user_version` counts the migrations applied to a file. A change of the schema is a new section at the end of the file; a
released section is never edited. A change of `group_states.TABLE` needs a new section, too: it drops the trigger `group_moves` and creates
it again. SQLite itself enforces the invariants, so that no code path can break them: a group only moves along the table of states, its
rewards are written once, a draw has one living group, a step of a run has one living plan, one run is active.

Conventions: times are seconds since 1970, leases are seconds of the server's uptime, steps are indices starting at 0. The sampling record
of a group (tokens, log-probabilities, seeds) is stored in `records`, separate from `groups`, because SQLite rewrites a whole row whenever
one column changes.
"""

from __future__ import annotations

import re
from pathlib import Path

from groupwise.server.ledger.group_states import TABLE, State, transitions

APPLICATION_ID = 0x47525053
"""Marks the file as the ledger of a training server (`GRPS`)."""

FREE: tuple[State, ...] = ("expired", "given_up")
"""States in which a group no longer occupies its draw."""

WITHOUT_REWARDS: tuple[State, ...] = ("open", "expired")
"""States without rewards. `given_up` is not among them, because such a group may have been held before."""

IN_A_PLAN: tuple[State, ...] = ("planned", "trained", "quarantined")


def sql_list(states: tuple[State, ...]) -> str:
    """States for SQL's `IN (…)`, without the parentheses."""
    return ", ".join(f"'{state}'" for state in states)


_SCRIPT = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
_, _first, *_later = re.split(r"-- migration \d+\n", _SCRIPT)
_first = _first.format(
    states=sql_list(tuple(TABLE)),
    moves=", ".join(f"('{old}', '{new}')" for old, new in transitions()),
    without_rewards=sql_list(WITHOUT_REWARDS),
    perhaps_without_rewards=sql_list((*WITHOUT_REWARDS, "given_up")),
    in_a_plan=sql_list(IN_A_PLAN),
    free=sql_list(FREE),
)
MIGRATIONS: tuple[str, ...] = (_first, *_later)
