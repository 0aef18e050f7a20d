"""Open sessions, models and samplers of clients that train through the Tinker API.

1. A call is there before it is answered, and what it came to stands, whoever would write it anew.
2. What is repeated is what changed the model since its state was kept, in order; the content of the rest is forgotten.
3. A session that ends takes all that was its own with it, but for the record of its models' updates.
4. Answers that are forgotten leave what must be repeated, and how far each line is.
"""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import pytest

from groupwise.server.ledger import calls
from groupwise.server.ledger.calls import CallRow, Outcome, StepRow
from groupwise.server.ledger.transaction import Transaction

SESSION, MODEL = "s-1", "s-1:train:0"
SPEC = {"base": "tiny", "rank": 4}


def call(sequence: int, kind: str = "forward_backward", line: str = MODEL) -> CallRow:
    return CallRow(
        f"f-{line}-{sequence}", SESSION, line, sequence, kind, b"digest", b"%d" % sequence
    )


def done(ledger: Transaction, sequence: int, kind: str = "forward_backward", **more) -> str:
    taken = call(sequence, kind)
    calls.insert_call(ledger, taken)
    outcome = Outcome("answered", "application/json", b"{}", changed=True)
    calls.record_outcome(ledger, taken.id, replace(outcome, **more))
    return taken.id


@pytest.fixture
def opened(ledger: Transaction) -> Transaction:
    calls.add_session(ledger, SESSION, "named")
    calls.add_model(ledger, MODEL, SESSION, SPEC)
    return ledger


def repeated(ledger: Transaction, after: int = -1) -> list[tuple[str, bytes]]:
    return calls.calls_to_repeat(ledger, MODEL, after)


def test_a_session_of_one_name_is_opened_once(opened):
    assert calls.add_session(opened, "s-2", "named") == SESSION
    unnamed = [calls.add_session(opened, id, None) for id in ("s-2", "s-3")]
    assert calls.all_sessions(opened) == [SESSION, *unnamed]


def test_a_recorded_outcome_of_a_call_cannot_be_overwritten(opened):
    id = done(opened, 1)
    with pytest.raises(sqlite3.IntegrityError, match="stands"):
        calls.record_outcome(opened, id, Outcome("answered", "application/json", b"other"))
    with pytest.raises(sqlite3.IntegrityError):
        calls.insert_call(opened, call(1))


def test_calls_before_a_state_that_is_kept_are_forgotten(opened):
    done(opened, 1)
    done(opened, 2, "OptimStep", kept=2, step=StepRow(0.1, 2.0, {"loss/policy": 1.0}))
    done(opened, 3)
    assert calls.all_models(opened)[0].kept == 2
    assert [each.content for each in calls.all_calls(opened)] == [None, None, b"3"]
    assert repeated(opened, 2) == [("forward_backward", b"3")]


def test_a_session_that_ends_takes_all_with_it_but_the_record(opened):
    calls.add_sampler(opened, "s-1:sample:0", SESSION, "tiny", None)
    id = done(opened, 1, step=StepRow(0.1, None, {}))
    calls.end_session(opened, SESSION)
    tables = (calls.all_sessions, calls.all_models, calls.all_samplers, calls.all_calls)
    assert [read(opened) for read in tables] == [[], [], [], []]
    assert len(calls.steps_of(opened, MODEL)) == 1
    calls.record_outcome(opened, id, Outcome("failed", "user", b"late"))
    calls.insert_call(opened, call(2))
    calls.add_model(opened, "s-1:train:1", SESSION, SPEC)
    calls.add_sampler(opened, "s-1:sample:1", SESSION, "tiny", None)
    assert not calls.all_calls(opened)


def test_answers_that_are_forgotten(opened):
    ids = [done(opened, 1, changed=False), done(opened, 2), done(opened, 3, changed=False)]
    calls.delete_answers(opened, ids)
    assert [each.sequence for each in calls.all_calls(opened)] == [2, 3]  # repeated, and the last
    assert calls.all_models(opened)[0].done == 3
