"""`groupwise fleet up` as a user runs it: a folder, two terminals, and kill -9.

1. A submission prints its job's id alone, and a fleet that runs takes it at once.
2. Cancel leaves no process; retry begins a new generation.
3. When the fleet is killed its jobs run on, and the next `up` finishes them: once. Of the one that was killed no row is left.
4. One folder, one fleet.
5. A folder that was moved is a fleet as before; a copy beside the original is none.
6. An address of NATS where nothing answers is told, once, and doctor sees it though only `up` was given it.
7. On a full disk it says which disk that is, and ends.
"""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.cli.main import main
from groupwise.jobs.fleet.settings import DATABASE_FILE
from tests.disks import read_only, small_disk
from tests.integration.fleet.whole_fleet import call
from tests.processes import TIMEOUT_S, wait_until


class Fleet:
    """A fleet in a folder, driven by its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder.with_suffix(".log")
        self.process: subprocess.Popen[str] | None = None
        kept = ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "TMPDIR")
        self.environment = {name: os.environ[name] for name in kept if name in os.environ} | {
            "GROUPWISE_FLEET": str(folder), "GROUPWISE_FLEET_LEASE_SECONDS": "2.0", "GROUPWISE_FLEET_SWEEP_SECONDS": "0.5",
            "GROUPWISE_FLEET_POLL_SECONDS": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        return call(self.environment, *words)

    def begin(self, *words: str, **how: Any) -> subprocess.Popen[str]:
        """A command as a process of its own."""
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
        command = [sys.executable, "-m", "groupwise", "fleet", *words]
        return subprocess.Popen(command, env=self.environment, text=True, **streams)

    def up(self, *words: str) -> None:
        with self.log.open("ab") as log:
            begin = log.tell()
            self.process = self.begin("up", *words, stdout=log, stderr=log, start_new_session=True)
        wait_until(
            lambda: b"Ready." in self.log.read_bytes()[begin:] or self._has_ended(), "the fleet"
        )

    def does_not_come_up(self) -> str:
        """What it says."""
        process = self.begin("up")
        _, said = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 2, said
        return said

    def _has_ended(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        return False

    def end(self, *how: int) -> int:
        assert self.process is not None
        for each in how or (signal.SIGINT,):
            self.process.send_signal(each)
        return self.process.wait(TIMEOUT_S)

    def submit(self, *words: str) -> str:
        done = self.call("submit", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, job_id: str) -> dict[str, Any]:
        done = self.call("show", job_id, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def roles(self) -> list[str]:
        """Of all rows of processes, dead or alive."""
        found = json.loads(self.call("status", "--json").stdout)["processes"]
        return sorted(each["role"] for each in found)

    def wait_for_status(self, job_id: str, *statuses: str) -> dict[str, Any]:
        """What a person sees of it then; until then its database is looked at, which takes no second each time."""
        wait_until(lambda: self._status(job_id) in statuses, f"{job_id} to be {statuses}")
        return self.job(job_id)

    def _status(self, job_id: str) -> str:
        file = f"{(self.folder / DATABASE_FILE).as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(file, uri=True)) as database:
            query = "SELECT status FROM jobs WHERE job_id = ?"
            return database.execute(query, (job_id,)).fetchone()[0]


@contextlib.contextmanager
def fleet_in(folder: Path) -> Generator[Fleet]:
    fleet = Fleet(folder)
    try:
        yield fleet
    finally:
        if fleet.process is not None and fleet.process.poll() is None:
            fleet.process.kill()
            fleet.process.wait(TIMEOUT_S)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One that is up all the time."""
    with fleet_in(tmp_path_factory.mktemp("up") / "fleet") as fleet:
        fleet.up()
        yield fleet


def python(text: str) -> tuple[str, ...]:
    return ("--", "python", "-uc", text)


def until_there(path: Path) -> str:
    """The text of a program that waits for a file."""
    return f"import os, time\nwhile not os.path.exists({str(path)!r}): time.sleep(0.05)\n"


def test_from_a_submission_to_its_artefacts(running: Fleet, tmp_path: Path) -> None:
    """As processes type it: the id stands alone on the standard output."""
    source = tmp_path / "in.txt"
    source.write_text("apples")
    text = (
        "import pathlib; pathlib.Path('outputs').mkdir(); print('hello');"
        "pathlib.Path('outputs/out.txt').write_text(open('in.txt').read() + ' and pears')"
    )
    words = ("submit", "--name", "greeting", "--file", str(source), *python(text))
    process = running.begin(*words)
    out, said = process.communicate(timeout=TIMEOUT_S)
    job_id = out.strip()
    assert (process.returncode, out) == (0, f"{job_id}\n")
    assert said == f"next: groupwise fleet logs -f {job_id}\n"
    found = running.wait_for_status(job_id, "completed")
    assert (found["name"], found["exit_code"], found["assigned_vm"]) == ("greeting", 0, "local")
    assert running.call("logs", job_id).stdout == "hello\n"
    left = running.folder / "artefacts" / job_id / "current" / "outputs" / "out.txt"
    assert left.read_text() == "apples and pears"


def test_cancel_leaves_no_process_and_retry_begins_a_new_generation(
    running: Fleet, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    text = (
        f"import os, time\nif os.path.exists({str(note)!r}): raise SystemExit\n"
        f"open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    job_id = running.submit(*python(text))
    pid = int(wait_until(lambda: note.exists() and note.read_text(), "the job to begin"))
    assert running.call("stop", job_id, "--reason", "enough").returncode == 0
    found = running.wait_for_status(job_id, "cancelled")
    assert not Path(f"/proc/{pid}").exists()
    assert found["attempts"][-1]["outcome"] == "cancelled"
    assert running.call("resume", job_id).returncode == 0
    found = running.wait_for_status(job_id, "completed")
    assert [each["generation"] for each in found["attempts"]] == [0, 1]


def test_jobs_survive_a_fleet_that_is_killed_and_are_finished_once(tmp_path: Path) -> None:
    """One runs on, the other one ends meanwhile. There is no NATS at its address, which is told once; and one folder has one fleet."""
    begun, flag, other_flag, ended = (tmp_path / name for name in ("begun", "a", "b", "ended"))
    first = f"open({str(begun)!r}, 'a').write('x')\n{until_there(flag)}print('done')"
    other = f"{until_there(other_flag)}open({str(ended)!r}, 'w').close(); raise SystemExit(65)"
    with fleet_in(tmp_path / "fleet") as fleet:
        fleet.up("--nats-url", "nats://127.0.0.1:1")
        assert fleet.process is not None
        assert f"process {fleet.process.pid}" in fleet.does_not_come_up()
        assert fleet.call("vm", "set", "local", "--cpu-slots", "2").returncode == 0
        job_id, other_id = (fleet.submit(*python(text)) for text in (first, other))
        wait_until(lambda: begun.exists() and begun.read_text(), "the job to begin")
        fleet.wait_for_status(other_id, "running")
        wait_until(
            lambda: "NATS at nats://127.0.0.1:1 is not there" in fleet.log.read_text(), "a word"
        )
        found = json.loads(fleet.call("doctor", "--json").stdout)["findings"]
        levels = {each["name"]: each["level"] for each in found}
        assert (levels["NATS"], levels["local jobs"]) == ("warning", "ok")
        assert [each for each in found if each["level"] == "problem"] == []
        assert fleet.log.read_text().count("is not there") == 1
        fleet.end(signal.SIGKILL)
        assert fleet.job(job_id)["status"] == "running"
        other_flag.touch()
        wait_until(ended.exists, "the other job to end")
        fleet.up()
        assert fleet.roles() == ["dispatcher", "poller", "requeue", "tracker"]
        flag.touch()
        found = fleet.wait_for_status(job_id, "completed")
        assert (begun.read_text(), len(found["attempts"])) == ("x", 1)
        assert fleet.call("logs", job_id).stdout == "done\n"
        assert fleet.wait_for_status(other_id, "failed")["exit_code"] == 65
        # as from `timeout`, which sends it to the process and then to its group
        assert fleet.end(signal.SIGTERM, signal.SIGTERM) == 0
        assert fleet.roles() == []
    assert "The fleet has ended." in fleet.log.read_text()


@pytest.mark.soak(suite="fleet")  # in each run `tests/unit/jobs/fleet/test_up.py` moves one
def test_a_fleet_that_was_moved_continues_where_it_is(tmp_path: Path) -> None:
    """A job that is running knows only the old path, so it needs a link there until it ends."""
    flag, old, new = (tmp_path / name for name in ("flag", "before", "now"))
    text = f"{until_there(flag)}os.mkdir('outputs'); open('outputs/x', 'w').close()"
    with fleet_in(old) as fleet:
        fleet.up()
        job_id = fleet.submit(*python(text))
        fleet.wait_for_status(job_id, "running")
        assert fleet.end() == 0
        assert f"{job_id} runs on" in fleet.log.read_text()
    old.rename(new)
    with fleet_in(new) as fleet:
        assert f"ln -s {new} {old}" in fleet.does_not_come_up()
        old.symlink_to(new)
        fleet.up()
        flag.touch()
        assert len(fleet.wait_for_status(job_id, "completed")["attempts"]) == 1
        assert (new / "artefacts" / job_id / "current/outputs/x").exists()
        assert fleet.end() == 0
        old.unlink()
        fleet.up()
        job_id = fleet.submit("--", "pwd")
        fleet.wait_for_status(job_id, "completed")
        assert fleet.call("logs", job_id).stdout.startswith(f"{new / 'work'}/")
        assert f"The fleet was moved from {old}" in fleet.log.read_text()
        assert not old.exists()
        assert fleet.end() == 0


def test_a_fleet_that_was_restored_begins_nothing_beside_what_runs(tmp_path: Path) -> None:
    """What was begun after the backup runs on, unknown; its job waits for its end, and goes on under a number of its own."""
    begun, flag = tmp_path / "begun", tmp_path / "flag"
    text = (
        f"import os, time; open({str(begun)!r}, 'a').write(os.environ['GROUPWISE_ATTEMPT'] + ' ')\n"
        f"while not os.path.exists({str(flag)!r}): time.sleep(0.05)\n"
        f"open({str(begun)!r}, 'a').write('ended ')"
    )
    with fleet_in(tmp_path / "fleet") as fleet:
        fleet.up()
        job_id = fleet.submit("--hold", *python(text))
        backup = tmp_path / "backup.db"
        with (
            contextlib.closing(sqlite3.connect(fleet.folder / DATABASE_FILE)) as database,
            contextlib.closing(sqlite3.connect(backup)) as kept,
        ):
            database.backup(kept)
        assert fleet.call("release", job_id).returncode == 0
        wait_until(begun.exists, "the job to begin")
        assert fleet.end() == 0
        for left in fleet.folder.glob(f"{DATABASE_FILE}-*"):
            left.unlink()
        backup.rename(fleet.folder / DATABASE_FILE)
        fleet.up()
        assert fleet.call("release", job_id).returncode == 0
        waiting = wait_until(lambda: fleet.job(job_id)["waiting"], "why it waits")
        assert f"runs {job_id}.1, which the database does not know" in waiting[0]
        assert "attempt_untracked" in fleet.call("status", "--json").stdout
        assert fleet.job(job_id)["attempts"] == []
        other = fleet.submit("true")
        assert "its CPU slot is taken" in str(fleet.wait_for_status(other, "pending")["waiting"])
        flag.touch()
        found = fleet.wait_for_status(job_id, "completed")
        assert [each["outcome"] for each in found["attempts"]] == ["succeeded"]
        last = found["attempts"][0]["epoch"]
        assert begun.read_text() == f"{job_id}.1 ended {job_id}.{last} ended "
        found = fleet.wait_for_status(other, "completed")
        assert [each["outcome"] for each in found["attempts"]] == ["succeeded"]
        assert fleet.end() == 0


def test_a_folder_that_takes_nothing_is_reported_in_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "umask", lambda mask: mask)
    (tmp_path / "file").touch()
    with small_disk(tmp_path / "disk", "1m") as disk, read_only(disk):
        for folder in (disk, disk / "fleet", tmp_path / "file"):
            assert main(["fleet", "up", "--fleet", str(folder)]) == 2
            told = capfd.readouterr().err
            assert (str(folder) in told, "Traceback" in told) == (True, False)


SMALL_DISK = 'mount -t tmpfs -o size=1m none "$0" && head -c $((1048576 - $1)) /dev/zero > "$0/all" && shift && exec "$@"'


@pytest.mark.parametrize(
    "left",
    [24_576, *(pytest.param(n, marks=pytest.mark.soak(suite="fleet")) for n in (0, 65_536))],
)
def test_a_full_disk_is_reported_in_words(left: int, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    of_its_own = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*of_its_own, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a disk of memory")
    up = [sys.executable, "-m", "groupwise", "fleet", "up", "--fleet", str(disk / "fleet")]
    done = subprocess.run(
        [*of_its_own, "sh", "-c", SMALL_DISK, str(disk), str(left), *up],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert f"he disk of {disk}/fleet is full (" in done.stderr
    assert "Make room there" in done.stderr
