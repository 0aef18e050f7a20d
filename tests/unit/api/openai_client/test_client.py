"""The client over a transport that answers as it is told, with a clock that only sleeping moves.

1. What may pass is asked again, with growing waits; what may not is not.
2. `Retry-After` holds, as seconds and as a date; one caller's 429 pauses all.
3. Fewer choices than asked for are filled up; a service that refuses several is asked one by one.
4. An answer that is none says what came. The key never shows.
"""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import httpx2
import pytest

from groupwise.api.openai_client.client import Client, Endpoint, checked_url
from groupwise.api.openai_client.waiting import backoff, retry_after
from groupwise.core.errors import EndpointError, UsageError
from groupwise.core.retry import Timing

KEY = "sk-secret-0123456789"
TODAY = 1_700_000_000.0
PROMPT = [{"role": "user", "content": "Two and two?"}]


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def timing(self, jitter: float = 1.0) -> Timing:
        return Timing(
            clock=lambda: self.now, today=lambda: TODAY, sleep=self.sleep, jitter=lambda: jitter
        )

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        until = self.now + seconds
        for _ in range(20):  # whoever does not wait goes first
            await asyncio.sleep(0)
        self.now = max(self.now, until)


def completion(
    *texts: str, usage: tuple[int, int] | None = (7, 3), **message: Any
) -> dict[str, Any]:
    choices = [
        {"index": i, "message": {"content": text, **message}, "finish_reason": "stop"}
        for i, text in enumerate(texts)
    ]
    billed = usage and {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return {"model": "served", "choices": choices, "usage": billed}


Reply = httpx2.Response | Exception | dict[str, Any] | int
Handler = Callable[[httpx2.Request], Reply]


class Service:
    """Gives the replies in their order, the last one for ever, and keeps what it was asked."""

    def __init__(self, *replies: Reply | Handler) -> None:
        self.replies = list(replies)
        self.asked: list[dict[str, Any]] = []
        self.requests: list[httpx2.Request] = []

    async def answer(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        self.asked.append(json.loads(request.content or b"{}"))
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if callable(reply) and not isinstance(reply, httpx2.Response):
            reply = reply(request)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, dict):
            return httpx2.Response(200, json=reply)
        return httpx2.Response(reply) if isinstance(reply, int) else reply


def client(
    service: Service, clock: Clock | None = None, *, concurrency: int = 16, retries: int = 8
) -> Client:
    return Client(
        Endpoint("http://host:1/v1", "m", api_key_env="TEST_KEY", retries=retries),
        concurrency=concurrency,
        timing=(clock or Clock()).timing(),
        transport=httpx2.MockTransport(service.answer),
    )


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)


async def test_chat_sends_what_is_given_and_reads_every_field() -> None:
    service = Service(
        completion("four", "5", reasoning_content="hm"),
        {"choices": [{"text": " four", "finish_reason": "length"}]},
        {"data": [{"id": "a"}, {"id": "b"}]},
    )
    given: dict[str, Any] = {"n": 2, "temperature": 0.5, "max_tokens": 9, "seed": 3, "stop": ["\n"]}
    async with client(service) as asking:
        answer = await asking.chat(PROMPT, **given, extra={"min_p": 0.1})
        text = await asking.complete("Two and two:")
        assert await asking.models() == ("a", "b")
    assert service.asked[:2] == [
        {"model": "m", "messages": PROMPT, **given, "min_p": 0.1},
        {"model": "m", "prompt": "Two and two:"},
    ]
    assert str(service.requests[0].url) == "http://host:1/v1/chat/completions"
    assert service.requests[0].headers["Authorization"] == f"Bearer {KEY}"
    assert (answer.texts, answer.finish_reasons) == (("four", "5"), ("stop", "stop"))
    assert (answer.reasoning, answer.model) == (("hm", "hm"), "served")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 3)
    assert (text.texts, text.finish_reasons, text.model) == ((" four",), ("length",), "m")
    assert text.usage.prompt_tokens is None


async def test_one_limit_pauses_all_callers_and_no_more_are_under_way_than_allowed() -> None:
    clock, times, most = Clock(), list[float](), 0
    under_way = 0

    async def timed(request: httpx2.Request) -> httpx2.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        times.append(clock.now)
        first = len(times) == 1
        for _ in range(5):
            await asyncio.sleep(0)
        under_way -= 1
        limited = httpx2.Response(429, headers={"Retry-After": "30"})
        return limited if first else httpx2.Response(200, json=completion("x"))

    transport, timing = httpx2.MockTransport(timed), clock.timing()
    for at_once in (1, 3):
        times, most = [], 0
        asking = Client(
            Endpoint("http://h", "m"), concurrency=at_once, timing=timing, transport=transport
        )
        async with asking:
            await asyncio.gather(*(asking.chat(PROMPT) for _ in range(12)))
        assert (len(times), most) == (13, at_once)
        assert min(times[at_once:]) >= times[0] + 30


async def test_the_key_shows_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    refused = httpx2.Response(401, json={"error": {"message": f"Wrong key {KEY}."}})
    async with client(Service(refused)) as asking:
        with pytest.raises(EndpointError, match=r"Wrong key ….*\n.*TEST_KEY holds") as caught:
            await asking.chat(PROMPT)
    shown = [str(caught.value), repr(asking.endpoint), caplog.text]
    assert not [text for text in shown if KEY in text]
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.status) == (str(caught.value), 401)


async def failed(service: Service, said: str, **given: Any) -> EndpointError:
    """That a request fails with these words."""
    async with client(service, **given) as asking:
        with pytest.raises(EndpointError, match=said) as caught:
            await asking.chat(PROMPT)
    return caught.value


@pytest.mark.parametrize(
    "failure", [408, 409, 425, 500, 502, 504, httpx2.ConnectError("no"), httpx2.ReadError("cut")]
)
async def test_temporary_failures_are_retried(failure: Reply) -> None:
    service, clock = Service(failure, failure, completion("x")), Clock()
    async with client(service, clock) as asking:
        assert (await asking.chat(PROMPT)).texts == ("x",)
    assert clock.slept == [1.0, 2.0]
    assert len(service.asked) == 3


@pytest.mark.parametrize(
    ("said", "replies"),
    [
        *(
            (f"status {status}: never", [httpx2.Response(status, json={"error": {"message": "never", "code": None}})])
            for status in (400, 401, 403, 404, 413, 422, 501)
        ),
        (r"tomorrow .* 86,400 s", [httpx2.Response(429, headers={"Retry-After": "86400"}, text="tomorrow")]),
        (r"moved to https://host/v1.*base URL", [httpx2.Response(301, headers={"Location": "https://host/v1/chat/completions"})]),
        ("pay", [httpx2.Response(429, json={"error": {"message": "pay", "code": "insufficient_quota"}})]),
        (r"status 503: full \(3 times\)", [httpx2.Response(503, text="full")] * 3),
        ("status 404: no such model",  # a gateway hands both on
         [{"error": {"message": "slow down", "code": 429}}, {"error": {"message": "no such model", "code": 404}}]),
    ],
)  # fmt: skip
async def test_permanent_failures_are_not_retried(said: str, replies: list[Reply]) -> None:
    service = Service(*replies)
    error = await failed(service, said, retries=2)
    assert len(service.asked) == len(replies)
    assert error.status is None or str(error.status) in said or "status" not in said


async def test_an_attempt_has_its_time_and_without_a_key_none_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TEST_KEY")
    asked: list[httpx2.Request] = []

    async def never(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        await asyncio.Event().wait()
        raise AssertionError

    endpoint = Endpoint("http://host:1", "m", api_key_env="TEST_KEY", timeout=0.01, retries=1)
    transport = httpx2.MockTransport(never)
    async with Client(endpoint, timing=Clock().timing(), transport=transport) as asking:
        with pytest.raises(EndpointError, match=r"no answer in 0.01 s \(2 times\)"):
            await asking.chat(PROMPT)
    assert "Authorization" not in asked[0].headers


async def test_retry_after_holds() -> None:
    for header in ("30", "30.0", formatdate(TODAY + 30, usegmt=True)):
        limited = httpx2.Response(429, headers={"Retry-After": header})
        service, clock = Service(limited, completion("x")), Clock()
        async with client(service, clock) as asking:
            await asking.chat(PROMPT)
        assert clock.slept == [33.0]  # and a tenth of it by the jitter, which is 1 here
    for none in (None, "soon", "nan", "inf", "Tue, 99 Foo"):
        assert retry_after(none, TODAY) is None
    assert retry_after(formatdate(TODAY - 9, usegmt=True), TODAY) == 0.0
    waits = backoff(Clock().timing())
    assert [waits.next() for _ in range(8)] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


async def test_missing_choices_are_asked_for_with_seeds_that_count_on() -> None:
    service = Service(completion("a", "b"), completion("c"), completion("d", "e"))
    async with client(service) as asking:
        answer = await asking.chat(PROMPT, n=4, seed=10)
        assert answer.texts == ("a", "b", "c", "d")
        seeds = [(asked.get("n"), asked["seed"]) for asked in service.asked]
        assert seeds == [(4, 10), (2, 12), (None, 13)]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (21, 9)
        assert (await asking.chat(PROMPT, n=4, or_fewer=True)).texts == ("d", "e")
    assert len(service.asked) == 4


async def test_a_service_that_refuses_several_is_asked_one_by_one() -> None:
    service = Service(lambda request: 400 if b'"n"' in request.content else completion("x"))
    async with client(service) as asking:
        assert (await asking.chat(PROMPT, n=3)).texts == ("x", "x", "x")
        assert (await asking.chat(PROMPT, n=2)).texts == ("x", "x")
    assert [asked.get("n") for asked in service.asked] == [3, None, None, None, None, None]


async def test_answers_of_other_forms() -> None:
    body = completion("a", "b", "c")
    body["choices"].reverse()
    async with client(Service(body)) as asking:
        assert (await asking.chat(PROMPT, n=3)).texts == ("a", "b", "c")
    parts = [{"type": "thinking"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    contents: list[tuple[Any, str]] = [(None, ""), (parts, "ab"), ("half \ud83d", "half \\ud83d")]
    for content, text in contents:
        body = {"choices": [{"message": {"content": content}}]}
        reply = httpx2.Response(200, content=json.dumps(body).encode())
        async with client(Service(reply)) as asking:
            answer = await asking.chat(PROMPT)
        assert (answer.texts, answer.finish_reasons) == ((text,), (None,))


def test_urls_and_keys_are_checked_without_showing_what_is_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meant = {
        "http://h:8000": "http://h:8000/v1", "http://h:8000/": "http://h:8000/v1", "https://h/v1/": "https://h/v1",
        "https://h/openai/v2": "https://h/openai/v2", "https://h/v1/chat/completions": "https://h/v1",
    }  # fmt: skip
    assert {given: checked_url(given) for given in meant} == meant
    secret = ("http://u:pass-word@h/v1", "http://h/v1?k=pass-word")
    for given in ("", "host:8000", "ftp://h/v1", "http://", *secret):
        with pytest.raises(UsageError) as caught:
            Endpoint(given, "m")
        assert "pass-word" not in str(caught.value)
    for key in ("two words", "line\nend", "ключ"):
        monkeypatch.setenv("TEST_KEY", key)
        with pytest.raises(UsageError, match="TEST_KEY") as caught:
            client(Service(200))
        assert key not in str(caught.value)
