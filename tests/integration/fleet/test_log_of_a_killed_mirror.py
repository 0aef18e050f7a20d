"""A log is byte for byte what the command wrote, however often the process that mirrors it is killed on its way."""

import asyncio
import dataclasses
import hashlib
import random
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise.fleet.attempts.effects import Gateway
from groupwise.fleet.files.logs import Follower, LogMirror, log_path
from groupwise.fleet.store.database import Database, connect, migrate
from groupwise.fleet.store.tables import Member
from groupwise.hosts.answers import RunnerState
from groupwise.hosts.driver import Known, Launch, Runner
from groupwise.hosts.local import LocalHost
from groupwise.hosts.spec import JobSpec
from tests.unit.fleet.work_folder import JOB, WorkFolder, begin

pytestmark = pytest.mark.fleet
WRITER = """
import hashlib, os, sys, time
data, n = b"", 0
while n < 4000:
    data = hashlib.sha512(data).digest() * 16
    os.write(1, data)
    n += 1
    if n % 100 == 0:
        time.sleep(0.01)
"""
MIRROR = """
import asyncio, sys
from pathlib import Path
from groupwise.fleet.files import logs
from groupwise.fleet.store.database import connect
from groupwise.fleet.attempts.drive import Part
from groupwise.fleet.attempts.effects import Gateway
from groupwise.hosts.driver import Runner
from groupwise.hosts.local import LocalHost

logs.PIECE = 50_000

async def main(url, folder, home, epoch):
    host = LocalHost(environment={"HOME": home, "PATH": "/usr/bin:/bin"})
    part = Part(Runner(host), "me", "job-1", 0, int(epoch), 0, {}, 0)
    mirror = logs.LogMirror(Path(folder), Gateway(connect(url)))
    print("ready", flush=True)
    while True:
        state = await part.runner.status("job-1", int(epoch))
        await mirror.catch_up(part, state.log_size)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def database(tmp_path: Path) -> Database:
    made = connect(f"sqlite:///{tmp_path / 'fleet.db'}")
    migrate(made)
    return made


async def test_kill_9_at_any_moment_costs_no_byte_and_doubles_none(
    database: Database, tmp_path: Path
) -> None:
    logs, home = tmp_path / "logs", tmp_path / "home"
    home.mkdir()
    host = LocalHost(environment={"HOME": str(home), "PATH": "/usr/bin:/bin"})
    part = begin(database, WorkFolder())
    runner = Runner(host)
    await runner.launch(Launch(JOB, part.epoch, JobSpec((sys.executable, "-c", WRITER)), slot=0))
    follower, followed = Follower(logs, JOB), b""
    chance = random.Random(7)
    url = f"sqlite:///{tmp_path / 'fleet.db'}"
    for _ in range(4):
        mirror = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", MIRROR, url, str(logs), str(home), str(part.epoch)),
            stdout=subprocess.PIPE,
        )
        assert await mirror.stdout.readline() == b"ready\n"
        wanted = len(followed) + chance.randrange(300_000)
        ended = False
        while len(followed) < wanted and not ended:
            piece = follower.read()
            followed += piece.data if piece else b""
            ended = (await runner.status(JOB, part.epoch)).state == "exited"
        mirror.kill()
        await mirror.wait()
    [state] = await runner.wait({(JOB, part.epoch): Known(RunnerState.RUNNING)}, seconds=0)
    while state.state != "exited":
        known = Known(state.state, state.log_size, state.checkpoints)
        [state] = await runner.wait({(JOB, part.epoch): known}, seconds=60)
    part = dataclasses.replace(part, runner=runner)
    await LogMirror(logs, Gateway(database)).catch_up(part, state.log_size)
    while piece := follower.read():
        followed += piece.data
    data, digest = b"", hashlib.sha256()
    for _ in range(4000):
        data = hashlib.sha512(data).digest() * 16
        digest.update(data)
    written = log_path(logs, JOB, part.epoch).read_bytes()
    assert len(written) == len(followed) == state.log_size == 4000 * 1024
    assert hashlib.sha256(written).digest() == hashlib.sha256(followed).digest() == digest.digest()
    assert database.run(lambda s: s.get_one(Member, (part.epoch, 0)).log_offset) == len(written)
    await host.close()
    database.close()
