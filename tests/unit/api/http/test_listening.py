"""Where a server listens, and which requests it reads to the end."""

import asyncio
import contextlib
import socket
from collections.abc import Iterable

import pytest
from starlette.types import Receive, Scope, Send

from groupwise.api.http import listening
from groupwise.api.http.listening import HEADER_SIZE, Uvicorn, bind, uvicorn_config


def test_small_answers_are_not_held_back_on_their_connections() -> None:
    with bind("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def body_length(scope: Scope, receive: Receive, send: Send) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": f"read {size}".encode()})


async def answer(*pieces: bytes) -> bytes:
    """What comes back for these bytes, until the server hangs up."""
    server = Uvicorn(uvicorn_config(body_length, certificate=None, key=None, proxy=None))
    with bind("127.0.0.1", 0) as at:
        serving = asyncio.create_task(server.serve([at]))
        await server.listening.wait()
        reader, writer = await asyncio.open_connection(*at.getsockname())
        with contextlib.suppress(ConnectionError):  # it hung up while we sent
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
        found = b""
        with contextlib.suppress(ConnectionError):
            found = await reader.read()
        writer.close()
        server.should_exit = True
        await serving
        return found


START = b"POST / HTTP/1.1\r\nhost: h\r\nconnection: close\r\n"


async def test_a_request_may_have_a_large_body_and_no_large_header() -> None:
    body, piece = b"x" * (5 * HEADER_SIZE), b"a" * (HEADER_SIZE // 2)
    sized = START + f"content-length: {len(body)}\r\n\r\n".encode()
    assert f"read {len(body)}".encode() in await answer(sized, body)
    chunked = START + b"transfer-encoding: chunked\r\n\r\n"
    assert b"read 3" in await answer(chunked, b"3\r\nabc\r\n0\r\n\r\n")
    for endless in (
        (b"GET /", *[piece] * 8),
        (START + b"x: ", *[piece] * 8),
        (START, *[b"x: " + piece + b"\r\n"] * 8),
        (chunked, b"3;x=", *[piece] * 8),
        (chunked, b"3\r\nabc\r\n0\r\n", *[b"x: " + piece + b"\r\n"] * 8),
    ):
        assert b" 200 " not in await answer(*endless)


@pytest.mark.parametrize("said", [(), (START,), (START + b"x",)])
async def test_a_request_that_never_ends_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, said: Iterable[bytes]
) -> None:
    monkeypatch.setattr(listening, "HEADER_SECONDS", 0.01)
    assert (await answer(*said)).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("most", [0, 1])
async def test_connections_beyond_the_bound_are_closed(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    assert listening.most_connections() > 100
    monkeypatch.setattr(listening, "most_connections", lambda: most)
    answered = await answer(START + b"content-length: 1\r\n\r\n", b"x")
    assert (b" 200 " in answered) == bool(most)


NEXT = b"GET / HTTP/1.1\r\nhost: h\r\n\r\n"


async def test_a_client_that_pipelines_too_many_requests_is_disconnected() -> None:
    last = NEXT.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    assert (await answer(NEXT * 5 + last)).count(b" 200 ") == 6
    assert (await answer(NEXT * 2_000)).count(b" 200 ") < 20


async def test_a_client_that_does_not_read_its_answer_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "UNREAD_SECONDS", 0.01)

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(64 << 20)})

    server = Uvicorn(uvicorn_config(large, certificate=None, key=None, proxy=None))
    with bind("127.0.0.1", 0) as at, socket.create_connection(at.getsockname()) as client:
        serving = asyncio.create_task(server.serve([at]))
        await server.listening.wait()
        client.sendall(NEXT)
        async with asyncio.timeout(20):
            while not server.server_state.total_requests or server.server_state.connections:  # noqa: ASYNC110  # uvicorn tells nobody
                await asyncio.sleep(0.01)
        server.should_exit = True
        await serving
