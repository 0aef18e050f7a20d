"""Log-probabilities and entropies of given tokens from their logits, and the gradient with respect to the logits, chunk by chunk.

With logits z (divided by the temperature T), probabilities p, entropy H and the rows of the head's weight W, the gradients with respect
to the head's input are `d log p(target) = (W[target] − p W) / T` and `dH = −(p (log p + H)) W / T`. If the weight is frozen, the forward
pass computes them while it has the logits, and the backward pass only scales them. Where places have several targets, `− p W / T` is
computed once for them, and the backward pass adds `W[target] / T`.

One kernel turns logits into these numbers and p in place: Triton's on a GPU, numba's in a process with one thread on a CPU. Elsewhere torch
does so for a few rows in float32 at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from groupwise.engine.learner.targets import Targets
from groupwise.engine.models.native import compiled
from groupwise.engine.models.native.facts import CHUNK
from groupwise.engine.models.native.fused import kernels_for

NEVER = -1e30
"""Replaces the logit of a token with probability 0. Unlike -inf it gives no NaN in the entropy and its gradient."""
ROWS_IN_CACHE = 16
"""Rows of float32 logits that a CPU handles at a time: 3 MB for a vocabulary of 49,152."""


@dataclass(frozen=True, slots=True)
class InputGradients:
    """Gradients with respect to the head's input, [N, H] of N targets, for a backward pass that only scales them."""

    targets: Targets
    weight_VH: Tensor
    chosen_NH: Tensor
    """Gradient with respect to log-probabilities; for places with several targets, the part that they share."""
    entropy_NH: Tensor | None

    def gradient(self, d_logprobs_N: Tensor, d_entropies_N: Tensor) -> Tensor:
        """The gradient [N, H] of the head's input."""
        if self.targets.ids_N.ndim == 1:
            d_NH = self.chosen_NH * d_logprobs_N[:, None]
        else:
            d_NH = self.chosen_NH * d_logprobs_N.sum(-1, keepdim=True)
            weights_NK = d_logprobs_N / self.targets.temperatures_N[:, None]
            for start in range(0, len(weights_NK), CHUNK):
                part = slice(start, start + CHUNK)
                rows_CKH = self.weight_VH[self.targets.ids_N[part]].to(d_NH.dtype)
                d_NH[part] += torch.einsum("ck,ckh->ch", weights_NK[part], rows_CKH)
        if self.entropy_NH is not None:
            d_NH.addcmul_(self.entropy_NH, d_entropies_N[:, None])
        return d_NH


class HeadNumbers:
    """The numbers of all targets, filled chunk by chunk, and the buffers for computing a chunk."""

    def __init__(self, input_NH: Tensor, targets: Targets, weight_VH: Tensor | None) -> None:
        """`input_NH`: the head's input, or what it is computed from. `weight_VH`: the head's weight, to compute `input_gradients`;
        None: without."""
        self._targets = targets
        count = len(input_NH)
        dtype = torch.promote_types(input_NH.dtype, torch.float32)
        self._logprobs_N = input_NH.new_empty(targets.ids_N.shape, dtype=dtype)
        self._entropies_N = input_NH.new_empty(count, dtype=dtype)
        self._right_N = input_NH.new_zeros(targets.ids_N.shape, dtype=torch.bool)
        top = (count, targets.outputs.top)
        self._top_ids_NX = input_NH.new_zeros(top, dtype=torch.long)
        self._top_logprobs_NX = input_NH.new_zeros(top, dtype=dtype)
        self.input_gradients: InputGradients | None = None
        if weight_VH is not None:
            chosen_NH = torch.empty_like(input_NH, dtype=dtype)
            entropy_NH = torch.empty_like(chosen_NH) if targets.outputs.entropy_gradient else None
            self.input_gradients = InputGradients(targets, weight_VH, chosen_NH, entropy_NH)
        on_cpu = input_NH.device.type == "cpu"
        self._rows = min(count, ROWS_IN_CACHE if on_cpu else CHUNK)
        self._buffers_2RV: Tensor | None = None

    def outputs(self) -> tuple[Tensor, ...]:
        """What an autograd function returns: the fields of `TokenNumbers`, also those that were not requested."""
        return self._logprobs_N, self._entropies_N, *self._unused()

    def constant(self) -> tuple[Tensor, ...]:
        """The `outputs` that have no gradient."""
        entropies = () if self._targets.outputs.entropy_gradient else (self._entropies_N,)
        return *entropies, *self._unused()

    def _unused(self) -> tuple[Tensor, ...]:
        return self._right_N, self._top_ids_NX, self._top_logprobs_NX

    def compute(self, start: int, end: int, logits_CV: Tensor) -> None:
        """Compute the numbers of the targets from `start` to `end`, and their gradients. May overwrite the logits."""
        gradients = self.input_gradients
        if gradients is None:
            self.overwrite(start, end, logits_CV, gradient=False)
            return
        entropy_CV = self.overwrite(start, end, logits_CV, gradient=True)
        temperatures_C1 = self._targets.temperatures_N[start:end, None]
        for into_NH, weights_CV in (
            (gradients.chosen_NH, logits_CV),
            (gradients.entropy_NH, entropy_CV),
        ):
            if into_NH is not None and weights_CV is not None:
                gradients_CH = weights_CV @ gradients.weight_VH
                torch.div(gradients_CH, temperatures_C1, out=into_NH[start:end]).neg_()

    def overwrite(
        self, start: int, end: int, logits_CV: Tensor, *, gradient: bool
    ) -> Tensor | None:
        """Compute the numbers of the targets from `start` to `end`. With `gradient`, p overwrites their logits, less 1 at the target if
        there is one at each place; returns p (log p + H) in the logits' format if entropies have a gradient."""
        targets = self._targets
        entropy = gradient and targets.outputs.entropy_gradient
        entropy_CV = torch.empty_like(logits_CV) if entropy else None
        kernels = _kernels_for(logits_CV)
        if kernels is not None:
            part = targets.part(start, end)
            self._compute_by_kernel(
                kernels, slice(start, end), part, logits_CV, entropy_CV, gradient=gradient
            )
            return entropy_CV
        for first in range(start, end, self._rows):
            last = min(first + self._rows, end)
            chunk = slice(first - start, last - start)
            self._compute_rows(
                slice(first, last),
                targets.part(first, last),
                logits_CV[chunk],
                None if entropy_CV is None else entropy_CV[chunk],
                gradient=gradient,
            )
        return entropy_CV

    def _compute_by_kernel(
        self,
        kernels: ModuleType,
        indices: slice,
        targets: Targets,
        logits_CV: Tensor,
        entropy_CV: Tensor | None,
        *,
        gradient: bool,
    ) -> None:
        """Do what `_compute_rows` does, for all targets of a chunk."""
        if targets.withheld_X2 is not None:
            known_X2 = targets.withheld_X2[targets.withheld_X2[:, 1] < logits_CV.shape[1]]
            logits_CV[known_X2[:, 0], known_X2[:, 1]] = -torch.inf
        single = targets.ids_N.ndim == 1
        ids_CK = targets.ids_N[:, None] if single else targets.ids_N
        temperatures_C1 = targets.temperatures_N[:, None]
        # The kernel overwrites the logits.
        chosen_CK = logits_CV.gather(1, ids_CK) / temperatures_C1
        if targets.outputs.top:
            top_CX, self._top_ids_NX[indices] = logits_CV.topk(targets.outputs.top, -1)
            self._top_logprobs_NX[indices] = top_CX / temperatures_C1
        normaliser_C, self._entropies_N[indices], likeliest_C = kernels.head_numbers(
            logits_CV,
            targets.temperatures_N,
            targets.ids_N if single else None,
            gradient=gradient,
            entropy_CV=entropy_CV,
        )
        logprobs_CK = chosen_CK - normaliser_C[:, None]
        self._logprobs_N[indices] = logprobs_CK.view_as(targets.ids_N)
        self._right_N[indices] = (likeliest_C[:, None] == ids_CK).view_as(targets.ids_N)
        self._top_logprobs_NX[indices] -= normaliser_C[:, None]

    def _compute_rows(
        self,
        indices: slice,
        targets: Targets,
        logits_RV: Tensor,
        entropy_RV: Tensor | None,
        *,
        gradient: bool,
    ) -> None:
        """Compute the numbers of a few targets. With `gradient`, overwrite the logits with the factors of the head's weight rows."""
        if self._buffers_2RV is None:
            self._buffers_2RV = self._entropies_N.new_empty(2, self._rows, logits_RV.shape[1])
        scaled_RV, probabilities_RV = self._buffers_2RV[:, : len(logits_RV)]
        scaled_RV.copy_(logits_RV).div_(targets.temperatures_N[:, None])
        if targets.withheld_X2 is not None:
            known_X2 = targets.withheld_X2[targets.withheld_X2[:, 1] < scaled_RV.shape[1]]
            scaled_RV[known_X2[:, 0], known_X2[:, 1]] = NEVER
        torch.softmax(scaled_RV, -1, out=probabilities_RV)
        # Computed from the largest logit, whose probability is at least 1 / V; those of others may be 0 in float32.
        normaliser_R = scaled_RV.amax(-1).sub_(probabilities_RV.amax(-1).log_())
        single = targets.ids_N.ndim == 1
        ids_RK = targets.ids_N[:, None] if single else targets.ids_N
        entropies_R = normaliser_R - torch.linalg.vecdot(probabilities_RV, scaled_RV)
        logprobs_RK = scaled_RV.gather(1, ids_RK) - normaliser_R[:, None]
        self._logprobs_N[indices] = logprobs_RK.view_as(targets.ids_N)
        self._entropies_N[indices] = entropies_R
        if targets.outputs.accuracy:
            right_RK = scaled_RV.argmax(-1)[:, None] == ids_RK
            self._right_N[indices] = right_RK.view_as(targets.ids_N)
        if targets.outputs.top:
            top_RX, self._top_ids_NX[indices] = scaled_RV.topk(targets.outputs.top, -1)
            self._top_logprobs_NX[indices] = top_RX - normaliser_R[:, None]
        if entropy_RV is not None:
            scaled_RV.sub_((normaliser_R - entropies_R)[:, None])
            torch.mul(scaled_RV, probabilities_RV, out=entropy_RV)
        if gradient:
            if single:
                ones_R1 = torch.ones_like(ids_RK, dtype=probabilities_RV.dtype)
                probabilities_RV.scatter_add_(1, ids_RK, -ones_R1)
            logits_RV.copy_(probabilities_RV)


def _kernels_for(logits_CV: Tensor) -> ModuleType | None:
    """The kernels that compute with such logits; None if torch's operations do."""
    if logits_CV.device.type == "cpu":
        return compiled if compiled.suits(logits_CV) else None
    return kernels_for(logits_CV)
