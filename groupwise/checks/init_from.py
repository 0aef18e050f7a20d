"""`groupwise init --from FILE`: the GRPO config of TRL, open-r1 or Unsloth as one of ours.

Each value that is taken over keeps its origin as a comment. What means something else here, and what has no equal, is told: silence means
that nothing is lost. Where a file leaves out what TRL then decides (all weights are trained, the loss is `dapo`), it is written down.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

from groupwise.checks.findings import Finding, Findings, OnFinding, Report
from groupwise.checks.foreign_config import NotPlain, read_foreign
from groupwise.checks.init_choices import Choice
from groupwise.checks.init_file import rendered
from groupwise.config import load_config, resolved
from groupwise.errors import UsageError
from groupwise.foreign_keys import FOREIGN_TO_RL
from groupwise.rewards.other_names import Meant, meant_by
from groupwise.rewards.registry import registered

CODE = "init_failed"

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
    "dataset_test_split": "data.dataset_test_split", "dataset_prompt_column": "data.prompt_column",
    "dataset_solution_column": "data.answer_column", "max_prompt_length": "data.max_prompt_length",
    "shuffle_dataset": "data.shuffle", "system_prompt": "data.system_prompt", "reward_weights": "rewards.reward_weights",
    "save_steps": "run.save_steps", "save_total_limit": "run.save_total_limit", "logging_steps": "run.logging_steps",
    "run_name": "run.name", "output_dir": "run.dir", "wandb_project": "run.wandb_project", "wandb_entity": "run.wandb_entity",
    "wandb_run_group": "run.wandb_group", "hub_model_id": "run.hub.repo_id", "hub_model_revision": "run.hub.revision",
    "hub_private_repo": "run.hub.private", "log_unique_prompts": "run.log_unique_prompts",
}  # fmt: skip
"""Keys whose values mean the same under ours."""

WITHOUT_EFFECT = frozenset(
    """
    attn_implementation bf16 tf32 fp16 torch_dtype task_type lora_task_type bias lora_bias use_cache do_train do_eval
    logging_strategy logging_first_step log_level log_level_replica log_completions num_completions_to_print
    remove_unused_columns ddp_timeout ddp_find_unused_parameters
    dataloader_num_workers dataloader_drop_last dataloader_pin_memory gradient_checkpointing_kwargs overwrite_output_dir
    overwrite_hub_revision push_to_hub push_to_hub_revision hub_strategy hub_token save_strategy report_to logging_dir
    use_vllm vllm_mode vllm_device vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_server_host vllm_server_port
    vllm_max_model_length vllm_enable_sleep_mode gpu_memory_utilization fast_inference max_model_len ds3_gather_for_generation
    deepspeed fsdp fsdp_config auto_find_batch_size full_determinism per_device_eval_batch_size eval_accumulation_steps
    disable_tqdm model_init_kwargs cast_lm_head_to_fp32 shuffle_buffer use_peft full_finetuning processing_class tokenizer
    eval_dataset train_dataset dataset args peft_config callbacks token device_map loftq_config benchmarks dataset_mixer packing
    """.split()
)
"""What decides how something is computed or shown there, and not what is learnt."""

REMARKS = {
    "bf16": "the number format is model.dtype here, which suits model and machine by itself",
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
"""What to say of some of them that people miss."""

NO_EQUAL = {
    "use_dora": "DoRA is not supported: only the low-rank factors are trained (lora, or lora: null for all weights)",
    "modules_to_save": "only the low-rank factors of lora are trained; `lora: null` trains all weights",
    "top_p": "training samples the whole distribution, which the learner's probabilities are those of; eval.top_p restricts evaluations",
    "top_k": "training samples the whole distribution, which the learner's probabilities are those of; eval.top_k restricts evaluations",
    "min_p": "training samples the whole distribution, which the learner's probabilities are those of; eval.min_p restricts evaluations",
    "repetition_penalty": "training samples the model's own distribution; the reward `repetition` makes repeating cost something",
    "top_entropy_quantile": "all tokens teach here",
    "sync_ref_model": "the reference stays the start of the run",
    "ref_model_mixup_alpha": "the reference stays the start of the run",
    "ref_model_sync_steps": "the reference stays the start of the run",
    "use_liger_loss": "the loss is computed in pieces here by itself",
    "use_liger_kernel": "the loss is computed in pieces here by itself",
}  # fmt: skip

TRL_BATCH, TRL_GENERATIONS = 8, 8
"""TRL's defaults of per_device_train_batch_size and num_generations."""
TRL_LEARNING_RATE, TRL_LENGTH = 1e-6, 256
"""The same of learning_rate and max_completion_length."""
LOSSES = {"grpo": "grpo", "dr_grpo": "dr_grpo", "dapo": "dapo", "bnpo": "dapo", "cispo": "cispo"}
"""TRL's loss_type, and the algorithm here."""
SCALES = {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"}


@dataclass(slots=True)
class Translation:
    """A foreign config on its way."""

    file: str
    given: dict[str, Any]
    """Its keys under their usual names."""
    processes: int
    choices: dict[str, Choice] = field(default_factory=dict[str, Choice])
    findings: list[Finding] = field(default_factory=list[Finding])
    used: set[str] = field(default_factory=set[str])

    def choose(self, key: str, value: Any, reason: str) -> None:
        """Write a value under our key."""
        self.choices[key] = Choice(tuple(key.split(".")), value, reason)

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a foreign key, which is dealt with then."""
        self.used.add(name)
        value = self.given.get(name)
        return default if value is None else value

    def say(self, name: str, text: str, *, lost: bool) -> None:
        """Tell what became of a key."""
        self.findings.append(
            Finding(
                name,
                "warning" if lost else "ok",
                text,
                "" if not lost else "the run learns without it",
            )
        )


def init_from(
    file: Path,
    *,
    processes: int | None = None,
    out: Path | None = None,
    force: bool = False,
    on_finding: OnFinding | None = None,
) -> Report:
    """Write our config for a foreign one: the command `groupwise init --from`.

    `processes` is how many devices the foreign run had, which its batch sizes are each for. Raises `UsageError`.
    """
    given = read_foreign(file)
    target = out or file.with_name(f"{file.stem}-groupwise.yaml")
    if target.exists() and not force:
        raise UsageError(
            f"{target} exists and is kept. Give --force to write it anew, or another name with --out."
        )
    made = translate(file.name, given, processes or given.get("num_processes") or 1)
    findings = Findings(on_finding)
    for choice in made.choices.values():
        findings.add(Finding(choice.key, "ok", json.dumps(choice.value), choice.reason))
    for finding in made.findings:
        findings.add(finding)
    ordered = sorted(made.choices.values(), key=lambda choice: SECTIONS.index(choice.path[0]))
    task = (
        ""
        if "data.dataset_name" in made.choices or "data.dataset_mixture" in made.choices
        else " --task-module TASK.py"
    )
    words = [
        f"groupwise check --config {target}{task}",
        f"groupwise rl --config {target}{task} --dry-run",
        f"groupwise rl --config {target}{task}",
    ]
    target.write_text(rendered(f"Written by groupwise init from {file.name}.", words, ordered))
    config = load_config(target).config
    details = {"file": str(target), "command": "rl", "config": resolved(config), "next": words}
    return Report(f"{target} from {file}", tuple(findings.found), CODE, details)


SECTIONS = ("model", "lora", "data", "rewards", "algorithm", "training", "sampler", "eval", "run")


# --- translating ---------------------------------------------------------------------------------


def translate(file: str, given: Mapping[str, Any], processes: int) -> Translation:
    """Our choices for foreign keys, and what is to be said of the others."""
    made = Translation(file, {}, processes)
    for name, value in given.items():
        if unfit := _unfit(name, value):
            if name not in WITHOUT_EFFECT and name != "model_name_or_path":
                made.say(name, unfit, lost=True)
        elif value is not None:
            made.given[name] = value
    for step in (_model, _lora, _batch, _length, _algorithm, _schedule, _rewards, _data, _run):
        step(made)
    for name, key in SAME.items():
        if name in made.given and name not in made.used and not _says_nothing(made.given[name]):
            made.choose(key, made.take(name), _from(made, name))
    for name in made.given:
        if name not in made.used and name not in SAME:
            _tell(made, name)
    return made


_WHOLE = frozenset(
    """
    num_generations per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size num_iterations
    max_steps max_completion_length max_prompt_length max_seq_length lora_r warmup_steps save_steps logging_steps eval_steps
    save_total_limit seed
    """.split()
)
_NUMBERS = _WHOLE | frozenset(
    """
    num_train_epochs learning_rate beta epsilon epsilon_high delta temperature lora_alpha lora_dropout warmup_ratio weight_decay
    adam_beta1 adam_beta2 adam_epsilon max_grad_norm vllm_importance_sampling_cap
    """.split()
)
_MAY_BE_ZERO = frozenset({"warmup_steps", "seed", "max_steps"})


def _unfit(name: str, value: Any) -> str | None:
    """What is wrong with a value that cannot be taken over, if that is so."""
    if isinstance(value, NotPlain):
        return f"is not taken over: only running the file tells what `{value.written:.60}` is. Write its value there, or into the result"
    if value is None or name not in _NUMBERS:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"is not taken over: {value!r:.40} is no number. Write the number into the result"
    if name in _WHOLE and value != int(value):
        return f"is not taken over: {value} is a share of the run there; here it is a whole number"
    if name in _WHOLE and value == 0 and name not in _MAY_BE_ZERO:
        return "is not taken over: 0 is no number of them"
    return None


def _from(made: Translation, name: str) -> str:
    return f"From {name} of {made.file}."


def _choose_or_default(made: Translation, key: str, name: str, default: Any) -> Any:
    """Write the value of a foreign key under ours, or TRL's default where the file has none; the value."""
    reason = _from(made, name) if name in made.given else "TRL's default."
    value = made.take(name, default)
    made.choose(key, value, reason)
    return value


def _says_nothing(value: Any) -> bool:
    return value in ("", [], {})


def _tell(made: Translation, name: str) -> None:
    """What became of a key that is not taken over."""
    value = made.given[name]
    if _says_nothing(value) or value is False:
        return
    if name in NO_EQUAL:
        if not (name in ("top_p", "repetition_penalty") and value == 1) and not (
            name == "top_k" and value in (0, -1)
        ):
            made.say(name, f"is not taken over: {NO_EQUAL[name]}", lost=True)
    elif name in WITHOUT_EFFECT:
        if name in REMARKS:
            made.say(name, REMARKS[name], lost=False)
    elif advice := _advice(name):
        made.say(name, f"is not taken over: {advice}", lost=True)
    elif made.file.endswith(".json"):
        return  # a dump holds all keys of transformers, most of them at their defaults
    else:
        made.say(name, "is not taken over: nothing here has that name", lost=True)


def _advice(name: str) -> str | None:
    matching = (each for each in FOREIGN_TO_RL if each.endswith("*") and name.startswith(each[:-1]))
    return FOREIGN_TO_RL.get(name) or next((FOREIGN_TO_RL[each] for each in matching), None)


def _model(made: Translation) -> None:
    if "model_name_or_path" not in made.given and "model_name" not in made.given:
        made.choose("model.name", "tiny", f"{made.file} names no model: put yours here.")
        made.say(
            "model_name_or_path",
            "is not in the file: model.name is `tiny` until you name yours",
            lost=True,
        )
    if made.given.get("load_in_4bit") or made.given.get("load_in_8bit"):
        made.choose("model.backend", "unsloth", "Weights in 4 or 8 bits are held by this backend.")
    if (checkpointing := made.take("gradient_checkpointing")) is not None:
        made.choose(
            "training.gradient_checkpointing",
            bool(checkpointing),
            _from(made, "gradient_checkpointing"),
        )
    for name in ("load_in_4bit", "load_in_8bit", "trust_remote_code"):
        if made.given.get(name) is False:
            made.used.add(name)


def _lora(made: Translation) -> None:
    keys = ("lora_r", "lora_alpha", "lora_target_modules", "use_peft")
    if made.take("use_peft") is False or not any(key in made.given for key in keys):
        made.choose(
            "lora",
            None,
            "TRL trains all weights where neither use_peft nor a LoraConfig says otherwise.",
        )
        made.used |= {"lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora"}
        return
    _choose_or_default(made, "lora.r", "lora_r", 16)
    _choose_or_default(made, "lora.alpha", "lora_alpha", 32)
    modules = made.take("lora_target_modules")
    if modules and modules not in ("all-linear", ["all-linear"]):
        made.choose(
            "lora.target_modules",
            [modules] if isinstance(modules, str) else list(modules),
            _from(made, "lora_target_modules"),
        )
    for name in ("bias", "lora_bias"):
        if made.take(name, "none") not in ("none", False, 0):
            made.say(name, f"is not taken over: {NO_EQUAL['modules_to_save']}", lost=True)
    if made.given.get("use_rslora") is False:
        made.used.add("use_rslora")


def _batch(made: Translation) -> None:
    """A step of TRL is per_device_train_batch_size × gradient_accumulation_steps × processes completions."""
    generations = _choose_or_default(
        made, "training.num_generations", "num_generations", TRL_GENERATIONS
    )
    device, accumulated = (
        made.take("per_device_train_batch_size", TRL_BATCH),
        made.take("gradient_accumulation_steps", 1),
    )
    completions = device * accumulated * made.processes
    prompts = Fraction(completions, generations)
    whole = max(1, round(prompts))
    made.choose(
        "training.prompts_per_step",
        whole,
        f"per_device_train_batch_size {device} × gradient_accumulation_steps {accumulated} × {made.processes} processes ÷ num_generations "
        f"{generations}.",
    )
    if prompts != whole:
        made.say(
            "per_device_train_batch_size",
            f"{completions} completions are no whole groups of {generations}: a step has {whole} groups",
            lost=False,
        )
    reuse = Fraction(made.take("steps_per_generation", accumulated), accumulated)
    made.take("generation_batch_size")
    if reuse > 1 and reuse.denominator == 1:
        made.choose(
            "training.minibatches",
            int(reuse),
            "steps_per_generation over gradient_accumulation_steps: updates for each generation.",
        )
        made.choose(
            "training.prompts_per_step",
            whole * int(reuse),
            "All groups that are sampled before these updates.",
        )


def _length(made: Translation) -> None:
    steps = made.take("max_steps", -1)
    made.used.add("num_train_epochs")
    if steps > 0:
        made.choose("training.max_steps", steps, _from(made, "max_steps"))
    else:
        made.choose("training.max_steps", None, "Epochs say how long.")
        _choose_or_default(made, "training.num_train_epochs", "num_train_epochs", 3)


def _algorithm(made: Translation) -> None:
    loss = str(made.take("loss_type", "dapo"))
    level = made.take("importance_sampling_level", "token")
    kind = "gspo" if level == "sequence" else LOSSES.get(loss)
    origin = "importance_sampling_level sequence" if kind == "gspo" else f"loss_type {loss}"
    if kind is None:
        made.say(
            "loss_type",
            f"{loss} is no algorithm here: there are {', '.join(LOSSES)}, and `dapo` stands in its place",
            lost=True,
        )
        kind = "dapo"
    if kind == "dapo":
        made.choose(
            "algorithm.preset",
            "trl_default",
            f"{origin}: the loss that TRL has by default."
            if "loss_type" not in made.given
            else f"From {origin}.",
        )
        if loss == "bnpo":
            made.say(
                "loss_type",
                "bnpo divides by the tokens of each device's batch; here it is all tokens of the step",
                lost=False,
            )
    else:
        made.choose("algorithm.type", kind, f"From {origin}.")
    if (scale := made.take("scale_rewards")) is not None and kind != "dr_grpo":
        made.choose(
            "algorithm.scale_rewards", SCALES.get(scale, "group"), _from(made, "scale_rewards")
        )
    elif kind == "dr_grpo" and scale not in (None, False, "none"):
        made.say(
            "scale_rewards",
            f"{scale} is not taken over: dr_grpo never divides by the spread of a group",
            lost=True,
        )
    correction, cap = (
        made.take("vllm_importance_sampling_correction"),
        made.take("vllm_importance_sampling_cap"),
    )
    if correction and made.given.get("use_vllm"):
        made.choose(
            "algorithm.importance_sampling_correction",
            made.take("vllm_importance_sampling_mode", "sequence_mask"),
            "TRL corrects for differences between vLLM and the learner.",
        )
        if cap is not None:
            made.choose(
                "algorithm.importance_sampling_cap",
                cap,
                _from(made, "vllm_importance_sampling_cap"),
            )
    if made.given.get("mask_truncated_completions") is False:
        made.used.add("mask_truncated_completions")


def _schedule(made: Translation) -> None:
    _choose_or_default(made, "training.learning_rate", "learning_rate", TRL_LEARNING_RATE)
    wanted = made.take("lr_scheduler_type")
    floor = made.take("lr_scheduler_kwargs")
    known = {
        "linear": "linear",
        "cosine": "cosine",
        "constant": "constant",
        "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine",
    }
    if wanted is not None:
        course = known.get(str(wanted))
        made.choose(
            "training.lr_scheduler_type", course or "linear", _from(made, "lr_scheduler_type")
        )
        if course is None:
            made.say(
                "lr_scheduler_type",
                f"{wanted} is not taken over: there are constant, linear and cosine",
                lost=True,
            )
        elif wanted == "cosine_with_min_lr" or floor:
            made.say(
                "lr_scheduler_kwargs",
                f"{floor} is not taken over: cosine ends at 0 here",
                lost=True,
            )
    if made.given.get("warmup_steps") in (0, 0.0):
        made.used.add("warmup_steps")
    if made.given.get("warmup_ratio") in (0, 0.0):
        made.used.add("warmup_ratio")
    optimiser = str(made.take("optim", "adamw"))
    if "adamw" not in optimiser:
        made.say("optim", f"{optimiser} is not taken over: the optimiser is AdamW", lost=True)
    elif "8bit" in optimiser:
        made.say(
            "optim",
            f"{optimiser} holds its state in 8 bits; AdamW does so in float32 here",
            lost=False,
        )


def _rewards(made: Translation) -> None:
    names = made.take("reward_funcs")
    listed = [names] if isinstance(names, str) else list(cast("Sequence[Any]", names or ()))
    known, ours = registered(), list[Any]()
    for name in listed:
        if not isinstance(name, str):
            made.say(
                "reward_funcs",
                f"{name!r:.40} is not taken over: name a reward, or path/to/file.py:function",
                lost=True,
            )
            continue
        meant = meant_by(name, known)
        if name in known or ":" in name:
            ours.append(name)
        elif "." in name:
            ours.append(":".join(name.rsplit(".", 1)))
        elif meant is not None and meant.rewards:
            ours.append(_with_parameters(made, meant))
            made.say(
                "reward_funcs", f"`{name}` is `{meant.rewards[0]}` here: {meant.remark}", lost=False
            )
        else:
            module = made.file if made.file.endswith(".py") else "rewards.py"
            ours.append(f"{module}:{name}")
            made.say(
                "reward_funcs",
                f"`{name}` is taken for a function of {module}"
                + (f": {meant.remark}" if meant else ""),
                lost=meant is not None,
            )
    if ours:
        made.choose("rewards.reward_funcs", ours, _from(made, "reward_funcs"))


_PARAMETERS = {
    "length": {
        "cosine_max_len": "max_length", "cosine_min_value_wrong": "wrong_short", "cosine_max_value_wrong": "wrong_long",
        "cosine_min_value_correct": "right_long", "cosine_max_value_correct": "right_short",
    },
    "repetition": {"repetition_n_grams": "n", "repetition_max_penalty": "max_penalty"},
    "overlong": {"max_completion_len": "max_length", "soft_punish_cache": "cache"},
}  # fmt: skip
"""open-r1's keys of its rewards, and ours."""


def _with_parameters(made: Translation, meant: Meant) -> Any:
    reward = meant.rewards[0]
    given: dict[str, Any] = dict(meant.parameters)
    for theirs, ours in _PARAMETERS.get(reward, {}).items():
        if theirs in made.given:
            given[ours] = made.take(theirs)
    if reward == "overlong":
        given.setdefault("max_length", made.given.get("max_completion_length", TRL_LENGTH))
    return {"name": reward, **given} if given else reward


def _data(made: Translation) -> None:
    mixture = made.take("dataset_mixture")
    if isinstance(mixture, Mapping):
        mixture = cast("Mapping[str, Any]", mixture)
        sets = list(_sets(made, mixture))
        made.choose("data.dataset_mixture", sets, _from(made, "dataset_mixture"))
        for theirs, ours in (("seed", "data.seed"), ("test_split_size", "data.test_split_size")):
            if (value := mixture.get(theirs)) is not None:
                made.choose(ours, value, f"From dataset_mixture.{theirs} of {made.file}.")
    if made.given.get("dataset_train_split") == "train":
        made.used.add("dataset_train_split")
    if (
        "dataset_test_split" in made.given
        and not made.given.get("do_eval")
        and made.given.get("eval_strategy", "no") == "no"
    ):
        made.used.add("dataset_test_split")
        made.say(
            "dataset_test_split",
            "is not taken over: without eval_strategy nothing is evaluated on it",
            lost=False,
        )


def _sets(made: Translation, mixture: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for each in cast("Sequence[Mapping[str, Any]]", mixture.get("datasets") or ()):
        entry: dict[str, Any] = {"source": each.get("id")}
        entry |= {
            key: each[key] for key in ("config", "split", "weight") if each.get(key) is not None
        }
        if columns := each.get("columns"):
            made.say(
                "dataset_mixture",
                f"the columns {', '.join(columns)} of {each.get('id')} are kept as all others are",
                lost=False,
            )
        yield entry


def _run(made: Translation) -> None:
    place = made.take("output_dir")
    if isinstance(place, str) and place.strip("./ "):
        folder = Path(place)
        made.choose(
            "run.dir",
            str(folder.parent) if str(folder.parent) != "." else "runs",
            _from(made, "output_dir"),
        )
        if not made.given.get("run_name"):
            made.choose("run.name", folder.name, _from(made, "output_dir"))
    sinks = made.take("report_to")
    named = [sinks] if isinstance(sinks, str) else list(cast("Sequence[Any]", sinks or ()))
    known = [each for each in named if each in ("wandb", "tensorboard", "trackio", "mlflow")]
    if known:
        made.choose("run.report_to", known, _from(made, "report_to"))
    every = made.take("eval_steps")
    if made.take("eval_strategy", made.given.get("evaluation_strategy", "no")) == "steps" and every:
        made.choose("eval.eval_steps", every, _from(made, "eval_steps"))
    made.used.add("evaluation_strategy")
    if made.given.get("push_to_hub") is not True:
        made.used |= {"hub_model_id", "hub_model_revision", "hub_private_repo"}
