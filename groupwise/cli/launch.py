"""`groupwise launch`: a command of groupwise, or a script of the project, on another machine; and what came of it."""

from __future__ import annotations

from typing import Annotated

import typer

from groupwise.cli import launch_jobs
from groupwise.cli.launch_options import (
    AsJson,
    BasePython,
    Detach,
    DryRun,
    EnvFile,
    Extra,
    Gpus,
    Host,
    IndexUrl,
    Key,
    Lock,
    MaxHours,
    MaxPrice,
    Name,
    NoPreflight,
    Port,
    Python,
    Result,
    Script,
    Take,
    To,
    TrustHost,
    TrustJump,
    User,
    Wheelhouse,
    With,
)
from groupwise.cli.launch_places import cluster, machine, trust_of
from groupwise.cli.launch_placing import Asked, environment_plan, launch
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
    user: User = None,
    port: Port = None,
    key: Key = None,
    trust: TrustHost = None,
    trust_jump: TrustJump = None,
    python: Python = None,
    base_python: BasePython = None,
    extra: Extra = None,
    also: With = None,
    lock: Lock = None,
    wheelhouse: Wheelhouse = None,
    index_url: IndexUrl = None,
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
    what = behind(ctx, script)
    environment = environment_plan(python, base_python, extra, also, lock, wheelhouse, index_url)
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


@app.command("slurm", cls=LaunchCommand)
def slurm(
    ctx: typer.Context,
    host: Host = None,
    user: User = None,
    port: Port = None,
    key: Key = None,
    trust: TrustHost = None,
    trust_jump: TrustJump = None,
    python: Python = None,
    base_python: BasePython = None,
    extra: Extra = None,
    also: With = None,
    lock: Lock = None,
    wheelhouse: Wheelhouse = None,
    index_url: IndexUrl = None,
    partition: Annotated[str | None, typer.Option(metavar="P", help="Of Slurm.")] = None,
    account: Annotated[str | None, typer.Option(metavar="A", help="That pays for it.")] = None,
    qos: Annotated[str | None, typer.Option(metavar="Q", help="Quality of service.")] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="TYPE", help="Of --gpus, as Slurm calls it.")
    ] = None,
    cpus: Annotated[int | None, typer.Option(metavar="N", min=1, help="Cores.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="M", help="Of the node, as 32G: sbatch's --mem.")
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Another option of sbatch: --sbatch=--constraint=a100"),
    ] = None,
    shared: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder that the login node and all nodes have; without it: the home folder.",
        ),
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
    """On a node of a cluster, given to Slurm.

    By this machine, or by a login node that is reached by SSH.

    groupwise launch slurm --host login --gpus 1 -- rl --config C.yaml --task-module task.py
    """
    from groupwise.launch.places import LOCAL, Place

    what = behind(ctx, script)
    made = base_python or extra or also or lock or wheelhouse or index_url
    environment = (
        environment_plan(python, base_python, extra, also, lock, wheelhouse, index_url)
        if host is not None or made
        else None
    )
    if host is not None:
        login = machine(host, user, port, key, trust_of(trust, trust_jump), python)
    elif user or port or key or trust or trust_jump:
        raise UsageError(
            "--user, --port, --key, --trust and --trust-jump are of a login node: --host names it. Without it Slurm is asked here."
        )
    else:
        login = Place(LOCAL, {"python": python} if python else {})
    asks = {
        "partition": partition,
        "account": account,
        "qos": qos,
        "gpu": gpu,
        "cpus": cpus,
        "memory": memory,
        "options": list(sbatch or ()),
    }
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
        {key: value for key, value in asks.items() if value},
    )
    launch(cluster(login, shared), asked)


app.command("list")(launch_jobs.list_jobs)
app.command("logs")(launch_jobs.logs)
app.command("fetch")(launch_jobs.fetch)
app.command("stop")(launch_jobs.stop)
app.command("resume")(launch_jobs.resume)
app.command("remove")(launch_jobs.remove)
