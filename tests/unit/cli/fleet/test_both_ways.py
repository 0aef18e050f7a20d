"""A command means the same for a fleet whose folder is here and for one behind an address: exit code, standard output, standard error.

The fleet is one, reached both ways. What changes something is either the same when it is done twice, or done to a job of each way.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main

from groupwise.cli.fleet.printing import print_status
from groupwise.cli.main import main
from groupwise.core.errors import RunError
from groupwise.jobs.fleet.client import FleetClient
from groupwise.jobs.fleet.files.logs import append, make
from groupwise.jobs.fleet.local import LocalFleet
from groupwise.jobs.fleet.settings import FleetPlace
from groupwise.jobs.fleet.store.database import connect
from groupwise.jobs.hosts.files import hash_of
from tests.fleet_api import api, place_in
from tests.unit.cli.conftest import BUILT
from tests.unit.jobs.fleet.queue_helpers import claim_some, execute, finish

KEY = "environment-key-0123456789"
pytestmark = pytest.mark.fleet  # a hundred commands, half of them through a socket


class BothWays:
    """One fleet, and commands on it by its folder and by its address."""

    def __init__(self, place: FleetPlace, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.place, self.url = place, url
        self._capsys = capsys

    def here(self, *words: str) -> tuple[int, str, str]:
        return self._run(str(self.place.folder), words)

    def afar(self, *words: str) -> tuple[int, str, str]:
        return self._run(self.url, words)

    def _run(self, fleet: str, words: tuple[str, ...]) -> tuple[int, str, str]:
        self._capsys.readouterr()
        names = 2 if words[0] in ("vm", "project", "key") else 1
        code = main(["fleet", *words[:names], "--fleet", fleet, *words[names:]])
        told = self._capsys.readouterr()
        return code, told.out, told.err

    def both(self, *words: str) -> tuple[int, str, str]:
        """What a command says, which is the same both ways."""
        here, afar = self.here(*words), self.afar(*words)
        assert afar == here
        return here


@dataclass(frozen=True)
class Reached:
    """The fleet, and what is in it."""

    place: FleetPlace
    url: str
    jobs: dict[str, str]
    """One that has completed and left something, one that waits, one that is held, one that was cancelled; the `epoch` of the first."""


@pytest.fixture(scope="module")
def reached(
    tmp_path_factory: pytest.TempPathFactory, fleet_with_a_machine: Path
) -> Iterator[Reached]:
    folder = tmp_path_factory.mktemp("both") / "fleet"
    shutil.copytree(fleet_with_a_machine, folder)
    place = place_in(folder)
    database = connect(place.database_url)
    try:
        with LocalFleet(place, "user:ada", database=database) as local:
            jobs = jobs_of(local)
        with api(database, place, {"GROUPWISE_API_KEY": KEY}) as url:
            yield Reached(place, url, jobs)
    finally:
        database.close()


@pytest.fixture
def ways(
    reached: Reached, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> BothWays:
    monkeypatch.setattr(typer.main, "get_command", BUILT)
    monkeypatch.setenv("GROUPWISE_API_KEY", KEY)
    monkeypatch.setattr("groupwise.cli.fleet.jobs.time", SimpleNamespace(time=lambda: 2e9))
    return BothWays(reached.place, reached.url, capsys)


@pytest.fixture
def jobs(reached: Reached) -> dict[str, str]:
    return reached.jobs


def jobs_of(fleet: LocalFleet) -> dict[str, str]:
    def submitted(name: str, **more: Any) -> str:
        asked = {"arguments": ["true", name], "resources": {"gpus": 0}, "name": name}
        return fleet.submit({**asked, "labels": {"is": name}, **more})["job_id"]

    done = submitted("done")
    (claimed,) = claim_some(fleet.database)
    finish(fleet.database, done)
    append(make(fleet.place.logs, done, claimed.epoch), 0, b"one\ntwo\nthree\n")
    leave(fleet.place, done, claimed.epoch, b"weights" * 1000)
    empty = submitted("empty")
    (claimed_empty,) = claim_some(fleet.database)
    finish(fleet.database, empty)
    leave(fleet.place, empty, claimed_empty.epoch, None)
    cancelled = submitted("cancelled")
    fleet.cancel(cancelled, "wrong data")
    waits, held = submitted("waits"), submitted("held", hold=True)
    return {
        "done": done, "empty": empty, "cancelled": cancelled, "waits": waits, "held": held, "epoch": str(claimed.epoch),
    }  # fmt: skip


def leave(place: FleetPlace, job_id: str, epoch: int, data: bytes | None) -> None:
    """A file, and a link that is left out; None: nothing."""
    file = place.artefacts / job_id / str(epoch) / "outputs" / "model.bin"
    file.parent.mkdir(parents=True)
    files, left_out = {}, []
    if data is not None:
        file.write_bytes(data)
        files = {"outputs/model.bin": [hash_of(file), 0o644, len(data)]}
        left_out = [["outputs/l", "link"]]
    record = place.artefacts / job_id / f"{epoch}.json"
    record.write_text(json.dumps({"files": files, "left_out": left_out}))
    (place.artefacts / job_id / "current").symlink_to(str(epoch))


# --- looking


READING_COMMANDS = (
    *(
        "list", "list --status held,cancelled --label is=held", "list --kind COMMAND --project default --limit 2",
        "list --name nobody", "show {done}", "show {waits}", "show {held}", "show {cancelled}", "vm list", "vm show vm-1",
        "project list", "key list", "hold --label is=held", "resume --name nobody", "remove --older-than 0s --dry-run",
        "remove --older-than 1d --status cancelled --dry-run",
    ),
)  # fmt: skip


def test_looking(ways: BothWays, jobs: dict[str, str]) -> None:
    for words in READING_COMMANDS:
        for json_too in ((), ("--json",)):
            code, out, err = ways.both(*words.format(**jobs).split(), *json_too)
            assert code == 0, err
            assert out or err, words


def test_show_has_the_time_of_a_job_only_if_its_command_has_run(
    ways: BothWays, reached: Reached
) -> None:
    job, epoch = reached.jobs["done"], reached.jobs["epoch"]

    def words_of_show() -> list[str]:
        return [line.split()[0] for line in ways.both("show", job)[1].splitlines() if line.split()]

    assert "started" not in words_of_show()
    assert "took" not in words_of_show()
    with closing(connect(reached.place.database_url)) as database:
        execute(database, "UPDATE attempts SET running_at = 5 WHERE epoch = :epoch", epoch=epoch)
    assert {"started", "took"} <= set(words_of_show())


def test_show_begins_with_the_reason_of_a_stop(ways: BothWays, jobs: dict[str, str]) -> None:
    lines = [line.split() for line in ways.both("show", jobs["cancelled"])[1].splitlines()]
    assert ["reason", "wrong", "data"] in lines


def test_vm_show_has_the_time_of_the_last_missed_look_as_a_date(
    ways: BothWays, reached: Reached
) -> None:
    with closing(connect(reached.place.database_url)) as database:
        execute(database, "UPDATE vms SET facts = :facts", facts='{"missed_at": 86400.25}')
    found = ways.both("vm", "show", "vm-1")[1]
    assert "86400" not in found
    assert "1970-01-0" in found


def test_status_names_the_command_that_adds_a_machine_if_there_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machines = {"ready": 0, "total": 0, "gpus": 0, "gpus_available": 0}
    print_status({"jobs": {}, "machines": machines, "processes": [], "alarms": []})
    assert "fleet vm add" in capsys.readouterr().out


def test_logs(ways: BothWays, jobs: dict[str, str]) -> None:
    text = "one\ntwo\nthree\n"
    for options, shown in (
        *(("", text), ("--tail 1", "three\n"), ("--tail 0", ""), ("--attempt {epoch}", text)),
        *(("-f", text), ("-f --tail 2", "two\nthree\n")),
    ):
        code, out, _ = ways.both("logs", jobs["done"], *options.format(**jobs).split())
        assert (code, out) == (0, shown)
    for job in ("waits", "held", "cancelled"):  # those that never ran say why
        code, out, err = ways.both("logs", jobs[job])
        assert (code, out, jobs[job] in err) == (0, "", True)


def test_fetch_writes_the_files_of_a_job(
    ways: BothWays, jobs: dict[str, str], tmp_path: Path
) -> None:
    for ask in (ways.here, ways.afar):
        shutil.rmtree(tmp_path / "to", ignore_errors=True)
        code, out, err = ask("fetch", jobs["done"], "--to", str(tmp_path / "to"))
        assert (code, out) == (0, f"{tmp_path / 'to'}\n")
        assert "1 file, 7 kB" in err
        assert "left out outputs/l: link" in err
        assert (tmp_path / "to/outputs/model.bin").read_bytes() == b"weights" * 1000
    found = json.loads(ways.both("fetch", jobs["done"], "--to", str(tmp_path / "to"), "--json")[1])
    assert [each["kept"] for each in found["files"]] == [True]
    (tmp_path / "to/outputs/model.bin").write_text("mine")
    code, _, err = ways.both("fetch", jobs["done"], "--to", str(tmp_path / "to"))
    assert code == 2
    assert "--force" in err
    assert (tmp_path / "to/outputs/model.bin").read_text() == "mine"
    code, out, err = ways.both("fetch", jobs["empty"])
    assert (code, out) == (0, "")
    assert f"{jobs['empty']} left nothing in `outputs`" in err
    assert "--output PATH" in err
    assert f"vm-1 keeps its working folder for some hours: attempts/{jobs['empty']}." in err
    code, _, err = ways.both("fetch", jobs["empty"], "results")
    assert code == 2
    assert "submit --output" in err


# --- changing


def test_repeated_commands_print_the_same_in_both_ways(
    ways: BothWays, jobs: dict[str, str]
) -> None:
    for words in (
        f"hold {jobs['held']}",
        f"stop {jobs['cancelled']}",
        "vm drain vm-1 --reason noisy",
        "vm undrain vm-1",
        "vm set vm-1 --cpu-slots 3",
        "vm set vm-1 --label disk=fast --deadman 10min --probe /opt/smi --idle-memory-mb 40",
        "vm set vm-1 --unlabel disk --deadman off",
        "project set red --weight 2 --max-gpus 4",
        "project set red --max-gpus none",
    ):
        assert ways.here(*words.split())[0] == 0
        assert ways.both(*words.split(), "--json")[0] == 0


def test_jobs_are_submitted_changed_and_ended_from_afar(ways: BothWays, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("print(1)\n")
    words = ("--gpus", "0", "--file", str(tmp_path / "code"), "--idempotency-key", str(tmp_path))
    code, out, _ = ways.both("submit", "--json", *words, "--", "python", "code/a.py")
    made = json.loads(out)
    assert code == 0
    (entry,) = made["request"]["files"].values()
    assert (ways.place.blobs / entry[0][:2] / entry[0]).read_text() == "print(1)\n"
    job = made["job_id"]
    assert ways.afar("hold", job)[2] == f"{job} is held\n"
    assert ways.afar("release", job)[2] == f"{job} is queued\n"
    assert ways.afar("stop", job, "--reason", "no more")[2] == f"{job} is cancelled\n"
    assert "reason no more" in ways.both("show", job)[1]
    resumed = ways.afar("resume", job)[2]
    assert resumed.startswith(f"{job} is queued again, with its files as they were sent on 20")
    job = ways.here("submit", "--gpus", "0", "--", "true")[1].strip()
    ways.here("stop", job)
    assert ways.here("resume", job)[2] == f"{job} is queued again\n"


def test_an_array_is_one_transaction_from_afar_too(ways: BothWays, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text('--seed 1\n{"name": "second"}\n')
    asked = ("submit", "--gpus", "0", "--array", str(tmp_path / "lines"))
    code, out, _ = ways.afar(*asked, "--label", "a=1", "--", "python", "x.py")
    assert code == 0
    assert len(out.split()) == 2
    (tmp_path / "lines").write_text('--seed 1\n{"environment": {"LD_PRELOAD": "x"}}\n')
    assert ways.both(*asked, "--label", "a=2", "--", "true")[0] == 2
    assert "no jobs" in ways.both("list", "--label", "a=2")[2]


# --- mistakes


def test_mistakes_are_reported_in_the_same_words(ways: BothWays, jobs: dict[str, str]) -> None:
    mistakes = (
        *("show job-none", "stop {done}", "release {held} {done} --label a=1", "hold {done}"),
        *("fetch {waits}", "fetch {done} nothing.txt", "fetch {done} --attempt 99999"),
        *("logs {done} --attempt 99999", "list --older-than job-none", "vm drain vm-2"),
        *("vm clear-quarantine vm-1 7", "vm trust vm-1 SHA256:{a43}", "vm set vm-1"),
        *("vm set vm-1 --deadman 5", "project set p --max-gpus few", "key revoke nobody"),
        *("stop {cancelled} {done} job-none", "resume --name done --status completed"),
        "submit --json --gpus 0 --env LD_PRELOAD=x -- true",
        "submit --json --gpus 0 --after job-none -- true",
        "submit --json --gpus 0 --secret NOT_TO_BE_HAD -- true",
        "submit --json --gpus 0 --file not-there -- true",
        "exec nowhere true",
    )
    for words in mistakes:
        told = words.format(**jobs, a43="A" * 43).split()
        code, _, err = ways.both(*told)
        assert (code, "bug" in err) == (2, False), err
        if told[0] not in ("submit", "exec", "logs") and told[:2] != ["key", "revoke"]:
            assert '"error"' in ways.both(*told, "--json")[1]


def test_changes_made_before_an_interruption_are_reported(
    ways: BothWays, jobs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groupwise.api.schemas.fleet.MAX_CHANGED", 1)
    monkeypatch.setattr(FleetClient, "change_all", _until(jobs["waits"], FleetClient.change_all))
    words = ("hold", jobs["held"], "job-none", jobs["waits"])
    code, _, err = ways.both(*words)
    assert (code, err.count("not done: ")) == (1, 1)
    assert f"{jobs['held']} is held" in err
    code, out, err = ways.both(*words, "--json")
    assert (code, err.count("not done: ")) == (1, 1)
    told = json.loads(out)
    assert told["error"]["message"] == "the fleet is away"
    assert [each["job_id"] for each in told["done"]] == [jobs["held"], "job-none"]


def _until(last: str, change: Any) -> Any:
    def changed(fleet: Any, verb: str, ids: list[str], reason: str | None) -> Any:
        if last in ids:
            raise RunError("the fleet is away")
        return change(fleet, verb, ids, reason)

    return changed
