"""The task that a config describes if no task file is given: `data` names the source of the rows, `rewards` the functions that
score them.

    data:                                      data:
      dataset_name: sums.jsonl                   dataset_mixture:
      answer_column: solution                      - {source: sums.jsonl, label: sums}
    rewards:                                       - {task: sort_words, weight: 0.5}
      reward_funcs: [correctness]              rewards: {reward_funcs: [correctness]}

A set of a mixture is a source, whose rows have the rewards of the config, or a whole task, whose rows come from its own hooks and
have its own rewards. The router distinguishes them by the column `task`, which holds the label of the set; every reward part is
recorded under that label.

With `task.mcp_servers`, rollouts have the tools of MCP servers (`mcp_tools`); with `task.agent`, a program of the user's plays
them (`external.agent`).

`find_task` returns the task of a command in either case. Workers find the task from the config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.core.errors import TaskError
from groupwise.core.settings.schema import Conflict, Strict, setting
from groupwise.core.settings.tree import tree_of
from groupwise.core.settings.validation import validate
from groupwise.core.settings.view import View
from groupwise.core.types import TASK_COLUMN, Example
from groupwise.tasks.contract import Command, Task, builtin_tasks, load_task
from groupwise.tasks.data.chat import Account, Row, Rows
from groupwise.tasks.data.config import DatasetConfig, MixtureEntry
from groupwise.tasks.data.loading import (
    Unscorable,
    always_scorable,
    held_out_parts,
    holds_out,
    set_location,
    training_parts,
    with_label,
)
from groupwise.tasks.data.mixture import Part, interleave, mix_parts, with_same_columns
from groupwise.tasks.data.pipelines import find_pipeline
from groupwise.tasks.data.sft_functions import format_rows
from groupwise.tasks.external.agent import AgentConfig, agent_program
from groupwise.tasks.external.protocol import Program
from groupwise.tasks.mcp_tools import McpServer, McpTools
from groupwise.tasks.rewards.registry import configured_rubric, registered_rewards
from groupwise.tasks.rewards.router import Router
from groupwise.tasks.rewards.rubric import Rubric

SPEC = "groupwise.tasks.configured"
"""This task's spec, by which runs' records and workers refer to it."""

TEXT = "text"
"""The column in which the tasks of a mixture put the formatted text of teacher rows."""


def find_task(source: object | None, config: View) -> Task:
    """The task given to a command; without one, the task of its config. Raises TaskError, also if both name data."""
    if source is None or source == SPEC:
        return ConfiguredTask(config)
    task = source if isinstance(source, Task) else load_task(source)
    if idle := _dataset_config(config).unused_with_task():
        keys = ", ".join(f"data.{key}" for key in idle)
        pronoun = "it" if len(idle) == 1 else "them"
        raise TaskError(
            f"{task.described} brings its own data, so that {keys} would have no effect. Leave {pronoun} out, or leave --task-module out "
            "and name the rewards in rewards.reward_funcs."
        )
    return task


class ConfiguredTaskConfig(Strict):
    """The section `task` of a config that names its data and no task."""

    mcp_servers: dict[str, McpServer] | None = setting(
        None, "Servers whose tools the policy may call, by names of your own.", min_length=1
    )
    agent: AgentConfig | None = setting(
        None, "A program of your own that plays attempts; see `groupwise.tasks.external.agent`."
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Report tools beside an agent, which has tools of its own."""
        if self.mcp_servers is not None and self.agent is not None:
            yield Conflict(
                "mcp_servers has no effect beside agent, which calls its tools itself; leave one out.",
                ("mcp_servers", "agent"),
            )


class ConfiguredTask(Task):
    """A task with the hooks that the config makes possible."""

    def __init__(self, config: View) -> None:
        """Raises TaskError if the config names no data, or mixes what cannot be mixed."""
        data = _dataset_config(config)
        if not data.names_data:
            raise TaskError(
                "No task was given, and the config names no data. Give a task with --task-module: a Python file, package.module, "
                f"module:attribute, or a built-in one ({', '.join(sorted(builtin_tasks()))}). Or say in the config where the rows are "
                "(data.dataset_name or data.dataset_mixture), and for rl and eval how they are scored (rewards.reward_funcs)."
            )
        if config.get("task") and (
            _is_supervised(config) or not {*config["task"]} & {*ConfiguredTaskConfig.model_fields}
        ):
            raise TaskError(
                "The config has a section `task`, but no task to read it: --task-module was not given. Leave the section out, or move it "
                "into `config` of a set of data.dataset_mixture. Without a task, rl and eval know task.mcp_servers and task.agent."
            )
        self._tasks = _task_sets(config, data)
        if not _is_supervised(config):
            # Rewards of the config apply to sources; a mixture that has only tasks does not use them.
            idle = [
                key
                for key in ("reward_funcs", "reward_weights")
                if config["rewards"][key] is not None
            ]
            if idle and not any(entry.source for entry in data.mixture):
                raise TaskError(
                    f"rewards.{idle[0]} would have no effect: it is for the sources of data.dataset_mixture, and every set of this one "
                    "is a task with rewards of its own. Leave it out, or give rewards.router the label of a task, whose rewards are then "
                    "replaced."
                )
        hooks = _Hooks(data, self._tasks)
        super().__init__(hooks, _dataset_name(data), SPEC, None)
        self._pipeline = data.preprocessing_pipeline
        self._possible = hooks.possible(config)

    def has(self, hook: str) -> bool:
        """See `Task.has`."""
        return hook in self._possible

    @property
    def described(self) -> str:
        """See `Task.described`."""
        return f"The config's task ({self.name})"

    def _hook_rows(self, hook: str, limit: int | None, **arguments: Any) -> Any:
        """See `Task._hook_rows`; the sets of a mixture respect `limit` for their streams too."""
        return self._call_hook(hook, **arguments, limit=limit)

    @property
    def files(self) -> tuple[str, ...]:
        """See `Task.files`: those of the tasks that are mixed, and of the pipeline that rows go through."""
        pipeline_file = find_pipeline(self._pipeline).file if self._pipeline else None
        return (
            *(file for task_set in self._tasks for file in task_set.task.files),
            *((pipeline_file,) if pipeline_file else ()),
        )

    def rubric(self, config: Any, tokenizer: Any, weights: Sequence[float] | None = None) -> Rubric:
        """See `Task.rubric`; in a mixture with tasks, weights are those of the config's own rewards."""
        return super().rubric(config, tokenizer, None if self._tasks else weights)

    def missing(self, hook: str, command: Command) -> str:
        """See `Task.missing`: names the config keys that would provide the hook."""
        match hook:
            case "get_reward_funcs":
                examples = ", ".join(sorted(registered_rewards())[:8])
                return (
                    f"The config names data, but no rewards, which `{command}` needs. Set rewards.reward_funcs, or rewards.router, to "
                    f"names such as {examples}, or give a task with --task-module."
                )
            case "get_eval_dataset":
                return (
                    f"The config names data, but none that are held out, which `{command}` needs. Set data.dataset_test_split (test_split "
                    "of a set of a mixture), or data.test_split_size to a share of the rows."
                )
            case _:
                return f"The config gives no {hook}, which `{command}` needs. Give a task with --task-module."


def _dataset_config(config: View) -> DatasetConfig:
    section = config["data"].to_dict()
    keys = {key: section[key] for key in DatasetConfig.model_fields}
    return DatasetConfig.model_validate_json(json.dumps(keys))


def _dataset_name(data: DatasetConfig) -> str:
    """`gsm8k` for `openai/gsm8k`, `sums` for `data/sums.jsonl`."""
    if data.dataset_name is None:
        return "mixture"
    basename = data.dataset_name.rstrip("/").rpartition("/")[2].partition(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", basename).strip("-") or "data"


# --- tasks in a mixture --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TaskSet:
    """A set that is a whole task."""

    entry: MixtureEntry
    where: str
    """Name of the set in messages."""
    label: str
    task: Task
    config: View
    """The config for its hooks, with its own section `task`."""

    def part(self, rows: Sequence[Row]) -> Part:
        return Part(
            self.where,
            [with_label(row, self.entry, self.label) for row in rows],
            self.entry.weight,
        )

    def account(self, hook: str) -> Account:
        """The account of rows that the task's own hook left out."""
        return self.task.accounts.get(hook, Account()).with_prefix(self.where)

    def lessons(self, hook: str, tokenizer: Any, limit: int | None) -> list[Row]:
        """The task's teacher rows, formatted by its own function."""
        rows = self.task.sft_rows(hook, self.config, tokenizer, limit)
        function = self.task.sft_function("get_sft_formatting_func", self.config, tokenizer)
        if function is None or not rows:
            return rows
        where = f"{self.where}: get_sft_formatting_func"
        return format_rows(rows, function, text_field=TEXT, where=where)


def _task_sets(config: View, data: DatasetConfig) -> list[_TaskSet]:
    sets = [
        _task_set(config, entry, entry.task, set_location(data, number))
        for number, entry in enumerate(data.mixture)
        if entry.task is not None
    ]
    labels = [task_set.label for task_set in sets] + [
        e.label or e.name for e in data.mixture if e.source
    ]
    for task_set in sets:
        if labels.count(task_set.label) > 1:
            raise TaskError(
                f"{task_set.where}: another set has the label {task_set.label!r} as well, so the rewards of a row would be ambiguous. Give "
                "each its own `label`."
            )
    return sets


def _task_set(config: View, entry: MixtureEntry, source: str, where: str) -> _TaskSet:
    task = load_task(source)
    supervised = _is_supervised(config)
    data, rewards = "get_sft_dataset" if supervised else "get_rl_dataset", "get_reward_funcs"
    command: Command = "sft" if supervised else "rl"
    for hook in (data,) if supervised else (data, rewards):
        if not task.has(hook):
            raise TaskError(f"{where}: {task.missing(hook, command)}")
        task.check_signature(hook)
    unmixable_hook = "get_sft_data_collator" if supervised else "get_environment"
    if task.has(unmixable_hook):
        raise TaskError(
            f"{where}: {task.described} has {unmixable_hook}, which a mixture has no place for. Use the task alone."
        )
    section: Any = entry.config or {}
    schema = task.config_schema()
    if schema is not None:
        tree = tree_of({"config": section}, where)
        section = validate(schema, tree, at=("config",)).model_dump(mode="json", by_alias=True)
    task_config = View({**config.to_dict(), "task": section})
    return _TaskSet(entry, where, entry.label or task.name, task, task_config)


# --- hooks ---------------------------------------------------------------------------------------


class _Hooks:
    """The hooks of a config's data. Each reads the data again, as those of a task file do.

    `limit`: most rows that are read of a stream, such as a task of a mixture may return.
    """

    def __init__(self, data: DatasetConfig, tasks: Sequence[_TaskSet]) -> None:
        self._data = data
        self._tasks = tasks
        self._rewards: Rubric | None = None

    def possible(self, config: View) -> set[str]:
        """The hooks that this config can provide."""
        if _is_supervised(config):
            return {"get_sft_dataset", *self._hook_if_held_out("get_sft_eval_dataset")}
        hooks = {"get_rl_dataset", "compute_metrics", *self._hook_if_held_out("get_eval_dataset")}
        names_rewards = any(
            config["rewards"].get(key) is not None for key in ("reward_funcs", "router")
        )
        if names_rewards or self._tasks:
            hooks.add("get_reward_funcs")
        if config.get("task"):
            hooks |= {"get_config_schema"}
            hooks |= {"get_program" if config["task"].get("agent") else "get_environment"}
        if any(task_set.task.has("get_rl_callbacks") for task_set in self._tasks):
            hooks.add("get_rl_callbacks")
        return hooks

    def _hook_if_held_out(self, hook: str) -> Iterator[str]:
        sources = [entry for entry in self._data.mixture if entry.source]
        if any(holds_out(self._data, entry) for entry in sources) or self._sets_with_hook(hook):
            yield hook

    def _sets_with_hook(self, hook: str) -> list[_TaskSet]:
        return [task_set for task_set in self._tasks if task_set.task.has(hook)]

    def get_rl_dataset(self, config: View, limit: int | None = None) -> Rows:
        """The rows of all sets, with their shares of an epoch, from the weights."""
        unscorable = self._unscorable_check(config)
        parts, account = training_parts(self._data, teacher=False, unscorable=unscorable)
        for task_set in self._tasks:
            examples = task_set.task.rl_examples(task_set.config, limit)
            parts.append(task_set.part(_example_rows(examples)))
            account += task_set.account("get_rl_dataset")
        rows, shares = mix_parts(with_same_columns(parts, "all"), self._data.seed)
        return Rows(rows, account, shares)

    def get_eval_dataset(self, config: View, limit: int | None = None) -> Rows:
        """The held-out rows of all sets, in turn."""
        unscorable = self._unscorable_check(config)
        parts, account = held_out_parts(self._data, teacher=False, unscorable=unscorable)
        for task_set in self._sets_with_hook("get_eval_dataset"):
            examples = task_set.task.eval_examples(task_set.config, limit)
            parts.append(task_set.part(_example_rows(examples)))
            account += task_set.account("get_eval_dataset")
        return Rows(interleave(with_same_columns(parts, "all")), account)

    def get_sft_dataset(self, config: View, tokenizer: Any, limit: int | None = None) -> Rows:
        """The teacher's rows of all sets, with their shares of an epoch, from the weights."""
        parts, account = training_parts(self._data, teacher=True)
        for task_set in self._tasks:
            parts.append(task_set.part(task_set.lessons("get_sft_dataset", tokenizer, limit)))
            account += task_set.account("get_sft_dataset")
        rows, shares = mix_parts(with_same_columns(parts, "all"), self._data.seed)
        return Rows(rows, account, shares)

    def get_sft_eval_dataset(self, config: View, tokenizer: Any, limit: int | None = None) -> Rows:
        """The teacher's held-out rows of all sets, in turn."""
        parts, account = held_out_parts(self._data, teacher=True)
        for task_set in self._sets_with_hook("get_sft_eval_dataset"):
            parts.append(task_set.part(task_set.lessons("get_sft_eval_dataset", tokenizer, limit)))
            account += task_set.account("get_sft_eval_dataset")
        return Rows(interleave(with_same_columns(parts, "all")), account)

    def get_reward_funcs(self, config: View, tokenizer: Any) -> Rubric:
        """The rewards of the config; in a mixture with tasks, also the rewards of the tasks, each under its label.

        A router of the config that has a task's label replaces the task's own.
        """
        if not self._tasks:
            rubric = self._config_rewards(config)
            assert rubric is not None, "the hook is there only with rewards"
            return rubric
        rubrics = {
            label: Rubric.of(functions, where=f"rewards of {label}")
            for label, functions in self._rewards_of_sources(config).items()
        }
        for task_set in self._tasks:
            if task_set.label not in rubrics:
                rubrics[task_set.label] = task_set.task.rubric(task_set.config, tokenizer)
        return Router.of(rubrics, where="rewards of data.dataset_mixture")

    def _config_rewards(self, config: View) -> Rubric | None:
        """The rewards that the config itself names; built once, because that may take long."""
        if self._rewards is None:
            section = config["rewards"].to_dict()
            if not self._tasks:
                self._rewards = configured_rubric(section)
            elif rubric := configured_rubric({**section, "default_task": None}):
                weights = section["reward_weights"]
                self._rewards = rubric if weights is None else rubric.reweighted(weights)
        return self._rewards

    def get_config_schema(self) -> type[ConfiguredTaskConfig]:
        """The section `task`, if there is one."""
        return ConfiguredTaskConfig

    def get_environment(self, config: View) -> McpTools:
        """The tools of the config's MCP servers."""
        tools = McpTools(config["task"]["mcp_servers"].to_dict())
        tools.check_limits(config["rollout"]["time_limit"])
        return tools

    def get_program(self, config: View) -> Program:
        """The program of the config's agent."""
        section = json.dumps(config["task"]["agent"].to_dict())
        return agent_program(AgentConfig.model_validate_json(section))

    def _unscorable_check(self, config: View) -> Unscorable:
        """The function that explains why a source's row cannot be scored."""
        rewards = self._config_rewards(config)
        return always_scorable if rewards is None else rewards.unscorable

    def _rewards_of_sources(self, config: View) -> dict[str, list[Any]]:
        """The rewards of the config by label: those of its router, or the same for all sources."""
        config_rubric = self._config_rewards(config)
        if config_rubric is None:
            return {}
        if isinstance(config_rubric, Router):
            return {
                label: _weighted_functions(rubric)
                for label, rubric in config_rubric.rubrics.items()
            }
        sources = [entry for entry in self._data.mixture if entry.source]
        return {entry.label or entry.name: _weighted_functions(config_rubric) for entry in sources}

    def get_rl_callbacks(self, config: View, tokenizer: Any, output_dir: str) -> list[object]:
        """The callbacks of all tasks."""
        return [
            callback
            for task_set in self._tasks
            for callback in task_set.task.rl_callbacks(task_set.config, tokenizer, output_dir)
        ]

    def compute_metrics(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        dataset_rows: Sequence[Row],
        config: View,
        tokenizer: Any,
    ) -> dict[str, Any]:
        """The number of samples, and each task's own metrics under its label."""
        metrics: dict[str, Any] = {"total_samples": len(dataset_rows)}
        details: dict[str, Any] = {}
        for task_set in self._sets_with_hook("compute_metrics"):
            indices = [
                n for n, row in enumerate(dataset_rows) if row.get(TASK_COLUMN) == task_set.label
            ]
            if not indices:
                continue
            result = task_set.task.compute_metrics(
                [prompts[n] for n in indices],
                [completions[n] for n in indices],
                [dataset_rows[n] for n in indices],
                task_set.config,
                tokenizer,
            )
            details[task_set.label] = result
            task_metrics = result.get("metrics", result)
            metrics |= {f"{task_set.label}/{name}": value for name, value in task_metrics.items()}
        return {"metrics": metrics, **details}


def _weighted_functions(rubric: Rubric) -> list[Any]:
    return list(zip(rubric.functions, rubric.weights, strict=True))


def _is_supervised(config: View) -> bool:
    """True for a config of `groupwise sft`, which has no rewards."""
    return "rewards" not in config


def _example_rows(examples: Sequence[Example]) -> list[Row]:
    return [{"prompt": example.prompt, **example.columns} for example in examples]
