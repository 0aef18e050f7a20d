"""The keys of TRL, open-r1 and Unsloth: what each is here, what decides nothing here, and what has no equal.

The defaults are those of TRL 1.16.
"""

from __future__ import annotations

from typing import Any

SAME = {
    "model_name_or_path": "model.name", "model_name": "model.name", "model_revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code", "max_seq_length": "model.max_seq_length", "load_in_4bit": "model.load_in_4bit",
    "load_in_8bit": "model.load_in_8bit", "chat_template_kwargs": "model.chat_template_kwargs",
    "lora_r": "lora.r", "lora_alpha": "lora.alpha", "lora_dropout": "lora.dropout", "use_rslora": "lora.rslora",
    "temperature": "sampler.temperature", "max_completion_length": "sampler.max_completion_length",
    "beta": "algorithm.beta", "epsilon": "algorithm.epsilon", "epsilon_high": "algorithm.epsilon_high", "delta": "algorithm.delta",
    "mask_truncated_completions": "algorithm.mask_truncated_completions",
    "max_steps": "training.max_steps", "num_train_epochs": "training.num_train_epochs",
    "warmup_steps": "training.warmup_steps", "warmup_ratio": "training.warmup_ratio", "weight_decay": "training.weight_decay",
    "adam_beta1": "training.adam_beta1", "adam_beta2": "training.adam_beta2", "adam_epsilon": "training.adam_epsilon",
    "max_grad_norm": "training.max_grad_norm", "seed": "training.seed", "gradient_checkpointing": "training.gradient_checkpointing",
    "num_generations": "training.num_generations", "num_iterations": "training.num_iterations",
    "dataset_name": "data.dataset_name", "dataset_config": "data.dataset_config", "dataset_train_split": "data.dataset_split",
    "dataset_test_split": "data.dataset_test_split", "dataset_revision": "data.dataset_revision",
    "test_split_size": "data.test_split_size", "stop_token_ids": "sampler.stop_token_ids", "min_tokens": "sampler.min_completion_length",
    "dataset_prompt_column": "data.prompt_column",
    "dataset_solution_column": "data.answer_column", "max_prompt_length": "data.max_prompt_length",
    "shuffle_dataset": "data.shuffle", "system_prompt": "data.system_prompt", "reward_weights": "rewards.reward_weights",
    "save_steps": "run.save_steps", "save_total_limit": "run.save_total_limit", "logging_steps": "run.logging_steps",
    "run_name": "run.name", "output_dir": "run.dir", "wandb_project": "run.wandb_project", "wandb_entity": "run.wandb_entity",
    "wandb_run_group": "run.wandb_group", "hub_model_id": "run.hub.repo_id", "hub_model_revision": "run.hub.revision",
    "hub_private_repo": "run.hub.private", "log_unique_prompts": "run.log_unique_prompts", "entropy_coef": "algorithm.entropy_coef",
    "eval_on_start": "eval.before_and_after",
}  # fmt: skip
"""Keys whose values mean the same under ours."""

WITHOUT_EFFECT = frozenset(
    """
    attn_implementation bf16 tf32 fp16 torch_dtype task_type lora_task_type use_cache do_train do_eval bf16_full_eval fp16_full_eval
    logging_strategy logging_first_step log_level log_level_replica log_completions num_completions_to_print log_on_each_node
    logging_nan_inf_filter log_multimodal log_completions_hub_repo include_num_input_tokens_seen skip_memory_metrics debug
    remove_unused_columns ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend
    dataloader_num_workers dataloader_drop_last dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order gradient_checkpointing_kwargs activation_checkpointing_kwargs
    overwrite_output_dir overwrite_hub_revision push_to_hub push_to_hub_revision hub_strategy hub_token hub_always_push save_strategy
    save_only_model save_on_each_node enable_jit_checkpoint logging_dir use_liger_loss use_liger_kernel liger_kernel_config
    use_vllm vllm_mode vllm_device vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_server_host vllm_server_port
    vllm_server_base_url vllm_server_timeout vllm_group_port vllm_model_impl vllm_max_model_length vllm_enable_sleep_mode vllm_dtype
    vllm_max_model_len vllm_enable_prefix_caching gpu_memory_utilization fast_inference max_model_len ds3_gather_for_generation
    cache_implementation use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged
    deepspeed fsdp fsdp_config accelerator_config parallelism_config full_determinism per_device_eval_batch_size
    eval_accumulation_steps eval_do_concat_batches eval_use_gather_object batch_eval_metrics prediction_loss_only include_for_metrics
    disable_tqdm model_init_kwargs cast_lm_head_to_fp32 shuffle_buffer use_peft processing_class tokenizer torch_empty_cache_steps
    torch_compile torch_compile_backend torch_compile_mode use_cpu no_cuda local_rank project trackio_space_id trackio_bucket_id
    trackio_static_space_id eval_dataset train_dataset dataset args peft_config quantization_config callbacks token device_map benchmarks
    packing max_lora_rank bnb_4bit_quant_type bnb_4bit_compute_dtype bnb_4bit_use_double_quant use_bnb_nested_quant
    bnb_4bit_quant_storage num_processes config config_file ignore_data_skip restore_callback_states_from_checkpoint
    vllm_sampling_params.seed vllm_sampling_params.n include_stop_str_in_output generation_batch_size float8_kv_cache
    jit_mode_eval past_index dispatch_batches split_batches pad_to_multiple_of length_column_name padding_side use_fast
    code_provider code_language ioi_provider e2b_router_url morph_router_url parallel_code_exec_per_proc code_eval_test_batch_size
    dataset_streaming ignore_bias_buffers reward_processing_classes optimizers offload_embedding dataset_num_proc
    """.split()
)
"""Keys that decide how something is computed or shown, not what is learnt."""

REMARKS = {
    "use_liger_loss": "the loss is always computed in chunks here",
    "use_liger_kernel": "the loss is always computed in chunks here",
    "bf16": "the number format is model.dtype here, which by default suits model and machine",
    "fp16": "half precision is bfloat16 or float32 here (model.dtype); fp16 would need loss scaling",
    "use_vllm": "the engine is sampler.engine: torch samples in the run, vllm at servers (sampler.url) or one that the run starts",
    "push_to_hub": "run.hub.repo_id names where the result goes; without it nothing is uploaded",
    "report_to": "run.report_to names the sinks; nothing is sent anywhere by default",
    "do_eval": "eval.eval_steps says how often held-out prompts are answered",
    "benchmarks": "the callback benchmark_on_checkpoint takes them as suites",
    "train_dataset": "the rows come from data.dataset_name, or from get_rl_dataset of a task file",
    "dataset": "the rows come from data.dataset_name, or from get_rl_dataset of a task file",
    "callbacks": "callbacks are named under `callbacks`; see docs/how-to/callbacks.md",
}  # fmt: skip
"""Remarks on those of them that users look for."""

NO_EQUAL = {
    "use_dora": "DoRA is not supported: only the low-rank factors are trained (lora, or lora: null for all weights)",
    "modules_to_save": "only the low-rank factors of lora are trained; `lora: null` trains all weights",
    "top_p": "training samples from all tokens, as the learner computes their probabilities; eval.top_p restricts evaluations only",
    "top_k": "training samples from all tokens, as the learner computes their probabilities; eval.top_k restricts evaluations only",
    "min_p": "training samples from all tokens, as the learner computes their probabilities; eval.min_p restricts evaluations only",
    "repetition_penalty": "training samples the model's own distribution; the reward `repetition` makes repeating cost something",
    "top_entropy_quantile": "all tokens of a completion contribute to the loss here",
    "sync_ref_model": "the reference stays the start of the run",
    "ref_model_mixup_alpha": "the reference stays the start of the run",
    "ref_model_sync_steps": "the reference stays the start of the run",
    "load_in_fp8": "weights are held as they are, or with the backend unsloth in 4 or 8 bits",
    "environment_factory": "a task file brings its environments; give it as --task-module",
    "rollout_func": "a task file brings its environments; give it as --task-module",
    "tools": "a task file brings its tools; give it as --task-module",
    "loftq_config": "an adapter starts at no change here",
    "generation_kwargs": "sampler.temperature, sampler.max_completion_length and sampler.stop are what training samples with",
    "dataset_mixer": "name the sets in data.dataset_mixture",
    "label_smoothing_factor": "TRL's loss of GRPO does not use it either",
}  # fmt: skip
"""Keys without an equivalent, and what to use instead."""

TRL_BATCH, TRL_GENERATIONS = 8, 8
"""TRL's defaults of per_device_train_batch_size and num_generations."""
TRL_LEARNING_RATE, TRL_LENGTH = 1e-6, 512
"""The same of learning_rate and max_completion_length."""
DEFAULTS: dict[str, Any] = {
    "load_in_4bit": False, "load_in_8bit": False, "trust_remote_code": False, "use_rslora": False, "mask_truncated_completions": False,
    "warmup_steps": 0, "warmup_ratio": 0, "dataset_train_split": "train", "log_unique_prompts": False, "shuffle_dataset": True,
    "entropy_coef": 0.0, "eval_on_start": False, "hub_private_repo": False, "use_peft": False, "use_dora": False, "lora_bias": "none",
    "bias": "none", "min_tokens": 0,
    "top_p": 1.0, "repetition_penalty": 1.0, "min_p": (0, 0.0), "top_k": (0, -1),
    "sync_ref_model": False, "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512, "top_entropy_quantile": 1.0, "average_tokens_across_devices": True, "label_smoothing_factor": 0.0,
    "eval_delay": 0, "load_best_model_at_end": False, "greater_is_better": False, "train_sampling_strategy": "random",
    "do_predict": False, "disable_dropout": False, "sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "multi_objective_aggregation": "sum_then_normalize",
    "use_adaptive_entropy": False, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005,
    "entropy_target": 0.2, "use_bias_correction_kl": True, "auto_find_batch_size": False, "full_finetuning": False,
    "group_by_length": False, "adafactor": False, "streaming": False, "use_liger_loss": False, "use_liger_kernel": False,
    "finetune_vision_layers": False, "finetune_language_layers": True, "finetune_attention_modules": True, "finetune_mlp_modules": True,
    "load_in_16bit": True, "load_in_fp8": False,
}  # fmt: skip
"""Values that change nothing: TRL decides the same without the key, and so do we."""
LORA_DEFAULTS = {"": (16, 32, 0.05), "LoraConfig": (8, 8, 0.0), "get_peft_model": (16, 16, 0.0)}
"""Rank, alpha and dropout of an adapter in TRL's own config, in peft's and in Unsloth's call."""
LOSSES = {"grpo": "grpo", "dr_grpo": "dr_grpo", "dapo": "dapo", "bnpo": "dapo", "cispo": "cispo"}
"""TRL's loss_type, and the algorithm here."""
LOSS_DIVISORS = {
    "dapo": "divides by all tokens of the step",
    "bnpo": "divides by the tokens of each device's batch",
    "dr_grpo": "divides by max_completion_length",
}
"""The divisor of each loss that does not average over each rollout first."""
SCALES = {"True": "group", "False": "none", "group": "group", "batch": "batch", "none": "none"}

SCHEDULES: dict[str, tuple[str, dict[str, Any], str]] = {
    "linear": ("linear", {}, ""),
    "cosine": ("cosine", {"num_cycles": 0.5}, ""),
    "cosine_with_restarts": ("cosine", {"num_cycles": 1}, ""),
    "polynomial": ("linear", {"power": 1.0, "lr_end": 1e-7}, ""),
    "constant": ("constant", {}, ""),
    "constant_with_warmup": ("constant", {}, ""),
    "inverse_sqrt": ("linear", {"timescale": None}, "falls with the root of the steps there, and does not end at 0"),
    "reduce_lr_on_plateau": ("constant", {}, "falls there when an evaluation no longer gets better"),
    "cosine_with_min_lr": ("cosine", {"num_cycles": 0.5, "min_lr": 0, "min_lr_rate": 0}, ""),
    "cosine_warmup_with_min_lr": (
        "cosine", {"num_cycles": 0.5, "min_lr": 0, "min_lr_rate": 0, "warmup_lr_rate": 0}, ""
    ),
    "warmup_stable_decay": ("constant", {}, "stays there, and falls in the last steps alone"),
    "greedy": ("constant", {}, "goes up and down there as the loss does"),
}  # fmt: skip
"""The learning rate's courses in transformers: ours, the arguments with which they are the same, and how they differ in any case."""

WHOLE = frozenset(
    """
    num_generations per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size num_iterations
    max_steps max_completion_length max_prompt_length max_seq_length lora_r warmup_steps save_steps logging_steps eval_steps
    save_total_limit seed min_tokens
    """.split()
)
NUMBERS = WHOLE | frozenset(
    """
    num_train_epochs learning_rate beta epsilon epsilon_high delta temperature lora_alpha lora_dropout warmup_ratio weight_decay
    adam_beta1 adam_beta2 adam_epsilon max_grad_norm test_split_size vllm_importance_sampling_cap
    """.split()
)
MAY_BE_ZERO = frozenset({"warmup_steps", "seed", "max_steps", "min_tokens"})
MAY_BE_NULL = frozenset({"max_grad_norm", "save_total_limit"})
"""Keys that null or 0 switches off there, as null does here."""
