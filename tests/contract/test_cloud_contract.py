"""What every backend keeps, as whoever launches a job relies on it:

1. Arguments, environment and files arrive exactly; a plan changes nothing.
2. A name is a job: submitted twice, at once or by somebody else, it runs once; under the same name nothing else is placed.
3. Whoever submitted may be gone: the job goes on, and is found, watched and fetched by its name alone.
4. An end is told with its kind and reason: success, a failure, a crash, the time limit, a cancellation with time to save.
5. An attempt after a failure goes on from the newest complete checkpoint.
6. The log comes byte for byte from any offset; results come whole, again only where they differ, checkpoints while it runs.
7. Values of secrets arrive, and are in nothing that the place keeps or shows.
8. A job that runs is not removed; one that has ended is, and its name is free.
"""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.clouds.folder import INCOMING
from groupwise.clouds.gang import NODES
from groupwise.clouds.port import (
    Backend,
    CloudError,
    Handle,
    NameTaken,
    NotHere,
    Order,
    Outcome,
    Phase,
)
from groupwise.errors import UsageError
from groupwise.hosts.failures import FailureClass
from groupwise.hosts.files import BlobStore
from groupwise.hosts.spec import JobSpec, Limits
from tests import places
from tests.places import SOON, Place, ending, said, until

pytestmark = pytest.mark.launch
ROOT = Path(__file__).parents[2]
ODD = (
    "",
    " ",
    "-v",
    "--",
    "a b",
    "it's",
    'say "hi"',
    "$(touch x)",
    "`id`",
    "two\nlines\n",
    "tab\t",
    "\\",
    "é→",
    "*",
    "~",
    "#no",
    "!h",
)
SAVES = """\
import hashlib, json, os, pathlib
def save(step, data):
    folder = pathlib.Path(f"outputs/checkpoints/step-{step}")
    folder.mkdir(parents=True)
    (folder / "w").write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps({"step": step, "files": {"w": entry}}))
"""
WAITS = "import time\nprint('on', flush=True)\ntime.sleep(1000)\n"


EVERYWHERE = {"gang", "ssh", "slurm", "ray", "aws", "modal"}
"""Beside this machine, where all tests run always."""
ALSO_AT: dict[str, set[str]] = {
    "test_all_that_was_asked_arrives_exactly": EVERYWHERE,
    "test_one_name_is_one_job_and_runs_once": EVERYWHERE,
    "test_cancelled_it_has_time_to_save": EVERYWHERE,
    "test_a_crash_is_gone_on_with_from_the_newest_checkpoint": EVERYWHERE,
    "test_secrets_arrive_and_are_kept_nowhere": EVERYWHERE,
    "test_whoever_submitted_may_be_gone": {"ssh", "modal"},
    "test_results_come_whole_and_again_only_where_they_differ": {"ssh", "modal"},
    "test_removed_its_name_is_free": {"aws"},
}
"""Where else a test runs always; at all other places it is one of the suite `launch` of the long tests."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    always = {"local", *ALSO_AT.get(metafunc.function.__name__, ())}
    long = pytest.mark.soak(suite="launch")
    found = [pytest.param(each, marks=[] if each in always else long) for each in places.PLACES]
    metafunc.parametrize("place", found, indirect=True, scope="module")


@pytest.fixture(scope="module")
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    with places.PLACES[request.param](tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture
async def backend(place: Place) -> AsyncIterator[Backend]:
    reached = place.reach()
    yield reached
    await reached.close()


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A job of this test alone."""
    return request.node.originalname.removeprefix("test_")[:60].replace("_", "-")


def order(name: str, script: str, *arguments: str, **fields: Any) -> Order:
    secrets = fields.pop("values", {})
    return Order(name, JobSpec(("python3", "-c", script, *arguments), **fields), secrets=secrets)


async def running(backend: Backend, handle: Handle) -> None:
    """Its command has said something."""
    await until(backend, handle, lambda status: status.log_size > 0)


def tree(folder: Path) -> dict[str, bytes]:
    """Files by their paths, but what other machines of a gang have said."""
    found = (each for each in folder.rglob("*") if each.parent.name not in (INCOMING, NODES))
    files = (each for each in found if each.is_file())
    return {each.relative_to(folder).as_posix(): each.read_bytes() for each in files}


# --- what arrives -------------------------------------------------------------------------------


async def test_all_that_was_asked_arrives_exactly(
    place: Place, backend: Backend, store: BlobStore, name: str, tmp_path: Path
) -> None:
    """And a plan of it changes nothing."""
    script = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['ODD'], open('data/in', 'rb').read().hex()]))"
    (tmp_path / "in").write_bytes(bytes(range(256)))
    files = store.put_files({"data/in": tmp_path / "in"})
    asked = order(name, script, *ODD, environment={"ODD": "".join(ODD)}, files=files)
    before = await backend.list()
    plan = await backend.plan(asked)
    assert plan.command == ("python3", "-c", script, *ODD)
    assert plan.steps
    assert await backend.list() == before
    assert await backend.find(name) is None
    handle = await backend.submit(asked, store)
    end = await ending(backend, handle)
    assert (end.outcome, end.code, end.failure) == (Outcome.SUCCEEDED, 0, None)
    assert json.loads(await said(backend, handle)) == [
        list(ODD),
        "".join(ODD),
        bytes(range(256)).hex(),
    ]
    assert (await backend.order(handle)).document() == {**asked.document(), "nodes": place.nodes}


async def test_what_is_wrong_with_a_job_is_told_before_anything_happens(
    backend: Backend, store: BlobStore, name: str
) -> None:
    wrong = [
        (order("no/name", "print()"), "no/name"),
        (order(name, "print()", secrets=("TOKEN",)), "secret TOKEN"),
        (order(name, "print()", environment={"LD_PRELOAD": "x"}), "LD_PRELOAD"),
        (replace(order(name, "print()"), gpus=-1), "gpus -1"),
    ]
    for asked, why in wrong:
        with pytest.raises(UsageError, match=why):
            await backend.submit(asked, store)
        with pytest.raises(UsageError, match=why):
            await backend.plan(asked)
    assert await backend.find(name) is None
    with pytest.raises(NotHere, match=name):
        await backend.resume(name, {}, store)
    with pytest.raises(NotHere, match=name):
        await backend.status(Handle(backend.name, name, 1))


# --- one name, one job ---------------------------------------------------------------------------


async def test_one_name_is_one_job_and_runs_once(
    place: Place, backend: Backend, store: BlobStore, name: str, tmp_path: Path
) -> None:
    """Submitted again and at once, by several; and nothing else is placed under it."""
    marks = tmp_path / "marks"
    asked = order(name, "import sys; open(sys.argv[1], 'a').write('x')", str(marks))
    others = [place.reach() for _ in range(2)]
    handles = await asyncio.gather(*(each.submit(asked, store) for each in (backend, *others)))
    assert len({each.attempt for each in handles}) == 1
    with pytest.raises(NameTaken, match=name):
        await backend.submit(order(name, "print(2)"), store)
    await ending(backend, handles[0])
    assert await others[0].submit(asked, store) == handles[0]
    assert marks.read_text() == "x" * place.nodes
    for each in others:
        await each.close()


SUBMITS = """\
import asyncio, json, sys
from pathlib import Path
from groupwise.clouds.port import Order
from groupwise.hosts.files import BlobStore
from tests.places import Place
async def main(place, order, store):
    await Place(**place).reach().submit(Order.from_document(order), BlobStore(Path(store)))
    print("submitted", flush=True)
    await asyncio.Event().wait()
asyncio.run(main(json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]))
"""


MAKES_WHEN_TOLD = """\
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(.01)
os.mkdir('outputs')
open('outputs/x', 'w').write('made')
"""


def submitted_by_a_laptop_that_dies(place: Place, asked: Order, store: Path) -> None:
    told = [json.dumps(asdict(place)), json.dumps(asked.document()), str(store)]
    with subprocess.Popen(
        [sys.executable, "-c", SUBMITS, *told],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as laptop:
        assert laptop.stdout is not None
        assert laptop.stdout.readline() == "submitted\n"
        os.killpg(laptop.pid, signal.SIGKILL)


async def test_whoever_submitted_may_be_gone(
    place: Place, backend: Backend, name: str, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    asked = order(name, MAKES_WHEN_TOLD, str(go))
    await asyncio.to_thread(submitted_by_a_laptop_that_dies, place, asked, tmp_path / "store")
    handle = await backend.find(name)
    assert handle is not None
    assert handle in await backend.list()
    assert (await backend.status(handle)).ending is None
    go.touch()
    await ending(backend, handle)
    await backend.fetch(handle, tmp_path / "results")
    assert tree(tmp_path / "results") == {"outputs/x": b"made"}


# --- how it ends ---------------------------------------------------------------------------------


FAILURES = {
    "raise SystemExit(3)": (FailureClass.CRASHED, 3, "exit code 3"),
    "raise SystemExit('no such key')": (FailureClass.CRASHED, 1, "no such key"),
    "raise SystemExit(2)": (FailureClass.USER_ERROR, 2, "exit code 2"),
    "import os; os.kill(os.getpid(), 9)": (FailureClass.KILLED, -9, "signal 9"),
    "raise MemoryError": (FailureClass.HOST_OOM, 1, "MemoryError"),
}


async def test_a_failure_is_told_with_its_kind(backend: Backend, store: BlobStore) -> None:
    orders = [order(f"fails-{n}", script) for n, script in enumerate(FAILURES)]
    handles = [await backend.submit(each, store) for each in orders]
    for handle, (failure, code, reason) in zip(handles, FAILURES.values(), strict=True):
        end = await ending(backend, handle)
        told = (end.outcome, end.failure, end.code)
        assert told == (Outcome.FAILED, failure, code), end
        assert reason in end.reason
        assert end.seconds is not None


async def test_the_time_limit_ends_it_with_what_it_has_made(
    backend: Backend, store: BlobStore, name: str, tmp_path: Path
) -> None:
    limits = Limits(time_seconds=5, grace_seconds=5)
    handle = await backend.submit(
        order(name, SAVES + "save(1, b'one')\n" + WAITS, limits=limits), store
    )
    end = await ending(backend, handle)
    assert (end.outcome, end.failure) == (Outcome.TIME_LIMIT, FailureClass.TIME_LIMIT)
    await backend.fetch(handle, tmp_path / "results")
    assert tree(tmp_path / "results")["outputs/checkpoints/step-1/w"] == b"one"


async def test_cancelled_it_has_time_to_save(
    backend: Backend, store: BlobStore, name: str, tmp_path: Path
) -> None:
    script = (
        SAVES
        + "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: (save(7, b'seven'), sys.exit(0)))\n"
        + WAITS
    )
    handle = await backend.submit(order(name, script), store)
    await running(backend, handle)
    await backend.cancel(handle, grace=SOON)
    end = await ending(backend, handle)
    assert end.outcome is Outcome.CANCELLED
    await backend.fetch(handle, tmp_path / "results")
    assert tree(tmp_path / "results")["outputs/checkpoints/step-7/w"] == b"seven"
    await backend.cancel(handle, grace=SOON)
    assert (await backend.status(handle)).ending == end


async def test_who_does_not_heed_a_cancellation_is_killed_with_all_that_it_started(
    backend: Backend, store: BlobStore, name: str
) -> None:
    script = (
        "import os, signal, subprocess, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)'])\n"
        "print(os.getpid(), child.pid, flush=True)\nimport time; time.sleep(1000)\n"
    )
    handle = await backend.submit(order(name, script), store)
    await running(backend, handle)
    pids = [int(each) for each in (await said(backend, handle)).split()]
    await backend.cancel(handle, grace=0.2)
    end = await ending(backend, handle)
    assert end.outcome is Outcome.CANCELLED
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


async def test_a_crash_is_gone_on_with_from_the_newest_checkpoint(
    backend: Backend, store: BlobStore, name: str, tmp_path: Path
) -> None:
    script = SAVES + (
        "import sys\nattempt, begun = int(os.environ['ATTEMPT']), os.environ.get('RESUME_FROM')\n"
        "data = pathlib.Path(begun, 'w').read_bytes() if begun else b''\n"
        "print(attempt, data.decode(), flush=True)\n"
        "if attempt == 1:\n    save(3, b'three'); save(4, b'four')\n"
        "if attempt < 3: os.kill(os.getpid(), 9)\n"
    )
    first = await backend.submit(order(name, script, secrets=("KEY",), values={"KEY": "v"}), store)
    assert (await until(backend, first, lambda status: status.ending)).step == 4
    second = await backend.resume(name, {"KEY": "v"}, store)
    await ending(backend, second)
    third = await backend.resume(name, {"KEY": "v"}, store)
    end = await ending(backend, third)
    assert end.outcome is Outcome.SUCCEEDED
    assert [await said(backend, each) for each in (first, second, third)] == [
        "1 \n",
        "2 four\n",
        "3 four\n",
    ]
    assert await backend.find(name) == third
    with pytest.raises(CloudError, match="succeeded"):
        await backend.resume(name, {"KEY": "v"}, store)


async def test_what_runs_is_not_begun_again_and_a_wait_for_it_ends(
    backend: Backend, store: BlobStore, name: str
) -> None:
    handle = await backend.submit(order(name, WAITS), store)
    await running(backend, handle)
    with pytest.raises(CloudError, match="goes on by itself"):
        await backend.resume(name, {}, store)
    with pytest.raises(CloudError, match="stop it first"):
        await backend.cleanup(handle)
    seen = await backend.status(handle)
    began = time.monotonic()
    assert await backend.wait(handle, seen, 0.2) == seen
    assert time.monotonic() - began < SOON
    await backend.cancel(handle, grace=0.1)
    await ending(backend, handle)


# --- what comes back ------------------------------------------------------------------------------


async def test_the_log_comes_byte_for_byte_while_it_is_written(
    backend: Backend, store: BlobStore, name: str
) -> None:
    script = (
        "import sys, time\nfor n in range(300):\n    sys.stdout.buffer.write(bytes([n % 256]) * (n + 1))\n"
        "    sys.stdout.flush()\n    n % 50 or time.sleep(.02)"
    )
    handle = await backend.submit(order(name, script), store)
    data, status = b"", await backend.status(handle)
    while status.ending is None or len(data) < status.log_size:
        part = await backend.log(handle, len(data), 777)
        assert len(part.data) <= 777
        data += part.data
        if not part.data:
            status = await backend.wait(handle, status, SOON)
    assert data == b"".join(bytes([n % 256]) * (n + 1) for n in range(300))


async def test_results_come_whole_and_again_only_where_they_differ(
    backend: Backend, store: BlobStore, name: str, tmp_path: Path
) -> None:
    script = (
        "import os\nos.makedirs('outputs/deep/er'); open('outputs/big', 'wb').write(bytes(9 << 20))\n"
        "for n in range(20): open(f'outputs/deep/er/{n}', 'w').write(str(n))\n"
        "os.symlink('/etc/passwd', 'outputs/link'); open('beside', 'w').write('no artefact')"
    )
    handle = await backend.submit(order(name, script), store)
    await ending(backend, handle)
    folder = tmp_path / "results"
    expected = {
        "outputs/big": bytes(9 << 20),
        **{f"outputs/deep/er/{n}": b"%d" % n for n in range(20)},
    }
    fetched = await backend.fetch(handle, folder)
    assert tree(folder) == expected
    assert set(fetched.files) == set(expected)
    assert fetched.received == sum(map(len, expected.values()))
    assert "outputs/link" in fetched.left_out
    (folder / "outputs/deep/er/7").write_text("damaged")
    assert (await backend.fetch(handle, folder)).received == 1
    assert tree(folder) == {**expected, "earlier/changed/outputs/deep/er/7": b"damaged"}


async def test_checkpoints_come_while_it_runs(
    backend: Backend, store: BlobStore, name: str, tmp_path: Path
) -> None:
    script = SAVES + "save(1, b'one'); open('outputs/half', 'w').write('not yet')\n" + WAITS
    handle = await backend.submit(order(name, script), store)
    status = await until(backend, handle, lambda status: status.step == 1)
    assert status.phase is Phase.RUNNING
    await backend.fetch(handle, tmp_path / "results")
    assert set(tree(tmp_path / "results")) == {
        "outputs/checkpoints/step-1/w",
        "outputs/checkpoints/step-1/manifest.json",
    }
    await backend.cancel(handle, grace=0.1)
    await ending(backend, handle)
    await backend.fetch(handle, tmp_path / "results")
    assert tree(tmp_path / "results")["outputs/half"] == b"not yet"


# --- secrets --------------------------------------------------------------------------------------


async def test_secrets_arrive_and_are_kept_nowhere(
    place: Place, backend: Backend, store: BlobStore, name: str, tmp_path: Path
) -> None:
    canary = "canary-3f9a1c7e5b"
    script = (
        "import hashlib, os; print(hashlib.sha256(os.environ['TOKEN'].encode()).hexdigest(), flush=True)\n"
        + WAITS
    )
    asked = order(name, script, secrets=("TOKEN",), values={"TOKEN": canary})
    plan = await backend.plan(asked)
    handle = await backend.submit(asked, store)
    await running(backend, handle)
    assert canary not in repr(
        (asked, plan, handle, await backend.order(handle), await backend.status(handle))
    )
    assert not any(canary.encode() in each for each in commands_here())
    await backend.cancel(handle, grace=0.1)
    await ending(backend, handle)
    await backend.fetch(handle, tmp_path / "results")
    for folder in (Path(place.home), tmp_path):
        assert not [path for path, data in tree(folder).items() if canary.encode() in data]
    assert hashlib.sha256(canary.encode()).hexdigest() in await said(backend, handle)


def commands_here() -> list[bytes]:
    """Argument lists of all processes of this machine, which is the place as well."""
    return [_read(each / "cmdline") for each in Path("/proc").iterdir() if each.name.isdigit()]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


# --- removing it ----------------------------------------------------------------------------------


async def test_removed_its_name_is_free(backend: Backend, store: BlobStore, name: str) -> None:
    first = await backend.submit(order(name, "print('first')"), store)
    await ending(backend, first)
    await backend.cleanup(first)
    assert await backend.find(name) is None
    second = await backend.submit(order(name, "print('second')"), store)
    await ending(backend, second)
    assert await said(backend, second) == "second\n"
    assert [each.name for each in await backend.list()].count(name) == 1
