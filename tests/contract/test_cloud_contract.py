"""The contract of every launch backend:

1. Arguments, environment and files arrive exactly; a plan changes nothing.
2. A name is a job: submitted twice, at once or by somebody else, it runs once; under the same name nothing else is placed.
3. The submitter may be gone: the job goes on, and is found, watched and fetched by its name alone.
4. An end is told with its kind and reason: success, a failure, a crash, the time limit, a cancellation with time to save.
5. An attempt after a failure goes on from the newest complete checkpoint.
6. The log comes byte for byte from any offset; results come whole, again only where they differ, checkpoints while it runs.
7. Secret values reach the job and appear in nothing that the backend stores or shows.
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
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeAlias

import pytest

from groupwise.core.errors import UsageError
from groupwise.jobs.clouds.backend import (
    Backend,
    CloudError,
    Handle,
    JobNotFound,
    NameTaken,
    Outcome,
    Phase,
)
from groupwise.jobs.hosts.failures import FailureClass
from groupwise.jobs.hosts.spec import Limits
from tests import launch_backends
from tests.launch_backends import SAVES, TIMEOUT_S, WAITS, BackendSpec, client, name, tree
from tests.processes import is_gone

__all__ = ["client", "name"]

pytestmark = pytest.mark.launch
LaunchClient: TypeAlias = launch_backends.LaunchClient[Backend]
ROOT = Path(__file__).parents[2]
ODD = (
    *(
        "", " ", "-v", "--", "a b", "it's", 'say "hi"', "$(touch x)", "`id`", "two\nlines\n", "tab\t",
    ),
    *("\\", "é→", "*", "~", "#no", "!h"),
)  # fmt: skip
EVERYWHERE = {"gang", "ssh", "slurm", "ray", "aws", "modal"}
"""Beside this machine, where all tests run always."""
ALSO_AT: dict[str, set[str]] = {
    "test_all_that_was_asked_arrives_exactly": EVERYWHERE, "test_one_name_is_one_job_and_runs_once": EVERYWHERE,
    "test_cancelled_it_has_time_to_save": EVERYWHERE, "test_a_crashed_job_resumes_from_its_newest_checkpoint": EVERYWHERE,
    "test_secrets_arrive_and_are_kept_nowhere": EVERYWHERE, "test_a_job_survives_the_death_of_its_submitter": {"ssh", "modal"},
    "test_results_come_whole_and_again_only_where_they_differ": {"ssh", "modal"}, "test_removed_its_name_is_free": {"aws"},
}  # fmt: skip
"""Where else a test runs always; at all other places it is one of the suite `launch` of the long tests."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    always = {"local", *ALSO_AT.get(metafunc.function.__name__, ())}
    soak = pytest.mark.soak(suite="launch")
    found = [
        pytest.param(each, marks=[] if each in always else soak)
        for each in launch_backends.BACKENDS
    ]
    metafunc.parametrize("spec", found, indirect=True, scope="module")


@pytest.fixture(scope="module")
def spec(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BackendSpec]:
    with launch_backends.BACKENDS[request.param](tmp_path_factory.mktemp("home")) as found:
        yield found


# --- what arrives -------------------------------------------------------------------------------


async def test_all_that_was_asked_arrives_exactly(spec: BackendSpec, client: LaunchClient) -> None:
    """And a plan of it changes nothing."""
    script = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['ODD'], open('data/in', 'rb').read().hex()]))"
    (client.folder / "in").write_bytes(bytes(range(256)))
    files = client.store.put_files({"data/in": client.folder / "in"})
    asked = client.order(script, *ODD, environment={"ODD": "".join(ODD)}, files=files)
    backend = client.backend
    before = await backend.list()
    plan = await backend.plan(asked)
    assert (plan.command, bool(plan.steps)) == (("python3", "-c", script, *ODD), True)
    assert (await backend.list(), await backend.find(client.name)) == (before, None)
    handle = await client.submit(asked)
    end = await client.ending(handle)
    assert (end.outcome, end.code, end.failure) == (Outcome.SUCCEEDED, 0, None)
    arrived = json.loads(await client.said(handle))
    assert arrived == [[*ODD], "".join(ODD), bytes(range(256)).hex()]
    assert (await backend.order(handle)).document() == {**asked.document(), "nodes": spec.nodes}


async def test_an_invalid_job_is_refused_before_anything_starts(
    client: LaunchClient,
) -> None:
    backend, fine = client.backend, client.order("print()")
    for asked, why in (
        (client.order("print()", name="no/name"), "no/name"),
        (client.order("print()", secrets=("TOKEN",)), "secret TOKEN"),
        (client.order("print()", environment={"LD_PRELOAD": "x"}), "LD_PRELOAD"),
        (replace(fine, gpus=-1), "gpus -1"),
    ):
        with pytest.raises(UsageError, match=why):
            await client.submit(asked)
        with pytest.raises(UsageError, match=why):
            await backend.plan(asked)
    assert await backend.find(client.name) is None
    with pytest.raises(JobNotFound, match=client.name):
        await client.resume()
    with pytest.raises(JobNotFound, match=client.name):
        await backend.status(Handle(backend.name, client.name, 1))


# --- one name, one job ---------------------------------------------------------------------------


async def test_one_name_is_one_job_and_runs_once(spec: BackendSpec, client: LaunchClient) -> None:
    """Submitted again and at once, by several; and nothing else is placed under it."""
    marks = client.folder / "marks"
    asked = client.order("import sys; open(sys.argv[1], 'a').write('x')", str(marks))
    others = [spec.reach() for _ in range(2)]
    all_of_them = (client.backend, *others)
    handles = await asyncio.gather(*(each.submit(asked, client.store) for each in all_of_them))
    assert len({each.attempt for each in handles}) == 1
    with pytest.raises(NameTaken, match=client.name):
        await client.submit("print(2)")
    await client.ending(handles[0])
    assert await others[0].submit(asked, client.store) == handles[0]
    assert marks.read_text() == "x" * spec.nodes
    for each in others:
        await each.close()


SUBMITTING_PROGRAM = """\
import asyncio, json, sys
from pathlib import Path
from groupwise.jobs.clouds.backend import Order
from groupwise.jobs.hosts.files import BlobStore
from tests.launch_backends import BackendSpec
async def main(spec, order, store):
    await BackendSpec(**spec).reach().submit(Order.from_document(order), BlobStore(Path(store)))
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


async def test_a_job_survives_the_death_of_its_submitter(
    spec: BackendSpec, client: LaunchClient
) -> None:
    go = client.folder / "go"
    asked = client.order(MAKES_WHEN_TOLD, str(go))

    def another_submits_and_dies() -> None:
        told = (json.dumps(asdict(spec)), json.dumps(asked.document()), str(client.store.root))
        with subprocess.Popen(
            [sys.executable, "-c", SUBMITTING_PROGRAM, *told],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "submitted\n"
            os.killpg(other.pid, signal.SIGKILL)

    await asyncio.to_thread(another_submits_and_dies)
    handle = await client.backend.find(client.name)
    assert handle is not None
    assert handle in await client.backend.list()
    assert (await client.backend.status(handle)).ending is None
    go.touch()
    await client.ending(handle)
    assert await client.fetched(handle) == {"outputs/x": b"made"}


# --- how it ends ---------------------------------------------------------------------------------


FAILURES = {
    "raise SystemExit(3)": (FailureClass.CRASHED, 3, "exit code 3"),
    "raise SystemExit('no such key')": (FailureClass.CRASHED, 1, "no such key"),
    "raise SystemExit(2)": (FailureClass.USER_ERROR, 2, "exit code 2"),
    "import os; os.kill(os.getpid(), 9)": (FailureClass.KILLED, -9, "signal 9"),
    "raise MemoryError": (FailureClass.HOST_OOM, 1, "MemoryError"),
}


async def test_a_failure_is_reported_with_its_kind(client: LaunchClient) -> None:
    handles = [await client.submit(each, name=f"fails-{n}") for n, each in enumerate(FAILURES)]
    for handle, (failure, code, reason) in zip(handles, FAILURES.values(), strict=True):
        end = await client.ending(handle)
        assert (end.outcome, end.failure, end.code) == (Outcome.FAILED, failure, code), end
        assert reason in end.reason
        assert end.seconds is not None


async def test_the_time_limit_ends_it_with_what_it_has_made(client: LaunchClient) -> None:
    (client.folder / "in").write_text("there from the beginning, however late the command is")
    files = client.store.put_files({"outputs/x": client.folder / "in"})
    limits = Limits(time_seconds=2, grace_seconds=5)
    handle = await client.submit(WAITS, limits=limits, files=files)
    end = await client.ending(handle)
    assert (end.outcome, end.failure) == (Outcome.TIME_LIMIT, FailureClass.TIME_LIMIT)
    assert (await client.fetched(handle)).keys() == {"outputs/x"}


async def test_cancelled_it_has_time_to_save(client: LaunchClient) -> None:
    saves = "signal.signal(signal.SIGTERM, lambda *_: (save(7, b'seven'), sys.exit(0)))\n"
    handle = await client.submit(SAVES + saves + WAITS)
    await client.running(handle)
    await client.backend.cancel(handle, grace=TIMEOUT_S)
    end = await client.ending(handle)
    assert end.outcome is Outcome.CANCELLED
    assert (await client.fetched(handle))["outputs/checkpoints/step-7/w"] == b"seven"
    await client.backend.cancel(handle, grace=TIMEOUT_S)
    assert (await client.backend.status(handle)).ending == end


async def test_a_job_that_ignores_cancellation_is_killed_with_its_children(
    client: LaunchClient,
) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    script = (
        f"{deaf}import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {deaf + 'time.sleep(1000)'!r}])\n"
        "print(os.getpid(), child.pid, flush=True)\ntime.sleep(1000)\n"
    )
    handle = await client.submit(script)
    await client.running(handle)
    pids = [int(each) for each in (await client.said(handle)).split()]
    await client.backend.cancel(handle, grace=0.2)
    assert await client.outcome(handle) is Outcome.CANCELLED
    assert all(map(is_gone, pids))


async def test_a_crashed_job_resumes_from_its_newest_checkpoint(client: LaunchClient) -> None:
    script = SAVES + (
        "attempt = int(os.environ['ATTEMPT'])\nprint(attempt, begun, flush=True)\n"
        "if attempt == 1:\n    save(3, b'three'); save(4, b'four')\n"
        "if attempt < 3: os.kill(os.getpid(), 9)\n"
    )
    first = await client.submit(script, values={"KEY": "v"})
    assert (await client.until(first, lambda status: status.ending)).step == 4
    second = await client.resume(KEY="v")
    await client.ending(second)
    third = await client.resume(KEY="v")
    assert await client.outcome(third) is Outcome.SUCCEEDED
    said = [await client.said(each) for each in (first, second, third)]
    assert said == ["1 \n", "2 four\n", "3 four\n"]
    assert await client.backend.find(client.name) == third
    with pytest.raises(CloudError, match="succeeded"):
        await client.resume(KEY="v")


# --- what comes back ------------------------------------------------------------------------------


async def test_a_running_job_is_not_restarted_or_removed_and_its_checkpoints_are_fetched(
    client: LaunchClient,
) -> None:
    script = SAVES + "save(1, b'one'); open('outputs/half', 'w').write('not yet')\n" + WAITS
    handle = await client.submit(script)
    await client.saved(handle, 1)
    await client.running(handle)
    with pytest.raises(CloudError, match="continues by itself"):
        await client.resume()
    with pytest.raises(CloudError, match="stop it first"):
        await client.backend.cleanup(handle)
    seen = await client.backend.status(handle)
    assert seen.phase is Phase.RUNNING
    began = time.monotonic()
    assert await client.backend.wait(handle, seen, 0.2) == seen
    assert time.monotonic() - began < TIMEOUT_S
    checkpoint = {f"outputs/checkpoints/step-1/{each}" for each in ("w", "manifest.json")}
    assert (await client.fetched(handle)).keys() == checkpoint
    await client.backend.cancel(handle, grace=0.1)
    await client.ending(handle)
    assert (await client.fetched(handle)).keys() == {*checkpoint, "outputs/half"}


async def test_the_log_comes_byte_for_byte_while_it_is_written(client: LaunchClient) -> None:
    script = (
        "import sys, time\nfor n in range(300):\n    sys.stdout.buffer.write(bytes([n % 256]) * (n + 1))\n"
        "    sys.stdout.flush()\n    n % 50 or time.sleep(.02)"
    )
    handle = await client.submit(script)
    data, status = b"", await client.backend.status(handle)
    while status.ending is None or len(data) < status.log_size:
        part = await client.backend.log(handle, len(data), 777)
        assert len(part.data) <= 777
        data += part.data
        if not part.data:
            status = await client.backend.wait(handle, status, TIMEOUT_S)
    assert data == b"".join(bytes([n % 256]) * (n + 1) for n in range(300))


async def test_results_come_whole_and_again_only_where_they_differ(client: LaunchClient) -> None:
    script = (
        "import os\nos.makedirs('outputs/deep/er'); open('outputs/big', 'wb').write(bytes(9 << 20))\n"
        "for n in range(20): open(f'outputs/deep/er/{n}', 'w').write(str(n))\n"
        "os.symlink('/etc/passwd', 'outputs/link'); open('beside', 'w').write('no artefact')"
    )
    handle = await client.submit(script)
    await client.ending(handle)
    folder = client.folder / "results"
    expected = {f"outputs/deep/er/{n}": b"%d" % n for n in range(20)}
    expected["outputs/big"] = bytes(9 << 20)
    fetched = await client.backend.fetch(handle, folder)
    assert (tree(folder), {*fetched.files}) == (expected, {*expected})
    assert fetched.received == sum(map(len, expected.values()))
    assert "outputs/link" in fetched.left_out
    (folder / "outputs/deep/er/7").write_text("damaged")
    assert (await client.backend.fetch(handle, folder)).received == 1
    assert tree(folder) == {**expected, "earlier/changed/outputs/deep/er/7": b"damaged"}


async def test_secrets_arrive_and_are_kept_nowhere(spec: BackendSpec, client: LaunchClient) -> None:
    canary = "canary-3f9a1c7e5b"
    script = "import hashlib, os; print(hashlib.sha256(os.environ['TOKEN'].encode()).hexdigest(), flush=True)\n"
    asked = client.order(script + WAITS, values={"TOKEN": canary})
    backend = client.backend
    plan = await backend.plan(asked)
    handle = await client.submit(asked)
    await client.running(handle)
    told = (asked, plan, handle, await backend.order(handle), await backend.status(handle))
    assert canary not in repr(told)
    assert not any(canary.encode() in each for each in commands_here())
    await backend.cancel(handle, grace=0.1)
    await client.ending(handle)
    await client.fetched(handle)
    for folder in (Path(spec.home), client.folder):
        assert not [path for path, data in tree(folder).items() if canary.encode() in data]
    assert hashlib.sha256(canary.encode()).hexdigest() in await client.said(handle)


def commands_here() -> list[bytes]:
    """Argument lists of all processes of this machine, which is the place as well."""
    return [_read(each / "cmdline") for each in Path("/proc").iterdir() if each.name.isdigit()]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


async def test_removed_its_name_is_free(client: LaunchClient) -> None:
    first = await client.submit("print('first')")
    await client.ending(first)
    await client.backend.cleanup(first)
    assert await client.backend.find(client.name) is None
    second = await client.submit("print('second')")
    await client.ending(second)
    assert await client.said(second) == "second\n"
    assert [each.name for each in await client.backend.list()].count(client.name) == 1
