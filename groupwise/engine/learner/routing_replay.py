"""Replays the experts that a sampler chose, in the learner's passes (R3, arXiv:2510.11370).

In bfloat16, or with other kernels, a learner's router may choose other experts for a token than the sampler's did, and then the token's
log-probability differs by more than rounding. Here the router computes its scores as always, and only the result of its `topk` is replaced:
the indices by the recorded ones, the values by its own scores at these indices. So whatever it makes of them stays as it is, such as a
softmax or a normalisation, and gradients reach it as always. Tokens without a recorded choice get the router's own.

The rows must be whole: a prompt that is computed once for several completions has no single choice of experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from groupwise.core.types import RoutedExperts
from groupwise.engine.learner.layout import MicroBatch, PackedBatch
from groupwise.engine.models.experts import routed_blocks, router_shape

OWN = -1
"""Stands for a choice that the learner's router makes."""


class RoutingReplay:
    """The routers of one model."""

    def __init__(self, model: nn.Module) -> None:
        """Raises ModelError for a model whose routers cannot replay choices."""
        self._shape = router_shape(model)
        self._device = cast("Any", model).device
        self._chosen_NLK: Tensor | None = None
        for layer, block in routed_blocks(model).items():
            # Transformers calls `forward` of the object, not of its class.
            block.forward = _Routed(self, layer, block.forward)

    def replay(self, batch: MicroBatch | PackedBatch | None) -> None:
        """Use the choices of these rows in each pass from now on, also in one that is recomputed for a gradient; None: no choices."""
        if batch is None or not any(row.routed_experts for row in batch.rows):
            self._chosen_NLK = None
            return
        layers, top_k = self._shape.layers, self._shape.top_k
        chosen_STLK = torch.full((*batch.shape, layers, top_k), OWN, dtype=torch.int16)
        for row, (sequence, start) in zip(batch.rows, batch.starts, strict=True):
            _place(row.routed_experts, chosen_STLK[sequence, start:])
        self._chosen_NLK = chosen_STLK.flatten(0, 1).to(self._device)

    def chosen(self, layer: int) -> Tensor | None:
        """The recorded choices [N, K] of a layer; None without."""
        return None if self._chosen_NLK is None else self._chosen_NLK[:, layer]

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return self._shape.experts


def _place(pieces: Iterable[RoutedExperts], chosen_TLK: Tensor) -> None:
    """Copy the choices of a row to its tokens."""
    for piece in pieces:
        wide = len(piece.indices) > piece.shape[0] * piece.shape[1] * piece.shape[2]
        indices = torch.frombuffer(
            bytearray(piece.indices), dtype=torch.uint16 if wide else torch.uint8
        )
        chosen_TLK[piece.first : piece.end] = indices.to(torch.int16).view(piece.shape)


class _Routed:
    """The forward pass of a module with a router and its experts."""

    def __init__(self, replay: RoutingReplay, layer: int, forward: Any) -> None:
        self._replay, self._layer, self._forward = replay, layer, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        chosen_NK = self._replay.chosen(self._layer)
        if chosen_NK is None:
            return self._forward(*args, **kwargs)
        with _RecordedTopK(chosen_NK, self._replay.experts) as replaced:
            output = self._forward(*args, **kwargs)
        assert replaced.count == 1, f"layer {self._layer} chose its experts {replaced.count} times"
        return output


class _RecordedTopK(TorchFunctionMode):
    """Replaces the result of the `topk` by which a router chooses among all experts of its layer."""

    def __init__(self, chosen_NK: Tensor, experts: int) -> None:
        super().__init__()
        self._chosen_NK, self._experts = chosen_NK, experts
        self.count = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk":
            return result
        scores, chosen_NK = args[0], self._chosen_NK
        if result.indices.shape != chosen_NK.shape or scores.shape[-1] != self._experts:
            return result  # such as one among groups of experts
        self.count += 1
        indices_NK = torch.where(chosen_NK == OWN, result.indices, chosen_NK.long())
        return torch.return_types.topk((scores.gather(-1, indices_NK), indices_NK))
