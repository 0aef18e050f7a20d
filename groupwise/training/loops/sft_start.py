"""The command `groupwise sft`, from the user's config to the outcome of the run.

It works like `groupwise rl`: check everything, build the parts, restore a resumed run to its last checkpoint, train, and record the
outcome in the folder. `groupwise rl --init-from RUN` can start from the result.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from groupwise.core.interruption import Interrupted, Interruption, run_to_end
from groupwise.core.types import Learner, Policy
from groupwise.runs import checkpoints
from groupwise.runs.folder import RunFolder
from groupwise.training import rollout_builder
from groupwise.training.assembly import prepare
from groupwise.training.callbacks.base import Callbacks
from groupwise.training.evaluation.evaluate import held_out
from groupwise.training.loops.outcome import (
    end,
    ended_early,
    exit_code,
    first_and_last,
    report_failure,
    summarise,
    write_curve,
)
from groupwise.training.loops.resume import (
    NOT_WEIGHTS,
    Resumption,
    check_folder,
    restore_checkpoint,
)
from groupwise.training.loops.sft import SftRun, save, train
from groupwise.training.loops.sft_completions import Completions
from groupwise.training.loops.sft_prepare import SftPrepared, plan_sft, prepare_sft, warnings_of
from groupwise.training.loops.start import (
    StartMode,
    TrainingResult,
    dry_run_warnings,
    find_start,
    left_out_lines,
    load_parts,
    open_run_folder,
    run_with_auto_resume,
    show_progress,
)
from groupwise.training.sft_config import SftConfig, load_sft_config

logger = logging.getLogger(__name__)

KIND = "sft"
METRIC = "loss"
"""The metric that is plotted and summarised."""


@dataclass(frozen=True, slots=True)
class SftResult(TrainingResult):
    """The result of a supervised run."""


def sft(
    config: Path | str | Mapping[str, Any] | SftConfig,
    task: object = None,
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
    resume_from: str | None = None,
    init_from: str | None = None,
    dry_run: bool = False,
) -> SftResult:
    """Train on the given answers of a task: the command `groupwise sft`.

    Without a task, the config names the rows. `resume` continues the newest unfinished run of the config's name; `resume_from`
    (`RUN@STEP`) continues that run from that checkpoint; `init_from` starts a new run from the weights of a run or adapter folder. Raises
    `UsageError` for wrong arguments and `RunError` if the run fails.
    """
    mode = StartMode(resume, resume_from, init_from)
    loaded = load_sft_config(config, overrides, to_train=True)
    if not dry_run:
        prepare.be_launched(loaded.config)

    def begin(mode: StartMode) -> SftResult:
        with nullcontext() if dry_run else prepare.expected_ranks(loaded.config):
            start = find_start(loaded, mode, KIND)
            prepared = prepare_sft(start.loaded, task, start.rows_read)
            resumption = start.resumption(prepared)
            if dry_run:
                folder_path = check_folder(prepared, start.point)
                return SftResult(plan_sft(prepared, dry_run_warnings(resumption)), folder_path)
            facts = {
                "examples": len(prepared.lessons.lessons),
                "rows_dropped_as_too_long": prepared.lessons.dropped,
            }
            with open_run_folder(prepared, start, KIND, facts) as (folder, ready_run):
                return run_to_end(_run_in(folder, ready_run, resumption))

    return run_with_auto_resume(begin, mode, loaded)


async def _run_in(
    folder: RunFolder, prepared: SftPrepared, resumption: Resumption | None
) -> SftResult:
    """Build the learner and train; the results are in the folder."""
    started_at = time.perf_counter()
    callbacks = Callbacks(prepared.callbacks)
    try:
        with show_progress(folder, prepared, resumption) as (progress, interruption):
            async with _build_parts(folder, prepared, interruption) as (learner, completions):
                config = prepared.config
                run = SftRun(
                    config=config,
                    max_steps=prepared.max_steps,
                    learner=learner,
                    tokenizer=prepared.tokenizer,
                    folder=folder,
                    progress=progress,
                    interruption=interruption,
                    policy=Policy(folder.name, 0, "", "adapter" if config.lora else "full", ""),
                    lessons=prepared.lessons,
                    order=prepared.order,
                    max_draws=prepared.max_draws,
                    held_out=prepared.held_out,
                    eval_steps=prepared.eval_steps,
                    callbacks=callbacks,
                    completions=completions,
                )
                if resumption is not None:
                    restore_checkpoint(run, prepared, resumption)
                    # Losses on other held-out rows are not comparable, so the best step is forgotten.
                    store, fingerprint = run.folder.store, prepared.facts["held_out"]
                    if store.get_meta().get("held_out") != fingerprint:
                        store.set_meta({"held_out": fingerprint})
                        run.best = run.loss_to_beat = run.evaluated_step = None
                        run.not_better = 0
                        run.say(
                            "the held-out rows were changed: the search for the best step starts again"
                        )
                _log_start(run, prepared)
                return await _run_to_completion(run, prepared, started_at)
    finally:
        callbacks.close()


@asynccontextmanager
async def _build_parts(
    folder: RunFolder, prepared: SftPrepared, interruption: Interruption
) -> AsyncGenerator[tuple[Learner, Completions | None]]:
    """The learner and, if evaluations draw completions, a sampler of the learner's weights with a scorer."""
    from groupwise.training.assembly.start import (
        publication_folder,
        start_supervised,
        start_training,
    )

    completion_prompts, task, tokenizer = (
        prepared.completion_prompts,
        prepared.task,
        prepared.tokenizer,
    )
    if completion_prompts is None:
        unused_folder = folder.path / "published"  # without a sampler, nothing is published
        starts = start_supervised(prepared.config, prepared.layout, folder.name, unused_folder)
        with closing(await load_parts(interruption, starts)) as parts:
            yield parts.learner, None
        return
    config = completion_prompts.config
    scorer = rollout_builder.build_scorer(config, task, tokenizer, completion_prompts.rubric)
    key_length = completion_prompts.layout.key_length
    rollouts = rollout_builder.build_rollouts(config, task, tokenizer, key_length)
    try:
        with publication_folder(config, folder.path) as publish_folder:
            starts = start_training(config, completion_prompts.layout, folder.name, publish_folder)
            with closing(await load_parts(interruption, starts)) as parts:
                await asyncio.gather(scorer.start(), rollouts.start())
                held_out_set = held_out(
                    config, task, completion_prompts.prompts, parts.stop_token_ids, rollouts
                )
                completions = Completions(
                    held_out=held_out_set, sampler=parts.sampler, scorer=scorer, tokenizer=tokenizer
                )
                yield parts.learner, completions
    finally:
        await rollouts.close()
        await scorer.close()


def _log_start(run: SftRun, prepared: SftPrepared) -> None:
    """Log the first lines and the warnings about the data."""
    lessons = prepared.lessons
    logger.info(
        "%s, %s: steps %d to %d, %d examples",
        run.config.model.name,
        prepared.task.described,
        run.step,
        run.max_steps,
        len(lessons.lessons),
    )
    for line in left_out_lines(prepared):
        run.say(line)
    if lessons.cut or lessons.dropped:
        limit = run.config.data.max_length or "the model's longest text"
        run.say(
            f"rows longer than {limit} tokens (data.max_length): {lessons.cut} were cut, {lessons.dropped} are left out"
        )
    for warning in warnings_of(prepared):
        logger.warning(warning)
    if lessons.without_end:
        logger.warning(
            "%d turns or completions are trained without a token that ends them: the model will not learn to stop there. "
            "Look at the first rows that --dry-run shows, and at the chat template or the tokenizer's end token",
            lessons.without_end,
        )


async def _run_to_completion(run: SftRun, prepared: SftPrepared, started_at: float) -> SftResult:
    """Take all steps, then write the final weights. An interruption keeps all completed steps."""
    try:
        await run.callbacks.begin(run)
        await train(run)
    except Interrupted as interrupted:
        if run.step > 0:
            await save(run)
        summary = await _finish_run(run, prepared, started_at, "interrupted")
        return SftResult(summary, run.folder.path, interrupted.exit_code)
    except Exception as error:
        await report_failure(run, error)
        raise
    await save(run)
    step = run.step
    if run.config.eval.load_best_model_at_end and run.best is not None:
        steps_kept = [
            checkpoint.step for checkpoint in checkpoints.complete(run.folder.checkpoints)
        ]
        if run.best.step in steps_kept:
            step = run.best.step
        else:
            run.say(
                f"warning: the best checkpoint, step-{run.best.step}, is gone: final/ has the last one"
            )

    def fill(folder: Path) -> None:
        """Copy the weights after `step` steps and the tokenizer, in the format of transformers, peft and vLLM."""
        source = run.folder.checkpoints / f"step-{step}"
        ignored = shutil.ignore_patterns(*NOT_WEIGHTS)
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=ignored)
        run.tokenizer.save_pretrained(folder)

    run.folder.write_final(fill, step)
    summary = await _finish_run(run, prepared, started_at, "finished")
    return SftResult(summary, run.folder.path, exit_code(run, summary))


async def _finish_run(
    run: SftRun,
    prepared: SftPrepared,
    started_at: float,
    state: Literal["finished", "interrupted"],
) -> dict[str, Any]:
    """Write the curve, summarise the run, and record its final state."""
    write_curve(run, METRIC)
    first_loss, last_loss = first_and_last(run, METRIC)
    summary = {
        **summarise(run, prepared, started_at),
        "loss_first": first_loss,
        "loss_last": last_loss,
    }
    evaluations = run.folder.store.evaluations(rows=False)
    # Callbacks may add evaluations without a loss.
    losses = (record.metrics.get("eval_loss") for record in evaluations)
    eval_losses = [loss for loss in losses if loss is not None]
    if eval_losses:
        summary |= {"eval_loss_first": eval_losses[0], "eval_loss_last": eval_losses[-1]}
    if run.best is not None:
        summary |= {"eval_loss_best": run.best.loss, "best_step": run.best.step}
    if run.stopped_early and run.step < run.max_steps:
        summary["stopped_early"] = True
    if run.met_condition is not None:
        summary["stopped_by"] = run.met_condition
    return await end(run, state, {**summary, **ended_early(run)})
