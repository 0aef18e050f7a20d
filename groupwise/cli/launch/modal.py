"""`groupwise launch modal`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Annotated

from groupwise.cli.environment import EnvironmentOptions
from groupwise.cli.launch.options import LaunchOptions
from groupwise.cli.launch.placing import launch
from groupwise.cli.options import option
from groupwise.cli.parsing import seconds
from groupwise.core.errors import UsageError


def modal(
    *,
    gpu_model: Annotated[
        str | None,
        option(
            "TYPE",
            "As Modal names it: L4, L40S, A100-80GB, H100, B200 and others; `modal billing rates` lists them with their prices; "
            "default: H100.",
            "--gpu-model",
            "--gpu",
        ),
    ] = None,
    profile: Annotated[
        str | None, option("P", "Profile in ~/.modal.toml; default: the active one.")
    ] = None,
    secret: Annotated[
        list[str] | None,
        option(
            "NAME=VARIABLE",
            "A Secret of your workspace, and which of its variables the job gets: huggingface=HF_TOKEN; several with commas. May be "
            "repeated.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        option(
            "TIME",
            "Longest duration of one call, e.g. 90m; default and maximum: 24h. Up to --time-limit further calls continue the job.",
            parser=seconds("--timeout"),
            show_default=False,
        ),
    ] = 86_400.0,
    packages: EnvironmentOptions,
    job: LaunchOptions,
) -> None:
    """Run a job in a container of Modal, with a GPU of its own.

    It needs groupwise[modal] and a token, which `modal token new` makes.

        groupwise launch modal --gpu-model A100 -- sft -c C.yaml -t task.py
    """
    from groupwise.jobs.clouds.modal.api import NAMED
    from groupwise.jobs.clouds.modal.backend import ENVIRONMENTS
    from groupwise.jobs.fleet.machines.plans import sent_files
    from groupwise.jobs.launch.packaging import local_store
    from groupwise.jobs.launch.places import MODAL, JobBackend

    plan = packages.plan()
    own_python = "python{}.{}".format(*sys.version_info[:2])
    release = re.fullmatch(r"python(3\.[0-9]+)", packages.base_python or own_python)
    if release is None:
        raise UsageError(
            f"--base-python {packages.base_python}: images of Modal have one Python, which is named by its release, as python3.12."
        )
    model = job.gpu_model(gpu_model) or "H100"
    if not re.fullmatch(r"[A-Za-z0-9-]+[!+]?", model):
        raise UsageError(
            f"--gpu-model {model}: one name is expected, as H100. --gpus N says how many."
        )
    files = sent_files(plan, ENVIRONMENTS, local_store())
    place_options = {
        "gpu": model,
        "timeout": int(timeout),
        "image": {
            "name": plan.name,
            "python": release[1],
            "files": {
                path: [entry.sha256, entry.mode, entry.size] for path, entry in files.items()
            },
        },
        **({NAMED: _workspace_secrets(secret, job.secrets())} if secret else {}),
    }
    place, hours = JobBackend(MODAL, {"profile": profile}), job.hours or int(timeout) / 3600
    launch(place, job, gpus=job.gpu_count or 1, hours=hours, place_options=place_options)


def _workspace_secrets(mappings: list[str], values: Mapping[str, str]) -> dict[str, list[str]]:
    """The variables that the job gets from each Modal Secret. UsageError if one is also in `values`, those of --env and --env-file."""
    from groupwise.jobs.hosts.spec import name_problems

    secrets: dict[str, list[str]] = {}
    for mapping in mappings:
        name, _, listed = mapping.partition("=")
        variables = [word.strip() for word in listed.split(",")]
        problems = name_problems("of its variables,", variables)
        if not name or problems:
            raise UsageError(
                f"--secret {mapping}: NAME=VARIABLE is expected, a Secret of your workspace at Modal and what the job has of it, as "
                f"huggingface=HF_TOKEN, or several: keys=HF_TOKEN,WANDB_API_KEY. {'; '.join(problems)}".rstrip()
            )
        names = {*values, *(word for words in secrets.values() for word in words)}
        if twice := sorted(names.intersection(variables)):
            raise UsageError(
                f"--secret {mapping}: {', '.join(twice)} is given twice; leave one out of --secret, --env and --env-file."
            )
        secrets.setdefault(name, []).extend(variables)
    return secrets
