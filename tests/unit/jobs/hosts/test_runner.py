"""The protocol with the real runner on this machine, with this Python and with the oldest supported one.

1. A request that was cut or changed on its way does nothing.
2. A launch that is repeated starts nothing; the state is told.
3. Of launch and void for one epoch, the first decides; a lower epoch is refused, and a forgotten one.
4. pid, start ticks and boot id are on disk before the command begins.
5. Whatever the end was, there is an exit record that says so, with the end of the log.
6. The command sees the promised environment, and nothing of the spec is ever read by a shell.
7. Secrets reach the command and no file.
8. A supervisor that has settled needs nothing more of the Python that it began with.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.jobs.hosts import spec
from groupwise.jobs.hosts.runner.artefacts import MAX_ARTEFACTS
from groupwise.jobs.hosts.runner.launch_request import (
    ENVIRONMENT_NAME,
    RESERVED_NAMES,
    RESERVED_PREFIXES,
)
from groupwise.jobs.hosts.runner.processes import ATTEMPT_VARIABLE
from groupwise.jobs.hosts.runner.protocol import SHA256
from groupwise.jobs.hosts.runner.root import JOB_ID
from tests.processes import is_gone, wait_until
from tests.runner_machine import Machine, Refused, machine, request


@pytest.fixture
def new(tmp_path: Path) -> Iterator[Machine]:
    """One that has never been asked."""
    with machine(tmp_path, new=True) as made:
        yield made


def test_reserved_names_are_equal_in_runner_and_control_plane() -> None:
    assert RESERVED_NAMES == spec.RESERVED_NAMES
    assert RESERVED_PREFIXES == spec.RESERVED_PREFIXES
    assert JOB_ID.pattern == spec.JOB_ID.pattern
    assert ENVIRONMENT_NAME.pattern == spec.ENVIRONMENT_NAME.pattern
    assert SHA256.pattern == spec.SHA256.pattern
    assert ATTEMPT_VARIABLE == spec.ATTEMPT_VARIABLE
    assert MAX_ARTEFACTS == spec.MAX_ARTEFACTS


def test_a_damaged_runner_is_replaced_and_another_than_the_named_one_refused(new: Machine) -> None:
    with pytest.raises(Refused, match="bad_runner"):
        new.ask("hello", source="def answer_request(body, payload): raise SystemExit\n")
    assert not (new.root / "runners").exists()
    new.ask("hello")
    stored = new.root / "runners" / f"{new.sha}.py"
    stored.write_text("raise SystemExit('not this new')\n")
    for cache in stored.parent.glob("*.bin"):
        cache.write_bytes(b"\0" * 500)
    assert new.ask("hello")["ok"]
    assert stored.read_text() == new.source


def test_a_request_that_was_cut_or_changed_does_nothing(either: Machine) -> None:
    whole = request(either.body("void", job="job", epoch=1))
    changed = whole.replace(b'"job": "job"', b'"job": "jab"')
    for data in (b"", whole[: len(whole) // 3], whole[:-1], changed):
        with pytest.raises(Refused, match="truncated"):
            either.finish(either.begin(data))
    assert not (either.root / "attempts").exists()


def test_ill_formed_requests_are_refused_and_do_nothing(here: Machine) -> None:
    ill: list[dict[str, Any]] = [{"job": job} for job in ("../up", ".hidden", "a/b", "a" * 81, 7)]
    ill += [{"epoch": epoch} for epoch in (-1, "1", True)] + [{"verb": None}]
    codes = [("bad_request", fields) for fields in ill]
    for code, fields in (
        *codes,
        ("unknown_verb", {"verb": "explode"}),
        ("protocol", {"protocol": 2}),
    ):
        with pytest.raises(Refused, match=code):
            here.ask(**{"verb": "void", "job": "job", "epoch": 1, **fields})
    assert not (here.root / "attempts").exists()


def test_a_command_runs_and_its_end_is_on_record(either: Machine) -> None:
    begun = either.sh(
        "echo out; echo err >&2; until [ -e go ]; do sleep 0.02; done; exit 3", rank=2
    )
    assert (begun["state"], begun["rank"], begun["same_boot"]) == ("running", 2, True)
    assert begun["heartbeat_age"] < 5
    stat = Path(f"/proc/{begun['pid']}/stat").read_text().rpartition(")")[2].split()
    assert begun["start_ticks"] == int(stat[19])
    (either.work() / "go").touch()
    ended = either.comes_to("exited")
    record = ended["exit"]
    known = {"code": 3, "signal": None, "reason": "exited", "tail": "out\nerr\n", "gpus": 0}
    assert {name: record[name] for name in known} == known
    assert min(record["seconds"], record["max_rss_mb"]) > 0
    assert (ended["log_size"], ended["pid"]) == (len("out\nerr\n"), begun["pid"])


def test_a_log_is_whole_however_fast_it_grows_and_who_writes_it(either: Machine) -> None:
    """Much more than its pipe holds, the last of it by what outlives the command and is asked to end."""
    script = (
        "trap '' TERM; (trap 'seq 9000000 9020000; exit' TERM; while :; do :; done) & "
        "seq 1000000 1900000; echo two >/dev/stderr; echo three >/dev/stdout; echo four | tee /dev/stderr"
    )
    either.sh(script)
    record = either.comes_to("exited")["exit"]
    lines = (either.folder() / "log").read_text().splitlines()
    told = ["two", "three", "four", "four"]
    assert lines == [
        *map(str, range(1_000_000, 1_900_001)),
        *told,
        *map(str, range(9_000_000, 9_020_001)),
    ]
    assert (record["code"], record["tail"][-8:]) == (0, "9020000\n")


NO_IMPORTS = """

class TooLate:
    def find_spec(self, name, path=None, target=None):
        raise ImportError("too late for " + name)


def daemonize(self, really=Supervisor.daemonize):
    really(self)
    for name in set(sys.modules) & {"pwd", "resource", "shutil", "traceback", "ctypes"}:
        assert name in ("pwd", "resource", "ctypes"), name
    sys.meta_path.insert(0, TooLate())


Supervisor.daemonize = daemonize
"""
"""For the end of the runner's text: as if another Python were there by the time that the supervisor has settled."""


@pytest.fixture
def replaced(either: Machine) -> Machine:
    either.source += NO_IMPORTS
    return either


def ended_without_complaint(either: Machine, epoch: int) -> dict[str, Any]:
    def is_over() -> Any:
        return either.complaints(epoch=epoch) or either.status(epoch=epoch)["state"] == "exited"

    wait_until(is_over, "its end")
    assert either.complaints(epoch=epoch) == ""
    return either.status(epoch=epoch)["exit"]


def test_a_supervisor_imports_nothing_once_it_has_settled(replaced: Machine) -> None:
    """However its command ends, and where its files cannot be laid out, or it has to complain."""
    file = {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    saved = json.dumps({"step": 7, "files": {"w": file}})
    utf_16 = "printf '\\377\\376{\\000}\\000' > outputs/odd/manifest.json"
    script = f"mkdir -p outputs/odd outputs/7; >outputs/7/w; echo '{saved}' > outputs/7/manifest.json; {utf_16}"
    replaced.sh(script + "; sleep 600 & echo é; exit 3", secrets={"TOKEN": "x"})
    record = ended_without_complaint(replaced, 1)
    assert (record["code"], record["tail"], record["leftovers"]) == (3, "é\n", 1)
    assert (record["checkpoints"], record["step"]) == (1, 7)
    deaf = "trap '' TERM; while :; do sleep 0.05; done"
    for epoch, limits, reason in ((2, {"time_seconds": 0.2}, "time_limit"), (3, {}, "cancelled")):
        replaced.sh(deaf, limits={**limits, "grace_seconds": 0}, epoch=epoch)
        if not limits:
            replaced.ask("kill", job="job", epoch=epoch, grace=0)
        record = ended_without_complaint(replaced, epoch)
        assert (record["reason"], record["signal"]) == (reason, 9)
    (sha,) = replaced.put(b"x")
    replaced.sh("true", spec_files={"a": [sha, 0o644, 1], "a/b": [sha, 0o644, 1]}, epoch=4)
    told = replaced.comes_to("refused", epoch=4)["refused"]
    assert "files cannot be laid" in told["message"]
    assert not replaced.work(epoch=4).exists()
    replaced.source += "\n\ndef watch(self):\n    {}['nothing']\n\n\nSupervisor.watch = watch\n"
    replaced.sh("true", epoch=5)
    said = wait_until(lambda: replaced.complaints(epoch=5), "its complaint")
    assert said.startswith("KeyError at run+")
    assert "watch+1: 'nothing'" in said


def test_a_repeated_launch_returns_the_state_and_starts_nothing(either: Machine) -> None:
    assert either.status()["state"] == "absent"
    for _ in range(2):
        assert either.ask("void", job="job", epoch=1)["state"] == "voided"
        assert either.sh("touch /tmp/never")["state"] == "voided"
    assert not either.work().exists()
    script = "echo started >> starts; until [ -e go ]; do sleep 0.02; done"
    first = either.sh(script, epoch=2)
    again = either.sh("echo another >> starts", epoch=2)
    assert again["pid"] == first["pid"]
    assert either.ask("void", job="job", epoch=2)["state"] == "running"
    with pytest.raises(Refused, match="still_running"):
        either.ask("forget", job="job", epoch=2)
    (either.work(epoch=2) / "go").touch()
    assert either.comes_to("exited", epoch=2)["exit"]["code"] == 0
    assert either.ask("void", job="job", epoch=2)["state"] == "exited"
    assert either.sh(script, epoch=2)["state"] == "exited"
    assert (either.work(epoch=2) / "starts").read_text() == "started\n"


def test_a_lower_epoch_is_refused_and_a_forgotten_one_stays_so(either: Machine) -> None:
    either.ask("void", job="job", epoch=5)
    late = either.sh("true", epoch=4)
    assert (late["state"], late["refused"]["code"]) == ("refused", "lower_epoch")
    assert not either.folder(epoch=4).exists()
    assert either.sh("true", job="other", epoch=1)["state"] in ("running", "exited")
    either.sh("true", epoch=6)
    either.comes_to("exited", epoch=6)
    for _ in range(2):
        assert either.ask("forget", job="job", epoch=6)["ok"]
    late = either.sh("touch /tmp/never", epoch=6)
    assert (late["state"], late["refused"]["code"]) == ("refused", "lower_epoch")
    assert not either.folder(epoch=6).exists()


def test_the_environment_of_a_command(either: Machine) -> None:
    own = {"TERM": "xterm", "SECRET_OF_THE_LOGIN": "x", "CUDA_VISIBLE_DEVICES": "7"}
    either.environment.update(own)
    program = either.home / "venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nexec env -0\n")
    program.chmod(0o755)
    given = {
        "ATTEMPT": "0", "PREVIOUS_FAILURE": "", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip
    more: dict[str, Any] = {"spec_environment": {"MINE": "a b\n$(id)"}, "environment": given}
    more["spec_artefacts"] = ["results/last", "outputs"]
    either.launch("python", python=str(program), rank=1, members=2, **more)
    either.comes_to("exited")
    entries = (either.folder() / "log").read_text().split("\0")
    seen = dict(entry.split("=", 1) for entry in entries if entry)
    folders = [
        str(either.folder() / "bin"),
        str(program.parent),
        *either.environment["PATH"].split(":"),
    ]
    assert seen.pop("PATH").split(":")[: len(folders)] == folders
    for name in ("USER", "LOGNAME"):
        assert seen.pop(name)
    seen.pop("PWD", None)  # the shell's own
    assert seen == {
        **given, "HOME": str(either.home), "LANG": "C.UTF-8", "MINE": "a b\n$(id)",
        "NODE_RANK": "1", "NNODES": "2", "GROUPWISE_RENDEZVOUS": "job.1",
        "GROUPWISE_ATTEMPT": "job.1", "GROUPWISE_RUNNER_FOLDER": str(either.folder()),
        "GROUPWISE_OUTPUT": str(either.work() / "results" / "last"),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    assert (either.work() / "results").is_dir()
    ours = set(seen) - {"MINE", "LANG", "PYTHONUNBUFFERED"}
    assert {n for n in ours if not spec.problems(spec.JobSpec(("x",), {n: ""}))} == set()


SHOWS = 'import sys; print(sys.prefix, sys.executable, *sys.argv[1:], sep="|")'


def test_python_and_python3_are_the_interpreter_of_the_machine(here: Machine) -> None:
    """Also where its folder has only one of the two or neither, where PATH has others, and where it is a virtual environment."""
    plain = here.home / "it's plain" / "python3.x"
    plain.parent.mkdir()
    plain.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    plain.chmod(0o755)
    plain.with_name("python3").symlink_to("/bin/false")
    venv = here.home / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (venv / "bin" / "python3").unlink()
    script = here.home / "script"
    script.write_text(f"#!/usr/bin/env python3\n{SHOWS}\n")
    script.chmod(0o755)
    words = f"python -c '{SHOWS}' 'a b'; python3 -c '{SHOWS}'; {script}"
    for number, (python, prefix) in enumerate(
        ((plain, sys.prefix), (venv / "bin" / "python", str(venv)))
    ):
        for command, count in ((("sh", "-c", words), 3), (("python", "-c", SHOWS, "a b"), 1)):
            epoch = 10 * number + 4 - count
            here.launch(*command, python=str(python), epoch=epoch)
            here.comes_to("exited", epoch=epoch)
            lines = (here.folder(epoch=epoch) / "log").read_text().splitlines()
            assert [line.split("|")[0] for line in lines] == [prefix] * count, lines
            assert lines[0].endswith("|a b"), lines
    missing = here.launch("python3", python="/nowhere/python", epoch=20)
    assert missing["refused"]["code"] == "unknown_program"
    assert "/nowhere/python" in missing["refused"]["message"]


def test_secrets_are_in_no_file_and_no_argument(either: Machine) -> None:
    canary = "canary-7d1f"
    script = 'echo "${#TOKEN}"; until [ -e go ]; do sleep 0.02; done'
    either.sh(script, spec_secrets=["TOKEN"], secrets={"TOKEN": canary})
    supervisor = either.state()["supervisor"]
    for told in (
        f"{supervisor}/cmdline",
        f"{either.status()['pid']}/cmdline",
        f"{supervisor}/environ",
    ):
        assert canary.encode() not in Path("/proc", told).read_bytes()
    (either.work() / "go").touch()
    ended = either.comes_to("exited")
    assert ended["exit"]["tail"] == f"{len(canary)}\n"
    assert canary not in json.dumps([ended, either.ask("observe"), either.state()])
    files = [path for path in either.root.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if canary.encode() in path.read_bytes()] == []


CANNOT_RUN: list[tuple[dict[str, Any], str, str]] = [
    ({"spec_environment": {"LD_PRELOAD": "x"}}, "bad_spec", "LD_PRELOAD"),
    ({"spec_environment": {"GROUPWISE_ATTEMPT": "other.1"}}, "bad_spec", "GROUPWISE_ATTEMPT"),
    ({"secrets": {"GROUPWISE_RENDEZVOUS": "x"}}, "bad_spec", "GROUPWISE_RENDEZVOUS"),
    ({"spec_environment": {"A=B": "x"}}, "bad_spec", "A=B"), ({"spec_secrets": ["TOKEN"]}, "bad_spec", "TOKEN"),
    ({"spec_artefacts": ["../../secret"]}, "bad_spec", "secret"), ({"spec_checkpoints": ["/etc"]}, "bad_spec", "/etc"),
    ({"spec_files": {"../x": ["0" * 64, 0o644, 1]}}, "bad_spec", "../x"), ({"limits": {"ram_mb": 10**9}}, "ram", "memory"),
    ({"limits": {"disk_mb": 10**11}}, "disk_full", "free"), ({"gpus": ["GPU-none"]}, "gpu_missing", "GPU-none"),
]  # fmt: skip


def test_a_launch_that_cannot_run_is_refused_every_time(here: Machine) -> None:
    for epoch, (fields, code, words) in enumerate(CANNOT_RUN, 1):
        told = here.launch("true", epoch=epoch, **fields)
        assert (told["state"], told["refused"]["code"]) == ("refused", code), fields
        assert words in told["refused"]["message"]
        assert here.launch("true", epoch=epoch)["refused"] == told["refused"]
        assert here.ask("void", job="job", epoch=epoch)["state"] == "refused"
        assert not here.work(epoch=epoch).exists()


def test_a_program_that_is_not_there_or_cannot_be_executed(either: Machine) -> None:
    assert either.launch("no-such-program")["refused"]["code"] == "unknown_program"
    assert either.launch("/no/such/program", epoch=2)["refused"]["code"] == "unknown_program"
    # One below the working folder may come with the files of the job: it is found out at the start.
    (sha,) = either.put(b"no program\n")
    for epoch, files, code in ((3, {}, 127), (4, {"mine": [sha, 0o755, 11]}, 126)):
        either.launch("./mine", epoch=epoch, spec_files=files)
        record = either.comes_to("exited", epoch=epoch)["exit"]
        assert (record["reason"], record["code"]) == ("spawn_failed", code)


def test_wait_answers_on_a_change_and_ends_when_the_caller_disconnects(either: Machine) -> None:
    either.sh(
        "until [ -e go ]; do sleep 0.02; done; echo word; until [ -e on ]; do sleep 0.02; done"
    )
    known = {"job.1": {"state": "running", "log_size": 0, "checkpoints": 0}}
    (same,) = either.ask("wait", known=known, timeout=0.2)["attempts"]
    assert same["state"] == "running"
    waiting = either.begin(request(either.body("wait", known=known, timeout=60, quiet=0)))
    (either.work() / "go").touch()
    (found,) = either.finish(waiting)["attempts"]
    assert found["log_size"] == 5
    known["job.1"]["log_size"] = 5
    waiting, left = (
        either.begin(request(either.body("wait", known=known, timeout=60))) for _ in range(2)
    )
    assert left.stdout is not None
    assert left.stderr is not None
    left.stdout.close()
    left.stderr.close()
    assert left.wait(20) == 0
    (either.work() / "on").touch()
    assert either.finish(waiting)["attempts"][0]["state"] == "exited"


def test_observe_tells_of_attempts_and_of_strangers(either: Machine) -> None:
    either.sh("until [ -e go ]; do sleep 0.02; done")
    either.ask("void", job="other", epoch=2)
    (either.root / "attempts" / "strange").mkdir()
    stray, elsewhere = (
        subprocess.Popen(
            ["sleep", "60"],
            env={"GROUPWISE_ATTEMPT": name, "GROUPWISE_RUNNER_FOLDER": f"{root}/attempts/{name}"},
        )
        for name, root in (("gone.7", either.root), ("gone.8", "/other"))
    )
    try:
        seen = wait_until(
            lambda: found if len((found := either.ask("observe"))["quarantined"]) > 1 else None
        )
    finally:
        for process in (stray, elsewhere):
            process.kill()
            process.wait()
    told = [(a["job"], a["state"]) for a in seen["attempts"]]
    assert told == [("job", "running"), ("other", "voided")]
    assert (seen["probe"]["status"], seen["gpus"]) == ("absent", [])
    assert [q for q in seen["quarantined"] if q.get("pid") in (None, stray.pid, elsewhere.pid)] == [
        {"what": "folder", "detail": "strange"},
        {"what": "process", "detail": "gone.7", "pid": stray.pid},
    ]
    assert seen["ram_free_mb"] > 0
    bytes_here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert seen["ram_mb"] == pytest.approx(bytes_here / 1e6, rel=0.02)
    free_here = shutil.disk_usage(either.root).free
    assert seen["disk_free_mb"] == pytest.approx(free_here / 1e6, rel=0.02)


def test_the_channel_closes_while_the_command_runs(either: Machine) -> None:
    """The harness reads to the end of the streams."""
    pid = either.sh("until [ -e go ]; do sleep 0.02; done")["pid"]
    assert not is_gone(pid)
    supervisor = either.state()["supervisor"]

    def held(process: int) -> dict[str, str]:
        folder = f"/proc/{process}/fd"
        return {fd: os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)}

    said, heard = held(pid), held(supervisor)
    complaints = str(either.folder() / "supervisor.err")
    assert [heard[fd] for fd in "012"] == [os.devnull, os.devnull, complaints]
    assert (said["0"], said["1"]) == (os.devnull, said["2"])
    assert list(heard.values()).count(said["1"]) == 2
    assert os.getsid(supervisor) != os.getsid(0)
    assert os.getsid(pid) == pid


def test_leftover_processes_of_a_command_are_ended_and_counted(either: Machine) -> None:
    """Not what goes with it by itself, or was ended together with it."""
    either.sh("nohup sleep 600 & sleep 600 & exit 0")
    record = either.comes_to("exited")["exit"]
    assert (record["code"], record["leftovers"]) == (0, 2)
    either.sh("sleep 600 & wait", epoch=2)
    either.ask("kill", job="job", epoch=2, grace=0)
    assert either.comes_to("exited", epoch=2)["exit"]["leftovers"] == 0
    either.source = either.source.replace(
        "HELPER_EXIT_SECONDS = 0.3\n", "HELPER_EXIT_SECONDS = 60.0\n"
    )
    either.sh("sleep 0.2 & exit 0", epoch=3)
    record = either.comes_to("exited", epoch=3)["exit"]
    assert (record["code"], record["leftovers"]) == (0, 0)
