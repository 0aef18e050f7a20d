"""The `sampler` section: how completions are drawn in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import model_validator

from groupwise.settings.schema import Strict, setting


class SamplerConfig(Strict):
    """Engine and sampling parameters."""

    not_yet: ClassVar[frozenset[str]] = frozenset(
        {
            "engine=vllm",
            "engine=openai",
            "engine=sglang",
            "repetition_penalty",
            "temperature_schedule",
            "url",
            "vllm_python",
            "gpu_memory_utilization",
            "tensor_parallel_size",
            "max_model_len",
        }
    )
    refused: ClassVar[Mapping[str, str]] = {
        key: f"it would draw completions from another distribution than the one whose log-probabilities the learner computes, so "
        f"ratios and gradients would be wrong; training draws from the whole distribution, at sampler.temperature. eval.{key} is for "
        "evaluations, from which nothing is learnt"
        for key in ("top_p", "top_k", "min_p")
    }

    engine: Literal["torch"] = setting(
        "torch", "What samples; torch does so on this machine, in the processes of the run."
    )
    max_completion_length: int = setting(
        256, "Longest completion in tokens, the stop token included; longer ones are cut off.", ge=1
    )
    min_completion_length: int = setting(
        0,
        "The first so many tokens of a completion are no stop tokens, neither the model's own nor stop_token_ids: their probability "
        "there is 0, for sampler and learner alike. A stop text does not end it before the last of them. Each turn of an "
        "environment counts anew, and so do reasoning and answer of two_stage. Holds for evaluations, too.",
        ge=0,
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
        "Completions decoded together in each process (run.processes); null chooses for the machine. More is faster until memory "
        "or cache runs out. Fewer than 8 would let results depend on the number.",
        on_resume="warn",
        ge=8,
    )
    enforce_eager: bool = setting(
        False,
        "On a GPU, start every operation of a token by itself instead of replaying a CUDA graph: slower, less memory, for "
        "debugging. Without effect on a CPU.",
        on_resume="warn",
    )

    @model_validator(mode="after")
    def _stops_mean_something(self) -> SamplerConfig:
        if "" in self.stop:
            raise ValueError(
                "stop has an empty text, with which every completion would end at once; leave it out."
            )
        below = [token for token in self.stop_token_ids if token < 0]
        if below:
            raise ValueError(f"stop_token_ids has {below[0]}; ids of tokens begin at 0.")
        return self
