"""The teacher of a distillation as a learner sees it: another model, the policy's own weights, or a moving average of them.

A teacher computes rows as the learner does, in an engine of its own or in the learner's. It sees its own prompt (`Row.as_seen_by_teacher`),
and no gradient is taken. With `MovingAverage` it follows the policy: after each update, teacher ← teacher + rate · (policy − teacher).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from groupwise.core.types import PolicyRole, Row
from groupwise.engine.learner.targets import Distributions, ForwardOutputs
from groupwise.engine.models.files import read_tensors, write_tensors
from groupwise.engine.models.lora import copy_exactly

if TYPE_CHECKING:
    from groupwise.engine.learner.engine import LearnerEngine

AVERAGE = "teacher.safetensors"
"""File of a checkpoint with the moving average."""
DISTRIBUTIONS = ForwardOutputs(trained_only=True, distributions=True)


class MovingAverage:
    """Weights that follow those of the policy slowly; float32, like them."""

    def __init__(
        self, average: Mapping[str, Tensor], policy: Mapping[str, Tensor], rate: float
    ) -> None:
        """`average` are the teacher's tensors, `policy` the trained ones that they begin with and follow, both in the same order."""
        self._average, self._policy, self._rate = average, policy, rate
        self.begin()

    def begin(self) -> None:
        """Begin with the policy's weights as they are now."""
        with torch.no_grad():
            for average, policy in zip(self._average.values(), self._policy.values(), strict=True):
                average.copy_(policy)

    def follow(self) -> None:
        """Take a step towards the policy."""
        with torch.no_grad():
            torch._foreach_lerp_([*self._average.values()], [*self._policy.values()], self._rate)

    def save(self, folder: Path) -> None:
        """Write the average into a checkpoint."""
        tensors = {name: tensor.detach().cpu() for name, tensor in self._average.items()}
        write_tensors(tensors, folder / AVERAGE)

    def read(self, folder: Path) -> None:
        """Restore what `save` wrote. Weights that were trained without a moving average have none, so it begins with them."""
        file = folder / AVERAGE
        if file.is_file():
            copy_exactly(self._average, read_tensors(file), str(file))
        else:
            self.begin()


@dataclass(frozen=True, slots=True)
class Teacher:
    """Computes rows as the teacher."""

    engine: LearnerEngine
    role: PolicyRole = "policy"
    """Whose weights of that engine's it has."""
    average: MovingAverage | None = None

    def distributions(self, rows: Sequence[Row], max_tokens: int) -> Distributions:
        """Its distributions at all trained tokens of the rows, one row after another."""
        as_seen_by_teacher = [row.as_seen_by_teacher for row in rows]
        states_by_row: list[Any] = [None] * len(rows)
        head = None
        with torch.no_grad(), self.engine.acting(self.role, gradient=False) as compute:
            for batch in self.engine.cut(as_seen_by_teacher, max_tokens, gradient=False):
                distributions = compute(batch, DISTRIBUTIONS).distributions
                assert distributions is not None, "they were asked for"
                head = distributions.logits
                counts = [sum(map(bool, row.mask)) for row in batch.rows]
                states = distributions.hidden_NH.split(counts)
                for index, state in zip(batch.indices, states, strict=True):
                    states_by_row[index] = state
        assert head is not None, "there are rows"
        return Distributions(torch.cat(states_by_row), head)
