"""The reward for code: a completion's code is run against the tests of its row, in disposable sandboxes.

    {"prompt": "…", "tests": ["assert add(2, 2) == 4", "assert add(-1, 1) == 0"]}
    {"prompt": "…", "tests": "def check(candidate): …", "entry_point": "add"}
    {"prompt": "…", "test_cases": [{"input": "2 2\\n", "output": "4\\n"}]}
    {"prompt": "…", "test_cases": {"fn_name": "add", "inputs": [[2, 2], [-1, 1]], "outputs": [4, 0]}}
    {"prompt": "…", "test_cases": [{"type": "function_call", "fn_name": "add", "input": [2, 2], "output": 4}]}

Datasets have other names for these columns: `FORMS_OF_TESTS` and `FORMS_OF_CASES` list all that are read.

Tests of functions run in one sandbox, the completion's code in another (`boxed_tests` describes how they communicate); a program
that reads standard input has a sandbox for each case, and its output is compared in this process. So the code can never read or
change a test or an expected value, and exiting early, printing marks or replacing functions earns nothing.

Results of the code, including time-outs, give a reward value. Problems that the code did not cause (no sandbox, or tests that also
break off without it) are reported as `Failed`.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import json
import pickletools
import re
import socket
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from typing import Any, cast

from groupwise.core.errors import SandboxError
from groupwise.core.interruption import run_to_end
from groupwise.core.processes.frames import FrameBuffer
from groupwise.core.reward_call.call import Failed
from groupwise.core.reward_call.tags import Tag, after_reasoning, last_tagged
from groupwise.core.reward_call.text import CompletionText, completion_texts
from groupwise.tasks.rewards.boxed_solution import WRAPPER
from groupwise.tasks.rewards.boxed_tests import BrokenTests, Plan
from groupwise.tasks.rewards.registry import reward
from groupwise.tasks.rewards.sandbox import (
    PROTECTIONS,
    START_LIMIT,
    Box,
    Limits,
    Result,
    missing,
    run,
)

FORMS_OF_TESTS = {
    "tests": "ours",
    "test_list": "MBPP, with `test_setup_code` or `test_imports`",
    "test": "HumanEval, with `entry_point`",
}
"""Columns with tests of functions, and the projects that use them."""
FORMS_OF_CASES = {
    "test_cases": "ours",
    "input_output": "APPS, TACO",
    "public_test_cases": "LiveCodeBench, with `metadata`",
    "private_test_cases": "LiveCodeBench, with `metadata`",
    "public_tests": "CodeContests",
    "private_tests": "CodeContests",
    "official_tests": "open-r1's Codeforces",
    "verification_info": "open-r1 and SYNTHETIC-1",
    "ground_truth": "PRIME",
    "reward_model": "verl and PRIME, by its `ground_truth`",
}
"""Columns with cases. Public and private cases count together. Otherwise a row has one of these columns; if it has one of ours as
well as others, ours is used. Ground-truth columns are read only if there is no other, because they may hold something else.
"""
BESIDE = ("entry_point", "metadata", "starter_code", "test_setup_code", "test_imports")
"""Columns with further information about the tests."""
NOT_READ = {
    "generated_checker": (None, "that program, which judges outputs, is not run here"),
    "interaction_format": (None, "there is nobody here to interact with"),
    "input_mode": ("file", "programs are given standard input alone"),
}
"""Columns of open-r1's Codeforces whose meaning is not supported, so the tests would judge wrongly: the value concerned (None:
any), and why.
"""
_MAX_UNPACKED = 1 << 29
_VERDICTS_LIMIT = 4 << 20
_MIB = 1 << 20
_FENCE = re.compile(
    r"(?P<before>[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<label>[^\s`]*+)[^`]*+"
)
_PYTHON = ("py", "python", "python3")
_LONG_STRINGS = ('"""', "'''")
"""Delimiters of multi-line strings: code inside one may well have a fence at the end of a line."""


def code_in(text: str, answer_tag: Tag = "answer", names: Collection[str] = ()) -> str:
    """The code of a completion: a fenced block in its last answer tag or in the text after its reasoning; without a block, all of
    that text.

    Of several blocks, the last closed one labelled as Python is used, else the last unclosed one with this label; without any, the
    same order applies to blocks without a label. If some blocks define one of `names`, the last of these is used, because a later
    block usually shows an example.
    """
    answer = after_reasoning(text)
    answer = last_tagged(answer, answer_tag) or answer
    lines = iter(answer.split("\n"))  # each block consumes its own lines
    blocks = [_read_block(opening, lines) for line in lines if (opening := _FENCE.fullmatch(line))]
    for labels in (_PYTHON, ("",)):
        for closed in (True, False):
            codes = [
                block.code for block in blocks if block.label in labels and block.whole is closed
            ]
            if codes:
                defining = [code for code in codes if _defines(code, names)]
                return (defining or codes)[-1]
    return answer


def _defines(code: str, names: Collection[str]) -> bool:
    alternatives = "|".join(map(re.escape, names))
    return bool(names) and bool(
        re.search(rf"(?m)^[ \t]*+(?:async[ \t]+def|def|class)[ \t]+(?:{alternatives})\b", code)
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """A fenced block of a text."""

    label: str
    code: str
    whole: bool
    """True if the block is closed."""


def _read_block(opening: re.Match[str], lines: Iterator[str]) -> _Block:
    """The block that starts here; its lines are consumed. A fence may also close it at the end of the last line of code."""
    fence, label = opening["fence"], opening["label"].lower()
    code: list[str] = []
    quotes = dict.fromkeys(_LONG_STRINGS, 0)
    for line in lines:
        stripped = line.rstrip()
        content = stripped.rstrip(fence[0])
        in_a_string = any((n + content.count(quote)) % 2 for quote, n in quotes.items())
        if stripped.endswith(fence) and (not content.strip() or not in_a_string):
            code += [content, ""] if content.strip() else [""]
            return _Block(label, _dedent(code, len(opening["before"])), whole=True)
        code.append(line)
        quotes = {quote: n + line.count(quote) for quote, n in quotes.items()}
    return _Block(label, _dedent(code, len(opening["before"])), whole=False)


def _dedent(lines: Sequence[str], indent: int) -> str:
    """Removes the fence's indent, as far as all lines have it."""
    widths = [len(line) - len(line.lstrip(" \t")) for line in lines if line.strip()]
    cut = min([indent, *widths])
    return "\n".join(line[cut:] for line in lines)


# Reading the tests of a row


@dataclass(frozen=True, slots=True)
class Case:
    """A program's input, and the output that it must print."""

    input: str
    output: str

    def passes(self, result: Result) -> bool:
        """True if the program exited normally and printed the expected output; see `_same_line`."""
        if result.ending != "finished" or result.cut:
            return False
        printed = result.output.decode(errors="replace").rstrip().splitlines()
        expected = self.output.rstrip().splitlines()
        return len(printed) == len(expected) and all(map(_same_line, printed, expected))


_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,6})?", re.ASCII)


def _same_line(printed: str, expected: str) -> bool:
    """Compares without white space at the end. Lines with only numbers are compared as exact numbers: 0.50 equals 0.5, and
    0.5000001 does not.
    """
    if printed.rstrip() == expected.rstrip():
        return True
    fields = printed.split(), expected.split()
    if len(fields[0]) != len(fields[1]) or not all(map(_NUMBER.fullmatch, fields[1] + fields[0])):
        return False
    return [*map(Decimal, fields[0])] == [*map(Decimal, fields[1])]


@dataclass(frozen=True, slots=True)
class RowTests:
    """The tests of one row: either of functions or of a program."""

    of_functions: str | tuple[str, ...] = ()
    entry_point: str | None = None
    of_program: tuple[Case, ...] = ()
    common_imports: bool = False
    """True if common modules need no import, as in LiveCodeBench; see `known_names`."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> RowTests:
        """Read the columns that `FORMS_OF_TESTS` and `FORMS_OF_CASES` name. Raises ValueError if they do not define tests."""
        name, value = _source_column(row)
        entry = (
            row.get("entry_point")
            or _function_named(_parse_nested_json(row.get("metadata")))
            or None
        )
        entry = _without_class(entry)
        # Some data sets wrap the tests in {language, test_cases}.
        match value:
            case {"test_cases": inner, **more} if not more.keys() - {"language"}:
                language = more.get("language", "python")
                if language != "python":
                    raise ValueError(f"has tests for {language!r:.40}; only Python is run")
                tests = _parse_nested_json(inner)
            case _:
                tests = value
        if not isinstance(tests, str | list | Mapping):
            raise ValueError(f"has `{name}` that are not text: {tests!r:.80}")
        if _are_cases(tests) or (name in FORMS_OF_CASES and not _are_asserts(tests)):
            cases: Any = cast("Any", [tests] if _is_one_case(tests) else tests)
            if isinstance(cases, list) and any(map(_is_call, cast("list[Any]", cases))):
                calls = cast("list[Any]", cases)
                return cls._of_calls(*_listed_calls(calls, entry or _begun_in(row)))
            table: Mapping[str, Any] = cast("Any", cases) if isinstance(cases, Mapping) else {}
            if function := table.get("fn_name"):
                return cls._of_calls(
                    function, [_make_call(*pair) for pair in _input_output_pairs(table)]
                )
            programs = tuple(_parse_cases(cases, name, numbers=entry is None))
            return cls(
                of_program=programs,
                common_imports=name == "public_test_cases" or _of_live_code_bench(cases),
            )
        test_list: list[Any] = [tests] if isinstance(tests, str) else list(cast("Any", tests))
        if not all(isinstance(test, str) and test.strip() for test in test_list):
            raise ValueError(f"has `{name}` that are not text: {tests!r:.80}")
        if entry is not None and not (isinstance(entry, str) and entry.isidentifier()):
            raise ValueError(f"has the entry_point {entry!r:.80}; expected the name of a function")
        prepared = _setup_code(row) if name == "test_list" else []
        texts = tests if isinstance(tests, str) else (*prepared, *test_list)
        return cls(of_functions=texts, entry_point=entry)

    @classmethod
    def _of_calls(cls, name: Any, calls: Sequence[_Call]) -> RowTests:
        """An assert for each call."""
        name = _without_class(name)
        if not (isinstance(name, str) and name.isidentifier()):
            raise ValueError(f"has the fn_name {name!r:.80}; expected the name of a function")
        if unlisted := [arguments for arguments, _ in calls if not isinstance(arguments, list)]:
            raise ValueError(
                f"has inputs of {name} such as {unlisted[0]!r:.80}; expected a list of arguments for each call"
            )
        boxed = all(  # each result is a list of one, which may be meant without the list
            isinstance(right[-1], list) and len(cast("list[Any]", right[-1])) == 1
            for _, right in calls
        )
        texts = [
            _call_test(name, arguments, [*right, right[-1][0]] if boxed else right)
            for arguments, right in calls
        ]
        return cls(of_functions=tuple(texts), entry_point=name, common_imports=True)

    @property
    def names(self) -> frozenset[str]:
        """Names that the tests need from a solution, as far as static analysis shows."""
        if self.entry_point or not self.of_functions:
            return frozenset() if self.entry_point is None else frozenset({self.entry_point})
        try:
            return Plan.of(self.of_functions, None).names
        except BrokenTests:
            return frozenset()

    def check(self) -> None:
        """Raise ValueError for tests of functions that cannot be run, or that no code could fail."""
        if self.of_program:
            return
        try:
            with warnings.catch_warnings():  # Python's, about the style of tests
                warnings.simplefilter("ignore")
                Plan.of(self.of_functions, self.entry_point, helped=False)
        except BrokenTests as broken:
            raise ValueError(f"has tests that cannot be run: {broken}") from broken


def _call_test(name: str, inputs: Any, right: Sequence[Any]) -> str:
    """The code of one test. A returned tuple equals a list, because JSON has only lists; any value in `right` is accepted."""
    try:
        arguments, results = (
            repr(json.loads(json.dumps(value, allow_nan=False))) for value in (inputs, right)
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"has values for {name} that are not JSON: {error}") from error
    return (
        f"_answer_ = {name}(*{arguments})\n"  # not a built-in name: the function may be named like one
        f"assert ([*_answer_] if _answer_.__class__ is ().__class__ else _answer_) in {results}"
    )


def _source_column(row: Mapping[str, Any]) -> tuple[str, Any]:
    """The column with the tests, and its value."""
    names = (*FORMS_OF_TESTS, *FORMS_OF_CASES)
    by_column = {name: value for name in names if (value := _parse_nested_json(row.get(name)))}
    for name, value in by_column.items():
        if name in FORMS_OF_CASES and isinstance(value, str) and _PACKED.fullmatch(value):
            by_column[name] = _unpack_private_cases(value)
    truths = [
        (name, by_column.pop(name))
        for name in ("ground_truth", "reward_model")
        if name in by_column
    ]
    preferred = {name: by_column[name] for name in ("tests", "test_cases") if name in by_column}
    by_column = preferred or _merge_public_private(by_column)
    by_column = by_column or dict(
        [pair for name, value in truths for pair in _tests_in_truth(name, value)][:1]
    )
    if len(by_column) > 1:
        first, second, *_ = by_column
        raise ValueError(
            f"has both `{first}` and `{second}`; leave one empty, or give one alone as `tests` or `test_cases`"
        )
    if not by_column:
        raise ValueError(
            "has no tests: expected asserts or code in the column `tests`, or input and output in `test_cases`. Those of "
            f"other data sets may stand in {', '.join(name for name in names if name not in ('tests', 'test_cases'))}"
        )
    ((name, value),) = by_column.items()
    if name == "official_tests":
        for column, (refused_value, why) in NOT_READ.items():
            if (cell := row.get(column)) and refused_value in (None, cell):
                raise ValueError(f"has `{column}` {cell!r:.40}, and {why}")
    return name, value


def _merge_public_private(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Public and private cases combined as one column."""
    merged = dict(columns)
    for public, private in (
        ("public_test_cases", "private_test_cases"),
        ("public_tests", "private_tests"),
    ):
        parts = [merged.pop(column) for column in (public, private) if column in merged]
        if cases := [case for part in parts for case in _case_list(part)]:
            merged[public] = cases
    return merged


def _tests_in_truth(name: str, value: Any) -> list[tuple[str, Any]]:
    """A ground-truth column if it holds tests; otherwise nothing."""
    if isinstance(value, Mapping) and "ground_truth" in value:
        value = _parse_nested_json(cast("Mapping[str, Any]", value)["ground_truth"])
    return [(name, value)] if _are_asserts(value) or (value and _are_cases(value)) else []


def _case_list(cases: Any) -> list[Any]:
    if isinstance(cases, Mapping):
        table = cast("Mapping[str, Any]", cases)
        pairs = _input_output_pairs(table) if any(table.values()) else []
        shared = {"fn_name": table["fn_name"]} if "fn_name" in table else {}
        return [{"input": argument, "output": expected, **shared} for argument, expected in pairs]
    if not isinstance(cases, list):
        raise ValueError(f"has test cases that are not a list: {cases!r:.80}")
    return cast("list[Any]", cases)


def _are_cases(value: Any) -> bool:
    """True if a column for asserts holds cases, as in DeepCoder."""
    entries: list[Any] = cast("Any", value) if isinstance(value, list) else [value]
    return all(isinstance(entry, Mapping) for entry in entries)


def _are_asserts(value: Any) -> bool:
    """True if a column of test cases holds asserts that call the function (AceCode), not inputs and outputs."""
    entries: list[Any] = cast("Any", value) if isinstance(value, list) else [value]
    return all(isinstance(entry, str) for entry in entries) and any(map(_ASSERT.search, entries))


_ASSERT = re.compile(r"(?m)^[^\S\n]*assert\b")


def _is_one_case(value: Any) -> bool:
    """True for one case; a table has lists for inputs and outputs, and no type."""
    match value:
        case {"input": given, "output": expected, **more}:
            return not (isinstance(given, list) and isinstance(expected, list)) or "type" in more
        case _:
            return False


def _setup_code(row: Mapping[str, Any]) -> list[str]:
    """The code that MBPP's tests start with."""
    values: list[Any] = [
        _parse_nested_json(row.get(name)) or [] for name in ("test_imports", "test_setup_code")
    ]
    lines: list[Any] = [
        line for value in values for line in ([value] if isinstance(value, str) else value)
    ]
    return [str(line) for line in lines if str(line).strip()]


def _function_named(metadata: Any) -> Any:
    if not isinstance(metadata, Mapping):
        return None
    return cast("Mapping[str, Any]", metadata).get("func_name")


def _without_class(name: Any) -> Any:
    """`add` for `Solution().add`, as LeetCodeDataset writes it."""
    return name.removeprefix("Solution().") if isinstance(name, str) else name


def _begun_in(row: Mapping[str, Any]) -> str | None:
    """The single function that LiveCodeBench's `starter_code` starts; None if it is ambiguous."""
    code = row.get("starter_code")
    names = set(_DEFINED.findall(code)) if isinstance(code, str) else set[str]()
    return names.pop() if len(names) == 1 else None


_DEFINED = re.compile(r"(?m)^[ \t]*def[ \t]+(?!__)(\w+)[ \t]*\(")


def _parse_nested_json(value: Any) -> Any:
    """The value with JSON text parsed, also if it was encoded twice, because some table formats hold only text; arrays become lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [
            _parse_nested_json(item) if hasattr(item, "tolist") else item
            for item in cast("list[Any]", value)
        ]
    if isinstance(value, Mapping):
        table = cast("Mapping[Any, Any]", value)
        return {
            key: _parse_nested_json(item) if hasattr(item, "tolist") else item
            for key, item in table.items()
        }
    if not isinstance(value, str):
        return value
    if value.lstrip()[:1] in ("[", "{", '"'):
        with suppress(ValueError):
            inner = json.loads(value)
            if not isinstance(inner, str):
                return _parse_nested_json(inner)
            return _parse_nested_json(inner) if inner.lstrip()[:1] in ("[", "{") else value
    return value


_PACKED = re.compile(r"e[JN][A-Za-z0-9+/]{10,}=*\s*")
"""Data that zlib has compressed, in base64."""


def _pickled_text(packed: bytes) -> str:
    """A pickled text, read from the pickle's instructions without executing or importing anything. Raises ValueError for any other
    pickle.
    """
    text = None
    for instruction, argument, _ in pickletools.genops(packed):
        if "UNICODE" in instruction.name:
            text = argument
        elif instruction.name not in _AROUND_TEXT:
            raise ValueError(f"its pickle holds more than a text ({instruction.name})")
    return str(text)


_AROUND_TEXT = frozenset("PROTO FRAME STOP PUT BINPUT LONG_BINPUT MEMOIZE".split())
"""Instructions that pickle writes around one text."""


def _unpack_private_cases(text: str) -> Any:
    """The private cases of LiveCodeBench: JSON, pickled, compressed, in base64."""
    try:
        unpacking = zlib.decompressobj()
        packed = unpacking.decompress(base64.b64decode(text, validate=True), _MAX_UNPACKED)
        if not unpacking.eof:
            raise ValueError(f"it ends early, or is larger than {_MAX_UNPACKED >> 20} MiB")
        return json.loads(_pickled_text(packed))
    except Exception as error:  # an invalid pickle may raise anything
        raise ValueError(
            f"has packed test cases {text[:20]!r}… that cannot be read: {error}"
        ) from error


_CALLS = ("functional", "function_call")
"""Kinds of a case that calls a function: LiveCodeBench's, and that of open-r1 and PrimeIntellect."""
_Call = tuple[Any, list[Any]]
"""Arguments, and the accepted results."""


def _is_call(case: Any) -> bool:
    if not isinstance(case, Mapping):
        return False
    kind = _case_kind(cast("Mapping[str, Any]", case))
    return kind in _CALLS or (kind is None and bool(cast("Any", case).get("fn_name")))


def _of_live_code_bench(cases: Any) -> bool:
    return isinstance(cases, list) and any("testtype" in case for case in cast("list[Any]", cases))


def _case_kind(case: Mapping[str, Any]) -> Any:
    return case.get("type", case.get("testtype"))


def _listed_calls(cases: Sequence[Any], entry_point: Any) -> tuple[Any, list[_Call]]:
    """The function that all cases call, and the calls."""
    names = {_name_in(case) or entry_point for case in cases if _is_call(case)}
    if not all(map(_is_call, cases)) or len(names) != 1 or None in names:
        raise ValueError(
            "has test cases that call functions; expected all of them to, with one `fn_name`, or an `entry_point` of the row"
        )
    if partial := [case for case in cases if not {"input", "output"} <= case.keys()]:
        raise ValueError(f"has a test case {partial[0]!r:.80}; expected `input` and `output`")
    calls = [
        _make_call(case["input"], case["output"], accept_list=_case_kind(case) != "functional")
        for case in cases
    ]
    return names.pop(), calls


def _name_in(case: Mapping[str, Any]) -> Any:
    return case.get("fn_name") or _function_named(_parse_nested_json(case.get("metadata")))


def _make_call(inputs: Any, expected: Any, *, accept_list: bool = False) -> _Call:
    """A call. Its arguments are a list, or text with the JSON of one argument in each line; a number is a single argument.

    `accept_list`: text may also be the JSON of the whole list. If the arguments are not text, a result given as text may be JSON or the
    text itself.
    """
    if isinstance(inputs, str):
        arguments = _parse_arguments(inputs)
        if accept_list and len(arguments) == 1 and isinstance(arguments[0], list):
            arguments = cast("list[Any]", arguments[0])
        return arguments, [_parse_result(expected)]
    right = (
        [expected, _parse_result(expected)]
        if accept_list and isinstance(expected, str)
        else [expected]
    )
    return ([inputs] if isinstance(inputs, int | float) else inputs), right


def _parse_arguments(text: str) -> list[Any]:
    with suppress(ValueError):
        return [json.loads(text)]  # one JSON value may take several lines
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ValueError(
            f"has the input {text!r:.80}, whose lines are not JSON: {error}"
        ) from error


def _parse_result(expected: Any) -> Any:
    if not isinstance(expected, str):
        return expected
    with suppress(ValueError):
        return json.loads(expected)
    return expected


def _parse_cases(value: Any, name: str, *, numbers: bool) -> list[Case]:
    """Cases from a list of {input, output}, or from {inputs: […], outputs: […]}; with `numbers`, a number is converted to text."""
    if isinstance(value, str):
        raise ValueError(
            f"has `{name}` that are neither JSON nor what LiveCodeBench packs: {value!r:.80}"
        )
    if isinstance(value, Mapping):
        pairs = _input_output_pairs(cast("Mapping[str, Any]", value))
        value = [{"input": argument, "output": expected} for argument, expected in pairs]
    return [_parse_case(case, numbers=numbers) for case in value]


def _input_output_pairs(table: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    inputs, outputs = (table.get(f"{name}s", table.get(name)) for name in ("input", "output"))
    if unknown := [key for key in table if key not in _OF_A_TABLE]:
        raise ValueError(
            f"has `test_cases` with the key {unknown[0]!r:.80}; expected `inputs`, `outputs` and, for calls, `fn_name`"
        )
    if not (isinstance(inputs, list) and isinstance(outputs, list)):
        raise ValueError(_NO_TABLE)
    columns = cast("list[Any]", inputs), cast("list[Any]", outputs)
    if not len(columns[0]) == len(columns[1]) > 0:
        raise ValueError(_NO_TABLE)
    return list(zip(*columns, strict=True))


_OF_A_TABLE = ("inputs", "outputs", "input", "output", "fn_name")
_NO_TABLE = "has `test_cases` that are a dictionary; expected `inputs` and `outputs`, two lists of equal length"


def _parse_case(value: Any, *, numbers: bool) -> Case:
    match value:
        case {"input": given, "output": expected, **more} if (
            not more.keys() - _BESIDE and not more.get("fn_name") and _case_kind(more) in _PROGRAMS
        ):
            with suppress(TypeError):
                return Case(
                    _join_lines(given, numbers=numbers), _join_lines(expected, numbers=numbers)
                )
        case _:
            pass
    raise ValueError(
        f"has a test case {value!r:.80}; expected {{input: text, output: text}}, or "
        "the type function_call, an `fn_name` and a list of arguments as input"
    )


def _join_lines(text: Any, *, numbers: bool) -> str:
    """Text; APPS and TACO also store it as a list of lines."""
    if numbers and isinstance(text, int | float) and not isinstance(text, bool):
        return str(text)
    if isinstance(text, list):
        return "\n".join(cast("list[str]", text))
    if not isinstance(text, str):
        raise TypeError
    return text


_BESIDE = {"type", "testtype", "fn_name", "metadata"}
"""Keys that some datasets have in a case in addition to input and output."""
_PROGRAMS = (None, "stdin", "stdin_stdout")
"""Kinds of a case for a program."""


# The verdict on one completion


@dataclass(frozen=True, slots=True)
class Verdict:
    """The number of tests that a piece of code passes, and the reason for its first failure."""

    passed: int
    of: int
    why: str | None


async def verdict(
    code: str, tests: RowTests, limits: Limits, require: Sequence[str] = ()
) -> Verdict:
    """Run the tests; `limits.seconds` is for all of them together.

    Raises SandboxError if no sandbox has the required protections, ValueError for tests that cannot be run.
    """
    if tests.of_program:
        passed, why, remaining = 0, None, limits.seconds
        cases, common_imports = tests.of_program, _common_imports(code, tests)
        for number, case in enumerate(cases):
            if remaining <= 0:
                break
            output = max(limits.output, 2 * len(case.output) + 1024)
            allowed = replace(limits, seconds=remaining, output=output)
            stdin = case.input.encode()
            result = await run(
                code, stdin=stdin, limits=allowed, require=require, common_imports=common_imports
            )
            remaining -= result.seconds
            if case.passes(result):
                passed += 1
            elif why is None:
                why = f"case {number}: {_describe_result(result)}"
        return Verdict(passed, len(cases), why)
    # If the tests break off, they are at fault if they also do so for code that does nothing.
    try:
        return await _run_tests(code, tests, limits, require)
    except _TestsBrokeOff as broke_off:
        if not broke_off.so_far.of:  # the tests had not started
            raise ValueError(str(broke_off)) from broke_off
        partial_verdict = broke_off.so_far
    names = Plan.of(tests.of_functions, tests.entry_point).names
    harmless = _ANYTHING + "\n".join(f"{name} = _Anything()" for name in sorted(names))
    try:
        await _run_tests(harmless, tests, limits, require)
    except _TestsBrokeOff as broke_off:
        raise ValueError(str(broke_off)) from broke_off
    return partial_verdict


def _common_imports(code: str, tests: RowTests) -> bool:
    """True if common modules need no import: the tests require it, like LiveCodeBench's, or the code defines LeetCode's wrapper class."""
    return tests.common_imports or _defines(code, (WRAPPER,))


def _describe_result(result: Result) -> str:
    errors = result.errors.decode(errors="replace").strip().splitlines()[-1:]
    printed = result.output.decode(errors="replace")[:200]
    return f"{result.ending}; printed {printed!r}{''.join(f'; {line[:200]}' for line in errors)}"


class _TestsBrokeOff(Exception):
    """The tests stopped before their end. `verdict` finds out whether the tests or the code are at fault."""

    def __init__(self, why: str, so_far: Verdict) -> None:
        super().__init__(why)
        self.so_far = replace(so_far, why=so_far.why or why)


_ANYTHING = """
class _Anything:
    def __call__(self, *_, **__): return self
    def __getattr__(self, _): return self
"""


async def _run_tests(code: str, tests: RowTests, limits: Limits, require: Sequence[str]) -> Verdict:
    """One sandbox for the code and one for the tests, connected by a socket; verdicts arrive on a second one."""
    solution_end, judge_end = socket.socketpair()
    receiver, verdicts = socket.socketpair()
    box_limits = replace(limits, seconds=limits.seconds + START_LIMIT)  # enforced in this process
    test_source = (
        tests.of_functions if isinstance(tests.of_functions, str) else list(tests.of_functions)
    )
    serving = _sandbox_program(
        "boxed_solution:serve", code=code, common_imports=_common_imports(code, tests)
    )
    judging = _sandbox_program(
        "boxed_tests:judge", tests=test_source, entry_point=tests.entry_point
    )
    solution = Box(serving, limits=box_limits, channels=[solution_end], require=require)
    judge = Box(judging, limits=box_limits, channels=[judge_end, verdicts], require=require)
    with receiver, solution_end, judge_end, verdicts:
        async with solution, judge:
            for end in (solution_end, judge_end, verdicts):
                end.close()
            await solution.wait_until_running()
            await judge.wait_until_running()
            docket = _VerdictCollector(receiver)
            if not await docket.fill(limits.seconds):
                result = await judge.result()
                why = f"The box of the tests ended before them: {_describe_result(result)}"
                raise _TestsBrokeOff(why, docket.verdict())
            return docket.verdict()


def _sandbox_program(function: str, **arguments: Any) -> dict[str, Any]:
    return {"function": f"groupwise.tasks.rewards.{function}", "arguments": arguments}


class _VerdictCollector:
    """Records the messages of the tests' sandbox."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._buffer = FrameBuffer()
        self._outcomes: list[bool] = []
        self._count = 0
        self._why: str | None = None

    async def fill(self, seconds: float) -> bool:
        """Receive verdicts until the last one or until `seconds` after the start of the tests. Returns False if the tests broke
        off.

        Raises _TestsBrokeOff if the tests report that they cannot be run, SandboxError if they do not start.
        """
        try:
            async with asyncio.timeout(START_LIMIT):
                opening = await self._next_message()
        except TimeoutError:
            raise SandboxError(f"Tests had not begun after {START_LIMIT:g} s.") from None
        if opening is None:
            return False
        self._count = self._require_unbroken(opening)["tests"]
        try:
            async with asyncio.timeout(seconds):
                while (message := await self._next_message()) is not None and "done" not in message:
                    self._record_verdict(self._require_unbroken(message))
        except TimeoutError:
            self._why = self._why or f"time ran out in test {len(self._outcomes)}"
            return True
        return message is not None

    def verdict(self) -> Verdict:
        """The verdict so far; tests without an outcome have not passed."""
        return Verdict(sum(self._outcomes), self._count, self._why)

    def _require_unbroken(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if "broken" in message:
            raise _TestsBrokeOff(message["broken"], self.verdict())
        return message

    def _record_verdict(self, message: Mapping[str, Any]) -> None:
        self._outcomes.append(message["passed"])
        self._why = self._why or message["why"]

    async def _next_message(self) -> dict[str, Any] | None:
        while (frame := self._buffer.take()) is None:
            piece = await asyncio.get_running_loop().sock_recv(self._connection, 1 << 16)
            if not piece:
                return None
            self._buffer.add(piece)
        return json.loads(frame)


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
    """Most completions of a group that run at the same time."""
    answer_tag: Tag = "answer"
    require: tuple[str, ...] = ("network", "files", "calls")
    """Protections without which nothing is run; see `sandbox.PROTECTIONS`. These keep the code from the trainer, and from the tests."""

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
        """Raise ValueError for a row without tests, with tests that cannot be run, or with tests that no code could fail."""
        try:
            RowTests.of(row).check()
        except RecursionError:
            raise ValueError("has tests that are nested too deep to be read") from None

    def check_machine(self) -> str:
        """Name the protections that hold on this machine. Raises ValueError if a required one is missing, or if no sandbox can run."""
        try:
            protections = _machine_protections()
        except SandboxError as problem:
            raise ValueError(
                f"runs code in a sandbox, which is not available here: {problem}"
            ) from problem
        description = ", ".join(
            f"{name} ({' and '.join(mechanisms)})"
            for name, mechanisms in protections.items()
            if mechanisms
        )
        lacking = missing(protections)
        if unmet := [name for name in self.require if name in lacking]:
            raise ValueError(
                f"does not run code without {', '.join(unmet)} in its sandbox ({'; '.join(PROTECTIONS[name] for name in unmet)}), and this "
                f"machine has {description or 'nothing of it'}. Run on Linux 5.13 or later on x86-64 or aarch64, or set its `require` "
                "to what you need: [] for code that you trust."
            )
        return f"runs code in a sandbox that has {description}; it lacks {', '.join(lacking) or 'nothing'}"

    async def __call__(
        self,
        completions: Sequence[CompletionText],
        log_extra: Callable[[str, Sequence[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """A number from 0 to 1 for each completion; `Failed` if its code cannot be judged."""
        count = len(completions)
        # Read the tests of each row once: the members of a group share them, and they may be large.
        names = (*FORMS_OF_TESTS, *FORMS_OF_CASES, *BESIDE, *NOT_READ)
        columns_used = [name for name in names if name in columns]
        tests_by_key: dict[tuple[int, ...], RowTests | str] = {}
        keys = [tuple(id(columns[name][index]) for name in columns_used) for index in range(count)]
        for index, key in enumerate(keys):
            if key not in tests_by_key:
                try:
                    tests_by_key[key] = RowTests.of(
                        {name: columns[name][index] for name in columns_used}
                    )
                except (ValueError, RecursionError) as problem:
                    tests_by_key[key] = str(problem)
        rows = [tests_by_key[key] for key in keys]
        texts = completion_texts(completions, columns)
        prompts = columns.get("prompts", [None] * count)
        rows = [
            _with_prompt_definitions(row, prompt) for row, prompt in zip(rows, prompts, strict=True)
        ]
        names_of_row = {row: () if isinstance(row, str) else row.names for row in set(rows)}
        codes = [
            _with_prompt(prompt, code_in(text, self.answer_tag, names_of_row[row]), row)
            for prompt, text, row in zip(prompts, texts, rows, strict=True)
        ]
        slots = asyncio.Semaphore(self.concurrency)
        async with asyncio.TaskGroup() as group:
            jobs = {  # run the same code once, even if several members of a group wrote it
                pair: group.create_task(self._verdict_for(*pair, slots))
                for pair in dict.fromkeys(zip(codes, rows, strict=True))
            }
        verdicts = [jobs[pair].result() for pair in zip(codes, rows, strict=True)]
        if log_extra is not None:
            log_extra("python_tests", [_verdict_record(verdict) for verdict in verdicts])
        return [
            verdict
            if isinstance(verdict, Failed)
            else verdict.passed / verdict.of
            if self.partial
            else float(verdict.passed == verdict.of)
            for verdict in verdicts
        ]

    async def _verdict_for(
        self, code: str, row: RowTests | str, slots: asyncio.Semaphore
    ) -> Verdict | Failed:
        """The verdict, or the reason why there is none."""
        if isinstance(row, str):
            return Failed(f"cannot judge this row: it {row}")
        limits = Limits(seconds=self.time_limit, memory=self.memory * _MIB)
        async with slots:
            try:
                return await verdict(code, row, limits, self.require)
            except (SandboxError, ValueError) as error:
                return Failed(f"could not run the tests: {error}")


def _with_prompt_definitions(row: RowTests | str, prompt: Any) -> RowTests | str:
    """The tests together with the definitions in a Python prompt other than the tested function, as HumanEval may need."""
    if isinstance(row, str) or row.entry_point is None or not isinstance(prompt, str):
        return row
    try:
        statements = ast.parse(prompt).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return row
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    definitions: list[ast.stmt] = [
        statement
        for statement in statements
        if isinstance(statement, kinds) and getattr(statement, "name", "") != row.entry_point
    ]
    tests = (row.of_functions,) if isinstance(row.of_functions, str) else row.of_functions
    helpers = ast.unparse(ast.Module(definitions, type_ignores=[]))
    if not helpers or not tests:
        return row
    combined = (
        "\n".join((helpers, *tests)) if isinstance(row.of_functions, str) else (helpers, *tests)
    )
    return replace(row, of_functions=combined)


def _with_prompt(prompt: Any, code: str, row: RowTests | str) -> str:
    """The code with its prompt before it, if the prompt starts the tested function, as in HumanEval."""
    names = () if isinstance(row, str) or row.entry_point is None else (row.entry_point,)
    prompt_begins_it = (
        isinstance(prompt, str) and _defines(prompt, names) and not _defines(code, names)
    )
    return prompt + code if prompt_begins_it else code


def _verdict_record(verdict: Verdict | Failed) -> dict[str, Any] | None:
    if isinstance(verdict, Failed):
        return None
    return {"passed": verdict.passed, "of": verdict.of, "why": verdict.why}


@cache
def _machine_protections() -> Mapping[str, tuple[str, ...]]:
    """Protections that a sandbox has on this machine, tried once."""
    return run_to_end(run("")).held
