"""The HTTP side with a service that is a fake: every route, who may ask it, and every problem that it names.

1. A route answers what its models say, flat for one and `groups` for several.
2. Every problem that the document names for a route can be got from it, and looks like the table.
3. Each role may do what it may, on every route; a route is never without a rule.
4. The document is complete, and the same each time.
5. The same Idempotency-Key is answered once, also while the first request is under way.
"""

import asyncio
import json
from typing import Any

import httpx2
import pytest
from fastapi.routing import APIRoute

from groupwise.http.declared import Route
from groupwise.server.app import ROUTES
from groupwise.server.routes import health
from groupwise.server.routes.declared import REPLAYED
from groupwise.wire.keys import Role
from groupwise.wire.problems import KINDS, MEDIA_TYPE, Refusal
from tests.unit.server.asking import app_of, client_of, keyring, serving_of, until
from tests.unit.server.fake_service import RUN, FakeService

METHODS = {
    "get_model": "open_version",
    "post_model": "open_version",
    "events": "last_event",
    "metrics": "status",
}
"""What the fake is asked by a handler of another name."""
OPEN = {"/healthz", "/readyz"}


def path_of(route: Route) -> str:
    return route.path.replace("{group_id}", "g-1")


def asks(route: Route, body: Any = None) -> dict[str, Any]:
    """The arguments of a good request."""
    given = route.example if body is None else body
    return {"method": route.method, "url": path_of(route)} | (
        {"json": given} if route.takes_body else {}
    )


def code_of(answer: httpx2.Response) -> str:
    assert answer.headers["content-type"] == MEDIA_TYPE, answer.text
    problem = answer.json()
    kind = KINDS[problem["code"]]
    assert (answer.status_code, problem["title"]) == (kind.status, kind.title)
    assert problem["instance"] == f"urn:groupwise:request:{answer.headers['x-request-id']}"
    return problem["code"]


# Answers


async def test_one_prompt_is_answered_flat_and_several_as_groups() -> None:
    async with client_of(app_of(FakeService())) as client:
        one = await client.post("/completions", json={"prompt": "a"})
        two = await client.post("/completions", json={"prompts": ["a", "b"]})
    assert one.status_code == two.status_code == 200
    assert one.json()["model_version"] == [RUN, 0]
    assert [group["prompt"] for group in two.json()["groups"]] == ["a", "b"]


@pytest.mark.parametrize(("wait", "status"), [(False, 200), (True, 202)])
async def test_a_step_that_was_waited_for_in_vain_is_202(wait: bool, status: int) -> None:
    async with client_of(app_of(FakeService())) as client:
        posted = await client.post(
            "/rewards", json={"group_id": "g-1", "rewards": [1], "wait": wait}
        )
        several = await client.post(
            "/rewards", json={"groups": [{"group_id": "g-1", "rewards": [1]}], "wait": wait}
        )
        step = await client.post("/step", json={"wait": wait})
    assert [answer.status_code for answer in (posted, several, step)] == [status] * 3
    assert posted.json()["status"] == several.json()["groups"][0]["status"] == "accepted"


async def test_stop_takes_nothing_or_an_empty_object() -> None:
    async with client_of(app_of(FakeService())) as client:
        answers = [
            await client.post("/stop"),
            await client.post("/stop", json={}),
            await client.post("/stop", json={"now": True}),
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 422]
    assert answers[2].json()["errors"][0]["field"] == "now"


async def test_the_model_comes_by_get_and_by_post() -> None:
    service = FakeService()
    async with client_of(app_of(service)) as client:
        got = await client.get("/model", params={"version": "tiny@4"})
        posted = await client.post("/model", json={"version": "tiny@4"})
        latest = await client.post("/model")
    assert [given for _, given in service.calls] == ["tiny@4", "tiny@4", None]
    assert got.headers["x-model-version"] == posted.headers["x-model-version"] == "tiny@4"
    assert got.headers["x-model-fingerprint"] == "f4"
    assert got.headers["content-disposition"] == 'attachment; filename="tiny@4.zip"'
    assert latest.status_code == 200


async def test_readiness_says_why_not() -> None:
    service = FakeService()
    app = app_of(service)
    async with client_of(app) as client:
        ready = await client.get("/readyz")
        service.not_ready = "the engine is being started"
        waiting = await client.get("/readyz")
        service.not_ready = None
        serving_of(app).ending.set()
        ending = await client.get("/readyz")
        alive = await client.get("/healthz")
    assert ready.status_code == alive.status_code == 200
    assert (waiting.status_code, waiting.json()["detail"]) == (503, "the engine is being started")
    assert (ending.status_code, ending.json()["status"]) == (503, "not_ready")


# Problems

NAMED = [(route, code) for route in ROUTES for code in sorted(route.all_codes)]


@pytest.mark.parametrize(
    ("route", "code"), NAMED, ids=[f"{route.name} {code}" for route, code in NAMED]
)
async def test_every_problem_that_a_route_names_can_be_got(
    route: Route, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = FakeService()
    ring, keys = keyring()
    needs_keys = code == "unauthorised" or (code == "forbidden" and route.role != Role.READ)
    settings = {"requests_per_second": 0.001, "burst": 1} if code == "rate_limited" else {}
    app = app_of(service, ring if needs_keys else None, max_body_bytes=1024, **settings)
    ask = asks(route)
    async with client_of(app) as client:
        if code == "rate_limited":
            await client.get("/status")
        elif code == "shutting_down":
            serving_of(app).end()
        elif code == "internal":
            _break(route, service, monkeypatch)
        elif code == "idempotency_key_reused":
            ask["headers"] = {"Idempotency-Key": "k"}
            await client.request(**ask)
            ask["json"] = _other(route)
        elif code in ("unauthorised", "forbidden", "too_large", "unsupported_media_type"):
            ask |= _outside(code, keys[Role.READ] if needs_keys else None)
        elif code == "invalid_request":
            _spoil(ask, route)
        else:
            service.fails[_method(route)] = Refusal(code, retry_after=1.5)
        answer = await client.request(**ask)
    assert code_of(answer) == code
    assert "secret-in-an-error" not in answer.text
    if isinstance(service.fails.get(_method(route)), Refusal):
        assert answer.headers["retry-after"] == "2"
        assert service.refused == ([code] if route.works else [])


def _outside(code: str, key: str | None) -> dict[str, Any]:
    """What is refused before the route is reached."""
    named = {"X-API-Key": key} if key else {}
    return {
        "unauthorised": {},
        "forbidden": {"headers": {"Host": "evil.example", **named}},
        "too_large": {"json": {"prompt": "x" * 2000}},
        "unsupported_media_type": {"headers": {"Content-Type": "text/plain"}},
    }[code]


def _break(route: Route, service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    if route.path == "/healthz":
        monkeypatch.setattr(health, "sent_model", _broken)
    elif route.path == "/readyz":
        monkeypatch.setattr(service, "ready", _broken)
    else:
        service.fails[_method(route)] = RuntimeError("secret-in-an-error")


def _broken(*_: Any) -> Any:
    raise RuntimeError("secret-in-an-error")


def _method(route: Route) -> str:
    return METHODS.get(route.handler.__name__, route.handler.__name__)


def _other(route: Route) -> Any:
    return {
        "/completions": {"prompt": "another"},
        "/start": {"max_steps": 7},
        "/rewards": {"group_id": "g-2", "rewards": [0.0]},
        "/step": {"wait": False},
        "/checkpoints": {"name": "another"},
    }[route.path]


def _spoil(ask: dict[str, Any], route: Route) -> None:
    if route.takes_body:
        ask["json"] = {"no_such_field": 1}
    elif route.path == "/events":
        ask["headers"] = {"Last-Event-ID": "-1"}
    elif route.path == "/model":
        ask["url"] = "/model?version="
    elif route.method == "DELETE":
        ask["url"] = "/completions/" + "g" * 65
    else:
        ask["url"] += "?no_such_parameter=1"


@pytest.mark.parametrize(
    ("url", "field", "said"),
    [
        ("/model?versio=tiny@4", "versio", "did you mean version?"),
        ("/model?version=4&step=4", "step", "there are: version"),
        ("/status?verbose", "verbose", "there are: none"),
    ],
)
async def test_a_query_parameter_that_is_not_known_is_refused(
    url: str, field: str, said: str
) -> None:
    service = FakeService()
    async with client_of(app_of(service)) as client:
        answer = await client.get(url)
        probe = await client.get("/healthz?from=somewhere")
    assert (answer.status_code, code_of(answer)) == (422, "invalid_request")
    assert [error["field"] for error in answer.json()["errors"]] == [field]
    assert said in answer.json()["detail"]
    assert service.calls == []
    assert probe.status_code == 200


async def test_addresses_and_methods_that_are_not_there_are_problems_too() -> None:
    async with client_of(app_of(FakeService())) as client:
        nowhere = await client.get("/nowhere")
        slash = await client.get("/status/")
        wrong = await client.put("/status")
    assert [code_of(nowhere), code_of(slash)] == ["not_found", "not_found"]
    assert code_of(wrong) == "method_not_allowed"
    assert wrong.headers["allow"] == "GET"


async def test_a_mistake_is_in_the_log_under_the_id_that_the_client_gets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = FakeService()
    service.fails["status"] = RuntimeError("what-is-wrong")
    async with client_of(app_of(service)) as client:
        answer = await client.get("/status")
    assert code_of(answer) == "internal"
    assert "what-is-wrong" not in answer.text
    (record,) = [record for record in caplog.records if record.exc_info]
    assert answer.headers["x-request-id"] in record.getMessage()
    assert "what-is-wrong" in str(record.exc_info[1])


async def test_what_a_route_answers_without_naming_it_is_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = FakeService()
    service.fails["status"] = Refusal("draw_taken")
    async with client_of(app_of(service)) as client:
        assert code_of(await client.get("/status")) == "draw_taken"
    assert "GET /status answered draw_taken, which its description lacks" in caplog.messages


# Who may ask

ROLES = {
    "POST /start": Role.ADMIN,
    "POST /stop": Role.ADMIN,
    "POST /checkpoints": Role.ADMIN,
    "POST /completions": Role.TRAIN,
    "DELETE /completions/{group_id}": Role.TRAIN,
    "POST /rewards": Role.TRAIN,
    "POST /step": Role.TRAIN,
    "GET /status": Role.READ,
    "GET /activity": Role.READ,
    "GET /events": Role.READ,
    "GET /model": Role.READ,
    "POST /model": Role.READ,
    "GET /tokenizer": Role.READ,
    "GET /checkpoints": Role.READ,
    "GET /metrics": Role.READ,
    "GET /healthz": None,
    "GET /readyz": None,
}


def test_every_route_has_its_role() -> None:
    assert {route.name: route.role for route in ROUTES} == ROLES


def test_no_address_is_answered_that_is_not_declared() -> None:
    app = app_of(FakeService())
    there = {
        f"{method} {route.path}"
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }
    assert there == {*ROLES, "GET /openapi.json"}
    assert all(isinstance(route, APIRoute) for route in app.routes)


ENDING = [route for route in ROUTES if route.path != "/events"]
"""A stream does not end in this process; its roles are tested in test_middleware.py, with a server."""


@pytest.mark.parametrize("how", ["api-key", "X-API-Key", "Authorization"])
@pytest.mark.parametrize("route", ENDING, ids=lambda route: route.name)
async def test_roles_on_every_route(route: Route, how: str) -> None:
    ring, keys = keyring()
    seen: dict[Role | None, int] = {}
    for role in (None, *Role):
        async with client_of(app_of(FakeService(), ring)) as client:
            word = "bearer " if how == "Authorization" else ""
            headers = {how: word + keys[role]} if role else {}
            seen[role] = (await client.request(**asks(route), headers=headers)).status_code
    for role, status in seen.items():
        if route.role is None:
            assert status == 200
        elif role is None:
            assert status == 401
        else:
            assert (status == 403) == (role < route.role), (role, status)
            assert status in (200, 202, 403)


async def test_a_wrong_key_is_told_nothing_and_repeated_nowhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ring, _ = keyring()
    wrong = "gw-abc-this-is-no-key"
    with caplog.at_level("DEBUG"):
        async with client_of(app_of(FakeService(), ring), **{"X-API-Key": wrong}) as client:
            answers = [await client.get("/status"), await client.get("/nowhere")]
    assert [code_of(answer) for answer in answers] == ["unauthorised"] * 2
    assert answers[0].headers["www-authenticate"] == "Bearer"
    assert wrong not in caplog.text + "".join(answer.text for answer in answers)


# The document


async def test_the_document_is_complete_and_always_the_same() -> None:
    async with client_of(app_of(FakeService())) as client:
        first = (await client.get("/openapi.json")).content
    async with client_of(app_of(FakeService())) as client:
        assert (await client.get("/openapi.json")).content == first
    document = json.loads(first)
    for route in ROUTES:
        operation = document["paths"][route.path][route.method.lower()]
        responses = operation["responses"]
        named = {
            code
            for response in responses.values()
            for code in response.get("content", {}).get(MEDIA_TYPE, {}).get("examples", {})
        }
        assert named == route.all_codes or route.path == "/readyz"
        assert operation["description"], route.name
        assert bool(operation["security"]) == (route.role is not None)
        assert ("202" in responses) == bool(route.later)
    assert "HTTPValidationError" not in document["components"]["schemas"]
    _check_references(document, document)


def _check_references(value: Any, document: Any) -> None:
    if isinstance(value, dict):
        if isinstance(target := value.get("$ref"), str):
            place = document
            for part in target.removeprefix("#/").split("/"):
                place = place[part]
        for inner in value.values():
            _check_references(inner, document)
    elif isinstance(value, list):
        for inner in value:
            _check_references(inner, document)


@pytest.mark.parametrize(
    "route", [route for route in ROUTES if route.takes_body], ids=lambda route: route.name
)
async def test_the_examples_of_the_document_are_accepted(route: Route) -> None:
    async with client_of(app_of(FakeService())) as client:
        assert (await client.request(**asks(route))).status_code in (200, 202)


# Twice

ONE = {"prompt": "a"}
NAME = {"Idempotency-Key": "once"}


async def test_the_same_key_gets_the_same_bytes_and_does_nothing_twice() -> None:
    service = FakeService()
    async with client_of(app_of(service)) as client:
        first = await client.post("/completions", json=ONE, headers=NAME)
        again = await client.post("/completions", json=ONE, headers=NAME)
        other = await client.post("/completions", json={"prompt": "b"}, headers=NAME)
    assert first.content == again.content
    assert (first.headers.get(REPLAYED), again.headers.get(REPLAYED)) == (None, "true")
    assert code_of(other) == "idempotency_key_reused"
    assert len(service.calls) == 1


async def test_whoever_comes_while_the_first_is_under_way_waits_for_its_answer() -> None:
    service = FakeService()
    service.blocked.add("completions")
    async with client_of(app_of(service)) as client:
        first = asyncio.create_task(client.post("/completions", json=ONE, headers=NAME))
        await service.entered.wait()
        second = asyncio.create_task(client.post("/completions", json=ONE, headers=NAME))
        other = await client.post("/completions", json={"prompt": "b"}, headers=NAME)
        assert code_of(other) == "idempotency_key_reused"
        assert not second.done()
        service.let_go.set()
        assert (await first).content == (await second).content
    assert len(service.calls) == 1


async def test_a_refusal_is_not_kept() -> None:
    service = FakeService()
    service.fails["completions"] = Refusal("too_busy", retry_after=1)
    async with client_of(app_of(service)) as client:
        first = await client.post("/completions", json=ONE, headers=NAME)
        del service.fails["completions"]
        again = await client.post("/completions", json=ONE, headers=NAME)
    assert (first.status_code, again.status_code) == (429, 200)


async def test_where_the_first_is_refused_the_next_in_line_does_the_work() -> None:
    service = FakeService()
    service.blocked.add("completions")
    async with client_of(app_of(service)) as client:
        first = asyncio.create_task(client.post("/completions", json=ONE, headers=NAME))
        await service.entered.wait()
        second = asyncio.create_task(client.post("/completions", json=ONE, headers=NAME))
        third = asyncio.create_task(client.post("/completions", json=ONE, headers=NAME))
        await asyncio.sleep(0)
        service.blocked.clear()
        service.shut = True  # the first one is told so when it goes on
        service.let_go.set()
        answers = [await first, await second, await third]
    assert [answer.status_code for answer in answers] == [503, 200, 200]
    assert answers[1].content == answers[2].content
    assert len(service.calls) == 2


@pytest.mark.parametrize("value", ["", "x" * 256])
async def test_a_key_that_is_none_is_refused(value: str) -> None:
    async with client_of(app_of(FakeService())) as client:
        answer = await client.post("/step", json={}, headers={"Idempotency-Key": value})
    assert code_of(answer) == "invalid_request"


# Events


async def test_streams_are_bounded_and_end_with_the_server() -> None:
    service = FakeService()
    app = app_of(service, max_event_streams=1)
    async with client_of(app) as client:
        first = asyncio.create_task(client.get("/events"))
        await until(lambda: serving_of(app).metrics.event_streams == 1)
        second = await client.get("/events")
        assert code_of(second) == "rate_limited"
        assert second.headers["retry-after"]
        service.happen("step", step=0, run_id=RUN)
        await until(lambda: service.told == 1)
        serving_of(app).ending.set()
        text = (await first).text
    assert serving_of(app).metrics.event_streams == 0
    assert "event: step\n" in text


async def test_a_stream_resumes_behind_the_last_event_that_its_client_has_had() -> None:
    service = FakeService()
    app = app_of(service)
    for step in range(3):
        service.happen("step", step=step, message="done\nwell")
    async with client_of(app) as client:
        stream = asyncio.create_task(client.get("/events", headers={"Last-Event-ID": "1"}))
        await until(lambda: serving_of(app).metrics.event_streams == 1)
        service.happen("stopped")
        await until(lambda: service.told == 4)
        serving_of(app).ending.set()
        answer = await stream
    assert answer.headers["content-type"].startswith("text/event-stream")
    ids = [line[4:] for line in answer.text.splitlines() if line.startswith("id: ")]
    data = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert ids == ["2", "3", "4"]
    assert [event["kind"] for event in data] == ["step", "step", "stopped"]
    assert data[0]["message"] == "done\nwell"
