"""TRL's half of the comparison: a `GRPOTrainer` that waits before each step until it is asked for it.

Its best setting on a CPU: base in bfloat16, LoRA, one group as a micro-batch, memory that is freed kept for the next use.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.work import ALPHA, LEARNING_RATE, MODEL, RANK, Work, prompts
from groupwise.models.config import ModelConfig
from groupwise.models.machine import prepare_process
from groupwise.models.tokenizer import resolve

STEPS = 100
"""More than are asked for."""


class Ended(Exception):
    """No further step is asked for."""


def serve(connection: Connection, work: Work, dtype: str) -> None:
    """Answer each message with the seconds of a step until one says `end`."""
    import os

    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    prepare_process(os.cpu_count() or 1)
    model, tokenizer = loaded(dtype)
    texts = [text for step in range(STEPS) for text in prompts(work, tokenizer, step)]

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

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=work.members,
            gradient_accumulation_steps=len(work.prompts),
            num_generations=work.members,
            max_completion_length=work.new_tokens,
            generation_kwargs={} if work.natural else {"min_new_tokens": work.new_tokens},
            temperature=1.0,
            beta=0.0,
            learning_rate=LEARNING_RATE,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            shuffle_dataset=False,
        )
        trainer = Timed(
            model=model,
            reward_funcs=_alternating,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=tokenizer,
            peft_config=adapter(),
            callbacks=[Waiting()],
        )
        with suppress(Ended):
            trainer.train()


def loaded(dtype: str) -> tuple[Any, Any]:
    """The model of the benchmarks and its tokenizer, by transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    location = resolve(ModelConfig(name=MODEL)).location
    model = AutoModelForCausalLM.from_pretrained(location, dtype=getattr(torch, dtype))
    return model, AutoTokenizer.from_pretrained(location)


def adapter() -> Any:
    """The adapter of the benchmarks as peft describes it."""
    from peft import LoraConfig

    return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")


def _alternating(completions: list[Any], **_: Any) -> list[float | None]:
    """Rewards that always teach."""
    return [float(index % 2) for index in range(len(completions))]
