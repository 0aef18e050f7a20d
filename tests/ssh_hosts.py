"""Machines with a real sshd, in two kinds, with fault injection (power loss, partition, reset).

`loopback_hosts`: sshd on an address of 127/8, as the user that runs the tests. Each has its own home, host key, PATH and work folder, but
shares process ids, boot id and network with everybody. Its parent is a supervisor, a process that adopts whatever is left of it, and ends
all of it when the test ends in whatever way.

`full_hosts`: machines in network, process and mount namespaces of their own, joined by a bridge (root, Linux). They can lose power, be cut
off, be rebooted, swallow answers and reset connections. They lie in a network that only this test process, and what it
starts, is in (`own_network`); all of it goes when they go.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from tests.ports import free_port
from tests.processes import TIMEOUT_S, wait_until
from tests.required_programs import (
    SEARCH_PATH,
    require_programs,
    root_needed,
    with_parent_death_signal,
)

if TYPE_CHECKING:
    from groupwise.jobs.hosts.ssh import Address

SUBNET = "10.77.0"
FAKE_NVIDIA_SMI = Path(__file__).with_name("fake_nvidia_smi.py")


# --- What both forms share ------------------------------------------------------------------------


@dataclass
class Host:
    """A machine with an sshd."""

    name: str
    address: str
    port: int
    user: str
    folder: Path
    """The machine's folder: home, keys, sshd's log."""
    key_path: Path
    """The private key to log in with."""
    home: Path

    @property
    def host_key(self) -> str:
        """The public host key, in the form in which it is pinned."""
        return " ".join((self.folder / "hostkey.pub").read_text().split()[:2])

    @property
    def workdir(self) -> Path:
        """The default folder of its runner's files."""
        return self.home / "groupwise-fleet"

    def vm_row(self, vm_id: str | None = None, *, pinned: bool = True) -> dict[str, Any]:
        """The columns of a row of `vms` for this machine."""
        return {
            "vm_id": vm_id or self.name,
            "ip_address": self.address,
            "port": self.port,
            "user": self.user,
            "ssh_key_path": str(self.key_path),
            "host_key": self.host_key if pinned else None,
        }

    @property
    def login(self) -> "Address":
        """The machine's address and login."""
        from groupwise.jobs.hosts.ssh import Address

        return Address(self.address, self.user, self.port, str(self.key_path), self.host_key)

    def gpus(self, count: int = 2, *, mode: str = "normal", **state: Any) -> list[str]:
        """Give it GPUs, or change what its nvidia-smi says of them (`fake_nvidia_smi.py` tells what there is). Their UUIDs."""
        return fake_gpus(self.folder / "bin", self.name, count, mode=mode, **state)

    def new_host_key(self) -> None:
        """Replace the host key, as after a reinstallation. sshd reads keys when it starts: call `restart` afterwards."""
        for name in ("hostkey", "hostkey.pub"):
            (self.folder / name).unlink(missing_ok=True)
        _keygen(self.folder / "hostkey")

    def new_login_key(self) -> None:
        """Replace the key that its user accepts."""
        self.key_path = self.folder / f"id_{uuid.uuid4().hex}"
        _keygen(self.key_path)
        # In place, so that its owner stays.
        (self.home / ".ssh" / "authorized_keys").write_text(
            self.key_path.with_suffix(".pub").read_text()
        )

    def log(self) -> str:
        """The log of its sshd."""
        return (self.folder / "sshd.log").read_text(errors="replace")

    def _prepare(self, owner: int | None = None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        binaries = self.folder / "bin"
        for place in (binaries, self.home / ".ssh"):
            place.mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o755)
        (self.home / ".ssh").chmod(0o700)
        _keygen(self.folder / "hostkey")
        shutil.copy(self.key_path.with_suffix(".pub"), self.home / ".ssh" / "authorized_keys")
        if owner is not None:
            for place in (self.home, self.home / ".ssh", self.home / ".ssh" / "authorized_keys"):
                os.chown(place, owner, owner)


def fake_gpus(
    folder: Path, name: str, count: int = 2, *, mode: str = "normal", **state: Any
) -> list[str]:
    """Write an nvidia-smi into a folder on PATH, with the GPUs that it shows; returns their UUIDs."""
    uuids = [f"GPU-{name}-{n}" for n in range(count)]
    cards = [
        {
            "uuid": uuid, "model": "NVIDIA H100 80GB HBM3", "memory_mb": 81559, "used_mb": 4, "utilisation": 0, "temperature": 31,
            "mig": None, "cells": {},
        }
        for uuid in uuids
    ]  # fmt: skip
    said = {"mode": mode, "gpus": cards, "apps": [], "marker_apps": {}, **state}
    program = folder / "nvidia-smi"
    answers = program.with_suffix(".json")
    temporary = answers.with_suffix(".new")
    temporary.write_text(json.dumps(said))
    temporary.replace(answers)
    if not program.exists():
        shutil.copy(FAKE_NVIDIA_SMI, program)
        program.chmod(0o755)
    return uuids


def _keygen(path: Path, kind: str = "ed25519") -> None:
    if not path.exists():
        command = [require_programs("ssh-keygen"), "-q", "-t", kind, "-N", "", "-f", str(path)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _until_it_answers(address: str, port: int, alive: Any, log: Any) -> None:
    def answers() -> bool:
        assert alive(), log()
        with contextlib.suppress(OSError), socket.create_connection((address, port), 0.2) as probe:
            probe.settimeout(1)
            return probe.recv(4) == b"SSH-"
        return False

    wait_until(answers, "sshd", details=log)


# --- Plain ones, on loopback ----------------------------------------------------------------------

SUPERVISOR = textwrap.dedent(
    """
    import ctypes, os, signal, subprocess, sys, time

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: what detaches itself becomes a child of this process

    def below(me):
        parents = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open("/proc/%s/stat" % name) as file:
                        parents[int(name)] = int(file.read().rpartition(") ")[2].split()[1])
                except OSError:
                    pass
        found = {me}
        while True:
            more = {pid for pid, parent in parents.items() if parent in found} - found
            if not more:
                return found - {me}
            found |= more

    def end_all():
        while below(os.getpid()):
            for pid in below(os.getpid()):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            reap()
            time.sleep(0.005)

    def reap():
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    signal.signal(signal.SIGCHLD, lambda *_: reap())
    log = open(sys.argv[1], "ab")
    for order in iter(sys.stdin.readline, ""):
        if order == "start\\n":
            subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        elif order == "end\\n":
            end_all()
        elif order == "hang up\\n":
            for pid in below(os.getpid()):
                try:
                    with open("/proc/%s/comm" % pid) as file:
                        if file.read() == "sshd\\n":
                            os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
        print("done", flush=True)
    end_all()
    """
)
"""Runs commands from its standard input; when that ends (its parent is gone), it kills all its descendants."""


class LoopbackHost(Host):
    """An sshd of this user, with its own address."""

    _supervisor: "subprocess.Popen[str] | None" = None

    def start(self) -> None:
        """Start sshd; returns when it accepts connections."""
        if self._supervisor is None:
            command = [sys.executable, "-S", "-c", SUPERVISOR, str(self.folder / "sshd.log")]
            self._supervisor = subprocess.Popen(
                [*command, *_sshd(), "-D", "-e", "-f", str(self.folder / "sshd_config")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        self._order("start")
        _until_it_answers(self.address, self.port, lambda: True, self.log)

    def power_loss(self) -> None:
        """Kill all its processes at once. Unlike in a real power loss, open connections are closed and the boot id stays."""
        self._order("end")

    def restart(self) -> None:
        """Restart sshd and everything else."""
        self.power_loss()
        self.start()

    def move(self, *, address: str | None = None, port: int | None = None) -> None:
        """Its sshd ends with all its connections and begins elsewhere, as when a cloud gives a machine another address: its jobs run on."""
        path = self.folder / "sshd_config"
        text = path.read_text()
        self.address, old_address = address or self.address, self.address
        self.port, old_port = port or self.port, self.port
        text = text.replace(f"ListenAddress {old_address}\n", f"ListenAddress {self.address}\n")
        path.write_text(text.replace(f"Port {old_port}\n", f"Port {self.port}\n"))
        self._order("hang up")
        self.start()

    def close(self) -> None:
        """End the machine and remove its files."""
        if self._supervisor is not None:
            self._supervisor.communicate(timeout=TIMEOUT_S)
            self._supervisor = None

    def _order(self, what: str) -> None:
        assert self._supervisor is not None
        self._supervisor.stdin.write(what + "\n")
        self._supervisor.stdin.flush()
        assert self._supervisor.stdout.readline() == "done\n"


def _sshd() -> list[str]:
    """The command for sshd. Started by root, it requires a folder in /run; if that is missing, sshd gets its own /run."""
    if os.geteuid() != 0 or Path("/run/sshd").is_dir():
        return [require_programs("sshd")]
    script = 'mount -t tmpfs -o mode=755 none /run && mkdir -m 755 /run/sshd && exec "$@"'
    shell = ["--mount", "--", "/bin/sh", "-c", script, "sh"]
    return [require_programs("unshare"), *shell, require_programs("sshd")]


@contextlib.contextmanager
def loopback_hosts(count: int = 1, *, settings: str = "") -> Iterator[list[LoopbackHost]]:
    """Started machines, at 127.0.0.11 and the following addresses. `settings`: further lines of sshd_config."""
    require_programs("sshd", "ssh-keygen")
    with _started(_loopback, count, settings) as hosts:
        yield hosts


H = TypeVar("H", "LoopbackHost", "FullHost")


@contextlib.contextmanager
def _started(
    make: Callable[[Path, int, Path, str], H], count: int, settings: str
) -> Iterator[list[H]]:
    with _folder() as folder:
        key = folder / "id_ed25519"
        _keygen(key)
        hosts = [make(folder, n, key, settings) for n in range(count)]
        try:
            for host in hosts:
                host.start()
            yield hosts
        finally:
            for host in hosts:
                host.close()


def _loopback(folder: Path, number: int, key: Path, settings: str) -> LoopbackHost:
    name = f"host{number + 1}"
    place = folder / name
    address = f"127.0.0.{11 + number}" if sys.platform == "linux" else "127.0.0.1"
    host = LoopbackHost(name, address, free_port(address), _user(), place, key, place / "home")
    host._prepare()
    enter = place / "enter"
    enter.write_text(
        f"#!/bin/sh\nexport HOME={host.home} PATH={place}/bin:/usr/local/bin:/usr/bin:/bin\n"
        'cd "$HOME" && exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    enter.chmod(0o755)
    _configure(
        host,
        settings,
        f"AuthorizedKeysFile {host.home}/.ssh/authorized_keys",
        "StrictModes no",
        f"SetEnv HOME={host.home} PATH={place}/bin:/usr/local/bin:/usr/bin:/bin",
        f"ForceCommand {enter}",
    )
    return host


def _configure(host: Host, settings: str, *own: str) -> None:
    """Write the configuration of the machine's sshd."""
    common = f"""
        Port {host.port}
        ListenAddress {host.address}
        HostKey {host.folder}/hostkey
        PidFile none
        UsePAM no
        PasswordAuthentication no
        KbdInteractiveAuthentication no
        UseDNS no
        PrintMotd no
        PrintLastLog no
        MaxStartups 100:30:200
    """
    text = "\n".join([textwrap.dedent(common), *own, textwrap.dedent(settings)])
    (host.folder / "sshd_config").write_text(text + "\n")


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A new folder, not below pytest's: other users must be able to enter it."""
    folder = Path(
        tempfile.mkdtemp(prefix="groupwise-hosts-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
    )
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- Whole ones, in namespaces --------------------------------------------------------------------

CLONE_NEWNET = 0x40000000
SPACES = ("--net", "--pid", "--uts", "--mount", "--ipc")
UID = 2001
INIT = """\
set -e; D=$1 N=$2 A=$3
mount --make-rprivate /; mount -t proc proc /proc
mount --bind $D/boot_id /proc/sys/kernel/random/boot_id
mount -t tmpfs -o mode=755 none /run; mkdir -m 755 /run/sshd
mount -t tmpfs -o mode=755 none /home; mkdir /home/gpu; mount --bind $D/home /home/gpu
mount --bind $D/passwd /etc/passwd; mount --bind $D/group /etc/group
hostname $N; ip link set lo up
for i in $(seq 500); do ip link show e0 >/dev/null 2>&1 && break; sleep .01; done
ip addr add $A/24 dev e0; ip link set e0 up
/usr/sbin/sshd -D -e -f $D/sshd_config 2>>$D/sshd.log </dev/null &
while :; do wait -n || true; sleep .2; done
"""
"""The first process of a machine. A read-only file replaces the boot id, so that a reboot can be noticed."""


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """This process, and what it starts meanwhile, in a network of its own, where nothing is but loopback. For root; skips else.

    Servers that were started before cannot be reached from within, nor later those that were started within: enter first, stay long.
    """
    require_programs("ip", "unshare", "setpriv")
    root_needed()
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        if libc.unshare(CLONE_NEWNET) != 0:
            pytest.skip(f"no network namespace can be made: {os.strerror(ctypes.get_errno())}")
        try:
            _run("ip link set lo up")
            # Where nothing but 127.0.0.1 is, some programs cannot even resolve that.
            _run(f"ip addr add {SUBNET}.254/32 dev lo")
            yield
        finally:
            assert libc.setns(before, CLONE_NEWNET) == 0
    finally:
        os.close(before)


def _run(command: str) -> None:
    words = command.split()
    done = subprocess.run(
        [require_programs(words[0]), *words[1:]],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"


class FullHost(Host):
    """A machine with its own processes, network, mounts, users and boot id."""

    number: int
    _holder: "subprocess.Popen[bytes] | None" = None
    _init: int = 0

    def start(self) -> None:
        """Power on, with a new boot id; returns when its sshd takes connections."""
        (self.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        link = f"v{self.number}"
        with (self.folder / "console.log").open("ab") as console:
            self._holder = subprocess.Popen(
                # Dies with this process, and everything of the machine with it.
                [
                    *with_parent_death_signal("KILL"),
                    *(require_programs("unshare"), *SPACES, "--fork", "--kill-child", "--"),
                    *("/bin/bash", "-c", INIT, "init"),
                    *(str(self.folder), self.name, self.address),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        self._init = self._first_process()
        # A fixed address of the card: else the others would look for the old one for half a minute.
        card = f"02:00:00:00:00:{self.number:02x}"
        _run(f"ip link add {link} type veth peer name e0 address {card} netns {self._init}")
        _run(f"ip link set {link} master br0 up")
        self.until_it_answers()

    def until_it_answers(self) -> None:
        """Wait until its sshd takes connections."""
        _until_it_answers(self.address, self.port, self.is_on, self.log)

    def is_on(self) -> bool:
        """True if it has power."""
        return self._holder is not None and self._holder.poll() is None

    def power_loss(self) -> None:
        """Kill every process at once, without closing connections."""
        self.partition()
        self._end()

    def reboot(self) -> None:
        """Cut the power and start again, with another boot id."""
        self.power_loss()
        self.start()

    def partition(self) -> None:
        """Drop all packets in both directions."""
        _run(f"ip link set v{self.number} down")

    def login_shell(self, shell: str, startup_files: str = "") -> None:
        """Give the user this login shell, and write this text into the start-up files that shells read for a single command."""
        path = self.folder / "passwd"
        users = path.read_text().splitlines()[:-1]
        path.write_text("\n".join([*users, f"gpu:*:{UID}:{UID}::/home/gpu:{shell}\n"]))
        for name in (".bashrc", ".cshrc", ".tcshrc", ".config/fish/config.fish"):
            (self.home / name).parent.mkdir(parents=True, exist_ok=True)
            (self.home / name).write_text(startup_files)

    def half_open(self) -> None:
        """Drop the packets that it sends, but not those that it receives."""
        self._filter("o { type filter hook output priority 0; }", "o tcp sport 22 drop")

    def reset(self) -> None:
        """Reset all connections and refuse new ones."""
        self._filter(
            "i { type filter hook input priority 0; }", "i tcp dport 22 reject with tcp reset"
        )

    def heal(self) -> None:
        """Restore the network."""
        _run(f"ip link set v{self.number} up")
        self.inside("nft flush ruleset")

    def inside(self, command: str) -> None:
        """Run a command in its network namespace."""
        _run(f"nsenter -t {self._init} -n {command}")

    def processes(self) -> list[int]:
        """The machine's process ids, as seen from outside, without its first process."""
        space = os.readlink(f"/proc/{self._init}/ns/pid")
        found: list[int] = []
        for each in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if each.name.isdigit() and os.readlink(each / "ns" / "pid") == space:
                    found.append(int(each.name))
        return [pid for pid in found if pid != self._init]

    def close(self) -> None:
        """End the machine and remove its files."""
        if self.is_on():
            self._end()

    def _filter(self, chain: str, rule: str) -> None:
        self.inside("nft add table ip f")
        self.inside(f"nft add chain ip f {chain}")
        self.inside(f"nft add rule ip f {rule}")

    def _end(self) -> None:
        os.kill(self._init, signal.SIGKILL)
        self._holder.wait(TIMEOUT_S)
        self._holder = None
        with contextlib.suppress(AssertionError):  # it goes with the machine, a little later
            _run(f"ip link del v{self.number}")

    def _first_process(self) -> int:
        pid = self._holder.pid

        def children() -> list[str]:
            assert self.is_on(), (self.folder / "console.log").read_text()
            return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

        return int(wait_until(children, "the machine's first process")[0])


@contextlib.contextmanager
def full_hosts(count: int = 1, *, settings: str = "") -> Iterator[list[FullHost]]:
    """Started machines, at 10.77.0.11 and the following addresses, in their own network; use them inside `own_network`."""
    require_programs("sshd", "ssh-keygen", "ip", "nft", "nsenter", "unshare", "setpriv")
    _run("ip link add br0 type bridge forward_delay 0 stp_state 0")
    _run(f"ip addr add {SUBNET}.1/24 dev br0")
    _run("ip link set br0 up")
    with _started(_full, count, settings) as hosts:
        yield hosts
    _run("ip link del br0")


def _full(folder: Path, number: int, key: Path, settings: str) -> FullHost:
    name = f"h{number + 1}"
    place = folder / name
    address = f"{SUBNET}.{11 + number}"
    host = FullHost(name, address, 22, "gpu", place, key, place / "home")
    host.number = number + 1
    host._prepare(UID)
    (place / "passwd").write_text(
        "root:x:0:0:root:/root:/bin/bash\n"
        "sshd:x:105:65534::/run/sshd:/usr/sbin/nologin\n"
        f"gpu:*:{UID}:{UID}::/home/gpu:/bin/bash\n"
    )
    (place / "group").write_text(f"root:x:0:\nnogroup:x:65534:\ngpu:x:{UID}:\n")
    _configure(
        host,
        settings,
        "AuthorizedKeysFile .ssh/authorized_keys",
        "AllowUsers gpu",
        f"SetEnv PATH={place}/bin:/usr/local/bin:/usr/bin:/bin",
    )
    return host


# --- Fixtures: a conftest imports those that its tests use ----------------------------------------


@pytest.fixture(scope="session", autouse=True)
def network_of_the_fleet() -> Iterator[None]:
    """All tests of a worker, and the servers that they share, in one network of their own, so that `full_machines` can be reached.

    Where none can be made the tests go on without, and those that need `full_machines` are skipped.
    """
    if os.geteuid() == 0 and shutil.which("ip", path=SEARCH_PATH) is not None:
        with own_network():
            yield
    else:
        yield


@pytest.fixture(scope="module")
def plain_machines() -> Iterator[list[LoopbackHost]]:
    """Two loopback machines, shared by the tests of a file: a test that changes one restores it."""
    with loopback_hosts(2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def full_machines(network_of_the_fleet: None) -> Iterator[list[FullHost]]:
    """Two full machines, shared by the tests of a file: a test that cuts one off or takes its power restores it."""
    root_needed()
    with full_hosts(2) as hosts:
        yield hosts
