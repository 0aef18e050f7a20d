"""The command `groupwise fleet doctor`: checks whether database, NATS, control plane and machines work as a fleet needs them to.

    database     reachable, its tables those of this version, its clock near ours
    own disk     room for the files of jobs
    NATS         if it is used by running processes, or else by the settings: reachable, and no release with known holes
    roles        alive, and not crashing again and again
    machines     each: trusted, reachable, Python, disk, GPUs as the fleet knows them, and one tiny command from launch to exit,
                 run with the interpreter of its jobs: whether it has this groupwise, and a torch that sees these GPUs
    alarms       those of `fleet status`: leaking and faulty GPUs, drained machines

It writes nothing to the database. On each machine it leaves nothing but the runner's file.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupwise.core.errors import GroupwiseError
from groupwise.core.findings import Finding, Findings, Level, OnFinding, Report
from groupwise.core.terminal.quantities import byte_size, counted
from groupwise.jobs.clouds.schedulers import SchedulerClient
from groupwise.jobs.fleet.attempts import records
from groupwise.jobs.fleet.attempts.records import Machine
from groupwise.jobs.fleet.machines import packing
from groupwise.jobs.fleet.machines.connections import LOCAL, host_of, scheduler_of
from groupwise.jobs.fleet.machines.observation import probe_problem
from groupwise.jobs.fleet.notify.nats import access_from, credentials
from groupwise.jobs.fleet.operations import keys, status
from groupwise.jobs.fleet.operations.actor import Actor
from groupwise.jobs.fleet.processes import NATS, is_gone
from groupwise.jobs.fleet.queue.elastic import Elastic
from groupwise.jobs.fleet.queue.resources import Resources
from groupwise.jobs.fleet.settings import DATABASE_FILE, FleetPlace
from groupwise.jobs.fleet.store import schema
from groupwise.jobs.fleet.store.database import Database, connect, database_time
from groupwise.jobs.fleet.store.tables import GPU
from groupwise.jobs.hosts.answers import SUPERVISED, Hello, MemberState, Observation
from groupwise.jobs.hosts.driver import KnownState, Launch, Runner
from groupwise.jobs.hosts.host import HostError, HostKeyError
from groupwise.jobs.hosts.spec import JobSpec, Limits

CLOCK_SECONDS = 5.0
"""Allowed difference in seconds between the database's clock and ours; only the former decides anything, but logs and pages show both."""
MIN_NATS = (2, 9, 23)
"""Older releases admit unauthenticated clients if accounts and `authorization` are mixed (CVE-2023-47090)."""
MIN_PYTHON = (3, 8)
MIN_DISK_MB = 5_000
CRASHES = 3
MACHINES_AT_ONCE = 16
PROBE_TIMEOUT = 120.0
"""Seconds for the tiny command to start and end; importing torch from a slow disk takes a while."""
NATS_SECONDS = 3.0
LOOK = """
import importlib.metadata, json, os, platform, sys, warnings
result = {"python": platform.python_version()}
try:
    import groupwise
    result["groupwise"] = groupwise.__version__
except Exception as error:
    if getattr(error, "name", None) != "groupwise":
        result["why"] = "%s: %s" % (type(error).__name__, error)
try:
    with open(os.path.join(sys.prefix, "environment.json")) as file:
        result["wheel"] = json.load(file)["wheel"]
except (OSError, ValueError, KeyError, TypeError):
    pass
try:
    result["torch"] = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    pass
if "torch" in result and sys.argv[1] == "gpus":
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        os.environ.pop(name, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            import torch
            result["build"] = torch.version.cuda or torch.version.hip
            result["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
        except Exception as error:
            result["torch_why"] = "%s: %s" % (type(error).__name__, error)
    if caught and not result.get("gpus"):
        result.setdefault("torch_why", str(caught[-1].message))
print()
print(json.dumps(result))
"""
"""The tiny command's program. It is given no GPU and uses none: it counts those that torch could use."""


def examine(
    place: FleetPlace, only: Sequence[str] | None, on_finding: OnFinding | None = None
) -> Report:
    """Run all checks, passing each finding to `on_finding` at once. `only`: check these machines, and no others."""
    findings = Findings(on_finding)

    def add(finding: Finding) -> None:
        findings.add(replace(finding, meaning="") if finding.level == "ok" else finding)

    file = place.folder / DATABASE_FILE
    if place.is_embedded and place.settings.database is None and not file.exists():
        problem = f"there is no fleet in {place.folder}"
        remedy = "`groupwise fleet up` makes and starts one; --fleet names another folder"
        add(Finding("database", "problem", problem, remedy=remedy))
    else:
        with closing(connect(place.database_url)) as database:
            if _check_database(database, add):
                _check_nats(place, database, add)
                if only is None:
                    add(_check_own_disk(place))
                    _check_roles(database, add)
                    _check_keys(database, add)
                _check_machines(database, only, add)
                covered = {"role_missing", "untrusted", "unreachable", "degraded"}
                actor = Actor("doctor")
                for alarm in database.read(lambda s: list(status.alarms(s, actor, place.growing))):
                    if alarm["kind"] not in covered:
                        add(
                            Finding(
                                alarm["kind"], "warning", alarm["message"], remedy=alarm["remedy"]
                            )
                        )
    return Report(f"the fleet in {place.folder}", tuple(findings.found), "doctor_failed")


# --- database -------------------------------------------------------------------------------------


def _check_database(database: Database, add: OnFinding) -> bool:
    """Check the database. Returns True if the other checks can continue."""
    try:
        current = database.at_rest(schema.is_current)
    except GroupwiseError as error:
        add(Finding("database", "problem", str(error)))
        return False
    if not current:
        add(
            Finding(
                "database",
                "problem",
                f"{database.name} does not have the tables of this version",
                remedy="`groupwise fleet migrate`",
            )
        )
        return False
    started_at = time.monotonic()
    now = database.read(database_time)
    took = time.monotonic() - started_at
    offset = now - time.time()
    add(Finding("database", "ok", f"{database.name}, {took * 1000:.0f} ms", data={"seconds": took}))
    add(
        Finding(
            "clocks",
            "ok" if abs(offset) <= CLOCK_SECONDS else "warning",
            f"the database's clock is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} this machine's",
            "times in logs and in lists differ by as much; leases and retries use only the database's clock",
            "set the clocks by NTP",
            {"seconds": offset},
        )
    )
    return True


def _check_own_disk(place: FleetPlace) -> Finding:
    """Check the disk that receives logs, checkpoints and artefacts of all jobs."""
    free_bytes = shutil.disk_usage(place.folder).free
    free_mb = free_bytes // 1_000_000
    low_level: Level = "problem" if free_bytes < status.MIN_FREE else "warning"
    return Finding(
        "own disk",
        "ok" if free_mb >= MIN_DISK_MB else low_level,
        f"{byte_size(free_bytes)} free in {place.folder}",
        "once it is full no job can end, because its outputs cannot be stored",
        "make room there, or `groupwise fleet remove`",
        {"free_mb": free_mb},
    )


def _check_keys(database: Database, add: OnFinding) -> None:
    """Check that keys bound to projects cannot reach beyond them."""

    def look(session: Session) -> tuple[dict[str, list[str]], list[str]]:
        submitters = keys.bound_submitters(session)
        projects = {name for names in submitters.values() for name in names}
        return submitters, keys.machines_run_as_fleet_user(session, projects) if submitters else []

    submitters, vm_ids = database.read(look)
    if vm_ids:
        add(
            Finding(
                "keys",
                "warning",
                f"jobs of {', '.join(submitters)} may run on {', '.join(vm_ids)}",
                "they run there as the user of the fleet itself, and can read and change its keys, its secrets and what others have",
                f"`groupwise fleet vm set {vm_ids[0]} --project P` keeps it for project P, `vm remove {vm_ids[0]}` takes it out of the "
                "fleet",
                {"keys": list(submitters), "machines": vm_ids},
            )
        )


# --- NATS -----------------------------------------------------------------------------------------


def _check_nats(place: FleetPlace, database: Database, add: OnFinding) -> None:
    addresses = _nats_addresses(place, database)
    if not addresses:
        add(Finding("NATS", "ok", "none is used; dispatchers look into the database by themselves"))
    for visible_url, url in addresses.items():
        add(
            (
                Finding(
                    "NATS",
                    "skipped",
                    f"{visible_url} is used, by an address that was given with a user or token in it, which is written down nowhere",
                    remedy="name that address to this command alone: GROUPWISE_FLEET_NATS_URL=nats://…",
                )
            )
            if url is None
            else _check_nats_server(visible_url, url)
        )


def _nats_addresses(place: FleetPlace, database: Database) -> dict[str, str | None]:
    """The address as users see it → the whole address, or None if it is unknown here. A running fleet may have been started with options;
    if none runs, the settings apply."""
    own_url = place.nats_url
    known_urls = {} if own_url is None else {access_from(own_url, os.environ).shown: own_url}
    process_facts = [
        process["facts"] for process in database.read(status.processes) if process["alive"]
    ]
    reported = [server[NATS] for server in process_facts if NATS in server]
    if not reported:
        return dict(known_urls)
    addresses = {
        server["url"]: server["url"] if server["whole"] else None for server in reported if server
    }
    return {visible_url: known_urls.get(visible_url, url) for visible_url, url in addresses.items()}


def _check_nats_server(visible_url: str, url: str) -> Finding:
    try:
        version = asyncio.run(_nats_version(url))
    except Exception as error:  # noqa: BLE001 — any error of the library means that it is not reachable
        return Finding(
            "NATS",
            "warning",
            f"{visible_url} does not answer: {error or type(error).__name__}",
            "no job is lost by it: dispatchers look into the database every few seconds. There is no news of finished jobs there",
            "start it, or set nats_url to another address, or to off",
        )
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    is_old = numbers < MIN_NATS
    return Finding(
        "NATS",
        "warning" if is_old else "ok",
        f"{visible_url}, version {version}",
        "this release has known holes" if is_old else "",
        f"use {'.'.join(map(str, MIN_NATS))} or newer",
        {"version": version},
    )


async def _nats_version(url: str) -> str:
    from nats.aio.client import Client

    client = Client()

    async def quiet(_: Exception) -> None:
        """The error that ends it is raised below."""

    async with asyncio.timeout(NATS_SECONDS):
        await client.connect(
            servers=[address.strip() for address in url.split(",")],
            allow_reconnect=False,
            connect_timeout=int(NATS_SECONDS),
            error_cb=quiet,
            **credentials(access_from(url, os.environ)),
        )
    try:
        return str(client.connected_server_version)
    finally:
        await client.close()


# --- roles ----------------------------------------------------------------------------------------


def _check_roles(database: Database, add: OnFinding) -> None:
    processes = database.read(status.processes)
    missing_roles = database.read(status.missing_roles)
    for process in processes:
        name = process["role"]
        location = f"process {process['pid']} on {process['host']}"
        crashes = process["facts"].get("crashes", 0)
        if not process["alive"] and is_gone(process["pid"], process["facts"]):
            if name in missing_roles:
                add(
                    Finding(
                        name,
                        "problem",
                        f"{location} has ended without a word, and no other process has the role",
                        remedy=f"`groupwise fleet {name}` starts another",
                    )
                )
        elif not process["alive"]:
            add(
                Finding(
                    name,
                    "warning" if name not in missing_roles else "problem",
                    f"{location} has been silent for {process['silent_seconds']:.0f} s",
                    "it was killed, it hangs, or it cannot reach the database",
                    f"look whether it is there; `groupwise fleet {name}` starts another",
                )
            )
        elif crashes >= CRASHES:
            add(
                Finding(
                    name,
                    "problem",
                    f"{location} crashed {crashes} times: {process['facts'].get('last_error')}",
                    "it is restarted each time, and does its work badly or not at all",
                    "its log has the whole story",
                )
            )
        else:
            add(Finding(name, "ok", location))
    for role in missing_roles:
        if role not in {process["role"] for process in processes}:
            add(
                Finding(
                    role,
                    "problem",
                    "no process has this role",
                    remedy=f"`groupwise fleet up` starts all roles, `groupwise fleet {role}` this one",
                )
            )


# --- machines -------------------------------------------------------------------------------------


def _check_machines(database: Database, only_names: Sequence[str] | None, add: OnFinding) -> None:
    """Check several machines at once. The findings of each are reported together, in the order of the machines' names."""

    def known(session: Session) -> tuple[Sequence[Machine], Counter[str]]:
        return records.machines(session), Counter(session.scalars(select(GPU.vm_id)))

    machines, gpus = database.read(known)
    names = {machine.vm_id for machine in machines}
    for name in only_names or ():
        if name not in names:
            known_names = ", ".join(sorted(names)) or "none"
            add(Finding(name, "problem", f"there is no such machine; there are: {known_names}"))
    if not machines:
        add(Finding("machines", "problem", "there are none", remedy="`groupwise fleet vm add`"))
    slots = asyncio.Semaphore(MACHINES_AT_ONCE)

    async def examine_one(machine: Machine) -> list[Finding]:
        async with slots:
            return await _check_machine(machine, gpus[machine.vm_id])

    async def examine_all() -> None:
        chosen_machines = [
            candidate
            for candidate in machines
            if only_names is None or candidate.vm_id in only_names
        ]
        for task in [asyncio.create_task(examine_one(machine)) for machine in chosen_machines]:
            for finding in await task:
                add(finding)

    asyncio.run(examine_all())


async def _check_machine(machine: Machine, known_gpus: int) -> list[Finding]:
    name = machine.vm_id
    if machine.lost:
        return [Finding(name, "skipped", "it was declared lost; it is taken back when it answers")]
    if machine.transport != LOCAL and machine.host_key is None:
        return [
            Finding(
                name,
                "problem",
                "its host key is not trusted",
                "until it is trusted, only its key is read",
                f"`groupwise fleet vm trust {name}`",
            )
        ]
    host = host_of(machine)
    try:
        runner = Runner(host, root=machine.workdir, python=machine.python)
        scheduler = scheduler_of(machine, host)
        if machine.engine is not None:
            return await _check_elastic(machine.vm_id, runner, machine.engine, scheduler)
        return await _check_plain_machine(machine, runner, known_gpus)
    except HostKeyError as error:
        return [
            Finding(
                name,
                "problem",
                str(error),
                "it was reinstalled, or this is another machine: nothing is sent to it",
                f"compare the key with the machine's own, then `groupwise fleet vm trust {name}`",
            )
        ]
    except HostError as error:
        return [
            Finding(
                name,
                "problem",
                f"it cannot be asked: {error}",
                remedy="see that it is up, and that address, port, user and key are right (`groupwise fleet vm show`)",
            )
        ]
    finally:
        await host.close()


async def _check_elastic(
    name: str, runner: Runner, engine: Elastic, scheduler: SchedulerClient | None
) -> list[Finding]:
    """Check an engine by a dry run of a job's options. The tiny command runs on the machine that submits to the engine: with the
    environment of jobs, but not where they run."""
    _, findings = await _check_answer(name, runner)
    subject = f"{name} {engine.title}"
    if scheduler is None or engine.problem is not None:
        remedy = f"`groupwise fleet vm set {name}`, or `vm remove` and `vm add`"
        return [*findings, Finding(subject, "problem", str(engine.problem), remedy=remedy)]
    request = engine.engine(Resources(gpus=min(1, engine.body.gpus)), Limits())
    try:
        dry_run = await scheduler.try_options(request.options)
    except HostError as error:
        remedy = f"see that it runs, and that `vm show {name}` has the right options"
        return [*findings, Finding(subject, "problem", str(error), "no job begins there", remedy)]
    findings.append(
        Finding(
            subject, "ok", f"{counted(engine.body.slots, 'place')} for jobs; it would: {dry_run}"
        )
    )
    return [*findings, *await _run_tiny_command(name, runner, 0)]


async def _check_answer(name: str, runner: Runner) -> tuple[Hello, list[Finding]]:
    """The first checks, which every machine gets."""
    started_at = time.monotonic()
    hello = await runner.hello()
    took = time.monotonic() - started_at
    text = f"{hello.hostname}: answers in {took * 1000:.0f} ms"
    finding = Finding(name, "ok", text, data={"seconds": took})
    numbers = tuple(int(part) for part in re.findall(r"\d+", hello.python)[:2])
    python = Finding(
        f"{name} python",
        "ok" if numbers >= MIN_PYTHON else "problem",
        f"python3 there is {hello.python}",
        "the runner needs 3.8 or newer",
        "install a newer python3 there",
    )
    free_mb = hello.disk_free_mb
    if free_mb is None:
        disk = Finding(f"{name} disk", "skipped", "its free space is unknown")
    else:
        disk = Finding(
            f"{name} disk",
            "ok" if free_mb >= MIN_DISK_MB else "warning",
            f"{free_mb / 1000:.0f} GB free in {hello.root}",
            "checkpoints will not fit, and a job whose disk is full fails",
            "make room there",
            {"free_mb": free_mb},
        )
    return hello, [finding, python, disk]


async def _check_plain_machine(machine: Machine, runner: Runner, known_gpus: int) -> list[Finding]:
    name = machine.vm_id
    hello, findings = await _check_answer(name, runner)
    if hello.filesystem is not None and hello.filesystem.startswith(("nfs", "cifs", "smb")):
        findings.append(
            Finding(
                f"{name} work folder",
                "problem",
                f"{hello.root} lies on {hello.filesystem}, where locks do not hold",
                "two jobs may get one GPU",
                "give the machine a --workdir on a local disk",
            )
        )
    observed = await runner.observe(probe=machine.probe)
    findings.append(_check_gpus(name, observed, known_gpus))
    healthy_gpus = sum(1 for gpu in observed.gpus if not gpu.mig and not gpu.problems)
    if any(gpu.mig for gpu in observed.gpus):
        healthy_gpus = min(healthy_gpus, 1)  # CUDA shows one MIG device
    findings += await _run_tiny_command(name, runner, healthy_gpus if known_gpus else 0)
    return findings


def _check_gpus(name: str, observed: Observation, known_gpus: int) -> Finding:
    subject, tool = f"{name} GPUs", observed.probe.tool
    is_unknown, problem = probe_problem(observed, known_gpus)
    if is_unknown:
        meaning, remedy = "nothing new is placed there", f"run {tool} there"
        return Finding(subject, "problem", str(problem), meaning, remedy)
    problems = [problem] if problem else []
    problems += [f"{gpu.index}: {', '.join(gpu.problems)}" for gpu in observed.gpus if gpu.problems]
    if problems:
        meaning, remedy = "these GPUs get no job", f"look at them with {tool}"
        return Finding(subject, "warning", "; ".join(problems), meaning, remedy)
    models = sorted({gpu.model or "?" for gpu in observed.gpus})
    text = f"{len(observed.gpus)}: {', '.join(models)}" if models else f"no {tool}: no GPUs"
    return Finding(subject, "ok", text)


async def _run_tiny_command(name: str, runner: Runner, gpus: int) -> list[Finding]:
    """Run the tiny command from launch to exit, as a job would be run; its folder is removed. `gpus`: how many torch should see."""
    job = f"doctor-{secrets.token_hex(5)}"
    spec = JobSpec(
        (runner.python, "-c", LOOK, "gpus" if gpus else "none"),
        artefacts=(),
        checkpoints=(),
        limits=Limits(time_seconds=PROBE_TIMEOUT, grace_seconds=1.0),
    )
    started_at = time.monotonic()
    try:
        state = await runner.launch(Launch(job, 1, spec))
        while state.state in SUPERVISED and time.monotonic() - started_at < PROBE_TIMEOUT:
            known_state = KnownState(state.state, state.log_size, clock=state.clock)
            for new_state in await runner.wait(
                {(state.job, state.epoch): known_state}, seconds=5.0
            ):
                state = new_state
        text = (await runner.log(job, 1, 0)).data.decode("utf-8", "replace").strip()
    finally:
        # A finding reports that the machine does not answer; a folder of some kilobytes stays there.
        with contextlib.suppress(HostError):
            await runner.kill(job, 1, grace=0.0)
            await runner.forget(job, 1)
    return _tiny_command_findings(
        name, runner.python, state, text, time.monotonic() - started_at, gpus
    )


def _tiny_command_findings(
    name: str, python: str, state: MemberState, text: str, took: float, gpus: int
) -> list[Finding]:
    """Findings from the tiny command's end and its last line."""
    subject = f"{name} jobs"
    prepare = f"`groupwise fleet vm prepare {name}`"
    if state.refused is not None:
        reason = f"the runner refused a tiny job: {state.refused.message}"
        remedy = f"{prepare} makes an environment for them" if "program" in reason else ""
        return [Finding(subject, "problem", reason, "jobs of this machine would all fail", remedy)]
    if state.exit is None:
        return [
            Finding(
                subject,
                "problem",
                f"a tiny job did not end within {PROBE_TIMEOUT:.0f} s: it is {state.state}",
            )
        ]
    if state.exit.code != 0:
        reason = state.exit.message or text or f"exit code {state.exit.code}"
        return [
            Finding(
                subject,
                "problem",
                f"{python} cannot be run there: {reason.splitlines()[-1]}",
                "jobs of this machine would all fail",
                f"{prepare} makes an environment; `groupwise fleet vm set {name} --python PATH` names one that is there",
            )
        ]
    output = _parse_last_line(text)
    findings = [
        Finding(
            subject, "ok", f"a tiny job ran in {took:.1f} s with Python {output.get('python', '?')}"
        )
    ]
    findings.append(_check_environment(name, python, output))
    if "groupwise" in output:
        findings.append(_check_torch(name, output, gpus))
    return findings


def _parse_last_line(text: str) -> dict[str, Any]:
    """Parse the command's result; start-up files of the interpreter may have printed something before it."""
    try:
        return dict(json.loads(text.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        return {}


def _check_environment(name: str, python: str, report: Mapping[str, Any]) -> Finding:
    """Check that its groupwise is the one installed here."""
    subject, there_version, own_version = (
        f"{name} environment",
        report.get("groupwise"),
        packing.version(),
    )
    remedy = f"`groupwise fleet vm prepare {name}`"
    if "why" in report:
        return Finding(
            subject,
            "problem",
            f"{python} has groupwise, but cannot import it: {report['why']}",
            "jobs of the training kinds (GRPO, SFT, EVAL) fail there",
            f"{remedy} makes an environment that can",
        )
    if there_version is None:
        return Finding(
            subject,
            "warning",
            f"{python} has no groupwise",
            "commands run there, training kinds (GRPO, SFT, EVAL) do not",
            f"{remedy} makes an environment that has it",
        )
    if there_version != own_version:
        return Finding(
            subject,
            "warning",
            f"{python} has groupwise {there_version}; here it is {own_version}",
            "jobs there do what that release does",
            f"{remedy} gives it this one",
        )
    if report.get("wheel") not in (None, _packed_here()):
        return Finding(
            subject,
            "warning",
            f"{python} has groupwise {there_version}, packed from other code than is here now",
            "jobs there do what that code does",
            f"{remedy} gives it this one",
        )
    return Finding(subject, "ok", f"{python} has groupwise {there_version}, as here")


@functools.cache
def _packed_here() -> str | None:
    """The hash of our own wheel; None if there are no sources to pack it from, and so nothing to compare."""
    try:
        return packing.pack().sha256
    except GroupwiseError:
        return None


def _check_torch(name: str, report: Mapping[str, Any], gpus: int) -> Finding:
    """Check that torch is installed, and sees the GPUs."""
    subject, torch = f"{name} torch", report.get("torch")
    prepare = f"`groupwise fleet vm prepare {name}`"
    if torch is None:
        return Finding(
            subject,
            "warning",
            "there is none",
            "training kinds (GRPO, SFT, EVAL) do not run there",
            f"{prepare} brings it",
        )
    if not gpus:
        return Finding(subject, "ok", f"torch {torch}")
    visible_gpus, build, reason = report.get("gpus"), report.get("build"), report.get("torch_why")
    if visible_gpus is None:
        return Finding(
            subject,
            "problem",
            f"torch {torch} cannot be imported: {reason}",
            "training kinds (GRPO, SFT, EVAL) fail there",
            prepare,
        )
    if build is None:
        return Finding(
            subject,
            "problem",
            f"torch {torch} is a build for processors alone, and the machine has {counted(gpus, 'GPU')}",
            "jobs get GPUs and do not use them",
            f"{prepare} from an index that has the CUDA build (--index-url https://pypi.org/simple)",
        )
    if visible_gpus < gpus:
        return Finding(
            subject,
            "problem",
            f"torch {torch} for CUDA {build} sees {visible_gpus} of {counted(gpus, 'GPU')}"
            + (f": {reason}" if reason else ""),
            "jobs that get the others fail, or use none",
            f"a driver that is too old wants an older build ({prepare} --index-url …); else look at nvidia-smi there",
        )
    return Finding(
        subject, "ok", f"torch {torch} for CUDA {build} sees {counted(visible_gpus, 'GPU')}"
    )
