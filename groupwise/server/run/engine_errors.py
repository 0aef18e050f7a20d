"""Converts refusals of an engine, and its loss during a call, into answers for clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from groupwise.api.schemas.problems import KINDS, Refusal
from groupwise.core.errors import GroupwiseError, RunError, UsageError
from groupwise.core.types import Prompt
from groupwise.server.engine.engine_protocol import EngineLost, InvalidSampleRequest, Opened
from groupwise.server.engine.sampling_checks import check_characters, texts_of
from groupwise.server.run.conductor import Conductor
from groupwise.server.run.engine_supervisor import DISK_FULL_RETRY_SECONDS, is_full
from groupwise.tasks.openai.sampling import OrderField

T = TypeVar("T")


async def await_engine(work: Awaitable[T], conductor: Conductor, seconds: float) -> T:
    """Await an engine's answer for at most `seconds`. A request that the engine refuses is the client's fault, a lost engine is not.

    While the run leaves its engine (a shutdown, a restart, its end), an engine may fail in any way, because its parts are being closed.
    Only an invalid request stays the client's fault then; for anything else the run says what the client is to do.
    """
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise Refusal("timed_out") from None
    except EngineLost:
        conductor.nudge()
        raise Refusal("engine_recovering", retry_after=2) from None
    except UsageError as error:
        if not isinstance(error, InvalidSampleRequest) and not conductor.is_serving:
            raise conductor.refusal() from None
        raise refusal_of(error, otherwise="invalid_request") from None
    except RunError as error:
        if not conductor.is_serving:
            raise conductor.refusal() from None
        raise refusal_of(error, otherwise="engine_recovering", retry_after=5) from None


def refusal_of(error: GroupwiseError, otherwise: str, retry_after: float | None = None) -> Refusal:
    """Convert an error of the package to a problem: under its own code if `KINDS` has it, else as `otherwise`."""
    if isinstance(error, Refusal):
        return error
    if is_full(error):
        return Refusal("disk_full", str(error), retry_after=retry_after or DISK_FULL_RETRY_SECONDS)
    code = error.code if error.code in KINDS else otherwise
    return Refusal(code, str(error), retry_after=retry_after)


def check_prompt_length(prompt: Prompt, opened: Opened, field: str) -> None:
    """Refuse with `prompt_too_long` a prompt that has too many characters for any tokens; the engine never receives it."""
    try:
        longest, most = opened.longest_prompt, opened.longest_prompt_characters
        check_characters(*texts_of(prompt), longest=longest, most=most)
    except InvalidSampleRequest as error:
        raise Refusal(error.code, error.message, field=field) from None


async def naming_field(work: Awaitable[T], fields: Mapping[OrderField, str]) -> T:
    """Await the engine's answer; if the request is invalid, the refusal names the field as the client knows it."""
    try:
        return await work
    except InvalidSampleRequest as error:
        refusal = refusal_of(error, otherwise="invalid_request")
        raise Refusal(refusal.code, refusal.detail, field=fields[error.field]) from None
