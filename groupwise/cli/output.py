"""Output of the commands: data on stdout, messages on stderr, and one place that converts errors to exit codes.

With `--json`, a command writes exactly one JSON object to stdout; on failure, it has `error: {code, message}`.
Exit codes: 0 success; 1 the run failed; 2 wrong usage; 130 and 143 interrupted by Ctrl-C or SIGTERM.
The log of a job is written by a `LogWriter`, since its bytes are not trusted.
"""

from __future__ import annotations

import codecs
import gc
import importlib.util
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, TextIO, cast

import typer

from groupwise.core.atomic_files import without_nan
from groupwise.core.errors import GroupwiseError
from groupwise.core.extras import extra_of, not_installed
from groupwise.core.terminal.text import clean
from groupwise.engine.models.memory import is_out_of_memory, out_of_memory

PROGRAM = "groupwise"

_CONTROL_CHARACTERS = re.compile(
    "[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
"""Characters that control a terminal but that JSON need not escape, and lone surrogates, which cannot be encoded."""


def collect_garbage_rarely() -> None:
    """Collect garbage rarely, in commands that make no run: their imports leave hardly any, and collecting takes a tenth of their time."""
    gc.set_threshold(1_000_000)


def write_json(data: Any) -> None:
    """Write one JSON document to stdout. NaN becomes null, and values of other types become their text."""
    ascii_only = (sys.stdout.encoding or "utf-8").lower() not in ("utf-8", "utf8")
    text = json.dumps(without_nan(data), indent=2, ensure_ascii=ascii_only, default=str)
    typer.echo(_CONTROL_CHARACTERS.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


CANCELLED_CODE = 130
"""The exit code that shells give to an interrupted program."""


def shell_code(exit_code: int | None) -> int:
    """The exit code of a failed job as a shell reports it: 128 plus the number of a signal; 1 if the code is missing."""
    code = exit_code or 1
    return 128 - code if code < 0 else min(code, 255)


def say(text: str) -> None:
    """Write a message to stderr, with control characters in untrusted text removed."""
    typer.echo(clean(text), err=True)


def write_result(summary: Mapping[str, Any], *, as_json: bool) -> None:
    """Write the result of a command: as JSON, or with a line `key  value` for each number and text in it."""
    if as_json:
        write_json(summary)
        return
    lines = list(_flatten_values(summary))
    width = max((len(name) for name, _ in lines), default=0)
    for name, text in lines:
        typer.echo(f"{name:<{width}}  {text}".rstrip())


def _flatten_values(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        inner = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else None
        if inner is None:
            yield name, _format_value(value)
        elif set(inner) in ({"value", "low", "high"}, {"value"}):
            yield name, measured_value(inner)
        else:
            yield from _flatten_values(inner, f"{name}.")


def measured_value(measured: Mapping[str, Any]) -> str:
    """A value as text, with its interval if it has one."""
    if "low" in measured:
        return "{value:.3f} [{low:.3f}, {high:.3f}]".format_map(measured)
    return _format_value(measured["value"])


def _format_value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return "[" + ", ".join(_format_value(entry) for entry in cast("list[Any]", value)) + "]"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def run_command(app: typer.Typer, program: str, args: list[str]) -> int:
    """Run a command line; returns the exit code and raises nothing."""
    as_json = "--json" in args
    try:
        code = typer.main.get_command(app).main(args=args, prog_name=program, standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has ended. Nothing more can be written to it, not even by Python at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Stopped as stopped:
        # The work was not done, and shells expect this exit code.
        return _report_message(str(stopped), "interrupted", stopped.exit_code, as_json)
    except Exception as error:  # noqa: BLE001 - the boundary: each failure gets a message and a code
        return report_error(error, as_json=as_json)
    return code if isinstance(code, int) else 0


def report_error(error: Exception, *, as_json: bool) -> int:
    """Report a failure and return the exit code: a message for errors that users can fix, a traceback for bugs."""
    if is_out_of_memory(error):
        error = out_of_memory(error)
    if isinstance(error, GroupwiseError):
        return _report_message(error.message, error.code, error.exit_code, as_json)
    if isinstance(error, typer.TyperException):
        # An invalid command line; show typer's own text, which starts with the usage.
        show = getattr(error, "show", None)
        if show is not None:
            error.message = clean(error.message) + _override_hint(error)
            show()
        else:
            say(f"{PROGRAM}: {error.format_message()}")
        if as_json:
            write_json({"error": {"code": "usage", "message": error.format_message()}})
        return error.exit_code
    if isinstance(error, ModuleNotFoundError) and (remedy := _missing_extra(error)):
        return _report_message(remedy, "usage", 2, as_json)
    say("".join(traceback.format_exception(error)).rstrip("\n"))
    error_text = f"{type(error).__name__}: {error}"
    return _report_message(
        f"this is a bug in {PROGRAM}, or in the task: {error_text}", "bug", 1, as_json
    )


def _missing_extra(error: ModuleNotFoundError) -> str | None:
    """How to install the extra that brings the missing package; None if no extra of users does, or if the package is there."""
    package = (error.name or "").partition(".")[0]
    if not package or importlib.util.find_spec(package) is not None:
        return None
    extra = extra_of(package)
    if extra is None:
        return None
    lacks_torch = extra == "train" and importlib.util.find_spec("torch") is None
    return not_installed("This", extra, *dict.fromkeys(["torch"] * lacks_torch + [package]))


class Stopped(Exception):
    """The user did not wait for the end: Ctrl-C, or a second signal."""

    def __init__(self, interrupt: KeyboardInterrupt) -> None:
        """If a signal other than SIGINT became a KeyboardInterrupt, its number is the first argument."""
        number = interrupt.args[0] if interrupt.args else signal.SIGINT
        self.exit_code = 128 + int(number)
        super().__init__(f"stopped by {signal.Signals(number).name}")


def _report_message(message: str, code: str, exit_code: int, as_json: bool) -> int:
    gap = "\n" if "\n" in message else " "
    say(f"{PROGRAM}:{gap}{message}")
    if as_json:
        write_json({"error": {"code": code, "message": message}})
    return exit_code


def _override_hint(error: Any) -> str:
    """How to give an unknown flag that is a key of the config (`--num_generations 8`) as a word; empty for other flags and commands."""
    option: str = getattr(error, "option_name", None) or ""
    context: Any = getattr(error, "ctx", None)
    if not option or context is None:  # the parser raises `requires an argument` without a context
        return ""
    if "overrides" not in {param.name for param in context.command.params}:
        return ""
    from groupwise.core.errors import ConfigError
    from groupwise.training.config import load_config
    from groupwise.training.sft_config import load_sft_config

    name = option.lstrip("-").replace("-", "_")
    try:
        load = load_sft_config if context.info_name == "sft" else load_config
        load({"model": {"name": "tiny"}, name: None})
    except ConfigError as config_error:
        problem = config_error.message.removeprefix("config: ")
        if "the nearest are" in problem:
            return ""  # not a key of any known framework
        return f". Keys of the config are given without dashes, e.g. training.seed=1: {problem}"
    return ""


class LogWriter:
    """Writes bytes unchanged to a program, and as text without control characters to a terminal.

    A piece may end within a multi-byte character; the rest comes with the next piece.
    """

    def __init__(self, *, err: bool = False) -> None:
        """`err`: write to standard error, because standard output is used for a document."""
        self._err = err
        self._letters = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Write a piece of the log. `last`: nothing follows, so an incomplete character is shown as such."""
        stream = sys.stderr if self._err else sys.stdout
        if is_terminal(stream):
            encoding = stream.encoding or "utf-8"
            visible = clean(self._letters.decode(data, last).replace("\r", "\n"))
            stream.write(visible.encode(encoding, "replace").decode(encoding))
        else:
            stream.flush()
            cast("BinaryIO", stream.buffer).write(data)
        stream.flush()

    def end(self) -> None:
        """End a log: an incomplete character is shown as such. Later writes belong to another log."""
        self.write(b"", last=True)
        self._letters.reset()


def is_terminal(stream: TextIO) -> bool:
    """True if the stream is a terminal, so that a person reads it."""
    return stream.isatty()


def has_colours(stream: TextIO) -> bool:
    """True for a terminal, unless NO_COLOR is set (https://no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")
