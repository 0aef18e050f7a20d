"""The routes alone: who may call them, what is refused, what a repeated request does, what becomes of sessions. JSON only."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.types import ASGIApp

from groupwise.api.http.bodies import Bodies
from groupwise.api.http.route import SMALL_BODY
from groupwise.server.ledger.writer import Ledger
from groupwise.server.tinker.futures import Limits
from groupwise.server.tinker.service import TinkerService
from groupwise.server.tinker.sessions import ROOM_SILENCE, SESSION_SILENCE
from groupwise.server.tinker.tensors import messages
from groupwise.server.tinker.training import EPHEMERAL_KEPT
from tests.fake_tinker_engine import FakeTinkerEngine
from tests.processes import wait_until_async
from tests.tinker_app import KEY, app

ADAM = {"learning_rate": 0.5}


class Asking:
    """A client of the routes over one service, without a network."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.now, self.date = 0.0, 1.6e9
        self.engine = FakeTinkerEngine(folder, max_models=options.pop("max_models", 4))
        self.ledger = Ledger.open(folder / "server.db")
        self.service = TinkerService(
            self.engine,
            self.ledger,
            clock=lambda: self.now,
            wall_clock=lambda: self.date,
            **options,
        )
        self.http = client_of(app(self.service, poll=0.05))

    async def post(self, path: str, status: int = 200, /, **body: Any) -> Any:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def session(self, **headers: str) -> str:
        body = {"tags": [], "sdk_version": "0"}
        answer = await self.http.post("create_session", json=body, headers=headers)
        return answer.json()["session_id"]

    async def model(self, session: str | None = None, number: int = 0) -> str:
        promise = await self.create(session or await self.session(), number)
        assert (await self.result(promise))["model_id"] == promise["model_id"]
        return promise["model_id"]

    async def create(self, session: str, number: int = 0) -> Any:
        how = {"lora_config": {"rank": 4}, "optimizer_config": {"type": "adamw"}}
        what = {"session_id": session, "model_seq_id": number, "base_model": "letters"}
        return await self.post("create_model", type="create_model", **what, **how)

    async def sampler(self) -> str:
        body = {"session_id": await self.session(), "sampling_session_seq_id": 0}
        answers = [
            await self.post("create_sampling_session", **body, base_model="letters")
            for _ in range(2)
        ]
        assert answers[0] == answers[1]
        return answers[0]["sampling_session_id"]

    async def step(self, model: str, number: Any, status: int = 200) -> Any:
        body = {"model_id": model, "seq_id": number, "adam_params": ADAM}
        return await self.post("optim_step", status, **body)

    async def result(self, promise: Any) -> Any:
        return (await self.poll(promise)).json()

    async def poll(self, promise: Any) -> httpx2.Response:
        for _ in range(100):
            body = {"request_id": promise["request_id"]}
            answer = await self.http.post("retrieve_future", json=body)
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
async def asking(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Asking]:
    asking = Asking(tmp_path, **getattr(request, "param", {}))
    await asking.service.open()
    yield asking
    await asking.service.close()
    await asking.http.aclose()
    await asking.ledger.close()


def with_(**options: Any) -> pytest.MarkDecorator:
    """Has the test ask a service with these options."""
    return pytest.mark.parametrize("asking", [options], indirect=True, ids=[""])


def _sample(sampler: str, number: int = 0, **changes: Any) -> dict[str, Any]:
    params = {"max_tokens": 3, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
    body = {"sampling_session_id": sampler, "seq_id": number, "num_samples": 2, "type": "sample"}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    return {**body, "prompt": prompt, "sampling_params": params, **changes}


async def test_a_key_is_needed_and_the_client_is_steered_to_what_is_served(asking: Asking) -> None:
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app(asking.service)), base_url="http://server/api/v1/"
    ) as nobody:
        assert (await nobody.get("healthz")).json() == {"status": "ok"}
        for path in ("client/config", "create_session", "asample", "nonsense"):
            answer = await nobody.post(path, json={})
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorised")
    flags = await asking.post("client/config", sdk_version="0.38.0")
    never = ("pjwt_auth_enabled", "use_pyqwest_transport", "proto_compress_fwdbwd")
    later = ("sample_use_retrieve_futures", "sample_join_sampling_session")
    assert not any(flags[name] for name in (*never, *later, "custom_loss_server_side"))
    assert await asking.post("telemetry", events=[]) == {"status": "accepted"}
    answer = await asking.http.get("get_server_capabilities")
    assert [each["model_name"] for each in answer.json()["supported_models"]] == ["letters"]


async def test_malformed_requests_are_refused(
    asking: Asking, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await asking.post("nonsense", 404))["code"] == "not_there"
    assert "ServiceClient.copy_weights" in (await asking.post("copy_weights", 400))["message"]
    assert "modle" in (await asking.post("get_info", 400, model_id="m", modle="x"))["message"]
    packed = await asking.http.post("get_info", content=b"{}", headers={"Content-Encoding": "zstd"})
    assert packed.status_code == 415
    twice, deep = b'{"model_id": "a", "model_id": "b"}', b'{"a":' * 100 + b"1" + b"}" * 100
    for path in ("create_session", "optim_step", "retrieve_future", "asample"):
        for content in (b"\xff", b"[" * 100_000, deep, twice):
            answer = await asking.http.post(path, content=content)
            assert (answer.status_code, answer.json()["code"]) == (400, "usage"), answer.text
    await asking.post("retrieve_future", 410, request_id="f-0-1")
    await asking.post("retrieve_future", 404, request_id="nonsense")

    def broken(*_: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr(asking.service, "capabilities", broken)
    answer = await asking.http.get("get_server_capabilities")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert ("secret" in answer.text, "secret" in caplog.text) == (False, True)


async def test_sessions_and_models_are_made_once(asking: Asking) -> None:
    first, again, other = [
        await asking.session(**{"X-Idempotency-Key": key}) for key in ("k", "k", "l")
    ]
    session = await asking.session()
    assert (again, len({first, other, session, await asking.session()})) == (first, 4)
    body, key = {"sdk_version": "2", "tags": []}, {"X-Idempotency-Key": "k"}
    answer = await asking.http.post("create_session", json=body, headers=key)
    assert answer.json()["session_id"] not in (first, other), "of another body"
    promises = [await asking.create(session) for _ in range(3)]
    model = f"{session}:train:0"
    assert promises[0] == promises[1] == promises[2]
    assert (await asking.result(promises[0]))["model_id"] == promises[0]["model_id"] == model
    assert asking.engine.calls == [("create_model", model)]
    changed = {"base_model": "letters", "lora_config": {"rank": 8}}
    await asking.post("create_model", 400, session_id=session, model_seq_id=0, **changed)
    info = await asking.post("get_info", model_id=model)
    assert (info["lora_rank"], info["model_data"]["model_name"]) == (4, "letters")


async def test_updates_are_done_once_and_in_order(asking: Asking) -> None:
    session = await asking.session()
    model = await asking.model(session)
    later = [await asking.step(model, number) for number in (2, 2, 3)]
    assert later[0] == later[1]
    answer = await asking.http.post("retrieve_future", json={"request_id": later[0]["request_id"]})
    assert (answer.status_code, answer.json()["type"]) == (408, "try_again")
    path = await asking.post("save_weights", model_id=model, seq_id=1, path="a", overwrite=False)
    assert (await asking.result(path))["path"] == f"tinker://{model}/weights/a"
    for promise in later:
        assert await asking.result(promise) == {"metrics": {"grad_norm": 0.0}}
    verbs = [verb for verb, _ in asking.engine.calls]
    assert verbs == ["create_model", "save_state", "optim_step", "optim_step"]
    waiting = asyncio.create_task(asking.result(await asking.step(model, 5)))
    await asking.post(f"sessions/{session}/finish")
    assert "its session has ended" in (await waiting)["error"]


async def test_a_refused_call_uses_up_its_sequence_number(
    asking: Asking, caplog: pytest.LogCaptureFixture
) -> None:
    model = await asking.model()
    for number in (2**53, 2**63, 2**64, 10**400, -1, 0, 1.5, "1", None, True, [1]):
        await asking.step(model, number, 400)
    assert asking.service.futures.waiting == 0
    refused: list[tuple[str, dict[str, Any]]] = [
        ("save_weights", {"path": "a", "ttl_seconds": 0}), ("save_weights", {"path": "../up"}),
        ("optim_step", {"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}),
        ("optim_step", {"adam_params": {"learning_rate": -1.0}}),
        ("save_weights_for_sampler", {"kind": "inflight", "sampling_session_seq_id": 0}), ("save_weights_for_sampler", {}),
        ("load_weights", {"path": "tinker://nothing", "optimizer": False}), ("save_weights_external", {"path": "a"}),
    ]  # fmt: skip
    for number, (path, body) in enumerate(refused, 1):
        await asking.post(path, 400, model_id=model, seq_id=number, **body)
    promise = await asking.step(model, len(refused) + 1)
    assert await asking.result(promise) == {"metrics": {"grad_norm": 0.0}}
    assert not caplog.records


@with_(max_models=1)
async def test_a_client_that_is_silent_makes_way_when_its_room_is_needed(asking: Asking) -> None:
    first, second = await asking.session(), await asking.session()
    await asking.model(first)
    asking.now = 12
    failed = await asking.result(await asking.create(second))
    assert failed["category"] == "user"
    for part in ("1 models already", f"{first}:train:0: heard of 12 seconds ago", "in 48 seconds", "ServiceClient.close"):  # fmt: skip
        assert part in failed["error"]
    answer = await asking.http.post(f"sessions/{first}/finish", json={"reason": {}})
    assert answer.status_code == 200
    await asking.post("session_heartbeat", 404, session_id=first)
    model = await asking.model(second, number=1)
    own = await asking.result(await asking.create(second, 2))
    assert f"Your own client has {model}" in own["error"]
    asking.now += ROOM_SILENCE - 1
    await asking.post("session_heartbeat", session_id=second)
    asking.now += ROOM_SILENCE - 1
    other = await asking.session()
    assert "error" in await asking.result(await asking.create(other))
    asking.now += 2
    assert ("drop", model) not in asking.engine.calls, "nobody needs its room"
    await asking.model(other, number=1)
    assert ("drop", model) in asking.engine.calls
    assert "Make a new ServiceClient" in (await asking.step(model, 1, 404))["message"]


async def test_only_as_many_make_way_as_are_in_it_and_at_last_all_that_are_silent(
    asking: Asking,
) -> None:
    models: list[str] = []
    for _ in range(4):
        models.append(await asking.model())
        asking.now += 1
    asking.now += ROOM_SILENCE
    fifth = await asking.model()
    assert [model for verb, model in asking.engine.calls if verb == "drop"] == models[:1]
    asking.now += SESSION_SILENCE - 30
    await asking.post("session_heartbeat", session_id=fifth.partition(":")[0])
    await asking.session()
    assert [model for verb, model in asking.engine.calls if verb == "drop"] == models


async def test_samples_are_drawn_once_and_those_that_cannot_be_are_refused(asking: Asking) -> None:
    sampler = await asking.sampler()
    answer = await asking.http.get(f"samplers/{sampler}")
    assert answer.json() == {"sampler_id": sampler, "base_model": "letters"}
    promises = [await asking.post("asample", **_sample(sampler)) for _ in range(2)]
    assert promises[0] == promises[1]
    assert len(set(promises[0]["sample_sequence_ids"])) == 2
    assert (await asking.poll(promises[0])).status_code == 200
    assert asking.engine.calls == [("sample", "letters")]
    await asking.post("asample", 400, **_sample(sampler, num_samples=3))
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("The prompt is empty", {"prompt": {"chunks": []}}), ("64", {"sampling_params": {"max_tokens": 63}}),
        ("temperature", {"sampling_params": {"temperature": -1}}), ("needs prompt_logprobs", {"prompt_logprobs_last_n": 1}),
        ("less than the prompt's 2", {"prompt_logprobs": True, "prompt_logprobs_last_n": 2}),
        ("topk_sample_logprobs", {"topk_sample_logprobs": 1025}), ("prompt_alt_tokens_k", {"prompt_alt_tokens_k": 3}),
        ("makes 4,194,304 entries", {"topk_sample_logprobs": 1024, "num_samples": 1024, "sampling_params": {"max_tokens": 4}}),
        ("at least 2 items", {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1]}}),
        ("it must be", {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [9, 1]}}),
        ("or neither", {"target_prompt_logprobs": {"data": [], "dtype": "int64", "shape": [1, 1], "sparse_crow_indices": [0, 0]}}),
        ("record_stability_info", {"record_stability_info": True}), ("num_samples", {"num_samples": 0}),
        ("at least 1 character", {"sampling_params": {"max_tokens": 2, "stop": ["a", ""]}}),
    ]  # fmt: skip
    for number, (message, changes) in enumerate(wrong, 1):
        refused = await asking.post("asample", 400, **_sample(sampler, number, **changes))
        assert message in refused["message"]


@pytest.mark.parametrize(("tokens", "shape"), [([1, 2, 3], [2, 1]), ([1], [0, 1])])
async def test_numbers_beside_a_sample_through_the_routes(
    asking: Asking, tokens: list[int], shape: list[int]
) -> None:
    """Also of a prompt of one token, before which nothing comes."""
    ids = {"data": [5] * shape[0], "dtype": "int64", "shape": shape}
    promise = await asking.post(
        "asample",
        **_sample(
            await asking.sampler(),
            prompt={"chunks": [{"type": "encoded_text", "tokens": tokens}]},
            topk_prompt_logprobs=2,
            topk_sample_logprobs=3,
            target_prompt_logprobs=ids,
        ),
    )
    answer = messages().SampleResponse()
    answer.ParseFromString((await asking.poll(promise)).content)
    assert (answer.topk_prompt_logprobs.k, answer.topk_prompt_logprobs.length) == (2, len(tokens))
    for sequence in answer.sequences:
        top = sequence.topk_sampled_logprobs
        assert (top.k, top.length) == (3, len(sequence.tokens) // 4)
    assert list(answer.target_prompt_logprobs.shape) == shape
    assert len(answer.target_prompt_logprobs.dense) == 4 * shape[0]


async def test_weights_for_a_sampler_are_saved_once_although_the_client_counts_on_when_it_repeats(
    asking: Asking,
) -> None:
    model = await asking.model()
    promises = [
        await asking.post(
            "save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=number
        )
        for number in (0, 1)
    ]
    samplers = {(await asking.result(each))["sampling_session_id"] for each in promises}
    assert len(samplers) == 1
    assert [verb for verb, _ in asking.engine.calls].count("save_for_sampler") == 1


async def test_weights_of_the_last_few_samplers_are_kept(asking: Asking) -> None:
    model = await asking.model()
    samplers: list[str] = []
    for number in range(EPHEMERAL_KEPT + 2):
        body = {"seq_id": number + 1, "sampling_session_seq_id": number}
        promise = await asking.post("save_weights_for_sampler", model_id=model, **body)
        samplers.append((await asking.result(promise))["sampling_session_id"])
    dropped = [name for verb, name in asking.engine.calls if verb == "drop_sampler"]
    assert dropped == ["_sampler-0", "_sampler-1"]
    failed = await asking.result(await asking.post("asample", **_sample(samplers[0])))
    assert failed["category"] == "user"
    for named in (f"{model}/weights/_", f"{model}/weights/..", "../weights/x", "a\0b/weights/x"):
        error = await asking.post("weights_info", 400, tinker_path=f"tinker://{named}")
        assert error["code"] == "usage"


@with_(limits=Limits(waiting=1))
async def test_too_many_calls_are_to_be_sent_again(asking: Asking) -> None:
    model = await asking.model()
    await asking.step(model, 2)
    body = {"model_id": model, "seq_id": 3, "adam_params": ADAM}
    answer = await asking.http.post("optim_step", json=body)
    assert (answer.status_code, answer.json()["code"]) == (429, "too_many_calls")
    assert answer.headers["Retry-After"] == "1"


async def test_bodies_are_plain_or_gzip(asking: Asking) -> None:
    body = b'{"tags": [], "sdk_version": "0"}'
    packed = gzip.compress(body)
    for encoding, content, status in (
        ("identity", body, 200),
        ("gzip", packed, 200),
        ("x-gzip", packed, 200),
        ("gzip", body, 415),
        ("zstd", body, 415),
    ):
        headers = {"Content-Encoding": encoding}
        answer = await asking.http.post("create_session", content=content, headers=headers)
        assert answer.status_code == status, (encoding, answer.text)
        assert status == 200 or answer.json()["code"] == "unsupported_media_type"


async def test_only_samples_and_passes_may_be_large(asking: Asking) -> None:
    long = " " * SMALL_BODY + "1"
    for path in ("create_session", "optim_step", "session_heartbeat", "retrieve_future"):
        answer = await asking.http.post(path, content=long)
        assert (answer.status_code, answer.json()["code"]) == (413, "too_large"), path
    assert (await asking.http.post("asample", content=long)).status_code == 400


async def test_a_body_that_is_large_or_still_comes_at_the_end_is_refused(asking: Asking) -> None:
    async def half() -> AsyncGenerator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    coming = Bodies(100)
    asking.http = client_of(app(asking.service, bodies=coming))
    assert (await asking.post("telemetry", 413, text="x" * 100))["code"] == "too_large"
    request = asyncio.create_task(asking.http.post("optim_step", content=half()))
    await wait_until_async(lambda: coming.coming)
    coming.give_up()
    answer = await request
    assert (answer.status_code, answer.json()["code"]) == (503, "shutting_down")
