"""Parses words of the command line: `k=v`, `2h`, statuses, settings of a kind. Each error quotes the word and the expected form."""

from __future__ import annotations

import difflib
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from groupwise.core.errors import UsageError
from groupwise.core.extras import require_packages
from groupwise.core.terminal.quantities import parse_size

if TYPE_CHECKING:
    from groupwise.jobs.fleet.states import JobStatus

_PART = re.compile(r"(\d+(?:\.\d+)?)(d|h|min|m|s)?")
_UNITS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0, "": 1.0}
_LONG = re.compile(r"(?:\d+(?:\.\d+)?(?:d|h|min|m|s))+")


def pairs(option: str, arguments: Iterable[str]) -> dict[str, str]:
    """Parse `KEY=VALUE` words. Raises UsageError for the first invalid word or repeated key."""
    values: dict[str, str] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not name or not equals:
            raise UsageError(f"{option} {argument}: write it as KEY=VALUE.")
        if name in values:
            raise UsageError(f"{option} {name} is given twice; once is enough.")
        values[name] = value
    return values


def variables(words: Iterable[str], files: Sequence[Path]) -> dict[str, str]:
    """The variables of --env and of the `.env` files of --env-file: --env overrides files, and later files override earlier ones. Values
    are not expanded from this process's environment."""
    from_files: dict[str, str] = {}
    for path in files:
        require_packages("--env-file", "launch", "dotenv")
        from dotenv import dotenv_values

        try:
            text = path.expanduser().read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--env-file {path}: it cannot be read: {error}.") from None
        values = dotenv_values(stream=io.StringIO(text), interpolate=False)
        for name, value in values.items():
            if value is None:
                # Do not show the line: it may be a secret value without its name.
                raise UsageError(
                    f"--env-file {path}: a line there has no `=`; lines are written NAME=VALUE, and values of several lines in quotes."
                )
            from_files[name] = value
    return from_files | pairs("--env", words)


def seconds(option: str, *words: str) -> Callable[[str], float]:
    """A parser for a time in seconds: `90s`, `30min`, `2h`, `1h30m`, `7d`, or a plain number.

    `words`: words that mean 0 seconds.
    """

    def parse(text: str) -> float:
        stripped = str(text).strip().lower()  # a default value is a number
        match = _PART.fullmatch(stripped)
        if match is not None:
            return float(match[1]) * _UNITS[match[2] or ""]
        if _LONG.fullmatch(stripped):
            return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(stripped))
        if stripped in words:
            return 0.0
        zero_text = "".join(f", or {word}" for word in words)
        raise UsageError(
            f"{option} {text}: a time is expected, e.g. 90s, 30min, 2h, 1h30m or 7d{zero_text}."
        )

    return parse


def megabytes(option: str) -> Callable[[str], int]:
    """A parser for a size in decimal megabytes, the manufacturers' unit: `40GB`, `64GiB`, `512MB`, or a plain number of MB."""

    def parse(text: str) -> int:
        size = parse_size(text, bare_number=10**6)
        if size is None or round(size / 10**6) < 1:
            raise UsageError(
                f"{option} {text}: a size of at least 1 MB is expected, e.g. 40GB, 64GiB, 512MB or a number of MB."
            )
        return round(size / 10**6)

    return parse


def gpus_of_model(text: str) -> tuple[str, int] | None:
    """Parse `A100:2`, `A100` or `MIG-3g.20gb` into the model and the number of GPUs; None for a number, UUIDs or a machine's indices."""
    match = re.fullmatch(
        r"(?!GPU-|MIG-(?!\d+[cg]\.))([A-Z][\w .+-]*)(?::([1-9]\d{0,5}))?",
        text.strip(),
        re.IGNORECASE,
    )
    return None if match is None else (match[1], int(match[2] or 1))


def expect_one_model(gpus: str, gpu_model: str | None) -> None:
    """Raise UsageError if --gpu-model is given in addition to a value of --gpus that names a model."""
    if gpu_model is not None:
        raise UsageError(
            f"--gpus {gpus} names a model of GPU, and so does --gpu-model {gpu_model}: give one."
        )


def statuses(arguments: Sequence[str] | None) -> frozenset[JobStatus] | None:
    """Parse statuses of jobs; one word may contain several, separated by commas."""
    from groupwise.jobs.fleet.states import JobStatus

    if not arguments:
        return None
    names = [part.strip().lower() for argument in arguments for part in argument.split(",")]
    valid_names = [status.value for status in JobStatus]
    for name in names:
        if name == "cancelling":
            raise UsageError(
                "--status cancelling: that is shown of a running job while it is being ended. Its status is running: --status running."
            )
        if name not in valid_names:
            close_matches = difflib.get_close_matches(name, valid_names, n=1)
            hint = (
                f"did you mean {close_matches[0]}?"
                if close_matches
                else f"there are {', '.join(valid_names)}."
            )
            raise UsageError(f"--status {name}: there is no such status; {hint}")
    return frozenset(JobStatus(name) for name in names)


def hyperparams(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse settings of a kind: a JSON object, or `key=value` with a YAML value; later words override earlier ones."""
    from groupwise.core.settings.overrides import parse_override

    settings: dict[str, Any] = {}
    for argument in arguments:
        if argument.lstrip().startswith("{"):
            settings |= json_object("--hyperparams", argument)
            continue
        if "=" not in argument:
            raise UsageError(
                f"--hyperparams {argument}: write key=value, or a JSON object, e.g. '{{\"beta\": 0.04}}'."
            )
        path, value = parse_override(argument)
        settings[".".join(path)] = value
    return settings


def json_object(what: str, text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises UsageError with the position of the error."""
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{what}: this is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise UsageError(f'{what}: a JSON object is expected, e.g. {{"learning_rate": 1e-5}}.')
    return cast("dict[str, Any]", value)


def secret(argument: str) -> tuple[str, str]:
    """Parse `NAME`, `NAME=env:OTHER` or `NAME=file:/path`. Returns the job's variable, and where the control machine finds its value."""
    name, equals, reference = argument.partition("=")
    if not equals:
        return name, f"env:{name}"
    if not reference.startswith(("env:", "file:")):
        raise UsageError(
            f"--secret {name}=…: a secret is named, never given: {name}=env:VARIABLE or {name}=file:/path, "
            "where the dispatcher finds its value. What was given is not shown here, but your shell may keep it in its history."
        )
    return name, reference
