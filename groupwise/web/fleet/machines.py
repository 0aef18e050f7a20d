"""The fleet as a whole: what somebody should look at, and all machines with their GPUs, as they are reserved and as they were seen."""

from __future__ import annotations

from typing import Any

from groupwise.errors import RunNotFoundError
from groupwise.fleet.states import Observed
from groupwise.web.fleet.watched import Document, FleetLike, WatchedFleet
from groupwise.web.pages import Page, Visit, done, shown

LIVE = "/live?fleet"
ACTIONS = {"drain": "place nothing new there", "undrain": "place work there again"}


def of(visit: Visit) -> WatchedFleet:
    """The fleet of this dashboard. Raises RunNotFoundError where there is none."""
    if visit.place.fleet is None:
        raise RunNotFoundError(
            "This dashboard shows no fleet. Whoever runs it may begin it with --fleet FOLDER, or --fleet with the address of an API."
        )
    return visit.place.fleet


def fleet(visit: Visit) -> Page:
    """The first page of a fleet."""
    found = of(visit)
    machines = [described(each) for each in found.machines()]
    data: dict[str, Any] = {"status": found.status(), "machines": machines, "jobs": found.newest()}
    return Page("fleet.html", data, live=LIVE)


def machine(visit: Visit) -> Page:
    """One machine."""
    document = of(visit).ask(lambda fleet: fleet.machine(visit.named("vm")))
    jobs = of(visit).ask(lambda fleet: fleet.jobs(vm=visit.named("vm"), limit=20))
    data = {"machine": described(document), "jobs": jobs, "actions": ACTIONS}
    return Page("machine.html", data, live=LIVE)


def change(visit: Visit, form: Any) -> str:
    """Drain a machine, or have it work again."""
    vm, action = visit.named("vm"), form.get("action", "")
    if action not in ACTIONS:
        raise RunNotFoundError(f"{action[:40]!r} is nothing that can be done with a machine here.")

    def changed(fleet: FleetLike) -> Document:
        return fleet.drain(vm) if action == "drain" else fleet.undrain(vm)

    of(visit).ask(changed)
    of(visit).forget()
    return visit.request.url.path


def described(machine: Document) -> Document:
    """A machine with, for each GPU, the word for what matters most of it."""
    gpus = [{**gpu, "shown": _of_gpu(gpu)} for gpu in machine.get("gpus", [])]
    return {**machine, "gpus": gpus}


def _of_gpu(gpu: Document) -> str:
    """held, free, quarantined, or what was seen of it that nobody here has asked for."""
    if gpu["quarantined"]:
        return "quarantined"
    if gpu["held_by"]:
        return "held"
    return "free" if gpu["observed"] == Observed.OK else gpu["observed"].replace("_", " ")


ROUTES = (
    shown("/fleet", fleet),
    shown("/fleet/machines/{vm}", machine),
    done("/fleet/machines/{vm}", change),
)
