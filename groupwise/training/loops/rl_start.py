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
from typing import TYPE_CHECKING, Any

from groupwise.core.errors import StoreError
from groupwise.core.interruption import Interrupted, Interruption, run_to_end
from groupwise.core.reward_call.request import Scorer
from groupwise.core.types import Policy, SamplingParams
from groupwise.runs.advice import DISTILLATION
from groupwise.runs.curves import WARM_UP_SUMMARY
from groupwise.runs.folder import SERVER_LOG, RunFolder
from groupwise.runs.records import EvaluationRecord
from groupwise.tasks.data.reward_hacking import Signals
from groupwise.tasks.data.selection import Selection, Sizes
from groupwise.tasks.rollouts.rollout_request import RolloutKind
from groupwise.training import rollout_builder
from groupwise.training.assembly import prepare
from groupwise.training.callbacks.base import Callbacks
from groupwise.training.callbacks.registry import callbacks_of_task
from groupwise.training.config import LoadedConfig, RunConfig, load_config, view
from groupwise.training.evaluation.evaluate import EvalResult, compare_before_after, held_out
from groupwise.training.loops.group_sampling import load_policy
from groupwise.training.loops.held_out import (
    HELD_OUT_KEY,
    announce,
    describe_result,
    evaluate_held_out,
    evaluation_name,
    notice_changed_questions,
    recorded_evaluation,
    store_evaluation,
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
from groupwise.training.loops.resume import (
    NOT_WEIGHTS,
    Resumption,
    check_folder,
    restore_checkpoint,
)
from groupwise.training.loops.rl import train
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
from groupwise.training.loops.teaching import Teaching
from groupwise.training.loops.training import save_checkpoint

if TYPE_CHECKING:
    from groupwise.core.terminal.progress import Progress
    from groupwise.training.assembly.parts import Parts
    from groupwise.training.loops.warm_up import WarmUpResult

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
    mode = StartMode(resume, resume_from, init_from)
    loaded = load_config(config, overrides, to_train=True)
    if not dry_run:
        prepare.be_launched(loaded.config)

    def begin(mode: StartMode, warm_up_result: WarmUpResult | None = None) -> RlResult:
        with nullcontext() if dry_run else prepare.expected_ranks(loaded.config):
            start = find_start(loaded, mode, KIND)
            return _rl(
                start,
                task,
                warm_up_result,
                dry_run=dry_run,
                on_this_machine=not dry_run,
            )

    if loaded.config.warm_up is None:
        return run_with_auto_resume(begin, mode, loaded)
    from groupwise.training.loops.warm_up import needs_warm_up, warm_up

    if not needs_warm_up(loaded, mode):
        return run_with_auto_resume(begin, mode, loaded)
    if not dry_run:  # report mistakes in the second stage before the first one runs
        with prepare.expected_ranks(loaded.config):
            _rl(
                find_start(loaded, StartMode(), KIND),
                task,
                None,
                dry_run=True,
                on_this_machine=True,
            )
    warm_up_result = warm_up(loaded, task, dry_run=dry_run)
    if warm_up_result.interrupted is not None:
        return RlResult(
            warm_up_result.interrupted.summary,
            warm_up_result.interrupted.folder,
            warm_up_result.interrupted.exit_code,
        )
    result = run_with_auto_resume(
        partial(begin, warm_up_result=warm_up_result),
        StartMode(init_from=warm_up_result.run),
        loaded,
    )
    if not dry_run:  # the run's own summary contains the warm-up
        return result
    return replace(result, summary={"warm_up": warm_up_result.summary, **result.summary})


def _rl(
    start: Start[LoadedConfig],
    task: object,
    warm_up_result: WarmUpResult | None,
    *,
    dry_run: bool,
    on_this_machine: bool,
) -> RlResult:
    """Prepare a run and train it. `on_this_machine` is True if the run will be here, so that its rewards' needs are checked now."""
    check_only = dry_run and start.point is None  # a resume compares all tokens
    prepared = prepare_rl(start.loaded, task, start.rows_read, check_only=check_only)
    if warm_up_result is not None:
        prepared = replace(prepared, warm_up_prompts=warm_up_result.prompts)
    if on_this_machine and prepared.rubric is not None:
        prepared.rubric.check_machine()
    resumption = start.resumption(prepared)
    if dry_run:
        folder_path = check_folder(prepared, start.point)
        all_callbacks(prepared, folder_path)
        return RlResult(plan_rl(prepared, dry_run_warnings(resumption)), folder_path)
    facts = {
        "examples": len(prepared.prompts.examples),
        "examples_dropped_as_too_long": prepared.prompts.dropped,
        **(warm_up_result.facts if warm_up_result else {}),
    }
    with open_run_folder(prepared, start, KIND, facts) as (folder, ready_run):
        if warm_up_result and warm_up_result.untrained is not None:
            # The evaluation of the untrained model, recorded before the first step.
            untrained, questions = warm_up_result.untrained, ready_run.facts[HELD_OUT_KEY]
            folder.store.add_evaluation(
                EvaluationRecord(
                    0, UNTRAINED, untrained.policy, untrained.metrics, untrained.rows, questions
                )
            )
        return run_to_end(run_in(folder, ready_run, resumption))


async def run_in(
    folder: RunFolder, prepared: RlPrepared, resumption: Resumption | None
) -> RlResult:
    """Build the parts and train; the results are in the folder."""
    from groupwise.training.assembly.start import publication_folder, start_training

    started_at = time.perf_counter()
    callbacks = all_callbacks(prepared, folder.path)
    scorer = rollout_builder.build_scorer(
        prepared.config, prepared.task, prepared.tokenizer, prepared.rubric
    )
    rollouts = rollout_builder.build_rollouts(
        prepared.config, prepared.task, prepared.tokenizer, prepared.layout.key_length
    )
    starting = asyncio.gather(scorer.start(), rollouts.start())
    try:
        with (
            publication_folder(prepared.config, folder.path) as publish_folder,
            show_progress(folder, prepared, resumption) as (progress, interruption),
        ):
            await asyncio.sleep(0)  # lets the workers start while the model is loaded
            starts = start_training(prepared.config, prepared.layout, folder.name, publish_folder)
            with closing(await load_parts(interruption, starts)) as parts:
                run = assemble(
                    folder,
                    prepared,
                    parts,
                    scorer,
                    rollouts,
                    progress,
                    interruption,
                    publish_folder,
                )
                run.callbacks = callbacks
                dropped = None
                if resumption is not None:
                    dropped = restore_checkpoint(run, prepared, resumption)
                    notice_changed_questions(run, prepared.facts[HELD_OUT_KEY])
                log_start(run, prepared)
                run.policy = await run.learner.publish(run.policy.version)
                if parts.by_http is not None:
                    parts.by_http.follow_server(folder.path / SERVER_LOG, run.say)
                # A server of the run's own starts now, which may take minutes.
                await interruption.allow(load_policy(run, run.policy))
                await starting
                if dropped is not None and rollouts.unrepeatable is not None:
                    run.say(
                        f"{rollouts.unrepeatable} plays all attempts after step {run.step} again from their beginning, "
                        f"{dropped.rollouts} recorded ones among them; whether it repeats itself is not known"
                    )
                if run.teaching is not None:
                    await interruption.allow(run.teaching.start())
                return await run_to_completion(run, prepared, started_at)
    finally:
        callbacks.close()
        await rollouts.close()
        await scorer.close()
        await asyncio.gather(starting, return_exceptions=True)


def all_callbacks(prepared: RlPrepared, folder: Path) -> Callbacks:
    """The callbacks of the config, then those of the task."""
    config_view, tokenizer = view(prepared.config), prepared.tokenizer
    task_callbacks = callbacks_of_task(
        prepared.task, config_view, tokenizer, str(folder), config_callbacks=prepared.callbacks
    )
    return Callbacks([*prepared.callbacks, *task_callbacks])


def assemble(
    folder: RunFolder,
    prepared: RlPrepared,
    parts: Parts,
    scorer: Scorer,
    rollouts: RolloutKind,
    progress: Progress,
    interruption: Interruption,
    publish_folder: Path,
) -> TaskRun:
    """The run before its first step."""
    config = prepared.config
    nothing_yet = Policy(folder.name, 0, "", "adapter", "")
    return TaskRun(
        config=config,
        max_steps=prepared.max_steps,
        algorithm=prepare.build_algorithm(config),
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
        teaching=teaching_of(prepared),
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
        publications=publish_folder,
    )


def teaching_of(prepared: RlPrepared) -> Teaching | None:
    """What adds the teacher's prompts and numbers to scored groups; None without either."""
    config, tokenizer = prepared.config, prepared.tokenizer
    teacher = config.teacher
    prompts = rollout_builder.teacher_prompts(config, prepared.task, tokenizer)
    if teacher is None or (prompts is None and teacher.type != "endpoint"):
        return None
    endpoint = None
    if teacher.type == "endpoint":
        top = config.algorithm.knobs["top_k"] or 0
        name = teacher.name or config.model.name
        from groupwise.engine.sampler.servers.teacher import EndpointTeacher

        endpoint = EndpointTeacher(teacher, name, tokenizer, top)
    return Teaching(prompts, endpoint, skips_failures=teacher.on_failure == "skip")


def selection_of(prepared: RlPrepared) -> Selection:
    """The selection that chooses the run's examples, in its initial state."""
    config = prepared.config
    sizes = Sizes(
        order=prepared.order,
        easy=len(prepared.easy.examples) if prepared.easy else 0,
        block=config.training.prompts_per_step,
    )
    replay, schedule = config.data.replay, config.sampler.temperature_schedule
    waits_for_floor = replay is not None and replay.at_temperature_floor and schedule is not None
    return Selection(
        config.data,
        config.training.seed,
        sizes,
        replay_from=schedule.steps if waits_for_floor and schedule else 0,
    )


def log_start(run: TaskRun, prepared: RlPrepared) -> None:
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


async def run_to_completion(run: TaskRun, prepared: RlPrepared, started_at: float) -> RlResult:
    """Evaluate, take all steps, evaluate again. An interruption keeps all completed steps."""
    try:
        await run.callbacks.begin(run)
        untrained = recorded_evaluation(run, UNTRAINED, 0)
        if untrained is not None and run.step == 0:
            run.say(f"held-out before any training: {describe_result(untrained)}")
        before = await held_out_result(run, BEFORE, 0, prepared)
        await train(run)
        await save_checkpoint(run)
        await run.callbacks.announce_checkpoint()

        def fill(folder: Path) -> None:
            """Copy the published weights and the tokenizer, in the format of transformers, peft and vLLM."""
            source = Path(run.policy.path)
            if run.config.model.backend == "tinker":  # whose publications end with their session
                source = run.folder.checkpoints / f"step-{run.step}"
            ignored = shutil.ignore_patterns(*NOT_WEIGHTS)
            shutil.copytree(source, folder, dirs_exist_ok=True, ignore=ignored)
            run.tokenizer.save_pretrained(folder)

        run.folder.write_final(fill)
        after = await held_out_result(run, AFTER, run.step, prepared)
    except Interrupted as interrupted:
        return await leave_interrupted(run, prepared, started_at, interrupted)
    except BaseException as error:
        with suppress(StoreError):  # a failure here must not hide the original error
            run.folder.store.keep_unfinished(run.uncommitted_groups.values())
        await report_failure(run, error)
        raise
    write_curve(run, METRIC)
    summary = {**_summarise(run, prepared, started_at, before, after), **ended_early(run)}
    summary = await end(run, "finished", summary)
    return RlResult(summary, run.folder.path, exit_code(run, summary), before, after)


async def leave_interrupted(
    run: TaskRun, prepared: RlPrepared, started_at: float, interruption: Interrupted
) -> RlResult:
    """Save an interrupted run: its scored groups, and a checkpoint of the last completed step."""
    run.folder.store.keep_unfinished(run.uncommitted_groups.values())
    if run.step > 0:
        await save_checkpoint(run)
        await run.callbacks.announce_checkpoint()
    write_curve(run, METRIC)
    summary = await end(run, "interrupted", _summarise(run, prepared, started_at))
    return RlResult(summary, run.folder.path, interruption.exit_code)


def _summarise(
    run: TaskRun,
    prepared: RlPrepared,
    started_at: float,
    before: EvalResult | None = None,
    after: EvalResult | None = None,
) -> dict[str, Any]:
    """Summarise the run in a few entries."""
    warmed_up = run.folder.store.get_meta().get(WARM_UP_SUMMARY)
    summary = {
        **({"warm_up": warmed_up} if warmed_up else {}),
        **summarise(run, prepared, started_at),
    }
    first_reward, last_reward = first_and_last(run, METRIC)
    if first_reward is not None:
        summary |= {"reward_first": first_reward, "reward_last": last_reward}
    first_kl, last_kl = first_and_last(run, DISTILLATION)
    if first_kl is not None:
        summary |= {"distillation_kl_first": first_kl, "distillation_kl_last": last_kl}
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
    fingerprint = prepared.facts["held_out"]
    result = recorded_evaluation(run, name, step)
    if result is not None and run.folder.store.get_meta().get(f"held_out_{name}") == fingerprint:
        if run.step == step:
            await announce(run, name, result)
        return result
    if run.step != step:
        run.say(
            "held-out prompts, or how they are answered, were changed: no comparison with before"
        )
        return None
    run.folder.store.set_meta({f"held_out_{name}": fingerprint})
    passing_result = recorded_evaluation(run, evaluation_name(step), step)
    if passing_result is not None:
        return await store_evaluation(run, name, passing_result)
    return await evaluate_held_out(run, name)
