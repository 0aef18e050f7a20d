"""What a task is: a Python file, module, class or object with some of the functions below, its hooks.

    get_rl_dataset(config)                      rows with a `prompt`; every other column reaches the rewards
    get_reward_funcs(config, tokenizer)         reward functions, (function, weight) pairs, or a Rubric
    get_eval_dataset(config)                    held-out rows
    compute_metrics(prompts, completions, dataset_rows, config, tokenizer)
                                                dict; its sub-dict `metrics` is printed, everything is written
    get_config_schema()                         a pydantic model of the config's `task:` section

`load_task` finds the task, `require` checks that it has what a verb needs, and the methods of `Task` call the hooks and check
what they return. Everything that is wrong with a task is a `TaskError` before a model is loaded.
"""

from __future__ import annotations

import difflib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast

from pydantic import BaseModel

import groupwise.tasks
from groupwise.data.examples import examples_from_rows
from groupwise.errors import TaskError
from groupwise.plugins import load, run_user_code
from groupwise.rewards.calling import RESERVED
from groupwise.rewards.rubric import Rubric
from groupwise.rewards.scoring import unpicklable
from groupwise.rewards.text import CompletionText, completion_text
from groupwise.types import Example, Prompt

Verb = Literal["rl", "eval"]

ENTRY_POINTS = "groupwise.tasks"
"""The entry-point group in which installed packages announce their tasks."""

LIMITED_BY = {"get_rl_dataset": "training.max_steps", "get_eval_dataset": "eval.max_prompts"}
"""The config key that says how much of an endless dataset is read."""

HOOKS = {
    "get_rl_dataset": ("config",),
    "get_reward_funcs": ("config", "tokenizer"),
    "get_rl_callbacks": ("config", "tokenizer", "output_dir"),
    "get_environment": ("config",),
    "get_eval_dataset": ("config",),
    "compute_metrics": ("prompts", "completions", "dataset_rows", "config", "tokenizer"),
    "get_config_schema": (),
}
"""Every hook with its parameters."""

NEEDED: dict[Verb, tuple[str, ...]] = {
    "rl": ("get_rl_dataset", "get_reward_funcs"),
    "eval": ("get_eval_dataset", "compute_metrics"),
}
USED_IF_THERE: dict[Verb, tuple[str, ...]] = {
    "rl": ("get_eval_dataset", "compute_metrics", "get_config_schema", "get_rl_callbacks"),
    "eval": ("get_reward_funcs", "get_config_schema"),
}
NOT_IN_THIS_VERSION = {"get_environment": "multi-turn environments"}


class Task:
    """A loaded task. Its methods call the hooks; each raises TaskError for what the hook does or returns wrongly."""

    def __init__(self, hooks: object, name: str, spec: str | None, file: str | None) -> None:
        self.name = name
        self.spec = spec
        """What `load_task` takes in another process to get the same; None where there is no such thing."""
        self.file = file
        self._hooks = hooks

    def has(self, hook: str) -> bool:
        """Whether the task has this hook."""
        return callable(getattr(self._hooks, hook, None))

    @property
    def described(self) -> str:
        """The task for messages: its name and where it stands."""
        return f"Task {self.name} ({self.file or 'no file'})"

    def rl_examples(self, config: Any, limit: int | None = None) -> list[Example]:
        """The training examples; of a stream without a length the first `limit`, without which it is refused."""
        return self._examples("get_rl_dataset", config, limit)

    def eval_examples(self, config: Any, limit: int | None = None) -> list[Example]:
        """The held-out examples, the first `limit`; without a limit, a stream without a length is refused."""
        return self._examples("get_eval_dataset", config, limit)[:limit]

    def rubric(self, config: Any, tokenizer: Any, weights: Sequence[float] | None = None) -> Rubric:
        """The rewards; `weights` replaces those that the task gives."""
        given = self._call("get_reward_funcs", config=config, tokenizer=tokenizer)
        return Rubric.of(given, weights, where=f"{self.described}: get_reward_funcs")

    def compute_metrics(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[CompletionText],
        dataset_rows: Sequence[dict[str, Any]],
        config: Any,
        tokenizer: Any,
    ) -> dict[str, Any]:
        """The task's own metrics over flat lists. The hook gets completions as text, also of chat prompts."""
        metrics = self._call(
            "compute_metrics",
            prompts=list(prompts),
            completions=[completion_text(completion) for completion in completions],
            dataset_rows=list(dataset_rows),
            config=config,
            tokenizer=tokenizer,
        )
        if not isinstance(metrics, dict):
            got = type(metrics).__name__
            raise TaskError(f"{self.described}: compute_metrics returned {got}. Expected a dict.")
        return cast("dict[str, Any]", metrics)

    def config_schema(self) -> type[BaseModel] | None:
        """The model of the config's `task:` section, or None where the section is free."""
        if not self.has("get_config_schema"):
            return None
        schema = self._call("get_config_schema")
        if not (inspect.isclass(schema) and issubclass(schema, BaseModel)):
            raise TaskError(
                f"{self.described}: get_config_schema returned {schema!r:.60}. "
                "Expected a class derived from pydantic.BaseModel."
            )
        return schema

    def refuse_callbacks(self, config: Any, tokenizer: Any, output_dir: str) -> None:
        """Raise TaskError if the task brings callbacks, which this version would not run."""
        if not self.has("get_rl_callbacks"):
            return
        given = self._call(
            "get_rl_callbacks", config=config, tokenizer=tokenizer, output_dir=output_dir
        )
        if given:
            raise TaskError(
                f"{self.described}: get_rl_callbacks returned callbacks, which are not in this version: they "
                "would never be called. Return an empty list or remove the hook."
            )

    def check_signature(self, hook: str) -> None:
        """Raise TaskError unless the hook can be called with what it is given."""
        function = getattr(self._hooks, hook)
        if inspect.iscoroutinefunction(function):
            raise TaskError(
                f"{self.described}: {hook} is async. Hooks are plain functions; remove `async`."
            )
        if _call_style(function, HOOKS[hook]) is None:
            raise TaskError(
                f"{self.described}: {hook} has the wrong parameters.\n"
                f"  expected: {_signature(hook)}\n"
                f"  found:    {hook}{inspect.signature(function)}"
            )

    def missing(self, hook: str, verb: Verb) -> str:
        """The message that says that the hook is not there."""
        there = [name for name in dir(self._hooks) if self._is_hook_like(name)]
        close = [name for name in there if name not in HOOKS and _alike(name, hook)]
        shown = ", ".join(there) or "none"
        renamed = f"\n  Is it {' or '.join(f'`{n}`' for n in close)}? Rename it." if close else ""
        return (
            f"{self.described} has no {hook}, which `{verb}` needs.\n"
            f"  expected: def {_signature(hook)}\n"
            f"  functions there are: {shown}{renamed}"
        )

    def _is_hook_like(self, name: str) -> bool:
        value = getattr(self._hooks, name, None)
        own = getattr(value, "__module__", None) == getattr(self._hooks, "__name__", None)
        return name in HOOKS or (
            inspect.isroutine(value)
            and not name.startswith("_")
            and (own or not isinstance(self._hooks, ModuleType))
        )

    def _examples(self, hook: str, config: Any, limit: int | None) -> list[Example]:
        where = f"{self.described}: {hook}"
        rows = self._call(hook, config=config)
        examples = run_user_code(  # a stream runs the task's code while it is read
            lambda: examples_from_rows(rows, where=where, limit=limit, limited_by=LIMITED_BY[hook]),
            what=f"{where} failed",
        )
        if self.has("get_reward_funcs"):
            _refuse_reserved_columns(examples, where)
        return examples

    def _call(self, hook: str, **arguments: Any) -> Any:
        function = getattr(self._hooks, hook)
        by_name = _call_style(function, HOOKS[hook]) == "names"
        what = f"{self.described}: {hook} failed"
        if by_name:
            return run_user_code(lambda: function(**arguments), what=what)
        return run_user_code(lambda: function(*arguments.values()), what=what)


def load_task(source: object) -> Task:
    """The task that `source` is: a path, module, `module:attribute`, name, or a module, class or object in memory."""
    if isinstance(source, str | Path):
        return _load_by_name(str(source))
    if isinstance(source, ModuleType):
        name = source.__name__.rpartition(".")[2]
        spec = source.__name__ if _importable(source.__name__) else None
        return Task(source, name, spec, getattr(source, "__file__", None))
    if inspect.isclass(source):
        hooks = run_user_code(
            source, what=f"Task class `{source.__name__}` failed when instantiated"
        )
        return Task(hooks, source.__name__, _spec_of_class(source), _file_of(source))
    return Task(source, type(source).__name__, None, _file_of(type(source)))


def require(task: Task, verb: Verb) -> None:
    """Raise TaskError unless the task has all that `rl` or `eval` needs, and nothing that would be left unused."""
    for hook, part in NOT_IN_THIS_VERSION.items():
        if task.has(hook):
            raise TaskError(
                f"{task.described}: {hook} is there, but {part} are not in this version. Remove the hook to run "
                "the task with single completions."
            )
    absent = [hook for hook in NEEDED[verb] if not task.has(hook)]
    if absent:
        raise TaskError("\n".join(task.missing(hook, verb) for hook in absent))
    for hook in (*NEEDED[verb], *(hook for hook in USED_IF_THERE[verb] if task.has(hook))):
        task.check_signature(hook)


def check_reward_columns(
    task: Task, rubric: Rubric, examples: Sequence[Example], *, in_workers: bool = False
) -> None:
    """Raise TaskError if a reward function asks for a column that some example lacks.

    With `in_workers`, also if the first example's columns cannot be sent to another process.
    """
    if not examples:
        return
    stuck = unpicklable(examples[0].columns) if in_workers else []
    if stuck:
        raise TaskError(
            f"{task.described}: the dataset's column {' and '.join(f'`{name}`' for name in stuck)} holds values that "
            "cannot be sent to the reward workers (pickle refuses them). Keep plain values in the dataset and make "
            "the objects in the reward function, or set rewards.in_process."
        )
    columns = set(examples[0].columns)
    for example in examples[1:]:
        columns &= example.columns.keys()
    rubric.check_columns(columns, where=f"{task.described}: get_reward_funcs")


def builtin_tasks() -> dict[str, str]:
    """The names of the built-in tasks and their modules."""
    modules = pkgutil.iter_modules(groupwise.tasks.__path__, "groupwise.tasks.")
    own = __name__
    return {m.name.rpartition(".")[2]: m.name for m in modules if m.name != own}


def _load_by_name(spec: str) -> Task:
    plugin = load(spec, builtins=builtin_tasks(), entry_points=ENTRY_POINTS)
    if isinstance(plugin.object, ModuleType):
        stem = Path(plugin.file).stem if plugin.file else plugin.module.__name__
        return Task(plugin.object, stem, plugin.spec, plugin.file)
    name = plugin.spec.rpartition(":")[2]
    return Task(plugin.object, name, plugin.spec, plugin.file)


def _importable(module: str) -> bool:
    """Whether another process can import it: not a script, a notebook or a file loaded by path."""
    return module != "__main__" and not module.startswith("groupwise_user_")


def _spec_of_class(kind: type) -> str | None:
    module = sys.modules.get(kind.__module__)
    if "<locals>" in kind.__qualname__ or module is None or not _importable(kind.__module__):
        return None
    return f"{kind.__module__}:{kind.__qualname__}"


def _file_of(kind: type) -> str | None:
    return getattr(sys.modules.get(kind.__module__), "__file__", None)


def _call_style(
    function: Callable[..., Any], names: Sequence[str]
) -> Literal["names", "order"] | None:
    """Whether a hook is called with keywords (it uses our names, in any order) or by position, or cannot be."""
    signature = inspect.signature(function)
    if _binds(signature, (), names):
        return "names"
    found = list(signature.parameters)
    displaced = [name for name in names if name in found and found.index(name) != names.index(name)]
    return "order" if _binds(signature, names, ()) and not displaced else None


def _binds(
    signature: inspect.Signature, by_position: Iterable[str], by_name: Iterable[str]
) -> bool:
    try:
        signature.bind(*by_position, **dict.fromkeys(by_name))
    except TypeError:
        return False
    return True


def _signature(hook: str) -> str:
    return f"{hook}({', '.join(HOOKS[hook])})"


def _alike(name: str, hook: str) -> bool:
    """`get_dataset` for `get_rl_dataset`, `rewards` for `get_reward_funcs`, `compute_metric` for `compute_metrics`."""
    core = hook.removeprefix("get_").removeprefix("rl_").removeprefix("eval_").partition("_")[0]
    return difflib.SequenceMatcher(None, name, hook).ratio() >= 0.7 or core in name


def _refuse_reserved_columns(examples: Sequence[Example], where: str) -> None:
    taken = [name for name in RESERVED if any(name in example.columns for example in examples)]
    if taken:
        raise TaskError(
            f"{where}: the dataset has a column {' and '.join(f'`{name}`' for name in taken)}, but reward functions "
            "get arguments of that name. Rename the column."
        )
