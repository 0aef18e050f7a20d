"""The command of an attempt: its environment, its streams, and the log of its output."""

from __future__ import annotations

import errno
import os
import signal
import time
from typing import TYPE_CHECKING

from groupwise.jobs.hosts.runner.files import TAIL
from groupwise.jobs.hosts.runner.processes import ATTEMPT_VARIABLE, FOLDER_VARIABLE, find_program

if TYPE_CHECKING:
    from typing import NoReturn

    from groupwise.jobs.hosts.runner.launch_request import LaunchRequest

ENGINE_PREFIXES = ("SLURM_", "SLURMD_", "RAY_")
"""Prefixes of the variables by which an engine describes its machines and ranks; the command receives them."""
LOG_PIECE = 1 << 20
"""Most bytes of the command's output that are read at once."""
LOG_TIMEOUT = 60.0
"""Seconds for which a log may be unwritable before it is given up. Meanwhile the command blocks once the pipe is full."""
SET_DEATH_SIGNAL, SET_NAME, SET_SUBREAPER = 1, 15, 36


def prctl(option: int, value: object) -> None:
    """Call the kernel's prctl; skipped if Python has no ctypes."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass


def command_environment(
    request: LaunchRequest, gpu_variables: dict[str, str], user: str
) -> dict[str, str]:
    """The command's environment: a few of the machine's variables, then the job's, its secrets, and the runner's own variables."""
    attempt = request.attempt
    outer = os.environ.items() if request.engine else ()
    environment = {
        **{name: text for name, text in outer if name.startswith(ENGINE_PREFIXES)},
        "HOME": os.path.expanduser("~"),
        "USER": user,
        "LOGNAME": user,
        "LANG": os.environ.get("LANG") or "C.UTF-8",
        "PYTHONUNBUFFERED": "1",  # output to a pipe is otherwise buffered, and appears in the log only after some kilobytes
        **request.spec.get("environment", {}),
        **request.environment,
        **request.secrets,
        "PATH": request.path,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        **gpu_variables,
        ATTEMPT_VARIABLE: attempt.name,
        FOLDER_VARIABLE: attempt.path,
    }
    if request.artefacts:
        environment["GROUPWISE_OUTPUT"] = os.path.join(attempt.work, request.artefacts[0])
    if request.resume_path:
        environment["RESUME_FROM"] = os.path.join(attempt.work, request.resume_path)
    if request.members > 1:
        environment["NODE_RANK"], environment["NNODES"] = str(request.rank), str(request.members)
        environment["GROUPWISE_RENDEZVOUS"] = attempt.name
    return environment


def run_child(
    request: LaunchRequest,
    environment: dict[str, str],
    start_r: int,
    exec_error_w: int,
    log: int,
    inherited: list[int],
) -> NoReturn:
    """Runs in the child: wait for a byte in `start_r`, then become the command; if that fails, write the error number to `exec_error_w`.
    The child dies with its supervisor."""
    try:
        os.setsid()
        prctl(SET_DEATH_SIGNAL, int(signal.SIGKILL))
        if os.read(start_r, 1):
            exec_command(request, environment, log, inherited)
    except OSError as error:
        os.write(exec_error_w, b"%d" % (error.errno or errno.EIO))
    except BaseException:  # noqa: BLE001  (after any error of exec it must not continue as a second supervisor)
        os.write(exec_error_w, b"%d" % errno.EINVAL)
    finally:
        os._exit(127)


def exec_command(
    request: LaunchRequest, environment: dict[str, str], log: int, inherited: list[int]
) -> NoReturn:
    """Set up streams, folder and signals as programs expect them, then execute the program."""
    devnull = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, devnull), (1, log), (2, log)):
        os.dup2(source, target)
    for fd in inherited:
        os.set_inheritable(fd, True)
    os.chdir(request.attempt.work)
    os.umask(0o022)
    for signum in (
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGPIPE,
        signal.SIGCHLD,
        signal.SIGXFSZ,
    ):
        signal.signal(signum, signal.SIG_DFL)
    arguments = request.spec["arguments"]
    program = find_program(arguments[0], request.path) or arguments[0]
    os.execve(program, arguments, environment)


class Log:
    """Collects the output of a command and its processes. They write to a pipe and not to the file, because a process that reopens
    /dev/stderr would truncate a file.

    If the file cannot be written, the command blocks once the pipe is full; after LOG_TIMEOUT seconds the pipe is closed."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        # The sink stays open here: otherwise the pipe would reach its end.
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self.unwritten = b""
        self.recent = b""
        self.problem = ""
        self.failing_since: float | None = None
        self.is_closed = False

    def readable_fds(self) -> list[int]:
        """Descriptors to wait for; none while output is unwritten, or once the pipe is closed."""
        return [] if self.unwritten or self.is_closed else [self.read_fd]

    def copy_output(self) -> bool:
        """Move some output from the pipe to the file. False if there was none, or if it could not be written."""
        if self.is_closed:
            return False
        if not self.unwritten:
            try:
                self.unwritten = os.read(self.read_fd, LOG_PIECE)
            except BlockingIOError:
                return False
            self.recent = (self.recent + self.unwritten[-TAIL:])[-TAIL:]
        try:
            count = os.write(self.file, self.unwritten)
        except OSError as error:
            # Record that the file cannot be written now; after LOG_TIMEOUT seconds close the pipe.
            now = time.monotonic()
            self.failing_since = now if self.failing_since is None else self.failing_since
            self.problem = f"\n[its log could not be written: {error.strerror}]\n"
            if now - self.failing_since >= LOG_TIMEOUT:
                self.is_closed, self.unwritten = True, b""
                os.close(self.read_fd)
            return False
        self.unwritten, self.failing_since, self.problem = self.unwritten[count:], None, ""
        return True

    def tail(self) -> str:
        """The end of the output as text, with a note if the log could not be written."""
        room = TAIL - len(self.problem.encode())
        return self.recent[-room:].decode("utf-8", "replace") + self.problem
