"""Errors raised by a client of the training server. Every error is one of these, whichever client and call it comes from.

ClientError                       `problem`, `code`, `status` and `retry_after` say what the server said; None if it said nothing
├── NoAnswer                      no answer, or not to the end, for as long as the client's patience lasts
├── StrangeAnswer                 what came is none of this protocol: a proxy, another server
│   └── BrokenDownload            the files of a model did not arrive whole
└── Refused                       the server answered that it does not do it; its `code` is a row of `groupwise.api.schemas.problems.KINDS`
    ├── NotAuthorised             no valid key, or one whose role is too low
    ├── InvalidRequest            a field or a value is wrong: `errors` names each; also before anything is sent
    ├── NotFound                  no such group, checkpoint, version or run
    ├── NotStarted                no run
    ├── RunActive                 there is one already
    ├── RunFinished               max_steps are done, or it was stopped
    ├── ManualMode                steps are taken by hand
    ├── GroupGone                 lease expired, given up, stale or quarantined
    ├── AlreadyRewarded           other rewards were accepted before
    ├── DrawTaken                 the position in the order of draws is another group's
    ├── VersionGone               that version's files are no longer kept
    ├── TooBusy                   still over the limits, for as long as the client's patience lasts
    └── Unavailable               the engine recovers or has failed, the disk is full, the server goes down
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from groupwise.api.schemas.problems import FieldError, Problem
from groupwise.core.errors import RunError


class ClientError(RunError):
    """A call that was not answered as it was meant."""

    code = "client"

    def __init__(
        self, message: str, problem: Problem | None = None, status: int | None = None
    ) -> None:
        """`status` is the HTTP status of an answer that has no problem in it."""
        super().__init__(message)
        self.problem = problem
        self.status = problem.status if problem else status
        if problem:
            self.code = problem.code

    @property
    def retry_after(self) -> float | None:
        """Seconds after which the server says that asking again may help."""
        return self.problem.retry_after if self.problem else None

    @property
    def errors(self) -> Sequence[FieldError]:
        """The fields of the request that are wrong."""
        return self.problem.errors if self.problem else ()

    @classmethod
    def about(cls, problem: Problem) -> Self:
        """The error that tells a problem."""
        lines = [f"{error.field or 'the body'}: {error.message}" for error in problem.errors]
        if len(lines) == 1:
            lines = []  # the detail is the same
        text = "\n  ".join([f"{problem.title} ({problem.code}): {problem.detail}", *lines])
        return cls(text, problem)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.problem, self.status)


class NoAnswer(ClientError):
    """No answer came. Check that the server runs and that the URL is right; what was sent may or may not have arrived."""

    code = "no_answer"


class StrangeAnswer(ClientError):
    """The answer is not of this protocol; the message holds its beginning."""

    code = "strange_answer"


class BrokenDownload(StrangeAnswer):
    """The files of a model did not arrive whole."""

    code = "broken_download"


class Refused(ClientError):
    """The server does not do it, and says why."""


class NotAuthorised(Refused):
    """No valid key, or one whose role is too low."""


class InvalidRequest(Refused):
    """A field or a value is wrong; `errors` names each."""


class NotFound(Refused):
    """The thing that the call names does not exist."""


class NotStarted(Refused):
    """There is no run."""


class RunActive(Refused):
    """There is a run already."""


class RunFinished(Refused):
    """The run has done max_steps, or was stopped."""


class ManualMode(Refused):
    """Steps are taken by hand."""


class GroupGone(Refused):
    """No rewards are taken for the group any more."""


class AlreadyRewarded(Refused):
    """Other rewards were accepted for the group before."""


class DrawTaken(Refused):
    """The position in the order of draws is another group's."""


class VersionGone(Refused):
    """The version's files are no longer kept."""


class TooBusy(Refused):
    """Over the limits."""


class Unavailable(Refused):
    """The server cannot do it now."""


BY_CODE: dict[str, type[Refused]] = {
    "not_started": NotStarted,
    "run_active": RunActive,
    "finished": RunFinished,
    "manual_mode": ManualMode,
    "lease_expired": GroupGone,
    "group_given_up": GroupGone,
    "group_stale": GroupGone,
    "group_quarantined": GroupGone,
    "already_rewarded": AlreadyRewarded,
    "draw_taken": DrawTaken,
    "version_gone": VersionGone,
}
BY_STATUS: dict[int, type[Refused]] = {
    401: NotAuthorised,
    403: NotAuthorised,
    404: NotFound,
    413: InvalidRequest,
    415: InvalidRequest,
    422: InvalidRequest,
    429: TooBusy,
    503: Unavailable,
    504: Unavailable,
}


def refused_error(problem: Problem) -> Refused:
    """The error for a problem: by its code, else by its status."""
    kind = BY_CODE.get(problem.code) or BY_STATUS.get(problem.status, Refused)
    return kind.about(problem)
