"""A job with the Trainer of Hugging Face. If its machine is lost, it continues on another one."""

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from groupwise.jobs.hosts.seal import seal


class Travels(TrainerCallback):
    """Each checkpoint is sealed when it has been written, and mirrored from then on."""

    def on_save(self, args, state, control, **_):
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # each rank has written its part
        if state.is_world_process_zero:
            seal(f"{args.output_dir}/checkpoint-{state.global_step}", state.global_step)


class FailsOnce(TrainerCallback):
    """Fails once, at the step FAIL_AT, to show a retry."""

    def on_step_end(self, args, state, control, **_):
        if os.environ["ATTEMPT"] == "0" and state.global_step == int(
            os.environ.get("FAIL_AT", "0")
        ):
            raise SystemExit("fails, to show what follows")


class Numbers(torch.utils.data.Dataset):
    """Numbers that follow each other."""

    def __len__(self):
        return 8

    def __getitem__(self, n):
        row = torch.tensor([n, n + 1, n + 2])
        return {"input_ids": row, "labels": row}


trainer = Trainer(
    GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=4, n_embd=8, n_layer=1, n_head=1)),
    TrainingArguments(
        os.environ["GROUPWISE_OUTPUT"],
        max_steps=8,
        save_steps=2,
        save_total_limit=2,
        logging_steps=1,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    ),
    train_dataset=Numbers(),
    callbacks=[Travels(), FailsOnce()],
)
trainer.train(resume_from_checkpoint=os.environ.get("RESUME_FROM"))
trainer.save_model()
