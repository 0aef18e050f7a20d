"""Where a run goes on, whether it may, and how it is taken back there."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from groupwise.config import compare_for_resume, resolved
from groupwise.errors import ResumeMismatchError, RunNotFoundError
from groupwise.loops.prepare import Prepared
from groupwise.loops.rl import Run
from groupwise.runs import checkpoints, find
from groupwise.runs.checkpoints import Checkpoint
from groupwise.runs.folder import RECORD, RunFolder, read_config
from groupwise.runs.records import ResumeRecord
from groupwise.runs.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run is taken up again."""

    path: Path
    checkpoint: Checkpoint | None
    """None: it has none, so it starts at step 0."""
    changes: dict[str, Any] = field(default_factory=dict[str, Any])


def find_resume_point(
    prepared: Prepared, resume: bool, resume_from: str | None
) -> ResumePoint | None:
    """Where to go on, None for a new run. Raises `ResumeMismatchError` if the run was made with something else."""
    runs_dir = Path(prepared.config.run.dir)
    if resume_from is not None:
        address = find.resolve(resume_from, runs_dir)
        checkpoint = address.checkpoint or checkpoints.newest(address.path / "checkpoints")
        if checkpoint is None:
            raise RunNotFoundError(
                f"The run {address.name!r} has no checkpoint. Give --resume to start it over from step 0."
            )
        path = address.path
    elif resume:
        path = find.newest_unfinished(prepared.loaded.run_name, runs_dir)
        checkpoint = checkpoints.newest(path / "checkpoints")
    else:
        return None
    return ResumePoint(path, checkpoint, _accepted_changes(path, prepared))


def _accepted_changes(path: Path, prepared: Prepared) -> dict[str, Any]:
    """Config keys that differ and may; refuses the others with the difference."""
    with Store.open(path / RECORD, readonly=True) as store:
        recorded = store.get_meta()
    found = compare_for_resume(read_config(path), prepared.config)
    refused = {key: change for key, change in found.fixed.items() if key != "run.name"}
    facts = {"--task-module": ("task", prepared.task.name)}
    facts["the training data (fingerprint)"] = ("data", prepared.data_fingerprint)
    for shown, (key, now) in facts.items():
        if recorded.get(key, now) != now:
            refused[shown] = (recorded[key][:16], now[:16])
    if refused:
        raise ResumeMismatchError(
            f"{path} was started with something else:\n"
            + "\n".join(
                f"  {key}: {old!r} then, {new!r} now" for key, (old, new) in refused.items()
            )
            + "\nGive what it was started with, or start another run with run.name=<another name>."
        )
    for key, change in found.warned.items():
        _warn(key, *change)
    return {key: list(change) for key, change in {**found.free, **found.warned}.items()}


def open_folder(prepared: Prepared, point: ResumePoint | None) -> RunFolder:
    """The run's folder, held by this process."""
    keep = prepared.config.run.keep_tokens
    if point is not None:
        return RunFolder.open(point.path, keep_tokens=keep)
    facts = {
        "kind": "rl",
        "model": prepared.config.model.name,
        "task": prepared.task.name,
        "task_module": prepared.task.spec,
        "max_steps": prepared.max_steps,
        "layout": asdict(prepared.layout),
        "data": prepared.data_fingerprint,
    }
    return RunFolder.create(
        Path(prepared.config.run.dir),
        prepared.loaded.run_name,
        resolved(prepared.config),
        facts,
        keep_tokens=keep,
    )


def take_back(run: Run, prepared: Prepared, point: ResumePoint) -> None:
    """Put weights, optimiser, position and record where the checkpoint is; what came after is drawn again from its seeds."""
    checkpoint = point.checkpoint
    if checkpoint is not None:
        run.learner.load(str(checkpoint.path))
        position = checkpoint.extra["position"]
        run.step = run.saved_step = position["step"]
        run.policy = replace(run.policy, version=position["policy"]["version"])
        run.tokens_seen = position["tokens_seen"]
        run.unscored_steps = position["unscored_steps"]
        run.non_finite = position["non_finite"]
    for skipped in checkpoints.complete(run.folder.checkpoints, verify=True).skipped:
        run.progress.note(f"skipped a checkpoint: {skipped}")
    checkpoints.drop_after(run.folder.checkpoints, run.step)
    warn_of_layout(run.folder, prepared)
    dropped = run.folder.store.rewind(run.step)
    run.folder.store.set_meta({"max_steps": run.max_steps, "layout": asdict(prepared.layout)})
    run.folder.resume(
        resolved(prepared.config), ResumeRecord(run.step, dropped, time.time(), point.changes)
    )
    run.progress.note(
        f"resumed after {run.step} steps; {dropped.steps} later steps are done again"
        if dropped.steps
        else f"resumed after {run.step} steps"
    )


def warn_of_layout(folder: RunFolder, prepared: Prepared) -> None:
    """Say so if this machine works in other shapes than the run did so far: results then agree only up to rounding."""
    before, now = folder.store.get_meta().get("layout", {}), asdict(prepared.layout)
    for key in sorted(before.keys() & now.keys()):
        if before[key] != now[key]:
            _warn(key, before[key], now[key])


def _warn(key: str, before: object, now: object) -> None:
    logger.warning(
        "resumed with another layout: %s was %r, is %r; results agree up to rounding",
        key,
        before,
        now,
    )
