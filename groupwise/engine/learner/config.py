"""The `training` section: how much is trained, on what steps, with which optimiser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, cast

from pydantic import model_validator

from groupwise.core.settings.schema import Conflict, Strict, setting

LENGTHS = (("training", "max_steps"), ("training", "num_train_epochs"))
"""The two keys that say how long a run is; a config has one of them."""


class OptimisationConfig(Strict):
    """Budget, step size and optimiser: what every training has."""

    not_yet: ClassVar[frozenset[str]] = frozenset({"optim=adamw_8bit", "optim=paged_adamw_8bit"})

    max_steps: int | None = setting(
        100,
        "Steps to train; null if num_train_epochs is set.",
        on_resume="free",
        ge=1,
    )
    num_train_epochs: float | None = setting(
        None,
        "Passes over the dataset, instead of max_steps; fractions are possible.",
        on_resume="free",
        gt=0,
    )
    learning_rate: float = setting(
        1e-5,
        "Peak step size of AdamW. The default suits a LoRA adapter; training all weights needs less.",
        gt=0,
    )
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = setting(
        "linear",
        "How the learning rate changes after its warm-up (`warmup_steps`). linear, cosine: it falls to 0 at the last step. constant: "
        "it stays.",
    )
    warmup_steps: int = setting(0, "Steps over which the learning rate rises from 0.", ge=0)
    warmup_ratio: float = setting(
        0.0, "The same as a share of all steps; set only one of the two.", ge=0, le=1
    )
    optim: Literal["adamw"] = setting("adamw", "The optimiser.")
    weight_decay: float = setting(
        0.0, "Decoupled weight decay of AdamW. 0, because a LoRA adapter starts as no change.", ge=0
    )
    adam_beta1: float = setting(0.9, "Decay of AdamW's mean of gradients.", ge=0, lt=1)
    adam_beta2: float = setting(0.999, "Decay of AdamW's mean of squared gradients.", ge=0, lt=1)
    adam_epsilon: float = setting(1e-8, "Added to AdamW's denominator.", gt=0)
    max_grad_norm: float | None = setting(
        1.0, "The gradient is scaled down to this norm; null leaves it as it is.", gt=0
    )
    seed: int = setting(
        0,
        "Decides the order of examples, every sampled token and the adapter's first values.",
        ge=0,
        le=2**63 - 1,
    )
    max_tokens_per_microbatch: int | None = setting(
        None,
        "Tokens that the learner computes at once in each process (run.processes). Fewer need less memory; more are faster, but only "
        "on a GPU. The gradient stays the same. null: 4096; on a GPU as many as fit into its free memory, up to 65536.",
        on_resume="warn",
        ge=1,
    )
    gradient_checkpointing: bool = setting(
        False,
        "Compute activations a second time instead of keeping them: less memory, slower.",
        on_resume="warn",
    )

    packing: bool = setting(
        True,
        "Compute rows of different prompts one after another in one sequence, if the model allows it, instead of each in a "
        "micro-batch of its own. The gradient stays the same.",
        on_resume="warn",
    )
    max_non_finite_steps: int = setting(
        3,
        "Stop the run after this many steps in a row in which an update was skipped because loss or gradient was not finite.",
        on_resume="free",
        ge=1,
    )

    @model_validator(mode="before")
    @classmethod
    def _epochs_replace_the_default_steps(cls, data: Any) -> Any:
        """Let a config with epochs omit `max_steps: null`."""
        if not isinstance(data, dict):
            return data
        keys = cast("dict[str, Any]", data)
        if keys.get("num_train_epochs") is None or "max_steps" in keys:
            return keys
        return {**keys, "max_steps": None}

    def conflicts(self) -> Iterator[Conflict]:
        """Yield a conflict for two keys with the same meaning if both or neither are set."""
        if self.max_steps is not None and self.num_train_epochs is not None:
            yield Conflict(
                f"max_steps is {self.max_steps} and num_train_epochs is {self.num_train_epochs}; "
                "give one of the two and set the other to null.",
                ("max_steps", "num_train_epochs"),
            )
        if self.max_steps is None and self.num_train_epochs is None:
            yield Conflict(
                "max_steps and num_train_epochs are both null; give one of the two.",
                ("max_steps", "num_train_epochs"),
            )
        if self.warmup_steps and self.warmup_ratio:
            yield Conflict(
                f"warmup_steps is {self.warmup_steps} and warmup_ratio is {self.warmup_ratio}; "
                "give one of the two.",
                ("warmup_steps", "warmup_ratio"),
            )


class TrainingConfig(OptimisationConfig):
    """The steps of reinforcement learning. Each draws `prompts_per_step` groups and makes one update, or several."""

    prompts_per_step: int = setting(8, "Examples (groups) drawn for each step.", ge=1)
    num_generations: int = setting(
        8,
        "Completions of each prompt, the size of a group. They are compared with each other, so at least 2, except for the plain form "
        "of reinforce_pp.",
        ge=1,
    )
    num_iterations: int = setting(
        1,
        "Passes over the groups of a step (mu in the GRPO paper). More learn more from each completion, off policy.",
        ge=1,
    )
    minibatches: int = setting(
        1, "Updates in each pass, of whole groups; at most prompts_per_step.", ge=1
    )
    schedule: Literal["fixed_lag", "free"] = setting(
        "fixed_lag",
        "fixed_lag: step n is sampled by the policy after n - max_off_policy_steps steps, and repeats exactly. free: each step takes the "
        "groups that are finished first, none older than max_off_policy_steps; the order is recorded.",
    )
    max_off_policy_steps: int = setting(
        0,
        "Number of steps that sampling may be ahead of learning. 0: they take turns. 1: the next step is sampled while this one is "
        "scored and learnt. If it is above 0, algorithm.importance_sampling_correction is token_truncate unless it is set.",
        ge=0,
    )

    @property
    def updates_per_step(self) -> int:
        """Optimiser calls in a step in which every group is trained."""
        return self.num_iterations * self.minibatches

    def conflicts(self) -> Iterator[Conflict]:
        """Also yield more updates than groups, and the schedule `free` without a lag."""
        yield from super().conflicts()
        if self.minibatches > self.prompts_per_step:
            yield Conflict(
                f"minibatches is {self.minibatches}, but a step has only prompts_per_step = {self.prompts_per_step} groups, "
                "and an update takes whole ones.",
                ("minibatches", "prompts_per_step"),
            )
        if self.schedule == "free" and self.max_off_policy_steps == 0:
            yield Conflict(
                "schedule is free with max_off_policy_steps 0, which leaves nothing free: every step would wait for its own groups. "
                "Set max_off_policy_steps to 1 or more, or schedule to fixed_lag.",
                ("schedule", "max_off_policy_steps"),
            )
