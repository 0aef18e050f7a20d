"""`groupwise launch slurm` and `groupwise launch ray`."""

from __future__ import annotations

import os
from typing import Annotated

from groupwise.cli.environment import RemoteEnvironmentOptions
from groupwise.cli.launch.options import GangOptions, LaunchOptions
from groupwise.cli.launch.places import ClusterOptions, ray_cluster, slurm_cluster
from groupwise.cli.launch.placing import launch
from groupwise.cli.options import option
from groupwise.cli.parsing import megabytes
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
        str | None, option("SIZE", "Main memory of a node, such as 32G (sbatch's --mem).")
    ] = None,
    sbatch: Annotated[
        list[str] | None,
        option(
            "OPTION",
            "Another option of sbatch, such as --sbatch=--constraint=a100. May be repeated.",
        ),
    ] = None,
    cluster: ClusterOptions,
    packages: RemoteEnvironmentOptions,
    gang: GangOptions,
    job: LaunchOptions,
) -> None:
    """Run a job on one or several nodes of a Slurm cluster.

    It is submitted from this machine, or from a login node over SSH.

        groupwise launch slurm --host login --gpus 1 -- rl -c C.yaml -t task.py
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


def ray(
    *,
    address: Annotated[
        str | None,
        option(
            "URL",
            "Address of Ray's dashboard, as that machine reaches it; default: this machine's RAY_ADDRESS if that is an http address, else "
            "http://127.0.0.1:8265.",
        ),
    ] = None,
    cpus: Annotated[float | None, option("N", "CPUs of Ray; default: 1.", min=0.01)] = None,
    memory: Annotated[
        int | None,
        option(
            "SIZE",
            "Memory that Ray reserves, such as 32GB; it is not a limit.",
            parser=megabytes("--memory"),
        ),
    ] = None,
    resource: Annotated[
        list[str] | None,
        option(
            "NAME=N",
            "Resource of Ray's nodes, such as --resource accelerator_type:A100=0.001. May be repeated.",
        ),
    ] = None,
    cluster: ClusterOptions,
    packages: RemoteEnvironmentOptions,
    gang: GangOptions,
    job: LaunchOptions,
) -> None:
    """Run a job on one or several nodes of a Ray cluster, as a job of Ray.

    It is submitted from this machine, or from the head node over SSH.

        groupwise launch ray --host head --gpus 1 -- rl -c C.yaml -t task.py
    """
    from groupwise.jobs.clouds.schedulers import resources_of

    plan = cluster.plan(packages)
    resources = resources_of(resource or (), job.gpu_model())
    options = {"cpus": cpus, "memory": memory and memory * 10**6, "resources": resources}
    place_options = {name: value for name, value in options.items() if value}
    # Ray's own programs accept other kinds of address in this variable as well.
    default_address = os.environ.get("RAY_ADDRESS", "") if cluster.host is None else ""
    if not address and default_address.startswith(("http://", "https://")):
        address = default_address
    place = ray_cluster(cluster.login(packages.python), cluster.shared, address)
    launch(place, job, environment=plan, place_options=place_options, gang=gang)
