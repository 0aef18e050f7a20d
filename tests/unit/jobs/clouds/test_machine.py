"""One machine as a backend, apart from the contract of all backends: its GPUs, and what it refuses."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.jobs.clouds.backend import CloudError, Handle, NameTaken, Order
from groupwise.jobs.hosts.spec import JobSpec
from tests import launch_backends
from tests.launch_backends import SAVES, WAITS, LaunchClient, ending
from tests.ssh_hosts import fake_gpus

pytestmark = pytest.mark.launch
SAYS_GPUS = (
    "import os, time; print(os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True); time.sleep(1000)"
)


class Sitter(LaunchClient[Any]):
    """Whoever launches on the machine at which they sit."""

    async def first_line(self, handle: Handle) -> str:
        await self.running(handle)
        return (await self.said(handle)).strip()

    async def gpus(self, count: int, name: str = "job") -> str:
        """Which ones a job of that name gets."""
        return await self.first_line(await self.submit(SAYS_GPUS, name=name, gpus=count))


@pytest.fixture
async def sitter(tmp_path: Path) -> AsyncIterator[Sitter]:
    (tmp_path / "home" / "bin").mkdir(parents=True)
    with launch_backends.local(tmp_path / "home") as spec:
        found = Sitter(spec.reach(), tmp_path, "job")
        yield found
        for each in await found.backend.list():
            await found.backend.cancel(each, grace=0.1)
            await ending(found.backend, each)
        await found.backend.close()


async def test_gpus_are_a_jobs_alone_and_free_after_it(sitter: Sitter) -> None:
    with pytest.raises(CloudError, match=r"has 0 GPUs.*nvidia-smi: absent"):
        await sitter.gpus(1)
    machine = sitter.folder / "home" / "bin"
    fake_gpus(machine, "here", 3)
    assert (await sitter.gpus(2, "first"), await sitter.gpus(1, "second")) == ("0,1", "2")
    with pytest.raises(CloudError, match="3 GPUs, 0 of them free"):
        await sitter.gpus(1, "third")
    assert await sitter.backend.find("third") is None
    assert await sitter.gpus(0, "none") == ""
    first = await sitter.backend.find("first")
    await sitter.backend.cancel(first, grace=0.1)
    await sitter.ending(first)
    [busy, *_] = fake_gpus(machine, "here", 3)
    fake_gpus(machine, "here", 3, apps=[{"uuid": busy, "pid": 4711, "used_mb": 900}])
    assert await sitter.gpus(1, "third") == "1", "on the first somebody else computes"
    fake_gpus(machine, "here", 2, lost={"1": "Unable to determine the device handle for GPU1"})
    with pytest.raises(CloudError, match=r"1 GPU, 1 of them free.*the device handle for GPU1"):
        await sitter.gpus(2, "fourth")


async def test_gpus_of_one_vendor_and_whole_ones_first(sitter: Sitter) -> None:
    machine = sitter.folder / "home" / "bin"
    card = {"model": "NVIDIA A100-SXM4-80GB", "memory_mb": 81920, "used_mb": 4, "utilisation": 0}
    card |= {"temperature": 31, "mig": None, "cells": {}}
    split = card | {"uuid": "GPU-split"}
    split["mig"] = [{"uuid": "MIG-a", "profile": "3g.40gb", "memory_mb": 40192}]
    amd = card | {"uuid": f"GPU-{'a' * 16}"}
    fake_gpus(machine, "here", gpus=[card | {"uuid": "GPU-whole"}, amd])
    with pytest.raises(CloudError, match="2 GPUs, 1 of them free"):
        await sitter.gpus(2, "both-vendors")
    fake_gpus(machine, "here", gpus=[card | {"uuid": "GPU-whole"}, split])
    assert await sitter.gpus(1, "whole") == "GPU-whole"
    with pytest.raises(CloudError, match="2 GPUs, 0 of them free"):
        await sitter.gpus(1, "no-slice")
    fake_gpus(machine, "here", gpus=[split])
    assert await sitter.gpus(1, "slice") == "MIG-a"


async def test_placed_by_two_at_once_under_a_name_that_was_free_again_it_runs_once(
    sitter: Sitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One asks before another laptop has placed the job, and goes on after."""
    newest, asked = sitter.backend._newest_attempt, list[str]()

    async def late(name: str) -> Any:
        asked.append(name)
        return None if len(asked) == 1 else await newest(name)

    first = await sitter.submit("print()")
    await sitter.ending(first)
    await sitter.backend.cleanup(first)
    placed = await sitter.submit(WAITS)
    monkeypatch.setattr(sitter.backend, "_newest_attempt", late)
    assert await sitter.submit(WAITS) == placed
    assert placed.attempt == 2
    asked.clear()
    with pytest.raises(NameTaken):
        await sitter.submit("print('another')")


async def test_an_attempt_that_was_refused_stands_in_the_way_of_nothing(sitter: Sitter) -> None:
    """The environment was gone when the job was resumed, and was made again."""
    python = sitter.folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    tells = "print(os.environ['ATTEMPT'], begun)"
    saves = f"{SAVES}save(int(os.environ['ATTEMPT']), b'one'); {tells}; raise SystemExit(3)"
    order = Order("job", JobSpec((str(python), "-c", saves)))
    first = await sitter.submit(order)
    await sitter.ending(first)
    python.unlink()
    for _ in range(2):
        with pytest.raises(CloudError, match="does not begin job"):
            await sitter.resume()
    assert await sitter.backend.find("job") == first, "and what it has made is found"
    assert await sitter.backend.list() == [first]
    assert await sitter.submit(order) == first
    assert "outputs/checkpoints/step-1/manifest.json" in await sitter.fetched(first)
    python.symlink_to(sys.executable)
    again = await sitter.resume()
    await sitter.ending(again)
    assert await sitter.said(again) == "2 one\n"
    await sitter.backend.cleanup(again)
    assert await sitter.backend.find("job") is None
