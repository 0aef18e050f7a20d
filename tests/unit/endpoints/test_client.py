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

from groupwise.endpoints.client import Client, Endpoint, checked_url
from groupwise.endpoints.waiting import Timing, retry_after, wait_after
from groupwise.errors import EndpointError, UsageError

KEY = "sk-secret-0123456789"
TODAY = 1_700_000_000.0
ASKED = [{"role": "user", "content": "Two and two?"}]


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def timing(self, chance: float = 1.0) -> Timing:
        return Timing(
            clock=lambda: self.now, today=lambda: TODAY, sleep=self.sleep, chance=lambda: chance
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
    service = Service(completion("four", "5", reasoning_content="hm"))
    async with client(service) as asking:
        answer = await asking.chat(
            ASKED, n=2, temperature=0.5, max_tokens=9, seed=3, stop=["\n"], extra={"min_p": 0.1}
        )
    assert service.asked == [
        {
            "model": "m",
            "messages": ASKED,
            "n": 2,
            "temperature": 0.5,
            "max_tokens": 9,
            "seed": 3,
            "stop": ["\n"],
            "min_p": 0.1,
        }
    ]
    assert str(service.requests[0].url) == "http://host:1/v1/chat/completions"
    assert service.requests[0].headers["Authorization"] == f"Bearer {KEY}"
    assert answer.texts == ("four", "5")
    assert answer.finish_reasons == ("stop", "stop")
    assert answer.reasoning == ("hm", "hm")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 3)
    assert answer.model == "served"


async def test_a_text_is_completed_and_models_are_listed() -> None:
    service = Service({"choices": [{"text": " four", "finish_reason": "length"}]})
    async with client(service) as asking:
        answer = await asking.complete("Two and two:")
    assert service.asked == [{"model": "m", "prompt": "Two and two:"}]
    assert (answer.texts, answer.finish_reasons, answer.model) == ((" four",), ("length",), "m")
    assert answer.usage.prompt_tokens is None
    async with client(Service({"data": [{"id": "a"}, {"id": "b"}]})) as asking:
        assert await asking.models() == ("a", "b")


async def test_without_a_key_none_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_KEY")
    service = Service(completion("x"))
    async with client(service) as asking:
        await asking.chat(ASKED)
    assert "Authorization" not in service.requests[0].headers


@pytest.mark.parametrize(
    "failure", [408, 409, 425, 500, 502, 504, httpx2.ConnectError("no"), httpx2.ReadError("cut")]
)
async def test_what_may_pass_is_asked_again(failure: Reply) -> None:
    service, clock = Service(failure, failure, completion("x")), Clock()
    async with client(service, clock) as asking:
        assert (await asking.chat(ASKED)).texts == ("x",)
    assert clock.slept == [1.0, 2.0]
    assert len(service.asked) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 501])
async def test_what_may_not_pass_is_not_asked_again(status: int) -> None:
    service = Service(httpx2.Response(status, json={"error": {"message": "never", "code": None}}))
    async with client(service) as asking:
        with pytest.raises(EndpointError, match=f"status {status}: never") as caught:
            await asking.chat(ASKED)
    assert caught.value.status == status
    assert len(service.asked) == 1


async def test_retries_end_and_say_how_often() -> None:
    clock, service = Clock(), Service(httpx2.Response(503, text="full"))
    async with client(service, clock, retries=2) as asking:
        with pytest.raises(EndpointError, match=r"status 503: full \(3 times\)"):
            await asking.chat(ASKED)
    assert len(service.asked) == 3


async def test_an_attempt_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(request: httpx2.Request) -> httpx2.Response:
        await asyncio.Event().wait()
        raise AssertionError

    endpoint = Endpoint("http://host:1", "m", timeout=0.01, retries=1)
    transport = httpx2.MockTransport(never)
    async with Client(endpoint, timing=Clock().timing(), transport=transport) as asking:
        with pytest.raises(EndpointError, match=r"no answer in 0.01 s \(2 times\)"):
            await asking.chat(ASKED)


@pytest.mark.parametrize(
    "header", ["30", "30.0", formatdate(TODAY + 30, usegmt=True)], ids=["int", "float", "date"]
)
async def test_retry_after_holds(header: str) -> None:
    limited = httpx2.Response(429, headers={"Retry-After": header})
    service, clock = Service(limited, completion("x")), Clock()
    async with client(service, clock) as asking:
        await asking.chat(ASKED)
    assert clock.slept == [33.0]  # and a tenth of it by chance, which is 1 here


async def test_a_wait_that_is_too_long_is_an_error_at_once() -> None:
    service = Service(httpx2.Response(429, headers={"Retry-After": "86400"}, text="tomorrow"))
    async with client(service) as asking:
        with pytest.raises(EndpointError, match=r"tomorrow .* 86,400 s"):
            await asking.chat(ASKED)
    assert len(service.asked) == 1


async def test_no_waiting_mends_an_empty_account() -> None:
    empty = {"error": {"message": "pay", "code": "insufficient_quota"}}
    service = Service(httpx2.Response(429, json=empty))
    async with client(service) as asking:
        with pytest.raises(EndpointError, match="pay"):
            await asking.chat(ASKED)
    assert len(service.asked) == 1


async def test_one_limit_pauses_all_callers() -> None:
    clock, times = Clock(), list[float]()

    def timed(request: httpx2.Request) -> Reply:
        times.append(clock.now)
        limited = httpx2.Response(429, headers={"Retry-After": "30"})
        return limited if len(times) == 1 else completion("x")

    async with client(Service(timed), clock, concurrency=1) as asking:
        await asyncio.gather(*(asking.chat(ASKED) for _ in range(5)))
    assert times[0] == 100.0
    assert min(times[1:]) >= 130.0
    assert len(times) == 6


async def test_no_more_are_under_way_than_allowed() -> None:
    under_way, most = 0, 0

    async def slow(request: httpx2.Request) -> httpx2.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        for _ in range(5):
            await asyncio.sleep(0)
        under_way -= 1
        return httpx2.Response(200, json=completion("x"))

    transport = httpx2.MockTransport(slow)
    async with Client(Endpoint("http://h", "m"), concurrency=3, transport=transport) as asking:
        await asyncio.gather(*(asking.chat(ASKED) for _ in range(12)))
    assert most == 3


async def test_missing_choices_are_asked_for_with_seeds_that_count_on() -> None:
    service = Service(completion("a", "b"), completion("c"), completion("d", "e"))
    async with client(service) as asking:
        answer = await asking.chat(ASKED, n=4, seed=10)
    assert answer.texts == ("a", "b", "c", "d")
    assert [(asked.get("n"), asked["seed"]) for asked in service.asked] == [
        (4, 10), (2, 12), (None, 13),
    ]  # fmt: skip
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (21, 9)


async def test_fewer_choices_are_returned_to_those_who_take_them() -> None:
    service = Service(completion("a"))
    async with client(service) as asking:
        assert (await asking.chat(ASKED, n=4, or_fewer=True)).texts == ("a",)
    assert len(service.asked) == 1


async def test_a_service_that_refuses_several_is_asked_one_by_one() -> None:
    service = Service(lambda request: 400 if b'"n"' in request.content else completion("x"))
    async with client(service) as asking:
        assert (await asking.chat(ASKED, n=3)).texts == ("x", "x", "x")
        assert (await asking.chat(ASKED, n=2)).texts == ("x", "x")
    assert [asked.get("n") for asked in service.asked] == [3, None, None, None, None, None]


async def test_choices_stand_in_the_order_of_their_index() -> None:
    body = completion("a", "b", "c")
    body["choices"].reverse()
    async with client(Service(body)) as asking:
        assert (await asking.chat(ASKED, n=3)).texts == ("a", "b", "c")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        (
            [{"type": "thinking"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "ab",
        ),
        ("half \ud83d", "half \\ud83d"),
    ],
)
async def test_content_of_other_forms(content: Any, text: str) -> None:
    body = {"choices": [{"message": {"content": content}}]}
    reply = httpx2.Response(200, content=json.dumps(body).encode())
    async with client(Service(reply)) as asking:
        answer = await asking.chat(ASKED)
    assert (answer.texts, answer.finish_reasons) == ((text,), (None,))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "an empty body"),
        (b'{"choices": [{"mess', r'no JSON, but \{"choices": \[\{"mess'),
        (b"<html>Sorry</html>", "<html>Sorry</html>"),
        (b"[1]", "no JSON object"),
        (b'{"choices": []}', "without choices"),
        (b'{"choices": [{}]}', "without message or text"),
        (b'{"choices": [{"message": {"content": 5}}]}', "no text"),
        (b"x" * 1000, r"x… \(1000 bytes\)"),
    ],
)
async def test_what_is_no_answer_is_shown(body: bytes, said: str) -> None:
    service = Service(httpx2.Response(200, content=body))
    async with client(service) as asking:
        with pytest.raises(EndpointError, match=said) as caught:
            await asking.chat(ASKED)
    assert str(caught.value).startswith("POST http://host:1/v1/chat/completions: ")
    assert caught.value.status is None
    assert len(service.asked) == 1


async def test_a_failure_that_a_gateway_hands_on_is_one() -> None:
    limited: Reply = {"error": {"message": "slow down", "code": 429}}
    unknown: Reply = {"error": {"message": "no such model", "code": 404}}
    service = Service(limited, completion("x"))
    async with client(service) as asking:
        assert (await asking.chat(ASKED)).texts == ("x",)
        service.replies[:] = [unknown]
        with pytest.raises(EndpointError, match="status 404: no such model"):
            await asking.chat(ASKED)
    assert len(service.asked) == 3


async def test_a_service_that_has_moved_says_where() -> None:
    moved = httpx2.Response(301, headers={"Location": "https://host/v1/chat/completions"})
    async with client(Service(moved)) as asking:
        with pytest.raises(EndpointError, match=r"moved to https://host/v1.*base URL"):
            await asking.chat(ASKED)


async def test_the_key_shows_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    refused = httpx2.Response(401, json={"error": {"message": f"Wrong key {KEY}."}})
    async with client(Service(refused)) as asking:
        with pytest.raises(EndpointError, match=r"Wrong key ….*\n.*TEST_KEY holds") as caught:
            await asking.chat(ASKED)
    shown = [str(caught.value), repr(asking.endpoint), caplog.text]
    assert not [text for text in shown if KEY in text]
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.status) == (str(caught.value), 401)


@pytest.mark.parametrize("key", ["two words", "line\nend", "ключ"])
def test_what_is_no_key_is_not_shown(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("TEST_KEY", key)
    with pytest.raises(UsageError, match="TEST_KEY holds something that is no key") as caught:
        client(Service(200))
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("http://h:8000", "http://h:8000/v1"),
        ("http://h:8000/", "http://h:8000/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("https://h/openai/v2", "https://h/openai/v2"),
        ("https://h/v1/chat/completions", "https://h/v1"),
    ],
)
def test_base_urls(given: str, meant: str) -> None:
    assert checked_url(given) == meant


@pytest.mark.parametrize(
    "given",
    [
        "",
        "host:8000",
        "ftp://h/v1",
        "http://",
        "http://u:pass-word@h/v1",
        "http://h/v1?k=pass-word",
    ],
)
def test_what_is_no_base_url_is_refused_without_showing_a_password(given: str) -> None:
    with pytest.raises(UsageError) as caught:
        Endpoint(given, "m")
    assert "pass-word" not in str(caught.value)


def test_waits_grow_to_a_limit_and_have_chance_in_them() -> None:
    assert [wait_after(n, 1.0) for n in (0, 1, 2, 5, 6, 99)] == [1.0, 2.0, 4.0, 32.0, 60.0, 60.0]
    assert wait_after(3, 0.0) == 4.0


@pytest.mark.parametrize("header", [None, "soon", "nan", "inf", "Tue, 99 Foo"])
def test_what_is_no_retry_after_counts_for_nothing(header: str | None) -> None:
    assert retry_after(header, TODAY) is None


def test_a_date_in_the_past_asks_for_no_wait() -> None:
    assert retry_after(formatdate(TODAY - 9, usegmt=True), TODAY) == 0.0
