import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest
from sqlalchemy import select

from groupwise.jobs.fleet import webhooks
from groupwise.jobs.fleet.store import events
from groupwise.jobs.fleet.store.database import Database, DatabaseFailure
from groupwise.jobs.fleet.store.tables import Event, Job
from groupwise.jobs.fleet.tracker import JobEnd, Tracker
from groupwise.jobs.fleet.webhooks import PAUSES, WebhookOutlet, is_public

HOOK = "https://hooks.example.org/path?key=1"


class World:
    """The internet: what names are, what servers answer, and what they were asked."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {"hooks.example.org": ["93.184.215.14"]}
        self.answers: list[int | Exception] = []
        self.asked: list[httpx2.Request] = []
        self.hanging: set[str] = set()
        """Hosts that never answer."""
        self.then_hangs = False
        """Whether who answers does so once."""
        self.now = 0.0

    async def resolve(self, host: str, port: int) -> list[str]:
        if host not in self.names:
            raise OSError(f"{host} is not known")
        return self.names[host]

    async def answer(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(request)
        if request.headers["Host"] in self.hanging:
            await asyncio.Event().wait()
        if self.then_hangs:
            self.hanging.add(request.headers["Host"])
        given = self.answers.pop(0) if self.answers else 200
        if isinstance(given, Exception):
            raise given
        return httpx2.Response(given, headers={"Location": "http://127.0.0.1/"})

    def outlet(self, database: Database, **more: Any) -> WebhookOutlet:
        return WebhookOutlet(
            database,
            transport=httpx2.MockTransport(self.answer),
            resolve=self.resolve,
            clock=lambda: self.now,
            **more,
        )


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def outlet(database: Database, world: World) -> AsyncIterator[WebhookOutlet]:
    database.run(lambda s: s.add(Job(job_id="a")))
    made = world.outlet(database)
    yield made
    await made.close()


def ended(webhook: str | None = HOOK, event_id: int = 5) -> JobEnd:
    return JobEnd(event_id, "a", "completed", 1.0, epoch=3, exit_code=0, webhook=webhook)


def recorded_events(database: Database) -> list[tuple[str, Any]]:
    rows = database.read(
        lambda s: s.execute(select(Event.kind, Event.detail).order_by(Event.event_id)).all()
    )
    return [(kind, detail) for kind, detail in rows]


async def test_a_webhook_posts_the_nats_message_with_an_idempotency_key(
    database: Database, world: World, outlet: WebhookOutlet
):
    assert await outlet.announce([ended()]) == {5}
    (request,) = world.asked
    assert (request.method, str(request.url)) == ("POST", "https://93.184.215.14/path?key=1")
    assert request.headers["Host"] == "hooks.example.org"
    assert request.headers["Groupwise-Event"] == "5"
    assert request.headers["Idempotency-Key"] == "groupwise-5"
    assert request.extensions["sni_hostname"] == "hooks.example.org"
    assert request.extensions["timeout"]["read"] == webhooks.ANSWER_TIMEOUT
    assert json.loads(request.content) == json.loads(ended().message())
    assert recorded_events(database) == [
        ("webhook.delivered", {"event_id": 5, "attempts": 1, "because": "HTTP 200"})
    ]


@pytest.mark.parametrize("failure", [500, 302, httpx2.ConnectError("refused")])
async def test_failed_deliveries_are_retried_with_growing_pauses_then_dropped(
    database: Database, world: World, outlet: WebhookOutlet, failure: int | Exception
):
    world.answers = [failure] * 100
    tries, settled = 0, frozenset[int]()
    for pause in (*PAUSES, 0.0):
        settled = await outlet.announce([ended()])
        tries += 1
        assert len(world.asked) == tries
        if not settled:
            assert await outlet.announce([ended()]) == frozenset(), "not before its time has come"
            assert len(world.asked) == tries
        world.now += pause
    assert settled == {5}
    assert tries == len(PAUSES) + 1
    assert recorded_events(database)[0][0] == "webhook.given_up"


async def test_a_place_that_never_answers_holds_up_no_other(
    world: World, outlet: WebhookOutlet, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(webhooks, "ROUND_SECONDS", 0.5)
    world.names["dead.example.org"] = ["93.184.215.15"]
    world.hanging = {"dead.example.org"}
    dead = [ended("https://dead.example.org/", number) for number in range(200)]
    async with asyncio.timeout(5):
        assert await outlet.announce([*dead, ended(event_id=200)]) == {200}
        assert await outlet.announce([*dead, ended(event_id=201)]) == {201}
    hosts = [request.headers["Host"] for request in world.asked]
    assert hosts.count("dead.example.org") == 1, "until it is known whether it answers"


async def test_an_end_that_could_not_be_written_down_is_not_told_twice(
    database: Database, world: World, outlet: WebhookOutlet, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as broken:
        broken.setattr(database, "in_thread", _away)
        with pytest.raises(DatabaseFailure):
            await outlet.announce([ended(), ended(event_id=6)])
    assert await outlet.announce([ended(), ended(event_id=6)]) == {5, 6}
    assert len(world.asked) == 2


async def _away(_: Any) -> Any:
    raise DatabaseFailure("the database is away")


@pytest.mark.parametrize(
    ("addresses", "names"),
    [
        (
            ["http://hooks.example.org/"],
            [
                *(["127.0.0.1"], ["93.184.215.14", "10.0.0.1"], ["169.254.169.254"], ["::1"]),
                *(["fd00::1"], ["fe80::1%eth0"], ["::ffff:127.0.0.1"], ["64:ff9b::7f00:1"]),
                *(["2002:5db8:d70e::"], ["0.0.0.0"], ["224.0.0.1"], ["fec0::1"], ["192.88.99.1"]),
                *(["168.63.129.16"], ["3fff::1"]),
            ],
        ),
        (
            [
                *("ftp://hooks.example.org/", "file:///etc/passwd", "http://"),
                *("http://hooks.example.org:99999/", "http://user:word@hooks.example.org/"),
                *("http://hooks..example.org/", f"http://{'a' * 70}/"),
                "http://hooks.example.org:0/",
            ],
            [["93.184.215.14"]],
        ),
    ],
    ids=["names", "addresses"],
)
async def test_nothing_is_sent_to_addresses_that_are_not_public(
    database: Database,
    world: World,
    outlet: WebhookOutlet,
    addresses: list[str],
    names: list[list[str]],
):
    asked = [(address, name) for address in addresses for name in names]
    for n, (address, name) in enumerate(asked):
        world.names["hooks.example.org"] = name
        assert await outlet.announce([ended(address, n)]) == {n}
        assert world.asked == [], (address, name)
    assert {kind for kind, _ in recorded_events(database)} == {"webhook.given_up"}
    assert not [said for _, said in recorded_events(database) if "10.0.0.1" in str(said)], (
        "nor where it is"
    )
    assert is_public("2606:2800:21f:cb07:6820:80da:af6b:8b2c")


async def test_settings_may_allow_private_addresses(database: Database, world: World):
    database.run(lambda s: s.add(Job(job_id="a")))
    world.names["inner"] = ["::1"]
    outlet = world.outlet(database, allow_private=True)
    assert await outlet.announce([ended("http://inner:8080/x")]) == {5}
    assert str(world.asked[0].url) == "http://[::1]:8080/x"
    assert "sni_hostname" not in world.asked[0].extensions
    await outlet.close()


async def test_a_restarted_tracker_does_not_repeat_webhook_calls(database: Database, world: World):
    def end(name: str, webhook: str | None) -> Callable[[Any], None]:
        def write(session: Any) -> None:
            session.add(Job(job_id=name, request={} if webhook is None else {"webhook": webhook}))
            session.flush()
            events.append(session, actor="d", kind="job.completed", job_id=name)

        return write

    database.run(end("slow", "https://nowhere.example.org/"))
    database.run(end("fine", HOOK))
    for _ in range(2):
        outlet = world.outlet(database)
        await Tracker(database, outlet).round()
        await outlet.close()
    assert len(world.asked) == 1
