"""Low-rank adapters over one frozen base, in the file format of peft.

Several adapters share one base: the one that is trained, the one that the sampler serves (a copy loaded from a published file), and the
one that a run started from (the reference for KL). Other models over that base add theirs, each with its own rank and layers. Adapters
are added and removed one by one and never affect each other. `AdaptedModel.using` selects the active one.

The arithmetic is our own: the low-rank product is added *before* the base output is rounded. With a base in bfloat16, adding it after
rounding, as peft's layer does, loses most of a change made at the learning rates of RL. The factors are kept in float32.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from groupwise.core.errors import ModelError
from groupwise.engine.models.experts import (
    DIVISIBLE,
    ExactLoraExperts,
    add_expert_adapters,
    experts_of,
    factors_by_expert,
)
from groupwise.engine.models.files import read_tensors, write_tensors
from groupwise.engine.models.fingerprint import tree_hash
from groupwise.engine.models.lora_config import ALL_LINEAR, CONFIG, WEIGHTS, AdapterConfig
from groupwise.engine.models.lora_layers import AdapterSwitch, ExactLoraLinear, LoraLayer
from groupwise.engine.models.native.facts import FAMILIES
from groupwise.engine.models.native.linear import Factors
from groupwise.engine.models.native.weights import NativeModel, native_model
from groupwise.engine.models.sharded import shard_of

if TYPE_CHECKING:
    from groupwise.engine.models.native.causal_lm import CausalModel

logger = logging.getLogger(__name__)

PREFIX = "base_model.model."
USED_WITHOUT_LAYER = {
    "falcon_h1": "out_proj", "falcon_mamba": "out_proj", "jamba": "dt_proj", "mamba": "out_proj", "mamba2": "out_proj",
    "nemotron_h": "out_proj",
}  # fmt: skip
"""Linear layers, by family, whose weight is used without the layer, at least by kernels for GPUs: an adapter would have no effect."""


class AdaptedModel:
    """A frozen base with named adapters, each with its own shape."""

    def __init__(self, base: CausalModel, config: AdapterConfig) -> None:
        self.base = base
        base.requires_grad_(False)
        self.config = config
        """Config of adapters that are added without one."""
        self.configs: dict[str, AdapterConfig] = {}
        """Config of each adapter, by its name."""
        self.switch = AdapterSwitch()
        self._warned: set[tuple[str, ...]] = set()
        """Sets of layers for which a warning has been logged that modules compute them."""
        self.layers: dict[str, ExactLoraLinear | ExactLoraExperts] = {}
        """Layers that at least one adapter changes, in the order of the base."""

    def add(
        self, name: str, *, trainable: bool, seed: int, config: AdapterConfig | None = None
    ) -> None:
        """Add an adapter that changes nothing yet: A is random from `seed`, B is zero (Hu et al. 2021, §4.1).

        Raises `ModelError` for impossible targets; the model is then unchanged.
        """
        assert name not in self.configs, f"there is an adapter {name} already"
        self._inject_adapter(name, self.config if config is None else config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for key, parameter in self.parameters(name).items():
                parameter.requires_grad_(trainable)
                if ".lora_A." in key:
                    bound = 1 / math.sqrt(parameter.shape[1])
                    values = torch.rand(parameter.shape, generator=generator) * 2 - 1
                    parameter.copy_(values * bound)
                else:
                    parameter.zero_()

    def remove(self, name: str) -> None:
        """Remove an adapter. A layer that no other adapter changes becomes the base's plain layer again."""
        self.configs.pop(name, None)
        # An inner layer comes before its outer one.
        for path, module in reversed([*self.base.named_modules()]):
            if isinstance(module, LoraLayer):
                module.remove(name)
                if not module.lora_A:
                    self.base.set_submodule(path, module.base_layer)
        self._update_layers()

    def layers_of(self, name: str) -> dict[str, ExactLoraLinear | ExactLoraExperts]:
        """The layers that an adapter changes, in the order of the base."""
        assert name in self.configs, f"there is no adapter {name}"
        return {path: layer for path, layer in self.layers.items() if name in layer.lora_A}

    def native(self, name: str) -> NativeModel | None:
        """The base as plain matrices. None, with the reason in the log, if it or this adapter does not allow that."""
        model = native_model(self.base)
        if model is None:
            return None
        native_paths = {part.path for linear in model.products for part in linear.parts}
        unsupported = [path for path in self.layers_of(name) if path not in native_paths]
        if unsupported and tuple(unsupported) not in self._warned:
            self._warned.add(tuple(unsupported))
            logger.warning(
                "a model is sampled and trained by transformers' modules, which is slower, because its adapter changes %s",
                ", ".join(unsupported[:4]),
            )
        return None if unsupported else model

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """The adapter's factors by the names that peft gives them in files, sorted."""
        parameters: dict[str, nn.Parameter] = {}
        for path, layer in self.layers_of(name).items():
            down, up = layer.factors(name)
            parameters[f"{PREFIX}{path}.lora_A.weight"] = down
            parameters[f"{PREFIX}{path}.lora_B.weight"] = up
        return dict(sorted(parameters.items()))

    def low_rank(self, name: str) -> dict[str, Factors]:
        """The adapter's factors by the layer's name in the base; not copies."""
        return {
            path: Factors(*layer.factors(name), layer.scaling[name])
            for path, layer in self.layers_of(name).items()
        }

    def write(self, name: str, tensors: Mapping[str, Tensor], origin: str) -> None:
        """Overwrite the adapter. Raises `ModelError` unless names and shapes match exactly."""
        copy_exactly(self.parameters(name), tensors, origin)

    @contextlib.contextmanager
    def using(self, name: str | None, *, dropout: bool = False) -> Iterator[CausalModel]:
        """The base with this adapter active (None: the plain base)."""
        assert name is None or name in self.configs, f"there is no adapter {name}"
        previous = self.switch.active, self.switch.dropout
        self.switch.active, self.switch.dropout = name, dropout
        try:
            yield self.base
        finally:
            self.switch.active, self.switch.dropout = previous

    def save(self, name: str, folder: Path) -> None:
        """Write the adapter as peft does, so peft, transformers and vLLM can load it. Raises OSError if the files cannot be written."""
        self._write_files(folder, self.parameters(name), self.configs[name].to_json())

    def save_by_expert(self, name: str, folder: Path) -> None:
        """Write the adapter with factors for each matrix of each expert, which vLLM takes. Raises ModelError if the model's files have
        other matrices, OSError if the adapter's cannot be written."""
        family = self.base.config.model_type
        if family not in DIVISIBLE:
            raise ModelError(
                f"lora.target_parameters: vLLM is given adapters of experts for {', '.join(sorted(DIVISIBLE))}, but this model is a "
                f"{family}. Leave lora.target_parameters out, or sample with sampler.engine torch."
            )
        tensors: dict[str, Tensor] = {}
        modules = set(self.configs[name].target_modules or ())
        for path, layer in self.layers_of(name).items():
            factors = {path: layer.factors(name)}
            if isinstance(layer, ExactLoraExperts):
                # Another layer is around this one and has all factors.
                within = path.endswith(".base_layer")
                factors = {} if within else factors_by_expert(layer, path, name)
            modules |= {each.rpartition(".")[2] for each in factors}
            for each, (down, up) in factors.items():
                tensors[f"{PREFIX}{each}.lora_A.weight"] = down
                tensors[f"{PREFIX}{each}.lora_B.weight"] = up
        config = {**self.configs[name].to_json(), "target_parameters": None}
        self._write_files(folder, tensors, {**config, "target_modules": sorted(modules)})

    def _write_files(
        self, folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
    ) -> None:
        copies = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
        write_tensors(copies, folder / WEIGHTS)
        called = config["base_model_name_or_path"] or self.base.config._name_or_path
        described = {**config, "base_model_name_or_path": called}
        (folder / CONFIG).write_text(json.dumps(described, indent=2, sort_keys=True))

    def _inject_adapter(self, name: str, config: AdapterConfig) -> None:
        try:
            self._resolve_targets(config)
            if config.target_parameters:
                add_expert_adapters(self.base, name, config, self.switch)
            if config.target_modules or not config.target_parameters:
                self._add_to_linear(name, config)
        except ValueError as error:
            self.remove(name)
            problem = str(error).rstrip(".")
            if problem.startswith("lora.target_parameters"):
                raise ModelError(f"{problem}.") from error
            raise ModelError(no_target_message(self.base, problem)) from error
        self.configs[name] = config
        self._update_layers()

    def _add_to_linear(self, name: str, config: AdapterConfig) -> None:
        """Add an adapter to the linear layers that the config names. Raises ValueError for names without effect."""
        changed = {path: each for path, each in self._own_modules() if config.targets(path)}
        unsupported = [
            path
            for path, each in changed.items()
            if not isinstance(each, nn.Linear | ExactLoraLinear)
        ]
        targets = config.target_modules
        given = [] if targets is None or isinstance(targets, str) else sorted(targets)
        paths = [f".{path}" for path in changed if path not in unsupported]
        unmatched = [
            target for target in given if not any(path.endswith(f".{target}") for path in paths)
        ]
        if unsupported or unmatched or not paths:
            names = ", ".join(unsupported[:4] or unmatched) or "none was found"
            raise ValueError(f"an adapter needs linear layers ({names})")
        for path, module in changed.items():
            if isinstance(module, nn.Linear):
                module = ExactLoraLinear(module, self.switch)
                self.base.set_submodule(path, module)
            cast("ExactLoraLinear", module).add(name, config)

    def _own_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules of the base, without what is within layers that have adapters."""
        within: tuple[str, ...] = ()
        for path, module in [*self.base.named_modules()]:
            if path and not path.startswith(within):
                yield path, module
                if isinstance(module, LoraLayer):
                    within += (f"{path}.",)

    def _resolve_targets(self, config: AdapterConfig) -> None:
        """Resolve all-linear. Raises ValueError for names without effect or of experts."""
        idle = USED_WITHOUT_LAYER.get(self.base.config.model_type)
        if config.target_modules == ALL_LINEAR:
            config.target_modules = all_linear_names(self.base, self.base)
        targets = config.target_modules or ()
        each = [targets] if isinstance(targets, str) else [[name] for name in sorted(targets)]
        if idle and any(name.rpartition(".")[2] == idle for some in each for name in some):
            raise ValueError(
                f"an adapter on {idle} has no effect: its weight is used without the layer"
            )
        named = [
            some if isinstance(some, str) else some[0]
            for some in each
            if _means_experts(self.base, some)
        ]
        if named:
            raise ValueError(
                f"peft takes {', '.join(named)} for experts here, as in releases of transformers in which each expert had layers of "
                "its own. Name matrices of experts in lora.target_parameters"
            )

    def _update_layers(self) -> None:
        self.layers = {
            path: module
            for path, module in self.base.named_modules()
            if isinstance(module, ExactLoraLinear | ExactLoraExperts)
        }


def layer_kinds(base: CausalModel) -> dict[str, tuple[str, ...]]:
    """The linear layers of a base by their full names, grouped as `attention`, `mlp`, and the output head, `unembed`."""
    head = base.get_output_embeddings()
    kinds: dict[str, list[str]] = {"attention": [], "mlp": [], "unembed": []}
    for path, module in base.named_modules():
        if ".lora_" in path or path.endswith(".base_layer"):
            continue
        if isinstance(module, (nn.Linear, ExactLoraLinear)):
            kind = "unembed" if module is head else "attention" if "att" in path else "mlp"
            kinds[kind].append(path)
    return {kind: tuple(paths) for kind, paths in kinds.items()}


def all_linear_names(base: CausalModel, part: nn.Module) -> list[str]:
    """Names of the linear layers that all-linear takes in a part of a model: without the output head, what chooses experts, names that peft
    takes for experts (as in releases of transformers in which each expert had layers of its own), and layers that it does not adapt."""
    head = cast("nn.Module", base.get_output_embeddings())
    left_out = {*head.modules()}
    for path, experts in experts_of(base).items():
        block = base.get_submodule(path.rpartition(".")[0])
        gates = (1, cast("Any", experts).num_experts)
        left_out |= {
            module
            for module in block.modules()
            if isinstance(module, nn.Linear) and module.out_features in gates
        }
    names = {
        path.removesuffix(".base_layer").rpartition(".")[2]
        for path, module in part.named_modules()
        if isinstance(module, nn.Linear) and module not in left_out and ".lora_" not in path
    }
    names.discard(USED_WITHOUT_LAYER.get(base.config.model_type, ""))
    return sorted(name for name in names if not _means_experts(base, [name]))


def _means_experts(base: CausalModel, targets: str | list[str]) -> bool:
    if base.config.model_type in FAMILIES:  # they have none
        return False
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    trial = LoraConfig(target_modules=targets)
    try:
        convert_peft_config_for_transformers(trial, base, None)
    except ValueError:  # it is one of several that peft takes for one matrix
        return True
    return bool(trial.target_parameters)


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors of a stored adapter (safetensors only)."""
    return read_tensors(folder / WEIGHTS)


def copy_exactly(owned: Mapping[str, Tensor], loaded: Mapping[str, Tensor], origin: str) -> None:
    """Copy `loaded` over `owned`, of divided tensors this learner's part; raises `ModelError` that lists every key or shape that does not
    match."""
    refuse_mismatch(shapes_of(owned), shapes_of(loaded), origin)
    with torch.no_grad():
        for key, tensor in owned.items():
            tensor.copy_(shard_of(loaded[key], tensor))


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor."""
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def refuse_mismatch(
    owned: Mapping[str, tuple[int, ...]], loaded: Mapping[str, tuple[int, ...]], origin: str
) -> None:
    """Raise `ModelError` that lists every name or shape in which `loaded` differs from `owned`."""
    missing = sorted(set(owned) - set(loaded))
    unexpected = sorted(set(loaded) - set(owned))
    shapes = [
        f"{key}: {loaded[key]} instead of {owned[key]}"
        for key in sorted(set(owned) & set(loaded))
        if owned[key] != loaded[key]
    ]
    if missing or unexpected or shapes:
        raise ModelError(
            f"The tensors of {origin} do not match the model, so none was loaded."
            + _name_list("missing", missing)
            + _name_list("not expected", unexpected)
            + _name_list("of another shape", shapes)
        )


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes, in the order of the names, as a tree whose pieces are hashed by torch's number of
    threads; 16 hex digits.
    """

    def contents() -> Iterator[tuple[str, memoryview]]:
        for key in sorted(tensors):
            tensor = tensors[key].detach().cpu().contiguous()
            content = tensor.flatten().view(torch.uint8).numpy().data
            yield f"{key}|{tensor.dtype}|{tuple(tensor.shape)}|", content

    return tree_hash(contents(), torch.get_num_threads())


def no_target_message(base: CausalModel, problem: str) -> str:
    """Message about a problem with `lora.target_modules` that lists the kinds of linear layers of the base."""
    kinds = sorted(
        {
            path.removesuffix(".base_layer").rsplit(".", 1)[-1]
            for path, module in base.named_modules()
            if isinstance(module, nn.Linear) and ".lora_" not in path
        }
    )
    return (
        f"lora.target_modules: {problem}. Linear layers of this {base.config.model_type} model: "
        f"{', '.join(kinds) or 'none'}; all-linear takes all but the output head."
    )


def _name_list(title: str, items: list[str]) -> str:
    if not items:
        return ""
    suffix = f"\n    … and {len(items) - 8} more" if len(items) > 8 else ""
    return f"\n  {title} ({len(items)}):" + "".join(f"\n    {item}" for item in items[:8]) + suffix
