"""Modal as a place, with a Modal of this machine: what happens when containers are taken away, calls end, and nobody watches."""

import asyncio
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from groupwise.cli.main import main
from groupwise.clouds.modal import runner as modal_runner
from groupwise.clouds.modal.backend import ModalBackend
from groupwise.clouds.modal.prices import DOLLARS_PER_SECOND, PRICED_AT
from groupwise.clouds.port import Backend, CloudError, Handle, Order, Outcome, Phase
from groupwise.errors import UsageError
from groupwise.hosts.files import BlobStore
from groupwise.hosts.spec import JobSpec, Limits
from groupwise.launch import places
from groupwise.testing.fake_modal import FakeModal
from tests.integration.launch.person import Person
from tests.integration.launch.stopping import asked, assert_stopped
from tests.integration.launch.test_local import TRAINS
from tests.places import ending, modal_backend
from tests.places import until as seen

pytestmark = pytest.mark.launch
LONG = pytest.mark.soak(suite="launch")
SOON = 40.0
TELLS = """\
import hashlib, os, sys
print(sys.argv[1:], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
os.mkdir("outputs")
with open("outputs/told", "w") as file:
    file.write(hashlib.sha256(os.environ["TOKEN"].encode()).hexdigest())
sys.exit(3)
"""
COUNTS = """\
import hashlib, json, os, pathlib, signal, sys, time
last, go = int(sys.argv[1]), pathlib.Path(sys.argv[2])
begun = os.environ.get("RESUME_FROM")
step = int(pathlib.Path(begun, "w").read_text()) if begun else 0
print("from", step, hashlib.sha256(os.environ.get("TOKEN", "").encode()).hexdigest()[:8], flush=True)
def save(*_):
    folder = pathlib.Path(f"outputs/checkpoints/step-{step}")
    folder.mkdir(parents=True, exist_ok=True)
    data = str(step).encode()
    (folder / "w").write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"step": step, "files": {"w": entry}}))
signal.signal(signal.SIGTERM, lambda *_: (save(), sys.exit(0)))
while step < last:
    step += 1
    save()
    while step >= 2 and not go.exists() and not (step > 2 and len(sys.argv) > 3):
        time.sleep(.01)
    time.sleep(.05)
pathlib.Path("outputs/done").write_text(str(step))
"""
"""Counts to a number, with a checkpoint for each; waits at 2 until it may go on."""


@pytest.fixture
def modal(tmp_path: Path) -> Iterator[FakeModal]:
    found = FakeModal(tmp_path / "modal")
    yield found
    found.stop()


@pytest.fixture
def backend(modal: FakeModal) -> ModalBackend:
    return modal_backend(modal)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def order(script: str, *words: str, name: str = "job", **fields: Any) -> Order:
    asks, values = fields.pop("asks", {}), fields.pop("values", {})
    spec = JobSpec(("python3", "-c", script, *words), secrets=tuple(values), **fields)
    return Order(name, spec, secrets=values, asks=asks)


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def until_live(modal: FakeModal, count: int) -> None:
    """So many of its calls."""
    deadline = time.monotonic() + SOON
    while [await modal.lives(each) for each in modal.calls()].count(True) != count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def at_step(backend: Backend, handle: Handle, step: int) -> None:
    await seen(backend, handle, lambda status: status.step == step)


async def said(backend: Backend, handle: Handle) -> list[str]:
    part = await backend.log(handle, 0, 1 << 20)
    return [" ".join(line.split()[:2]) for line in part.data.decode().splitlines()]


def holding(folder: Path, canary: str) -> list[Path]:
    files = (each for each in folder.rglob("*") if each.is_file())
    return [each for each in files if canary.encode() in each.read_bytes()]


@pytest.mark.parametrize("how", ["preempt", "lose"])
async def test_a_container_that_is_taken_away_is_followed_by_another(
    modal: FakeModal, backend: ModalBackend, store: BlobStore, tmp_path: Path, how: str
) -> None:
    go = tmp_path / "go"
    handle = await backend.submit(order(COUNTS, "4", str(go)), store)
    await at_step(backend, handle, 2)
    [call] = modal.calls()
    getattr(modal, how)(call)
    await until(lambda: modal.containers(call) == 2)
    assert (await backend.status(handle)).ending is None
    go.touch()
    assert (await ending(backend, handle)).outcome is Outcome.SUCCEEDED
    assert modal.calls() == [call]
    assert await said(backend, handle) == ["from 0", "from 2"]
    await backend.fetch(handle, tmp_path / "results")
    assert (tmp_path / "results/outputs/done").read_text() == "4"


async def test_what_was_written_after_the_last_checkpoint_is_not_there_in_the_next_container(
    modal: FakeModal, backend: ModalBackend, store: BlobStore
) -> None:
    """A container's disk is its own: nothing that was not committed is relied on."""
    script = "import pathlib, time; print(pathlib.Path('half').exists(), flush=True); open('half', 'w'); time.sleep(1000)"
    handle = await backend.submit(order(script), store)
    await seen(backend, handle, lambda status: status.log_size)
    modal.lose(modal.calls()[0])
    await seen(backend, handle, lambda status: status.log_size > len("False\n"))
    assert await said(backend, handle) == ["False", "False"]


@pytest.mark.parametrize(
    "secrets", ["of this machine", pytest.param("of the workspace", marks=LONG)]
)
async def test_a_job_that_outlasts_a_call_goes_on_in_others_with_nobody_there(
    store: BlobStore, tmp_path: Path, secrets: str
) -> None:
    canary = "canary-7d20b1"
    modal = FakeModal(tmp_path / "modal", secrets={"keys": {"TOKEN": canary}})
    ours = secrets == "of this machine"
    backend = modal_backend(modal, spare=9.0)
    asked = order(
        COUNTS,
        "2",
        str(tmp_path / "go"),
        values={"TOKEN": canary} if ours else {},
        limits=Limits(time_seconds=100),
        asks={"timeout": 13, "secrets": {} if ours else {"keys": ["TOKEN"]}},
    )
    handle = await backend.submit(asked, store)
    await backend.close()
    # Each call begins from the checkpoint before, and makes none of its own at step 2.
    await until(lambda: len(modal.calls()) >= 2)
    other = modal_backend(modal, spare=9.0)
    (tmp_path / "go").touch()
    end = await ending(other, handle)
    assert (end.outcome, end.seconds > 3) == (Outcome.SUCCEEDED, True)
    assert await said(other, handle) == ["from 0", "from 2"]
    log = (await other.log(handle, 0, 1 << 16)).data.decode()
    assert log.count(hashlib.sha256(canary.encode()).hexdigest()[:8]) == 2
    assert not holding(tmp_path, canary)
    modal.stop()


async def test_a_call_that_made_no_checkpoint_is_not_repeated_for_ever(
    modal: FakeModal, store: BlobStore
) -> None:
    backend = modal_backend(modal, spare=10.0)
    script = "import time; print('on', flush=True); time.sleep(1000)"
    asked = order(script, limits=Limits(time_seconds=100), asks={"timeout": 12})
    handle = await backend.submit(asked, store)
    end = await ending(backend, handle)
    assert (end.outcome, "no checkpoint" in end.reason) == (Outcome.TIME_LIMIT, True)
    assert len(modal.calls()) == 1


async def test_the_jobs_own_limit_holds_over_all_its_calls(
    modal: FakeModal, store: BlobStore, tmp_path: Path
) -> None:
    backend = modal_backend(modal, spare=6.0)
    asked = order(
        COUNTS, "1000", str(tmp_path), "free", limits=Limits(time_seconds=10), asks={"timeout": 9}
    )
    handle = await backend.submit(asked, store)
    status = await seen(backend, handle, lambda status: status.ending)
    assert status.ending is not None
    assert (status.ending.outcome, "10 s" in status.ending.reason) == (Outcome.TIME_LIMIT, True)
    assert len(modal.calls()) > 1
    assert (status.step or 0) > 2


@LONG
async def test_modals_own_time_out_kills_and_what_was_committed_is_there(
    modal: FakeModal, store: BlobStore, tmp_path: Path
) -> None:
    """The command does not heed that its time is up, and neither does the grace fit into the call."""
    backend = modal_backend(modal, spare=0.5)
    script = COUNTS.replace("(save(), sys.exit(0))", "None") + "time.sleep(1000)"
    limits = Limits(time_seconds=100, grace_seconds=60)
    asked = order(script, "2", str(tmp_path), limits=limits, asks={"timeout": 8})
    handle = await backend.submit(asked, store)
    assert (await ending(backend, handle)).outcome is Outcome.LOST
    assert modal.result(modal.calls()[0]) == "timed out"
    await backend.fetch(handle, tmp_path / "results")
    assert (tmp_path / "results/outputs/checkpoints/step-2/w").read_text() == "2"


async def test_results_of_calls_may_be_forgotten(
    modal: FakeModal, backend: ModalBackend, store: BlobStore, tmp_path: Path
) -> None:
    done = await backend.submit(order("print(1)", name="done"), store)
    before = await seen(backend, done, lambda status: status.ending)
    running = await backend.submit(order(COUNTS, "3", str(tmp_path / "go"), name="runs"), store)
    await at_step(backend, running, 2)
    for call in modal.calls():
        modal._tell(call, "stop")
    await until_live(modal, 0)
    for call in modal.calls():
        modal.expire(call)
    assert await backend.status(done) == before
    lost = (await backend.status(running)).ending
    assert lost is not None
    assert lost.outcome is Outcome.LOST
    (tmp_path / "go").touch()
    second = await backend.resume("runs", {}, store)
    assert (await seen(backend, second, lambda status: status.ending)).step == 3
    assert await said(backend, second) == ["from 2"]


async def test_a_secret_that_the_workspace_has_not_is_told(
    tmp_path: Path, store: BlobStore
) -> None:
    modal = FakeModal(tmp_path / "modal", secrets={"keys": {"TOKEN": "x"}})
    image = {"name": "env", "python": "3.11", "files": {}}
    asked = order("print()", asks={"secrets": {"keys": ["TOKEN", "WANTED"]}, "image": image})
    backend = modal_backend(modal)
    assert "with TOKEN, WANTED of keys of its" in " ".join((await backend.plan(asked)).steps)
    with pytest.raises(CloudError, match="Secret keys has no WANTED"):
        await backend.submit(asked, store)
    assert not list((tmp_path / "modal/apps").iterdir()), "no image was made in vain"
    assert await backend.find("job") is None


async def test_of_calls_that_two_laptops_spawned_one_stays(
    modal: FakeModal, store: BlobStore, tmp_path: Path
) -> None:
    modal.hold()
    marks = tmp_path / "marks"
    asked = order("import sys; open(sys.argv[1], 'a').write('x')", str(marks))
    laptops = [modal_backend(modal) for _ in range(2)]
    handles = await asyncio.gather(*(each.submit(asked, store) for each in laptops))
    assert handles[0] == handles[1]
    status = await laptops[0].status(handles[0])
    assert status.phase is Phase.WAITING
    assert "waits for a container" in status.waits_for
    await until_live(modal, 1)
    modal.hold(on=False)
    await ending(laptops[1], handles[1])
    assert marks.read_text() == "x"


async def test_a_laptop_that_dies_before_it_spawned_is_made_up_for(
    modal: FakeModal, backend: ModalBackend, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(*_: object) -> str:
        raise ConnectionResetError

    with monkeypatch.context() as patched:
        patched.setattr(modal, "spawn", dies)
        with pytest.raises(ConnectionResetError):
            await backend.submit(order("print(1)"), store)
    handle = await backend.find("job")
    assert handle is not None
    assert (await backend.status(handle)).waits_for == "it is on its way to Modal"
    assert await backend.submit(order("print(1)"), store) == handle
    assert (await ending(backend, handle)).outcome is Outcome.SUCCEEDED
    assert await said(backend, handle) == ["1"]


class Late(FakeModal):
    """Asked whether a call lives, it answers once it does not: what was read before is old by then."""

    async def lives(self, call: str) -> bool:
        while await super().lives(call):  # noqa: ASYNC110 — of another process
            await asyncio.sleep(0.01)
        return False


async def test_an_end_between_two_questions_is_no_loss(
    modal: FakeModal, store: BlobStore, tmp_path: Path
) -> None:
    late = modal_backend(Late(modal.folder))
    handle = await modal_backend(modal).submit(order("import time; time.sleep(1)"), store)
    end = (await late.status(handle)).ending
    assert end is not None
    assert end.outcome is Outcome.SUCCEEDED


async def test_cancelled_while_it_waits_it_never_begins(
    modal: FakeModal, backend: ModalBackend, store: BlobStore, tmp_path: Path
) -> None:
    modal.hold()
    mark = tmp_path / "mark"
    handle = await backend.submit(order("import sys; open(sys.argv[1], 'w')", str(mark)), store)
    await backend.cancel(handle, grace=1.0)
    assert (await ending(backend, handle)).outcome is Outcome.CANCELLED
    await until_live(modal, 0)
    modal.hold(on=False)
    assert not mark.exists()


async def test_cancelled_between_two_containers_it_ends(
    modal: FakeModal,
    backend: ModalBackend,
    store: BlobStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modal_runner, "SILENT", 0.5)
    handle = await backend.submit(order(COUNTS, "3", str(tmp_path / "go")), store)
    await at_step(backend, handle, 2)
    modal.hold()
    modal.lose(modal.calls()[0])
    status = await backend.status(handle)
    assert status.phase is Phase.RUNNING
    assert await backend.wait(handle, status, 1.0) == status
    await backend.cancel(handle, grace=1.0)
    assert (await ending(backend, handle)).outcome is Outcome.CANCELLED
    await backend.fetch(handle, tmp_path / "results")
    assert (tmp_path / "results/outputs/checkpoints/step-2/w").exists()


async def test_an_image_is_made_once_and_again_only_from_what_it_is_made_of(
    modal: FakeModal, backend: ModalBackend, store: BlobStore, tmp_path: Path
) -> None:
    sha = store.put(b"made of this")
    image = {"name": "abc", "python": "3.11", "files": {"builder.py": [sha, 0o644, 12]}}
    asked = order("raise SystemExit(1)", asks={"image": image})
    handle = await backend.submit(asked, store)
    assert (modal.folder / "apps/groupwise-abc").read_text() == '["builder.py"]'
    await ending(backend, handle)
    empty = BlobStore(tmp_path / "another")
    await backend.resume("job", {}, empty)
    (modal.folder / "apps/groupwise-abc").unlink()
    await ending(backend, Handle("modal", "job", 2))
    with pytest.raises(UsageError, match="groupwise-abc is not at Modal any more"):
        await backend.resume("job", {}, empty)


async def test_a_plan_needs_no_token_and_tells_what_it_costs(tmp_path: Path) -> None:
    backend = modal_backend(FakeModal(tmp_path / "modal", owner=None), spare=180.0)
    limits = Limits(time_seconds=50 * 3600)
    plan = await backend.plan(order("x", limits=limits, asks={"gpu": "A100"}))
    assert plan.price_per_hour == pytest.approx(0.000583 * 3600)
    assert "there is no token of Modal here" in plan.steps[0]
    assert any("up to 2 more" in step for step in plan.steps)
    with pytest.raises(UsageError, match="at most 86400 s"):
        await backend.plan(order("x", asks={"timeout": 86_401}))


async def test_a_job_costs_what_its_attempts_took(
    backend: ModalBackend, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DOLLARS_PER_SECOND, "H100", 10.0)
    fails = "import os, sys; sys.exit(os.environ['ATTEMPT'] == '1')"
    asked = replace(order(fails, asks={"gpu": "H100"}), gpus=2)
    first = await backend.submit(asked, store)
    none = await backend.cost(first)
    one = await ending(backend, first)
    second = await backend.resume("job", {}, store)
    other = await ending(backend, second)
    found = await backend.cost(second)
    assert found is not None
    seconds = (one.seconds or 0) + (other.seconds or 0)
    assert found.dollars == pytest.approx(2 * 10 * seconds, abs=0.01)
    assert f"2 H100 at list prices of {PRICED_AT}" in found.counts
    assert none is not None
    assert none.dollars < found.dollars
    without = await backend.submit(order("print()", name="without"), store)
    assert await backend.cost(without) is None


@pytest.fixture
def typing(modal: FakeModal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modal is the one of this machine."""
    monkeypatch.setitem(places.WAYS, places.MODAL, lambda _: modal_backend(modal))


@pytest.mark.usefixtures("typing")
def test_typed_from_the_plan_to_the_results(person: Person, tmp_path: Path) -> None:
    """All but Modal itself is what a person has who types it."""
    canary = "canary-0c6e42"
    (person.project / "keys.env").write_text(f"TOKEN={canary}\n")
    (person.project / "job.py").write_text(TELLS)
    dear = ("--gpu", "H100", "--gpus", "2", "--max-price", "7.5", "--script", "job.py")
    assert "$7.90 an hour" in person.types("modal", *dear, code=2).err
    assert "$7.90 an hour" in person.types("modal", "--dry-run", *dear, code=2).err
    words = ("--name", "typed", "--gpu", "A10G", "--env-file", "keys.env", "--script", "job.py")
    typed = person.types("modal", *words, "a b", "--", "--x", code=3)
    assert "['a b', '--', '--x'] 0" in typed.out
    assert canary not in typed.out + typed.err
    found = person.result("typed")
    assert (found["exit_code"], found["cost"] >= 0) == (3, True)
    assert f"A10G at list prices of {PRICED_AT}" in found["cost_counts"]
    told = (person.project / "launches/typed/outputs/told").read_text()
    assert told == hashlib.sha256(canary.encode()).hexdigest()
    assert not person.holding(canary, tmp_path / "modal")
    person.types("fetch", "typed", "--at", "modal", "--to", str(tmp_path / "here"))
    assert (tmp_path / "here/outputs/told").read_text() == told
    person.types("remove", "typed")
    assert not list((tmp_path / "modal/volume/groupwise-launch/attempts").glob("typed*"))


@pytest.mark.usefixtures("typing")
def test_ctrl_c_ends_it_in_order_and_fetches(
    person: Person, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(person.project)
    for name, value in person.environment.items():
        monkeypatch.setenv(name, value)
    shown, over = BytesIO(), Event()

    def press() -> None:
        while not over.wait(0.02):
            if b"it waits" in shown.getvalue():
                os.kill(os.getpid(), signal.SIGINT)
                return

    screen = TextIOWrapper(shown, "utf-8", write_through=True)
    keyboard = Thread(target=press)
    keyboard.start()
    with redirect_stdout(screen), redirect_stderr(screen):
        code = main(["launch", "modal", "--gpu", "A10G", *asked(person, "stopped")])
    over.set()
    keyboard.join()
    said = shown.getvalue().decode()
    assert code == 130, said
    assert_stopped(person, "stopped", said, tmp_path / "modal")


def test_the_documented_line_is_planned_without_a_token(person: Person) -> None:
    config = "model: {name: tiny}\nsft: {dataset: rows.jsonl}\n"
    (person.project / "config.yaml").write_text(config)
    words = ("--gpu", "A100", "--timeout", "24h", "--dry-run", "--json", "--no-preflight")
    of_job = ("sft", "--config", "config.yaml", "--task-module", "task.py", "a 'b'", "--x=1")
    typed = person.types("modal", *words, "--", *of_job)
    plan = json.loads(typed.out)
    assert plan["command"] == ["groupwise", *of_job]
    assert plan["price_per_hour"] == pytest.approx(2.0988)
    assert plan["max_hours"] == 24
    assert not (person.home / "state/groupwise/launches").exists()
    typed = person.types(
        "modal", *words[:3], "1h", "--max-price", "2", "--script", "task.py", code=2
    )
    assert "$2.10 an hour" in typed.err
    (person.project / "keys.env").write_text("TOKEN=x\n")
    script = ("--dry-run", "--script", "task.py")
    secret = ("--secret", "a=HF_TOKEN, WANDB_API_KEY")
    typed = person.types("modal", *secret, *script)
    assert "HF_TOKEN, WANDB_API_KEY of a" in typed.out
    for words, why in (
        (("--secret", "huggingface"), "NAME=VARIABLE is expected"),
        (("--secret", "a=B,"), "NAME=VARIABLE is expected"),
        (("--secret", "a=LD_PRELOAD"), "it decides which program runs"),
        (("--secret", "a=B", "--secret", "b=C,B"), "B is given twice"),
        (("--env-file", "keys.env", "--secret", "a=TOKEN"), "TOKEN is given twice"),
    ):
        assert why in person.types("modal", *words, *script, code=2).err
    typed = person.types("modal", "--detach", "--script", "task.py", code=None)
    assert typed.code != 0
    assert "modal token new" in typed.err


@LONG
def test_an_upload_needs_a_secret(person: Person) -> None:
    uploads = (*TRAINS, "training.max_steps=1", "run.hub.repo_id=somebody/sums")
    assert "hub" in person.types("modal", "--dry-run", "--", *uploads, code=2).err
    secret = ("--secret", "a=HF_TOKEN, WANDB_API_KEY")
    assert "tried here" in person.types("modal", "--dry-run", *secret, "--", *uploads).err
