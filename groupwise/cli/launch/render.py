"""`groupwise launch render`: a job as a manifest for Kubernetes, or as a task of SkyPilot or dstack."""

from __future__ import annotations

import re
from shlex import quote
from typing import Annotated, Literal

import typer

from groupwise.cli.launch.job_command import new_name
from groupwise.cli.launch.options import DEFAULT_HOURS, CommandOptions
from groupwise.cli.options import flag, option
from groupwise.cli.output import say
from groupwise.cli.parsing import pairs
from groupwise.core.errors import UsageError


def render(
    *,
    image: Annotated[
        str, option("IMG", "Image that has groupwise, and your project in --workdir.")
    ],
    job: CommandOptions,
    format: Annotated[
        Literal["kubernetes", "skypilot", "dstack"],
        option(None, "What the YAML is for."),
    ] = "kubernetes",
    machines: Annotated[
        int,
        option(
            "N",
            "Pods or nodes that run the job together, with torchrun.",
            "--machines",
            "--nodes",
            min=1,
        ),
    ] = 1,
    gpus: Annotated[int, option("N", "GPUs of each pod or node.", min=0)] = 1,
    gpu_model: Annotated[
        str | None, option("TYPE", "Model of the GPUs, for SkyPilot and dstack: H100, A100-80GB.")
    ] = None,
    cpus: Annotated[
        str | None, option("N", "CPU cores of each pod, for Kubernetes: 8, or 500m for a half.")
    ] = None,
    memory: Annotated[str | None, option("SIZE", "Main memory of each pod, such as 64Gi.")] = None,
    disk_gb: Annotated[int | None, option("N", "Disk of each pod or node in GB.", min=1)] = None,
    spot: Annotated[bool, flag("Use spot machines, for SkyPilot and dstack.", "--spot")] = False,
    setup: Annotated[
        str | None,
        option("COMMAND", "Shell command to run before the job, for SkyPilot and dstack."),
    ] = None,
    node_selector: Annotated[
        list[str] | None,
        option("KEY=VALUE", "Label that a node must have, for Kubernetes. May be repeated."),
    ] = None,
    toleration: Annotated[
        list[str] | None,
        option(
            "TAINT",
            "Taint of a node that the pods tolerate, for Kubernetes: KEY, KEY:EFFECT, KEY=VALUE or KEY=VALUE:EFFECT. "
            "May be repeated.",
        ),
    ] = None,
    image_pull_secret: Annotated[
        list[str] | None,
        option("NAME", "Secret of Kubernetes for pulling the image. May be repeated."),
    ] = None,
    namespace: Annotated[str | None, option("NS", "Namespace of Kubernetes.")] = None,
    volume: Annotated[
        str | None,
        option(
            "NAME",
            "Volume for the folder `runs`: an existing PersistentVolumeClaim, or a volume of dstack.",
            "--volume",
            "--pvc",
        ),
    ] = None,
    secret: Annotated[
        str | None,
        option(
            "NAME",
            "Secret of Kubernetes that holds the variables of --env and --env-file; default: the job's name and -env.",
        ),
    ] = None,
    workdir: Annotated[
        str | None, option("DIR", "Folder of the project in the image; default: /workspace.")
    ] = None,
) -> None:
    """Print the job as YAML: a manifest of Kubernetes, or a task of SkyPilot or dstack.

    The command contacts no cluster. Submit what it prints with `kubectl apply -f`, `sky launch` or `dstack apply -f`.

    \b
        groupwise launch render --image IMG --gpus 8 --volume runs \\
            -- rl -c C.yaml -t task.py

    \b
        groupwise launch render --format skypilot --image IMG --gpus 8 \\
            --gpu-model H100 -- rl -c C.yaml -t task.py
    """
    from groupwise.jobs.launch.packaging import refuse_shown_secrets
    from groupwise.jobs.launch.render import (
        RenderOptions,
        Toleration,
        as_yaml,
        dstack_task,
        manifests,
        skypilot_task,
    )

    command = job.command
    name = job.name or re.sub("[^a-z0-9]+", "-", new_name(command).lower()).strip("-")
    values = job.secrets()
    refuse_shown_secrets(command.line, values)
    if secret is not None and not values:
        raise UsageError(
            f"--secret {secret}: --env or --env-file must name the variables to take from it."
        )
    options = RenderOptions(
        name=name,
        command=command.line,
        image=image,
        hours=job.hours or DEFAULT_HOURS,
        nodes=machines,
        gpus=gpus,
        namespace=namespace,
        volume=volume,
        secret=(secret or f"{name}-env") if values else None,
        variables=tuple(values),
        workdir=workdir,
        cpus=cpus,
        memory=memory,
        disk_gb=disk_gb,
        node_selector=pairs("--node-selector", node_selector or ()),
        toleration=tuple(map(Toleration.parse, toleration or ())),
        image_pull_secret=tuple(image_pull_secret or ()),
        gpu_model=gpu_model,
        spot=spot,
        setup=setup,
    )
    if format != "kubernetes":
        if secret is not None:
            raise UsageError(
                f"--secret {secret}: {format} takes the variables from your environment."
            )
        task, comments = (skypilot_task if format == "skypilot" else dstack_task)(options)
        typer.echo(as_yaml([task], comments), nl=False)
        return
    documents = manifests(options)
    if volume is None:
        say("without --volume the results are lost with the pod")
    if options.secret is not None:
        sources = [f"--from-env-file={quote(str(file))}" for file in job.env_file or ()]
        sources += [f"--from-literal={quote(word)}" for word in job.env or ()]
        say(
            f"its variables are expected in the cluster: kubectl create secret generic {quote(options.secret)} {' '.join(sources)}"
        )
    typer.echo(as_yaml(documents), nl=False)
