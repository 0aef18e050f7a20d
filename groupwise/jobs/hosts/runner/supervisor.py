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

from groupwise.jobs.hosts.runner.attempt_folder import RESERVE
from groupwise.jobs.hosts.runner.cgroups import (
    Cgroups,
    enter_systemd_scope,
    make_cgroups,
    supervision_methods,
    unit_name,
)
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
    is_disk_full,
    number_in,
    read_json,
    remove_tree,
    set_cell,
    sync_folder,
    write_json,
)
from groupwise.jobs.hosts.runner.launch_request import check_program
from groupwise.jobs.hosts.runner.observe import user_name
from groupwise.jobs.hosts.runner.processes import (
    AttemptProcesses,
    boot_clock,
    boot_id,
    command_of,
    read_process,
    reap_adopted,
)
from groupwise.jobs.hosts.runner.protocol import LaunchRefused, as_bytes
from groupwise.jobs.hosts.runner.state import count_checkpoints

if TYPE_CHECKING:
    from typing import Any

    from groupwise.jobs.hosts.runner.launch_request import LaunchRequest
    from groupwise.jobs.hosts.runner.processes import Process
    from groupwise.jobs.hosts.runner.root import Attempt

HEARTBEAT = 5.0
TICK = 1.0
"""Seconds between two checks by the supervisor, unless something wakes it earlier."""
HELPER_EXIT_SECONDS = 0.3
"""Seconds that remaining processes have to exit by themselves after the command has ended; then they get TERM."""
EVICT = "evict"
"""Name of the file that requests an eviction. It contains the number of seconds that the command has left."""
EVICT_GRACE = 25.0
"""Seconds from the engine's TERM to our KILL. Slurm kills after 30 (KillWait); processes that Slurm kills leave no exit record."""
LEFTOVER_GRACE = 5.0
"""Seconds between TERM and KILL for processes that outlived the command."""
KILL_TIMEOUT = 10.0
"""Seconds to wait for killed processes to disappear. A process in uninterruptible sleep does not."""
DEADMAN_GRACE = 30.0
"""Most seconds of grace after the deadman expires. The control plane waits one minute longer than the deadman before it runs the job
elsewhere; TERM and KILL must fit into that minute."""
LAST_OUTPUT_SECONDS = 1.0
"""Seconds to wait, after the command has ended, for output of the processes that it left running."""
DISK_SPACE_TIMEOUT = 5.0
"""Seconds to wait for disk space for the end of the log. The exit record contains the last lines as well."""


class Supervisor:
    """Lives as long as the command and everything that the command started. Apart from the cells (small fixed-size files such as `cancel`
    and `contact`, see `create_files`), only the supervisor writes to the attempt's folder.

    After `daemonize` it imports nothing more: in a run of several days the machine's Python may be replaced by another version."""

    def __init__(
        self,
        request: LaunchRequest,
        gpu_variables: dict[str, str],
        locks: list[int],
        blobs_lock_fd: int,
        ready_fd: int,
    ) -> None:
        self.request, self.gpu_variables = request, gpu_variables
        self.attempt = request.attempt
        self.lock_fd, self.inherited_fds = locks[0], locks[1:]
        self.blobs_lock_fd, self.ready_fd = blobs_lock_fd, ready_fd
        self.state: dict[str, Any] = read_json(self.attempt.at("state.json")) or {}
        self.child = 0
        self.log: Log | None = None
        self.started_at = time.monotonic()
        self.next_beat = self.ended_at = 0.0
        self.last_contact = request.last_contact
        self.stop_request: StopRequest | None = None
        self.killed = False
        self.terminate_at = math.inf
        """Monotonic time at which the command gets TERM, once; infinite while no TERM is due."""
        self.user = ""
        self.leftover_count = 0
        self.wake_fd = self.bell_fd = -1
        self.evicted = False

    def run(self) -> None:
        """Run the attempt, from laying out its files to writing its exit record."""
        self.daemonize()
        try:
            self.request.write_aliases()
            if self.request.engine:
                # Another machine may have laid it out. From now on the attempt belongs to this one.
                self.state.update(
                    phase="claimed", boot_id=boot_id(), claimed_by=os.uname().nodename
                )
                write_json(self.attempt.at("state.json"), self.state)
                check_program(self.request)
            else:
                self.lay_out()
        except LaunchRefused as refusal:
            return self.refuse(refusal.record)
        except OSError as error:
            code = "disk_full" if is_disk_full(error) else "bad_spec"
            return self.refuse({"code": code, "message": f"its files cannot be laid out: {error}"})
        # The files are laid out: release the lock on the blobs, which a sweep may remove now.
        os.close(self.blobs_lock_fd)
        # Its deadman may have expired, or the attempt may have been cancelled in the meantime.
        stop = self.pending_stop() or self.start()
        if stop:
            return self.finish(stop, None)
        self.signal_ready()
        exit_info = self.watch()
        self.ended_at = time.monotonic()
        survivors = self.end_leftovers(exit_info)
        stop_request = self.stop_request or StopRequest("exited", "", 0.0)
        if survivors:
            names = ", ".join(f"{command_of(pid)} (pid {pid})" for pid in sorted(survivors))
            stop_request.message += f" still alive: {names}"
        return self.finish(stop_request, exit_info)

    # - before the command

    def daemonize(self) -> None:
        """Detach from the caller: streams, signals, folder, control group. Become the parent of all processes that the command orphans."""
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        if self.request.engine:
            signal.signal(signal.SIGTERM, self.evict)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.chdir("/")
        self.user = user_name()
        self.detach_streams()
        # Two things wake the supervisor early: the end of a child process, and a byte written to the FIFO `bell`.
        self.wake_fd, wake_w = os.pipe()
        for fd in (self.wake_fd, wake_w):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, ignore_signal)
        with contextlib.suppress(OSError):
            # Open for writing too: otherwise reading returns end-of-file whenever no request has the FIFO open.
            self.bell_fd = os.open(self.attempt.at("bell"), os.O_RDWR | os.O_NONBLOCK)
        prctl(SET_SUBREAPER, 1)
        prctl(SET_NAME, b"groupwise-super")
        unit = unit_name(self.attempt)
        # The engine accounts for, and ends, the processes in the group that it made: make no other group inside it.
        methods = ["session"] if self.request.engine else supervision_methods()
        if self.request.method in methods:
            methods = methods[methods.index(self.request.method) :]
        scope = enter_systemd_scope(unit) if methods[0] == "systemd" else None
        if methods[0] == "systemd" and scope is None:
            methods = methods[1:]
        self.cgroups = Cgroups() if methods[0] == "session" else make_cgroups(unit, scope)
        self.cgroups.limit(self.request.limits.get("ram_mb"))
        self.state["method"] = methods[0]

    def detach_streams(self) -> None:
        """Close the inherited descriptors: the channel of the request stays open as long as any process holds it. This process's own errors
        go to `supervisor.err`."""
        keep = {self.lock_fd, self.blobs_lock_fd, self.ready_fd, *self.inherited_fds}
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in keep:
                with contextlib.suppress(OSError):  # the descriptor of the listing itself
                    os.close(int(name))
        devnull = os.open(os.devnull, os.O_RDWR)
        try:
            path = self.attempt.at("supervisor.err")
            stderr = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            stderr = devnull
        for target, source in ((0, devnull), (1, devnull), (2, stderr)):
            os.dup2(source, target)

    def lay_out(self) -> None:
        """Put the files into the working folder. Stop early if the attempt is cancelled or its deadman expires."""
        next_check = time.monotonic() + TICK
        for _ in self.request.lay_out(self.attempt.work):
            if time.monotonic() >= next_check:
                self.beat()
                next_check = time.monotonic() + TICK
                if self.pending_stop():
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
            return self.finish(StopRequest("spawn_failed", record["message"], 0.0, code=125), None)
        self.cgroups.remove()
        return self.signal_ready()

    def signal_ready(self) -> None:
        """Let the waiting `launch` request answer: it waits until this pipe is closed."""
        os.close(self.ready_fd)

    def start(self) -> StopRequest | None:
        """Fork the child, record it, then let it run the program. Returns why the program could not start, or None."""
        start_r, start_w = os.pipe()
        exec_error_r, exec_error_w = os.pipe()
        environment = command_environment(self.request, self.gpu_variables, self.user)
        tether = os.open(self.attempt.at("tether"), os.O_RDONLY)
        step = "its log cannot be opened"
        try:
            log = self.log = Log(self.attempt.at("log"))
            step = "no process can be made"
            self.child = os.fork()
        except OSError as error:
            return StopRequest("spawn_failed", f"{step}: {error.strerror}", 0.0, code=125)
        if self.child == 0:
            for fd in (start_w, exec_error_r, self.lock_fd, self.ready_fd):
                os.close(fd)
            run_child(
                self.request,
                environment,
                start_r,
                exec_error_w,
                log.write_fd,
                [tether, *self.inherited_fds],
            )
        # From here on only the child needs the secrets.
        self.request.secrets.clear()
        environment.clear()
        for fd in (start_r, exec_error_w, tether):
            os.close(fd)
        try:
            # Write the child's pid and start ticks to disk before the program starts.
            self.cgroups.add_process(self.child)
            if self.state["method"] == "cgroup" and not self.cgroups.v2:
                self.state["method"] = "session"
            process = read_process(self.child)
            self.started_at = time.monotonic()
            self.state.update(
                phase="running",
                pid=self.child,
                start_ticks=process.ticks if process else None,
                supervisor=os.getpid(),
                cgroup=self.cgroups.record(),
                started_at=time.time(),
            )
            write_json(self.attempt.at("state.json"), self.state)
            with contextlib.suppress(BrokenPipeError):
                # If the child was killed before this write, `watch` sees its end like any other.
                os.write(start_w, b"!")
        except OSError as error:
            os.close(start_w)
            os.waitpid(self.child, 0)
            message = f"its record cannot be written: {error.strerror}"
            return StopRequest("spawn_failed", message, 0.0, code=125)
        os.close(start_w)
        return self.spawn_failure(exec_error_r)

    def spawn_failure(self, exec_error_fd: int) -> StopRequest | None:
        """Return why the program could not start. None if the pipe closes without an error number, as a successful exec closes it."""
        with open(exec_error_fd, "rb") as pipe:
            fields = pipe.read(16).split()
        if not fields:
            return None
        os.waitpid(self.child, 0)
        error_number = int(fields[0])
        # As shells and containers have it: not found, cannot be executed, or a fault of the machine.
        code = 127 if error_number in (errno.ENOENT, errno.ENOTDIR) else 125
        if error_number in (errno.EACCES, errno.ENOEXEC, errno.E2BIG, errno.EISDIR, errno.ELOOP):
            code = 126
        program = self.request.spec["arguments"][0]
        hint = " (a script needs a first line such as #!/bin/sh, and that program)"
        hint = hint if error_number in (errno.ENOENT, errno.ENOEXEC) else ""
        return StopRequest(
            "spawn_failed", f"{program:.200}: {os.strerror(error_number)}{hint}", 0.0, code=code
        )

    # - while it runs

    def watch(self) -> os.waitid_result:
        """Wait until the child has ended and return how. The child stays a zombie until everything is over: its pid must not be reused."""
        while True:
            exit_info = os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if exit_info is not None:
                return exit_info
            reap_adopted(except_pid=self.child)
            self.beat()
            # Send TERM once there is a reason to end; KILL when the grace is over, repeatedly until it works.
            stop_request = self.pending_stop()
            now = time.monotonic()
            if stop_request and not self.stop_request:
                self.stop_request = stop_request
                # An engine that sent us TERM usually sends it to all processes of the job. Wait half the grace: some programs quit at once
                # on a second TERM.
                self.terminate_at = (now + stop_request.kill_at) / 2 if self.evicted else now
            elif stop_request and self.stop_request:
                self.stop_request.kill_at = min(self.stop_request.kill_at, stop_request.kill_at)
            if now >= self.terminate_at:
                self.terminate()
                self.terminate_at = math.inf
            if self.stop_request and time.monotonic() >= self.stop_request.kill_at:
                self.attempt_processes().kill(timeout=0.0)
                self.killed = True
            self.sleep()

    def sleep(self, timeout: float = TICK) -> None:
        """Sleep until something wakes the supervisor or the next check is due. Meanwhile write the command's output to its log."""
        if self.stop_request and not self.killed:
            timeout = min(timeout, max(0.02, self.stop_request.kill_at - time.monotonic()))
        deadline = time.monotonic() + timeout
        wake_fds = [fd for fd in (self.wake_fd, self.bell_fd) if fd >= 0]
        log = self.log
        assert log is not None, "a command has a log"
        woken = False
        while not woken and timeout > 0:
            readable = select.select([*wake_fds, *log.readable_fds()], [], [], timeout)[0]
            log.copy_output()
            for fd in set(wake_fds).intersection(readable):
                woken = True
                with contextlib.suppress(OSError):
                    os.read(fd, 4096)
            timeout = deadline - time.monotonic()

    def beat(self) -> None:
        """Write the heartbeat, at most every HEARTBEAT seconds."""
        if time.monotonic() >= self.next_beat:
            with contextlib.suppress(OSError):  # the supervisor works without it
                set_cell(self.attempt.at("heartbeat"), f"{boot_clock():.3f}")
            self.next_beat = time.monotonic() + HEARTBEAT

    def pending_stop(self) -> StopRequest | None:
        """The request to end the command, if there is a reason for one now; None if the command may continue."""
        now = time.monotonic()
        grace = number_in(cell_words(self.attempt.at("cancel")))
        if grace is not None:
            since = self.stop_request.since if self.stop_request else now
            return StopRequest("cancelled", "", since + grace)
        if self.stop_request:
            return None
        notice = number_in(cell_words(self.attempt.at(EVICT)))
        if notice is None and self.evicted:
            notice = min(self.request.grace, EVICT_GRACE)
        if notice is not None:
            message = "the owner of its machine wants it back"
            if self.request.engine:
                message = f"{self.request.engine} ended it: its machine was wanted back, its time was up, or it was cancelled there"
            return StopRequest("evicted", message, now + notice)
        limit = self.request.limits.get("time_seconds")
        if limit is not None and self.child and now - self.started_at >= limit:
            message = f"its time limit of {limit:g} s was reached"
            return StopRequest("time_limit", message, now + self.request.grace)
        if self.request.deadman is not None and self.silence() >= self.request.deadman:
            message = f"no contact with the control plane for {self.request.deadman:g} s"
            # Count from the last contact: a machine that was suspended for the whole time kills at once.
            grace = min(self.request.grace, DEADMAN_GRACE)
            seconds_left = self.request.deadman + grace - self.silence()
            return StopRequest("deadman", message, now + seconds_left)
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

    def attempt_processes(self) -> AttemptProcesses:
        """The processes of the attempt."""
        return AttemptProcesses(self.attempt, self.state, supervisor=os.getpid())

    # - after it

    def end_leftovers(self, exit_info: os.waitid_result) -> dict[int, Process]:
        """End the processes that outlived the command; returns those that could not be ended."""
        processes = self.attempt_processes()
        if not processes.alive():
            return {}
        # Record how the command ended now, in case this process is killed while it ends the leftovers.
        self.drain_output(LAST_OUTPUT_SECONDS)
        with contextlib.suppress(OSError):
            stop_request = self.stop_request or StopRequest("exited", "", 0.0)
            write_json(self.attempt.at("outcome.json"), self.exit_record(stop_request, exit_info))
        if self.stop_request:
            processes.terminate(except_session=self.child)
        else:
            # Helper processes may exit by themselves once the command has ended.
            deadline = time.monotonic() + HELPER_EXIT_SECONDS
            while processes.alive() and time.monotonic() < deadline:
                reap_adopted(except_pid=self.child)
                self.sleep(0.02)
            self.leftover_count = len(processes.alive())
            processes.terminate(except_session=0)
        while time.monotonic() < self.leftovers_kill_at() and processes.alive():
            reap_adopted(except_pid=self.child)
            self.beat()
            self.sleep(0.05)
        return processes.kill(KILL_TIMEOUT)

    def drain_output(self, timeout: float) -> None:
        """Write all output to the log, for at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.log and (self.log.copy_output() or self.log.unwritten):
            if time.monotonic() >= deadline:
                return
            if self.log.unwritten:
                self.beat()
                time.sleep(0.05)

    def leftovers_kill_at(self) -> float:
        """Monotonic time at which leftovers are killed: at the end of the grace if the end was requested, soon after the command's own end
        otherwise."""
        stop_request = self.pending_stop()
        if self.stop_request:
            return min(
                self.stop_request.kill_at,
                stop_request.kill_at if stop_request else self.stop_request.kill_at,
            )
        kill_at = self.ended_at + min(self.request.grace, LEFTOVER_GRACE)
        return min(kill_at, stop_request.kill_at) if stop_request else kill_at

    def finish(self, stop_request: StopRequest, exit_info: os.waitid_result | None) -> None:
        """Reap the child, write the exit record, and end."""
        if exit_info is not None:
            reap_adopted()
            self.drain_output(
                DISK_SPACE_TIMEOUT if self.log and self.log.unwritten else LAST_OUTPUT_SECONDS
            )
        record = self.exit_record(stop_request, exit_info)
        # If the attempt's folder was removed, the lock file has no link left: a record cannot be written and would have no reader.
        while os.fstat(self.lock_fd).st_nlink > 0 and not save_exit(self.attempt, record):
            # Make way for the exit record if the job has created a folder under its name, or has removed the permissions of the
            # attempt's folder.
            with contextlib.suppress(OSError):
                os.chmod(self.attempt.path, 0o700)
            for path in (
                self.attempt.at("exit.json"),
                f"{self.attempt.at('exit.json')}.{os.getpid()}.new",
            ):
                if os.path.isdir(path) and not os.path.islink(path):
                    with contextlib.suppress(OSError):
                        os.rename(path, f"{path}.{os.urandom(4).hex()}")
            self.beat()
            time.sleep(TICK)
        self.cgroups.remove()
        # A launch request may still wait for its answer.
        with contextlib.suppress(OSError):  # it was released before
            self.signal_ready()

    def exit_record(
        self, stop_request: StopRequest, exit_info: os.waitid_result | None
    ) -> dict[str, Any]:
        """The record of how the command ended."""
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        code, signum = stop_request.code, None
        if exit_info is not None and exit_info.si_code == os.CLD_EXITED:
            code = exit_info.si_status
        elif exit_info is not None:
            signum = exit_info.si_status
        count, step = count_checkpoints(self.attempt, self.state)
        return {
            "code": code,
            "signal": signum,
            "reason": stop_request.reason,
            "message": stop_request.message.strip(),
            "oom_kill": self.cgroups.oom_kills(),
            "seconds": round(time.monotonic() - self.started_at, 3) if self.child else 0.0,
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
            "max_rss_mb": usage.ru_maxrss >> 10,
            "finished_at": time.time(),
            "tail": self.log.tail() if self.log else "",
            "gpus": len(self.request.gpus)
            or max(
                len(list(filter(None, gpus.split(",")))) for gpus in self.gpu_variables.values()
            ),
            "checkpoints": count,
            "step": step,
            "leftovers": self.leftover_count,
        }


class StopRequest:
    """Why the command has to end, or has ended, and the monotonic time at which it is killed."""

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
