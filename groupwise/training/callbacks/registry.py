"""Builds the callbacks that a config or a task names.

An entry of the config's `callbacks` is a name (a built-in one, or one that an installed package declares under the entry point
`groupwise.callbacks`), a class (`module:Class`, `path/to/file.py:Class`), or either with parameters (`{name: …, patience: 5}`).
A task's hook `get_rl_callbacks` returns objects. Both may derive from this package's `Callback` or from transformers' TrainerCallback.
Mistakes are refused before a model is loaded: unknown names and parameters, and methods that would never be called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from typing import Any

from groupwise.core.construct import accepted_parameters, instance, run_constructor
from groupwise.core.errors import ConfigError, TaskError
from groupwise.core.plugins import load, missing, nearest
from groupwise.core.settings.view import View
from groupwise.tasks.contract import Task
from groupwise.training.callbacks.base import EVENTS, Callback, overrides
from groupwise.training.callbacks.trainer import TrainerCallbackAdapter, is_trainer_callback

BUILTIN = (
    "benchmark_on_checkpoint",
    "early_stop",
    "loss_logging",
    "push_to_hub_revision",
    "success_cache",
)
"""The built-in callbacks. Each is a module here, imported once a config names it: `early_stop` has the class `EarlyStop`."""
ENTRY_POINTS = "groupwise.callbacks"
"""The entry-point group under which installed packages declare their callbacks."""

_KNOWN: dict[str, str] = dict.fromkeys(BUILTIN, __name__)

Named = tuple[str, Callback]
"""A callback with its name in messages and checkpoints."""

KINDS = "groupwise.Callback, or of transformers' TrainerCallback"


def configured_callbacks(
    entries: Sequence[str | Mapping[str, Any]], config: View, origin: str
) -> tuple[Named, ...]:
    """Build the callbacks of the config's `callbacks` and of `run.report_to`.

    Raises ConfigError with a line for each callback that cannot be built; `origin` names the place of the entries in the config.
    """
    callbacks: list[Named] = []
    problems: list[str] = []
    for entry in entries:
        try:
            with redirect_stdout(sys.stderr):  # standard output belongs to the command's result
                callback = _build_entry(entry, config)
            _refuse_equal_claims([*callbacks, callback])
            callbacks.append(callback)
        except TaskError as error:
            problems.append(f"{origin}: callbacks: {error}")
    report_to = config["run"].get("report_to", ())
    sinks = [report_to] if isinstance(report_to, str) else report_to
    if names := dict.fromkeys(name for name in sinks if name != "none"):
        from groupwise.training.callbacks.reporting import NAME, PARQUET, ParquetRecord, Reporting

        try:
            if sink_names := tuple(name for name in names if name != PARQUET):
                callbacks.append((NAME, _check_callback(Reporting(sink_names), config, NAME)))
            if PARQUET in names:
                callbacks.append((PARQUET, _check_callback(ParquetRecord(), config, NAME)))
        except TaskError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(callbacks)


def hook_callbacks(entries: Sequence[object], config: View, where: str) -> tuple[Named, ...]:
    """Build the callbacks (instances or classes) that a task's hook returned. Raises TaskError with a message that starts with `where`."""
    callbacks: list[Named] = []
    for entry in entries:
        kind = _class_of(entry)
        label = f"{where}: {kind.__name__}"
        _check_class(kind, label)
        callback = instance(entry, {}, label) if inspect.isclass(entry) else entry
        callbacks.append((kind.__name__, _check_callback(callback, config, label)))
    return tuple(callbacks)


def builtin(name: str) -> type[Callback]:
    """The class of a built-in callback."""
    class_name = name.title().replace("_", "")
    return getattr(import_module(f"{__package__}.{name}"), class_name)


def _build_entry(entry: str | Mapping[str, Any], config: View) -> Named:
    parameters = {} if isinstance(entry, str) else {k: v for k, v in entry.items() if k != "name"}
    name = entry if isinstance(entry, str) else str(entry["name"])
    if name in BUILTIN:
        return name, _check_callback(instance(builtin(name), parameters, name), config, name)
    plugin = load(
        name, kind="callback", builtins=_KNOWN, entry_points=ENTRY_POINTS, instantiate=False
    )
    target = plugin.object
    if inspect.ismodule(target):
        class_names = [
            attribute
            for attribute, value in vars(target).items()
            if inspect.isclass(value)
            and value.__module__ == plugin.module.__name__
            and _is_callback_class(value)
        ]
        raise TaskError(
            f"{name} is a module. Name the class in it, {name}:Class; callbacks there are: {', '.join(class_names) or 'none'}."
        )
    _check_class(_class_of(target), name)
    if inspect.isclass(target):
        if any(parameter.name == "name" for parameter in accepted_parameters(target)):
            raise TaskError(
                f"{name} has a parameter `name`, which no entry can give: there it says which callback is meant. Give the parameter "
                "another name, or return an instance from the task's get_rl_callbacks."
            )
        callback = instance(target, parameters, name)
    elif parameters:
        raise TaskError(
            f"{name} is an instance, so it takes no parameters ({', '.join(parameters)}). Name its class instead."
        )
    else:
        callback = target
    is_registered = ":" not in name
    return name if is_registered else _class_of(target).__name__, _check_callback(
        callback, config, name
    )


def _refuse_equal_claims(callbacks: Sequence[Named]) -> None:
    """Raise TaskError if the last callback claims the same resource as one before it."""
    name, callback = callbacks[-1]
    claim = callback.claim()
    for other_name, other_callback in callbacks[:-1]:
        if claim is not None and other_callback.claim() == claim:
            raise TaskError(
                f"{name}: {claim} can only belong to one callback, and {other_name} before it has it already. Leave one out, or give it "
                "other parameters."
            )


def unknown_callback(name: str) -> str | None:
    """The error message for an unknown name, or None. Runs no code, so it may miss some unknown names."""
    return missing(name, kind="callback", builtins=_KNOWN, entry_points=ENTRY_POINTS)


def _class_of(callback: object) -> type:
    return callback if inspect.isclass(callback) else type(callback)


def _is_callback_class(kind: type[Any]) -> bool:
    return issubclass(kind, Callback) or is_trainer_callback(kind)


def _check_class(kind: type, label: str) -> None:
    if not _is_callback_class(kind):
        raise TaskError(
            f"{label} is {kind.__name__}, which is not a callback. Derive its class from {KINDS}."
        )


# --- checking ------------------------------------------------------------------------------------


def _check_callback(callback: object, config: View, label: str) -> Callback:
    """Check a callback's methods and run its `check`. A TrainerCallback is wrapped instead."""
    if not isinstance(callback, Callback):
        return TrainerCallbackAdapter(callback)
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in EVENTS:
            suggestions = nearest(name, EVENTS)
            hint = f" Did you mean {' or '.join(suggestions)}?" if suggestions else ""
            raise TaskError(
                f"{label}: `{name}` would never be called.{hint} The events are: {', '.join(EVENTS)}."
            )
    for name, parameters in {**EVENTS, "state": (), "load_state": ("state",)}.items():
        signature = inspect.signature(getattr(callback, name))
        try:
            signature.bind(*parameters)
        except TypeError:
            expected = ", ".join(("self", *parameters))
            raise TaskError(
                f"{label}: {name} has the wrong parameters.\n  expected: {name}({expected})\n  found:    {name}{signature}"
            ) from None
    if overrides(callback, "state") != overrides(callback, "load_state"):
        raise TaskError(
            f"{label}: `state` and `load_state` belong together, but one of them is missing."
        )
    run_constructor(lambda: callback.check(config), label)
    return callback


def callbacks_of_task(
    task: Task,
    config: View,
    tokenizer: Any,
    output_dir: str,
    config_callbacks: Sequence[Named] = (),
) -> tuple[Named, ...]:
    """The callbacks that the task's hook `get_rl_callbacks` returns; none without the hook. `config_callbacks` are those of the config."""
    with redirect_stdout(sys.stderr):  # as above
        entries = task.rl_callbacks(config, tokenizer, output_dir)
        callbacks = hook_callbacks(entries, config, f"{task.described}: get_rl_callbacks")
    for end in range(len(callbacks)):
        _refuse_equal_claims([*config_callbacks, *callbacks[: end + 1]])
    return callbacks
