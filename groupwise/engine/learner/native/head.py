"""Log-probabilities and entropies of given tokens after the last layer, with their gradients, without keeping logits.

With logits z (divided by the temperature T), probabilities p, entropy H and the rows of the head's weight W, the gradients with respect
to the head's input are `d log p(target) = (W[target] − p W) / T` and `dH = −(p (log p + H)) W / T`. The forward pass computes them
while it has the logits; the backward pass only scales them. Where places have several targets, `− p W / T` is computed once for them, and
the backward pass adds `W[target] / T`.

On a GPU one Triton kernel turns logits into these numbers and p in place; elsewhere torch does so for a few rows in float32 at a time.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from groupwise.engine.learner.forward import Targets
from groupwise.engine.learner.native.elementwise import add_norm_gradient, norm_scale
from groupwise.engine.models.logprobs import NEVER, TokenNumbers
from groupwise.engine.models.native.facts import CHUNK
from groupwise.engine.models.native.fused import kernels_for
from groupwise.engine.models.native.weights import NativeModel

ROWS_IN_CACHE = 16
"""Rows of float32 logits that a CPU handles at a time: 3 MB for a vocabulary of 49,152."""


def token_numbers(model: NativeModel, residual_NH: Tensor, targets: Targets) -> TokenNumbers:
    """The numbers of the targets, from the residual stream [N, H] after all layers.

    They equal those of `groupwise.engine.models.logprobs.token_logprobs`.
    """
    gradient = torch.is_grad_enabled() and residual_NH.requires_grad
    logprobs_N, entropies_N, right_N, *top = _Head.apply(residual_NH, model, targets, gradient)  # pyright: ignore[reportGeneralTypeIssues]
    right = right_N if targets.outputs.accuracy else None
    return TokenNumbers(logprobs_N, entropies_N, right, *(top if targets.outputs.top else ()))


class _Head(torch.autograd.Function):
    """Final norm and head; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any, residual_NH: Tensor, model: NativeModel, targets: Targets, gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        numbers = _HeadNumbers(model, residual_NH, targets, gradient)
        for start in range(0, len(residual_NH), CHUNK):
            numbers.compute(start, min(start + CHUNK, len(residual_NH)))
        ctx.model, ctx.slopes = model, (numbers.chosen_slopes_NH, numbers.entropy_slopes_NH)
        ctx.targets = targets
        ctx.save_for_backward(residual_NH)
        unused = (numbers.right_N, numbers.top_ids_NX, numbers.top_logprobs_NX)
        # One call: each replaces what an earlier one has marked.
        constant = () if targets.outputs.entropy_gradient else (numbers.entropies_N,)
        ctx.mark_non_differentiable(*unused, *constant)
        return numbers.logprobs_N, numbers.entropies_N, *unused

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        d_logprobs_N, d_entropies_N, *_ = grad_outputs
        (residual_NH,) = ctx.saved_tensors
        model: NativeModel = ctx.model
        chosen_NH, entropy_NH = ctx.slopes
        targets: Targets = ctx.targets
        if targets.ids_N.ndim == 1:
            d_NH = chosen_NH * d_logprobs_N[:, None]
        else:
            d_NH = chosen_NH * d_logprobs_N.sum(-1, keepdim=True)
            weights_NK = d_logprobs_N / targets.temperatures_N[:, None]
            for start in range(0, len(weights_NK), CHUNK):
                part = slice(start, start + CHUNK)
                rows_CKH = model.head.weight_OI[targets.ids_N[part]].to(d_NH.dtype)
                d_NH[part] += torch.einsum("ck,ckh->ch", weights_NK[part], rows_CKH)
        if entropy_NH is not None:
            d_NH.addcmul_(entropy_NH, d_entropies_N[:, None])
        d_residual_NH = torch.zeros_like(residual_NH)
        scale_N1 = norm_scale(residual_NH, model.shape.epsilon)
        add_norm_gradient(d_residual_NH, d_NH, residual_NH, scale_N1, model.norm_H)
        return d_residual_NH, None, None, None


class _HeadNumbers:
    """The results, filled chunk by chunk, and the buffers for computing a chunk."""

    def __init__(
        self, model: NativeModel, residual_NH: Tensor, targets: Targets, gradient: bool
    ) -> None:
        self._model, self._residual_NH, self._targets = model, residual_NH, targets
        count = len(residual_NH)
        self.logprobs_N = residual_NH.new_empty(targets.ids_N.shape)
        self.entropies_N = residual_NH.new_empty(count)
        self.right_N = residual_NH.new_zeros(targets.ids_N.shape, dtype=torch.bool)
        self.top_ids_NX = residual_NH.new_zeros((count, targets.outputs.top), dtype=torch.long)
        self.top_logprobs_NX = residual_NH.new_zeros((count, targets.outputs.top))
        self.chosen_slopes_NH = torch.empty_like(residual_NH) if gradient else None
        entropy = gradient and targets.outputs.entropy_gradient
        self.entropy_slopes_NH = torch.empty_like(residual_NH) if entropy else None
        rows = min(count, ROWS_IN_CACHE if residual_NH.device.type == "cpu" else CHUNK)
        self._kernels = kernels_for(residual_NH)
        rows = 0 if self._kernels is not None else rows
        self._scaled_RV = residual_NH.new_empty(rows, model.shape.vocabulary)
        self._probabilities_RV = torch.empty_like(self._scaled_RV)

    def compute(self, start: int, end: int) -> None:
        """Compute the numbers of the targets from `start` to `end`."""
        model, targets = self._model, self._targets
        logits_CV = model.head.many(model.normed(self._residual_NH[start:end], model.norm_H))
        entropy_CV = None if self.entropy_slopes_NH is None else torch.empty_like(logits_CV)
        rows = len(self._scaled_RV)
        if self._kernels is not None:
            part = targets.part(start, end)
            self._compute_by_kernel(self._kernels, slice(start, end), part, logits_CV, entropy_CV)
        for first in range(start, end, rows) if rows else ():
            last = min(first + rows, end)
            chunk = slice(first - start, last - start)
            self._compute_rows(
                slice(first, last),
                targets.part(first, last),
                logits_CV[chunk],
                None if entropy_CV is None else entropy_CV[chunk],
            )
        temperatures_C1 = targets.temperatures_N[start:end, None]
        for slopes_NH, weights_CV in (
            (
                self.chosen_slopes_NH,
                logits_CV,
            ),  # now p, and p - 1 at the target if it is the only one
            (self.entropy_slopes_NH, entropy_CV),
        ):
            if slopes_NH is not None and weights_CV is not None:
                slopes_CH = weights_CV @ model.head.weight_OI
                torch.div(slopes_CH, temperatures_C1, out=slopes_NH[start:end]).neg_()

    def _compute_by_kernel(
        self,
        kernels: ModuleType,
        indices: slice,
        targets: Targets,
        logits_CV: Tensor,
        entropy_CV: Tensor | None,
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
            top_CX, self.top_ids_NX[indices] = logits_CV.topk(targets.outputs.top, -1)
            self.top_logprobs_NX[indices] = top_CX / temperatures_C1
        normaliser_C, self.entropies_N[indices], likeliest_C = kernels.head_numbers(
            logits_CV,
            targets.temperatures_N,
            targets.ids_N if single else None,
            gradient=self.chosen_slopes_NH is not None,
            slopes_CV=entropy_CV,
        )
        logprobs_CK = chosen_CK - normaliser_C[:, None]
        self.logprobs_N[indices] = logprobs_CK.view_as(targets.ids_N)
        self.right_N[indices] = (likeliest_C[:, None] == ids_CK).view_as(targets.ids_N)
        self.top_logprobs_NX[indices] -= normaliser_C[:, None]

    def _compute_rows(
        self, indices: slice, targets: Targets, logits_RV: Tensor, entropy_RV: Tensor | None
    ) -> None:
        """Compute the numbers of a few targets. With gradients, overwrite the logits with the factors of the head's weight rows."""
        count = len(logits_RV)
        scaled_RV, probabilities_RV = self._scaled_RV[:count], self._probabilities_RV[:count]
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
        self.logprobs_N[indices] = logprobs_RK.view_as(targets.ids_N)
        self.entropies_N[indices] = entropies_R
        if targets.outputs.accuracy:
            right_RK = scaled_RV.argmax(-1)[:, None] == ids_RK
            self.right_N[indices] = right_RK.view_as(targets.ids_N)
        if targets.outputs.top:
            top_RX, self.top_ids_NX[indices] = scaled_RV.topk(targets.outputs.top, -1)
            self.top_logprobs_NX[indices] = top_RX - normaliser_R[:, None]
        if entropy_RV is not None:
            scaled_RV.sub_((normaliser_R - entropies_R)[:, None])
            torch.mul(scaled_RV, probabilities_RV, out=entropy_RV)
        if self.chosen_slopes_NH is not None:
            if single:
                ones_R1 = torch.ones_like(ids_RK, dtype=probabilities_RV.dtype)
                probabilities_RV.scatter_add_(1, ids_RK, -ones_R1)
            logits_RV.copy_(probabilities_RV)
