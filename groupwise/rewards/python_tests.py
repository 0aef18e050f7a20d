"""The reward for code: what a completion wrote is run against the tests of its row, in boxes that can be thrown away.

    {"prompt": "…", "tests": ["assert add(2, 2) == 4", "assert add(-1, 1) == 0"]}
    {"prompt": "…", "tests": "def check(candidate): …", "entry_point": "add"}
    {"prompt": "…", "test_cases": [{"input": "2 2\\n", "output": "4\\n"}]}

Tests of functions run in one box, the completion's code in another (`boxed_tests` says how they talk); a program that reads standard
input has a box for each case, and its output is compared here. So no test and no expected value ever stands where the code could read
or change it, and leaving the process early, printing marks or replacing functions earns nothing.

What the code does, time-outs included, is a value. What it cannot be blamed for (no box, tests that cannot be run) is a failure.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

from groupwise.errors import SandboxError
from groupwise.rewards.calling import Failed
from groupwise.rewards.frames import FrameBuffer
from groupwise.rewards.registry import reward
from groupwise.rewards.sandbox import PROTECTIONS, START_LIMIT, Box, Limits, Result, missing, run
from groupwise.rewards.tags import last_tagged
from groupwise.rewards.text import CompletionText, completion_text

logger = logging.getLogger(__name__)

COLUMNS = ("tests", "test_cases")
_VERDICTS_LIMIT = 4 << 20
_MIB = 1 << 20
_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE
)
_OPEN_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?:python|py|python3)?[ \t]*\n(.*)", re.DOTALL | re.MULTILINE
)
_PYTHON = ("", "py", "python", "python3")


def code_in(text: str, answer_tag: str = "answer") -> str:
    """The code of a completion: of what follows its reasoning, or of its last answer tag, the last fenced block, else all of it."""
    said = text.rpartition("</think>")[2]
    said = last_tagged(said, answer_tag) or said
    blocks = [code for language, code in _BLOCK.findall(said) if language.lower() in _PYTHON]
    if blocks:
        return blocks[-1]
    cut_off = _OPEN_BLOCK.search(said)
    return cut_off.group(1) if cut_off else said


# What a row asks for


@dataclass(frozen=True, slots=True)
class Case:
    """What a program is given, and what it has to print."""

    input: str
    output: str

    def passes(self, result: Result) -> bool:
        """Whether the program ended well and printed that; white space at the ends of lines does not count."""
        printed = result.output.decode(errors="replace")
        return (
            result.ending == "finished"
            and not result.cut
            and _lines(printed) == _lines(self.output)
        )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


@dataclass(frozen=True, slots=True)
class RowTests:
    """The tests of one row: either of functions or of a program."""

    of_functions: str | tuple[str, ...] = ()
    entry_point: str | None = None
    of_program: tuple[Case, ...] = ()

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> RowTests:
        """Read the columns `tests`, `test_cases` and `entry_point`. Raises ValueError where they do not say what to run."""
        tests, cases = _parsed(row.get("tests")), _parsed(row.get("test_cases"))
        if tests and cases:
            raise ValueError("has both `tests` and `test_cases`; leave one empty")
        if cases:
            return cls(of_program=tuple(_cases(cases)))
        if not tests:
            raise ValueError(
                "has no tests: expected asserts or code in the column `tests`, or input and output in `test_cases`"
            )
        listed = [tests] if isinstance(tests, str) else list(cast("Sequence[Any]", tests))
        if not all(isinstance(each, str) and each.strip() for each in listed):
            raise ValueError(f"has `tests` that are no text: {tests!r:.80}")
        texts = tests if isinstance(tests, str) else tuple(listed)
        entry = row.get("entry_point") or None
        if entry is not None and not (isinstance(entry, str) and entry.isidentifier()):
            raise ValueError(f"has the entry_point {entry!r:.80}; expected the name of a function")
        return cls(of_functions=texts, entry_point=entry)


def _parsed(value: Any) -> Any:
    """Lists may be written as JSON, because tables of some formats hold text only."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(json.JSONDecodeError):
            return json.loads(value)
    return value


def _cases(value: Any) -> list[Case]:
    """From a list of {input, output}, or from {inputs: […], outputs: […]}."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        given, wanted = table.get("inputs"), table.get("outputs")
        if not (isinstance(given, list) and isinstance(wanted, list)):
            raise ValueError(_NO_TABLE)
        pairs = list(zip(cast("list[Any]", given), cast("list[Any]", wanted), strict=False))
        if not len(pairs) == len(cast("list[Any]", given)) == len(cast("list[Any]", wanted)):
            raise ValueError(_NO_TABLE)
        value = [{"input": each, "output": result} for each, result in pairs]
    return [_case(each) for each in value]


_NO_TABLE = (
    "has `test_cases` that are a dictionary; expected `inputs` and `outputs`, 2 lists of one length"
)


def _case(value: Any) -> Case:
    match value:
        case {"input": str(given), "output": str(wanted)}:
            return Case(given, wanted)
        case _:
            raise ValueError(
                f"has a test case {value!r:.80}; expected {{input: text, output: text}}"
            )


# The verdict on one completion


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many tests a piece of code passes, and why not the first that it fails."""

    passed: int
    of: int
    why: str | None
    missing: tuple[str, ...] = ()
    """Protections that did not hold."""


async def verdict(
    code: str, tests: RowTests, limits: Limits, require: Sequence[str] = ()
) -> Verdict:
    """Run the tests; `limits.seconds` is for all of them together.

    Raises SandboxError where there is no box with the protections that are required, ValueError for tests that cannot be run.
    """
    if tests.of_program:
        return await _of_program(code, tests.of_program, limits, require)
    return await _of_functions(code, tests, limits, require)


async def _of_program(
    code: str, cases: Sequence[Case], limits: Limits, require: Sequence[str]
) -> Verdict:
    passed, why, left = 0, None, limits.seconds
    unheld: tuple[str, ...] = ()
    for number, case in enumerate(cases):
        if left <= 0:
            break
        allowed = replace(limits, seconds=left)
        stdin = case.input.encode()
        result = await run(code, stdin=stdin, limits=allowed, require=require)
        left, unheld = left - result.seconds, result.missing
        if case.passes(result):
            passed += 1
        elif why is None:
            why = f"case {number}: {_shown(result)}"
    return Verdict(passed, len(cases), why, unheld)


def _shown(result: Result) -> str:
    errors = result.errors.decode(errors="replace").strip().splitlines()[-1:]
    printed = result.output.decode(errors="replace")[:200]
    return f"{result.ending}; printed {printed!r}{''.join(f'; {line[:200]}' for line in errors)}"


async def _of_functions(
    code: str, tests: RowTests, limits: Limits, require: Sequence[str]
) -> Verdict:
    """One box for the code and one for the tests, joined by a line; verdicts come on another."""
    theirs, line = socket.socketpair()
    ours, verdicts = socket.socketpair()
    patient = replace(limits, seconds=limits.seconds + START_LIMIT)  # the clock that counts is here
    given = tests.of_functions if isinstance(tests.of_functions, str) else list(tests.of_functions)
    serving = _program("boxed_solution:serve", code=code)
    judging = _program("boxed_tests:judge", tests=given, entry_point=tests.entry_point)
    solution = Box(serving, limits=patient, channels=[theirs], require=require)
    judge = Box(judging, limits=patient, channels=[line, verdicts], require=require)
    with ours, theirs, line, verdicts:
        async with solution, judge:
            for end in (theirs, line, verdicts):
                end.close()
            held = await solution.begun()
            await judge.begun()
            docket = _Docket(ours)
            if not await docket.fill(limits.seconds):
                ended = await judge.result()
                raise SandboxError(f"The box of the tests ended before them: {_shown(ended)}")
            return replace(docket.verdict(), missing=missing(held))


def _program(function: str, **arguments: Any) -> dict[str, Any]:
    return {"function": f"groupwise.rewards.{function}", "arguments": arguments}


class _Docket:
    """Takes down what the box of the tests says."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._buffer = FrameBuffer()
        self._outcomes: list[bool] = []
        self._count = 0
        self._why: str | None = None

    async def fill(self, seconds: float) -> bool:
        """Listen until the last verdict or until the time is over, which begins with the tests. False where it broke off.

        Raises ValueError for tests that cannot be run, SandboxError where they do not begin.
        """
        try:
            async with asyncio.timeout(START_LIMIT):
                opening = await self._next()
        except TimeoutError:
            raise SandboxError(f"Tests had not begun after {START_LIMIT:g} s.") from None
        if opening is None:
            return False
        self._count = _unbroken(opening)["tests"]
        try:
            async with asyncio.timeout(seconds):
                while (message := await self._next()) is not None and "done" not in message:
                    self._enter(_unbroken(message))
        except TimeoutError:
            self._why = self._why or f"time ran out in test {len(self._outcomes)}"
            return True
        return message is not None

    def verdict(self) -> Verdict:
        """What was said; tests of which nothing was said have not passed."""
        return Verdict(sum(self._outcomes), self._count, self._why)

    def _enter(self, message: Mapping[str, Any]) -> None:
        self._outcomes.append(message["passed"])
        self._why = self._why or message["why"]

    async def _next(self) -> dict[str, Any] | None:
        while (frame := self._buffer.take()) is None:
            piece = await asyncio.get_running_loop().sock_recv(self._connection, 1 << 16)
            if not piece:
                return None
            self._buffer.add(piece)
        return json.loads(frame)


def _unbroken(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if "broken" in message:
        raise ValueError(message["broken"])
    return message


# The reward


@reward("python_tests")
@dataclass(frozen=True, slots=True)
class PythonTests:
    """The share of a row's tests that the completion's code passes."""

    partial: bool = True
    """False: 1 for all tests, else 0."""
    time_limit: float = 4.0
    """Seconds for all tests of a completion."""
    memory: int = 512
    """MiB of address space for each process."""
    concurrency: int = 4
    """Completions of a group that are run at once."""
    answer_tag: str = "answer"
    require: tuple[str, ...] = ()
    """Protections without which nothing is run; see `sandbox.PROTECTIONS`."""

    def __post_init__(self) -> None:
        for name, value in (
            ("time_limit", self.time_limit),
            ("memory", self.memory),
            ("concurrency", self.concurrency),
        ):
            if not value > 0:
                raise ValueError(f"{name} is {value}; expected more than 0.")
        unknown = [name for name in self.require if name not in PROTECTIONS]
        if unknown:
            raise ValueError(
                f"require names {', '.join(unknown)}. There are: {', '.join(PROTECTIONS)}."
            )

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError for a row without tests."""
        RowTests.of(row)

    async def __call__(
        self,
        completions: Sequence[CompletionText],
        log_extra: Callable[[str, Sequence[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """A number from 0 to 1 for each completion; `Failed` where nothing can be said about its code."""
        count = len(completions)
        rows = [_row_of(columns, index) for index in range(count)]
        codes = [code_in(completion_text(each), self.answer_tag) for each in completions]
        slots = asyncio.Semaphore(self.concurrency)
        async with asyncio.TaskGroup() as group:
            asked = {  # the same code is run once, however many members of a group wrote it
                pair: group.create_task(self._judged(*pair, slots))
                for pair in dict.fromkeys(zip(codes, rows, strict=True))
            }
        verdicts = [asked[pair].result() for pair in zip(codes, rows, strict=True)]
        if log_extra is not None:
            log_extra("python_tests", [_note(each) for each in verdicts])
        return [each if isinstance(each, Failed) else self._value(each) for each in verdicts]

    async def _judged(
        self, code: str, row: RowTests | str, slots: asyncio.Semaphore
    ) -> Verdict | Failed:
        """The verdict, or why there is none."""
        if isinstance(row, str):
            return Failed(f"cannot judge this row: it {row}")
        limits = Limits(seconds=self.time_limit, memory=self.memory * _MIB)
        async with slots:
            try:
                found = await verdict(code, row, limits, self.require)
            except (SandboxError, ValueError) as error:
                return Failed(f"could not run the tests: {error}")
        _warn_once(found.missing)
        return found

    def _value(self, found: Verdict) -> float:
        return found.passed / found.of if self.partial else float(found.passed == found.of)


def _row_of(columns: Mapping[str, Sequence[Any]], index: int) -> RowTests | str:
    """The tests of a row, or what is wrong with it."""
    named = (name for name in (*COLUMNS, "entry_point") if name in columns)
    try:
        return RowTests.of({name: columns[name][index] for name in named})
    except ValueError as problem:
        return str(problem)


def _note(found: Verdict | Failed) -> dict[str, Any] | None:
    if isinstance(found, Failed):
        return None
    return {"passed": found.passed, "of": found.of, "why": found.why}


@cache
def _warn_once(missing: tuple[str, ...]) -> None:
    if serious := [name for name in missing if name in ("network", "files")]:
        logger.warning(
            "Code of the model runs in a sandbox that this system does not let be closed: %s. "
            "Name in `require` what you do not want to go without.",
            "; ".join(f"{name} (else {PROTECTIONS[name]})" for name in serious),
        )
