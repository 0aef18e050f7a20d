"""The apps that are deployed at Modal: the coordinator (function `coordinate`), and the worker (function `work`), once for each image.
Modal's containers import this module too, to find both functions.

No secret of a job is part of an app or an image. Secrets travel with each call, as one environment variable of its container, in
addition to the secrets of the Modal workspace that the call names.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import modal

from groupwise.jobs.clouds.modal import coordinator, worker
from groupwise.jobs.clouds.modal.api import MAX_SECONDS, Call, Image, app_of

COORDINATOR_APP = "groupwise-coordinator-1"
"""The number in the name changes when the protocol of its requests changes."""
RUNS, CACHES = "groupwise-runs", "groupwise-caches"
"""Names of the two volumes. A volume with open files cannot be reloaded, so jobs use a second one for caches."""
HOME, CACHE, SCRATCH = "/groupwise", "/groupwise-caches", "/groupwise-scratch"
SECRETS = "GROUPWISE_SECRETS"
PLAIN = "plain"
"""Name of the image without packages."""
BUILD = "/opt/groupwise/build"
COORDINATOR_PYTHON = "3.12"
COORDINATOR_SECONDS = 3600
AWAKE_SECONDS = 60
"""Seconds that the coordinator's container stays up without requests: a new one takes a second or two to start."""
START_SECONDS = 1800
"""Most seconds that a worker's container may take to start; Modal bills it from then on."""
WORK_MB = 16_384
"""Reserved memory in MB; a container may use more."""
WORK_CORES = 4.0


def runs() -> modal.Volume:
    """The volume that holds attempts and blobs."""
    return modal.Volume.from_name(RUNS, create_if_missing=True, version=2)


def coordinate(verb: str, *arguments: Any) -> Any:
    """Answer a request to the coordinator; see `coordinator.py`."""
    volume = runs()
    volume.reload()
    answer = coordinator.answer(HOME, verb, arguments)
    volume.commit()
    return answer


def work(document: Mapping[str, Any]) -> str:
    """Run one stint of a job, the part that one Modal call runs; see `worker.py`."""
    secrets: dict[str, str] = json.loads(os.environ.pop(SECRETS, "{}"))
    call_id = modal.current_function_call_id()
    assert call_id is not None, "this runs in a call"
    context = worker.ContainerContext(
        home=HOME,
        scratch=SCRATCH,
        volume=runs(),
        call_coordinator=function(COORDINATOR_APP, "coordinate").remote,
        spawn=lambda call: configured_function(call, secrets).spawn(call.document()).object_id,
        variables={"HF_HOME": f"{CACHE}/huggingface"},
        environment=os.environ,
    )
    try:
        return worker.work(Call(**document), call_id, secrets, context)
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def function(app: str, name: str, client: modal.Client | None = None) -> Any:
    """A handle of a deployed function. Modal reports a missing function only when it is called. Modal's types do not describe its
    arguments."""
    handle = modal.Function.from_name(app, name, client=client)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return cast("Any", handle)


def named_secrets(
    variables_by_secret: Mapping[str, Sequence[str]], client: modal.Client | None = None
) -> list[modal.Secret]:
    """Handles of secrets of the workspace. Modal reports a missing secret or variable only when it is used."""
    return [
        modal.Secret.from_name(name, required_keys=list(variables), client=client)
        for name, variables in variables_by_secret.items()
    ]


def configured_function(
    call: Call, secrets: Mapping[str, str], client: modal.Client | None = None
) -> Any:
    """The function `work` with the GPU, time limit and secrets of this call. `secrets` become an unnamed Modal secret, which exists for
    this call only."""
    job_secrets = [modal.Secret.from_dict({SECRETS: json.dumps(dict(secrets))})] if secrets else []
    handle = function(call.app or app_of(PLAIN), "work", client)
    return handle.with_options(
        gpu=call.gpu,
        cpu=WORK_CORES,
        memory=WORK_MB,
        timeout=call.timeout,
        secrets=[*job_secrets, *named_secrets(call.named, client)],
        retries=0,
    )


def build_image(image: Image, folder: Path) -> modal.Image:
    """Modal's image with the job's packages, installed by the same builder from the same lock file as on every other machine."""
    plain = modal.Image.debian_slim(image.python)
    if not image.files:
        return plain
    copied = plain.add_local_dir(folder, BUILD, copy=True)
    return copied.run_commands(f"cd {BUILD} && python -I builder.py")


def deploy(image: Image, client: modal.Client | None = None) -> None:
    """Build the image, and deploy the app whose worker uses it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, data in image.files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        app = modal.App(app_of(image.name), include_source=False)
        app.function(
            image=build_image(image, folder).add_local_python_source("groupwise"),
            volumes={
                HOME: runs(),
                CACHE: modal.Volume.from_name(CACHES, create_if_missing=True, version=2),
            },
            cpu=WORK_CORES,
            memory=WORK_MB,
            timeout=MAX_SECONDS,
            startup_timeout=START_SECONDS,
            retries=0,
            single_use_containers=True,
            name="work",
        )(work)
        app.deploy(client=client)


def deploy_coordinator(client: modal.Client | None = None) -> None:
    """Deploy the coordinator. One deployment serves all releases of this package with the same request protocol."""
    # One container and one request at a time: this makes its answers consistent without locks.
    app = modal.App(COORDINATOR_APP, include_source=False)
    app.function(
        image=modal.Image.debian_slim(COORDINATOR_PYTHON).add_local_python_source("groupwise"),
        volumes={HOME: runs()},
        max_containers=1,
        scaledown_window=AWAKE_SECONDS,
        timeout=COORDINATOR_SECONDS,
        retries=0,
        name="coordinate",
    )(coordinate)
    app.deploy(client=client)
