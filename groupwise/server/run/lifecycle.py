"""Starts runs, resumes earlier ones, and ends them: one at a time.

    request → order (`run_config.py`) → other users of the machine make room → an engine opens the run → ledger row → the conductor starts

POST /start is answered when the run is in the ledger; if a new run cannot start, nothing of it remains.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from groupwise.api.schemas.keys import Caller
from groupwise.api.schemas.problems import FieldError, Refusal
from groupwise.api.schemas.training import StartAnswer, StartRequest, StopAnswer
from groupwise.core import atomic_files
from groupwise.core.errors import GroupwiseError, UsageError
from groupwise.server.engine.engine_protocol import EngineLost, OpenRun
from groupwise.server.ledger import runs
from groupwise.server.ledger.runs import RunRow
from groupwise.server.ledger.writer import Ledger
from groupwise.server.run import ledger_operations, steps
from groupwise.server.run.active_run import ENDED, Current
from groupwise.server.run.checkpoints import Checkpoints
from groupwise.server.run.conductor import Conductor, Leaving, RunStatus
from groupwise.server.run.engine_errors import refusal_of
from groupwise.server.run.engine_supervisor import EngineSupervisor
from groupwise.server.run.responses import answer_of
from groupwise.server.run.run_config import RUNS, Allowed, order_of

logger = logging.getLogger(__name__)


class Beside(Protocol):
    """Another user of the machine: models that clients drive by verbs, or parts for a training loop in another process."""

    async def make_way(self) -> None:
        """Release the machine for something else. Refuses with `run_active` if this is in use."""
        ...

    async def let_go(self) -> None:
        """End everything that would prevent a run started with `replace: true`. Called while `turn` is held."""
        ...


class StartStop:
    """Starting and ending of runs."""

    def __init__(
        self,
        current: Current,
        ledger: Ledger,
        supervisor: EngineSupervisor,
        checkpoints: Checkpoints,
    ) -> None:
        config = current.config
        self._current = current
        self._config = config
        self._ledger = ledger
        self._supervisor = supervisor
        self._checkpoints = checkpoints
        self._allowed = Allowed(Path(config.model_dir).expanduser(), tuple(config.allowed_models))
        self.turn = asyncio.Lock()
        """Held while a run, or an engine for something else, is started or ended."""

    # --- starting --------------------------------------------------------------------------------

    async def go_on(self) -> None:
        """Resume the run that was active when the last server ended; in the background, because it takes a while."""
        known = await self._ledger.do(runs.list_runs)
        self._current.latest = known[-1] if known else None
        active = await self._ledger.do(runs.active_run)
        if active is None:
            return
        self._current.latest = active
        request = StartRequest.model_validate_json(json.dumps(active.settings))
        order = OpenRun(self._here(active.config), request.max_prompt_length, run=active.run)
        self._current.conductor = self._conductor_of(request, order)
        self._current.conductor.go_on()
        logger.info("going on with the run %s", active.run)

    async def start(
        self, request: StartRequest, caller: Caller, beside: Sequence[Beside]
    ) -> StartAnswer:
        """Start or resume a run. `beside`: other users of the machine, which may have to make room."""
        async with self.turn:
            self._current.refuse_when_shutting_down()
            replacing = request.replace
            order, request, old = await self._order(request)
            if replacing or self._current.active_conductor() is None:
                for each in beside:
                    if replacing:
                        await each.let_go()
                    await each.make_way()
            await self._make_way(replacing)
            conductor = self._conductor_of(request, order)
            standing = await self._begin_within_limit(conductor)
            answer = StartAnswer(
                run_id=standing.run,
                model_version=standing.version,
                fingerprint=standing.policy.fingerprint,
                max_steps=standing.max_steps,
                groups_per_step=request.prompts_per_step,
                tokenizer_hash=standing.opened.tokenizer_hash,
            )
            await self._keep_tokenizer(conductor, standing)
            row = await self._ledger.do(
                ledger_operations.start_run,
                standing.run,
                f"{RUNS}/{standing.run}",
                request.model_dump(mode="json", exclude_unset=True),
                dict(order.config),
                old is not None,
                standing.opened,
                caller,
                answer_of(answer),
            )
            self._current.conductor, self._current.latest = conductor, row
            conductor.go_on()
            return answer

    async def _order(self, request: StartRequest) -> tuple[OpenRun, StartRequest, RunRow | None]:
        """The order for the engine, the effective request, and the ledger row if a run is resumed. A resumed run keeps its own settings,
        overridden by those of the request.
        """
        if request.resume_from is None:
            order = await self._checked_order(request)
            return self._open_under_free_name(order), request, None
        rows = {row.run: row for row in await self._ledger.do(runs.list_runs)}
        if (old := rows.get(request.resume_from)) is not None:
            if request.run_name not in (None, old.run):
                message = (
                    f"has no effect with resume_from: {old.run}, because the run goes on under its own name. Leave it out, or begin a "
                    f"new run from a checkpoint of it, such as resume_from: {old.run}@<step> (GET /checkpoints lists them)"
                )
                error = FieldError(field="run_name", message=message)
                raise Refusal("settings_conflict", f"run_name {message}.", errors=[error])
            merged = _merge_settings(old.settings, request)
            order = await self._checked_order(merged)
            config = _with_run(order.config, name=old.run)
            return OpenRun(config, merged.max_prompt_length, run=old.run), merged, old
        beginning = self._checkpoints.beginning(request.resume_from, rows)
        merged = _merge_settings(beginning.settings, request)
        _refuse_other_weights(request.resume_from, beginning.settings, merged)
        order = self._open_under_free_name(await self._checked_order(merged))
        return replace(order, start_from=str(beginning.folder)), merged, None

    async def _checked_order(self, request: StartRequest) -> OpenRun:
        """Convert the request to an order. Runs in a thread, because checking a config takes a while."""
        return await asyncio.to_thread(order_of, request, self._allowed, self._config.folder)

    def _open_under_free_name(self, order: OpenRun) -> OpenRun:
        """Give a new run a name that no run has had: a stopped run is resumed only by `resume_from`, not because a name was reused."""
        wanted = order.config["run"]["name"]
        name, number = wanted, 1
        while (self._config.folder / RUNS / name).exists():
            number += 1
            name = f"{wanted}-{number}"
        return replace(order, config=_with_run(order.config, name=name))

    def _here(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Point the config to this output folder, which may have been moved since."""
        return _with_run(config, dir=str(self._config.folder / RUNS))

    async def _make_way(self, replacing: bool) -> None:
        conductor = self._current.conductor
        if conductor is not None:
            await conductor.last_words()
        if conductor is None or conductor.phase in ENDED:
            return
        if not replacing:
            run = self._current.latest.run if self._current.latest else "the run"
            raise Refusal(
                "run_active",
                f"{run} is active. Stop it first (POST /stop), or start with `replace: true`, which stops it cleanly.",
            )
        await self._leave(conductor, "replace")

    async def _begin_within_limit(self, conductor: Conductor) -> RunStatus:
        limit = self._config.start_time_limit
        try:
            async with asyncio.timeout(limit):
                return await conductor.begin()
        except TimeoutError:
            await self._supervisor.end()
            raise Refusal(
                "timed_out",
                f"the run was not ready after {limit:g} seconds (the server's start_time_limit).",
            ) from None
        except UsageError as error:
            raise refusal_of(error, otherwise="settings_conflict") from None
        except EngineLost as error:
            # It may have been killed for lack of memory that is free again.
            raise Refusal("engine_recovering", str(error), retry_after=2) from None
        except GroupwiseError as error:
            await self._supervisor.end()
            raise refusal_of(error, otherwise="engine_failed") from None

    async def _keep_tokenizer(self, conductor: Conductor, standing: RunStatus) -> None:
        """Store the tokenizer in the server's output, so that it can be served without an engine."""
        place = self._current.tokenizer_folder(standing.opened.tokenizer_hash)
        if place.is_dir():
            return
        files = await conductor.tokenizer_files()

        def fill(folder: Path) -> None:
            for name, content in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)

        await asyncio.to_thread(atomic_files.make_folder, place, fill, replace=True)

    def _conductor_of(self, request: StartRequest, order: OpenRun) -> Conductor:
        return Conductor(
            self._ledger,
            self._supervisor,
            request,
            order,
            most_open=self._config.max_open_groups,
            changed=self._current.changed,
        )

    # --- ending ----------------------------------------------------------------------------------

    async def stop(self) -> StopAnswer:
        """End the run after the step in progress, with a checkpoint; repeating it is harmless."""
        async with self.turn:
            if self._current.conductor is not None:
                await self._leave(self._current.conductor, "stop")
            row = self._current.latest
            if row is None:
                return StopAnswer()
            return StopAnswer(run_id=row.run, step=await self._ledger.do(steps.next_step, row.run))

    async def _leave(self, conductor: Conductor, why: Leaving) -> None:
        await conductor.leave(why, self._config.step_time_limit)
        self._current.changed.notify()


def _with_run(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The config with another name or folder of the run."""
    return {**config, "run": {**config["run"], **changes}}


def _refuse_other_weights(name: str, settings: Mapping[str, Any], request: StartRequest) -> None:
    """Refuse a change between training all weights and an adapter: their checkpoints do not fit each other. Checked before anything is
    loaded.
    """
    had_all = _merge_settings(settings, StartRequest()).trains_all
    if had_all != request.trains_all:
        was, now = ("all weights", "an adapter") if had_all else ("an adapter", "all weights")
        mend = "adapter: full" if had_all else "adapter: new"
        message = (
            f"the checkpoint {name} has {was}, and {now} would be trained. Give `{mend}`, or leave adapter and lora out, to go on with "
            "it; without resume_from the training begins anew"
        )
        error = FieldError(field="adapter", message=message)
        raise Refusal("resume_mismatch", f"adapter: {message}.", errors=[error])


_OURS = ("resume_from", "replace")
"""Keys of a start request that are not settings of the run."""
_REPLACED: Mapping[str, tuple[str, ...]] = {
    "groups_per_step": ("training_batch_size", "gradient_accumulation_steps"),
    "training_batch_size": ("groups_per_step",),
    "gradient_accumulation_steps": ("groups_per_step",),
}
"""Alternative settings: if the key is given, these settings of the earlier run are dropped."""


def _merge_settings(settings: Mapping[str, Any], request: StartRequest) -> StartRequest:
    """Override an earlier run's settings with those of the request. Refuses with `settings_conflict` if the result is invalid."""
    given = request.model_dump(mode="json", exclude_unset=True)
    fresh = {key: value for key, value in given.items() if key not in _OURS}
    gone = {
        *_OURS,
        *(old for key in fresh if fresh[key] is not None for old in _REPLACED.get(key, ())),
    }
    kept = {key: value for key, value in settings.items() if key not in gone}
    try:
        return StartRequest.model_validate_json(json.dumps({**kept, **fresh}))
    except ValidationError as error:
        refusal = Refusal.of_fields(error, StartRequest)
        raise Refusal(
            "settings_conflict",
            f"With the settings of the run that it goes on from: {refusal.detail}. A value of the request replaces the earlier setting; "
            "null takes one back.",
            errors=refusal.errors,
        ) from None
