"""A machine's row changes while a job runs there: the attempt is reached by the new row, and ends as if nothing had happened."""

import contextlib
from collections.abc import Iterator

import pytest

from groupwise.jobs.hosts import keys
from tests import ssh_hosts
from tests.integration.fleet.test_jump_hosts import alias, fingerprint
from tests.integration.fleet.test_up import Fleet, fleet_in
from tests.ports import free_port
from tests.processes import TIMEOUT_S, wait_until

ECHO = """
import sys, time
seen = []
while seen[-1:] != ["end\\n"]:
    seen, before = open(sys.argv[1]).readlines(), seen
    print(*seen[len(before):], sep="", flush=True)
    time.sleep(0.05)
"""
"""Prints each line that is added to a file."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_in(tmp_path_factory.mktemp("moving") / "fleet") as fleet:
        fleet.environment |= {"GROUPWISE_FLEET_SWEEP_SECONDS": "0.1"}
        fleet.up()
        yield fleet


def test_a_job_continues_whatever_changes_in_the_row_of_its_machine(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each column that may change while a job runs, one after the other; a change by which it would be lost is refused."""
    with ssh_hosts.loopback_hosts(2) as [host, gate], contextlib.ExitStack() as stack:
        lines = host.home / "lines"
        lines.touch()

        def call(verb: str, *words: str, code: int = 0) -> str:
            done = fleet.call("vm", verb, "moving", *words)
            assert done.returncode == code, done.stderr
            return done.stderr

        def is_reached(after: str) -> None:
            """What the job prints from now on arrives."""
            with lines.open("a") as file:
                file.write(f"{after}\n")
            log = fleet.folder / "logs" / f"{job}.log"
            wait_until(
                lambda: log.exists() and after in log.read_text().split(),
                f"the log after {after}",
                details=fleet.log.read_text,
            )

        way = ("--host", host.address, "--port", str(host.port), "--user", host.user)
        call("add", *way, "--key", str(host.key_path), "--trust", fingerprint(host))
        command = ("--vm", "moving", "--wait", "--", "python3", "-c", ECHO, str(lines))
        waiting = stack.enter_context(fleet.begin("submit", *command, stderr=None))
        stack.callback(waiting.kill)
        assert waiting.stdout is not None
        job = waiting.stdout.readline().strip()
        is_reached("start")
        host.move(port=free_port(host.address))
        call("set", "--port", str(host.port))
        is_reached("port")
        host.move(address="127.0.0.13")
        call("set", "--host", host.address)
        is_reached("host")
        host.new_login_key()
        host.move()
        call("set", "--key", str(host.key_path))
        is_reached("key")
        host.new_host_key()
        host.move()
        trust = ("vm", "trust", "moving", fingerprint(host))
        wait_until(lambda: fleet.call(*trust).returncode == 0, "its key to be seen")
        is_reached("host_key")
        monkeypatch.setattr(keys, "resolve_alias", lambda _: alias(host, alias(gate)))
        host.move(port=free_port(host.address))
        call("set", "--from-ssh-config", "it", "--trust-jump", fingerprint(gate))
        is_reached("jump")
        settings = (
            ("--python", "/usr/bin/python3"), ("--label", "a=b"), ("--cpu-slots", "3"), ("--project", "default"),
            ("--deadman", "1h"), ("--probe", "true"), ("--idle-memory-mb", "9"),
        )  # fmt: skip
        for setting in settings:
            call("set", *setting)
        is_reached("settings")
        for place in (("--user", "somebody"), ("--workdir", "/elsewhere")):
            assert "cannot be changed now" in call("set", *place, code=2)
        is_reached("end")
        assert waiting.wait(TIMEOUT_S) == 0
        assert [attempt["epoch"] for attempt in fleet.job(job)["attempts"]] == [1], "it ran once"
