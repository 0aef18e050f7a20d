"""The tests' side: they run here, one by one, and judge the results of the solution in the other sandbox.

Calls of the solution run in the other process; their results are compared here. A plain value becomes a built-in Python value here.
Anything else is a `Remote`: it supports calls, attributes, items, iteration, `len`, and comparison with other remotes. It never
equals a plain value and does no arithmetic with one, because then the solution would decide its own verdict. The general rule:
expected values are never sent to the solution.

A name that a test uses is, in this order: its own, Python's (unless it is the entry point), a module of the standard library, the
name's meaning in a common module (unless nothing else is read), the solution's. With an entry point the solution provides only
that. So a solution that defines `sorted`, `AssertionError`, `math` or `isclose` changes nothing for the tests.

Verdicts are sent on the second channel: `tests` (the number of tests), one `passed` for each, `done`; or `broken` if the tests
cannot be run here, which says nothing about the solution.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import symtable
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from groupwise.tasks.rewards.boxed_solution import MODULE, WRAPPER
from groupwise.tasks.rewards.boxed_values import (
    ConnectionLost,
    Errors,
    Json,
    MessageSocket,
    NotPlainError,
    ObjectTable,
    written_error,
)
from groupwise.tasks.rewards.sandbox_child import COMMON_MODULES
from groupwise.tasks.rewards.sandbox_kernel import FIRST_CHANNEL

_MAX_CHARACTERS_OF_TEST = 300
"""Most characters of a failed test in messages."""
_BUILTINS = frozenset(vars(builtins))
_TEST = "test_"
_CHECK = "check"


class BrokenTests(Exception):
    """The tests cannot be run, with any solution."""


def judge(tests: str | Sequence[str], entry_point: str | None) -> None:
    """Run the tests against the solution at the other end."""
    verdicts = MessageSocket(FIRST_CHANNEL + 1)
    try:
        plan = Plan.of(tests, entry_point)
        solution = SolutionProcess(MessageSocket(FIRST_CHANNEL))
        verdicts.send({"tests": len(plan.tests)})
        for problem in run_tests(plan, solution):
            verdicts.send({"passed": problem is None, "why": problem})
        verdicts.send({"done": True})
    except BrokenTests as broken:
        verdicts.send({"broken": str(broken)})


# Finding the tests


@dataclass(frozen=True, slots=True)
class Step:
    """A piece of the tests' code."""

    body: list[ast.stmt]
    is_test: bool

    @property
    def text(self) -> str:
        """The step's source code, cut short for messages."""
        return ast.unparse(ast.Module(self.body, type_ignores=[]))[:_MAX_CHARACTERS_OF_TEST]

    def run(self, names: dict[str, Any]) -> None:
        """Execute it with these names, and add the names that it defines."""
        module = ast.Module(self.body, type_ignores=[])
        exec(compile(module, "<tests>", "exec", dont_inherit=True), names)


@dataclass(frozen=True, slots=True)
class Plan:
    """The tests of one row, in order, and the names that they need from outside."""

    steps: tuple[Step, ...]
    names: frozenset[str]
    """Names that the tests read; the solution may have them."""
    modules: frozenset[str]
    """Modules of the standard library whose attributes they read; the solution's modules of the same name are not used."""
    library: Mapping[str, str]
    """Names of common modules that the tests read without an import, with their module: these do not refer to the solution's names
    either.
    """
    defined_names: frozenset[str]
    """Names that the tests define or import themselves."""
    entry_point: str | None

    @property
    def tests(self) -> tuple[Step, ...]:
        """The steps that count as tests."""
        return tuple(step for step in self.steps if step.is_test)

    @classmethod
    def of(
        cls, tests: str | Sequence[str], entry_point: str | None, *, helped: bool = True
    ) -> Plan:
        """Find the tests. In a text, each statement that checks something is a test, and so are each function `test_…` and
        `check(candidate)`, which gets the entry point. In a list, the entries that contain a test count; the others only prepare.

        `helped`: helpers that the prompt defines in addition to the entry point are already among the tests; otherwise they may be
        missing. Raises BrokenTests for tests that cannot be run, and if nothing is checked or the checking function is not the
        tests' own, because then any code could pass.
        """
        texts = [tests] if isinstance(tests, str) else list(tests)
        trees = [_parse_tests(text) for text in texts]
        checking = _checking_functions(trees)
        steps_of_texts = [_test_steps(tree, entry_point, checking) for tree in trees]
        steps = (
            steps_of_texts[0]
            if isinstance(tests, str)
            else [_join_steps(pieces) for pieces in steps_of_texts]
        )
        if not any(step.is_test for step in steps):
            raise BrokenTests(
                "nothing is checked, so any code would pass: there is no assert, test_… or check that is reached. Write "
                "`assert f(1) == 2`, not `f(1) == 2` or `print(f(1) == 2)`"
            )
        for name in sorted(_foreign_modules(trees)):
            raise BrokenTests(f"they import {name}, and there is the standard library alone")
        defined, free = _names_of(texts)
        defined |= {name for tree in trees for name in _star_names(tree)}
        # Modules of the standard library count if an attribute of them is read.
        owners = [
            node.value
            for tree in trees
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
        ]
        modules = (
            {owner.id for owner in owners if isinstance(owner, ast.Name)} & sys.stdlib_module_names
        ) - defined
        free -= defined | modules | {MODULE}
        entry = {entry_point} if entry_point else set[str]()
        names = (free - _BUILTINS) | entry
        library = _library_names(trees, names - entry, no_entry_point=not entry)
        names -= library.keys()
        if helped or entry_point is None:
            # The checking functions must not come from the solution.
            checkers = {name for tree in trees for name in _checker_names(tree, names)} & names
            checkers |= names & _THIRD_PARTY
            if entry_point is not None:
                checkers |= names - {WRAPPER}
            checkers.discard(entry_point or "")
            if checkers and names - checkers:
                instead = (
                    ""
                    if entry_point is None
                    else ", or leave entry_point out if the code has to have both"
                )
                raise BrokenTests(
                    f"they need `{min(checkers)}`, which they do not define, so that the code could: define it in the tests or import it "
                    f"there{instead}"
                )
        names &= {*entry, WRAPPER} if entry else names
        return cls(
            tuple(steps),
            frozenset(names),
            frozenset(modules),
            library,
            frozenset(defined),
            entry_point,
        )


def _parse_tests(text: str) -> ast.Module:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BrokenTests(f"the tests are not Python: {error}") from error
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef) and any(
            "TestCase" in ast.unparse(base) for base in statement.bases
        ):
            raise BrokenTests(
                "they are classes of unittest, which are not run here; write functions `test_…` or asserts"
            )
    return tree


def _test_steps(tree: ast.Module, entry_point: str | None, checking: frozenset[str]) -> list[Step]:
    """The statements of a text, and calls of its functions that are tests."""
    functions = [function for function in tree.body if isinstance(function, ast.FunctionDef)]
    tests = [function for function in functions if function.name.startswith(_TEST)]
    calls = [_call_step(test, []) for test in tests]
    called = {ast.unparse(statement).partition("(")[0] for statement in tree.body}
    for check in functions:
        if check.name == _CHECK and _CHECK not in called:
            if not entry_point:
                raise BrokenTests("they define check(candidate), and the row has no entry_point")
            calls.append(_call_step(check, [entry_point]))
            tests.append(check)
    for test in tests:
        if test.name not in checking:
            raise BrokenTests(
                f"{test.name} checks nothing, so any code would pass: it has no assert"
            )
    for statement in tree.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Compare):
            raise BrokenTests(
                f"there is no assert before `{ast.unparse(statement)[:_MAX_CHARACTERS_OF_TEST]}`"
            )
    # A statement counts as a check if it holds an assert that can fail, a raise, or a call that does either.
    return [
        *(
            Step(
                [statement],
                any(_is_check(node, checking) for node in _reachable_statements(statement)),
            )
            for statement in tree.body
        ),
        *calls,
    ]


def _checking_functions(trees: Sequence[ast.Module]) -> frozenset[str]:
    """The functions whose call checks something, directly or through functions that they call."""
    callers: defaultdict[str, set[str]] = defaultdict(set)
    added: set[str] = set()
    for function in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in (
                node for statement in function.body for node in _reachable_statements(statement)
            ):
                if _is_check(node, frozenset()):
                    added.add(function.name)
                elif isinstance(node, ast.Call):
                    callers[_name_of_call(node)].add(function.name)
    checking = set[str]()
    while added:
        checking |= added
        added = {caller for name in added for caller in callers[name]} - checking
    return frozenset(checking)


def _is_check(node: ast.AST, checking: frozenset[str]) -> bool:
    """True if this reachable node is an assert, raise or call that checks something."""
    match node:
        case ast.Assert(test):
            return not (
                (isinstance(test, ast.Tuple) and test.elts)
                or (isinstance(test, ast.Constant) and test.value)
            )
        case ast.Call():
            name = _name_of_call(node)
            return name in checking or name.startswith("assert")
        case _:
            return isinstance(node, ast.Raise)


def _name_of_call(call: ast.Call) -> str:
    """The last part of the called name; empty if the function is not called by name."""
    match call.func:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _reachable_statements(statement: ast.AST) -> Iterator[ast.AST]:
    """The asserts, raises and calls that may be executed with this statement, as far as static analysis shows, in no order."""
    pending: list[ast.AST] = [statement]
    while pending:
        match pending.pop():
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                pass
            case (ast.Assert() | ast.Raise()) as check:
                yield check
            case ast.If(ast.Constant(value), body, orelse) | ast.While(
                ast.Constant(value), body, orelse
            ):
                pending += body if value else orelse
            case node:
                if isinstance(node, ast.Call):
                    yield node
                pending += ast.iter_child_nodes(node)


def _call_step(function: ast.FunctionDef, arguments: list[str]) -> Step:
    parameters = function.args
    required = len(parameters.posonlyargs) + len(parameters.args) - len(parameters.defaults)
    required += parameters.kw_defaults.count(None)
    if required > len(arguments):
        raise BrokenTests(f"{function.name} takes arguments, and there are no fixtures here")
    return Step(ast.parse(f"{function.name}({', '.join(arguments)})").body, is_test=True)


def _join_steps(steps: list[Step]) -> Step:
    body = [statement for step in steps for statement in step.body]
    return Step(body, any(step.is_test for step in steps))


def _names_of(texts: Sequence[str]) -> tuple[set[str], set[str]]:
    """The names that the texts define globally, and the global names that they read."""
    defined: set[str] = set()
    read: set[str] = set()
    for text in texts:
        tables = [symtable.symtable(text, "<tests>", "exec")]
        defined |= {
            s.get_name() for s in tables[0].get_symbols() if s.is_assigned() or s.is_imported()
        }
        while tables:
            table = tables.pop()
            tables += table.get_children()
            outer = table.get_type() == "module"
            read |= {
                s.get_name()
                for s in table.get_symbols()
                if s.is_referenced() and (outer or s.is_global())
            }
    return defined, read


def _star_names(tree: ast.Module) -> Iterator[str]:
    """Names that a text star-imports from a common module."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(str(module), [ast.alias("*")]) if module in _WITH_STARS:
                yield from _public_names(module)
            case _:
                pass


def _foreign_modules(trees: Sequence[ast.Module]) -> set[str]:
    """Modules outside the standard library, except those whose import errors the text handles itself."""
    modules: set[str] = set()
    pending: list[ast.AST] = list(trees)
    while pending:
        match pending.pop():
            case ast.Try(handlers=handlers) if any(map(_catches_imports, handlers)):
                continue
            case ast.Import(names):
                modules |= {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(str(module), level=0):
                modules.add(module.partition(".")[0])
            case node:
                pending += ast.iter_child_nodes(node)
    return modules - sys.stdlib_module_names - {MODULE}


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or bool(
        re.search(r"\b(?:ImportError|ModuleNotFoundError|Exception)\b", ast.unparse(handler.type))
    )


def _library_names(
    trees: Sequence[ast.Module], names: Set[str], *, no_entry_point: bool
) -> dict[str, str]:
    """Finds the names of common modules that the tests use to judge: they are called with the result of another name, read without
    being called, or rarely something else. Without an entry point, if nothing else is read, these names are themselves under test.
    """
    judging = {name for tree in trees for name in _judging_names(tree, names)} | (names & _JUDGES)
    origins: dict[str, str] = {}
    for module in reversed(_WITH_STARS):
        public = _public_names(module)
        origins |= {name: module for name in judging if name in public}
    return {} if no_entry_point and names <= origins.keys() else origins


def _judging_names(tree: ast.Module, names: Set[str]) -> Iterator[str]:
    """Names with which a test judges: `near` in `near(area(2), 12.57)`, called with the result of another name; and names read but
    not called.
    """
    called = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in called:
        inner = {
            _root_name(inner_call)
            for inner_call in ast.walk(call)
            if isinstance(inner_call, ast.Call)
        }
        if isinstance(call.func, ast.Name) and (inner & names) - {call.func.id}:
            yield call.func.id
    functions = {id(call.func) for call in called}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names and id(node) not in functions:
            yield node.id


@cache
def _public_names(module: str) -> frozenset[str]:
    """Names that `import *` takes from a module."""
    imported = importlib.import_module(module)
    return frozenset(getattr(imported, "__all__", [n for n in dir(imported) if n[0] != "_"]))


_JUDGES = frozenset("isclose fabs fsum inf nan Counter OrderedDict defaultdict deque".split())
_THIRD_PARTY = frozenset("np numpy pd pandas torch scipy sp pytest".split())
"""Usual aliases of third-party modules."""
_WITH_STARS = (*COMMON_MODULES, "typing")
_COMPARES = re.compile(r"(?:is_?|all_?)close|(?:almost|approx)(?:_?equals?)?", re.IGNORECASE)


def _checker_names(tree: ast.Module, names: Set[str]) -> Iterator[str]:
    """The first names of the calls that judge: `np` of `np.testing.assert_allclose(f(1), 2)`, `same` of `assert same(f(1), 2)`."""
    for node in ast.walk(tree):
        match node:
            case ast.Assert(test):
                for call in _asserted_calls(test):
                    inner = {
                        _root_name(inner_call)
                        for inner_call in ast.walk(call)
                        if isinstance(inner_call, ast.Call)
                    }
                    if (inner & names) - {_root_name(call)}:
                        yield _root_name(call)
            case ast.Call(ast.Name(name) | ast.Attribute(attr=name)) if name.startswith(
                "assert"
            ) or _COMPARES.fullmatch(name):
                yield _root_name(node)
            case _:
                pass


def _asserted_calls(test: ast.expr) -> Iterator[ast.Call]:
    """The calls whose truth an assert checks."""
    match test:
        case ast.Call():
            yield test
        case ast.UnaryOp(ast.Not(), inner) | ast.Compare(inner, _, [ast.Constant(bool())]):
            yield from _asserted_calls(inner)
        case ast.BoolOp(values=values):
            for value in values:
                yield from _asserted_calls(value)
        case _:
            pass


def _root_name(call: ast.AST) -> str:
    """The name that an expression starts with; empty if it starts otherwise."""
    while isinstance(call, ast.Call | ast.Attribute | ast.Subscript):
        call = call.func if isinstance(call, ast.Call) else call.value
    return call.id if isinstance(call, ast.Name) else ""


# Running


def run_tests(plan: Plan, solution: SolutionProcess) -> Iterator[str | None]:
    """Yields None for each test that passes, else the reason for its failure. Raises BrokenTests."""
    problem: str | None = None
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        solution.load()
        # Names that the tests do not define themselves; the module docstring gives the order.
        sys.modules[MODULE] = solution.as_module(
            test_names=(plan.defined_names | plan.library.keys()) - {plan.entry_point}
        )
        extra_names: dict[str, Any] = {}
        for name in sorted(plan.names):
            if name == plan.entry_point or name in solution.names:
                extra_names[name] = solution.name(name)
        for name, module in plan.library.items():
            extra_names[name] = getattr(importlib.import_module(module), name)
        for name in sorted(plan.modules - extra_names.keys() - {MODULE}):
            with suppress(ImportError):  # a module of another operating system
                extra_names[name] = importlib.import_module(name)
        names |= extra_names
    except (Exception, ConnectionLost) as error:  # noqa: BLE001 — a solution may raise anything
        problem = f"the solution cannot be loaded: {_error_text(error)}"
    for step in plan.steps:
        failed = problem or _run_step(step, names)
        if step.is_test:
            yield failed
        elif failed is not None:  # as in a program, code after a failure is not reached
            problem = failed


def _run_step(step: Step, names: dict[str, Any]) -> str | None:
    """The reason why a step fails; None if it passes."""
    names["__builtins__"] = builtins
    try:
        step.run(names)
    except NotPlainError as error:
        raise BrokenTests(
            f"a test gives the solution what cannot go over to it ({error}): {step.text}"
        ) from error
    except BaseException as error:  # noqa: BLE001 — after any exception this test has not passed
        return f"{step.text}: {_error_text(error)}"
    return None


def _error_text(error: BaseException) -> str:
    text, name = (
        str(error)[:_MAX_CHARACTERS_OF_TEST],
        type(error).__name__[:_MAX_CHARACTERS_OF_TEST],
    )
    return f"{name}: {text}" if text else name


# The solution, seen from the tests


class SolutionProcess:
    """The connection to the solution's side: requests to the solution, and its callbacks."""

    def __init__(self, connection: MessageSocket) -> None:
        self._connection = connection
        self._objects = ObjectTable(_is_function, lambda number: Remote(self), of_tests=True)
        self._errors = Errors(self._objects)
        self.names: frozenset[str] = frozenset()
        if "ready" not in connection.receive():
            raise ConnectionLost("the solution's box does not answer")

    def load(self) -> None:
        """Load the solution's code in the other process."""
        names = map(str, self.ask("load"))
        self.names = frozenset(n for n in names if n.isidentifier() and not n.startswith("__"))

    def name(self, name: str) -> Any:
        """The value of a name of the solution. Raises NameError if the solution does not have it."""
        if name not in self.names:
            raise NameError(f"the solution has no {name}", name=name)
        kind, value = self.ask("name", name)
        return self._errors.class_named(*map(str, value)) if kind == "error" else value

    def as_module(self, test_names: Set[str]) -> types.ModuleType:
        """A module for tests that import the solution. A star import of it replaces neither built-in names nor the tests' own."""
        module = types.ModuleType(MODULE)
        module.__dict__["__all__"] = sorted(
            self.names - test_names - _BUILTINS - sys.stdlib_module_names
        )
        module.__dict__["__getattr__"] = self._attribute_of_module
        return module

    def _attribute_of_module(self, name: str) -> Any:
        if name not in self.names:
            raise AttributeError(name)
        return self.name(name)

    def ask(self, do: str, *arguments: Any, **keywords: Any) -> Any:
        """Request an operation in the other process; returns its result or raises its exception."""
        self._objects.showing.clear()
        question = {
            "do": do,
            "arguments": [self._objects.to_json(value, shown=True) for value in arguments],
            "named": [
                [key, self._objects.to_json(value, shown=True)] for key, value in keywords.items()
            ],
        }
        shown = sorted(self._objects.showing)
        self._connection.send({**question, "shown": shown})
        while "call" in (answer := self._connection.receive()):
            self._connection.send({"answer": self._call_function(answer)})
        try:
            return self._read_result(answer, shown)
        except (StopIteration, StopAsyncIteration) as error:
            if do == "next":
                raise
            # Otherwise `map` and `filter` would end here silently; generators convert it in the same way (PEP 479).
            raise RuntimeError(f"{type(error).__name__} was raised") from error

    def _read_result(self, answer: dict[str, Json], shown: list[int]) -> Any:
        try:
            for number, content in answer["changes"]:
                if number in shown:
                    self._objects.put(number, content)
            if "raised" not in answer:
                return self._objects.read(answer["result"])
            raised = self._errors.read(answer["raised"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConnectionLost(f"no answer: {error}") from error
        raise raised

    def _call_function(self, question: dict[str, Json]) -> dict[str, Json]:
        """Calls a function of the tests that the solution was given, and returns its result or error as JSON."""
        try:
            function = self._objects.local_object(question["call"])
            arguments = [self._objects.read(argument) for argument in question["arguments"]]
            keywords = {name: self._objects.read(argument) for name, argument in question["named"]}
            return {"result": self._objects.to_json(function(*arguments, **keywords))}
        except Exception as error:  # noqa: BLE001 — the solution may catch it, as it could without a sandbox
            return {"raised": written_error(self._objects, error)}


def _is_function(value: Any) -> bool:
    """True if this callable may be passed to the solution as a callback that runs here. Harmless built-in functions are not: both
    sides have them.
    """
    return callable(value) and getattr(value, "__module__", None) != "builtins"


def _remote_operation(do: str) -> Callable[..., Any]:
    def ask(self: Remote, *arguments: Any) -> Any:
        return _ask_remote(self, do, *arguments)

    return ask


def _between_remotes(do: str) -> Callable[..., Any]:
    def ask(self: Remote, other: object) -> Any:
        return _ask_remote(self, do, other) if isinstance(other, Remote) else NotImplemented

    return ask


def _ask_remote(remote: Remote, do: str, *arguments: Any, **keywords: Any) -> Any:
    solution: SolutionProcess = object.__getattribute__(remote, "_groupwise_process")
    return solution.ask(do, remote, *arguments, **keywords)


class Remote:
    """An object of the solution that is not a plain value."""

    __slots__ = ("__weakref__", "_groupwise_process")

    def __init__(self, solution: SolutionProcess) -> None:
        object.__setattr__(self, "_groupwise_process", solution)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__"):
            # Dunder names that Python looks up implicitly are not requested from the other process.
            raise AttributeError(name)
        return _ask_remote(self, "attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask_remote(self, "assign", name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return _ask_remote(self, "call", *arguments, **keywords)

    def __hash__(self) -> int:
        return _ask_remote(self, "hash")

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and bool(_ask_remote(value, "is a", self))

    __getitem__ = _remote_operation("item")
    __setitem__ = _remote_operation("put")
    __iter__, __next__, __len__ = (
        _remote_operation("iter"),
        _remote_operation("next"),
        _remote_operation("len"),
    )
    __bool__ = _remote_operation("bool")
    __int__, __float__ = _remote_operation("int"), _remote_operation("float")
    __str__, __repr__, __neg__ = (
        _remote_operation("str"),
        _remote_operation("repr"),
        _remote_operation("neg"),
    )
    __eq__ = _between_remotes("eq")
    __lt__, __le__ = _between_remotes("lt"), _between_remotes("le")
    __gt__, __ge__ = _between_remotes("gt"), _between_remotes("ge")
    __add__, __sub__ = _between_remotes("add"), _between_remotes("sub")
    __mul__, __truediv__ = _between_remotes("mul"), _between_remotes("truediv")
