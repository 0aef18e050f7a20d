"""Sends requests from synchronous code to an application in the same process: no socket, no port, and the same routes as over HTTP.

The application runs on an event loop in its own thread. Responses are streamed: the application waits while the reader is busy, so a
large file is never fully in memory. There are no time limits, since an application in this process cannot be lost.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx2
from starlette.types import ASGIApp, Message

T = TypeVar("T")


class InProcessTransport(httpx2.BaseTransport):
    """Answers the requests of a client with an ASGI application. Any number of threads may use it at once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="in-process-api")
        self._thread.daemon = True  # a process that ends without `close` does not wait for it
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the application's event loop, and wait for the result."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C, too: the caller no longer waits for the result
            future.cancel()
            raise

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send the request, and return when the response starts."""
        # Room for one message: the application waits until the reader takes it.
        messages: asyncio.Queue[Message | Exception] = asyncio.Queue(1)
        answering = asyncio.run_coroutine_threadsafe(
            self._run_app(request, request.read(), messages), self._loop
        )
        body = _AnswerBody(self, messages, answering)
        try:
            start = body.next_message()
        except BaseException:
            body.close()
            raise
        return httpx2.Response(start["status"], headers=start["headers"], stream=body)

    async def _run_app(
        self, request: httpx2.Request, body: bytes, messages: asyncio.Queue[Message | Exception]
    ) -> None:
        unread = [body]

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await asyncio.Event().wait()  # if the client disconnects, the task is cancelled
            raise AssertionError

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.partition(b"?")[0],
            "query_string": request.url.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "server": None,
            "client": None,
        }
        try:
            await self._app(scope, receive, messages.put)
        except Exception as error:  # noqa: BLE001 - as on a socket, the client sees a response that broke off
            await messages.put(error)

    def close(self) -> None:
        """Cancel the requests in progress, and end the thread."""
        if self._loop.is_closed():
            return
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _AnswerBody(httpx2.SyncByteStream):
    """The body of one response, read from the application's messages."""

    def __init__(
        self,
        transport: InProcessTransport,
        messages: asyncio.Queue[Message | Exception],
        answering: Future[None],
    ) -> None:
        self._transport, self._messages, self._answering = transport, messages, answering

    def next_message(self) -> Message:
        """The application's next message. Raises ReadError if it failed during a response."""
        message = self._transport.run(self._messages.get())
        if isinstance(message, Exception):
            raise httpx2.ReadError(f"the answer broke off: {message}") from message
        return message

    def __iter__(self) -> Iterator[bytes]:
        more_body = True
        while more_body:
            message = self.next_message()
            yield message.get("body", b"")
            more_body = message.get("more_body", False)
        self._answering.result()

    def close(self) -> None:
        """Cancel the response: its rest is not needed."""
        self._answering.cancel()


async def _cancel_others() -> None:
    other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in other_tasks:
        task.cancel()
    await asyncio.gather(*other_tasks, return_exceptions=True)
