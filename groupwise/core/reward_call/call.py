"""How a reward function is called, and which results it may return.

The convention is TRL's: `f(prompts=…, completions=…, **columns) -> list[float | None]`, one call for a group, one entry
for each member, None or NaN if the reward does not apply. A function receives the arguments that it names, or all of them through
`**kwargs`: the columns, and `prompt_ids`, `completion_ids`, `rollout_notes`, `trainer_state`, `log_metric` and `log_extra`. It may be
async, a method, a partial or an object with `__call__`. A function that is not async is called outside any running event loop, so it may
run its own.
`asyncio.get_event_loop()` returns a loop that lives as long as the thread, for clients that the function keeps between calls; if the
function returns an awaitable, it is awaited on that loop.

`call` never raises because of the function. An exception or a result of the wrong shape fails all rollouts of the call,
with that as the reason; an entry that is not a finite number fails only its own rollout.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
import weakref
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from keyword import iskeyword
from typing import Any, NoReturn, cast

from groupwise.core.errors import TaskError
from groupwise.core.plugins import explain, printable
from groupwise.core.reward_call.plain import plain
from groupwise.core.reward_call.request import ORIGIN, ScoreRequest
from groupwise.core.terminal.quantities import counted

RewardCallable = Callable[..., Any]

OPTIONAL_ARGUMENTS = (
    "prompts_seen", "prompt_ids", "completion_ids", "rollout_notes", "trainer_state", "log_metric", "log_extra",
)  # fmt: skip
"""Arguments that a function may take in addition to prompts, completions and columns."""

LARGEST = 1e15
"""Larger rewards are failures: their squares, in the standard deviation, would overflow the learner's numbers."""

RESERVED = ("prompts", "completions", *OPTIONAL_ARGUMENTS)
"""Names that no dataset column may have, because they are arguments of reward functions."""


@dataclass(frozen=True)
class TrainerState:
    """The state of the run, for rewards that change over time. Names and meanings are TRL's, as far as the values are known here."""

    global_step: int
    """Steps finished before the one that the group is drawn for."""
    max_steps: int
    steps_per_epoch: float | None = None
    """Not in TRL; None if the number of steps in one pass over the rows is unknown."""
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    """True in every process: each group is scored once."""
    is_hyper_param_search: bool = False
    trial_name: None = None
    trial_params: None = None
    log_history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """This field and all below keep TRL's values from before the first step: rewards run in parallel to training."""
    best_metric: None = None
    best_global_step: None = None
    best_model_checkpoint: None = None
    total_flos: int = 0
    num_input_tokens_seen: int = 0
    train_batch_size: None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def epoch(self) -> float:
        """Passes over the rows so far."""
        if self.steps_per_epoch is None:
            raise AttributeError  # `__getattr__` says more
        return self.global_step / self.steps_per_epoch

    @property
    def num_train_epochs(self) -> int:
        """Passes over the rows that all steps make; a last partial pass counts as one."""
        if self.steps_per_epoch is None:
            raise AttributeError
        return math.ceil(self.max_steps / self.steps_per_epoch)

    def __getattr__(self, name: str) -> NoReturn:
        names = ", ".join(field.name for field in fields(self))
        epochs = "" if self.steps_per_epoch is None else ", epoch, num_train_epochs"
        raise AttributeError(
            f"`trainer_state` has no `{name}` here: rewards are called outside the training loop, and only get its position. "
            f"There are: {names}{epochs}. Logs and evaluations are for callbacks; see get_rl_callbacks."
        )


@dataclass(slots=True)
class Logged:
    """The metrics and notes that one function recorded during one call."""

    metrics: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    extras: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])


@dataclass(frozen=True, slots=True)
class FunctionResult:
    """One function's result for a group: for each member a value (None: does not apply) or the reason for a failure."""

    values: tuple[float | None, ...]
    failures: tuple[str | None, ...]
    logged: Logged = field(default_factory=Logged)


class Failed(float):
    """Replaces the value of one completion that a function cannot score: NaN, with a reason."""

    def __new__(cls, reason: str) -> Failed:
        """`reason` completes the sentence "reward `name` …"."""
        failure = super().__new__(cls, math.nan)
        failure.reason = reason
        return failure

    reason: str


def score_each_row(score: Callable[..., float | None], *columns: Iterable[Any]) -> list[Any]:
    """Call `score` for each row of the columns. If it raises, only that row fails, not the whole group."""
    values: list[float | None] = []
    for row in zip(*columns, strict=True):
        try:
            values.append(score(*row))
        except Exception as error:  # noqa: BLE001 — any text may be a completion, and other rows must keep their values
            values.append(Failed(f"raised {explain(error).strip()}"))
    return values


class _InvalidResult(Exception):
    """A result that is not a list of one number for each member; the exception's text says what it is instead."""


def name_of(function: RewardCallable) -> str:
    """The name of a function in metrics and messages."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "name", None) or getattr(function, "__name__", None)
    return printable(name.strip("<>")) if isinstance(name, str) else type(function).__name__


def check_function(function: object, where: str) -> None:
    """Raise TaskError unless `function` can be called the way reward functions are."""
    if inspect.isclass(function):
        raise TaskError(
            f"{where}: `{function.__name__}` is a class; give an instance, `{function.__name__}()`."
        )
    if not callable(function):
        repr_text = "" if function is None else f" ({function!r:.60})"
        is_name = isinstance(function, str | dict)
        remedy = (
            " groupwise.tasks.rewards.get_reward_funcs(names, config) makes functions of names, each with its weight."
            if is_name
            else ""
        )
        raise TaskError(
            f"{where}: expected a function (prompts, completions, **columns) -> list[float | None], "
            f"got {type(function).__name__}{repr_text}.{remedy}"
        )
    for parameter in _parameters(function, where):
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise TaskError(
                f"{where}: `{name_of(function)}` takes `{parameter.name}` by position only; "
                "reward functions are called with keywords. Remove the `/` from its signature."
            )


def check_columns(function: RewardCallable, columns: Collection[str], where: str) -> None:
    """Raise TaskError if `function` needs an argument that is neither a column nor given to every reward."""
    needed = [
        parameter.name
        for parameter in _parameters(function, where)
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    missing = [name for name in needed if name not in columns and name not in RESERVED]
    if missing:
        quoted = " and ".join(f"`{name}`" for name in missing)
        raise TaskError(
            f"{where}: `{name_of(function)}` asks for {quoted}, but the dataset has no such column. "
            f"It has: {', '.join(sorted({*columns} - {ORIGIN})) or 'none but prompt'}. "
            f"Besides columns a reward may ask for {', '.join(RESERVED)}.{_single_completion_advice(function, missing, columns, where)}"
        )


def column_arguments(function: RewardCallable) -> list[str]:
    """The arguments of a function that are dataset columns. Excludes arguments that any function may take, and the function's own
    settings, which have a default other than None."""
    return [
        parameter.name
        for parameter in _parameters(function, "reward")
        if parameter.name not in (*RESERVED, ORIGIN)
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and (parameter.default is parameter.empty or parameter.default is None)
    ]


def _single_completion_advice(
    function: RewardCallable, missing: Collection[str], columns: Collection[str], where: str
) -> str:
    """Advice for a function that scores one completion at a time, as in verifiers; empty for others."""
    if not {"completion", "prompt", "state", "parser"} & set(missing):
        return ""
    function_name = getattr(function, "__name__", "")
    name = (
        function_name if function_name.isidentifier() and not iskeyword(function_name) else "reward"
    )
    takes = [
        parameter.name
        for parameter in _parameters(function, where)
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    lists = {"completion": "completions", "prompt": "prompts"}
    lists |= {
        parameter: parameter
        for parameter in (*columns, *RESERVED)
        if parameter in takes and parameter not in lists
    }
    row = "i"
    while row in (name, *lists, *lists.values()):
        row += "i"
    call_arguments = ", ".join(
        f"{parameter}={lists[parameter]}" + ("" if parameter in RESERVED else f"[{row}]")
        for parameter in takes
        if parameter in lists
    )
    columns_taken = dict.fromkeys(
        ["completions", *(lists[parameter] for parameter in takes if parameter in lists)]
    )
    def_prefix, await_prefix = ("async ", "await ") if is_async(function) else ("", "")
    unfilled = [parameter for parameter in missing if parameter not in lists]
    bound = ", ".join(f"{parameter}=…" for parameter in unfilled)
    partial_hint = f" with functools.partial({name}, {bound}) as `{name}`" if unfilled else ""
    return (
        f" If `{name}` scores one completion, as rewards of verifiers do, give one of this kind instead{partial_hint}:\n"
        f"  {def_prefix}def {name}_of_all({', '.join(columns_taken)}, **columns):\n"
        f"      return [{await_prefix}{name}({call_arguments}) for {row} in range(len(completions))]"
    )


async def call(
    name: str,
    function: RewardCallable,
    request: ScoreRequest,
    started: Callable[[str], None],
) -> FunctionResult:
    """Score a group with one function. `started` is called with its name just before it runs."""
    count, logged = len(request.completions), Logged()
    try:
        arguments = _call_arguments(function, request, logged)
        started(name)
        if is_async(function):
            answer = await function(**arguments)
        else:
            answer = call_plain(function, arguments)
        entries = _result_list(answer, count)
    except _InvalidResult as problem:
        return _failed_result(count, f"reward `{name}` {problem}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 — user code; it fails its rollouts only
        hint = _completion_form_hint(error, request)
        return _failed_result(count, f"reward `{name}` raised {explain(error).strip()}{hint}")
    values: list[float | None] = []
    failures: list[str | None] = []
    for entry in entries:
        value, problem = _parse_entry(entry)
        values.append(value)
        failures.append(problem and printable(f"reward `{name}` {problem}"))
    return FunctionResult(tuple(values), tuple(failures), logged)


def _completion_form_hint(error: BaseException, request: ScoreRequest) -> str:
    """What a completion is here, if the error looks as if the function took text for a chat or a chat for text; else empty."""
    if hasattr(error, "__notes__"):  # a wrapper explains the error itself, as a notebook's does
        return ""
    is_text = all(isinstance(completion, str) for completion in request.completions)
    message = str(error)
    if is_text and isinstance(error, TypeError) and "string indices must be integers" in message:
        return " (prompts are text here, so a completion is a string: take `completion`, not `completion[0]['content']`)"
    if not is_text and isinstance(error, TypeError | AttributeError) and "list" in message:
        return " (prompts are chats here, so a completion is a list of messages: its text is `completion[0]['content']`)"
    return ""


def is_async(function: RewardCallable) -> bool:
    """True if calling it returns a coroutine, as far as inspection can tell."""
    while isinstance(function, functools.partial):
        function = function.func
    call_method = getattr(type(function), "__call__", None)  # noqa: B004 — it may be async itself
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call_method)


def call_plain(function: RewardCallable, arguments: Mapping[str, Any]) -> Any:
    """The result of a function that is not async; the module docstring describes the event loop that it sees."""
    with loop_of_thread() as loop:
        answer = function(**arguments)
        if inspect.isawaitable(answer):
            answer = loop.run_until_complete(answer)
        return list(cast("Any", answer)) if isinstance(answer, Iterator) else answer


class _LoopOwner:
    """Holds a thread's event loop and closes it when the thread ends."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        weakref.finalize(self, self.loop.close).atexit = False


_of_thread = threading.local()


@contextmanager
def loop_of_thread() -> Generator[asyncio.AbstractEventLoop]:
    """Inside, the thread has no running event loop. Its current loop is one of its own, which outlives the call."""
    running = asyncio.events._get_running_loop()  # pyright: ignore[reportPrivateUsage]
    owner: _LoopOwner | None = getattr(_of_thread, "owner", None)
    if owner is None or owner.loop.is_closed():  # a user's function may have closed it
        owner = _of_thread.owner = _LoopOwner()
    asyncio.events._set_running_loop(None)  # pyright: ignore[reportPrivateUsage] — asyncio has no public way to leave a running loop
    asyncio.set_event_loop(owner.loop)
    try:
        yield owner.loop
    finally:
        asyncio.set_event_loop(running)
        asyncio.events._set_running_loop(running)  # pyright: ignore[reportPrivateUsage]


def _parameters(function: RewardCallable, where: str) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError as error:  # some functions written in C have no signature
        raise TaskError(
            f"{where}: `{name_of(function)}` has no signature that Python can read; wrap it in a function."
        ) from error


def _call_arguments(
    function: RewardCallable, request: ScoreRequest, logged: Logged
) -> dict[str, Any]:
    """Make new lists for each function: one that changes its arguments must not affect the others."""
    parameters = _parameters(function, "reward")
    names = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    count = len(request.completions)
    arguments: dict[str, Any] = {
        "prompts": [_copy_prompt(prompt) for prompt in request.prompts],
        "completions": [_copy_prompt(completion) for completion in request.completions],
        **{column: list(values) for column, values in request.columns.items()},
    }
    optional: dict[str, Any] = {
        "prompts_seen": list(request.prompts_seen),
        "prompt_ids": [list(ids) for ids in request.prompt_ids],
        "completion_ids": [list(ids) for ids in request.completion_ids],
        "rollout_notes": [dict(notes) for notes in request.notes or [{}] * count],
        "trainer_state": TrainerState(
            request.global_step, request.max_steps, request.steps_per_epoch
        ),
        "log_metric": functools.partial(_log_metric, logged),
        "log_extra": functools.partial(_log_extra, logged, count),
    }
    return {
        key: value for key, value in {**arguments, **optional}.items() if takes_all or key in names
    }


def _copy_prompt(value: Any) -> Any:
    return value if isinstance(value, str) else [dict(message) for message in value]


def _log_metric(logged: Logged, name: str, value: float) -> None:
    """Record a number about the group. Several of one name are averaged; values that are not finite are ignored."""
    number = float(value)
    if math.isfinite(number):
        logged.metrics.setdefault(printable(str(name)), []).append(number)


def _log_extra(logged: Logged, count: int, name: str, values: Sequence[Any]) -> None:
    """Record a value for each rollout; it is stored with the rollout."""
    entries = list(values)
    if len(entries) != count:
        raise ValueError(
            f"log_extra({name!r}, …) got {counted(len(entries), 'value')} for {counted(count, 'completion')}"
        )
    logged.extras[printable(str(name))] = [plain(value) for value in entries]


def _result_list(answer: Any, count: int) -> list[Any]:
    """The result as a list. Arrays and tensors of shape (count,) or (count, 1) are accepted."""
    if getattr(answer, "shape", None) == (count, 1):
        answer = answer.reshape(-1)
    listed: Any = answer.tolist() if hasattr(answer, "tolist") else answer
    if not isinstance(listed, Iterable) or isinstance(listed, str | bytes | Mapping | Set):
        raise _InvalidResult(
            f"returned {describe_value(answer)}; expected a list of {counted(count, 'number')}"
        )
    entries = list(cast("Iterable[Any]", listed))
    if len(entries) != count:
        raise _InvalidResult(
            f"returned {counted(len(entries), 'value')} for {counted(count, 'completion')}"
        )
    return entries


def _parse_entry(entry: Any) -> tuple[float | None, str | None]:
    """The value of one entry, and the problem with it; both None if the reward does not apply."""
    if entry is None:
        return None, None
    if isinstance(entry, Failed):
        return None, entry.reason
    try:
        value = None if isinstance(entry, str | bytes) else float(entry)
    except Exception:  # noqa: BLE001 — `__float__` of a foreign object may raise anything
        value = None
    if value is None:
        return (
            None,
            f"returned {describe_value(entry)} for this completion; expected a number or None",
        )
    if math.isnan(value):  # as with TRL, which makes NaN of None
        return None, None
    if not abs(value) <= LARGEST:
        return None, f"returned {value} for this completion; expected a number up to {LARGEST:g}"
    return value, None


def _failed_result(count: int, reason: str) -> FunctionResult:
    return FunctionResult((None,) * count, (printable(reason),) * count)


def describe_value(value: object) -> str:
    """The type of a value and the first characters of its repr, for a message."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
