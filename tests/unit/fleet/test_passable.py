"""What cannot be passed on is found wherever it stands, and told by its place."""

from typing import Any

import pytest
from sqlalchemy import text

from groupwise.fleet.passable import sayable, text_problems
from groupwise.fleet.queue import admission
from groupwise.fleet.store.database import Database
from groupwise.fleet.store.tables import Job


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"arguments": ["a", "b\0"]}, "arguments.1: a NUL character at position 1"),
        ({"environment": {"A": "\0"}}, "environment.A: a NUL character at position 0"),
        ({"labels": {"a\0": "b"}}, r"labels.a\x00: a NUL character at position 1"),
        ({"files": {"\udcff": ["0", 1, 2]}}, r"files.\udcff: bytes that are no UTF-8"),
        ({"hyperparams": {"a": [{"b": "\ud800"}]}}, "hyperparams.a.0.b: bytes that are no UTF-8"),
    ],
)
def test_the_place_is_named(document: dict[str, Any], place: str) -> None:
    assert place in "\n".join(text_problems(document, ""))


def test_everything_else_is_passed_on() -> None:
    fine = {"a": ["", "Grüße\n\x1b[31m", 5, None, True, {"b": "漢字🙂"}], "n": b"\0"}
    assert list(text_problems(fine, "")) == []


def test_what_json_cannot_say_is_told_as_near_as_it_can() -> None:
    document = {"a\ud800": [float("nan"), float("-inf"), 1.5, (True, None)], "b": "漢\udcff"}
    assert sayable(document) == {"a?": [None, None, 1.5, [True, None]], "b": "漢?"}


def test_a_held_row_that_can_never_run_fails_and_stops_nobody(database: Database) -> None:
    """Nothing that is held may fail; admission lets it go first."""

    def write(session: Any) -> None:
        for job_id, status in (("bad", "held"), ("good", "queued")):
            row = {
                "job_id": job_id,
                "status": status,
                "kind": "none" if status == "held" else "COMMAND",
            }
            session.execute(
                text(
                    "INSERT INTO jobs (job_id, status, job_type, request)"
                    ' VALUES (:job_id, :status, :kind, \'{"arguments": ["true"], "resources": {"gpus": 0}}\')'
                ),
                row,
            )

    database.run(write)
    assert database.run(lambda s: admission.admit_new(s, 10)) == 2
    status = {
        job_id: database.read(lambda s, job_id=job_id: s.get_one(Job, job_id).status)
        for job_id in ("bad", "good")
    }
    assert status == {"bad": "failed", "good": "queued"}
