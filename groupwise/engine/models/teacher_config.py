"""The `teacher` section: whom the algorithm `distillation` learns from, and what only the teacher sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from groupwise.core.settings.schema import Conflict, Strict, setting
from groupwise.engine.models.config import ModelConfig

KEYS = {
    "model": ("name", "revision", "adapter", "adapter_revision", "dtype"),
    "self": ("weights", "ema_rate"),
    "endpoint": (
        "name",
        "engine",
        "url",
        "api_key_env",
        "concurrency",
        "timeout",
        "server_timeout",
        "on_failure",
    ),
}
"""The keys that have an effect with each type; those of no type have one with every type."""


class TeacherConfig(Strict):
    """The teacher; keys of one type are refused with another, where they would have no effect."""

    type: Literal["model", "self", "endpoint"] = setting(
        "model",
        "model: another model, loaded beside the policy. self: the policy itself, with more in its prompt (prompt, or the task's "
        "teacher_prompt). endpoint: a server that returns the log-probabilities of tokens.",
    )
    name: str | None = setting(
        None,
        "model: a hub id, a local folder, or an alias, as in model.name. endpoint: what the server calls the model; null: model.name.",
        min_length=1,
    )
    revision: str | None = setting(
        None, "model: branch, tag or commit of a hub id; null is the hub's main branch."
    )
    adapter: str | None = setting(
        None, "model: the teacher's PEFT adapter, a folder or a hub id; null: none."
    )
    adapter_revision: str | None = setting(
        None, "model: branch, tag or commit of an adapter on the hub; null is its main branch."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "model: number format of the teacher's weights; auto takes bfloat16 if the device supports it.",
    )
    weights: Literal["current", "start", "ema"] = setting(
        "current",
        "self: the teacher's weights. current: those of the policy now (SDPO). start: those that the run started from (OPSD). ema: a "
        "moving average of the policy's (SDFT).",
    )
    ema_rate: float = setting(
        0.05,
        "self, with weights ema: the share of the way to the policy that the average moves after each update.",
        gt=0,
        le=1,
    )
    engine: Literal["vllm", "sglang", "openai"] = setting(
        "vllm",
        "endpoint: the kind of server. vllm; sglang; or openai, any server whose /v1/completions takes token ids and echoes a prompt "
        "with its log-probabilities, such as groupwise serve.",
    )
    url: str | tuple[str, ...] | None = setting(
        None,
        "endpoint: its address, as http://127.0.0.1:8000; several addresses share the work.",
        on_resume="free",
    )
    api_key_env: str = setting(
        "VLLM_API_KEY",
        "endpoint: the environment variable that holds its key; if it is not set, requests carry no key.",
        on_resume="free",
        min_length=1,
    )
    concurrency: int = setting(
        32, "endpoint: requests sent to each server at the same time.", on_resume="free", ge=1
    )
    timeout: float = setting(
        600.0, "endpoint: seconds in which a request must be answered.", on_resume="free", gt=0
    )
    server_timeout: float = setting(
        600.0,
        "endpoint: seconds for which a request is repeated while no server answers.",
        on_resume="free",
        gt=0,
    )
    on_failure: Literal["stop", "skip"] = setting(
        "stop",
        "endpoint: what happens if no answer comes. stop: the run ends, and --resume continues it. skip: the rollout counts as failed "
        "and does not teach.",
        on_resume="free",
    )
    prompt: str | None = setting(
        None,
        "What the teacher reads in place of the prompt's last user message (or of the whole prompt, if that is plain text). {prompt} "
        "is that message; {answer} and so on are columns of the row; {demonstration} is the best other completion of the group, if "
        "its reward is at least demonstration_reward; {feedback} is what a reward noted by log_extra('feedback', …). A rollout that "
        "lacks one of them keeps the policy's prompt. null: the policy's prompt, or what the task's teacher_prompt returns.",
    )
    demonstration_reward: float = setting(
        0.999, "Minimum reward of a completion that is shown as {demonstration}."
    )

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of the endpoint."""
        return (self.url,) if isinstance(self.url, str) else self.url or ()

    def model_config_of(self, policy: ModelConfig) -> ModelConfig:
        """The teacher of type `model`, as the config of a model."""
        return ModelConfig(
            name=self.name or policy.name,
            revision=self.revision,
            adapter=self.adapter,
            adapter_revision=self.adapter_revision,
            dtype=self.dtype,
            trust_remote_code=policy.trust_remote_code,
        )

    def conflicts(self) -> Iterator[Conflict]:
        """Report keys of another type, and missing ones."""
        keys_of_types = {key for keys in KEYS.values() for key in keys}
        for key in sorted(keys_of_types - {*KEYS[self.type]}):
            if (value := getattr(self, key)) != TeacherConfig.model_fields[key].default:
                types = " or ".join(kind for kind, keys in KEYS.items() if key in keys)
                yield Conflict(
                    f"{key} is {value!r}, which has no effect with the type {self.type}; it belongs to {types}. Leave it out, or change "
                    "type.",
                    (key, "type"),
                )
        if self.type == "model" and self.name is None:
            yield Conflict(
                "type is model, but name does not say which. Give a hub id, a folder or an alias, or set type to self for the policy "
                "itself.",
                ("type", "name"),
            )
        if self.type == "endpoint" and not self.urls:
            yield Conflict(
                "type is endpoint, but url does not say where it answers. Set it, as in teacher.url=http://127.0.0.1:8000.",
                ("type", "url"),
            )
        if self.adapter_revision is not None and self.adapter is None:
            yield Conflict(
                "adapter_revision has no effect without adapter.", ("adapter_revision", "adapter")
            )
        default_rate = TeacherConfig.model_fields["ema_rate"].default
        if self.weights != "ema" and self.ema_rate != default_rate:
            yield Conflict(
                f"ema_rate is {self.ema_rate:g}, which has no effect while weights is {self.weights}. Set weights to ema, or leave it out.",
                ("ema_rate", "weights"),
            )
        demonstration_reward = TeacherConfig.model_fields["demonstration_reward"].default
        if self.demonstration_reward != demonstration_reward and "{demonstration}" not in (
            self.prompt or ""
        ):
            yield Conflict(
                "demonstration_reward has no effect on a prompt without {demonstration}. Leave it out.",
                ("demonstration_reward", "prompt"),
            )
