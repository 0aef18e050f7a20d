"""Tools: Python functions that the policy may call, as an environment.

    def get_environment(config):
        return Tools([add, look_up])

Each turn is searched for calls. Their results are the next observation; a turn without a call is the answer and ends the rollout.
Errors in a call (unknown name, invalid arguments, an exception) are reported to the policy in the same way, so it can learn to
avoid them.

A schema is made from a function's signature and docstring, in the form that chat templates expect. The usual way to write a call is
that of Hermes and Qwen, `<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>`. `TextCalls` finds calls by a
regular expression instead, for models that are too small for JSON.

Tools that share a state are the methods of a class: `Tools(Shop)` makes a `Shop` for each rollout and offers its public methods.
Its `reset`, `reward`, `metrics` and `close` are those of an environment.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError, validate_call

from groupwise.api.http.strict_json import NotStrict, parse_inner
from groupwise.core.errors import TaskError
from groupwise.core.settings.field_errors import field_errors
from groupwise.core.types import Message
from groupwise.tasks.environment import Step, reset_arguments

Tool = Callable[..., Any]
Schema = dict[str, Any]
OWN_METHODS = ("reset", "reward", "metrics", "close")
"""Methods of a class of tools that belong to the environment and are not tools."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the policy wrote."""

    name: str
    arguments: dict[str, Any]
    problem: str | None = None
    """The reason why a malformed call cannot be executed; None for a valid call."""


class ToolUnavailable(Exception):
    """A tool raises this if it cannot work through no fault of the policy: the rollout fails, instead of being told an error."""


class CallForm(Protocol):
    """The notation of calls and of their results."""

    def find(self, text: str) -> list[ToolCall]:
        """The calls in a completion, in order, including malformed ones."""
        ...

    def results(self, results: Sequence[tuple[str, str]], *, chat: bool) -> str | list[Message]:
        """The observation for (tool, result) pairs."""
        ...

    @property
    def renders_schemas(self) -> bool:
        """True if the tools' schemas are added to the first prompt."""
        ...


class HermesCalls:
    """`<tool_call>` with JSON; results are messages of the role `tool`, or `<tool_response>` elements in plain text."""

    renders_schemas = True
    BEGIN = "<tool_call>"
    _PATTERN = re.compile(
        r'<tool_call>(\s*\{(?:[^"<]|"(?:[^"\\]|\\.)*+"|<(?!/?tool_call>))*+(?=</tool_call>)|.*?)'
        r"(?:</tool_call>|(?=<tool_call>)|\Z)",
        re.DOTALL,
    )
    """A call ends with its mark outside of JSON strings; where the strings do not end, with the first mark."""

    def find(self, text: str) -> list[ToolCall]:
        """See `CallForm.find`."""
        return [_hermes_call(content.strip()) for content in self._PATTERN.findall(text)]

    def split(
        self, text: str, is_valid: Callable[[ToolCall], bool] = lambda call: call.problem is None
    ) -> tuple[str, list[ToolCall]]:
        """The text without its valid calls, and these calls; the others stay in the text."""
        calls: list[ToolCall] = []

        def without(match: re.Match[str]) -> str:
            call = _hermes_call(match[1].strip())
            if not is_valid(call):
                return match[0]
            calls.append(call)
            return ""

        return self._PATTERN.sub(without, text), calls

    def results(self, results: Sequence[tuple[str, str]], *, chat: bool) -> str | list[Message]:
        """See `CallForm.results`."""
        if chat:
            return [{"role": "tool", "name": name, "content": result} for name, result in results]
        responses = [f"<tool_response>\n{result}\n</tool_response>" for _, result in results]
        return "\n" + "\n".join(responses) + "\n"


@dataclass(frozen=True)
class TextCalls:
    """Calls of one tool by a regular expression; its named groups are the arguments.

    `TextCalls("square", r"sq\\((?P<n>\\d+)\\)", result=" = {result}\\n")`
    """

    tool: str
    pattern: str
    result: str = "{result}"
    """Template of a result's text; `{result}` is replaced by the result."""

    renders_schemas = False

    def find(self, text: str) -> list[ToolCall]:
        """See `CallForm.find`."""
        return [ToolCall(self.tool, match.groupdict()) for match in re.finditer(self.pattern, text)]

    def results(self, results: Sequence[tuple[str, str]], *, chat: bool) -> str | list[Message]:
        """See `CallForm.results`."""
        return "".join(self.result.replace("{result}", result) for _, result in results)


class Tools:
    """Makes an environment of tools for each rollout; `get_environment` may return it."""

    def __init__(self, tools: Sequence[Tool] | type, calls: CallForm | None = None) -> None:
        """Raises TaskError if the schema of a tool cannot be made."""
        self._source: Any = tools
        self.calls = calls or HermesCalls()
        functions = (
            _public_methods(tools)
            if inspect.isclass(tools)
            else list(cast("Sequence[Tool]", tools))
        )
        if not functions:
            raise TaskError(
                "Tools: no tool is there; give functions, or a class with public methods."
            )
        schemas = [schema_of(function) for function in functions]
        self.names = tuple(schema["function"]["name"] for schema in schemas)
        duplicates = [name for name in self.names if self.names.count(name) > 1]
        if duplicates:
            raise TaskError(
                f"Tools: two tools are called `{duplicates[0]}`; give them different names."
            )
        if isinstance(self.calls, TextCalls) and self.calls.tool not in self.names:
            raise TaskError(
                f"TextCalls is about the tool `{self.calls.tool}`, but there are: {', '.join(self.names)}."
            )
        self.schemas: list[Schema] = schemas if self.calls.renders_schemas else []
        """Schemas for the chat template."""

    @property
    def gives_rewards(self) -> bool:
        """True if the environment itself may give rewards."""
        return inspect.isclass(self._source) and hasattr(self._source, "reward")

    @property
    def reset(self) -> Callable[..., Any] | None:
        """The `reset` of the class, if there is one."""
        return getattr(self._source, "reset", None) if inspect.isclass(self._source) else None

    def __call__(self) -> ToolEnvironment:
        """An environment for one rollout."""
        state: object | None = None
        functions: list[Tool] = []
        if inspect.isclass(self._source):
            state = self._source()
            functions += [getattr(state, m.__name__) for m in _public_methods(self._source)]
        else:
            functions += self._source
        tools = {function.__name__: validate_call(function) for function in functions}
        return ToolEnvironment(tools, self.calls, state)


class ToolEnvironment:
    """Executes the policy's calls, turn by turn."""

    def __init__(self, tools: Mapping[str, Tool], calls: CallForm, state: object | None) -> None:
        """`tools` by name. `state` may have the methods `reset`, `reward`, `metrics` and `close` of an environment."""
        self._tools = tools
        self._calls = calls
        self._state = state
        self._chat = True

    async def reset(self, **arguments: Any) -> Any:
        """Start the rollout; a class of tools gets the same call."""
        self._chat = not isinstance(arguments["prompt"], str)
        return await self._call_method("reset", arguments)

    async def step(self, completion: str) -> Step:
        """The results of the calls in a completion; a completion without calls is the final answer."""
        calls = self._calls.find(completion)
        if not calls:
            return Step(done=True)
        results = [(call.name, await self._run_call(call)) for call in calls]
        return Step(self._calls.results(results, chat=self._chat))

    async def reward(self) -> Any:
        """The reward of the class, if it defines one."""
        return await self._call_method("reward")

    async def metrics(self) -> Any:
        """The metrics of the class, if it defines any."""
        return await self._call_method("metrics")

    async def close(self) -> None:
        """Free the resources of the class."""
        await self._call_method("close")

    async def _call_method(self, method: str, arguments: Mapping[str, Any] | None = None) -> Any:
        function = getattr(self._state, method, None)
        if function is None:
            return None
        answer = function(**reset_arguments(function, arguments or {}))
        return await answer if inspect.isawaitable(answer) else answer

    async def _run_call(self, call: ToolCall) -> str:
        if call.problem is not None:
            return f"error: {call.problem}"
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r}; there are: {', '.join(self._tools)}"
        try:
            result = tool(**call.arguments)
            return _result_text(await result if inspect.isawaitable(result) else result)
        except ToolUnavailable:
            raise
        except ValidationError as error:
            return f"error: {'; '.join(map(str, field_errors(error)))}"
        except Exception as error:  # noqa: BLE001 — a tool may raise anything; the policy gets the error
            return f"error: {type(error).__name__}: {error}"


def schema_of(tool: Tool) -> Schema:
    """A function's schema in the form that chat templates expect. Raises TaskError for a parameter without a type."""
    name = getattr(tool, "__name__", type(tool).__name__)
    parameters = [p for p in inspect.signature(tool).parameters.values() if p.name != "self"]
    untyped = [p.name for p in parameters if p.annotation is p.empty]
    if untyped:
        raise TaskError(
            f"Tool `{name}`: the parameter `{untyped[0]}` has no type, so the policy cannot be told what to give. "
            f"Write it into the signature, `{untyped[0]}: int`."
        )
    summary, described = _docstring(tool)
    if not summary:
        raise TaskError(
            f"Tool `{name}` has no docstring; its first line tells the policy what it does."
        )
    hints = get_type_hints(tool)
    properties: dict[str, Any] = {}
    for parameter in parameters:
        hint = hints[parameter.name]
        where = f"Tool `{name}`: the parameter `{parameter.name}`"
        try:
            json_schema = TypeAdapter(hint).json_schema()
        except (
            Exception
        ) as error:  # pydantic raises several kinds of errors for types that JSON cannot represent
            raise TaskError(
                f"{where} has the type {hint}, which has no JSON schema: {error}"
            ) from error
        schema = {key: value for key, value in json_schema.items() if key != "title"}
        about = described.get(parameter.name)
        properties[parameter.name] = {**schema, "description": about} if about else schema
    required = [p.name for p in parameters if p.default is p.empty]
    arguments = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": summary, "parameters": arguments}
    return {"type": "function", "function": function}


def instructions(schemas: Sequence[Schema]) -> str:
    """A description of the tools for a chat whose template does not describe them."""
    lines = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return (
        f"You may call these functions:\n<tools>\n{lines}\n</tools>\n"
        "To call one, write its name and arguments as JSON between these tags:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )


def _hermes_call(text: str) -> ToolCall:
    expected = 'expected {"name": ..., "arguments": {...}} between the tags'
    try:
        content = parse_inner(text, finite_alone=True)
    except NotStrict as error:
        return ToolCall("", {}, f"the call is not JSON ({error.msg}); {expected}")
    if not isinstance(content, dict):
        return ToolCall("", {}, f"the call is not a JSON object; {expected}")
    call = cast("dict[str, Any]", content)
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(str(name or ""), {}, f"the call lacks its name or arguments; {expected}")
    return ToolCall(name, cast("dict[str, Any]", arguments))


def _public_methods(kind: type) -> list[Tool]:
    """Public methods in the order of their definition, inherited ones first."""
    names = [name for base in reversed(kind.__mro__[:-1]) for name in vars(base)]
    public = [name for name in dict.fromkeys(names) if not name.startswith("_")]
    return [
        getattr(kind, name)
        for name in public
        if inspect.isroutine(getattr(kind, name)) and name not in OWN_METHODS
    ]


def _docstring(tool: Tool) -> tuple[str, dict[str, str]]:
    """The text of a docstring before its sections, and the description of each parameter in its `Args:`."""
    text = inspect.getdoc(tool) or ""
    summary = re.split(r"\n\s*(?:Args|Arguments|Parameters|Returns|Raises):", text)[0]
    match = re.search(r"(?:Args|Arguments|Parameters):\n(.*?)(?:\n\S|\Z)", text, re.DOTALL)
    entries = re.findall(
        r"^ +(\w+)(?: *\([^)]*\))?: (.*(?:\n {8,}.*)*)", match[1] if match else "", re.MULTILINE
    )
    return " ".join(summary.split()), {name: " ".join(about.split()) for name, about in entries}


def _result_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
