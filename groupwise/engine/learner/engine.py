"""Engines compute rows for a learner. For known model families they use plain matrices (`groupwise.engine.learner.native.engine`),
otherwise transformers' modules with autograd, which supports any model, adapters or all weights, and dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from groupwise.core.types import PolicyRole, Row
from groupwise.engine.learner.forward import Paths, choose_paths
from groupwise.engine.learner.layout import Batch, PackedGroups, TransformersBatch
from groupwise.engine.learner.routing_replay import RoutingReplay
from groupwise.engine.learner.targets import ForwardOutputs, ForwardResult
from groupwise.engine.learner.weights import TrainedWeights
from groupwise.engine.models import varlen
from groupwise.engine.models.decoder import Decoder
from groupwise.engine.models.native.causal_lm import DecoderLayer
from groupwise.engine.models.native.facts import head_size

Compute = Callable[[Any, ForwardOutputs], ForwardResult]
"""Computes log-probabilities and entropies of a micro-batch that the same engine has cut."""


class LearnerEngine(Protocol):
    """Computes forward passes of rows, with a gradient if torch's gradients are enabled."""

    def cut(self, rows: Sequence[Row], max_tokens: int, *, gradient: bool) -> Sequence[Batch]:
        """Divide the rows into micro-batches of at most `max_tokens` tokens; a single longer row has its own."""
        ...

    def acting(self, role: PolicyRole, *, gradient: bool) -> AbstractContextManager[Compute]:
        """Context manager for computing as this policy; a backward pass must end inside it."""
        ...

    def keep_step(self, role: PolicyRole, *, gradient: bool) -> None:
        """Called after the last row of a step. Learners that hold parts of one model make the passes here that others still need."""
        ...


class TransformersEngine:
    """A `groupwise.engine.learner.engine.LearnerEngine` over any transformers causal language model."""

    def __init__(
        self,
        weights: TrainedWeights,
        *,
        packing: bool,
        gradient_checkpointing: bool,
        sharing: bool = True,
        routing_replay: bool = False,
    ) -> None:
        """Without `sharing`, each row is computed with its own prompt; so it is with `routing_replay`, which replays `Row.routed_experts`
        where the policy computes, and raises ModelError if this model cannot."""
        self._weights = weights
        self._decoder = Decoder(weights.model)
        self._routing = RoutingReplay(weights.model) if routing_replay else None
        sharing = sharing and self._routing is None
        self._sharing = sharing = sharing and not self._decoder.has_state
        self._reference_decoder: Decoder | None = None
        self.paths = choose_paths(
            self._decoder,
            packing=packing,
            sharing=sharing and not gradient_checkpointing,
            whole_groups=sharing and self._takes_many_texts(),
        )
        if gradient_checkpointing:
            model: Any = weights.model
            enable = getattr(model, "activation_checkpointing_enable", None)
            if enable is None:  # the name before transformers 5.23, which warns since then
                enable = model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        self._layers = [
            module
            for module in weights.model.modules()
            if gradient_checkpointing
            and isinstance(module, GradientCheckpointingLayer | DecoderLayer)
        ]

    def cut(
        self, rows: Sequence[Row], max_tokens: int, *, gradient: bool
    ) -> Sequence[TransformersBatch]:
        """See `LearnerEngine.cut`."""
        return self._paths_for(gradient=gradient).cut(rows, max_tokens)

    @contextmanager
    def acting(self, role: PolicyRole, *, gradient: bool) -> Generator[Compute]:
        """See `LearnerEngine.acting`."""
        paths = self._paths_for(gradient=gradient)
        reference = role == "reference"
        decoder = self.reference() if reference else self._decoder

        def compute(batch: TransformersBatch, outputs: ForwardOutputs) -> ForwardResult:
            if self._routing is not None:
                assert not isinstance(batch, PackedGroups), "rows of a shared prompt are not whole"
                self._routing.replay(batch if role == "policy" else None)
            return replace(paths, outputs=outputs).forward(decoder, batch)

        acting = (
            self._weights.acting_reference()
            if reference
            else self._weights.acting(dropout=gradient and self._weights.dropout > 0)
        )
        with acting, decoder.kernels():
            # Only layers that can be checkpointed are in training mode, and only with a gradient; all else stays in evaluation mode.
            layers = self._layers if gradient else []
            for layer in layers:
                layer.training = True  # not `train()`, which would turn on the dropout inside
            try:
                yield compute
            finally:
                for layer in layers:
                    layer.training = False
                if self._routing is not None:
                    self._routing.replay(None)

    def keep_step(self, role: PolicyRole, *, gradient: bool) -> None:
        """See `LearnerEngine.keep_step`."""

    def _paths_for(self, *, gradient: bool) -> Paths:
        """Without a gradient nothing is recomputed, so prompts can be shared even with gradient checkpointing."""
        return self.paths if gradient else replace(self.paths, sharing=self._sharing)

    def _takes_many_texts(self) -> bool:
        """True if one kernel computes the attention of many texts here, in the format of this model's products."""
        model = self._weights.model
        with self._weights.acting(dropout=False):
            rounding = torch.is_autocast_enabled(model.device.type)
            dtype = torch.get_autocast_dtype(model.device.type) if rounding else model.dtype
        size = head_size(self._decoder.config)
        return self._decoder.takes_text_masks and varlen.suits(size, dtype, model.device)

    def reference(self) -> Decoder:
        """The decoder of the reference policy."""
        if self._weights.reference_model is self._decoder.model:
            return self._decoder
        if self._reference_decoder is None:
            self._reference_decoder = Decoder(self._weights.reference_model)
        return self._reference_decoder
