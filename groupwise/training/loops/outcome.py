"""The end of any training run: curve, summary, model card, upload, the final state of its folder, and the event for its callbacks."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from groupwise.core import atomic_files
from groupwise.core.errors import CallbackError, GroupwiseError, StoreError, UsageError
from groupwise.core.interruption import Interrupted
from groupwise.core.processes.threads import DaemonThreads
from groupwise.core.terminal.notebook import kernel_display
from groupwise.core.terminal.quantities import counted
from groupwise.engine.models.artefact import CARD
from groupwise.engine.models.card import WeightsLocation, model_card, results_of
from groupwise.runs import find
from groupwise.runs.advice import advice_on
from groupwise.runs.curves import svg_of
from groupwise.runs.folder import FINAL_STEP
from groupwise.training.callbacks.base import RunEnd
from groupwise.training.loops.prepare import Prepared
from groupwise.training.loops.training import Training

if TYPE_CHECKING:
    from groupwise.engine.models.hub_push import Pushed, Target

logger = logging.getLogger(__name__)


def write_curve(run: Training, metric: str) -> None:
    """Write `reward.svg` or `loss.svg`: the metric over all steps."""
    if svg := svg_of(run.folder.store, metric, f"{run.folder.name}: {metric}"):
        atomic_files.write_file(run.folder.path / f"{metric}.svg", svg.encode())


def summarise(run: Training, prepared: Prepared, started_at: float) -> dict[str, Any]:
    """Summarise any run in a few entries. `started_at` is a time of `time.perf_counter`.

    `seconds` is the time since this process began or resumed the run.
    """
    resumes = run.folder.store.resumes()
    published = {"fingerprint": run.policy.fingerprint} if run.policy.fingerprint else {}
    warnings = [
        {
            "step": warning.step,
            "signal": warning.name,
            "kind": warning.kind,
            "message": warning.message,
        }
        for warning in run.folder.store.warnings()
    ]
    return {
        "run": run.folder.name,
        "folder": str(run.folder.path),
        "task": prepared.task.name,
        "steps": run.step,
        **({"resumed_from_step": resumes[-1].step} if resumes else {}),
        "max_steps": run.max_steps,
        "policy": f"{run.folder.name}@{run.step}",
        **published,
        **({"warnings": warnings} if warnings else {}),
        **({"advice": advice} if (advice := advice_on(run.folder.store)) else {}),
        "seconds": round(time.perf_counter() - started_at, 1),
    }


def first_and_last(run: Training, metric: str) -> tuple[float | None, float | None]:
    """A metric at the start and at the end of the run, as computed by `groupwise.runs.find.reward_ends`."""
    points = run.folder.store.metrics([metric]).get(metric, [])
    return find.reward_ends([value for _, value in points])


def ended_early(run: Training) -> dict[str, Any]:
    """The summary's entry about the callback that stopped the run before its last step, with its reason; empty otherwise."""
    stop = run.callbacks.stop
    if stop is None or run.step >= run.max_steps:
        return {}
    why = f": {stop.reason}" if stop.reason else ""
    run.say(f"ended after {run.step} of {run.max_steps} steps by the callback {stop.by}{why}")
    return {"stopped": asdict(stop)}


async def end(
    run: Training, state: Literal["finished", "stopped", "interrupted"], summary: dict[str, Any]
) -> dict[str, Any]:
    """Record the end of the run and announce it to callbacks and viewers. Returns the summary with the state.

    Before that, the final weights of a finished run get their model card and are uploaded if `run.hub` is set. Only a client of a training
    server stops a run; such runs have no callbacks.
    """
    if state == "finished":
        step = run.folder.store.get_meta()[FINAL_STEP]
        summary = {**summary, "policy": f"{run.folder.name}@{step}", "final_step": step}
        hub, final = run.config.run.hub, run.folder.final
        revision = None if hub.revision == "main" else hub.revision
        location = (
            WeightsLocation(hub.repo_id, revision) if hub.repo_id else WeightsLocation(final.name)
        )
        step, results = summary["final_step"], results_of(summary)
        card = model_card(run.folder.path, final, step, location=location, results=results)
        atomic_files.write_file(final / CARD, card.encode())
        summary = {**summary, **await _upload_final_weights(run, summary["policy"])}
    run.folder.summarise(state, summary)
    if state != "stopped":
        try:
            # A run that is killed during these calls has not ended; a resume repeats them.
            await run.callbacks.end(RunEnd(state, summary))
        except CallbackError:
            run.folder.finish(state, summary)
            raise
        if run.callbacks.unfinished_work:
            state = "interrupted"
    run.folder.finish(state, summary)
    if state == "finished":
        logger.info("finished after %d steps", run.step)
    elif state == "stopped":
        run.say(f"stopped after {counted(run.step, 'step')}, as a client asked")
    else:
        # A notebook has no --resume; there the error that ends the cell says how to continue.
        hint = "; --resume continues the run" if kernel_display() is None else ""
        run.say(f"interrupted after {run.step} steps{hint}")
    return {**summary, "state": state}


def exit_code(run: Training, summary: dict[str, Any]) -> int:
    """Exit code of a run that has taken all its steps: 1 if the upload failed; that of Ctrl-C or SIGTERM if a callback left work."""
    if summary["state"] == "interrupted":
        return 128 + (run.interruption.received_signal or signal.SIGINT)
    return 1 if "error" in summary.get("hub", {}) else 0


async def _upload_final_weights(run: Training, policy: str) -> dict[str, Any]:
    """Upload the final weights. Returns the summary's entry: their location, or the error. The folder has them in any case."""
    hub = run.config.run.hub
    if hub.repo_id is None:
        return {}
    from groupwise.engine.models.hub_push import Target

    target = Target(**hub.model_dump())
    run.say(f"uploading {run.folder.final} to {target}")
    thread = DaemonThreads([_Uploader()], "hub")
    try:
        job = thread.submit((run.folder.final, target, policy, run.folder.path))

        async def uploaded() -> Pushed:
            return await asyncio.wrap_future(job)

        return {"hub": asdict(await run.interruption.allow(uploaded()))}
    except (GroupwiseError, Interrupted) as error:
        why = str(error).rstrip(".") or "interrupted"
        options = " with --overwrite or --revision BRANCH" if isinstance(error, UsageError) else ""
        run.say(
            f"warning: the run is finished, and {run.folder.final} holds what it made, but that could not be uploaded: {why}. Try "
            f"again by: groupwise runs push {run.folder.name} --dir {run.folder.path.parent}{options}"
        )
        return {"hub": {"error": str(error) or "interrupted"}}
    finally:
        thread.close()


class _Uploader:
    """Uploads in a daemon thread, which does not keep the process alive."""

    def begin(self) -> None:
        pass

    def do(self, job: tuple[Path, Target, str, Path]) -> Pushed:
        from groupwise.engine.models.hub_push import push

        return push(*job)

    def end(self) -> None:
        pass


async def report_failure(run: Training, error: BaseException) -> None:
    """Record a failure in the folder, then announce it to the callbacks. A second Ctrl-C ends the run at once, without the callbacks."""
    if isinstance(error, Exception):
        with suppress(StoreError):
            run.folder.finish("failed", error=error)
        await run.callbacks.end(RunEnd("failed", {}, str(error)))
