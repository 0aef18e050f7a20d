"""The notifier of one machine: within this process, and between processes through datagram sockets in the fleet's folder.

`groupwise fleet up` listens at its own socket in `<folder>/doorbells/`; `groupwise fleet submit`, in another process, sends the ids to
every socket of this machine in that folder. A socket that refuses belongs to a process that is gone, and is removed by the process that
finds it. If a listener's buffer is full, it will wake up anyway: further messages are dropped.

Several machines may share the folder. A socket is reachable only from its own machine and refuses all others, alive or not. So its name
contains the boot of the system that it belongs to, and sockets of other systems are left alone. (Those of a machine that has lost its power
stay, a few bytes each.)

Only a process that waits makes a socket. Socket addresses are short even if the folder's path is long, since they are opened relative to
the folder (through /proc/self/fd; on other systems by their whole path, which most systems limit to about a hundred characters).
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import secrets
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from groupwise.jobs.fleet.notify.base import LARGEST, PendingIds, ids_in, messages

FOLDER = "doorbells"
DESCRIPTORS = Path("/proc/self/fd")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SENT = LARGEST // 2
"""Maximum bytes of one datagram; the system's default buffers are larger."""

logger = logging.getLogger(__name__)


class LocalNotifier:
    """Notifies this process and the other ones of this machine that use the same fleet folder; None: this process only."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder / FOLDER if folder is not None else None
        self._received = PendingIds()
        self._socket: socket.socket | None = None
        self._system = system_id()
        self._name = f"{self._system}-{os.getpid()}-{secrets.token_hex(4)}.sock"
        self._listening = False

    def open(self) -> None:
        """See `Notifier`: sending needs no background task here."""

    def notify(self, job_ids: Iterable[str]) -> None:
        """See `Notifier`."""
        ids = frozenset(job_ids)
        self._received.put(ids)
        if self._folder is None or not ids:
            return
        try:
            names = [n for n in os.listdir(self._folder) if n.startswith(f"{self._system}-")]
            other_names = [n for n in names if n != self._name]
            if other_names:
                texts = list(messages(sorted(ids), SENT))
                with (
                    OpenFolder(self._folder) as open_folder,
                    socket.socket(
                        socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
                    ) as sender,
                ):
                    for name in other_names:
                        try:
                            for text in texts:
                                sender.sendto(text, open_folder.address(name))
                        except ConnectionRefusedError:
                            with suppress(FileNotFoundError):
                                os.unlink(self._folder / name)
                        except (BlockingIOError, FileNotFoundError):
                            pass  # it has enough messages to wake up for; or it has just gone
        except OSError as error:
            if error.errno != errno.ENOENT:  # no process has ever listened there
                logger.debug("no process could be woken through %s: %s", self._folder, error)

    async def wait(self, timeout: float) -> frozenset[str]:
        """See `Notifier`."""
        if not self._listening:
            self._listening = True
            self._listen()
        return await self._received.wait(timeout)

    async def close(self) -> None:
        """See `Notifier`."""
        if self._socket is not None and self._folder is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
            with suppress(FileNotFoundError):
                os.unlink(self._folder / self._name)

    def _listen(self) -> None:
        if self._folder is None:
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with OpenFolder(self._folder) as opened:
                listener.bind(opened.address(self._name))
        except OSError as error:
            listener.close()
            logger.warning(
                "no notifications through %s (%s): jobs that other processes submit wait for the next sweep",
                self._folder,
                error,
            )
            return
        self._socket = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._read_messages, listener)

    def _read_messages(self, listener: socket.socket) -> None:
        with suppress(BlockingIOError):
            while True:
                # One byte more than the limit: a message that was cut off is then recognised as too long.
                self._received.put(ids_in(listener.recv(LARGEST + 1)))


def system_id() -> str:
    """Identifies this machine since its last boot, in eight hexadecimal digits."""
    try:
        system = BOOT_ID.read_bytes()
    except OSError:  # no Linux
        system = socket.gethostname().encode()
    return hashlib.sha256(system).hexdigest()[:8]


def command_socket(release: str, database: str | None) -> str:
    """Name of the socket in the fleet's folder at which a process of this machine answers commands (`api/serve.py`). It is another name for
    another release of Groupwise, and for another database than the folder's own (None)."""
    served = hashlib.sha256(f"{release} {database}".encode()).hexdigest()[:8]
    return f"commands-{system_id()}-{served}.sock"


class OpenFolder:
    """A folder held open, to keep the addresses of sockets in it short."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> OpenFolder:
        self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def address(self, name: str) -> str:
        """The address of the socket `name` in the folder."""
        if DESCRIPTORS.is_dir():
            return str(DESCRIPTORS / str(self._descriptor) / name)
        return str(self._folder / name)

    def has_listener(self, name: str) -> bool:
        """True if a process of this machine listens at the stream socket `name`."""
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(self.address(name))
            except OSError:
                return False
        return True
