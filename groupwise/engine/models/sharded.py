"""Reads tensors whole that are sharded over learners (`groupwise.engine.learner.fsdp`): for files, fingerprints and transfers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class FullTensors(Mapping[str, Tensor]):
    """Whole tensors in main memory. Each is gathered from all learners' shards, and rounded if a format is given, when it is read.

    If tensors are sharded, all learners must read the same ones in the same order.
    """

    def __init__(self, tensors: Mapping[str, Tensor], rounding: torch.dtype | None = None) -> None:
        self._tensors = tensors
        self._rounding = rounding

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name].detach()
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
        return whole.to("cpu", self._rounding if whole.is_floating_point() else None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def contribute_shards(self) -> None:
        """Contribute this learner's shards while another learner reads all tensors."""
        for _ in full_tensors(self._tensors):
            pass


def full_tensors(tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Each tensor whole, on its device; if they are sharded, all learners do this together."""
    for tensor in tensors.values():
        yield tensor.full_tensor() if is_sharded(tensor) else tensor


def shard_of(whole: Tensor, sharded: Tensor) -> Tensor:
    """The shard of `whole` that this learner has of `sharded`; all of it if that is not sharded."""
    if not is_sharded(sharded):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = sharded.device_mesh, sharded.placements
    return distribute_tensor(whole.to(sharded.device), mesh, placements, src_data_rank=None)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """True if each learner holds a shard of the tensor. Its class takes a second to import, so no tensor is one before that."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
