"""The numbers of targets from all their logits, in float64 with torch's graph: what every head must give."""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.engine.learner.targets import Targets, TokenNumbers


def plain_numbers(logits_NV: Tensor, targets: Targets) -> TokenNumbers:
    logits_NV = logits_NV.double() / targets.temperatures_N.double()[:, None]
    barred = torch.zeros_like(logits_NV, dtype=torch.bool)
    for place, token in [] if targets.withheld_X2 is None else targets.withheld_X2.tolist():
        if token < logits_NV.shape[1]:
            barred[place, token] = True
    logs_NV = logits_NV.masked_fill(barred, -torch.inf).log_softmax(-1)
    weighted_NV = logs_NV.exp() * logs_NV.masked_fill(barred, 0.0)
    ids_NK = targets.ids_N.view(len(logits_NV), -1)
    likeliest_N1 = logs_NV.argmax(-1, keepdim=True)
    top_NX, top_ids_NX = logs_NV.topk(targets.outputs.top, -1)
    return TokenNumbers(
        logs_NV.gather(1, ids_NK).view(targets.ids_N.shape),
        -weighted_NV.sum(-1),
        (likeliest_N1 == ids_NK).view(targets.ids_N.shape),
        top_ids_NX,
        top_NX.detach(),
    )
