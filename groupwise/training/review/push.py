"""`groupwise runs push`: uploads results that a run could not upload while it was running."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from groupwise.core import atomic_files
from groupwise.core.errors import RunInUseError, UsageError
from groupwise.engine.models import hub_queue
from groupwise.engine.models.artefact import write_artefact
from groupwise.engine.models.card import WeightsLocation, model_card, results_of
from groupwise.engine.models.hub_push import Target
from groupwise.engine.models.hub_push import push as upload
from groupwise.runs.config import HubSection
from groupwise.runs.find import final_step, label_of, resolve
from groupwise.runs.folder import FINAL, read_config, read_summary
from groupwise.runs.lock import holder, is_held


def push(
    run: str,
    *,
    runs_dir: Path = Path("runs"),
    overwrite: bool = False,
    revision: str | None = None,
) -> list[str]:
    """Upload the queued checkpoints, then the final weights if the config has `run.hub`; returns their URLs.

    Only the argument `overwrite` decides whether a branch is replaced, not the run's folder: the folder may come from another person and
    name a branch of yours. `revision`: another branch for the final weights. Raises UsageError if there is nothing to upload,
    EndpointError if the hub fails.
    """
    path = resolve(run, runs_dir).path
    if is_held(path):
        raise RunInUseError(
            f"{path} is in use by {holder(path) or 'another process'}, which uploads by itself. Wait for it or stop it."
        )
    entries = hub_queue.waiting(path)
    hub = HubSection.model_validate(read_config(path)["run"].get("hub") or {})
    final = path / FINAL
    if not entries and (hub.repo_id is None or not final.is_dir()):
        raise UsageError(
            f"{path.name} has nothing to upload: no checkpoint waits, and "
            + (
                "it has no final weights yet."
                if hub.repo_id
                else "its config has no run.hub.repo_id."
            )
        )
    if revision is not None and (hub.repo_id is None or not final.is_dir()):
        raise UsageError(
            f"--revision names the branch of the final weights, of which {path.name} has none to upload; the branches of checkpoints are "
            "given by the callback. Leave it out."
        )
    places = [entry.push(overwrite=overwrite).url for entry in entries]
    if hub.repo_id is not None and final.is_dir():
        branch = revision or hub.revision
        target = Target(hub.repo_id, branch, hub.private, overwrite)
        with (
            nullcontext(final)
            if revision is None
            else _with_card_for(target, path, final) as folder
        ):
            places.append(upload(folder, target, label_of(path, final), path).url)
    return places


@contextmanager
def _with_card_for(target: Target, run: Path, final: Path) -> Generator[Path]:
    """A copy of the final weights for a branch other than the config's, because the model card must name the branch of its files."""
    location = WeightsLocation(
        target.repo_id, None if target.revision == "main" else target.revision
    )
    results = results_of(read_summary(run))
    card = model_card(run, final, final_step(run), location=location, results=results)
    with tempfile.TemporaryDirectory(dir=run, prefix=atomic_files.BUILDING) as folder:
        write_artefact(Path(folder), final, card, linked=True)
        yield Path(folder)
