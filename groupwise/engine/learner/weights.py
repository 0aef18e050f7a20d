"""The weights that a learner trains, their publication, and the reference that they are compared with.

Tensors may be divided among learners (`groupwise.engine.learner.fsdp`). `WholeTensors` and `copy_parts` handle them as whole tensors, for
files and fingerprints.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeGuard, cast

import torch
from torch import Tensor, nn

from groupwise.core.types import PolicyRole
from groupwise.engine.learner.rounded_linear import round_again_in_backward
from groupwise.engine.models.config import Dtype
from groupwise.engine.models.files import disk_errors
from groupwise.engine.models.load import stored_tensors
from groupwise.engine.models.lora import (
    AdaptedModel,
    copy_exactly,
    read_adapter,
    refuse_mismatch,
    shapes_of,
)
from groupwise.engine.models.lora_config import WEIGHTS
from groupwise.engine.models.native.linear import Factors
from groupwise.engine.models.native.weights import NativeModel
from groupwise.engine.models.transformers_log import quiet

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from transformers import PreTrainedModel

    from groupwise.engine.models.lora_config import AdapterConfig
    from groupwise.engine.models.native.causal_lm import CausalModel

logger = logging.getLogger(__name__)


class TrainedWeights(Protocol):
    """Interface to the trained weights."""

    kind: Literal["adapter", "full"]

    @property
    def model(self) -> CausalModel: ...

    @property
    def reference_model(self) -> CausalModel:
        """The model with which the reference is computed (`acting_reference`); may be the same object as `model`."""
        ...

    def models(self) -> tuple[CausalModel, ...]:
        """`model`, and `reference_model` if that is another object."""
        ...

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters by the names used in files, sorted."""
        ...

    def undivided(self) -> Sequence[nn.Parameter]:
        """Parameters that every learner keeps whole when the models' weights are divided (`groupwise.engine.learner.fsdp`)."""
        ...

    @property
    def dropout(self) -> float:
        """Share of an adapter's inputs that is dropped while dropout is on."""
        ...

    def acting(self, *, dropout: bool) -> contextlib.AbstractContextManager[object]: ...

    def acting_reference(self) -> contextlib.AbstractContextManager[object]:
        """Context manager in which `reference_model` computes as the policy that the run started from."""
        ...

    def native(self) -> NativeModel | None:
        """The model as plain matrices; None if it must be computed by modules."""
        ...

    def factors(self, role: PolicyRole) -> dict[str, Factors]:
        """The adapter's factors for the layers of `native`, by layer name; those of the policy are the trained parameters."""
        ...

    def save(self, folder: Path) -> None:
        """Write the weights in the format of peft or transformers. Raises OSError if they cannot be written."""
        ...

    def published(self) -> Mapping[str, Tensor]:
        """The trained tensors as samplers hold them: of a model that computes in bfloat16, they are rounded to it."""
        ...

    def publish(self, folder: Path) -> None:
        """Like `save`, but write the tensors of `published`."""
        ...

    def contribute_parts(self) -> None:
        """Contribute this learner's parts while another learner runs `save`, if weights are divided."""
        ...

    def read(self, folder: Path) -> None:
        """Restore the files that `save` wrote. Raises `ModelError` unless all names and shapes match."""
        ...


class TrainedAdapter:
    """An adapter over a frozen base. The reference is the plain base, or a frozen copy of the adapter that the run started from."""

    kind: Literal["adapter", "full"] = "adapter"

    def __init__(
        self,
        adapted: AdaptedModel,
        seed: int,
        start: dict[str, Tensor] | None = None,
        name: str = "policy",
        config: AdapterConfig | None = None,
    ) -> None:
        """`name`: its name among the adapters over that base; `config`: its shape, None for the shape given with the base."""
        self.adapted = adapted
        self.name = name
        self._reference: str | None = None
        adapted.add(name, trainable=True, seed=seed, config=config)
        if start is not None:
            self._reference = f"{name}-start"
            adapted.add(self._reference, trainable=False, seed=seed, config=config)
            adapted.write(self._reference, start, "the starting adapter")
            adapted.write(name, start, "the starting adapter")

    @property
    def model(self) -> CausalModel:
        return self.adapted.base

    @property
    def reference_model(self) -> CausalModel:
        return self.adapted.base

    def models(self) -> tuple[CausalModel, ...]:
        return (self.adapted.base,)

    def parameters(self) -> dict[str, nn.Parameter]:
        return self.adapted.parameters(self.name)

    def undivided(self) -> Sequence[nn.Parameter]:
        names = [self.name, *([] if self._reference is None else [self._reference])]
        return [parameter for name in names for parameter in self.adapted.parameters(name).values()]

    @property
    def dropout(self) -> float:
        return self.adapted.configs[self.name].lora_dropout

    @contextlib.contextmanager
    def acting(self, *, dropout: bool) -> Iterator[None]:
        with self.adapted.using(self.name, dropout=dropout):
            yield

    @contextlib.contextmanager
    def acting_reference(self) -> Iterator[None]:
        with self.adapted.using(self._reference):
            yield

    def native(self) -> NativeModel | None:
        if self.dropout:
            logger.warning(
                "lora.dropout is %g, and with dropout the model is trained by transformers' modules, which is slower",
                self.dropout,
            )
            return None
        return self.adapted.native(self.name)

    def factors(self, role: PolicyRole) -> dict[str, Factors]:
        name = self.name if role == "policy" else self._reference
        return {} if name is None else self.adapted.low_rank(name)

    def save(self, folder: Path) -> None:
        self.adapted.save(self.name, folder)

    def published(self) -> Mapping[str, Tensor]:
        return WholeTensors(self.parameters())

    def publish(self, folder: Path) -> None:
        self.save(folder)

    def contribute_parts(self) -> None:
        """Do nothing, because each learner has the whole adapter."""

    def read(self, folder: Path) -> None:
        copy_exactly(self.parameters(), read_adapter(folder), str(folder / WEIGHTS))

    def remove(self) -> None:
        """Remove the adapter, and the frozen copy that it started from, from the base."""
        for name in (self.name, self._reference):
            if name is not None:
                self.adapted.remove(name)


class TrainedModel:
    """All weights of a model, with a frozen copy as reference if one is needed.

    Weights and gradients are float32. Small updates would vanish in bfloat16, so it is only the format of the products: torch's autocast
    rounds a weight when it is used. No later use shares the rounded copy, because gradients of both would be added in bfloat16; nor is it
    kept for the backward pass (`groupwise.engine.learner.rounded_linear`).
    """

    kind: Literal["adapter", "full"] = "full"
    dropout = 0.0

    def __init__(
        self,
        model: CausalModel,
        reference: CausalModel | None = None,
        dtype: Dtype = "float32",
    ) -> None:
        """`dtype`: the format of products, and of publications."""
        self.model = model.requires_grad_(True)
        self._frozen = reference
        self._rounding = torch.bfloat16 if dtype == "bfloat16" else None
        if self._rounding is not None:
            round_again_in_backward(self.model)

    @property
    def reference_model(self) -> CausalModel:
        assert self._frozen is not None, "built without a reference, because beta was 0"
        return self._frozen

    def models(self) -> tuple[CausalModel, ...]:
        return (self.model,) if self._frozen is None else (self.model, self._frozen)

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(sorted(self.model.named_parameters()))

    def undivided(self) -> Sequence[nn.Parameter]:
        return ()

    def acting(self, *, dropout: bool) -> contextlib.AbstractContextManager[object]:
        if self._rounding is None:
            return contextlib.nullcontext()
        return torch.autocast(self.model.device.type, self._rounding, cache_enabled=False)

    def acting_reference(self) -> contextlib.AbstractContextManager[object]:
        return self.acting(dropout=False)

    def native(self) -> None:
        """None, because the native engine computes gradients only for adapters."""

    def factors(self, role: PolicyRole) -> dict[str, Factors]:
        return {}

    def save(self, folder: Path) -> None:
        self._write(folder, None)

    def published(self) -> Mapping[str, Tensor]:
        return WholeTensors(self.parameters(), self._rounding)

    def publish(self, folder: Path) -> None:
        self._write(folder, self._rounding)

    def _write(self, folder: Path, rounding: torch.dtype | None) -> None:
        state = {**self._saved_tensors(rounding)}
        with disk_errors(folder), quiet():
            model = cast("PreTrainedModel", self.model)  # one whose weights are trained
            model.save_pretrained(folder, state_dict=state, max_shard_size="1TB")
            if rounding is not None:  # config.json then has the format of the trained weights
                model.config.dtype = rounding
                model.config.save_pretrained(folder)

    def contribute_parts(self) -> None:
        self._saved_tensors().contribute_parts()

    def read(self, folder: Path) -> None:
        copy_parts(self.parameters(), stored_tensors(self.model, folder), str(folder))

    def _saved_tensors(self, rounding: torch.dtype | None = None) -> WholeTensors:
        """The tensors to save, rounded to a format if one is given; a weight with two names is included once."""
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        buffers = {k: v for k, v in self.model.state_dict().items() if k not in names}
        return WholeTensors({**buffers, **self.parameters()}, rounding)


class WholeTensors(Mapping[str, Tensor]):
    """Whole tensors in main memory. Each is gathered from all learners' parts, and rounded if a format is given, when it is read.

    If tensors are divided, all learners must read the same ones in the same order.
    """

    def __init__(self, tensors: Mapping[str, Tensor], rounding: torch.dtype | None = None) -> None:
        self._tensors = tensors
        self._rounding = rounding

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name].detach()
        whole = tensor.full_tensor() if is_divided(tensor) else tensor
        return whole.to("cpu", self._rounding if whole.is_floating_point() else None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def contribute_parts(self) -> None:
        """Contribute this learner's parts while another learner reads all tensors."""
        for tensor in self._tensors.values():
            if is_divided(tensor):
                tensor.full_tensor()


def copy_parts(owned: Mapping[str, Tensor], loaded: Mapping[str, Tensor], origin: str) -> None:
    """Like `groupwise.engine.models.lora.copy_exactly`; each learner copies its part of divided tensors."""
    refuse_mismatch(shapes_of(owned), shapes_of(loaded), origin)
    with torch.no_grad():
        for name, tensor in owned.items():
            source = loaded[name]
            if is_divided(tensor):
                from torch.distributed.tensor import distribute_tensor

                source = distribute_tensor(
                    source.to(tensor.device),
                    tensor.device_mesh,
                    tensor.placements,
                    src_data_rank=None,
                )
            tensor.copy_(source)


def total_norm(tensors: Sequence[Tensor]) -> float:
    """Norm of all tensors together, including their parts on other learners."""
    total = torch.nn.utils.get_total_norm(tensors)
    return float(total.full_tensor() if is_divided(total) else total)


def is_divided(tensor: Tensor) -> TypeGuard[DTensor]:
    """True if each learner holds a part of the tensor. Its class takes a second to import, so no tensor is one before that."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
