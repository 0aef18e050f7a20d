"""The supervisor process: it starts the command of one attempt, ends it if necessary, and records how it ended."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import select
import signal
import time
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.cgroups import Group, enter_scope, make_group, methods, unit_of
from groupwise.jobs.hosts.runner.claims import RESERVE
from groupwise.jobs.hosts.runner.command import (
    SET_NAME,
    SET_SUBREAPER,
    Log,
    command_environment,
    prctl,
    run_child,
)
from groupwise.jobs.hosts.runner.files import (
    cell_words,
    is_full,
    number_in,
    read_json,
    remove_tree,
    set_cell,
    sync_folder,
    write_json,
)
from groupwise.jobs.hosts.runner.observe import user_name
from groupwise.jobs.hosts.runner.order import check_program
from groupwise.jobs.hosts.runner.processes import (
    Belonging,
    boot_clock,
    boot_id,
    command_of,
    process,
    reap_adopted,
)
from groupwise.jobs.hosts.runner.protocol import Refused, as_bytes
from groupwise.jobs.hosts.runner.state import count_checkpoints

if TYPE_CHECKING:
    from typing import Any

    from groupwise.jobs.hosts.runner.order import Order
    from groupwise.jobs.hosts.runner.processes import Process
    from groupwise.jobs.hosts.runner.root import Attempt

HEARTBEAT = 5.0
TICK = 1.0
"""Seconds between two checks by the supervisor, unless something wakes it earlier."""
LEAVING = 0.3
"""Seconds that remaining processes have to exit by themselves after the command has ended; then they get TERM."""
EVICT = "evict"
"""Name of the file that requests an eviction. It contains the number of seconds that the command has left."""
EVICT_GRACE = 25.0
"""Seconds from the engine's TERM to our KILL. Slurm kills after 30 (KillWait); processes that Slurm kills leave no exit record."""
LEFTOVER_GRACE = 5.0
"""Seconds between TERM and KILL for processes that outlived the command."""
KILL_PATIENCE = 10.0
"""Seconds to wait for killed processes to disappear. A process in uninterruptible sleep does not."""
DEADMAN_GRACE = 30.0
"""Most seconds of grace after the deadman expires. The controller waits one minute longer than the deadman before it runs the job
elsewhere; TERM and KILL must fit into that minute."""
LAST_WORDS = 1.0
"""Seconds to wait, after the command has ended, for output of the processes that it left running."""
ROOM_PATIENCE = 5.0
"""Seconds to wait for disk space for the end of the log. The exit record contains the last lines as well."""


class Supervisor:
    """Lives as long as the command and everything that the command started. Apart from the cells (small files with one value), only the
    supervisor writes to the attempt's folder.

    After `settle` it imports nothing more: in a run of several days the machine's Python may be replaced by another version."""

    def __init__(
        self, order: Order, visible: str, locks: list[int], blobs: int, speak: int
    ) -> None:
        self.order, self.visible = order, visible
        self.attempt = order.attempt
        self.lock, self.inherited = locks[0], locks[1:]
        self.blobs, self.speak = blobs, speak
        self.state: dict[str, Any] = read_json(self.attempt.at("state.json")) or {}
        self.child = 0
        self.log: Log | None = None
        self.begun = time.monotonic()
        self.next_beat = self.ended_at = 0.0
        self.last_contact = order.heard
        self.ending: Ending | None = None
        self.killed = False
        self.terminate_at = math.inf
        """Monotonic time at which the command gets TERM, once; infinite while no TERM is due."""
        self.user = ""
        self.left = 0
        self.waker = self.bell = -1
        self.evicted = False

    def run(self) -> None:
        """Run the attempt, from laying out its files to writing its exit record."""
        self.settle()
        try:
            if self.order.engine:
                # Another machine may have laid it out. From now on the attempt belongs to this one.
                self.state.update(
                    phase="claimed", boot_id=boot_id(), claimed_by=os.uname().nodename
                )
                write_json(self.attempt.at("state.json"), self.state)
                check_program(self.order)
            else:
                self.lay_out()
        except Refused as refusal:
            return self.refuse(refusal.record)
        except OSError as error:
            code = "disk_full" if is_full(error) else "bad_spec"
            return self.refuse({"code": code, "message": f"its files cannot be laid out: {error}"})
        # The files are laid out: release the lock on the blobs, which a sweep may remove now.
        os.close(self.blobs)
        # Its deadman may have expired, or the attempt may have been cancelled in the meantime.
        failure = self.reason() or self.start()
        if failure:
            return self.finish(failure, None)
        self.report_state()
        ended = self.watch()
        self.ended_at = time.monotonic()
        left = self.end_leftovers(ended)
        ending = self.ending or Ending("exited", "", 0.0)
        if left:
            names = ", ".join(f"{command_of(pid)} (pid {pid})" for pid in sorted(left))
            ending.message += f" still alive: {names}"
        return self.finish(ending, ended)

    # - before the command

    def settle(self) -> None:
        """Detach from the caller: streams, signals, folder, control group. Become the parent of all processes that the command orphans."""
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        if self.order.engine:
            signal.signal(signal.SIGTERM, self.evict)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.chdir("/")
        self.user = user_name()
        self.detach_streams()
        # Two things wake the supervisor early: the end of a child process, and a byte written to the FIFO `bell`.
        self.waker, wake = os.pipe()
        for fd in (self.waker, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, ignore_signal)
        with contextlib.suppress(OSError):
            # Open for writing too: otherwise reading returns end-of-file whenever no request has the FIFO open.
            self.bell = os.open(self.attempt.at("bell"), os.O_RDWR | os.O_NONBLOCK)
        prctl(SET_SUBREAPER, 1)
        prctl(SET_NAME, b"groupwise-super")
        unit = unit_of(self.attempt)
        # The engine accounts for, and ends, the processes in the group that it made: make no other group inside it.
        chosen = ["session"] if self.order.engine else methods()
        if self.order.method in chosen:
            chosen = chosen[chosen.index(self.order.method) :]
        scope = enter_scope(unit) if chosen[0] == "systemd" else None
        if chosen[0] == "systemd" and scope is None:
            chosen = chosen[1:]
        self.group = Group() if chosen[0] == "session" else make_group(unit, scope)
        self.group.limit(self.order.limits.get("ram_mb"))
        self.state["method"] = chosen[0]

    def detach_streams(self) -> None:
        """Close the channel of the request, which ends once no process has it open. This process's own errors go to `supervisor.err`."""
        keep = {self.lock, self.blobs, self.speak, *self.inherited}
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in keep:
                with contextlib.suppress(OSError):  # the descriptor of the listing itself
                    os.close(int(name))
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            path = self.attempt.at("supervisor.err")
            complaints = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            complaints = nothing
        for target, source in ((0, nothing), (1, nothing), (2, complaints)):
            os.dup2(source, target)

    def lay_out(self) -> None:
        """Put the files into the working folder. Stop early if the attempt is cancelled or its deadman expires."""
        look_at = time.monotonic() + TICK
        for _ in self.order.lay_out(self.attempt.work):
            if time.monotonic() >= look_at:
                self.beat()
                look_at = time.monotonic() + TICK
                if self.reason():
                    return

    def evict(self, _signum: int, _frame: object) -> None:
        """Signal handler for the engine's TERM: the engine takes its machine back."""
        self.evicted = True

    def refuse(self, record: dict[str, Any]) -> None:
        """Record that the command did not run and will not."""
        remove_tree(self.attempt.work)
        self.state.update(phase="refused", refused=record)
        try:
            write_json(self.attempt.at("state.json"), self.state)
        except OSError:
            return self.finish(Ending("spawn_failed", record["message"], 0.0, code=126), None)
        self.group.remove()
        return self.report_state()

    def report_state(self) -> None:
        """Make the waiting `launch` request answer: the attempt now has a state to report."""
        os.close(self.speak)

    def start(self) -> Ending | None:
        """Fork the child, record it, then let it run the program. Returns why the program could not start, or None."""
        go_on, go = os.pipe()
        failed, failure = os.pipe()
        environment = command_environment(self.order, self.visible, self.user)
        tether = os.open(self.attempt.at("tether"), os.O_RDONLY)
        step = "its log cannot be opened"
        try:
            log = self.log = Log(self.attempt.at("log"))
            step = "no process can be made"
            self.child = os.fork()
        except OSError as error:
            return Ending("spawn_failed", f"{step}: {error.strerror}", 0.0, code=126)
        if self.child == 0:
            for fd in (go, failed, self.lock, self.speak):
                os.close(fd)
            run_child(self.order, environment, go_on, failure, log.sink, [tether, *self.inherited])
        # From here on only the child needs the secrets.
        self.order.secrets.clear()
        environment.clear()
        for fd in (go_on, failure, tether):
            os.close(fd)
        try:
            self.record_child()
            with contextlib.suppress(BrokenPipeError):
                # If the child was killed before this write, `watch` sees its end like any other.
                os.write(go, b"!")
        except OSError as error:
            os.close(go)
            os.waitpid(self.child, 0)
            message = f"its record cannot be written: {error.strerror}"
            return Ending("spawn_failed", message, 0.0, code=126)
        os.close(go)
        return self.spawn_failure(failed)

    def record_child(self) -> None:
        """Write the child's pid and start ticks to disk before the program starts."""
        self.group.take_in(self.child)
        if self.state["method"] == "cgroup" and not self.group.v2:
            self.state["method"] = "session"
        found = process(self.child)
        self.begun = time.monotonic()
        self.state.update(
            phase="running",
            pid=self.child,
            start_ticks=found.ticks if found else None,
            supervisor=os.getpid(),
            cgroup=self.group.record(),
            started_at=time.time(),
        )
        write_json(self.attempt.at("state.json"), self.state)

    def spawn_failure(self, failed: int) -> Ending | None:
        """Return why the program could not start. None if the pipe closes without an error number, as a successful exec closes it."""
        with open(failed, "rb") as pipe:
            words = pipe.read(16).split()
        if not words:
            return None
        os.waitpid(self.child, 0)
        number = int(words[0])
        code = 127 if number in (errno.ENOENT, errno.ENOTDIR) else 126
        program = self.order.spec["arguments"][0]
        return Ending("spawn_failed", f"{program:.200}: {os.strerror(number)}", 0.0, code=code)

    # - while it runs

    def watch(self) -> Any:
        """Wait until the child has ended and return how. The child stays a zombie until everything is over: its pid must not be reused."""
        while True:
            ended = os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                return ended
            reap_adopted(but=self.child)
            self.beat()
            # Send TERM once there is a reason to end; KILL when the grace is over, repeatedly until it works.
            reason = self.reason()
            now = time.monotonic()
            if reason and not self.ending:
                self.ending = reason
                # An engine that sent us TERM usually sends it to all processes of the job. Wait half the grace: some programs quit at once
                # on a second TERM.
                self.terminate_at = (now + reason.kill_at) / 2 if self.evicted else now
            elif reason and self.ending:
                self.ending.kill_at = min(self.ending.kill_at, reason.kill_at)
            if now >= self.terminate_at:
                self.terminate()
                self.terminate_at = math.inf
            if self.ending and time.monotonic() >= self.ending.kill_at:
                self.belonging().kill(patience=0.0)
                self.killed = True
            self.sleep()

    def sleep(self, due: float = TICK) -> None:
        """Sleep until something wakes the supervisor or the next check is due. Meanwhile write the command's output to its log."""
        if self.ending and not self.killed:
            due = min(due, max(0.02, self.ending.kill_at - time.monotonic()))
        until = time.monotonic() + due
        alarms = [fd for fd in (self.waker, self.bell) if fd >= 0]
        log = self.log
        assert log is not None, "a command has a log"
        woken = False
        while not woken and due > 0:
            ready = select.select([*alarms, *log.sources()], [], [], due)[0]
            log.write_down()
            for fd in set(alarms).intersection(ready):
                woken = True
                with contextlib.suppress(OSError):
                    os.read(fd, 4096)
            due = until - time.monotonic()

    def beat(self) -> None:
        """Write the heartbeat, at most every HEARTBEAT seconds."""
        if time.monotonic() >= self.next_beat:
            with contextlib.suppress(OSError):  # the supervisor works without it
                set_cell(self.attempt.at("heartbeat"), f"{boot_clock():.3f}")
            self.next_beat = time.monotonic() + HEARTBEAT

    def reason(self) -> Ending | None:
        """Why the command has to end, and by when; None if it may continue."""
        now = time.monotonic()
        grace = number_in(cell_words(self.attempt.at("cancel")))
        if grace is not None:
            since = self.ending.since if self.ending else now
            return Ending("cancelled", "", since + grace)
        if self.ending:
            return None
        notice = number_in(cell_words(self.attempt.at(EVICT)))
        if notice is None and self.evicted:
            notice = min(self.order.grace, EVICT_GRACE)
        if notice is not None:
            message = "the owner of its machine wants it back"
            if self.order.engine:
                message = f"{self.order.engine} ended it: its machine was wanted back, its time was up, or it was cancelled there"
            return Ending("evicted", message, now + notice)
        limit = self.order.limits.get("time_seconds")
        if limit is not None and self.child and now - self.begun >= limit:
            message = f"its time limit of {limit:g} s was reached"
            return Ending("time_limit", message, now + self.order.grace)
        if self.order.deadman is not None and self.silence() >= self.order.deadman:
            message = f"no contact with the control plane for {self.order.deadman:g} s"
            # Count from the last contact: a machine that was suspended for the whole time kills at once.
            grace = min(self.order.grace, DEADMAN_GRACE)
            left = self.order.deadman + grace - self.silence()
            return Ending("deadman", message, now + left)
        return None

    def silence(self) -> float:
        """Seconds since the last contact with the control plane, by the boot clock, which counts suspended time too."""
        recorded = number_in(cell_words(self.attempt.at("contact")))
        self.last_contact = max(self.last_contact, recorded or 0.0)
        return boot_clock() - self.last_contact

    def terminate(self) -> None:
        """Send TERM to the command's process group, then CONT: a stopped process must continue to handle TERM."""
        for signum in (signal.SIGTERM, signal.SIGCONT):
            with contextlib.suppress(OSError):  # it may run as another user by now
                os.killpg(self.child, signum)

    def belonging(self) -> Belonging:
        """All processes that belong to the attempt."""
        return Belonging(self.attempt, self.state, supervisor=os.getpid())

    # - after it

    def end_leftovers(self, ended: Any) -> dict[int, Process]:
        """End the processes that outlived the command; returns those that could not be ended."""
        belonging = self.belonging()
        if not belonging.alive():
            return {}
        # Record how the command ended now, in case this process is killed while it ends the leftovers.
        self.drain_output(LAST_WORDS)
        with contextlib.suppress(OSError):
            ending = self.ending or Ending("exited", "", 0.0)
            write_json(self.attempt.at("outcome.json"), self.exit_record(ending, ended))
        if self.ending:
            belonging.terminate(but_session=self.child)
        else:
            # Helper processes may exit by themselves once the command has ended.
            until = time.monotonic() + LEAVING
            while belonging.alive() and time.monotonic() < until:
                reap_adopted(but=self.child)
                self.sleep(0.02)
            self.left = len(belonging.alive())
            belonging.terminate(but_session=0)
        while time.monotonic() < self.leftovers_until() and belonging.alive():
            reap_adopted(but=self.child)
            self.beat()
            self.sleep(0.05)
        return belonging.kill(KILL_PATIENCE)

    def drain_output(self, patience: float) -> None:
        """Write all output to the log, for at most `patience` seconds."""
        until = time.monotonic() + patience
        while self.log and (self.log.write_down() or self.log.unwritten):
            if time.monotonic() >= until:
                return
            if self.log.unwritten:
                self.beat()
                time.sleep(0.05)

    def leftovers_until(self) -> float:
        """Monotonic time at which leftovers are killed: at the end of the grace if the end was requested, soon after the command's own end
        otherwise."""
        reason = self.reason()
        if self.ending:
            return min(self.ending.kill_at, reason.kill_at if reason else self.ending.kill_at)
        own = self.ended_at + min(self.order.grace, LEFTOVER_GRACE)
        return min(own, reason.kill_at) if reason else own

    def finish(self, ending: Ending, ended: Any) -> None:
        """Reap the child, write the exit record, and end."""
        if ended is not None:
            reap_adopted()
            self.drain_output(ROOM_PATIENCE if self.log and self.log.unwritten else LAST_WORDS)
        record = self.exit_record(ending, ended)
        # If the attempt's folder was removed, the lock file has no link left: a record cannot be written and would have no reader.
        while os.fstat(self.lock).st_nlink > 0 and not save_exit(self.attempt, record):
            make_room_for_exit(self.attempt)
            self.beat()
            time.sleep(TICK)
        self.group.remove()
        # A launch request may still wait for its answer.
        with contextlib.suppress(OSError):  # it was released before
            self.report_state()

    def exit_record(self, ending: Ending, ended: Any) -> dict[str, Any]:
        """The record of how the command ended."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        code, signum = ending.code, None
        if ended is not None and ended.si_code == os.CLD_EXITED:
            code = ended.si_status
        elif ended is not None:
            signum = ended.si_status
        count, step = count_checkpoints(self.attempt, self.state)
        return {
            "code": code,
            "signal": signum,
            "reason": ending.reason,
            "message": ending.message.strip(),
            "oom_kill": self.group.oom_kills(),
            "seconds": round(time.monotonic() - self.begun, 3) if self.child else 0.0,
            "cpu_seconds": round(used.ru_utime + used.ru_stime, 3),
            "max_rss_mb": used.ru_maxrss >> 10,
            "finished_at": time.time(),
            "tail": self.log.tail() if self.log else "",
            "gpus": len(self.order.gpus) or len([each for each in self.visible.split(",") if each]),
            "checkpoints": count,
            "step": step,
            "leftovers": self.left,
        }


class Ending:
    """Why the command has to end, and when it is killed."""

    def __init__(self, reason: str, message: str, kill_at: float, code: int | None = None) -> None:
        self.reason, self.message, self.kill_at, self.code = reason, message, kill_at, code
        self.since = time.monotonic()


def ignore_signal(_signum: int, _frame: object) -> None:
    """Do nothing. A handler must exist for Python to write the signal's number to the pipe that wakes the supervisor."""


def save_exit(attempt: Attempt, record: dict[str, Any]) -> bool:
    """Write the exit record atomically and durably; return False if that failed. If the disk is full, overwrite the reserve file in place,
    padded with spaces, and rename it."""
    try:
        write_json(attempt.at("exit.json"), record)
        return True
    except OSError:
        pass
    try:
        fd = os.open(attempt.at("reserve"), os.O_WRONLY | os.O_NOFOLLOW)
        with open(fd, "wb") as file:
            file.write(as_bytes(record).ljust(RESERVE))
            file.flush()
            os.fsync(file.fileno())
        os.rename(attempt.at("reserve"), attempt.at("exit.json"))
        sync_folder(attempt.path)
        return True
    except OSError:
        return False


def make_room_for_exit(attempt: Attempt) -> None:
    """Make way for the exit record if the job has created a folder under its name, or has removed the permissions of the attempt's
    folder."""
    with contextlib.suppress(OSError):
        os.chmod(attempt.path, 0o700)
    for path in (attempt.at("exit.json"), f"{attempt.at('exit.json')}.{os.getpid()}.new"):
        if os.path.isdir(path) and not os.path.islink(path):
            with contextlib.suppress(OSError):
                os.rename(path, f"{path}.{os.urandom(4).hex()}")
