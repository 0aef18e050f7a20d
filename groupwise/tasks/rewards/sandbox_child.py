"""Code that runs inside a sandbox: a warden, a first process, and the program, which are forks of one fresh interpreter.

The *warden* gets its orders on a socket and reports there. It creates the namespaces and adopts orphans; when the program has
ended, or the socket is closed, it kills the remaining processes and reports. The *first* process is number 1 of the namespace, if
there is one: when it ends, the kernel kills everything in the namespace. It starts the *program*, which gives up one right after
the other and then runs untrusted code. Only the standard library is imported here, and the memory of this process holds no secrets.

Reports: `broken` (the box could not be built) or `refused` (a required protection is missing), and nothing is run; else `begun`
with the protections that hold, `ended` with the program's exit code (negative: the signal that ended it; absent if the first
process was killed), and `over` when none of its processes is left.
"""

from __future__ import annotations

import _sitebuiltins
import builtins
import fcntl
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import sysconfig
import time
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from groupwise.core.processes.frames import FrameBuffer, send_frame
from groupwise.tasks.rewards import sandbox_kernel as kernel

Report = dict[str, Any]
Protections = dict[str, list[str]]
"""Protection → the mechanisms that provide it; empty if it does not hold."""

_READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_READABLE_TOO = ("/usr/share/zoneinfo", "/etc/localtime", "/dev/urandom", "/dev/random")
_DEVICES = ("/dev/null", "/dev/zero")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_HIGH = 512
"""Descriptors from this number on are free."""
_SWEEPS = 200
"""Searches of the process table for remaining processes, if no namespace ends them all at once."""


def main() -> Callable[[], None]:
    """Builds the box and returns the function to run; only the program's process returns from here."""
    control = socket.socket(fileno=int(sys.argv[1]))
    buffer = FrameBuffer()
    while (frame := buffer.take()) is None:
        piece = control.recv(1 << 16)
        if not piece:
            os._exit(0)
        buffer.add(piece)
    orders = json.loads(frame)
    protections: Protections = {
        name: [] for name in ("network", "files", "disk", "processes", "user", "calls")
    }
    with suppress(OSError):  # if memory runs out, Linux kills this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        # Leave the namespaces and prepare the folder, as far as this system allows.
        folder, without = orders["folder"], orders["without"]
        home, library = f"{folder}/home", f"{folder}/python"
        with suppress(OSError):
            kernel.adopt_orphans()
        if "namespaces" not in without and _succeeds_in_child(kernel.leave_namespaces):
            with suppress(OSError):
                kernel.leave_namespaces()
                protections["network"].append("namespace")
                protections["processes"].append("namespace")
                kernel.mount_memory(home, orders["limits"]["disk"])
                protections["disk"].append("file system in memory")
                os.chown(home, orders["user"], -1)
                kernel.mount_again(_STANDARD_LIBRARY, library)
                _import_from(library)
        if "user" not in without and orders["user"] != os.geteuid() and _readable_by_all(sys.path):
            os.chown(home, orders["user"], -1)
            protections["user"].append(f"number {orders['user']}")
        status, status_pipe = os.pipe()
        child = os.fork()
        if child == 0:
            control.close()
            os.close(status)
            return _run_first_process(orders, protections, status_pipe)
        _close_descriptors([status_pipe, *orders["channels"]])
        _watch_program(control, status, child)
    except BaseException:  # noqa: BLE001 — the cause is reported; a box that was not built runs nothing
        _report_to_parent(control, {"broken": traceback.format_exc()})
    os._exit(0)


# The warden


def _import_from(library: str) -> None:
    """Import the standard library only from this folder; loaded packages find their submodules there too."""
    sys.path[:] = [library, f"{library}/lib-dynload"]
    sys.path_importer_cache.clear()
    for module in list(sys.modules.values()):
        parts = getattr(module, "__path__", None)
        if isinstance(parts, list):
            module.__path__ = [
                str(part).replace(_STANDARD_LIBRARY, library, 1) for part in cast("Any", parts)
            ]


def _succeeds_in_child(step: Callable[[], None]) -> bool:
    """True if a step succeeds in a child process. Tried there first, because a half-created namespace would be worse than none."""
    child = os.fork()
    if child == 0:
        with suppress(BaseException):  # after any error the exit code reports the failure
            step()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _readable_by_all(folders: list[str]) -> bool:
    """True if any user can import from these folders. Checked because this interpreter must still import after it changes its user."""
    existing = [Path(folder) for folder in folders if Path(folder).is_dir()]
    ancestors = {parent for folder in existing for parent in folder.parents}
    return all(folder.stat().st_mode & 0o5 == 0o5 for folder in existing) and all(
        parent.stat().st_mode & 0o1 for parent in ancestors
    )


def _watch_program(control: socket.socket, status: int, child: int) -> None:
    """Wait for the end of the program, or for the order to end it; forward the reports of the first process."""
    buffer, at_end = b"", False
    with os.fdopen(status, "rb", buffering=0) as pipe:
        while not at_end:
            ready, _, _ = select.select([control, pipe], [], [])
            if control in ready:  # the parent wants this to end, or has ended
                break
            piece = pipe.read(1 << 16)
            at_end = not piece
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                _report_to_parent(control, json.loads(line))
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _end_descendants()
    _report_to_parent(control, {"over": True})


def _report_to_parent(control: socket.socket, report: Report) -> None:
    with suppress(OSError):  # the parent has ended
        send_frame(control, json.dumps(report).encode())


def _end_descendants() -> None:
    """Kill and reap all descendants."""
    for _ in range(_SWEEPS):
        for process in _descendants():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        if not _reap_children():
            return
        time.sleep(0.001)


def _reap_children() -> bool:
    """Reap children that have ended; returns True if others are left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended in the meantime
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    descendants: list[int] = []
    generation = [os.getpid()]
    while generation:
        generation = [child for parent in generation for child in children.get(parent, [])]
        descendants += generation
    return descendants


# The first process


def _run_first_process(
    orders: dict[str, Any], protections: Protections, status_pipe: int
) -> Callable[[], None]:
    """Start the program and wait for its end; only the program's process returns."""
    with suppress(OSError):
        kernel.end_with_parent()
    child = os.fork()
    if child == 0:
        return _enter_sandbox(orders, protections, status_pipe)
    _close_descriptors(orders["channels"])
    while (pid_and_status := os.wait())[0] != child:
        pass
    _write_report(status_pipe, {"ended": os.waitstatus_to_exitcode(pid_and_status[1])})
    os._exit(0)


# The program


def _enter_sandbox(
    orders: dict[str, Any], protections: Protections, status_pipe: int
) -> Callable[[], None]:
    """Give up every right, report it, and return the function to run."""
    # Close every descriptor except the standard ones, the channels (renumbered) and `status_pipe` (the number after theirs).
    channels = orders["channels"]
    first = kernel.FIRST_CHANNEL
    high = [
        fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH) for descriptor in (*channels, status_pipe)
    ]
    os.closerange(first, _HIGH)
    for number, descriptor in enumerate(high, first):
        os.dup2(descriptor, number, inheritable=False)
    os.closerange(_HIGH, _HIGH + len(high) + 1)
    status_pipe = first + len(channels)
    try:
        program = _prepare_program(orders["program"])
        os.setsid()
        os.chdir(f"{orders['folder']}/home")
        _confine(orders, protections)
    except BaseException:  # noqa: BLE001 — reported to the parent; nothing is run
        _write_report(status_pipe, {"broken": traceback.format_exc()})
        os._exit(1)
    missing = [name for name in orders["require"] if not protections[name]]
    _write_report(status_pipe, {"refused": missing} if missing else {"begun": protections})
    if missing:
        os._exit(1)
    os.close(status_pipe)
    return program


def _write_report(status_pipe: int, report: Report) -> None:
    os.write(status_pipe, json.dumps(report).encode() + b"\n")


def _close_descriptors(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _prepare_program(program: dict[str, Any]) -> Callable[[], None]:
    """The function that runs the program: source code as a script, or a function `package.module:name` with its arguments."""
    if "source" in program:
        return lambda: _run_script(
            program["source"], common_imports=program.get("common_imports", False)
        )
    module, _, name = program["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    return lambda: function(**program["arguments"])


COMMON_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json"),
)
"""Modules that the harness of LiveCodeBench imports for a solution: first all names of each module, then the modules themselves."""


def known_names(*, common_imports: bool) -> dict[str, Any]:
    """The names that a solution may use without an import: the builtins and the names of typing, whose import models often forget.

    With `common_imports` also those of the modules above. They are added to the builtins, so the solution's own definitions take
    precedence.
    """
    names: dict[str, Any] = {}
    modules = COMMON_MODULES if common_imports else ()
    for module in ("typing", *modules):
        exec(f"from {module} import *", names)
    del names["__builtins__"]  # added by `exec`
    ends = {name: _sitebuiltins.Quitter(name, "") for name in ("exit", "quit")}
    return {
        **names,
        **ends,
        **vars(builtins),
        **{name: importlib.import_module(name) for name in modules},
    }


def _run_script(source: str, *, common_imports: bool) -> None:
    script = types.ModuleType("__main__")
    script.__file__, sys.argv = "program.py", ["program.py"]
    script.__dict__["__builtins__"] = known_names(common_imports=common_imports)
    sys.modules["__main__"] = script
    try:
        code = compile(source, "<program>", "exec", dont_inherit=True)
        exec(code, script.__dict__)
    except Exception as error:  # noqa: BLE001 — printed as by the interpreter, without the lines of this file
        traceback.print_exception(
            error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        )
        sys.exit(1)


def _confine(orders: dict[str, Any], protections: Protections) -> None:
    without = orders["without"]
    os.environ.pop("PYTHONPATH", None)
    if sys.path[0] != f"{orders['folder']}/python":
        _import_from(_STANDARD_LIBRARY)
    own_count = "namespace" in protections["processes"] or bool(protections["user"])
    # Without a user or namespace of its own, the user's other processes count as well.
    limits = orders["limits"]
    processes = limits["processes"] + (0 if own_count else _tasks_of(os.geteuid()))
    for name, value in (
        ("AS", limits["memory"]),
        ("CPU", limits["cpu_seconds"]),
        ("FSIZE", limits["file_size"]),
        ("NOFILE", limits["open_files"]),
        ("NPROC", processes),
        ("CORE", 0),
    ):
        number = getattr(resource, f"RLIMIT_{name}", None)
        if number is not None:
            _, most = resource.getrlimit(number)
            value = value if most == resource.RLIM_INFINITY else min(value, most)
            with suppress(OSError, ValueError):  # macOS has no address space limit
                resource.setrlimit(number, (value, value))
    if protections["user"]:
        kernel.become(orders["user"])
    with suppress(OSError):
        kernel.give_up_privileges()
    signals = bool(protections["user"]) or "namespace" in protections["processes"]
    if "landlock" not in without:
        with suppress(OSError):
            readable = (*sys.path, *_READABLE, *_READABLE_TOO)
            version = kernel.restrict_files(readable, [os.getcwd()], _DEVICES)
            protections["files"].append("Landlock")
            signals = signals or version >= 6
    if "seccomp" not in without:
        with suppress(OSError):
            # The kernel's process limit does not apply to root, so a root program may not start processes at all.
            kernel.restrict_calls(signals=signals, processes=os.geteuid() != 0)
            protections["network"].append("seccomp")
            protections["calls"].append("seccomp")


def _tasks_of(user: int) -> int:
    """Processes and threads of a user, as the kernel counts them."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder.stat().st_uid == user:
                count += len(os.listdir(folder / "task"))
    return count


if __name__ == "__main__":
    main()()
