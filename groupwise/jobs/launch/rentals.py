"""Machines of paid places: ends or keeps a job's machine after the job, and sweeps machines that were left running.

A backend of such a place can list and end its rented machines (`Renting`). Apart from a job's order and cost, only this is used here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.jobs.clouds.backend import (
    KEEP_ON_FAILURE,
    TERMINATE_AFTER,
    Backend,
    CloudError,
    Handle,
    Outcome,
    Priced,
    Rented,
    Renting,
    Status,
)
from groupwise.jobs.launch import results


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The result of a sweep."""

    overdue: tuple[Rented, ...]
    """Machines that were ended, or would be in a dry run."""
    left: tuple[Rented, ...]
    """Machines that are kept, because their deadlines are in the future."""
    failed: tuple[str, ...] = ()
    """Messages about machines that could not be ended."""


async def after(
    backend: Backend, handle: Handle, status: Status, folder: Path, say: Callable[[str], None]
) -> None:
    """End the machine of a job whose results were just fetched to `folder`, or report that it is kept, with its price.

    After a success it is ended if the order requests that; after any other ending it is ended unless the order keeps it; and never
    before all results are here.
    """
    if status.ending is None or not isinstance(backend, Renting):
        return
    found = await of_job(backend, handle.name)
    if not found:
        return
    order = await backend.order(handle)
    if status.ending.outcome is Outcome.SUCCEEDED:
        ends = bool(order.asks.get(TERMINATE_AFTER))
    else:
        ends = not order.asks.get(KEEP_ON_FAILURE)
    if ends and not results.is_all_of(folder, handle):
        say(f"not all of what {handle.name} has made is in {folder}, so what it ran on stays")
        ends = False
    for rented in found:
        if ends:
            await backend.give_back(rented)
            say(f"{rented.id} is ended")
        else:
            say(f"{stays(rented)}; `groupwise launch remove {handle.name}` ends it")


async def of_job(backend: Renting, name: str) -> list[Rented]:
    """Machines rented for this job."""
    return [each for each in await backend.rented() if each.job == name]


async def cost_of(backend: Backend, handle: Handle) -> dict[str, Any]:
    """The cost fields of a result document: dollars so far, and what they cover. Empty if unknown."""
    found = await backend.cost(handle) if isinstance(backend, Priced) else None
    return {} if found is None else {"cost": found.dollars, "cost_counts": found.counts}


def stays(rented: Rented) -> str:
    """The message that a machine is kept: its address, deadline and price."""
    price = "" if rented.price_per_hour is None else f", ${rented.price_per_hour:.2f} an hour"
    address = f" ({rented.address})" if rented.address else ""
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(rented.deadline))
    return f"{rented.id}{address} stays until {until}{price}"


async def sweep(
    backend: Renting, name: str | None, *, dry_run: bool, now: float | None = None
) -> SweepResult:
    """End machines whose deadlines have passed; with `name`, all machines of that job regardless of their deadlines."""
    moment = time.time() if now is None else now
    found = await backend.rented()
    if name is None:
        overdue = tuple(each for each in found if each.deadline <= moment)
    else:
        overdue = tuple(each for each in found if each.job == name)
    failed: dict[Rented, str] = {}
    if not dry_run:
        for each in overdue:
            try:
                await backend.give_back(each)
            except CloudError as error:
                failed[each] = f"{each.id} of {each.job}: {error.message}"
    ended = tuple(each for each in overdue if each not in failed)
    left = tuple(each for each in found if each not in overdue)
    return SweepResult(ended, left, tuple(failed.values()))
