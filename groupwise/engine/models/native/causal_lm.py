"""The modules of a Llama, Mistral, Qwen2 or Qwen3: weights by the names of transformers' files, and the plain forward pass over them.

Transformers' own modules take seconds to import. These have the same names, shapes and arithmetic, so adapters and checkpoints fit both.
`groupwise.engine.models.load.load_base` builds them for models that `groupwise.engine.models.decoder_shapes` can read. The native engines
read only the weights. The forward pass is for what they do not compute, such as dropout or an adapter on the output head, and is called as
transformers' is (`groupwise.engine.models.decoder`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from groupwise.engine.models.native.weight_cache import WeightCache

    CausalModel: TypeAlias = "CausalLM | PreTrainedModel"
    """A model that adapters change or that is sampled: in our own modules, or in those of transformers."""

DEFAULT_STOP = {"llama": 2, "mistral": 2}
"""The id of the end token that transformers' configs have for these families if config.json names none."""


@dataclass(slots=True)
class CausalLMConfig:
    """The settings of a model, under the names that transformers' configs use."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    tie_word_embeddings: bool
    attention_biases: tuple[bool, bool]
    """Whether queries, keys and values have a bias, and whether the output product has one."""
    mlp_bias: bool
    eos_token_id: int | list[int] | None
    _name_or_path: str
    layer_types: None = None
    hidden_act: str = "silu"
    sliding_window: None = None
    _attn_implementation: str = "sdpa"
    _experts_implementation: str | None = None

    def get_text_config(self) -> CausalLMConfig:
        """This config, which has no other parts."""
        return self


def config_from_json(content: Mapping[str, Any], name: str) -> CausalLMConfig:
    """The config in a config.json that `groupwise.engine.models.decoder_shapes.read_config` accepts, with transformers' defaults.

    `name`: where the model's files are.
    """
    family, heads = content["model_type"], content["num_attention_heads"]
    rope = content.get("rope_parameters") or content.get("rope_scaling") or {}
    attention_bias = family in ("llama", "qwen3") and content.get("attention_bias", False)
    return CausalLMConfig(
        model_type=family,
        vocab_size=content["vocab_size"],
        hidden_size=content["hidden_size"],
        intermediate_size=content["intermediate_size"],
        num_hidden_layers=content["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=content["num_key_value_heads"],
        head_dim=content.get("head_dim") or content["hidden_size"] // heads,
        rms_norm_eps=content.get("rms_norm_eps", 1e-6),
        rope_parameters={
            "rope_theta": content.get("rope_theta", 10_000.0),
            **rope,
            "rope_type": rope.get("rope_type", rope.get("type", "default")),
        },
        tie_word_embeddings=content["tie_word_embeddings"],
        attention_biases=(attention_bias or family == "qwen2", attention_bias),
        mlp_bias=family == "llama" and content.get("mlp_bias", False),
        eos_token_id=content.get("eos_token_id", DEFAULT_STOP.get(family)),
        _name_or_path=name,
    )


class RMSNorm(nn.Module):
    """The root-mean-square norm, computed in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta"))
        self.variance_epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * y.to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Cosine and sine of the angles by which queries and keys are rotated at a position."""

    attention_scaling = 1.0

    def __init__(self, config: CausalLMConfig) -> None:
        super().__init__()
        self.rope_type: str = config.rope_parameters["rope_type"]
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", _frequencies(config), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.to(x.device)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _frequencies(config: CausalLMConfig) -> Tensor:
    """The frequency of each pair of numbers of a head, in float32; scaled as Llama 3.1 does it, or linearly, if the config says so."""
    rope = config.rope_parameters
    exponents_C = torch.arange(0, config.head_dim, 2, dtype=torch.float, device="cpu")
    own_C = 1.0 / (rope["rope_theta"] ** (exponents_C / config.head_dim))
    if rope["rope_type"] == "default":
        return own_C
    slower_C = own_C / rope["factor"]
    if rope["rope_type"] == "linear":
        return slower_C
    length = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelength_C = 2 * math.pi / own_C
    found_C = torch.where(wavelength_C > length / low, slower_C, own_C)
    share_C = (length / wavelength_C - low) / (high - low)
    smooth_C = (1 - share_C) * found_C / rope["factor"] + share_C * found_C
    between_C = ~(wavelength_C < length / high) & ~(wavelength_C > length / low)
    return torch.where(between_C, smooth_C, found_C)


class Attention(nn.Module):
    """Attention with rotary positions."""

    is_causal = True

    def __init__(self, config: CausalLMConfig, index: int) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        queries, keys = size * config.num_attention_heads, size * config.num_key_value_heads
        of_inputs, of_output = config.attention_biases
        self.layer_idx, self.head_dim = index, size
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = _linear(hidden, queries, of_inputs)
        self.k_proj = _linear(hidden, keys, of_inputs)
        self.v_proj = _linear(hidden, keys, of_inputs)
        self.o_proj = _linear(queries, hidden, of_output)
        self.q_norm = self.k_norm = None
        if config.model_type == "qwen3":
            self.q_norm = RMSNorm(size, config.rms_norm_eps)
            self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], mask: Any, past_key_values: Any
    ) -> Tensor:
        # Imports transformers, so only where modules compute.
        from groupwise.engine.models.text_mask import masked_attention

        shape = (*x.shape[:-1], -1, self.head_dim)
        queries, keys = self.q_proj(x).view(shape), self.k_proj(x).view(shape)
        values = self.v_proj(x).view(shape).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = (_apply_rotary(each.transpose(1, 2), *cos_sin) for each in (queries, keys))
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_idx)
        output, _ = masked_attention(self, queries, keys, values, mask, scaling=self.head_dim**-0.5)
        return self.o_proj(output.reshape(*x.shape[:-1], -1))


def _apply_rotary(x_BJTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    first, second = x_BJTD.chunk(2, dim=-1)
    return x_BJTD * cos_BTD[:, None] + torch.cat((-second, first), dim=-1) * sin_BTD[:, None]


class MLP(nn.Module):
    """SwiGLU with its three products."""

    def __init__(self, config: CausalLMConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = _linear(hidden, inner, config.mlp_bias)
        self.up_proj = _linear(hidden, inner, config.mlp_bias)
        self.down_proj = _linear(inner, hidden, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and MLP. With `gradient_checkpointing`, a pass in training mode keeps only its input, and the backward pass repeats it."""

    gradient_checkpointing = False

    def __init__(self, config: CausalLMConfig, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, index)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], mask: Any, past_key_values: Any
    ) -> Tensor:
        if self.gradient_checkpointing and self.training:
            repeated = checkpoint(
                self._output, x, cos_sin, mask, past_key_values, use_reentrant=False
            )
            return cast("Tensor", repeated)
        return self._output(x, cos_sin, mask, past_key_values)

    def _output(
        self, x: Tensor, cos_sin: tuple[Tensor, Tensor], mask: Any, past_key_values: Any
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, mask, past_key_values)
        return x + self.mlp(self.post_attention_layernorm(x))


class DecoderStack(nn.Module):
    """Everything below the output head."""

    def __init__(self, config: CausalLMConfig) -> None:
        super().__init__()
        size = config.vocab_size, config.hidden_size
        # Without a weight it would be initialised, for which torch imports its compiler.
        self.embed_tokens = nn.Embedding(*size, _weight=torch.empty(size, device="meta"))
        self.layers = nn.ModuleList(
            DecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Any:
        """Last hidden states [B, T, H]. Without a mask each sequence is one text. `past_key_values`: a cache of
        `groupwise.engine.models.decoder`."""
        from groupwise.engine.models.text_mask import TextMask

        count = input_ids.shape[1]
        mask = TextMask(count) if attention_mask is None else attention_mask
        if position_ids is None:
            position_ids = torch.arange(count, device=input_ids.device)[None]
        x_BTH = self.embed_tokens(input_ids)
        cos_sin = self.rotary_emb(x_BTH, position_ids)
        for layer in self.layers:
            x_BTH = layer(x_BTH, cos_sin, mask, past_key_values)
        return SimpleNamespace(last_hidden_state=self.norm(x_BTH))


class CausalLM(nn.Module):
    """A decoder with its output head; built without storage, for `take_tensors`. In evaluation mode, and frozen."""

    _supports_attention_backend = True

    def __init__(self, config: CausalLMConfig, stop_ids: int | list[int] | None = None) -> None:
        """`stop_ids`: the end tokens of the model's generation config, if it has one."""
        super().__init__()
        self.config = config
        self.weight_cache: WeightCache | None = None
        """Where what is computed from these weights is cached; None if it is not."""
        self.generation_config = SimpleNamespace(eos_token_id=stop_ids)
        self.model = DecoderStack(config)
        self.lm_head = _linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.requires_grad_(False).eval()

    def take_tensors(self, tensors: Mapping[str, Tensor]) -> bool:
        """Make these tensors the weights; False, without any change, if one is missing or has another shape. Others are ignored."""
        own = dict(self.named_parameters())
        if any(
            name not in tensors or tensors[name].shape != parameter.shape
            for name, parameter in own.items()
        ):
            return False
        self.load_state_dict({name: tensors[name] for name in own}, strict=False, assign=True)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.requires_grad_(False)
        return True

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        """Logits [B, T, V]."""
        return SimpleNamespace(
            logits=self.lm_head(self.model(input_ids, **inputs).last_hidden_state)
        )

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the weights."""
        return self.model.norm.weight.dtype

    def get_decoder(self) -> DecoderStack:
        """Everything below the output head."""
        return self.model

    def get_input_embeddings(self) -> nn.Embedding:
        """The table of embeddings."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        """The output head; an adapter may be around it."""
        return self.lm_head

    def activation_checkpointing_enable(self, _: Mapping[str, Any]) -> None:
        """Have layers in training mode keep only their inputs."""
        for layer in self.model.layers:
            cast("DecoderLayer", layer).gradient_checkpointing = True


def _linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, device="meta")
