"""A machine for tests of the runner: this one, with its own root folder. Requests are sent exactly as the control plane sends them."""

import atexit
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import pytest

from groupwise.jobs.hosts.bootstrap import BOOTSTRAP, FLAGS
from groupwise.jobs.hosts.framing import AnswerReader
from groupwise.jobs.hosts.host import Request
from groupwise.jobs.hosts.runner import requests
from groupwise.jobs.hosts.runner.cgroups import Cgroups, remove_stray_cgroups
from groupwise.jobs.hosts.runner.files import read_json
from groupwise.jobs.hosts.runner.protocol import as_bytes
from groupwise.jobs.hosts.runner.root import Root, list_attempts
from groupwise.jobs.hosts.runner_text import runner_text
from tests.processes import TIMEOUT_S, is_gone, wait_until

FAKE_NVIDIA_SMI = Path(__file__).with_name("fake_nvidia_smi.py")
HERE = frozenset(
    "status touch missing manifest read gather keep log put observe release kill void forget".split()
)


def oldest_python() -> str | None:
    """A Python 3.8, if there is one."""
    places = [shutil.which("python3.8"), *Path.home().glob(".pyenv/versions/3.8.*/bin/python3.8")]
    for place in places:
        if place and runs_38(str(place)):
            return str(place)
    return None


def runs_38(python: str) -> bool:
    said = subprocess.run([python, "--version"], capture_output=True, text=True, check=False)
    return said.returncode == 0 and said.stdout.startswith("Python 3.8.")


OLDEST = oldest_python()
EVERY_PYTHON = (
    pytest.param(sys.executable, id="recent"),
    pytest.param(
        OLDEST,
        id="3.8",
        marks=pytest.mark.skipif(OLDEST is None, reason="no Python 3.8 is here"),
    ),
)
"""Parameters of a fixture: the interpreters that the runner must support."""


class Refused(Exception):
    """The runner answered with an error."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(str(error))
        self.code: str = error["code"]
        self.error = error


class _Answered(Exception):
    """Raised instead of an answer on standard output and the end of the process."""

    def __init__(self, body: dict[str, Any], data: bytes) -> None:
        super().__init__()
        self.body, self.data = body, data


def _answered(body: dict[str, Any], data: bytes = b"") -> NoReturn:
    raise _Answered(body, data)


def request(body: Mapping[str, Any], payload: bytes = b"") -> bytes:
    text = json.dumps(body).encode()
    digest = hashlib.sha256(text).hexdigest()
    return b"GROUPWISE 1 %d %s\n" % (len(text), digest.encode()) + text + payload


def remains(group: Cgroups) -> bool:
    """Remove the control group. True if it still exists: one with processes that are about to end cannot be removed yet."""
    group.remove()
    return any(os.path.isdir(folder) for folder in group.folders())


class Machine:
    """A root on this machine. `python` is what its `python3` would be."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.root = folder / "root"
        self.home = folder / "home"
        self.home.mkdir(parents=True, exist_ok=True)
        self.python = python
        self.source = runner_text().source
        self.environment = {"HOME": str(self.home), "PATH": "/usr/local/bin:/usr/bin:/bin"}
        self.payload = b""
        self.nvidia = folder / "nvidia.json"

    @property
    def sha(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()

    def with_gpus(self, *gpus: Mapping[str, Any], mode: str = "normal", **more: Any) -> None:
        """Put an nvidia-smi on PATH that shows these GPUs."""
        binaries = self.home / "bin"
        binaries.mkdir(exist_ok=True)
        link = binaries / "nvidia-smi"
        if not link.exists():
            link.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {FAKE_NVIDIA_SMI} "$@"\n')
            link.chmod(0o755)
        self.environment["FAKE_NVIDIA_SMI_STATE"] = str(self.nvidia)
        self.environment["PATH"] = f"{binaries}:/usr/local/bin:/usr/bin:/bin"
        self.nvidia.write_text(json.dumps({"mode": mode, "gpus": gpus, **more}))

    def body(self, verb: str, **fields: Any) -> dict[str, Any]:
        common = {"protocol": 1, "root": str(self.root), "verb": verb, "runner": self.sha}
        return {**common, **fields}

    def begin(self, data: bytes, before: Sequence[str] = ()) -> "subprocess.Popen[bytes]":
        """Start a call with this standard input, without waiting for it."""
        process = subprocess.Popen(
            [*before, self.python, *FLAGS, "-c", BOOTSTRAP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment,
            cwd="/",
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(data)
            process.stdin.close()
        return process

    def finish(self, process: "subprocess.Popen[bytes]") -> dict[str, Any]:
        """The call's answer. Its streams are read to the end, so no process that it left behind may hold them open."""
        assert process.stdout is not None
        assert process.stderr is not None
        with process.stdout, process.stderr:
            out, complaints = process.stdout.read(), process.stderr.read()
        process.wait(TIMEOUT_S)
        assert not complaints, complaints.decode()
        reader = AnswerReader(Request("ask", most_body=1 << 30, most_payload=1 << 30))
        assert reader.feed(out), out
        assert reader.answer is not None
        self.payload = reader.answer.payload
        body = dict(reader.answer.body)
        if "error" in body:
            raise Refused(body["error"])
        return body

    def ask(self, verb: str, payload: bytes = b"", **fields: Any) -> dict[str, Any]:
        """Send a request to a runner process; requests that are sent often are answered by the runner within the test process instead."""
        if payload:
            fields["payload"] = len(payload)
        if verb in HERE and self.python == sys.executable and self.sha == runner_text().sha256:
            return self._ask_here(self.body(verb, **fields), payload)
        answer = self.finish(self.begin(request(self.body(verb, **fields), payload)))
        if "need" in answer:
            body = self.body(verb, **fields, source=self.source)
            return self.finish(self.begin(request(body, payload)))
        return answer

    def _ask_here(self, body: dict[str, Any], payload: bytes) -> dict[str, Any]:
        mask, environment, told = os.umask(0o077), dict(os.environ), requests.send_answer
        os.environ.clear()
        os.environ.update(self.environment)
        requests.send_answer = _answered
        try:
            requests.answer_request(json.loads(json.dumps(body)), BytesIO(payload))
        except _Answered as answer:
            answered, self.payload = json.loads(as_bytes(answer.body)), answer.data
        finally:
            requests.send_answer = told
            os.environ.clear()
            os.environ.update(environment)
            os.umask(mask)
        if "error" in answered:
            raise Refused(answered["error"])
        return answered

    def order(
        self,
        *arguments: str,
        job: str = "job",
        epoch: int = 1,
        limits: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """The fields of a launch."""
        names = ("environment", "files", "secrets", "artefacts", "checkpoints")
        spec: dict[str, Any] = {"environment": {}, "files": {}, "secrets": []}
        spec.update({"artefacts": ["outputs"], "checkpoints": ["outputs"]})
        spec.update(
            {name: fields.pop(f"spec_{name}") for name in names if f"spec_{name}" in fields}
        )
        spec.update({"arguments": list(arguments), "limits": dict(limits or {})})
        common: dict[str, Any] = {"rank": 0, "members": 1, "gpus": [], "share_mb": None}
        common.update({"slot": None, "environment": {}, "secrets": {}, "resume": None})
        return {"job": job, "epoch": epoch, "spec": spec, **common, **fields}

    def launch(self, *arguments: str, **fields: Any) -> dict[str, Any]:
        return self.ask("launch", **self.order(*arguments, **fields))

    def sh(self, script: str, **fields: Any) -> dict[str, Any]:
        """A job that is a shell script."""
        return self.launch("sh", "-c", script, **fields)

    def status(self, job: str = "job", epoch: int = 1) -> dict[str, Any]:
        return self.ask("status", job=job, epoch=epoch)

    def comes_to(self, state: str, job: str = "job", epoch: int = 1) -> dict[str, Any]:
        """Wait until the attempt is in that state; for "exited", until its supervisor has ended too. No contact for the deadman."""
        found = wait_until(
            lambda: (s := self.status(job, epoch))["state"] == state and s,
            state,
            details=lambda: (self.status(job, epoch), self.complaints(job, epoch)),
        )
        written = read_json(str(self.folder(job, epoch) / "state.json")) or {}
        if state == "exited" and (supervisor := written.get("supervisor")):
            wait_until(lambda: is_gone(supervisor), "the end of the supervisor")
        return found

    def folder(self, job: str = "job", epoch: int = 1) -> Path:
        return self.root / "attempts" / f"{job}.{epoch}"

    def work(self, job: str = "job", epoch: int = 1) -> Path:
        return self.folder(job, epoch) / "work"

    def complaints(self, job: str = "job", epoch: int = 1) -> str:
        """The errors that its supervisor wrote about itself."""
        with suppress(OSError):
            return (self.folder(job, epoch) / "supervisor.err").read_text()
        return ""

    def state(self, job: str = "job", epoch: int = 1) -> dict[str, Any]:
        """Its state file."""
        return json.loads((self.folder(job, epoch) / "state.json").read_text())

    def kill_supervisor(self, job: str = "job", epoch: int = 1) -> None:
        """Kill the supervisor, as an out-of-memory killer would."""
        pid = self.state(job, epoch)["supervisor"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: is_gone(pid), "the end of the supervisor")

    def written(self, name: str, job: str = "job", epoch: int = 1) -> str:
        """The content of a file in the working folder, once it has a whole line."""
        path = self.work(job, epoch) / name

        def line() -> str:
            with suppress(OSError):
                text = path.read_text()
                return text if text.endswith("\n") else ""
            return ""

        return wait_until(line, name)

    def put(self, *blobs: bytes) -> list[str]:
        shas = [hashlib.sha256(blob).hexdigest() for blob in blobs]
        entries = [[sha, len(blobs[n])] for n, sha in enumerate(shas)]
        self.ask("put", b"".join(blobs), blobs=entries)
        return shas

    def end(self) -> None:
        """End everything that was started on it, whether the test passed or not."""
        here = self.root / "attempts"
        marks = [f"GROUPWISE_RUNNER_FOLDER={here}/".encode()]
        for folder in here.iterdir() if here.is_dir() else ():
            with suppress(OSError):
                pid: int = (read_json(str(folder / "state.json")) or {}).get("supervisor", 0)
                if pid and "groupwise-super" in Path(f"/proc/{pid}/comm").read_text():
                    os.kill(pid, signal.SIGKILL)
        for name in os.listdir("/proc"):
            with suppress(OSError):
                if name.isdigit() and marks[0] in Path(f"/proc/{name}/environ").read_bytes():
                    os.kill(int(name), signal.SIGKILL)
        self.end_groups()

    def end_groups(self) -> None:
        """Remove the control groups, and kill every process in them."""
        root = Root(str(self.root))
        for attempt in list_attempts(root)[0]:
            group = Cgroups.from_record((read_json(attempt.at("state.json")) or {}).get("cgroup"))
            group.kill()
            wait_until(lambda group=group: not remains(group), "the end of its control groups")
        remove_stray_cgroups(root)


_prepared: dict[str, Path] = {}
"""By Python: folders `runners` with the runner and what was compiled of it, which takes longer than most tests."""


def prepared(python: str) -> Path:
    if python not in _prepared:
        folder = Path(tempfile.mkdtemp(prefix="groupwise-runner-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        first = Machine(folder, python)
        first.ask("hello", source=first.source)
        _prepared[python] = first.root / "runners"
    return _prepared[python]


@contextmanager
def machine(folder: Path, python: str = sys.executable, *, new: bool = False) -> Iterator[Machine]:
    """A machine that has the runner already, or a `new` one. Everything that was started on it ends with it."""
    made = Machine(folder, python)
    if not new:
        shutil.copytree(prepared(python), made.root / "runners")
    try:
        yield made
    finally:
        made.end()
