"""Runs whose learners have a part of the weights each (`distributed.strategy: fsdp2`).

1. A run with two is that of one process up to rounding: adapters, all weights with a reference, supervised; with as many micro-batches as
   it may be, in each learner another number; with gradient checkpointing.
2. Each has half of every weight, and nothing more between two passes.
3. Checkpoints are those of one process: it goes on 2 → 1 → 2, and after a load all have the same weights.
4. Ctrl-C in the middle of a gradient ends the run with a checkpoint, and nobody waits for ever; so does the failure of one learner.
5. A learner that is killed ends the run with code 75; resumed, it equals the undisturbed run to the bit.
"""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import groupwise
from groupwise.engine.distributed.learner import RankLearner
from groupwise.engine.distributed.messages import MessageChannel
from groupwise.engine.distributed.rpc import WorkerCalls
from groupwise.engine.distributed.worker_state import WorkerState
from groupwise.engine.learner.torch_learner import TorchLearner
from tests.forked_zygote import fork_peers
from tests.integration.test_learners import (
    ALL_WEIGHTS,
    SOAK,
    WEIGHTS,
    assert_close,
    loaded,  # noqa: F401 — a fixture
    lost_by_a_kill,
    scaled,
)
from tests.integration.test_ranks import SFT, metrics, supervised
from tests.integration.toy_run import TOY, go_on, ratios_of, what_must_be_equal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    fork_peers(monkeypatch)


def divided(runs: Path, learners: int = 2, **training) -> dict[str, Any]:
    """With one learner whole."""
    settings = scaled(runs, learners, **training)
    if learners > 1:
        settings["run"]["threads"] = learners + 1
        settings["distributed"] |= {"samplers": 1, "strategy": "fsdp2"}
    return settings


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    runs = tmp_path_factory.mktemp("alone")
    assert groupwise.rl(divided(runs, 1), TOY).exit_code == 0
    return runs / "toy"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """With two learners, which make several passes for a gradient; and what each of them held of the weights after each gradient."""
    runs = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        fork_peers(patch)
        held = noted_numbers(patch)
        assert groupwise.rl(divided(runs, **SMALL), TOY).exit_code == 0
    return runs / "toy", held


ALL = {"lora": None}
KL = {"algorithm": {"beta": 0.05}}
OWN = {"algorithm": {"type": "examples/11_own_algorithm/asymmetric.py:Asymmetric", "beta": 0.05}}
SMALL = {"max_tokens_per_microbatch": 20}
AGAIN = {"gradient_checkpointing": True}


def test_a_run_of_two_is_that_of_one_process(alone, whole):
    whole, held = whole
    assert_halves(held)
    assert_close(alone, whole)
    assert len(ratios_of(alone)) > 100
    assert ratios_of(whole) == pytest.approx(ratios_of(alone), abs=1e-3)
    assert files(alone) == files(whole)


@pytest.mark.parametrize(("learners", "training", "more"), [
    (2, {"max_tokens_per_microbatch": 40, **AGAIN}, {**ALL, **OWN}), pytest.param(3, {**SMALL, **AGAIN}, {**ALL, **KL}, marks=SOAK),
    pytest.param(3, SMALL, KL, marks=SOAK), pytest.param(2, AGAIN, {}, marks=SOAK), pytest.param(2, {"packing": False}, KL, marks=SOAK),
    pytest.param(3, SMALL, ALL, marks=SOAK), pytest.param(2, AGAIN, ALL, marks=SOAK),
    pytest.param(2, {"num_iterations": 2, "minibatches": 2}, ALL, marks=SOAK),
])  # fmt: skip
def test_any_number_of_learners_equals_one(tmp_path, monkeypatch, learners, training, more):
    """The reference of all weights is another model, of which each has its part as well; a class in a file is found by all processes."""
    held = noted_numbers(monkeypatch)
    for count in (1, learners):
        settings = {**divided(tmp_path / str(count), count, **training), **more}
        assert groupwise.rl(settings, TOY).exit_code == 0
    one, other = tmp_path / "1/toy", tmp_path / f"{learners}/toy"
    assert_close(one, other, ALL_WEIGHTS if more.keys() >= ALL.keys() else WEIGHTS)
    assert ratios_of(other) == pytest.approx(ratios_of(one), abs=1e-3)
    assert files(one) == files(other)
    if learners == 2:
        assert_halves(held)


def files(run: Path) -> dict[str, Any]:
    """What is written of weights and optimiser: names, shapes and types."""
    found = [*run.glob("final/*.safetensors"), *run.glob("checkpoints/*/*.safetensors")]
    assert len(found) > 2
    return {
        str(file.relative_to(run)): {k: (t.shape, t.dtype) for k, t in load_file(file).items()}
        for file in found
    }


@pytest.mark.parametrize("lora", [{"r": 4, "dropout": 0.0}, None])
def test_supervised_runs(tmp_path, lora):
    one, two = supervised_runs(tmp_path, lora, "float32")
    assert_close(one, two, ALL_WEIGHTS if lora is None else WEIGHTS)


def test_all_weights_computed_in_bfloat16(tmp_path):
    """The parts are float32. A gradient's products round, so a step differs by as much as two divisions of its rows."""
    one, two = supervised_runs(tmp_path, None, "bfloat16")
    for name in ("loss", "grad_norm"):
        found, same = (metrics(run, name, steps=4) for run in (two, one))
        assert found == pytest.approx(same, rel=1e-2)
        assert found[0] == pytest.approx(same[0], rel=1e-3)
    weights, others = (load_file(run / "final" / ALL_WEIGHTS) for run in (one, two))
    distance, length = (
        sum(float((weights[k].float() - of.get(k, 0.0)).square().sum()) for k in weights)
        for of in (others, {})
    )
    assert distance < 1e-4 * length


def supervised_runs(folder: Path, lora: dict[str, Any] | None, dtype: str) -> list[Path]:
    """Of one learner and of two."""
    for count in (1, 2):
        settings = {**supervised(folder / str(count), 1), "lora": lora}
        settings["model"]["dtype"] = dtype
        settings["run"] |= {"processes": None, "threads": count}
        if count > 1:
            settings["distributed"] = {"learners": 2, "strategy": "fsdp2"}
        assert groupwise.sft(settings, SFT).exit_code == 0
    return [folder / str(count) / "sft" for count in (1, 2)]


def noted_numbers(patch: pytest.MonkeyPatch) -> list[list[dict[str, int]]]:
    """By learner, what is held after a gradient, whose passes had to gather everything."""
    found: list[list[dict[str, int]]] = []
    update = RankLearner.update

    async def looked(self, params):
        found.append(await self._ranks.call_all("numbers_held"))
        return await update(self, params)

    patch.setattr(RankLearner, "update", looked)
    patch.setattr(WorkerState, "numbers_held", numbers_held, raising=False)
    return found


def assert_halves(held: list[list[dict[str, int]]]) -> None:
    """Each has half of every weight, and nothing more between two passes."""
    assert held
    for each in (each for ranks in held for each in ranks):
        assert each["whole"] > 0
        assert (each["here"], each["undivided"]) == (each["whole"] // 2, 0)


def numbers_held(hosted: WorkerState) -> dict[str, int]:
    """Of the base, and of the reference if that is another model."""
    models = hosted.trained.models()
    kept = {id(each) for each in hosted.trained.unsharded()}
    weights = [each for model in models for each in model.parameters() if id(each) not in kept]
    parts = [each for each in weights if isinstance(each, DTensor)]
    return {
        "whole": sum(each.numel() for each in weights),
        "here": sum(each.to_local().numel() for each in parts),
        "undivided": len(weights) - len(parts),
    }


@pytest.mark.parametrize("more", [{}, pytest.param(ALL, marks=SOAK)])
def test_a_run_continues_with_another_number(alone, tmp_path, loaded, more):  # noqa: F811
    groupwise.rl({**divided(tmp_path, max_steps=2), **more}, TOY)
    groupwise.rl({**divided(tmp_path, 1, max_steps=4), **more}, TOY, resume_from="toy@2")
    groupwise.rl({**divided(tmp_path), **more}, TOY, resume_from="toy@4")
    assert [(len(each), len(set(each))) for each in loaded] == [(2, 1)]
    if more:
        groupwise.rl({**divided(tmp_path / "alone", 1), **more}, TOY)
        alone = tmp_path / "alone/toy"
    assert_close(alone, tmp_path / "toy", ALL_WEIGHTS if more else WEIGHTS)


def test_ctrl_c_in_the_middle_of_a_gradient(whole, tmp_path, monkeypatch):
    """One of them hears of it before its first pass is over: nothing comes between the passes that both make together."""
    settings = divided(tmp_path, **SMALL)
    given_up, backward, receive = threading.Event(), TorchLearner._backward, MessageChannel.receive

    def received(line):
        message = receive(line)
        if getattr(message, "name", "") == "learner.discard":
            given_up.set()
        return message

    def slow(learner, *arguments):
        if learner._updates == 3 and learner._replicas.rank == 0:
            given_up.wait()
        return backward(learner, *arguments)

    learn, discard, under_way = TorchLearner.forward_backward, TorchLearner.discard, []

    async def learned(learner, *arguments):
        under_way.append(learner)
        try:
            return await learn(learner, *arguments)
        finally:
            under_way.pop()

    def discarded(learner):
        assert not under_way
        discard(learner)

    together, steps = WorkerCalls.call_together, []

    async def interrupted(self, calls):
        if calls[0][1] == "learner.forward_backward":
            steps.append(len(steps))
            if len(steps) == 4:
                os.kill(os.getpid(), signal.SIGINT)
        return await together(self, calls)

    with monkeypatch.context() as patch:
        patch.setattr(MessageChannel, "receive", received)
        patch.setattr(TorchLearner, "_backward", slow)
        patch.setattr(TorchLearner, "forward_backward", learned)
        patch.setattr(TorchLearner, "discard", discarded)
        patch.setattr(WorkerCalls, "call_together", interrupted)
        assert groupwise.rl(settings, TOY).exit_code == 130
    assert (tmp_path / "toy/checkpoints/step-3").is_dir()
    go_on(settings)
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(whole[0])


def test_the_failure_of_one_learner_ends_the_run(tmp_path, monkeypatch):
    def failing(self, *arguments):
        if self._replicas.rank == 1:
            raise ValueError("of this learner alone")
        return backward(self, *arguments)

    backward = TorchLearner._backward
    monkeypatch.setattr(TorchLearner, "_backward", failing)
    with pytest.raises(ValueError, match="of this learner alone"):
        groupwise.rl(divided(tmp_path), TOY)


def test_a_killed_learner_ends_the_run(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        lost_by_a_kill(divided(tmp_path, **SMALL), patch, 1, 3, "update")
    go_on(divided(tmp_path, **SMALL))
    assert what_must_be_equal(tmp_path / "toy") == what_must_be_equal(whole[0])
