"""What a client is told of what the engine says."""

from __future__ import annotations

import pickle

import pytest

from groupwise.errors import GroupwiseError, ResumeMismatchError, RunError, UsageError
from groupwise.server.engine.models import FullFineTuning
from groupwise.server.engine.port import OrderField, WrongOrder
from groupwise.server.engine_refusals import named, refusal_of
from groupwise.wire.problems import Refusal

FIELDS: dict[OrderField, str] = {
    "prompt": "prompts.3",
    "prompt_ids": "prompt_tokens",
    "max_tokens": "max_completion_length",
    "min_tokens": "min_completion_length",
    "temperature": "temperature",
}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ResumeMismatchError("it differs"), "resume_mismatch"),
        (FullFineTuning("it differs"), "full_fine_tuning"),
        (WrongOrder("it differs", "prompt", "prompt_too_long"), "prompt_too_long"),
        (UsageError("it differs"), "settings_conflict"),
        (RunError("it differs"), "settings_conflict"),
        (Refusal("disk_full", "it differs"), "disk_full"),
    ],
)
def test_what_has_a_code_of_the_table_keeps_it(error: GroupwiseError, code: str) -> None:
    refusal = refusal_of(error, otherwise="settings_conflict")
    assert (refusal.code, refusal.detail) == (code, "it differs")


async def test_a_wrong_order_names_the_field_of_the_request_across_processes() -> None:
    async def work() -> None:
        raise pickle.loads(pickle.dumps(WrongOrder("too long", "prompt", "prompt_too_long")))

    with pytest.raises(Refusal) as refused:
        await named(work(), FIELDS)
    assert refused.value.code == "prompt_too_long"
    assert [(e.field, e.message) for e in refused.value.errors] == [("prompts.3", "too long")]
