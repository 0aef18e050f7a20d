import asyncio
import itertools
from pathlib import Path

import pytest
from sqlalchemy.orm import Session

from groupwise.jobs.fleet.attempts.controller import MemberOutput
from groupwise.jobs.fleet.attempts.effects import Death, Gateway, Side
from groupwise.jobs.fleet.attempts.records import Stale
from groupwise.jobs.fleet.files import logs as logs_module
from groupwise.jobs.fleet.files.logs import (
    Follower,
    LogMirror,
    append,
    cut,
    epochs,
    follower_at,
    log_path,
    make,
    newest_link,
)
from groupwise.jobs.fleet.store.database import Database
from groupwise.jobs.fleet.store.tables import Attempt, Member
from tests.disks import fill, small_disk
from tests.unit.jobs.fleet.work_folder import JOB, WorkFolder, begin


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "logs"


@pytest.fixture
def host() -> WorkFolder:
    return WorkFolder()


def offset_of(database: Database, output: MemberOutput) -> int:
    return database.run(lambda s: s.get_one(Member, (output.epoch, output.rank)).log_offset)


def written(logs: Path, output: MemberOutput) -> bytes:
    return log_path(logs, JOB, output.epoch, output.rank).read_bytes()


# Writing


def test_bytes_are_added_only_where_the_file_ends(logs: Path) -> None:
    path = make(logs, JOB, 1)
    assert append(path, 0, b"one\n") == 4
    assert append(path, 0, b"one\n") == 4
    assert append(path, 9, b"later") == 4
    assert append(path, 4, b"two\n") == 8
    assert path.read_bytes() == b"one\ntwo\n"


def test_cut_shortens_a_log_to_at_most_the_given_length(logs: Path) -> None:
    path = make(logs, JOB, 1)
    append(path, 0, b"sure, perhaps")
    assert cut(path, 4) == 4
    assert path.read_bytes() == b"sure"
    assert cut(path, 9) == 4
    assert cut(logs / JOB / "2.log", 9) == 0


def test_the_link_leads_to_the_newest_epoch_and_never_back(logs: Path) -> None:
    for epoch in (3, 12, 7):
        append(make(logs, JOB, epoch), 0, str(epoch).encode())
    assert newest_link(logs, JOB).read_text() == "12"
    assert epochs(logs, JOB) == [3, 7, 12]
    assert epochs(logs, "job-2") == []


async def test_the_mirror_brings_what_is_missing_and_says_so(
    database: Database, logs: Path, host: WorkFolder
) -> None:
    output = begin(database, host)
    mirror = LogMirror(logs, Gateway(database))
    host.log = b"one\n"
    await mirror.catch_up(output, 4)
    assert (written(logs, output), offset_of(database, output)) == (b"one\n", 4)
    host.log += b"two\xff\x00\n"
    await mirror.catch_up(output, len(host.log))
    await mirror.catch_up(output, len(host.log))
    assert (written(logs, output), offset_of(database, output)) == (host.log, len(host.log))
    assert [request.body["offset"] for request in host.asked] == [0, 4]


SOAK, SOAK_DEATHS = pytest.mark.soak(suite="fleet"), (1, 2, 4, 5, 7, 8)


@pytest.mark.parametrize("death", [3, 6, *(pytest.param(n, marks=SOAK) for n in SOAK_DEATHS)])
async def test_dying_at_any_effect_loses_and_doubles_nothing(
    death: int, database: Database, logs: Path, host: WorkFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs_module, "PIECE", 8)
    output = begin(database, host)
    host.log = b"0123456789abcdef!"
    seen: list[tuple[str, Side]] = []

    def hook(name: str, side: Side) -> None:
        seen.append((name, side))
        if len(seen) == death:
            raise Death

    with pytest.raises(Death):
        await LogMirror(logs, Gateway(database, hook)).catch_up(output, len(host.log))
    await LogMirror(logs, Gateway(database)).catch_up(output, len(host.log))
    assert (written(logs, output), offset_of(database, output)) == (host.log, len(host.log))


async def test_two_mirrors_at_once_write_each_byte_once(
    database: Database, logs: Path, host: WorkFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs_module, "PIECE", 7)
    output = begin(database, host)
    host.log = bytes(range(256)) * 2
    mirrors = [LogMirror(logs, Gateway(database)) for _ in range(3)]
    await asyncio.gather(*(mirror.catch_up(output, len(host.log)) for mirror in mirrors))
    assert written(logs, output) == host.log


async def test_a_former_owner_of_the_attempt_reports_no_log(
    database: Database, logs: Path, host: WorkFolder
) -> None:
    output = begin(database, host)
    host.log = b"one\n"

    def taken(session: Session) -> None:
        session.get_one(Attempt, output.epoch).owner = "another"

    database.run(taken)
    with pytest.raises(Stale):
        await LogMirror(logs, Gateway(database)).catch_up(output, 4)
    assert offset_of(database, output) == 0


def test_a_full_disk_is_reported_and_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        path = make(disk, JOB, 1)
        append(path, 0, b"before")
        ballast = fill(disk)
        with pytest.raises(OSError, match="No space left"):
            append(path, 6, bytes(100_000))
        assert path.read_bytes() == b"before"
        ballast.unlink()
        assert append(path, 6, b" and after") == 16


# Reading


def everything(follower: Follower) -> bytes:
    found = b""
    while piece := follower.read():
        found += piece.data
    return found


@pytest.mark.parametrize("how", ["moved away", "emptied"])
def test_a_follower_is_not_led_astray_by_rotation(how: str, logs: Path) -> None:
    path = make(logs, JOB, 1)
    append(path, 0, b"before ")
    follower = Follower(logs, JOB)
    assert everything(follower) == b"before "
    if how == "moved away":
        path.rename(path.with_suffix(".log.1"))
        make(logs, JOB, 1)
    else:
        path.write_bytes(b"")
    assert everything(follower) == b""
    append(path, 0, b"before and after")
    assert everything(follower) == b"and after"


def tail_of(logs: Path, data: bytes, lines: int) -> bytes:
    path = make(logs, JOB, 7)
    path.write_bytes(data)
    at = follower_at(logs, JOB, tail=lines).position
    assert at is not None
    return data[at.offset :]


def test_the_last_lines_are_the_same_wherever_the_file_is_cut(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line ends as a terminal has it: progress bars begin theirs again."""
    monkeypatch.setattr(logs_module, "TAIL_PIECE", 2)
    for size in range(6):
        for letters in itertools.product(b"x\r\n", repeat=size):
            data = bytes(letters)
            for lines in range(4):
                kept = data.splitlines(keepends=True)[-lines:] if lines else []
                assert tail_of(logs, data, lines) == b"".join(kept)
