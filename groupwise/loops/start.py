"""The command `groupwise rl`, from what a user gives to how the run ended.

Everything that can be wrong with config, task, data or checkpoint is found before the model is loaded. Then the parts are built, a
resumed run is taken back to its last checkpoint, and the loop in `groupwise.loops.rl` takes over. However that ends (done, Ctrl-C,
an error), the folder says so, and what is finished is kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from groupwise import build
from groupwise.callbacks.base import Callbacks, RunEnd
from groupwise.callbacks.registry import callbacks_of_task
from groupwise.config import LoadedConfig, RunConfig, load_config, view
from groupwise.display.progress import Progress
from groupwise.errors import StoreError, UsageError
from groupwise.loops.awaiting import run_to_end
from groupwise.loops.evaluate import EvalResult, held_out
from groupwise.loops.held_out import (
    ASKED,
    announce,
    evaluate_held_out,
    notice_changed_questions,
    recorded_evaluation,
)
from groupwise.loops.interruption import Interrupted, Interruption
from groupwise.loops.outcome import summarise, write_curve, write_final
from groupwise.loops.policies import find_policy
from groupwise.loops.prepare import ROWS_READ, Prepared, plan, prepare, starting_from
from groupwise.loops.resume import (
    ResumePoint,
    accepted_changes,
    find_resume_point,
    keep_start,
    open_folder,
    start_to_keep,
    take_back,
    with_start_of,
)
from groupwise.loops.rl import publish, train
from groupwise.loops.run import Run
from groupwise.loops.training import Training, save_checkpoint
from groupwise.models.tokens import unannounced
from groupwise.rewards.scoring import Scorer
from groupwise.rollouts.asking import RolloutKind
from groupwise.runs import durable, find
from groupwise.runs.folder import RunFolder
from groupwise.types import Policy, SamplingParams

logger = logging.getLogger(__name__)

BEFORE = "before"
AFTER = "after"

WAYS_TO_START = {
    "--resume": "goes on with the newest unfinished run of that name",
    "--resume-from": "goes on with the run and the checkpoint that it names",
    "--init-from": "starts a new run from the weights that it names",
}


@dataclass(frozen=True, slots=True)
class RlResult:
    """How a run ended."""

    summary: dict[str, Any]
    """For people and `--json`: run, state, steps, rewards, held-out results, folders."""
    folder: Path
    """The run folder; after a dry run, where it would have been."""
    exit_code: int = 0
    """0 done; 130 or 143 interrupted after a clean checkpoint."""
    before: EvalResult | None = field(default=None, repr=False)
    after: EvalResult | None = field(default=None, repr=False)


def rl(
    config: Path | str | Mapping[str, Any] | RunConfig,
    task: object,
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
    resume_from: str | None = None,
    init_from: str | None = None,
    dry_run: bool = False,
) -> RlResult:
    """Train on a task with reinforcement learning: the command `groupwise rl`.

    `resume` goes on with the newest unfinished run of the config's name, `resume_from` (`RUN@STEP`) with that checkpoint; `init_from`
    starts a new run from the weights of a run or adapter folder. Raises `UsageError` for what was given wrongly, `RunError` if the
    run failed on its way.
    """
    check_one_start({"--resume": resume, "--resume-from": resume_from, "--init-from": init_from})
    loaded = load_config(config, overrides)
    point = find_resume_point(loaded, resume, resume_from)
    start = start_to_keep(point) if point else starting_weights(loaded, init_from)
    if point is not None:
        loaded = with_start_of(loaded, point)
    rows_read = point.facts.get(ROWS_READ) if point else None
    prepared = prepare(starting_from(loaded, start) if start else loaded, task, rows_read)
    changes = accepted_changes(point, prepared) if point else {}
    if dry_run:
        place = Path(prepared.config.run.dir) / loaded.run_name
        all_callbacks(prepared, place)
        return RlResult(plan(prepared), place)
    folder = open_folder(prepared, point, _facts(prepared, init_from))
    try:
        with folder:
            if start is not None:
                prepared = replace(prepared, loaded=keep_start(folder, prepared.loaded, start))
            return run_to_end(run_in(folder, prepared, point, changes))
    except UsageError:
        if point is None and not find.run_info(folder.path).steps:
            durable.remove_folder(folder.path)  # nothing was started, so nothing stands in the way
        raise


def _facts(prepared: Prepared, init_from: str | None) -> dict[str, Any]:
    """What a new run notes about itself, beside the fingerprints of `Prepared.facts`."""
    return {
        "kind": "rl",
        "model": prepared.config.model.name,
        "task_module": prepared.task.spec,
        "examples": len(prepared.prompts.examples),
        "examples_dropped_as_too_long": prepared.prompts.dropped,
        "init_from": init_from,
    }


def starting_weights(loaded: LoadedConfig, init_from: str | None) -> Path | None:
    """The folder of the weights that `--init-from` names."""
    if init_from is None:
        return None
    return find_policy(init_from, Path(loaded.config.run.dir)).folder


def check_one_start(ways: Mapping[str, object]) -> None:
    """Raise `UsageError` if more than one of `WAYS_TO_START` is given."""
    given = [name for name, value in ways.items() if value]
    if len(given) > 1:
        meant = ", ".join(f"{name} {WAYS_TO_START[name]}" for name in given)
        raise UsageError(f"{' and '.join(given)} exclude each other: {meant}. Give one of them.")


async def run_in(
    folder: RunFolder, prepared: Prepared, point: ResumePoint | None, changes: Mapping[str, Any]
) -> RlResult:
    """Build the parts, train, and leave the folder with what came of it."""
    started = time.perf_counter()
    callbacks = all_callbacks(prepared, folder.path)
    publications = build.publication_folder(folder.path, build.publication_bytes(prepared.config))
    scorer = build.build_scorer(prepared.config, prepared.task, prepared.tokenizer, prepared.rubric)
    rollouts = build.build_rollouts(
        prepared.config, prepared.task, prepared.tokenizer, prepared.layout.key_length
    )
    starting = asyncio.gather(scorer.start(), rollouts.start())
    progress = Progress(
        folder.name,
        prepared.max_steps,
        start_step=point.step if point else 0,
        logging_steps=prepared.config.run.logging_steps,
    )
    try:
        with Interruption() as interruption, progress, shown_warnings(progress):
            progress.phase("loading")
            await asyncio.sleep(0)  # the workers start while the model is loaded
            run = assemble(folder, prepared, scorer, rollouts, progress, interruption, publications)
            run.callbacks = callbacks
            if point is not None:
                take_back(run, prepared, point, changes)
                notice_changed_questions(run, prepared.facts[ASKED])
            say_what_begins(run, prepared)
            await publish(run, run.policy.version)
            await starting
            return await conduct(run, prepared, started)
    finally:
        callbacks.close()
        await rollouts.close()
        await scorer.close()
        await asyncio.gather(starting, return_exceptions=True)
        build.remove_publications(publications)


def all_callbacks(prepared: Prepared, folder: Path) -> Callbacks:
    """Those of the config, then those of the task."""
    given, tokenizer = view(prepared.config), prepared.tokenizer
    of_task = callbacks_of_task(prepared.task, given, tokenizer, str(folder))
    return Callbacks([*prepared.callbacks, *of_task])


def assemble(
    folder: RunFolder,
    prepared: Prepared,
    scorer: Scorer,
    rollouts: RolloutKind,
    progress: Progress,
    interruption: Interruption,
    publications: Path,
) -> Run:
    """The run at its first step."""
    config = prepared.config
    parts = build.training_parts(config, prepared.layout, folder.name, publications)
    nothing_yet = Policy(folder.name, 0, "", "adapter", "")
    return Run(
        config=config,
        max_steps=prepared.max_steps,
        algorithm=build.build_algorithm(config),
        sampler=parts.sampler,
        learner=parts.learner,
        rollouts=rollouts,
        scorer=scorer,
        tokenizer=prepared.tokenizer,
        params=SamplingParams(
            max_tokens=config.sampler.max_completion_length,
            temperature=config.sampler.temperature,
            stop_token_ids=parts.stop_token_ids,
            stop=config.sampler.stop,
        ),
        prompts=prepared.prompts,
        unrewarded=prepared.rubric is None,
        held_out=held_out(
            config, prepared.task, prepared.held_out_prompts, parts.stop_token_ids, rollouts
        )
        if prepared.held_out_prompts
        else None,
        folder=folder,
        progress=progress,
        interruption=interruption,
        policy=nothing_yet,
        serving=nothing_yet,
        publications=publications,
    )


def say_what_begins(run: Run, prepared: Prepared) -> None:
    """The first lines of the log, and what a reader should know."""
    dropped = prepared.prompts.dropped
    if warning := unannounced(prepared.tokenizer, prepared.prompts.examples[0].prompt):
        logger.warning(warning)
    logger.info(
        "%s, %s: steps %d to %d, %d examples",
        run.config.model.name,
        prepared.task.described,
        run.step,
        run.max_steps,
        len(prepared.prompts.examples),
    )
    if dropped:
        run.say(
            f"{dropped} of {dropped + len(prepared.prompts.examples)} prompts are longer than data.max_prompt_length = "
            f"{run.config.data.max_prompt_length} tokens and left out"
        )


async def conduct(run: Run, prepared: Prepared, started: float) -> RlResult:
    """Held-out prompts before, all steps, held-out prompts after; an interruption keeps what is whole."""
    try:
        await run.callbacks.begin(run)
        before = await held_out_result(run, BEFORE, 0, prepared)
        await train(run)
        save_checkpoint(run)
        await run.callbacks.saved()
        run.folder.write_final(lambda folder: write_final(run, folder))
        after = await held_out_result(run, AFTER, run.step, prepared)
    except Interrupted as interrupted:
        return await stopped(run, prepared, started, interrupted)
    except BaseException as error:
        with suppress(StoreError):  # must not hide what happened
            run.folder.store.keep_unfinished(run.drawn.values())
        await failed(run, error)
        raise
    write_curve(run)
    summary = {**summarise(run, prepared, started, before, after), **ended_early(run)}
    run.folder.finish("finished", summary)
    logger.info("finished after %d steps", run.step)
    await run.callbacks.end(RunEnd("finished", summary))
    return RlResult({**summary, "state": "finished"}, run.folder.path, 0, before, after)


def ended_early(run: Training) -> dict[str, Any]:
    """For the summary: which callback ended the run before its last step, and why."""
    stop = run.callbacks.stop
    if stop is None or run.step >= run.max_steps:
        return {}
    why = f": {stop.reason}" if stop.reason else ""
    run.say(f"ended after {run.step} of {run.max_steps} steps by the callback {stop.by}{why}")
    return {"stopped": asdict(stop)}


async def failed(run: Training, error: BaseException) -> None:
    """Tell the callbacks, once the folder says so. Ctrl-C twice ends the run at once and does not wait for them."""
    if isinstance(error, Exception):
        with suppress(StoreError):
            run.folder.finish("failed", error=error)
        await run.callbacks.end(RunEnd("failed", {}, str(error)))


async def stopped(run: Run, prepared: Prepared, started: float, by: Interrupted) -> RlResult:
    """Leave an interrupted run with its scored groups and a checkpoint of the last whole step."""
    run.folder.store.keep_unfinished(run.drawn.values())
    if run.step > 0:
        save_checkpoint(run)
        await run.callbacks.saved()
    write_curve(run)
    summary = summarise(run, prepared, started, None, None)
    run.folder.finish("interrupted", summary)
    await run.callbacks.end(RunEnd("interrupted", summary))
    run.say(f"interrupted after {run.step} steps; the same command with --resume goes on")
    return RlResult({**summary, "state": "interrupted"}, run.folder.path, by.exit_code)


async def held_out_result(run: Run, name: str, step: int, prepared: Prepared) -> EvalResult | None:
    """How the policy after `step` steps does: as recorded, or found out now; None if it cannot be found out any more.

    What was recorded counts only if the prompts and the way of answering them are the same now.
    """
    if not run.config.eval.before_and_after or run.held_out is None:
        return None
    way = prepared.facts["held_out"]
    recorded = recorded_evaluation(run, name, step)
    if recorded is not None and run.folder.store.get_meta().get(f"held_out_{name}") == way:
        if run.step == step:
            await announce(run, name, recorded)
        return recorded
    if run.step != step:
        run.say(
            "held-out prompts, or how they are answered, were changed: no comparison with before"
        )
        return None
    run.folder.store.set_meta({f"held_out_{name}": way})
    return await evaluate_held_out(run, name)


@contextmanager
def shown_warnings(progress: Progress) -> Generator[None]:
    """Show what the package warns of beside the progress, too; the run's log has it anyway."""
    handler = _Shown(progress)
    package = logging.getLogger("groupwise")
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)


class _Shown(logging.Handler):
    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.note(f"warning: {record.getMessage()}")
