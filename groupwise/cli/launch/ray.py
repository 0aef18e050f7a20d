"""`groupwise launch ray`."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Annotated

import typer

from groupwise.cli.launch.options import (
    CommonOptions,
    Environment,
    Gang,
    Login,
    common,
    environment,
    gang,
    login,
    place_command,
)
from groupwise.cli.launch.places import ray_cluster
from groupwise.cli.launch.placing import launch
from groupwise.core.errors import UsageError

Address = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Of Ray's dashboard, as that machine reaches it; without it: RAY_ADDRESS of this machine if it is one, else http://127.0.0.1:8265.",
    ),
]
Cpus = Annotated[float | None, typer.Option(metavar="N", min=0.01, help="Of Ray; without it: 1.")]
Memory = Annotated[
    str | None,
    typer.Option(metavar="M", help="That Ray sets aside for it, as 32G; it is no limit."),
]
Resource = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=N",
        help="Of a resource of Ray's nodes: --resource accelerator_type:A100=0.001",
    ),
]
UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
"""Powers of two."""


@place_command(by=login, packages=environment, machines=gang, job=common)
def ray(
    address: Address = None,
    cpus: Cpus = None,
    memory: Memory = None,
    resource: Resource = None,
    *,
    by: Login,
    packages: Environment,
    machines: Gang,
    job: CommonOptions,
) -> None:
    """On a node of a Ray cluster, or several, as a job of Ray.

    By this machine, or by the head node that is reached by SSH.

    groupwise launch ray --host head --gpus 1 -- rl --config C.yaml --task-module task.py
    """
    from groupwise.jobs.clouds.ray import resources_of

    plan, here = by.plan(packages), by.host is None
    asks = {
        "cpus": cpus,
        "memory": None if memory is None else _bytes(memory),
        "resources": resources_of(resource or ()),
    }
    given = {name: value for name, value in asks.items() if value}
    # Ray's own programs understand other kinds of address in this variable as well.
    usual = os.environ.get("RAY_ADDRESS", "") if here else ""
    if not address and usual.startswith(("http://", "https://")):
        address = usual
    place = ray_cluster(by.machine(packages), by.shared, address)
    launch(place, replace(job, environment=plan, asks=given, gang=machines))


def _bytes(word: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", word)
    size = int(float(found[1]) * 2 ** UNITS[found[2]]) if found else 0
    if size < 1:
        raise UsageError(f"--memory {word}: a size is expected, as 500M or 32G.")
    return size
