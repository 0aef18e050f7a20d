"""The config of an adapter, read from and written to the adapter_config.json of peft, and the layers of a model that it names.

Peft takes long to import, so its file is read and written here; only Unsloth gets a config of peft's own (`AdapterConfig.as_peft`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.core.errors import ModelError
from groupwise.engine.models.config import LoraConfig
from groupwise.engine.models.files import read_json

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"
UNSUPPORTED = (
    "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication", "lora_bias", "trainable_token_indices",
    "fan_in_fan_out", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config", "use_bdlora", "use_qalora",
    "velora_config",
)  # fmt: skip
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal")
"""Values of peft's `init_lora_weights` that leave the base unchanged."""
DEFAULTS: Mapping[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None, "bias": "none", "corda_config": None,
    "ensure_weight_tying": False, "eva_config": None, "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
    "layer_replication": None, "loftq_config": {}, "lora_bias": False, "lora_ga_config": None, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "monteclora_config": None, "peft_type": "LORA", "qalora_group_size": 16,
    "rank_pattern": {}, "revision": None, "trainable_token_indices": None, "use_bdlora": None, "use_dora": False, "use_qalora": False,
    "velora_config": None,
}  # fmt: skip
"""Keys of peft's file that are no fields of `AdapterConfig`, with the values that a plain adapter has. `kasa_config` is left out: peft
before 0.21 warns of it when it loads the adapter."""

Names = str | Collection[str] | None
"""A regular expression for paths of modules, or their last names."""


@dataclass(slots=True, kw_only=True)
class AdapterConfig:
    """Settings of an adapter by the names of peft."""

    r: int
    lora_alpha: float
    lora_dropout: float = 0.0
    use_rslora: bool = False
    target_modules: Names = ALL_LINEAR
    target_parameters: list[str] | None = None
    """Matrices of experts."""
    exclude_modules: Names = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    base_model_name_or_path: str | None = None
    task_type: str | None = "CAUSAL_LM"
    stored: dict[str, Any] = field(default_factory=dict[str, Any])
    """Other keys of the file that the config was read from."""

    def targets(self, path: str) -> bool:
        """True if the adapter changes this module, by the rules of peft."""
        if _named(self.exclude_modules, path) or not _named(self.target_modules, path):
            return False
        by_name = not isinstance(self.target_modules, str) and path not in (
            self.target_modules or ()
        )
        if not by_name or self.layers_to_transform in (None, []):
            return True
        chosen = self.layers_to_transform
        index = self._layer_index(path)
        return index == chosen if isinstance(chosen, int) else index in (chosen or ())

    def _layer_index(self, path: str) -> int | None:
        """The number of the layer that a module is in."""
        patterns = self.layers_pattern or r"[^.]*"
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            found = re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", path)
            if found:
                return int(found[1])
        return None

    def to_json(self) -> dict[str, Any]:
        """The content of adapter_config.json."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        stored = own.pop("stored")
        own = {
            key: sorted(value) if isinstance(value, set | frozenset | tuple) else value
            for key, value in own.items()
        }
        return {
            **DEFAULTS,
            **stored,
            **own,
            "inference_mode": True,
            "peft_version": version("peft"),
        }

    def as_peft(self) -> PeftConfig:
        """The config as peft has it, for a new adapter."""
        from peft import LoraConfig as PeftConfig

        settings = {**self.to_json(), "inference_mode": False}
        return PeftConfig(**{key: value for key, value in settings.items() if key != "peft_type"})


def _named(names: Names, path: str) -> bool:
    if names is None:
        return False
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return any(path == name or path.endswith(f".{name}") for name in names)


def new_lora_config(settings: LoraConfig) -> AdapterConfig:
    """The config of a new adapter."""
    targets = settings.target_modules
    return AdapterConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        use_rslora=settings.rslora,
        target_modules=targets if isinstance(targets, str) else set(targets),
        target_parameters=list(settings.target_parameters) or None,
    )


def scaling_of(config: AdapterConfig) -> float:
    """The factor that an adapter's output is multiplied by."""
    return config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)


def read_lora_config(folder: Path) -> AdapterConfig:
    """The config of a stored adapter. Raises `ModelError` for kinds of adapter that are not plain LoRA."""
    if not folder.is_dir():
        raise ModelError(
            f"model.adapter: there is no folder {folder} (looked in {Path.cwd()}). Give one that holds {CONFIG} and "
            f"{WEIGHTS}."
        )
    if not (folder / CONFIG).is_file():
        raise ModelError(f"model.adapter: {folder} has no {CONFIG}, so it holds no adapter.")
    stored = read_json(folder / CONFIG)
    if stored.get("peft_type") != "LORA":
        raise ModelError(
            f"model.adapter: {folder} is of type {stored.get('peft_type')!r}; LORA is expected."
        )
    extra = [key for key in UNSUPPORTED if stored.get(key)] + (
        ["bias"] if stored.get("bias", "none") != "none" else []
    )
    start = stored.get("init_lora_weights", True)
    if start not in PLAIN_STARTS:  # other starts change the base too, and the file does not hold it
        extra.append(f"init_lora_weights={start}")
    if extra:
        raise ModelError(
            f"model.adapter: {folder} uses {', '.join(extra)}, which this version does not train. "
            "Merge it into its base and give the merged model as model.name."
        )
    rank, alpha = stored.get("r", 8), stored.get("lora_alpha", 8)  # peft's defaults
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        raise ModelError(
            f"model.adapter: {folder / CONFIG} has r={rank!r} and lora_alpha={alpha!r}. Expected are a whole number of at least 1, and a "
            "number."
        )
    own = {each.name for each in fields(AdapterConfig)} - {"r", "lora_alpha", "stored"}
    given = {"target_modules": None, "task_type": None, **stored}
    targets = given["target_modules"]
    given["target_modules"] = set(targets) if isinstance(targets, list) else targets
    return AdapterConfig(
        r=rank,
        lora_alpha=alpha,
        **{key: value for key, value in given.items() if key in own},
        stored={key: value for key, value in stored.items() if key in {*DEFAULTS, *UNSUPPORTED}},
    )
