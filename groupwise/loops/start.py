"""The command `groupwise rl`, from what a user gives to how the run ended.

Everything that can be wrong with config, task, data or checkpoint is found before the model is loaded. Then the parts are built, a
resumed run is taken back to its last checkpoint, and the loop in `groupwise.loops.rl` takes over. However that ends (done, Ctrl-C,
an error), the folder says so, and what is finished is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupwise import build
from groupwise.config import RunConfig
from groupwise.display.progress import Progress
from groupwise.errors import UsageError
from groupwise.loops.awaiting import run_to_end
from groupwise.loops.evaluate import EvalResult, held_out
from groupwise.loops.interruption import Interrupted, Interruption
from groupwise.loops.outcome import summarise, write_curve, write_final
from groupwise.loops.prepare import Prepared, plan, prepare
from groupwise.loops.resume import ResumePoint, find_resume_point, open_folder, take_back
from groupwise.loops.rl import Run, evaluate_held_out, publish, save_checkpoint, train
from groupwise.rewards.scoring import Scorer
from groupwise.runs import durable, find
from groupwise.runs.folder import RunFolder
from groupwise.types import Policy, SamplingParams

BEFORE = "before"
AFTER = "after"


@dataclass(frozen=True, slots=True)
class RlResult:
    """How a run ended."""

    summary: dict[str, Any]
    """For people and `--json`: run, state, steps, rewards, held-out results, folders."""
    exit_code: int = 0
    """0 done; 130 or 143 interrupted after a clean checkpoint."""
    folder: Path | None = None
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
    _check_one_start({"--resume": resume, "--resume-from": resume_from, "--init-from": init_from})
    prepared = prepare(config, task, overrides, init_from)
    if dry_run:
        return RlResult(plan(prepared))
    point = find_resume_point(prepared, resume, resume_from)
    folder = open_folder(prepared, point)
    try:
        with folder:
            return run_to_end(run_in(folder, prepared, point))
    except UsageError:
        if point is None and not find.run_info(folder.path).steps:
            durable.remove_folder(folder.path)  # nothing was started, so nothing stands in the way
        raise


def _check_one_start(ways: Mapping[str, object]) -> None:
    given = [name for name, value in ways.items() if value]
    if len(given) > 1:
        raise UsageError(
            f"{' and '.join(given)} exclude each other: --resume and --resume-from go on with a run, --init-from starts a "
            "new one. Give one of them."
        )


async def run_in(folder: RunFolder, prepared: Prepared, point: ResumePoint | None) -> RlResult:
    """Build the parts, train, and leave the folder with what came of it."""
    started = time.perf_counter()
    publications = build.publication_folder(folder.path)
    build.remove_publications(publications)
    progress = Progress(
        folder.name,
        prepared.max_steps,
        start_step=point.checkpoint.step if point and point.checkpoint else 0,
        logging_steps=prepared.config.run.logging_steps,
    )
    scorer = build.build_scorer(prepared.config, prepared.task, prepared.tokenizer)
    starting = asyncio.create_task(scorer.start())
    try:
        with Interruption() as interruption, progress:
            progress.phase("loading")
            await asyncio.sleep(0)  # the workers start while the model is loaded
            run = await assemble(
                folder, prepared, point, scorer, progress, interruption, publications
            )
            await starting
            return await conduct(run, prepared, started)
    finally:
        await scorer.close()
        await asyncio.gather(starting, return_exceptions=True)
        build.remove_publications(publications)


async def assemble(
    folder: RunFolder,
    prepared: Prepared,
    point: ResumePoint | None,
    scorer: Scorer,
    progress: Progress,
    interruption: Interruption,
    publications: Path,
) -> Run:
    """The run at its first step, or at its checkpoint, with the policy published."""
    config = prepared.config
    parts = build.training_parts(config, prepared.layout, folder.name, publications)
    run = Run(
        config=config,
        max_steps=prepared.max_steps,
        algorithm=build.build_algorithm(config),
        sampler=parts.sampler,
        learner=parts.learner,
        scorer=scorer,
        tokenizer=prepared.tokenizer,
        params=SamplingParams(
            max_tokens=config.sampler.max_completion_length,
            temperature=config.sampler.temperature,
            stop_token_ids=parts.stop_token_ids,
            stop=config.sampler.stop,
        ),
        prompts=prepared.prompts,
        held_out=held_out(config, prepared.task, prepared.held_out_prompts, parts.stop_token_ids)
        if prepared.held_out_prompts
        else None,
        folder=folder,
        progress=progress,
        interruption=interruption,
        policy=Policy(folder.name, 0, "", "adapter", ""),
    )
    if point is not None:
        take_back(run, prepared, point)
    await publish(run, run.policy.version)
    return run


async def conduct(run: Run, prepared: Prepared, started: float) -> RlResult:
    """Held-out prompts before, all steps, held-out prompts after; an interruption keeps what is whole."""
    try:
        before = await held_out_result(run, BEFORE, step=0)
        await train(run)
        after = await held_out_result(run, AFTER, step=run.max_steps)
    except Interrupted as interrupted:
        keep_what_is_whole(run)
        summary = summarise(run, prepared, started, None, None)
        run.folder.finish("interrupted", summary)
        run.progress.note(
            f"interrupted after {run.step} steps; the same command with --resume goes on"
        )
        return RlResult({**summary, "state": "interrupted"}, interrupted.exit_code, run.folder.path)
    except BaseException:
        run.folder.store.keep_unfinished(run.drawn.values())
        raise
    save_checkpoint(run)
    run.folder.write_final(lambda folder: write_final(run, folder))
    write_curve(run)
    summary = summarise(run, prepared, started, before, after)
    run.folder.finish("finished", summary)
    return RlResult({**summary, "state": "finished"}, 0, run.folder.path, before, after)


async def held_out_result(run: Run, name: str, step: int) -> EvalResult | None:
    """How the policy after `step` steps does: as recorded, or found out now; None if that policy is no longer there."""
    if not run.config.eval.before_and_after:
        return None
    for record in run.folder.store.evaluations():
        if (record.name, record.step) == (name, step):
            rows = [dict(row) for row in record.rows]
            return EvalResult(record.policy, dict(record.metrics), {}, rows)
    return await evaluate_held_out(run, name) if run.step == step else None


def keep_what_is_whole(run: Run) -> None:
    """Groups that are scored, and a checkpoint of the last whole step."""
    run.folder.store.keep_unfinished(run.drawn.values())
    if run.step > 0:
        save_checkpoint(run)
    write_curve(run)
