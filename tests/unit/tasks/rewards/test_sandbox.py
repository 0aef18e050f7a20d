"""The contract of the sandbox, with programs that really attack it.

1. A program gets its input and has its output taken; it finds the standard library, an empty folder, and nothing of this process.
2. Every limit ends or refuses, whatever is done: time, memory, processes, files, output.
3. Nothing that it started outlives it, and it outlives nobody who started it.
4. What a protection promises holds wherever the box says so, and the box says so only then.
5. A box that cannot be built, or not as it is required, runs nothing and says why.
"""

import asyncio
import errno
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress

import pytest

from groupwise.core.errors import SandboxError
from groupwise.tasks.rewards import sandbox
from groupwise.tasks.rewards.sandbox import MECHANISMS, PROTECTIONS, Box, Limits, run
from groupwise.tasks.rewards.sandbox_kernel import call_filter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its protections are Linux's")
WAYS = ((), ("namespaces",), ("namespaces", "seccomp"))
"""Mechanisms that are left out."""
SHORT = Limits(seconds=0.4)


async def running(source: str, limits: Limits | None = None, **options):
    return await run(textwrap.dedent(source), limits=limits or Limits(seconds=20), **options)


async def printed(source: str, **options) -> str:
    result = await running(source, **options)
    assert result.ending == "finished", result.errors.decode()
    return result.output.decode()


async def each_way(source: str, *ways: tuple[str, ...], needs: str, **options):
    """The results of a program, at the same time without the mechanisms of each way; of those in which a protection holds."""
    found = await asyncio.gather(*(running(source, without=way, **options) for way in ways))
    held = [result for result in found if needs not in result.missing]
    if not held:
        pytest.skip(f"{needs} does not hold on this system")
    return held


def everyone_gone(ours: socket.socket) -> bool:
    """Whether nobody holds the other end any more; it is inherited by every process of a box."""
    ours.settimeout(10)
    try:
        while ours.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    return True


# 1. the ordinary case


async def test_input_output_and_exit_codes():
    source = "import sys; print(input()); sys.stderr.write('no'); sys.exit(3)"
    found = await running(source, stdin=b"yes\n")
    assert (found.ending, found.code, found.cut) == ("failed", 3, False)
    assert (found.output, found.errors) == (b"yes\n", b"no")
    broken = await running("def f(:", stdin=b"x" * 5_000_000)  # which nobody reads
    assert broken.ending == "failed"
    assert b"SyntaxError" in broken.errors


async def test_a_program_is_a_script():
    source = """
        import dataclasses, atexit, threading
        @dataclasses.dataclass
        class Point:
            x: int
        if __name__ == "__main__":
            atexit.register(print, "last")
            threading.Thread(target=print, args=("thread",)).start()
            print(Point(1), "é".encode("idna"))
    """
    out = await printed(source)
    assert out.splitlines()[-1] == "last"
    assert set(out.splitlines()) == {"Point(x=1) b'xn--9ca'", "thread", "last"}


async def test_it_finds_the_standard_library_an_empty_folder_and_nothing_else(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    source = """
        import os
        print(sorted(os.environ), os.listdir(), os.getcwd() == os.environ['HOME'])
        import sqlite3, ssl, asyncio, multiprocessing, xml.dom.minidom, concurrent.futures, json.tool
        asyncio.run(asyncio.sleep(0))
        for name in ("pydantic", "numpy", "pytest"):
            try:
                __import__(name)
                print(name)
            except ImportError:
                pass
        print({str(i) for i in range(50)})
    """
    names = ["GROUPWISE_REWARD_WORKER", "HOME", "LANG", "PATH", "PYTHONHASHSEED", "PYTHONUTF8"]
    names += ["TMPDIR", *(["LD_LIBRARY_PATH"] if "LD_LIBRARY_PATH" in os.environ else [])]
    seen, order = (await printed(source)).splitlines()
    assert seen == f"{sorted(names)} [] True"
    assert await printed("print({str(i) for i in range(50)})") == f"{order}\n", "as every time"


async def test_its_folder_is_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    source = """
        import os
        open("file", "w").write("x")
        os.mkdir("closed", 0)
        for _ in range(20):  # further down than the longest path
            os.mkdir("d" * 250); os.chdir("d" * 250)
    """
    await printed(source, without=["namespaces"])
    assert list(tmp_path.iterdir()) == []


async def test_while_its_folder_is_deleted_others_continue(monkeypatch):
    loop, delete, went_on = asyncio.get_running_loop(), sandbox._delete_tree, threading.Event()

    def deleted(folder):
        loop.call_soon_threadsafe(went_on.set)
        assert went_on.wait(10)
        delete(folder)

    monkeypatch.setattr(sandbox, "_delete_tree", deleted)
    await printed("print(1)")


# 2. limits


ENDLESS = (
    "while True: pass",
    "import time; time.sleep(60)",
    "import signal\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\nwhile True: pass",
    "def f(n): return [f(n + 1)]\nimport sys; sys.setrecursionlimit(10**9)\nwhile True:\n  try: f(0)\n  except BaseException: pass",
)


async def test_the_clock_ends_it():
    since = time.monotonic()
    results = await asyncio.gather(*(running(source, SHORT) for source in ENDLESS))
    assert {result.ending for result in results} <= {"timed_out", "killed"}
    assert time.monotonic() - since < 20


async def test_endless_output_is_cut():
    limits = Limits(seconds=0.4, output=1000)
    async with Box({"source": "while True: print('x' * 99)"}, limits=limits) as box:
        assert set(await box.wait_until_running()) == set(PROTECTIONS)
        result = await box.result()
    assert (result.ending, len(result.output), result.cut) == ("timed_out", 1000, True)


async def test_memory_is_limited():
    assert "MemoryError" in (await running("x = bytearray(1 << 30)")).errors.decode()
    small = Limits(seconds=20, memory=64 << 20)
    assert "MemoryError" in (await running("x = bytearray(1 << 26)", small)).errors.decode()


async def test_it_ends_first_where_memory_runs_out():
    seen = "print(open('/proc/self/oom_score_adj').read())"
    assert await printed(seen, without=["namespaces", "landlock", "user"], require=()) == "1000\n\n"


async def test_files_are_limited():
    source = """
        for attempt in (lambda: os.write(os.open("f", os.O_CREAT | os.O_WRONLY), b"x" * 2000), fill):
            try:
                print(attempt())
                print(attempt())
            except OSError as error:
                print(error.strerror)
    """
    prelude = (
        "import os\ndef fill():\n    return len([os.open('/dev/null', 0) for _ in range(40)])\n"
    )
    result = await running(prelude + textwrap.dedent(source), Limits(seconds=20, file_size=1000))
    assert result.output.decode().splitlines() == [
        *("1000", "1000"),  # what still fits is written
        *("40", "Too many open files"),
    ]


async def test_the_disk_is_limited():
    source = "for i in range(100): open(str(i), 'wb').write(b'x' * 100_000)"
    (result,) = await each_way(source, (), needs="disk", limits=Limits(seconds=20, disk=1 << 20))
    assert "No space left" in result.errors.decode()


@pytest.mark.parametrize("without", WAYS[:2])
async def test_a_fork_bomb_is_bounded_and_swept_up(without):
    source = """
        import os
        while True:
            try:
                os.fork()
            except OSError:
                pass
    """
    ours, theirs = socket.socketpair()
    program = {"source": textwrap.dedent(source)}
    with ours, theirs:
        async with Box(program, limits=SHORT, channels=[theirs], without=without) as box:
            theirs.close()
            result = await box.result()
        assert everyone_gone(ours)
    assert result.ending == "timed_out"


# 3. nothing outlives it


ORPHAN = """
import os, sys, time
if os.fork() == 0:
    try:
        os.setsid()
    except OSError:
        pass
    if os.fork() == 0:
        os.environ.clear()
        for number in (0, 1, 2):
            os.close(number)
        time.sleep(20)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize(("without", "end"), [
    ((), ""), ((), "while True: pass"), (("namespaces",), "while True: pass"),
    (("namespaces", "seccomp"), ""),
])  # fmt: skip
async def test_an_orphan_that_hid_ends_with_the_program(without, end):
    if os.geteuid() == 0 and without == ("namespaces",):
        pytest.skip("root starts no processes there")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        box = Box({"source": ORPHAN + end}, limits=SHORT, channels=[theirs], without=without)
        async with box:
            theirs.close()
            await box.result()
        assert everyone_gone(ours)


async def test_it_ends_when_it_is_given_up():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with suppress(TimeoutError):
            async with asyncio.timeout(30), Box({"source": ORPHAN}, channels=[theirs]) as box:
                theirs.close()
                await box.wait_until_running()
                raise TimeoutError
        assert everyone_gone(ours)


SCRIPT = """
import asyncio, os, signal, socket, sys
from groupwise.tasks.rewards.sandbox import Box
async def main():
    theirs = socket.socket(fileno=int(sys.argv[1]))
    async with Box({{"source": {source!r}}}, channels=[theirs], without={without!r}) as box:
        theirs.close()
        await box.wait_until_running()
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def test_it_ends_when_whoever_started_it_is_killed(tmp_path):
    pairs = [socket.socketpair() for _ in WAYS]
    started = []
    for (_, theirs), without in zip(pairs, WAYS, strict=True):
        script = SCRIPT.format(source="import time; time.sleep(20)", without=without)
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", script, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "TMPDIR": str(tmp_path)},
            )
        )
        theirs.close()
    assert [process.wait(60) for process in started] == [-signal.SIGKILL] * len(WAYS)
    for ours, _ in pairs:
        with ours:
            assert everyone_gone(ours)


# 4. protections


def attempt(source: str) -> str:
    """A program that prints what it did or `refused`."""
    body = textwrap.indent(textwrap.dedent(source), "    ")
    return f"import os, socket, signal\ntry:\n{body}\nexcept OSError:\n    print('refused')"


async def test_files_of_others_are_closed(tmp_path):
    (tmp_path / "secret").write_text("secret")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    source = f"""
        import os
        for attempt in (
            lambda: open('{tmp_path}/secret').read(),
            lambda: open('{tmp_path}/open/new', 'w'),
            lambda: os.mkdir('{tmp_path}/open/new'),
            lambda: os.rename('{tmp_path}/secret', 'mine'),
            lambda: os.link('{tmp_path}/secret', 'mine'),
            lambda: os.remove('{tmp_path}/secret'),
            lambda: os.listdir('/proc'),
            lambda: open('/etc/passwd').read(),
        ):
            try:
                print(attempt())
            except OSError:
                print("refused")
    """
    for result in await each_way(source, (), ("namespaces",), ("seccomp",), needs="files"):
        assert result.output == b"refused\n" * 8
    assert (tmp_path / "secret").read_text() == "secret"
    assert list((tmp_path / "open").iterdir()) == []


async def test_a_group_signal_ends_the_program_alone():
    assert (await running("import os; os.killpg(0, 9)")).ending == "killed"


async def test_no_connection_can_be_made():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        reach = f"s = socket.socket(); s.connect(('127.0.0.1', {port})); print('through')"
        source = attempt(reach)
        ways = ((), ("namespaces",), ("seccomp",))
        for result in await each_way(source, *ways, needs="network"):
            assert result.output == b"refused\n"
        bare = await running(source, without=MECHANISMS)
    assert (set(bare.missing), bare.output) == (set(PROTECTIONS), b"through\n")


async def test_signals_reach_no_process_outside_the_sandbox():
    source = f"""
        import os, signal
        for process in (os.getppid(), {os.getpid()}):
            try:
                os.kill(process, signal.SIGTERM)
                print('sent')
            except OSError:
                pass
    """
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("a signal came"))
    ways = ((), ("namespaces", "user"), ("landlock", "namespaces"))
    try:
        results = await asyncio.gather(*(running(source, without=way) for way in ways))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert {result.ending for result in results} == {"finished"}
    assert results[0].output in (b"", b"sent\n"), "its own namespace has a parent"
    assert [result.output for result in results[1:]] == [b"", b""]


async def test_calls_that_reach_beyond_the_program_are_refused(tmp_path):
    source = f"""
        import ctypes, errno, os, socket
        call = ctypes.CDLL(None, use_errno=True).syscall
        ends, outside, time = socket.socketpair(), {os.getpid()}, ctypes.create_string_buffer(64)
        for attempt in (
            (302, outside, 7, 0, time),             # prlimit64
            (141, 0, outside, 19),                  # setpriority
            (144, outside, 0, time),                # sched_setscheduler
            (203, outside, 8, b"\\1" + bytes(7)),    # sched_setaffinity
            (251, 1, outside, 4 << 13),             # ioprio_set
            (72, ends[0].fileno(), 8, outside),     # fcntl, F_SETOWN
            (72, ends[0].fileno(), 10, 9),          # fcntl, F_SETSIG
            (16, ends[0].fileno(), 0x8901, time),   # ioctl, FIOSETOWN
            (53, 1, 2, 0, time),                    # socketpair of datagrams
            (157, 36, 1, 0, 0),                     # prctl, to adopt orphans
            *((number, 0, 0, 0) for number in (101, 165, 253, 272, 279, 319, 434, 435, 438, 440, 447)),
        ):
            if call(*attempt) != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
                print(attempt, ctypes.get_errno())
    """
    source += f"""
        print(call(90, b"{tmp_path}", 0o777), call(280, -100, b"{tmp_path}", 0, 0))  # chmod, utimensat
    """
    tmp_path.chmod(0o755)
    before = tmp_path.stat()
    for result in await each_way(source, (), ("namespaces", "user"), needs="calls"):
        assert (result.output, result.errors, result.code) == (b"0 0\n", b"", 0)
    assert tmp_path.stat() == before, "what is pretended does nothing"


async def test_the_standard_library_has_all_calls_that_it_needs():
    source = """
        import asyncio, concurrent.futures, ctypes, io, json, mmap, os, pathlib, random, resource, select, shutil
        import signal, socket, sqlite3, sys, tempfile, threading, time, uuid, zipfile
        async def both():
            return await asyncio.gather(asyncio.to_thread(time.sleep, 0.001), asyncio.sleep(0.001))
        asyncio.run(both())
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            assert list(pool.map(abs, (-1, 2))) == [1, 2]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "a")
            path.write_text("x" * 5000)
            shutil.copy2(path, path.with_name("b")), path.rename(path.with_name("c"))
            assert sorted(os.listdir(folder)) == ["b", "c"]
            with zipfile.ZipFile(path, "w") as packed:
                packed.writestr("d", "e")
            base = sqlite3.connect(os.path.join(folder, "base"))
            base.execute("create table t (n)"), base.commit(), base.close()
        signal.signal(signal.SIGALRM, lambda *_: None), signal.setitimer(signal.ITIMER_REAL, 0.001), signal.pause()
        ends = socket.socketpair()
        ends[0].sendall(b"x"), select.select([ends[1]], [], [], 1), ends[1].recv(1)
        mmap.mmap(-1, 4096), uuid.uuid4(), os.urandom(8), os.cpu_count(), resource.getrlimit(resource.RLIMIT_AS)
        print(input(), os.isatty(0), sys.argv, __file__, ctypes.CDLL(None).ftruncate(0, 9), ctypes.CDLL(None).write(0, b"x", 1))
        exit()
    """
    results = [
        await running(source, stdin=b"read", without=without) for without in ((), ("seccomp",))
    ]
    assert [(r.output, r.errors) for r in results] == [
        (b"read False ['program.py'] program.py -1 -1\n", b"")
    ] * 2


X86, ARM = 0xC000003E, 0xC00000B7
ALLOWED, PRETENDED, KILLED = 0x7FFF0000, 0x50000, 0x80000000
REFUSED, UNKNOWN = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
THREAD, FORK = 0x3D0F00, signal.SIGCHLD
"""Flags of `clone`."""


def answer_of(program: list[bytes], architecture: int, number: int, *arguments: int) -> int:
    """What the kernel does about a call, by the filter's instructions (seccomp(2))."""
    data = struct.pack("=iIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    value = at = 0
    while True:
        code, if_so, if_not, k = struct.unpack("=HBBI", program[at])
        at += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("=I", data, k)
            case 0x54:
                value &= k
            case 0x15 | 0x35 | 0x45:
                holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
                at += if_so if holds else if_not
            case 0x06:
                return k


def test_the_filter_of_calls_of_each_architecture():
    x86, arm = (call_filter(each, signals=False, processes=False) for each in ("x86_64", "aarch64"))
    assert answer_of(x86, ARM, 0) == answer_of(arm, X86, 63) == KILLED
    for of_x86, of_arm, arguments, answer in (  # openat, fchmod, kill, clone3; ptrace, connect; clone; fcntl; socketpair
        (257, 56, (), ALLOWED), (91, 52, (), PRETENDED), (62, 129, (), REFUSED), (435, 435, (), UNKNOWN),
        (101, 117, (), REFUSED), (42, 203, (), REFUSED), (56, 220, (THREAD,), ALLOWED), (56, 220, (FORK,), REFUSED),
        (72, 25, (0, 3), ALLOWED), (72, 25, (0, 8), REFUSED), (53, 199, (1, 1), ALLOWED), (53, 199, (1, 2), REFUSED),
    ):  # fmt: skip
        found = answer_of(x86, X86, of_x86, *arguments), answer_of(arm, ARM, of_arm, *arguments)
        assert found == (answer, answer), (of_x86, arguments)
    forking = call_filter("aarch64", signals=True, processes=True)
    assert answer_of(forking, ARM, 220, FORK) == answer_of(forking, ARM, 129) == ALLOWED
    assert answer_of(forking, ARM, 220, FORK | 0x10000000) == REFUSED, "a namespace of its own"


async def test_root_is_left_behind():
    source = "import os; print(os.getuid(), os.getgid(), os.getgroups())"
    (result,) = await each_way(source, (), needs="user")
    (number,) = result.held["user"]
    user = number.removeprefix("number ")
    assert result.output.decode() == f"{user} {user} []\n"
    assert int(user) > 1000


# 5. no box


async def test_a_required_protection_that_does_not_hold_stops_everything(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    source = f"open({str(tmp_path / 'open' / 'ran')!r}, 'w')"
    with pytest.raises(SandboxError, match="files was required"):
        await running(source, require=["files"], without=MECHANISMS)
    assert list((tmp_path / "open").iterdir()) == []


async def test_a_box_that_cannot_be_built_says_why(monkeypatch):
    with pytest.raises(SandboxError, match="'nowhere'"):
        async with Box({"function": "nowhere:f", "arguments": {}}) as box:
            await box.result()
    monkeypatch.setattr(sandbox, "_BARE", ("-c", "raise SystemExit('no warden')"))
    with pytest.raises(SandboxError, match="no warden"):
        await running("")
    monkeypatch.setattr(sandbox.sys, "executable", "/nowhere/python")
    with pytest.raises(SandboxError, match="cannot be started"):
        await running("")
