"""`groupwise runs replay`, on real runs of the tiny model:

1. every step of a run, whatever its schedule, algorithm and weights, gives the recorded loss, gradient norm and weights, to the bit;
2. it begins at the newest checkpoint that stands, reads a run that is in use, and leaves the folder as it is;
3. whatever was changed in the record or in a checkpoint is noticed and named;
4. another layout or machine agrees up to rounding, and a step is replayed in the layout that it was taken in;
5. what cannot be replayed is refused with the reason.
"""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch

import groupwise
from groupwise.core.errors import ResumeMismatchError, RunNotFoundError, UsageError
from groupwise.runs import checkpoints
from groupwise.runs.encoding import pack_floats, unpack_floats
from groupwise.runs.folder import RunFolder
from groupwise.runs.store import Store
from groupwise.training.review import replay as module
from groupwise.training.review.replay import Replay, replay
from tests.integration.toy_run import TOY, config


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    return trained(runs)


@pytest.fixture
def copy(recorded, tmp_path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "toy"))


def trained(runs: Path, algorithm: Any = None, **changes: Any) -> Path:
    settings = config(runs, **changes.pop("training", {}))
    settings["eval"] = {"before_and_after": False}
    settings["algorithm"] = algorithm or {}
    for section, keys in changes.items():
        settings[section] = None if keys is None else {**settings.get(section, {}), **keys}
    assert groupwise.rl(settings, TOY).exit_code == 0
    return runs / "toy"


def again(folder: Path, step: int | None = None) -> Replay:
    return replay("toy", step=step, runs_dir=folder.parent)


# Every bit


@pytest.mark.parametrize(("step", "first"), [(4, 0), (5, 4)])
def test_a_step_agrees_with_its_record_to_the_bit(recorded, step, first):
    found = again(recorded, step)
    assert (found.exact, found.exit_code, found.rounding) == (True, 0, ())
    assert [each.step for each in found.steps] == list(range(first + 1, step + 1))
    assert found.start == ("toy@4" if first else "the starting weights")
    assert len({each.replayed.fingerprint for each in found.steps}) == len(found.steps)
    assert all(each.replayed.grad_norm for each in found.steps)


WAYS: dict[str, dict[str, Any]] = {
    "several updates, adaptive KL": {
        "training": {"num_iterations": 2, "minibatches": 2, "prompts_per_step": 4},
        "algorithm": {
            "type": "grpo",
            "epsilon": 0.01,
            "beta": 0.5,
            "kl_target": 1e-4,
            "kl_horizon": 30.0,
        },
    },
    "lag": {"training": {"max_off_policy_steps": 1}},
    "free": {"training": {"schedule": "free", "max_off_policy_steps": 1}},
    "reference": {"algorithm": {"type": "grpo", "beta": 0.5}},
    "dynamic sampling": {
        "training": {"prompts_per_step": 4, "num_generations": 2},
        "algorithm": {"type": "dapo", "max_resample_rounds": 2},
    },
    "least length": {
        "sampler": {"min_completion_length": 4},
        "algorithm": {"type": "grpo", "beta": 0.5, "entropy_coef": 0.01},
    },
    "dropout": {"lora": {"r": 4, "alpha": 8, "dropout": 0.3}},
    "full": {
        "training": {"learning_rate": 1e-3},
        "algorithm": {"type": "grpo", "beta": 0.1},
        "lora": None,
    },
}


USUAL = ("several updates, adaptive KL", "dynamic sampling", "full")


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[] if way in USUAL else [pytest.mark.soak(suite="training")])
        for way in WAYS
    ],
)
def test_every_way_of_learning_can_be_replayed(tmp_path, way):
    run = {"save_steps": 3, "save_total_limit": None, "name": "toy", "dir": str(tmp_path)}
    folder = trained(tmp_path, **WAYS[way], run={**run, "threads": 1})
    from_checkpoint = again(folder)
    assert (from_checkpoint.exact, from_checkpoint.start) == (True, "toy@3")
    if "adaptive KL" in way:
        knobs = checkpoints.read(folder / "checkpoints/step-3").extra["position"]["algorithm"]
        assert knobs["knobs"]["beta"] != 0.5
    shutil.rmtree(folder / "checkpoints")
    assert again(folder).exact
    if way == "dynamic sampling":
        with Store.open(folder / "run.db", readonly=True) as store:
            assert any(record.rejected for record in store.steps())
            assert {len(record.draws) for record in store.steps()} == {4}


# A run that is only read


def test_replay_changes_no_file_of_the_run(copy):
    def contents() -> dict[str, bytes]:
        files = (path for path in copy.rglob("*") if path.is_file())
        # Whoever reads a database in WAL mode leaves these two, empty or as they were.
        return {str(p): p.read_bytes() for p in files if p.name not in ("run.db-shm", "run.db-wal")}

    with RunFolder.open(copy):
        before = contents()
        assert again(copy).exact
        assert contents() == before


def test_a_damaged_checkpoint_is_passed_over(copy):
    (copy / "checkpoints/step-4/optimiser.safetensors").write_bytes(b"torn")
    found = again(copy, 5)
    assert found.exact
    assert found.start == "the starting weights"


def test_a_run_from_other_weights_is_replayed_where_it_is_now(recorded, tmp_path):
    settings = config(tmp_path)
    settings["eval"] = {"before_and_after": False}
    groupwise.rl(settings, TOY, init_from=str(recorded / "final"))
    moved = (tmp_path / "toy").rename(tmp_path / "elsewhere")
    found = replay(str(moved), step=2)
    assert found.exact
    assert found.start == "the starting weights"


# What is noticed


def change(folder: Path, statement: str, *values: Any) -> None:
    connection = sqlite3.connect(folder / "run.db")
    with connection:
        assert connection.execute(statement, values).rowcount > 0
    connection.close()


def nudge_logprob(folder: Path) -> None:
    """The first log-probability of the last step."""
    connection = sqlite3.connect(folder / "run.db")
    found = connection.execute(
        "SELECT rollout, logprobs FROM segments JOIN rollouts r ON r.id = rollout"
        " WHERE r.step = 4 AND r.advantage != 0"
    ).fetchall()
    connection.close()
    rollout, blob = found[0]
    logprobs = unpack_floats(blob)
    assert logprobs
    first, *others = logprobs
    nudged = pack_floats([first + 1e-5, *others])
    change(folder, "UPDATE segments SET logprobs = ? WHERE rollout = ?", nudged, rollout)


CHANGES = {
    "loss": ("UPDATE metrics SET value = value + 1e-9 WHERE name = 'loss' AND step = 4", {"loss"}),
    "fingerprint": ("UPDATE steps SET fingerprint_out = 'f' WHERE step = 4", {"fingerprint"}),
    "rate": ("UPDATE steps SET learning_rate = 0.5 WHERE step = 4", {"fingerprint"}),
    "order": (
        "UPDATE steps SET draws = json_array(json_extract(draws, '$[0]')) WHERE step = 4",
        {"grad_norm", "fingerprint"},
    ),
    "rewards": ("UPDATE rollouts SET reward = reward * reward WHERE step = 4", {"advantages"}),
}


def test_changes_of_a_record_are_noticed_and_named(recorded, tmp_path):
    for what, (statement, named) in CHANGES.items():
        copy = Path(shutil.copytree(recorded, tmp_path / what / "toy"))
        change(copy, statement)
        found = again(copy)
        assert (found.agrees, found.exact, found.exit_code) == (False, False, 1), what
        assert named <= set(found.steps[-1].differences)


def test_the_smallest_change_of_a_logprob_and_other_starting_weights_are_noticed(copy):
    nudge_logprob(copy)
    assert "loss" in again(copy).steps[-1].differences
    change(copy, "UPDATE segments SET fingerprint = 'f' WHERE policy_version = 0")
    found = again(copy, 1)
    assert not found.agrees
    assert "f was recorded" in (found.start_differs or "")


# Rounding


def test_another_machine_agrees_up_to_rounding(copy, monkeypatch):
    monkeypatch.setattr(module, "describe_processor", lambda device: "an abacus")
    found = again(copy)
    assert found.agrees
    assert any("is an abacus" in reason for reason in found.rounding)
    change(copy, "UPDATE steps SET fingerprint_out = 'f'")
    change(copy, "UPDATE metrics SET value = value * 1.0001 WHERE name = 'grad_norm'")
    found = again(copy, 4)
    assert (found.agrees, found.exact, found.exit_code) == (True, False, 0)
    change(copy, "UPDATE metrics SET value = value * 1.2 WHERE name = 'grad_norm' AND step = 3")
    assert again(copy, 4).steps[-1].differences == ("grad_norm",)


# What is refused


def test_replay_refuses_missing_steps_and_other_models(copy):
    with pytest.raises(RunNotFoundError, match="9"):
        again(copy, 9)
    with Store.open(copy / "run.db") as store:
        base = store.get_meta()["base"]
        store.set_meta({"base": "0" * 16})
        with pytest.raises(ResumeMismatchError, match="model"):
            again(copy)
        store.set_meta({"base": base, "kind": "sft"})
        with pytest.raises(UsageError, match="groupwise sft"):
            again(copy)
        store.set_meta({"kind": "rl"})
    change(copy, "UPDATE segments SET logprobs = NULL")
    with pytest.raises(UsageError, match="tokens"):
        again(copy)
    change(copy, "DELETE FROM steps")
    with pytest.raises(RunNotFoundError, match="step"):
        again(copy)
