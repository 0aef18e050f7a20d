"""The runner for a machine that can reach the head of a Ray cluster: attempts are laid out on its disk, which the nodes share, and started
as Ray jobs.

`schedulers.py` describes when an engine is asked and how reliable its answers are. Ray is called through the HTTP API of its head (the Jobs
API). The attempt's name is the job's id, so Ray has each attempt at most once. Ray keeps all its state in the head: after a restart it
has forgotten the waiting jobs, and it gives up a job that has waited for a quarter of an hour. In both cases the next caller that reads
the state submits the job again: the options are stored with the attempt, and its token ensures that it starts once. A caller that
watches its attempts (`caller_watches`) does this itself."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, urlsplit

from groupwise.jobs.hosts.answers import MemberState
from groupwise.jobs.hosts.host import Host, HostUnreachable, RunnerRefused
from groupwise.jobs.hosts.schedulers import SchedulerRunner, scheduler_job_name

NAME = "ray"
ADDRESS = "http://127.0.0.1:8265"
"""The default address of the head."""
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Environment variables in which Ray expects its token."""
LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
CALL_SECONDS = 15.0
STOP_SECONDS = 30
"""Seconds between Ray's TERM and its KILL. Ray's default of 3 is too short for a checkpoint; the supervisor needs 25 (EVICT_GRACE)."""
LIVING = frozenset({"PENDING", "RUNNING"})
WITHOUT_MESSAGE = frozenset({"PENDING", "RUNNING", "SUCCEEDED"})
"""States whose message adds no information."""
GAVE_UP = "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"
"""Ray's error for a job that waited longer than the head's RAY_JOB_START_TIMEOUT_SECONDS (900)."""
RESOURCE_NAMES = {
    "entrypoint_num_cpus": "CPU",
    "entrypoint_num_gpus": "GPU",
    "entrypoint_memory": "memory",
}
"""Options of the Jobs API, and the corresponding names of resources in the cluster's status."""
GANG = "gang"
"""Our own option for a job on several machines at once, which the Jobs API does not support (`ray_gang.py`)."""

ApiCall = tuple[str, str, Mapping[str, Any] | None]
"""One HTTP call: method, path, body."""


@dataclass(frozen=True, slots=True)
class RayJob:
    """Ray's record of a submitted job."""

    name: str
    status: str
    reason: str = ""
    gave_up: bool = False
    """True if Ray gave the job up because it had waited too long."""
    resources: Mapping[str, tuple[float, float]] = field(
        default_factory=dict[str, tuple[float, float]]
    )
    """Ray's resources by name: amount in use, and total."""

    @property
    def is_alive(self) -> bool:
        """True if the job waits, runs, or is ending."""
        return self.status in LIVING

    def __str__(self) -> str:
        suffix = f" ({self.reason})" if self.reason else ""
        return f"job {self.name} of Ray is {self.status.lower()}{suffix}"


class RayRunner(SchedulerRunner[RayJob]):
    """The `SchedulerRunner` for Ray."""

    title = "Ray"
    _engine_id: str | None = None

    def __init__(
        self,
        host: Host,
        *,
        root: str = "groupwise-fleet",
        python: str = "python3",
        caller_watches: bool = False,
        address: str = ADDRESS,
    ) -> None:
        """`address`: URL of Ray's head, as seen from the machine."""
        super().__init__(host, root=root, python=python, caller_watches=caller_watches)
        self.address = address

    async def engine_id(self) -> str:
        """See `SchedulerRunner.engine_id`. The name includes the machine: machines that share a folder may each have their own Ray under
        the same address.

        No other engine uses a fleet's folder: its attempts keep the plain name, so they remain its own if Ray's address changes."""
        if self.caller_watches:
            return NAME
        if self._engine_id is None:
            url = urlsplit(self.address)
            is_local = url.hostname in LOCAL_NAMES
            name = (await self.hello()).hostname if is_local else url.hostname
            self._engine_id = f"{NAME}:{name}:{url.port or ''}"
        return self._engine_id

    async def find_jobs(self, attempts: Iterable[MemberState]) -> Sequence[RayJob]:
        """See `SchedulerRunner.find_jobs`."""
        names = [scheduler_job_name(attempt) for attempt in attempts]
        responses = await self._call_api(
            *(("GET", _job_path(name), None) for name in names),
            ("GET", "/api/cluster_status", None),
        )
        *jobs, (_, cluster) = responses
        resources = _parse_resources(cluster)
        ray_jobs: list[RayJob] = []
        for name, (status, text) in zip(names, jobs, strict=True):
            if status == 404 and "does not exist" in text:
                continue
            try:
                job: dict[str, Any] = json.loads(text)
                state = str(job["status"])
            except (ValueError, KeyError, TypeError):
                message = f"Ray does not say what became of {name}: {status} {_last_line(text)}"
                raise HostUnreachable(message) from None
            reason = (
                ""
                if state in WITHOUT_MESSAGE
                else _summarize_message(str(job.get("message") or ""))
            )
            ray_jobs.append(
                RayJob(name, state, reason, job.get("error_type") == GAVE_UP, resources)
            )
        return ray_jobs

    async def free_resources(self) -> str:
        """Ray's free resources as text. Raises HostUnreachable if no Ray answers."""
        (status, version), (_, cluster) = await self._call_api(
            ("GET", "/api/version", None), ("GET", "/api/cluster_status", None)
        )
        if status != 200 or "ray_version" not in version:
            raise self._unexpected_answer(status, version)
        return _format_free(_parse_resources(cluster), ("CPU", "GPU")) or "nothing yet"

    async def try_options(self, options: Sequence[str]) -> str:
        """Describe a job with these options and the free resources. Ray never rejects a job for asking too much: it waits for a node that
        may join."""
        return f"try {options[0]}; free: {await self.free_resources()}"

    def _waiting_reason(self, state: MemberState, job: RayJob) -> str:
        """See `SchedulerRunner._waiting_reason`. Lists requested and free resources, because Ray does not say what a job lacks."""
        options = _job_options(state.engine_options)
        gang: dict[str, Any] | None = options.get(GANG)
        named: dict[str, float] = {
            resource: options[name] for name, resource in RESOURCE_NAMES.items() if name in options
        }
        resources = {**named, **options.get("entrypoint_resources", {})}
        requested: Mapping[str, float] = gang["bundle"] if gang is not None else resources
        amounts = ", ".join(
            f"{_format_amount(amount)} {name}" for name, amount in requested.items()
        )
        placement = "" if gang is None else f" on each of {gang['nodes']} nodes at once"
        free_text = _format_free(job.resources, requested)
        return f"{job}: it wants {amounts}{placement}" + (
            f"; free: {free_text}" if free_text else ""
        )

    # --- giving ---------------------------------------------------------------------------------

    async def _submit(
        self,
        state: MemberState,
        options: Sequence[str],
        secrets: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """See `SchedulerRunner._submit`."""
        job_options = _job_options(options)
        script, log = (shlex.quote(f"{state.folder}/{name}") for name in ("begin.sh", "engine.log"))
        if (gang := job_options.pop(GANG, None)) is not None:
            # The entrypoint waits for all machines, and itself uses no resources.
            program, argument = (
                _program_text("ray_gang.py"),
                json.dumps({"folder": state.folder, **gang}),
            )
            entrypoint = f"exec python3 -c {shlex.quote(program)} {shlex.quote(argument)}"
        elif job_options.get("entrypoint_num_gpus"):
            entrypoint = f"exec sh {script}"
        else:  # hide the GPUs: otherwise the job would see those of its node
            entrypoint = f"CUDA_VISIBLE_DEVICES= exec sh {script}"
        variables = {
            "RAY_JOB_STOP_SIGNAL": "SIGTERM",
            "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS),
        }
        body = {
            "submission_id": scheduler_job_name(state),
            "entrypoint": f"{entrypoint} >>{log} 2>&1",
            "runtime_env": {"env_vars": variables},
            **job_options,
        }
        [(status, text)] = await self._call_api(("POST", "/api/jobs/", body))
        if status == 200 or "already exists" in text:
            return
        if status in (400, 422):
            raise RunnerRefused("engine", f"Ray would not have it: {_last_line(text)}")
        raise self._unexpected_answer(status, text)

    async def _cancel(self, jobs: Iterable[RayJob]) -> None:
        """Stop jobs, including waiting ones; Ray stops these only once it has started them."""
        calls = [("POST", f"{_job_path(job.name)}/stop", None) for job in jobs if job.is_alive]
        await self._call_api(*calls)

    async def _judge_unqueued(self, state: MemberState, jobs: Sequence[RayJob]) -> MemberState:
        """Submit a job again that Ray has forgotten or given up; meanwhile it counts as being submitted."""
        if any(not job.gave_up for job in jobs):
            return await self._void_unstarted(state, str(jobs[-1]))
        await self._call_api(*(("DELETE", _job_path(job.name), None) for job in jobs))
        state = replace(state, engine_says="it is on its way to Ray")
        if self.caller_watches:
            return replace(state, engine_has=False)
        try:
            await self._submit(state, state.engine_options)
        except RunnerRefused as refusal:
            return await self._void_unstarted(state, refusal.message)
        return state

    async def _call_api(self, *calls: ApiCall) -> list[tuple[int, str]]:
        """Make HTTP calls from the machine; returns status and text of each. Raises HostUnreachable if one got no answer, or Ray rejects
        the token."""
        if not calls:
            return []
        request = {"address": self.address, "seconds": CALL_SECONDS, "calls": calls}
        result = await self.run(
            ("python3", "-I", "-S", "-c", _program_text("ray_call.py"), json.dumps(request))
        )
        if result.code != 0:
            message = _last_line(result.err) or "no answer in time"
            raise HostUnreachable(f"Ray does not answer there at {self.address}: {message}")
        answers = [(int(status), str(text)) for status, text in json.loads(result.out)]
        if any(status in (401, 403) for status, _ in answers):
            raise HostUnreachable(
                f"Ray at {self.address} does not take its token, which is read there from {', '.join(TOKEN_VARIABLES)} or ~/.ray/auth_token"
            )
        return answers

    def _unexpected_answer(self, status: int, text: str) -> HostUnreachable:
        return HostUnreachable(
            f"what answers there at {self.address} is not a head of Ray, or not well: {status} {_last_line(text)}"
        )


@cache
def _program_text(program: str) -> str:
    return Path(__file__).with_name(program).read_text("utf-8")


def _job_options(options: Sequence[str]) -> dict[str, Any]:
    """The options in the format of the Jobs API."""
    return json.loads(options[0]) if options else {}


def _job_path(name: str) -> str:
    return f"/api/jobs/{quote(name, safe='')}"


def _format_free(resources: Mapping[str, tuple[float, float]], names: Iterable[str]) -> str:
    amounts = ((name, *resources[name]) for name in names if name in resources)
    return ", ".join(
        f"{_format_amount(total - used)} of {_format_amount(total)} {word}"
        for word, used, total in amounts
    )


def _parse_resources(cluster: str) -> dict[str, tuple[float, float]]:
    """Used and total amounts by resource name; empty if Ray does not report them, since they appear in messages only."""
    try:
        usage = json.loads(cluster)["data"]["clusterStatus"]["loadMetricsReport"]["usage"]
        return {str(name): (float(used), float(total)) for name, (used, total) in usage.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _format_amount(amount: float) -> str:
    return f"{amount:g}" if amount < 1e6 else f"{amount / 2**30:.1f}G"


def _summarize_message(text: str) -> str:
    """The first line of a message. If the message continues with the end of a log, add its last line; leave out a traceback."""
    first_line = text.partition("\n")[0].strip()
    if "Full traceback" in first_line:
        return first_line.removesuffix(" Full traceback:")
    summary, has_log, _ = first_line.partition(", last available logs")
    return f"{summary}: {_last_line(text)}" if has_log else first_line


def _last_line(text: str) -> str:
    """The last line that is not empty; in a traceback it names the error."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip(" .")), "")
