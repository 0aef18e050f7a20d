"""What every request goes through: limits, keys without names, foreign pages, clients that go away; the last with a real server."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import pytest

from groupwise.http import bodies
from groupwise.http.logs import ForPrograms, configure
from groupwise.http.middleware import Buckets, check_local
from groupwise.wire.keys import Role
from groupwise.wire.problems import Refusal
from tests.unit.server.asking import app_of, client_of, keyring, listening, serving_of, until
from tests.unit.server.fake_service import FakeService

# Limits


async def test_a_body_that_says_its_size_is_refused_before_it_is_read() -> None:
    app = app_of(FakeService(), max_body_bytes=1024)
    async with listening(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n"
        )
        assert b" 413 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


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


async def test_a_body_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.05)
    async with listening(app_of(FakeService())) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /step HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"
        )
        assert b" 504 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_a_body_that_is_half_here_when_the_server_ends_is_refused() -> None:
    app = app_of(FakeService())
    async with listening(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /step HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"
        )
        await until(lambda: serving_of(app).bodies.coming)
        serving_of(app).end()
        assert b" 503 " in await reader.readline()
        await reader.readuntil(b"shutting_down")  # the connection is kept for another request
        writer.close()
        await writer.wait_closed()


def test_a_bucket_gives_a_burst_and_then_so_many_a_second() -> None:
    now = 0.0
    buckets = Buckets(2.0, 3, lambda: now)
    assert [buckets.take("a") for _ in range(3)] == [0, 0, 0]
    assert buckets.take("a") == 0.5
    assert buckets.take("b") == 0
    now = 0.5
    assert [buckets.take("a"), buckets.take("a")] == [0, 0.5]
    now = 1000.0
    assert [buckets.take("a") for _ in range(4)] == [0, 0, 0, 0.5]


async def test_each_key_has_a_bucket_of_its_own_and_health_has_none() -> None:
    ring, keys = keyring()
    app = app_of(FakeService(), ring, requests_per_second=0.001, burst=1)
    async with client_of(app) as client:
        for role in Role:
            headers = {"X-API-Key": keys[role]}
            statuses = [(await client.get("/status", headers=headers)).status_code for _ in "ab"]
            assert statuses == [200, 429]
        assert (await client.get("/healthz")).status_code == 200


# Pages of other sites


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "127.1.2.3"])
def test_this_machine_by_name(host: str) -> None:
    check_local({"host": host, "origin": f"http://{host}"})


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "localhost.evil.example"},
        {"host": "10.0.0.1:8000"},
        {"host": ""},
        {},
        {"host": "localhost", "origin": "https://evil.example"},
        {"host": "localhost", "origin": "null"},
        {"host": "localhost", "origin": "http://[bad"},
        {"host": "localhost", "x-forwarded-for": "192.0.2.7"},
        {"host": "localhost", "forwarded": "for=192.0.2.7"},
    ],
)
def test_other_hosts_and_origins_are_refused_where_there_is_no_key(headers: dict[str, str]) -> None:
    with pytest.raises(Refusal) as refused:
        check_local(headers)
    assert refused.value.code == "forbidden"


async def test_with_a_key_any_host_is_right() -> None:
    ring, keys = keyring()
    headers = {"Host": "train.example", "Origin": "https://x.example", "api-key": keys[Role.READ]}
    async with client_of(app_of(FakeService(), ring), **headers) as client:
        assert (await client.get("/status")).status_code == 200


# The log and the numbers


async def test_a_line_for_each_request_without_bodies_and_keys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ring, keys = keyring()
    headers = {"api-key": keys[Role.TRAIN], "X-Request-ID": "mine-1"}
    with caplog.at_level(logging.INFO, "groupwise.http.access"):
        async with client_of(app_of(FakeService(), ring), **headers) as client:
            answer = await client.post("/completions?q=hidden", json={"prompt": "secret-prompt"})
            await client.get("/no%0Awhere")
    assert answer.headers["x-request-id"] == "mine-1"
    ours = [record for record in caplog.records if record.name == "groupwise.http.access"]
    first, second = (json.loads(ForPrograms().format(record)) for record in ours)
    expected = {"request_id": "mine-1", "method": "POST", "path": "/completions", "status": 422}
    assert first.items() >= expected.items()
    assert first["key"] == ring.caller(keys[Role.TRAIN]).id
    assert (second["status"], second["code"]) == (404, "not_found")
    assert "\n" not in second["message"]
    for hidden in (*keys.values(), "secret-prompt", "hidden"):
        assert hidden not in caplog.text


async def test_an_id_that_could_spoil_the_log_is_not_taken() -> None:
    async with client_of(app_of(FakeService())) as client:
        answer = await client.get("/status", headers={"X-Request-ID": "a b\tc"})
    assert answer.headers["x-request-id"] != "a b\tc"


@pytest.mark.parametrize("kind", ["text", "json"])
def test_log_lines(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    handler = configure(kind)
    try:
        logging.getLogger("groupwise.server").info("hello", extra={"facts": {"step": 3}})
    finally:
        logging.getLogger().removeHandler(handler)
    line = capsys.readouterr().err.strip()
    assert json.loads(line)["step"] == 3 if kind == "json" else line.endswith("INFO hello")


async def test_metrics_count_what_was_asked() -> None:
    service = FakeService()
    async with client_of(app_of(service)) as client:
        await client.get("/status")
        await client.get("/status")
        service.fails["completions"] = Refusal("too_busy")
        await client.post("/completions", json={"prompt": "a"})
        text = (await client.get("/metrics")).text
    assert 'groupwise_http_requests_total{route="GET /status",status="200"} 2' in text
    assert 'groupwise_refusals_total{code="too_busy"} 1' in text
    assert 'groupwise_http_request_seconds_count{route="GET /status"} 2' in text


# Clients that go away

COMPLETE = b'{"prompt": "a"}'
REWARD = b'{"group_id": "g-1", "rewards": [1], "wait": true}'


def request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def ask_and_go(port: int, service: FakeService, path: str, body: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request(path, body))
    await service.entered.wait()
    writer.close()
    await writer.wait_closed()


async def test_sampling_ends_with_the_client_that_asked() -> None:
    service = FakeService()
    service.blocked.add("completions")
    app = app_of(service)
    async with listening(app) as port:
        await ask_and_go(port, service, "/completions", COMPLETE)
        await until(lambda: service.cancelled == ["completions"])
        await until(lambda: serving_of(app).metrics.requests["POST /completions", 499] == 1)


async def test_a_wait_ends_with_its_client_and_what_was_committed_stands() -> None:
    service = FakeService()
    service.blocked.add("rewards")
    async with listening(app_of(service)) as port:
        await ask_and_go(port, service, "/rewards", REWARD)
        await until(lambda: service.cancelled == ["rewards"])
    assert len(service.committed) == 1


async def test_a_run_is_begun_whoever_listens() -> None:
    service = FakeService()
    service.blocked.add("start")
    app = app_of(service)
    async with listening(app) as port:
        await ask_and_go(port, service, "/start", b"{}")
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/healthz")).status_code == 200
        assert not service.cancelled
        service.let_go.set()
        await until(lambda: len(service.committed) == 1)
        await until(lambda: serving_of(app).metrics.requests["POST /start", 200] == 1)
    assert not service.cancelled


async def test_whoever_waits_for_the_same_answer_goes_on_when_the_first_client_has_gone() -> None:
    service = FakeService()
    service.blocked.add("completions")
    named = {"Idempotency-Key": "k"}
    async with listening(app_of(service)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        first = request("/completions", COMPLETE).replace(
            b"\r\n\r\n", b"\r\nIdempotency-Key: k\r\n\r\n"
        )
        writer.write(first)
        await service.entered.wait()
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            second = asyncio.create_task(
                client.post("/completions", json={"prompt": "a"}, headers=named)
            )
            service.blocked.clear()
            writer.close()
            await writer.wait_closed()
            assert (await second).status_code == 200
    assert service.cancelled == ["completions"]


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
            await until(lambda: serving_of(app).metrics.event_streams == 0)
