"""Supervises the ranks of a zygote until the first of them, or the run, ends: `python -m groupwise.engine.distributed.rank_supervisor`.

A zygote becomes this program (`exec`) once it has forked its ranks. It keeps its process id, so it stays their parent, but no longer holds
the modules and the parts of the model that the ranks have replaced by their own: 80 MiB and more. So import nothing large here.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress


def become_supervisor(connection: int, ranks: Sequence[int]) -> None:
    """Replace this program by the supervisor. `connection`: the descriptor that leads to the main process."""
    os.set_inheritable(connection, True)
    words = [sys.executable, "-P", "-m", __name__, str(connection), *map(str, ranks)]
    os.execv(sys.executable, words)


def supervise(descriptor: int, ranks: Sequence[int]) -> None:
    """When the first rank ends, report it and end all. End them, too, when the connection ends: the main process is gone or wants it."""
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=kill_at_end, args=(connection, ranks), daemon=True).start()
    ended_rank, status = os.wait()
    if _is_open(connection):
        from groupwise.engine.distributed.messages import MessageChannel, RankEnded

        with suppress(OSError):  # the main process has just gone
            ended = RankEnded(ranks.index(ended_rank), os.waitstatus_to_exitcode(status))
            MessageChannel(connection).send(ended)
    _kill(ranks)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


def kill_at_end(connection: socket.socket, ranks: Sequence[int]) -> None:
    """Kill the ranks when the connection ends. The main process sends nothing more, so nothing is lost by reading from it."""
    with suppress(OSError):
        connection.recv(1)
    _kill(ranks)


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:  # nothing has been sent
        return True
    except OSError:
        return False


def _kill(ranks: Sequence[int]) -> None:
    for process in ranks:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    supervise(int(sys.argv[1]), [int(rank) for rank in sys.argv[2:]])
