"""`groupwise launch slurm`."""

from __future__ import annotations

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
from groupwise.cli.launch.places import slurm_cluster
from groupwise.cli.launch.placing import launch
from groupwise.core.errors import UsageError

Partition = Annotated[str | None, typer.Option(metavar="P", help="Of Slurm.")]
Account = Annotated[str | None, typer.Option(metavar="A", help="That pays for it.")]
Qos = Annotated[str | None, typer.Option(metavar="Q", help="Quality of service.")]
Gpu = Annotated[
    str | None, typer.Option("--gpu", metavar="TYPE", help="Of --gpus, as Slurm calls it.")
]
Cpus = Annotated[int | None, typer.Option(metavar="N", min=1, help="Cores.")]
Memory = Annotated[
    str | None, typer.Option(metavar="M", help="Of the node, as 32G: sbatch's --mem.")
]
Sbatch = Annotated[
    list[str] | None,
    typer.Option(metavar="OPTION", help="Another option of sbatch: --sbatch=--constraint=a100"),
]


@place_command(by=login, packages=environment, machines=gang, job=common)
def slurm(
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    gpu: Gpu = None,
    cpus: Cpus = None,
    memory: Memory = None,
    sbatch: Sbatch = None,
    *,
    by: Login,
    packages: Environment,
    machines: Gang,
    job: CommonOptions,
) -> None:
    """On a node of a cluster, or several, given to Slurm.

    By this machine, or by a login node that is reached by SSH.

    groupwise launch slurm --host login --gpus 1 -- rl --config C.yaml --task-module task.py
    """
    if gpu is not None and not job.gpus:
        raise UsageError(f"--gpu {gpu} says of which type GPUs are, and --gpus how many: --gpus 1.")
    plan = by.plan(packages)
    asks = {
        "partition": partition,
        "account": account,
        "qos": qos,
        "gpu": gpu,
        "cpus": cpus,
        "memory": memory,
        "options": list(sbatch or ()),
    }
    given = {name: value for name, value in asks.items() if value}
    place = slurm_cluster(by.machine(packages), by.shared)
    launch(place, replace(job, environment=plan, asks=given, gang=machines))
