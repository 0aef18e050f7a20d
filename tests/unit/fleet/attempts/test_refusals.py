"""What a refusal says, and of whom."""

import pytest

from groupwise.fleet.attempts import refusals


@pytest.mark.parametrize(
    ("refusal", "code", "message"),
    [
        ("disk_full: 3 MB: too few", "disk_full", "3 MB: too few"),
        ("gpu_busy", "gpu_busy", ""),
        (None, "", ""),
    ],
)
def test_a_refusal_is_a_code_and_a_message(refusal: str | None, code: str, message: str) -> None:
    assert (refusals.code_of(refusal), refusals.message_of(refusal)) == (code, message)


def test_every_code_speaks_of_one() -> None:
    kinds = (refusals.OURS, refusals.OF_JOBS, frozenset(refusals.OF_GPUS))
    assert len(frozenset().union(*kinds)) == sum(map(len, kinds))


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        (["a"], "a is not in"),
        (["a", "b"], "a, b are not in"),
        (list("abcde"), "a, b, c and 2 more are not in"),
        (["x" * 4000], f"{'x' * 200}"),
    ],
)
def test_files_that_are_gone_are_named_as_far_as_a_line_goes(lacking: list[str], said: str) -> None:
    told = refusals.of_files("job-1", lacking, OSError("gone"))
    assert said in told
    assert len(told) < 600
    assert told.startswith("blob: ")
    assert "`groupwise fleet retry job-1`" in told


def test_of_a_checkpoint_it_is_said_which() -> None:
    told = refusals.of_checkpoint(20, "outputs/20", ["outputs/20/w.bin"], OSError("gone"))
    assert told == (
        "checkpoint: the checkpoint of step 20, outputs/20, is damaged: outputs/20/w.bin is not in the fleet's store of files: gone"
    )
