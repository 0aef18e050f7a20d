"""`groupwise launch modal` with a fake Modal: containers are taken away, calls end, and nobody watches."""

import asyncio
import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest

from groupwise.core.errors import UsageError
from groupwise.jobs.clouds.backend import Handle, Outcome, Phase
from groupwise.jobs.clouds.modal import backend
from groupwise.jobs.clouds.modal.backend import ModalBackend, gpu_rate
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.spec import Limits
from groupwise.jobs.launch import places
from tests.fake_modal import RATES, FakeModal
from tests.integration.launch.person import Person
from tests.launch_backends import SAVES, WAITS, modal_backend, name
from tests.launch_backends import LaunchClient as OfAnyPlace
from tests.processes import TIMEOUT_S, wait_until_async

__all__ = ["name"]

pytestmark = pytest.mark.launch
LaunchClient: TypeAlias = OfAnyPlace[ModalBackend]
SOAK = pytest.mark.soak(suite="launch")
REPORT_PROGRAM = """\
import hashlib, os, sys
print(sys.argv[1:], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
os.mkdir("outputs")
with open("outputs/told", "w") as file:
    file.write(hashlib.sha256(os.environ["TOKEN"].encode()).hexdigest())
sys.exit(3)
"""
COUNTS = f"""{SAVES}
last, go, step = int(sys.argv[1]), pathlib.Path(sys.argv[2]), int(begun or 0)
token = hashlib.sha256(os.environ.get("TOKEN", "").encode()).hexdigest()[:8]
print("from", step, token, os.path.exists("half"), flush=True)
pathlib.Path("half").touch()
signal.signal(signal.SIGTERM, lambda *_: (save(step, str(step).encode()), sys.exit(0)))
while step < last:
    step += 1
    save(step, str(step).encode())
    while step >= 2 and not go.exists() and not (step > 2 and len(sys.argv) > 3):
        time.sleep(.01)
    time.sleep(.05)
pathlib.Path("outputs/done").write_text(str(step))
"""
"""Counts to a number, with a checkpoint for each; waits at 2 until it may go on."""


@pytest.fixture
def modal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModal]:
    found = FakeModal(tmp_path / "modal", secrets={"keys": {"TOKEN": CANARY}})
    monkeypatch.setattr(backend, "ENVIRONMENTS", str(found.environments))
    yield found
    found.stop()


@pytest.fixture
def client(modal: FakeModal, tmp_path: Path, name: str) -> LaunchClient:
    return LaunchClient(modal_backend(modal), tmp_path, name)


def sparing(client: LaunchClient, modal: FakeModal, seconds: float) -> LaunchClient:
    """One whose calls end so long before their time is up."""
    return replace(client, backend=modal_backend(modal, spare=seconds))


CANARY = "canary-7d20b1"


async def until_live(modal: FakeModal, count: int) -> None:
    """So many of its calls."""
    deadline = time.monotonic() + TIMEOUT_S
    while [await modal.lives(each) for each in modal.calls()].count(True) != count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def begins(client: LaunchClient, handle: Handle) -> list[tuple[str, ...]]:
    """From which step, with which token, and whether something was left there, by each container."""
    lines = (await client.said(handle)).splitlines()
    return [tuple(line.split()[1:]) for line in lines]


async def test_a_container_that_is_taken_away_is_followed_by_another(
    modal: FakeModal, client: LaunchClient
) -> None:
    """A container's disk is its own: what was not committed is not there in the next one."""
    go = client.folder / "go"
    handle = await client.submit(COUNTS, "4", str(go))
    [call] = modal.calls()
    for number, how in enumerate((modal.preempt, modal.lose), 2):
        await client.saved(handle, number)
        how(call)
        await wait_until_async(lambda number=number: modal.containers(call) == number)
        assert (await client.backend.status(handle)).ending is None
    await client.saved(handle, 4)
    go.touch()
    assert await client.outcome(handle) is Outcome.SUCCEEDED
    assert modal.calls() == [call]
    begun = await begins(client, handle)
    assert [(step, left) for step, _, left in begun] == [(each, "False") for each in "023"]
    assert (await client.fetched(handle))["outputs/done"] == b"4"


@pytest.mark.parametrize(
    ("secrets", "last", "outcome"),
    [
        ("of this machine", 1000, Outcome.TIME_LIMIT),
        pytest.param("of the workspace", 2, Outcome.SUCCEEDED, marks=SOAK),
    ],
)
async def test_a_job_that_outlasts_a_call_continues_unattended_in_further_calls(
    modal: FakeModal, client: LaunchClient, secrets: str, last: int, outcome: Outcome
) -> None:
    """And is ended by its own limit, which holds over all of its calls."""
    ours, limit = secrets == "of this machine", 14.0 if last > 2 else 100.0
    client = sparing(client, modal, 8.0)
    handle = await client.submit(
        COUNTS,
        *(
            (f"{last}", str(client.folder), "free")
            if last > 2
            else ("2", str(client.folder / "go"))
        ),
        values={"TOKEN": CANARY} if ours else {},
        limits=Limits(time_seconds=limit),
        place_options={"timeout": 13, "secrets": {} if ours else {"keys": ["TOKEN"]}},
    )
    await client.backend.close()
    await wait_until_async(lambda: len(modal.calls()) >= 2)
    other = sparing(client, modal, 8.0)
    end = await other.ending(handle)
    assert (end.outcome, end.seconds > 3) == (outcome, True)
    if last > 2:
        assert "14 s" in end.reason
    first, *later = [(int(step), token) for step, token, _ in await begins(other, handle)]
    token = hashlib.sha256(CANARY.encode()).hexdigest()[:8]
    assert first == (0, token)
    assert later
    assert all(step >= 1 and each == token for step, each in later)
    assert not holding(client.folder, CANARY)


def holding(folder: Path, canary: str) -> list[Path]:
    files = (each for each in folder.rglob("*") if each.is_file())
    return [each for each in files if canary.encode() in each.read_bytes()]


async def test_a_call_that_made_no_checkpoint_is_not_repeated_for_ever(
    modal: FakeModal, client: LaunchClient
) -> None:
    client = sparing(client, modal, 10.0)
    handle = await client.submit(
        WAITS, limits=Limits(time_seconds=100), place_options={"timeout": 11}
    )
    end = await client.ending(handle)
    assert (end.outcome, "no checkpoint" in end.reason) == (Outcome.TIME_LIMIT, True)
    assert len(modal.calls()) == 1


@SOAK
async def test_modals_own_time_out_kills_and_what_was_committed_is_there(
    modal: FakeModal, client: LaunchClient
) -> None:
    """The command does not heed that its time is up, and neither does the grace fit into the call."""
    client = sparing(client, modal, 0.5)
    script = COUNTS.replace("sys.exit(0)", "None") + "time.sleep(1000)"
    limits = Limits(time_seconds=100, grace_seconds=60)
    words = ("2", str(client.folder))
    handle = await client.submit(script, *words, limits=limits, place_options={"timeout": 8})
    assert await client.outcome(handle) is Outcome.LOST
    assert modal.result(modal.calls()[0]) == "timed out"
    assert (await client.fetched(handle))["outputs/checkpoints/step-2/w"] == b"2"


async def test_results_of_calls_may_be_forgotten(modal: FakeModal, client: LaunchClient) -> None:
    done = await client.submit("print(1)", name="done")
    before = await client.until(done, lambda status: status.ending)
    go = client.folder / "go"
    running = await client.submit(COUNTS, "3", str(go))
    await client.saved(running, 2)
    for call in modal.calls():
        modal._tell(call, "stop")
    await until_live(modal, 0)
    for call in modal.calls():
        modal.expire(call)
    assert await client.backend.status(done) == before
    assert await client.outcome(running) is Outcome.LOST
    go.touch()
    second = await client.resume()
    assert (await client.until(second, lambda status: status.ending)).step == 3
    assert [step for step, *_ in await begins(client, second)] == ["2"]


async def test_only_one_of_two_spawned_calls_runs_and_none_of_a_cancelled_job(
    modal: FakeModal, client: LaunchClient
) -> None:
    modal.hold()
    marks, mark = client.folder / "marks", client.folder / "mark"
    order = client.order("import sys; open(sys.argv[1], 'a').write('x')", str(marks))
    clients = [client, replace(client, backend=modal_backend(modal))]
    handle, same = await asyncio.gather(*(each.submit(order) for each in clients))
    assert handle == same
    status = await client.backend.status(handle)
    assert status.phase is Phase.WAITING
    assert "waits for a container" in status.waits_for
    never = await client.submit("import sys; open(sys.argv[1], 'w')", str(mark), name="never")
    await client.backend.cancel(never, grace=1.0)
    assert await client.outcome(never) is Outcome.CANCELLED
    await until_live(modal, 1)
    modal.hold(on=False)
    await clients[1].ending(handle)
    assert (marks.read_text(), mark.exists()) == ("x", False)


async def test_a_laptop_that_dies_before_it_spawned_is_made_up_for(
    modal: FakeModal, client: LaunchClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(*_: object) -> str:
        raise ConnectionResetError

    with monkeypatch.context() as patched:
        patched.setattr(modal, "spawn", dies)
        with pytest.raises(ConnectionResetError):
            await client.submit("print(1)")
    handle = await client.backend.find(client.name)
    assert handle is not None
    assert "way to Modal" in str((await client.backend.status(handle)).waits_for)
    assert await client.submit("print(1)") == handle
    assert await client.outcome(handle) is Outcome.SUCCEEDED
    assert await client.said(handle) == "1\n"


class Late(FakeModal):
    """Asked whether a call lives, it answers once it does not: what was read before is old by then."""

    async def lives(self, call: str) -> bool:
        while await super().lives(call):  # noqa: ASYNC110 — of another process
            await asyncio.sleep(0.01)
        return False


async def test_an_end_between_two_questions_is_no_loss(
    modal: FakeModal, client: LaunchClient
) -> None:
    late = modal_backend(Late(modal.folder))
    end = (await late.status(await client.submit("import time; time.sleep(1)"))).ending
    assert end is not None
    assert end.outcome is Outcome.SUCCEEDED


async def test_an_image_is_made_once_and_again_only_from_what_it_is_made_of(
    modal: FakeModal, client: LaunchClient
) -> None:
    sha, app = client.store.put(b"made of this"), modal.folder / "apps/groupwise-abc"
    image = {"name": "abc", "python": "3.11", "files": {"builder.py": [sha, 0o644, 12]}}
    handle = await client.submit("raise SystemExit(1)", place_options={"image": image})
    assert app.read_text() == '["builder.py"]'
    await client.ending(handle)
    empty = BlobStore(client.folder / "another")
    await client.ending(await client.backend.resume(client.name, {}, empty))
    app.unlink()
    with pytest.raises(UsageError, match="groupwise-abc"):
        await client.backend.resume(client.name, {}, empty)


@pytest.mark.parametrize(("gpu", "rate"), [
    ("A100", 2.1), ("A100-80GB", 2.5), ("A10", 1.1), ("a10g", 1.1), ("L4", 0.8), ("H100!", 3.95), ("B200+", 6.25), ("RTX-PRO-6000", 3.03),
])  # fmt: skip
def test_a_gpu_costs_what_modal_lists(gpu: str, rate: float) -> None:
    assert gpu_rate(RATES, gpu) == rate


@pytest.mark.parametrize("gpu", ["V100", "H1", "A1", "L", "A100-60GB"])
def test_a_gpu_that_modal_does_not_list_is_refused(gpu: str) -> None:
    with pytest.raises(UsageError, match="A100-80GB, RTX6000, H100"):
        gpu_rate(RATES, gpu)


async def test_a_plan_needs_no_token_and_tells_what_it_costs(client: LaunchClient) -> None:
    backend = modal_backend(FakeModal(client.folder / "modal", owner=None), spare=180.0)
    limits = Limits(time_seconds=50 * 3600)
    plan = await backend.plan(client.order("x", limits=limits, place_options={"gpu": "A100"}))
    assert (plan.price_per_hour, plan.paid) == (None, True)
    assert "no token of Modal" in plan.steps[0]
    assert "takes a token" in plan.steps[-1]
    assert any("up to 2 more" in step for step in plan.steps)
    with pytest.raises(UsageError, match="at most 86400 s"):
        await backend.plan(client.order("x", place_options={"timeout": 86_401}))


async def test_a_job_costs_what_its_attempts_took(
    client: LaunchClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RATES, "gpu_hour_cost_h100", 36_000.0)
    fails = "import os, sys; sys.exit(os.environ['ATTEMPT'] == '1')"
    first = await client.submit(fails, gpus=2, place_options={"gpu": "H100"})
    before = await client.backend.cost(first)
    seconds = (await client.ending(first)).seconds
    second = await client.resume()
    seconds += (await client.ending(second)).seconds
    found = await client.backend.cost(second)
    assert found is not None
    assert found.dollars == pytest.approx(2 * 10 * seconds, abs=0.01)
    assert "2 H100 at the rates of now" in found.counts
    assert before is not None
    assert before.dollars < found.dollars
    assert await client.backend.cost(await client.submit("print()", name="without")) is None


@pytest.fixture
def typing(modal: FakeModal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modal is the one of this machine."""
    monkeypatch.setitem(places.BACKENDS, places.MODAL, lambda _: modal_backend(modal))


@pytest.mark.usefixtures("typing")
def test_typed_from_the_plan_to_the_results(person: Person, tmp_path: Path) -> None:
    """All but Modal itself is what a person has who types it."""
    (person.project / "keys.env").write_text(f"TOKEN={CANARY}\n")
    (person.project / "job.py").write_text(REPORT_PROGRAM)
    dear = ("--gpu-model", "H100", "--gpus", "2", "--max-price", "7.5", "--script", "job.py")
    assert "$7.90 an hour" in person.types("modal", *dear, code=2).err
    assert (
        "V100: Modal's list" in person.types("modal", "--gpu-model", "V100", *dear[4:], code=2).err
    )
    assert "$7.90 an hour" in person.types("modal", "--dry-run", *dear, code=2).err
    words = (
        "--name",
        "typed",
        "--gpu-model",
        "A10G",
        "--env-file",
        "keys.env",
        "--script",
        "job.py",
    )
    typed = person.types("modal", *words, "a b", "--", "--x", code=3)
    assert "['a b', '--', '--x'] 0" in typed.out
    assert CANARY not in typed.out + typed.err
    found = person.result("typed")
    assert (found["exit_code"], found["cost"] >= 0) == (3, True)
    assert "A10G at the rates of now" in found["cost_counts"]
    told = (person.project / "launches/typed/outputs/told").read_text()
    assert told == hashlib.sha256(CANARY.encode()).hexdigest()
    assert not person.holding(CANARY, tmp_path / "modal")
    person.types("fetch", "typed", "--at", "modal", "--to", str(tmp_path / "here"))
    assert (tmp_path / "here/outputs/told").read_text() == told
    person.types("remove", "typed")
    assert not list((tmp_path / "modal/volume/groupwise-launch/attempts").glob("typed*"))
