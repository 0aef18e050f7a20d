"""Text that has a special meaning for a shell, a terminal, a path or a format, in every field that people fill in.

1. Whatever field it stands in and whoever wrote it there, it is refused with a reason that names the field, or kept exactly as it is.
2. What arrives in a process (arguments, variables, files) is what was given, byte for byte.
3. Nothing of it is ever run: a file that any evaluation by a shell would make appears neither here nor on a machine.
4. No command of the fleet prints a control character.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import psycopg
import pytest
from sqlalchemy import select

from groupwise.api.schemas.problems import Refusal
from groupwise.cli.main import main
from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.client import FleetClient
from groupwise.jobs.fleet.files.artefacts import artefact_folder
from groupwise.jobs.fleet.files.logs import log_path
from groupwise.jobs.fleet.store.tables import VM, Job
from tests.integration.fleet.whole_fleet import WholeFleet, stand_ins, whole_fleet
from tests.postgres import Postgres

pytestmark = pytest.mark.timeout(540)
C = TypeVar("C")
T = TypeVar("T")

DUMP = """\
import hashlib, json, os, sys
files = {}
for folder, _, names in os.walk(b"."):
    for name in names:
        path = os.path.join(folder, name)
        with open(path, "rb") as file:
            files[path[2:].hex()] = hashlib.sha256(file.read()).hexdigest()
os.makedirs("outputs", exist_ok=True)
with open("outputs/seen.json", "w") as file:
    json.dump({
        "argv": [os.fsencode(word).hex() for word in sys.argv[1:]],
        "environment": {name.hex(): value.hex() for name, value in os.environb.items()},
        "files": files,
    }, file)
"""
CANARY = "canary-of-a-shell"


def nasty(canary: Path) -> dict[str, str]:
    """Name → text. Evaluated, most would make the file."""
    touch = f"touch {canary}"
    return {
        "semicolon": f"; {touch}",
        "substitution": f"$({touch})",
        "backticks": f"`{touch}`",
        "quotes": f"'; {touch}; '",
        "double quotes": f'"; {touch}; "',
        "both quotes": "it's \"quoted\" '\\''",
        "pipe": f"x | {touch}",
        "and": f"x && {touch} #",
        "newline": f"x\n{touch}\n",
        "carriage return": f"x\r\n{touch}\r",
        "brackets": "${IFS}${PATH}$HOME",
        "glob": "* ? [a-z] ~ {a,b}",
        "dash": "-rf",
        "option": f"--output={canary}",
        "proxy": f"-oProxyCommand={touch}",
        "equals": "=a=b=",
        "parents": f"../../../../../..{canary}",
        "format": "%s%n%x {} {{7*7}} {0.__class__} {self}",
        "escapes": "\x1b[31mred\x1b]0;title\x07\x1b[2J\x9b1m",
        "other controls": "\x01\x08\x7f\x85",
        "bidi": "abc\u202edef\u2066",
        "letters": "Grüße 漢字 🙂 e\u0301 \ufeff",
        "spaces": "  \t ",
        "backslashes": "\\ \\n \\\\ \\0 \\",
        "JSON": '{"a": ["b\\u0000"]}',
        "SQL": "'); DROP TABLE jobs; --",
        "YAML": "!!python/object/apply:os.system ['touch x']",
        "long": "x" * 100_000,
        "empty": "",
    }


NUL = "a\0b"


@pytest.fixture(scope="module")
def fleet(network_of_the_fleet: None, postgres: Postgres) -> Iterator[WholeFleet]:
    slow = {"GROUPWISE_FLEET_POLL_SECONDS": "10"}  # for two hundred rows of one machine
    with whole_fleet(postgres, machines=1, environment=slow) as made:
        python = stand_ins(made.shared / "bin", DUMP, "groupwise", "groupwise-train-grpo")
        made.add_machines(cpu_slots=8, python=python)
        made.start("up")
        made.until_polled()
        yield made


@pytest.fixture(scope="module")
def canary(fleet: WholeFleet) -> Path:
    """Where everybody may write: here and there it is the same path."""
    place = fleet.shared / "open"
    place.mkdir()
    place.chmod(0o1777)
    return place / CANARY


@pytest.fixture(autouse=True)
def nothing_is_run(fleet: WholeFleet, canary: Path) -> Iterator[None]:
    yield
    assert not canary.is_file()  # a work folder of that name is what somebody asked for
    for place in (fleet.folder.parent, fleet.hosts["h1"].folder):
        assert [path for path in place.rglob(CANARY) if path.is_file()] == []
    for name, control in fleet.controls.items():
        assert control.is_there(), f"{name} has ended\n{control.log()[-3000:]}"


@pytest.fixture
def client(fleet: WholeFleet) -> Iterator[FleetClient]:
    with fleet.api() as address, FleetClient(address, sleep=lambda _: None) as made:
        yield made


def seen(fleet: WholeFleet, job_id: str) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """What its process was given: arguments, variables, and hashes of files by their path."""
    fleet.ended(job_id)
    [attempt] = fleet.attempts(job_id)
    folder = artefact_folder(fleet.place.artefacts, job_id, attempt.epoch)
    found = json.loads((folder / "outputs/seen.json").read_text())
    variables = {decoded(name): decoded(value) for name, value in found["environment"].items()}
    files = {decoded(path): digest for path, digest in found["files"].items()}
    return [decoded(word) for word in found["argv"]], variables, files


def decoded(word: str) -> str:
    return os.fsdecode(bytes.fromhex(word))


# --- what arrives ---------------------------------------------------------------------------------


def test_arguments_variables_and_files_arrive_as_they_are(
    fleet: WholeFleet, client: FleetClient, canary: Path, tmp_path: Path
) -> None:
    texts = nasty(canary)
    (tmp_path / "dump.py").write_text(DUMP)
    files = {"dump.py": tmp_path / "dump.py"}
    for number, (name, text) in enumerate(texts.items()):
        content = tmp_path / f"file-{number}"
        content.write_bytes(text.encode() + b"\0\xff")
        files[f"as {name}/{number}"] = content
        path = text.strip("/").replace("/", "∕")[:60]
        if path:
            files[f"{path}/{path}"] = content
    job = client.submit(
        {
            "arguments": ["python3", "dump.py", *texts.values()],
            "environment": {f"V{n}": text for n, text in enumerate(texts.values())},
            "labels": {f"l{n}": text for n, text in enumerate(texts.values())},
            "name": texts["escapes"],
        },
        files=files,
    )
    words, there, found = seen(fleet, job["job_id"])
    assert words == list(texts.values())
    assert [there[f"V{n}"] for n in range(len(texts))] == words
    others = {name for name in there if not name.startswith(("V", "GROUPWISE_", "CUDA_"))}
    assert others <= set(
        "HOME USER LOGNAME LANG PATH PWD LC_CTYPE PYTHONUNBUFFERED ATTEMPT PREVIOUS_FAILURE".split()
    )
    hashes = {path: hashlib.sha256(place.read_bytes()) for path, place in files.items()}
    assert found == {path: digest.hexdigest() for path, digest in hashes.items()}
    shown = client.show(job["job_id"])
    assert (shown["arguments"][2:], shown["name"]) == (words, texts["escapes"])


# --- what is refused ------------------------------------------------------------------------------

PLACES: dict[str, Any] = {
    "arguments": lambda text: {"arguments": ["true", text]},
    "environment value": lambda text: {"environment": {"A": text}},
    "environment": lambda text: {"environment": {text: "a"}},
    "files": lambda text: {"files": {text: ["0" * 64, 0o644, 0]}},
    "files hash": lambda text: {"files": {"a": [text, 0o644, 0]}},
    "secrets": lambda text: {"secrets": {text: "env:HF_TOKEN"}},
    "secret": lambda text: {"secrets": {"A": text}},
    "secret file": lambda text: {"secrets": {"A": f"file:/{text}"}},
    "labels": lambda text: {"labels": {"a": text}},
    "labels key": lambda text: {"labels": {text: "a"}},
    "artefact": lambda text: {"artefacts": [text]},
    "checkpoint": lambda text: {"checkpoints": [text]},
    "output_dir": lambda text: {"output_dir": text},
    "name": lambda text: {"name": text},
    "after": lambda text: {"after": [text]},
    "webhook": lambda text: {"webhook": text},
    "webhook path": lambda text: {"webhook": f"http://127.0.0.1:1/{text}"},
    "job_type": lambda text: {"job_type": text},
    "resources vm": lambda text: {"resources": {"gpus": 0, "vm": text}},
    "resources labels": lambda text: {"resources": {"gpus": 0, "labels": {"a": text}}},
    "resources gpu_model": lambda text: {"resources": {"gpus": 1, "gpu_model": text}},
    "resources gpu": lambda text: {"resources": {"gpu_uuids": [text]}},
}
"""Fields of a job beside those of its kind, by words that its refusal names."""
GRPO = {"model": "tiny", "dataset": "/data", "reward_function": "correctness"}


def check_answer(answer: httpx2.Response, field: str, text: str) -> bool:
    """Whether it was accepted; where not, it says what is wrong."""
    if answer.status_code == 201:
        return True
    assert 400 <= answer.status_code < 500, (field, text[:100], answer.status_code, answer.text)
    said = answer.text.lower()
    named = {field.split()[0].rstrip("s"), field.split()[-1]}
    assert any(name in said for name in named), (field, said[:500])
    assert len(said) < 20_000, field
    assert "\x1b" not in answer.text
    return False


EVERY = pytest.mark.parametrize(
    "every", [5, pytest.param(1, marks=pytest.mark.soak(suite="fleet"))], ids=["some", "all"]
)
"""Each fifth is tried whenever the tests run, each column has its turn; all of them by `make soak SUITE=fleet`."""


def part(every: int, columns: Iterable[C], texts: Iterable[T]) -> list[tuple[C, T]]:
    """Of all pairs: each column has other texts than the one before it."""
    pairs = itertools.product(enumerate(columns), enumerate(texts))
    return [(column, text) for (n, column), (m, text) in pairs if (n + m) % every == 0]


@EVERY
def test_every_field_of_a_job_over_http(fleet: WholeFleet, canary: Path, every: int) -> None:
    texts = nasty(canary) | {"NUL": NUL}
    accepted: dict[str, dict[str, Any]] = {}
    held = {"arguments": ["true"], "hold": True}
    with fleet.api() as address, httpx2.Client(base_url=address, timeout=60) as http:
        for (field, body), text in part(every, PLACES.items(), texts.values()):
            asked = held | body(text)
            answer = http.post("/jobs", json=asked)
            if check_answer(answer, field, text):
                accepted[answer.json()["job_id"]] = asked
        for text in [each for each in texts.values() if len(each) < 10_000][::every]:
            check_answer(http.post("/jobs", json=held, params={"project": text}), "project", text)
            for query in ("name", "kind", "vm", "project", "older_than"):
                assert http.get("/jobs", params={query: text}).status_code in (200, 404, 422), query
            # else the client, or the server's reading of HTTP, would not have it as a header
            with contextlib.suppress(httpx2.TransportError):
                key = [(b"Idempotency-Key", text.encode())]
                answer = http.post("/jobs", json=held, headers=key)
                assert answer.status_code in (201, 400, 422), (text[:50], answer.text)
        kept = {job.job_id: job for job in fleet.rows(select(Job))}
    assert len(accepted) > 100 / every
    for job_id, asked in accepted.items():
        job = kept[job_id]
        assert job.status == "held", (asked, job.failure_reason)
        assert (job.spec or {})["arguments"] == asked["arguments"]
        for field in ("environment", "labels"):
            assert job.request.get(field, {}) == asked.get(field, {})


COLUMNS = (
    *("job_id", "job_type", "model", "dataset", "reward_function", "preprocessing_pipeline"),
    *("output_dir", "project", "name", "submitted_by", "idempotency_key", "log_path"),
)


def insert(fleet: WholeFleet, table: str, row: dict[str, Any]) -> None:
    """As somebody writes it by hand."""
    names, marks = ", ".join(f'"{name}"' for name in row), ", ".join(["%s"] * len(row))
    fleet.sql(
        f"INSERT INTO {table} ({names}) VALUES ({marks}) ON CONFLICT DO NOTHING", *row.values()
    )


def until_admitted(fleet: WholeFleet) -> None:
    """Admission has said what it thinks of every row."""
    waiting = select(Job.job_id).where(Job.status == "held", Job.admitted_at.is_(None))
    fleet.until(lambda: not fleet.rows(waiting), "admission of all rows")


@EVERY
def test_every_column_of_a_row(fleet: WholeFleet, canary: Path, every: int) -> None:
    """Written by hand: nothing refuses it but admission, which says why."""
    given: dict[str, tuple[str, str]] = {}
    request = [("request", text) for text in nasty(canary).values()]
    for number, (column, text) in enumerate(
        [*part(every, COLUMNS, nasty(canary).values()), *request]
    ):
        row = {"job_id": f"{every}-row-{number}", **GRPO, "status": "held", "project": "rows"}
        asked = json.dumps({"labels": {text: text}, "environment": {"A": text}})
        row[column] = asked if column == "request" else text
        insert(fleet, "jobs", row)
        given[str(row["job_id"])] = column, text
    until_admitted(fleet)
    jobs = {job.job_id: job for job in fleet.rows(select(Job).where(Job.job_id.in_(given)))}
    assert set(jobs) == set(given)
    for job_id, (column, text) in given.items():
        job = jobs[job_id]
        if job.status == "failed":
            assert column in str(job.failure_reason), (column, text[:80], job.failure_reason)
        elif column != "request":
            assert getattr(job, column) == text
    assert {job.status for job in jobs.values()} == {"held", "failed"}


MACHINE_COLUMNS = ("ip_address", "user", "ssh_key_path", "workdir", "python", "host_key")


def odd_machines(base: dict[str, Any], canary: Path) -> Iterator[dict[str, Any]]:
    """Rows with one text each in one column."""
    for column, text in itertools.product(MACHINE_COLUMNS, nasty(canary).values()):
        yield base | {column: text}
    for text in nasty(canary).values():
        yield base | {"probe": json.dumps([text, text])}
        yield base | {"labels": json.dumps({text: text})}
        jump = {"host": text, "user": text, "ssh_key_path": text, "host_key": text, "port": 22}
        yield base | {"jump": json.dumps(jump)}
    for jump in ({"port": "x"}, {"port": [5]}, {"host": ["a"]}):
        yield base | {"jump": json.dumps(jump)}


@EVERY
def test_every_column_of_a_machine(fleet: WholeFleet, canary: Path, every: int) -> None:
    """By rows: a machine that is not reached says why; one that is runs jobs, under whatever name its folder has."""
    for text in nasty(canary).values():  # commands, addresses and lines of advice hold its name
        with pytest.raises(psycopg.errors.CheckViolation, match="vm_id of a machine"):
            insert(fleet, "vms", {"vm_id": text, "ip_address": "127.0.0.1"})
    base = fleet.hosts["h1"].vm_row() | {"python": "python3"}
    rows: list[str] = []
    for number, row in [*enumerate(odd_machines(base, canary))][::every]:
        rows.append(f"odd-{every}-{number}")
        insert(fleet, "vms", row | {"vm_id": rows[-1]})
    silent = select(VM.vm_id).where(
        VM.vm_id.in_(rows), VM.contact != "ok", VM.problem.is_(None), VM.misses < 3
    )
    fleet.until(lambda: not fleet.rows(silent), "a look at all machines")
    vms = fleet.rows(select(VM).where(VM.vm_id.in_(rows)))
    assert [vm.vm_id for vm in vms if vm.contact != "ok" and not vm.problem] == []
    fine = [vm for vm in vms if vm.contact == "ok" and not vm.degraded]
    odd_folders = [vm.vm_id for vm in fine if vm.workdir != "groupwise-fleet"]
    assert odd_folders
    with fleet.api() as address, FleetClient(address) as client:
        request = {"arguments": ["python3", "-c", "print('it ran')"], "retry": {"charged": 0}}
        jobs = [
            client.submit(request | {"resources": {"gpus": 0, "vm": name}})["job_id"]
            for name in odd_folders
        ]
    for job_id, name in zip(jobs, odd_folders, strict=True):
        assert fleet.ended(job_id).assigned_vm == name
    fleet.sql("UPDATE vms SET active = false WHERE vm_id <> 'h1'")


# --- what is shown --------------------------------------------------------------------------------


def shown(fleet: WholeFleet, capfdbinary: pytest.CaptureFixture[bytes], *asked: str) -> str:
    """What a command prints, on either stream: nothing that a terminal obeys, or that reorders a line."""
    capfdbinary.readouterr()
    code = main(["fleet", *asked])
    out, err = capfdbinary.readouterr()
    said = (out + err).decode()
    odd = {c for c in said if c != "\n" and not c.isprintable() and c not in "\u200c\u200d"}
    assert (odd, "Traceback" in said) == (set(), False), (asked, said)
    assert code in (0, 2), (asked, code, said)
    return said


def test_no_command_prints_a_control_character(
    fleet: WholeFleet,
    client: FleetClient,
    canary: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in fleet.environment.items():
        monkeypatch.setenv(name, value)
    texts = nasty(canary)
    text = "".join(texts[name] for name in ("escapes", "other controls", "bidi", "newline"))
    failing = client.submit(
        {
            "arguments": ["python3", "-c", "import sys; sys.exit(sys.argv[1])", text],
            "name": text,
            "labels": {text: text},
            "retry": {"charged": 0},
        }
    )["job_id"]
    fleet.ended(failing, status="failed")
    columns = ("ip_address", "user", "workdir", "python", "problem", "drain_reason")
    labels = json.dumps({text: text})
    insert(fleet, "vms", {"vm_id": "painted", **dict.fromkeys(columns, text), "labels": labels})
    columns = ("model", "dataset", "reward_function", "job_type")
    insert(fleet, "jobs", {"job_id": "painted", **dict.fromkeys(columns, text)})
    fleet.until(lambda: fleet.job("painted").status == "failed", "the end of a row")
    plain = "jobs|jobs --json|show JOB|show JOB --json|show painted|vm list|vm show painted|status|project list|key list"
    given = "show TEXT|vm show TEXT|cancel TEXT|jobs --status TEXT|submit --kind TEXT --model TEXT"
    submitted = "--env --label --after --file --time-limit --webhook".split()
    for asked in (
        *(line.split() for line in f"{plain}|{given}".split("|")),
        *(["submit", option, "TEXT", "--", "true"] for option in submitted),
        ["submit", "--project", "TEXT", "--dry-run", "--", "TEXT"],
        ["submit", "--secret", f"A=env:{text}", "--", "true"],
    ):
        meant = {"JOB": failing, "TEXT": text}
        shown(fleet, capfdbinary, *(meant.get(word, word) for word in asked))
    fleet.sql("UPDATE vms SET active = false WHERE vm_id = 'painted'")


@pytest.mark.parametrize("job_id", ["../outside", "a/../../../outside", "..", ".", "a/b", "/etc"])
def test_an_id_that_would_be_a_path_leads_to_no_folder(fleet: WholeFleet, job_id: str) -> None:
    """Of a row that somebody wrote by hand."""
    for leads, below in ((artefact_folder, fleet.place.artefacts), (log_path, fleet.place.logs)):
        path = leads(below, job_id, 0).resolve()
        assert path.parent.parent == below.resolve()
        assert not path.exists()


def test_a_file_of_another_program_is_not_reached_by_names_of_jobs(client: FleetClient) -> None:
    for name in ("..%2f..%2fetc%2fpasswd", "..", ".", "", "a/../../b", "%00", "\0", "-h"):
        for verb in (client.show, client.artefacts, client.cancel, client.machine):
            with pytest.raises((Refusal, UsageError)):
                verb(name)
