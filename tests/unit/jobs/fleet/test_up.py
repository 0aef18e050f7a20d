"""Where this machine keeps everything once the fleet's folder was moved, and the end."""

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from groupwise.core.errors import UsageError
from groupwise.jobs.fleet import processes, up
from groupwise.jobs.fleet.attempts import records
from groupwise.jobs.fleet.operations import status
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.settings import FleetPlace, FleetSettings
from groupwise.jobs.fleet.store import schema, triggers
from groupwise.jobs.fleet.store.database import Database, migrate
from groupwise.jobs.fleet.store.tables import VM
from groupwise.jobs.fleet.store.triggers import Rule
from tests.unit.jobs.fleet.queue_helpers import add_machine, claim_some, finish, submit


def begin(database: Database, folder: Path, *roles: str, url: str | None = None) -> str | None:
    """With all roles, if none are named."""
    folder.mkdir(exist_ok=True)
    place = FleetPlace(folder, FleetSettings(database=url))
    return database.run(up._local_machine_update(place, roles or up.ROLES))


def workdir(database: Database) -> Path:
    return Path(database.read(lambda s: s.get_one(VM, "local").workdir))


def test_a_copy_beside_its_original_is_refused_until_the_original_is_away(
    database: Database, tmp_path: Path
) -> None:
    begin(database, tmp_path / "a")
    (tmp_path / "a" / "fleet.db").touch()
    with pytest.raises(UsageError, match="a copy of") as refused:
        begin(database, tmp_path / "b")
    assert all(str(tmp_path / name) in refused.value.message for name in "ab")
    assert workdir(database) == tmp_path / "a" / "work"
    (tmp_path / "a").rename(tmp_path / "old")
    begin(database, tmp_path / "b")
    assert workdir(database) == tmp_path / "b" / "work"


@pytest.mark.parametrize("role", up.ROLES)
def test_a_role_alone_follows_the_folder_as_all_do(
    database: Database, tmp_path: Path, role: str
) -> None:
    begin(database, tmp_path / "a")
    (tmp_path / "a" / "fleet.db").touch()
    with pytest.raises(UsageError, match="a copy of"):
        begin(database, tmp_path / "b", role)
    assert begin(database, tmp_path / "b", up.API) is None
    assert workdir(database) == tmp_path / "a" / "work"
    (tmp_path / "a").rename(tmp_path / "old")
    told = begin(database, tmp_path / "b", role)
    assert told is not None
    assert workdir(database) == tmp_path / "b" / "work"


# --- an end ---------------------------------------------------------------------------------------


async def test_the_second_signal_does_not_wait_unless_it_is_the_first_once_more(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, ended = [100.0], list[int]()
    monkeypatch.setattr(up, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(os, "_exit", ended.append)
    place = FleetPlace(tmp_path, FleetSettings())
    control = up._ControlPlane(place, database, ("requeue",), lambda text: None)
    for later, expected in ((0.0, []), (0.1, []), (up.SAME_SIGNAL_SECONDS + 0.1, [143])):
        now[0] = 100.0 + later
        control._on_stop_signal(15)
        assert control._stopping.is_set()
        assert ended == expected


async def test_the_end_names_the_jobs_that_run_on_and_the_deadman_that_ends_them(
    database: Database, tmp_path: Path
) -> None:
    place = FleetPlace(tmp_path, FleetSettings())

    async def farewell() -> str:
        lines = list[str]()
        await up._ControlPlane(place, database, up.ROLES, lines.append)._sign_off()
        return "\n".join(lines)

    def remedies() -> str:
        alarms = database.read(lambda s: list(status.alarms(s, Actor("up"))))
        return next(alarm["remedy"] for alarm in alarms if alarm["kind"] == "role_missing")

    add_machine(database, "rented")
    job_id = submit(database)
    assert job_id not in await farewell()
    (claimed,) = claim_some(database)
    assert job_id in await farewell()
    assert "deadman" not in await farewell() + remedies()
    database.run(lambda s: records.record_deadman(s, claimed.epoch, "me", 0, 120.0))
    assert "2 min" in await farewell()
    assert "2 min" in remedies()
    finish(database, job_id)
    assert "deadman" not in await farewell() + remedies()


# --- what it says of itself -----------------------------------------------------------------------


@pytest.fixture
def other_version(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Within it another version is at work, whose triggers are others."""

    @contextmanager
    def at_work() -> Generator[None, None, None]:
        with monkeypatch.context() as other:
            never = Rule("job_never", "jobs", "UPDATE", "1 = 1", "never")
            other.setattr(triggers, "rules", lambda: (never,))
            yield

    return at_work


def is_current(database: Database) -> bool:
    return database.at_rest(schema.is_current)


def test_roles_of_two_versions_do_not_work_side_by_side(
    database: Database,
    tmp_path: Path,
    other_version: Callable[[], AbstractContextManager[None]],
) -> None:
    with ExitStack() as locks:
        up._take_locks(locks, database, tmp_path, ["dispatcher"])
        up._take_locks(locks, database, tmp_path, ["poller"])
        with (
            other_version(),
            pytest.raises(UsageError, match=r"dispatcher .* works with it"),
        ):
            up._take_locks(locks, database, tmp_path, ["tracker"])
        assert is_current(database)
    with other_version(), ExitStack() as locks:
        up._take_locks(locks, database, tmp_path, ["tracker"])
        assert is_current(database)
    assert not is_current(database)


def test_tables_changed_by_a_process_that_missed_the_lock_are_migrated_again(
    database: Database,
    tmp_path: Path,
    other_version: Callable[[], AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def alone_too_late(folder: Path, role: str) -> Generator[None, None, None]:
        with other_version():
            migrate(database, lambda: processes.role_holder(folder))
        with alone(folder, role):
            yield

    alone = processes.hold_role
    monkeypatch.setattr(processes, "hold_role", alone_too_late)
    with ExitStack() as locks:
        up._take_locks(locks, database, tmp_path, ["dispatcher"])
        assert is_current(database)
