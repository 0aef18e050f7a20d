"""Machines: add, show, keep work away, trust, give one up. Changing one takes an admin's key without projects."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import Query
from fastapi.responses import Response

from groupwise.api.schemas.fleet import MachineBody, MachineChangeBody, ReasonBody, TrustBody
from groupwise.api.schemas.keys import Role
from groupwise.jobs.fleet.api.serving import DOCUMENTS, Context, changes, document, reads
from groupwise.jobs.fleet.operations import machines

TAG = "machines"


async def list_machines(
    context: Context,
    removed: Annotated[bool, Query(description="Also those that were taken out.")] = False,
) -> Response:
    """All machines, with their GPUs and who holds them."""
    return document(await context.read(machines.listing, removed=removed))


async def add_machine(context: Context, body: MachineBody) -> Response:
    """Add a machine, or add a removed one again."""
    machine = machines.NewMachine(**body.model_dump())
    return document(await context.run(machines.add, machine), 201)


async def show_machine(context: Context, vm_id: str) -> Response:
    """One machine, and its history."""
    return document(await context.read(machines.show, vm_id))


async def change_machine(context: Context, vm_id: str, body: MachineChangeBody) -> Response:
    """Change its address, and the settings of its jobs."""
    return document(await context.run(machines.change, vm_id, **body.model_dump()))


async def drain_machine(context: Context, vm_id: str, body: ReasonBody | None = None) -> Response:
    """Place no new jobs there; a reason is stored."""
    return document(await context.run(machines.drain, vm_id, None if body is None else body.reason))


async def undrain_machine(context: Context, vm_id: str) -> Response:
    """Place jobs there again; its failed launches are forgotten."""
    return document(await context.run(machines.undrain, vm_id))


async def lose_machine(context: Context, vm_id: str) -> Response:
    """Declare it lost: its attempts end, and its jobs run elsewhere."""
    return document(await context.run(machines.lost, vm_id))


async def remove_machine(context: Context, vm_id: str) -> Response:
    """Remove it; no job may run there."""
    return document(await context.run(machines.remove, vm_id))


async def trust_machine(context: Context, vm_id: str, body: TrustBody) -> Response:
    """Trust the host key that it showed last; it must have this fingerprint if one is given."""
    return document(await context.run(machines.trust, vm_id, body.fingerprint))


async def clear_gpu(context: Context, vm_id: str, gpu: str) -> Response:
    """Let jobs have a GPU again that was in quarantine; `gpu` is its index or UUID."""
    return document(await context.run(machines.clear_quarantine, vm_id, gpu))


change = partial(changes, tag=TAG, role=Role.ADMIN)
read = partial(reads, tag=TAG)
ROUTES = (
    read("/vms", list_machines, answer=DOCUMENTS),
    change("/vms", add_machine, "vm_exists", takes_body=True, status=201),
    read("/vms/{vm_id}", show_machine, "unknown_vm"),
    change(
        "/vms/{vm_id}",
        change_machine,
        "unknown_vm",
        "vm_state",
        "vm_in_use",
        takes_body=True,
        method="PUT",
    ),
    change("/vms/{vm_id}/drain", drain_machine, "unknown_vm", "vm_state", takes_body=True),
    change("/vms/{vm_id}/undrain", undrain_machine, "unknown_vm", "vm_state"),
    change("/vms/{vm_id}/lost", lose_machine, "unknown_vm", "vm_state"),
    change("/vms/{vm_id}/remove", remove_machine, "unknown_vm", "vm_in_use"),
    change(
        "/vms/{vm_id}/trust",
        trust_machine,
        "unknown_vm",
        "vm_state",
        "host_key_mismatch",
        takes_body=True,
    ),
    change("/vms/{vm_id}/gpus/{gpu}/clear", clear_gpu, "unknown_vm", "unknown_gpu"),
)
