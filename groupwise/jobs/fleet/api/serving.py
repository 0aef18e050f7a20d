"""Shared parts of the routes of the fleet's API: the database, the folders, and the caller.

A route is an operation of `groupwise.jobs.fleet.operations` with an address: it reads its body, runs the operation as one transaction
with the caller as its actor, and answers with the operation's document. So an operation means the same here as at the command line, and
a key that is bound to projects sees no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

from fastapi import Depends, Request
from fastapi.responses import JSONResponse, Response
from sqlalchemy.exc import DataError
from sqlalchemy.orm import Session

from groupwise.api.http.route import Route
from groupwise.api.http.shared_state import Limits, Shared, facts_of
from groupwise.api.schemas.keys import Caller, Role
from groupwise.api.schemas.problems import Refusal
from groupwise.jobs.fleet.notify.base import Notifier
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.operations.keys import ROLES
from groupwise.jobs.fleet.retry import AwayError
from groupwise.jobs.fleet.secrets import DEFAULT_SECRETS, AllowedSecrets
from groupwise.jobs.fleet.store.database import Database, DatabaseFailure
from groupwise.jobs.fleet.text_validation import json_safe
from groupwise.jobs.hosts.files import BlobStore

P = ParamSpec("P")
T = TypeVar("T")
MIB = 1 << 20
MAX_BODY = 64 * MIB
"""Maximum bytes of a request; a file for a job is sent in pieces of at most this size."""
MAX_JSON = 16 * MIB
"""Maximum bytes of a JSON body: an array of jobs, with the files of each."""
RETRY_SECONDS = 5.0
"""Seconds after which to ask again if the database did not answer."""


@dataclass(frozen=True, slots=True)
class Folders:
    """Folders of the control machine."""

    logs: Path
    artefacts: Path
    blobs: BlobStore

    @property
    def all(self) -> tuple[Path, ...]:
        """Folders that grow; each may be on a disk of its own."""
        return self.logs, self.artefacts, self.blobs.root


class Serving(Shared):
    """State shared by all requests to one API."""

    most_json = MAX_JSON
    role_words: Mapping[Role, str] = {role: word for word, role in ROLES.items()}

    def __init__(
        self,
        database: Database,
        folders: Folders,
        notifier: Notifier,
        allowed: AllowedSecrets = DEFAULT_SECRETS,
    ) -> None:
        super().__init__(Limits(MAX_BODY, max_json_bytes=self.most_json))
        self.database = database
        self.folders = folders
        self.notifier = notifier
        self.allowed = allowed

    def refusal_of(self, error: Exception) -> Refusal | None:
        """The refusal for errors of the database, which are not mistakes of the server."""
        if isinstance(error, DatabaseFailure):
            return Refusal("database_away", retry_after=RETRY_SECONDS)
        if isinstance(error, DataError | OverflowError):  # JSON allows more than a database stores
            return Refusal(
                "invalid_request",
                "The request holds what no database keeps: a NUL character, or a number beyond all bounds.",
            )
        return None


class LocalServing(Serving):
    """Serves callers in this process, who may see the database's name and messages."""

    most_json = MAX_BODY

    def refusal_of(self, error: Exception) -> Refusal | None:
        """Like `Serving.refusal_of`, but with the messages of the database and of the file system."""
        if isinstance(error, AwayError):
            return Refusal("database_away" if error.temporary else "internal", error.message)
        if isinstance(error, OSError):
            return Refusal("internal", f"{type(error).__name__}: {error}")
        return super().refusal_of(error)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The context a handler receives."""

    serving: Serving
    caller: Caller

    @property
    def actor(self) -> Actor:
        """The caller as an actor of operations."""
        caller = self.caller
        name = caller.key_id  # a local caller is named with its kind, as `user:ada`
        is_operator = caller.role >= Role.ADMIN and caller.projects is None
        return Actor(name if ":" in name else f"key:{name}", caller.projects, is_operator)

    async def run(
        self,
        operation: Callable[Concatenate[Session, Actor, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run an operation as one transaction."""
        return await self.serving.database.in_thread(
            lambda session: operation(session, self.actor, *args, **kwargs)
        )

    async def read(
        self,
        operation: Callable[Concatenate[Session, Actor, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run an operation that only reads, and waits for no writer."""
        return await self.serving.database.read_in_thread(
            lambda session: operation(session, self.actor, *args, **kwargs)
        )


async def request_context(request: Request) -> RequestContext:
    """Dependency of handlers: the request's caller and the shared state."""
    caller = facts_of(request.scope).caller
    assert caller is not None, "the middleware refuses requests without a caller"
    return RequestContext(request.app.state.shared, caller)


Context = Annotated[RequestContext, Depends(request_context)]


def document(value: Any, status: int = 200) -> Response:
    """A document as a response, even if a row holds values that JSON cannot express."""
    try:
        return JSONResponse(value, status)
    except ValueError:  # a number or a text that JSON cannot express
        return JSONResponse(json_safe(value), status)


DOCUMENT = dict[str, Any]
DOCUMENTS = list[dict[str, Any]]


def reads(
    path: str,
    handler: Callable[..., Any],
    *codes: str,
    tag: str,
    role: Role | None = Role.READ,
    answer: Any = DOCUMENT,
    media_type: str = "application/json",
) -> Route:
    """A route that changes nothing."""
    return Route(
        method="GET",
        path=path,
        handler=handler,
        role=role,
        tag=tag,
        answer=answer,
        media_type=media_type,
        codes=codes,
    )


def changes(
    path: str,
    handler: Callable[..., Any],
    *codes: str,
    tag: str,
    role: Role,
    method: str = "POST",
    works: bool = True,
    answer: Any = DOCUMENT,
    **more: Any,
) -> Route:
    """A route that changes something. `more`: other fields of `Route`."""
    return Route(
        method=method,
        path=path,
        handler=handler,
        role=role,
        tag=tag,
        answer=answer,
        codes=codes,
        works=works,
        **more,
    )
