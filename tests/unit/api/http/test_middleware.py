"""What every request goes through: limits, keys without names, foreign pages, clients that go away; the last with a real server."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError

import httpx2
import pytest

from groupwise.api.http import bodies
from groupwise.api.http.logs import JsonFormatter
from groupwise.api.http.origins import check_local
from groupwise.api.http.shared_state import TokenBuckets
from groupwise.api.schemas.keys import Role
from groupwise.api.schemas.problems import Refusal
from tests.processes import wait_until_async
from tests.unit.server.fake_service import FakeService
from tests.unit.server.http_client import app_of, client_of, keyring, listening, serving_of

# Limits


async def test_a_body_in_pieces_is_refused_as_soon_as_it_is_too_large() -> None:
    sent = 0

    async def pieces() -> AsyncGenerator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1
            yield b"x" * 512

    async with client_of(app_of(FakeService(), max_body_bytes=1024)) as client:
        answer = await client.post(
            "/completions", content=pieces(), headers={"Content-Type": "application/json"}
        )
    assert answer.json()["code"] == "too_large"
    assert sent < 10


def test_a_bucket_gives_a_burst_and_then_so_many_a_second() -> None:
    now = 0.0
    buckets = TokenBuckets(2.0, 3, lambda: now)
    assert [buckets.take("a") for _ in range(3)] == [0, 0, 0]
    assert buckets.take("a") == 0.5
    assert buckets.take("b") == 0
    now = 0.5
    assert [buckets.take("a"), buckets.take("a")] == [0, 0.5]
    now = 1000.0
    assert [buckets.take("a") for _ in range(4)] == [0, 0, 0, 0.5]


def test_buckets_that_are_full_again_take_no_memory() -> None:
    now = 0.0
    buckets = TokenBuckets(2.0, 3, lambda: now)
    for address in range(1000):
        buckets.take(f"{address}")
        now += 0.1
    assert len(buckets._tokens) <= 16  # those of the last 1.5 s
    assert [buckets.take("999") for _ in range(3)] == pytest.approx([0, 0, 0.4])


def test_threads_take_from_a_bucket_one_after_the_other() -> None:
    together = Barrier(2)
    met: list[bool] = []

    def clock() -> float:
        with suppress(BrokenBarrierError):
            together.wait(0.2)
            met.append(True)
        return 0.0

    buckets = TokenBuckets(1.0, 1, clock)
    with ThreadPoolExecutor(2) as threads:
        assert sorted(threads.map(buckets.take, ["here", "here"])) == [0, 1]
    assert met == []


async def test_each_key_has_a_bucket_of_its_own_and_health_has_none_and_metrics_count() -> None:
    ring, keys = keyring()
    app = app_of(FakeService(), ring, requests_per_second=0.001, burst=1)
    async with client_of(app) as client:
        for role in Role:
            headers = {"X-API-Key": keys[role]}
            statuses = [(await client.get("/status", headers=headers)).status_code for _ in "ab"]
            assert statuses == [200, 429]
        assert (await client.get("/healthz")).status_code == 200
    counted = serving_of(app).metrics
    assert counted.requests["GET /status", 200] == counted.refusals["rate_limited"] == len(Role)


# Pages of other sites


# The log and the numbers


async def test_a_line_for_each_request_without_bodies_and_keys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ring, keys = keyring()
    headers = {"api-key": keys[Role.TRAIN], "X-Request-ID": "mine-1"}
    with caplog.at_level(logging.INFO, "groupwise.api.http.access"):
        async with client_of(app_of(FakeService(), ring), **headers) as client:
            answer = await client.post("/completions?q=hidden", json={"prompt": "secret-prompt"})
            await client.get("/no%0Awhere")
    assert answer.headers["x-request-id"] == "mine-1"
    ours = [record for record in caplog.records if record.name == "groupwise.api.http.access"]
    first, second = (json.loads(JsonFormatter().format(record)) for record in ours)
    expected = {"request_id": "mine-1", "method": "POST", "path": "/completions", "status": 422}
    assert first.items() >= expected.items()
    assert first["key"] == ring.caller(keys[Role.TRAIN]).key_id
    assert (second["status"], second["code"]) == (404, "not_found")
    assert "\n" not in second["message"]
    for hidden in (*keys.values(), "secret-prompt", "hidden"):
        assert hidden not in caplog.text


# Clients that go away


async def test_the_roles_of_a_stream_and_that_it_ends_with_its_client() -> None:
    ring, keys = keyring()
    app = app_of(FakeService(), ring)
    async with (
        listening(app) as port,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        assert (await client.get("/events")).status_code == 401
        for role in Role:
            headers = {"api-key": keys[role]}
            async with client.stream("GET", "/events", headers=headers) as answer:
                assert answer.status_code == 200
                assert serving_of(app).metrics.event_streams == 1
            await wait_until_async(lambda: serving_of(app).metrics.event_streams == 0)


def request(path: str, body: bytes, length: int | None = None, more: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body


async def begun(port: int, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    return reader, writer


async def gone(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


async def test_bodies_that_are_too_large_or_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_of(FakeService(), max_body_bytes=1024)
    async with listening(app) as port:
        reader, writer = await begun(port, request("/completions", b"", 99999999999))
        assert b" 413 " in await reader.readline(), "before it is read"
        await gone(writer)
        monkeypatch.setattr(bodies, "BODY_SECONDS", 0.05)
        reader, writer = await begun(port, request("/step", b"{", 10))
        assert b" 504 " in await reader.readline()
        await gone(writer)
        monkeypatch.setattr(bodies, "BODY_SECONDS", 60.0)
        reader, writer = await begun(port, request("/step", b"{", 10))
        await wait_until_async(lambda: serving_of(app).bodies.coming)
        serving_of(app).end()
        assert b" 503 " in await reader.readline()
        await reader.readuntil(b"shutting_down")  # the connection is kept for another request
        await gone(writer)


async def test_pages_of_other_sites_are_refused_where_there_is_no_key() -> None:
    for host in ("localhost", "127.0.0.1:8000", "[::1]:8000", "127.1.2.3"):
        check_local({"host": host, "origin": f"http://{host}"})
    linked = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    another = {"host": "localhost", "sec-fetch-site": "cross-site"}
    for headers in ({}, {"sec-fetch-site": "none"}, {**another, **linked}):
        check_local({"host": "localhost", **headers})
    hosts = ("evil.example", "localhost.evil.example", "10.0.0.1:8000", "")
    origins = (
        "https://evil.example", "null", "http://[bad", "http://localhost:1", "http://127.0.0.1",
    )  # fmt: skip
    foreign: list[dict[str, str]] = [
        {},
        *({"host": host} for host in hosts),
        *({"host": "localhost", "origin": origin} for origin in origins),
        another,
        {**another, "sec-fetch-site": "same-site"},
        {**another, **linked, "origin": "https://evil.example"},
        {**another, **linked, "sec-fetch-dest": "iframe"},
        {"host": "localhost", "referer": "https://evil.example/"},
        {"host": "localhost", "x-forwarded-for": "192.0.2.7"},
        {"host": "localhost", "forwarded": "for=192.0.2.7"},
    ]
    for headers in foreign:
        with pytest.raises(Refusal) as refused:
            check_local(headers)
        assert refused.value.code == "forbidden", headers
    ring, keys = keyring()
    headers = {"Host": "train.example", "Origin": "https://x.example", "api-key": keys[Role.READ]}
    async with client_of(app_of(FakeService(), ring), **headers) as client:
        assert (await client.get("/status")).status_code == 200


async def test_a_disconnect_cancels_sampling_and_waiting_but_no_committed_work() -> None:
    service = FakeService()
    app = app_of(service)
    sent = {
        "completions": b'{"prompt": "a"}',
        "rewards": b'{"group_id": "g-1", "rewards": [1], "wait": true}',
        "start": b"{}",
    }
    async with listening(app) as port:
        for name, body in sent.items():
            service.blocked = {name}
            service.entered.clear()
            _, writer = await begun(port, request(f"/{name}", body))
            await service.entered.wait()
            await gone(writer)
            if name != "start":
                await wait_until_async(lambda name=name: name in service.cancelled)
        await wait_until_async(
            lambda: serving_of(app).metrics.requests["POST /completions", 499] == 1
        )
        assert len(service.committed) == 1, "the rewards stand"
        service.let_go.set()
        await wait_until_async(lambda: len(service.committed) == 2)
        await wait_until_async(lambda: serving_of(app).metrics.requests["POST /start", 200] == 1)
    assert service.cancelled == ["completions", "rewards"], "a run is begun whoever listens"


async def test_a_second_request_with_the_same_key_survives_the_disconnect_of_the_first() -> None:
    service = FakeService()
    service.blocked.add("completions")
    async with (
        listening(app_of(service)) as port,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        body, named = {"prompt": "a"}, {"Idempotency-Key": "k"}
        sent = request("/completions", json.dumps(body).encode(), more="Idempotency-Key: k\r\n")
        _, writer = await begun(port, sent)
        await service.entered.wait()
        second = asyncio.create_task(client.post("/completions", json=body, headers=named))
        service.blocked.clear()
        await gone(writer)
        assert (await second).status_code == 200
    assert service.cancelled == ["completions"]
