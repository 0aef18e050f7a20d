"""Everything that can be found out before a model is loaded: config, task, data, prompts, sizes.

What is wrong with any of them is a `UsageError` here, and a dry run ends here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from groupwise import build
from groupwise.build import Layout
from groupwise.config import LoadedConfig, RunConfig, load_config, resolved, view, with_task_schema
from groupwise.data.examples import fingerprint
from groupwise.loops.evaluate import held_out_prompts
from groupwise.loops.policies import find_policy
from groupwise.models.plan import plan_model, prompt_room
from groupwise.models.tokenizer import load_tokenizer
from groupwise.models.tokens import rendered
from groupwise.rollouts.prompts import PromptSet, tokenise
from groupwise.tasks.contract import Task, check_reward_columns, load_task, require


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
    folder = find_policy(reference, Path(loaded.config.run.dir)).folder
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
