"""`groupwise launch slurm`."""

from __future__ import annotations

from typing import Annotated

from groupwise.cli.environment import RemoteEnvironmentOptions
from groupwise.cli.launch.options import GangOptions, LaunchOptions
from groupwise.cli.launch.places import ClusterOptions, slurm_cluster
from groupwise.cli.launch.placing import launch
from groupwise.cli.options import option
from groupwise.core.errors import UsageError


def slurm(
    *,
    partition: Annotated[str | None, option("P", "Partition of Slurm.")] = None,
    account: Annotated[str | None, option("A", "Account that is charged.")] = None,
    qos: Annotated[str | None, option("Q", "Quality of service.")] = None,
    gpu_model: Annotated[
        str | None, option("TYPE", "Type of the GPUs, as Slurm names it.", "--gpu-model", "--gpu")
    ] = None,
    cpus: Annotated[int | None, option("N", "CPU cores.", min=1)] = None,
    memory: Annotated[
        str | None, option("SIZE", "Main memory of a node, as 32G: sbatch's --mem.")
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        option(
            "OPTION", "Another option of sbatch, as --sbatch=--constraint=a100. May be repeated."
        ),
    ] = None,
    cluster: ClusterOptions,
    packages: RemoteEnvironmentOptions,
    gang: GangOptions,
    job: LaunchOptions,
) -> None:
    """Run a job on one or several nodes of a Slurm cluster.

    It is submitted from this machine, or from a login node over SSH.

    groupwise launch slurm --host login --gpus 1 -- rl --config C.yaml --task-module task.py
    """
    if gpu_model is not None and not job.gpu_count:
        raise UsageError(
            f"--gpu-model {gpu_model} is the type of the GPUs, and --gpus their number: --gpus 1."
        )
    plan = cluster.plan(packages)
    options = {
        "partition": partition,
        "account": account,
        "qos": qos,
        "gpu": job.gpu_model(gpu_model),
        "cpus": cpus,
        "memory": memory,
        "options": sbatch,
    }
    place_options = {name: value for name, value in options.items() if value}
    place = slurm_cluster(cluster.login(packages.python), cluster.shared)
    launch(place, job, environment=plan, place_options=place_options, gang=gang)
