"""Rows as tensors: what a row knows of the other rows of its rollout reaches the loss."""

from __future__ import annotations

import torch

from groupwise.core.types import Row, SiblingRowStats
from groupwise.engine.learner.layout import MicroBatch
from groupwise.engine.learner.targets import ForwardResult
from groupwise.engine.learner.torch_learner import token_batch


def row(others: SiblingRowStats | None = None) -> Row:
    return Row((1,), (2, 3), (1, 1), (-1.0, -1.0), 0.5, 1.0, others=others)


def batch_of(*rows: Row):
    logprobs_BT = torch.zeros(len(rows), 2)
    return token_batch(
        MicroBatch((1,), rows, tuple(range(len(rows)))), ForwardResult(logprobs_BT, logprobs_BT)
    )


def test_rows_that_are_whole_rollouts_have_no_others():
    assert batch_of(row(), row()).others is None


def test_a_whole_rollout_beside_a_part_of_one_has_empty_sums():
    others = batch_of(row(), row(SiblingRowStats(3, 0.25, -0.5))).others
    assert others is not None
    assert others.tokens_B.tolist() == [0, 3]
    assert others.log_weights_B.tolist() == [0.0, 0.25]
    assert others.log_ratios_B.tolist() == [0.0, -0.5]
