"""`groupwise launch render`: a job as a manifest for Kubernetes."""

from __future__ import annotations

import re
from shlex import quote
from typing import Annotated

import typer

from groupwise.cli.launch.options import EnvFile, MaxHours, Name, Script
from groupwise.cli.launch.words import environment_of, job_command, new_name
from groupwise.cli.output import say
from groupwise.core.errors import UsageError

Nodes = Annotated[
    int, typer.Option(metavar="N", min=1, help="Pods that work together, by torchrun.")
]
GpusOfNode = Annotated[
    int, typer.Option("--gpus", metavar="N", min=0, help="Of each node, for it alone.")
]
Image = Annotated[
    str, typer.Option(metavar="IMG", help="With groupwise, and the project in --workdir.")
]
Namespace = Annotated[str | None, typer.Option(metavar="NS", help="Of the cluster.")]
Pvc = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="PersistentVolumeClaim for the folder `runs`; it is there."),
]
Secret = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Secret with the variables of --env-file; without it: NAME-env."
    ),
]
Workdir = Annotated[str, typer.Option(metavar="DIR", help="Where the project is, in the image.")]
Cpus = Annotated[str | None, typer.Option(metavar="N", help="Cores, as Kubernetes counts them.")]
Memory = Annotated[str | None, typer.Option(metavar="M", help="Of a node, as 64Gi.")]


def render(
    ctx: typer.Context,
    image: Image,
    script: Script = None,
    nodes: Nodes = 1,
    gpus: GpusOfNode = 1,
    namespace: Namespace = None,
    pvc: Pvc = None,
    secret: Secret = None,
    workdir: Workdir = "/workspace",
    cpus: Cpus = None,
    memory: Memory = None,
    name: Name = None,
    max_hours: MaxHours = 24.0,
    env_file: EnvFile = None,
) -> None:
    """As a manifest for Kubernetes, which is printed.

    Nothing is asked of a cluster: kubectl apply -f gives it one.

    groupwise launch render --image IMG --gpus 8 --pvc runs -- rl --config C.yaml --task-module task.py
    """
    from groupwise.jobs.launch.kubernetes import ManifestOptions, as_yaml, manifests
    from groupwise.jobs.launch.packaging import refuse_shown_secrets
    from groupwise.jobs.launch.preflight import check_verb

    found = job_command(ctx, script)
    if found.script is None:
        check_verb(found.words)
    called = name or re.sub("[^a-z0-9]+", "-", new_name(found).lower()).strip("-")
    values = environment_of(tuple(env_file or ()))
    refuse_shown_secrets(found.line, values)
    if secret is not None and not values:
        raise UsageError(f"--secret {secret}: what is taken of it, --env-file says by its names.")
    named = secret or f"{called}-env"
    documents = manifests(
        ManifestOptions(
            called,
            found.line,
            image,
            max_hours,
            nodes,
            gpus,
            namespace,
            pvc,
            named if values else None,
            tuple(values),
            workdir,
            cpus,
            memory,
        )
    )
    if pvc is None:
        say("without --pvc what the job makes is gone with its pod")
    if env_file:
        files = " ".join(f"--from-env-file={quote(str(file))}" for file in env_file)
        say(
            f"its variables are expected in the cluster: kubectl create secret generic {quote(named)} {files}"
        )
    typer.echo(as_yaml(documents), nl=False)
