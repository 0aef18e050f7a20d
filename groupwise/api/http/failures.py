"""Why a request to one of our servers failed, for the clients of the training server and of the fleet."""

from __future__ import annotations

import ssl
from typing import TypeVar

import httpx2
from pydantic import ValidationError

from groupwise.api.openai_client.waiting import retry_after
from groupwise.api.schemas.problems import Problem

E = TypeVar("E", bound=BaseException)

MAY_PASS = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses of responses without a problem body, as proxies send them, that may pass."""


def find_cause(error: BaseException | None, kind: type[E]) -> E | None:
    """The error of this kind in the chain of an error and its causes; None if there is none."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def certificate_problem(url: str, error: BaseException | None) -> str | None:
    """A message if a request failed because the server's certificate is not trusted here."""
    if (found := find_cause(error, ssl.SSLCertVerificationError)) is None:
        return None
    return (
        f"{url} shows a certificate that is not trusted here ({found.verify_message}). If an authority of your own has signed it, set "
        "SSL_CERT_FILE to the file with that authority's certificate; if it is for another name, use that name in the URL."
    )


def problem_in(response: httpx2.Response, today: float) -> Problem | None:
    """The problem in the body of an unsuccessful response, with the header's `Retry-After`; None if it has none. `today`: seconds since
    1970."""
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        return None
    seconds = retry_after(response.headers.get("Retry-After"), today)
    return problem if seconds is None else problem.model_copy(update={"retry_after": seconds})
