"""The `sampler` section: how completions are drawn in training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import model_validator

from groupwise.core.settings.schema import Conflict, Strict, setting


class TemperatureSchedule(Strict):
    """The section `sampler.temperature_schedule`: falls in a straight line, then stays low, but for a step now and then."""

    start: float = setting(1.0, "Temperature of the first step.", gt=0)
    end: float = setting(0.3, "The floor.", gt=0)
    steps: int = setting(3000, "Steps from start to end.", ge=1)
    high_temperature_every: int | None = setting(
        5000,
        "At the floor, each step whose index is a multiple of this has high_temperature; null: none.",
        ge=1,
    )
    high_temperature: float | None = setting(
        None, "Temperature of these steps; null: that of the start.", gt=0
    )

    def at(self, step: int) -> float:
        """The temperature of a step (from 0)."""
        if step < self.steps:
            return self.start + (self.end - self.start) * step / self.steps
        if self.high_temperature_every is not None and step % self.high_temperature_every == 0:
            return self.start if self.high_temperature is None else self.high_temperature
        return self.end

    def conflicts(self) -> Iterator[Conflict]:
        """A `high_temperature` without steps that use it."""
        if self.high_temperature is not None and self.high_temperature_every is None:
            yield Conflict(
                f"high_temperature is {self.high_temperature:g}, but high_temperature_every is null, so that no step has it. Set it, or "
                "leave high_temperature out.",
                ("high_temperature", "high_temperature_every"),
            )


SERVER_KEYS = (
    "url",
    "served_model",
    "adapter_folder",
    "adapter_folder_there",
    "weight_transfer",
    "weight_transfer_timeout",
    "logprob_tolerance",
    "concurrency",
    "timeout",
    "server_timeout",
    "api_key_env",
    "seeded",
    "routing_replay",
    "vllm_python",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "max_model_len",
)
"""Keys of the engines vllm and sglang about where and how servers are called; they do not affect the draws."""
SPAWNED_SERVER_KEYS = ("gpu_memory_utilization", "tensor_parallel_size", "max_model_len")
"""The keys that are passed to a server which the run starts itself."""


class SamplerConfig(Strict):
    """Engine and sampling parameters."""

    not_yet: ClassVar[frozenset[str]] = frozenset(
        {
            "engine=openai",
            "repetition_penalty",
        }
    )
    refused: ClassVar[Mapping[str, str]] = {
        key: f"it would draw completions from another distribution than the one whose log-probabilities the learner computes, so "
        f"ratios and gradients would be wrong; training draws from the whole distribution, at sampler.temperature. eval.{key} is for "
        "evaluations, from which nothing is learnt"
        for key in ("top_p", "top_k", "min_p")
    }

    engine: Literal["torch", "vllm", "sglang"] = setting(
        "torch",
        "What samples. torch: the processes of the run, on this machine. vllm: servers of vLLM, reached over HTTP (url) or started by "
        "the run (vllm_python). sglang: servers of SGLang, reached over HTTP (url).",
    )
    url: str | tuple[str, ...] | None = setting(
        None,
        "Address of vLLM or SGLang, as http://127.0.0.1:8000; several addresses share the work.",
        on_resume="free",
    )
    served_model: str | None = setting(
        None,
        "What the servers call the base (their --served-model-name); null: model.name.",
        on_resume="free",
    )
    adapter_folder: str | None = setting(
        None,
        "A folder that both this machine and the servers see, through which adapters, or files of all weights, are handed over. null: "
        "the servers run on this machine as the same user, and read the files of the run itself.",
        on_resume="free",
    )
    adapter_folder_there: str | None = setting(
        None,
        "Path of adapter_folder as the servers see it, if they mount it elsewhere; null: the same path.",
        on_resume="free",
    )
    weight_transfer: Literal["files", "ipc", "nccl"] | None = setting(
        None,
        "How servers get all weights, if lora is null. files: they read files. ipc: the server of vllm_python, or SGLang, copies them "
        "on the learner's own GPU. nccl: vLLM on other GPUs or machines receives them from the learner's GPU. null: ipc for the "
        "server of vllm_python if possible, else files.",
        on_resume="free",
    )
    weight_transfer_timeout: float = setting(
        120.0,
        "Seconds in which a server must have joined a transfer by nccl and received all weights; after that the run gives the "
        "transfer up.",
        on_resume="free",
        gt=0,
    )
    logprob_tolerance: float = setting(
        0.1,
        "Mean difference (nats) allowed between the log-probabilities of a server and those of the same weights here, on fixed "
        "prompts after each publication; a larger one stops the run. bfloat16 differs by about 0.01 to 0.03.",
        on_resume="free",
        gt=0,
    )
    concurrency: int = setting(
        256,
        "Requests sent to each server at the same time, one for each group; further ones wait.",
        on_resume="free",
        ge=1,
    )
    timeout: float = setting(
        600.0,
        "Seconds in which a server must have drawn a group's completions; after that another server is asked.",
        on_resume="free",
        gt=0,
    )
    server_timeout: float = setting(
        600.0,
        "Seconds for which the run waits when no server answers; enough to restart one.",
        on_resume="free",
        gt=0,
    )
    api_key_env: str = setting(
        "VLLM_API_KEY",
        "The environment variable that holds the servers' key (their --api-key); if it is not set, requests carry no key.",
        on_resume="free",
    )
    seeded: bool | None = setting(
        None,
        "Send a seed with each request, so that a server draws nearly the same if it is asked again. vLLM then draws random numbers "
        "separately for each completion, which costs time for each token on a GPU. null: true, except for the server of vllm_python "
        "on a GPU and for sglang, which never gets a seed.",
        on_resume="free",
    )
    routing_replay: bool = setting(
        False,
        "For mixtures of experts: the learner uses the experts that vLLM chose for each token (R3). Each row is then computed with "
        "its own prompt. Servers need vLLM 0.22 and --enable-return-routed-experts. Worth it if sampling/logprob_gap stays high and "
        "algorithm.importance_sampling_correction cuts off many tokens.",
        on_resume="warn",
    )
    vllm_python: str | None = setting(
        None,
        "In place of url: the Python of an environment that has vLLM, as /opt/vllm/bin/python. The run starts a server with it, on "
        "the GPUs after the first one, and ends it.",
        on_resume="free",
    )
    gpu_memory_utilization: float | None = setting(
        None,
        "Share of a GPU's memory that the server of vllm_python takes. null: 0.9; on the learner's own GPU 0.7, or 0.5 if the run "
        "samples while it learns. Without a GPU it is a share of the machine's memory, and null gives 4 GiB to keys and values, but "
        "at most a quarter of the memory.",
        on_resume="free",
        gt=0,
        le=1,
    )
    tensor_parallel_size: int = setting(
        1, "GPUs that share each product in the server of vllm_python.", on_resume="free", ge=1
    )
    max_model_len: int | None = setting(
        None,
        "Maximum tokens of prompt and completion in the server of vllm_python; null: what the run needs.",
        on_resume="free",
        ge=1,
    )
    max_completion_length: int = setting(
        256, "Longest completion in tokens, the stop token included; longer ones are cut off.", ge=1
    )
    min_completion_length: int = setting(
        0,
        "A completion cannot end before this many tokens: until then the model's own stop tokens and stop_token_ids have the "
        "probability 0, for sampler and learner alike, and stop texts have no effect. Each turn of an environment counts separately, "
        "and so do reasoning and answer of two_stage. Evaluations keep to it, too.",
        ge=0,
    )
    temperature: float = setting(
        1.0,
        "1 samples the model's own distribution. Log-probabilities are taken at this temperature.",
        gt=0,
    )
    temperature_schedule: TemperatureSchedule | None = setting(
        None,
        "A temperature that changes with the steps, in place of temperature; {} takes all defaults. Completions are drawn, and their "
        "log-probabilities computed, at the temperature of the step.",
    )
    stop: tuple[str, ...] = setting(
        (), "Texts that end a completion, besides the model's own stop tokens."
    )
    stop_token_ids: tuple[int, ...] = setting(
        (), "Token ids that end a completion, besides the model's own stop tokens."
    )
    max_num_seqs: int | None = setting(
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

    quantization: Literal["int8"] | None = setting(
        None,
        "int8: on a CPU with AVX512_VNNI, decode with the layers' weights and their inputs rounded to 8 bits, which is faster. null: "
        "no rounding. Adapter, output head and learner stay exact. With int8, algorithm.importance_sampling_correction is "
        "token_truncate unless it is set. Evaluations and a server's completions are decoded in the same way.",
    )

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of the servers."""
        return (self.url,) if isinstance(self.url, str) else self.url or ()

    def temperature_at(self, step: int) -> float:
        """The temperature of a training step (from 0)."""
        return self.temperature_schedule.at(step) if self.temperature_schedule else self.temperature

    def conflicts(self) -> Iterator[Conflict]:
        """Two settings of the temperature, and keys of another engine."""
        if self.engine != "torch":
            yield from self._server_conflicts()
        for key in SERVER_KEYS if self.engine == "torch" else ():
            if getattr(self, key) != SamplerConfig.model_fields[key].default:
                yield Conflict(
                    f"{key} has no effect with the engine {self.engine}, which asks no server. Set engine to vllm or sglang, or "
                    f"leave {key} out.",
                    (key, "engine"),
                )
        if self.temperature_schedule is not None and self.temperature != 1.0:
            yield Conflict(
                f"temperature is {self.temperature:g}, which has no effect beside temperature_schedule, whose start and end say what "
                "it is. Leave one of them out.",
                ("temperature", "temperature_schedule"),
            )

    def _server_conflicts(self) -> Iterator[Conflict]:
        """Conflicts among the keys of the engines vllm and sglang."""
        if self.engine == "sglang":
            yield from self._sglang_conflicts()
        if self.engine == "vllm" and not self.urls and self.vllm_python is None:
            yield Conflict(
                "engine is vllm, but url does not say where it answers. Start vLLM and set url, as in "
                "sampler.url=http://127.0.0.1:8000, or have the run start it with vllm_python, or leave engine out.",
                ("engine", "url", "vllm_python"),
            )
        keys = SPAWNED_SERVER_KEYS
        reason = "without vllm_python: only a server that the run starts receives it"
        if self.vllm_python is not None:
            keys = ("url", "served_model", "adapter_folder", "api_key_env")
            reason = "beside vllm_python, whose server is this run's own"
        for key in keys:
            if getattr(self, key) != SamplerConfig.model_fields[key].default:
                yield Conflict(
                    f"{key} has no effect {reason}. Leave one of them out.", (key, "vllm_python")
                )
        yield from self._transfer_conflicts()
        if len(set(self.urls)) < len(self.urls):
            yield Conflict(
                "url has an address twice; each server is asked for as many completions as concurrency says. Leave one out.",
                ("url",),
            )
        if self.adapter_folder_there is not None and self.adapter_folder is None:
            yield Conflict(
                "adapter_folder_there has no effect without adapter_folder, which is the same folder on this machine. Set it, too.",
                ("adapter_folder", "adapter_folder_there"),
            )
        for key in ("max_num_seqs", "enforce_eager", "quantization"):
            if value := getattr(self, key):
                yield Conflict(
                    f"{key} is {json.dumps(value)}, which has no effect with the engine {self.engine}, whose servers have settings of "
                    "their own. Leave it out.",
                    (key, "engine"),
                )

    def _transfer_conflicts(self) -> Iterator[Conflict]:
        """Ways to transfer weights that the servers do not have, and keys without effect on the chosen one."""
        transfer = self.weight_transfer
        if transfer == "ipc" and self.vllm_python is None and self.engine == "vllm":
            yield Conflict(
                "weight_transfer is ipc, by which only the vLLM of vllm_python takes weights. Set it to files or nccl, or leave it out.",
                ("weight_transfer", "vllm_python"),
            )
        if transfer == "nccl" and self.engine == "sglang":
            yield Conflict(
                "weight_transfer is nccl, but SGLang takes all weights from files, or by ipc. Set it to one of these, or leave it out.",
                ("weight_transfer", "engine"),
            )
        if transfer == "nccl" and self.adapter_folder is not None:
            yield Conflict(
                "adapter_folder has no effect with weight_transfer nccl, by which servers receive weights without files. Leave one of "
                "them out.",
                ("adapter_folder", "weight_transfer"),
            )
        default = SamplerConfig.model_fields["weight_transfer_timeout"].default
        if transfer != "nccl" and self.weight_transfer_timeout != default:
            yield Conflict(
                "weight_transfer_timeout has no effect without weight_transfer nccl. Leave it out, or set weight_transfer.",
                ("weight_transfer_timeout", "weight_transfer"),
            )

    def _sglang_conflicts(self) -> Iterator[Conflict]:
        """What the engine sglang does not take, and the address that it needs."""
        if self.vllm_python is not None:
            yield Conflict(
                "engine is sglang, but vllm_python starts a server of vLLM. Set engine to vllm, or start SGLang and set url in its place.",
                ("engine", "vllm_python"),
            )
        elif not self.urls:
            yield Conflict(
                "engine is sglang, but url does not say where it answers. Start SGLang and set url, as in "
                "sampler.url=http://127.0.0.1:30000, or leave engine out.",
                ("engine", "url"),
            )
        if self.routing_replay:
            yield Conflict(
                "routing_replay is true, but only vLLM is asked which experts it chose. Leave it out, or sample with vLLM.",
                ("engine", "routing_replay"),
            )
        if self.seeded:
            yield Conflict(
                "seeded is true, but SGLang is sent no seeds: it would draw the same completion for all members of a group. Leave it out.",
                ("engine", "seeded"),
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
