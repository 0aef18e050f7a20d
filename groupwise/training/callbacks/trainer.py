"""Runs callbacks that were written for the Trainer of transformers.

Such callbacks are recognised by the name of their base class, so transformers need not be imported. Each is wrapped and receives the
arguments that it expects: `args` (the config's keys, most of which have the same names), `state` (the progress of the run) and
`control`, whose requests are passed on: stop, save, evaluate, log. There is no model, optimiser or data loader here: those arguments
are None.

One step here is one `global_step`. If a callback handles events that never happen here (epochs, single optimiser calls, prediction),
a message at the start of the run names them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from groupwise.core.settings.view import View
from groupwise.runs.records import EvaluationRecord
from groupwise.training.callbacks.base import Callback, RunEnd, RunHandle

TRAINER_CALLBACK = "TrainerCallback"
STATEFUL = "ExportableState"

SUPPORTED_EVENTS = frozenset(
    {
        "on_init_end",
        "on_train_begin",
        "on_step_begin",
        "on_step_end",
        "on_log",
        "on_evaluate",
        "on_save",
        "on_train_end",
    }
)
MISSING_ARGUMENTS = ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
"""Arguments that a Trainer passes and that are None here."""
BEST_FIELDS = ("best_metric", "best_global_step", "best_model_checkpoint")
"""Attributes of `state` that describe the best evaluation so far."""


def is_trainer_callback(kind: type) -> bool:
    """True if a class is a callback for the Trainer of transformers."""
    return _trainer_callback_base(kind) is not None


def _trainer_callback_base(kind: type) -> type | None:
    return next((base for base in kind.__mro__ if base.__name__ == TRAINER_CALLBACK), None)


class TrainerArgs:
    """The `args` of a callback: the config's keys and the further attributes of a Trainer's arguments."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        attributes = [attribute for attribute in vars(self) if not attribute.startswith("_")]
        suggestions = get_close_matches(name, attributes, n=3, cutoff=0.0)
        raise AttributeError(
            f"these `args` have no `{name}`; there is no Trainer here. The nearest are {', '.join(suggestions)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """All names with their values."""
        return dict(vars(self))


@dataclass(slots=True)
class TrainerState:
    """The `state` object of a callback."""

    max_steps: int
    logging_steps: int
    save_steps: int
    eval_steps: int | None
    num_train_epochs: int
    train_batch_size: int | None
    epoch: float = 0.0
    global_step: int = 0
    """Number of steps done."""
    num_input_tokens_seen: int = 0
    total_flos: float = 0.0
    log_history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    best_metric: float | None = None
    """Best value of `args.metric_for_best_model` in the evaluations so far, without the one that is being announced."""
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None


@dataclass(slots=True)
class TrainerControl:
    """The `control` object of a callback, by which it makes requests."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    """Has no effect: there are no epochs to stop."""
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


class TrainerCallbackAdapter(Callback):
    """Wraps a Trainer callback as a `Callback`. Its own state goes into checkpoints if it is an `ExportableState`."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        self.critical = bool(getattr(wrapped, "critical", False))
        self._args: Any = None
        self._state: Any = None
        self._control: Any = TrainerControl()
        self._best: dict[str, Any] = {}
        self._questions = ""
        self._saved: tuple[int, str] | None = None
        self._epochs_said = False

    @property
    def never_called(self) -> list[str]:
        """Methods of the callback whose events never happen here."""
        kind = cast("type[Any]", type(self.wrapped))
        base = _trainer_callback_base(kind)
        events = [
            name for name in dir(base) if name.startswith("on_") and name not in SUPPORTED_EVENTS
        ]
        return [name for name in events if getattr(kind, name) is not getattr(base, name)]

    def on_run_begin(self, run: RunHandle) -> None:
        """`on_init_end` and `on_train_begin`."""
        self._args = TrainerArgs(_trainer_args(run))
        # The log history comes from the record, so a resumed run has all of it.
        settings = run.config.run
        epochs = _section(run.config, "training").get("num_train_epochs")
        logs: dict[int, dict[str, Any]] = {}
        for name, curve in run.metrics().items():
            for step, value in curve:
                logs.setdefault(step, {})[name] = value
        self._state = TrainerState(
            max_steps=run.max_steps,
            logging_steps=settings.logging_steps,
            save_steps=settings.save_steps,
            eval_steps=_section(run.config, "eval").get("eval_steps"),
            num_train_epochs=math.ceil(epochs or 0),
            train_batch_size=_rows_per_step(run.config),
            epoch=run.epoch,
            global_step=run.step,
            log_history=[
                {**logs[steps], "step": steps}
                for steps in sorted(logs)
                if steps % settings.logging_steps == 0
            ],
        )
        for name, value in self._best.items():
            setattr(self._state, name, value)
        if self.never_called:
            run.say(
                f"callback {type(self.wrapped).__name__}: {', '.join(self.never_called)} will not be called, because there is no "
                "such event here"
            )
        self._forward_event(run, "on_init_end")
        self._forward_event(run, "on_train_begin")

    def on_step_begin(self, run: RunHandle) -> None:
        """The event of the same name."""
        self._forward_event(run, "on_step_begin")

    def on_step_end(self, run: RunHandle, metrics: dict[str, float]) -> None:
        """The event of the same name, then `on_log` if it is due or was requested."""
        self._state.global_step, self._state.epoch = run.step, run.epoch
        self._state.num_input_tokens_seen = int(metrics.get("num_tokens", 0))
        self._forward_event(run, "on_step_end")
        if self._control.should_log or run.step % self._state.logging_steps == 0:
            self._log(run, metrics)

    def on_evaluate(self, run: RunHandle, evaluation: EvaluationRecord) -> None:
        """`on_log` and `on_evaluate` with metrics called `eval_…`. As in a Trainer, the best metric is updated afterwards."""
        metrics = {
            name if name.startswith("eval_") else f"eval_{name}": value
            for name, value in evaluation.metrics.items()
        }
        # Evaluated on other prompts, so the previous best is not comparable.
        if self._questions and evaluation.asked != self._questions:
            for name in BEST_FIELDS:
                setattr(self._state, name, None)
        self._questions = evaluation.asked
        self._log(run, metrics)
        self._forward_event(run, "on_evaluate", metrics={**metrics, "epoch": run.epoch})
        name = str(self._args.metric_for_best_model)
        value = metrics.get(name if name.startswith("eval_") else f"eval_{name}")
        if value is None or not math.isfinite(value):
            return
        sign, best = (1 if self._args.greater_is_better else -1), self._state.best_metric
        if best is None or sign * (value - best) > 0:
            self._state.best_metric, self._state.best_global_step = value, run.step
            saved = self._saved
            is_saved = saved is not None and saved[0] == run.step
            self._state.best_model_checkpoint = saved[1] if saved and is_saved else None

    def on_save(self, run: RunHandle, checkpoint: Path) -> None:
        """The event of the same name."""
        self._saved = (run.step, str(checkpoint))
        if self._state.best_global_step == run.step:
            self._state.best_model_checkpoint = str(checkpoint)
        self._forward_event(run, "on_save")

    def on_run_end(self, run: RunHandle, end: RunEnd) -> None:
        """`on_train_end`, for every outcome of the run."""
        self._forward_event(run, "on_train_end")

    def state(self) -> dict[str, Any]:
        """The best evaluation so far and, of a stateful callback, the attributes that it exports."""
        best = {name: getattr(self._state, name) for name in BEST_FIELDS} if self._state else None
        saved = {"best": best or self._best, "asked": self._questions}
        if not any(base.__name__ == STATEFUL for base in type(self.wrapped).__mro__):
            return saved
        return {**saved, "attributes": dict(self.wrapped.state()["attributes"])}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._best, self._questions = state["best"], state.get("asked", "")
        for name, value in state.get("attributes", {}).items():
            setattr(self.wrapped, name, value)

    def _forward_event(self, run: RunHandle, event: str, **arguments: Any) -> None:
        """Call a method with the arguments of a Trainer, and pass on the requests in its `control`."""
        absent = dict.fromkeys(MISSING_ARGUMENTS)
        tokenizer = {"processing_class": run.tokenizer, "tokenizer": run.tokenizer}
        method = getattr(self.wrapped, event)
        new_control = method(
            self._args, self._state, self._control, **absent, **tokenizer, **arguments
        )
        if new_control is not None:
            self._control = new_control
        control = self._control
        if control.should_training_stop:
            run.stop("it set control.should_training_stop")
        if control.should_save:
            run.save()
        if control.should_evaluate:
            run.evaluate()
        if control.should_epoch_stop and not self._epochs_said:
            self._epochs_said = True
            run.say(
                f"callback {type(self.wrapped).__name__}: control.should_epoch_stop has no effect, because there are no epochs to "
                "stop here; should_training_stop ends the run"
            )
        control.should_save = control.should_evaluate = False

    def _log(self, run: RunHandle, metrics: Mapping[str, float]) -> None:
        self._control.should_log = False
        logs = {**metrics, "epoch": run.epoch}
        self._state.log_history.append({**logs, "step": run.step})
        self._forward_event(run, "on_log", logs=dict(logs))


def _trainer_args(run: RunHandle) -> dict[str, Any]:
    """The keys of the config's sections in one flat dict, with the further names that a Trainer's arguments have."""
    keys: dict[str, Any] = {}
    for section in ("data", "sampler", "algorithm", "eval", "training", "run"):
        keys |= _section(run.config, section)
    for name in ("name", "dir", "type"):
        keys.pop(name, None)
    is_sft = run.kind == "sft"
    evaluates = is_sft or keys.get("eval_steps") is not None
    return {
        **keys,
        "output_dir": str(run.folder),
        "run_name": run.name,
        "max_steps": run.max_steps,
        "per_device_train_batch_size": _rows_per_step(run.config),
        "train_batch_size": _rows_per_step(run.config),
        "gradient_accumulation_steps": 1,
        "logging_strategy": "steps",
        "logging_first_step": False,
        "save_strategy": "steps",
        "eval_strategy": "steps" if evaluates else "no",
        "eval_delay": 0,
        "do_train": True,
        "do_eval": evaluates,
        "load_best_model_at_end": keys.get("load_best_model_at_end", False),
        "metric_for_best_model": "eval_loss" if is_sft else "eval_reward",
        "greater_is_better": not is_sft,
        "report_to": [],
        "push_to_hub": False,
        "disable_tqdm": False,
        "world_size": 1,
        "process_index": 0,
        "local_process_index": 0,
        "local_rank": -1,
        "should_save": True,
        "should_log": True,
    }


def _rows_per_step(config: View) -> int | None:
    training = _section(config, "training")
    prompts = training.get("prompts_per_step")
    if prompts is None:
        return training.get("examples_per_step")
    return prompts * training["num_generations"]


def _section(config: View, name: str) -> dict[str, Any]:
    return config[name].to_dict() if name in config else {}
