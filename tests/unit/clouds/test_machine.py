"""One machine as a backend, beside what all backends keep: its GPUs, and what it refuses."""

import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from groupwise.clouds.machine import MachineBackend
from groupwise.clouds.port import Backend, CloudError, Handle, NameTaken, Order, Outcome
from groupwise.hosts.driver import Runner
from groupwise.hosts.files import BlobStore
from groupwise.hosts.spec import JobSpec, Limits
from groupwise.hosts.ssh import Address, SshHost
from tests import places
from tests.contract.test_cloud_contract import SAVES
from tests.places import ending, until
from tests.ssh_hosts import fake_gpus

pytestmark = pytest.mark.launch
SAYS_GPUS = (
    "import os, time; print(os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True); time.sleep(1000)"
)
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ5bQ2Z1Jm1yq9JcWn0zjVQk2S4o0vV1oYb0Xb8bKx8s"


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[Backend]:
    (tmp_path / "home" / "bin").mkdir(parents=True)
    with places.local(tmp_path / "home") as place:
        reached = place.reach()
        yield reached
        for each in await reached.list():
            await reached.cancel(each, grace=0.1)
            await ending(reached, each)
        await reached.close()


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def order(name: str, gpus: int = 0, script: str = SAYS_GPUS, **fields: Any) -> Order:
    return Order(name, JobSpec(("python3", "-c", script), **fields), gpus)


async def said(backend: Backend, handle: Handle) -> str:
    """Its first line."""
    await until(backend, handle, lambda status: status.log_size)
    return (await backend.log(handle, 0, 1000)).data.decode().strip()


async def test_gpus_are_a_jobs_alone_and_free_after_it(
    backend: Backend, store: BlobStore, tmp_path: Path
) -> None:
    fake_gpus(tmp_path / "home" / "bin", "here", 3)
    first = await backend.submit(order("first", 2), store)
    second = await backend.submit(order("second", 1), store)
    assert [await said(backend, each) for each in (first, second)] == ["0,1", "2"]
    with pytest.raises(CloudError, match="has 3 GPUs, 0 of them free, and 1 are asked for"):
        await backend.submit(order("third", 1), store)
    assert await backend.find("third") is None
    assert await said(backend, await backend.submit(order("none"), store)) == ""
    await backend.cancel(first, grace=0.1)
    await ending(backend, first)
    assert await said(backend, await backend.submit(order("third", 1), store)) == "0"


async def test_a_gpu_that_somebody_else_computes_on_is_not_free(
    backend: Backend, store: BlobStore, tmp_path: Path
) -> None:
    with pytest.raises(CloudError, match=r"has 0 GPUs.*nvidia-smi: absent"):
        await backend.submit(order("job", 1), store)
    folder = tmp_path / "home" / "bin"
    [busy, _] = fake_gpus(folder, "here", 2)
    fake_gpus(folder, "here", 2, apps=[{"uuid": busy, "pid": 4711, "used_mb": 900}])
    assert await said(backend, await backend.submit(order("job", 1), store)) == "1"


async def test_what_it_refuses_may_be_asked_for_in_another_way(
    backend: Backend, store: BlobStore
) -> None:
    with pytest.raises(CloudError, match="does not begin job"):
        await backend.submit(order("job", limits=Limits(disk_mb=10**9)), store)
    refused = await backend.find("job")
    assert refused is not None
    assert (await ending(backend, refused)).outcome is Outcome.REFUSED
    with pytest.raises(CloudError, match="no job called job"):
        await backend.resume("job", {}, store)
    asked = replace(order("job"), python="/one/bin/python")
    again = await backend.submit(asked, store)
    assert again.attempt == refused.attempt + 1
    other = replace(asked, python="/another/bin/python")
    assert await backend.submit(other, store) == again, (
        "with another interpreter it is the same job"
    )
    assert await backend.order(again) == asked


def sees_nothing_at_first(backend: Any) -> None:
    """It asks before another laptop has placed the job, and goes on after."""
    newest, asked = backend._newest, []

    async def late(name: str) -> Any:
        asked.append(name)
        return None if len(asked) == 1 else await newest(name)

    backend._newest = late


async def test_placed_by_two_at_once_under_a_name_that_was_free_again_it_runs_once(
    backend: Backend, store: BlobStore
) -> None:
    asked = order("job", script="import time; print('on', flush=True); time.sleep(1000)")
    first = await backend.submit(order("job", script="print()"), store)
    await ending(backend, first)
    await backend.cleanup(first)
    placed = await backend.submit(asked, store)
    sees_nothing_at_first(backend)
    assert await backend.submit(asked, store) == placed
    assert placed.attempt == 2
    sees_nothing_at_first(backend)
    with pytest.raises(NameTaken):
        await backend.submit(order("job", script="print('another')"), store)
    await backend.cancel(placed, 0.1)


async def test_an_attempt_that_was_refused_stands_in_the_way_of_nothing(
    backend: Backend, store: BlobStore, tmp_path: Path
) -> None:
    """The environment was gone when the job was resumed, and was made again."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    tells = "print(os.environ['ATTEMPT'], os.path.exists(os.environ.get('RESUME_FROM', '-')))"
    saves = f"{SAVES}save(int(os.environ['ATTEMPT']), b'one'); {tells}; raise SystemExit(3)"
    spec = JobSpec((str(python), "-c", saves), artefacts=("outputs",), checkpoints=("outputs",))
    first = await backend.submit(Order("job", spec), store)
    await ending(backend, first)
    python.unlink()
    for _ in range(2):
        with pytest.raises(CloudError, match="does not begin job"):
            await backend.resume("job", {}, store)
    assert await backend.find("job") == first, "and what it has made is found"
    assert await backend.list() == [first]
    assert await backend.submit(Order("job", spec), store) == first
    fetched = await backend.fetch(first, tmp_path / "results")
    assert any(path.endswith("manifest.json") for path in fetched.files)
    python.symlink_to(sys.executable)
    again = await backend.resume("job", {}, store)
    assert await said(backend, again) == "2 True"
    await ending(backend, again)
    await backend.cleanup(again)
    assert await backend.find("job") is None


async def test_who_cannot_be_reached_is_told_so(store: BlobStore) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        host = SshHost(Address("127.0.0.1", "nobody", taken.getsockname()[1], host_key=KEY))
        backend = MachineBackend("ssh", Runner(host), "nobody@127.0.0.1")
        with pytest.raises(CloudError, match=r"nobody@127\.0\.0\.1 cannot be reached"):
            await backend.find("job")
        await backend.close()
