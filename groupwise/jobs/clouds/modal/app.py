"""What is deployed at Modal: the desk, and for each image the work. This module is imported there as well, to find both functions.

No job's secret is part of an app or an image: they come with each call, as one variable of its container's environment, beside those of
the workspace that it names.
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
from groupwise.jobs.clouds.modal.port import MOST_SECONDS, Call, Image

DESK_APP = "groupwise-desk-1"
"""With the number of what is asked of it."""
RUNS, CACHES = "groupwise-runs", "groupwise-caches"
"""Volumes. A volume with files that are open cannot be reloaded, so what jobs themselves read and write is another one."""
HOME, CACHE, SCRATCH = "/groupwise", "/groupwise-caches", "/groupwise-scratch"
SECRETS = "GROUPWISE_SECRETS"
PLAIN = "plain"
"""The image without packages."""
BUILD = "/opt/groupwise/build"
DESK_PYTHON = "3.12"
DESK_SECONDS = 3600
AWAKE_SECONDS = 60
"""The desk waits so long for the next request: beginning it anew takes a second or two."""
START_SECONDS = 1800
"""For a container of the work to begin; it is paid for from then on."""
WORK_MB = 16_384
"""Of memory, reserved; a container may use more."""
WORK_CORES = 4.0


def runs() -> modal.Volume:
    """Attempts and blobs."""
    return modal.Volume.from_name(RUNS, create_if_missing=True, version=2)


def desk(what: str, *arguments: Any) -> Any:
    """See `coordinator.py`."""
    volume = runs()
    volume.reload()
    said = desks.answer(HOME, what, arguments)
    volume.commit()
    return said


def work(document: Mapping[str, Any]) -> str:
    """See `worker.py`."""
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
    """One that was deployed; whether it was is found out when it is asked. Its type is Modal's, and says nothing of arguments."""
    found = modal.Function.from_name(app, name, client=client)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return cast("Any", found)


def named_secrets(
    named: Mapping[str, Sequence[str]], client: modal.Client | None = None
) -> list[modal.Secret]:
    """Of the workspace; whether it has them, with these variables, is found out when they are asked."""
    return [
        modal.Secret.from_name(name, required_keys=list(variables), client=client)
        for name, variables in named.items()
    ]


def called(call: Call, secrets: Mapping[str, str], client: modal.Client | None = None) -> Any:
    """The work, as this call wants it. What is carried is named by nobody, and gone with it."""
    carried = [modal.Secret.from_dict({SECRETS: json.dumps(dict(secrets))})] if secrets else []
    named = named_secrets(call.named, client)
    found = function(call.app or app_name(PLAIN), "work", client)
    return found.with_options(
        gpu=call.gpu,
        cpu=WORK_CORES,
        memory=WORK_MB,
        timeout=call.timeout,
        secrets=[*carried, *named],
        retries=0,
    )


def app_name(image: str) -> str:
    """Of the work with this image."""
    return Image(image, "").app


def desk_app() -> modal.App:
    """One container, and one request at a time: what makes its answers decisions."""
    app = modal.App(DESK_APP, include_source=False)
    app.function(
        image=_with_source(modal.Image.debian_slim(DESK_PYTHON)),
        volumes={HOME: runs()},
        max_containers=1,
        scaledown_window=AWAKE_SECONDS,
        timeout=DESK_SECONDS,
        retries=0,
        name="desk",
    )(desk)
    return app


def work_app(image: Image, folder: Path) -> modal.App:
    """`folder`: where the files of the image are, until it is made."""
    app = modal.App(image.app, include_source=False)
    app.function(
        image=_with_source(made_of(image, folder)),
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
    return app


def made_of(image: Image, folder: Path) -> modal.Image:
    """Packages by the same builder, from the same lock, as on every other machine."""
    plain = modal.Image.debian_slim(image.python)
    if not image.files:
        return plain
    copied = plain.add_local_dir(folder, BUILD, copy=True)
    return copied.run_commands(f"cd {BUILD} && python -I builder.py")


def _with_source(image: modal.Image) -> modal.Image:
    """Of this release, for desk and work themselves."""
    return image.add_local_python_source("groupwise")


def deploy(image: Image, client: modal.Client | None = None) -> None:
    """Make the image, and what works with it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, data in image.files.items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        work_app(image, folder).deploy(client=client)


def deploy_desk(client: modal.Client | None = None) -> None:
    """Once; it serves all releases that ask the same of it."""
    desk_app().deploy(client=client)
