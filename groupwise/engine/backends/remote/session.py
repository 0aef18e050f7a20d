"""A session with the parts of a server: calls to them, and file transfer in both directions.

A thread with its own event loop does all of this. So the loop that drives the parts can be asynchronous in one place and blocking in
another, and may compute for minutes (rewards, for example) without the server declaring it lost: a task of the thread sends a heartbeat
every few seconds. Lost requests are sent again under the same number.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx2

from groupwise.api.client.async_training_client import AsyncTrainingClient
from groupwise.api.client.connection import read_answer
from groupwise.api.client.errors import ClientError, NoAnswer, NotAuthorised, Refused
from groupwise.api.schemas.keys import VARIABLE
from groupwise.api.schemas.parts import (
    DEFAULT_CALL_WAIT,
    HEARTBEAT,
    PATH_PATTERN,
    PIECE,
    AnyVerb,
    CallAnswer,
    CallRequest,
    FolderAnswer,
    PartsAnswer,
    PartsRequest,
)
from groupwise.core import errors
from groupwise.core.errors import GroupwiseError, RunError, UsageError
from groupwise.core.retry import Timing

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_RETRY_TIMEOUT = 15.0
"""Seconds of retries for the first request: a wrong address should be reported soon."""
LAST_RETRY_TIMEOUT = 5.0
"""Seconds of retries when a closing session notifies the server, which would notice the missing heartbeat anyway."""
BYTES = {"Content-Type": "application/octet-stream"}


class RequestThread:
    """Sends requests to a server from its own thread."""

    def __init__(
        self,
        url: str,
        *,
        timing: Timing | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """The key is read from GROUPWISE_API_KEY. `transport` replaces the network. Raises UsageError for an invalid URL."""
        self.client = AsyncTrainingClient(url, timing=timing, transport=transport)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="parts", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread. May be repeated."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            current = asyncio.current_task()
            tasks = [task for task in asyncio.all_tasks() if task is not current]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.client.close()

        self.now(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def now(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread, and block until it is done."""
        return self.start(work).result()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Like `now`, for async callers; cancelling the wait cancels the work."""
        return await asyncio.wrap_future(self.start(work))


def as_usage(error: ClientError) -> UsageError:
    """Convert an error from before anything was started to UsageError, with a hint at `run.server` or the server's key."""
    hint = ""
    if isinstance(error, NotAuthorised):
        hint = f" The key of the server is read from {VARIABLE}."
    elif isinstance(error, NoAnswer):
        hint = " Here the key run.server of the config says where it is."
    return UsageError(f"run.server: {error.message}{hint}")


class Session(RequestThread):
    """Parts that are open on a server; call `open` first. Only one session at a time can use the server's model."""

    def __init__(self, url: str, *, timing: Timing | None = None, **more: Any) -> None:
        """Takes the arguments of `RequestThread`."""
        super().__init__(url, timing=timing, **more)
        self.id = secrets.token_hex(16)
        self._numbers = itertools.count(1)
        self._folders = itertools.count(1)
        self._last = 0
        """Number of the last ordered call."""
        self._open = False
        self._piece = PIECE
        self._beats: Future[None] | None = None

    def close(self) -> None:
        """Also release the parts, if the server can be reached."""
        if self._open:
            self._open = False
            with suppress(ClientError):  # the server then notices the missing heartbeat
                self.now(
                    self._send_request(
                        "DELETE", retry_timeout=LAST_RETRY_TIMEOUT, timeout=LAST_RETRY_TIMEOUT
                    )
                )
        super().close()

    async def open(self, owner: str) -> PartsAnswer:
        """Reserve the server's engine; parts of an earlier session of the same owner are ended. Raises UsageError if that is refused."""
        body = PartsRequest(owner=owner).model_dump_json().encode()
        request = self._send_request(
            "PUT", body=body, server_wait=60.0, retry_timeout=FIRST_RETRY_TIMEOUT
        )
        self._open = True  # perhaps, even if waiting for the answer is cancelled
        try:
            answer = read_answer(PartsAnswer, await self.run(request))
        except (Refused, NoAnswer) as error:
            self._open = False
            raise as_usage(error) from None
        self._piece = answer.piece
        self._beats = self.start(self._send_heartbeats(min(HEARTBEAT, answer.silence / 4)))
        return answer

    async def call(self, verb: AnyVerb, *, ordered: bool = False) -> Any:
        """Execute a verb in the parts. `ordered`: after all earlier ordered calls.

        Cancelling the wait cancels the call. Raises the server's error, and ClientError.
        """
        return await self.run(self.call_in_thread(verb, ordered=ordered))

    def call_now(self, verb: AnyVerb, *, ordered: bool = False) -> Any:
        """Like `call`, for code that is not async."""
        return self.now(self.call_in_thread(verb, ordered=ordered))

    def new_folder(self, kind: str) -> str:
        """A new name for a folder of the session on the server."""
        return f"{kind}-{next(self._folders)}"

    # --- within the thread ------------------------------------------------------------------------

    async def call_in_thread(self, verb: AnyVerb, *, ordered: bool = False) -> Any:
        """Like `call`, for code that already runs in the thread."""
        number, after = next(self._numbers), None
        if ordered:
            after, self._last = self._last, number
        path = f"/calls/{number}"
        body = CallRequest(after=after, do=verb).model_dump_json().encode()

        async def step(method: str, body: bytes | None = None) -> CallAnswer:
            query = {"wait": str(DEFAULT_CALL_WAIT)}
            return read_answer(
                CallAnswer,
                await self._send_request(
                    method, path, body=body, query=query, server_wait=DEFAULT_CALL_WAIT
                ),
            )

        try:
            answer = await step("PUT", body)
            while answer.state == "working":
                answer = await step("GET")
        except asyncio.CancelledError:
            self._giving_up = asyncio.ensure_future(self._give_up(path))
            raise
        except Refused:
            await self._give_up(path)  # otherwise later ordered calls would wait for it
            raise
        if answer.error is not None:
            raise _exception_of(answer.error.code, answer.error.message)
        if answer.state != "done":
            raise RunError(f"The call {verb.verb} to {self.client.connection.url} was given up.")
        return answer.result

    async def upload(self, files: Iterable[Path], folder: str) -> None:
        """Send files into a folder of the session, in pieces. A piece shorter than the full size is a file's last one."""
        for file in files:
            path, offset = f"/files/{folder}/{file.name}", 0
            with file.open("rb") as source:
                while True:
                    piece = await asyncio.to_thread(source.read, self._piece)
                    query = {"offset": str(offset)}
                    await self._send_request("PUT", path, body=piece, query=query, headers=BYTES)
                    offset += len(piece)
                    if len(piece) < self._piece:
                        break

    async def download(self, folder: str, into: Path) -> None:
        """Download the files of a folder of the session into an existing local folder."""
        answer = read_answer(FolderAnswer, await self._send_request("GET", f"/folders/{folder}"))
        for facts in answer.files:
            if not re.fullmatch(PATH_PATTERN, facts.path):
                raise RunError(
                    f"The server names a file {facts.path!r:.200}, which is none of a folder."
                )
            target = into / facts.path
            target.parent.mkdir(parents=True, exist_ok=True)
            path = f"{folder}/{facts.path}"
            with target.open("wb") as file:
                while (offset := file.tell()) < facts.size:
                    query = {"offset": str(offset)}
                    piece = (await self._send_request("GET", f"/files/{path}", query=query)).content
                    if not piece:
                        raise RunError(
                            f"{path} of the server ended after {offset} of {facts.size} bytes; it was changed on its way."
                        )
                    await asyncio.to_thread(file.write, piece)

    async def forget(self, folder: str) -> None:
        """Delete a folder of the session on the server."""
        await self._send_request("DELETE", f"/folders/{folder}")

    async def _give_up(self, path: str) -> None:
        with suppress(ClientError):
            await self._send_request("DELETE", path)

    async def _send_heartbeats(self, interval: float) -> None:
        """Send a heartbeat every `interval` seconds, until the task is cancelled."""
        while True:
            await asyncio.sleep(interval)
            with suppress(ClientError):  # the next call reports the problem
                await self._send_request("GET", retry_timeout=interval, timeout=interval)

    async def _send_request(self, method: str, below: str = "", **options: Any) -> httpx2.Response:
        """Send a request about this session's parts; see `AsyncTrainingClient.send`."""
        return await self.client.send(method, f"/parts/{self.id}{below}", **options)


def _exception_of(code: str, message: str) -> GroupwiseError:
    """The server's error as an exception of the same class; RunError if its code is unknown."""
    kinds = (kind for kind in vars(errors).values() if isinstance(kind, type))
    classes = {kind.code: kind for kind in kinds if issubclass(kind, GroupwiseError)}
    return classes.get(code, RunError)(message)
