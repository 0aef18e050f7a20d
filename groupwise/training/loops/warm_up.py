"""The supervised run that `warm_up` in a config of `groupwise rl` asks for.

It is a run of `groupwise sft` with the config given by `warm_up` (a file, or its sections) and the model of the RL config. A finished run
of the same config, task and data is reused under any name, so many RL runs can start from one warm-up. An unfinished one is resumed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupwise.core.errors import StoreError, UsageError
from groupwise.engine.distributed.torchrun import read_torchrun_rank
from groupwise.runs import checkpoints, find
from groupwise.runs.curves import WARM_UP, WARM_UP_SUMMARY
from groupwise.runs.folder import CHECKPOINTS, RECORD, read_config, read_summary
from groupwise.runs.store import Store
from groupwise.tasks.data.overlap import same_prompt
from groupwise.training.assembly.prepare import expected_ranks
from groupwise.training.config import LoadedConfig, compare_for_resume
from groupwise.training.evaluation.evaluate import EvalResult, evaluate_untrained
from groupwise.training.loops.resume import FIXED_FACTS
from groupwise.training.loops.sft_prepare import SftPrepared, plan_sft, prepare_sft
from groupwise.training.loops.sft_start import KIND, sft
from groupwise.training.loops.start import StartMode, TrainingResult
from groupwise.training.sft_config import LoadedSftConfig, SftConfig, config_of_warm_up

logger = logging.getLogger(__name__)

SUMMARY_KEYS = (
    "run",
    "policy",
    "steps",
    "loss_first",
    "loss_last",
    "seconds",
    "stopped_early",
    "stopped",
    "stopped_by",
)
"""Keys of the warm-up's summary that are copied into the summary of both stages."""


@dataclass(frozen=True, slots=True)
class WarmUpResult:
    """The result of a warm-up."""

    run: str | None = None
    """Path of the run to start from; None if it was interrupted or only planned."""
    summary: dict[str, Any] = field(default_factory=dict[str, Any])
    """Summary for people: that of the run, or its plan."""
    interrupted: TrainingResult | None = None
    prompts: frozenset[str] = frozenset()
    """The `prompt_key` of the prompts that it trains on."""
    untrained: EvalResult | None = None
    """The evaluation of the model on held-out prompts before any training."""

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for the record of the RL run that starts from the warm-up."""
        if self.run is None:
            return {}
        return {WARM_UP: Path(self.run).name, WARM_UP_SUMMARY: self.summary}


def warm_up(loaded: LoadedConfig, task: object, *, dry_run: bool) -> WarmUpResult:
    """Find, resume or make the supervised run that a new run starts from. With `dry_run`, only find or plan it.

    Raises the errors of `groupwise sft`.
    """
    sft_loaded = config_of_warm_up(loaded)
    with nullcontext() if dry_run else expected_ranks(sft_loaded.config):
        prepared = prepare_sft(sft_loaded, task)
    examples = [lesson.example for lesson in prepared.lessons.lessons]
    prompts = frozenset(same_prompt(example) for example in examples if example.prompt)
    # The newest run of the same config, task and data; finished runs come first.
    runs = Path(prepared.config.run.dir)
    paths = [path for path in find.run_folders(runs) if _has_same_inputs(path, prepared)]
    run_folder = max(
        paths,
        key=lambda path: (_is_finished(path), find.run_info(path).started or 0.0),
        default=None,
    )
    if run_folder is not None and _is_finished(run_folder):
        logger.info(
            "warm-up: the run %s was made from the same config, task and data", run_folder.name
        )
        summary = {**_short_summary(read_summary(run_folder) or {}), "reused": True}
        return WarmUpResult(
            str(run_folder),
            summary,
            prompts=prompts,
            untrained=None if dry_run else _evaluate_untrained(loaded, task),
        )
    if dry_run:
        return WarmUpResult(None, plan_sft(prepared), prompts=prompts)
    if read_torchrun_rank() is not None:
        raise UsageError(
            "The processes that torchrun has started serve one run, so that warm_up cannot be made here. Make it first, by groupwise sft "
            "with the same config: it is found then."
        )
    if run_folder is None:
        # An unfinished run of that name may still be resumed, so a new one gets a number.
        runs, name, number = Path(sft_loaded.config.run.dir), sft_loaded.run_name, 1
        while (runs / name / RECORD).is_file() and not _is_finished(runs / name):
            number += 1
            name = f"{sft_loaded.run_name}-{number}"
        logger.info("warm-up: at most %d supervised steps, as the run %s", prepared.max_steps, name)
        result = sft(_with_name(sft_loaded, name), task)
    elif checkpoints.newest(run_folder / CHECKPOINTS) is not None:
        result = sft(sft_loaded.config, task, resume_from=str(run_folder))
    else:  # the run was interrupted before its first checkpoint
        result = sft(_with_name(sft_loaded, run_folder.name), task, resume=True)
    if result.exit_code:
        return WarmUpResult(None, interrupted=result)
    return WarmUpResult(
        str(result.folder),
        _short_summary(result.summary),
        prompts=prompts,
        untrained=_evaluate_untrained(loaded, task),
    )


def _with_name(loaded: LoadedSftConfig, name: str) -> SftConfig:
    run = loaded.config.run.model_copy(update={"name": name})
    return loaded.config.model_copy(update={"run": run})


def _evaluate_untrained(loaded: LoadedConfig, task: object) -> EvalResult | None:
    # The processes of torchrun can serve only one run, the RL run.
    if read_torchrun_rank() is not None:
        return None
    logger.info("held-out prompts, answered by the model as it was before the warm-up")
    return evaluate_untrained(loaded, task)


def needs_warm_up(loaded: LoadedConfig, mode: StartMode) -> bool:
    """True if a run starts with its warm-up. A resumed run does if its earlier attempt was interrupted during the warm-up."""
    if not mode.resume:
        return mode == StartMode()
    runs = Path(loaded.config.run.dir)
    states = [facts.get("state") for _, facts in find.runs_called(loaded.run_name, runs)]
    if any(state != "finished" for state in states):
        return False
    warm_ups = find.runs_called(config_of_warm_up(loaded).run_name, runs)
    return not states or any(facts.get("state") != "finished" for _, facts in warm_ups)


def _has_same_inputs(path: Path, prepared: SftPrepared) -> bool:
    """True if a run was made with the same config (except its section `run`), task files, data and base model."""
    try:
        facts, config = Store.facts(path / RECORD), read_config(path)
    except (StoreError, OSError, ValueError):
        return False
    if facts.get("kind") != KIND or facts.get("init_from"):
        return False
    compared_facts = [*FIXED_FACTS.values(), "task_file"]
    if any(facts.get(name) != prepared.facts.get(name) for name in compared_facts):
        return False
    differences = compare_for_resume(config, prepared.config)
    changed_keys = [*differences.free, *differences.warned, *differences.fixed]
    return all(key.startswith("run.") for key in changed_keys)


def _is_finished(path: Path) -> bool:
    return Store.facts(path / RECORD).get("state") == "finished"


def _short_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {key: summary[key] for key in SUMMARY_KEYS if key in summary}
