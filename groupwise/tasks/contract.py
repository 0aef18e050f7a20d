"""Defines a task: a Python file, module, class or object with some of the functions below, its hooks.

    get_rl_dataset(config)                      rows with a `prompt`; every other column reaches the rewards
    get_reward_funcs(config, tokenizer)         reward functions, (function, weight) pairs, or a Rubric
    get_eval_dataset(config)                    held-out rows
    compute_metrics(prompts, completions, dataset_rows, config, tokenizer)
                                                dict; its sub-dict `metrics` is printed, everything is written
    get_rl_callbacks(config, tokenizer, output_dir)
                                                list of callbacks; see `groupwise.training.callbacks.base`
    get_environment(config)                     answers the policy turn by turn; see `groupwise.tasks.environment`
    get_program(config)                         the program of an environment that plays by itself; see `groupwise.tasks.external`
    teacher_prompt(example)                     what the teacher of a distillation reads; see `groupwise.tasks.rollouts.teacher_prompts`
    get_config_schema()                         a pydantic model of the config's `task:` section
    get_sft_dataset(config, tokenizer)          rows of a teacher; see `groupwise.tasks.data.sft`
    get_sft_eval_dataset(config, tokenizer)     held-out rows
    get_sft_formatting_func(config, tokenizer)  a function from a row, or a batch, to text or messages
    get_sft_data_collator(config, tokenizer)    a function from rows to a batch with labels

`load_task` finds the task, `require` checks that it has the hooks that a command needs, and the methods of `Task` call the hooks and
check their results. Every defect of a task raises a `TaskError` before a model is loaded.
"""

from __future__ import annotations

import difflib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

from pydantic import BaseModel

from groupwise.core.errors import TaskError
from groupwise.core.plugins import load, run_user_code
from groupwise.core.reward_call.call import RESERVED
from groupwise.core.reward_call.request import unpicklable
from groupwise.core.reward_call.text import CompletionText, completion_text
from groupwise.core.types import Example, Prompt
from groupwise.tasks.data.chat import Account, Rows
from groupwise.tasks.data.examples import examples_from_rows, read_rows
from groupwise.tasks.data.order import Share
from groupwise.tasks.data.sft import HOLDING
from groupwise.tasks.environment import (
    GIVEN,
    EnvironmentFactory,
    check_factory,
    check_methods,
    check_reset,
)
from groupwise.tasks.external.kinds import KINDS, split_spec
from groupwise.tasks.external.protocol import Program
from groupwise.tasks.external.task import ExternalHooks
from groupwise.tasks.rewards.rubric import Rubric

Command = Literal["rl", "sft", "eval"]

ENTRY_POINTS = "groupwise.tasks"
"""The entry-point group in which installed packages announce their tasks."""

LIMITED_BY = {
    "get_rl_dataset": "training.max_steps",
    "get_eval_dataset": "eval.max_prompts",
    "get_sft_dataset": "training.max_steps",
    "get_sft_eval_dataset": "eval.max_examples",
}
"""The config key that limits how much of an endless dataset is read."""

HOOKS = {
    "get_rl_dataset": ("config",),
    "get_reward_funcs": ("config", "tokenizer"),
    "get_rl_callbacks": ("config", "tokenizer", "output_dir"),
    "get_environment": ("config",),
    "get_program": ("config",),
    "teacher_prompt": ("example",),
    "get_eval_dataset": ("config",),
    "compute_metrics": ("prompts", "completions", "dataset_rows", "config", "tokenizer"),
    "get_config_schema": (),
    "get_sft_dataset": ("config", "tokenizer"),
    "get_sft_eval_dataset": ("config", "tokenizer"),
    "get_sft_formatting_func": ("config", "tokenizer"),
    "get_sft_data_collator": ("config", "tokenizer"),
}
"""Every hook with its parameters."""

NEEDED: dict[Command, tuple[str, ...]] = {
    "rl": ("get_rl_dataset", "get_reward_funcs"),
    "sft": ("get_sft_dataset",),
    "eval": ("get_eval_dataset", "compute_metrics"),
}
USED_IF_THERE: dict[Command, tuple[str, ...]] = {
    "rl": (
        "get_eval_dataset",
        "compute_metrics",
        "get_config_schema",
        "get_rl_callbacks",
        "get_environment",
        "get_program",
        "teacher_prompt",
    ),
    "sft": (
        "get_sft_eval_dataset",
        "get_sft_formatting_func",
        "get_sft_data_collator",
        "get_config_schema",
    ),
    "eval": ("get_reward_funcs", "get_config_schema", "get_environment", "get_program"),
}
GIVING_REWARDS = ("get_reward_funcs", "get_environment", "get_program")
"""Hooks of which one must be there, so that rollouts can be scored."""
SUBSTITUTES: dict[str, tuple[str, ...]] = {
    "get_reward_funcs": ("get_environment", "get_program"),
    "compute_metrics": GIVING_REWARDS,
}
"""A needed hook may be absent if one of these is there: an environment may give the rewards itself, and the means of the rewards are
metrics."""
NO_TASKS = ("wordle_rules", "reasoning_gym_answers", "reasoning_gym_problems")
"""Modules of `tasks/builtin` that are not tasks."""


class Task:
    """A loaded task. Its methods call the hooks; each raises TaskError if the hook fails or returns something invalid."""

    def __init__(self, hooks: object, name: str, spec: str | None, file: str | None) -> None:
        self.name = name
        self.spec = spec
        """Spec by which `load_task` finds the same task in another process; None if there is none."""
        self.file = file
        self.accounts: dict[str, Account] = {}
        """Counts of the rows that a hook left out, by hook, if the hook reports them."""
        self.shares: dict[str, tuple[Share, ...]] = {}
        """Shares of an epoch of a hook's rows, by hook; empty if an epoch has each row once."""
        self._hooks = hooks
        self._made: dict[str, tuple[Any, Any]] = {}
        """Configs and results of `_call_once`, by hook."""

    def with_hook(self, hook: str, function: Callable[..., Any]) -> Task:
        """The same task with this function as a hook, replacing the task's own if it has one."""
        hooks = _Hooks(self._hooks, {hook: function})
        return Task(hooks, self.name, self.spec, self.file)

    def has(self, hook: str) -> bool:
        """True if the task has this hook."""
        return callable(getattr(self._hooks, hook, None))

    @property
    def files(self) -> tuple[str, ...]:
        """The files with its hooks."""
        return (self.file,) if self.file else ()

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that a notebook's task adds to those of the run."""
        return dict(getattr(self._hooks, "facts_of_the_notebook", {}))

    @property
    def described(self) -> str:
        """The task in messages: its name and location."""
        return f"Task {self.name} ({self.file or 'no file'})"

    def rl_examples(self, config: Any, limit: int | None = None) -> list[Example]:
        """The training examples. Of a stream without a length, the first `limit` are read; without a limit it is refused."""
        return self._read_examples("get_rl_dataset", config, limit)

    def eval_examples(self, config: Any, limit: int | None = None) -> list[Example]:
        """The first `limit` held-out examples. A stream without a length is refused if there is no limit."""
        return self._read_examples("get_eval_dataset", config, limit)[:limit]

    def sft_rows(
        self, hook: str, config: Any, tokenizer: Any, limit: int | None = None
    ) -> list[dict[str, Any]]:
        """The rows of `get_sft_dataset` or `get_sft_eval_dataset`, unchanged; a stream is read up to `limit`.

        An optional hook may return None for no rows.
        """
        where = f"{self.described}: {hook}"
        rows = self._hook_rows(hook, limit, config=config, tokenizer=tokenizer)
        self._note_account(hook, rows)
        if rows is None and hook not in NEEDED["sft"]:
            return []
        return run_user_code(  # a stream runs the task's code while it is read
            lambda: read_rows(
                rows, where=where, limit=limit, limited_by=LIMITED_BY[hook], holding=HOLDING
            ),
            what=f"{where} failed",
        )

    def sft_function(self, hook: str, config: Any, tokenizer: Any) -> Callable[[Any], Any] | None:
        """The function that `get_sft_formatting_func` or `get_sft_data_collator` returns; None if the hook is missing or returns None."""
        if not self.has(hook):
            return None
        function = self._call_hook(hook, config=config, tokenizer=tokenizer)
        if function is not None and not callable(function):
            raise TaskError(
                f"{self.described}: {hook} returned {type(function).__name__}. Expected a function."
            )
        return function

    def rubric(self, config: Any, tokenizer: Any, weights: Sequence[float] | None = None) -> Rubric:
        """The rewards; `weights` replaces the task's own weights."""
        functions = self._call_hook("get_reward_funcs", config=config, tokenizer=tokenizer)
        return Rubric.of(functions, weights, where=f"{self.described}: get_reward_funcs")

    @property
    def gives_rewards(self) -> bool:
        """True if rollouts can be scored: by reward functions, or by the environment itself."""
        return any(map(self.has, GIVING_REWARDS))

    @property
    def played_by(self) -> Literal["environment", "external"] | None:
        """The value of `rollout.type` that the task needs for rollouts of several turns; None if it has none."""
        if self.has("get_program"):
            return "external"
        return "environment" if self.has("get_environment") else None

    def program(self, config: Any) -> Program:
        """The program of an environment that plays by itself."""
        program = self._call_once("get_program", config)
        if not isinstance(program, Program):
            raise TaskError(
                f"{self.described}: get_program returned {type(program).__name__}. Expected a groupwise.tasks.external.protocol.Program."
            )
        return program

    def environment(self, config: Any) -> EnvironmentFactory:
        """The factory of environments, one for each rollout."""
        where = f"{self.described}: get_environment"
        factory = check_factory(self._call_once("get_environment", config), where)
        silent = not getattr(factory, "gives_rewards", True)
        if silent and not self.has("get_reward_funcs"):
            raise TaskError(
                f"{where} returned tools that give no reward, and there is no get_reward_funcs. Add the hook, or give "
                "Tools a class with a method `reward`."
            )
        return factory

    def check_environment(self, config: Any, examples: Sequence[Example]) -> EnvironmentFactory:
        """The same, after checking that its methods can be called and that every example has the columns that its `reset` asks for."""
        factory = self.environment(config)
        if inspect.isclass(factory):
            check_methods(factory, f"{self.described}: get_environment")
        if not examples:
            return factory
        columns = set(examples[0].columns).intersection(*(example.columns for example in examples))
        _refuse_columns(GIVEN, examples, f"{self.described}", "`reset` gets")
        check_reset(factory, columns, f"{self.described}: get_environment")
        return factory

    def teacher_prompt(self, example: Example) -> Prompt:
        """What the teacher of a distillation reads in place of the example's prompt. The hook gets the row, with its `prompt`."""
        row = {**example.columns, "prompt": example.prompt}
        prompt = self._call_hook("teacher_prompt", example=row)
        if not isinstance(prompt, str | list):
            raise TaskError(
                f"{self.described}: teacher_prompt returned {type(prompt).__name__} for row {example.row_number}. Expected text, or a list "
                "of messages."
            )
        return cast("Prompt", prompt)

    def compute_metrics(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[CompletionText],
        dataset_rows: Sequence[dict[str, Any]],
        config: Any,
        tokenizer: Any,
    ) -> dict[str, Any]:
        """The task's own metrics over flat lists.

        The hook gets completions as text, also for chat prompts; as message lists if it sets `compute_metrics.reads_messages =
        True`.
        """
        hook = getattr(self._hooks, "compute_metrics", None)
        reads_messages = getattr(hook, "reads_messages", False) is True
        metrics = self._call_hook(
            "compute_metrics",
            prompts=list(prompts),
            completions=list(completions)
            if reads_messages
            else [completion_text(c) for c in completions],
            dataset_rows=list(dataset_rows),
            config=config,
            tokenizer=tokenizer,
        )
        if not isinstance(metrics, dict):
            type_name = type(metrics).__name__
            raise TaskError(
                f"{self.described}: compute_metrics returned {type_name}. Expected a dict."
            )
        return cast("dict[str, Any]", metrics)

    def config_schema(self) -> type[BaseModel] | None:
        """The model of the config's `task:` section, or None if the section is free-form."""
        if not self.has("get_config_schema"):
            return None
        schema = self._call_hook("get_config_schema")
        if not (inspect.isclass(schema) and issubclass(schema, BaseModel)):
            raise TaskError(
                f"{self.described}: get_config_schema returned {schema!r:.60}. "
                "Expected a class derived from pydantic.BaseModel."
            )
        return schema

    def rl_callbacks(self, config: Any, tokenizer: Any, output_dir: str) -> Sequence[object]:
        """The task's callbacks for its runs; see `groupwise.training.callbacks.registry`. Empty without the hook."""
        if not self.has("get_rl_callbacks"):
            return ()
        callbacks = self._call_hook(
            "get_rl_callbacks", config=config, tokenizer=tokenizer, output_dir=output_dir
        )
        if callbacks is not None and not isinstance(callbacks, list | tuple):
            type_name = type(callbacks).__name__
            raise TaskError(
                f"{self.described}: get_rl_callbacks returned {type_name}. Expected a list of callbacks."
            )
        return cast("Sequence[object]", callbacks or ())

    def check_signature(self, hook: str) -> None:
        """Raise TaskError unless the hook can be called with its arguments."""
        function = getattr(self._hooks, hook)
        if inspect.iscoroutinefunction(function):
            raise TaskError(
                f"{self.described}: {hook} is async. Hooks are plain functions; remove `async`."
            )
        if _call_style(function, HOOKS[hook]) is None:
            raise TaskError(
                f"{self.described}: {hook} has the wrong parameters.\n"
                f"  expected: {_hook_signature(hook)}\n"
                f"  found:    {hook}{inspect.signature(function)}"
            )

    def missing(self, hook: str, command: Command) -> str:
        """The error message for a missing hook."""
        functions = [name for name in dir(self._hooks) if self._is_hook_like(name)]
        close = [
            name
            for name in functions
            if name not in HOOKS and (_is_similar(name, hook) or _core_of(hook) in name)
        ]
        names = ", ".join(functions) or "none"
        others = " or ".join(SUBSTITUTES.get(hook, ()))
        substitutes = f" (or {others})" if others else ""
        hint = f"\n  Is it {' or '.join(f'`{n}`' for n in close)}? Rename it." if close else ""
        return (
            f"{self.described} has no {hook}, which `{command}` needs{substitutes}.\n"
            f"  expected: def {_hook_signature(hook)}\n"
            f"  functions there are: {names}{hint}"
        )

    def misspelt(self) -> dict[str, str]:
        """Functions that have nearly the name of a hook which the task lacks, and its parameters: name -> hook."""
        names = [name for name in dir(self._hooks) if self._is_hook_like(name)]
        return {
            name: hook
            for hook in HOOKS
            for name in names
            if not self.has(hook)
            and name not in HOOKS
            and _is_similar(name, hook)
            and _call_style(getattr(self._hooks, name), HOOKS[hook]) == "names"
        }

    def _is_hook_like(self, name: str) -> bool:
        value = getattr(self._hooks, name, None)
        is_local = getattr(value, "__module__", None) == getattr(self._hooks, "__name__", None)
        return name in HOOKS or (
            inspect.isroutine(value)
            and not name.startswith("_")
            and (is_local or not isinstance(self._hooks, ModuleType))
        )

    def _read_examples(self, hook: str, config: Any, limit: int | None) -> list[Example]:
        where = f"{self.described}: {hook}"
        rows = self._hook_rows(hook, limit, config=config)
        self._note_account(hook, rows)
        examples = run_user_code(  # a stream runs the task's code while it is read
            lambda: examples_from_rows(rows, where=where, limit=limit, limited_by=LIMITED_BY[hook]),
            what=f"{where} failed",
        )
        if self.gives_rewards:
            _refuse_columns(RESERVED, examples, where, "reward functions get")
        return examples

    def _hook_rows(self, hook: str, limit: int | None, **arguments: Any) -> Any:
        """A hook's rows; of a stream, the caller reads at most `limit` rows."""
        return self._call_hook(hook, **arguments)

    def _note_account(self, hook: str, rows: object) -> None:
        if isinstance(rows, Rows):
            self.accounts[hook], self.shares[hook] = rows.account, rows.shares

    def _call_once(self, hook: str, config: Any) -> Any:
        """The result of a hook that may start processes, such as servers of tools: it is called once for a config, to check and to run."""
        if hook not in self._made or self._made[hook][0] != config:
            self._made[hook] = (config, self._call_hook(hook, config=config))
        return self._made[hook][1]

    def _call_hook(self, hook: str, **arguments: Any) -> Any:
        function = getattr(self._hooks, hook)
        by_name = _call_style(function, HOOKS[hook]) == "names"
        what = f"{self.described}: {hook} failed"
        if by_name:
            return run_user_code(lambda: function(**arguments), what=what)
        return run_user_code(lambda: function(*arguments.values()), what=what)


class _Hooks:
    """The hooks of a task, some of them replaced by other functions."""

    def __init__(self, hooks: object, replacements: Mapping[str, Callable[..., Any]]) -> None:
        self._hooks = hooks
        vars(self).update(replacements)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hooks, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._hooks), *vars(self)})


def load_task(source: object) -> Task:
    """The task that `source` is: a path, module, `module:attribute`, name, environment of another library (`verifiers:NAME`), or a module,
    class or object in memory.
    """
    if (external := split_spec(source)) is not None:
        kind, name = external
        return Task(
            ExternalHooks(kind, name), re.sub(r"[^A-Za-z0-9_-]+", "-", name), str(source), None
        )
    if isinstance(source, str | Path):
        # As in `gym:CartPole-v1`: a kind of environment that there is not.
        kinds = ", ".join(f"{kind}:NAME" for kind in sorted(KINDS))
        hint = f"Environments of other libraries are {kinds}." if ":" in str(source) else ""
        plugin = load(str(source), builtins=builtin_tasks(), entry_points=ENTRY_POINTS, hint=hint)
        if isinstance(plugin.object, ModuleType):
            stem = Path(plugin.file).stem if plugin.file else plugin.module.__name__
            return Task(plugin.object, stem, plugin.spec, plugin.file)
        return Task(plugin.object, plugin.spec.rpartition(":")[2], plugin.spec, plugin.file)
    if isinstance(source, ModuleType):
        name = source.__name__.rpartition(".")[2]
        spec = source.__name__ if _is_importable(source.__name__) else None
        return Task(source, name, spec, getattr(source, "__file__", None))
    if inspect.isclass(source):
        hooks = run_user_code(
            source, what=f"Task class `{source.__name__}` failed when instantiated"
        )
        return Task(hooks, source.__name__, _spec_of_class(source), _file_of(source))
    return Task(source, type(source).__name__, None, _file_of(type(source)))


def absent_hooks(task: Task, command: Command) -> list[str]:
    """The hooks that the command needs, and for which the task has no substitute either."""
    return [
        hook
        for hook in NEEDED[command]
        if not any(map(task.has, (hook, *SUBSTITUTES.get(hook, ()))))
    ]


def require(task: Task, command: Command) -> None:
    """Raise TaskError unless the task has everything that `rl` or `eval` needs, and nothing that would go unused."""
    if absent := absent_hooks(task, command):
        raise TaskError("\n".join(task.missing(hook, command) for hook in absent))
    for hook in (*NEEDED[command], *USED_IF_THERE[command]):
        if task.has(hook):
            task.check_signature(hook)


def check_reward_columns(
    task: Task, rubric: Rubric | None, examples: Sequence[Example], *, in_workers: bool = False
) -> None:
    """Raise TaskError if the rewards cannot score some example, because it lacks a column that they need or has an unknown label.

    With `in_workers`, also if the first example's columns cannot be sent to another process.
    """
    if not examples or rubric is None:
        return
    stuck = unpicklable(examples[0].columns) if in_workers else []
    if stuck:
        raise TaskError(
            f"{task.described}: the dataset's column {' and '.join(f'`{name}`' for name in stuck)} holds values that "
            "cannot be sent to the reward workers (pickle refuses them). Keep plain values in the dataset and make "
            "the objects in the reward function, or set rewards.in_process."
        )
    rubric.check_rows({example.index: example.columns for example in examples})


def builtin_tasks() -> dict[str, str]:
    """The names of the built-in tasks and their modules."""
    folder = str(Path(__file__).with_name("builtin"))
    modules = pkgutil.iter_modules([folder], "groupwise.tasks.builtin.")
    modules_by_name = {module.name.rpartition(".")[2]: module.name for module in modules}
    return {name: module for name, module in modules_by_name.items() if name not in NO_TASKS}


def _is_importable(module: str) -> bool:
    """True if another process can import it: false for a script, a notebook or a file loaded by path."""
    return module != "__main__" and not module.startswith("groupwise_user_")


def _spec_of_class(kind: type) -> str | None:
    module = sys.modules.get(kind.__module__)
    if "<locals>" in kind.__qualname__ or module is None or not _is_importable(kind.__module__):
        return None
    return f"{kind.__module__}:{kind.__qualname__}"


def _file_of(kind: type) -> str | None:
    return getattr(sys.modules.get(kind.__module__), "__file__", None)


def _call_style(
    function: Callable[..., Any], names: Sequence[str]
) -> Literal["names", "order"] | None:
    """`names` if a hook is called with keywords (it uses our names, in any order), `order` if by position, None if it cannot be called."""
    signature = inspect.signature(function)
    if _accepts_arguments(signature, (), names):
        return "names"
    parameters = list(signature.parameters)
    displaced = [
        name for name in names if name in parameters and parameters.index(name) != names.index(name)
    ]
    return "order" if _accepts_arguments(signature, names, ()) and not displaced else None


def _accepts_arguments(
    signature: inspect.Signature, by_position: Iterable[str], by_name: Iterable[str]
) -> bool:
    try:
        signature.bind(*by_position, **dict.fromkeys(by_name))
    except TypeError:
        return False
    return True


def _hook_signature(hook: str) -> str:
    return f"{hook}({', '.join(HOOKS[hook])})"


def _is_similar(name: str, hook: str) -> bool:
    """`get_dataset` or `get_rl_data` for `get_rl_dataset`, `compute_metric` for `compute_metrics`."""
    return difflib.SequenceMatcher(None, name, hook).ratio() >= 0.7


def _core_of(hook: str) -> str:
    """The word that says what a hook is for: `reward` for `get_reward_funcs`."""
    return hook.removeprefix("get_").removeprefix("rl_").removeprefix("eval_").partition("_")[0]


def _refuse_columns(
    names: Sequence[str], examples: Sequence[Example], where: str, who_gets: str
) -> None:
    conflicts = [name for name in names if any(name in example.columns for example in examples)]
    if conflicts:
        raise TaskError(
            f"{where}: the dataset has a column {' and '.join(f'`{name}`' for name in conflicts)}, but {who_gets} "
            "arguments of that name. Rename the column."
        )
