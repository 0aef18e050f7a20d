"""The table of the loss: one row for each step, however often the run was taken up."""

from typing import Any

import pytest

from groupwise.callbacks.base import RunHandle
from groupwise.callbacks.loss_logging import COLUMNS, LossLogging
from tests.unit.callbacks.observed import Observed


def handle(run: Observed) -> RunHandle:
    return RunHandle(run, None, "loss_logging")  # type: ignore[arg-type]


def test_a_row_for_each_step_and_nothing_where_a_metric_is_missing(tmp_path, caplog):
    caplog.set_level("INFO", "groupwise")
    run, callback = Observed(tmp_path), LossLogging(("loss", "a,b"))
    callback.on_run_begin(handle(run))
    given: list[dict[str, Any]] = [
        {"loss": 0.1 + 0.2, "a,b": 2.0},
        {"reward": 1.0},
        {"loss": -1e-7},
    ]
    for metrics in given:
        run.step += 1
        callback.on_step_end(handle(run), metrics)
    assert (tmp_path / "loss_history.csv").read_text() == (
        'step,loss,"a,b"\n0,0.30000000000000004,2.0\n1,,\n2,-1e-07,\n'
    )
    assert "step 1/10: loss 0.3, a,b 2" in caplog.text


@pytest.mark.parametrize("left", ["", "step,loss\n0,1.5\n1,2.5\n2,3.5\n", "step,loss\n0,1.5\n1,2"])
def test_a_resume_writes_what_the_record_has(tmp_path, left):
    """Whatever a killed process left: rows of steps that are done again, or half a row."""
    file = tmp_path / "loss_history.csv"
    file.write_text(left)
    run = Observed(tmp_path, step=2, curves={"loss": [(0, 1.5), (1, 2.5)]})
    callback = LossLogging(("loss", "kl"))
    callback.on_run_begin(handle(run))
    run.step = 3
    callback.on_step_end(handle(run), {"loss": 9.0, "kl": 0.5})
    assert file.read_text() == "step,loss,kl\n0,1.5,\n1,2.5,\n2,9.0,0.5\n"


@pytest.mark.parametrize(
    ("metrics", "recorded", "said"),
    [
        (("loss", "learnin_rate"), (), ["'learnin_rate'"]),
        (("loss", "kl"), ("kl",), []),
        (COLUMNS, (), []),
    ],
)
def test_a_name_that_stands_for_nothing_is_told_once(tmp_path, metrics, recorded, said):
    run = Observed(tmp_path, curves={name: [(0, 1.0)] for name in recorded})
    callback = LossLogging(metrics)
    callback.on_run_begin(handle(run))
    for _ in range(2):
        run.step += 1
        callback.on_step_end(handle(run), {"loss": 1.0, "learning_rate": 0.1})
    assert len(run.said) == len(said)
    for told, name in zip(run.said, said, strict=True):
        assert told.startswith(f"loss_logging: there is no metric {name} in the steps so far")
        assert "Did you mean learning_rate?" in told
