"""Jobs run as the same Unix user as the runner: whatever one writes, into its outputs or over the records of its own attempt, must break
neither the answers about others nor its own end.

1. `observe` and `wait` answer, with all others, and a job's own exit record is whole.
2. No answer waits for a pipe, reads what has no end, or follows where a job's record points.
"""

import hashlib
import io
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from groupwise.jobs.hosts import answers
from groupwise.jobs.hosts.runner.artefacts import Hashes
from groupwise.jobs.hosts.runner.cgroups import unit_name
from groupwise.jobs.hosts.runner.requests import VERBS
from groupwise.jobs.hosts.runner.root import Attempt, Root
from groupwise.jobs.hosts.runner.state import count_checkpoints, state_of
from tests.processes import is_gone, wait_until
from tests.runner_machine import Machine, Refused

NESTED = "[" * 100_000


@pytest.fixture
def over(here: Machine) -> Machine:
    """Whose job has ended."""
    here.sh("true")
    here.comes_to("exited")
    return here


def observed(here: Machine) -> dict[str, dict[str, Any]]:
    """Attempts by their job, of an answer that the control plane takes."""
    told = here.ask("observe")
    answers.parse_observation(told)
    return {each["job"]: each for each in told["attempts"]}


def in_process(here: Machine) -> Attempt:
    return Attempt(Root(str(here.root)), "job", 1)


def saved(folder: Path, step: int, *, more: str = "") -> Path:
    """A checkpoint that counts, with `more` in its manifest."""
    folder.mkdir(parents=True)
    (folder / "w").write_bytes(b"w")
    entry = {"size": 1, "sha256": hashlib.sha256(b"w").hexdigest()}
    text = json.dumps({"step": step, "files": {"w": entry}})
    (folder / "manifest.json").write_text(text[:-1] + more + "}")
    return folder / "manifest.json"


HASHED = '"sha256": "' + "0" * 64 + '"}}}'
ODD_MANIFESTS = {
    "nested": NESTED, "nested inside": '{"step": 1, "files": ' + '{"a":' * 100_000,
    "long number": '{"files": {}, "step": ' + "1" * 1_000_000 + "}",
    "half character": '{"step": 1, "files": {"\\ud800": {"size": 1, ' + HASHED,
    "nul": '{"step": 1, "files": {"\\u0000": {"size": 1, ' + HASHED, "not a number": '{"step": NaN, "files": {}}',
    "list": '{"step": 1, "files": ["w"]}', "size as real": '{"step": 1, "files": {"w": {"size": 1.0, ' + HASHED,
}  # fmt: skip


def odd_entries(folder: Path) -> None:
    """All kinds of things called manifest.json."""
    text = b"\xff".decode(errors="surrogateescape")
    for name in ("pipe", "link", "endless", "folder", "socket", "closed", "loop", text):
        (folder / name).mkdir(parents=True)
    os.mkfifo(folder / "pipe" / "manifest.json")
    for name, target in (
        ("link", "/etc/passwd"),
        ("endless", "/dev/zero"),
        ("loop", "manifest.json"),
    ):
        (folder / name / "manifest.json").symlink_to(target)
    (folder / "folder" / "manifest.json").mkdir()
    os.mknod(folder / "socket" / "manifest.json", stat.S_IFSOCK | 0o600)
    for name in ("closed", text):
        (folder / name / "manifest.json").write_text("{}")
    (folder / "closed" / "manifest.json").chmod(0)
    (folder / "a\nb").write_text("")
    (folder / ("x" * 255)).write_text("")
    saved(folder / ("y" * 255) / "new\nline", 4)


def test_malformed_checkpoint_manifests_do_no_harm(either: Machine) -> None:
    """Whatever stands in it, also if it is not a file at all."""
    either.sh("until [ -e go ]; do sleep 0.02; done", job="other")
    either.sh("until [ -e go ]; do sleep 0.02; done; echo last words; exit 3")
    outputs = either.work() / "outputs"
    saved(outputs / "good", 5)
    for name, text in ODD_MANIFESTS.items():
        folder = outputs / "texts" / name
        folder.mkdir(parents=True)
        (folder / "w").write_bytes(b"w")
        (folder / "manifest.json").write_text(text)
    odd_entries(outputs / "entries")
    told = observed(either)
    assert {job: each["state"] for job, each in told.items()} == dict.fromkeys(
        ("job", "other"), "running"
    )
    assert (told["job"]["checkpoints"], told["job"]["step"]) == (2, 5)
    known = {"job.1": {"state": "running"}, "other.1": {"state": "running"}}
    assert len(either.ask("wait", known=known, timeout=0)["attempts"]) == 2
    tree = answers.parse_work_tree(either.ask("manifest", job="job", epoch=1, what="all"))
    assert [c.step for c in tree.checkpoints] == [4, 5]
    assert "outputs/entries/a\nb" in tree.files
    (either.work() / "go").touch()
    ended = either.comes_to("exited")["exit"]
    assert (ended["code"], ended["reason"], ended["tail"]) == (3, "exited", "last words\n")
    assert (ended["checkpoints"], ended["step"]) == (2, 5)
    assert either.complaints() == ""
    assert observed(either)["other"]["state"] == "running"


ODD_RECORDS = {
    "nested": NESTED,
    "no text": "\udcff\udcfe",
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
}  # fmt: skip
RECORDS = "state.json exit.json outcome.json heartbeat contact cancel hashes.json log".split()


def is_answered_beside_the_other(here: Machine) -> None:
    """Whatever is asked of both at once."""
    assert observed(here)["other"]["state"] == "running"
    known = {"job.1": {"clock": 1.0}, "other.1": {}}
    told = here.ask("wait", known=known, timeout=0)["attempts"]
    assert [t["job"] for t in told] == ["job", "other"]
    here.ask("touch", attempts=["job.1", "other.1"])
    answers.parse_member_state(here.status())


@pytest.mark.parametrize("odd", ODD_RECORDS)
def test_odd_records_of_one_break_no_answer_about_others(here: Machine, odd: str) -> None:
    text = ODD_RECORDS[odd].encode("utf-8", "surrogateescape")
    here.sh("echo other; sleep 600", job="other")
    here.sh("sleep 600")
    pid = here.status()["pid"]
    for supervised in (True, False):
        for name in RECORDS:
            (here.folder() / name).write_bytes(text)
            is_answered_beside_the_other(here)
        here.ask("log", job="job", epoch=1, offset=0, limit=10)
        answers.parse_work_tree(here.ask("manifest", job="job", epoch=1, what="all"))
        if supervised:
            stat = Path(f"/proc/{pid}/stat").read_text()
            supervisor = int(stat.rpartition(")")[2].split()[1])
            os.kill(supervisor, 9)
            wait_until(lambda s=supervisor: is_gone(s) and is_gone(pid), "their end")
    here.ask("kill", job="job", epoch=1, grace=0)
    assert here.ask("release", job="job", epoch=1, gpus=[])["clean"]
    assert here.ask("forget", job="job", epoch=1)["forgotten"]


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_records_that_are_not_files_are_not_waited_for(here: Machine, kind: str) -> None:
    here.sh("sleep 600", job="other")
    here.sh("until [ -e go ]; do sleep 0.02; done; exit 3")
    for name in (*RECORDS, "outcome.json"):
        path = here.folder() / name
        with suppress(FileNotFoundError):
            path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
        is_answered_beside_the_other(here)
        assert here.ask("log", job="job", epoch=1, offset=0, limit=10)["size"] >= 0
    (here.work() / "go").touch()
    ended = here.comes_to("exited")["exit"]
    assert (ended["code"], ended["reason"]) == (3, "exited")


def test_nothing_is_looked_for_where_a_record_points(here: Machine) -> None:
    """All below the control group of an attempt is read, and what is in it killed."""
    here.sh("sleep 600")
    here.kill_supervisor()
    state = here.state()
    groups = state_of(in_process(here))
    assert groups is not None
    assert groups["cgroup"] == {n: f for n, f in state["cgroup"].items() if f}
    for odd in ("/", str(here.home), "/sys/fs/cgroup", f"/tmp/{unit_name(in_process(here))}"):
        text = json.dumps({**state, "cgroup": {"v2": odd, "memory": odd}})
        (here.folder() / "state.json").write_text(text)
        groups = state_of(in_process(here))
        assert groups is not None
        assert groups["cgroup"] == {}


def test_a_checkpoint_whose_manifest_is_being_written_is_not_listed(
    over: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, step in (("a", 1), ("b", 2)):
        saved(over.work() / "outputs" / name, step)
    real = Hashes.of
    changing = "outputs/a/manifest.json"
    monkeypatch.setattr(
        Hashes, "of", lambda self, path: None if path == changing else real(self, path)
    )
    body = over.body("manifest", job="job", epoch=1, what="checkpoints")
    told, _ = VERBS["manifest"](Root(str(over.root)), body, io.BytesIO())
    assert [c.step for c in answers.parse_work_tree(told).checkpoints] == [2]


def test_a_state_that_could_not_be_read_again_is_not_begun(here: Machine) -> None:
    paths = [f"outputs/{n:0200}" for n in range(20_000)]
    with pytest.raises(Refused, match="too long"):
        here.launch("true", spec_checkpoints=paths)
    assert here.status()["state"] == "absent"


def test_a_number_that_no_database_takes_is_no_epoch(here: Machine) -> None:
    here.sh("mkdir ../../job.9223372036854775808; exit 3")
    here.comes_to("exited")
    told = here.ask("observe")
    assert [(a["job"], a["epoch"]) for a in told["attempts"]] == [("job", 1)]
    assert {"what": "folder", "detail": "job.9223372036854775808"} in told["quarantined"]


def test_observe_reports_all_attempts_if_one_cannot_be_read(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.sh("sleep 600", job="other")
    here.sh("sleep 600")
    real = state_of

    def fails(attempt: Attempt, *_: object) -> dict[str, Any] | None:
        if attempt.job == "job":
            raise RecursionError
        return real(attempt)

    monkeypatch.setattr("groupwise.jobs.hosts.runner.state.state_of", fails)
    told, _ = VERBS["observe"](Root(str(here.root)), here.body("observe"), io.BytesIO())
    found = [(a["job"], a["state"]) for a in told["attempts"]]
    assert found == [("job", "running"), ("other", "running")]
    answers.parse_observation(told)
    monkeypatch.setattr("groupwise.jobs.hosts.runner.state.checkpoints_of", fails)
    assert count_checkpoints(in_process(here), {}) == (0, None), "its record needs none"
