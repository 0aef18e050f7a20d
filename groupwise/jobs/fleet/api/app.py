"""The fleet's API: the same operations as the command line, over HTTP, for programs and for users on other machines.

The sender of a request is the holder of a key, which is looked up in the database each time. So a revoked key is refused from the next
request on, by every process that serves the API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from urllib.parse import unquote

from fastapi import FastAPI
from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.types import ASGIApp, Receive, Scope, Send

from groupwise.api.http.app import ApiInfo, assemble
from groupwise.api.http.middleware import RouteTable
from groupwise.api.http.route import Route
from groupwise.api.schemas.fleet import ACTS_FOR
from groupwise.api.schemas.keys import LOCAL, Caller, Keyring, Role, StoredKey, id_in, presented_key
from groupwise.api.schemas.problems import Refusal
from groupwise.jobs.fleet.api.routes import files, jobs, machines, people, state
from groupwise.jobs.fleet.api.serving import Serving
from groupwise.jobs.fleet.operations.keys import ROLES
from groupwise.jobs.fleet.store.database import database_time
from groupwise.jobs.fleet.store.tables import ApiKey

HEALTH = "/healthz"
ROUTES: tuple[Route, ...] = tuple(
    route if route.path == HEALTH else replace(route, codes=(*route.codes, "database_away"))
    for route in (
        *jobs.ROUTES,
        *files.ROUTES,
        *machines.ROUTES,
        *people.ROUTES,
        *state.ROUTES,
    )
)
"""Every route except the health check reads the database, if only for the caller's key."""

ABOUT = ApiInfo(
    "Groupwise fleet",
    "Jobs on many machines: submit one, watch it, cancel it, fetch what it left. A job is a command, an environment, files and resources. "
    "Every refusal is a problem (RFC 9457) with a `code` that never changes its meaning.",
)


def make_app(
    serving: Serving, environment_key: str | None, *, open_to_this_machine: bool
) -> FastAPI:
    """The application.

    `environment_key` is the key from the environment. `open_to_this_machine`: there was no key when it started to listen. Until the first
    one is made every caller from this machine is an admin, and this process never answers any other machine.
    """

    async def identify(headers: Mapping[str, str]) -> Caller:
        def caller(session: Session) -> Caller:
            if open_to_this_machine and not any_key(session):
                return LOCAL
            return caller_of(session, headers, environment_key)

        return await serving.database.read_in_thread(caller)

    return assemble(ABOUT, ROUTES, serving, identify, local_only=open_to_this_machine)


def make_local_app(serving: Serving) -> ASGIApp:
    """The application for commands of this machine (`groupwise.jobs.fleet.local`). They need no key: the header `ACTS_FOR` names the actor.

    A route is built when it is first requested: building all of them takes a tenth of a second, and a command needs one or two.
    """

    async def identify(headers: Mapping[str, str]) -> Caller:
        return Caller(unquote(headers.get(ACTS_FOR, LOCAL.key_id)), Role.ADMIN)

    table = RouteTable(ROUTES)

    @cache
    def application_of(route: Route | None) -> FastAPI:
        # Without routes it refuses as for any unknown address.
        routes = () if route is None else (route,)
        return assemble(ABOUT, routes, serving, identify, local_only=False)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await application_of(table.find(scope["method"], scope["path"]))(scope, receive, send)

    return application


def caller_of(session: Session, headers: Mapping[str, str], environment_key: str | None) -> Caller:
    """The caller of a request with these headers. `environment_key`: the key from the server's environment; its role is admin. Raises
    `unauthorised`."""
    presented = presented_key(headers)
    if presented is None:
        raise Refusal("unauthorised")
    caller = Keyring(_stored_keys(session, presented), environment_key).caller(presented)
    if caller is None:
        raise Refusal(
            "unauthorised",
            "The fleet does not know this key, or it was revoked, or its time is over. The fleet's operator makes one with "
            "`groupwise fleet key new ROLE`.",
        )
    return caller


def _stored_keys(session: Session, presented: str) -> tuple[StoredKey, ...]:
    """The row of the presented key, if it may still be used."""
    key = session.get(ApiKey, id_in(presented) or "")
    if key is None or key.revoked_at is not None:
        return ()
    if key.expires_at is not None and database_time(session) >= key.expires_at:
        return ()
    projects = None if key.projects is None else frozenset(key.projects)
    return (StoredKey(key.key_id, ROLES[key.role], bytes(key.digest), projects),)


def any_key(session: Session) -> bool:
    """True if a key was ever made, even if revoked or expired: from then on every request needs one."""
    return session.scalar(select(ApiKey.key_id).limit(1)) is not None
