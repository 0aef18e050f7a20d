"""The solution's side: model-written code is loaded here and executes the calls of the tests in the other sandbox.

This process does not judge. It has neither the tests nor their expected values: a solution sees only the arguments of its calls and
can affect the verdict only through its return values. Damage to this process hurts only the solution.
"""

from __future__ import annotations

import operator
import os
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any, cast

from groupwise.tasks.rewards.boxed_values import (
    MUTABLE,
    ConnectionLost,
    Errors,
    Json,
    MessageSocket,
    ObjectTable,
    builtin_of,
    written_error,
)
from groupwise.tasks.rewards.sandbox_child import known_names
from groupwise.tasks.rewards.sandbox_kernel import FIRST_CHANNEL

MODULE = "solution"
"""The module name of the solution."""
WRAPPER = "Solution"
"""The class that holds the methods of a LeetCode-style answer."""


def serve(code: str, *, common_imports: bool) -> None:
    """Serve the tests until they end. `common_imports`: common modules need no import, see `known_names`."""
    _Solution(code, MessageSocket(FIRST_CHANNEL), common_imports=common_imports).serve()
    os._exit(0)  # do not wait for threads of the solution


def _call_function(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    return function(*arguments, **keywords)


def _has_methods(value: Any) -> bool:
    """True for a list, dictionary, set or deque whose class, defined by the solution, adds methods: a copy by value would lose them."""
    kind = cast("type[Any]", type(value))
    if not isinstance(value, MUTABLE) or kind.__module__ != MODULE:
        return False
    members = (member for name, member in vars(kind).items() if not name.startswith("__"))
    return any(isinstance(member, types.FunctionType) for member in members)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "attribute": getattr,
    "assign": setattr,
    "call": _call_function,
    "is a": isinstance,
    "item": operator.getitem,
    "put": operator.setitem,
    **{
        function.__name__: function
        for function in (bool, float, hash, int, iter, len, next, repr, str)
    },
    **{
        name: getattr(operator, name)
        for name in ("eq", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "neg")
    },
}
"""Operations that the tests may request on an object that stays in this process."""


class _Solution:
    def __init__(self, code: str, connection: MessageSocket, *, common_imports: bool) -> None:
        self._code = code
        self._common_imports = common_imports
        self._connection = connection
        self._module = types.ModuleType(MODULE)
        self._objects = ObjectTable(stays=lambda value: True, stand_in=self._function_of_the_tests)
        self._errors = Errors(self._objects)
        self._operations = {**OPERATIONS, "load": self._load_solution, "name": self._look_up}

    def serve(self) -> None:
        """Answer requests one after the other."""
        self._connection.send({"ready": True})
        with suppress(ConnectionLost):
            while True:
                self._answer_question(self._connection.receive())

    def _answer_question(self, question: dict[str, Json]) -> None:
        try:
            # The result, and the passed arguments that the call changed.
            arguments = [self._objects.read(argument) for argument in question["arguments"]]
            keywords = {name: self._objects.read(argument) for name, argument in question["named"]}
            before = self._contents_of(question["shown"])
            answer = self._operations[question["do"]](*arguments, **keywords)
            after = self._contents_of(question["shown"])
            result, changes = (
                answer,
                [
                    [number, content]
                    for number, content in after.items()
                    if content != before[number]
                ],
            )
            by_number = question["do"] == "call" and _has_methods(result)
            reply = self._objects.by_number(result) if by_number else self._objects.to_json(result)
            self._connection.send({"result": reply, "changes": changes})
        except ConnectionLost:
            raise
        except BaseException as error:  # noqa: BLE001 — a solution may raise anything; the tests see it
            self._connection.send({"raised": written_error(self._objects, error), "changes": []})

    def _contents_of(self, numbers: list[int]) -> dict[int, Json]:
        return {
            number: self._objects.content(self._objects.remote_object(number)) for number in numbers
        }

    def _load_solution(self) -> list[str]:
        """Run the solution's code and return the names that it defined.

        Statements after its first definition may fail: they are usually examples of its use, such as ones that read input.
        """
        sys.modules[MODULE] = self._module
        self._module.__dict__["__builtins__"] = known_names(common_imports=self._common_imports)
        program = compile(self._code, f"<{MODULE}>", "exec", dont_inherit=True)
        try:
            exec(program, self._module.__dict__)
        except (Exception, SystemExit):
            values = (
                value for value in vars(self._module).values() if hasattr(value, "__module__")
            )
            if not any(value.__module__ == MODULE for value in values):
                raise
        names = dict.fromkeys((*vars(self._module), *dir(vars(self._module).get(WRAPPER))))
        return [name for name in names if not name.startswith("__")]

    def _look_up(self, name: str) -> tuple[str, Any]:
        """The kind and value of a name; an exception's class becomes its own name and that of its nearest built-in base class."""
        value: Any = vars(self._module).get(name, self)
        if value is self:
            value = getattr(self._wrapper_instance, name)
        if isinstance(value, type) and issubclass(value, Exception):
            return "error", (value.__name__, builtin_of(value))
        return "value", cast("Any", value)

    @cached_property
    def _wrapper_instance(self) -> Any:
        """The instance whose methods are used if the module has no function with that name."""
        return vars(self._module)[WRAPPER]()

    def _function_of_the_tests(self, number: int) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            encoded = [self._objects.to_json(argument) for argument in arguments]
            encoded_keywords = [
                [key, self._objects.to_json(argument)] for key, argument in keywords.items()
            ]
            self._connection.send({"call": number, "arguments": encoded, "named": encoded_keywords})
            while "answer" not in (message := self._connection.receive()):
                self._answer_question(message)
            if "raised" in message["answer"]:
                raise self._errors.read(message["answer"]["raised"])
            return self._objects.read(message["answer"]["result"])

        return call
