"""The weights that a sampler serves: its own copy, which changes only through a published file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from groupwise.engine.models.load import stored_tensors
from groupwise.engine.models.lora import AdaptedModel, copy_exactly, read_adapter
from groupwise.engine.models.native.linear import Factors
from groupwise.engine.models.native.weights import NativeModel, native_model

if TYPE_CHECKING:
    from groupwise.engine.models.lora_config import AdapterConfig
    from groupwise.engine.models.native.causal_lm import CausalModel


class ServedWeights(Protocol):
    """Interface to the served weights."""

    model: CausalModel

    def read(self, folder: Path) -> None:
        """Overwrite the weights from a published folder; raises `ModelError` unless all names and shapes match."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The published tensors, as they are in memory."""
        ...

    def acting(self) -> contextlib.AbstractContextManager[object]:
        """Context manager in which the model computes with these weights."""
        ...

    def native(self, *, int8: bool = False) -> NativeModel | None:
        """The model as plain matrices, packed for decoding, with its current weights; None if it has no native form. `int8` as in
        `NativeModel.pack`."""
        ...

    def factors(self) -> dict[str, Factors]:
        """The adapter's factors for the layers of `native`, by layer name; empty without an adapter."""
        ...


class ServedAdapter:
    """The sampler's own adapter, over a base that the learner may share."""

    def __init__(
        self, adapted: AdaptedModel, name: str = "served", config: AdapterConfig | None = None
    ) -> None:
        """`name`: its name among the adapters over that base; `config`: its shape, None for the shape given with the base."""
        self.adapted = adapted
        self.name = name
        self.model = adapted.base
        adapted.add(name, trainable=False, seed=0, config=config)

    def read(self, folder: Path) -> None:
        self.adapted.write(self.name, read_adapter(folder), str(folder))

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.adapted.parameters(self.name))

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        with self.adapted.using(self.name):
            yield

    def native(self, *, int8: bool = False) -> NativeModel | None:
        return _pack(self.adapted.native(self.name), int8=int8)

    def factors(self) -> dict[str, Factors]:
        return self.adapted.low_rank(self.name)

    def remove(self) -> None:
        """Remove the adapter from the base."""
        self.adapted.remove(self.name)


class ServedModel:
    """The sampler's own copy of a whole model, for full fine-tuning and for evaluating a model without an adapter."""

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self._changed = False

    def read(self, folder: Path) -> None:
        copy_exactly(self.tensors(), stored_tensors(self.model, folder), str(folder))
        self._changed = True

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def acting(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def native(self, *, int8: bool = False) -> NativeModel | None:
        anew, self._changed = self._changed, False
        return _pack(native_model(self.model, anew=anew), int8=int8)

    def factors(self) -> dict[str, Factors]:
        return {}


def _pack(model: NativeModel | None, *, int8: bool) -> NativeModel | None:
    if model is not None:
        model.pack(int8=int8)
    return model
