"""The runner under faults: every process killed, races, full disks, commands that do not end.

1. A supervisor that is killed leaves `lost`, never an exit record that nobody saw happen; its command dies with it.
2. A folder whose launch died before the command began is taken over; one whose command may have begun never is.
3. Of many launches and voids at once exactly one decides.
4. The end of an attempt is the end of everything that it started, however well hidden, and of nothing else.
5. A pid that means another process by now is never signalled.
6. A full disk costs an answer, never the truth: no torn file, no command without a record, no lost exit record.
"""

import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import groupwise
from groupwise.jobs.hosts.runner.attempt_folder import RESERVE, claim
from groupwise.jobs.hosts.runner.cgroups import (
    current_cgroups,
    remove_cgroup,
    supervision_methods,
)
from groupwise.jobs.hosts.runner.command import run_child
from groupwise.jobs.hosts.runner.files import TAIL, read_json, set_cell, write_json
from groupwise.jobs.hosts.runner.launch_request import LaunchRequest
from groupwise.jobs.hosts.runner.processes import boot_clock, read_process, send_signal
from groupwise.jobs.hosts.runner.protocol import RequestRejected, as_bytes
from groupwise.jobs.hosts.runner.requests import VERBS
from groupwise.jobs.hosts.runner.root import SPARE, Attempt, Root
from groupwise.jobs.hosts.runner.supervisor import Supervisor, save_exit
from tests.disks import fill, small_disk
from tests.processes import is_gone, wait_until
from tests.runner_machine import Machine, Refused, machine, request

GPU = "GPU-aaaaaaaa-0000"
FOR_EVER = "while :; do sleep 0.05; done"
DAEMON = """
import os, signal, sys, time
for n in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(n, signal.SIG_IGN)
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
os.closerange(0, 256)
with open(sys.argv[1] + ".new", "w") as file:
    file.write("%d\\n" % os.getpid())
os.rename(sys.argv[1] + ".new", sys.argv[1])
while True:
    time.sleep(1)
"""
"""A process that does all it can to be forgotten: twice orphaned, session of its own, no file open, deaf to TERM."""

QUIET = """
import os, sys, time
for name in os.listdir("/proc/self/fd"):
    held = "/proc/self/fd/" + name
    if os.path.exists(held) and not os.readlink(held).startswith(sys.argv[1]):
        os.close(int(name))
with open("quiet.new", "w") as file:
    file.write("%d\\n" % os.getpid())
os.rename("quiet.new", "quiet")
while True:
    time.sleep(1)
"""
"""A process that keeps nothing of what it was given but the lock of a GPU."""


@pytest.fixture
def cgroups() -> None:
    if "cgroup" not in supervision_methods():
        pytest.skip("control groups of version 2 cannot be made here")


@pytest.fixture(params=["cgroup", "session"])
def method(request: pytest.FixtureRequest) -> str:
    if request.param == "cgroup":
        request.getfixturevalue("cgroups")
    return request.param


def killed(here: Machine, epoch: int = 1) -> None:
    here.ask("kill", job="job", epoch=epoch, grace=0.1)


def released(here: Machine) -> dict[str, Any]:
    return here.ask("release", job="job", epoch=1, gpus=[])


def contact(here: Machine) -> float:
    """When the control plane was heard of last."""
    return float((here.folder() / "contact").read_text())


def daemon(here: Machine, name: str = "daemon", prefix: str = "") -> str:
    """Shell words that start one."""
    script = here.home / "daemon.py"
    script.write_text(DAEMON)
    return f"{prefix} {sys.executable} -IS {script} {name}"


# --- the supervisor is killed -------------------------------------------------------------------


def test_a_killed_supervisor_leaves_no_end_and_what_it_left_is_counted_and_killed(
    here: Machine, method: str
) -> None:
    begun = here.sh(f"{daemon(here)}; {FOR_EVER}", method=method)
    assert begun["method"] == method
    pid = int(here.written("daemon"))
    here.kill_supervisor()
    wait_until(lambda: is_gone(begun["pid"]), "the end of the command")
    told = wait_until(lambda: (s := here.status())["survivors"] == 1 and s, "one survivor")
    assert (told["state"], told["exit"], told["pid"]) == ("lost", None, begun["pid"])
    assert here.sh("true")["state"] == "lost"
    assert here.ask("void", job="job", epoch=1)["state"] == "lost"
    found = released(here)
    assert (found["clean"], [h["pid"] for h in found["holders"]]) == (False, [pid])
    assert here.ask("kill", job="job", epoch=1, grace=5)["survivors"] == 0
    assert is_gone(pid)
    assert released(here)["clean"]
    state = {**here.state(), "boot_id": "another"}
    (here.folder() / "state.json").write_text(json.dumps(state))
    told = here.status()
    assert (told["state"], told["same_boot"], told["heartbeat_age"]) == ("rebooted", False, None)


@pytest.mark.parametrize("shown_by", ["its control group", "what it inherited"])
def test_a_survivor_without_our_environment_is_found(
    here: Machine, request: pytest.FixtureRequest, shown_by: str
) -> None:
    if shown_by == "its control group":
        request.getfixturevalue("cgroups")
        here.sh(f"{daemon(here, prefix='env -i')}; {FOR_EVER}")
    else:
        here.sh(f"env -i sh -c 'echo $$ > daemon; {FOR_EVER}' & {FOR_EVER}", method="session")
    pid = int(here.written("daemon"))
    here.kill_supervisor()
    found = {h["what"] for h in released(here)["holders"] if h["pid"] == pid}
    assert found == {"cgroup"} if shown_by == "its control group" else found
    here.ask("kill", job="job", epoch=1, grace=5)
    assert is_gone(pid)


@pytest.mark.parametrize("share_mb", [None, 600])
def test_a_survivor_that_only_a_lock_shows_is_counted(here: Machine, share_mb: int | None) -> None:
    """It has neither our environment nor what else it was given."""
    here.with_gpus({"uuid": GPU})
    script = here.home / "quiet.py"
    script.write_text(QUIET)
    quiet = f"env -i {sys.executable} -IS {script} {here.root}/locks/"
    here.sh(f"{quiet} & {FOR_EVER}", gpus=[GPU], share_mb=share_mb, method="session")
    pid = int(here.written("quiet"))
    here.kill_supervisor()
    wait_until(lambda: here.status()["survivors"] == 1, "what is left")
    seen = here.ask("observe")["attempts"][0]
    assert (seen["state"], seen["survivors"]) == ("lost", 1)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: here.status()["survivors"] == 0, "its end")


# --- a launch that dies -------------------------------------------------------------------------


def claimed(here: Machine, epoch: int = 1) -> int:
    """As by a launch that has come no further; what it holds meanwhile."""
    attempt = Attempt(Root(str(here.root)), "job", epoch)
    lock = claim(attempt, {"phase": "claimed"})
    assert lock is not None
    return lock


def test_a_locked_claim_is_left_alone_and_an_unlocked_one_is_taken_over(
    here: Machine,
) -> None:
    lock = claimed(here)
    assert here.status()["state"] == "claimed"
    assert here.ask("void", job="job", epoch=1)["state"] == "claimed"
    assert here.sh("true")["state"] == "claimed"
    os.close(lock)
    told = here.status()
    assert (told["state"], told["pid"]) == ("lost", None)
    here.sh("exit 4")
    assert here.comes_to("exited")["exit"]["code"] == 4
    os.close(claimed(here, epoch=2))
    assert here.ask("void", job="job", epoch=2)["state"] == "voided"
    assert here.sh("true", epoch=2)["state"] == "voided"


def test_a_claim_never_takes_the_place_of_another(here: Machine) -> None:
    """Whoever comes to it, and by whatever mistake: the folder that stands there stays."""
    here.ask("void", job="job", epoch=1)
    with pytest.raises(OSError, match="not empty"):
        claimed(here)
    assert here.status()["state"] == "voided"
    assert [p.name for p in (here.root / "attempts").iterdir()] == ["job.1"]


@pytest.mark.parametrize(("word", "begins"), [(b"", False), (b"!", True)])
def test_a_command_waits_for_the_word_of_its_supervisor(
    monkeypatch: pytest.MonkeyPatch, word: bytes, begins: bool
) -> None:
    """It comes after the record is on disk; from a supervisor that dies before, only the end of the pipe comes."""
    began, ended = list[bool](), list[int]()
    monkeypatch.setattr(
        "groupwise.jobs.hosts.runner.command.exec_command", lambda *_: began.append(True)
    )
    monkeypatch.setattr("groupwise.jobs.hosts.runner.command.prctl", lambda *_: None)
    monkeypatch.setattr(os, "setsid", lambda: None)
    monkeypatch.setattr(os, "_exit", ended.append)
    go_on, go = os.pipe()
    os.write(go, word)
    os.close(go)
    try:
        run_child(None, {}, go_on, -1, -1, [])  # pyright: ignore[reportArgumentType]
    finally:
        os.close(go_on)
    assert (began, ended) == ([True] * begins, [127])


def test_exactly_one_of_many_launches_and_voids_decides(here: Machine) -> None:
    for epoch in range(1, 4):
        order = here.order("sh", "-c", "echo started >> ../starts", epoch=epoch)
        bodies = [here.body("launch", **order), here.body("void", job="job", epoch=epoch)] * 4
        answers = [here.finish(p) for p in [here.begin(request(body)) for body in bodies]]
        ran = {a["state"] for a in answers} & {"claimed", "running", "exited"}
        voided = {a["state"] for a in answers} & {"voided"}
        assert bool(ran) != bool(voided), answers
        if ran:
            here.comes_to("exited", epoch=epoch)
            assert (here.folder(epoch=epoch) / "starts").read_text() == "started\n"
        assert [p.name for p in (here.root / "attempts").iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("verb", ["launch", "void", "forget"])
def test_a_request_is_refused_while_another_holds_the_lock_of_the_job(
    here: Machine, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    body = here.body(verb, **here.order("true"))
    root = Root(str(here.root))
    monkeypatch.setattr("groupwise.jobs.hosts.runner.locks.LOCK_TIMEOUT", 0.05)
    with root.job_lock("job"), pytest.raises(RequestRejected, match="another request"):
        VERBS[verb](root, body, io.BytesIO())
    assert here.status()["state"] == "absent"


def test_the_highest_of_many_concurrent_epochs_wins(here: Machine) -> None:
    orders = [here.order("sleep", "0.1", epoch=epoch) for epoch in (3, 9, 1, 7, 2)]
    calls = [here.begin(request(here.body("launch", **order))) for order in orders]
    for call in calls:
        here.finish(call)
    assert here.ask("launch", **here.order("true", epoch=8))["refused"]["code"] == "lower_epoch"
    assert json.loads((here.root / "epochs" / "job").read_text())["highest"] == 9


# --- ends ---------------------------------------------------------------------------------------


def test_cancel_kills_what_does_not_listen_and_an_impatient_second_one_counts(
    here: Machine, method: str
) -> None:
    here.sh(f"trap '' TERM; echo $$ > pid; {FOR_EVER}", method=method)
    here.written("pid")
    here.ask("kill", job="job", epoch=1, grace=600)
    assert here.status()["state"] == "running"
    killed(here)
    record = here.comes_to("exited")["exit"]
    found = (record["code"], record["signal"], record["reason"])
    assert found == (None, signal.SIGKILL, "cancelled")


def test_cancel_reaches_what_was_stopped_and_the_grace_is_everybody_s(here: Machine) -> None:
    """The shell dies of TERM at once; what it started is still writing its last checkpoint."""
    saving = "trap 'sleep 0.3; echo saved > saved; exit 0' TERM; echo > ready; while :; do sleep 0.02; done"
    begun = here.sh(f'sh -c "{saving}" & until [ -e ready ]; do sleep 0.02; done; kill -STOP $$')
    stat = Path(f"/proc/{begun['pid']}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    here.ask("kill", job="job", epoch=1, grace=60)
    assert here.comes_to("exited")["exit"]["signal"] == signal.SIGTERM
    assert (here.work() / "saved").read_text() == "saved\n"


@pytest.mark.parametrize("prefix", ["", "env -i"])
@pytest.mark.parametrize("how", ["ends", "is cancelled"])
def test_daemons_of_a_job_are_killed_when_it_ends(
    here: Machine, method: str, prefix: str, how: str
) -> None:
    words, limits = daemon(here, prefix=prefix), {"grace_seconds": 0.1}
    ends = "exit 6" if how == "ends" else FOR_EVER
    until_there = "until [ -e daemon ]; do sleep 0.02; done"
    here.sh(f"{words}; {until_there}; {ends}", method=method, limits=limits)
    pid = int(here.written("daemon"))
    if how == "is cancelled":
        killed(here)
    record = here.comes_to("exited")["exit"]
    assert (is_gone(pid), record["message"]) == (True, "")
    if how == "ends":
        assert (record["code"], record["reason"]) == (6, "exited")
    found = released(here)
    assert (found["clean"], found["holders"]) == (True, [])


def test_processes_of_others_are_not_killed(here: Machine) -> None:
    own = os.getpid()  # runners of tests beside this one have a `job`, too, and attempts from 1 on
    others = [
        {"GROUPWISE_ATTEMPT": f"job.2{own}"},
        {"GROUPWISE_ATTEMPT": "job.1", "GROUPWISE_RUNNER_FOLDER": "/other/attempts/job.1"},
        {"GROUPWISE_ATTEMPT": f"job.1{own}"},
        {"XGROUPWISE_ATTEMPT": "job.1"},
    ]
    strangers = [subprocess.Popen(["sleep", "60"], env=environment) for environment in others]
    try:
        here.sh(FOR_EVER)
        killed(here)
        here.comes_to("exited")
        assert released(here)["clean"]
        assert [p.poll() for p in strangers] == [None] * len(strangers)
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


@pytest.mark.parametrize("voided", [False, True])
def test_a_job_without_its_folder_is_killed_by_its_mark(here: Machine, voided: bool) -> None:
    here.sh(f"echo $$ >pid; {FOR_EVER}")
    pid, supervisor = int(here.written("pid")), here.state()["supervisor"]
    shutil.rmtree(here.folder())
    assert here.status()["state"] == "absent"
    if voided:
        assert here.ask("void", job="job", epoch=1)["state"] == "voided"
        assert pid in [holder["pid"] for holder in released(here)["holders"]]
    killed(here)
    assert is_gone(pid)
    assert released(here)["clean"]
    wait_until(lambda: is_gone(supervisor), "the end of who has nowhere to write")


def test_each_root_has_a_name_that_stays(here: Machine) -> None:
    first = here.status()["place"]
    here.sh("true")
    assert here.comes_to("exited")["place"] == here.status(job="other")["place"] == first
    [place] = here.root.glob("place*")
    assert place.read_text() == first
    place.rename(here.root / "before")
    assert here.status()["place"] not in (None, "", first), "made anew, it is another root"


@pytest.mark.parametrize("what", ["start_ticks", "boot_id"])
def test_a_pid_that_was_reused_is_not_killed(here: Machine, what: str) -> None:
    here.sh(FOR_EVER)
    here.kill_supervisor()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        try:
            found = read_process(stranger.pid)
            assert found is not None
            state = {**here.state(), "pid": stranger.pid, "start_ticks": found.ticks}
            state[what] = {"start_ticks": found.ticks - 1, "boot_id": "another"}[what]
            (here.folder() / "state.json").write_text(json.dumps(state))
            here.ask("kill", job="job", epoch=1, grace=0)
            assert stranger.poll() is None
            wait_until(
                lambda: here.ask("release", job="job", epoch=1, gpus=[])["clean"], "its own end"
            )
        finally:
            stranger.kill()


@pytest.mark.parametrize("with_pidfd", [True, False])
def test_send_compares_before_it_signals(monkeypatch: pytest.MonkeyPatch, with_pidfd: bool) -> None:
    sent: list[int] = []
    if with_pidfd:
        monkeypatch.setattr(signal, "pidfd_send_signal", lambda _fd, signum: sent.append(signum))
    else:
        monkeypatch.delattr(os, "pidfd_open")  # as before Python 3.9
        monkeypatch.setattr(os, "kill", lambda _pid, signum: sent.append(signum))
    me = read_process(os.getpid())
    assert me is not None
    send_signal(me.pid, me.ticks + 1, signal.SIGTERM)
    assert sent == []
    send_signal(me.pid, me.ticks, signal.SIGTERM)
    assert sent == [signal.SIGTERM]
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    send_signal(ended.pid, 1, signal.SIGKILL)  # nobody receives it: not an error
    assert sent == [signal.SIGTERM]


def clock_passes(moment: float) -> None:
    """Wait two milliseconds: the contact file holds milliseconds."""
    while boot_clock() < moment + 0.002:
        pass


def test_the_deadman_counts_from_the_last_contact(here: Machine) -> None:
    here.sh(FOR_EVER, deadman=3600)
    first = contact(here)
    clock_passes(first)
    here.ask("touch", attempts=["job.1"])
    second = contact(here)
    assert second > first
    clock_passes(second)
    here.ask("touch", attempts={"job.1": first})  # an answer that never arrived
    here.status()
    assert contact(here) == second
    here.ask("wait", known={"job.1": {"clock": second + 0.001}}, timeout=0)
    assert contact(here) == round(second + 0.001, 3)
    here.ask("touch", attempts={"job.1": 1e11})  # beyond now is now
    assert contact(here) <= boot_clock() + 0.0005  # it is kept in whole milliseconds
    assert here.ask("touch", attempts=["none.1"])["touched"] == []
    here.sh(FOR_EVER, epoch=2, deadman=0.3, limits={"grace_seconds": 0.1})
    assert here.comes_to("exited", epoch=2)["exit"]["reason"] == "deadman"


@pytest.mark.parametrize("how", ["its files took longer", "it was long on its way"])
def test_a_command_whose_deadman_has_passed_never_begins(here: Machine, how: str) -> None:
    """The control plane has given up who did not answer for so long, and the job may be running elsewhere."""
    late = {"deadman": 1e-6}
    if how == "it was long on its way":
        late = {"deadman": 60, "clock": here.status()["clock"] - 61}
    here.sh("touch ../started", **late)
    told = here.comes_to("exited")
    assert (told["pid"], told["exit"]["reason"], told["exit"]["code"]) == (None, "deadman", None)
    assert not (here.folder() / "started").exists()


def test_repeated_or_older_clocks_do_not_extend_the_deadman(here: Machine) -> None:
    clock = here.status()["clock"]
    for told, counts in ((clock - 10, clock - 10), (clock - 20, clock - 10), (clock, clock)):
        here.sh(FOR_EVER, deadman=3600, clock=told)
        assert contact(here) == round(counts, 3)
    here.sh(FOR_EVER, deadman=3600, clock=clock + 1e9)  # of before it booted
    assert contact(here) <= boot_clock()


def test_a_machine_that_slept_through_its_deadman_kills_at_once(
    here: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its clock says. What it heard before is in its memory; a supervisor that was asleep itself has heard nothing else."""
    limits = {"grace_seconds": 600}
    here.sh(FOR_EVER, deadman=3600, limits=limits)
    body = here.body("launch", **here.order("true", deadman=3600, limits=limits))
    slept = Supervisor(LaunchRequest(Root(str(here.root)), body), {}, [0], 0, 0)
    true = time.time
    for hours in (0, -2):
        heard = boot_clock() + hours * 3600
        set_cell(str(here.folder() / "contact"), f"{heard:.3f}")
        slept.last_contact = -math.inf  # the machine may have booted a minute ago
        for days in (0, 2, -2):
            monkeypatch.setattr(time, "time", lambda d=days: true() + d * 86_400)
            record = slept.pending_stop()
            late = record is not None and record.kill_at < time.monotonic()
            assert (record and record.reason, late) == (
                ("deadman", True) if hours else (None, False)
            )


@pytest.mark.usefixtures("cgroups")
def test_a_service_manager_is_asked_for_a_scope(here: Machine) -> None:
    tool = here.home / "busctl"
    v2 = current_cgroups()["v2"]
    told = here.home / "told"
    tool.write_text(f"""#!{sys.executable}
import os, sys
words = sys.argv[1:]
open({str(told)!r}, "w").write("\\n".join(words))
folder = os.path.join({v2!r}, words[words.index("fail") - 1])
os.makedirs(folder)
pid = words[words.index("au") + 2]
open(os.path.join(folder, "cgroup.procs"), "w").write(pid)
""")
    tool.chmod(0o755)
    unit = f"groupwise-test-{os.getpid()}"
    program = (
        "import json, sys; sys.path[:0] = [sys.argv[1]]\n"
        "from groupwise.jobs.hosts.runner.cgroups import current_cgroups, enter_systemd_scope, make_cgroups\n"
        "scope = enter_systemd_scope(sys.argv[2]); group = make_cgroups('inner', scope)\n"
        "print(json.dumps([scope, current_cgroups()['v2'], group.v2])); group.remove()\n"
    )
    folder = str(Path(groupwise.__file__).parents[1])
    said = subprocess.run(
        [sys.executable, "-Sc", program, folder, unit],
        env={"PATH": f"{here.home}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    scope, own, inner = json.loads(said.stdout)
    try:
        assert scope == f"{v2}/{unit}.scope"
        assert (own, inner) == (f"{scope}/supervisor", f"{scope}/inner")
        words = told.read_text().splitlines()
        assert words[:3] == ["call", "org.freedesktop.systemd1", "/org/freedesktop/systemd1"]
        assert words[-9:-5] == ["2", "PIDs", "au", "1"]
        assert words[-4:] == ["Delegate", "b", "true", "0"]
    finally:
        remove_cgroup(scope)


def test_memory_beyond_the_limit_is_reported(here: Machine) -> None:
    if not here.ask("hello")["cgroup"]["memory"]:
        pytest.skip("memory cannot be limited here")
    program = "x = bytearray(200 << 20)\nfor n in range(0, len(x), 4096): x[n] = 1"
    here.launch(sys.executable, "-ISc", program, limits={"ram_mb": 60})
    record = here.comes_to("exited")["exit"]
    assert (record["signal"], record["oom_kill"]) == (signal.SIGKILL, 1)
    here.launch(sys.executable, "-ISc", "x = bytearray(1)", limits={"ram_mb": 60}, epoch=2)
    assert here.comes_to("exited", epoch=2)["exit"]["oom_kill"] == 0


# --- a full disk --------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Machine]:
    with small_disk(tmp_path / "disk", "2m") as disk, machine(disk) as made:
        yield made


def test_on_a_full_disk_attempts_can_be_voided_and_old_ones_removed(
    small: Machine,
) -> None:
    small.sh("exit 9")
    small.comes_to("exited")
    fill(small.home)
    with pytest.raises(Refused, match="disk_full"):
        small.launch("true", job="other")
    assert small.status(job="other")["state"] == "absent"
    assert small.ask("void", job="other", epoch=1)["state"] == "voided"
    with pytest.raises(Refused, match="disk_full"):  # it does not use up what was set aside
        small.launch("true", job="third")
    assert small.ask("forget", job="job", epoch=1) == {"forgotten": True, "ok": True}
    assert small.status()["state"] == "absent"
    (small.home / "ballast").unlink()
    small.launch("true", job="third")
    assert small.launch("true")["refused"]["code"] == "lower_epoch"
    assert small.launch("true", job="other")["state"] == "voided"
    assert (small.root / "spare").stat().st_size == SPARE


def test_the_exit_record_has_room_on_a_full_disk(small: Machine) -> None:
    small.sh("until [ -e go ]; do sleep 0.02; done; printf 'last words\\n'; exit 9")
    small.sh(FOR_EVER, job="cancelled")
    (small.work() / "go.new").touch()
    fill(small.home)
    (small.work() / "go.new").rename(small.work() / "go")
    told = small.comes_to("exited")["exit"]
    unwritten = "[its log could not be written: No space left on device]\n"
    assert (told["code"], told["tail"]) == (9, f"last words\n\n{unwritten}")
    assert {a["job"]: a["exit"] for a in small.ask("observe")["attempts"]}["job"]["code"] == 9
    small.ask("kill", job="cancelled", epoch=1, grace=0)
    assert small.comes_to("exited", job="cancelled")["exit"]["reason"] == "cancelled"


def test_a_log_continues_where_a_full_disk_has_room_again(small: Machine) -> None:
    """Nothing is lost: what could not be written waits, and so does the command."""
    small.sh(
        "until [ -e go ]; do sleep 0.02; done; seq 1000000 1059999; until [ -e room ]; do sleep 0.02; done; exit 9"
    )
    (small.work() / "go.new").touch()
    ballast = fill(small.home)
    (small.work() / "go.new").rename(small.work() / "go")
    told = small.status()
    assert (told["state"], told["log_size"]) == ("running", 0)
    ballast.unlink()
    (small.work() / "room").touch()
    assert small.comes_to("exited")["exit"]["code"] == 9
    text = (small.folder() / "log").read_text()
    assert text == "".join(f"{n}\n" for n in range(1_000_000, 1_060_000))


def test_no_write_may_be_torn(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write of a JSON fails once at each of its steps: what is read is the old one or the new one."""
    path = here.home / "a.json"
    for step in ("fsync", "rename", "open"):
        write_json(str(path), {"old": "x" * 100})
        real = getattr(os, step)

        def fails(*arguments: Any, real: Any = real, **options: Any) -> Any:
            if arguments[0] == str(
                here.home
            ):  # that is the last step, after which the new one stands
                return real(*arguments, **options)
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, step, fails)
            with pytest.raises(OSError, match="No space"):
                write_json(str(path), {"new": 1})
        assert read_json(str(path)) == {"old": "x" * 100}
        assert os.listdir(here.home) == ["a.json"]


def test_an_exit_record_waits_for_room(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the reserve holds the worst one: with a log of control characters, each of which is six in JSON."""
    lock = claimed(here)
    attempt = Attempt(Root(str(here.root)), "job", 1)
    (here.folder() / "reserve").unlink()

    def full(path: str, document: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("groupwise.jobs.hosts.runner.supervisor.write_json", full)
        assert not save_exit(attempt, {"code": 0})
    assert save_exit(attempt, {"code": 0})
    os.close(lock)
    here.sh("head -c 5000 /dev/zero; exit 1", epoch=2)
    record = here.comes_to("exited", epoch=2)["exit"]
    assert len(record["tail"]) == TAIL
    assert len(as_bytes(record)) + 10_000 < RESERVE


def test_files_that_do_not_fit_refuse_the_launch(small: Machine) -> None:
    blob = os.urandom(900_000)
    (sha,) = small.put(blob)
    small.launch("true", spec_files={name: [sha, 0o644, len(blob)] for name in "ab"})
    assert small.comes_to("refused")["refused"]["code"] == "disk_full"
    assert not small.work().exists()
