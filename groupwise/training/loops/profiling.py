"""`run.profile`: traces the work of a step.

    profile/step-N.json     every operator with its time, for Perfetto (https://ui.perfetto.dev) or chrome://tracing
    profile/step-N.txt      seconds of each phase, and the slowest operators

Tracing does not change the step's results, not even in the last bit. Reward workers are separate processes and not in the trace. If
several processes sample and learn (`run.processes`), the trace shows only the first; the others do the same with other groups and rows.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from groupwise.core import atomic_files
from groupwise.core.errors import ConfigError
from groupwise.runs.config import RunSection
from groupwise.training.loops.training import Training

if TYPE_CHECKING:
    from groupwise.engine.models.profile import Trace

PROFILE = "profile"
"""Name of the run's folder with the traces."""


def check_profiled_steps(run: RunSection, max_steps: int) -> None:
    """Raise ConfigError if `run.profile` names a step beyond the last one."""
    if run.profiled_steps and max(run.profiled_steps) > max_steps:
        raise ConfigError(
            f"run.profile names step {max(run.profiled_steps)}, but the run has the steps 1 to {max_steps}."
        )


@contextmanager
def profile_step(training: Training) -> Generator[None]:
    """Trace the code in this context, if `run.profile` names the current step."""
    step = training.step + 1
    if step not in training.config.run.profiled_steps:
        yield
        return
    from groupwise.engine.distributed.learner import RankLearner

    learner = training.learner
    try:
        with (
            learner.trace()
            if isinstance(learner, RankLearner)
            else _marking_calls(training) as trace
        ):
            yield
    finally:
        training.learner = learner
    training.progress.phase("writing the profile")
    try:
        folder = training.folder.path / PROFILE
        folder.mkdir(exist_ok=True)
        atomic_files.sweep(folder)
        table = folder / f"step-{step}.txt"
        # If sampling runs ahead, its time counts for the step that its groups belong to.
        phases = ("sampling", "scoring", "learning", "publishing", "step")
        seconds = {name: getattr(training.timings, name) for name in phases}
        lines = [f"{name:<12}{value:>10.3f} s\n" for name, value in seconds.items() if value]
        table.write_text(f"{''.join(lines)}\n{trace.table()}\n", encoding="utf-8")
        temp_path = atomic_files.building_path(folder / f"step-{step}.json")
        try:
            trace.write(temp_path)
            temp_path.replace(folder / f"step-{step}.json")
        finally:
            temp_path.unlink(missing_ok=True)
    except OSError as error:  # the trained step matters more
        training.say(f"warning: the profile of step {step} could not be written: {error}")
    else:
        training.say(f"the profile of step {step} is in {folder}")


@contextmanager
def _marking_calls(training: Training) -> Generator[Trace]:
    """Trace this process; the learner's calls appear in the trace by name."""
    from groupwise.engine.models.profile import MarkedLearner, tracing

    training.learner = MarkedLearner(training.learner)
    with tracing() as trace:
        yield trace
