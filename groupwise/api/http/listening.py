"""Makes a server listen: its socket, which is bound before anything else is started; TLS; and uvicorn, without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import Generator
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp

from groupwise.core.errors import UsageError

if TYPE_CHECKING or find_spec("httptools"):  # the faster parser
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HTTPProtocol
else:
    from uvicorn.protocols.http.h11_impl import H11Protocol as HTTPProtocol

KEEP_ALIVE = 75
"""Seconds for which an idle connection stays open: longer than clients and proxies keep theirs, so the server never closes one in use."""
HEADER_SIZE = 64 * 1024
"""Bytes that a client may send before its headers are complete, and between two chunks of its body."""
MAX_PIPELINED = 8
"""Requests that a client may send on one connection before the first of them is answered."""
MAX_FILES = 65_536
"""Limit for open files and connections of a server, if the system allows as many."""
UNREAD_SECONDS = 60.0
"""Seconds after which a client that reads nothing of a response is disconnected."""
TLS_END_SECONDS = 1.0
"""Seconds for a client to close its side of TLS when the server ends. An idle client reads nothing, and asyncio would wait for 30."""
HEADER_SECONDS = 60.0
"""Seconds for the headers of a request, from connecting or, on a kept connection, from the first byte of the next request."""


@cache
def most_connections() -> int:
    """How many connections a server holds: half of the allowed open files; raises the process's soft limit as far as possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = min(hard, MAX_FILES) if hard != resource.RLIM_INFINITY else MAX_FILES
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    return (MAX_FILES if soft == resource.RLIM_INFINITY else min(soft, MAX_FILES)) // 2


def check_tls(certificate: str | None, key: str | None) -> None:
    """Raise UsageError if the two files cannot be used, or only one of them is given."""
    if (certificate is None) != (key is None):
        raise UsageError("TLS needs both: --tls-certificate and --tls-key.")
    if certificate is None or key is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except OSError as error:  # SSLError is an OSError, too
        raise UsageError(
            f"tls_certificate {certificate} and tls_key {key} cannot be used: {error.strerror or error}. "
            "Both are PEM files, and the key is that of the first certificate."
        ) from None


@contextlib.contextmanager
def bind(host: str, port: int) -> Generator[socket.socket]:
    """A listening socket; port 0 chooses a free port. Raises UsageError."""
    host = host.strip("[]")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = addresses[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
        # Connections inherit it. asyncio sets it only if the socket names its protocol; without it the body of a response waits 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise UsageError(
            f"The server cannot listen at {host}:{port}: {error.strerror or error}. Give another --host or --port; port 0 takes any "
            "that is free."
        ) from None
    with listener:
        yield listener


def url_at(scheme: str, host: str, port: int) -> str:
    """URL of an address; IPv6 addresses are put in brackets."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


class BoundedProtocol(HTTPProtocol):
    """Disconnects a client whose headers are too large or too slow, that pipelines too many requests, or that does not
    read its responses. All of this happens before any key is checked.

    h11 counts the bytes itself (`h11_max_incomplete_event_size`), and takes one request at a time; httptools does neither.
    """

    _unparsed = 0
    """Bytes since the last headers or chunk of a body."""
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    """Timer that runs while the client reads nothing."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Start the time limit for a request; abort if there are too many connections."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
        else:
            self._start_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._stop_waiting()
        self._stop_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Called when the client does not read: abort the connection after UNREAD_SECONDS."""
        super().pause_writing()
        self._unread = self._unread or self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Called when the client reads again."""
        self._stop_unread()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse the bytes; disconnect if they are too many."""
        previous_cycle = self.cycle
        self._unparsed += len(data)
        super().data_received(data)
        if self.cycle is not previous_cycle:
            self._stop_waiting()
        elif not previous_cycle or previous_cycle.response_complete:
            self._start_waiting()
        if len(getattr(self, "pipeline", ())) > MAX_PIPELINED:
            self.transport.abort()
        elif self._unparsed > HEADER_SIZE and hasattr(HTTPProtocol, "on_body"):
            self._hang_up("431 Request Header Fields Too Large")

    _ending = False
    """True once the server ends."""

    def shutdown(self) -> None:
        """Called when the server ends: close the connection, after the response to a request that has come."""
        self._ending = True
        super().shutdown()
        self._end_tls()

    def on_response_complete(self) -> None:
        """A response is complete."""
        super().on_response_complete()
        if self._ending:
            self._end_tls()

    def _end_tls(self) -> None:
        """Wait only for what is still to be sent, and not for the client's end of TLS."""
        if self.transport.is_closing() and self.transport.get_extra_info("ssl_object"):
            self.loop.call_later(TLS_END_SECONDS, self._abort_once_sent)

    def _abort_once_sent(self) -> None:
        if self.transport.get_write_buffer_size():
            self.loop.call_later(TLS_END_SECONDS, self._abort_once_sent)
        else:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        """A chunk of the body has arrived."""
        self._unparsed = 0
        super().on_body(body)

    def _start_waiting(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(
                HEADER_SECONDS, self._hang_up, "408 Request Timeout"
            )

    def _stop_waiting(self) -> None:
        self._unparsed = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _hang_up(self, status: str) -> None:
        self._stop_waiting()
        if not self.transport.is_closing():
            answer = f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(answer.encode())
            self.transport.close()


class Uvicorn(uvicorn.Server):
    """A server without signal handlers, whose `listening` is set once it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Install no signal handlers."""
        yield


def uvicorn_config(
    app: ASGIApp, *, certificate: str | None, key: str | None, proxy: str | None
) -> uvicorn.Config:
    """Uvicorn's settings. `proxy`: address of a reverse proxy whose forwarded headers are trusted."""
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        h11_max_incomplete_event_size=HEADER_SIZE,
        proxy_headers=proxy is not None,
        forwarded_allow_ips=proxy or "",
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
