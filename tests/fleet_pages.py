"""Runs the documentation pages about the fleet, command by command, in order.

    groupwise fleet up           begins a fleet of the page's own, in a process of its own; so do the roles
    groupwise fleet …            runs here; JOB is the job that was submitted last, and the next command waits where a person would
    # fleet.yaml                 is that file: the fleet ends, and goes on with a real PostgreSQL and a real NATS
    INSERT …                     is typed at the prompt of its database
    nats pub SUBJECT ID          is published

Machines of the page (gpu-1, 10.0.0.12, …) are sshd processes on 127/8 with GPUs that a program plays. Nothing is asked of anybody else.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import psycopg
import pytest

from groupwise.cli.main import main
from tests import nats, postgres
from tests.processes import wait_until
from tests.ssh_hosts import Host, loopback_hosts

T = TypeVar("T")
ROLES = ("poller", "dispatcher", "requeue", "tracker", "api")
API = "http://127.0.0.1:8010"
TIMEOUT_S = 120.0
QUICK = {"POLL_SECONDS": "1", "SWEEP_SECONDS": "0.5"}
ONE_THREAD = ("--env", "OMP_NUM_THREADS=1", "--env", "OMP_WAIT_POLICY=PASSIVE")
"""Environment of a training that runs beside other tests."""
OUT_OF_REACH = re.compile(r"\b10\.0\.0\.(\d+)\b")
"""Addresses in the pages; they are replaced by addresses of this machine."""


class FleetDocRunner:
    """Runs the commands of one page. Leaves nothing running."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
        self._patch = patch
        self._capfd = capfd
        self._folder = folder / "fleet"
        self._logs = folder / "logs-of-roles"
        self._logs.mkdir()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = contextlib.ExitStack()
        self._hosts: list[Host] = []
        self._postgres: str | None = None
        self._nats: nats.Nats | None = None
        self.job = ""
        self.api = API
        patch.setenv("GROUPWISE_FLEET", str(self._folder))
        for name, value in QUICK.items():
            patch.setenv(f"GROUPWISE_FLEET_{name}", value)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for process in self._running.values():
            process.terminate()
        try:
            for process in self._running.values():
                process.wait(TIMEOUT_S)
        finally:
            for process in self._running.values():
                process.kill()
            self._stack.close()

    # what stands on a page

    def types(self, words: list[str]) -> None:
        """Run a command of `groupwise fleet`, given by the words after these two."""
        words = [self._here(word.replace("JOB", self.job)) for word in words]
        match words:
            case ["up", *options]:
                self._begin("up", options)
            case ["run", role, *options] if role in ROLES:
                self._begin(role, options)
            case ["vm", "add", vm, *options] if "--engine" in options:
                self._run(["vm", "add", vm, *self._of_engine(options)])
            case ["vm", "add", vm, *options]:
                self._run(["vm", "add", vm, *self._machine(vm, options)])
            case ["resume", job, *_]:
                self.until(lambda: self._status(job) in ("failed", "cancelled"), f"{job} to end")
                self._run(words)
            case ["submit", *_] if "--kind" in words or "hugging_face.py" in words:
                self._run(["submit", *ONE_THREAD, *words[1:]])
            case ["doctor", *_]:
                self._run(words, allowed=(0, 1))
            case ["vm", "prepare", *_] if "--dry-run" not in words:
                self._run([*words, "--dry-run"])  # gigabytes, otherwise
            case _:
                self._run(words)

    def publishes(self, subject: str, payload: str) -> None:
        """Publish with a client that does not know Groupwise."""
        assert self._nats is not None, "the page has said nothing of NATS yet"
        self._nats.publish(subject, payload.encode())

    def asks_the_database(self, statements: str) -> None:
        """Run statements as at the database's prompt."""
        assert self._postgres is not None, "the page has said nothing of PostgreSQL yet"
        with psycopg.connect(self._postgres) as connection:
            connection.execute(self._here(statements).encode())

    def writes(self, file: str, content: str) -> None:
        """Write a file of the fleet's folder. Servers that it names are started; roles that ran before are ended."""
        assert file == "fleet.yaml", file
        self._end_roles()
        self._postgres = self._stack.enter_context(postgres.server()).new_database()
        (self._folder.parent / "nats").mkdir()
        self._nats = self._stack.enter_context(nats.server(self._folder.parent / "nats"))
        self._patch.setenv("NATS_TOKEN", nats.TOKEN)
        content, databases = re.subn(r"postgresql://\S+", self._postgres, content)
        content, servers = re.subn(r"nats://\S+", self._nats.url, content)
        assert (databases, servers) == (1, 1), content
        (self._folder / file).write_text(content)

    def variables_of_a_job(self) -> set[str]:
        """The names of the environment variables of a job."""
        self.types(["submit", "--wait", "--", "env"])
        assert main(["fleet", "logs", self.job]) == 0
        return set(re.findall(r"^(\w+)=", self._capfd.readouterr().out, re.MULTILINE))

    # what is done for it

    def _run(self, words: list[str], allowed: tuple[int, ...] = (0,)) -> None:
        self._capfd.readouterr()
        code = main(["fleet", *words])
        out, err = self._capfd.readouterr()
        assert code in allowed, f"groupwise fleet {shlex.join(words)}\n{out}\n{err}\n{self._said()}"
        if words[0] == "submit" and "--dry-run" not in words:
            self.job = out.splitlines()[-1]

    def _begin(self, role: str, options: list[str]) -> None:
        if "--port" in options:
            place = options.index("--port")
            options = [*options[:place], *options[place + 2 :]]
        if role in ("up", "api"):
            options = [*options, "--port", "0"]
        of_role = () if role == "up" else ("run",)
        with (self._logs / role).open("wb") as log:
            self._running[role] = subprocess.Popen(
                [sys.executable, "-m", "groupwise", "fleet", *of_role, role, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if role == "up":
            self.until(lambda: "Ready." in self._said(), "the fleet to be ready")
        if role in ("up", "api"):
            self.api = self.until(lambda: self._address(role), "the address of the fleet")[-1]

    def _address(self, role: str) -> list[str]:
        said = (self._logs / role).read_text()
        return re.findall(r"http://127\.0\.0\.1:\d+", said)

    def _end_roles(self) -> None:
        for process in self._running.values():
            process.terminate()
        for role, process in self._running.items():
            assert process.wait(TIMEOUT_S) == 0, f"{role}\n{self._said()}"
        self._running.clear()

    def _machine(self, vm: str, options: list[str]) -> list[str]:
        """The options, with port, user, key and host key of a machine on this host."""
        if not self._hosts:
            self._hosts.extend(self._stack.enter_context(loopback_hosts(2)))
            for each in self._hosts:
                each.gpus(2)
        host = self._hosts[int(vm.rpartition("-")[2]) - 1]
        if options[:2] == ["--host", vm]:
            self._let_ssh_know(vm, host)
            return options
        known = dict(zip(options[::2], options[1::2], strict=True))
        assert known["--host"] == host.address
        known |= {"--port": str(host.port), "--user": host.user, "--key": str(host.key_path)}
        known["--trust"] = _fingerprint(host)
        return [word for option in known.items() for word in option]

    def _of_engine(self, options: list[str]) -> list[str]:
        """The options of a row for this machine, which has no such engine, and with a folder of this test."""
        known = dict(zip(options[::2], options[1::2], strict=True))
        for way in ("--host", "--user", "--key"):
            del known[way]
        known["--workdir"] = str(self._folder.parent / "shared")
        return [word for option in known.items() for word in option]

    def _let_ssh_know(self, name: str, host: Host) -> None:
        """Make `ssh NAME` reach the host, by a config that only this test's ssh reads."""
        folder = self._folder.parent / "ssh"
        folder.mkdir()
        (folder / "config").write_text(
            f"Host {name}\n HostName {host.address}\n Port {host.port}\n User {host.user}\n IdentityFile {host.key_path}\n"
        )
        ssh = folder / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {folder}/config "$@"\n')
        ssh.chmod(0o755)
        self._patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def _here(self, text: str) -> str:
        return OUT_OF_REACH.sub(r"127.0.0.\1", text).replace(API, self.api)

    def _status(self, job: str) -> str:
        self._capfd.readouterr()
        assert main(["fleet", "show", job, "--json"]) == 0
        found = re.search(r'^  "status": "(\w+)"', self._capfd.readouterr().out, re.MULTILINE)
        assert found is not None
        return found[1]

    def _said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._logs.iterdir()))

    def until(self, condition: Callable[[], T], what: str) -> T:
        def found() -> T:
            assert all(each.poll() is None for each in self._running.values()), self._said()
            return condition()

        return wait_until(found, what, TIMEOUT_S, self._said)


def _fingerprint(host: Host) -> str:
    found = subprocess.run(
        ["ssh-keygen", "-lf", str(host.folder / "hostkey.pub")],
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.split()[1]
