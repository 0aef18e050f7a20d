"""From URLs as people type them to engines; nothing shows a password, nothing is kept where it would be lost."""

import stat
from pathlib import Path

import pytest
from sqlalchemy import text

from groupwise.core.errors import UsageError
from groupwise.jobs.fleet.store import engine
from groupwise.jobs.fleet.store.database import connect

SECRET = "s3cr3t-canary"


def test_spellings_of_postgresql() -> None:
    drivers = ("psycopg", "psycopg2", "asyncpg")
    schemes = ("postgresql", "postgres", "POSTGRESQL", *(f"postgresql+{each}" for each in drivers))
    more = "sslmode=require&connect_timeout=77"
    for scheme in schemes:
        url = engine.parse(f" {scheme}://ada:{SECRET}@db.example:6432/fleet?{more}\n")
        assert url.drivername == "postgresql+psycopg"
        assert engine.shown(url) == "postgresql://ada@db.example:6432/fleet"
        arguments = engine.connection_arguments(url)
        assert (arguments["user"], arguments["password"]) == ("ada", SECRET)
        assert (arguments["host"], arguments["port"]) == ("db.example", 6432)
        assert (arguments["dbname"], arguments["sslmode"]) == ("fleet", "require")
        assert arguments["connect_timeout"] == "77", "rather than our own"


@pytest.mark.parametrize(("given", "words"), [
    ("fleet.db", "no '://'"), ("sqlite://", "is a file"), ("sqlite:///:memory:", "is a file"), ("sqlite://fleet.db", "is a file"),
    (f"mysql://ada:{SECRET}@db/fleet", "begins with mysql"), (f"postgresql://ada:{SECRET}@db:port/fleet", "cannot be read"),
    (f"ada:{SECRET}@db/fleet", "no '://'"),
])  # fmt: skip
def test_unsupported_database_urls_are_refused_without_their_password(
    given: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        engine.parse(given)
    assert SECRET not in str(raised.value)
    assert "sqlite:///" in str(raised.value)
    assert raised.value.__cause__ is None


def test_the_password_does_not_appear_in_texts_of_a_database() -> None:
    database = connect(f"postgresql://ada:{SECRET}@127.0.0.1:1/fleet")
    try:
        assert SECRET not in repr(database) + repr(database.engine) + database.name
    finally:
        database.close()


def test_the_file_is_for_its_owner_alone_and_written_with_care(tmp_path: Path) -> None:
    folder, pragmas = tmp_path / "new", ("journal_mode", "synchronous", "foreign_keys")
    database = connect(f"sqlite:///{folder}/fleet.db")
    try:
        database.run(lambda session: session.execute(text("CREATE TABLE t (a INTEGER)")))
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
        found = [
            database.run(lambda s, each=each: s.execute(text(f"PRAGMA {each}")).scalar_one())
            for each in pragmas
        ]
    finally:
        database.close()
    assert modes == {"fleet.db": 0o600, "fleet.db-wal": 0o600, "fleet.db-shm": 0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert found == ["wal", 2, 1]


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw - nfs4 server:/home rw
31 30 8:2 / /home/ada/my\\040disk rw - xfs /dev/sdb1 rw
32 22 0:41 / /mnt/share rw shared:7 master:2 - cifs //server/share rw
33 22 8:3 / /mnt/share rw - ext4 /dev/sdc1 rw
"""


def test_the_file_system_of_a_path() -> None:
    kinds = {
        "/var/fleet.db": "ext4", "/home/ada/fleet.db": "nfs4", "/home/ada/my disk/fleet.db": "xfs", "/homes/fleet.db": "ext4",
        "/mnt/share/fleet.db": "ext4",
    }  # fmt: skip
    assert {path: engine.file_system(Path(path), MOUNTS.splitlines()) for path in kinds} == kinds


def test_a_network_file_system_is_refused(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    with pytest.raises(UsageError, match=r"\(nfs4\).*postgresql://"):
        engine.refuse_network_file_system(Path("/home/ada/fleet.db"), mounts)
    engine.refuse_network_file_system(Path("/var/fleet.db"), mounts)
    engine.refuse_network_file_system(Path("/home/fleet.db"), tmp_path / "not there")
