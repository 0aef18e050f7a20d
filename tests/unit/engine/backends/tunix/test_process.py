"""The worker's process, with a worker that computes nothing in its place."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from groupwise.api.schemas.parts import Update
from groupwise.core.errors import ModelError, RunError
from groupwise.core.types import OptimiserParams
from groupwise.engine.backends.tunix import process
from groupwise.engine.backends.tunix.messages import Look, Restore, Save
from groupwise.engine.backends.tunix.process import WorkerProcess
from groupwise.notebook.config import SECRETS

PARROT = """
import json, os, signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
connection = socket.socket(fileno=int(sys.argv[1]))
answers = connection.makefile("w")
print("it begins", flush=True)
withdrawn = []
for line in connection.makefile("r"):
    order = json.loads(line)
    if order["cancel"] is not None:
        withdrawn.append(order["cancel"])
        continue
    do, answer = order["do"], {"number": order["number"]}
    if do["verb"] == "save":
        print("the disk is on fire", flush=True)
        os._exit(3)
    if do["verb"] == "restore" and do["folder"] == "never":
        continue
    if do["verb"] == "restore":
        answer["error"] = {"kind": "ModelError", "message": "no such " + do["folder"]}
    else:
        told = {"path": os.environ.get("PYTHONPATH"), "own": os.environ.get("OWN"), "names": [*os.environ]}
        answer["result"] = {"do": do, "withdrawn": withdrawn, **told}
    answers.write(json.dumps(answer) + "\\n")
    answers.flush()
"""


CREDENTIALS = {
    *map(str.upper, SECRETS),
    *("GROUPWISE_API_KEY", "OPENAI_API_KEY", "GITHUB_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
}


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerProcess]:
    main = tmp_path / "main.py"
    main.write_text(PARROT)
    monkeypatch.setattr(process, "MAIN", main)
    monkeypatch.setenv("PYTHONPATH", "/of/another")
    for name in CREDENTIALS:
        monkeypatch.setenv(name, "x")
    started = WorkerProcess(Path(sys.executable), {"OWN": "yes"})
    yield started
    started.close()


def test_calls_are_answered_each_by_its_own(worker: WorkerProcess) -> None:
    async def three() -> list[float]:
        orders = [Update(params=OptimiserParams(rate)) for rate in (0.1, 0.2, 0.3)]
        found = await asyncio.gather(*map(worker.call, orders))
        return [each["do"]["params"]["learning_rate"] for each in found]

    assert asyncio.run(three()) == [0.1, 0.2, 0.3]
    told = worker.call_now(Look())
    assert (told["path"], told["own"]) == (None, "yes")
    assert "PATH" in told["names"]
    assert not CREDENTIALS & {*told["names"]}
    os.kill(worker.pid, signal.SIGINT)  # of the group, which is not its affair
    with pytest.raises(ModelError, match="no such place"):
        worker.call_now(Restore(folder="place"))
    assert os.getpgid(worker.pid) != os.getpgid(0)


def test_a_call_without_a_waiter_is_withdrawn(worker: WorkerProcess) -> None:
    async def give_up() -> None:
        waits = asyncio.create_task(worker.call(Restore(folder="never")))
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits

    asyncio.run(give_up())
    assert worker.call_now(Look())["withdrawn"] == [1]


def test_its_end_is_reported_with_its_last_words(worker: WorkerProcess) -> None:
    worker.tell(Restore(folder="never"))  # for which nobody waits
    for _ in range(2):  # also by calls that come later
        with pytest.raises(RunError, match=r"(?s)exit code 3.*on fire"):
            worker.call_now(Save(folder="x"))


def test_kill_fails_what_waits(worker: WorkerProcess) -> None:
    async def killed() -> None:
        waits = asyncio.create_task(worker.call(Restore(folder="never")))
        await asyncio.sleep(0)
        os.kill(worker.pid, signal.SIGKILL)
        await waits

    with pytest.raises(RunError, match="SIGKILL"):
        asyncio.run(killed())
