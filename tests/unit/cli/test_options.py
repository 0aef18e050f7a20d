"""Options with several names: the first is shown, the others still work, and two of them at once are refused. Options without a value."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from groupwise.cli.main import app, main
from tests.unit.cli.conftest import BUILT, Command

CPUS = ["fleet", "submit", "--cpus", "2"]


@pytest.mark.parametrize(("words", "both"), [
    ([*CPUS, "--cpu", "3", "--", "true"], ("--cpus", "--cpu")),
    (["fleet", "submit", "--ram=1GB", "--memory", "2GB", "true"], ("--ram", "--memory")),
    (["fleet", "submit", "--max-steps", "1", "--max_steps", "2"], ("--max-steps", "--max_steps")),
    (["generate", "--concurrency", "1", "--input-batch-size", "2"], ("--concurrency", "--input-batch-size")),
    (["launch", "local", "--max-hours", "1", "--time-limit", "2h", "--", "rl"], ("--max-hours", "--time-limit")),
])  # fmt: skip
def test_two_names_of_one_option_are_refused(
    words: list[str], both: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"{both[0]} and {both[1]} are the same" in told


def test_repeated_names_and_options_of_the_command_itself_are_accepted(still: Command) -> None:
    plan = ("submit", "--gpus", "0", "--array", "/no/such/file")
    for words in (
        ("--cpus", "2", "--cpus", "3", "--", "true"),
        ("--cpus", "2", "true", "--cpu", "3"),
        ("--output", "a", "--artefact", "b", "--", "true"),
    ):
        code, _, err = still(*plan, *words)
        assert (code, "/no/such/file" in err, "are the same" in err) == (2, True, False)


@pytest.mark.parametrize(("words", "usage"), [
    ("rl", "[key=value]..."),
    ("runs export", "RUN[@STEP]"),
    ("fleet stop", "[JOB...]"),
    ("fleet exec", "JOB|VM [--] ARGUMENTS..."),
    ("fleet submit", "[[--] ARGUMENTS...]"),
    ("fleet vm prepare", "VM..."),
    ("fleet vm trust", "VM [FINGERPRINT]"),
])  # fmt: skip
def test_usage_has_brackets_around_what_may_be_left_out_and_braces_nowhere(
    words: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words.split(), "--help"]) == 0
    assert f"groupwise {words} [OPTIONS] {usage}\n" in capsys.readouterr().out


def test_an_option_without_its_value_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the line of each command, for each of its options."""
    monkeypatch.setattr(typer.main, "get_command", BUILT)
    tried = set[str]()
    for words, command in commands(BUILT(app)):
        for option in [one.opts[0] for one in command.params if takes_a_value(one)]:
            code = main([*words, option])
            told = " ".join(capsys.readouterr().err.split())
            assert (code, option in told, "bug" in told) == (2, True, False), told
            tried.add(words[0])
    assert {"rl", "eval", "web", "runs", "fleet", "launch"} <= tried


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "list_commands"):
        yield words, command
        return
    context = typer.Context(command)
    for verb in command.list_commands(context):
        yield from commands(command.get_command(context, verb), (*words, verb))


def takes_a_value(param: Any) -> bool:
    return param.param_type_name == "option" and not (param.is_flag or param.count)
