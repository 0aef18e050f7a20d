"""Everything that goes to a machine and comes back, by SSH and the real runner: files, log, checkpoint, artefacts."""

import asyncio
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select

from groupwise.fleet.attempts.drive import CheckpointMirror as MirrorsCheckpoints
from groupwise.fleet.attempts.drive import Collected, Part
from groupwise.fleet.attempts.drive import Collector as Collects
from groupwise.fleet.attempts.drive import LogMirror as MirrorsLogs
from groupwise.fleet.attempts.effects import Gateway
from groupwise.fleet.files.artefacts import Collector
from groupwise.fleet.files.logs import LogMirror, newest_link
from groupwise.fleet.files.mirror import CheckpointMirror
from groupwise.fleet.store.database import Database
from groupwise.fleet.store.tables import Checkpoint
from groupwise.hosts.answers import MemberState, RunnerState
from groupwise.hosts.driver import BATCH, Known, Launch, Resume, Runner
from groupwise.hosts.files import BlobStore, files_below
from groupwise.hosts.spec import FileEntry, JobSpec, as_json
from groupwise.hosts.ssh import Address, SshHost
from tests.ssh_hosts import LoopbackHost, loopback_hosts
from tests.unit.fleet.work_folder import JOB, WorkFolder, begin

pytestmark = pytest.mark.fleet
TRAINER = """
import hashlib, json, os, sys
big = open("data/big.bin", "rb").read()
print("big", hashlib.sha256(big).hexdigest(), oct(os.stat("data/run.sh").st_mode), flush=True)
resumed = os.environ.get("RESUME_FROM")
start = json.load(open(resumed + "/manifest.json"))["step"] if resumed else 0
print("from", start, flush=True)
step = start + 10
folder = "outputs/checkpoint-%d" % step
os.makedirs(folder)
with open(folder + "/weights", "wb") as file:
    file.write(b"w" * (5 << 20) + str(step).encode())
weights = open(folder + "/weights", "rb").read()
files = {"weights": {"size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}}
with open(folder + "/manifest.json", "w") as file:
    json.dump({"step": step, "files": files}, file)
os.makedirs("outputs/small")
for n in range(700):
    with open("outputs/small/%d" % n, "w") as file:
        file.write(str(n))
os.symlink("/etc/passwd", "outputs/latest")
os.mkfifo("outputs/pipe")
"""


def reach(machine: LoopbackHost) -> Runner:
    row = machine.vm_row()
    login = (row["ip_address"], row["user"], row["port"], row["ssh_key_path"], row["host_key"])
    return Runner(SshHost(Address(*login)))


async def over(runner: Runner, epoch: int) -> MemberState:
    state = await runner.status(JOB, epoch)
    while state.state is not RunnerState.EXITED:
        known = {
            (JOB, epoch): Known(
                state.state, state.log_size, state.checkpoints, state.step, state.clock
            )
        }
        [state] = await runner.wait(known, seconds=20) or [state]
    return state


@pytest.fixture
def machines() -> Iterator[list[LoopbackHost]]:
    """Of this test alone: another database counts its epochs from the beginning."""
    with loopback_hosts(2) as hosts:
        yield hosts


async def test_there_and_back_and_on_from_the_checkpoint(
    machines: list[LoopbackHost], database: Database, tmp_path: Path
) -> None:
    source = tmp_path / "source" / "data"
    source.mkdir(parents=True)
    big = os.urandom(2 * BATCH + 12345)
    (source / "big.bin").write_bytes(big)
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source.parent / "train.py").write_text(TRAINER)
    store, gateway = BlobStore(tmp_path / "blobs"), Gateway(database)
    files = await asyncio.to_thread(lambda: store.put_files(files_below(source.parent)))
    spec = JobSpec(("python3", "train.py"), files=files)
    logs: MirrorsLogs = LogMirror(tmp_path / "logs", gateway)
    checkpoints: MirrorsCheckpoints = CheckpointMirror(store, gateway)
    collector: Collects = Collector(tmp_path / "artefacts", store, gateway)
    resume: Resume | None = None
    for turn, machine in enumerate(machines):
        part: Part = begin(database, WorkFolder())
        runner = reach(machine)
        part = dataclasses.replace(part, runner=runner, spec=as_json(spec))
        needed = {**files, **(resume.manifest if resume else {})}
        assert await runner.provide(store, needed) == sum(entry.size for entry in needed.values())
        assert await runner.provide(store, needed) == 0
        await runner.launch(Launch(JOB, part.epoch, spec, slot=0, resume=resume))
        state = await over(runner, part.epoch)
        assert state.exit is not None
        assert state.exit.code == 0, state.exit.tail
        await logs.catch_up(part, state.log_size)
        said = newest_link(tmp_path / "logs", JOB).read_text().splitlines()
        assert said == [f"big {files['data/big.bin'].sha256} 0o100755", f"from {turn * 10}"]
        await checkpoints.mirror(part)
        assert await collector.collect(part) == Collected(left_out=2)
        left = tmp_path / "artefacts" / JOB / "current" / "outputs"
        step = (turn + 1) * 10
        assert (left / f"checkpoint-{step}" / "weights").read_bytes().endswith(str(step).encode())
        assert {path.name for path in left.iterdir()} >= {f"checkpoint-{step}"}
        small = {path.name: path.read_text() for path in (left / "small").iterdir()}
        assert small == {str(n): str(n) for n in range(700)}
        assert not (left / "latest").is_symlink()
        assert not (left / "pipe").exists()
        assert (await runner.release(JOB, part.epoch)).clean
        rows = database.run(lambda s: s.scalars(select(Checkpoint)).all())
        row = max(rows, key=lambda r: r.step)
        assert row.step == step
        manifest = {path: FileEntry(*entry) for path, entry in row.manifest.items()}
        resume = Resume(manifest, row.step, row.path)
        await runner.forget(JOB, part.epoch)
        await runner.host.close()
