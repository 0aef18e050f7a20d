"""A zygote, or a rank with a model of its own, that is forked from the test process, which has imported everything: a fresh interpreter
takes seconds for that.

All else is as in a run: sockets, the fork into ranks, their end.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

import pytest

from groupwise.engine.distributed import forked_workers, peer, spawned_workers, zygote

Main = Callable[[int, int], object]
"""The code that the process runs, given a descriptor to its parent."""


class Forked:
    """The part of `subprocess.Popen` that is used for such a process."""

    main: Main = staticmethod(lambda parent, descriptor: zygote.main(parent, descriptor, ()))

    def __init__(
        self, command: list[str], pass_fds: list[int], env: Mapping[str, str], **_: Any
    ) -> None:
        parent, descriptor = map(int, command[4:6])
        assert [descriptor] == pass_fds
        output, ours = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _be(self.main, parent, descriptor, ours, env)
        os.close(ours)
        self.stdout: IO[bytes] = os.fdopen(output, "rb")

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class ForkedPeer(Forked):
    main: Main = staticmethod(peer.main)


def _be(
    main: Main, parent: int, descriptor: int, output: int, environment: Mapping[str, str]
) -> None:
    status = 1
    try:
        os.setsid()
        for number in (1, 2):
            os.dup2(output, number)
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number != descriptor:
                with suppress(OSError):
                    os.close(number)
        sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.update(environment)
        main(parent, descriptor)
        status = 0
    except BaseException:  # noqa: BLE001 — a fork must never return into the tests
        traceback.print_exc()
    os._exit(status)


def fork_zygotes(patch: pytest.MonkeyPatch) -> None:
    """Fork zygotes as long as the patch is in place."""
    patch.setattr(forked_workers, "Popen", Forked)
    patch.setattr(zygote, "collect", lambda: None)  # of all that the tests have imported


def fork_peers(patch: pytest.MonkeyPatch) -> None:
    """Fork learners and samplers with their own models as long as the patch is in place."""
    patch.setattr(spawned_workers, "Popen", ForkedPeer)
