"""The fleet's API: the same verbs as the command line, behind addresses, for programs and for people who are elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI

from groupwise.fleet.api.callers import caller_of
from groupwise.fleet.api.routes import files, jobs, machines, people, state
from groupwise.fleet.api.serving import Serving
from groupwise.http.app import About, assemble
from groupwise.http.declared import Route
from groupwise.wire.keys import LOCAL, Caller

ROUTES: tuple[Route, ...] = (
    *jobs.ROUTES,
    *files.ROUTES,
    *machines.ROUTES,
    *people.ROUTES,
    *state.ROUTES,
)

DESCRIPTION = (
    "Jobs on many machines: submit one, watch it, cancel it, fetch what it left. A job is a command, an environment, files and resources. "
    "Every refusal is a problem (RFC 9457) with a `code` that never changes its meaning."
)


def make_app(serving: Serving, plain: str | None, *, open_to_this_machine: bool) -> FastAPI:
    """The application.

    `plain` is the key from the environment. `open_to_this_machine`: there is no key at all, so that whoever asks from this machine is an
    admin, and nobody else is answered.
    """

    async def who(headers: Mapping[str, str]) -> Caller:
        if open_to_this_machine:
            return LOCAL
        return await serving.database.read_in_thread(
            lambda session: caller_of(session, headers, plain)
        )

    return assemble(
        About("Groupwise fleet", DESCRIPTION),
        ROUTES,
        serving,
        who,
        local_only=open_to_this_machine,
    )
