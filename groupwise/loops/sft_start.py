"""The command `groupwise sft`, from what a user gives to how the run ended.

It goes the way of `groupwise rl`: check everything, build, take a resumed run back to its last checkpoint, train, and leave a folder that
says how it ended. From there `groupwise rl --init-from RUN` goes on.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from groupwise import build
from groupwise.callbacks.base import Callbacks, RunEnd
from groupwise.display.plot import svg_curve, with_mean
from groupwise.display.progress import Progress
from groupwise.errors import UsageError
from groupwise.loops.awaiting import run_to_end
from groupwise.loops.interruption import Interrupted, Interruption
from groupwise.loops.prepare import ROWS_READ, starting_from
from groupwise.loops.resume import (
    NOT_WEIGHTS,
    ResumePoint,
    accepted_changes,
    find_resume_point,
    keep_start,
    open_folder,
    start_to_keep,
    take_back,
    with_start_of,
)
from groupwise.loops.sft import SftRun, save, train
from groupwise.loops.sft_prepare import SftPrepared, plan_sft, prepare_sft
from groupwise.loops.start import (
    check_one_start,
    ended_early,
    failed,
    shown_warnings,
    starting_weights,
)
from groupwise.models.tokens import unannounced
from groupwise.runs import checkpoints, durable, find
from groupwise.runs.folder import RunFolder
from groupwise.sft_config import LoadedSftConfig, SftConfig, load_sft_config
from groupwise.types import Policy

logger = logging.getLogger(__name__)

KIND = "sft"
CURVE = "loss.svg"


@dataclass(frozen=True, slots=True)
class SftResult:
    """How a supervised run ended."""

    summary: dict[str, Any]
    """For people and `--json`: run, state, steps, losses, folders."""
    folder: Path
    """The run folder; after a dry run, where it would have been."""
    exit_code: int = 0
    """0 done; 130 or 143 interrupted after a clean checkpoint."""


def sft(
    config: Path | str | Mapping[str, Any] | SftConfig,
    task: object,
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
    resume_from: str | None = None,
    init_from: str | None = None,
    dry_run: bool = False,
) -> SftResult:
    """Train on the given answers of a task: the command `groupwise sft`.

    `resume` goes on with the newest unfinished run of the config's name, `resume_from` (`RUN@STEP`) with that checkpoint; `init_from`
    starts a new run from the weights of a run or adapter folder. Raises `UsageError` for what was given wrongly, `RunError` if the
    run failed on its way.
    """
    check_one_start({"--resume": resume, "--resume-from": resume_from, "--init-from": init_from})
    loaded = load_sft_config(config, overrides)
    point = find_resume_point(loaded, resume, resume_from, KIND)
    start = start_to_keep(point) if point else starting_weights(loaded, init_from)
    if point is not None:
        loaded = cast("LoadedSftConfig", with_start_of(loaded, point))
    if start is not None:
        loaded = cast("LoadedSftConfig", starting_from(loaded, start))
    prepared = prepare_sft(loaded, task, point.facts.get(ROWS_READ) if point else None)
    changes = accepted_changes(point, prepared) if point else {}
    if dry_run:
        return SftResult(plan_sft(prepared), Path(prepared.config.run.dir) / loaded.run_name)
    folder = open_folder(prepared, point, _facts(prepared, init_from))
    try:
        with folder:
            if start is not None:
                kept = keep_start(folder, prepared.loaded, start)
                prepared = replace(prepared, loaded=cast("LoadedSftConfig", kept))
            return run_to_end(_run_in(folder, prepared, point, changes))
    except UsageError:
        if point is None and not find.run_info(folder.path).steps:
            durable.remove_folder(folder.path)  # nothing was started, so nothing stands in the way
        raise


def _facts(prepared: SftPrepared, init_from: str | None) -> dict[str, Any]:
    """What a new run notes about itself, beside the fingerprints of `SftPrepared.facts`."""
    return {
        "kind": KIND,
        "model": prepared.config.model.name,
        "task_module": prepared.task.spec,
        "examples": len(prepared.lessons.lessons),
        "rows_dropped_as_too_long": prepared.lessons.dropped,
        "init_from": init_from,
    }


async def _run_in(
    folder: RunFolder, prepared: SftPrepared, point: ResumePoint | None, changes: Mapping[str, Any]
) -> SftResult:
    """Build the learner, train, and leave the folder with what came of it."""
    started = time.perf_counter()
    progress = Progress(
        folder.name,
        prepared.max_steps,
        start_step=point.step if point else 0,
        logging_steps=prepared.config.run.logging_steps,
    )
    callbacks = Callbacks(prepared.callbacks)
    try:
        with Interruption() as interruption, progress, shown_warnings(progress):
            progress.phase("loading")
            run = _assemble(folder, prepared, progress, interruption)
            run.callbacks = callbacks
            if point is not None:
                take_back(run, prepared, point, changes)
                _look_anew_if_changed(run, prepared)
            _say_what_begins(run, prepared)
            return await _conduct(run, prepared, started)
    finally:
        callbacks.close()


def _assemble(
    folder: RunFolder, prepared: SftPrepared, progress: Progress, interruption: Interruption
) -> SftRun:
    """The run at its first step."""
    config = prepared.config
    unused = folder.path / "published"  # nothing samples, so nothing is published
    return SftRun(
        config=config,
        max_steps=prepared.max_steps,
        learner=build.supervised_learner(config, prepared.layout, folder.name, unused),
        tokenizer=prepared.tokenizer,
        folder=folder,
        progress=progress,
        interruption=interruption,
        policy=Policy(folder.name, 0, "", "adapter" if config.lora else "full", ""),
        lessons=prepared.lessons,
        max_draws=prepared.max_draws,
        held_out=prepared.held_out,
        eval_steps=prepared.eval_steps,
    )


def _look_anew_if_changed(run: SftRun, prepared: SftPrepared) -> None:
    """Losses on other held-out rows do not compare: the best step is looked for anew."""
    store, now = run.folder.store, prepared.facts["held_out"]
    if store.get_meta().get("held_out") == now:
        return
    store.set_meta({"held_out": now})
    run.best = run.to_beat = run.evaluated_step = None
    run.not_better = 0
    run.say("the held-out rows were changed: the best step is looked for anew")


def _say_what_begins(run: SftRun, prepared: SftPrepared) -> None:
    """The first lines of the log, and what a reader should know."""
    lessons = prepared.lessons
    logger.info(
        "%s, %s: steps %d to %d, %d examples",
        run.config.model.name,
        prepared.task.described,
        run.step,
        run.max_steps,
        len(lessons.lessons),
    )
    if lessons.cut or lessons.dropped:
        limit = run.config.data.max_length or "the model's longest text"
        run.say(
            f"rows longer than {limit} tokens (data.max_length): {lessons.cut} were cut, {lessons.dropped} are left out"
        )
    if warning := unannounced(prepared.tokenizer, lessons.lessons[0].example.prompt):
        logger.warning(warning)
    if lessons.without_end:
        logger.warning(
            "%d turns or completions are trained without a token that ends them: the model will not learn to stop there. "
            "Look at the first rows that --dry-run shows, and at the chat template or the tokenizer's end token",
            lessons.without_end,
        )


async def _conduct(run: SftRun, prepared: SftPrepared, started: float) -> SftResult:
    """All steps, then the final weights; an interruption keeps what is whole."""
    try:
        await run.callbacks.begin(run)
        await train(run)
    except Interrupted as interrupted:
        if run.step > 0:
            await save(run)
        return await _ended(run, prepared, started, "interrupted", interrupted.exit_code)
    except Exception as error:
        await failed(run, error)
        raise
    await save(run)
    run.folder.write_final(lambda folder: _write_final(run, folder))
    return await _ended(run, prepared, started, "finished", 0)


def _write_final(run: SftRun, folder: Path) -> None:
    """The last weights, or the best ones, and the tokenizer, as transformers, peft and vLLM load them."""
    source = run.folder.checkpoints / f"step-{_final_step(run)}"
    ignored = shutil.ignore_patterns(*NOT_WEIGHTS)
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=ignored)
    run.tokenizer.save_pretrained(folder)


def _final_step(run: SftRun) -> int:
    """After which step the final weights are; the last one where the best checkpoint is gone."""
    if not run.config.eval.load_best_model_at_end or run.best is None:
        return run.step
    kept = [checkpoint.step for checkpoint in checkpoints.complete(run.folder.checkpoints)]
    if run.best.step in kept:
        return run.best.step
    run.say(f"warning: the best checkpoint, step-{run.best.step}, is gone: final/ has the last one")
    return run.step


async def _ended(
    run: SftRun,
    prepared: SftPrepared,
    started: float,
    state: Literal["finished", "interrupted"],
    exit_code: int,
) -> SftResult:
    """Leave curve and summary, and record the state."""
    _write_curve(run)
    summary = {**_summarise(run, prepared, started), **ended_early(run)}
    run.folder.finish(state, summary)
    await run.callbacks.end(RunEnd(state, summary))
    if state == "finished":
        logger.info("finished after %d steps", run.step)
    else:
        run.say(f"interrupted after {run.step} steps; the same command with --resume goes on")
    return SftResult({**summary, "state": state}, run.folder.path, exit_code)


def _write_curve(run: SftRun) -> None:
    """`loss.svg`, the loss of every step."""
    points = run.folder.store.metrics(["loss"]).get("loss", [])
    if points:
        drawn = svg_curve(with_mean("loss", points), title=f"{run.folder.name}: loss")
        durable.write_file(run.folder.path / CURVE, drawn.encode())


def _summarise(run: SftRun, prepared: SftPrepared, started: float) -> dict[str, Any]:
    """What a run amounts to, in a few lines."""
    losses = [value for _, value in run.folder.store.metrics(["loss"]).get("loss", [])]
    first, last = find.reward_ends(losses)
    summary: dict[str, Any] = {
        "run": run.folder.name,
        "folder": str(run.folder.path),
        "task": prepared.task.name,
        "steps": run.step,
        "max_steps": run.max_steps,
        "policy": f"{run.folder.name}@{run.step}",
        "seconds": round(time.perf_counter() - started, 1),
        "loss_first": first,
        "loss_last": last,
    }
    found = run.folder.store.evaluations(rows=False)
    evaluated = [record.metrics["eval_loss"] for record in found]
    if evaluated:
        summary |= {"eval_loss_first": evaluated[0], "eval_loss_last": evaluated[-1]}
    if run.best is not None:
        summary |= {"eval_loss_best": run.best.loss, "best_step": run.best.step}
    if run.gave_up and run.step < run.max_steps:
        summary["stopped_early"] = True
    return summary
