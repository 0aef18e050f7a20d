"""Keys of TRL, verl, OpenRLHF and vLLM, with their equivalents here, for messages about unknown keys.

An unknown key is looked up here before any near name is suggested; a name that ends in `*` matches by its beginning.
"""

from __future__ import annotations

_BATCH = (
    "a step is training.prompts_per_step groups of training.num_generations completions, "
    "and training.max_tokens_per_microbatch is what is computed at once"
)
_ENGINE = "sampler.engine names the engine, torch or vllm, and with vllm sampler.url says where it answers"
_RL_DATA = "here it is data.dataset_name, where no task's get_rl_dataset brings the data"
_OVERLONG = (
    "algorithm.type dapo has algorithm.soft_punish_cache and algorithm.soft_punish_factor, and "
    "algorithm.mask_truncated_completions leaves rollouts that were cut off out of the loss"
)
_RESUME = "give --resume or --resume-from RUN@STEP on the command line"
_MACHINE = "here it is distributed.learners, one process for each GPU; run.processes and run.threads say how many cores of a CPU are used"
_CHECKPOINTS = "the callback push_to_hub_revision uploads each checkpoint"
_REWARDS = "rewards.reward_funcs names the rewards, each with its parameters"
_SANDBOX = "the reward python_tests runs code in boxes of its own, on this machine"
_SFT = "it belongs to `groupwise sft`, which has a config of its own"
_TASK = "the task brings it: give --task-module on the command line"


def _of_reward(parameter: str, reward: str) -> str:
    return f"it is `{parameter}` of the reward {reward}, in its entry of rewards.reward_funcs"


def _of_callback(parameter: str, callback: str) -> str:
    return f"it is `{parameter}` of the callback {callback}, in its entry of `callbacks`"


def _named(key: str) -> str:
    return f"here it is {key}"


FOREIGN_VALUES: dict[tuple[str, str], str] = {
    ("max_steps", "-1"): "Where epochs say how long, write null, and training.num_train_epochs",
    ("scale_rewards", "True"): "TRL's true is group here",
    ("scale_rewards", "False"): "TRL's false is none here",
    ("dtype", "'float16'"): "Half precision is bfloat16 here, which needs no loss scaling",
    ("dtype", "'bf16'"): "Write bfloat16",
}
"""Values that people write elsewhere, by key and how Python writes them, and what they are here."""

FOREIGN_TO_RL: dict[str, str] = {
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "per_device_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "generation_batch_size",
            "steps_per_generation",
            "train_batch_size",
            "rollout_batch_size",
            "mini_batch_size",
            "micro_batch_size",
            "micro_train_batch_size",
            "micro_rollout_batch_size",
            "ppo_mini_batch_size",
            "ppo_micro_batch_size*",
            "log_prob_micro_batch_size*",
            "batch_size",
        ),
        _BATCH,
    ),
    **dict.fromkeys(
        ("ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu", "max_tokens_per_gpu"),
        _named("training.max_tokens_per_microbatch"),
    ),
    "vllm_gpu_memory_utilization": _named("sampler.gpu_memory_utilization"),
    "eval_on_start": _named("eval.before_and_after"),
    "evaluation": "here it is the section eval",
    "attn_implementation": "the attention implementation is chosen automatically",
    **dict.fromkeys(("init_adapter_repo", "init_adapter"), _named("model.adapter")),
    **dict.fromkeys(("use_rslora", "rs_lora"), _named("lora.rslora")),
    **dict.fromkeys(
        ("use_dora", "modules_to_save", "lora_bias", "lora_modules_to_save", "bias"),
        "only the low-rank factors of lora are trained; null for the section lora trains all weights",
    ),
    **dict.fromkeys(
        ("task_type", "lora_task_type"), "it is always causal language modelling; leave it out"
    ),
    **dict.fromkeys(("vllm", "vllm_*", "use_vllm", "sglang", "fast_inference"), _ENGINE),
    **dict.fromkeys(
        (
            *("max_tokens", "max_new_tokens", "max_response_length", "response_length"),
            *("max_completion_len", "generate_max_len"),
        ),
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
    "hub_model_revision": (
        "here it is run.hub.revision, and `revision` of the callback push_to_hub_revision, which uploads each checkpoint"
    ),
    "overwrite_hub_revision": (
        "here it is run.hub.overwrite, and `overwrite` of the callback push_to_hub_revision, which uploads each checkpoint"
    ),
    "push_to_hub_revision": f"{_CHECKPOINTS}: name it in `callbacks`",
    "hub_strategy": f"run.hub.repo_id names where the final weights are uploaded to, and {_CHECKPOINTS}",
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
    **dict.fromkeys(
        ("wandb", "wandb_config"),
        "here run.report_to names wandb, beside run.wandb_project, run.wandb_entity and run.wandb_group",
    ),
    "wandb_run_group": _named("run.wandb_group"),
    "wandb_tags": "the environment says it, as WANDB_TAGS",
    "wandb_notes": "the environment says it, as WANDB_NOTES",
    "project_name": "here it is run.wandb_project, run.trackio_project or run.mlflow_experiment",
    **dict.fromkeys(
        ("early_stopping", "early_stopping_patience"), _of_callback("patience", "early_stop")
    ),
    **dict.fromkeys(
        ("early_stopping_threshold", "early_stopping_min_delta"),
        _of_callback("min_delta", "early_stop"),
    ),
    **dict.fromkeys(("wandb_mode", "wandb_offline"), "the environment says it, as WANDB_MODE"),
    **dict.fromkeys(
        ("model_name_or_path", "model_name", "model_id", "base_model", "pretrained_model"),
        _named("model.name"),
    ),
    "model_revision": _named("model.revision"),
    **dict.fromkeys(("adapter_path", "adapter_name_or_path"), _named("model.adapter")),
    **dict.fromkeys(
        ("torch_dtype", "bf16", "fp16", "precision", "mixed_precision"), _named("model.dtype")
    ),
    **dict.fromkeys(("max_seq_len", "seq_len", "max_length"), _named("model.max_seq_length")),
    **dict.fromkeys(("lora_r", "lora_rank", "max_lora_rank", "rank"), _named("lora.r")),
    **dict.fromkeys(
        ("peft", "peft_config", "lora_config", "qlora", "adapter_config"),
        "here it is the section lora: lora.r, lora.alpha, lora.dropout, lora.target_modules",
    ),
    **dict.fromkeys(("stop_strings", "stop_words", "stop_sequences"), _named("sampler.stop")),
    **dict.fromkeys(
        ("enable_thinking", "thinking", "thinking_budget", "reasoning_effort"),
        "what the chat template reads stands in model.chat_template_kwargs, each under its name",
    ),
    "actor_rollout_ref": (
        "it is a section of verl: its model is the section model here, its actor is training and algorithm, its rollout is sampler and "
        "training.num_generations, and its ref is algorithm.beta"
    ),
    **dict.fromkeys(
        ("actor", "policy"),
        "elsewhere it is a section of what learns; here that is model, training and algorithm",
    ),
    "trainer": "it is a section of verl and others; here its keys stand in training, eval and run",
    "generator": "it is a section of SkyRL; here it is sampler, and training.num_generations",
    "orchestrator": "it is a section of prime-rl; here its keys stand in training, data and eval",
    "lora_alpha": _named("lora.alpha"),
    "lora_dropout": _named("lora.dropout"),
    "lora_target_modules": _named("lora.target_modules"),
    **dict.fromkeys(
        ("use_peft", "full_finetuning"), "here it is lora, where null trains all weights"
    ),
    "use_gradient_checkpointing": _named("training.gradient_checkpointing"),
    **dict.fromkeys(("random_state", "random_seed"), _named("training.seed")),
    **dict.fromkeys(("lr", "actor_lr", "actor_learning_rate"), _named("training.learning_rate")),
    **dict.fromkeys(
        ("epochs", "num_epochs", "total_epochs", "num_episodes"),
        _named("training.num_train_epochs"),
    ),
    **dict.fromkeys(
        ("total_steps", "num_steps", "total_training_steps"), _named("training.max_steps")
    ),
    **dict.fromkeys(
        (
            *("group_size", "num_return_sequences", "rollouts_per_example", "rollouts_per_group"),
            *("n", "n_samples_per_prompt", "num_rollouts", "num_samples_per_prompt"),
        ),
        _named("training.num_generations"),
    ),
    **dict.fromkeys(("groups_per_step", "problems_per_step"), _named("training.prompts_per_step")),
    **dict.fromkeys(
        ("ppo_epochs", "ppo_inner_epochs", "num_ppo_epochs"), _named("training.num_iterations")
    ),
    **dict.fromkeys(
        ("async_level", "max_async_level", "lag"), _named("training.max_off_policy_steps")
    ),
    **dict.fromkeys(("lr_scheduler", "scheduler"), _named("training.lr_scheduler_type")),
    "lr_warmup_steps": _named("training.warmup_steps"),
    **dict.fromkeys(("lr_warmup_ratio", "lr_warmup_steps_ratio"), _named("training.warmup_ratio")),
    "warmup": "here it is training.warmup_steps or training.warmup_ratio",
    "optimizer": _named("training.optim"),
    **dict.fromkeys(
        ("gradient_clipping", "grad_clip", "clip_grad_norm"), _named("training.max_grad_norm")
    ),
    **dict.fromkeys(("kl_coef", "kl_loss_coef", "init_kl_coef"), _named("algorithm.beta")),
    **dict.fromkeys(
        ("clip_range", "cliprange", "clip_ratio", "eps_clip"), _named("algorithm.epsilon")
    ),
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
    "norm_adv_by_std_in_grpo": _named("algorithm.scale_rewards"),
    **dict.fromkeys(
        ("critic", "critic_*", "value_model", "vf_coef", "gamma", "gae_lambda", "lam"),
        "no algorithm here has a critic: completions of a prompt are compared with each other",
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
    **dict.fromkeys(
        ("dataset", "train_dataset", "dataset_path", "train_files", "prompt_data"), _RL_DATA
    ),
    "dataset_train_split": _named("data.dataset_split"),
    **dict.fromkeys(
        ("dataset_solution_column", "dataset_answer_column", "solution_column", "label_key"),
        _named("data.answer_column"),
    ),
    **dict.fromkeys(
        ("dataset_prompt_column", "prompt_key", "input_key"), _named("data.prompt_column")
    ),
    **dict.fromkeys(
        ("prompt_max_len", "max_prompt_len", "filter_overlong_prompts"),
        _named("data.max_prompt_length"),
    ),
    "shuffle_dataset": _named("data.shuffle"),
    **dict.fromkeys(
        ("temp_start", "temperature_start"), _named("sampler.temperature_schedule.start")
    ),
    **dict.fromkeys(("temp_end", "temperature_end"), _named("sampler.temperature_schedule.end")),
    **dict.fromkeys(
        ("anneal_steps", "temp_steps", "temp_anneal_steps", "temperature_steps"),
        _named("sampler.temperature_schedule.steps"),
    ),
    **dict.fromkeys(
        ("high_temp_period", "high_temp_every", "hot_every"),
        _named("sampler.temperature_schedule.high_temperature_every"),
    ),
    **dict.fromkeys(
        ("high_temp", "temp_high", "hot"), _named("sampler.temperature_schedule.high_temperature")
    ),
    "slots": _named("sampler.max_num_seqs"),
    "scale": "here it is the section distributed",
    **dict.fromkeys(("replay_buffer", "use_replay", "use_replay_buffer"), _named("data.replay")),
    **dict.fromkeys(
        ("replay_buffer_size", "replay_capacity", "buffer_size"), _named("data.replay.capacity")
    ),
    **dict.fromkeys(("replay_warmup", "replay_warmup_steps"), _named("data.replay.warmup_entries")),
    **dict.fromkeys(
        ("replay_ratio", "replay_fraction", "replay_share", "replay_prob"),
        _named("data.replay.max_share"),
    ),
    **dict.fromkeys(("ucb_c", "ucb_exploration"), _named("data.replay.exploration")),
    **dict.fromkeys(("curriculum_learning", "use_curriculum"), _named("data.curriculum")),
    **dict.fromkeys(("easy_dataset", "easy_dataset_name"), _named("data.easy_pool.dataset_name")),
    **dict.fromkeys(
        ("eval_dataset", "val_files"),
        "here it is data.dataset_test_split or data.test_split_size, where no task brings the data",
    ),
    **dict.fromkeys(
        ("output_dir", "logging_dir", "default_local_dir", "save_path", "ckpt_path"),
        "here it is run.dir with run.name",
    ),
    **dict.fromkeys(
        (
            *("run_name", "experiment_name", "wandb_run_name", "wandb_name"),
            "mlflow_run_name",
        ),
        _named("run.name"),
    ),
    **dict.fromkeys(
        ("eval_strategy", "evaluation_strategy", "do_eval"),
        "here it is eval.eval_steps, and eval.before_and_after",
    ),
    **dict.fromkeys(("eval_interval", "eval_every", "test_freq"), _named("eval.eval_steps")),
    "val_before_train": _named("eval.before_and_after"),
    "eval_n_samples_per_prompt": _named("eval.samples_per_prompt"),
    **dict.fromkeys(
        (
            "save_strategy",
            "save_freq",
            "save_interval",
            "ckpt",
            "ckpt_interval",
            "checkpoint_interval",
        ),
        _named("run.save_steps"),
    ),
    **dict.fromkeys(("max_actor_ckpt_to_keep", "max_ckpt_num"), _named("run.save_total_limit")),
    **dict.fromkeys(
        (
            *("num_gpus", "n_gpus", "n_gpus_per_node", "num_gpus_per_node", "gpus", "nnodes"),
            *("num_nodes", "num_processes", "world_size", "num_train_gpus", "num_infer_gpus"),
            *("trainer_gpu_ids", "inference_gpu_ids", "device", "device_map"),
            *("deepspeed", "deepspeed_*", "zero_stage", "fsdp", "fsdp_*", "ddp_*"),
        ),
        _MACHINE,
    ),
    "cosine_max_len": f"{_of_reward('max_length', 'length')}, there in tokens",
    "cosine_min_value_wrong": _of_reward("wrong_short", "length"),
    "cosine_max_value_wrong": _of_reward("wrong_long", "length"),
    "cosine_min_value_correct": _of_reward("right_long", "length"),
    "cosine_max_value_correct": _of_reward("right_short", "length"),
    "repetition_max_penalty": _of_reward("max_penalty", "repetition"),
    **dict.fromkeys(("repetition_n_grams", "repetition_ngram_size"), _of_reward("n", "repetition")),
    **dict.fromkeys(("reward_functions", "reward_function", "custom_reward_function"), _REWARDS),
    **dict.fromkeys(
        ("judge_model", "judge_url", "ruler", "ruler_judge_model"),
        "the reward judge asks a model: name it in rewards.reward_funcs, with its parameters",
    ),
    **dict.fromkeys(
        (
            *("code_provider", "code_language", "ioi_provider", "e2b_router_url"),
            *("morph_router_url", "parallel_code_exec_per_proc", "code_eval_test_batch_size"),
        ),
        _SANDBOX,
    ),
    **dict.fromkeys(("env", "env_id", "environment", "environments", "task_module"), _TASK),
    **dict.fromkeys(
        ("max_tool_calling_iterations", "max_assistant_turns", "max_turns_per_rollout"),
        _named("rollout.max_turns"),
    ),
    **dict.fromkeys(
        (
            "examples_per_step",
            "completion_only_loss",
            "assistant_only_loss",
            "assistant_turns",
            "dataset_text_field",
            "truncation_mode",
            "load_best_model_at_end",
        ),
        _SFT,
    ),
    **dict.fromkeys(("resume", "resume_from_checkpoint"), _RESUME),
}
"""Advice on keys in a config of `groupwise rl`."""


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
_OF_RL_ALONE = (
    *(
        "sampler.",
        "algorithm",
        "rewards.",
        "rollout.",
        "data.replay",
        "data.curriculum",
        "data.easy_pool",
    ),
    *(
        "the reward ",
        "data.max_prompt_length",
        "eval.before_and_after",
        "eval.samples_per_prompt",
    ),
    *(
        "training.num_generations",
        "training.prompts_per_step",
        "training.num_iterations",
        "training.max_off_policy_steps",
    ),
)
"""Words in an advice about things that a supervised run does not have."""
_KEYS_OF_SFT = ("early_stopping_patience", "early_stopping_threshold", "eval_on_start")


def _for_sft(name: str, advice: str) -> str | None:
    """The advice on a name of the other table in a supervised run."""
    if advice == _SFT or name in _KEYS_OF_SFT:
        return None
    return _RL if any(part in advice for part in _OF_RL_ALONE) else advice


FOREIGN_TO_SFT: dict[str, str] = {
    **{
        name: own
        for name, advice in FOREIGN_TO_RL.items()
        if (own := _for_sft(name, advice)) is not None
    },
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "train_batch_size",
            "mini_batch_size",
            "micro_batch_size",
            "micro_train_batch_size",
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
            "max_off_policy_steps",
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
        (
            "max_seq_length",
            "max_seq_len",
            "seq_len",
            "sequence_len",
            "cutoff_len",
            "model_max_length",
        ),
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
"""Advice on keys in a config of `groupwise sft`."""
