"""No regular expression takes more than linear time in the length of its text, whatever that is.

Each pattern of the package is given texts that repeat what it begins to match: its letters, and its runs of letters with something behind.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]
from typing import Any

import groupwise

ROOT = Path(groupwise.__file__).parent
FROM: dict[str, str] = dict.fromkeys(("match", "fullmatch"), "start")
FROM |= dict.fromkeys(("search", "sub", "subn", "findall", "finditer", "split"), "anywhere")
"""Where a method looks for its pattern."""
BOUNDED = {
    "runs/search.py": "300 characters of a reason are looked at",
    "core/settings/validation.py": "advice that stands in the code",
    "tasks/tools.py": "docstrings of the user's own functions",
}
"""Modules whose texts are short, and why."""
LENGTH = 4000
SHORT_S = 0.01


def test_every_pattern_takes_time_in_proportion_to_its_text():
    slow = {
        f"{path}:{line} {how} {pump!r}"
        for path, line, how, pattern in patterns()
        if path not in BOUNDED
        if (pump := quadratic(pattern, how)) is not None
    }
    assert slow == set()


def patterns() -> Iterator[tuple[str, int, str, re.Pattern[Any]]]:
    """Where each pattern stands, whether it is looked for from the start or anywhere, and the pattern."""
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT)
        for node in ast.walk(ast.parse(path.read_text())):
            name = ""
            match node:
                case ast.Assign(
                    [ast.Name(name)], ast.Call(ast.Attribute(ast.Name("re"), "compile")) as call
                ):
                    ways = used_ways().get(name, {"search"})
                case ast.Call(ast.Attribute(ast.Name("re"), way)) as call if way != "compile":
                    ways = {way}
                case _:
                    continue
            for how in {FROM[way] for way in ways & FROM.keys()}:
                if (found := compiled(call, place, name)) is not None:
                    yield str(place), call.lineno, how, found


def compiled(call: ast.Call, place: Path, name: str) -> re.Pattern[Any] | None:
    """The pattern that a call makes; of one that is put together, what the module has of it."""
    match call.args:
        case [ast.Constant(str(text)), *_]:
            return re.compile(text, flags_of(call))
        case _ if name and "worker" not in place.parts:
            module = importlib.import_module(".".join(("groupwise", *place.with_suffix("").parts)))
            return getattr(module, name, None)
        case _:
            return None


@functools.cache
def used_ways() -> dict[str, set[str]]:
    """The methods that the package calls of something, by its name."""
    found: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        for name, way in re.findall(r"\b(\w++)\.(\w++)", path.read_text()):
            found.setdefault(name, set()).add(way)
    return found


def flags_of(call: ast.Call) -> int:
    """Those that are given, by name."""
    given = [
        *call.args[1:],
        *(keyword.value for keyword in call.keywords if keyword.arg == "flags"),
    ]
    named = [
        node.attr for each in given for node in ast.walk(each) if isinstance(node, ast.Attribute)
    ]
    return sum(
        {getattr(re, name) for name in named if isinstance(getattr(re, name, None), re.RegexFlag)}
    )


def quadratic(pattern: re.Pattern[Any], how: str) -> str | None:
    """What a text repeats that takes four times as long when it is twice as long; None if there is nothing."""
    letters = sorted(set(runs(_parser.parse(pattern.pattern, pattern.flags))))[:20]
    pumps = {*"aA0 \n\t_-.\\{", *letters, *(each + more for each in letters for more in "a 0")}
    for pump in sorted(pumps):
        text = pump * (LENGTH // len(pump))
        for around in ("{}", "x{}\0!", "```{}`"):
            if seconds(pattern, how, around.format(text)) < SHORT_S:
                continue
            once, twice = (
                min(seconds(pattern, how, around.format(text * n)) for _ in range(3))
                for n in (1, 2)
            )
            if once > SHORT_S and twice > 3 * once:
                return pump
    return None


def runs(parsed: Iterable[Any]) -> Iterator[str]:
    """The letters of a pattern that stand one after the other."""
    run = ""
    for kind, value in parsed:
        if str(kind) == "LITERAL":
            run += chr(value)
            continue
        yield from [run] if run else []
        run = ""
        yield from (each for inner in inner_of(value) for each in runs(inner))
    yield from [run] if run else []


def inner_of(value: Any) -> Iterator[Any]:
    """The patterns within a part of a pattern."""
    if isinstance(value, _parser.SubPattern):
        yield value
    elif isinstance(value, list | tuple):
        if value and all(isinstance(each, tuple) and len(each) == 2 for each in value):
            yield value  # a set of letters
        else:
            for each in value:
                yield from inner_of(each)


def seconds(pattern: re.Pattern[Any], how: str, given: str) -> float:
    """Of processor time."""
    text = given if isinstance(pattern.pattern, str) else given.encode()
    began = time.thread_time()
    if how == "start":
        pattern.match(text)
        pattern.fullmatch(text)
    else:
        for _ in pattern.finditer(text):
            pass
    return time.thread_time() - began
