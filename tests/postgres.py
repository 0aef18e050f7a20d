"""A real PostgreSQL for tests: the server as a child of this process, a database for each test, and ways to be cruel to it. It does not
outlive the thread that started it, killed or not.

One server serves all tests of a worker; `create database` takes 40 ms, a server a second. It flushes what it acknowledges, so that what
it was told before `kill -9` must be there after `start`.
"""

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg

from tests.ports import free_port
from tests.processes import TIMEOUT_S, wait_until
from tests.required_programs import skip_or_fail, with_parent_death_signal

PLACES = (
    *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True),
    Path("/usr/local/pgsql/bin"),
)
SETTINGS = """
listen_addresses = '127.0.0.1'
fsync = on
synchronous_commit = on
full_page_writes = on
recovery_init_sync_method = syncfs
shared_buffers = 32MB
max_connections = 100
max_wal_size = 256MB
unix_socket_directories = ''
dynamic_shared_memory_type = mmap
"""


def programs() -> Path | None:
    """The folder of the programs `postgres` and `initdb`."""
    found = shutil.which("initdb")
    places = (Path(found).resolve().parent, *PLACES) if found else PLACES
    return next((each for each in places if (each / "postgres").exists()), None)


class Postgres:
    """A server with a data folder of its own. PostgreSQL does not run as root: then `postgres` runs it, or nobody."""

    def __init__(self, place: Path, folder: Path) -> None:
        self.place = place
        self.folder = folder
        self.port = free_port()
        self._user = _unprivileged() if os.geteuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count()
        self._make()

    def _make(self) -> None:
        if self._user:
            os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)
        command = "-U fleet -A trust --no-locale -E UTF8 --no-sync".split()
        made = self._popen([self.place / "initdb", "-D", self.folder / "data", *command])
        assert made.wait(TIMEOUT_S) == 0, self.log()
        with (self.folder / "data" / "postgresql.conf").open("a") as settings:
            settings.write(f"{SETTINGS}port = {self.port}\n")

    def _popen(self, command: list[str | Path]) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as output:
            return subprocess.Popen(
                [*with_parent_death_signal(), *command],
                cwd=self.folder,
                env={"PATH": f"{self.place}:/usr/bin:/bin", "LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                user=self._user.pw_uid if self._user else None,
                group=self._user.pw_gid if self._user else None,
                extra_groups=[] if self._user else None,
            )

    def log(self) -> str:
        """The server's log."""
        return (self.folder / "log").read_text(errors="replace")

    def start(self) -> None:
        """Start the server; returns when it accepts connections."""
        assert self._process is None
        self._process = self._popen([self.place / "postgres", "-D", self.folder / "data"])
        process = self._process

        def answers() -> bool:
            assert process.poll() is None, self.log()
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(self.url("postgres"), connect_timeout=2).close()
                return True
            return False

        wait_until(answers, "PostgreSQL", details=self.log)

    def kill(self) -> None:
        """`kill -9` the server, then its children; returns when all are gone, so that `start` finds none."""
        self._end(signal.SIGKILL)

    def demote(self) -> None:
        """Kill the server and start it as a standby: it answers, but refuses writes until `promote`."""
        self.kill()
        (self.folder / "data" / "standby.signal").touch()
        self.start()

    def promote(self) -> None:
        """Promote the standby; returns when it accepts writes."""
        self.execute("SELECT pg_promote()")

    def stop(self) -> None:
        """Stop at once, without a checkpoint: its data is no longer needed."""
        if self._process is not None:
            self._end(signal.SIGQUIT)

    def _end(self, how: signal.Signals) -> None:
        assert self._process is not None
        children = _children(self._process.pid)
        self._process.send_signal(how)
        self._process.wait(TIMEOUT_S)
        self._process = None
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        wait_until(lambda: not any(map(_alive, children)), "the end of PostgreSQL's children")

    def url(self, database: str) -> str:
        """The URL of a database, for `connect`."""
        return f"postgresql://fleet@127.0.0.1:{self.port}/{database}"

    def new_database(self, like: str = "template1") -> str:
        """Create an empty database, or a copy of another one that has no connections; returns its URL."""
        name = f"test_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {like}")
        return self.url(name)

    def has(self, name: str) -> bool:
        """True if there is a database of that name."""
        with psycopg.connect(self.url("postgres")) as connection:
            found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name])
            return found.fetchone() is not None

    def execute(self, statement: str) -> None:
        """Execute a statement as the superuser, outside any transaction."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(statement.encode())


@contextlib.contextmanager
def server() -> Iterator[Postgres]:
    """A started server; its folder is removed at the end."""
    place = programs() or skip_or_fail("there is no PostgreSQL (Debian: apt install postgresql)")
    # Not below pytest's folder: that one is closed to the user `postgres`.
    root = os.environ.get("PYTEST_DEBUG_TEMPROOT")
    folder = Path(tempfile.mkdtemp(prefix="groupwise-postgres-", dir=root))
    try:
        running = Postgres(place, folder)
        try:
            running.start()
            yield running
        finally:
            running.stop()
    finally:
        shutil.rmtree(folder)


def _unprivileged() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def _children(pid: int) -> list[int]:
    return [each for each in _processes() if (_stat(each) or [""] * 2)[1] == str(pid)]


def _processes() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]


def _alive(pid: int) -> bool:
    """True if the process runs; a zombie holds nothing and counts as ended."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


def _stat(pid: int) -> list[str] | None:
    """State, parent and what follows in `/proc/<pid>/stat`; None: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
