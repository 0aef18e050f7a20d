"""Mutations: the package with one guard removed, to see the tests that guard it fail.

Each mutation lives in a tree of its own: a copy of `groupwise`, changed in one place, and links to everything else. A nursery, which is
one process that has imported the slow libraries and nothing of ours, forks a child for each tree; the child runs the named tests there,
so a mutation costs what its tests cost. What is reported are the outcomes of tests that ran: a file that cannot be imported, a fixture
that breaks or a test that is not there are no failed tests.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("tests", "examples", "configs", "pyproject.toml")
SLOW_IMPORTS = (
    "torch",
    "hypothesis",
    "numba",
    "numpy",
    "peft",
    "pydantic",
    "rich.table",
    "safetensors.torch",
    "tokenizers",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "typer",
)


@dataclass(frozen=True, slots=True)
class Mutation:
    """One mistake, made on purpose."""

    item: str
    """Of docs/correctness.md, or the guard of the fleet that is taken away."""
    mistake: str
    edits: tuple[tuple[str, str, str], ...]
    """(file in `groupwise`, text that stands there exactly once, what takes its place)."""
    tests: tuple[str, ...]
    """Each of these must fail, in at least one case."""

    @property
    def name(self) -> str:
        """For people: item and mistake."""
        return f"{self.item}: {self.mistake}"


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What came of a run of tests in a tree."""

    package: str
    """The file that `import groupwise` found."""
    code: int
    """Exit code of pytest; 1 says that tests failed."""
    passed: frozenset[str]
    failed: frozenset[str]
    """In their call: what breaks before, in a fixture, stands in `broken`."""
    broken: frozenset[str]
    talk: str
    """What pytest printed."""


def tree(folder: Path, edits: Sequence[tuple[str, str, str]] = ()) -> Path:
    """Copy the package there, mutated. AssertionError where a text to be replaced does not stand there exactly once."""
    texts = changed(edits)
    shutil.copytree(ROOT / "groupwise", folder / "groupwise", ignore=_half_written)
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    for file, text in texts.items():
        path = folder / "groupwise" / file
        path.write_text(text)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()
    return folder


def changed(edits: Sequence[tuple[str, str, str]]) -> dict[str, str]:
    """The files of the package that are changed, with their texts. AssertionError where a text does not stand there exactly once."""
    texts: dict[str, str] = {}
    for file, old, new in edits:
        text = texts.get(file) or (ROOT / "groupwise" / file).read_text()
        found = text.count(old)
        assert found == 1, (
            f"{file} has the text of a mutation {found} times, not once. Make the same mistake in the code as it is now, in "
            f"tests/mutations.py or tests/fleet_mutations.py:\n{old}"
        )
        texts[file] = text.replace(old, new)
    return texts


def _half_written(_: str, names: list[str]) -> list[str]:
    """Compiled files that another process is about to rename."""
    return [name for name in names if ".pyc." in name]


class Nursery:
    """The process that forks; a context manager."""

    def __init__(self, imports: Sequence[str] = SLOW_IMPORTS) -> None:
        """`imports`: what takes long to import, and which most of the tests need."""
        self._imports = tuple(imports)

    def __enter__(self) -> Self:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *self._imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)

    def run(self, folder: Path, tests: Sequence[str]) -> Outcomes:
        """Run these tests with the package of that tree."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(folder), list(tests)]), file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "done\n", "the nursery ended"
        talk = (folder / "talk").read_text(errors="replace")
        report = folder / "report.json"
        assert report.exists(), f"the tests did not come to an end:\n{talk}"
        found = json.loads(report.read_text())
        passed, failed, broken = (frozenset(found[key]) for key in ("passed", "failed", "broken"))
        return Outcomes(found["package"], found["code"], passed, failed, broken, talk)


class _Witness:
    """A plugin of pytest that writes down what happened to whom."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {"passed": [], "failed": [], "broken": []}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.outcome in ("passed", "failed"):
            self.found[report.outcome].append(report.nodeid)
        elif report.failed and report.when == "setup":
            self.found["broken"].append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.found["broken"].append(report.nodeid)


def _nursery() -> None:
    for name in (*sys.argv[1:], "pytest"):
        __import__(name)
    gc.collect()
    gc.freeze()  # or each child would look through all that for garbage, and so copy it
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        folder, tests = json.loads(line)
        child = os.fork()
        if not child:
            _run_in(folder, tests)
        os.waitpid(child, 0)
        print("done", file=answers, flush=True)


def _run_in(folder: str, tests: list[str]) -> None:
    """In a forked child: never returns."""
    try:
        talk = os.open(f"{folder}/talk", os.O_WRONLY | os.O_CREAT)
        os.dup2(talk, 1)
        os.dup2(talk, 2)
        os.chdir(folder)
        sys.path[0] = folder
        _run_tests(Path(folder), tests)
    except BaseException:  # noqa: BLE001 — a child must never return into the nursery
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def _run_tests(folder: Path, tests: list[str]) -> None:
    import pytest

    witness = _Witness()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={folder / 'tmp'}"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # anyio came with transformers
    code = pytest.main([*options, *tests], plugins=[witness])
    import groupwise

    report = {**witness.found, "code": int(code), "package": groupwise.__file__}
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    _nursery()
