"""Everything that can be found out about a supervised run before a model is loaded: config, task, rows, masks, sizes.

What is wrong with any of them is a `UsageError` here, and a dry run ends here.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, cast

from groupwise import build
from groupwise.build import Layout
from groupwise.callbacks.registry import Named, configured_callbacks
from groupwise.config import resolved, with_task_schema
from groupwise.errors import TaskError
from groupwise.loops.prepare import ROWS_READ, check_start, digest, task_facts
from groupwise.loops.profiling import check_profiled_steps
from groupwise.models.chat_masks import Masked
from groupwise.models.identity import identity
from groupwise.models.plan import plan_model, prompt_room, vocabulary
from groupwise.models.tokenizer import load_tokenizer
from groupwise.models.tokens import unannounced
from groupwise.rollouts.teacher import LessonSet, TeacherWay, read_lessons
from groupwise.settings import View
from groupwise.sft_config import LoadedSftConfig, SftConfig
from groupwise.tasks.contract import Task, load_task, require

TRAINED = ("⟦", "⟧")
"""What stands around the trained tokens of a row that is shown."""


@dataclass(frozen=True, slots=True)
class SftPrepared:
    """A supervised run that is checked but not built."""

    loaded: LoadedSftConfig
    task: Task
    tokenizer: Any
    lessons: LessonSet
    held_out: LessonSet | None
    layout: Layout
    facts: dict[str, Any]
    """Fingerprints of what the config only names: task, its file, the rows as token ids and masks; how many rows of a stream
    were read."""
    callbacks: tuple[Named, ...] = ()

    @property
    def config(self) -> SftConfig:
        return self.loaded.config

    @property
    def run_name(self) -> str:
        return self.loaded.run_name

    @property
    def max_draws(self) -> int | None:
        """Examples drawn in all steps together, where epochs say so."""
        epochs = self.config.training.num_train_epochs
        return None if epochs is None else max(1, math.ceil(epochs * len(self.lessons.lessons)))

    @property
    def max_steps(self) -> int:
        """Steps of the whole run; the last one of whole epochs may be smaller."""
        if self.max_draws is None:
            assert self.config.training.max_steps is not None
            return self.config.training.max_steps
        return -(-self.max_draws // self.config.training.examples_per_step)

    @property
    def eval_steps(self) -> int:
        """Steps between evaluations."""
        epoch = -(-len(self.lessons.lessons) // self.config.training.examples_per_step)
        return self.config.eval.eval_steps or epoch


def prepare_sft(loaded: LoadedSftConfig, task: object, rows_read: int | None = None) -> SftPrepared:
    """Check task and rows against the config; tokenise and mask all rows. `rows_read`: see `groupwise.loops.prepare.prepare`."""
    found = load_task(task)
    require(found, "sft")
    schema = found.config_schema()
    if schema is not None:
        loaded = cast("LoadedSftConfig", with_task_schema(loaded, schema))
    config = loaded.config
    check_start(loaded)
    tokenizer = load_tokenizer(config.model)
    rows_read = rows_read or _draws(config)
    lessons = _read(config, found, tokenizer, "get_sft_dataset", rows_read)
    assert lessons is not None, "an empty dataset is an error"
    held_out = None
    if found.has("get_sft_eval_dataset"):
        limit = config.eval.max_examples
        held_out = _read(config, found, tokenizer, "get_sft_eval_dataset", limit)
    if held_out is None:
        _refuse_evaluation_of_nothing(config, found)
    facts = {
        **task_facts(found),
        "data": _fingerprint(lessons),
        "held_out": _fingerprint(held_out) if held_out else "",
        "base": identity(config.model),
        ROWS_READ: rows_read,
    }
    layout = build.supervised_layout(config)
    origin = loaded.tree.origin(("callbacks",))
    callbacks = configured_callbacks(config.callbacks, View(resolved(config)), origin)
    prepared = SftPrepared(loaded, found, tokenizer, lessons, held_out, layout, facts, callbacks)
    check_profiled_steps(config.run, prepared.max_steps)
    return prepared


def _read(
    config: SftConfig, task: Task, tokenizer: Any, hook: str, limit: int | None
) -> LessonSet | None:
    """What a hook returns; None where it returns nothing."""
    given = View(resolved(config))
    rows = task.sft_rows(hook, given, tokenizer, limit)
    if hook == "get_sft_eval_dataset":
        rows = rows[:limit]
    if not rows:
        return None
    room = prompt_room(config.model, 0)
    way = TeacherWay(
        text_field=config.data.dataset_text_field,
        completion_only=config.data.completion_only_loss,
        last_turn_only=config.data.assistant_turns == "last",
        max_length=min(config.data.max_length or room, room),
        vocabulary=vocabulary(config.model),
        truncation=config.data.truncation_mode,
        formatting=task.sft_function("get_sft_formatting_func", given, tokenizer),
        collator=task.sft_function("get_sft_data_collator", given, tokenizer),
    )
    return read_lessons(tokenizer, rows, way, where=f"{task.described}: {hook}")


def _refuse_evaluation_of_nothing(config: SftConfig, task: Task) -> None:
    evaluation = config.eval
    asked = {
        "eval.eval_steps": evaluation.eval_steps,
        "eval.early_stopping_patience": evaluation.early_stopping_patience,
        "eval.load_best_model_at_end": evaluation.load_best_model_at_end or None,
    }
    keys = [key for key, value in asked.items() if value is not None]
    if keys:
        without = "returns None from" if task.has("get_sft_eval_dataset") else "has no"
        raise TaskError(
            f"{' and '.join(keys)} {'is' if len(keys) == 1 else 'are'} set, but {task.described} {without} "
            "get_sft_eval_dataset, so there is nothing to evaluate on. Leave the key out, or add the hook."
        )


def _draws(config: SftConfig) -> int | None:
    """How many rows of an endless stream are read; None where epochs decide, which needs an end."""
    steps = config.training.max_steps
    return None if steps is None else steps * config.training.examples_per_step


def _fingerprint(lessons: LessonSet) -> str:
    return digest([[row.ids, row.mask] for lesson in lessons.lessons for row in lesson.rows])


def plan_sft(prepared: SftPrepared) -> dict[str, Any]:
    """What a run would do: the resolved config, sizes, and the first rows with what is trained of them."""
    config, layout, lessons = prepared.config, prepared.layout, prepared.lessons
    sizes = plan_model(
        config.model,
        config.lora,
        dtype=layout.dtype,
        slots=layout.slots,
        key_length=layout.key_length,
        microbatch=min(
            layout.max_tokens_per_microbatch, config.training.examples_per_step * lessons.longest
        ),
        needs_reference=False,
        device=layout.device,
    )
    first = lessons.drawn(0, config.training.seed, shuffle=config.data.shuffle)
    warning = unannounced(prepared.tokenizer, first.example.prompt)
    settings = resolved(config)
    return {
        "config": {**settings, "run": {**settings["run"], "name": prepared.run_name}},
        "plan": {
            "task": prepared.task.described,
            **_counts(lessons),
            "held_out_examples": len(prepared.held_out.lessons) if prepared.held_out else 0,
            "steps": prepared.max_steps,
            "steps_between_evaluations": prepared.eval_steps if prepared.held_out else None,
            "parameters": sizes.parameters,
            "parameters_trained": sizes.trained_parameters,
            "memory_mib": {
                **{key: round(value) for key, value in asdict(sizes.memory).items()},
                "total": round(sizes.memory.total),
            },
            "layout": asdict(layout),
            "warnings": [warning] if warning else [],
            "first_rows": [shown_row(prepared.tokenizer, row) for row in first.rows],
        },
    }


def _counts(lessons: LessonSet) -> dict[str, Any]:
    return {
        "examples": len(lessons.lessons),
        "rows": sum(len(lesson.rows) for lesson in lessons.lessons),
        "rows_cut_as_too_long": lessons.cut,
        "rows_dropped_as_too_long": lessons.dropped,
        "trained_without_end_token": lessons.without_end,
        "tokens": lessons.tokens,
        "trained_tokens": lessons.trained_tokens,
        "longest_row": lessons.longest,
    }


def shown_row(tokenizer: Any, row: Masked) -> str:
    """The row as text, special tokens included, with ⟦ ⟧ around what is trained."""
    pieces: list[str] = []
    start = 0
    for place in range(1, len(row.ids) + 1):
        if place == len(row.ids) or row.mask[place] != row.mask[start]:
            text = tokenizer.decode(list(row.ids[start:place]), skip_special_tokens=False)
            pieces.append(text.join(TRAINED) if row.mask[start] else text)
            start = place
    return "".join(pieces)
