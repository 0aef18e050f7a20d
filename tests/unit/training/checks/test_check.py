"""`groupwise check` on whole tasks: a correct one, and one for each possible mistake."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.core.errors import ConfigError, TaskError
from groupwise.core.findings import Finding, Report
from groupwise.core.reward_call.call import Failed
from groupwise.core.reward_call.request import GroupScore, MemberScore, ScoreRequest, unscored_group
from groupwise.training.checks import check as module
from groupwise.training.checks.check import check

ROWS = [{"prompt": f"Say {word}.", "answer": word} for word in ("red", "green", "blue", "black")]
PLAIN = {"model": {"name": "tiny"}, "rewards": {"time_limit": 5}}


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the answer and nothing else."""
    return [float(text.strip() == gold) for text, gold in zip(completions, answer, strict=True)]


def task(*functions: Any, rows: Any = None, **hooks: Any) -> SimpleNamespace:
    made = {
        "get_rl_dataset": lambda config: rows or ROWS,
        "get_reward_funcs": lambda config, tokenizer: list(functions or [right]),
        **hooks,
    }
    return SimpleNamespace(**made)


def checked(*functions: Any, **more: Any) -> dict[str, Finding]:
    return by_name(check(task(*functions, **more), PLAIN))


def by_name(report: Report) -> dict[str, Finding]:
    return {finding.name: finding for finding in report.findings}


def test_a_good_task_passes_everything():
    report = check(
        task(get_eval_dataset=lambda config: [{"prompt": "Say pink.", "answer": "pink"}]), PLAIN
    )
    told = {finding.name: finding.level for finding in report.findings if finding.level != "ok"}
    assert told == {"training data: prompts": "warning", "held-out data: prompts": "warning"}, (
        "they are text"
    )
    assert report.exit_code == 0
    assert report.details["prompts"] == ["Say red.", "Say green."]
    assert {row["completion"]: row["reward"] for row in report.details["table"]} == {
        "gold": 1, "another's gold": 0, "empty": 0, "garbage": 0, "prompt echoed": 0, "very long": 0,
    }  # fmt: skip
    json.dumps(report.summary)


@pytest.mark.parametrize(("row", "name", "level"), [
    ({"messages": 3}, "sft data", "problem"), ({"prompt": '{"messages": [', "completion": "a"}, "sft data: prompts", "warning"),
])  # fmt: skip
def test_bad_supervised_rows_do_not_stop_the_other_checks(row, name, level):
    report = check(task(get_sft_dataset=lambda config, tokenizer: [row]), PLAIN)
    found = by_name(report)
    assert found[name].level == level
    assert found["gold earns most"].level == "ok"


WARM_UP = {
    "data": {"dataset_text_field": "story"},
    "training": {"max_steps": 1, "examples_per_step": 2},
}


@pytest.mark.parametrize(("config", "shared"), [(PLAIN, 3), ({**PLAIN, "warm_up": WARM_UP}, 2)])
def test_held_out_prompts_among_the_supervised_rows_are_found(config, shared):
    """Those that the warm-up reads, if the config has one."""
    rows = [{"prompt": f"Say {n}.", "completion": "no", "story": "", "answer": "n"} for n in "abc"]
    hooks = {
        "get_eval_dataset": lambda config: rows,
        "get_sft_dataset": lambda config, tokenizer: iter(rows) if "data" in config else rows,
    }
    found = by_name(check(task(**hooks), config))["overlap"]
    assert (found.level, found.data["shared"]) == ("warning", shared)


def test_a_task_file_is_scored_in_workers_and_needs_no_config(tmp_path: Path):
    file = tmp_path / "task.py"
    file.write_text(
        "import os\n"
        f"HERE = {json.dumps(ROWS)}\n"
        "def get_rl_dataset(config):\n    return HERE\n"
        "def right(completions, answer, log_metric):\n"
        f"    assert os.getpid() != {__import__('os').getpid()}\n"
        "    return [float(c == a) for c, a in zip(completions, answer)]\n"
        "def get_reward_funcs(config, tokenizer):\n    return [right]\n"
        "def compute_metrics(prompts, completions, dataset_rows, config, tokenizer):\n"
        "    return {'accuracy': sum(c == r['answer'] for c, r in zip(completions, dataset_rows)) / 4}\n"
    )
    report = check(str(file))
    found = by_name(report)
    assert report.exit_code == 0
    assert "no config was given" in found["rendering"].measured
    assert found["training data"].data["prompt_length"]["unit"] == "characters"
    assert found["compute_metrics"].data == {"accuracy": 1.0}


def test_a_reward_that_crashes():
    def first_letter(completions, answer):
        return [float(text[0] == gold[0]) for text, gold in zip(completions, answer, strict=True)]

    report = check(task(first_letter), PLAIN)
    assert report.exit_code == 1
    said = by_name(report)["exceptions"]
    assert "IndexError" in said.measured
    assert "test_check.py" in said.measured
    assert said.remedy.startswith("let the reward function take any text")
    assert report.summary["error"]["code"] == "check_failed"


@pytest.mark.parametrize(("config", "longest"), [
    ({**PLAIN, "sampler": {"max_completion_length": 6}}, 6), (None, 4 * 256),
])  # fmt: skip
def test_no_completion_is_longer_than_a_policy_may_write(config, longest):
    def shortest(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [
            0.0 if text == gold else float(-len(text))
            for text, gold in zip(completions, answer, strict=True)
        ]

    (worst,) = (
        row["reward"]
        for row in check(task(shortest), config).details["table"]
        if row["completion"] == "very long"
    )
    assert worst == -longest


def contained(completions, answer):
    return [float(gold in text) for text, gold in zip(completions, answer, strict=True)]


def stripped(completions, answer):
    return [float(text.strip() == gold) for text, gold in zip(completions, answer, strict=True)]


def size(completions, **_):
    return [float(len(completion[0]["content"]) > 100) for completion in completions]


@pytest.mark.parametrize(("reward", "name", "others"), [
    (contained, "gold earns most", {"part contained": "warning"}),
    (stripped, "exceptions", {"part stripped": "warning", "gold earns most": "skipped", "independence": "skipped"}),
])  # fmt: skip
def test_a_reward_that_takes_messages_for_text_is_told_so(reward, name, others):
    rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    found = checked(reward, size, rows=rows)
    assert {other: found[other].level for other in others} == others
    assert 'completion[0]["content"]' in found[name].remedy


@pytest.mark.parametrize("result", [[0.0] * 2, 1.0])
def test_a_result_of_the_wrong_length_is_not_blamed_on_the_completions(result):
    def short(completions: list[str], **_: Any) -> Any:
        return result

    remedy = by_name(check(task(short), PLAIN))["exceptions"].remedy
    assert remedy == "let the reward function return a list with one number for each completion"


def test_a_judge_without_verdicts_is_not_blamed_on_the_completions():
    def judged(completions: list[str], **_: Any) -> list[float]:
        return [Failed("got no verdict: the endpoint refused the connection")] * len(completions)

    said = by_name(check(task(judged), PLAIN))["exceptions"]
    assert "refused the connection" in said.measured
    assert said.remedy.startswith("remove the cause that the reward itself names")


class Hanging:
    """A scorer in workers that answers some calls, and lets all others time out."""

    def __init__(self, answered: Collection[int]) -> None:
        self.answered, self.calls = answered, 0

    async def start(self) -> None:
        pass

    async def score(self, request: ScoreRequest) -> GroupScore:
        self.calls += 1
        count = len(request.completions)
        if self.calls not in self.answered:
            return unscored_group(count, "timed_out", "the call took longer than 30 s")
        return GroupScore(tuple(MemberScore("scored", None, 1.0) for _ in range(count)))

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(("answered", "calls", "determinism"), [
    ((), 3, "skipped"), ((3,), 6, "skipped"), (range(1, 9), 11, "warning"),
])  # fmt: skip
def test_a_reward_that_hangs_is_given_up(
    monkeypatch: pytest.MonkeyPatch, answered: Collection[int], calls: int, determinism: str
):
    """After three calls in a row, the first ones or those that repeat the four for the layout and the four for the rows."""
    scorer = Hanging(answered)
    monkeypatch.setattr(module.rollout_builder, "build_scorer", lambda *_: scorer)
    report = check(task(right), PLAIN)
    found = by_name(report)
    assert scorer.calls == calls
    assert found["determinism"].level == determinism
    assert found["independence"].level == "skipped"
    assert "after 3 time-outs" in found["independence"].measured
    if not answered:
        assert [each.name for each in report.of_level("problem")] == ["exceptions"]
        assert "longer than 30 s" in found["exceptions"].measured
        assert found["latency"].data["calls"] == calls


def tagged(completions, answer):
    wanted = [f"<answer>{gold}</answer>" for gold in answer]
    return [float(want in text) for text, want in zip(completions, wanted, strict=True)]


def tired(completions, answer, calls=[]):  # noqa: B006 — its memory
    calls.append(1)
    return [value / len(calls) for value in right(completions, answer)]


def share(completions, answer):
    return [value / len(completions) for value in right(completions, answer)]


class Relative:
    relative = True

    def __call__(self, completions, answer):
        return share(completions, answer)


@pytest.mark.parametrize(("reward", "levels"), [
    (tagged, {"gold earns most": "ok"}), (contained, {"prompt echoed": "warning", "gold earns most": "warning"}),
    (tired, {"determinism": "warning"}), (share, {"independence": "warning"}), (Relative(), {"independence": "ok"}),
])  # fmt: skip
def test_rewards_that_can_be_won_otherwise_are_warned_of(reward, levels):
    found = checked(reward)
    assert {name: found[name].level for name in levels} == levels
    layout = found["gold answers"].data["layout"]
    assert (layout == "in answer tags") is (reward is tagged), "the way that earns most"


def test_a_misspelt_hook_is_named():
    taught = {"get_sft_dataset": lambda config, tokenizer: [{"prompt": "a", "completion": "b"}]}
    misspelt = task(get_reward_func=lambda config, tokenizer: [right], **taught)
    del misspelt.get_reward_funcs
    found = by_name(check(misspelt, PLAIN))
    assert [found[name].level for name in ("hooks", "rewards")] == ["warning"] * 2
    assert "Is it `get_reward_func`? Rename it." in found["rewards"].measured
    assert "`compute_metric`" in checked(compute_metric=lambda *five, **named: {})["hooks"].remedy


@pytest.mark.parametrize(("rewards", "hooks"), [({}, 1), ({"reward_funcs": ["correctness"]}, 0)])
def test_rewards_of_the_config_are_no_hook_of_the_task(rewards, hooks):
    """Those of a task that the config's replace still are."""
    given = {**PLAIN, "rewards": {**PLAIN["rewards"], **rewards}}
    without = task()
    if rewards:
        assert "get_reward_funcs" in by_name(check(without, given))["hooks"].data["hooks"]
        del without.get_reward_funcs
    found = by_name(check(without, given))["hooks"]
    assert found.data["hooks"].count("get_reward_funcs") == hooks
    assert ("rewards of the config" in found.measured) == (not hooks)


def test_rewards_without_rows_to_train_on_are_a_warning():
    unnamed = task(get_rl_data=lambda config: ROWS, get_eval_dataset=lambda config: ROWS)
    del unnamed.get_rl_dataset
    found = by_name(check(unnamed, PLAIN))
    assert found["hooks"].remedy == "is `get_rl_data` the hook get_rl_dataset? Rename it"
    assert found["training data"].level == "warning"
    rows_of_a_split = checked(get_dataset=lambda split: ROWS)
    assert rows_of_a_split["hooks"].level == "ok", "no hook is called so"


def test_check_refuses_what_training_would_refuse(tmp_path: Path):
    with pytest.raises(TaskError, match="not found"):
        check(str(tmp_path / "no.py"))
    with pytest.raises(TaskError, match="asks for `target`"):
        checked(lambda completions, target: [])
    with pytest.raises(ConfigError):
        check(task(), PLAIN, overrides=["training.lerning_rate=1"])


def completions_file(tmp_path: Path, *rows: Any) -> str:
    file = tmp_path / "given.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(file)


def test_given_completions_are_scored_by_prompt_or_by_number(tmp_path: Path):
    red = [{"prompt": "Say red.", "completion": word} for word in ("red", "blue")]
    source = completions_file(tmp_path, *red, {"example": 2, "completion": "black"})
    report = check(task(), PLAIN, completions=source)
    said = by_name(report)["given completions"]
    assert said.data["mean"] == pytest.approx(1 / 3)
    assert (said.data["prompts"], said.data["groups"], said.data["constant_groups"]) == (2, 1, 0)
    assert report.details["table"][-1]["completion"] == "given"


@pytest.mark.parametrize(
    ("words", "remedy"), [(["blue"], "stop_when"), (["blue", "grey", "pink", "tan"], "warm_up")]
)
def test_check_says_why_given_completions_would_not_teach(tmp_path: Path, words, remedy):
    rows = [{"prompt": "Say red.", "completion": word} for word in words * (8 // len(words))]
    said = by_name(
        check(
            task(),
            PLAIN,
            completions=completions_file(tmp_path, *rows, {"example": 1, "completion": "green"}),
        )
    )
    assert said["given completions"].data["groups/distinct"] == len(words) / 8
    assert remedy in said["given completions"].remedy
    alone = by_name(check(task(), PLAIN, completions=completions_file(tmp_path, *rows)))
    assert ("given: solved" in said, "given: solved" in alone) == (False, True)
