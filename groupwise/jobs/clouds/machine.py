"""One machine as a backend: this one, or one over SSH.

Jobs are attempts of its runner (`groupwise.jobs.hosts`), which continue without this process. The order is a file in the working folder
of each attempt, so anyone who reaches the machine finds the whole job by its name. An attempt is one epoch of the runner: it starts at
most once, even if several callers request it repeatedly. Epochs continue to count after a job was removed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from groupwise.core.errors import UsageError
from groupwise.core.interruption import wait_until_done
from groupwise.core.terminal.quantities import byte_size, counted
from groupwise.jobs.clouds.backend import (
    Busy,
    Capabilities,
    CloudError,
    Ending,
    FetchedResults,
    Handle,
    JobNotFound,
    NameTaken,
    Order,
    Outcome,
    Phase,
    Plan,
    Status,
    Unreachable,
    identity_fields,
)
from groupwise.jobs.clouds.folder import ResultsFolder, is_allowed_path, results_folder
from groupwise.jobs.hosts.answers import (
    ExitReason,
    LogPart,
    MemberState,
    ProgramResult,
    Refusal,
    RunnerState,
    vendor_of,
)
from groupwise.jobs.hosts.driver import (
    DEFAULT_TIMEOUT,
    KnownState,
    Launch,
    Resume,
    Runner,
    Scheduler,
)
from groupwise.jobs.hosts.failures import FailureClass, classify, has_succeeded
from groupwise.jobs.hosts.fetching import Fetcher, FileChanged
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.host import (
    HostError,
    HostKeyError,
    HostUnreachable,
    OutcomeUnknown,
    RunnerRefused,
)
from groupwise.jobs.hosts.spec import FileEntry, JobSpec

ROOT = "groupwise-launch"
"""The runner's folder, below the home folder on the machine."""
ORDER = ".groupwise-order.json"
"""The file in the working folder that contains the order."""
MAX_ORDER = 64 << 20
"""Largest size of that file in bytes: a job may have a hundred thousand files."""
NO_PROBE = ("true",)
"""A probe command that skips the query for GPUs."""
NAME_ALL = (
    "name all of them, in the order in which they were named first: --at ssh:USER@HOST,USER@HOST."
)
TRIES = 3
"""How often steps are tried that others may disturb: a free GPU is taken, a checkpoint is removed while it is fetched."""
LOSS_REASONS = {
    RunnerState.LOST: (FailureClass.SUPERVISOR_LOST, "what watched over it on {where} was killed"),
    RunnerState.REBOOTED: (FailureClass.REBOOT, "{where} was restarted while it ran"),
}

OVERTAKEN = "lower_epoch"
LOST_RACES = frozenset({OVERTAKEN, "gpu_busy", "foreign_busy"})
"""Codes of refusals because another attempt came first."""
STARTED_STATES = frozenset({RunnerState.CLAIMED, RunnerState.RUNNING, RunnerState.EXITED})
ENDED_BY_RUNNER = {
    ExitReason.TIME_LIMIT: Outcome.TIME_LIMIT,
    ExitReason.DEADMAN: Outcome.LOST,
    ExitReason.SPAWN_FAILED: Outcome.REFUSED,
}


class MachineBackend:
    """A `Backend` on one machine."""

    capabilities = Capabilities()

    def __init__(self, name: str, runner: Runner, where: str) -> None:
        """`where`: the machine's name in messages."""
        self.name = name
        self._runner = runner
        self._where = where

    # --- placing ------------------------------------------------------------------------------

    async def plan(self, order: Order) -> Plan:
        """See `Backend.plan`."""
        order.check()
        sizes = {entry.sha256: entry.size for entry in order.spec.files.values()}
        with self._cloud_errors():
            engine = await self._scheduler(order)
            hello = await self._runner.hello()
            lacking = await self._runner.missing(sizes)
            start_steps = await self._start_steps(order, engine, hello.root)
        bytes_to_send = sum(sizes[sha256] for sha256 in lacking)
        files = counted(len(sizes), "file")
        if len(lacking) < len(sizes):
            files = f"{len(lacking):,} of {files}, since the machine has the others"
        steps = (f"send {files} ({byte_size(bytes_to_send)})", *start_steps)
        return Plan(f"{self._where} ({hello.hostname})", steps, order.spec.arguments)

    async def _scheduler(self, order: Order) -> Scheduler | None:
        """The engine that starts the job, and its options; None: the machine itself. Raises UsageError for options that do not exist."""
        return None

    async def _start_steps(
        self, order: Order, engine: Scheduler | None, root: str
    ) -> tuple[str, ...]:
        """The steps that start the job, for a plan. Raises CloudError or HostError if it could not start."""
        await self._free_gpus(order.gpus)
        gpus = f"with {counted(order.gpus, 'GPU')} of its own" if order.gpus else "without GPUs"
        return (f"start {order.name} in {root}, {gpus}",)

    async def submit(self, order: Order, store: BlobStore) -> Handle:
        """See `Backend.submit`."""
        order.check()
        newest = await self._newest_attempt(order.name)
        if newest is None or newest.state is RunnerState.REFUSED:
            handle = await self._start_attempt(
                order, store, 1 if newest is None else newest.epoch + 1, 1
            )
        else:
            handle = self._handle(newest)
        await self._expect_same(order, handle)
        if newest is not None and newest.state is RunnerState.QUEUED:
            # The process that laid it out may have been killed before it submitted it to the engine.
            return await self._start_attempt(order, store, newest.epoch, 1)
        return handle

    async def _expect_same(self, order: Order, handle: Handle) -> None:
        """Raise NameTaken if the attempt belongs to a job with another order."""
        try:
            placed = await self.order(handle)
        except CloudError:
            with self._cloud_errors():
                state = await self._runner.status(handle.name, handle.attempt)
            if state.state not in (RunnerState.REFUSED, RunnerState.VOIDED):
                raise
            return  # refused, or voided before its start: the order was removed with the other files
        if identity_fields(placed.document()) != identity_fields(order.document()):
            raise NameTaken(
                f"{self._where} has another job called {order.name}: give this one another name, or remove that one once it has ended."
            )

    async def resume(self, name: str, secrets: Mapping[str, str], store: BlobStore) -> Handle:
        """See `Backend.resume`."""
        all_attempts = await self._attempts(name)
        attempts = self._only_started(name, all_attempts)
        last_attempt = attempts[-1]
        status = self._status(last_attempt)
        if status.ending is None:
            raise CloudError(f"{name} is {status.phase} on {self._where}: it continues by itself.")
        if status.ending.outcome is Outcome.SUCCEEDED:
            raise CloudError(
                f"{name} has succeeded on {self._where}: there is nothing to continue."
            )
        order = await self.order(self._handle(last_attempt))
        order = replace(order, secrets=dict(secrets))
        order.check()
        self._expect_same_machines(order, last_attempt)
        newest: Resume | None = None
        # Look further back than the last attempt, which may have ended before its first checkpoint.
        with self._cloud_errors():
            for attempt in reversed([attempt for attempt in attempts if attempt.checkpoints]):
                tree = await self._runner.manifest(attempt.job, attempt.epoch, "checkpoints")
                if tree.checkpoints:
                    newest_checkpoint = max(
                        tree.checkpoints, key=lambda checkpoint: checkpoint.step
                    )
                    await self._runner.keep(attempt.job, attempt.epoch, newest_checkpoint.files)
                    newest = Resume(
                        newest_checkpoint.files, newest_checkpoint.step, newest_checkpoint.path
                    )
                    break
        return await self._start_attempt(
            order, store, all_attempts[-1].epoch + 1, len(attempts) + 1, newest
        )

    def _expect_same_machines(self, order: Order, attempt: MemberState) -> None:
        """Raise UsageError if this place does not have all machines of the job's last attempt."""
        if order.nodes > 1 and not self.capabilities.nodes:
            raise UsageError(
                f"{order.name} runs on {order.nodes} machines at once, and {self._where} is one: {NAME_ALL}"
            )

    async def take_over(
        self, order: Order, store: BlobStore, attempt: int, newest: Resume | None
    ) -> Handle:
        """Start this attempt of a job whose earlier ones were on other machines; `store` holds the files of `newest` too."""
        order.check()
        previous = await self._newest_attempt(order.name)
        if (
            previous is not None
            and previous.epoch >= attempt
            and previous.state is not RunnerState.REFUSED
        ):
            return self._handle(previous)
        if newest is not None:
            with self._cloud_errors():
                await self._runner.provide(store, newest.manifest)
        return await self._start_attempt(order, store, attempt, attempt, newest)

    async def _start_attempt(
        self, order: Order, store: BlobStore, epoch: int, attempt: int, resume: Resume | None = None
    ) -> Handle:
        """Start under this epoch, or a later one if the machine has seen higher ones of a removed job; or find the attempt that another
        caller has started meanwhile."""
        for tries_left in reversed(range(TRIES)):
            state = await self._start_epoch(order, store, epoch, attempt, resume)
            if not tries_left or state.refused is None or state.refused.code not in LOST_RACES:
                self._expect_started(order, state)
                return self._handle(state)
            if state.refused.code == OVERTAKEN and (
                existing := await self._attempt_since(order, epoch)
            ):
                return existing
            epoch = max(epoch, state.refused.highest or 0) + 1
        raise AssertionError("the last try returns or raises")

    def _expect_started(self, order: Order, state: MemberState) -> None:
        """Raise CloudError if the machine refused to start it. An attempt that was cancelled before its start is not a refusal."""
        if state.refused is not None and state.state is not RunnerState.VOIDED:
            raise CloudError(
                f"{self._where} does not begin {order.name}: {_refusal_text(state.refused)}"
            )

    async def _attempt_since(self, order: Order, epoch: int) -> Handle | None:
        """The attempt of this job that was started here under this epoch or a later one, or None. Raises NameTaken if it belongs to another
        job."""
        newest = await self._newest_attempt(order.name)
        if newest is None or newest.epoch < epoch or newest.state is RunnerState.REFUSED:
            return None
        handle = self._handle(newest)
        await self._expect_same(order, handle)
        return handle

    async def _start_epoch(
        self,
        order: Order,
        store: BlobStore,
        epoch: int,
        attempt: int,
        resume: Resume | None,
        extra_files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> MemberState:
        """Start under this epoch. If an attempt with it has started already, return that one, without comparing the orders. `extra_files`:
        additional files for its working folder that are not part of the order."""
        with self._cloud_errors():
            state = await self._runner.status(order.name, epoch)
        if state.state in STARTED_STATES:
            return state
        data = json.dumps(order.document(), sort_keys=True).encode()
        own_files = {
            path: FileEntry(await asyncio.to_thread(store.put, data), 0o600, len(data))
            for path, data in {ORDER: data, **extra_files}.items()
        }
        spec = replace(order.spec, files={**order.spec.files, **own_files})
        launch = await self._launch_request(order, spec, epoch, attempt, resume)
        with self._cloud_errors():
            await self._runner.provide(store, spec.files)
            # An epoch has one attempt at most: if there was no answer, repeating the request returns the attempt's state.
            for _ in range(TRIES - 1):
                with suppress(OutcomeUnknown):
                    return await self._runner.launch(launch)
            return await self._runner.launch(launch)

    async def _launch_request(
        self, order: Order, spec: JobSpec, epoch: int, attempt: int, resume: Resume | None
    ) -> Launch:
        with self._cloud_errors():
            engine = await self._scheduler(order)
        return Launch(
            order.name,
            epoch,
            spec,
            gpus=await self._free_gpus(order.gpus) if engine is None else (),
            environment={"ATTEMPT": str(attempt)},
            secrets=order.secrets,
            resume=resume,
            engine=engine,
            python=order.python,
        )

    async def _free_gpus(self, count: int) -> list[str]:
        """UUIDs of idle GPUs, all of one vendor. Raises CloudError if there are too few. A MIG device is given only where no GPU is
        whole, and only by itself, as CUDA shows a process no more than one."""
        if count == 0:
            return []
        with self._cloud_errors():
            observation = await self._runner.observe()
        in_use = {
            uuid for attempt in observation.attempts if attempt.is_alive for uuid in attempt.gpus
        }
        busy = in_use | {app.uuid for app in observation.apps if not app.graphics}
        gpus, probe = [gpu for gpu in observation.gpus if not gpu.mig], observation.probe
        free = [gpu.uuid for gpu in gpus if gpu.uuid not in busy and not gpu.problems]
        if count > 1 or not all(gpu.uuid.startswith("MIG-") for gpu in gpus):
            free = [uuid for uuid in free if not uuid.startswith("MIG-")]
        of_vendors = [[u for u in free if vendor_of(u) == name] for name in ("NVIDIA", "AMD")]
        free = max(of_vendors, key=len)
        if len(free) < count:
            problems = "; ".join([*probe.lost, *(p for gpu in gpus for p in gpu.problems)][:3])
            detail = f" {probe.tool}: {problems or probe.status}." if problems or not gpus else ""
            raise CloudError(
                f"{self._where} has {counted(len(gpus), 'GPU')}, {len(free)} of them free, and {count} are asked for.{detail} A fleet "
                "(`groupwise fleet`) keeps jobs until there are some."
            )
        return free[:count]

    # --- finding ------------------------------------------------------------------------------

    async def find(self, name: str) -> Handle | None:
        """See `Backend.find`."""
        newest = await self._newest_attempt(name)
        return None if newest is None else self._handle(newest)

    async def list(self) -> list[Handle]:
        """See `Backend.list`."""
        attempts = await self._attempts()
        by_job = {
            attempt.job: [other for other in attempts if other.job == attempt.job]
            for attempt in attempts
        }
        return [self._handle(_newest_of(by_job[name])) for name in sorted(by_job)]

    async def order(self, handle: Handle) -> Order:
        """See `Backend.order`."""
        return Order.from_document(json.loads(await self._read_own_file(handle, ORDER)))

    async def _read_own_file(self, handle: Handle, path: str) -> bytes:
        """Read a file that we laid out for an attempt. Waits until all files exist: another process may be starting the job at this
        moment."""
        key = (handle.name, handle.attempt)
        with self._cloud_errors():
            state = await self._runner.status(*key)
            for _ in range(TRIES):
                if state.state is not RunnerState.CLAIMED:
                    break
                [state] = await self._runner.wait(
                    {key: KnownState(state.state)}, seconds=DEFAULT_TIMEOUT
                )
            data = b""
            while len(data) <= MAX_ORDER:
                part = await self._runner.read(*key, path, offset=len(data))
                if not part:
                    return data
                data += part
        raise CloudError(
            f"{path} of {handle.name} on {self._where} is larger than {MAX_ORDER} bytes"
        )

    async def _attempts(self, name: str | None = None) -> list[MemberState]:
        """The attempts of a job, or of all jobs, oldest first."""
        with self._cloud_errors():
            observation = await self._runner.observe(probe=NO_PROBE)
        attempts = [
            attempt for attempt in observation.attempts if name is None or attempt.job == name
        ]
        return sorted(attempts, key=lambda attempt: attempt.epoch)

    async def _newest_attempt(self, name: str) -> MemberState | None:
        """The job's last attempt that was started or waits; if there is none, the last refused one."""
        attempts = await self._attempts(name)
        return _newest_of(attempts) if attempts else None

    async def _started_attempts(self, name: str) -> list[MemberState]:
        """The job's attempts except those that the machine refused. Raises JobNotFound if there are none."""
        return self._only_started(name, await self._attempts(name))

    def _only_started(self, name: str, attempts: Sequence[MemberState]) -> list[MemberState]:
        started = [attempt for attempt in attempts if attempt.state is not RunnerState.REFUSED]
        if not started:
            raise JobNotFound(f"{self._where} has no job called {name}.")
        return started

    def _handle(self, state: MemberState) -> Handle:
        return Handle(self.name, state.job, state.epoch, {"where": self._where})

    # --- watching -----------------------------------------------------------------------------

    async def status(self, handle: Handle) -> Status:
        """See `Backend.status`."""
        with self._cloud_errors():
            state = await self._runner.status(handle.name, handle.attempt)
        return self._status(state)

    async def wait(self, handle: Handle, seen: Status, seconds: float) -> Status:
        """See `Backend.wait`."""
        if seen.ending is not None:
            return seen
        state = RunnerState.RUNNING if seen.phase is Phase.RUNNING else RunnerState.CLAIMED
        known = KnownState(state, seen.log_size, seen.checkpoints, seen.step)
        with self._cloud_errors():
            states = await self._runner.wait(
                {(handle.name, handle.attempt): known}, seconds=seconds
            )
        return self._status(states[0]) if states else seen

    async def log(self, handle: Handle, offset: int, limit: int) -> LogPart:
        """See `Backend.log`."""
        with self._cloud_errors():
            return await self._runner.log(handle.name, handle.attempt, offset, limit=limit)

    def _status(self, state: MemberState) -> Status:
        if state.state is RunnerState.ABSENT:
            raise JobNotFound(f"{self._where} knows nothing of {state.job}, attempt {state.epoch}.")
        ending = self._ending_of(state)
        phase = Phase.RUNNING if state.state is RunnerState.RUNNING else Phase.WAITING
        phase = phase if ending is None else Phase.ENDED
        waits_for = state.engine_says if state.state is RunnerState.QUEUED else ""
        return Status(phase, state.log_size, state.checkpoints, state.step, ending, waits_for)

    def _ending_of(self, state: MemberState) -> Ending | None:
        """How the attempt ended; None: it has not ended."""
        if state.exit is not None:
            if has_succeeded(state.exit):
                ending = Ending(Outcome.SUCCEEDED, "it ended with exit code 0")
            elif state.exit.reason is ExitReason.CANCELLED:
                ending = Ending(Outcome.CANCELLED, state.exit.message or "cancelled")
            else:
                diagnosis = classify(state.exit)
                outcome = ENDED_BY_RUNNER.get(state.exit.reason, Outcome.FAILED)
                ending = Ending(outcome, diagnosis.because, diagnosis.failure)
            code = state.exit.code
            if code is None and state.exit.signal is not None:
                code = -state.exit.signal
            return replace(ending, code=code, seconds=state.exit.seconds)
        if state.refused is not None:
            return Ending(
                Outcome.REFUSED, _refusal_text(state.refused), FailureClass.LAUNCH_FAILURE
            )
        if state.state is RunnerState.VOIDED:
            return Ending(Outcome.CANCELLED, "cancelled before it began")
        if state.state in LOSS_REASONS and not state.survivors:
            failure, message = LOSS_REASONS[state.state]
            return Ending(Outcome.LOST, message.format(where=self._where), failure)
        return None

    # --- ending -------------------------------------------------------------------------------

    async def cancel(self, handle: Handle, grace: float) -> None:
        """See `Backend.cancel`."""
        with self._cloud_errors():
            state = await self._runner.void(handle.name, handle.attempt)
            if state.is_alive:
                await self._runner.kill(handle.name, handle.attempt, grace=grace)

    async def fetch(self, handle: Handle, folder: Path) -> FetchedResults:
        """See `Backend.fetch`."""
        has_ended = (await self.status(handle)).ending is not None
        with (
            results_folder(folder, f"{handle.name} on {self._where}") as results,
            self._cloud_errors(),
        ):
            return await self._fetch_results(handle, results, has_ended=has_ended)

    async def _fetch_results(
        self, handle: Handle, results: ResultsFolder, *, has_ended: bool
    ) -> FetchedResults:
        name, attempt = handle.name, handle.attempt
        fetching = Fetcher(self._runner, name, attempt, results.incoming)
        kind, changed = "artefacts" if has_ended else "checkpoints", ""
        for _ in range(TRIES):
            tree = await self._runner.manifest(name, attempt, kind)
            # A request fills only one of these two fields of the tree.
            of_checkpoints = {
                path: entry
                for checkpoint in tree.checkpoints
                for path, entry in checkpoint.files.items()
            }
            offered = {**tree.files, **of_checkpoints}
            reserved = [path for path in offered if not is_allowed_path(path)]
            files = {path: e for path, e in offered.items() if path not in (ORDER, *reserved)}
            missing = await asyncio.to_thread(results.missing, files)
            await asyncio.to_thread(results.check_room, missing)
            try:
                await fetching.fetch(missing)
            except FileChanged as change:
                changed = str(change)
                continue
            await wait_until_done(
                asyncio.to_thread(results.accept, missing, files, attempt, has_ended=has_ended)
            )
            left_out = {
                **dict(tree.refused),
                **{reason: f"{n} more" for reason, n in tree.refused_more.items()},
                **dict.fromkeys(reserved, "the folder of results has that name itself"),
            }
            received = sum(entry.size for entry in missing.values())
            return FetchedResults(results.folder, tuple(sorted(files)), received, left_out)
        raise Busy(
            f"{changed} of {name} on {self._where} changed again and again while it was fetched; try again."
        )

    async def cleanup(self, handle: Handle) -> None:
        """See `Backend.cleanup`."""
        attempts = await self._attempts(handle.name)
        if any(self._ending_of(attempt) is None for attempt in attempts):
            raise CloudError(f"{handle.name} has not ended on {self._where}: stop it first.")
        with self._cloud_errors():
            for attempt in attempts:
                await self._runner.forget(attempt.job, attempt.epoch)
            await self._runner.sweep()

    async def close(self) -> None:
        """See `Backend.close`."""
        await self._runner.host.close()

    async def run(self, *arguments: str) -> ProgramResult:
        """Run a program of the machine and wait for its end."""
        with self._cloud_errors():
            return await self._runner.run(arguments)

    @contextmanager
    def _cloud_errors(self) -> Generator[None]:
        """Turn errors of the machine into CloudError, with messages for users."""
        try:
            yield
        except HostKeyError as error:
            raise CloudError(
                f"{self._where}: {error}. Nothing was said to it. Compare the key with the machine's own before you trust it."
            ) from None
        except HostUnreachable as error:
            raise Unreachable(
                f"{self._where} cannot be reached: {error}. Its jobs run without that."
            ) from None
        except RunnerRefused as refusal:
            raise CloudError(f"{self._where} will not: {refusal.message}") from None
        except HostError as error:
            raise Unreachable(
                f"{self._where} gave no answer, so its result is unknown: {error}. The same command again finds out."
            ) from None


def _newest_of(attempts: Sequence[MemberState]) -> MemberState:
    """The newest of the attempts, which are sorted oldest first. Refused ones count only if there are no others, since they have no
    results."""
    started = [attempt for attempt in attempts if attempt.state is not RunnerState.REFUSED]
    return (started or attempts)[-1]


def _refusal_text(refused: Refusal) -> str:
    holder = f" (held by {refused.holder})" if refused.holder else ""
    return f"{refused.message}{holder}"
