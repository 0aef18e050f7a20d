"""CUDA graphs without a GPU: a computation that is recorded once, operation by operation, and replayed on the same memory.

What a capture refuses is refused: results that the program waits for, results whose size depends on numbers, and anything that comes from
the program's own memory, such as a list that becomes a tensor. As after a capture, nothing of the recording's own memory holds a
result until it is replayed; it is filled with NaN, so that a replay that depends on it would show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
PROGRAM_MEMORY = ("aten::lift_fresh", "aten::pin_memory", "aten::set_", "aten::resize_")


class NotRecordableError(Exception):
    """The capture of a CUDA graph would refuse this operation."""


class FakeCudaGraph:
    """A `groupwise.engine.sampler.native.recording.Record` that counts what was recorded and replayed."""

    def __init__(self) -> None:
        self.recordings = 0
        self.replays = 0

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record `compute`."""
        self.recordings += 1
        compute()  # apart, as before a capture
        with _Recorder() as recorder:
            result = compute()
        recorder.forget()

        def replay() -> Tensor:
            self.replays += 1
            recorder.replay()
            return result

        return replay


class _Recorder(TorchDispatchMode):
    """Records operations with the tensors that they read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], dict[int, Tensor]]] = []
        self._own: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        taken = _tensors((args, kwargs))
        _refuse(func, taken)
        found = func(*args, **kwargs)
        known = {_memory(each) for each in taken}
        fresh = {n: each for n, each in enumerate(_tensors(found)) if _memory(each) not in known}
        self._own |= {_memory(each): each for each in fresh.values()}
        # What only looks at memory in another way has been done once and for all.
        if fresh or func._schema.is_mutable:
            self._steps.append((func, args, kwargs, fresh))
        return found

    def forget(self) -> None:
        """Overwrite every tensor that was made while recording."""
        for each in self._own.values():
            whole = torch.empty(0, dtype=each.dtype).set_(each.untyped_storage())
            whole.fill_(torch.nan if each.dtype.is_floating_point or each.is_complex() else 0)

    def replay(self) -> None:
        """Repeat the operations on the same memory."""
        for func, args, kwargs, fresh in self._steps:
            found = _tensors(func(*args, **kwargs))
            for number, mine in fresh.items():
                mine.copy_(found[number])


def _refuse(func: Any, taken: Sequence[Tensor]) -> None:
    name = func._schema.name
    chosen = name in ("aten::index", "aten::index_put_", "aten::index_put")
    masked = chosen and any(each.dtype in (torch.bool, torch.uint8) for each in taken[1:])
    if WAITS & set(func.tags) or masked or name in PROGRAM_MEMORY:
        raise NotRecordableError(f"{func} cannot be part of a CUDA graph")


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
