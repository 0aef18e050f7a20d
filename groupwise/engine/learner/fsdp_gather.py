"""Gives tensors that may be divided among learners as whole ones: to write and read files, and for fingerprints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from groupwise.engine.models.lora import refuse_mismatch, shapes_of


class Whole(Mapping[str, Tensor]):
    """Whole tensors, put together from all parts one after another as they are read; in memory of the processor.

    If they are divided, all learners must read the same ones in the same order.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name].detach()
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def lend(self) -> None:
        """Take part while another learner reads all of them."""
        for tensor in self._tensors.values():
            if isinstance(tensor, DTensor):
                tensor.full_tensor()


def copy_parts(owned: Mapping[str, Tensor], given: Mapping[str, Tensor], origin: str) -> None:
    """Like `groupwise.engine.models.lora.copy_exactly`; each learner takes its part of divided tensors."""
    refuse_mismatch(shapes_of(owned), shapes_of(given), origin)
    with torch.no_grad():
        for name, tensor in owned.items():
            source = given[name]
            if isinstance(tensor, DTensor):
                source = distribute_tensor(
                    source.to(tensor.device),
                    tensor.device_mesh,
                    tensor.placements,
                    src_data_rank=None,
                )
            tensor.copy_(source)


def norm(tensors: Sequence[Tensor]) -> float:
    """Norm of all tensors together, including their parts on other learners."""
    found = torch.nn.utils.get_total_norm(tensors)
    return float(found.full_tensor() if isinstance(found, DTensor) else found)
