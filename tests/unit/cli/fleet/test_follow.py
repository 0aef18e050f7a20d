"""A log is followed from where it is wanted, across attempts, to the end of the job, whichever way the fleet is reached."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from groupwise.api.schemas.fleet import LogPart
from groupwise.api.schemas.problems import Refusal
from groupwise.cli import output
from groupwise.cli.fleet.follow import PORTION, follow_log, print_log, until_ended
from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.retry import AwayError, RequestRetries

PIECE = 4
NOTHING_SAID: dict[str, Any] = {"failure_reason": None, "exit_code": None}


class Fleet:
    """One job of a fleet. What happens next, happens while somebody waits for more, or looks."""

    def __init__(self, **logs: bytes) -> None:
        self.logs = {int(name.removeprefix("of_")): data for name, data in logs.items()}
        self.epochs = sorted(self.logs)
        self.of_rank_1: dict[int, bytes] = {}
        self.status = "running"
        self.waiting: list[str] = []
        self.attempts: dict[int, dict[str, Any]] = {}
        self.later: list[Callable[[], None]] = []
        self.retries = RequestRetries()

    def progress(self, job_id: str) -> dict[str, Any]:
        return {
            "job_id": job_id, "status": self.status, "exit_code": None, "failure_reason": None, "epochs": self.epochs,
        }  # fmt: skip

    def show(self, job_id: str) -> dict[str, Any]:
        return {
            "waiting": self.waiting,
            "attempts": [self.attempts.get(e, RUNS | {"epoch": e}) for e in self.epochs],
        }

    def log(
        self,
        job_id: str,
        *,
        epoch: int | None = None,
        offset: int = 0,
        rank: int = 0,
        tail: int | None = None,
        wait: float = 0.0,
    ) -> LogPart:
        if epoch is None:
            epoch = max(self.logs, default=None)
        if epoch is None:
            return LogPart(b"", None, 0, False)
        if tail is not None:
            lines = self.logs[epoch].splitlines(keepends=True)
            offset = len(self.logs[epoch]) - sum(map(len, lines[len(lines) - tail :]))
        data = (self.logs if rank == 0 else self.of_rank_1).get(epoch, b"")[offset : offset + PIECE]
        following = [each for each in sorted(self.logs) if each > epoch]
        if data or not following:
            if not data and wait and self.later:
                self.later.pop(0)()
            return LogPart(data, epoch, offset + len(data), False)
        return self.log(job_id, epoch=following[0], wait=wait)

    def passes(self, _: float) -> None:
        self.later.pop(0)()


RUNS = {"state": "running", "outcome": None, "failure_class": None, "members": [{"vm_id": "one"}]}
Said = Callable[[], tuple[str, str]]


@pytest.fixture
def printed_text(capfd: pytest.CaptureFixture[str]) -> Said:
    def both() -> tuple[str, str]:
        told = capfd.readouterr()
        return told.out, told.err

    return both


def follow(fleet: Fleet, **more: Any) -> dict[str, Any]:
    return follow_log(cast("Any", fleet), "job-1", sleep=fleet.passes, **more)


def test_all_attempts_to_the_end(printed_text: Said) -> None:
    fleet = Fleet(of_3=b"first\n")

    def again() -> None:
        fleet.logs[7], fleet.epochs = b"second\n", [3, 7]

    def ends() -> None:
        fleet.logs[7] += b"and last\n"
        fleet.status = "completed"

    fleet.later = [again, ends]
    assert follow(fleet)["status"] == "completed"
    assert printed_text() == ("first\nsecond\nand last\n", "— job-1 is tried again: attempt 7 —\n")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda _: True)


@pytest.mark.usefixtures("terminal")
def test_letters_that_are_cut_by_a_piece_are_whole_in_a_terminal(printed_text: Said) -> None:
    text = "naïve €uro — 日本\n"
    assert "\ufffd" in text.encode()[: 2 * PIECE].decode("utf-8", "replace")
    fleet = Fleet(of_3=text.encode())
    print_log(cast("Any", fleet), "job-1", epoch=None, tail=None)
    fleet.status = "completed"
    follow(fleet)
    assert printed_text()[0] == text * 2


@pytest.mark.parametrize(("tail", "before"), [(0, ""), (1, "two\n"), (9, "one\ntwo\n")])
def test_it_begins_near_the_end_and_repeats_nothing(
    printed_text: Said, tail: int, before: str
) -> None:
    fleet = Fleet(of_3=b"one\ntwo\n")

    def ends() -> None:
        fleet.logs[3] += b"three\n"
        fleet.status = "completed"

    fleet.later = [ends]
    follow(fleet, tail=tail)
    assert printed_text() == (f"{before}three\n", "")


def test_an_empty_log_of_an_attempt_that_has_ended_is_not_still_to_come(printed_text: Said) -> None:
    fleet = Fleet(of_3=b"", of_7=b"")
    ended = RUNS | {"epoch": 3, "state": "ended", "outcome": "failed"}
    for columns, words in (
        ({"failure_class": "host_lost"}, "nothing of the log of attempt 3 of job-1 was copied before one was lost"),
        ({"outcome": "void"}, "attempt 3 of job-1 has never started"),
        ({}, "attempt 3 of job-1 has ended, and wrote nothing"),
    ):  # fmt: skip
        fleet.attempts[3] = ended | columns
        print_log(cast("Any", fleet), "job-1", tail=None, epoch=3)
        assert printed_text() == ("", f"{words}\n")


def test_the_log_of_one_attempt_is_printed_so_far(printed_text: Said) -> None:
    fleet = Fleet(of_3=b"first log\n", of_7=b"second log\n", of_9=b"")
    for more, out in (
        ({"epoch": 3}, "first log\n"),
        ({"epoch": 7, "tail": 1}, "second log\n"),
    ):
        print_log(cast("Any", fleet), "job-1", **{"epoch": None, "tail": None, **more})
        assert printed_text() == (out, "")
    print_log(cast("Any", fleet), "job-1", tail=None, epoch=None)
    assert printed_text() == ("", "job-1 has written nothing yet\n")
    del fleet.logs[9]  # it has begun, and nothing of it has come
    print_log(cast("Any", fleet), "job-1", tail=None, epoch=None)
    assert printed_text() == ("second log\n", "")
    assert follow(fleet, epoch=3)["status"] == "running"
    assert printed_text() == ("first log\n", "")
    with pytest.raises(UsageError, match="number of the fleet: 3, 7, 9"):
        follow(fleet, epoch=4)
    fleet.of_rank_1[7], fleet.status = b"rank 1\n", "completed"
    print_log(cast("Any", fleet), "job-1", epoch=None, tail=None, rank=1)
    follow(fleet, rank=1)
    assert printed_text()[0] == "rank 1\n" * 2


def test_a_long_array_is_asked_for_in_portions_and_one_that_was_removed_is_reported(
    printed_text: Said,
) -> None:
    ids = [f"job-{n}" for n in range(PORTION + 1)]
    portions: list[int] = []

    class Many(Fleet):
        removed = ""

        def jobs(self, *, ids: list[str], limit: int) -> list[dict[str, Any]]:
            assert limit >= len(ids)
            portions.append(len(ids))
            found = [{"job_id": each, "status": "completed"} for each in ids]
            return [each | NOTHING_SAID for each in found if each["job_id"] != self.removed]

        def progress(self, job_id: str) -> dict[str, Any]:
            raise Refusal("unknown_job", f"there is no job {job_id!r}")

    fleet = Many()
    found = until_ended(cast("Any", fleet), [*ids, "job-0"], lambda _: None)
    assert [each["job_id"] for each in found] == [*ids, "job-0"]
    assert portions == [PORTION, 1]
    fleet.removed = "job-7"
    with pytest.raises(Refusal, match="no job 'job-7'"):
        until_ended(cast("Any", fleet), ids, lambda _: None)


def test_a_reason_to_wait_is_said_once_whatever_the_status(printed_text: Said) -> None:
    """A job that cannot run is `queued` for a moment, which means that it can."""
    statuses = ["queued", "pending", "cancelled"]

    class Waiting(Fleet):
        def jobs(self, *, ids: list[str], limit: int) -> list[dict[str, Any]]:
            return [{"job_id": each, "status": statuses.pop(0)} | NOTHING_SAID for each in ids]

    fleet = Waiting()
    fleet.waiting = ["no machine could run it now", "beta: no GPU"]
    until_ended(cast("Any", fleet), ["job-1"], lambda _: None)
    told = printed_text()[1].splitlines()
    assert told[:2] == [
        *("job-1 waits: no machine could run it now; beta: no GPU", "job-1 was cancelled")
    ]


class Restarted(Fleet):
    """Of each kind of question, every second is not answered for five minutes."""

    def __init__(self, **logs: bytes) -> None:
        super().__init__(**logs)
        self.now = 0.0
        self.told: list[str] = []
        self.retries = RequestRetries(
            tell=self.told.append, sleep=self._sleep, clock=lambda: self.now
        )
        self._away_until: dict[str, float] = {}

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _expect_here(self, question: str) -> None:
        if question not in self._away_until:
            self._away_until[question] = self.now + 300.0
        if self.now < self._away_until[question]:
            raise AwayError("no answer")
        del self._away_until[question]

    def progress(self, job_id: str) -> dict[str, Any]:
        self._expect_here("progress")
        return super().progress(job_id)

    def show(self, job_id: str) -> dict[str, Any]:
        self._expect_here("show")
        return super().show(job_id)

    def jobs(self, *, ids: list[str], limit: int) -> list[dict[str, Any]]:
        self._expect_here("jobs")
        return [Fleet.progress(self, each) for each in ids]

    def log(self, job_id: str, **wanted: Any) -> LogPart:
        self._expect_here("log")
        return super().log(job_id, **wanted)


def test_a_log_is_followed_over_restarts_and_no_byte_is_lost_or_told_twice(
    printed_text: Said,
) -> None:
    fleet = Restarted()
    fleet.status, fleet.waiting = "queued", ["no GPU"]

    def begins() -> None:
        fleet.status, fleet.logs[3], fleet.epochs = "running", b"first and ", [3]

    def ends() -> None:
        fleet.status = "completed"
        fleet.logs[3] += b"last words\n"

    fleet.later = [begins, ends]
    assert follow(fleet)["status"] == "completed"
    assert printed_text()[0] == "first and last words\n"
    assert len(fleet.told) >= 10
    assert {words.partition(":")[0] for words in fleet.told} == {
        "the fleet does not answer, and is asked on for 10 minutes",
        "the fleet answers again",
    }
