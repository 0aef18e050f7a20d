"""The self-test of algorithms: ours pass, and each way to break the contract is found and named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from groupwise.algorithms.base import LossResult, TokenBatch
from groupwise.algorithms.dr_grpo import DrGrpo
from groupwise.algorithms.registry import ALGORITHMS, make
from groupwise.core.types import Group, RolloutCredit
from groupwise.training.checks.check_algorithm import check_algorithm


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "distillation"])
@pytest.mark.parametrize("correction", ["none", "sequence_truncate"])
def test_ours_pass(name: str, correction: str) -> None:
    algorithm = make(name, {"beta": 0.1, "importance_sampling_correction": correction})
    assert [(finding.level, finding.name) for finding in check_algorithm(algorithm, name)] == [
        ("ok", "algorithm")
    ]


@pytest.mark.parametrize(
    "knobs",
    [
        {"type": "grpo", "top_entropy_quantile": 0.3, "entropy_advantage": 0.4},
        {"type": "clip_cov", "clip_cov_low": 0.1, "clip_cov_high": 2.0, "clip_cov_ratio": 0.2},
        {"type": "kl_cov", "kl_cov_ratio": 0.2},
        {"type": "rloo", "turn_discount": 0.9},
    ],
    ids=str,
)
def test_knobs_of_tokens_and_turns_pass(knobs: dict[str, Any]) -> None:
    algorithm = make(knobs["type"], {key: value for key, value in knobs.items() if key != "type"})
    assert [finding.level for finding in check_algorithm(algorithm, "mine")] == ["ok"]


@dataclass(frozen=True, kw_only=True)
class DividesByTheBatch(DrGrpo):
    def loss(self, batch: TokenBatch) -> LossResult:
        result = DrGrpo.loss(self, batch)
        tokens = batch.mask_BT.sum()
        return replace(result, components={k: v / tokens for k, v in result.components.items()})


@dataclass(frozen=True, kw_only=True)
class ForgetsTheMask(DrGrpo):
    def loss(self, batch: TokenBatch) -> LossResult:
        ratios = (batch.policy_logprobs_BT - batch.sampling_logprobs_BT).exp()
        total = -(ratios * batch.advantages).nan_to_num(1.0).sum(-1) * ratios.nan_to_num(1.0).sum(
            -1
        )
        return LossResult({"policy": total.sum()}, {})


@dataclass(frozen=True, kw_only=True)
class PrefersTheFirst(DrGrpo):
    def credits(self, groups: Sequence[Group]) -> tuple[tuple[RolloutCredit | None, ...], ...]:
        return tuple(
            tuple(
                credit and replace(credit, advantage=credit.advantage / (1 + place))
                for place, credit in enumerate(credits)
            )
            for credits in DrGrpo.credits(self, groups)
        )


@dataclass(frozen=True, kw_only=True)
class PrefersTheFirstGroup(DrGrpo):
    def credits(self, groups: Sequence[Group]) -> tuple[tuple[RolloutCredit | None, ...], ...]:
        return tuple(
            tuple(credit and replace(credit, scale=1.0 + place) for credit in credits)
            for place, credits in enumerate(DrGrpo.credits(self, groups))
        )


@dataclass(frozen=True, kw_only=True)
class PunishesFailures(DrGrpo):
    def credits(self, groups: Sequence[Group]) -> tuple[tuple[RolloutCredit | None, ...], ...]:
        return tuple(
            tuple(credit or RolloutCredit(-1.0, 1.0) for credit in credits)
            for credits in DrGrpo.credits(self, groups)
        )


@dataclass(frozen=True, kw_only=True)
class TeachesNothing(DrGrpo):
    def advantages(self, groups: Sequence[Group]) -> list[tuple[float | None, ...]]:
        return [tuple(0.0 for _ in group.rollouts) for group in groups]


@dataclass(frozen=True, kw_only=True)
class DividesByNothing(DrGrpo):
    def denominator(self, groups: Sequence[Group], max_completion_length: int) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Raises(DrGrpo):
    def credits(self, groups: Sequence[Group]) -> tuple[tuple[RolloutCredit | None, ...], ...]:
        raise RuntimeError("out of luck")


@dataclass(frozen=True, kw_only=True)
class LeavesOneOut(DrGrpo):
    def advantages(self, groups: Sequence[Group]) -> list[tuple[float | None, ...]]:
        return [values[1:] for values in DrGrpo.advantages(self, groups)]


@dataclass(frozen=True, kw_only=True)
class IsUndecided(DrGrpo):
    def advantages(self, groups: Sequence[Group]) -> list[tuple[float | None, ...]]:
        return [(math.nan,) * len(group.rollouts) for group in groups]


@dataclass(frozen=True, kw_only=True)
class AddsUpRows(DrGrpo):
    def surrogate(self, batch: TokenBatch, log_ratio_BT: Any) -> tuple[Any, dict[str, Any]]:
        values, stats = DrGrpo.surrogate(self, batch, log_ratio_BT)
        return values.sum(-1, keepdim=True), stats


@pytest.mark.parametrize(
    ("kind", "violated"),
    [
        (DividesByTheBatch, {"micro-batching"}),
        (ForgetsTheMask, {"padding"}),
        (PrefersTheFirst, {"order of rollouts"}),
        (PrefersTheFirstGroup, {"permutation of groups"}),
        (PunishesFailures, {"failed rollouts"}),
        (TeachesNothing, {"gradient"}),
        (DividesByNothing, {"gradient"}),
    ],
)
def test_each_violated_property_is_named(kind: type[DrGrpo], violated: set[str]) -> None:
    findings = list(check_algorithm(kind(), "own.py:Mine"))
    assert {finding.level for finding in findings} == {"problem"}
    assert violated <= {finding.name.removeprefix("algorithm: ") for finding in findings}
    assert all(finding.meaning and finding.remedy for finding in findings)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Raises, "out of luck"),
        (LeavesOneOut, "[6, 6, 6] values for groups of [7, 7, 7] rollouts"),
        (IsUndecided, "`advantages` returned nan"),
        (AddsUpRows, "one value for each token"),
    ],
)
def test_an_algorithm_that_fails_is_one_problem_with_its_message(kind: type[DrGrpo], said: str):
    (finding,) = check_algorithm(kind(), "own.py:Mine")
    assert finding.level == "problem"
    assert said in finding.measured
