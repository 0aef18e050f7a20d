"""Sampler and learner, over a stand-in for the tinker package that records its calls."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from groupwise.algorithms.registry import make
from groupwise.core.errors import (
    CheckpointError,
    EndpointError,
    NonFiniteError,
    PolicyMismatchError,
    UsageError,
)
from groupwise.core.types import GroupRequest, LossSpec, OptimiserParams, Row, SamplingParams
from groupwise.engine.backends.tinker import capabilities, saved, service
from groupwise.engine.backends.tinker.parts import TinkerLearner, TinkerSampler
from groupwise.engine.backends.tinker.service import Service
from groupwise.engine.models.config import LoraConfig, ModelConfig
from groupwise.testing import ALPHABET, FakeTokenizer

ROW = Row((1, 2), (3, 4), (1, 1), (-0.5, -0.5), 1.0, 1.0)
PPO = make("dr_grpo", {}).loss_spec()
CUSTOM = make("dr_grpo", {"beta": 0.1}).loss_spec()
STOP = ALPHABET.index("x")


class FakeError(Exception):
    """The root of the package's errors."""


class FakeStatusError(FakeError):
    status_code = 422


class FakeAuthenticationError(FakeStatusError):
    status_code = 401


class Promise:
    """A future of the package."""

    def __init__(self, result: Any) -> None:
        self._future: Future[Any] = Future()
        if isinstance(result, Exception):
            self._future.set_exception(result)
        else:
            self._future.set_result(result)

    def future(self) -> Future[Any]:
        return self._future

    def result(self, timeout: float | None = None) -> Any:
        return self._future.result(timeout)


class FakePackage:
    """The package, its clients, and their calls in `calls`."""

    TinkerError = FakeError
    APIStatusError = FakeStatusError
    AuthenticationError = FakeAuthenticationError
    PermissionDeniedError = FakeAuthenticationError

    __version__ = "0.38.0"

    def __init__(self) -> None:
        self.data: list[Any] = []
        self.calls: list[tuple[str, Any]] = []
        self.sequences: list[Any] = []
        self.metrics: dict[str, float] | None = {"grad_norm": 0.5}
        self.fails: dict[str, Exception] = {}
        self.samplers = 0

    class ModelInput:
        @staticmethod
        def from_ints(tokens: list[int]) -> list[int]:
            return tokens

    Datum = SamplingParams = AdamParams = SimpleNamespace

    def answer(self, call: str, given: Any, result: Any = None) -> Promise:
        self.calls.append((call, given))
        return Promise(self.fails.get(call, result))

    # --- ServiceClient, TrainingClient and SamplingClient in one ---

    def ServiceClient(self, **given: Any) -> FakePackage:
        self.calls.append(("ServiceClient", given))
        return self

    def create_lora_training_client(self, base: str, **given: Any) -> Promise:
        return self.answer("create_lora_training_client", (base, given), self)

    def create_training_client_from_state(self, path: str) -> Promise:
        return self.answer("create_training_client_from_state", path, self)

    def create_training_client_from_state_with_optimizer(self, path: str) -> Promise:
        return self.answer("create_training_client_from_state_with_optimizer", path, self)

    def create_sampling_client(self, **given: Any) -> Promise:
        return self.answer("create_sampling_client", given, self)

    def save_weights_and_get_sampling_client(self) -> Promise:
        self.samplers += 1
        handle = f"handle {self.samplers}"
        client = SimpleNamespace(get_sampler_handle=lambda: handle, sample=self.sample)
        return self.answer("save_weights_and_get_sampling_client", None, client)

    def save_state(self, name: str) -> Promise:
        path = f"tinker://m/weights/{name}"
        return self.answer("save_state", name, SimpleNamespace(path=path))

    def save_weights_for_sampler(self, name: str) -> Promise:
        path = f"tinker://m/sampler_weights/{name}"
        return self.answer("save_weights_for_sampler", name, SimpleNamespace(path=path))

    def forward(self, data: list[Any], loss: str) -> Promise:
        return self.answer("forward", loss, _output(data))

    def forward_backward(self, data: list[Any], loss: str, settings: Any) -> Promise:
        self.data = data
        return self.answer("forward_backward", (loss, settings), _output(data))

    def forward_backward_custom(self, data: list[Any], compute: Any) -> Promise:
        import torch

        logprobs = [torch.full((len(each.model_input),), -0.5, requires_grad=True) for each in data]
        loss, _ = compute(data, logprobs)
        loss.backward()
        return self.answer("forward_backward_custom", loss.item(), _output(data))

    def optim_step(self, adam: Any) -> Promise:
        return self.answer("optim_step", vars(adam), SimpleNamespace(metrics=self.metrics))

    def compute_logprobs(self, prompt: list[int], prompt_logprobs_last_n: int) -> Promise:
        known = [None] * (len(prompt) - prompt_logprobs_last_n)
        return self.answer("compute_logprobs", prompt, [*known, *[-0.6] * prompt_logprobs_last_n])

    def sample(self, **given: Any) -> Promise:
        return self.answer("sample", given, SimpleNamespace(sequences=self.sequences))

    def close(self, status: str) -> Promise:
        return self.answer("close", status)


def _output(data: list[Any]) -> Any:
    lengths = [len(each.model_input) for each in data]
    fields = [{"logprobs": SimpleNamespace(data=[-0.5] * length)} for length in lengths]
    return SimpleNamespace(loss_fn_outputs=fields)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FakePackage:
    fake = FakePackage()
    monkeypatch.setattr(service, "import_package", lambda: fake)
    monkeypatch.setattr(capabilities, "read_schema", lambda _: {})
    monkeypatch.setenv("TINKER_API_KEY", "gw-secret")
    return fake


def connected(**model: Any) -> Service:
    return Service(ModelConfig(name="tiny", backend="tinker", base_url="http://here", **model), "r")


def learner_in(folder: Path, **model: Any) -> TinkerLearner:
    return TinkerLearner(connected(**model), LoraConfig(r=4), 7, "a run", folder / "published", {})


def names(package: FakePackage) -> list[str]:
    return [name for name, _ in package.calls]


async def step(learner: TinkerLearner, loss: LossSpec = PPO) -> Any:
    await learner.forward_backward([ROW], loss, {"policy": 2.0, "kl": 2.0})
    return await learner.update(OptimiserParams(0.1, max_grad_norm=None, eps=1e-6))


async def test_a_step_is_one_loss_by_name_and_one_update(
    package: FakePackage, tmp_path: Path
) -> None:
    learner = learner_in(tmp_path)
    result = await step(learner)
    assert (result.grad_norm, result.applied) == (0.5, True)
    assert package.calls[0][1]["api_key"] == "tml-secret"
    layers = {"train_attn": True, "train_mlp": True, "train_unembed": False}
    assert package.calls[1:] == [
        ("create_lora_training_client", ("tiny", {"rank": 4, "seed": 7, **layers})),
        ("forward_backward", ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})),
        (
            "optim_step",
            {
                "learning_rate": 0.1,
                "beta1": 0.9,
                "beta2": 0.999,
                "eps": 1e-6,
                "weight_decay": 0.0,
                "grad_clip_norm": 0.0,
            },
        ),
    ]


@pytest.mark.parametrize(
    ("metrics", "norm"), [({"optim/unclipped_grad_l2:mean": 2.0}, 2.0), ({"x": 1.0}, None), (None, None)]
)  # fmt: skip
async def test_the_gradient_norm_is_reported_if_the_service_returns_it(
    package: FakePackage, tmp_path: Path, metrics: Any, norm: float | None
) -> None:
    package.metrics = metrics
    result = await step(learner_in(tmp_path))
    assert result.grad_norm == norm or (norm is None and result.grad_norm != result.grad_norm)


async def test_a_kl_penalty_is_computed_here_against_the_base(
    package: FakePackage, tmp_path: Path
) -> None:
    learner = learner_in(tmp_path)
    (reference,) = await learner.logprobs([ROW], "reference")
    assert reference == (-0.6, -0.6)
    assert ("create_sampling_client", {"base_model": "tiny"}) in package.calls
    row = Row((1, 2), (3, 4), (1, 1), (-0.5, -0.5), 1.0, 1.0, reference_logprobs=reference)
    sums = await learner.forward_backward([row], CUSTOM, {"policy": 2.0, "kl": 4.0})
    total = sums["loss/policy"] / 2 + sums["loss/kl"] / 4
    assert package.calls[-1] == ("forward_backward_custom", pytest.approx(total))
    assert await learner.trained_logprobs() == [(-0.5, -0.5)]


async def test_where_a_service_averages_a_custom_loss_is_one_of_ratios(
    package: FakePackage, tmp_path: Path
) -> None:
    """One forward pass, and one whose numbers are slopes; its ratios are 1, and numbers undo the mean over 3 targets and 2 rows."""
    learner = learner_in(tmp_path, loss_reduction="mean")
    rows = [replace(ROW, reference_logprobs=(-0.5, -0.5)) for _ in range(2)]
    await learner.forward_backward(rows, CUSTOM, {"policy": 2.0, "kl": 4.0})
    assert names(package)[2:] == ["forward", "forward_backward"]
    assert package.calls[-1] == ("forward_backward", ("importance_sampling", None))
    for each in package.data:
        assert each.loss_fn_inputs["logprobs"][1:] == [-0.5, -0.5]
        # Each token has the slope of −ratio / 2; that of the KL penalty is 0 where the policies are equal.
        assert each.loss_fn_inputs["advantages"] == pytest.approx([0.0, 0.5 * 6, 0.5 * 6])


async def test_older_releases_of_the_package_return_clients(
    package: FakePackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(name: str) -> None:
        later = getattr(package, name)
        monkeypatch.setattr(package, name, lambda *a, **kw: later(*a, **kw).result())

    for name in ("create_lora_training_client", "create_sampling_client"):
        at_once(name)
    client = SimpleNamespace(_sampling_session_id="s", sample=package.sample)
    monkeypatch.setattr(package, "save_weights_and_get_sampling_client", lambda: client)
    monkeypatch.setattr(package, "compute_logprobs", lambda prompt: Promise([None, -0.1, -0.2, -0.3]).future())  # fmt: skip
    monkeypatch.delattr(FakePackage, "close")
    learner = learner_in(tmp_path)
    await step(learner)
    assert await learner.logprobs([ROW], "reference") == [(-0.2, -0.3)]
    assert len((await learner.publish(1)).fingerprint) == 16
    learner._service.close()


async def test_a_service_that_samples_loaded_models_alone_is_given_the_state(
    package: FakePackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        capabilities, "read_schema", lambda _: {"info": {"title": capabilities.SKYRL}}
    )
    weights = saved.SavedWeights(base_model="tiny", state="tinker://m/weights/x", sampler="tinker://m/x")  # fmt: skip
    saved.write(weights, tmp_path)
    sampler = TinkerSampler(connected(), FakeTokenizer(), {})
    await sampler.serve(tmp_path)
    assert package.calls[-2:] == [
        ("create_training_client_from_state", "tinker://m/weights/x"),
        ("save_weights_and_get_sampling_client", None),
    ]


async def test_a_gradient_that_must_not_be_used_is_not(
    package: FakePackage, tmp_path: Path
) -> None:
    learner = learner_in(tmp_path)
    await step(learner)
    learner.discard()  # of nothing: there is no gradient
    await learner.forward_backward([ROW], PPO, {"policy": 2.0})
    learner.discard()
    for work in (learner.forward_backward([ROW], PPO, {"policy": 2.0}), learner.update(OptimiserParams(0.1))):  # fmt: skip
        with pytest.raises(NonFiniteError, match="no call that clears it"):
            await work
    (tmp_path / "state").mkdir()
    await learner.save(str(tmp_path / "state"))  # an interrupted run still saves its weights
    learner.load(str(tmp_path / "state"))
    await step(learner)


async def test_a_checkpoint_names_a_state_from_which_training_continues(
    package: FakePackage, tmp_path: Path
) -> None:
    first, folders = learner_in(tmp_path), [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    await step(first)
    await first.save(str(folders[0]))
    await first.save(str(folders[1]))  # nothing was learnt since: it is the same state
    await step(first)
    await first.save(str(folders[2]))
    found = [saved.read(folder) for folder in folders]
    assert found[0] == found[1] != found[2]
    assert [each.updates for each in found] == [1, 1, 2]
    assert names(package).count("save_state") == 2
    package.calls.clear()
    second = learner_in(tmp_path)
    second.load(str(folders[2]))
    await step(second)
    path = found[2].state
    assert package.calls[1] == ("create_training_client_from_state_with_optimizer", path)
    assert "create_lora_training_client" not in names(package)
    with pytest.raises(CheckpointError):
        second.load(str(tmp_path))


async def test_a_run_starts_from_the_state_that_its_adapter_names(
    package: FakePackage, tmp_path: Path
) -> None:
    path = "tinker://m/weights/taught"
    await step(learner_in(tmp_path, adapter=path))
    assert package.calls[1] == ("create_training_client_from_state", path)


async def test_a_published_policy_is_the_one_that_is_sampled(
    package: FakePackage, tmp_path: Path
) -> None:
    connection, published = connected(), cast("dict[str, Any]", {})
    learner = TinkerLearner(connection, LoraConfig(), 0, "r", tmp_path, published)
    sampler = TinkerSampler(connection, FakeTokenizer(), published)
    policies = [await learner.publish(version) for version in range(3)]
    assert len({policy.fingerprint for policy in policies}) == 3
    with pytest.raises(PolicyMismatchError):  # the last two are kept
        await sampler.load(policies[0])
    await sampler.load(policies[2])
    assert sampler.fingerprint() == policies[2].fingerprint
    package.sequences = [
        SimpleNamespace(tokens=[1, STOP, 2], logprobs=[-1.0, -2.0, -3.0], stop_reason="length"),
        SimpleNamespace(tokens=[1, 3], logprobs=[-1.0, -2.0], stop_reason="length"),
    ]
    params = SamplingParams(max_tokens=3, stop_token_ids=(STOP,), top_k=5)
    seeds = (2**63 + 5, 9)
    drawn = await sampler.generate(GroupRequest(0, (1, 2), seeds, params))
    assert [(each.token_ids, each.logprobs, each.finish_reason) for each in drawn] == [
        ((1, STOP), (-1.0, -2.0), "stop"),
        ((1, 3), (-1.0, -2.0), "length"),
    ]
    assert [each.seed for each in drawn] == list(seeds)
    assert {(each.policy_version, each.fingerprint) for each in drawn} == {
        (2, policies[2].fingerprint)
    }
    _, given = package.calls[-1]
    assert (given["prompt"], given["num_samples"]) == ([1, 2], 2)
    assert vars(given["sampling_params"]) == {
        "max_tokens": 3,
        "seed": 5,
        "stop": [STOP],
        "temperature": 1.0,
        "top_k": 5,
        "top_p": 1.0,
    }
    package.sequences = [SimpleNamespace(tokens=[1], logprobs=None, stop_reason="stop")]
    with pytest.raises(EndpointError, match="in place of 2"):
        await sampler.generate(GroupRequest(0, (1,), seeds, params))
    with pytest.raises(EndpointError, match="0 log-probabilities for 1"):
        await sampler.generate(GroupRequest(0, (1,), seeds[:1], params))


async def test_a_wait_that_is_cancelled_leaves_the_request_to_the_service(
    package: FakePackage,
) -> None:
    pending: Future[Any] = Future()
    waiting = asyncio.ensure_future(connected().wait(SimpleNamespace(future=lambda: pending)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not pending.cancelled()
    pending.set_result(None)


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (FakeAuthenticationError("no"), UsageError, "refuses the key in TINKER_API_KEY"),
        (FakeStatusError("bad"), EndpointError, "422"),
        (FakeError("gone"), EndpointError, "--resume"),
        (ValueError("which this SDK version only supports as proto."), UsageError, "tinker=="),
    ],
)
async def test_errors_of_the_service_are_ours(
    package: FakePackage, tmp_path: Path, error: Exception, kind: type[Exception], told: str
) -> None:
    package.fails["optim_step"] = error
    with pytest.raises(kind, match=told):
        await step(learner_in(tmp_path))


def test_a_key_and_an_address_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(name="tiny", backend="tinker", base_url="http://127.0.0.1:9")
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(UsageError, match="TINKER_API_KEY is empty"):
        service.longest_context(model)
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    with pytest.raises(UsageError, match=r"no Tinker service answers at http://127\.0\.0\.1:9"):
        service.longest_context(model)
