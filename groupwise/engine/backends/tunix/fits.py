"""Checks that Tunix computes a model as transformers does, and can read its files, before a worker is started.

Tunix reads the parts of a model that it supports and silently ignores the rest: a config key that changes the computation, an unknown
tensor, a number format that it reads as another. So this module refuses everything that Tunix does not compute, by the model's config (as
transformers completes it) and by the headers of its files. It reads no weights, except embeddings that are stored twice.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.core.errors import ModelError, UsageError
from groupwise.engine.backends.tunix.messages import Open
from groupwise.engine.models.files import files_in_index

HfConfig = Mapping[str, Any]
"""The config of a model's text part: `config.json` with transformers' defaults for its type."""
Shape = tuple[int, ...]

TORCH = "Leave model.backend out to train it with torch."
GEMMA3_PATTERN = 6
"""In Tunix, one layer in this many has full attention."""

SILU = {"hidden_act": "silu"}
COMPUTED: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {
        "tie_word_embeddings": True,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
    },
    "llama": {**SILU, "attention_bias": False, "mlp_bias": False},
    "qwen2": SILU,
    "qwen3": {**SILU, "attention_bias": False},
}
"""Keys that change transformers' computation, by `model_type`, each with the only value that Tunix supports."""

_ATTENTION = tuple(f"self_attn.{letter}_proj" for letter in "qkvo")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
FORMATS = ("BF16", "F16", "F32", "F64")
"""Number formats that Tunix reads, by safetensors' names."""
OF_PICTURES = ("vision_tower.", "multi_modal_projector.")
"""Prefixes of tensors of the image part of a model."""
NO_WEIGHT = re.compile(r".*rotary_emb\.inv_freq")
"""Matches tensors in older files that transformers ignores as well."""
TEXT = "language_model."
"""Prefix of the text part's tensors in a Gemma 3 that accepts images."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def check(order: Open) -> None:
    """Raise `ModelError` for a model that Tunix would compute differently, or files that it would misread; UsageError for a mesh that does
    not divide the model."""
    check_unread(order.text, order.mesh, order.layers)
    check_files(Path(order.model), order.text)


def check_unread(hf_config: HfConfig, mesh: tuple[int, int], layers: Sequence[str]) -> None:
    """Run the checks that need no weights. `layers` are transformers' names of the layers that get an adapter."""
    check_description(hf_config)
    check_mesh(hf_config, mesh)
    check_layers(hf_config, layers)


# --- the model's config ---------------------------------------------------------------------------


def check_description(hf_config: HfConfig) -> None:
    """Raise `ModelError` for a model that Tunix does not support, or computes differently from transformers."""
    kind = str(hf_config.get("model_type"))
    if kind not in COMPUTED:
        raise ModelError(
            f"model.backend tunix has no models of the type {kind!r}; it has: {', '.join(COMPUTED)}. {TORCH}"
        )
    for key, value in COMPUTED[kind].items():
        actual = hf_config.get(key, value)
        if (actual or None) != (value or None):
            raise _unsupported_value(kind, key, actual, f"has {value!r} alone")
    _check_positions(kind, hf_config)
    tunix = ["full_attention"] * hf_config["num_hidden_layers"]
    if kind == "gemma3_text":
        tunix = [
            "full_attention" if index % GEMMA3_PATTERN == 0 else "sliding_attention"
            for index in range(1, len(tunix) + 1)
        ]
    actual = hf_config.get("layer_types") or tunix
    if list(actual) != tunix:
        number = next(
            position for position, (a, b) in enumerate(zip(actual, tunix, strict=True)) if a != b
        )
        raise _unsupported_value(kind, f"layer_types[{number}]", actual[number], f"has {tunix[number]} there")  # fmt: skip
    if kind == "gemma3_text":
        scalar, head = hf_config["query_pre_attn_scalar"], hf_config["head_dim"]
        width = hf_config["hidden_size"] // hf_config["num_attention_heads"]
        if scalar not in (head, width):
            raise _unsupported_value(
                kind, "query_pre_attn_scalar", scalar, f"has {head} (head_dim) and {width} (hidden_size by heads)"
            )  # fmt: skip


def _check_positions(kind: str, hf_config: HfConfig) -> None:
    ropes: dict[str, Any] = hf_config["rope_parameters"]
    nested: dict[str, dict[str, Any]] = {k: v for k, v in ropes.items() if isinstance(v, dict)}
    for name, rope in (nested or {"": ropes}).items():
        scaled = rope.get("rope_type", "default")
        if scaled != "default" and (name, scaled) != ("full_attention", "linear"):
            raise ModelError(
                f"The positions of this model are scaled ({scaled}), which Tunix does not compute, so that it would be another model. "
                f"{TORCH}"
            )
        if (share := rope.get("partial_rotary_factor") or 1) != 1:
            raise _unsupported_value(kind, "partial_rotary_factor", share, "has 1 alone")


def _unsupported_value(kind: str, key: str, actual: Any, tunix: str) -> ModelError:
    return ModelError(
        f"{key} of this model is {actual!r}, but Tunix's {kind} {tunix}, so that it would be another model. {TORCH}"
    )


# --- the mesh -------------------------------------------------------------------------------------


def check_mesh(hf_config: HfConfig, mesh: tuple[int, int]) -> None:
    """Raise UsageError if the mesh's devices do not divide the model's axes evenly."""
    kind = hf_config["model_type"]
    axes = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
    sizes: dict[str, int] = {key: hf_config[key] for key in axes}
    sizes["num_key_value_heads"] = _kv_heads(hf_config)
    fsdp, tp = mesh
    by_tp = {**sizes, "head_dim": _head_size(hf_config)} if kind == "qwen3" else sizes
    if kind == "gemma3_text" and sizes["num_key_value_heads"] == 1:
        by_tp.pop("num_key_value_heads")  # each device holds a single key head whole
    for axis, parts, divided in (("fsdp", fsdp, {"hidden_size": sizes["hidden_size"]}), ("tp", tp, by_tp)):  # fmt: skip
        indivisible = [f"{key} is {size}" for key, size in divided.items() if size % parts]
        if indivisible:
            raise UsageError(
                f"model.mesh is {list(mesh)}: its {axis} of {parts} does not divide this model, whose "
                f"{', '.join(indivisible)}. Take another number of devices for {axis}."
            )


def _head_size(hf_config: HfConfig) -> int:
    return hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"]


def _kv_heads(hf_config: HfConfig) -> int:
    return hf_config.get("num_key_value_heads") or hf_config["num_attention_heads"]


# --- the adapted layers ---------------------------------------------------------------------------


def check_layers(hf_config: HfConfig, layers: Sequence[str]) -> None:
    """Raise `ModelError` for layers that Tunix cannot adapt, or that share one weight in Tunix with layers that get no adapter."""
    adaptable = [*_ATTENTION, *_MLP]
    parts = [path.rpartition("layers.")[2].partition(".") for path in layers]
    for (number, _, part), layer in zip(parts, layers, strict=True):
        if not number.isdecimal() or part not in adaptable:
            raise ModelError(
                f"lora.target_modules has {layer}, which the backend tunix does not adapt; it adapts: {', '.join(adaptable)}."
            )
    adapted = {(number, part) for number, _, part in parts}
    fused: tuple[str, ...] = ()
    if hf_config["model_type"] == "gemma3_text":
        # In Tunix one weight holds keys and values; with equally many heads it holds queries as well.
        same_heads = _kv_heads(hf_config) == hf_config["num_attention_heads"]
        fused = _ATTENTION[0 if same_heads else 1 : 3]
    for number, part in sorted(adapted):
        if part in fused and any((number, sibling) not in adapted for sibling in fused):
            raise ModelError(
                f"lora.target_modules has {part}, which is one weight with others in Tunix ({', '.join(fused)}): take all or none."
            )


# --- the files ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, as its header describes it."""

    file: Path
    number: str
    """Its number format, such as BF16."""
    shape: Shape
    begin: int
    """Offset of its data from the start of the file, in bytes; `end` likewise."""
    end: int
    first: str
    """The format of the file's first tensor; Tunix reads all tensors of the file in it."""


def check_files(folder: Path, hf_config: HfConfig) -> None:
    """Raise `ModelError` unless the files hold every weight of the config, in its shape and in a format that Tunix reads, and no weights
    that Tunix would ignore."""
    kind, shapes = hf_config["model_type"], expected_shapes(hf_config)
    headers = _read_headers(folder, TEXT if kind == "gemma3_text" else "")
    if missing := sorted(set(shapes) - set(headers)):
        raise ModelError(
            f"{len(missing)} weights are missing in {folder}: {', '.join(missing[:4])}."
        )
    extra = sorted(set(headers) - set(shapes) - {HEAD})
    if extra:
        raise ModelError(
            f"{folder} holds {len(extra)} weights that Tunix's {kind} has no place for: {', '.join(extra[:4])}. {TORCH}"
        )
    for name, shape in shapes.items():
        stored = headers[name]
        if stored.shape != shape:
            raise ModelError(
                f"{name} in {stored.file} has the shape {list(stored.shape)}, but its config.json says {list(shape)}."
            )
        if stored.number not in FORMATS:
            raise ModelError(
                f"{name} in {stored.file} holds numbers in the format {stored.number}; Tunix reads {', '.join(FORMATS)}. {TORCH}"
            )
        if stored.number != stored.first:
            raise ModelError(
                f"{stored.file} holds numbers in several formats ({stored.first} first, but {name} in {stored.number}), and Tunix would "
                "read all as the first. Save the model in one: load it with transformers in that dtype, and save_pretrained. Or leave "
                "model.backend out to train it with torch."
            )
    if (
        HEAD in headers
        and HEAD not in shapes
        and _read_bytes(headers[HEAD]) != _read_bytes(headers[EMBEDDING])
    ):
        raise ModelError(
            f"tie_word_embeddings of this model is true, but {folder} holds a {HEAD} that is not its embedding, which Tunix would leave "
            f"out. {TORCH}"
        )


def expected_shapes(hf_config: HfConfig) -> dict[str, Shape]:
    """Transformers' names of a model's weights in files, with their shapes."""
    hidden, inner = hf_config["hidden_size"], hf_config["intermediate_size"]
    head = _head_size(hf_config)
    queries, keys = head * hf_config["num_attention_heads"], head * _kv_heads(hf_config)
    layer: dict[str, Shape] = {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    match hf_config["model_type"]:
        case "gemma3_text":
            norms = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
            layer |= {f"{name}.weight": (hidden,) for name in norms}
            layer |= {f"self_attn.{name}_norm.weight": (head,) for name in "qk"}
        case "qwen3":
            layer |= {f"self_attn.{name}_norm.weight": (head,) for name in "qk"}
        case "qwen2":
            sizes = {"q": queries, "k": keys, "v": keys}
            layer |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
        case _:
            pass
    shapes: dict[str, Shape] = {
        f"model.layers.{number}.{name}": shape
        for number in range(hf_config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    table = (hf_config["vocab_size"], hidden)
    shapes |= {EMBEDDING: table, "model.norm.weight": (hidden,)}
    return shapes if hf_config.get("tie_word_embeddings") else {**shapes, HEAD: table}


def _read_headers(folder: Path, prefix: str) -> dict[str, Stored]:
    """The tensors of the text part in all files that Tunix reads, by their names without prefix.

    Raises ModelError if transformers would read other files.
    """
    if (folder / MODEL).is_file():
        files = {folder / MODEL}
    elif (folder / INDEX).is_file():
        names = files_in_index(folder / INDEX)
        if lost := sorted(name for name in names if not (folder / name).is_file()):
            raise ModelError(f"{folder / INDEX} names {', '.join(lost)}, which are not there.")
        files = {folder / name for name in names}
    else:
        raise ModelError(
            f"There is neither {MODEL} nor {INDEX} in {folder}, and Tunix reads no other files. Load the model with transformers and "
            "save_pretrained it, or leave model.backend out to train it with torch."
        )
    tensors: dict[str, Stored] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, stored in _tensors_in_header(file):
            name = name.removeprefix(prefix)
            if name.startswith(OF_PICTURES) or NO_WEIGHT.fullmatch(name):
                continue
            if name in tensors or file not in files:
                other = "another file, too" if name in tensors else "none of the model's files"
                raise ModelError(
                    f"{file} holds {name}, which is in {other}; Tunix reads every *.safetensors of a folder. Move that file away."
                )
            tensors[name] = stored
    return tensors


def _tensors_in_header(file: Path) -> list[tuple[str, Stored]]:
    """The tensors in a safetensors file's header. The file has the header's size (8 bytes), the header as JSON, then the tensors' data."""
    entries: list[tuple[str, Stored]] = []
    with file.open("rb") as content:
        try:
            (size,) = struct.unpack("<Q", content.read(8))
            header: dict[str, Any] = json.loads(content.read(size))
            tensors = {name: info for name, info in header.items() if name != "__metadata__"}
            first = next((info["dtype"] for info in tensors.values()), "")
            for name, info in tensors.items():
                begin, end = (8 + size + offset for offset in info["data_offsets"])
                stored = Stored(file, info["dtype"], tuple(info["shape"]), begin, end, first)
                entries.append((name, stored))
        except (struct.error, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{file} is not a safetensors file: {error}. Fetch it again."
            ) from error
    if any(stored.end > file.stat().st_size for _, stored in entries):
        raise ModelError(f"{file} is shorter than its header says. Fetch it again.")
    return entries


def _read_bytes(stored: Stored) -> bytes:
    with stored.file.open("rb") as content:
        content.seek(stored.begin)
        return content.read(stored.end - stored.begin)
