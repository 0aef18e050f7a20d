"""`groupwise runs replay`: repeats the training of a step from its recorded rollouts.

The record has every token, log-probability and reward of a step, and checkpoints have weights and optimiser state before some steps. So
training can be repeated without sampling or scoring: from the newest checkpoint at or before the step (or the run's initial weights),
through the recorded steps in between, with the same code as the run. Each step must give the recorded loss, gradient norm and weights.

The run is only read, so it may continue at the same time. The replay writes to a temporary folder, which it deletes at the end.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.core.errors import (
    CheckpointError,
    ResumeMismatchError,
    RunNotFoundError,
    UsageError,
)
from groupwise.core.interruption import Interruption, run_to_end
from groupwise.core.terminal.progress import Progress
from groupwise.core.types import Group, Policy
from groupwise.engine.models.identity import identity
from groupwise.engine.models.machine import choose_device, describe_processor, torch_version
from groupwise.runs import checkpoints, find
from groupwise.runs.checkpoints import Checkpoint
from groupwise.runs.folder import CHECKPOINTS, RECORD, START, RunFolder, read_config
from groupwise.runs.records import ResumeRecord, StepRecord
from groupwise.runs.store import Store
from groupwise.tasks.rollouts.rows import GroupCredits
from groupwise.training.assembly import prepare
from groupwise.training.config import RunConfig, load_config, resolved_values
from groupwise.training.loops.learning import learn
from groupwise.training.loops.prepare import starting_from
from groupwise.training.loops.run import Learning
from groupwise.training.placement import Layout

RELATIVE_TOLERANCE = {"float32": 1e-3, "tf32": 1e-2, "bfloat16": 5e-2}
"""Tolerance of gradient norm and loss for rounding, as a fraction of the gradient norm."""
MIN_GRAD_NORM = 1e-2
"""Smallest gradient norm that is used for the tolerance: rounding errors do not vanish with the gradient."""


@dataclass(frozen=True, slots=True)
class StepValues:
    """The results of training a step."""

    loss: float | None
    """None if no rollout had an advantage."""
    grad_norm: float | None
    version: int
    """Version of the policy after the step."""
    fingerprint: str


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step as recorded and as replayed."""

    step: int
    recorded: StepValues
    replayed: StepValues
    advantages: int
    """Number of rollouts whose recorded advantage differs from the one computed from their rewards."""
    tolerance: float | None
    """Tolerance of loss and gradient norm, from `RELATIVE_TOLERANCE`; None: every bit must be equal."""

    @property
    def exact(self) -> bool:
        """True if every bit is equal."""
        return not self.advantages and not self._unequal_names(0.0) and self._same_fingerprint

    @property
    def differences(self) -> tuple[str, ...]:
        """Names of the values that differ by more than the tolerance."""
        names = self._unequal_names(self.tolerance or 0.0)
        if self.tolerance is None and not self._same_fingerprint:
            names.append("fingerprint")
        return (*names, *(["advantages"] if self.advantages else []))

    @property
    def _same_fingerprint(self) -> bool:
        return self.recorded.fingerprint == self.replayed.fingerprint

    def _unequal_names(self, tolerance: float) -> list[str]:
        before, now = self.recorded, self.replayed
        margin = tolerance * max(before.grad_norm or 0.0, MIN_GRAD_NORM)
        pairs = {
            "loss": _is_close(before.loss, now.loss, margin),
            "grad_norm": _is_close(before.grad_norm, now.grad_norm, margin),
            "version": before.version == now.version,
        }
        return [name for name, is_equal in pairs.items() if not is_equal]


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay."""

    run: str
    step: int
    """The requested step."""
    start: str
    """The start of the replay: `run@steps`, or the initial weights."""
    start_differs: str | None
    """How the weights at the start differ from the recorded ones; None if they are equal."""
    rounding: tuple[str, ...]
    """Reasons why bits may differ; empty: they must be equal."""
    steps: tuple[ReplayedStep, ...]

    @property
    def agrees(self) -> bool:
        """True if every step agrees with the record, within the tolerance."""
        return self.start_differs is None and not any(step.differences for step in self.steps)

    @property
    def exact(self) -> bool:
        """True if every step agrees to the last bit."""
        return self.start_differs is None and all(step.exact for step in self.steps)

    @property
    def exit_code(self) -> int:
        """Exit code of the command."""
        return 0 if self.agrees else 1

    def summary(self) -> dict[str, Any]:
        """The replay as plain data for `--json`."""
        return {
            **asdict(self),
            "agrees": self.agrees,
            "exact": self.exact,
            "steps": [
                {**asdict(step), "exact": step.exact, "differences": step.differences}
                for step in self.steps
            ],
        }


def replay(reference: str, *, step: int | None = None, runs_dir: Path = Path("runs")) -> Replay:
    """Repeat step `step` (None: the last one) of a run, and compare it with the record.

    Raises `UsageError` with the reason if the run or step cannot be replayed.
    """
    path = find.resolve(reference, runs_dir).path
    with Store.open(path / RECORD, readonly=True) as store:
        return run_to_end(_replay(_open_recording(path, store, step)))


# --- the record ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Recording:
    """The record of the step to replay and of the steps before it."""

    path: Path
    store: Store
    step: int
    steps: Mapping[int, StepRecord]
    checkpoint: Checkpoint | None
    config: RunConfig
    """The config at that step."""
    layout: Layout
    """The layout at that step, adapted to this machine."""
    rounding: tuple[str, ...]

    @property
    def first(self) -> int:
        """The first step that is repeated."""
        return self.checkpoint.step if self.checkpoint else 0


def _open_recording(path: Path, store: Store, requested_step: int | None) -> _Recording:
    facts, resumes = store.get_meta(), store.resumes()
    if facts.get("kind", "rl") != "rl":
        raise UsageError(
            f"{path} is a run of `groupwise {facts['kind']}`: it has no rollouts that could be replayed."
        )
    steps = {record.step: record for record in store.steps()}
    if not steps:
        raise RunNotFoundError(f"The run {path.name!r} has recorded no step yet.")
    step = max(steps) if requested_step is None else requested_step - 1
    if step not in steps:
        raise RunNotFoundError(
            f"The run {path.name!r} has no step {step + 1}; it has the steps {min(steps) + 1} to {max(steps) + 1}."
        )
    checkpoint = _checkpoint_before(path, step)
    first_step = checkpoint.step if checkpoint else 0
    layouts = {
        k: config_at_step(facts["layout"], resumes, k, "layout")
        for k in range(first_step, step + 1)
    }
    layout, reasons = _adapted_layout(layouts[step])
    if any(other_layout != layouts[step] for other_layout in layouts.values()):
        reasons = (*reasons, "a resume since the checkpoint changed the layout")
    loaded = load_config(config_at_step(read_config(path), resumes, step))
    # Initial weights from another run are stored in this run's folder, which may have been moved.
    start = path / START
    config = (starting_from(loaded, start) if start.is_dir() else loaded).config
    before, current = facts.get("base"), identity(config.model)
    if before is not None and before != current:
        raise ResumeMismatchError(
            f"{path} was trained on another model: {config.model.name!r} had the fingerprint {before} then, and has {current} now. "
            "Put the weights back that it had, and replay again."
        )
    return _Recording(path, store, step, steps, checkpoint, config, layout, reasons)


def _checkpoint_before(path: Path, step: int) -> Checkpoint | None:
    """The newest undamaged checkpoint at or before the step; None: the run's initial weights."""
    for checkpoint in reversed(checkpoints.complete(path / CHECKPOINTS)):
        if checkpoint.step <= step:
            try:
                checkpoint.verify()
            except (CheckpointError, RunNotFoundError):  # damaged, or just deleted by the run
                continue
            return checkpoint
    return None


def config_at_step(
    current: Mapping[str, Any], resumes: Sequence[ResumeRecord], step: int, section: str = ""
) -> dict[str, Any]:
    """The config at a step; with `section`, the recorded values under that key.

    Later resumes may have changed it; these changes are reverted.
    """
    resumes_applied = [index for index, resume in enumerate(resumes, 1) if resume.step <= step]
    config: dict[str, Any] = copy.deepcopy(dict(current))
    for resume in reversed(resumes[max(resumes_applied, default=0) :]):
        for key, (old_value, _) in resume.changes.items():
            if key.startswith("layout.") == (section == "layout"):
                tree = config
                *sections, leaf = key.removeprefix(f"{section}.").split(".")
                for outer in sections:
                    tree = tree.setdefault(outer, {})
                tree[leaf] = old_value
    return config


def _adapted_layout(layout_record: Mapping[str, Any]) -> tuple[Layout, tuple[str, ...]]:
    """The recorded layout as far as this machine supports it, and the reasons why results may differ in their last bits."""
    recorded_layout = Layout(**layout_record)
    device = (
        recorded_layout.device
        if recorded_layout.device in ("cpu", choose_device())
        else choose_device()
    )
    layout = replace(
        recorded_layout, device=device, processor=describe_processor(device), torch=torch_version()
    )
    reasons = [
        f"{key} was {old or 'not recorded'}, is {new}"
        for key, old in asdict(recorded_layout).items()
        if old != (new := asdict(layout)[key])
    ]
    if device != "cpu":
        reasons.append(f"on {device} some sums may be added up in another order")
    return layout, tuple(reasons)


# --- the training, repeated ----------------------------------------------------------------------


async def _replay(recording: _Recording) -> Replay:
    from groupwise.training.assembly.start import training_parts

    name = recording.path.name
    progress = Progress(f"{name}, replayed", recording.step + 1, start_step=recording.first)
    with _scratch(recording) as (folder, publish_folder), progress:
        progress.phase("loading")
        with closing(
            training_parts(recording.config, recording.layout, folder.name, publish_folder)
        ) as parts:
            config = recording.config
            run = Learning(
                config=config,
                max_steps=recording.step + 1,
                algorithm=prepare.build_algorithm(config),
                learner=parts.learner,
                tokenizer=None,
                folder=folder,
                progress=progress,
                interruption=Interruption(),
                policy=Policy(folder.name, 0, "", "adapter", ""),
            )
            mismatch = await _load_start(run, recording)
            steps: list[ReplayedStep] = []
            for step in range(recording.first, recording.step + 1):
                steps.append(await _replay_step(run, recording, step))
                values_replayed = steps[-1].replayed
                values = {"loss": values_replayed.loss, "grad_norm": values_replayed.grad_norm}
                progress.step(
                    step, {name: value for name, value in values.items() if value is not None}
                )
    start = f"{name}@{recording.first}" if recording.checkpoint else "the starting weights"
    return Replay(name, recording.step + 1, start, mismatch, recording.rounding, tuple(steps))


@contextmanager
def _scratch(recording: _Recording) -> Generator[tuple[RunFolder, Path]]:
    """A temporary run folder and a folder for published weights; both are deleted at the end."""
    from groupwise.training.assembly.start import publication_folder

    config = recording.config
    with (
        tempfile.TemporaryDirectory(prefix="groupwise-replay-") as temp_folder,
        publication_folder(config, Path(temp_folder)) as publish_folder,
        RunFolder.create(Path(temp_folder), recording.path.name, resolved_values(config)) as folder,
    ):
        yield folder, publish_folder


async def _load_start(run: Learning, recording: _Recording) -> str | None:
    """Load the initial weights of the replay. Returns how they differ from the recorded ones, or None."""
    checkpoint = recording.checkpoint
    if checkpoint is None:
        # The fingerprint of the run's initial weights, which sampled the first groups.
        groups = recording.store.groups(0)
        fingerprints = (
            segment.fingerprint
            for group in groups
            for rollout in group.rollouts
            for segment in rollout.segments
            if segment.policy_version == 0
        )
        fingerprint = next(fingerprints, None)
    else:
        with checkpoints.reading(checkpoint.path):
            run.learner.load(str(checkpoint.path))
        run.load_state(checkpoint.extra["position"])
        fingerprint = run.policy.fingerprint
    run.policy = await run.learner.publish(run.policy.version)
    if fingerprint in (None, run.policy.fingerprint):
        return None
    return (
        f"the weights have the fingerprint {run.policy.fingerprint}, {fingerprint} was recorded: this machine makes "
        "or reads other ones than the run had"
    )


async def _replay_step(run: Learning, recording: _Recording, step: int) -> ReplayedStep:
    """Repeat `groupwise.training.loops.rl.take_step` without sampling and recording."""
    record, metrics = recording.steps[step], recording.store.step_metrics(step)
    by_draw = {group.draw: group for group in recording.store.groups(record.step)}
    groups = [by_draw[draw] for draw in record.draws]
    tokens_missing = any(
        segment.source == "policy" and segment.sampling_logprobs is None
        for group in groups
        for rollout in group.rollouts
        for segment in rollout.segments
    )
    if tokens_missing:
        raise UsageError(
            f"Step {record.step + 1} of {recording.path.name!r} was recorded without tokens (run.keep_tokens was false), and "
            "they are what is trained: it cannot be replayed, nor can steps after it up to the next checkpoint."
        )
    credits = run.algorithm.credits(groups)
    result = await learn(run, groups, credits, record.learning_rate)
    if result.changed:
        run.policy = await run.learner.publish(run.policy.version + 1)
    run.adapt({**result.metrics, "rollouts/scored": metrics["rollouts/scored"]})
    run.step += 1
    return ReplayedStep(
        step + 1,
        recorded=_step_values(metrics, record.version_out, record.fingerprint_out),
        replayed=_step_values(result.metrics, run.policy.version, run.policy.fingerprint),
        advantages=sum(map(_other_advantages, groups, credits)),
        tolerance=RELATIVE_TOLERANCE[recording.layout.products_dtype]
        if recording.rounding
        else None,
    )


def _other_advantages(group: Group, credits: GroupCredits) -> int:
    advantages = [credit.advantage if credit else None for credit in credits]
    recorded = [rollout.advantage for rollout in group.rollouts]
    return sum(before != now for before, now in zip(recorded, advantages, strict=True))


def _step_values(metrics: Mapping[str, float], version: int, fingerprint: str) -> StepValues:
    return StepValues(metrics.get("loss"), metrics.get("grad_norm"), version, fingerprint)


def _is_close(before: float | None, now: float | None, margin: float) -> bool:
    if before is None or now is None:
        return before is now
    both_broken = math.isnan(before) and math.isnan(now)
    return both_broken or before == now or abs(before - now) <= margin
