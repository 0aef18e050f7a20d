"""Shards weights over learners (FSDP2), for models that do not fit on one GPU.

Each learner holds a part of every weight of the base. A layer's weights are gathered when it computes, in the forward and again in the
backward pass, and freed afterwards; embedding and head are gathered for a whole pass. If all weights are trained, gradients, moments and
updates are divided in the same way; an adapter is small, and every learner has all of it.

All learners gather at the same time, so all make equally many passes: those with fewer micro-batches make empty ones. Between two passes
each learner computes independently. Gradients are sums over all learners, never means (`groupwise.engine.learner.collective`). Files hold
whole tensors: the first learner writes them, and the others contribute their parts.

Transformers' modules compute the model, and a pass is a single call of each. The native engine is not used, because it stores weights in
its own order; nor are shared prompts, because they would need one more call in some learners.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from groupwise.core.errors import ModelError
from groupwise.core.types import PolicyRole, Row
from groupwise.engine.learner.collective import ProcessGroupGradientSum
from groupwise.engine.learner.engine import Compute, TransformersEngine
from groupwise.engine.learner.layout import Batch, PackedBatch
from groupwise.engine.learner.targets import ForwardOutputs, ForwardResult
from groupwise.engine.learner.weights import TrainedWeights

_PASS = "sharded_pass"
"""Name of the method, added to a sharded model, that makes a pass."""
_EMPTY_BATCH = PackedBatch((Row((0, 0), (0,), (1,), (0.0,), 0.0, 1.0),), (0,), ((0, 0),), (1, 2))
"""Batch for learners that have no rows left."""

Numbers = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""The fields of a `ForwardResult` in a tuple, because FSDP's hooks look for tensors in the result of a pass."""


class FsdpEngine:
    """A `groupwise.engine.learner.engine.LearnerEngine` that divides a model's weights among the learners of the process group.

    All learners create it at the same time, and then make the same calls in the same order.
    """

    def __init__(
        self,
        weights: TrainedWeights,
        device: str,
        *,
        packing: bool,
        gradient_checkpointing: bool,
    ) -> None:
        """`device`: where this learner's parts of the model go; the whole model may still be on another device."""
        self._engine = TransformersEngine(
            weights,
            packing=packing,
            gradient_checkpointing=gradient_checkpointing,
            sharing=False,
        )
        self._weights = weights
        self._left = 0
        """Passes that other learners make after this learner's last rows."""
        policy, *references = weights.models()
        if references:
            self._engine.reference()  # creates its decoder, which runs the model, while it is whole
        for model in (policy, *references):
            shard_model(cast("PreTrainedModel", model), device, weights.unsharded())

    def cut(self, rows: Sequence[Row], max_tokens: int, *, gradient: bool) -> Sequence[Batch]:
        """See `LearnerEngine.cut`. Learners agree on the number of passes, so all call it together; `rows` may be empty."""
        batches = self._engine.cut(rows, max_tokens, gradient=gradient) if rows else []
        max_batches = torch.tensor(len(batches), device=self._weights.model.device)
        dist.all_reduce(max_batches, dist.ReduceOp.MAX)
        self._left = int(max_batches) - len(batches)
        return batches

    @contextmanager
    def acting(self, role: PolicyRole, *, gradient: bool) -> Generator[Compute]:
        """See `LearnerEngine.acting`."""
        model = self._weights.model if role == "policy" else self._weights.reference_model
        with self._engine.acting(role, gradient=gradient) as compute:

            def gathered(batch: Any, outputs: ForwardOutputs) -> ForwardResult:
                return ForwardResult(*getattr(model, _PASS)(compute, batch, outputs))

            yield gathered

    def keep_step(self, role: PolicyRole, *, gradient: bool) -> None:
        """Make as many empty passes as needed to match the learners with more rows."""
        for _ in range(self._left):
            with self.acting(role, gradient=gradient) as compute:
                forward = compute(_EMPTY_BATCH, ForwardOutputs())
                if gradient:
                    (forward.logprobs_BT.sum() * 0.0).backward()
        self._left = 0


class FsdpGradientSum(ProcessGroupGradientSum):
    """Like `ProcessGroupGradientSum`, but FSDP has already summed the gradients of sharded weights in the backward pass."""

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `groupwise.engine.learner.replicas.SharedMemoryGradientSum.sum_gradients`."""
        unsharded = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
        if unsharded:
            super().sum_gradients(unsharded)


def shard_model(
    model: PreTrainedModel, device: str, unsharded: Sequence[nn.Parameter] = ()
) -> None:
    """Keep only this learner's part of each weight, on `device`; those that stay `unsharded` move there whole."""
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    layers = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ModelError(
            f"distributed.strategy is fsdp2, but nothing says which modules of a {model.config.model_type} model are its layers, so that "
            "its weights cannot be gathered one layer after another. Set distributed.strategy=ddp, for which the model must fit on one GPU."
        )
    for parameter in unsharded:
        parameter.data = parameter.data.to(mesh.device_type)
    ignored = set(unsharded)
    for layer in reversed(layers):  # inner layers before those that contain them
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=ignored)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    setattr(cast("nn.Module", model), _PASS, _forward_tuple)
    register_fsdp_forward_method(model, _PASS)


def _forward_tuple(compute: Compute, batch: Any, outputs: ForwardOutputs) -> Numbers:
    forward = compute(batch, outputs)
    return (
        forward.logprobs_BT,
        forward.entropies_BT,
        forward.right_BT,
        forward.top_ids_BTX,
        forward.top_logprobs_BTX,
    )
