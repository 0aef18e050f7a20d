"""The judge of histories objects to every violation that is planted, and to nothing else."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.chaos import history
from tests.fleet_history import assert_kept, read, violations

History = list[dict[str, Any]]


class Written:
    """Builds a history; each record comes after the one before."""

    def __init__(self) -> None:
        self.records: History = []

    def add(self, what: str, **facts: Any) -> "Written":
        self.records.append({"at": float(len(self.records)), "what": what, **facts})
        return self

    def start(self, job: str, epoch: int, **facts: Any) -> "Written":
        return self.add("start", **self._who(job, epoch, facts))

    def stop(self, job: str, epoch: int, code: int | None = 0, **facts: Any) -> "Written":
        return self.add("stop", code=code, **self._who(job, epoch, facts))

    def status(self, job: str, status: str, generation: int = 0, **facts: Any) -> "Written":
        return self.add("status", job=job, status=status, generation=generation, **facts)

    def child(self, job: str, epoch: int) -> "Written":
        return self.add("child", **self._who(job, epoch, {}))

    def made(self, job: str, epoch: int, data: str, what: str = "made") -> "Written":
        return self.add(what, job=job, epoch=epoch, rank=0, path="result", data=data)

    def kept(self, job: str, epoch: int, data: str) -> "Written":
        return self.made(job, epoch, data, "kept")

    def attempt(
        self, job: str, epoch: int, outcome: str, failure: str | None = None, **facts: Any
    ) -> "Written":
        said = {"outcome": outcome, "failure": failure, "charged": False, "generation": 0, **facts}
        return self.add("attempt", job=job, epoch=epoch, vms=["vm-1"], **said)

    def _who(self, job: str, epoch: int, facts: dict[str, Any]) -> dict[str, Any]:
        return {"job": job, "epoch": epoch, "rank": 0, "vm": "vm-1", "gpus": ["G0"], **facts}


def good() -> Written:
    """A job that fails once and then succeeds, one that is cancelled, one whose machine loses its power."""
    h = Written()
    h.add("accepted", job="a").add("accepted", job="b").add("accepted", job="c")
    h.start("a", 1).add("wrote", job="a", epoch=1, rank=0, data="one\n").stop("a", 1, 1)
    h.start("a", 2).stop("a", 2).status("a", "completed", exit_code=0)
    h.add("mirrored", job="a", epoch=1, rank=0, data="one\n", whole=True)
    h.start("b", 3).add("cancel_requested", job="b").stop("b", 3, -15, why="cancelled")
    h.status("b", "running").status("b", "cancelled", exit_code=143)
    h.start("c", 4, vm="vm-2").add("power_off", vm="vm-2").start("c", 5).stop("c", 5)
    return h.status("c", "completed")


def test_a_history_in_which_every_promise_was_kept_is_not_objected_to() -> None:
    assert_kept(good().records)


def killed_early(code: int) -> Written:
    """Its second attempt is cancelled before the trainer can write that it begins."""
    h = good().start("d", 6).stop("d", 6, 1).attempt("d", 6, "failed", "crashed")
    h.add("cancel_requested", job="d").attempt("d", 7, "cancelled")
    return h.status("d", "cancelled", exit_code=code)


def test_one_that_was_killed_before_its_first_word_has_the_code_of_a_signal() -> None:
    assert_kept(killed_early(143).records)


def without_a_last_word(code: int, outcome: str = "cancelled") -> Written:
    """Killed in a cancellation, and then its machine loses its power."""
    h = good().start("d", 6).add("cancel_requested", job="d").add("power_off", vm="vm-1")
    return h.attempt("d", 6, outcome).status("d", "cancelled", exit_code=code)


def at_its_limit(code: int, failure: str = "time_limit") -> Written:
    """Likewise, at its time limit."""
    h = good().add("accepted", job="d", time_limit=0.5).start("d", 6).add("power_off", vm="vm-1")
    return h.attempt("d", 6, "failed", failure).status("d", "failed", exit_code=code)


def test_one_that_was_killed_has_no_last_word() -> None:
    assert_kept(without_a_last_word(137).records)
    assert_kept(at_its_limit(137).records)


PLANTED: dict[str, tuple[Callable[[], Written], str]] = {
    "lost": (lambda: good().add("accepted", job="d"), "d was accepted and is nowhere"),
    "stuck": (
        lambda: good().add("accepted", job="d").status("d", "queued"),
        "d was accepted and is queued",
    ),
    "twice at once": (
        lambda: good().start("d", 6, gpus=[]).start("d", 7, gpus=[], vm="vm-2"),
        "two executions of one job",
    ),
    "late second start of one attempt": (
        lambda: good().start("d", 6).stop("d", 6, 1).start("d", 6).stop("d", 6, 1),
        "began twice",
    ),
    "unseen end": (
        lambda: good().start("d", 6).start("d", 7, vm="vm-2").stop("d", 7, 1).stop("d", 6, 1),
        "two executions of one job",
    ),
    "one GPU for two": (lambda: good().start("d", 6).start("e", 7), "both have GPU G0"),
    "a share beside a whole": (
        lambda: good().start("d", 6).start("e", 7, share_mb=100),
        "both have GPU G0",
    ),
    "leak": (
        lambda: good().add("reserved", job="a", epoch=2, vm="vm-1", gpu="G0"),
        "a.2 still holds G0",
    ),
    "final state left": (lambda: good().status("a", "failed"), "was completed and became failed"),
    "completed again": (lambda: good().status("a", "queued", 1), "was begun again"),
    "generation back": (
        lambda: good().status("b", "queued", 1).status("b", "cancelled", 0),
        "went back",
    ),
    "said to be done": (
        lambda: good().start("d", 6).stop("d", 6, 1).status("d", "completed"),
        "no attempt of it succeeded",
    ),
    "success thrown away": (
        lambda: good().start("d", 6).stop("d", 6, 0).status("d", "failed"),
        "an attempt of it succeeded",
    ),
    "wrong code": (
        lambda: good().start("d", 6).stop("d", 6, 3).status("d", "failed", exit_code=4),
        "is said to have exited with 4",
    ),
    "wrong code of one that was killed early": (
        lambda: killed_early(1),
        "is said to have exited with 1",
    ),
    "wrong code of one without a last word": (
        lambda: without_a_last_word(1),
        "is said to have exited with 1",
    ),
    "wrong code of one that was killed at its limit": (
        lambda: at_its_limit(1),
        "is said to have exited with 1",
    ),
    "the code of a signal of one that was not at its limit": (
        lambda: at_its_limit(137, "reboot"),
        "is said to have exited with 137",
    ),
    "the code of a signal where nobody sent one": (
        lambda: without_a_last_word(137, "failed"),
        "is said to have exited with 137",
    ),
    "run again": (
        lambda: good().start("d", 6).stop("d", 6, 0).start("d", 7).stop("d", 7, 0),
        "was run again",
    ),
    "cancelled and alive": (
        lambda: good().start("d", 6).add("cancel_requested", job="d").status("d", "cancelled"),
        "was alive when d was said to be cancelled",
    ),
    "healthy job ended": (
        lambda: good().start("d", 6).stop("d", 6, -15, why="cancelled"),
        "was healthy and was ended",
    ),
    "log with a gap": (
        lambda: (
            good()
            .add("wrote", job="d", epoch=6, rank=0, data="abc")
            .add("mirrored", job="d", epoch=6, rank=0, data="ac")
        ),
        "not what it wrote",
    ),
    "something left behind uses its GPU": (
        lambda: good().start("d", 6).stop("d", 6, 1).start("e", 7).child("d", 6).stop("e", 7, 1),
        "both have GPU G0",
    ),
    "something left behind after a cancellation": (
        lambda: (
            good()
            .start("d", 6)
            .add("cancel_requested", job="d")
            .stop("d", 6, -15, why="cancelled")
            .status("d", "cancelled")
            .child("d", 6)
        ),
        "was alive when d was said to be cancelled",
    ),
    "the same lock twice": (
        lambda: good().add("clash", job="d", epoch=6, over="gpu G0", holder="a.2.0"),
        "found gpu G0 in the hands of a.2.0",
    ),
    "artefact lost": (
        lambda: good().made("a", 2, "x").attempt("a", 2, "succeeded"),
        "is not there as it was made",
    ),
    "artefact torn": (
        lambda: good().made("a", 2, "x").kept("a", 2, "y").attempt("a", 2, "succeeded"),
        "is not there as it was made",
    ),
    "resumed from nothing": (
        lambda: good().add("saved", job="d", epoch=6, step=4).start("d", 7, resumed=6),
        "went on from step 6",
    ),
    "void and ran": (
        lambda: good().start("d", 6).stop("d", 6, 1).attempt("d", 6, "void"),
        "and it ran",
    ),
    "wrong class": (
        lambda: good().start("d", 6).stop("d", 6, 1).attempt("d", 6, "failed", "user_error"),
        "that is not what happened to it",
    ),
    "supervisor lost by itself": (
        lambda: good().start("d", 6).stop("d", 6, 1).attempt("d", 6, "failed", "supervisor_lost"),
        "that is not what happened to it",
    ),
    "success not seen": (
        lambda: good().start("d", 6).stop("d", 6).attempt("d", 6, "failed", "crashed"),
        "and it succeeded",
    ),
    "cancelled by nobody": (
        lambda: good().start("d", 6).stop("d", 6, 1).attempt("d", 6, "cancelled"),
        "nobody wanted it cancelled",
    ),
    "tried too often": (
        lambda: (
            good()
            .attempt("a", 1, "failed", "crashed", charged=True)
            .attempt("a", 6, "failed", "crashed", charged=True)
            .attempt("a", 7, "failed", "crashed", charged=True)
            .attempt("a", 8, "failed", "crashed", charged=True)
        ),
        "was tried 4 times",
    ),
    "process left": (
        lambda: good().add("left", job="a", epoch=2, vm="vm-1"),
        "is alive on vm-1 in the end",
    ),
    "log without its end": (
        lambda: (
            good()
            .add("wrote", job="d", epoch=6, rank=0, data="abc")
            .add("mirrored", job="d", epoch=6, rank=0, data="ab", whole=True)
        ),
        "not what it wrote",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_objected_to(name: str) -> None:
    history, words = PLANTED[name]
    found = violations(history().records)
    assert any(words in each for each in found), found


def test_only_a_settled_history_has_to_have_ended() -> None:
    history = good().add("accepted", job="d").records
    assert violations(history, settled=False) == []


def test_shares_of_a_gpu_may_stand_beside_each_other_up_to_its_memory() -> None:
    history = good().start("d", 6, share_mb=600).start("e", 7, share_mb=400).records
    assert violations(history, gpu_memory_mb=1000) == []
    assert any("come to 1000 of 900 MB" in v for v in violations(history, gpu_memory_mb=900))


def test_a_job_that_is_passed_over_has_starved() -> None:
    history = good().add("accepted", job="d").add("accepted", job="e")
    for _ in range(20):
        history.add("step")
    assert violations(history.records, settled=False, patience=15) == [
        "d waited for more than 15",
        "e waited for more than 15",
    ]


def test_a_gang_is_ended_when_one_of_it_fails() -> None:
    gang = good().start("d", 6, gpus=[]).start("d", 6, rank=1, vm="vm-2")
    gang.stop("d", 6, 1, gpus=[]).stop("d", 6, -15, rank=1, vm="vm-2", why="cancelled")
    assert violations(gang.records) == []


def test_what_succeeded_on_a_machine_that_was_lost_may_be_run_again() -> None:
    history = good().start("d", 6).stop("d", 6).add("lost", vm="vm-1")
    history.start("d", 7, vm="vm-2").stop("d", 7, vm="vm-2").status("d", "completed")
    assert violations(history.records) == []


def test_a_gang_has_succeeded_only_when_all_of_it_has() -> None:
    half = good().start("d", 6, members=2).stop("d", 6).status("d", "completed")
    assert any("no attempt of it succeeded" in v for v in violations(half.records))


def test_a_last_line_that_is_torn_was_never_written(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_text('{"at": 1, "what": "boot"}\n{"at": 2, "wh')
    assert read(path) == [{"at": 1, "what": "boot"}]


def test_of_a_machine_that_was_given_up_nobody_knows_what_runs_there() -> None:
    history = good().start("d", 6).add("lost", vm="vm-1").start("d", 7, vm="vm-2")
    history.add("clash", job="d", epoch=7, over="job d.0", holder="d.6.0")
    history.stop("d", 6, -9, why="cancelled").stop("d", 7, vm="vm-2").status("d", "completed")
    assert violations(history.records) == []


def test_but_its_gpus_are_used_by_one_at_a_time_all_the_same() -> None:
    history = good().start("d", 6).add("lost", vm="vm-1").start("e", 7)
    history.stop("d", 6, -9, why="cancelled").stop("e", 7, 1)
    assert any("both have GPU G0" in v for v in violations(history.records))


@pytest.mark.parametrize(
    "excuse",
    [
        lambda h: h.add("supervisor_killed", job="d", epoch=6, rank=0, vm="vm-1"),
        lambda h: h.add("power_off", vm="vm-1"),
    ],
)
def test_a_success_of_which_no_record_was_written_may_be_repeated(excuse: Any) -> None:
    history = good().start("d", 6).stop("d", 6)
    excuse(history)
    history.start("d", 7).stop("d", 7).status("d", "completed")
    assert violations(history.records) == []


def test_a_time_limit_is_a_reason_to_end() -> None:
    history = good().add("accepted", job="d", time_limit=1.0).start("d", 6)
    history.add("boot").stop("d", 6, -15, why="cancelled").status("d", "failed")
    assert violations(history.records) == []


@pytest.mark.parametrize(
    ("words", "cut", "killed"),
    [
        (("start", "step", "step", "term", "step"), 1.5, True),
        (("start", "step", "step", "term", "step"), 0.4, False),
        (("start", "step", "step", "step", "step"), 1.5, False),
        (("start", "step", "step", "step", "step"), 2.5, True),
    ],
)
def test_who_was_asked_to_end_may_be_killed_before_the_power_goes(
    words: tuple[str, ...], cut: float, killed: bool
) -> None:
    """It said a word each fifth of a second until then."""
    who = {"job": "j", "epoch": 1, "rank": 0, "vm": "h1"}
    told = [{"at": 0.2 * n, "what": word, **who} for n, word in enumerate(words)]
    records = [{"at": 0.8 + cut, "what": "power_off", "vm": "h1"}]
    fleet = cast("Any", SimpleNamespace(records=records, trainers=dict))
    assert [r["what"] for r in history._silent_ends(fleet, told)] == ["stop"] * killed
