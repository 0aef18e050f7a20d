"""The contract of rewards within one process.

1. Functions get what they name, as TRL users know it; nobody's changes reach anybody else.
2. The total is Σ weight × value over the parts that apply.
3. What a function does wrongly fails the rollouts concerned, with a reason, and raises nothing.
4. What cannot be called at all is a TaskError before anything starts.
"""

import asyncio
import functools
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.core.errors import TaskError
from groupwise.core.reward_call.call import Failed
from groupwise.core.reward_call.request import MemberScore, ScoreRequest
from groupwise.core.reward_call.text import CompletionText
from groupwise.core.types import Prompt, from_json, to_json
from groupwise.tasks.rewards.router import Router
from groupwise.tasks.rewards.rubric import NO_REWARD, Rubric


def request(count=2, **columns):
    return ScoreRequest(
        draw=0,
        prompts=["p"] * count,
        completions=[f"c{i}" for i in range(count)],
        completion_ids=[[i, 9] for i in range(count)],
        columns=columns,
        global_step=3,
        max_steps=10,
        prompt_ids=[[7]] * count,
        steps_per_epoch=4.0,
    )


def score(rubric, asked=None):
    if not isinstance(rubric, Rubric):
        rubric = Rubric(rubric)
    return asyncio.run(rubric.score(asked or request()))


def reason(member: MemberScore) -> str:
    assert member.reason is not None
    return member.reason


def constant(value, name="f"):
    def function(completions, **kwargs):
        return [value] * len(completions)

    function.__name__ = name
    return function


# 1. arguments


def test_reward_functions_receive_the_columns_and_arguments_they_name():
    seen = {}

    def everything(prompts, completions, **kwargs):
        seen["everything"] = {name: kwargs[name] for name in ("answer", "other", "prompt_ids")}
        kwargs["log_extra"]("seen", kwargs["completion_ids"])
        return [float(kwargs["trainer_state"].global_step)] * 2

    def one(completions, answer):
        seen["one"] = answer
        return [0.0, 0.0]

    def named(completions, completion_ids, trainer_state, **kwargs):
        seen["ids"] = completion_ids
        seen["steps"] = (trainer_state.global_step, trainer_state.max_steps)
        seen["epochs"] = (trainer_state.epoch, trainer_state.num_train_epochs)
        assert trainer_state.is_world_process_zero
        at_start = (trainer_state.log_history, trainer_state.best_metric, trainer_state.total_flos)
        assert at_start == ([], None, 0)
        seen["rest"] = set(kwargs)
        return [1, 1]

    members = score([everything, one, named], request(answer=["a", "b"], other=[1, 2])).members
    assert [member.parts[0].value for member in members] == [3.0, 3.0]
    assert [member.notes["seen"] for member in members] == [[0, 9], [1, 9]]
    assert seen == {
        "everything": {"answer": ["a", "b"], "other": [1, 2], "prompt_ids": [[7], [7]]}, "one": ["a", "b"], "ids": [[0, 9], [1, 9]],
        "steps": (3, 10), "epochs": (0.75, 3),
        "rest": set("prompts prompt_ids prompts_seen answer other rollout_notes log_metric log_extra".split()),
    }  # fmt: skip


def test_a_function_may_run_an_event_loop_of_its_own():
    async def double(value):
        await asyncio.sleep(0)
        return 2.0 * value

    def runs(completions, **kwargs):
        async def every():
            return await asyncio.gather(*map(double, range(len(completions))))

        return list(asyncio.run(every()))

    def makes(completions, **kwargs):
        loop = asyncio.new_event_loop()
        try:
            return [loop.run_until_complete(double(n)) for n in range(len(completions))]
        finally:
            loop.close()

    def finds(completions, **kwargs):
        loop = asyncio.get_event_loop()
        return [loop.run_until_complete(double(n)) for n in range(len(completions))]

    async def awaits(completions, **kwargs):
        return [await double(n) for n in range(len(completions))]

    members = score([runs, makes, finds, awaits]).members
    assert [[p.value for p in member.parts] for member in members] == [[0.0] * 4, [2.0] * 4]


def test_the_event_loop_of_a_reward_lasts_as_long_as_its_thread():
    lock, loops = asyncio.Lock(), set()

    async def ask():
        async with lock:  # it belongs to the loop in which somebody waited for it first
            await asyncio.sleep(0)
            return 1.0

    def keeps(completions, **kwargs):
        loops.add(loop := asyncio.get_event_loop())
        return loop.run_until_complete(asyncio.gather(ask(), ask()))

    def gathers(completions, **kwargs):
        return asyncio.gather(ask(), ask())

    def yields(completions, **kwargs):
        yield from asyncio.run(gathers_anew())

    async def gathers_anew():
        return [await asyncio.sleep(0, 1.0)] * 2

    def in_a_thread():
        functions = [keeps, yields, gathers, lambda completions: gathers_anew()]
        return [score(functions).members[0].reward for _ in range(2)]

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(in_a_thread).result() == [4.0, 4.0]
    (loop,) = loops
    assert loop.is_closed()


class Counter:
    def __call__(self, completions, **kwargs):
        return [1] * len(completions)


class Awaited:
    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0)
        return [2] * len(completions)


def test_async_functions_objects_methods_and_partials():
    def scaled(completions, factor, **kwargs):
        return [factor] * len(completions)

    functions = [Counter(), Awaited(), Counter().__call__, functools.partial(scaled, factor=4)]
    parts = score(functions).members[0].parts
    assert [part.value for part in parts] == [1.0, 2.0, 1.0, 4.0]
    assert [part.name for part in parts] == ["Counter", "Awaited", "__call__", "scaled"]


def test_changes_to_arguments_stay_with_the_function():
    question: list[Prompt] = [[{"role": "user", "content": "q"}]]
    answers: list[CompletionText] = [[{"role": "assistant", "content": "c"}]]
    chat = ScoreRequest(0, question, answers, [[1]], {"answer": ["x"]}, 0, 1)

    def spoils(prompts, completions, answer, **kwargs):
        completions[0][0]["content"] = prompts[0][0]["content"] = "spoilt"
        answer.clear()
        return [1.0]

    def reads(prompts, completions, answer, **kwargs):
        assert (prompts[0][0]["content"], completions[0][0]["content"]) == ("q", "c")
        assert answer == ["x"]
        return [1.0]

    assert score([spoils, reads], chat).members[0].outcome == "scored"


def test_metrics_are_averaged_and_extras_kept_beside_their_rollout():
    def logs(completions, log_metric, log_extra):
        log_metric("length", 1)
        log_metric("length", np.float32(2))
        log_metric("length", float("nan"))
        log_extra("seen", [np.int64(5), {"a": (1, float("inf"))}])
        return [1, 1]

    found = score([logs])
    assert found.metrics == {"length": 1.5}
    assert [member.notes for member in found.members] == [{"seen": 5}, {"seen": {"a": [1, None]}}]
    assert from_json(type(found), to_json(found)) == found
    spoilt = score([lambda completions, log_extra: log_extra("seen", [1])])
    assert "1 value for 2 completions" in reason(spoilt.members[0])


# 2. totals


@given(st.lists(st.tuples(st.floats(-10, 10), st.none() | st.floats(-10, 10)), min_size=1))
def test_total_is_the_weighted_sum_of_what_applies(parts):
    parts = [(weight, value) for weight, value in parts if weight] or [(1.0, 1.0)]
    rubric = Rubric([(constant(value), weight) for weight, value in parts])
    member = score(rubric).members[0]
    applied = [weight * value for weight, value in parts if value is not None]
    assert member.outcome == ("scored" if applied else "failed")
    assert member.reward == (sum(applied) if applied else None)
    if not applied:
        assert member.reason == NO_REWARD


def test_part_of_weight_zero_neither_applies_nor_fails():
    def broken(completions, **kwargs):
        raise RuntimeError("monitor")

    ok = score([(constant(2.0), 1), (broken, 0)]).members[0]
    assert (ok.outcome, ok.reward) == ("scored", 2.0)
    assert "monitor" in ok.notes["failed_rewards"]["broken"]
    nothing = score([(constant(None), 1), (constant(1.0), 0)]).members[0]
    assert (nothing.outcome, nothing.reason) == ("failed", NO_REWARD)


# 3. failures


@pytest.mark.parametrize(("answer", "first", "second"), [
    ([1, 1], 1, 1), ((True, False), 1, 0), ([Decimal(1), np.float32(2)], 1, 2), (np.ones(2, dtype=np.float16), 1, 1),
    (np.array([[1], [2]]), 1, 2), ([np.array(1.0), np.array(True)], 1, 1), (map(float, "12"), 1, 2), ({"a": 1, "b": 2}.values(), 1, 2),
    (torch.tensor([1, np.nan], dtype=torch.bfloat16), 1, None), ([torch.tensor(1), torch.tensor([2.0])], 1, 2),
    ([1.0, None], 1, None), ([np.nan, 1], None, 1), (np.array([None, 2.0]), None, 2), ([None, Decimal("NaN")], None, None),
    *(([1, entry], 1, "returned") for entry in (np.inf, -np.inf, 1e308, -1e16, 10**400, "1", [1.0], {"a": 1}, 1j, np.ones(2))),
    ([1, Failed("has no tests")], 1, "has no tests"), *((answer, *["expected a list of 2 numbers"] * 2) for answer in (
        1.0, np.float64(1), torch.tensor(1.0), True, None, "ab", {"a": 1, "b": 2}, {1.0, 2.0})),
    ([1.0], *["returned 1 value for 2 completions"] * 2), (np.ones((2, 2)), *["returned list [1.0, 1.0]"] * 2),
])  # fmt: skip
def test_every_answer_has_one_meaning(answer, first, second):
    """Numbers count, None and NaN do not apply, and anything else fails its own rollout, or all if it is not a list of the right length."""
    members = score([constant(0.0, "fine"), lambda completions: answer]).members
    for member, wanted in zip(members, (first, second), strict=True):
        value = None if isinstance(wanted, str) else wanted
        assert member.parts[1].value == value
        if isinstance(wanted, str):
            assert (member.outcome, member.reward) == ("failed", None)
            assert "reward `lambda` " in reason(member)
            assert wanted in reason(member)
        else:
            assert (member.outcome, member.reward, member.notes) == ("scored", value or 0, {})


@pytest.mark.parametrize(("value", "weight"), [(1e308, 1.0), (1e14, 1e9)])
def test_rewards_beyond_what_a_step_can_compute_with_fail_their_rollouts(value, weight):
    member = score([(constant(value), weight)]).members[0]
    assert (member.outcome, "up to 1e+15" in reason(member)) == ("failed", True)


def test_arguments_that_no_row_fills_are_reported():
    some = np.array([1, 2])

    def settings(completions, answer, gold=None, w=some, origin=None, log_extra=None): ...

    rubric = Rubric([settings])
    assert rubric.unfilled_arguments([]) == []
    assert (
        rubric.unfilled_arguments([{"answer": "1", "gold": None}, {"answer": None, "gold": "2"}])
        == []
    )
    told = rubric.unfilled_arguments([{"answer": None}, {"answer": None}])
    assert told == rubric.argument_columns == [("settings", "answer"), ("settings", "gold")]


def raises(completions, **kwargs):
    return [1 / 0 for _ in completions]


async def raises_later(completions, **kwargs):
    await asyncio.sleep(0)
    raise KeyError("late")


async def cancels(completions, **kwargs):
    raise asyncio.CancelledError


def leaves(completions, **kwargs):
    raise SystemExit(1)


def looks_back(completions, trainer_state, **kwargs):
    assert getattr(trainer_state, "save_steps", None) is None
    return trainer_state.eval_steps


@pytest.mark.parametrize(("function", "part"), [
    (raises, "return [1 / 0 for _ in completions]"), (raises_later, "KeyError: 'late'"),
    (cancels, "CancelledError"), (leaves, "SystemExit"), (looks_back, "has no `eval_steps` here"),
])  # fmt: skip
def test_exceptions_fail_the_call_and_nothing_else(function, part):
    heard = []
    rubric = Rubric([function, constant(1.0, "fine")])
    found = asyncio.run(rubric.score(request(), heard.append))
    assert heard == [function.__name__, "fine"], "each is announced before it runs"
    for member in found.members:
        assert member.outcome == "failed"
        assert f"`{function.__name__}` raised" in reason(member)
        assert part in reason(member)
        assert member.parts[1].value == 1.0


# 4. what cannot be called


def test_a_function_that_takes_text_for_a_chat_or_the_reverse_learns_what_it_gets():
    def content(completions, **columns):
        return [float(len(each[0]["content"])) for each in completions]

    def stripped(completions, **columns):
        return [float(len(each.strip())) for each in completions]

    text = request()
    chat = replace(text, completions=[[{"role": "assistant", "content": "a"}]] * 2)
    for function, asked, hint in (
        (content, text, "prompts are text here"),
        (stripped, chat, "prompts are chats here"),
    ):
        assert hint in reason(score([function], asked).members[0])


def refused(call) -> str:
    with pytest.raises(TaskError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(("value", "part"), [
    ([], "empty"), ({}, "got dict"), (None, "got NoneType"),
    (["accuracy"], "groupwise.tasks.rewards.get_reward_funcs"), ([3], "entry 0: expected a function"),
    ([constant(1), (3, 1.0)], "entry 1"), ([Counter], "give an instance, `Counter()`"), ([(constant(1), "1")], "weight of `f` is '1'"),
    ([(constant(1), float("nan"))], "finite"), ([(constant(1), True)], "weight of `f` is True"),
    ([(constant(1), 0)], "every weight is 0"), ([lambda completions, /: 1], "position only"),
])  # fmt: skip
def test_invalid_lists_of_reward_functions_are_refused(value, part):
    message = refused(lambda: Rubric.of(value, where="task.py: get_reward_funcs"))
    assert message.startswith("task.py: get_reward_funcs")
    assert part in message


def test_weights_replace_those_given_and_names_are_unique():
    given = [(constant(1, "a"), 5), constant(1, "b")]
    assert Rubric.of(given, where="").weights == (5.0, 1.0)
    assert Rubric.of(given, [2, 3], where="").weights == (2.0, 3.0)
    assert Rubric.of(Rubric(given), [2, 3], where="").weights == (2.0, 3.0)
    assert "3 weights for 2" in refused(lambda: Rubric(given, [1, 2, 3]))
    names = ["f", "f", "f_2", "g", "f"]
    assert Rubric([constant(1, name) for name in names]).names == ("f", "f_3", "f_2", "g", "f_4")


def test_reward_arguments_without_a_column_are_refused_with_the_columns_there_are():
    rubric = Rubric([lambda completions, gold, log_extra, hint=None: completions])
    rubric.check_columns({"gold"}, where="t")
    message = refused(lambda: rubric.check_columns({"answer", "level", "origin"}, where="t"))
    assert "asks for `gold`" in message
    assert "It has: answer, level. " in message


def c(prompts, completion): ...
async def i(completion, answer, log_metric, level=0, j=1, **state): ...
def p(prompt, completion, parser): ...  # fmt: skip


@pytest.mark.parametrize(("function", "body"), [
    (c, "def c_of_all(completions, prompts, **columns):\n      return [c(prompts=prompts, completion=completions[i]) for i"),
    (i, "async def i_of_all(completions, answer, log_metric, level, **columns):\n      return [await "
        "i(completion=completions[ii], answer=answer[ii], log_metric=log_metric, level=level[ii]) for ii"),
    (p, "def p_of_all(completions, prompts, **columns):\n      return [p(prompt=prompts[i], completion=completions[i]) for i"),
    (lambda completion: 1, "def reward_of_all(completions, **columns):\n      return [reward(completion=completions[i]) for i"),
])  # fmt: skip
def test_a_function_of_one_completion_is_refused_with_how_to_adapt_it(function, body):
    message = refused(lambda: Rubric([function]).check_columns({"answer", "level"}, where="t"))
    assert message.endswith(f"{body} in range(len(completions))]")
    assert ("functools.partial(p, parser=…)" in message) is (function is p)
    exec(textwrap.dedent(message.partition("instead")[2].partition(":\n")[2]), {})


def test_stateful_is_what_a_function_says_of_itself():
    function = constant(1)
    assert not Rubric([function]).stateful
    setattr(function, "stateful", True)  # noqa: B010 — type checkers know no attributes of functions
    assert Rubric([constant(2), function]).stateful
    assert Router.of({"a": constant(2), "b": function}).stateful
    setattr(function, "__module__", None)  # noqa: B010 — as that of code that runs without a module's names
    assert Rubric([function]).files == ()
