"""`groupwise launch ray` with a real Ray of two nodes, and what happens to jobs when it, or somebody, is unkind."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.clouds.port import Backend, Order, Outcome, Phase, Unreachable
from groupwise.hosts import ray as ray_host
from groupwise.hosts.driver import Engine, Launch, Runner
from groupwise.hosts.failures import FailureClass
from groupwise.hosts.files import BlobStore
from groupwise.hosts.port import OutcomeUnknown
from groupwise.hosts.spec import JobSpec, Limits
from tests import ray
from tests.integration.launch.person import Person
from tests.integration.launch.stopping import ctrl_c_ends_it
from tests.places import Place, ending, said, until
from tests.ray import Ray

pytestmark = pytest.mark.launch
SLOWLY = 4.0
"""Seconds in which a job saves; by itself Ray kills after 3."""
SAVES = f"""\
import hashlib, json, os, pathlib, signal, sys, time
def save():
    folder = pathlib.Path("outputs/checkpoints/step-1")
    folder.mkdir(parents=True)
    (folder / "w").write_bytes(b"one")
    entry = {{"size": 3, "sha256": hashlib.sha256(b"one").hexdigest()}}
    (folder / "manifest.json").write_text(json.dumps({{"step": 1, "files": {{"w": entry}}}}))
if "RESUME_FROM" in os.environ:
    print(pathlib.Path(os.environ["RESUME_FROM"], "w").read_text())
    sys.exit(0)
if sys.argv[1:] == ["at once"]:
    save()
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("on", flush=True)
while not told:
    time.sleep(.05)
time.sleep({SLOWLY})
print(len(told))
save()
"""
SHOWS = """\
import json, os, sys
os.makedirs("outputs")
told = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS")}
told["token"] = os.environ["RAY_AUTH_TOKEN"][:4]
with open("outputs/told.json", "w") as file:
    json.dump({"words": sys.argv[1:], **told}, file)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Ray]:
    with ray.cluster() as found:
        found.start_node()
        yield found


@pytest.fixture
def clerk(cluster: Ray, person: Person, monkeypatch: pytest.MonkeyPatch) -> Person:
    """A person at the head."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", cluster.token)
    return person


@pytest.fixture
async def backend(cluster: Ray, tmp_path: Path) -> AsyncIterator[Backend]:
    reached = Place("ray", str(tmp_path), ray=(cluster.address, cluster.token)).reach()
    yield reached
    await reached.close()


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.originalname.removeprefix("test_")[:60].replace("_", "-")


def order(name: str, script: str, *arguments: str, gpus: int = 0, **resources: float) -> Order:
    spec = JobSpec(
        ("python3", "-c", script, *arguments),
        artefacts=("outputs",),
        checkpoints=("outputs",),
        limits=Limits(time_seconds=600, grace_seconds=20),
    )
    return Order(name, spec, gpus, asks={"resources": resources} if resources else {})


def waits_for(go: Path) -> str:
    return (
        f"import os, time\nprint(os.environ['CUDA_VISIBLE_DEVICES'] or 'none', flush=True)\n"
        f"while not os.path.exists({str(go)!r}):\n    time.sleep(.05)"
    )


# --- typed -----------------------------------------------------------------------------------------


def test_a_script_runs_on_a_node_and_comes_back(clerk: Person, cluster: Ray) -> None:
    (clerk.project / "job.py").write_text(SHOWS)
    words = ("two words", "--gpus", "-x", "it's")
    asks = ("--gpus", "2", "--cpus", "2", "--memory", "100M", "--resource", "apart=1")
    typed = clerk.types("ray", "--name", "shows", *asks, "--script", "job.py", *words)
    assert f"shows is placed on ray:,{cluster.address}" in typed.err
    told = json.loads((clerk.project / "launches/shows/outputs/told.json").read_text())
    assert told == {
        "words": list(words),
        "CUDA_VISIBLE_DEVICES": "0,1",
        "RAY_ADDRESS": f"{cluster.host}:{cluster.gcs}",
        "token": cluster.token[:4],
    }
    assert clerk.result("shows")["state"] == "succeeded"
    [job] = cluster.jobs("shows")
    assert cluster.node in job["driver_agent_http_address"]
    assert job["status"] == "SUCCEEDED"
    assert clerk.holding(cluster.token) == []


def test_a_plan_asks_ray_and_changes_nothing(
    clerk: Person, cluster: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.idle()
    (clerk.project / "job.py").write_text("print('it ran')")
    dry = ("ray", "--dry-run", "--name", "planned", "--gpus", "1")
    typed = clerk.types(*dry, "--resource", "apart=1", "--script", "job.py")
    assert '"entrypoint_num_cpus": 1, "entrypoint_num_gpus": 1' in typed.out
    assert "Ray has free: 8 of 8 CPU, 4 of 4 GPU" in typed.out
    assert cluster.jobs("planned") == []
    dead = ("--address", f"http://127.0.0.1:{cluster.gcs}")
    typed = clerk.types(*dry, *dead, "--script", "job.py", code=1)
    assert "Ray does not answer there" in typed.err
    assert "Traceback" not in typed.err
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 40)
    assert "does not take its token" in clerk.types(*dry, "--script", "job.py", code=1).err


def test_ctrl_c_ends_it_in_order_and_fetches(clerk: Person, cluster: Ray) -> None:
    ctrl_c_ends_it(clerk, "ray", far=(cluster.folder,))


def test_what_waits_says_what_for_and_is_stopped(clerk: Person, cluster: Ray) -> None:
    cluster.idle()
    (clerk.project / "job.py").write_text("print('it ran')")
    clerk.types("ray", "--name", "later", "--detach", "--gpus", "9", "--script", "job.py")
    [listed] = json.loads(clerk.types("list", "--json").out)["jobs"]
    assert (listed["state"], listed["place"]) == ("waiting", f"ray:,{cluster.address}")
    assert (
        "of Ray is pending: it wants 1 CPU, 9 GPU; free: 8 of 8 CPU, 4 of 4 GPU"
        in listed["waits_for"]
    )
    clerk.types("stop", "later")
    assert json.loads(clerk.types("list", "--json").out)["jobs"][0]["state"] == "cancelled"
    assert clerk.types("logs", "later").out == ""


def test_found_from_another_machine_by_address_and_folder(clerk: Person, cluster: Ray) -> None:
    (clerk.project / "job.py").write_text("print('it ran')")
    shared = clerk.home / "shared"
    where = ("--shared", str(shared))
    clerk.types("ray", "--name", "there", "--detach", *where, "--script", "job.py")
    clerk.state = "another"
    typed = clerk.types("logs", "-f", "there", "--at", f"ray:{shared},{cluster.address}")
    assert "it ran" in typed.out
    assert (shared / "groupwise-launch").is_dir()


# --- unkind ----------------------------------------------------------------------------------------


async def test_each_gets_gpus_of_its_own_and_what_asks_for_none_gets_none(
    backend: Backend, store: BlobStore, name: str, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    asked = (("a", 1), ("b", 1), ("c", 0))
    handles = [
        await backend.submit(order(f"{name}-{word}", waits_for(go), gpus=gpus, apart=0.5), store)
        for word, gpus in asked
    ]
    for each in handles:
        await until(backend, each, lambda status: status.log_size)
    waiting = await backend.submit(order(f"{name}-d", waits_for(go), gpus=1, apart=0.5), store)
    assert (await backend.status(waiting)).phase is Phase.WAITING
    seen = [(await said(backend, each)).strip() for each in handles]
    assert sorted(seen) == ["0", "1", "none"]
    assert seen[2] == "none"
    go.touch()
    for each in (*handles, waiting):
        assert (await ending(backend, each)).outcome is Outcome.SUCCEEDED
    assert (await said(backend, waiting)).strip() in ("0", "1")


async def test_cut_off_before_ray_had_it_whoever_looks_submits_it(
    backend: Backend,
    store: BlobStore,
    name: str,
    cluster: Ray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def is_cut_off(*_: object) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(ray_host.RayRunner, "_submit", is_cut_off)
        with pytest.raises(asyncio.CancelledError):
            await backend.submit(order(name, "print('it ran')"), store)
    assert cluster.jobs(name) == []
    handle = await backend.find(name)
    assert handle is not None
    assert (await ending(backend, handle)).outcome is Outcome.SUCCEEDED
    assert await backend.submit(order(name, "print('it ran')"), store) == handle
    assert len(cluster.jobs(name)) == 1
    assert await said(backend, handle) == "it ran\n"


async def test_an_answer_that_does_not_come_is_asked_for_again_and_it_runs_once(
    backend: Backend,
    store: BlobStore,
    name: str,
    cluster: Ray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, lost = ray_host.RayRunner._submit, iter([True])

    async def answers_late(*asked: Any) -> None:
        await real(*asked)
        if next(lost, False):
            raise OutcomeUnknown("no answer in time")

    monkeypatch.setattr(ray_host.RayRunner, "_submit", answers_late)
    handle = await backend.submit(order(name, "print('it ran')"), store)
    assert next(lost, None) is None
    assert (await ending(backend, handle)).outcome is Outcome.SUCCEEDED
    assert len(cluster.jobs(name)) == 1
    assert await said(backend, handle) == "it ran\n"


async def test_stopped_by_hand_it_has_time_to_save_and_goes_on_from_there(
    backend: Backend, store: BlobStore, name: str, cluster: Ray
) -> None:
    handle = await backend.submit(order(name, SAVES), store)
    await until(backend, handle, lambda status: status.log_size)
    cluster.stop(name)
    status = await until(backend, handle, lambda status: status.ending)
    assert status.ending is not None
    assert status.ending.failure is FailureClass.PREEMPTION
    assert status.ending.reason.startswith("ray:")
    assert status.step == 1
    assert await said(backend, handle) == "on\n1\n"
    again = await backend.resume(name, {}, store)
    assert (await ending(backend, again)).outcome is Outcome.SUCCEEDED
    assert await said(backend, again) == "one\n"


async def test_what_ray_cannot_begin_is_told_with_its_words(
    backend: Backend, store: BlobStore, name: str
) -> None:
    runner: Any = backend._ray  # type: ignore[attr-defined]
    word = await runner.word()
    wrong = Engine(word, ('{"entrypoint_num_cpus": -1}',))
    await runner.launch(Launch(name, 1, JobSpec(("true",)), engine=wrong))
    state = await runner.status(name, 1)
    assert "num_cpus cannot be negative" in state.refused.message
    assert "Traceback" not in state.refused.message


async def test_jobs_of_another_ray_in_the_same_folder_are_left_alone(
    backend: Backend, name: str
) -> None:
    runner: Any = backend._ray  # type: ignore[attr-defined]
    plain = Runner(runner.host, root=runner.root)
    await plain.launch(Launch(name, 1, JobSpec(("true",)), engine=Engine("ray:another:8265")))
    assert (await runner.status(name, 1)).engine_says == ""
    await plain.void(name, 1)


async def test_with_its_node_it_is_lost_and_goes_on_from_its_checkpoint(
    backend: Backend, store: BlobStore, name: str, cluster: Ray
) -> None:
    handle = await backend.submit(order(name, SAVES, "at once", apart=1), store)
    await until(backend, handle, lambda status: status.log_size and status.step)
    await asyncio.to_thread(cluster.kill_node)
    assert (await ending(backend, handle)).outcome is Outcome.LOST
    cluster.start_node()
    again = await backend.resume(name, {}, store)
    assert (await ending(backend, again)).outcome is Outcome.SUCCEEDED
    assert await said(backend, again) == "one\n"


async def test_without_its_head_a_job_goes_on_and_what_waited_waits_for_the_next_one(
    backend: Backend, store: BlobStore, name: str, cluster: Ray, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    handle = await backend.submit(order(name, waits_for(go)), store)
    later = await backend.submit(order(f"{name}-later", "print('it ran')", new=1), store)
    await until(backend, handle, lambda status: status.log_size)
    cluster.kill("gcs_server", "dashboard/dashboard.py", "ray-dashboard-")
    assert (await backend.status(handle)).phase is Phase.RUNNING
    with pytest.raises(Unreachable, match="Ray does not answer"):
        await backend.status(later)
    with pytest.raises(Unreachable, match="Ray does not answer"):
        await backend.submit(order(f"{name}-new", "print('it ran')"), store)
    go.touch()
    assert (await ending(backend, handle)).outcome is Outcome.SUCCEEDED
    cluster.end()
    cluster.start(new=1)
    assert (await ending(backend, later)).outcome is Outcome.SUCCEEDED
    assert await said(backend, later) == "it ran\n"
    new = await backend.submit(order(f"{name}-new", "print('it ran')"), store)
    assert (await ending(backend, new)).outcome is Outcome.SUCCEEDED


@pytest.mark.soak(suite="launch")
async def test_what_ray_gives_up_it_gets_again(store: BlobStore, name: str, tmp_path: Path) -> None:
    with ray.cluster(start_timeout=3) as impatient:
        place = Place("ray", str(tmp_path), ray=(impatient.address, impatient.token))
        backend = place.reach()
        handle = await backend.submit(order(name, "print('it ran')", apart=1), store)
        await asyncio.to_thread(
            impatient.until, lambda: [job["status"] for job in impatient.jobs(name)] == ["FAILED"]
        )
        status = await backend.status(handle)
        assert (status.phase, status.waits_for) == (Phase.WAITING, "it is on its way to Ray")
        impatient.start_node()
        assert (await ending(backend, handle)).outcome is Outcome.SUCCEEDED
        assert await said(backend, handle) == "it ran\n"
        await backend.close()
