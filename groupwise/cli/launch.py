"""`groupwise launch`: a command of groupwise, or a script of the project, on another machine; and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from groupwise.cli import launch_jobs
from groupwise.cli.launch_options import (
    AsJson,
    Detach,
    DryRun,
    EnvFile,
    Gpus,
    MaxHours,
    MaxPrice,
    Name,
    NoPreflight,
    Result,
    Script,
    Take,
    To,
)
from groupwise.cli.launch_places import machine, trust_of
from groupwise.cli.launch_placing import Asked, launch
from groupwise.cli.launch_words import LaunchCommand, behind
from groupwise.errors import UsageError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.command("local", cls=LaunchCommand)
def local(
    ctx: typer.Context,
    script: Script = None,
    name: Name = None,
    gpus: Gpus = 0,
    max_hours: MaxHours = 24.0,
    max_price: MaxPrice = None,
    env_file: EnvFile = None,
    take: Take = None,
    result: Result = None,
    to: To = None,
    dry_run: DryRun = False,
    detach: Detach = False,
    no_preflight: NoPreflight = False,
    as_json: AsJson = False,
) -> None:
    """On this machine, as a process that needs no terminal.

        groupwise launch local --detach -- rl --config C.yaml --task-module task.py

    It runs in a copy of the project, with the packages that this command runs with, and the variables of --env-file.
    """
    from groupwise.launch.places import LOCAL, Place

    asked = Asked(
        behind(ctx, script),
        name,
        gpus,
        max_hours,
        max_price,
        tuple(env_file or ()),
        tuple(take or ()),
        tuple(result or ()),
        to,
        dry_run,
        detach,
        not no_preflight,
        as_json,
    )
    launch(Place(LOCAL), asked)


@app.command("ssh", cls=LaunchCommand)
def ssh(
    ctx: typer.Context,
    host: Annotated[
        str,
        typer.Option(metavar="H", help="As `ssh H` has it: a name of the ssh config, or address."),
    ],
    user: Annotated[str | None, typer.Option(metavar="U", help="As whom to log in.")] = None,
    port: Annotated[int | None, typer.Option(metavar="N", min=1, max=65535)] = None,
    key: Annotated[
        str | None, typer.Option(metavar="FILE", help="The private key, on this machine.")
    ] = None,
    trust: Annotated[
        str | None,
        typer.Option(
            metavar="FINGERPRINT",
            help="Its host key, as SHA256:…; without it: that of known_hosts, or your answer here.",
        ),
    ] = None,
    trust_jump: Annotated[
        str | None,
        typer.Option("--trust-jump", metavar="FINGERPRINT", help="The same of a jump host."),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            metavar="P",
            help="Interpreter there that has groupwise; without it: an environment is made of what is installed here.",
        ),
    ] = None,
    base_python: Annotated[
        str | None,
        typer.Option(
            "--base-python",
            metavar="P",
            help="Interpreter there that makes it; without it: the version of here.",
        ),
    ] = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(metavar="E", help="Extra of groupwise for that; without it: train."),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--with", metavar="NAME", help="Also this package, in the release installed here."
        ),
    ] = None,
    lock: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Releases, as pip freeze writes them; with hashes, too."),
    ] = None,
    wheelhouse: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Install from its wheels alone; they are sent there."),
    ] = None,
    index_url: Annotated[
        str | None,
        typer.Option("--index-url", metavar="URL", help="Where pip looks there, in place of PyPI."),
    ] = None,
    script: Script = None,
    name: Name = None,
    gpus: Gpus = 0,
    max_hours: MaxHours = 24.0,
    max_price: MaxPrice = None,
    env_file: EnvFile = None,
    take: Take = None,
    result: Result = None,
    to: To = None,
    dry_run: DryRun = False,
    detach: Detach = False,
    no_preflight: NoPreflight = False,
    as_json: AsJson = False,
) -> None:
    """On a machine that is reached by SSH.

    It needs Python 3.11, and nothing else installed.

    groupwise launch ssh --host gpu1 --gpus 1 -- rl --config C.yaml --task-module task.py
    """
    from groupwise.fleet.machines.plans import Asked as Environment
    from groupwise.fleet.machines.plans import plan_of

    what = behind(ctx, script)
    made = base_python or extra or also or lock or wheelhouse or index_url
    if python is not None and made:
        raise UsageError(
            "--python names an environment that is there; --base-python, --extra, --with, --lock, --wheelhouse and --index-url are for one "
            "that is made."
        )
    environment = (
        None
        if python is not None
        else plan_of(
            Environment(
                extras=extra or (),
                also=also or (),
                lock=lock,
                wheelhouse=wheelhouse,
                python=base_python,
                index_url=index_url,
            )
        )
    )
    place = machine(host, user, port, key, trust_of(trust, trust_jump), python)
    asked = Asked(
        what,
        name,
        gpus,
        max_hours,
        max_price,
        tuple(env_file or ()),
        tuple(take or ()),
        tuple(result or ()),
        to,
        dry_run,
        detach,
        not no_preflight,
        as_json,
        environment,
    )
    launch(place, asked)


app.command("list")(launch_jobs.list_jobs)
app.command("logs")(launch_jobs.logs)
app.command("fetch")(launch_jobs.fetch)
app.command("stop")(launch_jobs.stop)
app.command("resume")(launch_jobs.resume)
app.command("remove")(launch_jobs.remove)
