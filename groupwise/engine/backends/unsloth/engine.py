"""Rows computed by Unsloth: each whole, prompt included, beside others of its prompt."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from groupwise.core.types import PolicyRole, Row
from groupwise.engine.backends.unsloth import library
from groupwise.engine.backends.unsloth.model import UnslothDecoder
from groupwise.engine.learner.engine import Compute
from groupwise.engine.learner.forward import Forward, ForwardOutputs, whole_rows
from groupwise.engine.learner.layout import MicroBatch, microbatches
from groupwise.engine.learner.weights import TrainedWeights


class UnslothEngine:
    """A `groupwise.engine.learner.engine.Engine` over a model that Unsloth has loaded."""

    def __init__(self, weights: TrainedWeights) -> None:
        self._weights = weights
        self._decoder = UnslothDecoder(weights.model)

    def cut(self, rows: Sequence[Row], max_tokens: int, *, gradient: bool) -> list[MicroBatch]:
        """See `Engine.cut`."""
        return microbatches(rows, max_tokens, prompt_shared=False)

    @contextmanager
    def acting(self, role: PolicyRole, *, gradient: bool) -> Generator[Compute]:
        """See `Engine.acting`. Without a gradient the same kernels compute, so that log-probabilities are those that are trained."""

        def compute(batch: MicroBatch, wanted: ForwardOutputs) -> Forward:
            return whole_rows(self._decoder, batch, wanted)

        reference = role == "reference"
        acting = (
            self._weights.acting_reference() if reference else self._weights.acting(dropout=False)
        )
        with acting:
            library.learning(self._weights.model)
            yield compute

    def keep_step(self, role: PolicyRole, *, gradient: bool) -> None:
        """See `Engine.keep_step`: it learns alone."""
