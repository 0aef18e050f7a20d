"""From URLs as people type them to engines; nothing shows a password, nothing is kept where it would be lost."""

import stat
from pathlib import Path

import pytest
from sqlalchemy import text

from groupwise.errors import UsageError
from groupwise.fleet.store import engine
from groupwise.fleet.store.database import connect

SECRET = "s3cr3t-canary"


@pytest.mark.parametrize(
    "scheme",
    [
        "postgresql",
        "postgres",
        "POSTGRESQL",
        "postgresql+psycopg",
        "postgresql+psycopg2",
        "postgresql+asyncpg",
    ],
)
def test_spellings_of_postgresql(scheme: str) -> None:
    url = engine.parse(f" {scheme}://ada:{SECRET}@db.example:6432/fleet?sslmode=require\n")
    assert url.drivername == "postgresql+psycopg"
    assert engine.shown(url) == "postgresql://ada@db.example:6432/fleet"
    arguments = engine.connection_arguments(url)
    assert arguments["user"] == "ada"
    assert arguments["password"] == SECRET
    assert (arguments["host"], arguments["port"]) == ("db.example", 6432)
    assert (arguments["dbname"], arguments["sslmode"]) == ("fleet", "require")


def test_a_password_in_the_query_is_not_shown_either() -> None:
    url = engine.parse(f"postgresql://db.example/fleet?user=ada&password={SECRET}")
    assert SECRET not in engine.shown(url)
    assert engine.connection_arguments(url)["password"] == SECRET


def test_what_the_url_says_goes_before_our_time_limits() -> None:
    url = engine.parse("postgresql://db.example/fleet?connect_timeout=77&application_name=mine")
    arguments = engine.connection_arguments(url)
    assert (arguments["connect_timeout"], arguments["application_name"]) == ("77", "mine")


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+pysqlite", "sqlite+aiosqlite"])
def test_spellings_of_sqlite(scheme: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert engine.shown(engine.parse(f"{scheme}:///a/b.db")) == f"sqlite:///{tmp_path}/a/b.db"
    assert engine.shown(engine.parse(f"{scheme}:////a/b.db")) == "sqlite:////a/b.db"
    assert engine.shown(engine.parse(f"{scheme}:///~/b.db")) == f"sqlite:///{tmp_path}/home/b.db"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("fleet.db", "no '://'"),
        ("sqlite://", "is a file"),
        ("sqlite:///:memory:", "is a file"),
        ("sqlite://fleet.db", "is a file"),
        (f"mysql://ada:{SECRET}@db/fleet", "begins with mysql"),
        (f"postgresql://ada:{SECRET}@db:port/fleet", "cannot be read"),
        (f"ada:{SECRET}@db/fleet", "no '://'"),
    ],
)
def test_what_is_no_database_of_ours(given: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        engine.parse(given)
    assert SECRET not in str(raised.value)
    assert "sqlite:///" in str(raised.value)
    assert raised.value.__cause__ is None


def test_the_password_is_in_no_words_of_a_database() -> None:
    database = connect(f"postgresql://ada:{SECRET}@127.0.0.1:1/fleet")
    try:
        assert SECRET not in repr(database) + repr(database.engine) + database.name
    finally:
        database.close()


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    database = connect(f"sqlite:///{tmp_path}/new/fleet.db")
    try:
        database.run(lambda session: session.execute(text("CREATE TABLE t (a INTEGER)")))
        modes = {
            file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "new").iterdir()
        }
    finally:
        database.close()
    assert modes == {"fleet.db": 0o600, "fleet.db-wal": 0o600, "fleet.db-shm": 0o600}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_every_connection_to_sqlite_is_careful(tmp_path: Path) -> None:
    database = connect(f"sqlite:///{tmp_path}/fleet.db")
    names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
    try:
        found = database.run(
            lambda session: [session.execute(text(f"PRAGMA {name}")).scalar_one() for name in names]
        )
    finally:
        database.close()
    assert found == ["wal", 2, 1, 5000]


def test_a_file_that_cannot_be_made() -> None:
    with pytest.raises(UsageError, match=r"cannot be opened: .*folder that this user may write to"):
        connect("sqlite:////proc/fleet/fleet.db")


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw - nfs4 server:/home rw
31 30 8:2 / /home/ada/my\\040disk rw - xfs /dev/sdb1 rw
32 22 0:41 / /mnt/share rw shared:7 master:2 - cifs //server/share rw
33 22 8:3 / /mnt/share rw - ext4 /dev/sdc1 rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/fleet.db", "ext4"),
        ("/home/ada/fleet.db", "nfs4"),
        ("/home/ada/my disk/fleet.db", "xfs"),
        ("/homes/fleet.db", "ext4"),
        ("/mnt/share/fleet.db", "ext4"),
    ],
)
def test_the_file_system_of_a_path(path: str, kind: str) -> None:
    assert engine.file_system(Path(path), MOUNTS.splitlines()) == kind


def test_a_network_file_system_is_refused(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    with pytest.raises(UsageError, match=r"network file system \(nfs4\).*postgresql://"):
        engine.refuse_network_file_system(Path("/home/ada/fleet.db"), mounts)
    engine.refuse_network_file_system(Path("/var/fleet.db"), mounts)
    engine.refuse_network_file_system(Path("/home/fleet.db"), tmp_path / "not there")
