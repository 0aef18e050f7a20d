"""Linux features with which a process gives up rights: namespaces, another user, Landlock, seccomp.

Each function changes the calling process permanently, through system calls only; its children inherit the change. If the kernel
lacks a feature, or this container may not use it, the function raises OSError and changes nothing. `sandbox_child` defines the
order of the calls.
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
"""The descriptor of a program's first channel to the outside; further channels have the next numbers."""

_NEWNS, _NEWUTS, _NEWIPC = 0x20000, 0x4000000, 0x8000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_APART = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
_ANY_NAMESPACE = _APART | _NEWUSER | 0x2000000
"""All namespace flags of `clone`, control groups included."""

_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_SET_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_CAPABILITIES_V3 = 0x20080522

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Audit numbers (`linux/audit.h`), by Python's name, of the architectures whose system calls are numbered below."""


# Namespaces


def leave_namespaces() -> None:
    """Put this process where it sees no network, and its next child where it sees no other process.

    Root needs no further rights; other users get their own user namespace, which not every system allows.
    """
    user, group = os.geteuid(), os.getegid()
    _libc_call("unshare", _APART if user == 0 else _APART | _NEWUSER)
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    # Invisible outside the namespace.
    _libc_call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)


def mount_memory(folder: str, size: int) -> None:
    """Mount `folder` in memory, with at most `size` bytes; it disappears with this namespace."""
    options = f"size={size},nr_inodes=4096,mode=0700".encode()
    _libc_call("mount", b"tmpfs", folder.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, options)


def mount_again(source: str, target: str) -> None:
    """Mount the folder `source` at `target` as well."""
    _libc_call("mount", os.fsencode(source), os.fsencode(target), None, _MS_BIND | _MS_REC, None)


# The identity of the process


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends, so none escapes."""
    _prctl(_PR_SET_SUBREAPER, 1)


def end_with_parent() -> None:
    """Have this process killed when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become(user: int) -> None:
    """Become a user who owns nothing; only root can."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def give_up_privileges() -> None:
    """Drop every capability, gain none by executing anything, and hide this process's memory from others."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    header = struct.pack("=Ii", _CAPABILITIES_V3, 0)
    _libc_call("capset", header, bytes(24))
    _prctl(_PR_SET_DUMPABLE, 0)


# Files


def restrict_files(readable: Iterable[str], writable: Iterable[str], devices: Iterable[str]) -> int:
    """Landlock: only these files can be opened. Returns the version of the kernel's interface.

    A folder includes everything in it; missing paths are skipped. From version 6 on, signals do not reach processes outside.
    """
    version = _landlock_call("landlock_create_ruleset", None, 0, 1)
    # All file rights that this version has: 13 at first, later also moving, truncating, and controlling devices.
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    words = [rights] + ([3] if version >= 4 else []) + ([3] if version >= 6 else [])
    # Files, connections, abstract sockets, signals.
    rules = struct.pack(f"={len(words)}Q", *words)
    ruleset = _landlock_call("landlock_create_ruleset", rules, len(rules), 0)
    try:
        for path in readable:
            _allow_path(ruleset, path, _READ)
        for path in devices:
            _allow_path(ruleset, path, _READ_FILE | _WRITE_FILE)
        for path in writable:
            _allow_path(ruleset, path, rights)
        _landlock_call("landlock_restrict_self", ruleset, 0)
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
"""System call numbers of Landlock, the same on every architecture."""


def _allow_path(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rights &= -1 if Path(path).is_dir() else _OF_A_FILE
        _landlock_call("landlock_add_rule", ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)


# System calls

_Numbers = tuple[int | None, int | None]
"""A system call's numbers, in the order of `_ARCHITECTURES` (the second from `asm-generic/unistd.h`); None if it does not exist."""

_ALLOWED: dict[str, _Numbers] = {
    # files, which Landlock judges when they are opened or changed by path
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None),
    "fstat": (5, 80), "lstat": (6, None), "poll": (7, None), "lseek": (8, 62), "pread64": (17, 67),
    "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "preadv": (295, 69),
    "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287), "access": (21, None),
    "pipe": (22, None), "pipe2": (293, 59), "select": (23, None), "pselect6": (270, 72),
    "ppoll": (271, 73), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "sendfile": (40, 71), "copy_file_range": (326, 285), "flock": (73, 32), "fsync": (74, 82),
    "fdatasync": (75, 83), "ftruncate": (77, 46), "getdents": (78, None), "getdents64": (217, 61),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, None),
    "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "creat": (85, None), "link": (86, None), "linkat": (265, 37),
    "unlink": (87, None), "unlinkat": (263, 35), "symlink": (88, None), "symlinkat": (266, 36),
    "readlink": (89, None), "readlinkat": (267, 78), "umask": (95, 166), "openat": (257, 56),
    "newfstatat": (262, 79), "statx": (332, 291), "faccessat": (269, 48), "faccessat2": (439, 439),
    "statfs": (137, 43), "fstatfs": (138, 44), "close_range": (436, 436),
    # waiting for several things
    "epoll_create": (213, None), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_wait": (232, None), "epoll_pwait": (281, 22), "eventfd": (284, None),
    "eventfd2": (290, 19),
    # memory
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214),
    "mremap": (25, 216), "msync": (26, 227), "madvise": (28, 233), "mincore": (27, 232),
    "membarrier": (324, 283),
    # receiving signals
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132), "restart_syscall": (219, 128), "pause": (34, None),
    "alarm": (37, None), "getitimer": (36, 102), "setitimer": (38, 103),
    # time
    "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None), "times": (100, 153),
    # the process itself; of other processes `sched_getaffinity` shows only which CPUs they may use
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getpgrp": (111, None),
    "getpgid": (121, 155), "getsid": (124, 156), "setpgid": (109, 154), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getresuid": (118, 148),
    "getresgid": (120, 150), "getgroups": (115, 158), "uname": (63, 160), "sysinfo": (99, 179),
    "getrusage": (98, 165), "getrlimit": (97, 163), "setrlimit": (160, 164), "getcpu": (309, 168),
    "getrandom": (318, 278), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "arch_prctl": (158, None), "set_tid_address": (218, 96), "set_robust_list": (273, 99),
    "futex": (202, 98), "rseq": (334, 293),
    # other programs, and the end
    "execve": (59, 221), "wait4": (61, 260), "waitid": (247, 95), "exit": (60, 93),
    "exit_group": (231, 94),
    # its own sockets
    "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212),
    "shutdown": (48, 210), "getsockname": (51, 204), "getpeername": (52, 205),
    "getsockopt": (55, 209),
}  # fmt: skip
"""System calls that CPython and its standard library need, found by running them. All others are refused: calls that reach the
network, other processes or rare parts of the kernel, that outlive the box or use memory outside of any limit, and that change files
in ways that Landlock does not check, because it only controls opening them (rights, owners, times, attributes).
"""
_PARTLY: dict[tuple[int, int], tuple[tuple[int, int, tuple[int, ...]], ...]] = {
    (72, 25): ((1, 0xFFFFFFFF, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)),),  # fcntl: no signal owner, no lease, no notification
    (16, 29): ((1, 0xFFFFFFFF, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),  # ioctl: terminal queries, number of readable bytes
    (157, 167): ((0, 0xFFFFFFFF, (15, 16)),),  # prctl: a thread's name
    (302, 261): ((0, 0xFFFFFFFF, (0,)),),  # prlimit64: its own limits
    (53, 199): ((0, 0xFFFFFFFF, (1,)), (1, 0xF, (1,))),  # socketpair: of streams, which reach no other process
}  # fmt: skip
"""System calls that are allowed if each of these arguments, masked, has one of these values."""
_SIGNALS: dict[str, _Numbers] = {"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131)}
_OF_ATTRIBUTES = (range(188, 200), range(5, 17))
"""Numbers of setxattr to fremovexattr, by architecture: files in the box have no extended attributes."""
_FORKS: dict[str, _Numbers] = {"fork": (57, None), "vfork": (58, None)}
"""`clone` does it on other architectures."""
_PRETENDED: dict[str, _Numbers] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
}  # fmt: skip
"""These calls have no effect but report success, so `shutil.copy2` and similar functions work."""
_CLONE = (56, 220)
_X32 = 0x40000000
_A_THREAD = 0x10000
"""Flag of `clone` that makes a thread."""

_FIRST_WITH_FALLBACK = 424
"""Calls from this number on return ENOSYS, so programs fall back to an older call."""

_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16


def restrict_calls(*, signals: bool, processes: bool) -> None:
    """Allow the system calls that a Python program needs; sending signals and starting processes only if `signals` and `processes`
    are set.
    """
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no filter for {platform.machine()}")
    program = b"".join(call_filter(platform.machine(), signals=signals, processes=processes))
    code = ctypes.create_string_buffer(program)
    filtered = struct.pack("HP", len(program) // 8, ctypes.addressof(code))
    _prctl(_PR_SET_SECCOMP, 2, ctypes.create_string_buffer(filtered))


def call_filter(architecture: str, *, signals: bool, processes: bool) -> list[bytes]:
    """The filter as BPF instructions: a jump gives the number of instructions to skip if its test is true, and if it is false."""
    which = list(_ARCHITECTURES).index(architecture)
    calls = {**_ALLOWED, **(_SIGNALS if signals else {}), **(_FORKS if processes else {})}
    allowed = _instruction(_RETURN, _ALLOW)
    refusal = _instruction(_RETURN, _REFUSE | errno.EPERM)
    unknown = _instruction(_RETURN, _REFUSE | errno.ENOSYS)
    program = [
        _instruction(_LOAD, _ARCHITECTURE_AT),
        _instruction(_EQUAL, _ARCHITECTURES[architecture], 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_AT),
        _instruction(_AT_LEAST, _X32, 0, 1),  # the x32 variants of the same calls
        refusal,
    ]
    answers = (
        (allowed, [numbers[which] for numbers in calls.values()]),
        (_instruction(_RETURN, _REFUSE), [numbers[which] for numbers in _PRETENDED.values()]),
        (_instruction(_RETURN, _REFUSE | errno.ENOTSUP), _OF_ATTRIBUTES[which]),
    )
    for answer, numbers in answers:
        for number in numbers:
            if number is not None:
                program += [_instruction(_EQUAL, number, 0, 1), answer]
    for numbers, conditions in _PARTLY.items():
        checks = [
            instruction
            for condition in conditions
            for instruction in _refuse_unless_value_in(*condition, refusal)
        ]
        program += [
            _instruction(_EQUAL, numbers[which], 0, len(checks) + 1),
            *checks,
            allowed,
        ]
    return [
        *program,
        _instruction(_EQUAL, _CLONE[which], 0, 5),
        _instruction(_LOAD, _FIRST_ARGUMENT_AT),
        _instruction(_ANY_BIT, _ANY_NAMESPACE, 1, 0),
        _instruction(_ANY_BIT, 0xFFFFFFFF if processes else _A_THREAD, 1, 0),
        refusal,
        allowed,
        _instruction(
            _AT_LEAST, _FIRST_WITH_FALLBACK, 0, 1
        ),  # also `clone3`, whose flags a filter cannot read
        unknown,
        refusal,
    ]


def _refuse_unless_value_in(
    argument: int, mask: int, values: tuple[int, ...], refusal: bytes
) -> list[bytes]:
    """Refuse the call unless an argument, masked, has one of the values."""
    looked_at = [
        _instruction(_LOAD, _FIRST_ARGUMENT_AT + 8 * argument),
        _instruction(_AND, mask),
    ]
    count = len(values)
    equal = [_instruction(_EQUAL, value, count - n, 0) for n, value in enumerate(values)]
    return [*looked_at, *equal, refusal]


def _instruction(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_so, if_not, value)


# Access to the C library


def _prctl(option: int, value: object, argument: object = 0) -> None:
    _libc_call("prctl", option, value, argument, 0, 0)


def _landlock_call(name: str, *arguments: object) -> int:
    return _libc_call("syscall", _LANDLOCK[name], *arguments)


def _libc_call(name: str, *arguments: object) -> int:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"{name}: only on Linux")
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype = ctypes.c_long
    # Pass integers as wide as a register: C would read garbage in the upper half of a narrower one.
    answer: int = function(
        *(
            ctypes.c_long(argument) if isinstance(argument, int) else argument
            for argument in arguments
        )
    )
    if answer == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return answer
