"""Watches a run for signals of reward hacking: turns each step's groups into metrics, and warns when a signal starts or ends.

A committed step reports its groups. Only fresh groups count, including rejected ones: they were not selected by reward. Groups from
the easy pool or the replay buffer would reflect the selection, not the policy. A signal starts when its strength reaches 1 and ends
when it falls below `ENDS`; this hysteresis keeps a signal at its threshold from flickering.

Nothing here uses randomness, raises errors or stops the run. The state is part of the checkpoint, so a resumed run warns at the
same steps as an uninterrupted one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from groupwise.core.types import Group
from groupwise.runs.records import WarningRecord
from groupwise.tasks.data.drift import Gauge
from groupwise.tasks.data.reward_hacking_detectors import (
    DETECTORS,
    DetectorInput,
    Finding,
    SignalsConfig,
    missing_accuracy_note,
)
from groupwise.tasks.data.reward_hacking_statistics import group_statistics, lowest_part_values

Argument: TypeAlias = tuple[str, str]
"""A reward's name and the name of one of its arguments."""

logger = logging.getLogger(__name__)

ENDS = 0.7
"""Strength below which a signal ends."""
NEW_METRICS = (
    "length_correlation",
    "repetition",
    "repeated_lines",
    "distinct_completions",
    "distinct_ngrams",
    "same_answers",
)
"""Statistics that become metrics under their names; the others are already metrics."""


@dataclass(frozen=True, slots=True)
class StepSignals:
    """The metrics and warnings of a step."""

    metrics: dict[str, float]
    warnings: tuple[WarningRecord, ...]


class Signals:
    """The signals of one run."""

    def __init__(self, config: SignalsConfig, rewards: Collection[Argument] = ()) -> None:
        """`rewards`: the arguments of reward functions that name columns."""
        self.config = config
        self._unfilled = dict.fromkeys(rewards)
        """Arguments that have been None in every row so far."""
        self._gauges: dict[str, Gauge] = {}
        self._rewards: tuple[float, float] | None = None
        """The lowest and the highest reward so far."""
        self._least: dict[str, float] = {}
        """The lowest weighted value of each part so far."""
        self._active: set[str] = set()

    def observe(
        self, groups: Sequence[Group], step: int, entropy: float | None = None
    ) -> StepSignals:
        """Process the groups of step `step` (from 0), just before it is committed; `entropy` is the mean entropy of its tokens (nats)."""
        fresh = [group for group in groups if group.origin == "fresh"]
        rows = [group.example.columns for group in groups]
        for argument in [
            unfilled
            for unfilled in self._unfilled
            if any(r.get(unfilled[1]) is not None for r in rows)
        ]:
            del self._unfilled[argument]
        statistics = group_statistics(fresh)
        if entropy is not None:
            statistics["entropy"] = entropy
        for name, value in statistics.items():
            gauge = self._gauges.setdefault(name, Gauge())
            gauge.observe(value, self.config.start_steps, self.config.memory)
        rewards = [r.reward for group in fresh for r in group.scored if r.reward is not None]
        is_first_scored = bool(rewards) and self._rewards is None
        if rewards:
            bounds = [*rewards, *(self._rewards or ())]
            self._rewards = min(bounds), max(bounds)
        for part, lowest in lowest_part_values(fresh).items():
            self._least[part] = min(self._least.get(part, lowest), lowest)
        if is_first_scored:
            parts = dict.fromkeys(p.name for g in fresh for r in g.scored for p in r.parts)
            if text := missing_accuracy_note(self.config, parts):
                logger.info("%s", text)
            accuracy_part = self.config.accuracy_part
            if accuracy_part is not None and accuracy_part not in parts:
                logger.warning(
                    "signals.accuracy_part is %r, but no reward part so far is called so. There are: %s",
                    accuracy_part,
                    ", ".join(parts) or "none",
                )
        warnings = self._warning_changes(step + 1)
        return StepSignals(self._make_metrics(statistics), warnings)

    def state(self) -> dict[str, Any]:
        """All that a checkpoint needs, as plain JSON."""
        return {
            "gauges": {name: [g.start, g.running] for name, g in self._gauges.items()},
            "rewards": self._rewards and list(self._rewards),
            "least": dict(self._least),
            "active": sorted(self._active),
            "unfilled": [list(argument) for argument in self._unfilled],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self._gauges = {
            name: Gauge(list(start), now) for name, (start, now) in state["gauges"].items()
        }
        self._rewards = state["rewards"] and tuple(state["rewards"])
        self._least = dict(state.get("least", {}))
        self._active = set(state["active"])
        still_unfilled = [tuple(entry) for entry in state.get("unfilled", self._unfilled)]
        self._unfilled = {
            argument: None for argument in self._unfilled if argument in still_unfilled
        }

    def _warning_changes(self, steps: int) -> tuple[WarningRecord, ...]:
        lowest, highest = self._rewards or (0.0, 0.0)
        sight = DetectorInput(self.config, self._gauges, lowest, highest, self._least)
        findings = {name: suspicion(sight) for name, suspicion in DETECTORS.items()}
        findings["unfilled"] = Finding(
            float(bool(self._unfilled)), unfilled_arguments_warning(self._unfilled)
        )
        changes = [
            change(name, finding, steps, was=name in self._active)
            for name, finding in findings.items()
            if finding is not None
        ]
        warnings = tuple(record for record in changes if record is not None)
        self._active ^= {warning.name for warning in warnings}
        return warnings

    def _make_metrics(self, statistics: Mapping[str, float]) -> dict[str, float]:
        new_metrics = {name: statistics[name] for name in NEW_METRICS if name in statistics}
        shares = {
            f"part_share/{name.partition('/')[2]}": value
            for name, value in statistics.items()
            if name.startswith("share/")
        }
        lengths = self._gauges.get("length")
        growth = lengths.now / lengths.mean if lengths and lengths.ready and lengths.mean else None
        metrics = {
            **new_metrics,
            **(shares if len(shares) > 1 else {}),
            **({} if growth is None else {"length_growth": growth}),
            "active": float(len(self._active)),
        }
        return {f"signals/{name}": value for name, value in metrics.items()}


def change(name: str, finding: Finding, steps: int, *, was: bool) -> WarningRecord | None:
    """The warning that a signal starts or ends after `steps` steps; None if nothing changes."""
    begins, ends = not was and finding.strength >= 1, was and finding.strength < ENDS
    if not (begins or ends):
        return None
    numbers = ", ".join(f"{label} {value:.3g}" for label, value in finding.values.items())
    text = finding.text if begins else "no longer so"
    line = f"{text} ({numbers})" if numbers else text
    return WarningRecord(steps, name, "begins" if begins else "ends", line, finding.values)


def unfilled_arguments_warning(arguments: Iterable[Argument]) -> str:
    """A warning about arguments of rewards that are None in every row."""
    names = ", ".join(f"`{argument}` of the reward `{reward}`" for reward, argument in arguments)
    return f"{names} has been None in every row: the column is empty or not there"
