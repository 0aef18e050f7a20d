"""`groupwise launch ssh`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from groupwise.cli.environment import RemoteEnvironmentOptions
from groupwise.cli.launch.options import GangOptions, LaunchOptions
from groupwise.cli.launch.places import LoginOptions, machines_together
from groupwise.cli.launch.placing import launch
from groupwise.cli.options import option
from groupwise.core.errors import UsageError
from groupwise.core.terminal.quantities import counted


def ssh(
    *,
    host: Annotated[
        list[str],
        option(
            "H",
            "The machine, as `ssh H` has it: a name of the ssh config, or an address. May be repeated: the job then runs on all of "
            "them at once.",
        ),
    ],
    login: LoginOptions,
    master_addr: Annotated[
        str | None,
        option(
            "ADDRESS",
            "Address at which the other machines reach the first one; default: the one used from here.",
        ),
    ] = None,
    packages: RemoteEnvironmentOptions,
    gang: GangOptions,
    job: LaunchOptions,
) -> None:
    """Run a job on a machine over SSH, or on several at once.

    The machine needs Python 3.11 and nothing else.

    groupwise launch ssh --host gpu1 --gpus 1 -- rl --config C.yaml --task-module task.py
    """
    if gang.machines not in (None, len(host)):
        raise UsageError(
            f"--machines is {gang.machines}, and --host names {counted(len(host), 'machine')}: give each its own --host."
        )
    if master_addr is not None and len(host) == 1:
        raise UsageError("--master-addr is for several machines, each with its own --host.")
    plan = packages.plan_unless_there()
    places = [login.machine(name, packages.python) for name in host]
    gang = replace(gang, machines=len(host))
    launch(machines_together(places, master_addr), job, environment=plan, gang=gang)
