"""What people write in a config who come from TRL, verl, OpenRLHF or vLLM, and what it is here.

An unknown key is looked up here before any near name is suggested; a name that ends in `*` matches by its beginning.
"""

from __future__ import annotations

_BATCH = (
    "a step is training.prompts_per_step groups of training.num_generations completions, "
    "and training.max_tokens_per_microbatch is what is computed at once"
)
_ENGINE = "sampler.engine names the engine, and only torch is in this version"
_RL_DATA = "here it is data.dataset_name, where no task's get_rl_dataset brings the data"
_OVERLONG = (
    "algorithm.type dapo has algorithm.soft_punish_cache and algorithm.soft_punish_factor, and "
    "algorithm.mask_truncated_completions leaves rollouts that were cut off out of the loss"
)
_RESUME = "give --resume or --resume-from RUN@STEP on the command line"


def _named(key: str) -> str:
    return f"here it is {key}"


FOREIGN_TO_RL: dict[str, str] = {
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "generation_batch_size",
            "steps_per_generation",
            "train_batch_size",
            "rollout_batch_size",
            "mini_batch_size",
            "micro_batch_size",
            "batch_size",
        ),
        _BATCH,
    ),
    **dict.fromkeys(("vllm", "vllm_*", "use_vllm", "sglang"), _ENGINE),
    **dict.fromkeys(
        ("max_tokens", "max_new_tokens", "max_response_length", "response_length"),
        _named("sampler.max_completion_length"),
    ),
    **dict.fromkeys(
        ("min_tokens", "min_new_tokens", "min_length"), _named("sampler.min_completion_length")
    ),
    **dict.fromkeys(
        ("hf_repo_id", "hub_model_id"),
        _named("run.hub.repo_id"),
    ),
    "benchmarks": "the callback benchmark_on_checkpoint takes them as suites",
    "push_to_hub": "run.hub.repo_id names where the result is uploaded to; without it nothing is",
    "hub_private_repo": _named("run.hub.private"),
    "hub_model_revision": _named("run.hub.revision"),
    "wandb_log_unique_prompts": _named("run.log_unique_prompts"),
    "log_completions": "run.num_completions_to_print says how many rollouts the sinks show",
    "license_name": _named("run.license"),
    **dict.fromkeys(
        (
            *("logger", "loggers", "tracker", "trackers", "log_with"),
            *("use_wandb", "use_mlflow", "use_tensorboard", "use_trackio"),
        ),
        _named("run.report_to"),
    ),
    "mlflow_experiment_name": _named("run.mlflow_experiment"),
    "mlflow_tracking_uri": "the environment says it, as MLFLOW_TRACKING_URI, and run.report_to names mlflow",
    "project_name": "here it is run.wandb_project, run.trackio_project or run.mlflow_experiment",
    **dict.fromkeys(("wandb_mode", "wandb_offline"), "the environment says it, as WANDB_MODE"),
    **dict.fromkeys(
        ("model_name_or_path", "model_name", "model_id", "base_model", "pretrained_model"),
        _named("model.name"),
    ),
    "model_revision": _named("model.revision"),
    **dict.fromkeys(("adapter_path", "adapter_name_or_path"), _named("model.adapter")),
    **dict.fromkeys(("torch_dtype", "bf16", "fp16", "precision"), _named("model.dtype")),
    **dict.fromkeys(("max_seq_len", "max_length"), _named("model.max_seq_length")),
    **dict.fromkeys(("lora_r", "lora_rank", "rank"), _named("lora.r")),
    "lora_alpha": _named("lora.alpha"),
    "lora_dropout": _named("lora.dropout"),
    "lora_target_modules": _named("lora.target_modules"),
    "use_peft": "here it is lora, where null trains all weights",
    **dict.fromkeys(("lr", "actor_lr"), _named("training.learning_rate")),
    **dict.fromkeys(("epochs", "num_epochs", "total_epochs"), _named("training.num_train_epochs")),
    **dict.fromkeys(
        ("total_steps", "num_steps", "total_training_steps"), _named("training.max_steps")
    ),
    **dict.fromkeys(
        ("group_size", "num_return_sequences", "rollouts_per_example"),
        _named("training.num_generations"),
    ),
    **dict.fromkeys(("lr_scheduler", "scheduler"), _named("training.lr_scheduler_type")),
    "warmup": "here it is training.warmup_steps or training.warmup_ratio",
    "optimizer": _named("training.optim"),
    **dict.fromkeys(
        ("gradient_clipping", "grad_clip", "clip_grad_norm"), _named("training.max_grad_norm")
    ),
    **dict.fromkeys(("kl_coef", "kl_loss_coef", "init_kl_coef"), _named("algorithm.beta")),
    **dict.fromkeys(("clip_range", "cliprange", "clip_ratio"), _named("algorithm.epsilon")),
    **dict.fromkeys(("clip_ratio_high", "cliprange_high"), _named("algorithm.epsilon_high")),
    "clip_ratio_low": _named("algorithm.epsilon"),
    "clip_ratio_c": _named("algorithm.delta"),
    **dict.fromkeys(
        ("loss_type", "adv_estimator", "advantage_estimator"), _named("algorithm.type")
    ),
    **dict.fromkeys(
        ("loss_normaliser", "loss_normalizer", "normaliser", "normalizer", "loss_agg_mode"),
        "what a loss is divided by belongs to the algorithm: algorithm.type dr_grpo takes a constant, dapo the tokens of the step, "
        "grpo those of each rollout",
    ),
    **dict.fromkeys(
        ("proximal_logprobs", "use_proximal_logprobs"),
        "the learner computes them where algorithm.importance_sampling_correction needs them",
    ),
    "importance_sampling_level": "here algorithm.type gspo has one ratio for a sequence",
    **dict.fromkeys(
        ("kl_loss_type", "kl_penalty", "kl_type"),
        _named("algorithm.kl_estimator"),
    ),
    "use_bias_correction_kl": "here it is algorithm.kl_gradient with the value exact, its default",
    "use_adaptive_kl": _named("algorithm.adaptive_kl"),
    "target_kl": _named("algorithm.kl_target"),
    **dict.fromkeys(
        ("entropy_bonus", "entropy_coeff", "entropy_loss_coef"), _named("algorithm.entropy_coef")
    ),
    **dict.fromkeys(
        ("filter_groups", "dynamic_sample", "dynamic_filtering"),
        _named("algorithm.dynamic_sampling"),
    ),
    **dict.fromkeys(
        ("max_resample_times", "max_num_gen_batches"), _named("algorithm.max_resample_rounds")
    ),
    **dict.fromkeys(("overlong_buffer", "overlong_filter"), _OVERLONG),
    **dict.fromkeys(
        ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "rollout_is"),
        _named("algorithm.importance_sampling_correction"),
    ),
    **dict.fromkeys(
        (
            "vllm_importance_sampling_cap",
            "vllm_importance_sampling_clip_max",
            "tis_imp_ratio_cap",
        ),
        _named("algorithm.importance_sampling_cap"),
    ),
    "normalize_advantages": "here algorithm.type reinforce_pp normalises advantages over the step",
    **dict.fromkeys(("dataset", "train_dataset", "dataset_path", "train_files"), _RL_DATA),
    **dict.fromkeys(
        ("eval_dataset", "val_files"),
        "here it is data.dataset_test_split or data.test_split_size, where no task brings the data",
    ),
    **dict.fromkeys(("output_dir", "logging_dir"), "here it is run.dir with run.name"),
    **dict.fromkeys(
        ("run_name", "experiment_name", "wandb_run_name", "mlflow_run_name"), _named("run.name")
    ),
    **dict.fromkeys(
        ("eval_strategy", "evaluation_strategy", "do_eval"),
        "here it is eval.eval_steps, and eval.before_and_after",
    ),
    "save_strategy": _named("run.save_steps"),
    **dict.fromkeys(
        (
            "examples_per_step",
            "completion_only_loss",
            "assistant_only_loss",
            "assistant_turns",
            "dataset_text_field",
            "truncation_mode",
            "load_best_model_at_end",
            "eval_on_start",
        ),
        "it belongs to `groupwise sft`, which has a config of its own",
    ),
    **dict.fromkeys(("resume", "resume_from_checkpoint"), _RESUME),
}
"""For the config of `groupwise rl`."""


_STEP = (
    "a step is training.examples_per_step examples, and training.max_tokens_per_microbatch is what is "
    "computed at once"
)
_RL = "it belongs to `groupwise rl`, which has a config of its own; `groupwise sft` samples nothing"
_RL_EVAL = (
    "it belongs to `groupwise rl` and `groupwise eval`, which have a config of their own; `groupwise sft` evaluates the "
    "loss on held-out rows"
)
_SFT_DATA = "here it is data.dataset_name, where no task's get_sft_dataset brings the data"
_EVAL = "here it is eval.eval_steps; evaluation is on where the task has get_sft_eval_dataset"
_NOT_HERE = ("sampler.", "training.num_generations", "algorithm.", "prompts_per_step")

_SHARED = {
    name: advice
    for name, advice in FOREIGN_TO_RL.items()
    if not any(part in advice for part in _NOT_HERE)
}
"""Of `groupwise rl`, what holds for a supervised run too."""

FOREIGN_TO_SFT: dict[str, str] = {
    **_SHARED,
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "train_batch_size",
            "mini_batch_size",
            "micro_batch_size",
            "batch_size",
        ),
        _STEP,
    ),
    **dict.fromkeys(
        (
            "sampler",
            "algorithm",
            "rewards",
            "rollout",
            "prompts_per_step",
            "num_generations",
            "num_iterations",
            "minibatches",
            "schedule",
            "lag",
            "max_prompt_length",
            "max_completion_length",
            "beta",
            "temperature",
        ),
        _RL,
    ),
    **dict.fromkeys(
        (
            "before_and_after",
            "samples_per_prompt",
            "pass_at_k",
            "success_threshold",
            "success_part",
        ),
        _RL_EVAL,
    ),
    "max_prompts": "here it is eval.max_examples",
    **dict.fromkeys(("dataset", "train_dataset", "dataset_path", "train_files"), _SFT_DATA),
    **dict.fromkeys(
        ("max_seq_length", "max_seq_len", "sequence_len", "cutoff_len", "model_max_length"),
        "here it is data.max_length",
    ),
    **dict.fromkeys(
        ("max_length", "dataset_text_field", "completion_only_loss", "truncation_mode"),
        "here it stands in the section data",
    ),
    **dict.fromkeys(
        ("assistant_only_loss", "train_on_inputs", "train_on_prompt"),
        "here it is data.completion_only_loss",
    ),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy", "do_eval"), _EVAL),
    **dict.fromkeys(("metric_for_best_model", "greater_is_better"), "the metric is eval_loss"),
}
"""For the config of `groupwise sft`."""
