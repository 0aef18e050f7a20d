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
    RentedMachine,
    Renting,
    Status,
)
from groupwise.jobs.launch import results


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The result of a sweep."""

    overdue: tuple[RentedMachine, ...]
    """Machines that were ended, or would be in a dry run."""
    kept: tuple[RentedMachine, ...]
    """Machines that are kept, because their deadlines are in the future."""
    failed: tuple[str, ...] = ()
    """Messages about machines that could not be ended."""


async def end_or_keep(
    backend: Backend, handle: Handle, status: Status, folder: Path, say: Callable[[str], None]
) -> None:
    """End the machine of a job whose results were just fetched to `folder`, or report that it is kept, with its price.

    After a success it is ended if the order requests that; after any other ending it is ended unless the order keeps it; and never
    before all results are here.
    """
    if status.ending is None or not isinstance(backend, Renting):
        return
    machines = await machines_of_job(backend, handle.name)
    if not machines:
        return
    order = await backend.order(handle)
    if status.ending.outcome is Outcome.SUCCEEDED:
        should_end = bool(order.place_options.get(TERMINATE_AFTER))
    else:
        should_end = not order.place_options.get(KEEP_ON_FAILURE)
    if should_end and not results.is_all_of(folder, handle):
        say(f"not all of what {handle.name} has made is in {folder}, so what it ran on stays")
        should_end = False
    for rented in machines:
        if should_end:
            await backend.give_back(rented)
            say(f"{rented.id} is ended")
        else:
            say(f"{kept_message(rented)}; `groupwise launch remove {handle.name}` ends it")


async def machines_of_job(backend: Renting, name: str) -> list[RentedMachine]:
    """Machines rented for this job."""
    return [machine for machine in await backend.rented() if machine.job == name]


async def cost_of(backend: Backend, handle: Handle) -> dict[str, Any]:
    """The cost fields of a result document: dollars so far, and what they cover. Empty if unknown."""
    cost = await backend.cost(handle) if isinstance(backend, Priced) else None
    return {} if cost is None else {"cost": cost.dollars, "cost_counts": cost.counts}


def kept_message(rented: RentedMachine) -> str:
    """The message that a machine is kept: its address, deadline and price."""
    price = "" if rented.price_per_hour is None else f", ${rented.price_per_hour:.2f} an hour"
    address = f" ({rented.address})" if rented.address else ""
    deadline = time.strftime("%Y-%m-%d %H:%M", time.localtime(rented.deadline))
    return f"{rented.id}{address} stays until {deadline}{price}"


async def sweep(
    backend: Renting, name: str | None, *, dry_run: bool, now: float | None = None
) -> SweepResult:
    """End machines whose deadlines have passed; with `name`, all machines of that job regardless of their deadlines."""
    moment = time.time() if now is None else now
    machines = await backend.rented()
    if name is None:
        overdue = tuple(machine for machine in machines if machine.deadline <= moment)
    else:
        overdue = tuple(machine for machine in machines if machine.job == name)
    failed: dict[RentedMachine, str] = {}
    if not dry_run:
        for machine in overdue:
            try:
                await backend.give_back(machine)
            except CloudError as error:
                failed[machine] = f"{machine.id} of {machine.job}: {error.message}"
    ended_machines = tuple(machine for machine in overdue if machine not in failed)
    kept = tuple(machine for machine in machines if machine not in overdue)
    return SweepResult(ended_machines, kept, tuple(failed.values()))
