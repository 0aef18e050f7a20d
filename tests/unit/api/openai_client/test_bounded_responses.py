"""A server that answers with gigabytes, however small they are on their way, cannot fill the memory of the clients."""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable, Iterator

import httpx2
import pytest

from groupwise.api.client import AsyncTrainingClient, TrainingClient
from groupwise.api.client.errors import StrangeAnswer
from groupwise.api.openai_client import bounded_responses
from groupwise.api.openai_client import client as openai_client
from groupwise.api.openai_client.bounded_responses import ResponseTooLarge, read_response
from groupwise.api.openai_client.client import Client, Endpoint
from groupwise.core.errors import EndpointError
from groupwise.jobs.fleet.client import FleetAway, FleetClient

HERE = "http://127.0.0.1:9"
LIMIT = 8 << 20
GZIP = 16


class _Bomb(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """256 MiB of spaces as gzip, made as it is read."""

    def __init__(self) -> None:
        self.sent = 0

    def __iter__(self) -> Iterator[bytes]:
        packer = zlib.compressobj(wbits=zlib.MAX_WBITS | GZIP)
        spaces = b" " * (1 << 20)
        for _ in range(256):
            self.sent += len(spaces)
            yield packer.compress(spaces) + packer.flush(zlib.Z_FULL_FLUSH)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self:
            yield part


@pytest.fixture(params=[200, 400])
def bomb(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[httpx2.Request], httpx2.Response]]:
    stream = _Bomb()

    def answer(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(request.param, headers={"content-encoding": "gzip"}, stream=stream)

    for function in (bounded_responses.read_response, bounded_responses.read_response_async):
        monkeypatch.setattr(function, "__defaults__", (LIMIT,))
    monkeypatch.setattr(openai_client, "MAX_RESPONSE", LIMIT)
    tracemalloc.start()
    yield answer
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0 < stream.sent < 3 * LIMIT
    assert most < 6 * LIMIT


def test_clients_stop_reading(bomb: Callable[[httpx2.Request], httpx2.Response]) -> None:
    transport = httpx2.MockTransport(bomb)
    with (
        TrainingClient(HERE, transport=transport) as client,
        pytest.raises(StrangeAnswer, match="more than"),
    ):
        client.status()


async def test_asynchronous_clients_stop_reading(
    bomb: Callable[[httpx2.Request], httpx2.Response],
) -> None:
    async with AsyncTrainingClient(HERE, transport=httpx2.MockTransport(bomb)) as client:
        with pytest.raises(StrangeAnswer, match="more than"):
            await client.status()


async def test_judges_stop_reading(bomb: Callable[[httpx2.Request], httpx2.Response]) -> None:
    endpoint = Endpoint(HERE, "judge")
    async with Client(endpoint, transport=httpx2.MockTransport(bomb)) as client:
        with pytest.raises(EndpointError, match="more than"):
            await client.ask("GET", "/models", None, lambda body: body)


def test_clients_of_a_fleet_stop_reading(
    bomb: Callable[[httpx2.Request], httpx2.Response],
) -> None:
    with (
        FleetClient(HERE, transport=httpx2.MockTransport(bomb)) as client,
        pytest.raises(FleetAway, match="more than"),
    ):
        client.show("j-1")


def test_a_response_is_the_same_with_its_body_unpacked() -> None:
    packed = zlib.compressobj(wbits=zlib.MAX_WBITS | GZIP)
    body = packed.compress(b'{"a": 1}') + packed.flush()
    headers = [("content-encoding", "gzip"), ("x-a", "1"), ("x-a", "2"), ("retry-after", "3")]

    def answer(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(429, headers=headers, stream=httpx2.ByteStream(body))

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as http:
        for limit in (8, 7):
            with http.stream("GET", HERE) as streamed:
                if limit < 8:
                    with pytest.raises(ResponseTooLarge):
                        read_response(streamed, limit)
                    continue
                read = read_response(streamed, limit)
            assert (read.status_code, read.json(), read.request.url.host) == (
                429,
                {"a": 1},
                "127.0.0.1",
            )
            assert read.headers.get_list("x-a") == ["1", "2"]
            assert "content-encoding" not in read.headers
