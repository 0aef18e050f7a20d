"""Completions with their rewards as plain text, where no kernel draws the live page that has them."""

from __future__ import annotations

import math
from dataclasses import replace

from groupwise.notebook.record import Record
from groupwise.training.callbacks.base import Callback, RunHandle

TABLES = 8
"""Into so many stretches a training is cut; each ends with a table."""
MAX_ROWS = 4
"""Completions of a table."""
LONGEST = 70
"""Characters shown of one, and half as many of what was asked, so that a line of the table stays one on a screen."""


class Completions(Callback):
    """Tells completions of the first step, of the last one, and of some between; how many does not grow with the training."""

    def on_step_end(self, run: RunHandle, metrics: dict[str, float]) -> None:
        """See `Callback`."""
        stretch = math.ceil(run.max_steps / TABLES)
        ends = run.step % stretch == 0 or run.step == run.max_steps
        if ends or run.step == run.first_step + 1:
            found = Record(run.folder).table(run.step - 1, MAX_ROWS, LONGEST)
            run.say(str(replace(found, title=f"Completions of step {run.step}")))
