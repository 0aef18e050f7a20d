"""Tools of MCP servers (Model Context Protocol), as an environment: `tools.Tools` for tools that other programs offer.

    task:
      mcp_servers:
        time: {command: mcp-server-time, args: [--local-timezone, UTC]}     # a program, over its standard input and output
        docs: {url: "http://127.0.0.1:8000/mcp", tools: [search]}           # a service, over streamable HTTP

`McpTools` asks each server once which tools it has; their schemas go into the prompt. A rollout starts a server when it first calls one of
its tools, and ends it when the rollout ends, so that no state reaches another rollout; `shared` servers serve all rollouts of a worker.

    an error that the server reports         is the result of the call, `error: …`
    no answer within `time_limit`            likewise; the server is ended, and started again for the next call
    the server dies during a call            likewise
    the server cannot be started             the rollout fails, because the policy is not to blame

The package `mcp` is imported when a server is first asked.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncGenerator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TextIO, cast

from groupwise.core.errors import TaskError
from groupwise.core.extras import not_installed
from groupwise.core.processes.process_tree import MARK
from groupwise.core.settings.schema import Conflict, Strict, setting
from groupwise.core.terminal.text import clean
from groupwise.tasks.tools import (
    CallForm,
    HermesCalls,
    Schema,
    Tool,
    ToolEnvironment,
    ToolUnavailable,
)

if TYPE_CHECKING:
    from mcp import Client
    from mcp import Tool as McpTool
    from mcp.client._transport import TransportStreams
    from mcp.types import CallToolResult, ContentBlock

FIRST_START_LIMIT = 120.0
"""Seconds that a server may take to start and list its tools before the run, when `npx` and `uvx` may still have to download it."""
_LOST = "; it is started again for the next call, and its state is lost"
_LOG_CHARS = 600
"""Characters of a server's standard error that a message shows."""


class McpServer(Strict):
    """One entry of `mcp_servers`: a program with `command`, or a service with `url`."""

    command: str | None = setting(
        None, "The program to start, such as mcp-server-time, uvx or npx."
    )
    args: tuple[str, ...] = setting((), "Its arguments.")
    env: dict[str, str] = setting({}, "Environment variables for it.")
    inherit_env: tuple[str, ...] = setting(
        (),
        "Names of environment variables that it gets with the values that they have here, such as those with keys. It always gets PATH, "
        "HOME, USER, SHELL and TERM.",
    )
    cwd: str | None = setting(
        None,
        "The folder it starts in; null: a new empty folder, which is removed when it ends, so that files of one rollout reach no other.",
    )
    url: str | None = setting(
        None, "The address of a service, over streamable HTTP, instead of `command`."
    )
    header_env: dict[str, str] = setting(
        {},
        "HTTP headers of requests to `url`, each with the name of the environment variable that holds its value, as in "
        "{Authorization: DOCS_HEADER}.",
    )
    tools: tuple[str, ...] | None = setting(
        None, "Which of its tools the policy is offered; null: all.", min_length=1
    )
    tool_prefix: str = setting(
        "", "A prefix for the names of its tools, if two servers have a tool of the same name."
    )
    shared: bool = setting(
        False,
        "One server for all rollouts of a worker, instead of one for each rollout. This saves starts; use it only if no rollout "
        "can leave anything to another.",
    )
    time_limit: float = setting(
        10.0, "Seconds for one call; one that takes longer is answered by an error.", gt=0
    )
    start_limit: float = setting(
        15.0,
        "Seconds that it may take to start within a rollout; otherwise the rollout fails.",
        gt=0,
    )
    max_result_length: int = setting(
        4000,
        "Maximum number of characters of a result that the policy sees; the rest is cut off.",
        ge=1,
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Report a server without an address or with two, and keys of the other kind of server."""
        if (self.command is None) == (self.url is None):
            yield Conflict(
                "a server has either `command`, a program to start, or `url`, the address of a service.",
                ("command", "url"),
            )
            return
        idle = ("header_env",) if self.url is None else ("args", "env", "inherit_env", "cwd")
        for key in idle:
            if getattr(self, key):
                needed = "url" if self.url is None else "command"
                yield Conflict(f"{key} has no effect without {needed}.", (key, needed))


class McpTools:
    """Makes an environment of the servers' tools for each rollout; `get_environment` may return it."""

    gives_rewards = False

    def __init__(
        self,
        servers: Mapping[str, Mapping[str, Any] | McpServer],
        calls: CallForm | None = None,
    ) -> None:
        """Asks every server for its tools. Raises TaskError if one does not answer, lacks a tool, or two have a tool of one name."""
        self._servers = {
            name: entry
            if isinstance(entry, McpServer)
            else McpServer.model_validate_json(json.dumps(dict(entry)))
            for name, entry in servers.items()
        }
        self._calls = calls or HermesCalls()
        self._shared: dict[str, _Connection] = {}
        schemas: list[Schema] = []
        self._owners: dict[str, tuple[str, str]] = {}
        """The server of each tool, and its name there."""
        for name, server in self._servers.items():
            for schema in _offered_tools(name, server):
                function = schema["function"]
                own_name = function["name"]
                full_name = server.tool_prefix + own_name
                if full_name in self._owners:
                    raise TaskError(
                        f"mcp_servers: {self._owners[full_name][0]} and {name} both have the tool `{full_name}`. Set tool_prefix of one of "
                        "them, or leave the tool out of its `tools`."
                    )
                self._owners[full_name] = (name, own_name)
                schemas.append({**schema, "function": {**function, "name": full_name}})
        self.schemas = schemas if self._calls.renders_schemas else []
        """Schemas for the chat template."""

    def check_limits(self, turn_limit: float) -> None:
        """Raise TaskError if a call may take longer than a turn of the environment, whose process would be killed then."""
        for name, server in self._servers.items():
            if server.start_limit + server.time_limit >= turn_limit:
                raise TaskError(
                    f"mcp_servers.{name}: start_limit and time_limit are {server.start_limit:g} and {server.time_limit:g} s, together not "
                    f"below the {turn_limit:g} s that a whole turn may take. Lower them, or raise rollout.time_limit."
                )

    def __call__(self) -> ToolEnvironment:
        """An environment for one rollout."""
        connections = {
            name: self._shared.setdefault(name, _Connection(name, server))
            if server.shared
            else _Connection(name, server)
            for name, server in self._servers.items()
        }
        use = _Use(connections)
        tools: dict[str, Tool] = {
            full_name: partial(use.call, server, own_name)
            for full_name, (server, own_name) in self._owners.items()
        }
        return ToolEnvironment(tools, self._calls, use)


class _Use:
    """What one rollout does with the servers."""

    def __init__(self, connections: Mapping[str, _Connection]) -> None:
        self._connections = connections
        self._calls = self._errors = 0

    async def call(self, server: str, tool: str, /, **arguments: Any) -> str:
        self._calls += 1
        result = await self._connections[server].call(tool, arguments)
        self._errors += result.startswith("error: ")
        return result

    def metrics(self) -> dict[str, float]:
        return {"tool_calls": self._calls, "tool_errors": self._errors}

    async def close(self) -> None:
        for connection in self._connections.values():
            if not connection.server.shared:
                await connection.close()


class _Connection:
    """The connection with one server: opened by the first call, and opened again by the next call after the server has ended."""

    def __init__(self, name: str, server: McpServer) -> None:
        self.server = server
        self._name = name
        self._client: Client | None = None
        self._ended = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """The result of a call, as text. Raises ToolUnavailable if the server cannot be started."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS, METHOD_NOT_FOUND

        client = self._client or await self.open(self.server.start_limit)
        longest = self.server.max_result_length
        try:
            async with asyncio.timeout(self.server.time_limit):
                result = await client.call_tool(tool, dict(arguments))
        except TimeoutError:
            await self.close()
            return f"error: {self._name} did not answer within {self.server.time_limit:g} s{_LOST}"
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                await self.close()
                return f"error: {self._name} ended{_LOST}"
            message = _shortened(error.message, longest)
            about_the_call = error.code in (INVALID_PARAMS, METHOD_NOT_FOUND)
            if about_the_call or self.server.url is None:
                return f"error: {message}"
            await self.close()  # a service that was started again knows the session no more
            return f"error: {self._name}: {message}{_LOST}"
        text = _shortened(_result_text(result), longest)
        return f"error: {text}" if result.is_error else text

    async def open(self, limit: float) -> Client:
        """The client, once the server has answered within `limit` seconds. Raises ToolUnavailable."""
        client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            self._holder = asyncio.create_task(self._hold_open(client, log))
            await asyncio.wait((client,), timeout=limit)
            if client.done() and client.exception() is None:
                self._client = client.result()
                return self._client
            problem = (
                _described_error(cast("Exception", client.exception()))
                if client.done()
                else f"it did not answer within {limit:g} s"
            )
            await self.close()
            raise ToolUnavailable(
                f"The MCP server `{self._name}` ({self._address}) cannot be used: {problem}{_last_output(log)}"
            )

    async def close(self) -> None:
        """End the server, or the session with a service."""
        client, self._client = self._client, None
        holder, self._holder = self._holder, None
        if holder is None:
            return
        self._ended.set()
        if client is None:  # it still waits for an answer
            holder.cancel()
        await asyncio.wait((holder,))

    async def _hold_open(self, opened: asyncio.Future[Client], log: TextIO) -> None:
        """Keeps the client open until it is closed. A task of its own does that, because the task that enters it must leave it."""
        from mcp import Client

        try:
            async with Client(_transport(self.server, log)) as client:
                opened.set_result(client)
                await self._ended.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 — anything may go wrong in a program of others; `open` reports it
            if not opened.done():
                opened.set_exception(error)

    @property
    def _address(self) -> str:
        return self.server.url or " ".join((self.server.command or "", *self.server.args))


@asynccontextmanager
async def _transport(server: McpServer, log: TextIO) -> AsyncGenerator[TransportStreams]:
    """The streams to and from a server. A program ends with the streams, and with this process."""
    import httpx2
    from mcp import StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if server.url is not None:
        headers = {header: _variable(name) for header, name in server.header_env.items()}
        timeout = httpx2.Timeout(server.time_limit, read=None)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout) as http_client,
            streamable_http_client(server.url, http_client=http_client) as streams,
        ):
            yield streams
        return
    inherited = {name: _variable(name) for name in server.inherit_env}
    mark = {MARK: os.environ[MARK]} if MARK in os.environ else {}
    with tempfile.TemporaryDirectory(prefix="groupwise-mcp-", ignore_cleanup_errors=True) as folder:
        parameters = StdioServerParameters(
            command=cast("str", server.command),
            args=list(server.args),
            env={**inherited, **server.env, **mark},
            cwd=server.cwd or folder,
        )
        async with stdio_client(parameters, errlog=log) as streams:
            yield streams


def _variable(name: str) -> str:
    if name not in os.environ:
        raise TaskError(
            f"mcp_servers: the environment variable {name} is not set; inherit_env or header_env names it."
        )
    return os.environ[name]


# --- which tools there are ------------------------------------------------------------------------


def _offered_tools(name: str, server: McpServer) -> list[Schema]:
    """The schemas of the tools that a server offers to the policy, under their own names."""
    schemas = json.loads(_listed_tools(name, server.model_dump_json()))
    if server.tools is None:
        return schemas
    by_name = {schema["function"]["name"]: schema for schema in schemas}
    if unknown := [tool for tool in server.tools if tool not in by_name]:
        raise TaskError(
            f"mcp_servers.{name}.tools: the server has no tool `{unknown[0]}`. It has: {', '.join(by_name) or 'none'}."
        )
    return [by_name[tool] for tool in server.tools]


@cache
def _listed_tools(name: str, server_json: str) -> str:
    """The schemas of all tools of a server as JSON. Each process asks a server once, in a thread because a loop may be running here."""
    server = McpServer.model_validate_json(server_json)
    with ThreadPoolExecutor(1, "mcp-tools") as thread:
        try:
            return thread.submit(asyncio.run, _list_tools(name, server)).result()
        except ToolUnavailable as problem:
            raise TaskError(str(problem)) from problem
        except ImportError as error:
            raise TaskError(not_installed("task.mcp_servers", "mcp", "mcp")) from error


async def _list_tools(name: str, server: McpServer) -> str:
    from mcp import MCPError

    connection = _Connection(name, server)
    client = await connection.open(FIRST_START_LIMIT)
    try:
        schemas: list[Schema] = []
        cursor: str | None = None
        async with asyncio.timeout(FIRST_START_LIMIT):
            while True:
                page = await client.list_tools(cursor=cursor)
                schemas += map(_schema_of, page.tools)
                if (cursor := page.next_cursor) is None:
                    return json.dumps(schemas)
    except (TimeoutError, MCPError) as error:
        problem = f"The MCP server `{name}` does not list its tools: {_described_error(error)}"
        raise ToolUnavailable(problem) from error
    finally:
        await connection.close()


def _schema_of(tool: McpTool) -> Schema:
    parameters = {key: value for key, value in tool.input_schema.items() if key != "$schema"}
    function = {
        "name": tool.name,
        "description": tool.description or tool.title or "",
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


# --- results --------------------------------------------------------------------------------------


def _result_text(result: CallToolResult) -> str:
    """A result as text: its parts one below the other, or else its structured content as JSON."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(_part_text(part) for part in result.content)


def _part_text(part: ContentBlock) -> str:
    """A part as text; of pictures and sounds their kind alone."""
    match part.type:
        case "text":
            return part.text
        case "resource":
            return getattr(part.resource, "text", f"[{part.resource.mime_type or 'binary data'}]")
        case "resource_link":
            return f"[{part.name}: {part.uri}]"
        case _:
            return f"[{part.mime_type}]"


def _shortened(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    return f"{text[:longest]}\n[cut off: {len(text) - longest} more characters]"


def _described_error(error: BaseException) -> str:
    """An error in words; of a group, its members."""
    if isinstance(error, BaseExceptionGroup):
        causes = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return "; ".join(map(_described_error, causes))
    return str(error) if isinstance(error, TaskError) else f"{type(error).__name__}: {error}"


def _last_output(log: TextIO) -> str:
    """The end of what a server wrote to its standard error, for a message."""
    log.seek(0)
    text = clean(log.read().strip()[-_LOG_CHARS:])
    return f"\n  it wrote: {text}" if text else ""
