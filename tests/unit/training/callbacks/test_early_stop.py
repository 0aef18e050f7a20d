"""When a run counts as no longer improving."""

from typing import Any

import pytest

from groupwise.runs.records import EvaluationRecord
from groupwise.training.callbacks.early_stop import EarlyStop


class Run:
    def __init__(self) -> None:
        self.step = 0
        self.stopped: list[str] = []
        self.said: list[str] = []

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)

    def say(self, text: str) -> None:
        self.said.append(text)


def steps_until_stopped(callback: EarlyStop, values: list[Any], run: Any = None) -> int | None:
    run = run or Run()
    for value in values:
        run.step += 1
        callback.on_step_end(run, {} if value is None else {callback.metric: value})
        if run.stopped:
            return run.step
    return None


@pytest.mark.parametrize(("parameters", "values", "stopped_after"), [
    ({}, [1, 1, 1, 1], 4), ({"patience": 1}, [1, 2, 3, 3], 4), ({"patience": 2}, [1, 0, 2, 0, 0], 5),
    ({"patience": 2, "min_delta": 0.5}, [1, 1.5, 1.4], 3), ({"patience": 2, "min_delta": 0.5}, [1, 1.6, 1.4], None),
    ({"patience": 2, "mode": "min"}, [3, 2, 1, 2, 1], 5), ({"patience": 1, "metric": "eval_loss"}, [3, 2, 2], 3),
    ({"patience": 1, "metric": "loss", "mode": "max"}, [3, 2], 2), ({"patience": 2}, [float("nan"), 1, float("nan"), float("inf")], 4),
    ({"patience": 2}, [1, None, 1, None, None, 1], 6),
])  # fmt: skip
def test_patience(parameters, values, stopped_after):
    assert steps_until_stopped(EarlyStop(observe="steps", **parameters), values) == stopped_after


def test_state_continues_where_it_was():
    values = [0.1, 0.3, 0.2, 0.3, 0.1]
    whole, first, second = (EarlyStop(observe="steps") for _ in range(3))
    run = Run()
    assert steps_until_stopped(whole, values) == 5
    assert steps_until_stopped(first, values[:3], run) is None
    second.load_state(first.state())
    assert steps_until_stopped(second, values[3:], run) == 5
    assert second.state() == whole.state()


def test_the_best_on_other_held_out_prompts_is_no_mark():
    run: Any = Run()
    one, other = EarlyStop(patience=2), EarlyStop(patience=2)
    one.on_evaluate(run, EvaluationRecord(0, "step-0", "x", {"reward": 0.9}, asked="easy"))
    one.on_evaluate(run, EvaluationRecord(1, "step-1", "x", {"reward": 0.8}, asked="easy"))
    other.load_state(one.state())
    for step, reward in enumerate((0.2, 0.1, 0.3, 0.2)):
        other.on_evaluate(run, EvaluationRecord(step, "s", "x", {"reward": reward}, asked="hard"))
    assert (other.best, other.not_better, run.stopped) == (0.3, 1, [])
