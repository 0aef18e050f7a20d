"""Published settings by name: an algorithm with the knobs that its source states.

Knobs that a source does not state keep their defaults. Settings that are not knobs of the algorithm (learning rate, group size, lengths)
are listed in `docs/algorithm-settings.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """One published setting."""

    algorithm: str
    source: str
    """Paper or code that states the values."""
    knobs: Mapping[str, Any] = field(default_factory=dict[str, Any])


PRESETS: dict[str, Preset] = {
    "deepseek_math_grpo": Preset(
        "grpo",
        "https://arxiv.org/abs/2402.03300, section 4.2",
        {"beta": 0.04, "kl_estimator": "k3", "kl_gradient": "estimator", "scale_rewards": "group"},
    ),
    "deepseek_r1_grpo": Preset(
        "grpo",
        "https://www.nature.com/articles/s41586-025-09422-z, methods, first RL stage",
        {
            "beta": 0.001,
            "kl_estimator": "k3",
            "kl_gradient": "estimator",
            "epsilon": 10.0,
            "scale_rewards": "group",
        },
    ),
    "dr_grpo_paper": Preset(
        "dr_grpo",
        "https://arxiv.org/abs/2503.20783, examples/qwen2.5-math-7b.sh in https://github.com/sail-sg/understand-r1-zero",
        {"beta": 0.0},
    ),
    "dapo_paper": Preset(
        "dapo",
        "https://arxiv.org/abs/2503.14476, sections 2.3, 3.4 and 4.1",
        {
            "beta": 0.0,
            "epsilon": 0.2,
            "epsilon_high": 0.28,
            "scale_rewards": "group",
            "mask_truncated_completions": True,
            "dynamic_sampling": True,
            "soft_punish_cache": None,
            "soft_punish_factor": 1.0,
        },
    ),
    "gspo_paper": Preset(
        "gspo",
        "https://arxiv.org/abs/2507.18071, sections 2 and 5.1",
        {"beta": 0.0, "epsilon": 3e-4, "epsilon_high": 4e-4, "scale_rewards": "group"},
    ),
    "scalerl_cispo": Preset(
        "cispo",
        "https://arxiv.org/abs/2510.13786, section 4; the cap from docs/source/paper_index.md in "
        "https://github.com/huggingface/trl",
        {"epsilon_high": 4.0, "scale_rewards": "batch"},
    ),
    "rloo_paper": Preset(
        "rloo",
        "https://arxiv.org/abs/2402.14740, appendix C",
        {"beta": 0.03, "kl_estimator": "k1"},
    ),
    "reinforce_pp_paper": Preset(
        "reinforce_pp",
        "https://arxiv.org/abs/2501.03262, equations 4 and 5",
        {"group_baseline": False},
    ),
    "reinforce_pp_baseline_paper": Preset(
        "reinforce_pp",
        "https://arxiv.org/abs/2501.03262, equations 6 to 8",
        {"group_baseline": True, "kl_estimator": "k2", "kl_gradient": "estimator"},
    ),
    "max_rl_paper": Preset(
        "max_rl",
        "https://arxiv.org/abs/2602.02710, qwen3_experiments/run_qwen3_training.sh in https://github.com/tajwarfahim/maxrl",
        {"beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.2},
    ),
    "gmpo_paper": Preset(
        "gmpo",
        "https://arxiv.org/abs/2507.20673",
        {"beta": 0.0, "epsilon": 0.4, "epsilon_high": 0.4, "scale_rewards": "group"},
    ),
    "sapo_paper": Preset(
        "sapo",
        "https://arxiv.org/abs/2511.20347, and TRL 1.16's defaults",
        {
            "beta": 0.0,
            "temperature_positive": 1.0,
            "temperature_negative": 1.05,
            "scale_rewards": "group",
        },
    ),
    "gdpo_paper": Preset(
        "gdpo",
        "https://arxiv.org/abs/2601.05242, verl-GDPO/train_gdpo.sh in https://github.com/NVlabs/GDPO",
        {"beta": 0.0},
    ),
    "gigpo_paper": Preset(
        "gigpo",
        "https://arxiv.org/abs/2505.10978, examples/gigpo_trainer in https://github.com/langfengQ/verl-agent",
        {
            "beta": 0.01,
            "kl_estimator": "k3",
            "kl_gradient": "estimator",
            "turn_discount": 0.95,
            "step_advantage_weight": 1.0,
            "scale_rewards": "group",
        },
    ),
    "clip_cov_paper": Preset(
        "clip_cov",
        "https://arxiv.org/abs/2505.22617, and the script of Clip-Cov in https://github.com/PRIME-RL/Entropy-Mechanism-of-RL",
        {
            "beta": 0.0,
            "epsilon": 1.0,
            "epsilon_high": 1.0,
            "clip_cov_ratio": 2e-4,
            "clip_cov_low": 1.0,
            "clip_cov_high": 5.0,
        },
    ),
    "kl_cov_paper": Preset(
        "kl_cov",
        "https://arxiv.org/abs/2505.22617, and the script of KL-Cov in https://github.com/PRIME-RL/Entropy-Mechanism-of-RL",
        {"beta": 0.0, "kl_cov_ratio": 2e-3, "kl_cov_coef": 1.0},
    ),
    "high_entropy_tokens_paper": Preset(
        "dapo",
        "https://arxiv.org/abs/2506.01939",
        {
            "beta": 0.0,
            "epsilon": 0.2,
            "epsilon_high": 0.28,
            "dynamic_sampling": True,
            "top_entropy_quantile": 0.2,
        },
    ),
    "entropy_advantage_paper": Preset(
        "dapo",
        "https://arxiv.org/abs/2506.14758, section 4 and table 4",
        {
            "beta": 0.0,
            "epsilon": 0.2,
            "epsilon_high": 0.28,
            "scale_rewards": "group",
            "dynamic_sampling": False,
            "soft_punish_cache": 0,
            "entropy_advantage": 0.4,
            "entropy_advantage_cap": 2.0,
        },
    ),
    "intellect_3_icepop": Preset(
        "dapo",
        "https://arxiv.org/abs/2512.16144, equation 1; IcePop of https://arxiv.org/abs/2510.18855",
        {
            "scale_rewards": "none",
            "soft_punish_cache": 0,
            "importance_sampling_correction": "token_mask",
            "importance_sampling_floor": 0.5,
            "importance_sampling_cap": 5.0,
        },
    ),
    "trl_default": Preset(
        "dapo",
        "https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/grpo_config.py",
        {
            "beta": 0.0,
            "epsilon": 0.2,
            "epsilon_high": None,
            "scale_rewards": "group",
            "mask_truncated_completions": False,
            "dynamic_sampling": False,
            "soft_punish_cache": 0,
        },
    ),
}
"""Every preset by the name that configs use."""
