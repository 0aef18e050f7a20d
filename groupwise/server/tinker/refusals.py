"""Refusals of requests to the Tinker API: each code with its HTTP status and its meaning, and the errors that it belongs to.

The client repeats a request for minutes after 408, 409, 429 and 5xx, so requests that can never succeed get another status. A request
refused before it reaches this API gets a code of `groupwise.api.schemas.problems`; those that can occur are listed here, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from groupwise.api.schemas.problems import KINDS, ProblemKind, Refusal
from groupwise.core.errors import GroupwiseError, RunError, StoreError, UsageError
from groupwise.server.ledger.file import DiskFull, LedgerClosed
from groupwise.server.tinker.compatibility import Unsupported
from groupwise.server.tinker.futures import (
    AnswerGone,
    LedgerUnavailable,
    TooManyCalls,
    UnknownAnswer,
)
from groupwise.server.tinker.sessions import NotFound

OF_OTHERS = (
    "unauthorised",
    "forbidden",
    "rate_limited",
    "shutting_down",
    "too_large",
    "unsupported_media_type",
    "timed_out",
    "disk_full",
    "internal",
)
CODES: Mapping[str, ProblemKind] = {
    **{code: KINDS[code] for code in OF_OTHERS},
    "usage": ProblemKind(
        400,
        "Not what the server takes",
        "A field, a value or the whole body is not what this server takes; the message names it. A number in the order of the model's "
        "calls is used up all the same.",
    ),
    "unsupported": ProblemKind(
        400,
        "Not supported",
        "The protocol has this, and this server has not; the message names the method of the client, and says why.",
    ),
    "not_there": ProblemKind(
        404,
        "Not there",
        "No such address, session, model or sampler: it never was, its session has ended, or the server does not know it.",
    ),
    "unknown_answer": ProblemKind(404, "No such request", "No request was ever given this id."),
    "answer_gone": ProblemKind(
        410,
        "The answer is gone",
        "The request was answered, but its answer is kept no longer, or was given by a server that has ended.",
    ),
    "too_many_calls": ProblemKind(
        429,
        "Too many calls wait",
        "More calls wait than are taken, all clients together; send this one again later.",
        retry=True,
    ),
    "not_kept": ProblemKind(
        503,
        "Not written down",
        "The call could not be written down at the moment, so it was not taken; send it again later.",
        retry=True,
    ),
    "engine_failed": ProblemKind(
        503,
        "The engine has failed",
        "The process with the model ended while this was asked, and too often; the message says how.",
        retry=True,
    ),
}
"""Every code that a request can be refused with."""

_CODE_OF_ERROR: Mapping[type[GroupwiseError], str] = {
    NotFound: "not_there",
    UnknownAnswer: "unknown_answer",
    AnswerGone: "answer_gone",
    Unsupported: "unsupported",
    TooManyCalls: "too_many_calls",
    LedgerUnavailable: "not_kept",
    DiskFull: "disk_full",
    LedgerClosed: "shutting_down",
    StoreError: "not_kept",
    RunError: "engine_failed",
    UsageError: "usage",
}
"""The first matching class decides, so subclasses come before their bases."""


def code_of(error: Exception) -> str:
    """Code of an exception; `internal` for an error of the server itself."""
    if isinstance(error, Refusal):
        return error.code
    return next(
        (code for error_class, code in _CODE_OF_ERROR.items() if isinstance(error, error_class)),
        "internal",
    )
