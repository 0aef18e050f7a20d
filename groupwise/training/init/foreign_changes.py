"""Which objects a statement of a script changes in place, for `groupwise init --from`.

    rows.append(row)                     rows
    random.shuffle(rows)                 rows: a function may change its arguments
    for row in rows: row["n"] = 1        rows, by way of the variable of the loop
    fill()                               what the function `fill` of the script changes

A statement that only may change an object counts: copied without need it does no harm, left out it would cost rows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence

from groupwise.core.plugins import called_name

_READERS = frozenset(
    """
    print pprint len dump log debug info warning error write writelines makedirs seed manual_seed set_seed
    append extend add insert update setdefault remove discard appendleft extendleft
    """.split()
)
"""Functions and methods that change none of their arguments."""
_CHANGERS = frozenset(
    """
    append extend insert remove pop popitem clear reverse setdefault update add discard appendleft extendleft popleft
    read readline readlines seek shuffle
    """.split()
)
"""Methods that change their object also where their result is used, as in `first = rows.pop()`."""


class ChangesInPlace:
    """What the statements of a script change, apart from the names that they bind."""

    def __init__(self, statements: Sequence[ast.stmt]) -> None:
        nodes = [node for statement in statements for node in ast.walk(statement)]
        self._functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
        self._modules = {
            (alias.asname or alias.name).partition(".")[0]
            for node in nodes
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        self._sources: dict[str, set[str]] = {}
        """Name -> the names of the objects that it may be, or may be a part of."""
        for node in nodes:
            if isinstance(node, ast.Assign):
                source = _owner(node.value)
                parts = {source} if source and not isinstance(node.value, ast.Call) else set[str]()
                for target in node.targets:
                    self._link(target, parts)
            elif isinstance(node, ast.For | ast.comprehension):
                self._link(node.target, _names_in(node.iter))

    def _link(self, target: ast.expr, sources: set[str]) -> None:
        for name in _names_in(target):
            self._sources.setdefault(name, set()).update(sources - {name})

    def of(self, statement: ast.stmt) -> set[str]:
        """The names whose objects a statement may change. A definition changes nothing until it is called."""
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return set()
        return self._with_sources(self._changed(statement, frozenset())) - self._modules

    def _with_sources(self, names: Iterable[str]) -> set[str]:
        """These names, and those of the objects that they may be, or may be a part of."""
        found = set(names)
        while more := set[str]().union(*(self._sources.get(name, ()) for name in found)) - found:
            found |= more
        return found

    def _changed(self, statement: ast.AST, callers: frozenset[str]) -> Iterator[str]:
        for node in ast.walk(statement):
            match node:
                case (
                    ast.Attribute(ctx=ast.Store() | ast.Del())
                    | ast.Subscript(ctx=ast.Store() | ast.Del())
                ):
                    yield _owner(node)
                case ast.Expr(value):
                    for call in ast.walk(value):
                        if isinstance(call, ast.Call):
                            yield from self._changed_by_call(call)
                case ast.Call():
                    name = called_name(node)
                    if isinstance(node.func, ast.Attribute) and name in _CHANGERS:
                        yield _owner(node.func)
                    elif name == "next":
                        yield from map(_owner, node.args)
                    elif name in self._functions and name not in callers:
                        yield from self._changed_by_function(node, callers | {name})
                case _:
                    pass

    def _changed_by_call(self, call: ast.Call) -> Iterator[str]:
        """What a call may change that is made for its effect: the object of its method, and its arguments."""
        if isinstance(call.func, ast.Attribute):
            yield _owner(call.func)
        if called_name(call) not in _READERS:
            values = [*call.args, *(keyword.value for keyword in call.keywords)]
            yield from (_owner(value) for value in values if not isinstance(value, ast.Call))

    def _changed_by_function(self, call: ast.Call, callers: frozenset[str]) -> Iterator[str]:
        """What a function of the script changes: its arguments, and names outside of it."""
        function = self._functions[called_name(call)]
        parameters = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        given = dict(zip(parameters, call.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        shared = {
            name
            for child in ast.walk(function)
            if isinstance(child, ast.Global | ast.Nonlocal)
            for name in child.names
        }
        yield from shared
        own = {child.arg for child in ast.walk(function.args) if isinstance(child, ast.arg)}
        own |= {
            child.id
            for child in ast.walk(function)
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)
        } - shared
        changed = (name for child in function.body for name in self._changed(child, callers))
        for name in self._with_sources(changed):
            if name in given:
                yield _owner(given[name])
            elif name not in own:
                yield name


def _owner(node: ast.expr) -> str:
    """The name at the beginning of an expression, such as `rows` in `rows[0].tags`; empty if there is none."""
    while True:
        match node:
            case ast.Attribute(inner) | ast.Subscript(inner) | ast.Starred(inner):
                node = inner
            case ast.Call(inner):
                node = inner
            case ast.Name(name):
                return name
            case _:
                return ""


def _names_in(node: ast.expr) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
