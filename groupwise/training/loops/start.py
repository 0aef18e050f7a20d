"""The start of a training command: the parts that `rl_start` and `sft_start` share.

run_with_auto_resume  resumes from the last checkpoint if a server has lost the run's sampler or learner
find_start       finds the initial weights, and the point where an earlier run resumes
resumption       checks that a resumed run is the same run, and lists the changes
opened           opens and locks the run's folder; removes it again if the run could not start
watched, loaded  show progress and warnings, and handle Ctrl-C
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from groupwise.core import atomic_files
from groupwise.core.errors import RunError, UsageError
from groupwise.core.interruption import Interrupted, Interruption
from groupwise.core.terminal.notebook import kernel_display
from groupwise.engine.models.card import packages_used
from groupwise.runs import checkpoints, find
from groupwise.runs.folder import CHECKPOINTS, RECORD, RunFolder
from groupwise.runs.store import Store
from groupwise.training.config import Loaded, LoadedConfig
from groupwise.training.evaluation.policies import PolicyWeights, find_policy
from groupwise.training.loops.prepare import ROWS_READ, Prepared, row_counts, starting_from
from groupwise.training.loops.resume import (
    ResumePoint,
    Resumption,
    check_resume,
    copy_start_weights,
    find_resume_point,
    open_folder,
    start_weights_to_copy,
    use_copied_start,
)
from groupwise.training.placement import oversubscription_warning

if TYPE_CHECKING:
    from groupwise.core.terminal.progress import Progress

logger = logging.getLogger(__name__)

T = TypeVar("T")
AnyPrepared = TypeVar("AnyPrepared", bound=Prepared)

ENDS = "stopping: saving what has been done; {again} stops at once, without saving"
MAX_FUTILE_RESUMES = 3
"""Number of losses in a row without a new checkpoint after which a run is no longer resumed automatically."""

START_OPTIONS = {
    "--resume": "continues the newest unfinished run of that name",
    "--resume-from": "continues from the run and the checkpoint that it names",
    "--init-from": "starts a new run from the weights that it names",
}


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of a training command."""

    summary: dict[str, Any]
    """Summary for people and `--json`: run, state, steps, results, folders. After a dry run, config and plan."""
    folder: Path
    """The run folder; after a dry run, where it would have been."""
    exit_code: int = 0
    """0: done; 130 (SIGINT) or 143 (SIGTERM): interrupted after a clean checkpoint."""


@dataclass(frozen=True, slots=True)
class StartMode:
    """The user's choice of how to start a run; without any, an ordinary new run. Raises `UsageError` if more than one is given."""

    resume: bool = False
    resume_from: str | None = None
    init_from: str | None = None

    def __post_init__(self) -> None:
        values = (self.resume, self.resume_from, self.init_from)
        names = [name for name, value in zip(START_OPTIONS, values, strict=True) if value]
        if len(names) > 1:
            meanings = ", ".join(f"{name} {START_OPTIONS[name]}" for name in names)
            raise UsageError(
                f"{' and '.join(names)} exclude each other: {meanings}. Give one of them."
            )


def run_with_auto_resume(
    begin: Callable[[StartMode], T], mode: StartMode, loaded: LoadedConfig
) -> T:
    """Run `begin` in this mode; if `run.server` loses the run's sampler or learner, resume from the last checkpoint as with `--resume`.

    A crashed engine or a restarted server then costs the steps since the last checkpoint. Raises the run's own errors, and the loss
    itself if it happens `MAX_FUTILE_RESUMES` times in a row without a new checkpoint.
    """
    failures, last_step, run = 0, 0, ""
    while True:
        try:
            return begin(mode)
        except UsageError as error:
            if not run:
                raise
            raise RunError(
                f"{error.message} The run {run} is at step {last_step}; --resume continues it."
            ) from None
        except RunError as error:
            from groupwise.api.client.errors import ClientError
            from groupwise.api.schemas.parts import LOST

            if not isinstance(error, ClientError) or error.code not in LOST:
                raise
            runs = Path(loaded.config.run.dir)
            if mode.resume_from is None:
                path = find.newest_unfinished(loaded.run_name, runs)
            else:
                path = find.resolve(mode.resume_from.partition("@")[0], runs).path
            checkpoint = checkpoints.newest(path / CHECKPOINTS)
            run, step = path.name, 0 if checkpoint is None else checkpoint.step
            failures = 0 if step > last_step else failures + 1
            if failures == MAX_FUTILE_RESUMES:
                raise
            last_step = step
            logger.warning("%s", error)
            logger.warning("the run %s goes on by itself, after step %d", run, step)
            _await_server(loaded.config.run.server)
            mode = StartMode(resume_from=f"{run}@{step}") if step else StartMode(resume=True)


def _await_server(url: str | None) -> None:
    """Wait for a server that may be restarting; the client retries until its timeout."""
    from groupwise.api.client import TrainingClient

    assert url is not None, "parts that can be lost are a server's"
    with TrainingClient(url) as client:
        client.send("GET", "/healthz")


@dataclass(frozen=True, slots=True)
class Start(Generic[Loaded]):
    """The initial state of a run."""

    loaded: Loaded
    """The config, with the initial weights in its `model` section."""
    point: ResumePoint | None
    """The point where an earlier run resumes; None for a new run."""
    init_from: str | None
    """The initial weights of a new run, as the user named them."""
    lineage: tuple[dict[str, Any], ...]
    """The initial weights and their ancestors, the oldest first."""
    weights: Path | None
    """Weights that still have to be copied into the run's folder."""

    @property
    def rows_read(self) -> int | None:
        """Number of rows that the earlier run reads from a stream of unknown length."""
        return self.point.facts.get(ROWS_READ) if self.point else None

    def resumption(self, prepared: Prepared) -> Resumption | None:
        """The allowed resume; None for a new run. Raises `ResumeMismatchError` if something has changed that may not change."""
        return check_resume(self.point, prepared) if self.point else None


def find_start(loaded: Loaded, mode: StartMode, kind: str) -> Start[Loaded]:
    """Find the initial weights or the point to resume from. `kind` is the command (`rl`, `sft`); it can resume only its own runs."""
    lineage: tuple[dict[str, Any], ...] = ()
    point = find_resume_point(loaded, mode.resume, mode.resume_from, kind)
    if point is not None:
        weights = start_weights_to_copy(point)
        loaded = use_copied_start(loaded, point)
    elif mode.init_from is not None:
        policy = find_policy(mode.init_from, Path(loaded.config.run.dir))
        weights = policy.folder
        lineage = () if weights is None else _lineage(policy, weights)
    else:
        weights = None
    if weights is not None:
        loaded = starting_from(loaded, weights)
    if loaded.config.run.hub.repo_id is not None:
        from groupwise.engine.models.hub_push import Target, check_access

        # Check before any work: raises UsageError if it is already clear that the result cannot be uploaded at the end.
        target = Target(**loaded.config.run.hub.model_dump())
        warning = check_access(target, point.path if point else None)
        if warning:
            logger.warning("run.hub: %s. It is tried when the run has finished", warning)
    return Start(loaded, point, mode.init_from, lineage, weights)


def _lineage(policy: PolicyWeights, weights: Path) -> tuple[dict[str, Any], ...]:
    """The origin of weights for the model card: the run that trained them and its ancestors, or only a name if no run is known."""
    run = policy.run or find.run_around(weights)
    if run is None:
        is_path = Path(policy.label).expanduser().exists()
        return ({"policy": weights.resolve().name if is_path else policy.label},)
    facts = Store.facts(run / RECORD)
    known_facts = {
        key: facts[key] for key in ("kind", "task", "dataset", "model") if facts.get(key)
    }
    return (*facts.get("lineage", ()), {"policy": find.label_of(run, weights), **known_facts})


def dry_run_warnings(resumption: Resumption | None) -> tuple[str, ...]:
    """Warnings about a resume, for the plan of a dry run."""
    return () if resumption is None else (*resumption.messages, *resumption.warnings)


def left_out_lines(prepared: Prepared) -> list[str]:
    """Messages about rows that cannot be used, one line for each reason."""
    return [
        f"{count} {'row' if count == 1 else 'rows'} of {hook} left out: {reason}"
        for hook, reasons in row_counts(prepared.task)["rows_left_out"].items()
        for reason, count in reasons.items()
    ]


@contextmanager
def open_run_folder(
    prepared: AnyPrepared, start: Start[Any], kind: str, facts: Mapping[str, Any]
) -> Generator[tuple[RunFolder, AnyPrepared]]:
    """Open the run's folder and copy the initial weights into it; a new folder records `facts` about the run."""
    all_facts = {
        "kind": kind,
        "model": prepared.loaded.config.model.name,
        "task_module": prepared.task.spec,
        **facts,
        **row_counts(prepared.task),
        "init_from": start.init_from,
        "lineage": start.lineage,
        "packages": packages_used(),
    }
    folder = open_folder(prepared, start.point, all_facts)
    try:
        with folder:
            if start.weights is not None:
                loaded = copy_start_weights(folder, prepared.loaded, start.weights)
                prepared = replace(prepared, loaded=loaded)
            if prepared.config.run.keep_tokens:
                folder.keep_tokenizer(prepared.tokenizer.save_pretrained)
            yield folder, prepared
    except UsageError:
        if start.point is None and not find.run_info(folder.path).steps:
            atomic_files.remove_folder(folder.path)  # nothing was started, so free the run's name
        raise


@contextmanager
def show_progress(
    folder: RunFolder, prepared: Prepared, resumption: Resumption | None
) -> Generator[tuple[Progress, Interruption]]:
    """Show progress and warnings, and handle Ctrl-C. The caller loads the model in this context."""
    from groupwise.core.terminal.progress import Progress

    progress = Progress(
        folder.name,
        prepared.max_steps,
        start_step=resumption.point.step if resumption else 0,
        logging_steps=prepared.config.run.logging_steps,
    )
    again = "Ctrl-C once more" if kernel_display() is None else "another interrupt"
    ends = Interruption(lambda: progress.note(ENDS.format(again=again)))
    with ends as interruption, progress, _shown_warnings(progress):
        if warning := oversubscription_warning(
            prepared.layout, elsewhere=prepared.config.run.server is not None
        ):
            logger.warning(warning)
        if resumption is None and folder.name != prepared.run_name:
            progress.note(f"there is a finished run {prepared.run_name}; this one is {folder.name}")
        progress.phase("loading")
        yield progress, interruption


async def load_parts(interruption: Interruption, parts: Coroutine[Any, Any, T]) -> T:
    """Await the parts while the model loads. Ctrl-C or SIGTERM then ends the command at once, as there are no steps to save."""
    try:
        return await interruption.allow(parts)
    except Interrupted as interrupted:
        raise KeyboardInterrupt(interrupted.exit_code - 128) from None


@contextmanager
def _shown_warnings(progress: Progress) -> Generator[None]:
    """Also show the package's warnings and notices in the progress display; the run's log contains them in any case."""
    handler = _ProgressHandler(progress)
    package = logging.getLogger("groupwise")
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)


class _ProgressHandler(logging.Handler):
    """Shows warnings, and records that are logged with `extra={"notice": True}` because the user waits for what they say."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.INFO)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self._progress.note(f"warning: {record.getMessage()}")
        elif getattr(record, "notice", False):
            self._progress.note(record.getMessage())
