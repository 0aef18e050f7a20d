"""The fleet's API: the same verbs as the command line, behind addresses, for programs and for people who are elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fastapi import FastAPI
from sqlalchemy.orm import Session

from groupwise.api.http.app import About, assemble
from groupwise.api.http.declared import Route
from groupwise.api.schemas.keys import LOCAL, Caller
from groupwise.jobs.fleet.api.callers import any_key, caller_of
from groupwise.jobs.fleet.api.routes import files, jobs, machines, people, state
from groupwise.jobs.fleet.api.serving import Serving

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
"""All but whether the process lives ask the database, for the caller's key if for nothing else."""

DESCRIPTION = (
    "Jobs on many machines: submit one, watch it, cancel it, fetch what it left. A job is a command, an environment, files and resources. "
    "Every refusal is a problem (RFC 9457) with a `code` that never changes its meaning."
)


def make_app(serving: Serving, plain: str | None, *, open_to_this_machine: bool) -> FastAPI:
    """The application.

    `plain` is the key from the environment. `open_to_this_machine`: there was no key when it began to listen. Until the first one is made
    whoever asks from this machine is an admin, and nobody else is ever answered by this process.
    """

    def caller(session: Session, headers: Mapping[str, str]) -> Caller:
        if open_to_this_machine and not any_key(session):
            return LOCAL
        return caller_of(session, headers, plain)

    async def who(headers: Mapping[str, str]) -> Caller:
        return await serving.database.read_in_thread(lambda session: caller(session, headers))

    return assemble(
        About("Groupwise fleet", DESCRIPTION),
        ROUTES,
        serving,
        who,
        local_only=open_to_this_machine,
    )
