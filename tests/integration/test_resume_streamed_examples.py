"""A resume meets a stream of examples: a longer run goes on with those that it began with, in the same order."""

from __future__ import annotations

import copy
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise
from groupwise.core.errors import ResumeMismatchError
from groupwise.runs.store import Store
from tests.integration import toy_task
from tests.integration.toy_run import config


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


class Stream:
    """The toy task, with prompts without end."""

    get_reward_funcs = staticmethod(toy_task.get_reward_funcs)
    letter = "a"

    @classmethod
    def get_rl_dataset(cls, config):
        return ({"prompt": f"write {cls.letter}{n}:", "wanted": "abc"} for n in count())

    @classmethod
    def get_sft_dataset(cls, config, tokenizer):
        return ({"prompt": f"write {cls.letter}{n}:", "completion": "abc"} for n in count())


def steps(settings: dict[str, Any], number: int) -> dict[str, Any]:
    given = copy.deepcopy(settings)
    given["training"] |= {"max_steps": number, "lr_scheduler_type": "constant"}
    given["eval"] = {}
    return given


def drawn(folder: Path, count: int) -> list[int]:
    with Store.open(folder / "run.db", readonly=True) as store:
        return [group.example.index for step in range(count) for group in store.groups(step)]


def test_a_longer_run_on_a_stream_goes_round_in_what_it_began_with(tmp_path):
    settings = config(tmp_path)
    groupwise.rl(steps(settings, 3), Stream)
    before = drawn(tmp_path / "toy", 3)
    result = groupwise.rl(steps(settings, 6), Stream, resume_from="toy@3")
    assert result.summary["steps"] == 6
    after = drawn(result.folder, 6)
    assert after[:6] == before
    assert sorted(after[6:]) == sorted(before) == list(range(6)), "each example once per epoch"
    again = groupwise.rl(steps(settings, 7), Stream, resume_from="toy@6")
    assert drawn(again.folder, 6) == after


def test_a_stream_of_other_examples_is_refused(tmp_path, monkeypatch):
    settings = config(tmp_path)
    groupwise.rl(steps(settings, 3), Stream)
    monkeypatch.setattr(Stream, "letter", "b")
    with pytest.raises(ResumeMismatchError, match="training data, as token"):
        groupwise.rl(steps(settings, 4), Stream, resume_from="toy@3")
