"""Distillation: its three forms against autograd on the formula, and against TRL's losses of the same name.

1. sampled: the gradient is that of (log π − log π_T).detach() · log π, TRL's token-level loss of SDPO;
2. top_k: value and gradient are those of TRL's loss over the teacher's top k with a bucket for the rest, and for all k = V tokens those of
   the full KL;
3. full_vocabulary takes the KL as the learner computed it; that KL is the generalised JSD of TRL's GKD with beta 1
   (`tests/unit/engine/learner/test_teacher.py` has the learner's side);
4. rewards add their own gradient by their weight; what is masked has none; missing numbers are refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from groupwise.algorithms.base import TokenBatch
from groupwise.algorithms.registry import make

B, T, V = 3, 5, 11
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0]])
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


class Texts:
    """Logits of a policy and a teacher at each token of a batch, in float32."""

    def __init__(self, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.policy_BTV = torch.randn(B, T, V, generator=random).requires_grad_()
        self.teacher_BTV = 2 * torch.randn(B, T, V, generator=random)
        self.ids_BT = torch.randint(0, V, (B, T), generator=random)
        self.advantages_B = torch.randn(B, generator=random)

    def chosen(self, logits_BTV: torch.Tensor, ids_BTK: torch.Tensor) -> torch.Tensor:
        return logits_BTV.log_softmax(-1).gather(-1, ids_BTK)

    def batch(self, **more: Any) -> TokenBatch:
        """What a learner gives the form sampled, on policy."""
        ids_BT1 = self.ids_BT[..., None]
        policy_BT = self.chosen(self.policy_BTV, ids_BT1)[..., 0]
        values: dict[str, Any] = {
            "policy_logprobs_BT": policy_BT,
            "sampling_logprobs_BT": policy_BT.detach(),
            "mask_BT": MASK,
            "advantages_B": torch.zeros(B),
            "scales_B": torch.ones(B),
            "teacher_logprobs_BT": self.chosen(self.teacher_BTV, ids_BT1)[..., 0],
        }
        return TokenBatch(**values | more)

    def top_k_batch(self, k: int) -> TokenBatch:
        """At each place the token itself, then the teacher's k most probable ones."""
        top_BTK = self.teacher_BTV.topk(k, -1).indices
        ids_BTK = torch.cat((self.ids_BT[..., None], top_BTK), -1)
        policy_BT = self.chosen(self.policy_BTV, ids_BTK).flatten(1)
        return self.batch(
            policy_logprobs_BT=policy_BT,
            sampling_logprobs_BT=policy_BT.detach(),
            mask_BT=MASK.repeat_interleave(1 + k, dim=1),
            teacher_logprobs_BT=self.chosen(self.teacher_BTV, ids_BTK).flatten(1),
        )

    def kl_BT(self) -> torch.Tensor:
        own, theirs = self.policy_BTV.log_softmax(-1), self.teacher_BTV.log_softmax(-1)
        return (own.exp() * (own - theirs)).sum(-1)

    def gradient(self, value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, self.policy_BTV, retain_graph=True)[0]


@pytest.fixture(autouse=True)
def _without_trls_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture
def texts() -> Texts:
    return Texts()


def test_sampled_form_has_trls_token_level_gradient(texts: Texts) -> None:
    from trl.experimental.sdpo.loss_utils import compute_sampled_token_self_distillation_loss

    theirs_BT = compute_sampled_token_self_distillation_loss(
        texts.policy_BTV, texts.teacher_BTV, texts.ids_BT, distillation_alpha=1.0
    )
    result = make("distillation", {}).loss(texts.batch())
    wanted = texts.gradient((theirs_BT * MASK).sum())
    torch.testing.assert_close(texts.gradient(result.components["policy"]), wanted, **CLOSE)


@pytest.mark.parametrize("k", [1, 4, V - 1])
def test_top_k_form_is_trls_with_a_tail(texts: Texts, k: int) -> None:
    from trl.experimental.sdpo.loss_utils import add_tail_bucket, compute_divergence

    top_BTK = texts.teacher_BTV.topk(k, -1).indices
    own_BTK, teacher_BTK = (
        add_tail_bucket(texts.chosen(logits_BTV, top_BTK))
        for logits_BTV in (texts.policy_BTV, texts.teacher_BTV)
    )
    theirs_BT = compute_divergence(own_BTK, teacher_BTK, 1.0)
    wanted = (theirs_BT * MASK).sum()
    algorithm = make("distillation", {"form": "top_k", "top_k": k})
    result = algorithm.loss(texts.top_k_batch(k))
    ours = result.components["distillation"]
    torch.testing.assert_close(ours, wanted, **CLOSE)
    # The bucket is what is left of 1: of k = V - 1 tokens a number of few digits.
    rounding: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4} if k == V - 1 else CLOSE
    torch.testing.assert_close(texts.gradient(ours), texts.gradient(wanted), **rounding)
    assert result.stats["tokens"] == MASK.sum()
    if k == V - 1:  # the bucket is the one token that is left
        torch.testing.assert_close(ours, (texts.kl_BT() * MASK).sum(), **CLOSE)


def test_full_vocabulary_is_gkd_with_beta_1(texts: Texts) -> None:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    wanted = GKDTrainer.generalized_jsd_loss(
        texts.policy_BTV,
        texts.teacher_BTV,
        labels=torch.where(MASK == 1, texts.ids_BT, -100),
        beta=1.0,
        reduction="sum",
    )
    algorithm = make("distillation", {"form": "full_vocabulary", "teacher_weight": 0.5})
    result = algorithm.loss(texts.batch(teacher_kl_BT=texts.kl_BT(), teacher_logprobs_BT=None))
    ours = result.components["distillation"]
    torch.testing.assert_close(2 * ours, wanted, **CLOSE)
    torch.testing.assert_close(2 * texts.gradient(ours), texts.gradient(wanted), **CLOSE)
    assert result.stats["distillation_kl"].item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("entropy_advantage", [0.0, 0.4])
@pytest.mark.parametrize("form", ["sampled", "full_vocabulary"])
def test_rewards_add_their_own_gradient(texts: Texts, form: str, entropy_advantage: float) -> None:
    """Advantages come with their weight, since the algorithm's `credits` has them."""
    shaped = {"entropy_advantage": entropy_advantage}
    algorithm = make("distillation", {"form": form, "reward_weight": 0.7, **shaped})
    entropies_BT = torch.rand(B, T, generator=torch.Generator().manual_seed(1))
    batch = texts.batch(teacher_kl_BT=texts.kl_BT(), entropies_BT=entropies_BT)
    without = algorithm.loss(batch).components
    with_rewards = algorithm.loss(replace(batch, advantages_B=texts.advantages_B)).components
    rewards = make("dapo", shaped).loss(replace(batch, advantages_B=texts.advantages_B)).components
    torch.testing.assert_close(
        texts.gradient(torch.stack([*with_rewards.values()]).sum()),
        texts.gradient(torch.stack([*without.values(), rewards["policy"]]).sum()),
        **CLOSE,
    )


def test_numbers_outside_the_mask_do_not_matter(texts: Texts) -> None:
    for name, batch in (("sampled", texts.batch()), ("top_k", texts.top_k_batch(3))):
        algorithm = make("distillation", {"form": name, "top_k": 3 if name == "top_k" else None})
        unknown_BT = batch.teacher_logprobs_BT.masked_fill(batch.mask_BT == 0, float("nan"))
        clean, spoilt = (
            algorithm.loss(each) for each in (batch, replace(batch, teacher_logprobs_BT=unknown_BT))
        )
        for component, value in clean.components.items():
            assert torch.equal(spoilt.components[component], value)


@pytest.mark.parametrize("form", ["sampled", "full_vocabulary"])
def test_missing_numbers_of_the_teacher_are_refused(texts: Texts, form: str) -> None:
    with pytest.raises(ValueError, match="Fill it from the teacher"):
        make("distillation", {"form": form}).loss(texts.batch(teacher_logprobs_BT=None))


def test_credits_are_those_of_rewards_times_their_weight(group: Any) -> None:
    (weights,) = make("distillation", {"reward_weight": 0.5}).credits([group(1.0, 0.0, None)])
    assert [None if each is None else each.advantage for each in weights] == [0.25, -0.25, None]
    alone: Any = make("distillation", {})
    assert not alone.compares_members
    assert alone.teaches(alone.credits([group(1.0)])[0])


@pytest.mark.parametrize(
    "knobs",
    [
        {"form": "top_k"},
        {"top_k": 4},
        {"dynamic_sampling": True},
        {"entropy_advantage": 0.4},
        {"form": "top_k", "top_k": 4, "importance_sampling_correction": "sequence_mask"},
    ],
)
def test_knobs_without_effect_are_refused(knobs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"distillation\."):
        make("distillation", knobs)
