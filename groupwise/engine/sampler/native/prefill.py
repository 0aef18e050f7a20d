"""A prompt computed by itself, the same way for every engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.engine.models.native.facts import ROWS
from groupwise.engine.models.native.forward import Adapter, residual_after_layers, text_attention
from groupwise.engine.models.native.weights import NativeModel

Keep = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Turns keys, in float32, and values [P, J, D] of one layer into the form that an engine keeps."""


def prefilled(
    model: NativeModel, ids: Sequence[int], adapter: Adapter | None, keep: Keep
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [V] after a prompt; and the kept forms of its keys and of its values, those of all layers above each other."""
    ids_P = torch.tensor(ids, device=model.device)
    rotations_P1C = model.rotations(torch.arange(len(ids), device=model.device))
    kept: list[tuple[Tensor, Tensor]] = []

    def attend(number: int, qkv_PO: Tensor) -> Tensor:
        queries, keys, values = model.heads(model.layers[number], qkv_PO, rotations_P1C)
        kept.append(keep(keys, values))
        return text_attention(model, queries, keys, values)

    residual_PH = residual_after_layers(model, model.embedded(ids_P), attend, adapter, few=False)
    last_8H = F.pad(residual_PH[-1:], (0, 0, 0, ROWS - 1))
    keys, values = zip(*kept, strict=True)
    return model.logits(last_8H)[0], torch.stack(keys), torch.stack(values)
