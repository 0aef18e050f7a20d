"""What SQLite itself refuses, independent of the code."""

from __future__ import annotations

import sqlite3
from contextlib import nullcontext

import pytest

from groupwise.server.ledger.group_states import TABLE, transitions
from tests.unit.server.ledger.making import RUN, open_groups

PATHS = {
    "open": (), "rewarded": ("rewarded",), "held": ("held",), "planned": ("rewarded", "planned"),
    "trained": ("rewarded", "planned", "trained"),
    "quarantined": ("rewarded", "planned", "quarantined"), "expired": ("expired",),
    "given_up": ("given_up",), "stale": ("rewarded", "stale"),
}  # fmt: skip
"""How each state is reached."""


def put(ledger, state: str) -> None:
    """Into a state by hand, with all that belongs to it."""
    rewarded = state not in ("open", "expired", "given_up")
    planned = state in ("planned", "trained", "quarantined")
    ledger.execute(
        """UPDATE groups SET state = ?, rewards = coalesce(rewards, ?), answer = coalesce(answer, ?),
        accepted = coalesce(accepted, ?), plan = ?, position = ?""",
        (state, *(["[1, 2]", "{}", 1] if rewarded else [None] * 3), *([1, 0] if planned else [None] * 2)),
    )  # fmt: skip


def test_a_group_begins_open(run):
    open_groups(run, 0)
    with pytest.raises(sqlite3.IntegrityError, match="begins open"):
        run.execute(
            """INSERT INTO groups SELECT 'g-x', run, 9, 'expired', sampled_step, version, fingerprint, members, prompt, content,
            key_id, opened_at, lease_end, NULL, NULL, NULL, NULL, NULL, NULL, 0 FROM groups"""
        )


def test_half_changes_of_a_group_are_refused(run):
    open_groups(run, 0)
    run.insert("plans", run=RUN, step=0, parameters="{}", made_at=0.0)
    put(run, "rewarded")
    for change, refused in (
        ("rewards = '[0, 0]'", "accepted rewards stand"),
        ("rewards = NULL", "accepted rewards stand"),
        ("answer = NULL", "CHECK"),
        ("plan = 1, position = 0", "CHECK"),
        ("state = 'planned'", "CHECK"),
        ("plan = 77, position = 0, state = 'planned'", "FOREIGN KEY"),
    ):
        with pytest.raises(sqlite3.IntegrityError, match=refused):
            run.execute(f"UPDATE groups SET {change}")


def test_one_living_group_a_draw_and_one_living_plan_a_step(run):
    open_groups(run, 0, 1)
    with pytest.raises(sqlite3.IntegrityError, match="draw"):
        run.execute("UPDATE groups SET draw = 0 WHERE draw = 1")
    run.insert("plans", run=RUN, step=0, parameters="{}", made_at=0.0)
    with pytest.raises(sqlite3.IntegrityError, match="step"):
        run.insert("plans", run=RUN, step=0, parameters="{}", made_at=0.0)
    run.execute("UPDATE plans SET state = 'quarantined'")
    run.insert("plans", run=RUN, step=0, parameters="{}", made_at=0.0)


def test_a_group_moves_along_the_table_alone(run):
    assert PATHS.keys() == TABLE.keys()
    open_groups(run, 0)
    run.insert("plans", run=RUN, step=0, parameters="{}", made_at=0.0)
    for old, path in PATHS.items():
        run.execute("SAVEPOINT one")
        for state in path:
            put(run, state)
        for new in TABLE:
            run.execute("SAVEPOINT two")
            allowed = (old, new) in transitions()
            with nullcontext() if allowed else pytest.raises(sqlite3.IntegrityError, match="move"):
                put(run, new)
            assert run.value("SELECT state FROM groups") == (new if allowed else old)
            run.execute("ROLLBACK TO two")
        run.execute("ROLLBACK TO one")
