"""The callback `early_stop`: ends a run that has stopped improving."""

from __future__ import annotations

import math
from typing import Any, Literal

from groupwise.core.plugins import nearest
from groupwise.core.settings.view import View
from groupwise.core.terminal.quantities import counted
from groupwise.runs.records import EvaluationRecord
from groupwise.training.callbacks.base import Callback, RunHandle


class EarlyStop(Callback):
    """Ends the run after `patience` evaluations (or steps) in a row in which a metric did not improve.

    An improvement is more than `min_delta` above the best value so far or, with `mode: min`, below it. Without a mode, it is `min` if the
    metric's name contains "loss". The evaluation before training counts as the first value to improve on.
    """

    def __init__(
        self,
        metric: str = "reward",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["max", "min"] | None = None,
        observe: Literal["evaluations", "steps"] = "evaluations",
    ) -> None:
        if patience < 1:
            raise ValueError(f"patience is {patience}; it must be at least 1.")
        if min_delta < 0:
            raise ValueError(f"min_delta is {min_delta}; it must be at least 0.")
        self.metric = metric
        self.patience = patience
        self.min_delta = min_delta
        self.mode = mode or ("min" if "loss" in metric else "max")
        self.observe = observe
        self.best: float | None = None
        self.best_step = 0
        """Number of steps done at the best value."""
        self.not_better = 0
        """Number of observations since the best value."""
        self._questions = ""
        """The held-out prompts (`asked`) of the evaluations so far; empty before the first evaluation."""
        self._missed = False

    def check(self, config: View) -> None:
        """Raise ValueError if the run makes no evaluations that could be observed."""
        # An RL run has evaluations during training only with eval_steps; an SFT run has them by default.
        rl = "before_and_after" in config.eval
        if self.observe == "evaluations" and rl and config.eval.eval_steps is None:
            raise ValueError(
                "it observes evaluations, but eval.eval_steps is null, so there are none during training. Set "
                "eval.eval_steps, or let it `observe: steps`."
            )

    def on_step_end(self, run: RunHandle, metrics: dict[str, float]) -> None:
        """Observe the step's metrics, if steps are observed."""
        if self.observe == "steps":
            self._update_best(run, metrics)

    def on_evaluate(self, run: RunHandle, evaluation: EvaluationRecord) -> None:
        """Observe the evaluation's metrics, if evaluations are observed."""
        if self.observe == "evaluations":
            # A best value on other held-out prompts is not comparable.
            if self._questions and evaluation.asked != self._questions:
                self.best, self.best_step, self.not_better = None, 0, 0
            self._questions = evaluation.asked
            self._update_best(run, dict(evaluation.metrics))

    def state(self) -> dict[str, Any]:
        """The best value and its step, and the number of observations since."""
        return {
            "best": self.best,
            "best_step": self.best_step,
            "not_better": self.not_better,
            "asked": self._questions,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.best, self.best_step = state["best"], state["best_step"]
        self.not_better = state["not_better"]
        self._questions = state.get("asked", "")

    def _update_best(self, run: RunHandle, metrics: dict[str, float]) -> None:
        value = metrics.get(self.metric)
        if value is None:
            # A step may lack a metric (no group had a signal, so there is no loss); report that once, because the
            # name may be wrong.
            if not self._missed:
                self._missed = True
                suggestions = nearest(self.metric, metrics)
                hint = f" Did you mean {' or '.join(suggestions)}?" if suggestions else ""
                run.say(
                    f"early_stop: there is no metric {self.metric!r} in the {self.observe} so far.{hint} There are: "
                    f"{', '.join(sorted(metrics))}"
                )
        elif self._is_better(value):
            self.best, self.best_step, self.not_better = value, run.step, 0
        else:
            self.not_better += 1
            if self.not_better >= self.patience:
                observed = counted(self.not_better, self.observe.removesuffix("s"))
                if self.best is None:
                    reason = f"{self.metric} was not a finite number in {observed}"
                else:
                    direction, verb = (
                        ("above", "risen") if self.mode == "max" else ("below", "fallen")
                    )
                    margin = f" by more than {self.min_delta:g}" if self.min_delta else ""
                    reason = (
                        f"{self.metric} has not {verb} {direction} {self.best:.4g} (after {self.best_step} steps){margin} in "
                        f"{observed}"
                    )
                run.stop(reason)

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        sign = 1 if self.mode == "max" else -1
        return self.best is None or sign * (value - self.best) > self.min_delta
