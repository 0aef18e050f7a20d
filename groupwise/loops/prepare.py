"""Everything that can be found out before a model is loaded: config, task, data, prompts, sizes.

What is wrong with any of them is a `UsageError` here, and a dry run ends here.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from groupwise import build
from groupwise.build import Layout
from groupwise.callbacks.registry import Named, configured_callbacks
from groupwise.config import LoadedConfig, RunConfig, resolved, view, with_task_schema
from groupwise.data.examples import fingerprint
from groupwise.errors import ConfigError, TaskError
from groupwise.loops.awaiting import run_to_end
from groupwise.loops.evaluate import check_success_part, held_out_prompts
from groupwise.loops.profiling import check_profiled_steps
from groupwise.models.adapters import check_adapter
from groupwise.models.identity import identity
from groupwise.models.plan import ModelPlan, plan_model, prompt_room
from groupwise.models.tokenizer import load_tokenizer
from groupwise.models.tokens import rendered, unannounced
from groupwise.rewards.rubric import Rubric
from groupwise.rollouts.prompts import PromptSet, tokenise
from groupwise.tasks.contract import Task, check_reward_columns, load_task, require
from groupwise.types import Example

ROWS_READ = "rows_read"
"""The fact about a run that says how many rows of a stream without a length it reads."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that is checked but not built."""

    loaded: LoadedConfig
    task: Task
    tokenizer: Any
    prompts: PromptSet
    held_out_prompts: PromptSet | None
    rubric: Rubric | None
    max_steps: int
    layout: Layout
    facts: dict[str, Any]
    """Fingerprints of what the config only names: task, its file, the data as token ids, how held-out prompts are answered;
    how many rows of a stream were read."""
    callbacks: tuple[Named, ...] = ()
    """Those of the config; the task's own are made where the run's folder is known."""

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @property
    def run_name(self) -> str:
        return self.loaded.run_name


def prepare(loaded: LoadedConfig, task: object, rows_read: int | None = None) -> Prepared:
    """Check task and data against the config; tokenise all prompts.

    `rows_read` is how many rows of an endless stream the run began with, where it goes on: its examples are the same ones for all of
    its steps, however many there will be.
    """
    found = load_task(task)
    require(found, "rl")
    schema = found.config_schema()
    if schema is not None:
        loaded = with_task_schema(loaded, schema)
    settings = loaded.config
    check_start(loaded)
    _refuse_evaluation_of_nothing(settings, found)
    given = view(settings)
    rows_read = rows_read or _draws(settings)
    examples = found.rl_examples(given, limit=rows_read)
    tokenizer = load_tokenizer(settings.model)
    callbacks = configured_callbacks(settings.callbacks, given, loaded.tree.origin(("callbacks",)))
    rubric = build.task_rubric(settings, found, tokenizer)
    in_workers = build.scores_in_workers(settings, found, rubric)
    check_reward_columns(found, rubric, examples, in_workers=in_workers)
    _check_algorithm(settings, rubric)
    tools = build.check_rollouts(settings, found, examples)
    room = prompt_room(settings.model, build.longest_completion(settings))
    prompts = tokenise(
        tokenizer,
        examples,
        max_prompt_length=settings.data.max_prompt_length,
        room=room,
        where=f"{found.described}: get_rl_dataset",
        tools=tools,
    )
    asked = None
    if _evaluates(settings, found):
        asked = held_out_prompts(settings, found, tokenizer, room)
        check_success_part(settings, found, rubric)
        check_reward_columns(found, rubric, asked.examples, in_workers=in_workers)
    max_steps = _max_steps(settings, len(prompts.examples))
    check_profiled_steps(settings.run, max_steps)
    return Prepared(
        loaded=loaded,
        task=found,
        tokenizer=tokenizer,
        prompts=prompts,
        held_out_prompts=asked,
        rubric=rubric,
        max_steps=max_steps,
        layout=build.choose_layout(settings, max(prompts.longest, asked.longest if asked else 0)),
        facts=_facts(settings, found, prompts, asked, rows_read),
        callbacks=callbacks,
    )


def check_start(loaded: LoadedConfig) -> None:
    """Raise `ModelError` if the run cannot start from its adapter, called as the user gave it."""
    model, lora = loaded.config.model, loaded.config.lora
    in_config = loaded.tree.value(("model", "adapter")) == model.adapter
    check_adapter(model, lora, "model.adapter" if in_config else "--init-from")


def starting_from(loaded: LoadedConfig, folder: Path) -> LoadedConfig:
    """The config of a run that begins with the weights in a folder: an adapter, or a whole model."""
    return with_model(loaded, {key_of_weights(folder): str(folder)})


def key_of_weights(folder: Path) -> Literal["adapter", "name"]:
    """The key of the `model` section that names such weights: those of an adapter, or a whole model."""
    return "adapter" if (folder / "adapter_config.json").is_file() else "name"


def with_model(loaded: LoadedConfig, update: Mapping[str, Any]) -> LoadedConfig:
    """The config with keys of its `model` section replaced."""
    model = loaded.config.model.model_copy(update=dict(update))
    return replace(loaded, config=loaded.config.model_copy(update={"model": model}))


def _facts(
    config: RunConfig,
    task: Task,
    prompts: PromptSet,
    asked: PromptSet | None,
    rows_read: int | None,
) -> dict[str, Any]:
    held_out = [
        config.eval.model_dump(mode="json", exclude={"eval_steps", "before_and_after"}),
        config.sampler.model_dump(mode="json", exclude={"slots"}),
    ]
    return {
        **task_facts(task),
        "data": digest(fingerprint(prompts.examples), prompts.prompts),
        "held_out": digest(held_out, asked.prompts if asked else ()),
        ROWS_READ: rows_read,
        "base": identity(config.model),
    }


def task_facts(task: Task) -> dict[str, str]:
    """The task's name, and a fingerprint of its file."""
    file = Path(task.file) if task.file else None
    return {
        "task": task.name,
        "task_file": digest(file.read_text(errors="replace")) if file and file.is_file() else "",
    }


def digest(*parts: Any) -> str:
    """A short fingerprint of plain values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _refuse_evaluation_of_nothing(config: RunConfig, task: Task) -> None:
    if config.eval.eval_steps is not None and not task.has("get_eval_dataset"):
        raise TaskError(
            f"eval.eval_steps is {config.eval.eval_steps}, but {task.described} has no get_eval_dataset, so there is "
            "nothing to evaluate on. Leave the key out, or add the hook."
        )


def _check_algorithm(config: RunConfig, rubric: Rubric | None) -> None:
    longest = build.longest_written(config)
    try:
        build.build_algorithm(config).check(longest, rubric.names if rubric else ())
    except ValueError as error:
        raise ConfigError(str(error)) from None


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


def planned_sizes(config: RunConfig, layout: Layout) -> ModelPlan:
    """Parameters and memory of a run in this layout."""
    return plan_model(
        config.model,
        config.lora,
        dtype=layout.dtype,
        slots=layout.slots,
        key_length=layout.key_length,
        microbatch=layout.max_tokens_per_microbatch,
        needs_reference=build.build_algorithm(config).needs_reference,
        device=layout.device,
    )


def plan(prepared: Prepared) -> dict[str, Any]:
    """What a run would do: the resolved config, sizes, and the first prompt as the model would see it."""
    config, layout = prepared.config, prepared.layout
    sizes = planned_sizes(config, layout)
    rows = config.training.prompts_per_step * config.training.num_generations
    example, _ = prepared.prompts.drawn(0, config.training.seed, shuffle=config.data.shuffle)
    warning = unannounced(prepared.tokenizer, example.prompt)
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
            "most_tokens_sampled_per_step": rows * build.longest_written(config),
            "parameters": sizes.parameters,
            "parameters_trained": sizes.trained_parameters,
            "memory_mib": {
                **{key: round(value) for key, value in asdict(sizes.memory).items()},
                "total": round(sizes.memory.total),
            },
            "layout": asdict(layout),
            "warnings": [warning] if warning else [],
            "first_prompt": _first_prompt(prepared, example),
        },
    }


def _first_prompt(prepared: Prepared, example: Example) -> str:
    """An example's first prompt, which tools and environments have a part in."""
    config, tokenizer, room = prepared.config, prepared.tokenizer, prepared.layout.key_length
    (ids,) = run_to_end(build.first_prompts(config, prepared.task, tokenizer, [example], room))
    return rendered(tokenizer, ids)
