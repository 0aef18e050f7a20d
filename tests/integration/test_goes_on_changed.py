"""What a resume meets that was changed since: how far a stream is read, what is asked of held-out prompts.

1. a longer run on a stream goes on with the examples that it began with, in the same order;
2. evaluations that ask something else say so, are made anew, and are no mark for what watches them.
"""

from __future__ import annotations

import copy
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise
from groupwise.errors import ResumeMismatchError
from groupwise.runs.store import Store
from tests.integration import toy_task
from tests.integration.running import TOY, config


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


# 1


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
    with pytest.raises(ResumeMismatchError, match="the training data, as token ids"):
        groupwise.rl(steps(settings, 4), Stream, resume_from="toy@3")


# 2


def watched(runs: Path, number: int, **evaluation: Any) -> dict[str, Any]:
    settings = config(runs, lr_scheduler_type="constant", max_steps=number)
    settings["eval"] = {
        "eval_steps": 1,
        "max_prompts": 3,
        "before_and_after": False,
        **evaluation,
    }
    settings["callbacks"] = [{"name": "early_stop", "patience": 2, "min_delta": 2.0}]
    settings["run"] |= {"save_steps": 1, "save_total_limit": None}
    return settings


def evaluations(folder: Path) -> dict[int, Any]:
    with Store.open(folder / "run.db", readonly=True) as store:
        return {each.step: each for each in store.evaluations()}


def test_evaluations_that_ask_something_else_begin_anew(tmp_path, capsys):
    """No reward is 2 above another one, so early_stop ends a run after its third evaluation of one kind."""
    folder = groupwise.rl(watched(tmp_path, 3), TOY).folder
    before = evaluations(folder)
    assert before[1].asked == before[2].asked != ""
    result = groupwise.rl(watched(tmp_path, 4, max_prompts=5), TOY, resume_from="toy@2")
    said = capsys.readouterr().err
    assert said.count("the best one is looked for anew") == 1
    after = evaluations(folder)
    assert after[1] == before[1]
    assert after[2].asked == after[3].asked != before[2].asked
    assert [len(after[step].rows) for step in (1, 2, 3)] == [3, 5, 5]
    assert result.summary["steps"] == 4, "two evaluations so far"
