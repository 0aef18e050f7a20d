"""The routes by themselves: who may ask, what is refused, what a repeated request does, what becomes of sessions. JSON alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.types import ASGIApp

from groupwise.http import bodies
from groupwise.http.bodies import Bodies
from groupwise.server.verbs.futures import Limits
from groupwise.server.verbs.opened import SESSION_SILENCE
from groupwise.server.verbs.service import VerbService
from groupwise.server.verbs.training import EPHEMERAL_KEPT
from groupwise.testing.fake_verbs import FakeVerbs
from tests.unit.server.asking import until
from tests.verb_server import KEY, app

ADAM = {"learning_rate": 0.5}


class Asking:
    """A client of the routes over one service, without a network."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.now = 0.0
        self.engine = FakeVerbs(folder, max_models=options.pop("max_models", 4))
        self.service = VerbService(self.engine, clock=lambda: self.now, **options)
        self.http = client_of(app(self.service, poll=0.05))

    async def post(self, path: str, status: int = 200, /, **body: Any) -> Any:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def session(self, **headers: str) -> str:
        answer = await self.http.post(
            "create_session", json={"tags": [], "sdk_version": "0"}, headers=headers
        )
        return answer.json()["session_id"]

    async def model(self, session: str | None = None, number: int = 0) -> str:
        promise = await self.create(session or await self.session(), number)
        assert (await self.result(promise))["model_id"] == promise["model_id"]
        return promise["model_id"]

    async def create(self, session: str, number: int = 0, **changes: Any) -> Any:
        body = {
            "session_id": session,
            "model_seq_id": number,
            "base_model": "letters",
            "lora_config": {"rank": 4},
            "optimizer_config": {"type": "adamw"},
            "type": "create_model",
        }
        return await self.post("create_model", **{**body, **changes})

    async def result(self, promise: Any) -> Any:
        return (await self.poll(promise)).json()

    async def poll(self, promise: Any) -> httpx2.Response:
        for _ in range(100):
            answer = await self.http.post(
                "retrieve_future", json={"request_id": promise["request_id"]}
            )
            if answer.status_code != 408:
                return answer
        raise AssertionError("no answer")


def client_of(answers: ASGIApp) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        transport=httpx2.ASGITransport(answers),
        base_url="http://server/api/v1/",
        headers={"X-API-Key": KEY},
    )


@pytest.fixture
async def asking(tmp_path: Path) -> AsyncGenerator[Asking]:
    asking = await _asking(tmp_path)
    yield asking
    await asking.service.close()
    await asking.http.aclose()


async def _asking(folder: Path, **options: Any) -> Asking:
    asking = Asking(folder, **options)
    await asking.service.open()
    return asking


def _sample(sampler: str, number: int = 0, **changes: Any) -> dict[str, Any]:
    body = {
        "sampling_session_id": sampler,
        "seq_id": number,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 3, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
        "type": "sample",
    }
    return {**body, **changes}


async def test_a_key_is_needed_everywhere_but_for_the_health(asking: Asking) -> None:
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app(asking.service)), base_url="http://server/api/v1/"
    ) as nobody:
        assert (await nobody.get("healthz")).json() == {"status": "ok"}
        for path in ("client/config", "create_session", "asample", "nonsense"):
            answer = await nobody.post(path, json={})
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorised")


async def test_unknown_routes_and_refused_ones(asking: Asking) -> None:
    assert (await asking.post("nonsense", 404))["code"] == "not_there"
    found = await asking.post("copy_weights", 400)
    assert found["code"] == "unsupported"
    assert "ServiceClient.copy_weights" in found["message"]


async def test_bodies_are_strict(asking: Asking) -> None:
    found = await asking.post("get_info", 400, model_id="m", modle="x")
    assert "modle" in found["message"]
    answer = await asking.http.post("get_info", content=b"\xff")
    assert answer.status_code == 400
    answer = await asking.http.post("get_info", content=b"{}", headers={"Content-Encoding": "zstd"})
    assert (answer.status_code, "not taken" in answer.text) == (400, True)


async def test_bodies_are_strict_json_and_no_deeper_than_any_request(asking: Asking) -> None:
    given = (
        b"[" * 100_000,
        b'{"a":' * 100 + b"1" + b"}" * 100,
        b'{"model_id": "a", "model_id": "b"}',
    )
    for path in ("create_session", "optim_step", "retrieve_future", "asample"):
        for content in given:
            answer = await asking.http.post(path, content=content)
            assert (answer.status_code, answer.json()["code"]) == (400, "usage"), answer.text
            assert "no JSON as it is taken here" in answer.json()["message"]


async def test_a_mistake_of_the_server_is_told_as_such_and_its_details_are_not(
    asking: Asking, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr(asking.service, "capabilities", broken)
    answer = await asking.http.get("get_server_capabilities")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert "secret" not in answer.text
    assert "secret" in caplog.text


async def test_a_large_body(asking: Asking) -> None:
    asking.http = client_of(app(asking.service, bodies=Bodies(100)))
    assert (await asking.post("telemetry", 413, text="x" * 100))["code"] == "too_large"


async def test_a_body_that_does_not_come(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    async def half() -> AsyncGenerator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.05)
    answer = await asking.http.post("optim_step", content=half())
    assert (answer.status_code, answer.json()["code"]) == (504, "timed_out")
    monkeypatch.setattr(bodies, "BODY_SECONDS", 60.0)
    coming = Bodies(100)
    asking.http = client_of(app(asking.service, bodies=coming))
    asked = asyncio.create_task(asking.http.post("optim_step", content=half()))
    await until(lambda: coming.coming)
    coming.give_up()
    answer = await asked
    assert (answer.status_code, answer.json()["code"]) == (503, "shutting_down")


async def test_a_session_is_made_once_for_a_key(asking: Asking) -> None:
    first = await asking.session(**{"X-Idempotency-Key": "k"})
    assert await asking.session(**{"X-Idempotency-Key": "k"}) == first
    assert await asking.session(**{"X-Idempotency-Key": "l"}) != first
    assert await asking.session() != await asking.session()


async def test_a_model_is_made_once_for_its_number(asking: Asking) -> None:
    session = await asking.session()
    promises = [await asking.create(session) for _ in range(3)]
    assert promises[0] == promises[1] == promises[2]
    assert promises[0]["model_id"] == f"{session}:train:0"
    await asking.result(promises[0])
    assert asking.engine.calls == [("create_model", f"{session}:train:0")]
    other = await asking.post(
        "create_model",
        400,
        session_id=session,
        model_seq_id=0,
        base_model="letters",
        lora_config={"rank": 8},
    )
    assert "another content" in other["message"]
    info = await asking.post("get_info", model_id=promises[0]["model_id"])
    assert (info["lora_rank"], info["model_data"]["model_name"]) == (4, "letters")


async def test_updates_are_done_once_and_in_order(asking: Asking) -> None:
    model = await asking.model()
    later = [
        await asking.post("optim_step", model_id=model, seq_id=n, adam_params=ADAM)
        for n in (2, 2, 3)
    ]
    assert later[0] == later[1]
    assert [verb for verb, _ in asking.engine.calls] == ["create_model"]
    answer = await asking.http.post("retrieve_future", json={"request_id": later[0]["request_id"]})
    assert answer.status_code == 408
    assert answer.json()["type"] == "try_again"
    path = await asking.post("save_weights", model_id=model, seq_id=1, path="a", overwrite=False)
    assert (await asking.result(path))["path"] == f"tinker://{model}/weights/a"
    for promise in later:
        assert await asking.result(promise) == {"metrics": {"grad_norm": 0.0}}
    verbs = [verb for verb, _ in asking.engine.calls]
    assert verbs == ["create_model", "save_state", "optim_step", "optim_step"]


@pytest.mark.parametrize("number", [2**53, 2**63, 2**64, 10**400, -1, 0, 1.5, "1", None, True, [1]])
async def test_numbers_that_no_call_can_have(
    asking: Asking, number: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = await asking.model()
    await asking.post("optim_step", 400, model_id=model, seq_id=number, adam_params=ADAM)
    assert asking.service.futures.waiting == 0
    await asking.post("optim_step", model_id=model, seq_id=1, adam_params=ADAM)
    assert not caplog.records


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("save_weights", {"path": "a", "ttl_seconds": 3600}),
        ("save_weights", {"path": "../up"}),
        ("optim_step", {"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}),
        ("optim_step", {"adam_params": {"learning_rate": -1.0}}),
        ("save_weights_for_sampler", {"kind": "inflight", "sampling_session_seq_id": 0}),
        ("save_weights_for_sampler", {}),
        ("load_weights", {"path": "tinker://nothing", "optimizer": False}),
        ("save_weights_external", {"path": "a"}),
    ],
)
async def test_a_refused_request_has_used_its_number(
    asking: Asking, path: str, body: dict[str, Any]
) -> None:
    model = await asking.model()
    await asking.post(path, 400, model_id=model, seq_id=1, **body)
    promise = await asking.post("optim_step", model_id=model, seq_id=2, adam_params=ADAM)
    assert await asking.result(promise) == {"metrics": {"grad_norm": 0.0}}


async def test_too_many_models_are_refused_by_the_engine_until_a_session_ends(
    tmp_path: Path,
) -> None:
    asking = await _asking(tmp_path, max_models=1)
    first = await asking.session()
    await asking.model(first)
    second = await asking.session()
    failed = await asking.result(await asking.create(second))
    assert failed["category"] == "user"
    assert "1 models already" in failed["error"]
    answer = await asking.http.post(f"sessions/{first}/finish", json={"reason": {}})
    assert answer.status_code == 200
    await asking.post("session_heartbeat", 404, session_id=first)
    await asking.model(second, number=1)
    await asking.post(f"sessions/{first}/finish")


async def test_models_of_silent_sessions_are_let_go_of(tmp_path: Path) -> None:
    asking = await _asking(tmp_path, max_models=1)
    silent, model = await asking.session(), ""
    model = await asking.model(silent)
    asking.now = SESSION_SILENCE - 1
    await asking.post("session_heartbeat", session_id=silent)
    asking.now = SESSION_SILENCE + 1
    other = await asking.session()
    assert "error" in await asking.result(await asking.create(other))
    asking.now = 2 * SESSION_SILENCE
    await asking.post("session_heartbeat", session_id=other)
    await asking.model(other, number=1)
    assert ("drop", model) in asking.engine.calls
    gone = await asking.post("optim_step", 404, model_id=model, seq_id=1, adam_params=ADAM)
    assert "Make a new ServiceClient" in gone["message"]


async def test_samples_are_drawn_once(asking: Asking) -> None:
    session = await asking.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "letters"}
    sampler = (await asking.post("create_sampling_session", **body))["sampling_session_id"]
    assert (await asking.post("create_sampling_session", **body))["sampling_session_id"] == sampler
    answer = await asking.http.get(f"samplers/{sampler}")
    assert answer.json() == {"sampler_id": sampler, "base_model": "letters"}
    promises = [await asking.post("asample", **_sample(sampler)) for _ in range(2)]
    assert promises[0] == promises[1]
    assert len(set(promises[0]["sample_sequence_ids"])) == 2
    assert (await asking.poll(promises[0])).status_code == 200
    assert asking.engine.calls == [("sample", "letters")]
    await asking.post("asample", 400, **_sample(sampler, num_samples=3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": {"chunks": []}}, "The prompt is empty"),
        ({"sampling_params": {"max_tokens": 63}}, "together they may have 64"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"prompt_logprobs_last_n": 1}, "needs prompt_logprobs"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 2}, "less than the prompt's 2"),
        ({"topk_sample_logprobs": 3}, "topk_sample_logprobs"),
        ({"prompt_alt_tokens_k": 3}, "prompt_alt_tokens_k"),
        ({"record_stability_info": True}, "record_stability_info"),
        ({"num_samples": 0}, "num_samples"),
    ],
)
async def test_samples_that_cannot_be(
    asking: Asking, changes: dict[str, Any], message: str
) -> None:
    session = await asking.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "letters"}
    sampler = (await asking.post("create_sampling_session", **body))["sampling_session_id"]
    found = await asking.post("asample", 400, **_sample(sampler, **changes))
    assert message in found["message"]


async def test_weights_of_the_last_few_samplers_are_kept(asking: Asking) -> None:
    model = await asking.model()
    samplers: list[str] = []
    for number in range(EPHEMERAL_KEPT + 2):
        promise = await asking.post(
            "save_weights_for_sampler",
            model_id=model,
            seq_id=number + 1,
            sampling_session_seq_id=number,
        )
        samplers.append((await asking.result(promise))["sampling_session_id"])
    dropped = [name for verb, name in asking.engine.calls if verb == "drop_sampler"]
    assert dropped == ["_sampler-0", "_sampler-1"]
    failed = await asking.result(await asking.post("asample", **_sample(samplers[0])))
    assert failed["category"] == "user"
    assert (await asking.post("weights_info", 400, tinker_path=f"tinker://{model}/weights/_"))[
        "code"
    ] == "usage"


async def test_too_many_calls_are_to_be_sent_again(tmp_path: Path) -> None:
    asking = await _asking(tmp_path, limits=Limits(waiting=1))
    model = await asking.model()
    await asking.post("optim_step", model_id=model, seq_id=2, adam_params=ADAM)
    answer = await asking.http.post(
        "optim_step", json={"model_id": model, "seq_id": 3, "adam_params": ADAM}
    )
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
    assert answer.json()["code"] == "too_many_calls"


async def test_answers_that_are_gone_or_never_were(asking: Asking) -> None:
    await asking.post("retrieve_future", 410, request_id="f-0-1")
    await asking.post("retrieve_future", 404, request_id="nonsense")


async def test_the_client_is_steered_to_what_is_served(asking: Asking) -> None:
    flags = await asking.post("client/config", sdk_version="0.38.0")
    assert not any(
        flags[name]
        for name in (
            "pjwt_auth_enabled",
            "use_pyqwest_transport",
            "proto_compress_fwdbwd",
            "sample_use_retrieve_futures",
            "sample_join_sampling_session",
            "custom_loss_server_side",
        )
    )
    assert await asking.post("telemetry", events=[]) == {"status": "accepted"}
    answer = await asking.http.get("get_server_capabilities")
    assert [each["model_name"] for each in answer.json()["supported_models"]] == ["letters"]


async def test_a_waiting_poll_ends_with_its_session(asking: Asking) -> None:
    session = await asking.session()
    model = await asking.model(session)
    promise = await asking.post("optim_step", model_id=model, seq_id=2, adam_params=ADAM)
    waiting = asyncio.create_task(asking.result(promise))
    await asking.post(f"sessions/{session}/finish")
    assert "its session has ended" in (await waiting)["error"]
