"""Builds a task's rollouts and scorer for a config: in this process, or in worker processes.

`build_rollouts` builds the object that samples rollouts, `build_scorer` the one that scores them. `scorer_for_worker` and
`environments_for_worker` are the factories that workers call by name. Nothing here needs a model; the caller provides the tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from groupwise.core.errors import ConfigError, TaskError
from groupwise.core.extras import require_packages
from groupwise.core.reward_call.request import Scorer, unpicklable
from groupwise.core.types import Example, SamplingParams
from groupwise.engine.distributed import prefork
from groupwise.engine.models.tokens import completion_text
from groupwise.tasks.configured import ConfiguredTask, find_task
from groupwise.tasks.contract import Task
from groupwise.tasks.external.kinds import KINDS
from groupwise.tasks.rewards.config import DEFAULT_TASK_VARIABLE
from groupwise.tasks.rewards.inprocess import InProcessScorer, RubricScorer
from groupwise.tasks.rewards.registry import configured_rubric
from groupwise.tasks.rewards.router import Router
from groupwise.tasks.rewards.rubric import Rubric
from groupwise.tasks.rewards.workers import RewardWorkers
from groupwise.tasks.rollouts.dialogue import first_ids
from groupwise.tasks.rollouts.environment import EnvironmentRollouts, Limits
from groupwise.tasks.rollouts.hosts import LocalHost, WorkerHost
from groupwise.tasks.rollouts.rollout_request import RolloutKind, RolloutRequest
from groupwise.tasks.rollouts.seeds import member_seed
from groupwise.tasks.rollouts.sessions import Sessions
from groupwise.tasks.rollouts.single import Single
from groupwise.tasks.rollouts.teacher_prompts import TeacherPrompts
from groupwise.tasks.rollouts.trained_turns import trained_turns
from groupwise.tasks.rollouts.two_stage import TwoStage
from groupwise.tasks.tools import Schema
from groupwise.training.config import LoadedConfig, RunConfig, load_config, view


def task_of(config: RunConfig, source: object | None) -> Task:
    """The task of a command, or the one in the config if `source` is None, with the rewards that the config names."""
    return with_configured_rewards(config, find_task(source, view(config)))


def with_configured_rewards(config: RunConfig, task: Task) -> Task:
    """The task with the config's rewards instead of its own, if the config names any.

    With a router without `default_task`, the task's own rewards remain for rows without a label.
    """
    if not config.rewards.names_rewards or isinstance(task, ConfiguredTask):
        return task

    def get_reward_funcs(config: Any, tokenizer: Any) -> Rubric | None:
        section = config["rewards"]
        is_routed = section.get("router") is not None and section.get("default_task") is None
        keeps_own = is_routed and task.has("get_reward_funcs")
        own_rubric = (task.name, task.rubric(config, tokenizer)) if keeps_own else None
        return configured_rubric(section, own_rubric)

    return task.with_hook("get_reward_funcs", get_reward_funcs)


def task_rubric(config: RunConfig, task: Task, tokenizer: Any) -> Rubric | None:
    """The task's rewards, or None if it has none. Call this once per process, because it may load a reward model."""
    rubric = None
    if task.has("get_reward_funcs"):
        rubric = task.rubric(view(config), tokenizer, config.rewards.reward_weights)
    default = config.rewards.default_task or None
    if default is None and isinstance(rubric, Router) and rubric.default is None:
        default = os.environ.get(DEFAULT_TASK_VARIABLE) or None
    if default is None:
        return rubric
    if not isinstance(rubric, Router):
        raise TaskError(
            f"rewards.default_task is {default}, but {task.described} has the same rewards for every row, whatever its label. Leave "
            "the key out, or give rewards by label in rewards.router."
        )
    return rubric.with_default(default)


def with_default_label(loaded: LoadedConfig, rubric: Rubric | None) -> LoadedConfig:
    """The config with its rubric's default label. A resume then has the same label even if the environment variable has changed."""
    rewards = loaded.config.rewards
    if not isinstance(rubric, Router) or rubric.default is None or rewards.default_task:
        return loaded
    if rubric.default != os.environ.get(DEFAULT_TASK_VARIABLE):
        return loaded
    with_label = rewards.model_copy(update={"default_task": rubric.default})
    return replace(loaded, config=loaded.config.model_copy(update={"rewards": with_label}))


def teacher_prompts(config: RunConfig, task: Task, tokenizer: Any) -> TeacherPrompts | None:
    """What the teacher of a distillation reads; None if it reads what the policy does.

    Raises ConfigError if it would be no teacher, or if its prompts have no place in these rollouts.
    """
    teacher = config.teacher
    if teacher is None:
        return None
    hook = task.teacher_prompt if task.has("teacher_prompt") else None
    if teacher.prompt is None and hook is None:
        if teacher.type == "self" and teacher.weights == "current":
            raise ConfigError(
                f"teacher.type is self, but the teacher would read the policy's own prompt and know nothing more: {task.described} has no "
                "teacher_prompt, and teacher.prompt is null. Give it more to read, as in teacher.prompt='{prompt} The answer is {answer}.'"
            )
        return None
    if config.rollout.type == "environment":
        source = (
            "the task has teacher_prompt" if teacher.prompt is None else "teacher.prompt is set"
        )
        raise ConfigError(
            f"rollout.type is environment, whose first prompts come from the environment, but {source}, which would stand in place of "
            "them. Leave it out: the teacher then reads what the policy does."
        )
    room = 1 << 30  # an endpoint refuses itself what is too long for it
    if teacher.type != "endpoint":
        model = config.model if teacher.type == "self" else teacher.model_config_of(config.model)
        room = prefork.prompt_room(model, longest_completion(config))
    return TeacherPrompts(
        tokenizer,
        room,
        teacher.prompt,
        teacher.demonstration_reward,
        hook,
    )


def scores_in_workers(config: RunConfig, task: Task, rubric: Rubric | None) -> bool:
    """True if rewards run in worker processes: the task must be importable there, and its rewards must keep no state."""
    stateful = rubric is not None and rubric.stateful
    return task.spec is not None and not config.rewards.in_process and not stateful


def build_scorer(
    config: RunConfig, task: Task, tokenizer: Any, rubric: Rubric | None = None
) -> Scorer:
    """Build reward workers, or a scorer that calls `rubric` in a thread of this process; see `scores_in_workers`.

    `rubric` is the task's, if the caller has built it already. The scorer of a task without rewards only computes metrics.
    """
    rubric = rubric or task_rubric(config, task, tokenizer)
    if not scores_in_workers(config, task, rubric):
        return InProcessScorer(
            rubric, _metrics_of(config, task, tokenizer), time_limit=config.rewards.time_limit
        )
    return RewardWorkers(
        "groupwise.training.rollout_builder:scorer_for_worker",
        {"config": config.model_dump(mode="json"), "task": task.spec},
        workers=config.rewards.workers,
        time_limit=config.rewards.time_limit,
        start_limit=config.rewards.start_limit,
    )


def scorer_for_worker(config: Mapping[str, Any], task: str) -> RubricScorer:
    """The factory that reward workers call: builds the task's rewards and metrics in the worker."""
    loaded = load_config(config).config
    resolved_task = task_of(loaded, task)
    tokenizer = LazyTokenizer(loaded)
    return RubricScorer(
        task_rubric(loaded, resolved_task, tokenizer), _metrics_of(loaded, resolved_task, tokenizer)
    )


def _metrics_of(config: RunConfig, task: Task, tokenizer: Any) -> Any:
    def compute(prompts: Any, completions: Any, rows: Any) -> dict[str, Any]:
        return task.compute_metrics(prompts, completions, rows, view(config), tokenizer)

    return compute


def check_rollouts(
    config: RunConfig, task: Task, examples: Sequence[Example]
) -> tuple[Schema, ...]:
    """Raise TaskError if task and `rollout.type` do not match, or if an example lacks columns that its environment needs.

    Returns the schemas of the tools that are described in chat prompts.
    """
    if config.rollout.type != "external" and task.has("get_program"):
        raise TaskError(
            f"{task.described} plays in a process of its own, but rollout.type is {config.rollout.type}. Set rollout.type to external."
        )
    if config.rollout.type == "external":
        if not task.has("get_program"):
            raise TaskError(
                f"{task.described} has no get_program, but rollout.type is external.\n"
                "  expected: def get_program(config)\n"
                f"Add the hook, name an environment of another library ({', '.join(f'{kind}:NAME' for kind in KINDS)}), or leave "
                "rollout.type out."
            )
        task.program(view(config))
        trained_turns(config.rollout.trained_turns)
        return ()
    if config.rollout.type != "environment":
        if task.has("get_environment"):
            raise TaskError(
                f"{task.described} has get_environment, but rollout.type is {config.rollout.type}, so that it would never "
                "be asked. Set rollout.type to environment, or remove the hook."
            )
        return ()
    if not task.has("get_environment"):
        raise TaskError(
            f"{task.described} has no get_environment, but rollout.type is environment.\n"
            "  expected: def get_environment(config)\n"
            "Add the hook, or leave rollout.type out."
        )
    factory = task.check_environment(view(config), examples)
    unpicklable_columns = (
        unpicklable(examples[0].columns) if examples and _hosts_in_workers(config, task) else []
    )
    if unpicklable_columns:
        raise TaskError(
            f"{task.described}: the dataset's column {' and '.join(f'`{name}`' for name in unpicklable_columns)} holds values that "
            "cannot be sent to the environment workers (pickle refuses them). Keep plain values in the dataset and make "
            "the objects in the environment, or set rollout.in_process."
        )
    return tuple(getattr(factory, "schemas", ()))


def build_rollouts(
    config: RunConfig, task: Task, tokenizer: Any, room: int | None = None
) -> RolloutKind:
    """Build the object that samples rollouts. `room` is the sampler's key length, which an environment's prompts must not exceed."""
    if config.rollout.type == "single":
        return Single(lambda ids: completion_text(tokenizer, ids))
    if config.rollout.type == "two_stage":
        return TwoStage(config.rollout, tokenizer)
    if config.rollout.type == "external":
        check_rollouts(config, task, ())
        subject = "An environment of another library, which asks the policy over HTTP,"
        require_packages(subject, "environments", "starlette", "uvicorn")
        from groupwise.tasks.rollouts.external import ExternalLimits, ExternalRollouts

        external_limits = ExternalLimits(
            max_turns=config.rollout.max_turns,
            max_tokens=longest_completion(config),
            max_seconds=config.rollout.max_seconds,
            max_concurrent=config.rollout.max_concurrent,
            start_limit=config.rollout.start_limit,
            room=room,
        )
        program = task.program(view(config))
        return ExternalRollouts(
            program,
            tokenizer,
            external_limits,
            config.rollout.workers,
            trained_turns(config.rollout.trained_turns),
        )
    limits = Limits(
        max_turns=config.rollout.max_turns,
        max_tokens=longest_completion(config),
        time_limit=config.rollout.time_limit,
        max_seconds=config.rollout.max_seconds,
        room=room,
    )
    tools = check_rollouts(config, task, ())
    if not _hosts_in_workers(config, task):
        host = LocalHost(Sessions(task.environment(view(config))))
    else:
        host = WorkerHost(
            "groupwise.training.rollout_builder:environments_for_worker",
            {"config": config.model_dump(mode="json"), "task": task.spec},
            workers=config.rollout.workers,
            start_limit=config.rollout.start_limit,
        )
    return EnvironmentRollouts(host, tokenizer, limits, tools)


def longest_completion(config: RunConfig) -> int:
    """Largest number of tokens that may follow a prompt in training or evaluation, for the configured type of rollout."""
    completion_tokens = max(
        config.sampler.max_completion_length, config.eval.max_completion_length or 0
    )
    return config.rollout.longest(completion_tokens)


def longest_written(config: RunConfig) -> int:
    """Largest number of tokens that the policy may write in one rollout of training; algorithms take it as the longest completion."""
    return config.rollout.longest_written(config.sampler.max_completion_length)


async def first_prompts(
    config: RunConfig,
    task: Task,
    tokenizer: Any,
    examples: Sequence[Example],
    room: int | None = None,
) -> list[tuple[int, ...]]:
    """The policy's first prompts for these examples, as tokens: with tools, and with the environment's opening.

    `room` is as in `build_rollouts`. Raises TaskError if an environment gives no first prompt.
    """
    tools = check_rollouts(config, task, ())
    prompt_ids = [
        first_ids(tokenizer, example.prompt, tools, example.columns) for example in examples
    ]
    if config.rollout.type != "environment":
        return prompt_ids
    rollouts = build_rollouts(config, task, tokenizer, room)
    assert isinstance(rollouts, EnvironmentRollouts)
    params = SamplingParams(max_tokens=1)
    requests = [
        RolloutRequest(
            draw, example, ids, 1, partial(member_seed, config.training.seed, draw), params
        )
        for draw, (example, ids) in enumerate(zip(examples, prompt_ids, strict=True))
    ]
    try:
        await rollouts.start()
        return [await rollouts.opening(ask) for ask in requests]
    finally:
        await rollouts.close()


def environments_for_worker(config: Mapping[str, Any], task: str) -> Sessions:
    """The factory that environment workers call: builds the task's environments in the worker."""
    loaded = load_config(config).config
    return Sessions(task_of(loaded, task).environment(view(loaded)))


def _hosts_in_workers(config: RunConfig, task: Task) -> bool:
    return task.spec is not None and not config.rollout.in_process


class LazyTokenizer:
    """The model's tokenizer, loaded when a task first uses it; most rewards never do.

    Until then, a worker has imported neither transformers nor torch. The first use imports both (seconds, about 250 MB) if transformers
    has to load the tokenizer. torch cannot be hidden from transformers to save that: transformers decides once per process whether torch
    exists, and a reward that loads a model later would not have it.
    """

    def __init__(self, config: RunConfig) -> None:
        vars(self).update(_config=config, _tokenizer=None)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The tokenizer's class, for `isinstance`."""
        return self._load_tokenizer().__class__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._load_tokenizer(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._load_tokenizer(), name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._load_tokenizer()(*arguments, **keywords)

    def __len__(self) -> int:
        return len(self._load_tokenizer())

    def _load_tokenizer(self) -> Any:
        attributes = vars(self)
        if attributes["_tokenizer"] is None:
            from groupwise.engine.models.tokenizer import load_tokenizer

            attributes["_tokenizer"] = load_tokenizer(attributes["_config"].model)
        return attributes["_tokenizer"]
