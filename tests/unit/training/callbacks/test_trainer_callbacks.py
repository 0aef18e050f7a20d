"""Callbacks for the Trainer of transformers: their arguments, and the effect of their requests."""

from typing import Any

import pytest
from transformers import EarlyStoppingCallback
from transformers import TrainerCallback as Base
from transformers.trainer_callback import ExportableState

from groupwise.runs.records import EvaluationRecord
from groupwise.training.callbacks.base import Callbacks
from groupwise.training.callbacks.trainer import TrainerCallbackAdapter
from tests.unit.training.callbacks.fake_run import ObservedRun

TrainerCallback: Any = Base  # people's overrides are freer than its annotations


class Recording(TrainerCallback):
    """Notes what each event gives; `wishes` are set on `control` at an event."""

    def __init__(self, **wishes: str) -> None:
        self.wishes = wishes
        self.given: dict[str, Any] = {}


def noting(event: str) -> Any:
    def note(self: Any, args: Any, state: Any, control: Any, **given: Any) -> Any:
        given.get("logs", {}).pop("loss", None)
        self.given[event] = (args, state, given)
        if event in self.wishes:
            setattr(control, self.wishes[event], True)
        return None if event == "on_step_end" else control  # returning it is optional

    return note


for event in ("init_end", "train_begin", "step_begin", "step_end", "log", "evaluate", "save"):
    setattr(Recording, f"on_{event}", noting(f"on_{event}"))


class Told:
    """A run that one callback of transformers is told of."""

    def __init__(self, callback: Any, run: ObservedRun) -> None:
        self.run = run
        self.adapter = TrainerCallbackAdapter(callback)
        self.callbacks = Callbacks([(type(callback).__name__, self.adapter)])

    async def begin(self) -> None:
        await self.callbacks.begin(self.run)

    async def step(self, **metrics: float) -> None:
        await self.callbacks.step_begins()
        self.run.step += 1
        await self.callbacks.step_committed(metrics)

    async def evaluate(self, **metrics: float) -> None:
        step = self.run.step
        await self.callbacks.announce_evaluation(
            EvaluationRecord(step, f"step-{step}", "toy", metrics)
        )

    async def save(self) -> None:
        self.run.saved_step = self.run.step
        await self.callbacks.announce_checkpoint()


@pytest.fixture
async def start_callback(tmp_path):
    made = []

    async def begin(callback: Any, begun: bool = True, **facts: Any) -> Told:
        one = Told(callback, ObservedRun(tmp_path, **facts))
        made.append(one)
        if begun:
            await one.begin()
        return one

    yield begin
    for each in made:
        each.callbacks.close()


async def test_callbacks_get_trainer_args_state_and_metrics(start_callback, tmp_path):
    recording = Recording()
    one = await start_callback(recording)
    await one.step(loss=0.5, num_tokens=30.0)
    await one.evaluate(reward=1.0, eval_loss=2.0)
    args, state, given = recording.given["on_step_end"]
    assert args.output_dir == str(tmp_path)
    assert (args.max_steps, args.learning_rate, args.beta) == (10, 0.1, 0.5)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (8, 1)
    assert (args.eval_strategy, args.eval_steps, args.save_steps) == ("steps", 2, 2)
    assert (args.metric_for_best_model, args.greater_is_better) == ("eval_reward", True)
    assert args.to_dict()["run_name"] == "toy"
    with pytest.raises(AttributeError, match="no `fp16`"):
        _ = args.fp16
    assert (state.global_step, state.max_steps, state.epoch) == (1, 10, 0.25)
    assert state.num_input_tokens_seen == 30
    assert state.is_world_process_zero
    assert state.is_local_process_zero
    assert given["processing_class"] == "the tokenizer"
    assert given["model"] is None
    assert recording.given["on_evaluate"][2]["metrics"] == {
        "eval_reward": 1.0,
        "eval_loss": 2.0,
        "epoch": 0.25,
    }
    assert state.log_history == [
        {"loss": 0.5, "num_tokens": 30.0, "epoch": 0.25, "step": 1},
        {"eval_reward": 1.0, "eval_loss": 2.0, "epoch": 0.25, "step": 1},
    ]


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_end", "on_log"])
async def test_control_is_passed_on(start_callback, event):
    stopping = await start_callback(Recording(**{event: "should_training_stop"}))
    saving = await start_callback(Recording(**{event: "should_save"}))
    evaluating = await start_callback(Recording(**{event: "should_evaluate"}))
    for one in (stopping, saving, evaluating):
        await one.step(loss=1.0)
    assert stopping.callbacks.stop.by == "Recording"
    assert saving.callbacks.save_was_asked()
    assert evaluating.callbacks.evaluation_was_asked
    assert not saving.adapter._control.should_save


# --- real ones


async def test_exported_state_and_the_best_metric_continue_over_a_resume(start_callback):
    one = await start_callback(EarlyStoppingCallback(early_stopping_patience=2))
    for reward in (2.0, 1.0):
        await one.step()
        await one.evaluate(reward=reward)
    again = await start_callback(
        EarlyStoppingCallback(early_stopping_patience=2),
        begun=False,
        step=2,
        curves={"loss": [(1, 0.5), (2, 0.25)]},
    )
    again.callbacks.load_state(one.callbacks.state())
    await again.begin()
    assert again.adapter._state.log_history == [{"loss": 0.5, "step": 1}, {"loss": 0.25, "step": 2}]
    await again.step()
    await again.evaluate(reward=1.5)
    assert again.callbacks.stop is not None
    assert isinstance(again.adapter.wrapped, ExportableState)
