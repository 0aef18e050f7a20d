"""Which held-out examples are trained on."""

from __future__ import annotations

from groupwise.core.types import Example
from groupwise.tasks.data.overlap import same_prompt, same_row, trained_on


def test_prompts_are_the_same_whatever_the_order_of_their_keys() -> None:
    train = [Example(0, [{"role": "user", "content": "a"}], {"seed": 1}), Example(1, "b", {})]
    held_out = [Example(0, [{"content": "a", "role": "user"}], {"seed": 2}), Example(1, "c", {})]
    assert trained_on(train, held_out, same_prompt) == held_out[:1]
    assert trained_on(train, held_out, same_row) == []
    assert trained_on(train, train[1:], same_row) == train[1:]
