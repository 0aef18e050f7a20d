"""The `sampler` section: how completions are drawn in training."""

from __future__ import annotations

from typing import ClassVar, Literal

from groupwise.settings import Strict, setting


class SamplerConfig(Strict):
    """Engine and sampling parameters."""

    not_yet: ClassVar[frozenset[str]] = frozenset(
        {
            "engine=vllm",
            "engine=openai",
            "engine=sglang",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "min_completion_length",
            "temperature_schedule",
            "url",
            "vllm_python",
            "gpu_memory_utilization",
            "tensor_parallel_size",
            "max_model_len",
        }
    )

    engine: Literal["torch"] = setting("torch", "What samples; torch runs in this process.")
    max_completion_length: int = setting(
        256, "Longest completion in tokens, the stop token included; longer ones are cut off.", ge=1
    )
    temperature: float = setting(
        1.0,
        "1 samples the model's own distribution. Log-probabilities are taken at this temperature.",
        gt=0,
    )
    stop: tuple[str, ...] = setting(
        (), "Texts that end a completion, besides the model's own stop tokens."
    )
    stop_token_ids: tuple[int, ...] = setting(
        (), "Token ids that end a completion, besides the model's own stop tokens."
    )
    slots: int | None = setting(
        None,
        "Completions decoded together; null chooses for the machine. More is faster until memory "
        "or cache runs out. Fewer than 8 would let results depend on the number.",
        on_resume="warn",
        ge=8,
    )
