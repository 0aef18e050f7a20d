"""`groupwise launch ssh`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from groupwise.cli.launch.options import (
    CommonOptions,
    Environment,
    Gang,
    Key,
    Port,
    TrustHost,
    TrustJump,
    User,
    common,
    environment,
    gang,
    place_command,
)
from groupwise.cli.launch.places import machine, machines_together, trust_of
from groupwise.cli.launch.placing import launch
from groupwise.core.errors import UsageError

Hosts = Annotated[
    list[str],
    typer.Option(
        "--host",
        metavar="H",
        help="As `ssh H` has it: a name of the ssh config, or address. Several: the job runs on all of them at once.",
    ),
]
MasterAddress = Annotated[
    str | None,
    typer.Option(
        "--master-addr",
        metavar="ADDRESS",
        help="Where the other machines reach the first one; without it: as this machine does.",
    ),
]


@place_command(packages=environment, machines=gang, job=common)
def ssh(
    host: Hosts,
    user: User = None,
    port: Port = None,
    key: Key = None,
    trust: TrustHost = None,
    trust_jump: TrustJump = None,
    master_addr: MasterAddress = None,
    *,
    packages: Environment,
    machines: Gang,
    job: CommonOptions,
) -> None:
    """On a machine that is reached by SSH, or on several at once.

    It needs Python 3.11, and nothing else installed.

    groupwise launch ssh --host gpu1 --gpus 1 -- rl --config C.yaml --task-module task.py
    """
    together = machines.of(len(host))
    if master_addr is not None and not together.is_several:
        raise UsageError("--master-addr is for several machines, each with its own --host.")
    plan = packages.plan()
    trusted = trust_of(trust, trust_jump)
    places = [machine(each, user, port, key, trusted, packages.python) for each in host]
    place = machines_together(places, master_addr)
    launch(place, replace(job, environment=plan, gang=together))
