"""From what a config or a task names to callbacks that a run can call.

An entry of the config's `callbacks` is a name (a built-in, or one that an installed package announces under the entry point
`groupwise.callbacks`), a class (`module:Class`, `path/to/file.py:Class`), or either with parameters (`{name: …, patience: 5}`).
The hook `get_rl_callbacks` of a task returns objects. Both may be classes of our own base or of transformers' TrainerCallback.
Whatever cannot work is refused before a model is loaded: unknown names and parameters, methods that would never be called.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from groupwise.callbacks.base import EVENTS, Callback, overrides
from groupwise.callbacks.early_stop import EarlyStop
from groupwise.callbacks.loss_logging import LossLogging
from groupwise.callbacks.trainer import TrainerCallbackAdapter, is_trainer_callback
from groupwise.errors import ConfigError, TaskError
from groupwise.plugins import load, missing, nearest, run_user_code
from groupwise.settings.view import View
from groupwise.tasks.contract import Task

BUILTIN: dict[str, type[Callback]] = {"early_stop": EarlyStop, "loss_logging": LossLogging}
ENTRY_POINTS = "groupwise.callbacks"
"""The entry-point group in which installed packages announce their callbacks."""

_KNOWN = dict.fromkeys(BUILTIN, __name__)

Named = tuple[str, Callback]
"""A callback with its name in messages and checkpoints."""

KINDS = "groupwise.Callback, or of transformers' TrainerCallback"


def configured_callbacks(
    entries: Sequence[str | Mapping[str, Any]], config: View, origin: str
) -> tuple[Named, ...]:
    """Those of the config's `callbacks`. Raises ConfigError with a line for each that cannot be had; `origin` is where they stand."""
    found: list[Named] = []
    problems: list[str] = []
    for entry in entries:
        try:
            found.append(_configured(entry, config))
        except TaskError as error:
            problems.append(f"{origin}: callbacks: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(found)


def given_callbacks(given: Sequence[object], config: View, where: str) -> tuple[Named, ...]:
    """Those that a task's hook returned, instances or classes. Raises TaskError, which begins with `where`."""
    found: list[Named] = []
    for each in given:
        kind = _kind(each)
        what = f"{where}: {kind.__name__}"
        _check_kind(kind, what)
        made = _made(each, {}, what) if inspect.isclass(each) else each
        found.append((kind.__name__, _checked(made, config, what)))
    return tuple(found)


def _configured(entry: str | Mapping[str, Any], config: View) -> Named:
    parameters = {} if isinstance(entry, str) else {k: v for k, v in entry.items() if k != "name"}
    name = entry if isinstance(entry, str) else str(entry["name"])
    if name in BUILTIN:
        return name, _checked(_made(BUILTIN[name], parameters, name), config, name)
    found = _loaded(name)
    _check_kind(_kind(found), name)
    if inspect.isclass(found):
        made = _made(found, parameters, name)
    elif parameters:
        raise TaskError(
            f"{name} is an instance, so it takes no parameters ({', '.join(parameters)}). Name its class instead."
        )
    else:
        made = found
    announced = ":" not in name
    return name if announced else _kind(found).__name__, _checked(made, config, name)


def unknown_callback(name: str) -> str | None:
    """What is to be said of a name that stands for nothing, as far as that shows without running code; None otherwise."""
    return missing(name, kind="callback", builtins=_KNOWN, entry_points=ENTRY_POINTS)


def _loaded(name: str) -> object:
    """The class (or instance) that a name stands for."""
    plugin = load(
        name, kind="callback", builtins=_KNOWN, entry_points=ENTRY_POINTS, instantiate=False
    )
    if not inspect.ismodule(plugin.object):
        return plugin.object
    there = [
        each
        for each, value in vars(plugin.object).items()
        if inspect.isclass(value) and value.__module__ == plugin.module.__name__ and _is_kind(value)
    ]
    raise TaskError(
        f"{name} is a module. Name the class in it, {name}:Class; callbacks there are: {', '.join(there) or 'none'}."
    )


def _kind(each: object) -> type:
    return each if inspect.isclass(each) else type(each)


def _is_kind(kind: type[Any]) -> bool:
    return issubclass(kind, Callback) or is_trainer_callback(kind)


def _check_kind(kind: type, what: str) -> None:
    if not _is_kind(kind):
        raise TaskError(
            f"{what} is {kind.__name__}, which is no callback. Derive its class from {KINDS}."
        )


# --- making --------------------------------------------------------------------------------------


def _made(kind: type, parameters: Mapping[str, Any], what: str) -> object:
    """An instance, its parameters checked against the constructor's."""
    signature = inspect.signature(kind)
    known = [
        p
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    names = [p.name for p in known]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for name in parameters:
        if name not in names and not takes_any:
            raise TaskError(_no_parameter(what, name, names))
    missing = [p.name for p in known if p.default is p.empty and p.name not in parameters]
    if missing:
        raise TaskError(f"{what} needs {' and '.join(f'`{name}`' for name in missing)}.")
    hints = _hints(kind)
    values = {
        name: _typed(value, hints.get(name), f"{what}: {name}")
        for name, value in parameters.items()
    }
    return _refusing(lambda: kind(**values), what)


def _no_parameter(what: str, name: str, names: Sequence[str]) -> str:
    near = nearest(name, names)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    there = f"It takes: {', '.join(names)}." if names else "It takes none."
    return f"{what} has no parameter `{name}`{hint} {there}"


def _hints(kind: type) -> dict[str, Any]:
    try:
        return get_type_hints(kind.__init__)
    except Exception:  # noqa: BLE001 — annotations of users may be anything; without them any value is taken
        return {}


def _typed(value: Any, hint: Any, what: str) -> Any:
    """The value as its parameter's annotation wants it: lists become tuples, whole numbers numbers, and nothing else is converted."""
    if hint is None:
        return value
    try:
        return TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise TaskError(
            f"{what} is {json.dumps(value)}: {reason[:1].lower()}{reason[1:]}."
        ) from None
    except PydanticUserError:  # an annotation that pydantic knows nothing of
        return value


# --- checking ------------------------------------------------------------------------------------


def _checked(made: object, config: View, what: str) -> Callback:
    """As one that a run can call, and that has something to do in it."""
    if not isinstance(made, Callback):
        return TrainerCallbackAdapter(made)
    _check_methods(made, what)
    _refusing(lambda: made.check(config), what)
    return made


def _check_methods(callback: Callback, what: str) -> None:
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in EVENTS:
            near = nearest(name, EVENTS)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise TaskError(
                f"{what}: `{name}` would never be called.{hint} The events are: {', '.join(EVENTS)}."
            )
    for name, parameters in {**EVENTS, "state": (), "load_state": ("state",)}.items():
        signature = inspect.signature(getattr(callback, name))
        try:
            signature.bind(*parameters)
        except TypeError:
            expected = ", ".join(("self", *parameters))
            raise TaskError(
                f"{what}: {name} has the wrong parameters.\n  expected: {name}({expected})\n  found:    {name}{signature}"
            ) from None
    if overrides(callback, "state") != overrides(callback, "load_state"):
        raise TaskError(
            f"{what}: `state` and `load_state` belong together, but one of them is missing."
        )


def _refusing(call: Callable[[], Any], what: str) -> Any:
    """The result of `call`. A ValueError is what a callback refuses with, and says all; anything else is shown whole."""

    def explained() -> Any:
        try:
            return call()
        except ValueError as refused:
            raise TaskError(f"{what}: {refused}") from refused

    return run_user_code(explained, what=f"{what} failed")


def callbacks_of_task(
    task: Task, config: View, tokenizer: Any, output_dir: str
) -> tuple[Named, ...]:
    """Those that the hook `get_rl_callbacks` returns; none where there is no such hook."""
    given = task.rl_callbacks(config, tokenizer, output_dir)
    return given_callbacks(given, config, f"{task.described}: get_rl_callbacks")
