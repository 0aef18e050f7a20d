"""Tunix's half of the comparison, run by the Python of its environment: its own `GRPOLearner` with its own rollouts.

Prints one line of JSON: the seconds of each step, from the reward of its first completions to that of the next one's. Settings are those
that its examples use: LoRA on all linear layers, vanilla rollouts, one group as a micro-batch of training; all groups are sampled together.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from typing import Any


def main() -> None:
    """Read what to do from the first word, train, print."""
    work = json.loads(sys.argv[1])
    whole = work["groups"] * work["members"]
    began: list[float] = []
    seen = 0

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        nonlocal seen
        if seen % whole == 0:  # Tunix asks for as many at once as it samples together
            began.append(time.perf_counter())
        seen += len(completions)
        return [float(text.count("e")) for text in completions]

    learner_of(work, reward).train([{"prompts": each} for each in work["prompts"]])
    began.append(time.perf_counter())
    seconds = [after - before for before, after in pairwise(began)]
    assert len(seconds) == len(work["prompts"]), "a step is no step"
    print(json.dumps({"seconds": seconds}))


def learner_of(work: dict[str, Any], reward: Any) -> Any:
    """A learner with the model that the work names."""
    import jax
    import optax
    import qwix
    from flax import nnx
    from transformers import AutoTokenizer
    from tunix.models.llama3 import model as llama
    from tunix.models.llama3.params import create_model_from_safe_tensors
    from tunix.rl import rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout.base_rollout import RolloutConfig

    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), (jax.sharding.AxisType.Auto,) * 2)
    shape = llama.ModelConfig(**work["shape"])
    base = create_model_from_safe_tensors(work["model"], shape, mesh, jax.numpy.float32)
    provider = qwix.LoraProvider(
        module_path=".*q_proj|.*k_proj|.*v_proj|.*o_proj|.*gate_proj|.*up_proj|.*down_proj",
        rank=work["rank"],
        alpha=work["alpha"],
    )
    actor = qwix.apply_lora_to_model(
        base, provider, **base.get_model_input(), rngs=nnx.Rngs(params=0)
    )
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine="vanilla",
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.chain(
                optax.clip_by_global_norm(1.0), optax.adamw(work["learning_rate"])
            ),
            eval_every_n_steps=10**9,
            max_steps=len(work["prompts"]),
            mini_batch_size=work["groups"],
            train_micro_batch_size=1,
            rollout_micro_batch_size=work["groups"],
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=work["new_tokens"],
            max_prompt_length=work["longest"],
            kv_cache_size=work["longest"] + work["new_tokens"] + 8,
            temperature=1.0,
            top_p=1.0,
            eos_tokens=[work["never"]],
        ),
    )
    cluster = rl_cluster.RLCluster(
        actor=actor,
        reference=base,
        tokenizer=AutoTokenizer.from_pretrained(work["model"]),
        cluster_config=config,
    )
    with mesh:
        return GRPOLearner(
            cluster,
            GRPOConfig(num_generations=work["members"], num_iterations=1, beta=0.0),
            reward,
        )


if __name__ == "__main__":
    main()
