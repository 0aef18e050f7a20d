"""Rows computed by a model's own modules, with torch's graph for the gradient: for any model, adapter or all weights, with dropout."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from groupwise.core.types import PolicyRole, Row
from groupwise.engine.learner.engine import Compute
from groupwise.engine.learner.forward import Forward, ForwardOutputs, Paths, choose_paths
from groupwise.engine.learner.layout import MicroBatch, PackedBatch
from groupwise.engine.learner.weights import TrainedWeights
from groupwise.engine.models.decoder import Decoder


class TransformersEngine:
    """A `groupwise.engine.learner.engine.Engine` over any transformers causal language model."""

    def __init__(
        self,
        weights: TrainedWeights,
        *,
        packing: bool,
        gradient_checkpointing: bool,
        sharing: bool = True,
    ) -> None:
        """Without `sharing`, each row is computed with its own prompt."""
        self._weights = weights
        self._sharing = sharing
        self._decoder = Decoder(weights.model)
        self._reference_decoder: Decoder | None = None
        self.paths = choose_paths(
            self._decoder, packing=packing, sharing=sharing and not gradient_checkpointing
        )
        if gradient_checkpointing:
            weights.model.activation_checkpointing_enable({"use_reentrant": False})
        self._layers = [
            module
            for module in weights.model.modules()
            if gradient_checkpointing and isinstance(module, GradientCheckpointingLayer)
        ]

    def cut(
        self, rows: Sequence[Row], max_tokens: int, *, gradient: bool
    ) -> list[MicroBatch | PackedBatch]:
        """See `Engine.cut`."""
        return self._ways(gradient=gradient).cut(rows, max_tokens)

    @contextmanager
    def acting(self, role: PolicyRole, *, gradient: bool) -> Generator[Compute]:
        """See `Engine.acting`."""
        paths = self._ways(gradient=gradient)
        reference = role == "reference"
        decoder = self.reference() if reference else self._decoder

        def compute(batch: MicroBatch | PackedBatch, wanted: ForwardOutputs) -> Forward:
            return replace(paths, wanted=wanted).forward(decoder, batch)

        acting = (
            self._weights.acting_reference()
            if reference
            else self._weights.acting(dropout=gradient and self._weights.dropout > 0)
        )
        with acting, _TrainingMode(self._layers if gradient else ()):
            yield compute

    def keep_step(self, role: PolicyRole, *, gradient: bool) -> None:
        """See `Engine.keep_step`."""

    def _ways(self, *, gradient: bool) -> Paths:
        """Without a gradient nothing is recomputed, so that prompts can be shared whenever they may be."""
        return self.paths if gradient else replace(self.paths, sharing=self._sharing)

    def reference(self) -> Decoder:
        """The model that the reference computes with."""
        if self._weights.reference_model is self._decoder.model:
            return self._decoder
        if self._reference_decoder is None:
            self._reference_decoder = Decoder(self._weights.reference_model)
        return self._reference_decoder


class _TrainingMode:
    """Layers that can be checkpointed are only in training mode; everything else stays in evaluation mode."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        self._layers = layers

    def __enter__(self) -> None:
        for layer in self._layers:
            layer.training = True  # not `train()`, which would turn on the dropout inside

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            layer.training = False
