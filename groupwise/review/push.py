"""The command `groupwise runs push`: brings to its end what a run could not upload while it went on."""

from __future__ import annotations

from pathlib import Path

from groupwise.errors import RunInUseError, UsageError
from groupwise.models import hub_queue
from groupwise.models.hub_push import Target
from groupwise.models.hub_push import push as upload
from groupwise.runs.config import HubSection
from groupwise.runs.find import resolve, run_info
from groupwise.runs.folder import read_config
from groupwise.runs.lock import holder, is_held


def push(run: str, *, runs_dir: Path = Path("runs"), overwrite: bool = False) -> list[str]:
    """Upload the checkpoints that wait, then the final weights where the config has `run.hub`; returns where they are.

    Raises UsageError where there is nothing to upload, EndpointError where the hub fails.
    """
    path = resolve(run, runs_dir).path
    if is_held(path):
        raise RunInUseError(
            f"{path} is in use by {holder(path) or 'another process'}, which uploads by itself. Wait for it or stop it."
        )
    entries = hub_queue.waiting(path)
    hub = HubSection.model_validate(read_config(path)["run"].get("hub") or {})
    final = path / "final"
    if not entries and (hub.repo_id is None or not final.is_dir()):
        raise UsageError(
            f"{path.name} has nothing to upload: no checkpoint waits, and "
            + (
                "it has no final weights yet."
                if hub.repo_id
                else "its config has no run.hub.repo_id."
            )
        )
    places = [entry.push(overwrite=overwrite) for entry in entries]
    if hub.repo_id is not None and final.is_dir():
        target = Target(hub.repo_id, hub.revision, hub.private, overwrite or hub.overwrite)
        places.append(upload(final, target, f"{path.name}@{run_info(path).steps}"))
    return places
