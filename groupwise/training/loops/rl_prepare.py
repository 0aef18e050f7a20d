"""Checks and prepares a run of `groupwise rl` before a model is loaded: config, task, data, prompts, sizes.

Any mistake in them raises a `UsageError` here, and a dry run ends here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from groupwise.algorithms.custom import file_digest, is_custom
from groupwise.core.errors import ConfigError, TaskError
from groupwise.core.interruption import run_to_end
from groupwise.core.types import TASK_COLUMN, Example
from groupwise.engine.distributed import prefork
from groupwise.engine.models.footprint import Decoding
from groupwise.engine.models.identity import identity
from groupwise.engine.models.plan import (
    MIB,
    ModelPlan,
    largest_microbatch,
    plan_model,
    sampler_bytes,
)
from groupwise.engine.models.tokenizer_agreement import check_same_tokens
from groupwise.engine.models.tokens import render_prompt
from groupwise.engine.sampler.config import SERVER_KEYS
from groupwise.tasks.contract import Task, check_reward_columns, require
from groupwise.tasks.data.curriculum import EASY
from groupwise.tasks.data.examples import examples_from_rows, fingerprint
from groupwise.tasks.data.loading import always_scorable, as_prompts
from groupwise.tasks.data.order import Order
from groupwise.tasks.data.overlap import same_prompt, same_row, trained_on, warning_of_overlap
from groupwise.tasks.data.replay import key_of
from groupwise.tasks.data.reward_hacking import unfilled_arguments_warning
from groupwise.tasks.data.reward_hacking_detectors import missing_accuracy_note
from groupwise.tasks.data.sources import read_source
from groupwise.tasks.data.success import check_part
from groupwise.tasks.rewards.router import Router
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.tasks.rollouts.prompts import PromptSet, text_prompts, tokenise
from groupwise.training import placement, rollout_builder
from groupwise.training.assembly import prepare
from groupwise.training.callbacks.registry import Named, configured_callbacks
from groupwise.training.callbacks.success_cache import PART as CACHED
from groupwise.training.callbacks.success_cache import SuccessCache
from groupwise.training.config import LoadedConfig, RunConfig, view, with_task_schema
from groupwise.training.evaluation.evaluate import check_success_part, held_out_prompts
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
from groupwise.training.placement import Layout

EASY_POOL = "data.easy_pool"
EASY_SOURCE = "EASY_DATASET_NAME"
"""The environment variable that names the source of the easy pool if the config names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlPrepared(Prepared):
    """A run of reinforcement learning that is checked but not built."""

    prompts: PromptSet
    order: Order
    """The order in which examples are drawn."""
    easy: PromptSet | None
    """The prompts of the easy pool; None without one."""
    held_out_prompts: PromptSet | None
    rubric: Rubric | None
    warm_up_prompts: frozenset[str] = frozenset()
    """The `prompt_key` of the prompts that the warm-up before this run trains on."""

    @property
    def config(self) -> RunConfig:
        return self.loaded.config


def prepare_rl(
    loaded: LoadedConfig,
    task: object,
    rows_read: int | None = None,
    *,
    check_only: bool = False,
) -> RlPrepared:
    """Check task and data against the config, and tokenise all prompts.

    `rows_read` is given for a resumed run: the number of rows that it read of a stream without a length. So the run keeps the same
    examples even if its number of steps has changed. With `check_only`, most prompts are not tokenised (see `tokenise`), and `facts`
    lack the fingerprints of the data, so that the result can be planned, but neither run nor compared with an earlier run.
    """
    resolved_task = rollout_builder.task_of(loaded.config, task)
    require(resolved_task, "rl")
    loaded = with_task_schema(loaded, resolved_task.config_schema())
    settings = loaded.config
    check_start(loaded)
    if settings.model.backend == "tunix":
        from groupwise.training.assembly.services import check_tunix

        check_tunix(settings)
    evaluates = _evaluates(settings, resolved_task)
    config_view = view(settings)
    # None if the number of epochs decides, which requires a stream with an end.
    steps = settings.training.max_steps
    rows_read = rows_read or (steps and steps * settings.training.prompts_per_step)
    examples = resolved_task.rl_examples(config_view, limit=rows_read)
    tokenizer = prefork.load_tokenizer(settings.model)
    prepare.check_stop_tokens(settings, tokenizer)
    callbacks = configured_callbacks(
        settings.callbacks, config_view, loaded.tree.origin(("callbacks",))
    )
    rubric = rollout_builder.task_rubric(settings, resolved_task, tokenizer)
    loaded = rollout_builder.with_default_label(loaded, rubric)
    settings = loaded.config
    easy_rows = _check_examples(settings, resolved_task, rubric, callbacks, examples)
    prompts, easy, held_out = _tokenise_all(
        settings,
        resolved_task,
        rubric,
        tokenizer,
        (examples, easy_rows),
        evaluates=evaluates,
        check_only=check_only,
    )
    order = order_of(
        resolved_task, "get_rl_dataset", [example.index for example in prompts.examples], settings
    )
    max_steps = _max_steps(settings, order.length)
    check_profiled_steps(settings.run, max_steps)
    longest_prompt = max(
        prompt_set.longest for prompt_set in (prompts, easy, held_out) if prompt_set
    )
    return RlPrepared(
        loaded=loaded,
        task=resolved_task,
        tokenizer=tokenizer,
        prompts=prompts,
        order=order,
        easy=easy,
        held_out_prompts=held_out,
        rubric=rubric,
        max_steps=max_steps,
        layout=training_layout(settings, longest_prompt),
        facts=task_facts(resolved_task, rubric)
        | _algorithm_facts(settings)
        | {ROWS_READ: rows_read, "base": identity(settings.model)}
        | ({} if check_only else _data_facts(settings, (prompts, easy), held_out)),
        callbacks=callbacks,
    )


def _check_examples(
    config: RunConfig,
    task: Task,
    rubric: Rubric | None,
    callbacks: Sequence[Named],
    examples: Sequence[Example],
) -> Sequence[Example]:
    """Check that rewards, algorithm and replay fit the examples. Returns those of the easy pool; empty without one."""
    in_workers = rollout_builder.scores_in_workers(config, task, rubric)
    check_reward_columns(task, rubric, examples, in_workers=in_workers)
    _check_algorithm(config, rubric)
    _check_success_parts(config, task, rubric, callbacks)
    easy_rows = easy_examples(config, task, rubric)
    _check_replay(config, (examples, easy_rows))
    check_reward_columns(task, rubric, easy_rows, in_workers=in_workers)
    return easy_rows


def _tokenise_all(
    config: RunConfig,
    task: Task,
    rubric: Rubric | None,
    tokenizer: Any,
    rows: tuple[Sequence[Example], Sequence[Example]],
    *,
    evaluates: bool,
    check_only: bool,
) -> tuple[PromptSet, PromptSet | None, PromptSet | None]:
    """The prompts of `rows` (those to train on, those of the easy pool) and the held-out ones as token ids; None if there are none."""
    examples, easy_rows = rows
    tools = rollout_builder.check_rollouts(config, task, [*examples, *easy_rows])
    room = prepare.prompt_room(config.model, rollout_builder.longest_completion(config))
    tokenise_rows = partial(
        tokenise,
        tokenizer,
        max_prompt_length=config.data.max_prompt_length,
        room=room,
        tools=tools,
        strict=config.data.strict,
        check_only=check_only,
    )
    prompts = tokenise_rows(examples, where=f"{task.described}: get_rl_dataset")
    easy = tokenise_rows(easy_rows, where=EASY_POOL) if easy_rows else None
    held_out = None
    if evaluates:
        held_out = held_out_prompts(config, task, tokenizer, room, check_only=check_only)
        in_workers = rollout_builder.scores_in_workers(config, task, rubric)
        check_reward_columns(task, rubric, held_out.examples, in_workers=in_workers)
    _check_teacher(config, task, tokenizer, (*prompts.examples, *(easy.examples if easy else ())))
    return prompts, easy, held_out


def _evaluates(config: RunConfig, task: Task) -> bool:
    """True if the run evaluates held-out prompts. Raises TaskError if `eval.eval_steps` is set but the task has no such prompts."""
    if config.eval.eval_steps is not None and not task.has("get_eval_dataset"):
        raise TaskError(
            f"eval.eval_steps is {config.eval.eval_steps}, but {task.described} has no get_eval_dataset, so there is "
            "nothing to evaluate on. Leave the key out, or add the hook."
        )
    evaluates = config.eval.before_and_after or config.eval.eval_steps is not None
    return evaluates and task.has("get_eval_dataset")


def _check_algorithm(config: RunConfig, rubric: Rubric | None) -> None:
    max_tokens = rollout_builder.longest_written(config)
    try:
        prepare.build_algorithm(config).check(max_tokens, rubric.names if rubric else ())
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _algorithm_facts(config: RunConfig) -> dict[str, str]:
    """The content of the file of an algorithm of one's own, by its digest."""
    name = config.algorithm.type
    return {"algorithm_file": file_digest(name)} if is_custom(name) else {}


def _check_teacher(
    config: RunConfig, task: Task, tokenizer: Any, examples: Sequence[Example]
) -> None:
    """Raise UsageError for a teacher that has other tokens than the policy, or a prompt of the teacher's that cannot be written."""
    teacher = config.teacher
    if teacher is None:
        return
    if teacher.type == "model":
        model = teacher.model_config_of(config.model)
        check_same_tokens(tokenizer, prefork.load_tokenizer(model), config.model.name, model.name)
    prompts = rollout_builder.teacher_prompts(config, task, tokenizer)
    if prompts is not None:
        prompts.check(examples)


def _max_steps(config: RunConfig, examples: int) -> int:
    """The configured number of steps, or the number that the configured epochs need."""
    training = config.training
    if training.max_steps is not None:
        return training.max_steps
    assert training.num_train_epochs is not None
    return max(1, math.ceil(training.num_train_epochs * examples / training.prompts_per_step))


def _data_facts(
    config: RunConfig,
    training_sets: Sequence[PromptSet | None],
    held_out_set: PromptSet | None,
) -> dict[str, str]:
    """Fingerprints of the training data, and of the held-out prompts with what decides how they are answered."""
    held_out = [
        config.eval.model_dump(mode="json", exclude={"eval_steps", "before_and_after"}),
        config.sampler.model_dump(mode="json", exclude={"max_num_seqs", *SERVER_KEYS}),
    ]
    return {
        "data": digest(
            *[part for p in training_sets if p for part in (fingerprint(p.examples), p.prompts)]
        ),
        "held_out": digest(held_out, held_out_set.prompts if held_out_set else ()),
    }


def warnings_of(prepared: RlPrepared) -> list[str]:
    """Warnings about prompts, rewards and this machine, before the run."""
    examples, rubric = prepared.prompts.examples, prepared.rubric
    unfilled = (
        rubric.unfilled_arguments([example.columns for example in examples]) if rubric else []
    )
    overlap = None
    held_out_set = prepared.held_out_prompts
    if held_out_set is not None:
        training_examples = [
            e for pool in (prepared.prompts, prepared.easy) if pool for e in pool.examples
        ]
        plays = prepared.task.played_by is not None
        key_of = same_row if plays else same_prompt
        supervised = () if plays else prepared.warm_up_prompts
        overlap = warning_of_overlap(
            len(trained_on(training_examples, held_out_set.examples, key_of, supervised)),
            len(held_out_set.examples),
            instead="data.dataset_test_split, data.test_split_size, or the task's get_eval_dataset",
        )
    warnings = [unfilled_arguments_warning(unfilled)] if unfilled else []
    machine_warnings = rubric.check_machine(refuse=False) if rubric else []
    return [
        *prompt_warnings(prepared, examples),
        *warnings,
        *([overlap] if overlap else []),
        *machine_warnings,
    ]


def easy_examples(config: RunConfig, task: Task, rubric: Rubric | None) -> list[Example]:
    """The examples of `data.easy_pool`; empty without such a pool. Rows that are left out are counted in the task's accounts.

    The examples have the label EASY if the router has rewards for it. If the config names the data, their prompts are prepared in the same
    way as the data's, and rows that the rewards cannot score are left out. With a task, rows are used as they are.
    """
    pool, data = config.data.easy_pool, config.data
    if pool is None:
        return []
    source = pool.dataset_name or os.environ.get(EASY_SOURCE)
    if not source:
        raise ConfigError(
            "data.easy_pool does not say where the easy examples are. Set data.easy_pool.dataset_name to a file or a hub id, or "
            f"{EASY_SOURCE} in the environment."
        )
    columns = pool.columns or (data.renamed_columns("answer") if data.names_data else {})
    rows = read_source(source, pool.dataset_config, pool.dataset_split, columns)
    origin = f"{EASY_POOL} ({source})"
    has_easy_rewards = isinstance(rubric, Router) and EASY in rubric.rubrics
    label = {TASK_COLUMN: EASY} if has_easy_rewards else {}
    rows = [{**label, **row} for row in rows]
    if data.names_data:
        is_unscorable = rubric.unscorable if rubric else always_scorable
        prepared = as_prompts(data, rows, origin, is_unscorable)
        task.accounts[EASY_POOL] = prepared.account
        rows = prepared
    return examples_from_rows(rows, where=origin)


def _check_replay(config: RunConfig, pools: Sequence[Sequence[Example]]) -> None:
    """Raise ConfigError for a warm-up of the replay buffer that cannot end, and for examples that the buffer cannot tell apart."""
    replay = config.data.replay
    if replay is None:
        return
    examples = [example for pool in pools for example in pool]
    keys = {key_of(example.prompt) for example in examples}
    if len(examples) > len(keys) == 1:
        raise ConfigError(
            f"data.replay tells examples apart by their prompts, and all {len(examples)} have the same one, as those of a game do: it "
            "would keep one for all. Leave data.replay out."
        )
    if len(keys) < replay.warmup_entries:
        raise ConfigError(
            f"data.replay.warmup_entries is {replay.warmup_entries}, but the number of different prompts is {len(keys)}, so that nothing "
            "would ever be drawn again. Lower it."
        )


def _check_success_parts(
    config: RunConfig, task: Task, rubric: Rubric | None, callbacks: Sequence[Named]
) -> None:
    """Raise an error for a key that names a part which the reward does not have: nothing would ever count as solved."""
    check_success_part(config, task, rubric)
    if task.has("get_environment"):  # an environment's parts are only known once it returns them
        return
    caches = [callback for _, callback in callbacks if isinstance(callback, SuccessCache)]
    parts = [*config.data.success_parts.items(), *((CACHED, cache.part) for cache in caches)]
    if config.signals is not None:
        parts.append(("signals.accuracy_part", config.signals.accuracy_part))
    for key, part in parts:
        check_part(key, part, rubric.names if rubric else (), task.described)


def training_layout(config: RunConfig, longest_prompt: int) -> Layout:
    """See `placement.choose_layout`. The sampler frees its keys and values while the run learns if the GPU's memory would be short.

    It then has to record its CUDA graph again for each step, so it keeps them otherwise, and if the run samples while it learns.
    """
    layout = placement.choose_layout(config, longest_prompt)
    elsewhere = config.run.server is not None or config.model.backend != "transformers"
    elsewhere |= config.sampler.engine != "torch" or layout.samplers > 0
    if layout.device == "cpu" or elsewhere or config.training.max_off_policy_steps > 0:
        return layout
    free = prefork.free_memory(layout.device)
    planned = planned_sizes(config, layout).memory.total * MIB
    frees = free is not None and planned > placement.USABLE * free
    return replace(layout, frees_cache=frees)


def planned_sizes(config: RunConfig, layout: Layout) -> ModelPlan:
    """Estimate parameters and memory of a run in this layout."""
    members = config.training.num_generations
    rows = -(-config.training.prompts_per_step * members // layout.learning_processes)
    completion_tokens = rollout_builder.longest_completion(config)
    return plan_model(
        config.model,
        config.lora,
        dtype=layout.dtype,
        decoding=None if layout.samplers else _decoding(config, layout),
        microbatch=largest_microbatch(
            layout.max_tokens_per_microbatch,
            layout.key_length,
            -(-rows // members) * (layout.key_length - completion_tokens)
            + rows * completion_tokens,
        ),
        needs_reference=prepare.needs_reference(config),
        teacher=placement.teacher_bytes(config, layout.device, layout.processes_per_model),
        device=layout.device,
        gradient_checkpointing=config.training.gradient_checkpointing,
        processes=layout.processes_per_model,
        parts=layout.weight_shards,
        server=_beside_learner(config, layout),
        frees_cache=layout.frees_cache,
    )


def _beside_learner(config: RunConfig, layout: Layout) -> tuple[float, float]:
    """What the run's own vLLM server or sampler takes of the learner's GPU, in bytes: while the run samples, and while it learns."""
    if not layout.shares_gpus:
        if config.sampler.vllm_python is None:
            return 0.0, 0.0
        from groupwise.training.assembly.servers import own_server_bytes

        return own_server_bytes(config, layout)
    decoding = _decoding(config, layout)
    held = sampler_bytes(config.model, config.lora, layout.dtype, layout.device, decoding)
    return held, held


def _decoding(config: RunConfig, layout: Layout) -> Decoding:
    """The sizes of the batch that a process decodes. Members of a group share their prompt's cache, unless each continues its own text."""
    rollout = config.rollout
    slots = layout.slots if config.sampler.engine == "torch" else 0  # servers decode elsewhere
    first_length = last_length = rollout_builder.longest_completion(config)
    prompts = -(-slots // config.training.num_generations)
    if rollout.type != "single":
        first_length = last_length = config.sampler.max_completion_length
        prompts = slots
    if rollout.type == "two_stage":
        first_length, last_length = rollout.max_reasoning_length, rollout.max_answer_length
    return Decoding(
        slots=slots,
        key_length=layout.key_length,
        completion=max(first_length, last_length),
        prompts=prompts,
        prompt=layout.key_length - last_length,
    )


def plan_rl(prepared: RlPrepared, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """The plan of a run: the resolved config, sizes, and the first prompt as the model would see it.

    `warnings` are added to the plan's own.
    """
    config, held_out_set = prepared.config, prepared.held_out_prompts
    rows = config.training.prompts_per_step * config.training.num_generations
    examples = prepared.prompts.examples
    example = examples[prepared.order.example(0)]
    # Important settings that the config leaves at their defaults, with the difference from TRL's defaults.
    algorithm: Mapping[str, Any] = prepared.loaded.tree.value(("algorithm",)) or {}
    lora = config.lora
    remarks: list[str] = []
    if not {"type", "preset"} & algorithm.keys():
        remarks.append(
            f"{config.algorithm.type} (default): the loss is divided by a constant, rewards are not scaled by their group's spread; "
            "TRL's default is algorithm.preset=trl_default"
        )
    if "lora" not in prepared.loaded.tree.values and lora is not None:
        remarks.append(
            f"LoRA of rank {lora.r} (default): TRL trains all weights, which is lora=null"
        )
    defaults = {"chosen_by_default": remarks} if remarks else {}
    prompt_sets = filter(None, (prepared.prompts, prepared.easy, held_out_set))
    counts = {
        "examples": len(examples),
        "examples_dropped_as_too_long": prepared.prompts.dropped,
        **draws_per_epoch(prepared.order, len(examples)),
        **({"easy_examples": len(prepared.easy.examples)} if prepared.easy else {}),
        "held_out_examples": len(held_out_set.examples) if held_out_set else 0,
        "prompts_tokenised": sum(prompt_set.tokenised for prompt_set in prompt_sets),
        "steps": prepared.max_steps,
        "completions_per_step": rows,
        "most_tokens_sampled_per_step": rows * rollout_builder.longest_written(config),
        **defaults,
    }
    room = prepared.layout.key_length
    (first_prompt,) = run_to_end(  # tools and environments add to it
        rollout_builder.first_prompts(config, prepared.task, prepared.tokenizer, [example], room)
    )
    # Warn if no known reward part shows what is solved, because the signals of reward hacking need such a part.
    signals, rubric = config.signals, prepared.rubric
    text = missing_accuracy_note(signals, rubric.names) if signals and rubric else None
    signals_note = {"signals": text} if text else {}
    return plan_of(
        prepared,
        None if config.model.backend == "tinker" else planned_sizes(config, prepared.layout),
        counts=counts,
        first_examples={
            **signals_note,
            "first_prompt": render_prompt(prepared.tokenizer, first_prompt),
        },
        warnings=[*warnings_of(prepared), *text_prompts(prepared.tokenizer, examples), *warnings],
    )
