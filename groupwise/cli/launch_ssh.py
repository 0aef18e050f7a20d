"""`groupwise launch ssh`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from groupwise.cli.launch_options import Key, Port, TrustHost, TrustJump, User, place_command
from groupwise.cli.launch_places import machine, trust_of
from groupwise.cli.launch_placing import Asked, Environment, asked, environment, launch

ThisHost = Annotated[
    str, typer.Option(metavar="H", help="As `ssh H` has it: a name of the ssh config, or address.")
]


@place_command(packages=environment, job=asked)
def ssh(
    host: ThisHost,
    user: User = None,
    port: Port = None,
    key: Key = None,
    trust: TrustHost = None,
    trust_jump: TrustJump = None,
    *,
    packages: Environment,
    job: Asked,
) -> None:
    """On a machine that is reached by SSH.

    It needs Python 3.11, and nothing else installed.

    groupwise launch ssh --host gpu1 --gpus 1 -- rl --config C.yaml --task-module task.py
    """
    plan = packages.plan()
    place = machine(host, user, port, key, trust_of(trust, trust_jump), packages.python)
    launch(place, replace(job, environment=plan))
