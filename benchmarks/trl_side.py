"""TRL's half of the comparison: a `GRPOTrainer` that waits before each step until it is asked for it.

Its best setting on a CPU: base in bfloat16, LoRA, one group as a micro-batch, memory that is freed kept for the next use. On a GPU a
micro-batch has as many groups as fit (`benchmarks.against_trl` tries), and TRL may sample by vLLM in its own process
(`vllm_mode="colocate"`).
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from benchmarks.memory import used_on_the_gpu
from benchmarks.step import config_of
from benchmarks.work import MODEL, Rules, Workload, prompts
from groupwise.engine.models.config import ModelConfig
from groupwise.engine.models.machine import prepare_process
from groupwise.engine.models.tokenizer import resolve
from groupwise.training.config import RunConfig

if TYPE_CHECKING:
    from trl import GRPOConfig


OUT_OF_MEMORY = "out of memory"


class Ended(Exception):
    """No further step is asked for."""


def serve(connection: Connection, work: Workload, rules: Rules) -> None:
    """Answer each message with the seconds of a step until one says `end`; with `OUT_OF_MEMORY` if a micro-batch does not fit."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    from groupwise.engine.models.lora_config import new_lora_config

    prepare_process(os.cpu_count() or 1)
    config = config_of(work, rules.dtype, model=rules.model)
    assert config.lora is not None
    assert config.training.max_steps is not None
    model, tokenizer = loaded(rules.dtype, rules.model)
    steps = range(config.training.max_steps)  # more than are asked for
    texts = [text for step in steps for text in prompts(work, tokenizer, step)]

    class Waiting(TrainerCallback):
        """Lets a step begin when the other side says so, and tells it how long the step took."""

        started = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            connection.send({})

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if connection.recv() == "end":
                raise Ended
            trainer.sampling, trainer.tokens = 0.0, 0
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            step = time.perf_counter() - self.started
            connection.send(
                {
                    "sampling": trainer.sampling,
                    "learning": step - trainer.sampling,
                    "step": step,
                    "tokens": float(trainer.tokens),
                    "gpu_mib": used_on_the_gpu(),
                }
            )

    class Timed(GRPOTrainer):
        """Knows how long it sampled, and how much."""

        sampling = 0.0
        tokens = 0

        def _generate(self, prompts: list[Any]) -> Any:
            started = time.perf_counter()
            found = super()._generate(prompts)
            self.sampling += time.perf_counter() - started
            self.tokens += sum(map(len, found[1]))
            return found

    exact_lengths: dict[str, Any] = {}
    if not work.natural:
        least = "min_tokens" if rules.vllm else "min_new_tokens"
        exact_lengths = {least: work.new_tokens}
    colocated = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": work.longest + work.new_tokens,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model=model,
            reward_funcs=_alternating,
            args=settings(
                config,
                folder,
                per_device_train_batch_size=rules.groups * work.members,
                gradient_accumulation_steps=len(work.prompts) // rules.groups,
                generation_kwargs=exact_lengths,
                logging_strategy="no",
                **(colocated if rules.vllm else {}),
            ),
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer,
            peft_config=new_lora_config(config.lora).as_peft(),
            callbacks=[Waiting()],
        )
        try:
            with suppress(Ended):
                trainer.train()
        except torch.OutOfMemoryError:
            connection.send(OUT_OF_MEMORY)


def loaded(dtype: str, name: str = MODEL) -> tuple[Any, Any]:
    """The model and its tokenizer, by transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    location = resolve(ModelConfig(name=name)).location
    model = AutoModelForCausalLM.from_pretrained(location, dtype=getattr(torch, dtype))
    return model, AutoTokenizer.from_pretrained(location)


def settings(config: RunConfig, folder: str, **more: Any) -> GRPOConfig:
    """What Groupwise's config says, in TRL's words, and `more`."""
    from trl import GRPOConfig

    return GRPOConfig(**{**in_words_of_trl(config, folder), **more})


def in_words_of_trl(config: RunConfig, folder: str) -> dict[str, Any]:
    """What Groupwise's config says, as arguments of `GRPOConfig`; a group is a micro-batch."""
    import torch

    training = config.training
    assert training.max_steps is not None
    return dict(
        output_dir=folder,
        seed=training.seed,
        max_steps=training.max_steps,
        per_device_train_batch_size=training.num_generations,
        gradient_accumulation_steps=training.prompts_per_step,
        num_generations=training.num_generations,
        num_iterations=training.num_iterations,
        max_completion_length=config.sampler.max_completion_length,
        temperature=config.sampler.temperature,
        loss_type=config.algorithm.type,
        scale_rewards="none",
        learning_rate=training.learning_rate,
        lr_scheduler_type=training.lr_scheduler_type,
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_epsilon=training.adam_epsilon,
        max_grad_norm=training.max_grad_norm or 0.0,
        gradient_checkpointing=training.gradient_checkpointing,
        bf16=False,  # the model's own number format stands
        use_cpu=not torch.cuda.is_available(),
        shuffle_dataset=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **config.algorithm.model_dump(include={"beta", "epsilon"}),
    )


def _alternating(completions: list[Any], **_: Any) -> list[float | None]:
    """Rewards that always teach."""
    return [float(index % 2) for index in range(len(completions))]
