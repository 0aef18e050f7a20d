"""Jobs run as the same Unix user as the runner: whatever one writes, into its outputs or over the records of its own attempt, must break
neither the answers about others nor its own end.

1. `observe` and `wait` answer, with all others, and a job's own exit record is whole.
2. No answer waits for a pipe, reads what has no end, or follows where a job's record points.
3. Data that only looks like checkpoints costs a look at its size and times, no more.
"""

import hashlib
import io
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from groupwise.hosts import answers, runner
from tests.runner_machine import EVERY_PYTHON, Machine, Refused, alive, machine, until

NESTED = "[" * 100_000
MIB = 1 << 20


@pytest.fixture(params=EVERY_PYTHON)
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path, request.param) as made:
        yield made


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path) as made:
        yield made


def observed(here: Machine) -> dict[str, dict[str, Any]]:
    """Attempts by their job, of an answer that the control plane takes."""
    told = here.ask("observe")
    answers.observation(told)
    return {each["job"]: each for each in told["attempts"]}


def in_process(here: Machine) -> runner.Attempt:
    return runner.Attempt(runner.Root(str(here.root)), "job", 1)


def saved(folder: Path, step: int, *, more: str = "") -> Path:
    """A checkpoint that counts, with `more` in its manifest."""
    folder.mkdir(parents=True)
    (folder / "w").write_bytes(b"w")
    entry = {"size": 1, "sha256": hashlib.sha256(b"w").hexdigest()}
    text = json.dumps({"step": step, "files": {"w": entry}})
    (folder / "manifest.json").write_text(text[:-1] + more + "}")
    return folder / "manifest.json"


ODD_MANIFESTS = {
    "nested": NESTED,
    "nested well": "[" * 50_000 + "]" * 50_000,
    "nested inside": '{"step": 1, "files": ' + '{"a":' * 100_000,
    "long number": '{"files": {}, "step": ' + "1" * 1_000_000 + "}",
    "long size": '{"step": 1, "files": {"w": {"size": ' + "1" * 1_000_000 + "}}}",
    "half character": '{"step": 1, "files": {"\\ud800": {"size": 1, "sha256": "'
    + "0" * 64
    + '"}}}',
    "nul": '{"step": 1, "files": {"\\u0000": {"size": 1, "sha256": "' + "0" * 64 + '"}}}',
    "not a number": '{"step": NaN, "files": {}}',
    "truth": '{"step": true, "files": {}}',
    "no end": '{"step": 1e999, "files": {}}',
    "null bytes": "\0" * 5000,
    "list": '{"step": 1, "files": ["w"]}',
    "twice": '{"step": 1, "step": -1, "files": {}, "files": 7}',
    "size as real": '{"step": 1, "files": {"w": {"size": 1.0, "sha256": "' + "0" * 64 + '"}}}',
}


def test_what_a_job_calls_a_manifest_breaks_nothing(here: Machine) -> None:
    here.sh("until [ -e go ]; do sleep 0.02; done", job="other")
    here.sh("until [ -e go ]; do sleep 0.02; done; echo last words; exit 3")
    saved(here.work() / "outputs" / "good", 5)
    for name, text in ODD_MANIFESTS.items():
        folder = here.work() / "outputs" / name
        folder.mkdir(parents=True)
        (folder / "w").write_bytes(b"w")
        (folder / "manifest.json").write_text(text)
    told = observed(here)
    assert {job: each["state"] for job, each in told.items()} == {
        "job": "running",
        "other": "running",
    }
    assert (told["job"]["checkpoints"], told["job"]["step"]) == (1, 5)
    known = {"job.1": {"state": "running"}, "other.1": {"state": "running"}}
    assert len(here.ask("wait", known=known, timeout=0)["attempts"]) == 2
    found = here.ask("manifest", job="job", epoch=1, what="all")
    assert [c["step"] for c in found["checkpoints"]] == [5]
    (here.work() / "go").touch()
    ended = here.comes_to("exited")["exit"]
    assert (ended["code"], ended["reason"], ended["tail"]) == (3, "exited", "last words\n")
    assert (ended["checkpoints"], ended["step"]) == (1, 5)
    assert here.complaints() == ""
    assert observed(here)["other"]["state"] == "running"


def odd_entries(folder: Path) -> None:
    """All kinds of things called manifest.json."""
    for name in (
        "pipe",
        "link",
        "endless",
        "folder",
        "socket",
        "closed",
        "loop",
        b"\xff".decode(errors="surrogateescape"),
    ):
        (folder / name).mkdir(parents=True)
    os.mkfifo(folder / "pipe" / "manifest.json")
    (folder / "link" / "manifest.json").symlink_to("/etc/passwd")
    (folder / "endless" / "manifest.json").symlink_to("/dev/zero")
    (folder / "folder" / "manifest.json").mkdir()
    os.mknod(folder / "socket" / "manifest.json", stat.S_IFSOCK | 0o600)
    (folder / "closed" / "manifest.json").write_text("{}")
    (folder / "closed" / "manifest.json").chmod(0)
    (folder / "loop" / "manifest.json").symlink_to("manifest.json")
    (folder / b"\xff".decode(errors="surrogateescape") / "manifest.json").write_text("{}")
    (folder / "a\nb").write_text("")
    (folder / ("x" * 255)).write_text("")
    saved(folder / ("y" * 255) / "new\nline", 4)


def test_a_manifest_that_is_no_file(here: Machine) -> None:
    here.sh("mkdir outputs; until [ -e go ]; do sleep 0.02; done")
    until((here.work() / "outputs").exists)
    odd_entries(here.work() / "outputs")
    assert (observed(here)["job"]["checkpoints"], observed(here)["job"]["step"]) == (1, 4)
    tree = answers.work_tree(here.ask("manifest", job="job", epoch=1, what="all"))
    assert [c.step for c in tree.checkpoints] == [4]
    assert "outputs/a\nb" in tree.files
    (here.work() / "go").touch()
    assert here.comes_to("exited")["exit"]["step"] == 4


def test_what_is_too_large_for_a_manifest_is_not_read(one: Machine) -> None:
    one.sh("true")
    one.comes_to("exited")
    outputs = one.work() / "outputs"
    large = saved(outputs / "large", 9, more=f', "more": "{"x" * runner.LARGEST_MANIFEST}"')
    saved(outputs / "full", 7, more=f', "more": "{"x" * (runner.LARGEST_MANIFEST - 1000)}"')
    assert large.stat().st_size > runner.LARGEST_MANIFEST
    assert [c.step for c in runner.checkpoints_of(in_process(one), ["outputs"])] == [7]


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that are read inside a working folder, from here on."""
    found: list[str] = []
    real = runner.read_inside

    def counted(work: str, path: str, most: int) -> bytes:
        found.append(path)
        return real(work, path, most)

    monkeypatch.setattr(runner, "read_inside", counted)
    return found


def test_what_is_no_manifest_is_read_once(one: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    one.sh("true")
    one.comes_to("exited")
    attempt, outputs = in_process(one), one.work() / "outputs"
    saved(outputs / "good", 7)
    other = outputs / "other" / "manifest.json"
    other.parent.mkdir()
    other.write_text(json.dumps(["x"] * runner.REMEMBERED_ABOVE))
    read = reads(monkeypatch)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 10)  # all has settled
    for _ in range(3):
        assert [c.step for c in runner.checkpoints_of(attempt, ["outputs"])] == [7]
    assert read.count("outputs/other/manifest.json") == 1
    assert read.count("outputs/good/manifest.json") == 3
    other.unlink()
    other.parent.rmdir()
    saved(outputs / "other", 8, more=f', "more": "{"x" * runner.REMEMBERED_ABOVE}"')
    assert [c.step for c in runner.checkpoints_of(attempt, ["outputs"])] == [7, 8]
    for odd in (NESTED, '{"seen": 7}', '{"seen": [7, [{}], ["x"], {}]}', "[]"):
        Path(attempt.at("others.json")).write_text(odd)
        assert [c.step for c in runner.checkpoints_of(attempt, ["outputs"])] == [7, 8]


def test_of_many_manifests_the_newest_are_read(
    one: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.sh("true")
    one.comes_to("exited")
    paths = [saved(one.work() / "outputs" / f"step-{step}", step) for step in range(10)]
    for step, path in enumerate(paths):
        os.utime(path, (1000 + step, 1000 + step))
    size = paths[0].stat().st_size
    with monkeypatch.context() as patched:
        patched.setattr(runner, "MOST_MANIFESTS", 3)
        found = runner.checkpoints_of(in_process(one), ["outputs"])
        assert [c.step for c in found] == [7, 8, 9]
    monkeypatch.setattr(runner, "MANIFESTS_TOGETHER", 2 * size)
    assert [c.step for c in runner.checkpoints_of(in_process(one), ["outputs"])] == [8, 9]


def test_a_checkpoint_whose_manifest_is_being_written_is_not_listed(
    one: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.sh("true")
    one.comes_to("exited")
    saved(one.work() / "outputs" / "a", 1)
    saved(one.work() / "outputs" / "b", 2)
    real = runner.Hashes.of
    changing = "outputs/a/manifest.json"
    monkeypatch.setattr(
        runner.Hashes, "of", lambda self, path: None if path == changing else real(self, path)
    )
    body = one.body("manifest", job="job", epoch=1, what="checkpoints")
    told, _ = runner.VERBS["manifest"](runner.Root(str(one.root)), body, io.BytesIO())
    assert [c.step for c in answers.work_tree(told).checkpoints] == [2]


def test_a_state_that_could_not_be_read_again_is_not_begun(one: Machine) -> None:
    paths = [f"outputs/{n:0200}" for n in range(20_000)]
    with pytest.raises(Refused, match="too long"):
        one.launch("true", spec_checkpoints=paths)
    assert one.status()["state"] == "absent"


def test_more_entries_than_are_looked_at_are_not_even_listed(
    one: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.sh("mkdir -p outputs/a outputs/b; cd outputs/a; touch 1 2 3 4 5 6 7 8 9")
    one.comes_to("exited")
    monkeypatch.setattr(runner, "MOST_ENTRIES", 5)
    walk = runner.Walk(str(one.work()))
    walk.enter("outputs")
    assert walk.refused == {"outputs/a": "too_many", "outputs": "too_many"}
    walk.enter("outputs/b")
    assert walk.seen <= 8


ODD_RECORDS = {
    "nested": NESTED,
    "list": "[]",
    "empty": "",
    "no text": "\udcff\udcfe",
    "long": "[" + "0," * 3 * MIB + "0]",
    "odd fields": json.dumps(
        {
            "phase": ["x"], "boot_id": 7, "pid": "x", "start_ticks": -1, "method": {}, "rank": 1e400,
            "started_at": float("nan"), "gpus": "GPU-1", "slot": -1, "share_mb": "x",
            "refused": [[]], "checkpoints": 7, "artefacts": {"a": 1},
            "limits": [1], "cgroup": "x", "reason": [], "code": 10**30, "signal": "9",
        }
    ),
    "odd insides": json.dumps(
        {
            "phase": "running", "checkpoints": [7, {}, "../..", "/etc", "\ud800", "\0", "x" * 5000],
            "artefacts": [None, "outputs"], "limits": {"artefact_mb": "x", "artefact_files": [1]},
            "cgroup": {"v2": "/", "memory": 7}, "reason": "exited", "code": 10**19, "tail": {},
            "seconds": "x", "checkpoints_": 1, "step": 10**19, "message": 7, "gpus": [7], "pid": 10**19,
            "slot": 10**19, "share_mb": 10**19,
        }
    ),
    "refused for nothing": '{"phase": "refused", "refused": {"code": {}}}',
}  # fmt: skip
RECORDS = [
    "state.json",
    "exit.json",
    "outcome.json",
    "heartbeat",
    "contact",
    "cancel",
    "hashes.json",
    "log",
]


OFTEN = ("nested", "odd fields", "odd insides", "pipe", "endless")
"""The others are long tests."""


def all_of(*words: str) -> list[Any]:
    rare = pytest.mark.soak(suite="fleet")
    return [pytest.param(word, marks=[] if word in OFTEN else rare) for word in words]


@pytest.mark.parametrize("odd", all_of(*ODD_RECORDS))
def test_odd_records_of_one_break_no_answer_about_others(one: Machine, odd: str) -> None:
    text = ODD_RECORDS[odd].encode("utf-8", "surrogateescape")
    one.sh("echo other; sleep 600", job="other")
    one.sh("sleep 600")
    pid = one.status()["pid"]
    for supervised in (True, False):
        for name in RECORDS:
            (one.folder() / name).write_bytes(text)
            assert observed(one)["other"]["state"] == "running", name
            known = {"job.1": {"clock": 1.0}, "other.1": {}}
            told = one.ask("wait", known=known, timeout=0)["attempts"]
            assert [t["job"] for t in told] == ["job", "other"]
            one.ask("touch", attempts=["job.1", "other.1"])
            answers.member_state(one.status())
        one.ask("log", job="job", epoch=1, offset=0, limit=10)
        answers.work_tree(one.ask("manifest", job="job", epoch=1, what="all"))
        if supervised:
            end_supervisor_of(one, pid)
    one.ask("kill", job="job", epoch=1, grace=0)
    assert one.ask("release", job="job", epoch=1, gpus=[])["clean"]
    assert one.ask("forget", job="job", epoch=1)["forgotten"]


def end_supervisor_of(here: Machine, child: int) -> None:
    supervisor = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(supervisor, 9)
    until(lambda: not alive(supervisor) and not alive(child), "their end")


@pytest.mark.parametrize("kind", all_of("pipe", "folder", "endless"))
def test_records_that_are_no_files_are_waited_for_by_nobody(one: Machine, kind: str) -> None:
    one.sh("sleep 600", job="other")
    one.sh("until [ -e go ]; do sleep 0.02; done; exit 3")
    for name in (*RECORDS, "outcome.json"):
        path = one.folder() / name
        with suppress(FileNotFoundError):
            path.unlink() if not path.is_dir() else path.rmdir()
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")
        assert observed(one)["other"]["state"] == "running", name
        one.ask("touch", attempts=["job.1", "other.1"])
        known = {"job.1": {"clock": 1.0}, "other.1": {}}
        assert len(one.ask("wait", known=known, timeout=0)["attempts"]) == 2
        assert one.ask("log", job="job", epoch=1, offset=0, limit=10)["size"] >= 0
    (one.work() / "go").touch()
    ended = one.comes_to("exited")["exit"]
    assert (ended["code"], ended["reason"]) == (3, "exited")


def test_a_cancel_that_nobody_can_hear_kills(one: Machine) -> None:
    one.sh("trap '' TERM; while :; do sleep 0.05; done")
    (one.folder() / "cancel").unlink()
    (one.folder() / "cancel").mkdir()
    one.ask("kill", job="job", epoch=1, grace=600)
    assert one.comes_to("exited")["exit"]["signal"] == 9


def test_nothing_is_looked_for_where_a_record_points(one: Machine) -> None:
    """All below the control group of an attempt is read, and what is in it killed."""
    one.sh("sleep 600")
    one.kill_supervisor()
    state = one.state()
    groups = runner.state_of(in_process(one))
    assert groups is not None
    assert groups["cgroup"] == {n: f for n, f in state["cgroup"].items() if f}
    for odd in ("/", str(one.home), "/sys/fs/cgroup", f"/tmp/{runner.unit_of(in_process(one))}"):
        text = json.dumps({**state, "cgroup": {"v2": odd, "memory": odd}})
        (one.folder() / "state.json").write_text(text)
        groups = runner.state_of(in_process(one))
        assert groups is not None
        assert groups["cgroup"] == {}


def test_a_number_that_no_database_takes_is_no_epoch(one: Machine) -> None:
    one.sh("mkdir ../../job.9223372036854775808; exit 3")
    one.comes_to("exited")
    told = one.ask("observe")
    assert [(a["job"], a["epoch"]) for a in told["attempts"]] == [("job", 1)]
    assert {"what": "folder", "detail": "job.9223372036854775808"} in told["quarantined"]


def test_whatever_happens_to_one_the_others_are_told_of(
    one: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.sh("sleep 600", job="other")
    one.sh("sleep 600")
    real = runner.state_of

    def fails(attempt: runner.Attempt) -> dict[str, Any] | None:
        if attempt.job == "job":
            raise RecursionError
        return real(attempt)

    monkeypatch.setattr(runner, "state_of", fails)
    root, body = runner.Root(str(one.root)), one.body("observe")
    told, _ = runner.VERBS["observe"](root, body, io.BytesIO())
    assert [(a["job"], a["state"]) for a in told["attempts"]] == [
        ("job", "running"),
        ("other", "running"),
    ]
    answers.observation(told)


def test_an_exit_record_does_not_depend_on_checkpoints(
    one: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(runner, "checkpoints_of", fails)
    assert runner.count_checkpoints(in_process(one), {}) == (0, None)
