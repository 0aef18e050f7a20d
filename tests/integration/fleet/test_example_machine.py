"""The machine of an example can be added as the example says, is unreachable after Ctrl-C, and comes back as the same machine."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.integration.fleet.whole_fleet import call
from tests.ports import free_port
from tests.processes import TIMEOUT_S, wait_until
from tests.required_programs import require_programs

EXAMPLE = Path(__file__).parents[3] / "examples/10_fleet/machine.py"


@contextlib.contextmanager
def playing(folder: Path, port: int) -> Iterator[list[str]]:
    """The words of the command that it prints."""
    command = [sys.executable, str(EXAMPLE), str(folder), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as machine:
        try:
            assert machine.stdout is not None
            yield shlex.split(machine.stdout.readline())
        finally:
            machine.send_signal(signal.SIGINT)
            assert machine.wait(TIMEOUT_S) == 0


def connected(key: Path, port: int) -> subprocess.Popen[str]:
    """A connection that lasts until one of its ends is closed."""
    options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"]
    command = ["ssh", "-F", "/dev/null", *(f"-o{each}" for each in options)]
    command += ["-i", str(key), "-p", str(port), "127.0.0.1", "echo here; cat"]
    connection = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert connection.stdout is not None
    assert connection.stdout.readline() == "here\n"
    return connection


def test_the_machine_of_the_example_can_be_lost_and_found(tmp_path: Path) -> None:
    require_programs("sshd", "ssh", "ssh-keygen", install="openssh-server")
    environment = {**os.environ, "GROUPWISE_FLEET": str(tmp_path / "fleet"), "HOME": str(tmp_path)}
    port = free_port()

    def add(*words: str) -> int:
        return call(environment, "vm", "add", *words).returncode

    with contextlib.ExitStack() as connections:
        with playing(tmp_path / "one", port) as said:
            assert said[:5] == ["groupwise", "fleet", "vm", "add", "one"]
            assert said[-2:] == ["--python", sys.executable]
            assert add(*said[4:]) == 0
            second = [sys.executable, str(EXAMPLE), str(tmp_path / "two"), str(port)]
            refused = subprocess.run(second, check=False, stdout=subprocess.PIPE, timeout=TIMEOUT_S)
            assert (refused.returncode, refused.stdout) == (1, b"")
            connection = connections.enter_context(connected(tmp_path / "one" / "login", port))
        assert connection.wait(TIMEOUT_S) != 0
    assert call(environment, "vm", "remove", "one").returncode == 0
    assert add("one") != 0
    with playing(tmp_path / "one", port) as again:
        assert again == said
        wait_until(lambda: add("one") == 0, "its return")
