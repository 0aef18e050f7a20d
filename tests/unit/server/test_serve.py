"""The whole server as a process: its output, how it ends, and when it may not start."""

import asyncio
import gzip
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from groupwise.api.http.route import Route
from groupwise.api.schemas.keys import Role
from groupwise.api.schemas.problems import KINDS, MEDIA_TYPE, Refusal
from groupwise.core.errors import UsageError
from groupwise.runs.lock import RunLock
from groupwise.server.routes import health
from groupwise.server.serve import ROUTES, serve
from groupwise.server.settings import ServerConfig
from tests.processes import wait_until_async
from tests.unit.server.fake_service import RUN, FakeService
from tests.unit.server.http_client import app_of, client_of, keyring, serving_of
from tests.unit.server.run_server import main

ROOT = Path(__file__).resolve().parents[3]
METHODS = {
    "get_model": "open_version", "post_model": "open_version", "events": "last_event", "metrics": "status",
}  # fmt: skip
"""What the fake is asked by a handler of another name."""


@dataclass
class Process:
    popen: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list[str])
    more: threading.Condition = field(default_factory=threading.Condition)
    ended: bool = False

    def read(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            with self.more:
                self.lines.append(line)
                self.more.notify_all()
        with self.more:
            self.ended = True
            self.more.notify_all()

    def wait_for_output(self, pattern: str) -> str:
        """Wait for a line with it."""

        def search() -> "re.Match[str] | None":
            return re.search(pattern, "".join(self.lines))

        with self.more:
            self.more.wait_for(lambda: search() or self.ended, timeout=30)
            match = search()
        assert match, "".join(self.lines)
        return match[0]

    @property
    def address(self) -> str:
        return self.wait_for_output(r"https?://127.0.0.1:\d+")


@contextmanager
def server(folder: Path, *more: str, **settings: str) -> Generator[Process]:
    environment = {f"GROUPWISE_SERVE_{name.upper()}": value for name, value in settings.items()}
    words = [sys.executable, "-m", "tests.unit.server.run_server", str(folder), *more]
    popen = subprocess.Popen(
        words, cwd=ROOT, env=os.environ | environment, stderr=subprocess.PIPE, text=True
    )
    process = Process(popen)
    reader = threading.Thread(target=process.read)
    reader.start()
    try:
        yield process
    finally:
        popen.kill()
        popen.wait()
        reader.join()
        assert popen.stderr is not None
        popen.stderr.close()


def test_a_server_that_shuts_down_takes_no_work_and_a_second_signal_ends_it_at_once(
    tmp_path: Path,
) -> None:
    with server(tmp_path, "slow") as process, httpx2.Client(base_url=process.address) as client:
        process.popen.send_signal(signal.SIGINT)
        process.wait_for_output("shutting down")
        assert client.get("/readyz").status_code == 503
        assert client.get("/status").status_code == 200
        assert client.post("/start", json={}).json()["code"] == "shutting_down"
        process.popen.send_signal(signal.SIGINT)
        assert process.popen.wait(30) == -signal.SIGINT


def test_it_ends_cleanly_with_a_request_that_waits_and_a_stream_that_is_open(
    tmp_path: Path,
) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("model_id: tiny\nmax_steps: 3\n")
    with (
        server(tmp_path / "out", str(settings)) as process,
        httpx2.Client(base_url=process.address) as client,
    ):
        process.wait_for_output("no key is needed")
        process.wait_for_output("next: curl -X POST http://.*/completions")
        process.wait_for_output("run tiny is ready, started by --start-with")
        client.get("/status")
        client.get("/nowhere")
        process.wait_for_output("GET /nowhere 404 not_found")
        assert not any("GET /status" in line for line in process.lines)
        waited: list[httpx2.Response] = []

        def wait() -> None:
            with httpx2.Client(base_url=process.address, timeout=30) as other:
                waited.append(other.post("/completions", json={"prompt": "a"}))

        waiting = threading.Thread(target=wait)
        with client.stream("GET", "/events", headers={"Last-Event-ID": "0"}) as stream:
            lines = stream.iter_lines()
            assert "event: started" in lines
            waiting.start()
            assert "event: warning" in lines  # the request is there
            process.popen.send_signal(signal.SIGTERM)
            for _ in lines:  # it ends, and so does this
                pass
        waiting.join(30)
        assert process.popen.wait(30) == 0
        assert waited[0].json()["code"] == "shutting_down"
        process.wait_for_output("shutting down; a second signal ends the process at once")


def test_a_server_with_an_active_run_proposes_no_start(tmp_path: Path) -> None:
    with server(tmp_path, "continues") as process:
        process.wait_for_output("next: curl http://.*/status\n")


def test_a_run_that_cannot_be_begun_ends_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings.yaml").write_text("run_name: bad\n")
    assert main(str(tmp_path / "out"), str(tmp_path / "settings.yaml")) == 2
    assert "was refused: for a reason" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("openssl") is None, reason="nothing here makes certificates")
def test_tls_by_files_logs_in_json_and_a_run_that_is_active_already(tmp_path: Path) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    usages = ("subjectAltName=IP:127.0.0.1", "keyUsage=digitalSignature,keyCertSign")
    more = [word for usage in usages for word in ("-addext", usage)]
    words = [*make.split(), *more, "-keyout", key, "-out", certificate]
    subprocess.run(words, check=True, capture_output=True)
    trusting = ssl.create_default_context(cafile=str(certificate))
    files = {"tls_certificate": str(certificate), "tls_key": str(key)}
    (tmp_path / "settings.yaml").write_text("run_name: active\n")
    more = str(tmp_path / "settings.yaml")
    with server(tmp_path / "out", more, **files, log_format="json") as process:
        process.wait_for_output("--start-with has nothing to do")
        assert process.address.startswith("https://")
        with httpx2.Client(base_url=process.address, verify=trusting) as client:
            assert client.get("/status").status_code == 200
            line = json.loads(process.wait_for_output(r'\{.*"path": "/status".*\}'))
            assert (line["status"], line["key"]) == (200, "local")
            process.popen.terminate()  # the client keeps its connection and reads nothing
            assert process.popen.wait(timeout=25) == 0


def test_bad_certificate_used_folder_or_used_port_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("no certificate")
    for name in ("c.pem", "none.pem"):
        path = str(tmp_path / name)
        config = ServerConfig(output_dir=str(tmp_path / "out"), tls_certificate=path, tls_key=path)
        with pytest.raises(UsageError, match="PEM"):
            serve(config, None)
    assert not (tmp_path / "out").exists()
    held = RunLock.acquire(tmp_path)
    with pytest.raises(UsageError, match=r"served already by process \d+"):
        serve(ServerConfig(output_dir=str(tmp_path), port=0), None)
    held.release()
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}.*--port"):
            serve(ServerConfig(output_dir=str(tmp_path), port=port), None)


def path_of(route: Route) -> str:
    return route.path.replace("{group_id}", "g-1")


def asks(route: Route, body: Any = None) -> dict[str, Any]:
    """The arguments of a good request."""
    content = route.example if body is None else body
    return {"method": route.method, "url": path_of(route)} | (
        {"json": content} if route.takes_body else {}
    )


def code_of(answer: httpx2.Response) -> str:
    assert answer.headers["content-type"] == MEDIA_TYPE, answer.text
    problem = answer.json()
    kind = KINDS[problem["code"]]
    assert (answer.status_code, problem["title"]) == (kind.status, kind.title)
    assert problem["instance"] == f"urn:groupwise:request:{answer.headers['x-request-id']}"
    return problem["code"]


# Answers


async def test_one_group_is_answered_flat_several_as_a_list_and_a_vain_wait_with_202() -> None:
    reward = {"group_id": "g-1", "rewards": [1]}
    async with client_of(app_of(FakeService())) as client:
        one = await client.post("/completions", json={"prompt": "a"})
        two = await client.post("/completions", json={"prompts": ["a", "b"]})
        for wait, status in ((False, 200), (True, 202)):
            posted = await client.post("/rewards", json={**reward, "wait": wait})
            several = await client.post("/rewards", json={"groups": [reward], "wait": wait})
            step = await client.post("/step", json={"wait": wait})
            assert [answer.status_code for answer in (posted, several, step)] == [status] * 3
            assert posted.json()["status"] == several.json()["groups"][0]["status"] == "accepted"
        bodies: list[dict[str, Any]] = [{}, {"json": {}}, {"json": {"now": True}}]
        stopped = [(await client.post("/stop", **body)).status_code for body in bodies]
    assert one.json()["model_version"] == [RUN, 0]
    assert [group["prompt"] for group in two.json()["groups"]] == ["a", "b"]
    assert stopped == [200, 200, 422], "a stop takes no body"


async def test_the_model_comes_by_get_and_by_post() -> None:
    service = FakeService()
    async with client_of(app_of(service)) as client:
        got = await client.get("/model", params={"version": "tiny@4"})
        posted = await client.post("/model", json={"version": "tiny@4"})
        assert (await client.post("/model")).status_code == 200
    assert [version for _, version in service.calls] == ["tiny@4", "tiny@4", None]
    for answer in (got, posted):
        headers = {name: answer.headers[f"x-model-{name}"] for name in ("version", "fingerprint")}
        assert headers == {"version": "tiny@4", "fingerprint": "f4"}
        assert answer.headers["content-disposition"] == 'attachment; filename="tiny@4.zip"'


# Problems


def apps_for(service: FakeService) -> Callable[[Route, str], tuple[FastAPI, str | None]]:
    """By the code of a problem, an app that can have it, and a key of a reader where it needs one."""
    ring, keys = keyring()
    plain = app_of(service, max_body_bytes=1024)
    keyed = app_of(service, ring, max_body_bytes=1024)
    limited = app_of(service, requests_per_second=0.001, burst=1)
    ending = app_of(service)
    serving_of(ending).end()

    def chosen(route: Route, code: str) -> tuple[FastAPI, str | None]:
        if code == "unauthorised" or (code == "forbidden" and route.role != Role.READ):
            return keyed, keys[Role.READ]
        return {"rate_limited": limited, "shutting_down": ending}.get(code, plain), None

    return chosen


async def test_every_problem_that_a_route_names_can_be_got(monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService()
    app_for = apps_for(service)
    for route in ROUTES:
        for code in sorted(route.all_codes):
            app, key = app_for(route, code)
            ask = asks(route)
            service.refused.clear()
            with monkeypatch.context() as broken:
                async with client_of(app) as client:
                    if code == "rate_limited":
                        await client.get("/status")
                    elif code == "internal":
                        _break(route, service, broken)
                    elif code == "idempotency_key_reused":
                        ask["headers"] = {"Idempotency-Key": "k"}
                        await client.request(**ask)
                        ask["json"] = _other(route)
                    elif code in _OUTSIDE:
                        ask |= _outside(code, key)
                    elif code == "invalid_request":
                        _spoil(ask, route)
                    elif code != "shutting_down":
                        service.fails[_method(route)] = Refusal(code, retry_after=1.5)
                    answer = await client.request(**ask)
            assert code_of(answer) == code, route.name
            assert "secret-in-an-error" not in answer.text
            if isinstance(service.fails.get(_method(route)), Refusal):
                assert answer.headers["retry-after"] == "2"
                assert service.refused == ([code] if route.works else [])
            service.fails.clear()


_OUTSIDE = ("unauthorised", "forbidden", "too_large", "unsupported_media_type")


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
        monkeypatch.setattr(health, "json_response", _broken)
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
        "/completions": {"prompt": "another"}, "/start": {"max_steps": 7}, "/rewards": {"group_id": "g-2", "rewards": [0.0]},
        "/step": {"wait": False}, "/checkpoints": {"name": "another"},
        "/trajectories/close": {"group": "another"},
    }[route.path]  # fmt: skip


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


async def test_secrets_stay_out_of_answers_and_logs_and_errors_are_logged_with_an_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = FakeService()
    service.fails["status"] = RuntimeError("what-is-wrong")
    async with client_of(app_of(service)) as client:
        answer = await client.get("/status")
    assert (code_of(answer), "what-is-wrong" in answer.text) == ("internal", False)
    (record,) = [record for record in caplog.records if record.exc_info]
    assert answer.headers["x-request-id"] in record.getMessage()
    assert "what-is-wrong" in str(record.exc_info[1])
    ring, _ = keyring()
    wrong = "gw-abc-this-is-no-key"
    with caplog.at_level("DEBUG"):
        async with client_of(app_of(FakeService(), ring), **{"X-API-Key": wrong}) as client:
            answers = [await client.get("/status"), await client.get("/nowhere")]
    assert [code_of(answer) for answer in answers] == ["unauthorised"] * 2
    assert answers[0].headers["www-authenticate"] == "Bearer"
    assert wrong not in caplog.text + "".join(answer.text for answer in answers)


# Who may ask

ROLES = {
    "POST /start": Role.ADMIN, "POST /stop": Role.ADMIN, "POST /checkpoints": Role.ADMIN,
    "POST /completions": Role.TRAIN, "DELETE /completions/{group_id}": Role.TRAIN,
    "POST /rewards": Role.TRAIN, "POST /step": Role.TRAIN, "GET /status": Role.READ,
    "POST /trajectories/close": Role.TRAIN,
    "GET /activity": Role.READ, "GET /events": Role.READ, "GET /model": Role.READ,
    "POST /model": Role.READ, "GET /tokenizer": Role.READ, "GET /checkpoints": Role.READ,
    "GET /metrics": Role.READ, "GET /healthz": None, "GET /readyz": None,
}  # fmt: skip


ENDING = [route for route in ROUTES if route.path != "/events"]
"""A stream does not end in this process; its roles are tested in test_middleware.py, with a server."""


async def test_roles_on_every_route_and_no_other_address_is_answered() -> None:
    assert {route.name: route.role for route in ROUTES} == ROLES
    ring, keys = keyring()
    app = app_of(FakeService(), ring)
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    there = {f"{method} {route.path}" for route in routes for method in route.methods or ()}
    assert there == {*ROLES, "GET /openapi.json"}
    async with client_of(app) as client:
        for route in ENDING:
            for role in Role:
                headers = {"api-key": keys[role]}
                status = (await client.request(**asks(route), headers=headers)).status_code
                assert (status == 403) == (route.role is not None and role < route.role), route.name
                assert status in (200, 202, 403)
            status = (await client.request(**asks(route))).status_code
            assert status == (200 if route.role is None else 401), route.name
        reader = keys[Role.READ]
        for headers in ({"X-API-Key": reader}, {"Authorization": f"bearer {reader}"}):
            assert (await client.get("/status", headers=headers)).status_code == 200
            assert (await client.post("/step", json={}, headers=headers)).status_code == 403


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
        contents = [each.get("content", {}).get(MEDIA_TYPE, {}) for each in responses.values()]
        named = {code for content in contents for code in content.get("examples", {})}
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


# Twice

NAME = {"Idempotency-Key": "once"}


async def test_a_repeated_request_waits_and_does_the_work_if_the_first_is_refused() -> None:
    service = FakeService()
    service.blocked.add("completions")
    async with client_of(app_of(service)) as client:

        async def ask(prompt: str = "a") -> httpx2.Response:
            return await client.post("/completions", json={"prompt": prompt}, headers=NAME)

        tasks = [asyncio.create_task(ask())]
        await service.entered.wait()
        tasks += [asyncio.create_task(ask()) for _ in range(2)]
        assert code_of(await ask("b")) == "idempotency_key_reused"
        assert (tasks[1].done(), len(service.calls)) == (False, 1)
        service.blocked.clear()
        service.shut = True  # the first one is told so when it goes on
        service.let_go.set()
        answers = await asyncio.gather(*tasks)
    assert [answer.status_code for answer in answers] == [503, 200, 200]
    assert answers[1].content == answers[2].content
    assert len(service.calls) == 2


# Events


async def test_streams_are_bounded_resume_behind_the_last_event_and_end_with_the_server() -> None:
    service = FakeService()
    app = app_of(service, max_event_streams=1)
    for step in range(3):
        service.happen("step", step=step, message="done\nwell")
    async with client_of(app) as client:
        stream = asyncio.create_task(client.get("/events", headers={"Last-Event-ID": "1"}))
        await wait_until_async(lambda: serving_of(app).metrics.event_streams == 1)
        second = await client.get("/events")
        assert (code_of(second), bool(second.headers["retry-after"])) == ("rate_limited", True)
        service.happen("stopped")
        await wait_until_async(lambda: service.told == 4)
        serving_of(app).ending.set()
        answer = await stream
    assert serving_of(app).metrics.event_streams == 0
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.splitlines()
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [line[4:] for line in lines if line.startswith("id: ")] == ["2", "3", "4"]
    assert [event["kind"] for event in data] == ["step", "step", "stopped"]
    assert data[0]["message"] == "done\nwell"


async def test_readiness_says_why_not() -> None:
    service = FakeService()
    app = app_of(service)
    async with client_of(app) as client:
        ready = await client.get("/readyz")
        service.not_ready = "the engine is being started"
        waiting = await client.get("/readyz")
        service.not_ready = None
        serving_of(app).ending.set()
        ending, alive = await client.get("/readyz"), await client.get("/healthz")
    assert [each.status_code for each in (ready, waiting, ending, alive)] == [200, 503, 503, 200]
    assert "engine is being started" in waiting.json()["detail"]


async def test_bodies_are_plain_or_gzip_and_names_of_other_servers_are_reported() -> None:
    body = b'{"prompt": "a"}'
    encoded = {
        "gzip": gzip.compress(body),
        "x-gzip": gzip.compress(body),
        "identity": body,
        "br": body,
    }
    async with client_of(app_of(FakeService())) as client:
        for encoding, content in encoded.items():
            headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
            answer = await client.post("/completions", content=content, headers=headers)
            assert answer.status_code == (415 if encoding == "br" else 200), encoding
            assert answer.is_success or "compressed by gzip" in answer.json()["detail"]
        answer = await client.post("/completions", json={"prompt": "a", "max_tokens": 5})
        assert answer.status_code == 422
        assert "max_completion_length" in answer.json()["detail"]
