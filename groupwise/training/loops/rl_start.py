"""The command `groupwise rl`, from the user's config to the outcome of the run.

Errors in config, task, data or checkpoint are found before the model is loaded. Then the parts are built, a resumed run is restored to
its last checkpoint, and the loop in `groupwise.training.loops.rl` runs. For every outcome (finished, Ctrl-C, an error), the folder
records the state of the run, and finished work is kept.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from groupwise.core.errors import StoreError
from groupwise.core.interruption import Interrupted, Interruption, run_to_end
from groupwise.core.reward_call.request import Scorer
from groupwise.core.terminal.progress import Progress
from groupwise.core.types import Policy, SamplingParams
from groupwise.runs.curves import WARM_UP_SUMMARY
from groupwise.runs.folder import RunFolder
from groupwise.runs.records import EvaluationRecord
from groupwise.tasks.data.reward_hacking import Signals
from groupwise.tasks.data.selection import Selection, Sizes
from groupwise.tasks.rollouts.asking import RolloutKind
from groupwise.training import build, rollout_builder
from groupwise.training.callbacks.base import Callbacks
from groupwise.training.callbacks.registry import callbacks_of_task
from groupwise.training.config import LoadedConfig, RunConfig, load_config, view
from groupwise.training.evaluation.evaluate import EvalResult, compare_before_after, held_out
from groupwise.training.loops.held_out import (
    ASKED,
    announce,
    describe_result,
    evaluate_held_out,
    in_passing,
    keep_evaluation,
    notice_changed_questions,
    recorded_evaluation,
)
from groupwise.training.loops.outcome import (
    end,
    ended_early,
    exit_code,
    first_and_last,
    report_failure,
    summarise,
    write_curve,
)
from groupwise.training.loops.resume import Resumption, check_folder, restore_checkpoint
from groupwise.training.loops.rl import publish, train
from groupwise.training.loops.rl_prepare import RlPrepared, plan_rl, prepare_rl, warnings_of
from groupwise.training.loops.run import TaskRun
from groupwise.training.loops.start import (
    Start,
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
from groupwise.training.loops.training import save_checkpoint
from groupwise.training.loops.warm_up import WarmedUp, needs_warm_up, warm_up

logger = logging.getLogger(__name__)

KIND = "rl"
METRIC = "reward"
"""The metric that is plotted and summarised."""
UNTRAINED = "base"
BEFORE = "before"
AFTER = "after"
"""Names of the evaluations: the untrained model, if a warm-up came first, then before and after the steps of reinforcement learning."""


@dataclass(frozen=True, slots=True)
class RlResult(TrainingResult):
    """The result of the command, with the held-out results before and after training, if any."""

    before: EvalResult | None = field(default=None, repr=False)
    after: EvalResult | None = field(default=None, repr=False)


def rl(
    config: Path | str | Mapping[str, Any] | RunConfig,
    task: object = None,
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
    resume_from: str | None = None,
    init_from: str | None = None,
    dry_run: bool = False,
) -> RlResult:
    """Train on a task with reinforcement learning: the command `groupwise rl`.

    Without a task, the config names the rows and the rewards. `resume` continues the newest unfinished run of the config's name;
    `resume_from` (`RUN@STEP`) continues that run from that checkpoint; `init_from` starts a new run from the weights of a run or adapter
    folder. Raises `UsageError` for wrong arguments and `RunError` if the run fails. If the config has `warm_up`, a supervised run is made
    first, unless a matching one exists or `init_from` is given.
    """
    ways = StartMode(resume, resume_from, init_from)
    given = load_config(config, overrides, to_train=True)
    if not dry_run:
        build.be_launched(given.config)

    def begin(ways: StartMode, warmed: WarmedUp | None = None) -> RlResult:
        with nullcontext() if dry_run else build.expected_ranks(given.config):
            start = find_start(given, ways, KIND)
            return _rl(start, task, warmed or WarmedUp(), dry_run=dry_run, here=not dry_run)

    if given.config.warm_up is None or not needs_warm_up(given, ways):
        return run_with_auto_resume(begin, ways, given)
    if not dry_run:  # report mistakes in the second stage before the first one runs
        with build.expected_ranks(given.config):
            _rl(find_start(given, StartMode(), KIND), task, WarmedUp(), dry_run=True, here=True)
    warmed = warm_up(given, task, dry_run=dry_run)
    if warmed.interrupted is not None:
        return RlResult(
            warmed.interrupted.summary, warmed.interrupted.folder, warmed.interrupted.exit_code
        )
    result = run_with_auto_resume(
        partial(begin, warmed=warmed), StartMode(init_from=warmed.run), given
    )
    if not dry_run:  # the run's own summary contains the warm-up
        return result
    return replace(result, summary={"warm_up": warmed.summary, **result.summary})


def _rl(
    start: Start[LoadedConfig], task: object, warmed: WarmedUp, *, dry_run: bool, here: bool
) -> RlResult:
    """Prepare a run and train it. `here` is True if the run will be on this machine, so that its rewards' needs are checked here."""
    prepared = prepare_rl(start.loaded, task, start.rows_read)
    if here and prepared.rubric is not None:
        prepared.rubric.check_machine()
    resumption = start.resumption(prepared)
    if dry_run:
        place = check_folder(prepared, start.point)
        all_callbacks(prepared, place)
        return RlResult(plan_rl(prepared, dry_run_warnings(resumption)), place)
    noted = {
        "examples": len(prepared.prompts.examples),
        "examples_dropped_as_too_long": prepared.prompts.dropped,
        **warmed.facts,
    }
    with open_run_folder(prepared, start, KIND, noted) as (folder, ready):
        if warmed.untrained is not None:
            # The evaluation of the untrained model, recorded before the first step.
            found, questions = warmed.untrained, ready.facts[ASKED]
            folder.store.add_evaluation(
                EvaluationRecord(0, UNTRAINED, found.policy, found.metrics, found.rows, questions)
            )
        return run_to_end(run_in(folder, ready, resumption))


async def run_in(
    folder: RunFolder, prepared: RlPrepared, resumption: Resumption | None
) -> RlResult:
    """Build the parts and train; the results are in the folder."""
    started = time.perf_counter()
    callbacks = all_callbacks(prepared, folder.path)
    publications = build.publication_folder(folder.path, build.publication_bytes(prepared.config))
    scorer = rollout_builder.build_scorer(
        prepared.config, prepared.task, prepared.tokenizer, prepared.rubric
    )
    rollouts = rollout_builder.build_rollouts(
        prepared.config, prepared.task, prepared.tokenizer, prepared.layout.key_length
    )
    starting = asyncio.gather(scorer.start(), rollouts.start())
    try:
        with show_progress(folder, prepared, resumption) as (progress, interruption):
            await asyncio.sleep(0)  # lets the workers start while the model is loaded
            starts = build.start_training(
                prepared.config, prepared.layout, folder.name, publications
            )
            with closing(await load_parts(interruption, starts)) as parts:
                run = assemble(
                    folder, prepared, parts, scorer, rollouts, progress, interruption, publications
                )
                run.callbacks = callbacks
                if resumption is not None:
                    restore_checkpoint(run, prepared, resumption)
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


def all_callbacks(prepared: RlPrepared, folder: Path) -> Callbacks:
    """The callbacks of the config, then those of the task."""
    given, tokenizer = view(prepared.config), prepared.tokenizer
    of_task = callbacks_of_task(
        prepared.task, given, tokenizer, str(folder), beside=prepared.callbacks
    )
    return Callbacks([*prepared.callbacks, *of_task])


def assemble(
    folder: RunFolder,
    prepared: RlPrepared,
    parts: build.Parts,
    scorer: Scorer,
    rollouts: RolloutKind,
    progress: Progress,
    interruption: Interruption,
    publications: Path,
) -> TaskRun:
    """The run before its first step."""
    config = prepared.config
    nothing_yet = Policy(folder.name, 0, "", "adapter", "")
    return TaskRun(
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
            min_tokens=config.sampler.min_completion_length,
        ),
        prompts=prepared.prompts,
        easy=prepared.easy,
        selection=selection_of(prepared),
        signals=Signals(config.signals, prepared.rubric.argument_columns if prepared.rubric else ())
        if config.signals
        else None,
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


def selection_of(prepared: RlPrepared) -> Selection:
    """The selection that chooses the run's examples, in its initial state."""
    config = prepared.config
    sizes = Sizes(
        order=prepared.order,
        easy=len(prepared.easy.examples) if prepared.easy else 0,
        block=config.training.prompts_per_step,
    )
    replay, schedule = config.data.replay, config.sampler.temperature_schedule
    waits = replay is not None and replay.at_temperature_floor and schedule is not None
    return Selection(
        config.data,
        config.training.seed,
        sizes,
        replay_from=schedule.steps if waits and schedule else 0,
    )


def say_what_begins(run: TaskRun, prepared: RlPrepared) -> None:
    """Log the first lines and the warnings about the data."""
    dropped = prepared.prompts.dropped
    for warning in warnings_of(prepared):
        logger.warning(warning)
    logger.info(
        "%s, %s: steps %d to %d, %d examples",
        run.config.model.name,
        prepared.task.described,
        run.step,
        run.max_steps,
        len(prepared.prompts.examples),
    )
    for line in left_out_lines(prepared):
        run.say(line)
    if dropped:
        run.say(
            f"{dropped} of {dropped + len(prepared.prompts.examples)} prompts are longer than data.max_prompt_length = "
            f"{run.config.data.max_prompt_length} tokens and left out"
        )


async def conduct(run: TaskRun, prepared: RlPrepared, started: float) -> RlResult:
    """Evaluate, take all steps, evaluate again. An interruption keeps all completed steps."""
    try:
        await run.callbacks.begin(run)
        untrained = recorded_evaluation(run, UNTRAINED, 0)
        if untrained is not None and run.step == 0:
            run.say(f"held-out before any training: {describe_result(untrained)}")
        before = await held_out_result(run, BEFORE, 0, prepared)
        await train(run)
        save_checkpoint(run)
        await run.callbacks.announce_checkpoint()

        def fill(folder: Path) -> None:
            """Copy the published weights and the tokenizer, in the format of transformers, peft and vLLM."""
            shutil.copytree(run.policy.path, folder, dirs_exist_ok=True)
            run.tokenizer.save_pretrained(folder)

        run.folder.write_final(fill)
        after = await held_out_result(run, AFTER, run.step, prepared)
    except Interrupted as interrupted:
        return await leave_interrupted(run, prepared, started, interrupted)
    except BaseException as error:
        with suppress(StoreError):  # a failure here must not hide the original error
            run.folder.store.keep_unfinished(run.drawn.values())
        await report_failure(run, error)
        raise
    write_curve(run, METRIC)
    summary = {**_summarise(run, prepared, started, before, after), **ended_early(run)}
    summary = await end(run, "finished", summary)
    return RlResult(summary, run.folder.path, exit_code(run, summary), before, after)


async def leave_interrupted(
    run: TaskRun, prepared: RlPrepared, started: float, by: Interrupted
) -> RlResult:
    """Save an interrupted run: its scored groups, and a checkpoint of the last completed step."""
    run.folder.store.keep_unfinished(run.drawn.values())
    if run.step > 0:
        save_checkpoint(run)
        await run.callbacks.announce_checkpoint()
    write_curve(run, METRIC)
    summary = await end(run, "interrupted", _summarise(run, prepared, started))
    return RlResult(summary, run.folder.path, by.exit_code)


def _summarise(
    run: TaskRun,
    prepared: RlPrepared,
    started: float,
    before: EvalResult | None = None,
    after: EvalResult | None = None,
) -> dict[str, Any]:
    """Summarise the run in a few entries."""
    warmed_up = run.folder.store.get_meta().get(WARM_UP_SUMMARY)
    summary = {**({"warm_up": warmed_up} if warmed_up else {}), **summarise(run, prepared, started)}
    first, last = first_and_last(run, METRIC)
    if first is not None:
        summary |= {"reward_first": first, "reward_last": last}
    if before and after:
        untrained = recorded_evaluation(run, UNTRAINED, 0)
        summary["held_out"] = compare_before_after(before, after, untrained)
    return summary


async def held_out_result(
    run: TaskRun, name: str, step: int, prepared: RlPrepared
) -> EvalResult | None:
    """The evaluation after `step` steps, from the record or made now; None if the run is past that step.

    A recorded evaluation is used only if the prompts and the sampling options of evaluations are unchanged.
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
    known = recorded_evaluation(run, in_passing(step), step)
    if known is not None:
        return await keep_evaluation(run, name, known)
    return await evaluate_held_out(run, name)
