"""A transformers model with three operations that sampler and learner share: hidden states, logits, caches.

Both sides call the same forward pass with explicit positions, and state which keys a query sees, so sampling and training do the same
arithmetic. In every cache here a key's index is its position: prompts start at 0, and there is no padding on the left. Only without a cache
may one sequence hold several texts, each with positions from 0. Models with a state are computed text by text (`has_state`).
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from groupwise.core.errors import ModelError
from groupwise.engine.models.attention_kernels import pinned_kernels
from groupwise.engine.models.experts import all_rows, register_all_rows
from groupwise.engine.models.fused_modules import fuse
from groupwise.engine.models.text_mask import ATTENTION, TextMask

if TYPE_CHECKING:
    from groupwise.engine.models.native.causal_lm import CausalModel


def cache_keyword(body: nn.Module) -> str:
    """Name of the cache among the arguments and outputs of a transformers model: `cache` since 5.24, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(body.forward).parameters else "past_key_values"


class PromptCache:
    """Collects the keys and values of a prompt pass, gradients included; shape per layer [1, heads, P, head size], P tokens."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys.append(key)
        self.values.append(value)
        return key, value

    def get_seq_length(self, *_: Any) -> int:
        return 0


class SharedPrefixCache:
    """Makes one prompt's keys and values visible to every row of a batch, before the row's own."""

    def __init__(self, prompt: PromptCache) -> None:
        self.prompt = prompt

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        rows = key.shape[0]
        shared_key = self.prompt.keys[layer_idx].expand(rows, -1, -1, -1)
        shared_value = self.prompt.values[layer_idx].expand(rows, -1, -1, -1)
        return torch.cat((shared_key, key), dim=2), torch.cat((shared_value, value), dim=2)

    def get_seq_length(self, *_: Any) -> int:
        return self.prompt.keys[0].shape[2]


class SlotCache:
    """Preallocated keys and values for a fixed number of slots, each at its own position."""

    def __init__(self, slots: int, key_length: int) -> None:
        self.slots = slots
        self.key_length = key_length
        self.positions = torch.zeros(slots, dtype=torch.long)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def place(self, slot: int, prompt: PromptCache) -> None:
        """Copy a prompt's keys and values to the start of a slot."""
        if not self.keys:
            self.keys = [self._empty_cache_tensor(key) for key in prompt.keys]
            self.values = [self._empty_cache_tensor(value) for value in prompt.values]
        length = prompt.keys[0].shape[2]
        for layer in range(len(self.keys)):
            self.keys[layer][slot, :, :length] = prompt.keys[layer][0]
            self.values[layer][slot, :, :length] = prompt.values[layer][0]

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        rows = torch.arange(self.slots, device=key.device)
        self.keys[layer_idx][rows, :, self.positions] = key[:, :, 0]
        self.values[layer_idx][rows, :, self.positions] = value[:, :, 0]
        return self.keys[layer_idx], self.values[layer_idx]

    def get_seq_length(self, *_: Any) -> int:
        return self.key_length

    def _empty_cache_tensor(self, like: Tensor) -> Tensor:
        _, heads, _, size = like.shape
        return like.new_zeros(self.slots, heads, self.key_length, size)


Cache = PromptCache | SharedPrefixCache | SlotCache


def has_state(config: Any) -> bool:
    """True if a model has layers other than full and sliding attention, such as recurrent or convolutional ones.

    Their state is a summary of all earlier tokens, so the caches here cannot share it, nor a mask keep texts apart that follow each other.
    """
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    return bool({*kinds} - {"full_attention", "sliding_attention"})


class Decoder:
    """Hidden states and logits of one model."""

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        register_all_rows()
        self._fuse_modules()
        self.body = model.get_decoder()
        self.head = cast("nn.Module", model.get_output_embeddings())
        self.config = model.config.get_text_config()
        kinds = getattr(self.config, "layer_types", None)
        self.layer_types = set(kinds) if kinds else None
        kinds = self.layer_types or set[str]()
        self.has_state = has_state(self.config)
        self._cache_keyword = cache_keyword(self.body)
        # Models that do not list which layers have a sliding window have it in all.
        windowed = self.layer_types is None or "sliding_attention" in kinds
        self.window: int | None = getattr(self.config, "sliding_window", None) if windowed else None
        """Number of latest tokens that a layer with a sliding window sees; None: all."""
        scale = getattr(self.config, "logit_scale", None)
        divisor = getattr(self.config, "logits_scaling", None)
        self.logit_factor: float = (1.0 if scale is None else scale) / (divisor or 1.0)
        """What the model multiplies its head's output with."""
        self._logit_cap: float | None = getattr(self.config, "final_logit_softcapping", None)
        if not self.has_state:  # transformers makes their masks, for attention of its own
            self._choose_attention()
        self._check_caches()
        self._check_head()

    @property
    def device(self) -> torch.device:
        return self.model.device

    def kernels(self) -> contextlib.AbstractContextManager[object]:
        """Context manager with the attention kernels of this model. Its calls enter it; so must a backward pass that recomputes layers."""
        one = getattr(self.config, "num_key_value_heads", None) == 1
        return pinned_kernels(self.device, one_key_head=one)

    @property
    def takes_text_masks(self) -> bool:
        """True if the model's attention is that of `groupwise.engine.models.text_mask`, which needs no dense mask."""
        return self.config._attn_implementation == ATTENTION

    def hidden(
        self, ids_BT: Tensor, positions_BT: Tensor, seen: TextMask | Tensor, cache: Cache | None
    ) -> Tensor:
        """Last hidden states [B, T, H]. `seen`: the keys that a query sees; as a tensor [B, T, K], for slots, True where it sees a key.

        Without a cache the keys are the given tokens themselves, independent of their positions: a sequence may hold several texts. A model
        with a state (`has_state`) takes only sequences of one text each, without a cache.
        """
        if self.has_state:
            assert isinstance(seen, TextMask)
            assert seen.lengths is None, "a state is not kept apart in a sequence"
            assert cache is None, "a state is not shared"
            with self.kernels():
                return self.body(
                    input_ids=ids_BT, position_ids=positions_BT, use_cache=False
                ).last_hidden_state
        mask = self._attention_mask(seen, positions_BT, self.window)
        if self.window is not None and self.layer_types is not None:  # one for each kind of layer
            everything = self._attention_mask(seen, positions_BT, None)
            mask = {"full_attention": everything, "sliding_attention": mask}
        decoding = isinstance(cache, SlotCache)
        with self.kernels(), all_rows(self.config) if decoding else contextlib.nullcontext():
            output = self.body(
                input_ids=ids_BT,
                position_ids=positions_BT,
                attention_mask=mask,
                use_cache=cache is not None,
                **{self._cache_keyword: cache},
            )
        return output.last_hidden_state

    def advance(self, ids_1T: Tensor, first: int, cache: Any) -> tuple[Tensor, Any]:
        """Last hidden states [T, H] of one text's next tokens, from position `first`, and transformers' own cache after them; None: the
        text begins."""
        positions_1T = torch.arange(first, first + ids_1T.shape[1], device=self.device)[None]
        with self.kernels():
            output = self.body(
                input_ids=ids_1T,
                position_ids=positions_1T,
                use_cache=True,
                **{self._cache_keyword: cache},
            )
        return output.last_hidden_state[0], getattr(output, self._cache_keyword)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Logits [N, V] in float32, with the scaling and capping that the model's own head applies."""
        return self.unscaled_logits(hidden_NH).float() * self.logit_factor

    def unscaled_logits(self, hidden_NH: Tensor) -> Tensor:
        """Logits [N, V] that become those of `logits` when multiplied by `logit_factor`; in the head's number format unless they are
        capped. A caller may overwrite them, also before their backward pass."""
        logits_NV = self.head(hidden_NH)
        cap = self._logit_cap
        if cap is None:
            return logits_NV
        capped_NV = torch.tanh(logits_NV.float() * (self.logit_factor / cap))
        return capped_NV * (cap / self.logit_factor)

    @property
    def caps_logits(self) -> bool:
        """True if the model squashes its logits with tanh, as Gemma 2 does."""
        return self._logit_cap is not None

    def _attention_mask(
        self, seen: TextMask | Tensor, positions_BT: Tensor, window: int | None
    ) -> TextMask | Tensor:
        """The mask in the form that the model's attention takes: booleans for torch's SDPA, numbers to add to the scores otherwise."""
        if isinstance(seen, TextMask):
            seen = seen.within(window)
            if self.takes_text_masks:
                return seen
            mask_BTK = seen.dense(self.device)
        else:
            mask_BTK = seen
            if window is not None:
                keys_K = torch.arange(seen.shape[-1], device=seen.device)
                mask_BTK = seen & (positions_BT[:, :, None] - keys_K < window)
        mask_B1TK = mask_BTK[:, None]
        if self.config._attn_implementation in ("sdpa", ATTENTION):
            return mask_B1TK
        lowest = torch.finfo(self.model.dtype).min
        return torch.zeros_like(mask_B1TK, dtype=self.model.dtype).masked_fill(~mask_B1TK, lowest)

    def _fuse_modules(self) -> None:
        """On a GPU, compute each norm, SwiGLU and rotary embedding with one fused kernel."""
        fuse(self.model)

    def _choose_attention(self) -> None:
        """Have the model use the attention that takes text masks, if its code asks transformers' registry for its attention.

        Others compute their attention themselves, or by a function that is not torch's SDPA; they get dense masks.
        """
        if self.config._attn_implementation == "sdpa" and self.model._supports_attention_backend:
            self.config._attn_implementation = ATTENTION

    @torch.no_grad()
    def _check_caches(self) -> None:
        ids_1T = torch.tensor([[0, 1, 2]], device=self.device)
        positions_1T = torch.arange(3, device=self.device)[None]
        try:
            if not self.has_state:
                prompt = PromptCache()
                self.hidden(ids_1T, positions_1T, TextMask(3), prompt)
                if not prompt.keys:
                    raise ValueError("it puts no keys into a cache")
                return
            whole_TH = self.hidden(ids_1T, positions_1T, TextMask(3), None)[0]
            _, cache = self.advance(ids_1T[:, :2], 0, None)
            last_1H, _ = self.advance(ids_1T[:, 2:], 2, cache)
        except (AttributeError, TypeError, ValueError) as error:  # code of any model
            kinds = ", ".join(sorted(self.layer_types or ())) or "not listed"
            raise ModelError(
                f"The forward pass of {self.config.model_type!r} (kinds of layers: {kinds}) is not that of most models of transformers: "
                f"{error}. This version cannot sample and train it; docs/how-to/your-own-model.md lists families that work."
            ) from error
        margin = 2e-2 * float(whole_TH.abs().max())
        if not torch.allclose(whole_TH[-1:], last_1H, rtol=2e-2, atol=margin):
            raise ModelError(
                f"The model {self.config.model_type!r} computes a token after others differently than with them: its hidden states differ "
                f"by {float((whole_TH[-1] - last_1H[0]).abs().max()):.3g}, so what is sampled would not be what is trained. "
                "docs/how-to/your-own-model.md lists families that work."
            )

    @torch.no_grad()
    def _check_head(self) -> None:
        ids = torch.tensor([[0, 1, 2]], device=self.device)
        expected = self.model(input_ids=ids).logits.float()
        positions = torch.arange(3, device=self.device)[None]
        ours = self.logits(self.hidden(ids, positions, TextMask(3), None)[0])
        if not torch.allclose(
            ours, expected[0], rtol=2e-2, atol=2e-2 * float(expected.abs().max())
        ):
            raise ModelError(
                f"The output head of {self.config.model_type!r} does more than this version knows: our logits differ "
                f"from the model's own by {float((ours - expected[0]).abs().max()):.3g}."
            )
