"""Checks that two tokenizers give the same ids the same meaning, which distillation needs: it compares probabilities token by token.

They are compared by content, not by name: each id of the policy must have the same text in the teacher's vocabulary, and texts must be
divided in the same way. A teacher may have ids beyond the policy's, as larger models of a family do.
"""

from __future__ import annotations

from typing import Any

from groupwise.core.errors import UsageError

PROBES = (
    'The quick brown fox, 1234567 times: "jump!" said\n\n\tnobody\'s dog.',
    "def f(x_1):\n    return x_1 ** 2 + 0.5  # größer als π ≈ 3.14159",
    "Ünïcödé, 日本語, Русский, عربى, 🙂🙃 and    spaces",
)
"""Texts with digits, code, white space, and letters of several scripts."""


def check_same_tokens(policy: Any, teacher: Any, policy_name: str, teacher_name: str) -> None:
    """Raise UsageError unless the teacher's tokenizer has the policy's tokens under the same ids."""
    own: dict[str, int] = policy.get_vocab()
    theirs = {token: text for text, token in teacher.get_vocab().items()}
    different = sorted(token for text, token in own.items() if theirs.get(token) != text)
    if different:
        texts = {token: text for text, token in own.items()}
        examples = "; ".join(
            f"{token} is {texts[token]!r} here and {theirs[token]!r} there"
            if token in theirs
            else f"{token} is {texts[token]!r} here and nothing there"
            for token in different[:3]
        )
        raise UsageError(
            f"{teacher_name} cannot teach {policy_name}: {len(different)} of {len(own)} tokens differ ({examples}). Distillation compares "
            "probabilities token by token, so take a teacher of the same family, with the same tokenizer."
        )
    for text in PROBES:
        ids = [
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for tokenizer in (policy, teacher)
        ]
        if ids[0] != ids[1]:
            raise UsageError(
                f"{teacher_name} cannot teach {policy_name}: both have the same tokens, but divide texts in different ways: {text!r} is "
                f"{ids[0][:12]} here and {ids[1][:12]} there. Take a teacher with the same tokenizer."
            )
