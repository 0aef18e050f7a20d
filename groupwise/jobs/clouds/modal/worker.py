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

from groupwise.jobs.clouds.modal.api import ROOT, Call
from groupwise.jobs.clouds.modal.coordinator import TAKEN_TOKEN, attempt_at
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

NOT_COPIED = (
    TAKEN_TOKEN,
    "turn.json",
    "log",
    "exit.json",
    "outcome.json",
    "bell",
    "queued.json.voided",
)
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
class ContainerContext:
    """The folders, services and variables that a container provides."""

    home: str
    """The folder of the volume."""
    scratch: str
    """A folder on the container's own disk."""
    volume: Volume
    call_coordinator: Callable[..., Any]
    """Sends a request to the coordinator."""
    spawn: Callable[[Call], str]
    """Spawns another call with the same secrets; returns its id."""
    variables: Mapping[str, str]
    """Default environment variables for commands: the folders of caches."""
    environment: Mapping[str, str]
    """The container's environment variables, including those of the workspace's secrets."""


def work(call: Call, call_id: str, secrets: Mapping[str, str], context: ContainerContext) -> str:
    """Run a call of the worker; returns how it ended, which Modal shows on its pages. `call_id`: the id of this call."""
    turn = context.call_coordinator("take", call.job, call.epoch, call.number, call_id)
    if turn is None:
        return "it is another call's turn, or the job is over"
    if turn["handed_over"]:  # the container was taken away before it could spawn the next call
        return spawn_next(call, context)
    context.volume.reload()
    environment = context.environment
    variables = {name: environment[name] for name in call.variables if name in environment}
    return Stint(call, call_id, context, turn["spent"]).run({**variables, **secrets})


def spawn_next(call: Call, context: ContainerContext) -> str:
    """Spawn a call for the next stint."""
    next_call = replace(call, number=call.number + 1)
    spawned = context.spawn(next_call)
    context.call_coordinator("note", call.job, call.epoch, next_call.number, spawned)
    return "another call continues it"


class Stint:
    """One stint of a job: the part that this call runs."""

    def __init__(self, call: Call, call_id: str, context: ContainerContext, spent: float) -> None:
        self.call, self.call_id, self.context, self.spent = call, call_id, context, spent
        self.volume_attempt = attempt_at(context.home, call.job, call.epoch)
        self.local_attempt = attempt_at(context.scratch, call.job, call.epoch)
        self.request = read_json(self.volume_attempt.at(TAKEN_TOKEN), LARGEST_TOKEN) or {}
        spec: dict[str, Any] = self.request["spec"]
        self.artefacts: list[str] = spec["artefacts"]
        self.folders: list[str] = spec["checkpoints"]
        usable_seconds = call.timeout - call.spare
        seconds_left = usable_seconds if call.limit is None else call.limit - spent
        self.is_last = call.limit is not None and seconds_left <= usable_seconds
        """True if the job's time limit ends before this call does."""
        self.seconds = max(0.001, min(usable_seconds, seconds_left))
        self.copied: dict[str, tuple[int, Any]] = {}
        """Checkpoints that are on the volume: path to step and `mark` of the manifest."""
        self.resumed_step = -1
        """The step of the checkpoint from which this stint resumes; -1: none."""
        self.log_offset = size_of(self.volume_attempt.at("log"))
        self.state: dict[str, Any] = {}
        self.copy_errors: dict[str, str] = {}

    def run(self, secrets: Mapping[str, str]) -> str:
        """Run the job until it ends or this call's time is over."""
        self.lay_out(secrets)
        process = self.start_supervisor()
        try:
            while process.poll() is None:
                try:
                    process.wait(self.call.every)
                except subprocess.TimeoutExpired:
                    self.sync()
        except BaseException:
            # The container is taken away, for whichever reason: the command saves first.
            self.save_and_stop(process)
            raise
        return self.finish()

    # - before

    def lay_out(self, secrets: Mapping[str, str]) -> None:
        """Copy the attempt to this disk, including its newest checkpoint, and mark it as queued here."""
        shutil.rmtree(self.local_attempt.path, ignore_errors=True)
        make_folder(os.path.dirname(self.local_attempt.path))
        ignored = shutil.ignore_patterns(*NOT_COPIED)
        shutil.copytree(
            self.volume_attempt.path,
            self.local_attempt.path,
            symlinks=True,
            ignore=lambda folder, names: (
                ignored(folder, names) if folder == self.volume_attempt.path else set()
            ),
        )
        write_file(self.local_attempt.at("log"), b"")
        state = read_json(self.volume_attempt.at("state.json")) or {}
        fields_dropped = ("pid", "start_ticks", "started_at", "supervisor", "cgroup")
        queued = {name: value for name, value in state.items() if name not in fields_dropped}
        write_json(self.local_attempt.at("state.json"), {**queued, "phase": "queued"})
        write_file(self.local_attempt.at(TOKEN), as_bytes(self.token(secrets)))

    def token(self, secrets: Mapping[str, str]) -> dict[str, Any]:
        """The request with which the supervisor starts. The supervisor removes the file before it starts the command."""
        spec, limits = self.request["spec"], dict(self.request["spec"].get("limits") or {})
        limits["time_seconds"] = self.seconds
        variables: dict[str, str] = {**self.context.variables, **(spec.get("environment") or {})}
        return {
            **self.request,
            "root": os.path.join(self.context.scratch, ROOT),
            "spec": {
                **spec,
                "environment": {n: v for n, v in variables.items() if n not in secrets},
                "secrets": sorted(secrets),
                "limits": limits,
            },
            "secrets": dict(secrets),
            "python": self.call.python or sys.executable,
            "resume": self.resume_request(),
        }

    def resume_request(self) -> dict[str, Any] | None:
        """The checkpoint from which to resume. The files of all checkpoints are in the working folder already."""
        checkpoints = checkpoints_of(self.local_attempt, self.folders)
        self.copied = {
            checkpoint.path: (checkpoint.step, self.manifest_mark(checkpoint))
            for checkpoint in checkpoints
        }
        requested: dict[str, Any] = self.request.get("resume") or {}
        if not checkpoints:
            return {**requested, "manifest": {}} if requested else None
        self.resumed_step = checkpoints[-1].step
        return {"manifest": {}, "step": checkpoints[-1].step, "path": checkpoints[-1].path}

    def start_supervisor(self) -> subprocess.Popen[bytes]:
        """Start the supervisor in its own session: signals to this process do not reach it."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
            map(str, range(self.call.gpus))
        )
        names = ("HOME", "USER", "PATH", "LANG", "LD_LIBRARY_PATH")
        inherited = {name: os.environ[name] for name in names if name in os.environ}
        return subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                "-X",
                "utf8",
                self.local_attempt.at("runner.py"),
                self.local_attempt.path,
            ],
            env={**inherited, "CUDA_VISIBLE_DEVICES": visible if self.call.gpus else ""},
            stdin=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    # - while it runs

    def sync(self) -> None:
        """Copy everything new to the volume, and check there for a cancellation."""
        self.sync_log()
        self.sync_state()
        self.sync_checkpoints()
        set_cell(self.volume_attempt.at("heartbeat"), f"{boot_clock():.3f}")
        self.context.volume.commit()
        self.context.volume.reload()
        # Pass a cancellation on to the supervisor; the request is a file on the volume.
        grace = number_in(cell_words(self.volume_attempt.at("cancel")))
        if grace is not None and grace != number_in(cell_words(self.local_attempt.at("cancel"))):
            set_cell(self.local_attempt.at("cancel"), f"{grace:.3f}")
            wake_supervisor(self.local_attempt)

    def sync_log(self) -> None:
        """Append new output to the log on the volume, which already has the output of earlier stints."""
        with (
            open(self.local_attempt.at("log"), "rb") as source,
            open(self.volume_attempt.at("log"), "r+b") as log,
        ):
            source.seek(log.seek(0, os.SEEK_END) - self.log_offset)
            shutil.copyfileobj(source, log)

    def sync_state(self) -> None:
        """Copy the state, with a boot id of this stint: pids of this container mean nothing to the coordinator."""
        state = read_json(self.local_attempt.at("state.json")) or {}
        shared = {**state, "boot_id": f"{self.call_id} {self.call.number}"}
        if state.get("phase") != "queued" and shared != self.state:
            self.state = shared
            write_json(self.volume_attempt.at("state.json"), shared)

    def sync_checkpoints(self) -> None:
        """Copy new checkpoints. Remove a checkpoint that the command has removed, once there is a later one."""
        checkpoints = checkpoints_of(self.local_attempt, self.folders)
        for checkpoint in checkpoints:
            if self.copied.get(checkpoint.path) != (
                checkpoint.step,
                self.manifest_mark(checkpoint),
            ):
                self.copy_checkpoint(checkpoint)
        newest = checkpoints[-1].step if checkpoints else -1
        for path in set(self.copied) - {checkpoint.path for checkpoint in checkpoints}:
            if self.copied[path][0] < newest:
                shutil.rmtree(os.path.join(self.volume_attempt.work, path), ignore_errors=True)
                del self.copied[path]

    def manifest_mark(self, checkpoint: Checkpoint) -> tuple[int, int]:
        """Time (ns) and size of the manifest. They differ if a checkpoint was replaced by another of the same name."""
        file_stat = checkpoint.stats[checkpoint.manifest]
        return file_stat.st_mtime_ns, file_stat.st_size

    def copy_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint, its manifest last. Skip it if it is removed while it is copied."""
        source, target = (
            os.path.join(work, checkpoint.path)
            for work in (self.local_attempt.work, self.volume_attempt.work)
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
        self.copied[checkpoint.path] = (checkpoint.step, self.manifest_mark(checkpoint))

    # - after

    def save_and_stop(self, process: subprocess.Popen[bytes]) -> None:
        """Ask the command to save, and copy its checkpoints. If the command has ended, copy its results and exit record instead."""
        evict(self.local_attempt, EVICT_GRACE)
        try:
            process.wait(EVICTED_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        record = read_json(self.local_attempt.at("exit.json")) or {}
        if record.get("reason") in ("exited", "cancelled"):
            self.finish()
        else:
            self.sync_log()
            self.sync_checkpoints()
            self.context.volume.commit()

    def finish(self) -> str:
        """Copy the results and the exit record to the volume, or start the next stint. Returns how this stint ended."""
        exit_record = read_json(self.local_attempt.at("exit.json"))
        if exit_record is None and (read_json(self.local_attempt.at("state.json")) or {}).get(
            "refused"
        ):
            self.sync_state()
            self.context.volume.commit()
            return "refused"
        if exit_record is None:
            raise RuntimeError("the supervisor ended without an exit record")
        limit, spent = self.call.limit, self.spent + float(exit_record.get("seconds") or 0.0)
        self.is_last = self.is_last or (limit is not None and spent >= limit)
        if exit_record["reason"] == "time_limit" and not self.is_last and self.hand_over():
            return spawn_next(self.call, self.context)
        self.sync_log()
        self.sync_state()
        for path in self.artefacts:
            self.mirror(
                os.path.join(self.local_attempt.work, path),
                os.path.join(self.volume_attempt.work, path),
            )
        write_json(self.volume_attempt.at("exit.json"), self.whole_record(exit_record))
        self.context.volume.commit()
        return str(exit_record["reason"])

    def hand_over(self) -> bool:
        """Hand over if this call's time is over and the job's is not; returns True if another call continues. A stint that has made no
        checkpoint does not hand over, because such a job would never end."""
        self.sync_log()
        self.sync_checkpoints()
        if max((step for step, _ in self.copied.values()), default=-1) <= self.resumed_step:
            return False
        self.context.volume.commit()
        call = self.call
        return bool(
            self.context.call_coordinator(
                "hand_over", call.job, call.epoch, call.number, self.call_id
            )
        )

    def whole_record(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The exit record of the whole job, across its stints."""
        whole = {**record, "seconds": self.spent + float(record.get("seconds") or 0.0)}
        if record["reason"] == "time_limit":
            call = f"its call's time of {self.call.timeout:g} s was up, and it had made no checkpoint in it to continue from"
            job = f"its time limit of {self.call.limit or 0:g} s was reached"
            whole["message"] = job if self.is_last else call
        if self.copy_errors:
            listed = ", ".join(
                f"{path} ({reason})" for path, reason in [*self.copy_errors.items()][:5]
            )
            whole["message"] = f"{whole.get('message') or ''} not kept: {listed}".strip()
        return whole

    def mirror(self, source: str, target: str) -> None:
        """Make `target` equal to `source`; do not copy files that are equal already."""
        try:
            if os.path.islink(source):
                _remove(target)
                os.symlink(os.readlink(source), target)
            elif os.path.isdir(source):
                if os.path.islink(target) or os.path.isfile(target):
                    _remove(target)
                os.makedirs(target, exist_ok=True)
                source_names = os.listdir(source)
                for name in set(os.listdir(target)) - set(source_names):
                    _remove(os.path.join(target, name))
                for name in source_names:
                    self.mirror(os.path.join(source, name), os.path.join(target, name))
            elif os.path.isfile(source) and not _is_same(source, target):
                _remove(target)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                shutil.copy2(source, target)
            elif not os.path.lexists(source):
                _remove(target)
        except OSError as error:
            self.copy_errors[os.path.relpath(source, self.local_attempt.work)] = (
                error.strerror or str(error)
            )


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _is_same(source: str, target: str) -> bool:
    """True if both have the same size and modification time, which `copy2` preserves."""
    try:
        source_stat, target_stat = os.stat(source), os.lstat(target)
    except FileNotFoundError:
        return False
    return (source_stat.st_size, source_stat.st_mtime_ns) == (
        target_stat.st_size,
        target_stat.st_mtime_ns,
    )
