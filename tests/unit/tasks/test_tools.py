"""Tools: schemas from signatures, calls found in text, and every mistake reported to the policy."""

import json
from typing import Any, Literal

import pytest

from groupwise.core.errors import TaskError
from groupwise.tasks.environment import Step
from groupwise.tasks.tools import HermesCalls, TextCalls, Tools, schema_of


def look_up(
    name: str, kinds: list[Literal["a", "b"]], most: int = 3, loud: bool | None = None
) -> str:
    """Find things by name.

    More about it.

    Args:
        name: What it is called,
            in full.
        kinds (list): Which kinds.

    Returns:
        What was found.
    """
    return f"{name}:{'+'.join(kinds)}:{most}:{loud}"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def divide(a: float, b: float) -> float:
    """Divide."""
    return a / b


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def answer(tools: Tools, completion: str, prompt: Any = "p") -> Step:
    environment = tools()
    await environment.reset(prompt=prompt, seed=1, member=0)
    return await environment.step(completion)


async def tool_answer(tools: Tools, completion: str) -> str:
    observation = (await answer(tools, completion, [{"role": "user", "content": "p"}])).observation
    assert isinstance(observation, list)
    (message,) = observation
    return message["content"]


def test_schema_is_made_of_signature_and_docstring():
    assert schema_of(look_up) == {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Find things by name. More about it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "description": "What it is called, in full."},
                    "kinds": {
                        "type": "array",
                        "items": {"type": "string", "enum": ["a", "b"]},
                        "description": "Which kinds.",
                    },
                    "most": {"type": "integer"},
                    "loud": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                },
                "required": ["name", "kinds"],
            },
        },
    }


def test_functions_that_cannot_be_tools_are_refused():
    def silent(a: int): ...

    def foreign(a: Tools):
        """Use it."""

    cases: tuple[tuple[list[Any], str], ...] = (
        ([], "no tool"), ([lambda x: x], "`x`"), ([add, add], "two tools.*`add`"), ([silent], "`silent`"), ([foreign], "`foreign`.*`a`"),
    )  # fmt: skip
    for tools, said in cases:
        with pytest.raises(TaskError, match=said):
            Tools(tools)
    with pytest.raises(TaskError, match=r"`sub`.*add"):
        Tools([add], TextCalls("sub", "x"))


async def test_calls_are_made_in_their_order_and_a_turn_without_one_is_the_answer():
    tools = Tools([add, divide])
    text = f"I think {call('add', a=1, b=2)} and {call('divide', a=1, b=4)}"
    step = await answer(tools, text, [{"role": "user", "content": "p"}])
    assert step == Step(
        [
            {"role": "tool", "name": "add", "content": "3"},
            {"role": "tool", "name": "divide", "content": "0.25"},
        ]
    )
    assert await answer(tools, "The answer is 3.") == Step(done=True)
    step = await answer(tools, call("add", a="1", b=2.0))
    assert step.observation == "\n<tool_response>\n3\n</tool_response>\n"


@pytest.mark.parametrize(("completion", "said"), [
    (call("sub", a=1, b=2), "error: there is no tool 'sub'"), (call("add", a=1), "error: b: "),
    (call("add", a="x", b=2), "error: a: "), (call("add", a=1, b=2, c=3), "error: c: "),
    (call("divide", a=1, b=0), "error: ZeroDivisionError"),
    ("<tool_call>{'name': 'add'}</tool_call>", "error: the call is not JSON ("),
    ('<tool_call>{"name": "add", "argu', "error: the call is not JSON ("),
    ("<tool_call>[1]</tool_call>", "error: the call is not a JSON object"),
    (f"<tool_call>{'[' * 5_000}</tool_call>", "error: the call is not JSON ("),
    ('<tool_call>{"arguments": {}}</tool_call>', "error: the call lacks"),
    ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', "error: the call lacks"),
])  # fmt: skip
async def test_errors_of_tools_are_returned_to_the_policy(completion, said):
    assert (await tool_answer(Tools([add, divide]), completion)).startswith(said)


def test_calls_are_found_however_they_are_cut():
    find = HermesCalls().find
    assert [c.name for c in find(call("a") + call("b"))] == ["a", "b"]
    assert [c.name for c in find('<tool_call>{"name": "a"}<tool_call>{"name": "b"}')] == ["a", "b"]
    assert find("no call, tool_call") == []
    assert find('<tool_call>{"name": "a"}')[0].arguments == {}


async def test_text_calls_are_found_by_their_pattern():
    tools = Tools([add], TextCalls("add", r"(?P<a>\d+)\+(?P<b>\d+)=", "{result} "))
    assert tools.schemas == []
    assert await answer(tools, "1+2=, 3+4=") == Step("3 7 ")
    assert await answer(tools, "12") == Step(done=True)


class Counter:
    """Tools with a state."""

    def reset(self, start: int) -> str:
        self.value = start
        return "Count!"

    def increase(self, by: int = 1) -> int:
        """Increase the counter."""
        self.value += by
        return self.value

    def _hidden(self):
        raise AssertionError

    async def reward(self) -> float:
        return float(self.value)


async def test_public_methods_of_a_class_are_tools_with_a_state_for_each_rollout():
    tools = Tools(Counter)
    assert tools.names == ("increase",)
    assert tools.gives_rewards
    assert "self" not in tools.schemas[0]["function"]["parameters"]["properties"]
    one, other = tools(), tools()
    assert await one.reset(prompt="p", start=5, seed=1, member=0) == "Count!"
    await other.reset(prompt="p", start=0, seed=1, member=1)
    assert (
        await one.step(call("increase", by=2))
    ).observation == "\n<tool_response>\n7\n</tool_response>\n"
    await one.step(call("increase"))
    assert (await one.reward(), await other.reward()) == (8.0, 0.0)
    assert await one.metrics() is None
