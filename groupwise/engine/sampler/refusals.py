"""Errors that every sampler raises in the same words; free of torch."""

from __future__ import annotations

from groupwise.core.errors import NonFiniteError, PolicyMismatchError, RunError
from groupwise.core.types import GroupRequest, Policy


def refuse_misfit(request: GroupRequest, key_length: int) -> None:
    """Raise `RunError` for an empty prompt or completion, or if both together are longer than the sampler has room for."""
    if not request.prompt_ids or request.params.max_tokens < 1:
        raise RunError(
            f"A prompt of {len(request.prompt_ids)} tokens and a completion of at most "
            f"{request.params.max_tokens}; both need at least one."
        )
    needed = len(request.prompt_ids) + request.params.max_tokens
    if needed > key_length:
        raise RunError(
            f"A prompt of {len(request.prompt_ids)} tokens with {request.params.max_tokens} new ones needs "
            f"{needed} positions, but the sampler was laid out for {key_length}."
        )


def refuse_other_weights(policy: Policy, found: str) -> None:
    """Raise `PolicyMismatchError` if the loaded weights have another fingerprint than the published ones."""
    if found != policy.fingerprint:
        raise PolicyMismatchError(
            f"{policy.run}@{policy.version} was published with the fingerprint {policy.fingerprint}, but the files in "
            f"{policy.path} have {found}. Someone else wrote there, or the disk is damaged."
        )


def not_finite(version: int) -> NonFiniteError:
    """The error for logits that are not finite."""
    return NonFiniteError(
        f"The model's logits are not finite (policy version {version}), so nothing can be drawn from them. "
        "Lower training.learning_rate, or try model.dtype=float32."
    )
