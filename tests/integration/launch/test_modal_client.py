"""Our calls of Modal, by Modal's own client against a local server: what is deployed, and the arguments of calls."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import modal
import pytest
from modal._serialization import serialize
from modal_proto import api_pb2

from groupwise.jobs.clouds.backend import Outcome
from groupwise.jobs.clouds.modal.api import Call, Image, app_of
from groupwise.jobs.clouds.modal.live import LiveModal
from groupwise.jobs.hosts.host import HostError, OutcomeUnknown
from tests.fake_modal import FakeModal, coordinate, spawn
from tests.fake_modal_server import EXPIRED, UNFINISHED, Server, modal_server
from tests.launch_backends import LaunchClient, modal_backend

pytestmark = pytest.mark.launch
CANARY = "canary-90ae11"
IMAGE = Image("abc", "3.11", {"builder.py": b"print()", "wheels/a.whl": b"wheel"})


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Server]:
    async with modal_server() as found:
        monkeypatch.setenv("MODAL_SERVER_URL", found.url)
        monkeypatch.setenv("MODAL_TOKEN_ID", "ak-1")
        monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-1")
        yield found


@pytest.fixture
async def live(server: Server) -> AsyncIterator[LiveModal]:
    found = LiveModal()
    yield found
    await found.close()


@pytest.fixture
async def deployed(live: LiveModal) -> LiveModal:
    """It has the image."""
    await live.deploy(IMAGE)
    return live


async def spawned(live: LiveModal, **asks: Any) -> str:
    """A call of a job."""
    return await live.spawn(Call("job", 1, app=app_of(IMAGE.name), **asks), {})


def at_once(value: Any) -> Callable[[], Any]:
    return lambda: value


async def test_the_desk_is_deployed_once_and_is_one_container(
    server: Server, live: LiveModal
) -> None:
    server.answers = lambda name, *words: at_once([name, *words])
    assert await live.call_coordinator("turns", [["a", 1]]) == [
        "groupwise-coordinator-1/coordinate",
        "turns",
        [["a", 1]],
    ]
    other = LiveModal()
    await other.call_coordinator("note", "a", 1, 1, "fc-1")
    await other.close()
    assert len(server.of("FunctionCreate")) == 1
    made = server.functions["groupwise-coordinator-1/coordinate"]
    assert (made.module_name, made.implementation_name) == (
        "groupwise.jobs.clouds.modal.app",
        "coordinate",
    )
    assert made.autoscaler_settings.max_containers == 1
    assert made.max_concurrent_inputs <= 1
    assert made.retry_policy.retries == 0
    [volume] = made.volume_mounts
    assert (server.name(volume.volume_id), volume.mount_path) == ("groupwise-runs", "/groupwise")


async def test_work_has_its_image_from_the_builder_and_is_not_repeated_by_modal(
    server: Server, live: LiveModal
) -> None:
    assert not await live.has_app(app_of(IMAGE.name))
    await live.deploy(IMAGE)
    assert await live.has_app(app_of(IMAGE.name))
    lines = [
        line for each in server.of("ImageGetOrCreate") for line in each.image.dockerfile_commands
    ]
    assert any(line.startswith("FROM python:3.11.") for line in lines)
    assert lines[-1] == "RUN cd /opt/groupwise/build && python -I builder.py"
    made = server.functions["groupwise-abc/work"]
    assert made.retry_policy.retries == 0
    assert made.single_use_containers
    assert made.timeout_secs == 86_400
    mounts = {server.name(each.volume_id): each.mount_path for each in made.volume_mounts}
    assert mounts == {"groupwise-runs": "/groupwise", "groupwise-caches": "/groupwise-caches"}


async def test_a_call_has_its_gpu_its_time_and_its_secrets_and_nothing_else_has_them(
    server: Server, deployed: LiveModal
) -> None:
    asked: list[Any] = []
    server.answers = lambda *words: asked.append(words) or at_once(UNFINISHED)
    call = Call("job", 1, app=app_of(IMAGE.name), gpu="A100-80GB:2", gpus=2, timeout=3600)
    begun = await deployed.spawn(call, {"TOKEN": CANARY})
    [bound] = server.of("FunctionBindParams")
    options = bound.function_options
    gpu = options.resources.gpu_config
    assert (gpu.gpu_type, gpu.count, options.resources.memory_mb) == ("A100-80GB", 2, 16_384)
    assert (options.timeout_secs, options.retry_policy.retries) == (3600, 0)
    [secret] = server.of("SecretGetOrCreate")
    assert list(secret.env_dict) == ["GROUPWISE_SECRETS"]
    assert list(options.secret_ids)
    [(name, document)] = asked
    assert name.startswith("groupwise-abc/work")
    assert Call(**document) == call
    holding = [name for name, message in server.asked if CANARY in str(message)]
    assert holding == ["SecretGetOrCreate"]
    assert await deployed.lives(begun)
    await deployed.cancel(begun)
    assert not await deployed.lives(begun)


async def test_rates_are_those_of_the_workspace(server: Server, deployed: LiveModal) -> None:
    assert await deployed.rates() == {"gpu_hour_cost_h100": 3.95, "cpu_hour_cost": 0.0473}
    server.says = "PERMISSION_DENIED"
    assert await deployed.rates() is None


async def test_secrets_of_the_workspace_are_asked_for_by_name_and_variables(
    server: Server, deployed: LiveModal
) -> None:
    server.answers = lambda *_: at_once(UNFINISHED)
    named = {"huggingface": ["HF_TOKEN"], "keys": ["A", "B"]}
    await deployed.expect_secrets(named)
    await spawned(deployed, named=named)
    asked = server.of("SecretGetOrCreate")
    assert len(asked) == 4
    for each in (asked[:2], asked[2:]):
        assert {one.deployment_name: list(one.required_keys) for one in each} == named
    assert not any(each.env_dict for each in asked)
    [bound] = server.of("FunctionBindParams")
    assert len(bound.function_options.secret_ids) == 2


def failed(status: str, error: Exception | None = None) -> Any:
    data = b"" if error is None else serialize(error)
    named = getattr(api_pb2.GenericResult, f"GENERIC_STATUS_{status}")
    return api_pb2.GenericResult(status=named, exception="it did not go well", data=data)


async def test_a_call_that_has_ended_or_is_forgotten_does_not_live_and_of_others_nothing_is_known(
    server: Server, deployed: LiveModal
) -> None:
    words = [failed(each) for each in ("TIMEOUT", "TERMINATED", "INTERNAL_FAILURE")]
    raised = [RuntimeError("OSError: no room"), ImportError("of what a container needs")]
    for result in ("exited", EXPIRED, *words, *(failed("FAILURE", each) for each in raised)):
        server.answers = lambda *_, result=result: at_once(result)
        assert not await deployed.lives(await spawned(deployed)), result
    assert server.of("SecretGetOrCreate") == []
    begun = await spawned(deployed)
    server.says = "INVALID_ARGUMENT"
    with pytest.raises(HostError):
        await deployed.lives(begun)
    server.says = ""
    server.results[begun] = at_once(failed("FAILURE", ConnectionResetError("on the way")))
    with pytest.raises(OutcomeUnknown, match="on the way"):
        await deployed.lives(begun)


async def test_a_request_that_lost_its_connection_may_have_arrived(
    live: LiveModal, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost() -> None:
        raise modal.exception.ConnectionError("the last of several tries")

    call = SimpleNamespace(cancel=SimpleNamespace(aio=lost))
    monkeypatch.setattr(modal.FunctionCall, "from_id", lambda *_, **__: call)
    with pytest.raises(OutcomeUnknown, match="last of several"):
        await live.cancel("fc-1")


async def test_a_job_by_the_real_client(server: Server, live: LiveModal, tmp_path: Path) -> None:
    """The whole way, with what the fake Modal makes of each call."""
    modal = FakeModal(tmp_path / "modal")

    def answers(name: str, *words: Any) -> Callable[[], Any]:
        if name.endswith("/coordinate"):
            return at_once(coordinate(modal.folder, *words))
        begun = spawn(modal.folder, Call(**words[0]), {})
        becomes = lambda: modal.result(begun) or UNFINISHED  # noqa: E731
        server.results[begun] = becomes  # the work knows itself by this id
        return becomes

    server.answers = answers
    client = LaunchClient(modal_backend(live), tmp_path, "job")
    handle = await client.submit(
        "import os; os.mkdir('outputs'); open('outputs/x', 'w').write('y')"
    )
    assert await client.outcome(handle) is Outcome.SUCCEEDED
    assert await client.fetched(handle) == {"outputs/x": b"y"}
    modal.stop()
