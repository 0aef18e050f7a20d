"""A fleet with canaries as secrets, keys and passwords; then all its output and files are searched for them.

1. The command of a job has its secrets, and nobody else: no other process of its machine, in arguments or environment.
2. Nowhere are they written down: not in the database, in logs, events, artefacts, or any file here or on a machine.
3. Nobody is told: not in messages of NATS, answers of the API, what commands print, reasons of failures.
4. What the operator has not allowed is not to be had, however it is written and by whatever entrance.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest

from groupwise.jobs.fleet.files.artefacts import artefact_folder
from tests.integration.fleet.whole_fleet import WholeFleet, hearing, whole_fleet
from tests.postgres import Postgres

pytestmark = pytest.mark.timeout(540)

OF_A_VARIABLE = "canary-of-a-variable-4f1e8a"
OF_A_FILE = "canary-of-a-file-93bd07"
OF_THE_DATABASE = "canary-of-the-database-c2a955"
OF_ANOTHER = "canary-of-what-nobody-allowed-e01f6b"
PROGRAM = """\
import hashlib, os, sys, time
values = {name: os.environ[name] for name in ("TOKEN", "FROM_FILE")}
os.makedirs("outputs", exist_ok=True)
for name, value in values.items():
    with open("outputs/" + name, "w") as file:
        file.write(hashlib.sha256(value.encode()).hexdigest())
print("begun", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
sys.exit(int(sys.argv[2]))
"""
SECRETS = {"TOKEN": "env:HF_TOKEN"}


@pytest.fixture(scope="module")
def fleet(network_of_the_fleet: None, postgres: Postgres) -> Iterator[WholeFleet]:
    own = {"HF_TOKEN": OF_A_VARIABLE, "OWN_TOKEN": OF_ANOTHER}
    with whole_fleet(postgres, machines=1, url=with_password, environment=own) as made:
        keep(made.folder / "secrets" / "token", OF_A_FILE)
        keep(made.folder / "private" / "token", OF_ANOTHER)
        made.add_machines(python="python3", cpu_slots=4)
        made.start("up")
        made.until_polled()
        yield made


def with_password(url: str) -> str:
    """The server takes any."""
    return url.replace("fleet@", f"fleet:{OF_THE_DATABASE}@")


def keep(path: Path, value: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(value + "\n")
    path.chmod(0o600)


def requested(fleet: WholeFleet, gate: Path, code: int, **more: Any) -> dict[str, Any]:
    return {
        "arguments": ["python3", "-c", PROGRAM, str(gate), str(code)],
        "secrets": {**SECRETS, "FROM_FILE": f"file:{fleet.folder}/secrets/token"},
        "retry": {"charged": 0},
        **more,
    }


# --- looking everywhere ---------------------------------------------------------------------------


def tables(url: str) -> Iterator[tuple[str, bytes]]:
    """Every table of a PostgreSQL database, as COPY writes it."""
    with psycopg.connect(url) as connection:
        names = connection.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
        ).fetchall()
        for (name,) in names:
            with connection.cursor().copy(
                f'COPY (SELECT * FROM "{name}") TO STDOUT'.encode()
            ) as copy:
                yield name, b"".join(bytes(piece) for piece in copy)


def files(*folders: Path) -> Iterator[tuple[str, bytes]]:
    """With their names."""
    for path in (path for folder in folders for path in folder.rglob("*")):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink():
                yield str(path), str(path).encode() + path.read_bytes()


def processes() -> Iterator[tuple[int, bytes, bytes]]:
    """Number, arguments and environment of all that this machine has, whatever namespace it is in."""
    for each in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if each.name.isdigit():
                arguments, environment = (each / "cmdline", each / "environ")
                yield int(each.name), arguments.read_bytes(), environment.read_bytes()


def found_in(places: Iterable[tuple[str, bytes]], *canaries: str) -> list[str]:
    return [
        f"{canary} in {name}"
        for name, content in places
        for canary in canaries
        if canary.encode() in content
    ]


ALL = (OF_A_VARIABLE, OF_A_FILE, OF_THE_DATABASE, OF_ANOTHER)


def expect_written_nowhere(fleet: WholeFleet, *canaries: str) -> None:
    """But where the operator keeps them."""
    own = {str(fleet.folder / name / "token") for name in ("secrets", "private")}
    assert found_in(tables(fleet.url), *canaries) == []
    folders = [fleet.folder.parent, *(host.folder for host in fleet.hosts.values()), fleet.shared]
    assert found_in((each for each in files(*folders) if each[0] not in own), *canaries) == []


def expect_known_to_nobody_else(fleet: WholeFleet, jobs: list[str]) -> None:
    """Of all processes while the jobs run. The control plane's environment is where the operator put one of them."""
    control = {c._process.pid for c in fleet.controls.values() if c._process is not None}
    inside = set(fleet.hosts["h1"].processes())
    markers = [f"GROUPWISE_ATTEMPT={job_id}.".encode() for job_id in jobs]
    having: list[int] = []
    for pid, arguments, environment in processes():
        if pid == os.getpid():
            continue
        assert found_in([(f"arguments of {pid}", arguments)], *ALL) == [], arguments
        if pid in control:
            assert OF_A_FILE.encode() not in environment
        elif pid in inside and found_in([(str(pid), environment)], *ALL):
            assert any(marker in environment for marker in markers), arguments
            assert arguments.startswith(b"python3\0-c\0import hashlib"), arguments
            having.append(pid)
    assert len(having) == len(jobs)


# --- the tests ------------------------------------------------------------------------------------


@pytest.fixture
def nats_messages(fleet: WholeFleet) -> Iterator[list[tuple[str, bytes]]]:
    """Every message that NATS carries meanwhile."""
    heard: list[tuple[str, bytes]] = []
    with hearing(fleet.nats, ">", lambda subject, data: heard.append((subject, data))):
        yield heard


class Noted:
    """A client of the API that keeps every answer, headers and all."""

    def __init__(self, fleet: WholeFleet, address: str, role: str) -> None:
        self.address = address
        self.key = fleet.cli("key", "new", role).stdout.strip()
        self.answers: list[tuple[str, bytes]] = []

    def ask(self, method: str, path: str, **more: Any) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {self.key}"}
        answer = httpx2.request(
            method, f"{self.address}{path}", headers=headers, timeout=60, **more
        )
        headers = repr(answer.headers).encode()
        self.answers.append((f"{method} {path}", headers + answer.content))
        return answer

    def submit(self, asked: dict[str, Any]) -> str:
        return self.ask("POST", "/jobs", json=asked).json()["job_id"]


def test_only_the_command_has_its_secrets(
    fleet: WholeFleet, nats_messages: list[tuple[str, bytes]]
) -> None:
    gate = fleet.shared / "gate"
    with fleet.api() as address:
        noted, acting = (Noted(fleet, address, role) for role in ("admin", "act"))
        jobs = [acting.submit(requested(fleet, gate, code)) for code in (0, 3)]
        for job_id in jobs:
            log = fleet.place.logs / f"{job_id}.log"
            fleet.until(log.exists, f"the log of {job_id}")
        expect_known_to_nobody_else(fleet, jobs)
        gate.touch()
        fleet.ended(jobs[0])
        fleet.ended(jobs[1], status="failed")
        fleet.until_idle()
        [attempt] = fleet.attempts(jobs[0])
        folder = artefact_folder(fleet.place.artefacts, jobs[0], attempt.epoch) / "outputs"
        for name, value in (("TOKEN", OF_A_VARIABLE), ("FROM_FILE", OF_A_FILE)):
            assert (folder / name).read_text() == hashlib.sha256(value.encode()).hexdigest()
        for job_id in jobs:
            for path in ("", "/log", "/artefacts"):
                noted.ask("GET", f"/jobs/{job_id}{path}")
        noted.ask("POST", f"/jobs/{jobs[1]}/retry")
        fleet.ended(jobs[1], status="failed")
        for path in "jobs vms vms/h1 events status projects keys metrics openapi.json".split():
            noted.ask("GET", f"/{path}")
        noted.ask("POST", "/jobs", json=requested(fleet, gate, 0, secrets={"TOKEN": OF_A_VARIABLE}))
    commands = "jobs --json|show {0}|show {1} --json|logs {1}|key list|status --json|doctor"
    printed = [
        fleet.cli(*words.format(*jobs).split(), code=None)
        for words in f"{commands}|submit --secret TOKEN={OF_A_VARIABLE} -- true".split("|")
    ]
    shown = [(str(each.args), (each.stdout + each.stderr).encode()) for each in printed]
    ends = {"jobs.completed", "jobs.errored"}
    fleet.until(lambda: {subject for subject, _ in nats_messages} >= ends, "the messages")
    for places in (noted.answers, nats_messages, tables(fleet.url), files(fleet.folder)):
        assert found_in(places, jobs[0]) != []  # whoever looks there finds what is there
    keys = (noted.key, acting.key)
    everything = (*ALL, *keys, *(key.rpartition("_")[2] for key in keys))
    for places in (noted.answers, nats_messages, shown):
        assert found_in(places, *everything) == []
    expect_written_nowhere(fleet, *everything)


def test_secrets_that_are_not_allowed_cannot_be_read(fleet: WholeFleet) -> None:
    place = fleet.folder
    (place / "secrets" / "elsewhere").symlink_to("../private/token")
    references = [
        "env:OWN_TOKEN", f"file:{place}/private/token", f"file:{place}/secrets/../private/token",
        "file:/proc/self/environ", f"file:{place}/secrets/./token", "env:GROUPWISE_FLEET_DATABASE",
        "env:NATS_TOKEN",
    ]  # fmt: skip
    with fleet.api() as address:
        noted = Noted(fleet, address, "act")
        for number, reference in enumerate(references):
            asked = {"arguments": ["true"], "secrets": {"STOLEN": reference}}
            answer = noted.ask("POST", "/jobs", json=asked)
            row = f"stolen-{number}"
            statement = "INSERT INTO jobs (job_id, job_type, request) VALUES (%s, 'COMMAND', %s)"
            fleet.sql(statement, row, json.dumps(asked))
            reason = str(fleet.ended(row, status="failed").failure_reason)
            told = [answer.text, reason]
            if number < 2:
                words = ("submit", "--secret", f"STOLEN={reference}", "--", "true")
                told.append(fleet.cli(*words, code=2).stderr)
                assert OF_ANOTHER not in told[-1]
            assert answer.status_code == 422, answer.text
            assert all("STOLEN" in each and "allowed_secrets" in each for each in told), told
        linked = {"STOLEN": f"file:{place}/secrets/elsewhere"}
        job_id = noted.submit({"arguments": ["true"], "secrets": linked})
        assert "leads out of" in str(fleet.ended(job_id, status="failed").failure_reason)
        noted.ask("GET", f"/jobs/{job_id}")
        check_changed_rows(fleet, noted)
    assert found_in(noted.answers, *ALL) == []
    expect_written_nowhere(fleet, *ALL)


def check_changed_rows(fleet: WholeFleet, noted: Noted) -> None:
    """Whoever may write rows may write them at any time, and whoever owns the database may take its triggers away, too: a row that is
    changed after its admission gets no more."""
    changed = json.dumps({"arguments": ["true"], "secrets": {"TOKEN": "env:OWN_TOKEN"}})
    change = "UPDATE jobs SET request = %s WHERE job_id = %s"
    asked = {"arguments": ["true"], "secrets": SECRETS, "hold": True}
    one, other = (noted.submit(asked) for _ in "ab")
    for job_id in (one, other):
        with pytest.raises(psycopg.errors.CheckViolation):
            fleet.sql(change, changed, job_id)
    fleet.sql("ALTER TABLE jobs DISABLE TRIGGER fleet_job_request")
    fleet.sql(change, changed, other)
    fleet.sql("ALTER TABLE jobs ENABLE TRIGGER fleet_job_request")
    for job_id in (one, other):
        noted.ask("POST", f"/jobs/{job_id}/release")
    fleet.ended(one)
    assert "allowed_secrets" in str(fleet.ended(other, status="failed").failure_reason)


def test_the_password_is_in_no_complaint(fleet: WholeFleet, postgres: Postgres) -> None:
    """The database goes away, and everybody says so."""
    postgres.kill()
    try:
        for done in (fleet.cli("list", code=None), fleet.cli("doctor", code=None)):
            assert done.returncode != 0
            assert OF_THE_DATABASE not in done.stdout + done.stderr
        control = fleet.controls["up"]
        words = ("does not do its work", "away")
        fleet.until(lambda: any(word in control.log() for word in words), "a complaint")
    finally:
        postgres.start()
    assert found_in(files(fleet.folder.parent), OF_THE_DATABASE) == []
