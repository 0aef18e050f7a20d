"""Checks and prepares a run of `groupwise sft` before a model is loaded: config, task, rows, masks, sizes.

Any mistake in them raises a `UsageError` here, and a dry run ends here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.core.errors import ConfigError, TaskError
from groupwise.core.settings.view import View
from groupwise.engine.distributed import prefork
from groupwise.engine.models.chat_masks import MaskedRow
from groupwise.engine.models.identity import identity
from groupwise.engine.models.plan import ModelPlan, largest_microbatch, plan_model
from groupwise.runs.advice import DISTINCT
from groupwise.tasks.configured import find_task
from groupwise.tasks.contract import Task, require
from groupwise.tasks.data.chat import Account
from groupwise.tasks.data.order import Order
from groupwise.tasks.data.overlap import prompt_key, warning_of_overlap
from groupwise.tasks.rollouts.teacher import Lesson, LessonSet, TeacherOptions, read_lessons
from groupwise.training import placement
from groupwise.training.assembly import prepare
from groupwise.training.callbacks.registry import configured_callbacks
from groupwise.training.config import resolved_values, with_task_schema
from groupwise.training.evaluation.measures import CLIPPED, LENGTH, REWARD, measure
from groupwise.training.loops.prepare import (
    ROWS_READ,
    Prepared,
    check_start,
    digest,
    draws_per_epoch,
    order_of,
    plan_of,
    prompt_warnings,
    task_facts,
)
from groupwise.training.loops.profiling import check_profiled_steps
from groupwise.training.loops.sft_completions import (
    WITH_SIGNAL,
    PreparedPrompts,
    prepare_completions,
)
from groupwise.training.placement import Layout
from groupwise.training.sft_config import LoadedSftConfig, SftConfig, parse_condition

LOSS_METRICS = ("eval_loss", "perplexity", "eval_tokens", "eval_mean_token_accuracy")
"""The metrics of held-out rows."""
TRAINED_MARKS = ("⟦", "⟧")
"""Marks around the trained tokens when a row is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftPrepared(Prepared):
    """A supervised run that is checked but not built."""

    loaded: LoadedSftConfig
    lessons: LessonSet
    order: Order
    """The order in which examples are drawn."""
    held_out: LessonSet | None
    max_draws: int | None
    """Number of examples drawn in all steps together, if the length is given in epochs; otherwise None."""
    completion_prompts: PreparedPrompts | None = None
    """Prompts for the completions that evaluations draw; None if they draw none."""

    @property
    def config(self) -> SftConfig:
        return self.loaded.config

    @property
    def eval_steps(self) -> int:
        """Number of steps between evaluations; by default one epoch."""
        epoch = -(-self.order.length // self.config.training.examples_per_step)
        return self.config.eval.eval_steps or epoch


def prepare_sft(loaded: LoadedSftConfig, task: object, rows_read: int | None = None) -> SftPrepared:
    """Check task and rows against the config; tokenise and mask all rows.

    For `rows_read`, see `groupwise.training.loops.rl_prepare.prepare_rl`.
    """
    resolved_task = find_task(task, View(resolved_values(loaded.config)))
    require(resolved_task, "sft")
    loaded = with_task_schema(loaded, resolved_task.config_schema())
    config = loaded.config
    check_start(loaded)
    tokenizer = prefork.load_tokenizer(config.model)
    # None if the number of epochs decides, which requires a stream with an end.
    steps = config.training.max_steps
    rows_read = rows_read or (steps and steps * config.training.examples_per_step)
    lessons = _read_hook(config, resolved_task, tokenizer, "get_sft_dataset", rows_read)
    assert lessons is not None, "an empty dataset is an error"
    held_out = None
    if resolved_task.has("get_sft_eval_dataset"):
        limit = config.eval.max_examples
        held_out = _read_hook(config, resolved_task, tokenizer, "get_sft_eval_dataset", limit)
    if held_out is None and config.eval.completions is None:
        _refuse_evaluation_keys(config, resolved_task)
    _check_conditions(config, resolved_task, has_held_out=held_out is not None)
    facts = {
        **task_facts(resolved_task),
        "data": _lessons_fingerprint(lessons),
        "held_out": _lessons_fingerprint(held_out) if held_out else "",
        "base": identity(config.model),
        ROWS_READ: rows_read,
    }
    rows = [lesson.example.index for lesson in lessons.lessons]
    order = order_of(resolved_task, "get_sft_dataset", rows, config)
    epochs = config.training.num_train_epochs
    max_draws = None if epochs is None else max(1, math.ceil(epochs * order.length))
    config_view, origin = View(resolved_values(config)), loaded.tree.origin(("callbacks",))
    layout = placement.supervised_layout(config)
    if max_draws is None:
        assert config.training.max_steps is not None
        max_steps = config.training.max_steps
    else:
        max_steps = -(-max_draws // config.training.examples_per_step)
    prepared = SftPrepared(
        loaded=loaded,
        task=resolved_task,
        tokenizer=tokenizer,
        max_steps=max_steps,
        layout=layout,
        facts=facts,
        callbacks=configured_callbacks(config.callbacks, config_view, origin),
        lessons=lessons,
        order=order,
        held_out=held_out,
        max_draws=max_draws,
        completion_prompts=prepare_completions(loaded, resolved_task, tokenizer, layout),
    )
    check_profiled_steps(config.run, prepared.max_steps)
    return prepared


def _refuse_evaluation_keys(config: SftConfig, task: Task) -> None:
    """Raise TaskError for keys that need held-out rows, because the task has none."""
    evaluation_keys = {
        "eval.eval_steps": config.eval.eval_steps,
        "eval.early_stopping_patience": config.eval.early_stopping_patience,
        "eval.load_best_model_at_end": config.eval.load_best_model_at_end or None,
        "training.stop_when": config.training.stop_when or None,
    }
    keys = [key for key, value in evaluation_keys.items() if value is not None]
    if keys:
        problem = "returns None from" if task.has("get_sft_eval_dataset") else "has no"
        raise TaskError(
            f"{' and '.join(keys)} {'is' if len(keys) == 1 else 'are'} set, but {task.described} {problem} "
            "get_sft_eval_dataset, so there is nothing to evaluate on. Leave the key out, or add the hook."
        )


def _check_conditions(config: SftConfig, task: Task, *, has_held_out: bool) -> None:
    """Raise ConfigError if `training.stop_when` names a metric that no evaluation can have.

    The names of reward parts and those that `compute_metrics` returns are not known yet.
    """
    draws = config.eval.completions is not None
    has_own = draws and task.has("compute_metrics")
    known = [*(LOSS_METRICS if has_held_out else ())]
    if draws:
        known += [REWARD, "rewards/NAME/mean", "pass@K", WITH_SIGNAL, DISTINCT, LENGTH, CLIPPED]
    names = [n for text in config.training.stop_when for n, _, _ in parse_condition(text)]
    for name in names:
        is_open = name == "rollouts/failed" or (draws and measure(name, ()) is not None)
        is_open |= has_own and not name.startswith(("groups/", "completions/"))
        if name not in known and not is_open:
            raise ConfigError(
                f"training.stop_when names {name}, which no evaluation of this run has. There are: {', '.join(known)}."
                f"{'' if draws else ' eval.completions adds what the policy writes.'}"
            )


def _read_hook(
    config: SftConfig, task: Task, tokenizer: Any, hook: str, limit: int | None
) -> LessonSet | None:
    """Read the rows of a hook as lessons; None if the hook returns nothing."""
    config_view = View(resolved_values(config))
    rows = task.sft_rows(hook, config_view, tokenizer, limit)
    if hook == "get_sft_eval_dataset":
        rows = rows[:limit]
    if not rows:
        return None
    settings, origin = teacher_settings(config, task, tokenizer), f"{task.described}: {hook}"
    lessons = read_lessons(tokenizer, rows, settings, where=origin)
    task.accounts[hook] = task.accounts.get(hook, Account()) + Account(lessons.refused)
    if config.data.strict and lessons.dropped:
        raise TaskError(
            f"{origin}: {lessons.dropped} rows have nothing to train within data.max_length = {settings.max_length} tokens, and "
            "data.strict is true. Raise the limit, or set data.strict to false to leave them out."
        )
    return lessons


def teacher_settings(config: SftConfig, task: Task, tokenizer: Any) -> TeacherOptions:
    """The settings for reading the task's rows: fields, masks, length, formatting."""
    config_view = View(resolved_values(config))
    room = prepare.prompt_room(config.model, 0)
    return TeacherOptions(
        text_field=config.data.dataset_text_field,
        completion_only=config.data.completion_only_loss,
        last_turn_only=config.data.assistant_turns == "last",
        max_length=min(config.data.max_length or room, room),
        vocabulary=len(tokenizer)  # a service does not say how many token ids its model has
        if config.model.backend == "tinker"
        else prefork.vocabulary(config.model),
        truncation=config.data.truncation_mode,
        formatting=task.sft_function("get_sft_formatting_func", config_view, tokenizer),
        collator=task.sft_function("get_sft_data_collator", config_view, tokenizer),
        strict=config.data.strict,
    )


def _lessons_fingerprint(lessons: LessonSet) -> str:
    return digest([[row.ids, row.mask] for lesson in lessons.lessons for row in lesson.rows])


def planned_sft_sizes(config: SftConfig, layout: Layout, longest_row: int) -> ModelPlan:
    """Estimate parameters and memory of a run in this layout with rows of at most `longest_row` tokens."""
    examples = config.training.examples_per_step
    return plan_model(
        config.model,
        config.lora,
        dtype=layout.dtype,
        decoding=None,
        microbatch=largest_microbatch(
            layout.max_tokens_per_microbatch,
            longest_row,
            -(-examples // layout.learning_processes) * longest_row,
        ),
        needs_reference=False,
        device=layout.device,
        gradient_checkpointing=config.training.gradient_checkpointing,
        processes=layout.processes_per_model,
        parts=layout.weight_shards,
    )


def plan_sft(prepared: SftPrepared, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """The plan of a run: the resolved config, sizes, and the first rows with their trained parts marked.

    `warnings` are added to the plan's own.
    """
    config, lessons, held_out = prepared.config, prepared.lessons, prepared.held_out
    first_lesson = lessons.lessons[prepared.order.example(0)]
    counts = {
        "examples": len(lessons.lessons),
        "rows": sum(len(lesson.rows) for lesson in lessons.lessons),
        "rows_cut_as_too_long": lessons.cut,
        "rows_dropped_as_too_long": lessons.dropped,
        "trained_without_end_token": lessons.without_end,
        "tokens": lessons.tokens,
        "trained_tokens": lessons.trained_tokens,
        "longest_row": lessons.longest,
        **draws_per_epoch(prepared.order, len(lessons.lessons)),
        "held_out_examples": len(held_out.lessons) if held_out else 0,
        "steps": prepared.max_steps,
        "steps_between_evaluations": prepared.eval_steps if held_out else None,
    }
    return plan_of(
        prepared,
        None
        if config.model.backend == "tinker"
        else planned_sft_sizes(config, prepared.layout, lessons.longest),
        counts=counts,
        first_examples={
            "first_rows": [render_row(prepared.tokenizer, row) for row in first_lesson.rows]
        },
        warnings=[*warnings_of(prepared), *warnings],
    )


def warnings_of(prepared: SftPrepared) -> list[str]:
    """Warnings about the rows before the run."""
    examples = [lesson.example for lesson in prepared.lessons.lessons]
    overlap = None
    if prepared.held_out is not None:
        training_keys = set(map(_prompt_key, prepared.lessons.lessons))
        held_out_keys = list(map(_prompt_key, prepared.held_out.lessons))
        overlap = warning_of_overlap(
            sum(key in training_keys for key in held_out_keys),
            len(held_out_keys),
            instead="data.dataset_test_split, data.test_split_size, or the task's get_sft_eval_dataset",
        )
    return [*prompt_warnings(prepared, examples), *([overlap] if overlap else [])]


def _prompt_key(lesson: Lesson) -> str:
    """A key that is equal for lessons with the same prompt; without a prompt, for lessons with the same tokens."""
    prompt = lesson.example.prompt
    if isinstance(prompt, str):
        has_prompt = bool(prompt)
    else:
        has_prompt = any(message["role"] not in ("system", "developer") for message in prompt)
    return prompt_key(prompt) if has_prompt else json.dumps([row.ids for row in lesson.rows])


def render_row(tokenizer: Any, row: MaskedRow) -> str:
    """The row as text, with special tokens, and with ⟦ ⟧ around the trained parts."""
    pieces: list[str] = []
    start = 0
    for index in range(1, len(row.ids) + 1):
        if index == len(row.ids) or row.mask[index] != row.mask[start]:
            text = tokenizer.decode(list(row.ids[start:index]), skip_special_tokens=False)
            pieces.append(text.join(TRAINED_MARKS) if row.mask[start] else text)
            start = index
    return "".join(pieces)
