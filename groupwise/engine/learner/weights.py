"""The weights that a learner trains, their publication, and the reference that they are compared with.

Tensors may be divided among learners (`groupwise.engine.learner.fsdp`); files and fingerprints are of whole ones
(`groupwise.engine.models.sharded`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from groupwise.core.types import PolicyRole
from groupwise.engine.learner.rounded_linear import round_again_in_backward
from groupwise.engine.models.config import Dtype
from groupwise.engine.models.files import disk_errors
from groupwise.engine.models.load import stored_tensors
from groupwise.engine.models.lora import AdaptedModel, copy_exactly, read_adapter
from groupwise.engine.models.lora_config import WEIGHTS
from groupwise.engine.models.native.linear import Factors
from groupwise.engine.models.native.weights import NativeModel
from groupwise.engine.models.sharded import FullTensors, is_sharded
from groupwise.engine.models.transformers_log import quiet

if TYPE_CHECKING:
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

    def unsharded(self) -> Sequence[nn.Parameter]:
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

    def contribute_shards(self) -> None:
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

    def unsharded(self) -> Sequence[nn.Parameter]:
        names = self.adapted.configs  # with a sampler's copy over the same base
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
                "lora.dropout is %g, and with dropout the model is trained by transformers' modules, which are slower than "
                "the native code, on a CPU several times; lora.dropout=0 avoids that",
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
        return FullTensors(self.parameters())

    def publish(self, folder: Path) -> None:
        self.save(folder)

    def contribute_shards(self) -> None:
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

    def unsharded(self) -> Sequence[nn.Parameter]:
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
        return FullTensors(self.parameters(), self._rounding)

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

    def contribute_shards(self) -> None:
        self._saved_tensors().contribute_shards()

    def read(self, folder: Path) -> None:
        copy_exactly(self.parameters(), stored_tensors(self.model, folder), str(folder))

    def _saved_tensors(self, rounding: torch.dtype | None = None) -> FullTensors:
        """The tensors to save, rounded to a format if one is given; a weight with two names is included once."""
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        buffers = {k: v for k, v in self.model.state_dict().items() if k not in names}
        return FullTensors({**buffers, **self.parameters()}, rounding)


def total_norm(tensors: Sequence[Tensor]) -> float:
    """Norm of all tensors together, including their parts on other learners."""
    total = torch.nn.utils.get_total_norm(tensors)
    return float(total.full_tensor() if is_sharded(total) else total)
