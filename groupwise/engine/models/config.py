"""The `model` and `lora` sections: which model is trained, and how much of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from groupwise.core.errors import ModelError
from groupwise.core.settings.schema import Conflict, Strict, setting

Dtype = Literal["float32", "bfloat16"]
"""Number formats of a model's weights."""


class ModelConfig(Strict):
    """The model that the run starts from."""

    name: str = setting(
        ...,
        "A hub id, a local folder, a .gguf file, or an alias (`smollm2-135m-instruct`, `tiny`).",
        min_length=1,
    )
    revision: str | None = setting(
        None, "Branch, tag or commit of a hub id; null is the hub's main branch."
    )
    adapter: str | None = setting(
        None,
        "A PEFT adapter to start from: a folder, or a hub id; with the backend tinker, a tinker:// path of a saved state. null starts from "
        "the model as it is.",
    )
    adapter_revision: str | None = setting(
        None, "Branch, tag or commit of an adapter on the hub; null is its main branch."
    )
    dtype: Literal["auto", "float32", "tf32", "bfloat16"] = setting(
        "auto",
        "Number format of the computation and of frozen weights; auto takes what suits the model and machine. Weights that are all "
        "trained (lora: null) stay float32. tf32 keeps everything in float32, but a GPU rounds the factors of its matrix products to "
        "TF32 (11 significant bits instead of 24), which makes them several times faster.",
    )
    chat_template: str | None = setting(
        None, "File with a Jinja chat template; null uses the one that comes with the tokenizer."
    )
    chat_template_kwargs: dict[str, Any] = setting(
        {},
        "Arguments that the chat template receives in every conversation, such as {enable_thinking: false}. A row's own column "
        "`chat_template_kwargs` overrides them.",
    )
    trust_remote_code: bool = setting(
        False, "Run Python code from the model's repository. Off, because it can do anything."
    )
    max_seq_length: int | None = setting(
        None,
        "Maximum tokens of prompt and completion together; null is the model's own limit.",
        ge=2,
    )

    backend: Literal["transformers", "unsloth", "tunix", "tinker"] = setting(
        "transformers",
        "What loads the model and computes with it. transformers: torch. unsloth: torch with Unsloth's kernels for GPUs (pip install "
        "'groupwise[train,unsloth]'). tunix: google-tunix with JAX, for TPUs, in an environment of its own that groupwise fetch-tunix "
        "makes. tinker: a service of the Tinker API samples and learns (pip install 'groupwise[train,tinker]').",
    )
    base_url: str | None = setting(
        None,
        "Backend tinker: address of the service, as http://127.0.0.1:8000. null: TINKER_BASE_URL, or else the default of the tinker "
        "package.",
        on_resume="free",
        min_length=1,
    )
    api_key_env: str = setting(
        "TINKER_API_KEY",
        "Backend tinker: the environment variable that holds the service's key.",
        on_resume="free",
        min_length=1,
    )
    tokenizer: str | None = setting(
        None,
        "Backend tinker: tokenizer of the model that the service calls `name`: a hub id, a folder or an alias. null: `name` itself.",
        min_length=1,
    )
    loss_reduction: Literal["sum", "mean"] | None = setting(
        None,
        "Backend tinker: how the service adds up a loss. sum: as Tinker does. mean: over the targets of a datum and over datums, as "
        "SkyRL's engine jax does; what is sent is scaled so that the result is the same. null: sum; a SkyRL server needs an explicit "
        "value.",
    )
    load_in_4bit: bool = setting(
        False,
        "Backend unsloth: hold the frozen weights in 4 bits (bitsandbytes NF4), which takes a quarter of the memory of bfloat16.",
    )
    load_in_8bit: bool = setting(
        False,
        "Backend unsloth: hold the frozen weights in 8 bits (bitsandbytes LLM.int8), which takes half the memory of bfloat16.",
    )
    mesh: tuple[int, int] | None = setting(
        None,
        "Backend tunix: its devices as [fsdp, tp]. fsdp is the number over which weights and rows are divided, tp the number that "
        "share each product. null: all devices, as [all, 1].",
        on_resume="warn",
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Settings that the backend does not support, or that have no effect without another one."""
        for key in ("load_in_4bit", "load_in_8bit"):
            if getattr(self, key) and self.backend != "unsloth":
                yield Conflict(
                    f"{key} is true, which the backend {self.backend} does not do. Set backend to unsloth, or leave {key} out.",
                    (key, "backend"),
                )
        if self.load_in_4bit and self.load_in_8bit:
            yield Conflict(
                "load_in_4bit and load_in_8bit are both true; weights are held in one of the two. Leave one out.",
                ("load_in_4bit", "load_in_8bit"),
            )
        for key in ("base_url", "api_key_env", "tokenizer", "loss_reduction"):
            value = getattr(self, key)
            if value != type(self).model_fields[key].default and self.backend != "tinker":
                yield Conflict(
                    f"{key} is {value!r}, which has no effect with the backend {self.backend}. Set backend to tinker, or leave {key} out.",
                    (key, "backend"),
                )
        if self.mesh is not None and self.backend != "tunix":
            yield Conflict(
                f"mesh is {list(self.mesh)}, which has no effect with the backend {self.backend}. Set backend to tunix, or leave mesh out.",
                ("mesh", "backend"),
            )
        if self.mesh is not None and min(self.mesh) < 1:
            yield Conflict(f"mesh is {list(self.mesh)}; both numbers are 1 or more.", ("mesh",))
        if self.adapter_revision is not None and self.adapter is None:
            yield Conflict(
                f"adapter_revision is {self.adapter_revision!r}, but there is no adapter that it could be of. Set adapter to "
                "a hub id, or leave adapter_revision out; that of the model is revision.",
                ("adapter_revision", "adapter"),
            )


class LoraConfig(Strict):
    """The low-rank adapter. `lora: null` trains all weights of the model instead."""

    r: int = setting(16, "Rank of the adapter; RL needs little capacity, so 16 is ample.", ge=1)
    alpha: int = setting(
        32, "The adapter's output is scaled by alpha / r; twice the rank is the usual choice.", ge=1
    )
    rslora: bool = setting(
        False,
        "Scale by alpha / √r instead (rank-stabilised LoRA, arXiv:2312.03732), so that a high rank does not learn more slowly.",
    )
    dropout: float = setting(
        0.0,
        "Share of the adapter's inputs dropped in training. 0, so that sampler and learner see the "
        "same policy.",
        ge=0,
        lt=1,
    )
    target_modules: Literal["all-linear"] | tuple[str, ...] = setting(
        "all-linear",
        "Names of the layers that get an adapter; all-linear is every linear layer except the output head and, in a mixture of "
        "experts, the experts and their router.",
    )
    target_parameters: tuple[str, ...] = setting(
        (),
        "Matrices of experts that get an adapter too, of rank r for each expert, as [mlp.experts.gate_up_proj, "
        "mlp.experts.down_proj]; the same as target_parameters of peft.",
    )

    def conflicts(self) -> Iterator[Conflict]:
        """Settings that the adapters of experts do not support."""
        if self.target_parameters and self.dropout:
            yield Conflict(
                f"dropout is {self.dropout:g}, which adapters of experts (target_parameters) do not have. Set dropout to 0, or leave "
                "target_parameters out.",
                ("dropout", "target_parameters"),
            )


def recorded_base(recorded: Mapping[str, Any], *, trust_remote_code: bool = False) -> ModelConfig:
    """The config of the model that a run was trained on according to its record, without its adapter.

    Raises ModelError if it would run code and the caller has not allowed that: the author of the folder also wrote the record.
    """
    if recorded.get("trust_remote_code") and not trust_remote_code:
        raise ModelError(
            f"the run's config has model.trust_remote_code, so that {recorded.get('name')} would run code of its author. If you trust both "
            "that and where the folder comes from, say --trust-remote-code to `groupwise runs export`; elsewhere, give the merged model."
        )
    return ModelConfig.model_validate({**recorded, "adapter": None, "adapter_revision": None})
