"""The worker: it runs one stint of a job, in a container with the job's GPU. It takes its turn from the coordinator, copies the attempt
from the volume to the container's own disk, and starts it there under the runner's supervisor, as an engine's node does (`begin.sh`).

Meanwhile this process copies everything new to the volume every few seconds (the log, complete checkpoints, the state) and checks
whether the job was cancelled. At the end it copies all artefacts, and after them the exit record. So the volume holds the same files as
any other machine's disk, but never an open database or a half-written checkpoint.

Modal may take a container away at any moment, and then starts the same call again in another one, which resumes from the newest
checkpoint on the volume. If Modal warns first (KeyboardInterrupt), the command is asked to save. If a stint reaches the end of its call
while the job may still run, and it has made a checkpoint, it spawns the next call itself; no other process is needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from groupwise.jobs.clouds.modal.coordinator import ASKED, attempt
from groupwise.jobs.clouds.modal.port import ROOT, Call
from groupwise.jobs.hosts.runner.checkpoints import Checkpoint, checkpoints_of
from groupwise.jobs.hosts.runner.ending import evict, wake_supervisor
from groupwise.jobs.hosts.runner.files import (
    cell_words,
    is_disk_full,
    make_folder,
    number_in,
    read_json,
    set_cell,
    size_of,
    write_file,
    write_json,
)
from groupwise.jobs.hosts.runner.launch_request import LARGEST_TOKEN
from groupwise.jobs.hosts.runner.processes import boot_clock
from groupwise.jobs.hosts.runner.protocol import as_bytes
from groupwise.jobs.hosts.runner.root import TOKEN
from groupwise.jobs.hosts.runner.supervisor import EVICT_GRACE

FRESH = (ASKED, "turn.json", "log", "exit.json", "outcome.json", "bell", "queued.json.voided")
"""Files of the attempt's folder on the volume that are not copied: the supervisor starts without them."""
EVICTED_SECONDS = 27.0
"""Seconds that the supervisor has to end. Its command gets 25 of them; Modal gives the container 30."""


class Volume(Protocol):
    """The volume, as a container uses it."""

    def commit(self) -> None:
        """Publish the changes made in this container."""
        ...

    def reload(self) -> None:
        """Read the changes that others have committed."""
        ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The folders, services and variables that a container provides."""

    home: str
    """The folder of the volume."""
    scratch: str
    """A folder on the container's own disk."""
    volume: Volume
    desk: Callable[..., Any]
    """Sends a request to the coordinator."""
    spawn: Callable[[Call], str]
    """Spawns another call with the same secrets; returns its id."""
    variables: Mapping[str, str]
    """Default environment variables for commands: the folders of caches."""
    environment: Mapping[str, str]
    """The container's environment variables, including those of the workspace's secrets."""


def work(call: Call, me: str, secrets: Mapping[str, str], around: Surroundings) -> str:
    """Run a call of the worker; returns how it ended, which Modal shows on its pages. `me`: the id of this call."""
    turn = around.desk("take", call.job, call.epoch, call.number, me)
    if turn is None:
        return "it is another call's turn, or the job is over"
    if turn["handed_over"]:  # the container was taken away before it could spawn the next call
        return follow(call, around)
    around.volume.reload()
    there = around.environment
    variables = {name: there[name] for name in call.variables if name in there}
    return Stint(call, me, around, turn["spent"]).run({**variables, **secrets})


def follow(call: Call, around: Surroundings) -> str:
    """Spawn a call for the next stint."""
    following = replace(call, number=call.number + 1)
    spawned = around.spawn(following)
    around.desk("note", call.job, call.epoch, following.number, spawned)
    return "another call goes on with it"


class Stint:
    """One stint of a job: the part that this call runs."""

    def __init__(self, call: Call, me: str, around: Surroundings, spent: float) -> None:
        self.call, self.me, self.around, self.spent = call, me, around, spent
        self.there = attempt(around.home, call.job, call.epoch)
        self.here = attempt(around.scratch, call.job, call.epoch)
        self.asked = read_json(self.there.at(ASKED), LARGEST_TOKEN) or {}
        spec: dict[str, Any] = self.asked["spec"]
        self.artefacts: list[str] = spec["artefacts"]
        self.folders: list[str] = spec["checkpoints"]
        most = call.timeout - call.spare
        left = most if call.limit is None else call.limit - spent
        self.is_last = call.limit is not None and left <= most
        """True if the job's time limit ends before this call does."""
        self.seconds = max(0.001, min(most, left))
        self.brought: dict[str, tuple[int, Any]] = {}
        """Checkpoints that are on the volume: path to step and `mark` of the manifest."""
        self.began_at = -1
        """The step of the checkpoint from which this stint resumes; -1: none."""
        self.log_there = size_of(self.there.at("log"))
        self.state: dict[str, Any] = {}
        self.not_kept: dict[str, str] = {}

    def run(self, secrets: Mapping[str, str]) -> str:
        """Run the job until it ends or this call's time is over."""
        self.lay_out(secrets)
        process = self.begin()
        try:
            while process.poll() is None:
                try:
                    process.wait(self.call.every)
                except subprocess.TimeoutExpired:
                    self.share()
        except (
            BaseException
        ):  # the container is taken away, for whichever reason: the command saves first
            self.leave(process)
            raise
        return self.settle()

    # - before

    def lay_out(self, secrets: Mapping[str, str]) -> None:
        """Copy the attempt to this disk, including its newest checkpoint, and mark it as queued here."""
        shutil.rmtree(self.here.path, ignore_errors=True)
        make_folder(os.path.dirname(self.here.path))
        ignored = shutil.ignore_patterns(*FRESH)
        shutil.copytree(
            self.there.path,
            self.here.path,
            symlinks=True,
            ignore=lambda folder, names: (
                ignored(folder, names) if folder == self.there.path else set()
            ),
        )
        write_file(self.here.at("log"), b"")
        state = read_json(self.there.at("state.json")) or {}
        fields_dropped = ("pid", "start_ticks", "started_at", "supervisor", "cgroup")
        queued = {name: value for name, value in state.items() if name not in fields_dropped}
        write_json(self.here.at("state.json"), {**queued, "phase": "queued"})
        write_file(self.here.at(TOKEN), as_bytes(self.token(secrets)))

    def token(self, secrets: Mapping[str, str]) -> dict[str, Any]:
        """The request with which the supervisor starts. The supervisor removes the file before it starts the command."""
        spec, limits = self.asked["spec"], dict(self.asked["spec"].get("limits") or {})
        limits["time_seconds"] = self.seconds
        variables: dict[str, str] = {**self.around.variables, **(spec.get("environment") or {})}
        return {
            **self.asked,
            "root": os.path.join(self.around.scratch, ROOT),
            "spec": {
                **spec,
                "environment": {n: v for n, v in variables.items() if n not in secrets},
                "secrets": sorted(secrets),
                "limits": limits,
            },
            "secrets": dict(secrets),
            "python": self.call.python or sys.executable,
            "resume": self.newest(),
        }

    def newest(self) -> dict[str, Any] | None:
        """The checkpoint from which to resume. The files of all checkpoints are in the working folder already."""
        found = checkpoints_of(self.here, self.folders)
        self.brought = {each.path: (each.step, self.mark(each)) for each in found}
        first: dict[str, Any] = self.asked.get("resume") or {}
        if not found:
            return {**first, "manifest": {}} if first else None
        self.began_at = found[-1].step
        return {"manifest": {}, "step": found[-1].step, "path": found[-1].path}

    def begin(self) -> subprocess.Popen[bytes]:
        """Start the supervisor in its own session: signals to this process do not reach it."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
            map(str, range(self.call.gpus))
        )
        names = ("HOME", "USER", "PATH", "LANG", "LD_LIBRARY_PATH")
        passed = {name: os.environ[name] for name in names if name in os.environ}
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", self.here.at("runner.py"), self.here.path],
            env={**passed, "CUDA_VISIBLE_DEVICES": visible if self.call.gpus else ""},
            stdin=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    # - while it runs

    def share(self) -> None:
        """Copy everything new to the volume, and check there for a cancellation."""
        self.share_log()
        self.share_state()
        self.share_checkpoints()
        set_cell(self.there.at("heartbeat"), f"{boot_clock():.3f}")
        self.around.volume.commit()
        self.around.volume.reload()
        self.hear()

    def share_log(self) -> None:
        """Append new output to the log on the volume, which already has the output of earlier stints."""
        with open(self.here.at("log"), "rb") as source, open(self.there.at("log"), "r+b") as log:
            source.seek(log.seek(0, os.SEEK_END) - self.log_there)
            shutil.copyfileobj(source, log)

    def share_state(self) -> None:
        """Copy the state, with a boot id of this stint: pids of this container mean nothing to the coordinator."""
        state = read_json(self.here.at("state.json")) or {}
        shared = {**state, "boot_id": f"{self.me} {self.call.number}"}
        if state.get("phase") != "queued" and shared != self.state:
            self.state = shared
            write_json(self.there.at("state.json"), shared)

    def share_checkpoints(self) -> None:
        """Copy new checkpoints. Remove a checkpoint that the command has removed, once there is a later one."""
        found = checkpoints_of(self.here, self.folders)
        for each in found:
            if self.brought.get(each.path) != (each.step, self.mark(each)):
                self.bring(each)
        newest = found[-1].step if found else -1
        for path in set(self.brought) - {each.path for each in found}:
            if self.brought[path][0] < newest:
                shutil.rmtree(os.path.join(self.there.work, path), ignore_errors=True)
                del self.brought[path]

    def mark(self, checkpoint: Checkpoint) -> tuple[int, int]:
        """Time (ns) and size of the manifest. They differ if a checkpoint was replaced by another of the same name."""
        found = checkpoint.stats[checkpoint.manifest]
        return found.st_mtime_ns, found.st_size

    def bring(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint, its manifest last. Skip it if it is removed while it is copied."""
        source, target = (
            os.path.join(work, checkpoint.path) for work in (self.here.work, self.there.work)
        )
        shutil.rmtree(target, ignore_errors=True)
        try:
            for path in (*checkpoint.files, "manifest.json"):
                os.makedirs(os.path.dirname(os.path.join(target, path)), exist_ok=True)
                shutil.copy2(os.path.join(source, path), os.path.join(target, path))
        except OSError as error:
            shutil.rmtree(target, ignore_errors=True)
            if is_disk_full(error):
                raise
            return
        self.brought[checkpoint.path] = (checkpoint.step, self.mark(checkpoint))

    def hear(self) -> None:
        """Pass a cancellation on to the supervisor; the request is a file on the volume."""
        grace = number_in(cell_words(self.there.at("cancel")))
        if grace is not None and grace != number_in(cell_words(self.here.at("cancel"))):
            set_cell(self.here.at("cancel"), f"{grace:.3f}")
            wake_supervisor(self.here)

    # - after

    def leave(self, process: subprocess.Popen[bytes]) -> None:
        """Ask the command to save, and copy its checkpoints. If the command has ended, copy its results and exit record instead."""
        evict(self.here, EVICT_GRACE)
        try:
            process.wait(EVICTED_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        record = read_json(self.here.at("exit.json")) or {}
        if record.get("reason") in ("exited", "cancelled"):
            self.settle()
        else:
            self.share_log()
            self.share_checkpoints()
            self.around.volume.commit()

    def settle(self) -> str:
        """Copy the results and the exit record to the volume, or start the next stint. Returns how this stint ended."""
        record = read_json(self.here.at("exit.json"))
        if record is None and (read_json(self.here.at("state.json")) or {}).get("refused"):
            self.share_state()
            self.around.volume.commit()
            return "refused"
        if record is None:
            raise RuntimeError("the supervisor ended without an exit record")
        limit, spent = self.call.limit, self.spent + float(record.get("seconds") or 0.0)
        self.is_last = self.is_last or (limit is not None and spent >= limit)
        if record["reason"] == "time_limit" and not self.is_last and self.goes_on():
            return follow(self.call, self.around)
        self.share_log()
        self.share_state()
        for path in self.artefacts:
            self.keep(os.path.join(self.here.work, path), os.path.join(self.there.work, path))
        write_json(self.there.at("exit.json"), self.whole_record(record))
        self.around.volume.commit()
        return str(record["reason"])

    def goes_on(self) -> bool:
        """Hand over if this call's time is over and the job's is not; returns True if another call continues. A stint that has made no
        checkpoint does not hand over, because such a job would never end."""
        self.share_log()
        self.share_checkpoints()
        if max((step for step, _ in self.brought.values()), default=-1) <= self.began_at:
            return False
        self.around.volume.commit()
        call = self.call
        return bool(self.around.desk("hand_over", call.job, call.epoch, call.number, self.me))

    def whole_record(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The exit record of the whole job, across its stints."""
        found = {**record, "seconds": self.spent + float(record.get("seconds") or 0.0)}
        if record["reason"] == "time_limit":
            call = f"its call's time of {self.call.timeout:g} s was up, and it had made no checkpoint in it to go on from"
            job = f"its time limit of {self.call.limit or 0:g} s was reached"
            found["message"] = job if self.is_last else call
        if self.not_kept:
            listed = ", ".join(f"{path} ({why})" for path, why in [*self.not_kept.items()][:5])
            found["message"] = f"{found.get('message') or ''} not kept: {listed}".strip()
        return found

    def keep(self, source: str, target: str) -> None:
        """Make `target` equal to `source`; do not copy files that are equal already."""
        try:
            if os.path.islink(source):
                _remove(target)
                os.symlink(os.readlink(source), target)
            elif os.path.isdir(source):
                if os.path.islink(target) or os.path.isfile(target):
                    _remove(target)
                os.makedirs(target, exist_ok=True)
                names = os.listdir(source)
                for name in set(os.listdir(target)) - set(names):
                    _remove(os.path.join(target, name))
                for name in names:
                    self.keep(os.path.join(source, name), os.path.join(target, name))
            elif os.path.isfile(source) and not _is_same(source, target):
                _remove(target)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                shutil.copy2(source, target)
            elif not os.path.lexists(source):
                _remove(target)
        except OSError as error:
            self.not_kept[os.path.relpath(source, self.here.work)] = error.strerror or str(error)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _is_same(source: str, target: str) -> bool:
    """True if both have the same size and modification time, which `copy2` preserves."""
    try:
        one, other = os.stat(source), os.lstat(target)
    except FileNotFoundError:
        return False
    return (one.st_size, one.st_mtime_ns) == (other.st_size, other.st_mtime_ns)
