"""The KL divergence between two models at many places, over the whole vocabulary, without holding the logits of either at all of them.

Both models are given as hidden states and a head. The logits of a chunk of places are computed, compared, and computed again in the
backward pass, so memory holds two chunks of logits and never two batches of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from groupwise.engine.learner.head_numbers import NEVER
from groupwise.engine.learner.targets import Distributions, Targets
from groupwise.engine.models.native.facts import CHUNK


def teacher_kl(targets: Targets, policy: Distributions) -> Tensor | None:
    """KL(policy ‖ `targets.outputs.teacher`) in nats at each place, at its temperature; only the policy has a gradient. None without one.

    Neither may draw a withheld token. If one model has more logits than the other, as models pad their vocabularies differently, the
    surplus is left out of both.
    """
    teacher = targets.outputs.teacher
    if teacher is None:
        return None
    parts: list[Tensor] = []
    for start in range(0, len(targets.temperatures_N), CHUNK):
        part = slice(start, start + CHUNK)
        places = targets.part(start, start + CHUNK)
        arguments = (
            policy.logits,
            policy.hidden_NH[part],
            teacher.logits,
            teacher.hidden_NH[part].detach(),
            places.temperatures_N,
            places.withheld_X2,
        )
        if torch.is_grad_enabled():
            parts.append(checkpoint(_chunk_kl, *arguments, use_reentrant=False))
        else:
            parts.append(_chunk_kl(*arguments))
    return torch.cat(parts)


def _chunk_kl(
    policy_logits: Callable[[Tensor], Tensor],
    policy_NH: Tensor,
    teacher_logits: Callable[[Tensor], Tensor],
    teacher_NH: Tensor,
    temperatures_N: Tensor,
    withheld_X2: Tensor | None,
) -> Tensor:
    with torch.no_grad():
        teacher_NV = teacher_logits(teacher_NH)
    policy_NV = policy_logits(policy_NH)
    shared = min(policy_NV.shape[1], teacher_NV.shape[1])
    barred_NV = None
    if withheld_X2 is not None:
        known_X2 = withheld_X2[withheld_X2[:, 1] < shared]
        barred_NV = torch.zeros(len(policy_NV), shared, dtype=torch.bool, device=policy_NV.device)
        barred_NV[known_X2[:, 0], known_X2[:, 1]] = True

    def logprobs(logits_NV: Tensor) -> Tensor:
        scaled_NV = logits_NV[:, :shared] / temperatures_N[:, None]
        if barred_NV is not None:
            scaled_NV = scaled_NV.masked_fill(barred_NV, NEVER)
        return scaled_NV.log_softmax(-1)

    teacher_NV = logprobs(teacher_NV)
    policy_NV = logprobs(policy_NV)
    return (policy_NV.exp() * (policy_NV - teacher_NV)).sum(-1)
