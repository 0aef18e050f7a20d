"""Mutation tests: the package with one deliberate mistake, which tests must notice.

`tests/mutations.txt` lists them. A mutation names a module, a function, an edit of its syntax tree (so layout, comments and moved lines do
not matter), and test files in which at least one test must fail. Each gets its own tree: a copy of `groupwise` with the edit, and links to
everything else. A fork server, one process that has imported the slow libraries and nothing of ours, forks a child for each tree, and
the child runs the tests there; so a mutation costs what its tests cost.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutations.txt"
LINKED = ("tests", "examples", "configs", "pyproject.toml")
SLOW_IMPORTS = (
    *("torch", "alembic.command", "asyncssh", "fastapi", "httpx2", "hypothesis", "numba", "numpy"),
    *("peft", "psycopg", "pydantic", "rich.table", "safetensors.torch", "sqlalchemy.orm"),
    *("tokenizers", "torch._dynamo", "transformers.models.llama.modeling_llama", "typer"),
    "uvicorn",
)
ONE_PROCESS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not soak and not gpu")
ONE_PROCESS += ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # anyio came with transformers


@dataclass(frozen=True, slots=True)
class Edit:
    """One change in one function of one file."""

    file: str
    """The file's path below `groupwise`."""
    scope: str
    """Qualified name of a function or class; empty for the module."""
    text: str
    """The edit as written in the table, whose head explains the form."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One deliberate mistake."""

    mistake: str
    """A description for people; starts with the number of its row in docs/correctness.md, if it has one."""
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    """Test files: in at least one of them a test must fail."""


@dataclass(slots=True)
class _Section:
    file: str
    tests: tuple[str, ...]
    mutations: list[Mutation] = field(default_factory=list)


def read_table(text: str) -> tuple[Mutation, ...]:
    """The mutations of such a table. ValueError for a line that cannot be read."""
    sections: list[_Section] = []
    above = ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if not line.startswith(" "):
            file, *tests = line.split()
            mirrored = f"unit/{file.rpartition('/')[0]}/test_{file.rpartition('/')[2]}"
            sections.append(_Section(file, tuple(f"tests/{test}" for test in tests or [mirrored])))
            continue
        if line.startswith("    # "):
            above = line[6:]
            continue
        found = re.fullmatch(r" +(and )?(?:(\S+\.py):)?([\w.]*): (.*?)(?:  # (.*))?", line)
        if found is None or not sections:
            raise ValueError(f"mutations.txt, line {number}: {line!r}")
        joined, file, scope, edit, beside = found.groups()
        section = sections[-1]
        edits = (Edit(file or section.file, scope, edit),)
        if joined:
            last = section.mutations.pop()
            section.mutations.append(Mutation(last.mistake, last.edits + edits, last.tests))
        else:
            section.mutations.append(Mutation(beside or above, edits, section.tests))
    return tuple(mutation for section in sections for mutation in section.mutations)


def _key(node: ast.AST) -> str:
    """A key that is equal for equal code, whether it is read or assigned to."""
    return re.sub(r"ctx=\w+\(\)", "", ast.dump(node))


def _readings(text: str) -> Iterator[list[ast.AST]]:
    """The ways to parse the text: as an expression, statements, a slice or a keyword argument."""
    with contextlib.suppress(SyntaxError):
        body = ast.parse(text.replace(" ;; ", "\n")).body
        alone = body[0] if len(body) == 1 else None
        yield [alone.value] if isinstance(alone, ast.Expr) else list(body)
    for around in ("_[{}]", "_({})"):
        with contextlib.suppress(SyntaxError):
            whole = ast.parse(around.format(text), mode="eval").body
            yield [whole.slice] if isinstance(whole, ast.Subscript) else list(whole.keywords)  # type: ignore[attr-defined]


def _alike(text: str, node: ast.AST) -> list[ast.AST]:
    """The reading of the text that can replace such a node."""
    readings = [each for each in _readings(text) if each]
    kinds = (ast.Slice, ast.keyword, ast.stmt, ast.expr)
    kind = next((kind for kind in kinds if isinstance(node, kind)), ast.AST)
    return next((each for each in readings if isinstance(each[0], kind)), readings[0])


def _is(node: ast.AST, wanted: str | Mapping[str, type[ast.AST]]) -> bool:
    if isinstance(wanted, Mapping):  # the kind first: to dump every node takes long
        return type(node) in wanted.values() and _key(node) in wanted
    if not isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
        return False
    lines = [line for line in ast.unparse(node).strip().splitlines() if line[:1] != "@"]
    return lines[0].strip() == wanted


def _scopes(node: ast.AST, names: Sequence[str]) -> Iterator[ast.AST]:
    """The functions or classes of that qualified name."""
    if not names:
        yield node
        return
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _scopes(child, names)
        elif child.name == names[0]:
            yield from _scopes(child, names[1:])


Place = tuple[ast.AST, str, int | None]
"""The position of a node: its parent, the parent's field, and the index if the field is a list."""


def _places(tree: ast.AST) -> dict[int, Place]:
    places: dict[int, Place] = {}
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if isinstance(value, ast.AST):
                places[id(value)] = parent, name, None
            for index, each in enumerate(value if isinstance(value, list) else ()):
                places[id(each)] = parent, name, index
    return places


def _replace(node: ast.AST, new: list[ast.AST], places: dict[int, Place]) -> None:
    parent, name, index = places[id(node)]
    expressions = all(isinstance(each, ast.expr) for each in new)
    if isinstance(parent, ast.Expr) and not (len(new) == 1 and expressions):
        _replace(parent, new, places)
    elif index is None:
        setattr(parent, name, new[0])
    else:
        listed = getattr(parent, name)
        if isinstance(node, ast.stmt):
            new = [ast.Expr(each) if isinstance(each, ast.expr) else each for each in new]
            new = new or [ast.Pass()] * (len(listed) == 1)
        listed[index : index + 1] = new
        if isinstance(parent, ast.BoolOp) and len(listed) == 1:
            _replace(parent, listed, places)


def make_edit(tree: ast.Module, edit: Edit) -> None:
    """Apply the edit to the tree. ValueError if the code that it names is missing or ambiguous."""
    text, nth = edit.text, 0
    if marked := re.fullmatch(r"(.*) @(\d+)", text):
        text, nth = marked[1], int(marked[2])
    names = edit.scope.split(".") if edit.scope else []
    scopes = [*_scopes(tree, names)]
    nodes = [node for scope in scopes for node in ast.walk(scope)]
    if " ~> " in text:
        old, new = (ast.literal_eval(each) for each in text.split(" ~> "))
        texts = [
            each for each in nodes if isinstance(each, ast.Constant) and type(each.value) is str
        ]
        found = [each for each in texts if old in each.value]  # type: ignore[operator]
    else:
        old, new = (text[5:], "") if text.startswith("drop ") else text.split(" => ", 1)
        header = old.endswith(": ...")
        readings = () if header else [each[0] for each in _readings(old) if each]
        wanted = f"{old[:-5]}:" if header else {_key(each): type(each) for each in readings}
        found = [each for each in nodes if _is(each, wanted)]
    if not found or (len(found) > 1 and not nth):
        raise ValueError(f"{edit.file}, {edit.scope or 'module'}: {len(found)} times {old!r}")
    node = found[nth - 1 if nth else 0]
    if " ~> " in text:
        assert isinstance(node, ast.Constant)
        node.value = str(node.value).replace(old, new)
    else:
        around = [tree] if node in scopes else scopes
        places = {key: place for each in around for key, place in _places(each).items()}
        _replace(node, _alike(new, node) if new else [], places)


def changed(edits: Sequence[Edit]) -> dict[str, ast.Module]:
    """The files of the package that are changed, as syntax trees. ValueError as `make_edit`."""
    trees: dict[str, ast.Module] = {}
    for edit in edits:
        if edit.file not in trees:
            trees[edit.file] = ast.parse((ROOT / "groupwise" / edit.file).read_text())
        make_edit(trees[edit.file], edit)
    return trees


def tree(folder: Path, edits: Sequence[Edit] = ()) -> Path:
    """Copy the package there, mutated. ValueError as `make_edit`."""
    trees = changed(edits)
    shutil.copytree(
        ROOT / "groupwise", folder / "groupwise", ignore=shutil.ignore_patterns("*.pyc.*")
    )
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    for file, code in trees.items():
        path = folder / "groupwise" / file
        path.write_text(ast.unparse(ast.fix_missing_locations(code)) + "\n")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()
    return folder


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcome of a test run in a tree."""

    package: str
    """The file that `import groupwise` found."""
    code: int
    """Exit code of pytest; 1 says that tests failed."""
    failed: frozenset[str]
    """Tests that failed in their call; those that fail in a fixture are in `broken`."""
    broken: frozenset[str]
    printed: str


class ForkServer:
    """The process that has the slow imports and forks one child per mutation; a context manager."""

    def __enter__(self) -> Self:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=30)

    def run(self, folder: Path, tests: Sequence[str], *options: str) -> Outcomes:
        """Run these tests with the package of that tree."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(folder), [*options, *tests]]), file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "done\n", "the fork server ended"
        printed = (folder / "printed").read_text(errors="replace")
        report = folder / "report.json"
        assert report.exists(), f"the tests did not come to an end:\n{printed}"
        found = json.loads(report.read_text())
        failed, broken = frozenset(found["failed"]), frozenset(found["broken"])
        return Outcomes(found["package"], found["code"], failed, broken, printed)


class _Recorder:
    """A plugin of pytest that notes which tests failed."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {"failed": [], "broken": []}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and report.when == "call":
            self.found["failed"].append(report.nodeid)
        elif report.failed and report.when == "setup":
            self.found["broken"].append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.found["broken"].append(report.nodeid)


def _fork_for_each_line() -> None:
    for name in (*SLOW_IMPORTS, "pytest"):
        __import__(name)
    gc.collect()
    gc.freeze()  # or each child would look through all that for garbage, and so copy it
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        folder, arguments = json.loads(line)
        child = os.fork()
        if not child:
            _run_in_child(Path(folder), arguments)
        os.waitpid(child, 0)
        print("done", file=answers, flush=True)


def _run_in_child(folder: Path, arguments: list[str]) -> None:
    """Never returns."""
    try:
        printed = os.open(folder / "printed", os.O_WRONLY | os.O_CREAT)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        os.chdir(folder)
        sys.path[0] = str(folder)
        import pytest

        recorder = _Recorder()
        options = [*ONE_PROCESS, f"--basetemp={folder / 'tmp'}"]
        code = 1
        with contextlib.suppress(Exception):  # of what a failed test left open
            code = pytest.main([*options, *arguments], plugins=[recorder])
        import groupwise

        report = {**recorder.found, "code": int(code), "package": groupwise.__file__}
        (folder / "report.json").write_text(json.dumps(report))
    except BaseException:  # noqa: BLE001 — a child must never return into the fork server
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    _fork_for_each_line()
