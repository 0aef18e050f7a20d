"""The part of every bridge that speaks with the run: reads calls, one JSON object a line, and answers them in any order.

A bridge runs in the environment's own Python, which need not be ours, so this file imports the standard library alone. It connects to
the Unix socket that its command line names, and ends when the socket closes. Decision 0075 describes the calls. An adapter gives the
answers:

    class Adapter:
        def open(self, protocol, name, args, eval_args): ...  # {"library": "verifiers 0.4.0"}
        def examples(self, split, offset, limit): ...         # {"examples": [...], "more": False}
        async def rollout(self, call): ...                    # {"rewards": [...], ...}
        async def close(self): ...

    serve(Adapter())

An adapter whose `open` answers `"scores_groups": True` has a method more, `async def score(self, rollouts)`, which takes the names of a
group's attempts and returns {"answers": [{"rewards": [...], ...}]}, one for each.

`chat` asks the policy, for environments that do not ask by themselves.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import traceback
import urllib.error
import urllib.request
from typing import Any, Protocol

MAX_LINE = 1 << 28
"""Bytes of one call; a dataset's example may hold a whole document."""
FRAMES = 3
"""Frames of a traceback that an error quotes."""


class Adapter(Protocol):
    """What one library needs to be asked through this bridge."""

    def open(
        self, protocol: int, name: str, args: dict[str, Any], eval_args: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Load the environment; called once, first."""
        ...

    def examples(self, split: str, offset: int, limit: int) -> dict[str, Any]:
        """Examples of a split, from `offset` on, at most `limit`."""
        ...

    async def rollout(self, call: dict[str, Any]) -> dict[str, Any]:
        """Play one attempt. Cancelled if the run gives it up."""
        ...

    async def close(self) -> None:
        """Free what the environment holds."""
        ...


def serve(adapter: Adapter) -> None:
    """Answer the calls of the run until it closes the socket."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    # In the main thread and outside of a loop, since libraries set signal handlers and run loops of their own while they load.
    with connection.makefile("rb") as lines:
        call = json.loads(lines.readline())
    try:
        answer = {"id": call["id"], "result": adapter.open(**call["params"])}
    except BaseException as error:  # noqa: BLE001 — code of others, which may raise anything
        answer = {"id": call["id"], "error": {"message": _words(error)}}
    connection.sendall(json.dumps(answer, default=str).encode() + b"\n")
    asyncio.run(_serve(adapter, connection))


class Refused(Exception):
    """The policy refused a request, mostly because a limit of the attempt is reached."""


async def chat(
    call: dict[str, Any], messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> tuple[str, dict[str, Any]]:
    """Ask the policy for the next message of a conversation; returns its id and the message. Raises Refused."""
    return await asyncio.to_thread(_chat, call, messages, tools)


def _chat(
    call: dict[str, Any], messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[str, dict[str, Any]]:
    body = {"model": call["model"], "messages": messages, **({"tools": tools} if tools else {})}
    request = urllib.request.Request(
        f"{call['base_url']}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {call['api_key']}"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on loopback
    try:
        with opener.open(request) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise Refused(error.read().decode(errors="replace")[:500]) from None
    return answer["id"], answer["choices"][0]["message"]


async def _serve(adapter: Any, connection: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_LINE)
    rollouts: dict[str, asyncio.Task[Any]] = {}
    answering: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        call = json.loads(line)
        method, params = call["method"], call["params"]
        if method == "rollout":
            rollouts[params["rollout"]] = work = asyncio.ensure_future(adapter.rollout(params))
            work.add_done_callback(lambda _, name=params["rollout"]: rollouts.pop(name, None))
        elif method == "cancel":
            if task := rollouts.get(params["rollout"]):
                task.cancel()
            work = asyncio.ensure_future(_nothing())
        elif method == "score":
            work = asyncio.ensure_future(adapter.score(**params))
        else:
            work = asyncio.ensure_future(asyncio.to_thread(adapter.examples, **params))
        answer = asyncio.ensure_future(_answer(call["id"], work, writer))
        answering.add(answer)
        answer.add_done_callback(answering.discard)
    for task in rollouts.values():
        task.cancel()
    await adapter.close()


async def _nothing() -> dict[str, Any]:
    return {}


async def _answer(number: int, work: asyncio.Future[Any], writer: asyncio.StreamWriter) -> None:
    try:
        # NaN may pass: the run says which number of the answer it is.
        text = json.dumps({"id": number, "result": await work}, default=str)
    except asyncio.CancelledError:
        text = json.dumps({"id": number, "error": {"message": "it was given up"}})
    except BaseException as error:  # noqa: BLE001 — code of others, which may raise anything
        text = json.dumps({"id": number, "error": {"message": _words(error)}})
    writer.write(text.encode() + b"\n")
    await writer.drain()


def _words(error: BaseException) -> str:
    """The error, and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    where = "".join(f"\n  {frame.filename}:{frame.lineno} in {frame.name}" for frame in last)
    return f"{type(error).__name__}: {error}{where}"
