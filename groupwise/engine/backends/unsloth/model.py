"""Adapters over a model that Unsloth has loaded, its hidden states, and the engine that computes rows for the learner.

The layers are peft's; Unsloth computes them with its own kernels. An adapter's product is added to the base's rounded output, so in
bfloat16 small changes have less effect than in our own layers (`groupwise.engine.models.lora`); a run reports the share that takes effect.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from groupwise.core.errors import ModelError
from groupwise.core.types import PolicyRole, Row
from groupwise.engine.backends.unsloth import library
from groupwise.engine.learner.engine import Compute
from groupwise.engine.learner.forward import whole_rows
from groupwise.engine.learner.layout import MicroBatch, microbatches
from groupwise.engine.learner.targets import ForwardOutputs, ForwardResult
from groupwise.engine.learner.weights import TrainedWeights
from groupwise.engine.models.decoder import Cache, Decoder
from groupwise.engine.models.lora import AdaptedModel, no_target_message
from groupwise.engine.models.lora_config import AdapterConfig
from groupwise.engine.models.text_mask import TextMask


class Layer:
    """A linear layer of peft, with the interface of `groupwise.engine.models.lora_layers.ExactLoraLinear`."""

    def __init__(self, module: LoraLayer) -> None:
        self.module = module
        self.lora_A: Any = module.lora_A
        self.scaling: Mapping[str, float] = module.scaling

    def __call__(self, x: Tensor) -> Tensor:
        return cast("nn.Module", self.module)(x)

    def factors(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        """A [rank, in] and B [out, rank] of an adapter."""
        down, up = self.module.lora_A[name], self.module.lora_B[name]
        return cast("nn.Parameter", down.weight), cast("nn.Parameter", up.weight)

    def act(self, name: str | None) -> None:
        """Compute with this adapter from now on, or with the base alone if None. `requires_grad` stays as its owner has set it."""
        self.module._active_adapter = [] if name is None else [name]
        self.module._disable_adapters = name is None


class UnslothModel(AdaptedModel):
    """A frozen base with named adapters; one is active at a time, and a lock gives the model to one thread."""

    def __init__(
        self, base: PreTrainedModel, config: AdapterConfig, *, gradient_checkpointing: bool
    ) -> None:
        super().__init__(base, config)
        self._model = base
        self._alone = threading.RLock()
        try:
            self._peft: PeftModel = library.adapt(
                base, config, gradient_checkpointing=gradient_checkpointing
            )
        except ValueError as error:
            raise ModelError(no_target_message(base, str(error).rstrip("."))) from error

    @contextlib.contextmanager
    def using(self, name: str | None, *, dropout: bool = False) -> Iterator[PreTrainedModel]:
        """See `AdaptedModel.using`. Waits while another thread computes."""
        assert not dropout, "the config refuses it"
        with self._alone:
            previous = self.switch.active
            self._activate(name)
            try:
                yield self._model
            finally:
                self._activate(previous)

    def native(self, name: str) -> None:
        """None, because Unsloth's kernels compute this model."""

    def _activate(self, name: str | None) -> None:
        self.switch.active = name
        for layer in self.layers.values():
            cast("Layer", layer).act(name)

    def _inject_adapter(self, name: str, config: AdapterConfig) -> None:
        """See `AdaptedModel._inject_adapter`. The first adapter replaces the one that `library.adapt` created."""
        with self._keeping_other_adapters():
            self._peft.add_adapter(name, config.as_peft())
            if library.FIRST_ADAPTER in self._peft.peft_config:
                self._peft.set_adapter(name)  # peft warns if an active adapter is deleted
                self._peft.delete_adapter(library.FIRST_ADAPTER)
        config.target_modules = cast(
            "Any", self._peft.peft_config[name]
        ).target_modules  # all-linear, resolved
        self.configs[name] = config
        self._update_layers()
        for parameter in self.parameters(name).values():
            parameter.data = parameter.data.float()
        self._activate(self.switch.active)

    def remove(self, name: str) -> None:
        """See `AdaptedModel.remove`."""
        self.configs.pop(name, None)
        with self._keeping_other_adapters():
            for path, module in [*self.base.named_modules()]:
                if isinstance(module, LoraLayer):
                    module._active_adapter = []  # peft would activate another one, and warn about it
                    module.delete_adapter(name)
                    if not module._all_available_adapter_names():
                        self.base.set_submodule(path, module.get_base_layer())
        self._update_layers()

    @contextlib.contextmanager
    def _keeping_other_adapters(self) -> Iterator[None]:
        """Keep the other adapters trainable or not, as their owners chose; peft would train only one. The base stays frozen."""
        owned = [parameter for name in self.configs for parameter in self.parameters(name).values()]
        trained = [parameter for parameter in owned if parameter.requires_grad]
        try:
            yield
        finally:
            self.base.requires_grad_(False)
            for parameter in trained:
                parameter.requires_grad_(True)

    def _update_layers(self) -> None:
        """See `AdaptedModel._update_layers`. Also remove the config that peft stores on the base, because it is only the last adapter's."""
        vars(self.base).pop("peft_config", None)
        layers = {
            path: Layer(module)
            for path, module in self.base.named_modules()
            if isinstance(module, LoraLayer)
        }
        self.layers = cast("Any", layers)


class UnslothDecoder(Decoder):
    """Computes hidden states of whole rows only: Unsloth's attention supports only the causal mask, and has its own caches."""

    def _fuse_modules(self) -> None:
        """Keep the kernels that Unsloth has for them."""

    def _choose_attention(self) -> None:
        """Keep the attention that Unsloth has chosen."""

    def hidden(
        self, ids_BT: Tensor, positions_BT: Tensor, seen: TextMask | Tensor, cache: Cache | None
    ) -> Tensor:
        """See `Decoder.hidden`. Rows must start at position 0, with no cache."""
        assert cache is None
        return self.body(input_ids=ids_BT, use_cache=False).last_hidden_state

    def _check_caches(self) -> None:
        """Refuse models with a state, for which Unsloth's samplers have not been seen."""
        if self.has_state:
            raise ModelError(
                f"{self.config.model_type} has layers other than attention, which the backend unsloth does not train here. Leave "
                "model.backend out."
            )


class UnslothEngine:
    """A `groupwise.engine.learner.engine.LearnerEngine` over a model that Unsloth has loaded. Computes each row whole, with its prompt."""

    def __init__(self, weights: TrainedWeights) -> None:
        self._weights = weights
        self._decoder = UnslothDecoder(weights.model)

    def cut(self, rows: Sequence[Row], max_tokens: int, *, gradient: bool) -> list[MicroBatch]:
        """See `LearnerEngine.cut`."""
        return microbatches(rows, max_tokens, prompt_shared=False)

    @contextmanager
    def acting(self, role: PolicyRole, *, gradient: bool) -> Generator[Compute]:
        """See `LearnerEngine.acting`. The same kernels compute without a gradient, so log-probabilities equal those in training."""

        def compute(batch: MicroBatch, outputs: ForwardOutputs) -> ForwardResult:
            return whole_rows(self._decoder, batch, outputs)

        reference = role == "reference"
        acting = (
            self._weights.acting_reference() if reference else self._weights.acting(dropout=False)
        )
        with acting:
            library.learning(cast("PreTrainedModel", self._weights.model))
            yield compute

    def keep_step(self, role: PolicyRole, *, gradient: bool) -> None:
        """See `LearnerEngine.keep_step`. Nothing to do."""
