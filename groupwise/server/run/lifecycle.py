"""Starts runs, resumes earlier ones, and ends them: one at a time.

    request → open request (`run_config.py`) → others on the machine make room → an engine opens the run → ledger row → the conductor starts

POST /start is answered when the run is in the ledger; if a new run cannot start, the ledger never knows of it. If the server or the engine
ends meanwhile, its folder remains until the next start, or the next server: a file beside it marks it, so no folder is deleted
that came in another way. A run that it was to replace is paused meanwhile, and goes on then: in the ledger it is the active one until the
new run takes its place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.problems import Refusal
from groupwise.api.schemas.training import StartAnswer, StartRequest, StopAnswer
from groupwise.core import atomic_files
from groupwise.core.errors import GroupwiseError, UsageError
from groupwise.runs.folder import CHECKPOINTS
from groupwise.runs.lock import is_held
from groupwise.server.engine.engine_protocol import EngineLost, OpenRun
from groupwise.server.ledger import runs
from groupwise.server.ledger.runs import RunRow
from groupwise.server.ledger.writer import Ledger
from groupwise.server.run import ledger_operations, steps
from groupwise.server.run.active_run import ENDED, TOKENIZERS, ActiveRun
from groupwise.server.run.checkpoints import Checkpoints
from groupwise.server.run.conductor import Conductor, RunStatus, StopReason
from groupwise.server.run.engine_errors import refusal_of
from groupwise.server.run.engine_supervisor import EngineSupervisor
from groupwise.server.run.responses import answer_of
from groupwise.server.run.run_config import RUNS, AllowedModels, to_open_request

logger = logging.getLogger(__name__)

STARTING = ".starting-"
"""Prefix of the file that marks the folder of a new run until the ledger has the run."""


class MachineUser(Protocol):
    """Another user of the machine: models that clients train through the Tinker API, or parts for a training loop in another process."""

    async def release_machine(self) -> None:
        """Release the machine for something else. Refuses with `run_active` if this is in use."""
        ...

    async def release_for_replacement(self) -> None:
        """End everything that would prevent a run started with `replace: true`. Called while `machine_lock` is held."""
        ...


class Runs(Protocol):
    """The server's runs, as other users of the machine see them; see `groupwise.server.run.service.Service`."""

    machine_lock: asyncio.Lock
    """Held while a run, or an engine of another kind, is started or ended."""

    def active_conductor(self) -> Conductor | None:
        """The run that has an engine, or will soon have one again; None if there is none."""
        ...

    async def make_room(self, for_user: str) -> None:
        """Refuse with `run_active` if something other than `for_user` uses the machine."""
        ...


class RunLifecycle:
    """Starting and ending of runs."""

    def __init__(
        self,
        active_run: ActiveRun,
        ledger: Ledger,
        supervisor: EngineSupervisor,
        checkpoints: Checkpoints,
    ) -> None:
        config = active_run.config
        self._active_run = active_run
        self._config = config
        self._ledger = ledger
        self._supervisor = supervisor
        self._checkpoints = checkpoints
        self._allowed = AllowedModels(
            Path(config.model_dir).expanduser(), tuple(config.allowed_models)
        )
        self.machine_lock = asyncio.Lock()
        """Held while a run, or an engine for something else, is started or ended."""

    # --- starting --------------------------------------------------------------------------------

    async def resume_active_run(self) -> None:
        """Resume the run that was active when the last server ended; in the background, because it takes a while."""
        await asyncio.to_thread(self._remove_unfinished)
        all_runs = await self._ledger.do(runs.list_runs)
        self._active_run.latest = all_runs[-1] if all_runs else None
        await self._remove_broken_starts()
        active = await self._ledger.do(runs.active_run)
        if active is None:
            return
        self._active_run.latest = active
        request = StartRequest.model_validate_json(json.dumps(active.settings))
        open_request = OpenRun(
            # The output folder may have been moved since.
            _with_run(active.config, dir=str(self._config.folder / RUNS)),
            request.max_prompt_length,
            run=active.run,
        )
        self._active_run.conductor = self._conductor_of(request, open_request)
        self._active_run.conductor.start_steps()
        logger.info("the run %s continues; loading %s", active.run, request.model_id)

    async def start(
        self, request: StartRequest, caller: Caller, machine_users: Sequence[MachineUser]
    ) -> StartAnswer:
        """Start or resume a run. `machine_users`: other users of the machine, which may have to make room."""
        async with self.machine_lock:
            self._active_run.refuse_when_shutting_down()
            await self._remove_broken_starts()
            replacing = request.replace
            open_request, request, resumed_row = await self._resolve_request(request)
            if replacing or self._active_run.active_conductor() is None:
                for user in machine_users:
                    if replacing:
                        await user.release_for_replacement()
                    await user.release_machine()
            replaced = await self._pause_current(replacing)
            try:
                return await self._open_and_record(
                    request, open_request, resumed_row, replaced, caller
                )
            except BaseException:
                await self._supervisor.end()
                self._go_on_with(replaced)
                raise

    async def _open_and_record(
        self,
        request: StartRequest,
        open_request: OpenRun,
        resumed_row: RunRow | None,
        replaced: Conductor | None,
        caller: Caller,
    ) -> StartAnswer:
        """Open the run in an engine, and make it the active one of the ledger in place of `replaced`."""
        conductor = self._conductor_of(request, open_request)
        marker = self._config.folder / RUNS / f"{STARTING}{open_request.config['run']['name']}"
        status = await self._begin_within_limit(
            conductor, marker if open_request.run is None else None
        )
        answer = StartAnswer(
            run_id=status.run,
            model_version=status.version,
            fingerprint=status.policy.fingerprint,
            max_steps=status.max_steps,
            groups_per_step=request.prompts_per_step,
            tokenizer_hash=status.opened.tokenizer_hash,
        )
        row = await self._ledger.do(
            ledger_operations.start_run,
            status.run,
            f"{RUNS}/{status.run}",
            request.model_dump(mode="json", exclude_unset=True),
            dict(open_request.config),
            resumed_row is not None,
            status.opened,
            caller,
            answer_of(answer),
            replaced=replaced and replaced.run,
        )
        marker.unlink(missing_ok=True)
        if replaced is not None:
            replaced.phase = "stopped"
            self._active_run.changed.notify()
        self._active_run.conductor, self._active_run.latest = conductor, row
        conductor.start_steps()
        return answer

    async def _resolve_request(
        self, request: StartRequest
    ) -> tuple[OpenRun, StartRequest, RunRow | None]:
        """The open request, the effective request, and the ledger row if a run is resumed. A resumed run keeps its own settings,
        overridden by those of the request.
        """
        if request.resume_from is None:
            open_request = await self._checked_request(request)
            return self._open_under_free_name(open_request), request, None
        rows = {row.run: row for row in await self._ledger.do(runs.list_runs)}
        if (row_of_run := rows.get(request.resume_from)) is not None:
            if request.run_name not in (None, row_of_run.run):
                message = (
                    f"has no effect with resume_from: {row_of_run.run}, because the run continues under its own name. Leave it out, or "
                    f"begin a new run from a checkpoint of it, such as resume_from: {row_of_run.run}@<step> (GET /checkpoints lists them)"
                )
                detail = f"run_name {message}."
                raise Refusal("settings_conflict", detail, field="run_name", problem=message)
            merged = _merge_settings(row_of_run.settings, request)
            open_request = await self._checked_request(merged)
            done = await self._ledger.do(steps.next_step, row_of_run.run)
            if done >= merged.max_steps:
                message = (
                    f"is {merged.max_steps}, but {row_of_run.run} has taken {done} steps. Give a "
                    "larger max_steps to continue it, or begin a new run with its weights by "
                    f"resume_from: {row_of_run.run}@{done}"
                )
                detail = f"max_steps {message}."
                raise Refusal("settings_conflict", detail, field="max_steps", problem=message)
            config = _with_run(open_request.config, name=row_of_run.run)
            return (
                OpenRun(config, merged.max_prompt_length, run=row_of_run.run),
                merged,
                row_of_run,
            )
        beginning = self._checkpoints.beginning(request.resume_from, rows)
        merged = _merge_settings(beginning.settings, request)
        _refuse_other_weights(request.resume_from, beginning.settings, merged)
        open_request = self._open_under_free_name(await self._checked_request(merged))
        return replace(open_request, start_from=str(beginning.folder)), merged, None

    async def _checked_request(self, request: StartRequest) -> OpenRun:
        """`to_open_request`, in a thread, because checking a config takes a while."""
        return await asyncio.to_thread(to_open_request, request, self._allowed, self._config.folder)

    def _open_under_free_name(self, open_request: OpenRun) -> OpenRun:
        """Give a new run a name that no run has had: a stopped run is resumed only by `resume_from`, not because a name was reused."""
        base_name = open_request.config["run"]["name"]
        name, number = base_name, 1
        while (self._config.folder / RUNS / name).exists():
            number += 1
            name = f"{base_name}-{number}"
        return replace(open_request, config=_with_run(open_request.config, name=name))

    async def _pause_current(self, replacing: bool) -> Conductor | None:
        """Free the machine of the active run, without ending the run; None if there is none. Refuses with `run_active` unless replacing."""
        conductor = self._active_run.conductor
        if conductor is not None:
            await conductor.wait_if_finishing()
        if conductor is None or conductor.phase in ENDED:
            return None
        if not replacing:
            run = self._active_run.latest.run if self._active_run.latest else "the run"
            raise Refusal(
                "run_active",
                f"{run} is active. Stop it first (POST /stop), or start with `replace: true` (in Python `start(…, replace=True)`), which "
                "stops it cleanly.",
            )
        await self._stop_run(conductor, "replace")
        return self._active_run.active_conductor()

    def _go_on_with(self, paused: Conductor | None) -> None:
        """Continue the run that could not be replaced, from the checkpoint that it was paused with."""
        if paused is None or self._active_run.shutting_down:
            return
        self._active_run.conductor = paused.successor()
        self._active_run.conductor.start_steps()
        self._active_run.changed.notify()
        logger.warning("no other run was started; %s continues", paused.run)

    async def _begin_within_limit(self, conductor: Conductor, marker: Path | None) -> RunStatus:
        """Everything that a start needs of the engine. While the server shuts down, an engine may fail in any way: that is retryable.

        `marker`: the file that marks the folder of a new run until the ledger has the run.
        """
        limit = self._config.start_time_limit
        try:
            async with asyncio.timeout(limit):
                if marker is not None:
                    marker.parent.mkdir(exist_ok=True)
                    await asyncio.to_thread(atomic_files.write_file, marker, b"")
                logger.info("loading %s", conductor.model)
                status = await conductor.begin()
                await self._keep_tokenizer(conductor, status)
                return status
        except TimeoutError:
            raise Refusal(
                "timed_out",
                f"the run was not ready after {limit:g} seconds (the server's start_time_limit).",
            ) from None
        except UsageError as error:
            self._active_run.refuse_when_shutting_down()
            raise refusal_of(error, otherwise="settings_conflict") from None
        except EngineLost as error:
            # It may have been killed for lack of memory that is free again.
            raise Refusal("engine_recovering", str(error), retry_after=2) from None
        except GroupwiseError as error:
            self._active_run.refuse_when_shutting_down()
            raise refusal_of(error, otherwise="engine_failed") from None

    async def _remove_broken_starts(self) -> None:
        """Delete the folders of new runs that the ledger does not have, because the server or the engine ended during their start."""
        markers = [*(self._config.folder / RUNS).glob(f"{STARTING}*")]
        if not markers:
            return
        recorded = {row.run for row in await self._ledger.do(runs.list_runs)}

        def remove() -> None:
            for marker in markers:
                folder = marker.with_name(marker.name.removeprefix(STARTING))
                if folder.name not in recorded and folder.is_dir():
                    if is_held(folder):  # by an engine that is about to end
                        continue
                    atomic_files.remove_folder(folder)
                marker.unlink(missing_ok=True)

        await asyncio.to_thread(remove)

    def _remove_unfinished(self) -> None:
        """Delete what an earlier server was writing or deleting when it was killed. New folders of runs are their engine's."""
        output = self._config.folder
        for folder in (output / CHECKPOINTS, output / TOKENIZERS):
            if folder.is_dir():
                atomic_files.sweep(folder)
        for folder in (output / RUNS).glob(f"{atomic_files.REMOVING}*"):
            shutil.rmtree(folder, ignore_errors=True)
        for marker in (output / RUNS).glob(f"{atomic_files.BUILDING}{STARTING}*"):
            marker.unlink()

    async def _keep_tokenizer(self, conductor: Conductor, status: RunStatus) -> None:
        """Store the tokenizer in the server's output, so that it can be served without an engine."""
        target = self._active_run.tokenizer_folder(status.opened.tokenizer_hash)
        if target.is_dir():
            return
        files = await conductor.tokenizer_files()

        def fill(folder: Path) -> None:
            for name, content in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)

        await asyncio.to_thread(atomic_files.make_folder, target, fill, replace=True)

    def _conductor_of(self, request: StartRequest, open_request: OpenRun) -> Conductor:
        return Conductor(
            self._ledger,
            self._supervisor,
            request,
            open_request,
            max_open_groups=self._config.max_open_groups,
            changed=self._active_run.changed,
        )

    # --- ending ----------------------------------------------------------------------------------

    async def stop(self) -> StopAnswer:
        """End the run after the step in progress, with a checkpoint; repeating it is harmless."""
        async with self.machine_lock:
            if self._active_run.conductor is not None:
                await self._stop_run(self._active_run.conductor, "stop")
            row = self._active_run.latest
            if row is None:
                return StopAnswer()
            return StopAnswer(run_id=row.run, step=await self._ledger.do(steps.next_step, row.run))

    async def _stop_run(self, conductor: Conductor, reason: StopReason) -> None:
        await conductor.end(reason, self._config.step_time_limit)
        self._active_run.changed.notify()


def _with_run(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The config with another name or folder of the run."""
    return {**config, "run": {**config["run"], **changes}}


def _refuse_other_weights(name: str, settings: Mapping[str, Any], request: StartRequest) -> None:
    """Refuse a change between training all weights and an adapter: their checkpoints do not fit each other. Checked before anything is
    loaded.
    """
    had_all = _merge_settings(settings, StartRequest()).trains_all
    if had_all != request.trains_all:
        old_kind, new_kind = (
            ("all weights", "an adapter") if had_all else ("an adapter", "all weights")
        )
        remedy = "adapter: full" if had_all else "adapter: new"
        message = (
            f"the checkpoint {name} has {old_kind}, and {new_kind} would be trained. Give `{remedy}`, or leave adapter and lora "
            "out, to continue it; without resume_from the training begins from the start"
        )
        detail = f"adapter: {message}."
        raise Refusal("resume_mismatch", detail, field="adapter", problem=message)


_REQUEST_ONLY = ("resume_from", "replace")
"""Keys of a start request that are not settings of the run."""
_REPLACED: Mapping[str, tuple[str, ...]] = {
    "groups_per_step": ("training_batch_size", "gradient_accumulation_steps"),
    "training_batch_size": ("groups_per_step",),
    "gradient_accumulation_steps": ("groups_per_step",),
}
"""Alternative settings: if the key is given, these settings of the earlier run are dropped."""


def _merge_settings(settings: Mapping[str, Any], request: StartRequest) -> StartRequest:
    """Override an earlier run's settings with those of the request. Refuses with `settings_conflict` if the result is invalid."""
    requested = request.model_dump(mode="json", exclude_unset=True)
    fresh = {key: value for key, value in requested.items() if key not in _REQUEST_ONLY}
    dropped_keys = {
        *_REQUEST_ONLY,
        *(
            replaced
            for key in fresh
            if fresh[key] is not None
            for replaced in _REPLACED.get(key, ())
        ),
    }
    inherited = {key: value for key, value in settings.items() if key not in dropped_keys}
    try:
        return StartRequest.model_validate_json(json.dumps({**inherited, **fresh}))
    except ValidationError as error:
        refusal = Refusal.of_fields(error, StartRequest)
        raise Refusal(
            "settings_conflict",
            f"With the settings of the run that it continues: {refusal.detail}. A value of the request replaces the earlier setting; "
            "null takes one back.",
            errors=refusal.errors,
        ) from None
