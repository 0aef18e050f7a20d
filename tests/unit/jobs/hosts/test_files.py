import errno
import fcntl
import hashlib
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from groupwise.core.errors import UsageError
from groupwise.jobs.hosts import files
from groupwise.jobs.hosts.files import (
    MARK,
    SPARED,
    BlobBusy,
    BlobError,
    BlobStore,
    files_below,
)
from groupwise.jobs.hosts.spec import FileEntry
from tests.disks import small_disk
from tests.meanwhile import right_before


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def everything(store: BlobStore) -> set[str]:
    return {p.relative_to(store.root).as_posix() for p in store.root.rglob("*") if p.is_file()} - {
        ".lock",
        ".marking",
    }


@pytest.fixture
def like_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks are given as by NFS 4: shared ones to who may read the file, others to who may write it. Those of folders are local."""
    real = fcntl.flock

    def flock(file: Any, how: int) -> None:
        fd = file if isinstance(file, int) else file.fileno()
        access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        unfit = os.O_WRONLY if how & fcntl.LOCK_SH else os.O_RDONLY
        if access == unfit and stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("like_nfs")
def test_a_store_that_several_machines_share(store: BlobStore, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"weights")
    entry = store.put_file(tmp_path / "weights")
    other = sha(b"other")
    with store.incoming(other, 5, "ada") as incoming:
        incoming.add(b"other")
        incoming.finish()
    with store.needed([other]):
        assert store.missing([entry.sha256, other, sha(b"lacking")]) == [sha(b"lacking")]
        store.collect([entry.sha256], now=time.time() + 10 * SPARED)
    assert store.missing([entry.sha256]) == []


def test_plain_files_are_found_below_folders_and_all_else_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    for name in ("a/b/one", "a/two", "three"):
        (tmp_path / name).write_text(name)
    found = files_below(tmp_path)
    assert found == {name: tmp_path / name for name in ("a/b/one", "a/two", "three")}
    monkeypatch.setattr(files, "MAX_FILES", 2)
    with pytest.raises(UsageError, match="at most 2"):
        files_below(tmp_path)
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(tmp_path / "socket"))
        with pytest.raises(UsageError) as refused:
            files_below(tmp_path)
    for expected in ("link is", "pipe is", "socket is"):
        assert expected in str(refused.value)


def test_a_blob_is_stored_once_under_its_hash_and_copied_to_a_file(
    store: BlobStore, tmp_path: Path
) -> None:
    first, second = store.put(b"content"), store.put(b"content")
    assert first == second == sha(b"content")
    assert everything(store) == {f"{first[:2]}/{first}"}
    assert (store.read(first), store.size(first), store.part(first, 3, 2)) == (b"content", 7, b"te")
    assert first in store
    assert store.missing([first, sha(b"other")]) == [sha(b"other")]
    for name in (sha(b"other"), "../../etc/passwd"):
        with pytest.raises(BlobError):
            store.read(name)
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o750)
    manifest = store.put_files({"run.sh": tmp_path / "run.sh"})
    assert manifest == {"run.sh": FileEntry(sha(b"#!/bin/sh\n"), 0o750, 10)}
    target = tmp_path / "there"
    target.write_text("what was there before")
    store.copy(manifest["run.sh"], target)
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("#!/bin/sh\n", 0o750)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["blobs", "run.sh", "there"]


def test_a_damaged_blob_is_never_given_out_and_makes_room_for_the_right_one(
    store: BlobStore, tmp_path: Path
) -> None:
    name = store.put(b"content")
    store.path(name).chmod(0o644)
    store.path(name).write_bytes(b"contemt")
    with pytest.raises(BlobError, match="damaged"):
        store.copy(FileEntry(name, 0o644, 7), tmp_path / "there")
    assert not (tmp_path / "there").exists()
    assert name not in store
    store.put(b"content")
    assert store.read(name) == b"content"


def receive(store: BlobStore, data: bytes, *, marked: bool = False, whole: bytes = b"") -> str:
    """Sent in pieces, of which these are the first, or all."""
    with store.incoming(sha(whole or data), len(whole or data), marked=marked) as incoming:
        incoming.add(data)
        if not whole:
            incoming.finish()
    return sha(whole or data)


def test_one_at_a_time_receives_a_blob_and_continues_after_a_crash(store: BlobStore) -> None:
    data = b"0123456789"
    with store.incoming(sha(data), 10, "me") as incoming:
        incoming.add(data[:4])
        with pytest.raises(BlobBusy), store.incoming(sha(data), 10, "me"):
            pass
        assert (store.received(sha(data), "me"), store.received(sha(data), "you")) == (4, 0)
    with store.incoming(sha(data), 10, "me") as incoming:
        assert (incoming.received, sha(data) in store) == (4, False)
        incoming.add(data[4:])
        incoming.finish()
    assert store.read(sha(data)) == data
    with store.incoming(sha(b"right"), 5) as incoming:
        incoming.add(b"wrong")
        with pytest.raises(BlobError, match="sha256"):
            incoming.finish()
        with pytest.raises(BlobError, match="announced 5 bytes"):
            incoming.add(b"longer")
        assert incoming.received == 0
    assert sha(b"right") not in store


def test_only_unreferenced_old_blobs_are_collected(
    store: BlobStore,
) -> None:
    kept, asked, old = (store.put(data) for data in (b"kept", b"asked", b"old!"))
    long_ago = time.time() - 2 * SPARED
    for name in (kept, asked, old):
        os.utime(store.path(name), (long_ago, long_ago))
    receive(store, b"ha", whole=b"half")
    assert store.missing([asked]) == []
    assert store.collect({kept}) == 4
    assert (kept in store, asked in store, old in store) == (True, True, False)
    assert store.collect({kept}, now=time.time() + 2 * SPARED) == len("asked") + len("ha")
    assert everything(store) == {f"{kept[:2]}/{kept}"}


def is_marked(store: BlobStore, sha256: str) -> bool:
    """As what was fetched, on which nobody counts."""
    return bool(store.path(sha256).stat().st_mode & MARK)


@pytest.mark.parametrize("how", ["put", "asked for", "put as a file", "received"])
@pytest.mark.parametrize("first", [True, False])
def test_a_blob_that_was_put_or_requested_is_spared_for_a_day(
    store: BlobStore, tmp_path: Path, how: str, first: bool
) -> None:
    def count_on_it() -> None:
        (tmp_path / "file").write_bytes(b"both")
        if how == "received":
            receive(store, b"both")
        elif how == "asked for" and not first:
            assert store.missing([sha(b"both")]) == []
        elif how == "put as a file":
            store.put_file(tmp_path / "file")
        else:
            store.put(b"both")

    if first:
        count_on_it()
    receive(store, b"both", marked=True)
    if not first:
        count_on_it()
    assert not is_marked(store, sha(b"both"))
    store.collect(set(), now=time.time() + SPARED / 2)
    assert sha(b"both") in store


def test_needed_blobs_stay_listed_until_their_process_ends(store: BlobStore) -> None:
    assert store.all_needed() == set()
    with store.needed(["a" * 64, "b" * 64]), store.needed(["c" * 64]):
        assert store.all_needed() == {"a" * 64, "b" * 64, "c" * 64}
        for path in (store.root / ".needed").iterdir():
            os.utime(path, (0, 0))
        store.collect(set(), now=time.time() + 2 * SPARED)
        assert store.all_needed() == {"a" * 64, "b" * 64, "c" * 64}, "it is locked"
    assert store.all_needed() == set()
    code = """
import os, signal, sys
from pathlib import Path
from groupwise.jobs.hosts.files import BlobStore
with BlobStore(Path(sys.argv[1])).needed(["d" * 64]):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, str(store.root)], check=False)
    assert store.all_needed() == {"d" * 64}, "it may just have begun"
    [path] = (store.root / ".needed").iterdir()
    os.utime(path, (0, 0))
    assert store.all_needed() == set()
    assert list((store.root / ".needed").iterdir()) == []


HAMMER = """
import sys
from pathlib import Path
from groupwise.jobs.hosts.files import BlobStore

seed, store = int(sys.argv[1]), BlobStore(Path(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
for n in range(80):
    data = str((n * 7 + seed) % 40).encode() * 2000
    assert store.read(store.put(data)) == data
    if n % 20 == seed:
        store.collect(set())
"""


def test_several_processes_write_the_same_blobs_while_others_collect(store: BlobStore) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", HAMMER, str(n), str(store.root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(4)
    ]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    assert [worker.communicate(timeout=60)[0] for worker in workers] == [""] * 4
    assert [worker.returncode for worker in workers] == [0] * 4
    names = everything(store)
    assert len(names) == 40
    for name in names:
        assert sha(store.root.joinpath(name).read_bytes()) == name.split("/")[1]


def test_a_full_disk_leaves_no_half_blob(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        store = BlobStore(disk)
        with pytest.raises(OSError, match="No space left"):
            store.put(bytes(2 << 20))
        assert everything(store) == set()
        store.put(b"small")


def test_too_large_a_blob_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs", largest=100)
    large = tmp_path / "large"
    large.write_bytes(bytes(101))
    with pytest.raises(BlobError, match="at most 100"):
        store.put(bytes(101))
    with pytest.raises(BlobError, match="at most 100"):
        store.put_file(large)
    with pytest.raises(BlobError, match="at most 100"), store.incoming(sha(b""), 101):
        pass
    assert everything(store) == set()


def test_an_incoming_blob_stays_and_is_spared_from_its_completion(
    store: BlobStore,
) -> None:
    with store.incoming(sha(b"large"), 5, marked=True) as incoming:
        incoming.add(b"large")
        store.collect(set(), now=time.time() + 2 * SPARED)
        incoming.finish()
    assert store.read(sha(b"large")) == b"large"
    with store.incoming(sha(b"slow"), 4) as incoming:
        incoming.add(b"slow")
    [path] = (store.root / "incoming").iterdir()
    os.utime(path, (0, 0))
    with store.incoming(sha(b"slow"), 4) as incoming:
        incoming.finish()
    assert store.collect({sha(b"large")}) == 0


def test_a_folder_that_is_removed_while_it_is_walked_through_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "checkpoints" / ".building-step-4"
    gone.mkdir(parents=True)
    (tmp_path / "w").touch()
    right_before(monkeypatch, os, "scandir", gone.rmdir, lambda path: str(path) == str(gone))
    assert set(files_below(tmp_path)) == {"w"}
    assert not gone.exists()
    with pytest.raises(UsageError, match="cannot be read"):
        files_below(tmp_path / "missing")
