"""What Linux offers a process that wants to be less than it is: namespaces, another user, Landlock, seccomp.

Each function changes the calling process for good, by system calls, without any package; its children inherit it. One that the
kernel does not have, or that this container may not use, raises OSError and changes nothing. `sandbox_child` says in which order
they are called.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

FIRST_CHANNEL = 3
"""The descriptor of a program's first channel to the outside; the others follow."""

_NEWNS, _NEWUTS, _NEWIPC = 0x20000, 0x4000000, 0x8000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_APART = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
_ANY_NAMESPACE = _APART | _NEWUSER | 0x2000000
"""In the flags of `clone`, control groups included."""

_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_SET_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_CAPABILITIES_V3 = 0x20080522

_X86_64 = 0xC000003E
"""The one architecture whose system calls are numbered below."""


# Namespaces


def leave_namespaces() -> None:
    """Put this process where it sees no network, and its next child where it sees no other process.

    Root needs nothing for it; anybody else gets a user namespace of his own, which not every system allows.
    """
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _APART if user == 0 else _APART | _NEWUSER)
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)  # what is mounted here stays here


def mount_memory(folder: str, size: int) -> None:
    """Make `folder` one that lives in memory, holds at most `size` bytes, and is gone with this namespace."""
    options = f"size={size},nr_inodes=4096,mode=0700".encode()
    _call("mount", b"tmpfs", folder.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options)


def mount_again(source: str, target: str) -> None:
    """Show the folder `source` at `target` too."""
    _call("mount", os.fsencode(source), os.fsencode(target), None, _MS_BIND | _MS_REC, None)


# Who the process is


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends, so that none gets out of sight."""
    _control(_PR_SET_SUBREAPER, 1)


def end_with_parent() -> None:
    """Be killed when the thread that started this process ends."""
    _control(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become(user: int) -> None:
    """Become a user who owns nothing; for root alone."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def give_up_privileges() -> None:
    """Drop every capability, gain none by executing anything, and show one's memory to nobody."""
    _control(_PR_SET_NO_NEW_PRIVS, 1)
    header = struct.pack("=Ii", _CAPABILITIES_V3, 0)
    _call("capset", header, bytes(24))
    _control(_PR_SET_DUMPABLE, 0)


# Files


def restrict_files(readable: Iterable[str], writable: Iterable[str], devices: Iterable[str]) -> int:
    """Landlock: of all files only these can be opened. Returns the version of the kernel's interface.

    Folders count with all that is in them; paths that are not there are left out. From version 6 on signals do not
    reach processes that are outside.
    """
    version = _raw("landlock_create_ruleset", None, 0, 1)
    rights = _all_rights(version)
    words = [rights] + ([3] if version >= 4 else []) + ([3] if version >= 6 else [])
    rules = struct.pack(
        f"={len(words)}Q", *words
    )  # files; connecting; abstract sockets and signals
    ruleset = _raw("landlock_create_ruleset", rules, len(rules), 0)
    try:
        for path in readable:
            _allow(ruleset, path, _READ)
        for path in devices:
            _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
        for path in writable:
            _allow(ruleset, path, rights)
        _raw("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)
    return version


_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_FOLDER
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE
_LANDLOCK = {
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}
"""Their numbers are the same on every architecture."""


def _all_rights(version: int) -> int:
    """Every right over files that this version knows: 13 of them, then moving, truncating, and controlling devices."""
    return (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rights &= -1 if Path(path).is_dir() else _OF_A_FILE
        _raw("landlock_add_rule", ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)


# System calls

_ALLOWED = {
    # files, which Landlock judges when they are opened or changed by path
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7,
    "lseek": 8, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "preadv": 295,
    "pwritev": 296, "preadv2": 327, "pwritev2": 328, "access": 21, "pipe": 22, "pipe2": 293,
    "select": 23, "pselect6": 270, "ppoll": 271, "dup": 32, "dup2": 33, "dup3": 292, "sendfile": 40,
    "copy_file_range": 326, "flock": 73, "fsync": 74, "fdatasync": 75, "ftruncate": 77,
    "getdents": 78, "getdents64": 217, "getcwd": 79, "chdir": 80, "fchdir": 81,
    "rename": 82, "renameat": 264, "renameat2": 316, "mkdir": 83, "mkdirat": 258, "rmdir": 84,
    "creat": 85, "link": 86, "linkat": 265, "unlink": 87, "unlinkat": 263, "symlink": 88,
    "symlinkat": 266, "readlink": 89, "readlinkat": 267, "umask": 95, "openat": 257,
    "newfstatat": 262, "statx": 332, "faccessat": 269, "faccessat2": 439, "statfs": 137,
    "fstatfs": 138, "close_range": 436,
    # waiting for several things
    "epoll_create": 213, "epoll_create1": 291, "epoll_ctl": 233, "epoll_wait": 232,
    "epoll_pwait": 281, "eventfd": 284, "eventfd2": 290,
    # memory
    "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "mremap": 25, "msync": 26, "madvise": 28,
    "mincore": 27, "membarrier": 324,
    # signals that come
    "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "rt_sigpending": 127,
    "rt_sigtimedwait": 128, "rt_sigsuspend": 130, "sigaltstack": 131, "restart_syscall": 219,
    "pause": 34, "alarm": 37, "getitimer": 36, "setitimer": 38,
    # time
    "nanosleep": 35, "clock_nanosleep": 230, "clock_gettime": 228, "clock_getres": 229,
    "gettimeofday": 96, "time": 201, "times": 100,
    # the process itself; `sched_getaffinity` reads of others how many processors they may use
    "getpid": 39, "getppid": 110, "gettid": 186, "getpgrp": 111, "getpgid": 121, "getsid": 124,
    "setpgid": 109, "getuid": 102, "geteuid": 107, "getgid": 104, "getegid": 108,
    "getresuid": 118, "getresgid": 120, "getgroups": 115, "uname": 63, "sysinfo": 99,
    "getrusage": 98, "getrlimit": 97, "setrlimit": 160, "getcpu": 309, "getrandom": 318,
    "sched_yield": 24, "sched_getaffinity": 204, "arch_prctl": 158, "set_tid_address": 218,
    "set_robust_list": 273, "futex": 202, "rseq": 334,
    # other programs, and the end
    "execve": 59, "wait4": 61, "waitid": 247, "exit": 60, "exit_group": 231,
    # the sockets that it has
    "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "shutdown": 48, "getsockname": 51,
    "getpeername": 52, "getsockopt": 55,
}  # fmt: skip
"""What CPython and its standard library need, seen by running them. Everything else is refused: what reaches the network, other processes
or rare parts of the kernel, what would outlive the box or take memory that no limit counts, and what changes files that Landlock leaves
alone, because it is about opening them (rights, owners, times, attributes)."""
_PARTLY: dict[int, tuple[tuple[int, int, tuple[int, ...]], ...]] = {
    72: ((1, 0xFFFFFFFF, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)),),  # fcntl: no owner of signals, no lease, no notice
    16: ((1, 0xFFFFFFFF, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),  # ioctl: of terminals, how much there is to read
    157: ((0, 0xFFFFFFFF, (15, 16)),),  # prctl: a thread's name
    302: ((0, 0xFFFFFFFF, (0,)),),  # prlimit64: its own limits
    53: ((0, 0xFFFFFFFF, (1,)), (1, 0xF, (1,))),  # socketpair: of streams, which reach nobody else
}  # fmt: skip
"""System calls that are allowed if each of these arguments, masked, has one of these values."""
_SIGNALS = {"kill": 62, "tkill": 200, "tgkill": 234}
_OF_ATTRIBUTES = range(188, 200)
"""From setxattr to fremovexattr: no file here has any."""
_FORKS = {"fork": 57, "vfork": 58}
_PRETENDED = (90, 91, 268, 452, 132, 235, 261, 280)
"""chmod, fchmod, fchmodat, fchmodat2, utime, utimes, futimesat, utimensat: they do nothing and say that they did, so that files can be
copied with what belongs to them."""
_CLONE, _X32 = 56, 0x40000000
_A_THREAD = 0x10000
"""In the flags of `clone`."""

_FIRST_WITH_FALLBACK = 424
"""From this number on ENOSYS is answered: programs then fall back to an older call."""

_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16


def restrict_calls(*, signals: bool, processes: bool) -> None:
    """Allow the system calls that a program in Python needs, and sending signals and starting processes only if that is said."""
    if platform.machine() != "x86_64":
        raise OSError(errno.ENOSYS, f"no filter for {platform.machine()}")
    numbers = list(_ALLOWED.values())
    numbers += _SIGNALS.values() if signals else ()
    numbers += _FORKS.values() if processes else ()
    program = b"".join(_filter(numbers, processes))
    code = ctypes.create_string_buffer(program)
    filtered = struct.pack("HP", len(program) // 8, ctypes.addressof(code))
    _control(_PR_SET_SECCOMP, 2, ctypes.create_string_buffer(filtered))


def _filter(numbers: Iterable[int], processes: bool) -> list[bytes]:
    """The filter in the kernel's little language: a jump says how many instructions are skipped if so, and if not."""
    allowed = _instruction(_RETURN, _ALLOW)
    refused = _instruction(_RETURN, _REFUSE | errno.EPERM)
    unknown = _instruction(_RETURN, _REFUSE | errno.ENOSYS)
    program = [
        _instruction(_LOAD, _ARCHITECTURE_AT),
        _instruction(_EQUAL, _X86_64, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_AT),
        _instruction(_AT_LEAST, _X32, 0, 1),  # the same calls under other numbers
        refused,
    ]
    for number in numbers:
        program += [_instruction(_EQUAL, number, 0, 1), allowed]
    for number in _PRETENDED:
        program += [_instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, _REFUSE)]
    for number in _OF_ATTRIBUTES:
        unsupported = _instruction(_RETURN, _REFUSE | errno.ENOTSUP)
        program += [_instruction(_EQUAL, number, 0, 1), unsupported]
    for number, conditions in _PARTLY.items():
        checks = [each for condition in conditions for each in _checked(*condition, refused)]
        program += [_instruction(_EQUAL, number, 0, len(checks) + 1), *checks, allowed]
    return [
        *program,
        _instruction(_EQUAL, _CLONE, 0, 5),
        _instruction(_LOAD, _FIRST_ARGUMENT_AT),
        _instruction(_ANY_BIT, _ANY_NAMESPACE, 1, 0),
        _instruction(_ANY_BIT, 0xFFFFFFFF if processes else _A_THREAD, 1, 0),
        refused,
        allowed,
        _instruction(
            _AT_LEAST, _FIRST_WITH_FALLBACK, 0, 1
        ),  # `clone3` too, whose flags cannot be seen
        unknown,
        refused,
    ]


def _checked(argument: int, mask: int, values: tuple[int, ...], refused: bytes) -> list[bytes]:
    """Refuse unless an argument, of which these bits count, has one of the values."""
    looked_at = [
        _instruction(_LOAD, _FIRST_ARGUMENT_AT + 8 * argument),
        _instruction(_AND, mask),
    ]
    left = len(values)
    equal = [_instruction(_EQUAL, value, left - n, 0) for n, value in enumerate(values)]
    return [*looked_at, *equal, refused]


def _instruction(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_so, if_not, value)


# The gateway to the C library


def _control(option: int, value: object, argument: object = 0) -> None:
    _call("prctl", option, value, argument, 0, 0)


def _raw(name: str, *arguments: object) -> int:
    return _call("syscall", _LANDLOCK[name], *arguments)


def _call(name: str, *arguments: object) -> int:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"{name}: only on Linux")
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype = ctypes.c_long
    answer: int = function(*(_plain(each) for each in arguments))
    if answer == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return answer


def _plain(argument: object) -> object:
    """Numbers as wide as a register: C would read the upper half of a narrower one from wherever."""
    return ctypes.c_long(argument) if isinstance(argument, int) else argument
