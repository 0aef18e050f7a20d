"""`groupwise launch ssh`, typed, with a real sshd: whom it trusts, and an environment that a real pip makes there."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from groupwise.hosts.keys import parse
from tests.integration.launch.person import Person
from tests.integration.launch.stopping import ctrl_c_ends_it
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


def way_to(host: LoopbackHost) -> list[str]:
    found = {
        "--host": host.address,
        "--user": host.user,
        "--port": str(host.port),
        "--key": str(host.key_path),
    }
    return [word for option in found.items() for word in option]


@pytest.fixture
def way(machine: LoopbackHost) -> list[str]:
    return way_to(machine)


@pytest.fixture
def trusted(machine: LoopbackHost, way: list[str]) -> list[str]:
    return [*way, "--trust", parse(machine.host_key).fingerprint]


def test_nothing_is_said_to_a_machine_that_nobody_trusts(
    person: Person, machine: LoopbackHost, way: list[str]
) -> None:
    (person.project / "job.py").write_text("")
    before = machine.log().count("Accepted publickey")
    words = ("ssh", *way, "--python", sys.executable)
    typed = person.types(*words, "--script", "job.py", code=2)
    assert parse(machine.host_key).fingerprint in typed.err
    assert "--trust SHA256:" in typed.err
    typed = person.types(*words, "--trust", "SHA256:another", "--script", "job.py", code=2)
    assert "not SHA256:another" in typed.err
    assert machine.log().count("Accepted publickey") == before


def test_ctrl_c_ends_it_in_order_and_fetches(
    person: Person, machine: LoopbackHost, trusted: list[str]
) -> None:
    words = ("ssh", *trusted, "--python", sys.executable)
    ctrl_c_ends_it(person, *words, far=(machine.home,))


def test_an_environment_is_made_there_once(
    person: Person, machine: LoopbackHost, trusted: list[str], tmp_path: Path
) -> None:
    (person.project / "job.py").write_text(TELLS)
    house = fill_wheelhouse(tmp_path / "wheelhouse")
    lock = lock_of(house, hashes=True)
    made = ("--lock", str(lock), "--wheelhouse", str(house))
    python = ("--base-python", os.path.realpath(sys.executable))
    words = ("ssh", *trusted, *made, *python)
    typed = person.types(*words, "--name", "first", "--script", "job.py", "--a", "b c")
    assert "4/4 looking whether it works" in typed.out
    told = json.loads((person.project / "launches/first/outputs/told.json").read_text())
    assert told["words"] == ["--a", "b c"]
    environments = machine.home / "groupwise-launch/environments"
    assert Path(told["prefix"]).parent == environments
    assert told["path"].startswith(f"{told['prefix']}/bin:")
    typed = person.types(*words, "--name", "second", "--script", "job.py")
    assert "it is there already" in typed.out
    again = json.loads((person.project / "launches/second/outputs/told.json").read_text())
    assert again["prefix"] == told["prefix"]


@pytest.mark.soak(suite="launch")
def test_an_environment_that_cannot_be_made_ends_the_job_with_the_reason(
    person: Person, trusted: list[str], tmp_path: Path
) -> None:
    (person.project / "job.py").write_text("")
    house = fill_wheelhouse(tmp_path / "wheelhouse")
    lock = lock_of(house, hashes=False)
    lock.write_text(lock.read_text() + "not-there-at-all==1.0\n")
    made = ("--lock", str(lock), "--wheelhouse", str(house))
    python = ("--base-python", os.path.realpath(sys.executable))
    words = ("ssh", *trusted, *made, *python, "--name", "broken", "--script", "job.py")
    typed = person.types(*words, code=69)
    assert "not-there-at-all" in typed.out
    assert person.result("broken")["state"] == "failed"


def test_a_job_is_found_from_another_machine(
    person: Person, machine: LoopbackHost, trusted: list[str]
) -> None:
    text = "import os, sys; print(os.environ['ATTEMPT'], sys.executable); sys.exit(os.environ['ATTEMPT'] == '1')"
    (person.project / "job.py").write_text(text)
    words = ("ssh", *trusted, "--python", sys.executable, "--name", "afar")
    person.types(*words, "--detach", "--script", "job.py")
    row = machine.vm_row()
    other = dataclasses.replace(person, state="another")
    known = person.home / ".ssh" / "known_hosts"
    known.parent.mkdir()
    known.write_text(f"[{row['ip_address']}]:{row['port']} {machine.host_key}\n")
    at = f"ssh:{row['user']}@{row['ip_address']}:{row['port']}"
    place = ("--at", at, "--key", row["ssh_key_path"])
    assert other.types("logs", "-f", "afar", *place, code=1).out == f"1 {sys.executable}\n"
    assert other.types("resume", "afar", *place).out == f"2 {sys.executable}\n"


def test_a_machine_that_is_away_is_told_as_such(person: Person) -> None:
    with loopback_hosts(1) as [host]:
        (person.project / "job.py").write_text("")
        trust = ("--trust", parse(host.host_key).fingerprint, "--python", sys.executable)
        words = ("ssh", *way_to(host), *trust, "--name", "gone", "--detach")
        person.types(*words, "--script", "job.py")
    found = json.loads(person.types("list", "--json").out)["jobs"]
    assert [(each["name"], each["state"]) for each in found] == [("gone", "unknown")]
    assert "cannot be reached" in found[0]["problem"]
    assert "cannot be reached" in person.types("stop", "gone", code=1).err
