"""The apps that are deployed at Modal: the desk, and the work, once for each image. This module is imported there as well, to find both
functions.

No job's secret is part of an app or an image: they come with each call, as one variable of its container's environment, beside the secrets
of the workspace that it names.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import modal

from groupwise.jobs.clouds.modal import coordinator as desks
from groupwise.jobs.clouds.modal import worker as works
from groupwise.jobs.clouds.modal.port import MOST_SECONDS, Call, Image, app_of

DESK_APP = "groupwise-desk-1"
"""Its number changes with the requests that it answers."""
RUNS, CACHES = "groupwise-runs", "groupwise-caches"
"""Volumes. One with open files cannot be reloaded, so jobs read and write another one, for caches."""
HOME, CACHE, SCRATCH = "/groupwise", "/groupwise-caches", "/groupwise-scratch"
SECRETS = "GROUPWISE_SECRETS"
PLAIN = "plain"
"""Name of the image without packages."""
BUILD = "/opt/groupwise/build"
DESK_PYTHON = "3.12"
DESK_SECONDS = 3600
AWAKE_SECONDS = 60
"""Seconds that the desk waits for the next request: beginning it again takes a second or two."""
START_SECONDS = 1800
"""Seconds for a container of the work to begin; it is paid for from then on."""
WORK_MB = 16_384
"""MB of memory that are reserved; a container may use more."""
WORK_CORES = 4.0


def runs() -> modal.Volume:
    """The volume of attempts and blobs."""
    return modal.Volume.from_name(RUNS, create_if_missing=True, version=2)


def desk(what: str, *arguments: Any) -> Any:
    """Answer a request; see `coordinator.py`."""
    volume = runs()
    volume.reload()
    answer = desks.answer(HOME, what, arguments)
    volume.commit()
    return answer


def work(document: Mapping[str, Any]) -> str:
    """Run one stint of a job; see `worker.py`."""
    secrets: dict[str, str] = json.loads(os.environ.pop(SECRETS, "{}"))
    me = modal.current_function_call_id()
    assert me is not None, "this runs in a call"
    around = works.Surroundings(
        home=HOME,
        scratch=SCRATCH,
        volume=runs(),
        desk=function(DESK_APP, "desk").remote,
        spawn=lambda call: called(call, secrets).spawn(call.document()).object_id,
        variables={"HF_HOME": f"{CACHE}/huggingface"},
        environment=os.environ,
    )
    try:
        return works.work(Call(**document), me, secrets, around)
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def function(app: str, name: str, client: modal.Client | None = None) -> Any:
    """A deployed function; a missing one shows only when it is called. Modal's type says nothing of its arguments."""
    found = modal.Function.from_name(app, name, client=client)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return cast("Any", found)


def named_secrets(
    named: Mapping[str, Sequence[str]], client: modal.Client | None = None
) -> list[modal.Secret]:
    """Secrets of the workspace; a missing secret or variable shows only when it is used."""
    return [
        modal.Secret.from_name(name, required_keys=list(variables), client=client)
        for name, variables in named.items()
    ]


def called(call: Call, secrets: Mapping[str, str], client: modal.Client | None = None) -> Any:
    """The work, with the GPU, time limit and secrets of this call. The secrets it carries have no name, and are gone with it."""
    carried = [modal.Secret.from_dict({SECRETS: json.dumps(dict(secrets))})] if secrets else []
    secrets_named = named_secrets(call.named, client)
    found = function(call.app or app_of(PLAIN), "work", client)
    return found.with_options(
        gpu=call.gpu,
        cpu=WORK_CORES,
        memory=WORK_MB,
        timeout=call.timeout,
        secrets=[*carried, *secrets_named],
        retries=0,
    )


def made_of(image: Image, folder: Path) -> modal.Image:
    """Modal's image with the packages, made by the same builder from the same lock as on every other machine."""
    plain = modal.Image.debian_slim(image.python)
    if not image.files:
        return plain
    copied = plain.add_local_dir(folder, BUILD, copy=True)
    return copied.run_commands(f"cd {BUILD} && python -I builder.py")


def deploy(image: Image, client: modal.Client | None = None) -> None:
    """Make the image, and deploy the work that uses it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, data in image.files.items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        app = modal.App(app_of(image.name), include_source=False)
        app.function(
            image=made_of(image, folder).add_local_python_source("groupwise"),
            volumes={
                HOME: runs(),
                CACHE: modal.Volume.from_name(CACHES, create_if_missing=True, version=2),
            },
            cpu=WORK_CORES,
            memory=WORK_MB,
            timeout=MOST_SECONDS,
            startup_timeout=START_SECONDS,
            retries=0,
            single_use_containers=True,
            name="work",
        )(work)
        app.deploy(client=client)


def deploy_desk(client: modal.Client | None = None) -> None:
    """Deploy the desk; it serves all releases that send it the same requests."""
    # Its answers are decisions because there is one container, which takes one request at a time.
    app = modal.App(DESK_APP, include_source=False)
    app.function(
        image=modal.Image.debian_slim(DESK_PYTHON).add_local_python_source("groupwise"),
        volumes={HOME: runs()},
        max_containers=1,
        scaledown_window=AWAKE_SECONDS,
        timeout=DESK_SECONDS,
        retries=0,
        name="desk",
    )(desk)
    app.deploy(client=client)
