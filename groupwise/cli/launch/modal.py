"""`groupwise launch modal`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from groupwise.cli.fleet.words import seconds_of
from groupwise.cli.launch.options import (
    BasePython,
    CommonOptions,
    Environment,
    Extra,
    IndexUrl,
    Lock,
    Wheelhouse,
    With,
    common,
    environment,
    place_command,
)
from groupwise.cli.launch.placing import launch
from groupwise.cli.launch.words import environment_of
from groupwise.core.errors import UsageError

Gpu = Annotated[
    str,
    typer.Option(
        "--gpu",
        metavar="TYPE",
        help="T4, L4, A10G, L40S, A100 (40 GB), A100-80GB, H100, H200 or B200.",
    ),
]
Timeout = Annotated[
    str,
    typer.Option(
        metavar="T",
        help="Of a call, in seconds or as 90m, 24h, which is the longest. With --max-hours other calls go on with the job until then.",
    ),
]
Profile = Annotated[
    str | None, typer.Option(metavar="P", help="Of ~/.modal.toml; without it: the active one.")
]

Secret = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VARIABLE",
        help="A Secret of your workspace, and which of its variables the job has: huggingface=HF_TOKEN; several with commas. May be "
        "repeated.",
    ),
]


@dataclass(frozen=True, slots=True)
class Calls:
    """The length of a job's calls."""

    timeout: int
    """Seconds of one call."""
    is_all: bool
    """True if the job has one call only, because --max-hours was not given."""


def calls(ctx: typer.Context, timeout: Timeout = "24h") -> Calls:
    """The time-out of a call, which is the job's as well without --max-hours. Raises UsageError."""
    source = ctx.get_parameter_source("max_hours")
    return Calls(int(seconds_of("--timeout", timeout)), source is None or source.name == "DEFAULT")


def packages(
    base_python: BasePython = None,
    extra: Extra = None,
    also: With = None,
    lock: Lock = None,
    wheelhouse: Wheelhouse = None,
    index_url: IndexUrl = None,
) -> Environment:
    """The packages of the image."""
    return environment(None, base_python, extra, also, lock, wheelhouse, index_url)


@place_command(calls=calls, packages=packages, job=common)
def modal(
    gpu: Gpu = "H100",
    profile: Profile = None,
    secret: Secret = None,
    *,
    calls: Calls,
    packages: Environment,
    job: CommonOptions,
) -> None:
    """In a container of Modal, with a GPU of its own.

    groupwise launch modal --gpu A100 --timeout 24h -- sft --config C.yaml --task-module task.py
    """
    from groupwise.jobs.clouds.modal.backend import ENVIRONMENTS, check_gpu
    from groupwise.jobs.clouds.modal.port import NAMED
    from groupwise.jobs.fleet.machines.plans import sent_files
    from groupwise.jobs.launch.packaging import files_here
    from groupwise.jobs.launch.places import MODAL, JobBackend

    plan = packages.plan()
    assert plan is not None, "an image has packages"
    ours = "python{}.{}".format(*sys.version_info[:2])
    release = re.fullmatch(r"python(3\.[0-9]+)", packages.base_python or ours)
    if release is None:
        raise UsageError(
            f"--base-python {packages.base_python}: images of Modal have one Python, which is named by its release, as python3.12."
        )
    files = sent_files(plan, ENVIRONMENTS, files_here())
    asks = {
        "gpu": check_gpu(gpu),
        "timeout": calls.timeout,
        "image": {
            "name": plan.name,
            "python": release[1],
            "files": {path: [each.sha256, each.mode, each.size] for path, each in files.items()},
        },
        **({NAMED: _workspace_secrets(secret, environment_of(job.env_files))} if secret else {}),
    }
    hours = calls.timeout / 3600 if calls.is_all else job.max_hours
    given = replace(job, gpus=job.gpus or 1, max_hours=hours, asks=asks)
    launch(JobBackend(MODAL, {"profile": profile}), given)


def _workspace_secrets(given: list[str], values: Mapping[str, str]) -> dict[str, list[str]]:
    """The variables that the job has of each Secret. `values`: the variables of --env-file. Raises UsageError."""
    from groupwise.jobs.hosts.spec import name_problems

    found: dict[str, list[str]] = {}
    for each in given:
        name, _, listed = each.partition("=")
        variables = [word.strip() for word in listed.split(",")]
        wrong = name_problems("of its variables,", variables)
        if not name or wrong:
            raise UsageError(
                f"--secret {each}: NAME=VARIABLE is expected, a Secret of your workspace at Modal and what the job has of it, as "
                f"huggingface=HF_TOKEN, or several: keys=HF_TOKEN,WANDB_API_KEY. {'; '.join(wrong)}".rstrip()
            )
        taken = {*values, *(word for words in found.values() for word in words)}
        if twice := sorted(taken.intersection(variables)):
            raise UsageError(
                f"--secret {each}: {', '.join(twice)} is given twice; leave one out of --secret and --env-file."
            )
        found.setdefault(name, []).extend(variables)
    return found
