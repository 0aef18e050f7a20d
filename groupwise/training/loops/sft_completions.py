"""Draws and scores completions of a supervised run's policy at each evaluation, as `groupwise rl` would.

A warm-up is complete when its completions have the form that the rewards can read, and completions of a prompt still differ. The loss on
given answers does not show this. `prepare_completions` reads config, task and prompts before a model is loaded; `Completions` draws,
scores and measures:

    reward, rewards/NAME/mean, pass@k …   as in evaluations, at the temperature of the RL config
    groups/with_signal                    share of prompts whose completions earn different rewards, which RL can learn from
    groups/distinct                       share of the completions of a prompt that are different, on average
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from groupwise.algorithms.advantages import all_equal
from groupwise.core.reward_call.request import Scorer
from groupwise.core.types import Learner, Policy, Sampler
from groupwise.runs.advice import DISTINCT
from groupwise.tasks.contract import Task, require
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.tasks.rollouts.prompts import PromptSet
from groupwise.training import placement, rollout_builder
from groupwise.training.assembly import prepare
from groupwise.training.config import RunConfig, load_config, with_task_schema
from groupwise.training.evaluation.evaluate import (
    HeldOut,
    answer_held_out,
    check_success_part,
    held_out_prompts,
)
from groupwise.training.evaluation.measures import by_prompt, distinct_share
from groupwise.training.placement import Layout
from groupwise.training.sft_config import LoadedSftConfig

WITH_SIGNAL = "groups/with_signal"


@dataclass(frozen=True, slots=True)
class PreparedPrompts:
    """The prompts for which completions are drawn, with the config to draw and score them; prepared before a model is loaded."""

    config: RunConfig
    """The RL run's config, with the model and the adapter of the supervised run."""
    prompts: PromptSet
    rubric: Rubric | None
    layout: Layout


def prepare_completions(
    loaded: LoadedSftConfig, task: Task, tokenizer: Any, layout: Layout
) -> PreparedPrompts | None:
    """Prepare the prompts; None if no completions are configured. Raises UsageError for a task without prompts or rewards."""
    completions_config = loaded.config.eval.completions
    if completions_config is None:
        return None
    require(task, "eval")
    config, completions_config = loaded.config, loaded.config.eval.completions
    assert completions_config is not None
    rl_config: dict[str, Any] = (
        completions_config.rl if isinstance(completions_config.rl, dict) else {}
    )
    if isinstance(completions_config.rl, str):
        base_folder = loaded.path.parent if loaded.path else Path()
        rl_config = load_config(base_folder / completions_config.rl).config.model_dump(
            mode="json", exclude_unset=True
        )
    sft_values = config.model_dump(mode="json", exclude_unset=True)
    shared_sections = {
        name: sft_values[name]
        for name in ("model", "lora", "run", "distributed")
        if name in sft_values
    }
    sections: dict[str, Any] = {**rl_config, **shared_sections, "warm_up": None}
    sections.setdefault("task", sft_values.get("task", {}))
    # The sampler uses the learner's weights, so these settings must be the learner's.
    sft_training = config.training
    keys = ("seed", "gradient_checkpointing", "packing", "max_tokens_per_microbatch")
    training = {**sections.get("training", {}), **{key: getattr(sft_training, key) for key in keys}}
    temperature = sections.get("sampler", {}).get("temperature", 1.0)
    evaluation = {
        **sections.get("eval", {}),
        "max_prompts": completions_config.max_prompts,
        "samples_per_prompt": completions_config.num_generations,
        "temperature": temperature,
        "pass_at_k": None,
    }
    loaded_rl = load_config({**sections, "training": training, "eval": evaluation})
    config = with_task_schema(loaded_rl, task.config_schema()).config
    room = prepare.prompt_room(config.model, rollout_builder.longest_completion(config))
    prompts = held_out_prompts(config, task, tokenizer, room)
    rubric = rollout_builder.task_rubric(config, task, tokenizer)
    check_success_part(config, task, rubric)
    drawing = placement.choose_layout(config, prompts.longest)
    drawing = replace(drawing, max_tokens_per_microbatch=layout.max_tokens_per_microbatch)
    return PreparedPrompts(config, prompts, rubric, drawing)


@dataclass(slots=True, kw_only=True)
class Completions:
    """Draws completions at an evaluation, scores them and computes metrics."""

    held_out: HeldOut
    sampler: Sampler
    scorer: Scorer
    tokenizer: Any

    async def measure(
        self,
        learner: Learner,
        policy: Policy,
        step: int,
        max_steps: int,
        on_progress: Callable[[int, int], None],
    ) -> dict[str, float]:
        """Metrics of the current policy, which is that after `step` steps."""
        published = await learner.publish(policy.version)
        await self.sampler.load(published)
        result = await answer_held_out(
            self.held_out,
            self.sampler,
            self.scorer,
            self.tokenizer,
            f"{policy.run}@{step}",
            on_progress=on_progress,
            trainer=(step, max_steps, None),
        )
        return {**result.metrics, **spread(result.rows)}


def spread(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of how much the completions of a prompt differ, over all prompts with at least two scored completions."""
    groups = [
        [row for row in samples if row["reward"] is not None]
        for samples in by_prompt(rows).values()
    ]
    groups = [samples for samples in groups if len(samples) > 1]
    if not groups:
        return {}
    return {
        WITH_SIGNAL: fmean(not all_equal([row["reward"] for row in samples]) for samples in groups),
        DISTINCT: fmean(
            distinct_share([row["completion"] for row in samples]) for samples in groups
        ),
    }
