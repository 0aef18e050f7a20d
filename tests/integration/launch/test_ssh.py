"""`groupwise launch ssh`, typed, with a real sshd: whom it trusts, and an environment that a real pip makes there."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from groupwise.jobs.hosts.keys import parse_host_key
from tests.integration.launch.person import Person
from tests.ssh_hosts import LoopbackHost, loopback_hosts
from tests.wheels import fill_wheelhouse, lock_of

TELLS = """\
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


def test_nothing_is_said_to_a_machine_that_nobody_trusts(
    person: Person, machine: LoopbackHost
) -> None:
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
    (person.project / "job.py").write_text(TELLS)
    environments, prefixes = machine.home / "groupwise-launch/environments", set[str]()
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
