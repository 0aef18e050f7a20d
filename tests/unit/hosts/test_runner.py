"""The protocol, spoken to the real runner on this machine, with this Python and with the oldest that is promised.

1. A request that was cut or changed on its way does nothing.
2. A launch that is repeated starts nothing; the state is told.
3. Of launch and void for one epoch, the first decides; a lower epoch is refused, and a forgotten one.
4. pid, start ticks and boot id are on disk before the command begins.
5. Whatever the end was, there is an exit record that says so, with the end of the log.
6. The channel of a launch closes while the command runs.
7. The command sees the promised environment, and nothing of the spec is ever read by a shell.
8. Secrets reach the command and no file.
9. A supervisor that has settled needs nothing more of the Python that it began with.
"""

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.hosts import runner, spec
from tests.runner_machine import EVERY_PYTHON, Machine, Refused, alive, machine, request, until


@pytest.fixture(params=EVERY_PYTHON)
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    with machine(tmp_path, request.param) as made:
        yield made


@pytest.fixture
def new(tmp_path: Path) -> Iterator[Machine]:
    """One that has never been asked."""
    with machine(tmp_path, new=True) as made:
        yield made


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Machine]:
    """For what does not depend on the Python."""
    with machine(tmp_path) as made:
        yield made


def test_what_jobs_may_not_set_is_the_same_on_both_sides() -> None:
    assert runner.RESERVED_NAMES == spec.RESERVED_NAMES
    assert runner.RESERVED_PREFIXES == spec.RESERVED_PREFIXES
    assert runner.JOB_ID.pattern == spec.JOB_ID.pattern
    assert runner.ENVIRONMENT_NAME.pattern == spec.ENVIRONMENT_NAME.pattern
    assert runner.SHA256.pattern == spec.SHA256.pattern
    assert runner.ATTEMPT_VARIABLE == spec.ATTEMPT_VARIABLE
    assert runner.MOST_ARTEFACTS == spec.MOST_ARTEFACTS


def test_hello(here: Machine) -> None:
    told = here.ask("hello")
    assert (told["protocols"], told["root"]) == ([1], str(here.root))
    assert told["methods"][-1] == "session"
    assert told["cpus"] > 0
    assert told["ram_mb"] > 100
    assert told["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert here.ask("hello", root="fleet")["root"] == str(here.home / "fleet")
    assert here.ask("hello", root="~/other")["root"] == str(here.home / "other")


def test_a_damaged_runner_is_replaced_not_run(new: Machine) -> None:
    new.ask("hello")
    stored = new.root / "runners" / f"{new.sha}.py"
    stored.write_text("raise SystemExit('not this new')\n")
    for cache in stored.parent.glob("*.bin"):
        cache.write_bytes(b"\0" * 500)
    assert new.ask("hello")["ok"]
    assert stored.read_text() == new.source


def test_another_runner_than_the_named_one_is_refused(new: Machine) -> None:
    with pytest.raises(Refused, match="bad_runner"):
        new.ask("hello", source="def answer_request(body, payload): raise SystemExit\n")
    assert not (new.root / "runners").exists()


def test_a_request_that_was_cut_or_changed_does_nothing(here: Machine) -> None:
    whole = request(here.body("void", job="job", epoch=1))
    changed = whole.replace(b'"job": "job"', b'"job": "jab"')
    for data in (b"", whole[: len(whole) // 3], whole[:-1], changed):
        with pytest.raises(Refused, match="truncated"):
            here.finish(here.begin(data))
    assert not (here.root / "attempts").exists()


def test_ill_formed_requests_are_refused_and_do_nothing(one: Machine) -> None:
    ill: list[tuple[dict[str, Any], str]] = [
        ({"verb": "explode"}, "unknown_verb"),
        ({"protocol": 2}, "protocol"),
    ]
    ill += [({"job": job}, "bad_request") for job in ("../up", ".hidden", "a/b", "a" * 81, 7)]
    ill += [({"epoch": epoch}, "bad_request") for epoch in (-1, "1", True)]
    for fields, code in (*ill, ({"verb": None}, "bad_request")):
        with pytest.raises(Refused) as refused:
            one.ask(**{"verb": "void", "job": "job", "epoch": 1, **fields})
        assert refused.value.code == code, fields
    assert not (one.root / "attempts").exists()


def test_a_command_runs_and_its_end_is_on_record(here: Machine) -> None:
    begun = here.sh("echo out; echo err >&2; until [ -e go ]; do sleep 0.02; done; exit 3", rank=2)
    assert begun["state"] == "running"
    assert begun["rank"] == 2
    assert begun["same_boot"]
    assert begun["heartbeat_age"] < 5
    stat = Path(f"/proc/{begun['pid']}/stat").read_text().rpartition(")")[2].split()
    assert begun["start_ticks"] == int(stat[19])
    (here.work() / "go").touch()
    ended = here.comes_to("exited")
    record = ended["exit"]
    assert (record["code"], record["signal"], record["reason"]) == (3, None, "exited")
    assert record["tail"] == "out\nerr\n"
    assert record["gpus"] == 0
    assert record["seconds"] > 0
    assert record["max_rss_mb"] > 0
    assert ended["log_size"] == len("out\nerr\n")
    assert ended["pid"] == begun["pid"]


def test_who_writes_to_dev_stderr_empties_no_log(here: Machine) -> None:
    here.sh("echo one; echo two >/dev/stderr; echo three >/dev/stdout; echo four | tee /dev/stderr")
    assert here.comes_to("exited")["exit"]["tail"] == "one\ntwo\nthree\nfour\nfour\n"
    assert (here.folder() / "log").read_text() == "one\ntwo\nthree\nfour\nfour\n"


def test_a_log_is_whole_however_fast_it_grows_and_who_writes_it(here: Machine) -> None:
    """Much more than its pipe holds, the last of it by what outlives the command and is asked to end."""
    script = (
        "trap '' TERM; (trap 'seq 9000000 9020000; exit' TERM; while :; do :; done) & "
        "seq 1000000 1900000"
    )
    here.sh(script)
    record = here.comes_to("exited")["exit"]
    lines = (here.folder() / "log").read_text().splitlines()
    assert lines == [str(n) for n in (*range(1_000_000, 1_900_001), *range(9_000_000, 9_020_001))]
    assert (record["code"], record["tail"][-8:]) == (0, "9020000\n")


def test_what_a_command_left_behind_is_ended_and_counted(here: Machine) -> None:
    """Not what goes with it by itself, or was ended together with it."""
    here.sh("nohup sleep 600 & sleep 600 & exit 0")
    record = here.comes_to("exited")["exit"]
    assert (record["code"], record["leftovers"]) == (0, 2)
    here.sh("sleep 600 & wait", epoch=2)
    here.ask("kill", job="job", epoch=2, grace=0)
    assert here.comes_to("exited", epoch=2)["exit"]["leftovers"] == 0
    here.source = here.source.replace("LEAVING = 0.3\n", "LEAVING = 60.0\n")
    here.sh("sleep 0.2 & exit 0", epoch=3)
    record = here.comes_to("exited", epoch=3)["exit"]
    assert (record["code"], record["leftovers"]) == (0, 0)


NO_IMPORTS = """

class TooLate:
    def find_spec(self, name, path=None, target=None):
        raise ImportError("too late for " + name)


def settle(self, really=Supervisor.settle):
    really(self)
    for name in set(sys.modules) & {"pwd", "resource", "shutil", "traceback", "ctypes"}:
        assert name in ("pwd", "resource", "ctypes"), name
    sys.meta_path.insert(0, TooLate())


Supervisor.settle = settle
"""
"""For the end of the runner's text: as if another Python were there by the time that the supervisor has settled."""


@pytest.fixture
def replaced(here: Machine) -> Machine:
    here.source += NO_IMPORTS
    return here


def ended_without_complaint(here: Machine, epoch: int) -> dict[str, Any]:
    def is_over() -> Any:
        return here.complaints(epoch=epoch) or here.status(epoch=epoch)["state"] == "exited"

    until(is_over, "its end")
    assert here.complaints(epoch=epoch) == ""
    return here.status(epoch=epoch)["exit"]


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
    assert "its files cannot be laid out" in told["message"]
    assert not replaced.work(epoch=4).exists()
    replaced.source += "\n\ndef watch(self):\n    {}['nothing']\n\n\nSupervisor.watch = watch\n"
    replaced.sh("true", epoch=5)
    said = until(lambda: replaced.complaints(epoch=5), "its complaint")
    assert said.startswith("KeyError at ")
    assert "'nothing'" in said


def test_launch_again_tells_the_state_and_starts_nothing(here: Machine) -> None:
    script = "echo started >> starts; until [ -e go ]; do sleep 0.02; done"
    first = here.sh(script)
    again = here.sh("echo another >> starts")
    assert again["pid"] == first["pid"]
    (here.work() / "go").touch()
    here.comes_to("exited")
    assert here.sh(script)["state"] == "exited"
    assert (here.work() / "starts").read_text() == "started\n"


def test_what_was_voided_never_runs_and_what_runs_is_not_voided_or_forgotten(here: Machine) -> None:
    assert here.status()["state"] == "absent"
    for _ in range(2):
        assert here.ask("void", job="job", epoch=1)["state"] == "voided"
        assert here.sh("touch /tmp/never")["state"] == "voided"
    assert not here.work().exists()
    here.sh("until [ -e go ]; do sleep 0.02; done", epoch=2)
    assert here.ask("void", job="job", epoch=2)["state"] == "running"
    with pytest.raises(Refused, match="still_running"):
        here.ask("forget", job="job", epoch=2)
    (here.work(epoch=2) / "go").touch()
    assert here.comes_to("exited", epoch=2)["exit"]["code"] == 0
    assert here.ask("void", job="job", epoch=2)["state"] == "exited"


def test_a_lower_epoch_is_refused_and_a_forgotten_one_stays_so(here: Machine) -> None:
    here.ask("void", job="job", epoch=5)
    late = here.sh("true", epoch=4)
    assert (late["state"], late["refused"]["code"]) == ("refused", "lower_epoch")
    assert not here.folder(epoch=4).exists()
    assert here.sh("true", job="other", epoch=1)["state"] in ("running", "exited")
    here.sh("true", epoch=6)
    here.comes_to("exited", epoch=6)
    for _ in range(2):
        assert here.ask("forget", job="job", epoch=6)["ok"]
    late = here.sh("touch /tmp/never", epoch=6)
    assert (late["state"], late["refused"]["code"]) == ("refused", "lower_epoch")
    assert not here.folder(epoch=6).exists()


def test_the_environment_of_a_command(here: Machine) -> None:
    here.environment.update(
        {"TERM": "xterm", "SECRET_OF_THE_LOGIN": "x", "CUDA_VISIBLE_DEVICES": "7"}
    )
    program = here.home / "venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nexec env -0\n")
    program.chmod(0o755)
    here.launch(
        "python",
        python=str(program),
        rank=1,
        members=2,
        spec_environment={"MINE": "a b\n$(id)"},
        environment={
            "ATTEMPT": "0",
            "PREVIOUS_FAILURE": "",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "29500",
        },
        spec_artefacts=["results/last", "outputs"],
    )
    here.comes_to("exited")
    seen = dict(
        entry.split("=", 1) for entry in (here.folder() / "log").read_text().split("\0") if entry
    )
    assert seen.pop("PATH").split(":")[0] == str(program.parent)
    for name in ("USER", "LOGNAME"):
        assert seen.pop(name)
    seen.pop("PWD", None)  # the shell's own
    assert seen == {
        "HOME": str(here.home),
        "LANG": "C.UTF-8",
        "MINE": "a b\n$(id)",
        "ATTEMPT": "0",
        "PREVIOUS_FAILURE": "",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "NODE_RANK": "1",
        "NNODES": "2",
        "GROUPWISE_RENDEZVOUS": "job.1",
        "GROUPWISE_ATTEMPT": "job.1",
        "GROUPWISE_RUNNER_FOLDER": str(here.folder()),
        "GROUPWISE_OUTPUT": str(here.work() / "results" / "last"),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
    }
    assert (here.work() / "results").is_dir()
    ours = set(seen) - {"MINE", "LANG", "PYTHONUNBUFFERED"}
    assert {n for n in ours if not spec.problems(spec.JobSpec(("x",), {n: ""}))} == set()


def test_the_channel_closes_while_the_command_runs(here: Machine) -> None:
    begun = here.sh(
        "until [ -e go ]; do sleep 0.02; done"
    )  # the harness reads to the end of the streams
    assert alive(begun["pid"])
    supervisor = here.state()["supervisor"]
    nothing, complaints = os.devnull, str(here.folder() / "supervisor.err")
    said = [os.readlink(f"/proc/{begun['pid']}/fd/{fd}") for fd in (1, 2)]
    heard = [os.readlink(f"/proc/{supervisor}/fd/{fd}") for fd in os.listdir(f"/proc/{supervisor}/fd")]  # fmt: skip
    assert [os.readlink(f"/proc/{supervisor}/fd/{fd}") for fd in (0, 1, 2)] == [nothing, nothing, complaints]  # fmt: skip
    assert said[0] == said[1]
    assert heard.count(said[0]) == 2
    assert os.readlink(f"/proc/{begun['pid']}/fd/0") == nothing
    assert os.getsid(supervisor) != os.getsid(0)
    assert os.getsid(begun["pid"]) == begun["pid"]


def test_secrets_are_in_no_file_and_no_argument(here: Machine) -> None:
    canary = "canary-7d1f"
    here.sh(
        'echo "${#TOKEN}"; until [ -e go ]; do sleep 0.02; done',
        spec_secrets=["TOKEN"],
        secrets={"TOKEN": canary},
    )
    supervisor = here.state()["supervisor"]
    for pid in (supervisor, here.status()["pid"]):
        assert canary.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert canary.encode() not in Path(f"/proc/{supervisor}/environ").read_bytes()
    (here.work() / "go").touch()
    ended = here.comes_to("exited")
    assert ended["exit"]["tail"] == f"{len(canary)}\n"
    assert canary not in json.dumps([ended, here.ask("observe"), here.state()])
    files = [path for path in here.root.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if canary.encode() in path.read_bytes()] == []


CANNOT_RUN: list[tuple[dict[str, Any], str, str]] = [
    ({"spec_environment": {"LD_PRELOAD": "x"}}, "bad_spec", "LD_PRELOAD"),
    ({"spec_environment": {"PATH": "x"}}, "bad_spec", "PATH"),
    ({"spec_environment": {"GROUPWISE_ATTEMPT": "other.1"}}, "bad_spec", "GROUPWISE_ATTEMPT"),
    ({"spec_environment": {"GROUPWISE_OUTPUT": "/x"}}, "bad_spec", "GROUPWISE_OUTPUT"),
    ({"secrets": {"GROUPWISE_RENDEZVOUS": "x"}}, "bad_spec", "GROUPWISE_RENDEZVOUS"),
    ({"spec_environment": {"A=B": "x"}}, "bad_spec", "A=B"),
    ({"secrets": {"BASH_ENV": "x"}}, "bad_spec", "BASH_ENV"),
    ({"spec_secrets": ["TOKEN"]}, "bad_spec", "TOKEN"),
    ({"spec_artefacts": ["../../secret"]}, "bad_spec", "secret"),
    ({"spec_checkpoints": ["/etc"]}, "bad_spec", "/etc"),
    ({"spec_files": {"../x": ["0" * 64, 0o644, 1]}}, "bad_spec", "../x"),
    ({"limits": {"ram_mb": 10**9}}, "ram", "memory"),
    ({"limits": {"disk_mb": 10**11}}, "disk_full", "free"),
    ({"limits": {"time_seconds": "long"}}, "bad_spec", "time_seconds"),
    ({"gpus": ["GPU-none"]}, "gpu_missing", "GPU-none"),
]


def test_what_cannot_run_is_refused_for_good(one: Machine) -> None:
    for epoch, (fields, code, words) in enumerate(CANNOT_RUN, 1):
        told = one.launch("true", epoch=epoch, **fields)
        assert (told["state"], told["refused"]["code"]) == ("refused", code), fields
        assert words in told["refused"]["message"]
        assert one.launch("true", epoch=epoch)["refused"] == told["refused"]
        assert one.ask("void", job="job", epoch=epoch)["state"] == "refused"
        assert not one.work(epoch=epoch).exists()


def test_a_program_that_is_not_there_or_cannot_be_executed(here: Machine) -> None:
    assert here.launch("no-such-program")["refused"]["code"] == "unknown_program"
    assert here.launch("/no/such/program", epoch=2)["refused"]["code"] == "unknown_program"
    # One below the working folder may come with the files of the job: it is found out at the start.
    (sha,) = here.put(b"no program\n")
    for epoch, files, code in ((3, {}, 127), (4, {"mine": [sha, 0o755, 11]}, 126)):
        here.launch("./mine", epoch=epoch, spec_files=files)
        record = here.comes_to("exited", epoch=epoch)["exit"]
        assert (record["reason"], record["code"]) == ("spawn_failed", code)


def test_wait_answers_when_something_changes(here: Machine) -> None:
    here.sh("until [ -e go ]; do sleep 0.02; done; echo word; until [ -e on ]; do sleep 0.02; done")
    known = {"job.1": {"state": "running", "log_size": 0, "checkpoints": 0}}
    (same,) = here.ask("wait", known=known, timeout=0.2)["attempts"]
    assert same["state"] == "running"
    waiting = here.begin(request(here.body("wait", known=known, timeout=60, quiet=0)))
    (here.work() / "go").touch()
    (found,) = here.finish(waiting)["attempts"]
    assert found["log_size"] == 5
    known["job.1"]["log_size"] = 5
    waiting = here.begin(request(here.body("wait", known=known, timeout=60)))
    (here.work() / "on").touch()
    assert here.finish(waiting)["attempts"][0]["state"] == "exited"


def test_wait_ends_when_nobody_listens(one: Machine) -> None:
    one.sh("until [ -e go ]; do sleep 0.02; done")
    waiting = one.begin(
        request(one.body("wait", known={"job.1": {"state": "running"}}, timeout=600))
    )
    assert waiting.stdout is not None
    assert waiting.stderr is not None
    waiting.stdout.close()
    waiting.stderr.close()
    assert waiting.wait(20) == 0


def test_observe_tells_of_attempts_and_of_strangers(here: Machine) -> None:
    here.sh("until [ -e go ]; do sleep 0.02; done")
    here.ask("void", job="other", epoch=2)
    (here.root / "attempts" / "strange").mkdir()
    stray = subprocess.Popen(
        ["sleep", "60"],
        env={
            "GROUPWISE_ATTEMPT": "gone.7",
            "GROUPWISE_RUNNER_FOLDER": str(here.root / "attempts/gone.7"),
        },
    )
    elsewhere = subprocess.Popen(
        ["sleep", "60"],
        env={"GROUPWISE_ATTEMPT": "gone.8", "GROUPWISE_RUNNER_FOLDER": "/other/attempts/gone.8"},
    )
    try:
        seen = until(
            lambda: found if len((found := here.ask("observe"))["quarantined"]) > 1 else None
        )
    finally:
        for process in (stray, elsewhere):
            process.kill()
            process.wait()
    assert [(a["job"], a["state"]) for a in seen["attempts"]] == [
        ("job", "running"),
        ("other", "voided"),
    ]
    assert seen["probe"]["status"] == "absent"
    assert seen["gpus"] == []
    assert [q for q in seen["quarantined"] if q.get("pid") in (None, stray.pid, elsewhere.pid)] == [
        {"what": "folder", "detail": "strange"},
        {"what": "process", "detail": "gone.7", "pid": stray.pid},
    ]
    assert seen["ram_free_mb"] > 0
