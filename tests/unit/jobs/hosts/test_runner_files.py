"""Files that go to a machine and come back from it.

1. A blob is what its hash says, or it is not there; one that a job wrote to is noticed.
2. A job finds its files with their modes; what it does to them harms no other job.
3. Only plain files inside the working folder are listed and read: no link, device, pipe or way out, whatever happens meanwhile.
4. A checkpoint counts when its manifest and all that this names are there.
5. The sweep takes what nobody wants, and nothing from a launch under way.
6. What takes long shows that it goes on, and is done once, however often it is asked for.
7. What a job leaves is removed, however it has closed it.
"""

import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from groupwise.jobs.hosts import answers
from groupwise.jobs.hosts.runner.artefacts import listed_bytes, verb_manifest
from groupwise.jobs.hosts.runner.blobs import hash_of, protect_blob
from groupwise.jobs.hosts.runner.ending import verb_sweep
from groupwise.jobs.hosts.runner.locks import take_lock
from groupwise.jobs.hosts.runner.observe import WatchedAttempt
from groupwise.jobs.hosts.runner.protocol import RequestProgress, RequestRejected
from groupwise.jobs.hosts.runner.requests import send_sign
from groupwise.jobs.hosts.runner.root import Attempt, Root
from groupwise.jobs.hosts.runner.work_folder import open_inside, read_if_unchanged, read_inside
from tests.processes import wait_until
from tests.runner_machine import Machine, Refused, machine, request


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def done(here: Machine, script: str = "true", **fields: Any) -> Path:
    """The working folder of a job that has ended."""
    here.sh(script, **fields)
    assert here.comes_to("exited")["exit"]["code"] == 0
    return here.work()


def manifest(here: Machine, what: str = "artefacts") -> dict[str, Any]:
    return here.ask("manifest", job="job", epoch=1, what=what)


def read(here: Machine, path: str, **fields: Any) -> bytes:
    here.ask(
        "read", **{"job": "job", "epoch": 1, "path": path, "offset": 0, "limit": 1 << 20, **fields}
    )
    return here.payload


# --- blobs --------------------------------------------------------------------------------------


def test_bytes_of_another_hash_or_that_were_cut_are_not_kept(here: Machine) -> None:
    data = b"x" * 1000
    for code, payload, blobs in (
        ("bad_blob", b"other", [[sha(b"right"), 5]]),
        ("bad_request", data[:500], [[sha(data), 1000]]),
        ("bad_request", b"x", [["../" * 20 + "a", 1]]),
    ):
        with pytest.raises(Refused, match=code):
            here.ask("put", payload, blobs=blobs)
    body = here.body("put", blobs=[[sha(data), 1000]], payload=1000)
    with pytest.raises(Refused, match="truncated"):
        here.finish(here.begin(request(body, data[:500])))
    with pytest.raises(Refused, match="bad_request"):
        here.ask("missing", sha256=["../../etc/passwd"])
    assert here.ask("missing", sha256=[sha(b"right")])["missing"]
    assert [p for p in (here.root / "blobs").rglob("*") if p.is_file()] == []


def test_parts_are_joined(either: Machine) -> None:
    parts = [b"first", b"second", b"third"]
    whole, shas = b"".join(parts), [sha(part) for part in parts]
    either.put(*parts[:2])
    asked = {"blob": [sha(whole), len(whole)], "parts": [[sha(part), len(part)] for part in parts]}
    with pytest.raises(Refused, match="missing_blobs") as refused:
        either.ask("join", **asked)
    assert refused.value.error["missing"] == [sha(b"third")]
    either.put(parts[2])
    for _ in range(2):
        either.ask("join", **asked)
        assert either.ask("missing", sha256=[sha(whole), *shas])["missing"] == shas


def test_a_job_finds_its_files(either: Machine) -> None:
    program, large = b"#!/bin/sh\ncat data/in.txt; ls -l\n", os.urandom(2 << 20)
    given = {
        "run": (program, 0o755),
        "data/in.txt": (b"hello\n", 0o640),
        "data/deep/large": (large, 0o644),
    }
    files = {name: [sha(data), mode, len(data)] for name, (data, mode) in given.items()}
    with pytest.raises(Refused, match="missing_blobs") as refused:
        either.launch("./run", spec_files=files)
    assert sorted(refused.value.error["missing"]) == sorted(entry[0] for entry in files.values())
    assert either.status()["state"] == "absent"
    either.put(*(data for data, _ in given.values()))
    either.launch("./run", spec_files=files)
    assert either.comes_to("exited")["exit"]["tail"].startswith("hello\n")
    for name, (_, mode) in given.items():
        assert (either.work() / name).stat().st_mode & 0o777 == mode


def test_a_job_that_changes_its_files_harms_no_other_job(here: Machine) -> None:
    """However large they are, and whoever it is: root heeds no mode."""
    small, large = b"small", os.urandom(2 << 20)
    files = {"small": [sha(small), 0o644, 5], "large": [sha(large), 0o444, len(large)]}
    here.put(small, large)
    here.sh("until [ -e go ]; do sleep 0.02; done; sha256sum large", spec_files=files)
    here.sh("echo bad >> small; chmod u+w large; echo bad >> large", spec_files=files, job="other")
    here.comes_to("exited", job="other")
    (here.work() / "go").touch()
    assert here.comes_to("exited")["exit"]["tail"].startswith(sha(large))
    assert here.ask("missing", sha256=[sha(small), sha(large)])["missing"] == []
    blob = Path(Root(str(here.root)).blob(sha(large)))
    blob.chmod(0o644)
    blob.write_bytes(b"bad")
    with pytest.raises(Refused, match="missing_blobs"):
        here.sh("true", spec_files=files, epoch=2)
    here.put(large)
    here.sh("sha256sum large", spec_files=files, epoch=2)
    assert here.comes_to("exited", epoch=2)["exit"]["tail"].startswith(sha(large))


def test_the_sweep_keeps_what_is_wanted_and_waits_for_a_launch(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep, gone = here.put(b"keep", b"gone")
    left = here.root / "attempts" / ".new-job.1-0123"
    left.mkdir(parents=True)
    removed = here.ask("sweep", keep=[keep])["removed"]
    assert removed == 0, "a launch under way may just have sent them"
    root = Root(str(here.root))
    held = take_lock(root.lock("blobs.lock"), fcntl.LOCK_SH)
    assert held is not None
    monkeypatch.setattr("groupwise.jobs.hosts.runner.locks.LOCK_TIMEOUT", 0.05)
    with pytest.raises(RequestRejected, match="blobs"):
        verb_sweep(root, {"keep": [], "older_than": 0, "runner": "r"}, io.BytesIO())
    os.close(held)
    assert here.ask("missing", sha256=[keep, gone])["missing"] == []
    assert here.ask("sweep", keep=[keep], older_than=0)["removed"] == 1
    assert here.ask("missing", sha256=[keep, gone])["missing"] == [gone]
    assert not left.exists()


def test_recently_requested_blobs_are_not_swept(here: Machine) -> None:
    asked, old = here.put(b"asked for", b"old")
    root = Root(str(here.root))
    changed = os.stat(root.blob(old)).st_ctime
    until = time.monotonic() + 5.0
    while os.stat(root.blob(asked)).st_ctime < changed + 0.1:
        assert protect_blob(root, asked)
        assert time.monotonic() < until, "its time of change stays what it was"
    body = {"keep": [], "older_than": time.time() - changed - 0.05, "runner": "r"}
    assert verb_sweep(root, body, io.BytesIO())[0] == {"removed": 1}
    assert here.ask("missing", sha256=[asked, old])["missing"] == [old]


# --- coming back --------------------------------------------------------------------------------


def test_artefacts_are_listed_and_read(either: Machine) -> None:
    script = "mkdir -p outputs/a; printf one > outputs/a/x; printf '' > outputs/y; chmod 600 outputs/y; echo no > other"
    done(either, script)
    told = manifest(either)
    files = {"outputs/a/x": [sha(b"one"), 0o644, 3], "outputs/y": [sha(b""), 0o600, 0]}
    assert (told["files"], told["refused"]) == (files, [])
    assert read(either, "outputs/a/x", offset=1) == b"ne"
    assert read(either, "outputs/a/x", limit=1, sha256=sha(b"one")) == b"o"
    assert read(either, "outputs/a/x", offset=3) == b""
    with pytest.raises(Refused, match="changed"):
        read(either, "outputs/a/x", sha256=sha(b"two"))
    for path in ("../state.json", "/etc/passwd", "outputs/../../log", "", ".", "a//b", "a\0b"):
        with pytest.raises(Refused, match="refused_path"):
            read(either, path)


def test_links_pipes_and_files_outside_the_folder_are_refused(
    here: Machine, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("canary")
    outputs = done(here, "mkdir -p outputs/real; echo > outputs/real/file") / "outputs"
    for name, target in (("link", secret / "key"), ("folder", secret), ("inner", "real/file")):
        (outputs / name).symlink_to(target)
    os.mkfifo(outputs / "pipe")
    os.mkdir(os.fsencode(outputs) + b"/\xff")
    expected = {"folder": "link", "inner": "link", "link": "link", "pipe": "pipe"}
    if os.geteuid() == 0:
        os.mknod(outputs / "device", 0o600 | 0o020000, os.makedev(1, 5))
        expected["device"] = "device"
    told = manifest(here)
    assert list(told["files"]) == ["outputs/real/file"]
    refused = dict(map(tuple, told["refused"]))
    assert [why for path, why in refused.items() if "not_utf8" in why] == ["not_utf8"]
    assert {p: w for p, w in refused.items() if w != "not_utf8"} == {
        f"outputs/{name}": why for name, why in expected.items()
    }
    for path in (*expected, "folder/key", "real"):
        with pytest.raises(Refused, match="refused_path"):
            read(here, f"outputs/{path}")
    outputs.rename(here.work() / "before")
    (here.work() / "outputs").symlink_to(tmp_path)
    told = manifest(here)
    assert (told["files"], told["refused"]) == ({}, [["outputs", "link"]])
    with pytest.raises(Refused, match="refused_path"):
        read(here, "outputs/secret/key")


def gather(here: Machine, *files: tuple[str, bytes]) -> list[bool]:
    """Which are whole; their bytes are the payload."""
    listed = [[path, sha(data), len(data)] for path, data in files]
    whole: list[bool] = here.ask("gather", job="job", epoch=1, files=listed)["whole"]
    return whole


def test_only_what_is_as_it_was_listed_comes_in_one_answer(either: Machine, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("one")
    script = "mkdir -p outputs/real; cd outputs; printf one > real/x; cp real/x other; printf oneone > grown"
    outputs = done(either, script + "; printf on > cut; printf '' > y; printf 3 > 'z é'") / "outputs"  # fmt: skip
    (outputs / "link").symlink_to(tmp_path / "key")
    (outputs / "folder").symlink_to("real")
    (outputs / "out").symlink_to(tmp_path)
    (outputs / "loop").symlink_to("loop")
    os.mkfifo(outputs / "pipe")
    good = [("outputs/other", b"one"), ("outputs/y", b""), ("outputs/z é", b"3")]
    good += [("outputs/real/x", b"one")]
    assert gather(either) == []
    assert gather(either, *good) == [True] * 4
    assert either.payload == b"one3one"
    odd = "link folder/x out/key loop pipe real gone gone/x real/x/below grown cut".split()
    out = ["../../../../key", str(tmp_path / "key"), "", ".", "outputs//other", "a\0b", "\ud800"]
    long = ["outputs/" + "x" * 300]
    files = [(path, b"one") for path in [f"outputs/{name}" for name in odd] + out + long]
    files[3:3] = [("outputs/other", b"two"), *good]
    assert gather(either, *files) == [each in good for each in files]
    assert either.payload == b"one3one"


def keep(here: Machine, *files: tuple[str, bytes]) -> None:
    listed = [[path, sha(data), len(data)] for path, data in files]
    told = here.ask("keep", job="job", epoch=1, files=listed)
    assert told["kept"] == [sha(data) for _, data in files]


def test_only_files_of_the_attempt_itself_become_blobs_without_upload(
    either: Machine, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("one")
    script = "mkdir -p outputs/real; cd outputs; printf one > real/x; printf two > other; printf on > short"
    outputs = done(either, script + "; printf onetwo > grown; mkfifo pipe; >y") / "outputs"
    (outputs / "link").symlink_to(tmp_path / "key")
    (outputs / "folder").symlink_to("real")
    for path, code in (
        *[(f"outputs/{name}", "changed") for name in ("other", "short", "grown")],
        *[(f"outputs/{name}", "refused_path") for name in ("link", "folder/x", "real", "pipe")],
        *[("outputs/gone", "not_found"), ("../state.json", "refused_path")],
    ):
        wanted = b"onetwothree" if path.endswith("grown") else b"one"
        with pytest.raises(Refused, match=code):
            keep(either, (path, wanted))
        assert either.ask("missing", sha256=[sha(wanted)])["missing"] == [sha(wanted)]
    files = [("outputs/real/x", b"one"), ("outputs/y", b"")]
    keep(either, *files)
    assert either.ask("missing", sha256=[sha(b"one"), sha(b"")])["missing"] == []
    (outputs / "real" / "x").write_text("two")
    assert (either.root / "blobs" / sha(b"one")[:2] / sha(b"one")).read_bytes() == b"one"
    keep(either, *files)  # it is there, whatever became of the file


def test_no_more_is_read_of_a_file_than_was_listed(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have grown to any size since, or grow as it is read."""
    work = done(here, "mkdir outputs; truncate -s 64M outputs/grown")
    read: list[int] = []
    real = read_inside

    def counted(work: str, path: str, most: int) -> bytes:
        read.append(len(data := real(work, path, most)))
        return data

    monkeypatch.setattr("groupwise.jobs.hosts.runner.work_folder.read_inside", counted)
    assert read_if_unchanged(str(work), "outputs/grown", sha(bytes(10)), 10) is None
    assert read == [11]


def test_a_file_replaced_by_a_link_before_opening_is_refused(
    here: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("canary")
    file = done(here, "mkdir outputs; echo > outputs/file") / "outputs" / "file"
    plain = os.stat(file)
    file.unlink()
    file.symlink_to(tmp_path / "key")
    monkeypatch.setattr(os, "stat", lambda *_a, **_k: plain)
    with pytest.raises(RequestRejected, match="outputs/file"):
        open_inside(str(here.work()), "outputs/file")
    assert read_if_unchanged(str(here.work()), "outputs/file", sha(b"canary"), 6) is None


def test_a_hash_is_remembered_only_while_the_file_is_the_same(here: Machine) -> None:
    path = done(here, "mkdir outputs; printf one > outputs/x") / "outputs" / "x"
    remembered = here.folder() / "hashes.json"
    manifest(here)
    assert not remembered.exists(), "so fresh that the next change may not show"
    os.utime(path, (1, 1))
    assert manifest(here)["files"]["outputs/x"][0] == sha(b"one")
    assert json.loads(remembered.read_text())["outputs/x"][1] == sha(b"one")
    path.write_bytes(b"two")
    os.utime(path, (1, 1))  # its time of change shows it all the same
    assert manifest(here)["files"]["outputs/x"][0] == sha(b"two")


def test_many_refused_files_are_reported_in_part_and_counted(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links say nothing of whether a job's artefacts are whole: they take no room from what does."""
    script = "for n in 1 2 3 4 5; do ln -s x outputs/a-$n; head -c 1020000 /dev/zero > outputs/b-$n; done"
    done(here, "mkdir outputs; " + script, limits={"artefact_mb": 1})
    monkeypatch.setattr("groupwise.jobs.hosts.runner.artefacts.MAX_REFUSED", 2)
    told = in_process(here)
    large, links = [("outputs/b-1", "too_large"), ("outputs/b-2", "too_large")], ["link", "link"]
    assert list(told.refused[:2]) == large
    assert [why for _, why in told.refused[2:]] == links
    assert told.refused_more == {"too_large": 3, "link": 3}
    monkeypatch.setattr(
        "groupwise.jobs.hosts.runner.artefacts.REFUSED_TOGETHER", listed_bytes("outputs/b-1")
    )
    assert in_process(here).refused_more == {"too_large": 4, "link": 4}


def in_process(here: Machine, what: str = "artefacts") -> answers.WorkTree:
    body = here.body("manifest", job="job", epoch=1, what=what)
    return answers.parse_work_tree(verb_manifest(Root(str(here.root)), body, io.BytesIO())[0])


# --- what takes long ----------------------------------------------------------------------------


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """As by a request before, that is at work."""
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


def asked_twice(here: Machine, verb: str) -> tuple[dict[str, Any], Path]:
    """A request, and the folder that is locked while one like it is carried out."""
    done(here, "mkdir outputs; touch outputs/x")
    if verb == "manifest":
        return here.body(verb, job="job", epoch=1, what="artefacts"), here.folder()
    shas, whole = here.put(b"one", b"two"), sha(b"onetwo")
    folder = here.root / "blobs" / whole[:2]
    folder.mkdir(exist_ok=True)
    (folder / f"{whole}.join.new").write_bytes(b"torn, and longer than what is to be")
    return here.body(verb, blob=[whole, 6], parts=[[part, 3] for part in shas]), folder


def waits_for(asked: subprocess.Popen[bytes], folder: Path) -> bool:
    """It has come to where it takes the lock of that folder."""
    with suppress(OSError):
        return any(
            os.readlink(each) == str(folder) for each in Path(f"/proc/{asked.pid}/fd").iterdir()
        )
    return False


@pytest.mark.parametrize("verb", ["manifest", "join"])
def test_long_requests_run_one_at_a_time(either: Machine, verb: str) -> None:
    """And who waits for another one ends with whoever asked."""
    body, folder = asked_twice(either, verb)
    with locked(folder):
        waiting = [either.begin(request(body)) for _ in range(3)]
        for each in waiting:
            wait_until(partial(waits_for, each, folder), "it to wait")
        left = waiting.pop()
        assert left.stdout is not None
        assert left.stderr is not None
        left.stdout.close()
        left.stderr.close()
        assert left.wait(60) == 0
    for each in waiting:
        told = either.finish(each)
        assert told.get("files", {}).keys() == ({"outputs/x"} if verb == "manifest" else set())
    assert not list(either.root.rglob("*.new"))


def test_a_disk_that_hangs_gives_no_signs(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    before = RequestProgress.done
    assert send_sign(before) == before
    assert capfdbinary.readouterr().out == b""
    hash_of(io.BytesIO(b"x"))
    assert send_sign(before) > before
    assert capfdbinary.readouterr().out == b"\n"


# --- another user -------------------------------------------------------------------------------


@pytest.fixture
def nobodys() -> Iterator[Machine]:
    """A machine whose user is not root, and where root can be another one."""
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    if os.geteuid() == 0 and (python is None or shutil.which("setpriv") is None):
        pytest.skip("no Python here that another user may run")
    folder = Path(tempfile.mkdtemp(prefix="groupwise-nobody-"))
    try:
        with machine(folder, new=True) as made:
            if os.geteuid() == 0:
                user = folder / "python"
                change = "setpriv --reuid=65534 --regid=65534 --clear-groups"
                user.write_text(f'#!/bin/sh\nexec {change} {python} "$@"\n')
                user.chmod(0o755)
                made.python = str(user)
                for path in (folder, made.home):
                    os.chown(path, 65534, 65534)
            yield made
    finally:
        shutil.rmtree(folder)


def in_attempts(here: Machine) -> list[str]:
    return os.listdir(here.root / "attempts")


CLOSED = """
mkdir -p outputs/a/b outputs/c/d outputs/deep
touch outputs/a/b/x outputs/c/y
ln -s "$HOME" outputs/a/home
chmod 555 outputs/a/b outputs/a; chmod 0 outputs/c
cd outputs/deep; n=0; while [ $n -lt 1200 ]; do mkdir d; cd d; n=$((n + 1)); done
"""


def test_folders_that_a_job_has_closed_or_nested_are_removed(nobodys: Machine) -> None:
    kept = nobodys.home / "kept"
    kept.touch()
    done(nobodys, CLOSED)
    nobodys.ask("forget", job="job", epoch=1)
    assert in_attempts(nobodys) == []
    assert nobodys.ask("observe")["unremoved"] == []
    assert kept.exists()


# --- checkpoints --------------------------------------------------------------------------------


def checkpoint(folder: Path, step: int, files: dict[str, bytes], **more: Any) -> None:
    folder.mkdir(parents=True)
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    entries = {path: {"size": len(data), "sha256": sha(data)} for path, data in files.items()}
    (folder / "manifest.json").write_text(json.dumps({"step": step, "files": entries, **more}))


def test_checkpoints_count_when_they_are_complete(either: Machine) -> None:
    work = done(either, "mkdir outputs")
    saved = work / "outputs" / "checkpoints"
    checkpoint(saved / "step-20", 20, {"w": b"22", "deep/o": b"2"})
    checkpoint(saved / "step-9", 9, {"w": b"9"})
    checkpoint(saved / "step-30", 30, {"w": b"30", "o": b"3"})
    (saved / "step-30" / "o").unlink()
    checkpoint(saved / "step-40", 40, {"w": b"40"})
    (saved / "step-40" / "w").write_bytes(b"4")
    checkpoint(saved / ".building-step-50", 50, {"w": b"50"})
    checkpoint(saved / "step-60", 60, {})
    torn = '{"step": 60, "files": {"../step-9/w": {"size": 1'
    (saved / "step-60" / "manifest.json").write_text(torn)
    checkpoint(saved / "step-of-tokens", 10**20, {"w": b"9"})
    checkpoint(saved / "step-before-any", -1, {"w": b"9"})
    (work / "outputs" / "manifest.json").write_text('{"name": "an app"}')
    found = manifest(either, "checkpoints")["checkpoints"]
    names = [(c["path"].rpartition("/")[2], c["step"]) for c in found]
    assert names == [("step-9", 9), ("step-20", 20)]
    last = (saved / "step-20" / "manifest.json").read_bytes()
    assert found[1]["files"] == {
        f"outputs/checkpoints/step-20/{name}": [sha(data), 0o644, len(data)]
        for name, data in {"w": b"22", "deep/o": b"2", "manifest.json": last}.items()
    }
    assert manifest(either, "all")["checkpoints"] == found
    assert manifest(either, "artefacts")["checkpoints"] == []


def test_checkpoints_show_while_the_job_runs_and_in_its_record(here: Machine) -> None:
    here.sh("until [ -e go ]; do sleep 0.02; done")
    assert (here.status()["checkpoints"], here.status()["step"]) == (0, None)
    checkpoint(here.work() / "outputs" / "step-7", 7, {"w": b"7"})
    known = {"job.1": {"state": "running", "checkpoints": 0}}
    (told,) = here.ask("wait", known=known, timeout=20)["attempts"]
    assert (told["state"], told["checkpoints"], told["step"]) == ("running", 1, 7)
    known["job.1"] |= {"checkpoints": 1, "step": 7}
    (here.work() / "outputs" / "step-7").rename(here.home / "old")
    checkpoint(here.work() / "outputs" / "step-8", 8, {"w": b"8"})
    watched = WatchedAttempt(Attempt(Root(str(here.root)), "job", 1), known["job.1"])
    found = watched.read_state()
    assert (found["state"], found["checkpoints"], found["step"]) == ("running", 1, 8)
    assert watched.differs(found, log_too=False)
    (here.work() / "go").touch()
    record = here.comes_to("exited")["exit"]
    assert (record["checkpoints"], record["step"]) == (1, 8)
