"""Callbacks for runs of the toy task."""

import json
import os
import signal
from typing import Any

from groupwise import Callback

HISTORY = "history.json"


class History(Callback):
    """Remembers everything that it was told, over resumes, and leaves it in the run's folder."""

    def __init__(self):
        self.told = []

    def on_step_begin(self, run):
        self.told.append(f"begin {run.step}")

    def on_groups(self, run, groups, rejected):
        self.told.append(f"groups {[group.draw for group in groups]}")

    async def on_step_end(self, run, metrics):
        self.told.append(f"end {run.step} {metrics.get('reward')!r}")

    def on_evaluate(self, run, evaluation):
        self.told.append(f"evaluated {evaluation.name} {evaluation.metrics.get('reward')!r}")

    def on_save(self, run, checkpoint):
        assert (checkpoint / "manifest.json").is_file()
        self.told.append(f"saved {checkpoint.name}")

    def on_run_end(self, run, end):
        (run.folder / HISTORY).write_text(json.dumps(self.told))

    def state(self):
        return {"told": self.told}

    def load_state(self, state):
        self.told = state["told"]


class Asking(Callback):
    """Asks for something when so many steps are done."""

    def __init__(self, save: int = 0, evaluate: int = 0, stop: int = 0, interrupt: int = 0):
        self.save, self.evaluate, self.stop, self.interrupt = save, evaluate, stop, interrupt

    def on_step_end(self, run, metrics):
        if run.step == self.save:
            run.save()
        if run.step == self.evaluate:
            run.evaluate()
        if run.step == self.stop:
            run.stop("enough")

    def on_groups(self, run, groups, rejected):
        if run.step == self.interrupt and run.first_step == 0 and self.interrupt:
            os.kill(os.getpid(), signal.SIGINT)


class Meddling(Callback):
    """Tries to change whatever it is given."""

    def on_groups(self, run, groups, rejected):
        for group in groups:
            group.example.columns.clear()
            group.metrics["mine"] = 1.0
            for rollout in group.rollouts:
                rollout.notes["mine"] = 1

    def on_step_end(self, run, metrics):
        metrics.clear()

    def on_evaluate(self, run, evaluation: Any):
        evaluation.metrics.pop("reward")
        evaluation.rows.pop()

    def on_run_end(self, run, end):
        end.summary.clear()


class Failing(Callback):
    """Fails after every step."""

    def __init__(self, critical: bool = False, at: int | None = None):
        self.critical = critical
        self.at = at

    def on_step_end(self, run, metrics):
        if self.at in (None, run.step):
            raise RuntimeError(f"no luck after {run.step}")
