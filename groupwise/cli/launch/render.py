"""`groupwise launch render`: a job as a manifest for Kubernetes."""

from __future__ import annotations

import re
from shlex import quote
from typing import Annotated

import typer

from groupwise.cli.launch.job_command import new_name
from groupwise.cli.launch.options import DEFAULT_HOURS, CommandOptions
from groupwise.cli.output import say
from groupwise.core.errors import UsageError


def render(
    *,
    image: Annotated[
        str,
        typer.Option(metavar="IMG", help="Image with groupwise, and the project in --workdir."),
    ],
    job: CommandOptions,
    machines: Annotated[
        int,
        typer.Option(
            "--machines",
            "--nodes",
            metavar="N",
            min=1,
            help="Number of pods that work together, with torchrun.",
        ),
    ] = 1,
    gpus: Annotated[
        int, typer.Option(metavar="N", min=0, help="GPUs that each pod has for itself.")
    ] = 1,
    cpus: Annotated[
        str | None, typer.Option(metavar="N", help="CPU cores of a pod, as Kubernetes counts them.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Main memory of a pod, as 64Gi.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(metavar="NS", help="Namespace of the cluster.")
    ] = None,
    pvc: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="An existing PersistentVolumeClaim for the folder `runs`."
        ),
    ] = None,
    secret: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Secret with the variables of --env and --env-file; default: NAME-env.",
        ),
    ] = None,
    workdir: Annotated[
        str, typer.Option(metavar="DIR", help="Folder of the project in the image.")
    ] = "/workspace",
) -> None:
    """Print a Kubernetes manifest for the job.

    No cluster is contacted: kubectl apply -f submits the manifest.

    groupwise launch render --image IMG --gpus 8 --pvc runs -- rl --config C.yaml --task-module task.py
    """
    from groupwise.jobs.launch.kubernetes import ManifestOptions, as_yaml, manifests
    from groupwise.jobs.launch.packaging import refuse_shown_secrets
    from groupwise.jobs.launch.preflight import check_verb

    command = job.command
    if command.script is None:
        check_verb(command.words)
    name = job.name or re.sub("[^a-z0-9]+", "-", new_name(command).lower()).strip("-")
    values = job.secrets()
    refuse_shown_secrets(command.line, values)
    if secret is not None and not values:
        raise UsageError(
            f"--secret {secret}: --env or --env-file must name the variables to take from it."
        )
    secret = secret or f"{name}-env"
    documents = manifests(
        ManifestOptions(
            name=name,
            command=command.line,
            image=image,
            hours=job.hours or DEFAULT_HOURS,
            nodes=machines,
            gpus=gpus,
            namespace=namespace,
            pvc=pvc,
            secret=secret if values else None,
            variables=tuple(values),
            workdir=workdir,
            cpus=cpus,
            memory=memory,
        )
    )
    if pvc is None:
        say("without --pvc the results are lost with the pod")
    if values:
        sources = [f"--from-env-file={quote(str(file))}" for file in job.env_file or ()]
        sources += [f"--from-literal={quote(word)}" for word in job.env or ()]
        say(
            f"its variables are expected in the cluster: kubectl create secret generic {quote(secret)} {' '.join(sources)}"
        )
    typer.echo(as_yaml(documents), nl=False)
