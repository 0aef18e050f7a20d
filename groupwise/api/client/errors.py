"""Errors raised by the clients of the training server. All errors of all clients and calls are listed here.

ClientError                       `problem`, `code`, `status` and `retry_after` hold the server's response; None without one
├── NoAnswer                      no response, or only a part of one, until the client's retry time was over
│   └── NoServer                  nothing listens at the address, for two minutes
├── StrangeAnswer                 the response is not of this protocol: a proxy, another server
│   └── BrokenDownload            the files of a model did not arrive complete
└── Refused                       the server refused the request; `code` is a key of `groupwise.api.schemas.problems.KINDS`
    ├── NotAuthorised             no valid key, or its role is too low
    ├── InvalidRequest            a field or a value is wrong: `errors` names each; also raised before anything is sent
    ├── NotFound                  no such group, checkpoint, version or run
    ├── NotStarted                no run
    ├── RunActive                 a run exists already
    ├── RunFinished               max_steps are done, or the run was stopped
    ├── ManualMode                the run uses `steps: manual`
    ├── GroupGone                 lease expired, given up, stale or quarantined
    ├── AlreadyRewarded           other rewards were accepted before
    ├── DrawTaken                 another group has this position in the order of draws
    ├── VersionGone               that version's files are no longer kept
    ├── TooBusy                   still over the limits when the client's retry time was over
    └── Unavailable               the engine is recovering or has failed, the disk is full, the server is shutting down
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from groupwise.api.schemas.problems import FieldError, Problem
from groupwise.core.errors import RunError


class ClientError(RunError):
    """A call that failed."""

    code = "client"

    def __init__(
        self, message: str, problem: Problem | None = None, status: int | None = None
    ) -> None:
        """`status` is the HTTP status of a response without a problem body."""
        super().__init__(message)
        self.problem = problem
        self.status = problem.status if problem else status
        if problem:
            self.code = problem.code

    @property
    def retry_after(self) -> float | None:
        """Seconds after which, according to the server, a retry may help."""
        return self.problem.retry_after if self.problem else None

    @property
    def errors(self) -> Sequence[FieldError]:
        """The wrong fields of the request."""
        return self.problem.errors if self.problem else ()

    @classmethod
    def about(cls, problem: Problem) -> Self:
        """The error for a problem body."""
        lines = [f"{error.field or 'the body'}: {error.message}" for error in problem.errors]
        if len(lines) == 1:
            lines = []  # the detail is the same
        text = "\n  ".join([f"{problem.title} ({problem.code}): {problem.detail}", *lines])
        return cls(text, problem)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.problem, self.status)


class NoAnswer(ClientError):
    """No response arrived. Check that the server runs and that the URL is right; the request may or may not have arrived."""

    code = "no_answer"


class NoServer(NoAnswer):
    """Nothing listens at the server's address. Start the server again, then repeat the call: it has not arrived."""

    code = "no_server"


class StrangeAnswer(ClientError):
    """The response is not of this protocol; the message shows its beginning."""

    code = "strange_answer"


class BrokenDownload(StrangeAnswer):
    """The files of a model did not arrive complete."""

    code = "broken_download"


class Refused(ClientError):
    """The server refused the request; the message says why."""


class NotAuthorised(Refused):
    """No valid key, or its role is too low."""


class InvalidRequest(Refused):
    """A field or a value is wrong; `errors` names each."""


class NotFound(Refused):
    """The object that the call names does not exist."""


class NotStarted(Refused):
    """There is no run."""


class RunActive(Refused):
    """A run exists already."""


class RunFinished(Refused):
    """The run has finished max_steps, or was stopped."""


class ManualMode(Refused):
    """The run uses `steps: manual`: steps are taken only on request."""


class GroupGone(Refused):
    """The server accepts no rewards for the group any more."""


class AlreadyRewarded(Refused):
    """Other rewards were accepted for the group before."""


class DrawTaken(Refused):
    """Another group has this position in the order of draws."""


class VersionGone(Refused):
    """The version's files are no longer kept."""


class TooBusy(Refused):
    """The server's limits are exceeded."""


class Unavailable(Refused):
    """The server cannot answer the request now."""


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
