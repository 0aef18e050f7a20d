"""A local imitation of Modal: calls are processes, each container has its own copy of the volume, and only commits are seen by others.

Rules that it shares with Modal:

    - One coordinator, one request after the other. Work goes on when its spawner is gone: a process of its own keeps it.
    - A call waits for a container (`hold`), runs in one, and is begun again with the same input in a new one, with an empty disk, when that
      is taken away: told with SIGINT and killed after a while (`preempt`), or without a word (`lose`).
    - A time-out counts from the beginning of a container, and kills. A cancelled call is told, then killed. With a container all that it
      started goes.
    - Results of calls are forgotten after a while (`expire`): nothing is known of such a call.
    - Values of secrets are in the environment of the container, and in no file.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from groupwise.jobs.clouds.modal.api import Call, Image, app_of
from groupwise.jobs.clouds.modal.coordinator import answer
from groupwise.jobs.clouds.modal.worker import ContainerContext, work
from groupwise.jobs.hosts.host import RunnerRefused

THIS = "tests.fake_modal"
SECRETS = "GROUPWISE_SECRETS"
RATES = {
    "cpu_hour_cost": 0.0473, "mem_gib_hour_cost": 0.008, "gpu_hour_cost_t4": 0.59, "gpu_hour_cost_l4": 0.8, "gpu_hour_cost_a10g": 1.1,
    "gpu_hour_cost_l40s": 1.95, "gpu_hour_cost_a100_40gb": 2.1, "gpu_hour_cost_a100_80gb": 2.5, "gpu_hour_cost_rtx6000": 3.03,
    "gpu_hour_cost_h100": 3.95, "gpu_hour_cost_h200": 4.54, "gpu_hour_cost_b200": 6.25, "gpu_hour_cost_b300": 7.1,
}  # fmt: skip
"""Modal's prices in September 2026."""
EMPTY: Mapping[str, str] = MappingProxyType({})
TICK = 0.02
GRACE = 30.0
"""Seconds between SIGINT and the end of a container."""
KEEPER, CONTAINER = "modal-keeper", "modal-container"
"""Process names, by which a container can be distinguished from a call that it has spawned."""
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""


class FakeModal:
    """See `groupwise.jobs.clouds.modal.api.ModalApi`. All of one folder are the same Modal."""

    def __init__(
        self,
        folder: Path,
        *,
        owner: str | None = "somebody",
        secrets: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        """`secrets`: the workspace's secrets by name, each with its variables."""
        self.folder, self._owner, self._secrets = folder, owner, secrets or {}
        for name in ("volume", "calls", "apps", "coordinator"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    async def workspace(self) -> str | None:
        """See `ModalApi.workspace`."""
        return self._owner

    async def rates(self) -> Mapping[str, float] | None:
        """See `ModalApi.rates`."""
        return None if self._owner is None else RATES

    async def has_app(self, name: str) -> bool:
        """See `ModalApi.has_app`."""
        return (self.folder / "apps" / name).exists()

    async def deploy(self, image: Image) -> None:
        """See `ModalApi.deploy`. No image is made: the interpreter of its environment is that of this process."""
        python = self.environments / image.name / "bin/python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', "utf-8")
        python.chmod(0o755)
        (self.folder / "apps" / app_of(image.name)).write_text(
            json.dumps(sorted(image.files)), "utf-8"
        )

    @property
    def environments(self) -> Path:
        """The folder of environments in containers, which see the files of this machine."""
        return self.folder / "environments"

    async def call_coordinator(self, verb: str, *arguments: Any) -> Any:
        """See `ModalApi.call_coordinator`."""
        return await in_thread(coordinate, self.folder, verb, *arguments)

    async def spawn(self, call: Call, secrets: Mapping[str, str]) -> str:
        """See `ModalApi.spawn`."""
        await self.expect_secrets(call.named)
        named = {n: word for name in call.named for n, word in self._secrets[name].items()}
        return await in_thread(spawn, self.folder, call, secrets, named)

    async def expect_secrets(self, variables_by_secret: Mapping[str, Sequence[str]]) -> None:
        """See `ModalApi.expect_secrets`."""
        for name, variables in variables_by_secret.items():
            there = self._secrets.get(name, {})
            if lacking := sorted({*variables} - there.keys()):
                raise RunnerRefused("secret", f"Secret {name} has no {', '.join(lacking)}")

    async def lives(self, call: str) -> bool:
        """See `ModalApi.lives`."""
        place = self.folder / "calls" / call
        return place.exists() and not (place / "result").exists()

    async def cancel(self, call: str) -> None:
        """See `ModalApi.cancel`."""
        self._tell(call, "cancel")

    async def close(self) -> None:
        """See `ModalApi.close`."""

    # --- what befalls it --------------------------------------------------------------------------

    def hold(self, *, on: bool = True) -> None:
        """While this is on, no container is free."""
        (self.folder / "hold").touch() if on else (self.folder / "hold").unlink()

    def preempt(self, call: str) -> None:
        """Take a call's container back, with a warning."""
        self._tell(call, "preempt")

    def lose(self, call: str) -> None:
        """Take a call's container away without a warning."""
        self._tell(call, "lose")

    def expire(self, call: str) -> None:
        """Forget a call's result."""
        shutil.rmtree(self.folder / "calls" / call)

    def stop(self) -> None:
        """End every running call without a warning."""
        for name in self.calls():
            self._tell(name, "stop")

    def calls(self) -> list[str]:
        """The ids of all known calls, in the order in which they were spawned."""
        return sorted(each.parent.name for each in (self.folder / "calls").glob("*/input"))

    def containers(self, call: str) -> int:
        """The number of containers that the call has had."""
        return len(list((self.folder / "calls" / call).glob("container-*")))

    def result(self, call: str) -> str | None:
        """How the call ended: one word, and the result of `work`."""
        place = self.folder / "calls" / call / "result"
        return place.read_text("utf-8") if place.exists() else None

    def _tell(self, call: str, what: str) -> None:
        with suppress(FileNotFoundError):  # Modal knows nothing of it any more
            (self.folder / "calls" / call / what).touch()


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """asyncio is imported here, because keepers and containers start sooner without it."""
    import asyncio

    return await asyncio.to_thread(function, *arguments)


# --- the volume -----------------------------------------------------------------------------------


class View:
    """A container's copy of the volume."""

    def __init__(self, committed: Path, here: Path) -> None:
        self._committed, self.here = committed, here
        self._note = here.with_suffix(".seen")
        here.mkdir(parents=True, exist_ok=True)
        self._mine: dict[str, Any] = {}
        """The state of each path here and there, when both were last equal."""
        self._theirs: dict[str, Any] = {}
        with suppress(FileNotFoundError):
            self._mine, self._theirs = json.loads(self._note.read_text("utf-8"))

    def commit(self) -> None:
        """Copy changes here to there, and changes there to here. If both changed the same file, the last one wins."""
        with self._alone():
            sent = self._carry(self.here, self._committed, self._mine, ())
            self._carry(self._committed, self.here, self._theirs, sent)
            self._mine, self._theirs = _listed(self.here), _listed(self._committed)

    def reload(self) -> None:
        """Copy changes there to here; local changes stay."""
        with self._alone():
            changed = {
                path for path, found in _listed(self.here).items() if self._mine.get(path) != found
            }
            came = self._carry(self._committed, self.here, self._theirs, changed)
            self._theirs = _listed(self._committed)
            now = _listed(self.here)
            self._mine = {
                path: now[path]
                for path in now
                if path in came or (path in self._mine and path not in changed)
            }

    @contextmanager
    def _alone(self) -> Generator[None]:
        with _locked(self._committed.with_suffix(".lock")):
            yield
            self._note.write_text(json.dumps([self._mine, self._theirs]), "utf-8")

    @staticmethod
    def _carry(
        source: Path, target: Path, before: Mapping[str, Any], but: Collection[str]
    ) -> set[str]:
        """Carry changes since `before` from source to target, leaving out `but`; returns the paths that are new or changed."""
        now = _listed(source)
        gone = {path for path in before if path not in now and path not in but}
        came = {path for path in now if before.get(path) != now[path] and path not in but}
        for path in sorted(gone, reverse=True):
            _remove(target / path)
        for path in sorted(came):
            _copy(source / path, target / path)
        return came


def _listed(folder: Path) -> dict[str, Any]:
    """A description of each path; anything but files, folders and links is not part of a volume."""
    found: dict[str, Any] = {}
    todo = [""]
    while todo:
        below = todo.pop()
        with os.scandir(folder / below) as entries:
            for entry in entries:
                path = f"{below}{entry.name}"
                if entry.is_symlink():
                    found[path] = ["link", os.readlink(entry.path)]
                elif entry.is_dir():
                    found[path] = ["folder"]
                    todo.append(f"{path}/")
                elif entry.is_file():
                    seen = entry.stat()
                    found[path] = [seen.st_mtime_ns, seen.st_size, seen.st_mode]
    return found


def _copy(source: Path, target: Path) -> None:
    if source.is_symlink():
        _remove(target)
        target.symlink_to(os.readlink(source))
    elif source.is_dir():
        target.mkdir(exist_ok=True)
    else:
        if target.is_dir():
            _remove(target)
        new = target.with_name(f".{target.name[:100]}.{os.getpid()}.copying")
        shutil.copy2(source, new)
        new.replace(target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Generator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- the coordinator -------------------------------------------------------------------------------------


def coordinate(folder: Path, what: str, *arguments: Any) -> Any:
    """Send a request to the coordinator: a single container, which answers one request after another."""
    with _locked(folder / "coordinator" / "lock"):
        view = View(folder / "volume", folder / "coordinator" / "volume")
        view.reload()
        said = answer(str(view.here), what, arguments)
        view.commit()
        return said


# --- calls ----------------------------------------------------------------------------------------


def spawn(
    folder: Path, call: Call, secrets: Mapping[str, str], named: Mapping[str, str] = EMPTY
) -> str:
    """Spawn a call of `work`, with a keeper process. `named`: the variables of the workspace's secrets that the call names."""
    name = f"fc-{time.time_ns():x}{uuid.uuid4().hex[:6]}"
    place = folder / "calls" / name
    place.mkdir()
    (place / "input").write_text(json.dumps(call.document()), "utf-8")
    with (place / "said").open("wb") as said:
        subprocess.run(
            [sys.executable, "-m", THIS, str(folder), name],
            input=json.dumps({SECRETS: json.dumps(dict(secrets)), **named}).encode(),
            stdout=said,
            stderr=said,
            start_new_session=True,
            check=True,
        )  # it goes on in a child
    return name


class Keeper:
    """Modal's side of a call: runs its containers."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.place = folder / "calls" / name
        self.timeout = json.loads((self.place / "input").read_text("utf-8"))["timeout"]

    def keep(self, secrets: Mapping[str, str]) -> None:
        """Run containers, one after another, until there is a result."""
        libc = ctypes.CDLL(None)
        libc.prctl(SUBREAPER, 1)
        Path("/proc/self/comm").write_text(KEEPER)
        number = 0
        while True:
            while (word := self.before()) == "":
                time.sleep(TICK)
            number += 1
            word = self.contain(number, secrets) if word == "go" else word
            if word != "again":
                break
        with suppress(FileNotFoundError):  # it has expired
            (self.place / "result").write_text(word, "utf-8")

    def before(self) -> str:
        """`cancelled` if the call was ended before it got a container, `go` if it may have one now, else empty."""
        if self.told("cancel") or self.told("stop"):
            return "cancelled"
        return "" if (self.folder / "hold").exists() else "go"

    def told(self, what: str) -> bool:
        """True once for each time that the call was told this."""
        try:
            (self.place / what).unlink()
        except FileNotFoundError:
            return False
        return True

    def contain(self, number: int, secrets: Mapping[str, str]) -> str:
        """Run one container; returns how the call ended in it, or `again`."""
        container = os.fork()
        if container == 0:
            os.setsid()
            Path("/proc/self/comm").write_text(CONTAINER)
            os.environ.update(secrets)
            run_container(self.folder, self.name, number)
        try:
            return self.watch(container, time.monotonic() + self.timeout)
        finally:
            self.end()

    def watch(self, container: int, deadline: float) -> str:
        """Watch a container until it has ended, or has to."""
        while (ended := _ended(container)) is None:
            if self.told("stop"):
                return "stopped"
            if self.told("lose"):
                return "again"
            if self.told("preempt"):
                return self.leave(container, signal.SIGINT) or "again"
            if self.told("cancel"):
                return self.leave(container, signal.SIGUSR1) or "cancelled"
            if time.monotonic() >= deadline:
                return "timed out"
            time.sleep(TICK)
        return "done" if ended == 0 else "failed"

    def leave(self, container: int, how: signal.Signals) -> str:
        """Signal the container, and give it some time; returns `done` if its work ended within that time."""
        os.kill(container, how)
        until = time.monotonic() + GRACE
        while (ended := _ended(container)) is None and time.monotonic() < until:
            time.sleep(TICK)
        return "done" if ended == 0 else ""

    def end(self) -> None:
        """End the container with all that it has started: this process adopts orphans."""
        while found := _below(os.getpid()):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(TICK)


def _ended(pid: int) -> int | None:
    """The exit status of a child; None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _below(pid: int) -> list[int]:
    """All descendants, those further down first, but for keepers of calls that the work has spawned: these are Modal's own."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    inside = [each for each in map(int, children) if not _is_keeper(each)]
    return [each for child in inside for each in (*_below(child), child)]


def _is_keeper(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text() == KEEPER + "\n"
    except OSError:
        return False


class Cancelled(BaseException):
    """Raised, as by Modal, in the middle of a call that is cancelled."""


def _cancelled(_signal: int, _frame: object) -> None:
    raise Cancelled


def run_container(folder: Path, name: str, number: int) -> NoReturn:
    """Run a container in a process of its own."""
    status = 1
    try:
        sys.stderr.write(contain(folder, name, number) + "\n")
        status = 0
    except KeyboardInterrupt:
        pass  # it was wanted back
    except BaseException:  # noqa: BLE001  (a copy of the keeper must not go on as one)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def contain(folder: Path, name: str, number: int) -> str:
    """Run the work of a container, with a volume and a disk of its own."""
    signal.signal(signal.SIGUSR1, _cancelled)
    place = folder / "calls" / name / f"container-{number}"
    view = View(folder / "volume", place / "volume")
    view.reload()
    secrets = json.loads(os.environ.pop(SECRETS))
    call = Call(**json.loads((folder / "calls" / name / "input").read_text("utf-8")))
    named = {name: os.environ[name] for name in call.variables}
    around = ContainerContext(
        str(view.here),
        str(place / "disk"),
        view,
        partial(coordinate, folder),
        lambda following: spawn(folder, following, secrets, named),
        {"HF_HOME": str(folder / "caches")},
        os.environ,
    )
    said = work(call, name, secrets, around)
    view.commit()
    return said


def main() -> None:
    """Entry point of `python -m`: starts a process that outlives the one that called Modal."""
    folder, name = sys.argv[1:]
    secrets: dict[str, str] = json.loads(sys.stdin.read())
    if os.fork() == 0:
        Keeper(Path(folder), name).keep(secrets)


if __name__ == "__main__":
    main()
