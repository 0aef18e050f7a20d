"""How clients are told of what an engine refuses, and of one that ends while it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from groupwise.api.schemas.problems import KINDS, FieldError, Refusal
from groupwise.core.errors import GroupwiseError, RunError, UsageError
from groupwise.server.engine.port import EngineLost, OrderField, WrongOrder
from groupwise.server.run.conductor import Conductor
from groupwise.server.run.engine_supervisor import FULL_SECONDS, is_full

T = TypeVar("T")


async def asked(work: Awaitable[T], conductor: Conductor, seconds: float) -> T:
    """What the engine of a run gave within so many seconds; what it refused is the client's, and its loss nobody's fault."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise Refusal("timed_out") from None
    except EngineLost:
        conductor.nudge()
        raise Refusal("engine_recovering", retry_after=2) from None
    except UsageError as error:
        raise refusal_of(error, otherwise="invalid_request") from None
    except RunError as error:
        raise refusal_of(error, otherwise="engine_recovering", retry_after=5) from None


def refusal_of(error: GroupwiseError, otherwise: str, retry_after: float | None = None) -> Refusal:
    """What the package says is wrong, as a problem of the table: under its own code where that is one."""
    if isinstance(error, Refusal):
        return error
    if is_full(error):
        return Refusal("disk_full", str(error), retry_after=retry_after or FULL_SECONDS)
    code = error.code if error.code in KINDS else otherwise
    return Refusal(code, str(error), retry_after=retry_after)


async def named(work: Awaitable[T], fields: Mapping[OrderField, str]) -> T:
    """What the engine gave; where the order is wrong, the refusal has the field, by the name that the client knows."""
    try:
        return await work
    except WrongOrder as error:
        refusal = refusal_of(error, otherwise="invalid_request")
        field = FieldError(field=fields[error.field], message=refusal.detail)
        raise Refusal(refusal.code, refusal.detail, errors=[field]) from None
