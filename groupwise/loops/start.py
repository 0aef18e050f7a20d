"""The command `groupwise rl`, from what a user gives to how the run ended.

Everything that can be wrong with config, task, data or checkpoint is found before the model is loaded. Then the parts are built, a
resumed run is taken back to its last checkpoint, and the loop in `groupwise.loops.rl` takes over. However that ends (done, Ctrl-C,
an error), the folder says so, and what is finished is kept.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from groupwise import build
from groupwise.build import Layout
from groupwise.config import (
    LoadedConfig,
    RunConfig,
    compare_for_resume,
    load_config,
    resolved,
    view,
    with_task_schema,
)
from groupwise.data.examples import fingerprint
from groupwise.display.plot import svg_curve, with_mean
from groupwise.display.progress import Progress
from groupwise.errors import ResumeMismatchError, RunNotFoundError, UsageError
from groupwise.loops.evaluate import EvalResult, held_out, held_out_prompts
from groupwise.loops.interruption import Interrupted, Interruption
from groupwise.loops.rl import Run, evaluate_held_out, publish, save_checkpoint, train
from groupwise.loops.statistics import Interval, paired_difference
from groupwise.models.plan import plan_model, prompt_room
from groupwise.models.tokenizer import load_tokenizer
from groupwise.models.tokens import rendered
from groupwise.rollouts.prompts import PromptSet, tokenise
from groupwise.runs import checkpoints, durable, find
from groupwise.runs.checkpoints import Checkpoint
from groupwise.runs.folder import RunFolder, read_config
from groupwise.runs.records import ResumeRecord
from groupwise.tasks.contract import Task, check_reward_columns, load_task, require
from groupwise.types import Policy, SamplingParams

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that is checked but not built."""

    loaded: LoadedConfig
    task: Task
    tokenizer: Any
    prompts: PromptSet
    held_out_prompts: PromptSet | None
    max_steps: int
    data_fingerprint: str
    layout: Layout

    @property
    def config(self) -> RunConfig:
        return self.loaded.config


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a run is taken up again."""

    path: Path
    checkpoint: Checkpoint | None
    """None: it has none, so it starts at step 0."""
    changes: dict[str, Any] = field(default_factory=dict[str, Any])


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
    prepared = prepare(config, task, overrides, init_from)
    if dry_run:
        return RlResult(plan(prepared))
    point = find_resume_point(prepared, resume, resume_from)
    folder = open_folder(prepared, point)
    try:
        with folder:
            return asyncio.run(run_in(folder, prepared, point))
    except UsageError:
        if point is None and not find.run_info(folder.path).steps:
            durable.remove_folder(folder.path)  # nothing was started, so nothing stands in the way
        raise


# --- before anything is built --------------------------------------------------------------------


def prepare(
    config: Path | str | Mapping[str, Any] | RunConfig,
    task: object,
    overrides: Sequence[str],
    init_from: str | None = None,
) -> Prepared:
    """Check config, task and data; tokenise all prompts."""
    loaded = load_config(config, overrides)
    found = load_task(task)
    require(found, "rl")
    schema = found.config_schema()
    if schema is not None:
        loaded = with_task_schema(loaded, schema)
    if init_from is not None:
        loaded = _starting_from(loaded, init_from)
    settings = loaded.config
    given = view(settings)
    limit = _draws(settings)
    examples = found.rl_examples(given, limit=limit)
    tokenizer = load_tokenizer(settings.model)
    found.refuse_callbacks(given, tokenizer, str(Path(settings.run.dir) / loaded.run_name))
    rubric = found.rubric(given, tokenizer, settings.rewards.reward_weights)
    check_reward_columns(found, rubric, examples)
    room = prompt_room(settings.model, build.longest_completion(settings))
    prompts = tokenise(
        tokenizer,
        examples,
        max_prompt_length=settings.data.max_prompt_length,
        room=room,
        where=f"{found.described}: get_rl_dataset",
    )
    asked = (
        held_out_prompts(settings, found, tokenizer, room) if _evaluates(settings, found) else None
    )
    return Prepared(
        loaded=loaded,
        task=found,
        tokenizer=tokenizer,
        prompts=prompts,
        held_out_prompts=asked,
        max_steps=_max_steps(settings, len(prompts.examples)),
        data_fingerprint=fingerprint(prompts.examples),
        layout=build.choose_layout(settings, max(prompts.longest, asked.longest if asked else 0)),
    )


def _starting_from(loaded: LoadedConfig, reference: str) -> LoadedConfig:
    from groupwise.loops.evaluate import find_policy

    folder, _, _ = find_policy(reference, Path(loaded.config.run.dir))
    if folder is None:
        return loaded
    key = "adapter" if (folder / "adapter_config.json").is_file() else "name"
    model = loaded.config.model.model_copy(update={key: str(folder)})
    return replace(loaded, config=loaded.config.model_copy(update={"model": model}))


def _draws(config: RunConfig) -> int | None:
    """How many examples of an endless stream are read; None where epochs decide, which needs an end."""
    steps = config.training.max_steps
    return None if steps is None else steps * config.training.prompts_per_step


def _max_steps(config: RunConfig, examples: int) -> int:
    if config.training.max_steps is not None:
        return config.training.max_steps
    assert config.training.num_train_epochs is not None
    return max(
        1, math.ceil(config.training.num_train_epochs * examples / config.training.prompts_per_step)
    )


def _evaluates(config: RunConfig, task: Task) -> bool:
    wanted = config.eval.before_and_after or config.eval.eval_steps is not None
    return wanted and task.has("get_eval_dataset")


def plan(prepared: Prepared) -> dict[str, Any]:
    """What a run would do: the resolved config, sizes, and the first prompt as the model would see it."""
    config, layout = prepared.config, prepared.layout
    sizes = plan_model(
        config.model,
        config.lora,
        dtype=layout.dtype,
        slots=layout.slots,
        key_length=layout.key_length,
        microbatch=layout.max_tokens_per_microbatch,
        needs_reference=build.build_algorithm(config).needs_reference,
    )
    rows = config.training.prompts_per_step * config.training.num_generations
    example, _ = prepared.prompts.drawn(0, config.training.seed, shuffle=config.data.shuffle)
    return {
        "config": {
            **resolved(config),
            "run": {**resolved(config)["run"], "name": prepared.loaded.run_name},
        },
        "plan": {
            "task": prepared.task.described,
            "examples": len(prepared.prompts.examples),
            "examples_dropped_as_too_long": prepared.prompts.dropped,
            "held_out_examples": len(prepared.held_out_prompts.examples)
            if prepared.held_out_prompts
            else 0,
            "steps": prepared.max_steps,
            "completions_per_step": rows,
            "most_tokens_sampled_per_step": rows * config.sampler.max_completion_length,
            "parameters": sizes.parameters,
            "parameters_trained": sizes.trained_parameters,
            "memory_mib": {
                **{key: round(value) for key, value in asdict(sizes.memory).items()},
                "total": round(sizes.memory.total),
            },
            "layout": asdict(layout),
            "first_prompt": rendered(prepared.tokenizer, example.prompt),
        },
    }


# --- the folder and resume -----------------------------------------------------------------------


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
    before = read_config(path)
    recorded = before.pop("_recorded", {})
    found = compare_for_resume(before, prepared.config)
    refused = {key: change for key, change in found.fixed.items() if key != "run.name"}
    if recorded.get("task") not in (None, prepared.task.spec or prepared.task.name):
        refused["--task-module"] = (recorded["task"], prepared.task.spec or prepared.task.name)
    if recorded.get("data") not in (None, prepared.data_fingerprint):
        refused["the training data (fingerprint)"] = (
            recorded["data"][:16],
            prepared.data_fingerprint[:16],
        )
    if refused:
        raise ResumeMismatchError(
            f"{path} was started with something else:\n"
            + "\n".join(
                f"  {key}: {old!r} then, {new!r} now" for key, (old, new) in refused.items()
            )
            + "\nGive what it was started with, or start another run with run.name=<another name>."
        )
    for key, (old, new) in found.warned.items():
        logger.warning(
            "resumed with another layout: %s was %r, is %r; results agree up to rounding",
            key,
            old,
            new,
        )
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
    }
    return RunFolder.create(
        Path(prepared.config.run.dir),
        prepared.loaded.run_name,
        _stored_config(prepared),
        facts,
        keep_tokens=keep,
    )


def _stored_config(prepared: Prepared) -> dict[str, Any]:
    recorded = {"task": prepared.task.spec or prepared.task.name, "data": prepared.data_fingerprint}
    return {**resolved(prepared.config), "_recorded": recorded}


# --- the run -------------------------------------------------------------------------------------


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
    try:
        with Interruption() as interruption, progress:
            progress.phase("loading")
            workers = asyncio.create_task(scorer.start())
            await asyncio.sleep(0)  # they start while the model is loaded
            run = await assemble(
                folder, prepared, point, scorer, progress, interruption, publications
            )
            await workers
            return await conduct(run, prepared, started)
    finally:
        await scorer.close()
        build.remove_publications(publications)


async def assemble(
    folder: RunFolder,
    prepared: Prepared,
    point: ResumePoint | None,
    scorer: Any,
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
    dropped = run.folder.store.rewind(run.step)
    run.folder.store.set_meta({"max_steps": run.max_steps, "layout": asdict(prepared.layout)})
    run.folder.resume(
        _stored_config(prepared), ResumeRecord(run.step, dropped, time.time(), point.changes)
    )
    run.progress.note(
        f"resumed after {run.step} steps; {dropped.steps} later steps are done again"
        if dropped.steps
        else f"resumed after {run.step} steps"
    )


async def conduct(run: Run, prepared: Prepared, started: float) -> RlResult:
    """Held-out prompts before, all steps, held-out prompts after; an interruption keeps what is whole."""
    try:
        before = await evaluated_once(run, BEFORE) if run.config.eval.before_and_after else None
        await train(run)
        after = await evaluated_once(run, AFTER) if run.config.eval.before_and_after else None
    except Interrupted as interrupted:
        keep_what_is_whole(run)
        summary = summarise(run, prepared, started, None, None)
        run.folder.finish("interrupted", summary)
        run.progress.note(f"interrupted after {run.step} steps; the same command with --resume goes on")
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


async def evaluated_once(run: Run, name: str) -> EvalResult | None:
    """The held-out result of that name: the recorded one where a resumed run has it already."""
    for record in run.folder.store.evaluations():
        if record.name == name:
            return EvalResult(
                record.policy, dict(record.metrics), {}, [dict(row) for row in record.rows]
            )
    return await evaluate_held_out(run, name)


def keep_what_is_whole(run: Run) -> None:
    """Groups that are scored, and a checkpoint of the last whole step."""
    run.folder.store.keep_unfinished(run.drawn.values())
    if run.step > 0:
        save_checkpoint(run)
    write_curve(run)


def write_final(run: Run, folder: Path) -> None:
    """The published weights and the tokenizer, as transformers, peft and vLLM load them."""
    shutil.copytree(run.policy.path, folder, dirs_exist_ok=True)
    run.tokenizer.save_pretrained(folder)


def write_curve(run: Run) -> None:
    """`reward.svg`, the reward of every step."""
    points = run.folder.store.metrics(["reward"]).get("reward", [])
    if points:
        drawn = svg_curve(with_mean("reward", points), title=f"{run.folder.name}: reward")
        run.folder.curve.write_text(drawn, encoding="utf-8")


def summarise(
    run: Run,
    prepared: Prepared,
    started: float,
    before: EvalResult | None,
    after: EvalResult | None,
) -> dict[str, Any]:
    """What a run amounts to, in a few lines."""
    rewards = [value for _, value in run.folder.store.metrics(["reward"]).get("reward", [])]
    ends = max(1, min(5, len(rewards) // 2))
    summary: dict[str, Any] = {
        "run": run.folder.name,
        "folder": str(run.folder.path),
        "task": prepared.task.name,
        "steps": run.step,
        "max_steps": run.max_steps,
        "policy": f"{run.folder.name}@{run.step}",
        "fingerprint": run.policy.fingerprint,
        "seconds": round(time.perf_counter() - started, 1),
    }
    if rewards:
        summary["reward_first"] = sum(rewards[:ends]) / ends
        summary["reward_last"] = sum(rewards[-ends:]) / ends
    if before and after:
        summary["held_out"] = compared(before, after)
    return summary


def compared(before: EvalResult, after: EvalResult) -> dict[str, Any]:
    """Held-out reward before and after, and the paired difference with its 95 % interval."""
    first, last = before.rewards, after.rewards
    both = sorted(first.keys() & last.keys())
    change = paired_difference([first[key] for key in both], [last[key] for key in both])
    names = [name for name in after.judged if name in before.judged]
    return {
        "prompts": len(both),
        "change": _as_dict(change),
        "rises": change.low > 0,
        "before": {name: _as_dict(before.interval(name)) for name in names},
        "after": {name: _as_dict(after.interval(name)) for name in names},
    }


def _as_dict(interval: Interval) -> dict[str, float]:
    return {"value": interval.value, "low": interval.low, "high": interval.high}
