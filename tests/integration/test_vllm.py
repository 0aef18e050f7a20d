"""Whole runs whose completions a server draws that answers as vLLM does:

1. what it samples is what is trained: every step begins at a ratio of 1, the reward rises, and each version is served under its name;
2. a server that serves another base ends the run before it learns;
3. an interrupted run goes on; a policy is evaluated by the server as by this machine;
4. completions are weighed by what the learner makes of them, unless the config says otherwise; what does not go together is refused;
5. all weights of a model are given to servers of vLLM and SGLang, which may be started anew, as the run may.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.responses import Response

import groupwise
from groupwise.core.errors import ConfigError, EndpointError, PolicyMismatchError, UsageError
from groupwise.engine.models.tiny import tiny_model, tiny_tokenizer
from groupwise.engine.sampler.servers import nccl
from groupwise.runs.store import Store
from groupwise.training import placement
from groupwise.training.config import load_config
from groupwise.training.placement import choose_layout
from tests.fake_sglang_server import SglangServer
from tests.fake_vllm_server import VllmServer, refusal
from tests.forked_zygote import fork_peers
from tests.gloo_transfer import GlooGroup
from tests.integration.test_learners import ALL_WEIGHTS, WEIGHTS, assert_close
from tests.integration.toy_run import STEPS, TOY, begun_in_child, config

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
SOAK = pytest.mark.soak(suite="engine")
PROCESSED = "processed_logprobs"
DIVIDED = {"learners": 2, "strategy": "fsdp2"}


@pytest.fixture(scope="module", autouse=True)
def forked():
    """Learners; and one thread computes."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        fork_peers(patch)
        yield


@pytest.fixture(scope="module")
def running():
    with VllmServer(logprobs_mode=PROCESSED) as found:
        yield found


@pytest.fixture
def server(running):
    running.renew(logprobs_mode=PROCESSED)
    return running


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, int]:
    """The folder of a run by one server, and how many completions that was asked for."""
    with VllmServer(logprobs_mode=PROCESSED) as server:
        made = settings(tmp_path_factory.mktemp("whole"), server.url)
        return trained(made), len(server.bodies("/completions"))


def settings(
    runs: Path, *urls: str, learners: int = 1, strategy: str = "ddp", **sampler: Any
) -> dict[str, Any]:
    made = config(runs, lr_scheduler_type="constant")
    made["model"]["dtype"] = "float32"
    made["sampler"] = {
        "engine": "vllm",
        "url": urls[0] if len(urls) == 1 else [*urls],
        "max_completion_length": 6,
        "logprob_tolerance": 0.001,
        **sampler,
    }
    made["run"]["threads"] = learners
    return {**made, "distributed": {"learners": learners, "strategy": strategy}}


def trained(made: dict[str, Any], **more: Any) -> Path:
    result = groupwise.rl(made, TOY, **more)
    assert result.exit_code == 0
    assert result.folder
    return result.folder


def curve(folder: Path, name: str) -> list[float]:
    with Store.open(folder / "run.db", readonly=True) as store:
        return [value for _, value in store.metrics([name])[name]]


@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.0, marks=SOAK)])
def test_the_tokens_that_the_server_samples_are_trained(tmp_path, server, temperature):
    made = settings(tmp_path, server.url, temperature=temperature, min_completion_length=2)
    folder = trained(made)
    assert curve(folder, "sampling/ratio_mean") == pytest.approx([1.0] * STEPS, abs=1e-4)
    assert max(curve(folder, "sampling/logprob_gap")) < 1e-4
    assert max(map(abs, curve(folder, "grad_norm"))) > 0
    names = [body["lora_name"] for body in server.bodies("/load_lora_adapter")]
    assert [name.split("-")[2] for name in names] == [f"v{n}" for n in range(STEPS + 1)]
    assert server.adapters == [], "forgotten at the end"
    with Store.open(folder / "run.db", readonly=True) as store:
        groups = [group for step in range(STEPS) for group in store.groups(step)]
    drawn = [segment for group in groups for each in group.rollouts for segment in each.segments]
    assert len({segment.fingerprint for segment in drawn}) == STEPS
    assert {f"groupwise-toy-v{each.policy_version}-{each.fingerprint}" for each in drawn} <= {*names}  # fmt: skip


@SOAK
def test_the_reward_rises(tmp_path):
    """Of a model whose weights are large enough for an adapter to change what it says within seconds."""
    model = tiny_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12.0 if parameter.dim() == 2 else 1.0)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with VllmServer(logprobs_mode=PROCESSED, folder=folder, name="sharp") as server:
        made = settings(tmp_path, server.url, served_model="sharp")
        made["model"]["name"] = str(folder)
        made["lora"] = {"r": 8, "alpha": 16}
        made["training"] |= {
            "max_steps": 30,
            "prompts_per_step": 4,
            "num_generations": 8,
            "learning_rate": 0.05,
        }
        made["eval"] = {"before_and_after": False}
        run = trained(made)
    rewards = curve(run, "reward")
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    assert max(curve(run, "sampling/logprob_gap")) < 1e-3


def test_a_run_continues_after_its_server_was_lost(tmp_path, server):
    """With a lag, whose completions the earlier version draws."""

    async def fails(path, body):
        fourth = path == "/load_lora_adapter" and "-v3-" in body["lora_name"]
        return refusal(500, "CUDA error") if fourth else None

    made = settings(tmp_path, server.url)
    made["training"]["max_off_policy_steps"] = 1
    server.interfere = fails
    with pytest.raises(UsageError, match=r"load the adapter .*CUDA"):
        groupwise.rl(made, TOY)
    server.interfere = None
    server.end()
    server.begin()
    assert len(curve(trained(made, resume=True), "reward")) == STEPS


@pytest.mark.parametrize("learners", [1, pytest.param(2, marks=SOAK)])
def test_another_base_ends_the_run_before_it_learns(tmp_path, server, learners):
    server.renew(logprobs_mode=PROCESSED, seed=1)
    made = settings(tmp_path, server.url, learners=learners)
    with pytest.raises(PolicyMismatchError, match=server.url):
        groupwise.rl(made, TOY)
    with Store.open(tmp_path / "toy" / "run.db", readonly=True) as store:
        assert store.last_step() is None


@pytest.mark.parametrize("policy", ["toy", pytest.param("base", marks=SOAK)])
def test_a_policy_is_evaluated_by_the_server_as_here(server, whole, policy):
    runs = whole[0].parent
    there = groupwise.evaluate(settings(runs, server.url, learners=2), TOY, policy=policy)
    alone = {
        **settings(runs, server.url),
        "sampler": {"max_completion_length": 6, "max_num_seqs": 8},
    }
    assert there.rows == groupwise.evaluate(alone, TOY, policy=policy).rows
    assert server.adapters == []


@pytest.mark.parametrize("lora", [{"r": 4, "dropout": 0.0}, pytest.param(None, marks=SOAK)])
def test_learners_with_a_part_of_the_weights_learn_what_one_learns(tmp_path, lora):
    """With a lag, and a server that is started again while they learn: all of them then compare its answers together."""
    route = "/load_lora_adapter" if lora else "/collective_rpc"
    folders: list[Path] = []
    loads: list[int] = []
    for learning in ({}, DIVIDED):
        with VllmServer(logprobs_mode=PROCESSED) as server:
            server.interfere = starts_again(server, "/completions", 12, 24) if learning else None
            made = settings(tmp_path / str(len(learning)), server.url, **learning)
            made["training"]["max_off_policy_steps"] = 1
            folders.append(trained({**made, "lora": lora}))
            loads.append(len(server.bodies(route)))
    assert loads == [STEPS + 1, STEPS + 3]
    one, several = folders
    assert_close(one, several, WEIGHTS if lora else ALL_WEIGHTS)


# --- the config


def test_completions_of_a_server_are_weighed_unless_the_config_says_otherwise(tmp_path):
    given = settings(tmp_path, "http://x")
    for algorithm, correction in (
        ({}, "token_truncate"),
        ({"importance_sampling_correction": "none"}, "none"),
    ):
        knobs = load_config({**given, "algorithm": algorithm}).config.algorithm.knobs
        assert knobs["importance_sampling_correction"] == correction


@pytest.mark.parametrize(("words", "told"), [
    (["sampler.url=null"], "url"), (["sampler.url=[http://x, http://x]"], "url"), (["sampler.max_num_seqs=16"], "max_num_seqs"),
    (["lora.r=4", "sampler.weight_transfer=files"], "lora"), (["lora=null", "sampler.weight_transfer=ipc"], "weight_transfer"),
    (["lora=null", "sampler.weight_transfer=nccl", "sampler.adapter_folder=/x"], "adapter_folder"),
    (["lora=null", "sampler.weight_transfer=nccl", "sampler.engine=sglang"], "SGLang takes all weights from files, or by ipc"),
    (["lora=null", "sampler.weight_transfer=nccl"], "learns on the CPU"),
    (["sampler.weight_transfer_timeout=9"], "weight_transfer_timeout"),
    (["sampler.routing_replay=true", "distributed.strategy=fsdp2", "distributed.learners=2"], "choose experts themselves"),
    (["run.processes=2", "run.threads=2"], r"run\.processes"), (["run.server=http://y"], r"run\.server"),
    (["model.backend=tunix"], r"model\.backend"),
    (["sampler.routing_replay=true", "model.backend=unsloth"], "unsloth, which computes experts"),
    (["sampler.routing_replay=true", "sampler.engine=sglang"], "only vLLM is asked which experts"),
])  # fmt: skip
def test_conflicting_sampler_settings_are_refused(tmp_path, words, told):
    with pytest.raises(ConfigError, match=told):
        choose_layout(load_config(settings(tmp_path, "http://x"), words).config, 8)


# --- full fine-tuning ----------------------------------------------------------------------------


def full_settings(runs: Path, *urls: str, **more: Any) -> dict[str, Any]:
    given = {**settings(runs, *urls, **more), "lora": None}
    if more.get("weight_transfer") == "nccl":
        given["sampler"]["weight_transfer_timeout"] = 20.0
    return given


def starts_again(server: Any, route: str, *requests: int) -> Callable[[str, Any], Awaitable[None]]:
    """An interference: the server is started anew at these requests."""

    async def start_again(path: str, _: Any) -> None:
        if path == route and len(server.bodies(route)) in requests:
            server._serve_base()

    return start_again


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are broadcast without a GPU."""
    monkeypatch.setattr(nccl, "NcclGroup", GlooGroup)
    monkeypatch.setattr(placement, "_refuse_transfer_without_gpu", lambda *_: None)


@pytest.mark.parametrize(
    ("engine", "transfer", "learning"),
    [
        ("vllm", "files", {}),
        ("vllm", "nccl", {}),
        ("vllm", "nccl", {"learners": 2}),
        ("vllm", "files", DIVIDED),
        ("vllm", "nccl", DIVIDED),
        ("sglang", "files", {}),
        ("sglang", "ipc", {}),
    ],
)
def test_all_weights_are_trained_with_servers_elsewhere(tmp_path, gloo, engine, transfer, learning):
    """One of them is started anew in the middle: what it draws with the weights of its start is drawn again."""
    kind = SglangServer if engine == "sglang" else partial(VllmServer, logprobs_mode=PROCESSED)
    route = "/generate" if engine == "sglang" else "/completions"
    took = "/update_weights" if transfer == "nccl" else "/collective_rpc"
    if engine == "sglang":
        took = f"/update_weights_from_{'disk' if transfer == 'files' else 'tensor'}"
    shared = tmp_path / "shared"
    with kind() as server, kind() as other:
        server.interfere = starts_again(server, route, 4)
        more = (
            {"adapter_folder": str(shared)}
            if transfer == "files"
            else {"weight_transfer": transfer}
        )
        given = full_settings(
            tmp_path / "runs", server.url, other.url, engine=engine, **learning, **more
        )
        folder = trained(given)
        assert len(server.bodies(took)) == len(other.bodies(took)) + 1 >= STEPS
        versions = {str(each.weight_version) for each in (server, other)}
        assert len(versions) == 1
        assert versions.pop().startswith("groupwise-toy-v")
        if engine == "sglang":
            assert {each["lora_path"] for each in other.bodies(route)} == {None}
        assert groupwise.evaluate(given, TOY, policy=str(folder)).rows
    assert not list(shared.glob("*/*"))


def test_a_run_killed_while_sending_weights_continues_after_its_server_restarts(
    tmp_path, gloo, server
):
    given = full_settings(
        tmp_path / "runs", server.url, weight_transfer="nccl", timeout=1, server_timeout=2
    )
    run = 0

    async def kill(path: str, _: Any) -> None:
        if path == "/update_weights" and len(server.bodies(path)) == 2:
            os.kill(run, signal.SIGKILL)

    server.interfere = kill
    run = begun_in_child(lambda: groupwise.rl(given, TOY))
    os.waitpid(run, 0)
    server.interfere = None
    while not server.hangs:
        time.sleep(0.02)
    with pytest.raises(EndpointError, match="None of the servers"):
        groupwise.rl(given, TOY, resume=True)
    server._serve_base()
    assert groupwise.rl(given, TOY, resume=True).summary["steps"] == STEPS


@pytest.mark.parametrize(
    ("transfer", "refused", "told"),
    [
        ("nccl", "/init_weight_transfer_engine", r"vLLM 0\.30(.|\n)*weight-transfer-config"),
        ("files", "/collective_rpc", r"vLLM 0\.27(.|\n)*sampler\.adapter_folder"),
    ],
)
def test_a_server_that_takes_no_weights_is_told_what_to_be_started_with(
    tmp_path, gloo, server, transfer, refused, told
):
    async def be_older(path: str, _: Any) -> Response | None:
        return refusal(500, "unexpected keyword argument") if path == refused else None

    server.interfere = be_older
    given = full_settings(tmp_path, server.url, weight_transfer=transfer)
    with pytest.raises(UsageError, match=told):
        groupwise.rl(given, TOY)
    assert not server.paused
