"""`groupwise launch ssh` as a user types it, with a real sshd: which host keys it trusts, and an environment that a real pip installs
there."""

import dataclasses
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.jobs.hosts.driver import BATCH
from groupwise.jobs.hosts.files import hash_of
from groupwise.jobs.hosts.host import Request, RunnerResponse
from groupwise.jobs.hosts.keys import parse_host_key
from groupwise.jobs.hosts.ssh import SshHost
from tests.integration.launch.person import Person
from tests.ssh_hosts import LoopbackHost, loopback_hosts
from tests.wheels import fill_wheelhouse, lock_of

REPORT_PROGRAM = """\
import json, os, sys
import own_thing_of_a_test
os.makedirs("outputs")
with open("outputs/told.json", "w") as file:
    json.dump({"words": sys.argv[1:], "prefix": sys.prefix, "path": os.environ["PATH"]}, file)
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[LoopbackHost]:
    with loopback_hosts(1) as [host]:
        yield host


def way_to(host: LoopbackHost, *trust: str) -> list[str]:
    found = {
        "--host": host.address, "--user": host.user, "--port": str(host.port), "--key": str(host.key_path),
    }  # fmt: skip
    return ["ssh", *(word for option in found.items() for word in option), *trust]


def trusting(host: LoopbackHost) -> list[str]:
    return way_to(host, "--trust", parse_host_key(host.host_key).fingerprint)


@pytest.fixture
def trusted(machine: LoopbackHost) -> list[str]:
    return [*trusting(machine), "--python", sys.executable]


def test_no_login_to_a_machine_with_an_untrusted_key(person: Person, machine: LoopbackHost) -> None:
    (person.project / "job.py").write_text("")
    before = machine.log().count("Accepted publickey")
    job = ("--python", sys.executable, "--script", "job.py")
    typed = person.types(*way_to(machine), *job, code=2)
    assert parse_host_key(machine.host_key).fingerprint in typed.err
    assert "--trust SHA256:" in typed.err
    typed = person.types(*way_to(machine, "--trust", "SHA256:another"), *job, code=2)
    assert "not SHA256:another" in typed.err
    assert machine.log().count("Accepted publickey") == before


@pytest.fixture
def made(machine: LoopbackHost, tmp_path: Path) -> tuple[Path, list[str]]:
    """A lock, and words that have an environment made of it."""
    house = fill_wheelhouse(tmp_path / "wheelhouse")
    lock = lock_of(house, hashes=True)
    words = ("--lock", str(lock), "--wheelhouse", str(house))
    base = ("--base-python", os.path.realpath(sys.executable))
    return lock, [*trusting(machine), *words, *base]


def test_an_environment_is_made_there_once(
    person: Person, machine: LoopbackHost, made: tuple[Path, list[str]]
) -> None:
    (person.project / "job.py").write_text(REPORT_PROGRAM)
    environments, prefixes = machine.home / "groupwise-launch/environments", set[str]()

    def plan() -> dict[str, Any]:
        words = ("--dry-run", "--json", "--script", "job.py")
        return json.loads(person.types(*made[1], *words).out)["environment"]

    bare = plan()
    assert bare["downloads"]["own_thing-1.0-py3-none-any.whl"] > 0
    assert bare["machine"]["python"] == os.path.realpath(sys.executable)
    assert 0 < bare["disk_needed"] < bare["machine"]["free"]
    assert not environments.exists(), "a plan changes nothing there"
    said = {"first": "4/4 looking whether it works", "second": "it is there already"}
    for name, words in said.items():
        job = ("--name", name, "--script", "job.py", "--a", "b c")
        assert words in person.types(*made[1], *job).out
        path = person.project / f"launches/{name}/outputs/told.json"
        told = json.loads(path.read_text())
        assert told["words"] == ["--a", "b c"]
        assert Path(told["prefix"]).parent == environments
        assert told["path"].startswith(f"{told['prefix']}/bin:")
        prefixes.add(told["prefix"])
    assert len(prefixes) == 1
    assert plan()["machine"]["made"]


def test_a_sender_that_is_killed_continues_where_it_was(
    person: Person, machine: LoopbackHost, trusted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 10 * BATCH + 1
    (person.project / "large.bin").write_bytes(random.Random(0).randbytes(size))
    reads = "import hashlib; print(hashlib.sha256(open('large.bin', 'rb').read()).hexdigest())"
    (person.project / "job.py").write_text(reads)
    words = (*trusted, "--name", "large", "--script", "job.py")
    sender = person.begins(*words)
    blobs = machine.home / "groupwise-launch/blobs"

    def arrived() -> int:
        return sum(
            path.stat().st_size == BATCH for path in blobs.glob("*/*") if path.name[-4:] != ".new"
        )

    person.waits(lambda: arrived() >= 3)
    sender.kill()
    sender.wait()
    sent: list[int] = []
    there, call = arrived(), SshHost.call

    async def counted(self: SshHost, request: Request, *, timeout: float) -> RunnerResponse:
        sent.append(len(request.payload))
        return await call(self, request, timeout=timeout)

    monkeypatch.setattr(SshHost, "call", counted)
    assert hash_of(person.project / "large.bin") in person.types(*words).out
    assert sum(sent) < size - there * BATCH + (1 << 20)


def test_a_job_is_found_from_another_machine(
    person: Person, machine: LoopbackHost, trusted: list[str]
) -> None:
    text = "import os, sys; print(os.environ['ATTEMPT'], sys.executable); sys.exit(os.environ['ATTEMPT'] == '1')"
    (person.project / "job.py").write_text(text)
    person.types(*trusted, "--name", "afar", "--detach", "--script", "job.py")
    row = machine.vm_row()
    other = dataclasses.replace(person, state="another")
    known = person.home / ".ssh" / "known_hosts"
    known.parent.mkdir()
    known.write_text(f"[{row['ip_address']}]:{row['port']} {machine.host_key}\n")
    at = f"ssh:{row['user']}@{row['ip_address']}:{row['port']}"
    place = ("--at", at, "--key", row["ssh_key_path"])
    assert other.types("logs", "-f", "afar", *place, code=1).out == f"1 {sys.executable}\n"
    assert other.types("resume", "afar", *place).out == f"2 {sys.executable}\n"
