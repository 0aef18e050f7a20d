"""Finds the point where a run resumes, checks that the resume is allowed, and restores the run."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from groupwise.core import atomic_files
from groupwise.core.errors import ResumeMismatchError, RunInUseError, RunNotFoundError
from groupwise.core.settings.comparison import Change
from groupwise.core.terminal.quantities import counted
from groupwise.engine.models.card import packages_used
from groupwise.runs import checkpoints, find, recovery
from groupwise.runs.checkpoints import RUN_FILES, Checkpoint, SkippedCheckpoint
from groupwise.runs.folder import CHECKPOINTS, CONFIG, RECORD, START, RunFolder, read_config
from groupwise.runs.lock import holder, is_held
from groupwise.runs.record_segments import SEGMENT_FILE, RebuiltRecord
from groupwise.runs.records import ResumeRecord, Rewound
from groupwise.runs.store import Store
from groupwise.training.config import Loaded, LoadedConfig, compare_for_resume, resolved_values
from groupwise.training.loops.prepare import Prepared, key_of_weights, starting_from
from groupwise.training.loops.run import POLICIES, SELECTION
from groupwise.training.loops.training import Training
from groupwise.training.placement import EXACT_FIELDS, with_layout_defaults

logger = logging.getLogger(__name__)

NOT_WEIGHTS = (
    *("optimiser.safetensors", "learner.json", "manifest.json"),
    *(SEGMENT_FILE, RUN_FILES, POLICIES, SELECTION),
)
FIXED_FACTS = {
    "--task-module": "task",
    "the file of algorithm.type": "algorithm_file",
    "the training data, as token ids": "data",
    "the base model": "base",
}
"""Facts that a resume may not change, in addition to keys of the config: name in messages -> fact."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The point from which a run resumes."""

    path: Path
    checkpoint: Checkpoint | None
    """None if the run has no checkpoint: it starts over at step 0."""
    facts: dict[str, Any]
    """Facts that the run recorded about itself when it was started."""
    skipped: tuple[SkippedCheckpoint, ...]
    """Damaged checkpoints that cannot be used."""
    checkpoint_steps: tuple[int, ...]
    """The steps of all checkpoints that look complete."""
    repair: RebuiltRecord | None = None
    """How the run's record was repaired; None if it was intact."""

    @property
    def step(self) -> int:
        """Number of steps that are kept."""
        return self.checkpoint.step if self.checkpoint else 0


@dataclass(frozen=True, slots=True)
class Resumption:
    """An allowed resume: its starting point, and the changes since the run was started."""

    point: ResumePoint
    changed: dict[str, tuple[Any, Any]]
    """Keys of config and layout that have changed and may change: old and new value."""
    warnings: tuple[str, ...]
    """Warnings about changes that make results agree only up to rounding, and about a changed task file."""

    @property
    def messages(self) -> tuple[str, ...]:
        """Messages from the search for the checkpoint: a repaired record, and checkpoints that cannot be used."""
        repairs = () if self.point.repair is None else (str(self.point.repair),)
        return (*repairs, *(f"skipped a checkpoint: {skipped}" for skipped in self.point.skipped))


def find_resume_point(
    loaded: LoadedConfig, resume: bool, resume_from: str | None, kind: str = "rl"
) -> ResumePoint | None:
    """Find the point to resume from; None for a new run. `kind` is the command (`rl`, `sft`), which must be the one that started the run.

    If both are given, `resume_from` names the run, and it starts over from step 0 if it has no checkpoint.
    """
    if not resume and resume_from is None:
        return None
    runs_dir = Path(loaded.config.run.dir)
    recoveries = recovery.recover_by_name(resume_from or loaded.run_name, runs_dir)
    address = find.resolve(resume_from, runs_dir) if resume_from is not None else None
    path = address.path if address else find.newest_unfinished(loaded.run_name, runs_dir)
    _refuse_held(path)
    repair = recoveries.get(path.resolve()) or recovery.recover(path)
    with Store.open(path / RECORD, readonly=True) as record:
        facts, last_step = record.get_meta(), record.last_step()
    done = 0 if last_step is None else last_step + 1
    complete_checkpoints = checkpoints.complete(path / CHECKPOINTS, verify=True)
    # A rebuilt record may end before the last checkpoint, if some of its segments were damaged.
    checkpoint = next(
        (saved for saved in reversed(complete_checkpoints) if saved.step <= done), None
    )
    if address is not None:
        checkpoint = address.checkpoint or checkpoint
        if checkpoint is None and not resume:
            raise RunNotFoundError(
                f"The run {address.name!r} has no checkpoint. Give --resume to start it over from step 0."
            )
    if facts.get("kind", kind) != kind:
        raise ResumeMismatchError(
            f"{path} is a run of `groupwise {facts['kind']}`; continue it with that command."
        )
    checkpoint_steps = tuple(saved.step for saved in checkpoints.complete(path / CHECKPOINTS))
    return ResumePoint(
        path, checkpoint, facts, complete_checkpoints.skipped, checkpoint_steps, repair
    )


def _refuse_held(path: Path) -> None:
    if is_held(path):
        raise RunInUseError(
            f"{path} is in use by {holder(path) or 'another process'}. Wait for it or stop it."
        )


def use_copied_start(loaded: Loaded, point: ResumePoint) -> Loaded:
    """The config, with the weights that the run copied from `--init-from`; their path follows the run's folder if that was moved."""
    start_folder = point.path / START
    if not point.facts.get("init_from") or not start_folder.is_dir():
        return loaded
    return starting_from(loaded, start_folder.resolve())


def start_weights_to_copy(point: ResumePoint) -> Path | None:
    """The weights of `--init-from`, if the run died before they were copied into its folder; otherwise None."""
    if not point.facts.get("init_from") or (point.path / START).is_dir():
        return None
    stored = read_config(point.path)["model"]
    return Path(stored["adapter"] or stored["name"])


def check_resume(point: ResumePoint, prepared: Prepared) -> Resumption:
    """Compare the run as it was started with the config now. Raises `ResumeMismatchError` for changes that a resume may not make."""
    stored = read_config(point.path)
    differences = compare_for_resume(stored, prepared.config)
    _refuse_new_name(point, prepared.loaded, stored["run"]["name"])
    # Allowed: a config with another name, and another path of the initial weights that were copied into the run's folder.
    allowed_keys = {"run.name"}
    start = point.path / START
    if point.facts.get("init_from"):
        allowed_keys |= (
            {f"model.{key_of_weights(start)}"}
            if start.is_dir()
            else {"model.adapter", "model.name"}
        )
    mismatches = {
        key: change for key, change in differences.fixed.items() if key not in allowed_keys
    }
    for name, key in FIXED_FACTS.items():
        before, now = point.facts.get(key), prepared.facts.get(key)
        if before is not None and before != now:
            mismatches[name] = (before, now)
    if prepared.max_steps < point.step:
        mismatches["training.max_steps"] = (f"{point.step} steps done", prepared.max_steps)
    if mismatches:
        raise ResumeMismatchError(
            f"{point.path} was started with other settings:\n"
            + "\n".join(
                f"  {key}: {_as_config_text(old)} then, {_as_config_text(new)} now"
                for key, (old, new) in mismatches.items()
            )
            + "\nGive those settings, or start another run with run.name=<another name>."
        )
    before, now = with_layout_defaults(point.facts.get("layout", {})), asdict(prepared.layout)
    layout = {
        f"layout.{key}": (before[key], now[key])
        for key in sorted(before.keys() & now.keys())
        if before[key] != now[key]
    }
    return Resumption(
        point,
        changed={**differences.free, **differences.warned, **layout},
        warnings=tuple(_resume_warnings(point, prepared, differences.warned, layout)),
    )


def _refuse_new_name(point: ResumePoint, loaded: LoadedConfig, stored_name: str | None) -> None:
    """Raise ResumeMismatchError if the command line gives the run another name: a resumed run keeps its name.

    A config file may have another `run.name`, because the config of one run may continue another.
    """
    name, origin = loaded.config.run.name, loaded.tree.origin(("run", "name"))
    if name in (None, stored_name, point.path.name) or not origin.startswith("override"):
        return
    at = f"{point.path.name}@{point.step}"
    raise ResumeMismatchError(
        f"{origin}: {at} is continued under its own name, {point.path.name}. Leave run.name out; "
        f"or give --init-from {at} instead, for a new run from these weights."
    )


def open_folder(
    prepared: Prepared, point: ResumePoint | None, facts: Mapping[str, Any]
) -> RunFolder:
    """Open or create the run's folder and lock it for this process. A new folder records `facts`: `kind`, `model`, `init_from` …"""
    keep = prepared.config.run.keep_tokens
    if point is not None:
        folder = RunFolder.open(point.path, keep_tokens=keep)
        # Another process may have resumed and ended the run after the checkpoint was chosen and before the lock was taken.
        checkpoint_steps = tuple(saved.step for saved in checkpoints.complete(folder.checkpoints))
        finished_at = folder.store.get_meta().get("finished_at")
        if checkpoint_steps != point.checkpoint_steps or finished_at != point.facts.get(
            "finished_at"
        ):
            folder.close()
            raise RunInUseError(
                f"{point.path} was continued by another process in the meantime. Look at it with `groupwise runs show`, and "
                "give --resume again if it is not finished."
            )
        return folder
    sizes = {"max_steps": prepared.max_steps, "layout": asdict(prepared.layout)}
    return RunFolder.create(
        Path(prepared.config.run.dir),
        prepared.run_name,
        resolved_values(prepared.config),
        {**facts, **sizes, **prepared.facts},
        keep_tokens=keep,
    )


def check_folder(prepared: Prepared, point: ResumePoint | None) -> Path:
    """The folder that `open_folder` would return, with the same refusals; creates and locks nothing."""
    if point is not None:
        _refuse_held(point.path)
        return point.path
    return RunFolder.would_create(Path(prepared.config.run.dir), prepared.run_name)


def copy_start_weights(folder: RunFolder, loaded: Loaded, start: Path) -> Loaded:
    """Copy the initial weights into the run's folder, which then depends on no other folder, and change their path in its config."""
    start_file = folder.path / START
    temp_folder = atomic_files.building_path(start_file)
    with checkpoints.reading(start):
        shutil.copytree(start, temp_folder, ignore=shutil.ignore_patterns(*NOT_WEIGHTS))
    atomic_files.publish_folder(temp_folder, start_file)
    loaded = starting_from(loaded, start_file.resolve())
    atomic_files.write_json(folder.path / CONFIG, resolved_values(loaded.config))
    return loaded


def restore_checkpoint(run: Training, prepared: Prepared, resumption: Resumption) -> Rewound:
    """Restore weights, optimiser, position and record to the checkpoint. Later steps are drawn again from their seeds.

    Returns what was dropped from the record.
    """
    checkpoint = resumption.point.checkpoint
    if checkpoint is not None:
        run.learner.load(str(checkpoint.path))
        run.load_state(checkpoint.extra["position"])
        run.load_extra_files(checkpoint.path, checkpoint.extra["position"])
    for text in resumption.messages:
        run.say(text)
    checkpoints.drop_after(run.folder.checkpoints, run.step)
    for text in resumption.warnings:
        logger.warning("%s", text)
    dropped = run.folder.store.rewind(run.step)
    run.folder.store.set_meta({"max_steps": run.max_steps, "layout": asdict(prepared.layout)})
    if packages := resumption.point.facts.get("packages"):
        run.folder.store.set_meta({"packages": packages_used(packages)})
    changes = {key: list(change) for key, change in resumption.changed.items()}
    run.folder.resume(
        resolved_values(prepared.config), ResumeRecord(run.step, dropped, time.time(), changes)
    )
    note = f"; repeats {counted(dropped.steps, 'later step')}" if dropped.steps else ""
    run.say(f"resumed after {counted(run.step, 'step')}{note}")
    for key, (old, new) in resumption.changed.items():
        if not key.startswith(("layout.", "run.")):
            run.say(f"changed: {key} was {_as_config_text(old)}, is {_as_config_text(new)}")
    return dropped


def _resume_warnings(
    point: ResumePoint,
    prepared: Prepared,
    keys: Mapping[str, Change],
    layout: Mapping[str, Change],
) -> Iterator[str]:
    """Warnings about changes of config and layout after which results agree only up to rounding, and about changed code of the task."""
    names = {_last_key(key): key for key in keys}
    facts = {
        names.get(_last_key(fact), _last_key(fact)): change
        for fact, change in layout.items()
        if _last_key(fact) not in EXACT_FIELDS
    }
    other_changes = {
        key: change for key, change in keys.items() if not hasattr(prepared.layout, _last_key(key))
    }
    for key, (before, now) in {**other_changes, **facts}.items():
        old_text, new_text = _as_config_text(before), _as_config_text(now)
        yield f"resumed with another layout: {key} was {old_text}, is {new_text}; results then agree only up to rounding"
    if point.facts.get("task_file", "") != prepared.facts["task_file"]:
        yield "the code of the task or of its rewards was changed since the run was started; the run continues with the new code"


def _last_key(key: str) -> str:
    return key.rpartition(".")[2]


def _as_config_text(value: object) -> str:
    """The value as it is written in a config."""
    return json.dumps(value, ensure_ascii=False)
