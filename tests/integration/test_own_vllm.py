"""A run starts a server of vLLM for itself, keeps it alive, and ends it (`sampler.vllm_python`): a program that begins as vLLM's does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

import groupwise
from groupwise.core.errors import UsageError
from groupwise.core.rendezvous import SET_BY_TORCHRUN
from groupwise.engine.sampler.servers import local_policy, nccl, spawned_server
from groupwise.engine.sampler.servers.spawned_server import ServerGpus, server_gpus
from groupwise.runs import publications
from groupwise.training import placement
from groupwise.training.assembly import servers
from groupwise.training.callbacks.base import Callback
from tests.fake_vllm_server import GPU, VllmServer, refusal
from tests.gloo_transfer import GlooGroup
from tests.integration.test_other_families import model_of
from tests.integration.toy_run import TOY, begun_in_child, config
from tests.processes import all_gone

FAKE = Path(__file__).parents[1] / "fake_vllm.py"
SHARED = ServerGpus(("0",), 0.7, True, True)
"""The learner's GPU, on which the server sleeps while the run learns."""
OTHER = ServerGpus(("1",), 0.9)
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def server() -> Iterator[VllmServer]:
    with VllmServer(logprobs_mode="processed_logprobs") as server:
        yield server


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: VllmServer) -> Path:
    """What stands in the place of the Python of vLLM's environment."""
    monkeypatch.setenv("FAKE_VLLM_TOLD", str(tmp_path / "told"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program = tmp_path / "vllm python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("FAKE_VLLM_THERE", server.url)
    return program


def settings(folder: Path, python: Path) -> dict[str, Any]:
    found = {**config(folder / "runs", max_steps=3), "eval": {"before_and_after": False}}
    found["model"]["dtype"] = "float32"
    found["sampler"] = {
        "engine": "vllm", "vllm_python": str(python), "max_completion_length": 6
    }  # fmt: skip
    return found


def recorded_calls(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "told").read_text().splitlines()]


class Kills(Callback):
    """The first one."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if len(recorded_calls(self.folder)) == 1:
            os.kill(recorded_calls(self.folder)[0]["pid"], signal.SIGKILL)


def test_a_run_has_a_server_and_one_that_is_killed_is_started_again(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told what a server without a GPU needs, and nothing of torchrun."""
    for name in SET_BY_TORCHRUN:
        monkeypatch.setenv(name, "1" if "SIZE" in name else "0")
    given = settings(tmp_path, python)
    given["callbacks"] = [{"name": f"{__name__}:Kills", "folder": str(tmp_path)}]
    result = groupwise.rl(given, TOY)
    assert (result.summary["state"], result.summary["steps"]) == ("finished", 3)
    servers = recorded_calls(tmp_path)
    assert len(servers) == 2
    assert len({(each["uds"], each["adapters"]) for each in servers}) == 1
    assert not Path(servers[0]["uds"]).parent.exists()
    log = result.folder / "vllm.log"
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["begins"] * 2
    assert f"its output is in {log}" in (result.folder / "log.txt").read_text()
    assert Path(servers[0]["adapters"]).is_absolute()
    for server in servers:
        assert (server["served_model_name"], server["max_lora_rank"]) == ("tiny", 8)
        assert (server["enable_sleep_mode"], server["enable_lora"], server["rank"]) == (
            False,
            True,
            [],
        )
        assert server["no_enable_chunked_prefill"]
        assert server["max_num_batched_tokens"] >= 8192
        assert (server["gpu_memory_utilization"], int(server["cache"]) in range(1, 5)) == (
            None,
            True,
        )
    assert all_gone([each["pid"] for each in servers])


def test_a_server_that_cannot_start_says_why(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started once more if that may help."""
    monkeypatch.setattr("groupwise.engine.sampler.servers.spawned_server.LOOKS_EVERY", 0.05)
    for error, starts in (
        ("ValueError: too little memory", 2),
        ("ModuleNotFoundError: No module named 'vllm'", 1),
    ):
        (tmp_path / "starts").unlink(missing_ok=True)
        python.write_text(
            f"""#!/bin/sh
            echo >>"{tmp_path}/starts"
            printf "%s\\n" "Traceback (most recent call last):" "  frame" "{error} $$" "" bye
            exit 1
            """
        )
        with pytest.raises(UsageError, match=rf"ended \(exit status 1\): {error} \d+\n"):
            groupwise.rl(settings(tmp_path, python), TOY)
        assert (tmp_path / "starts").read_text() == "\n" * starts
    with pytest.raises(UsageError, match="there is no program"):
        groupwise.rl(settings(tmp_path, tmp_path / "nothing"), TOY)


def test_a_server_that_ends_at_each_first_completion_is_given_up(
    tmp_path: Path, python: Path, server: VllmServer
) -> None:
    """It answers each time before that, so waiting until it answers again would last as long as the run."""

    async def kill(path: str, _: Any) -> Response | None:
        if path == "/completions":
            os.kill(recorded_calls(tmp_path)[-1]["pid"], signal.SIGKILL)
            return refusal(500, "nobody gets this")
        return None

    server.interfere = kill
    with pytest.raises(UsageError, match=r"ended \(exit status -9\)"):
        groupwise.rl(settings(tmp_path, python), TOY)
    assert len(recorded_calls(tmp_path)) == 2


def test_a_slow_start_tells_what_the_server_says(
    tmp_path: Path,
    python: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The log of a run that could not begin outlives its folder."""
    monkeypatch.setattr(spawned_server, "REPORTS_EVERY", 0.0)
    python.write_text("#!/bin/sh\necho 'INFO 11-28 11:33:01 [a.py:7] Capturing'\nexec sleep 1000\n")
    given = settings(tmp_path, python)
    given["sampler"]["server_timeout"] = 2.0
    with pytest.raises(UsageError, match="has not answered for 2 s") as failure:
        groupwise.rl(given, TOY)
    assert "has been starting for 1 s: Capturing\n" in capsys.readouterr().err
    log = Path(str(failure.value).rpartition(" is in ")[2].removesuffix("."))
    assert "Capturing" in log.read_text()
    assert not (tmp_path / "runs/toy").exists()


def test_a_killed_run_leaves_no_server_behind(tmp_path: Path, python: Path) -> None:
    """Also one that waits for it. The folder of its socket goes when another process claims one."""
    record = tmp_path / "told"
    python.write_text(
        f"""#!/bin/sh
        for word in "$@"; do case "$word" in --uds=*) echo "$word" >"{record}.uds";; esac; done
        echo "$$" >"{record}"
        exec sleep 1000
        """
    )
    run = begun_in_child(lambda: groupwise.rl(settings(tmp_path, python), TOY))
    while not (record.exists() and record.read_text().endswith("\n")):
        assert os.waitpid(run, os.WNOHANG) == (0, 0)
        time.sleep(0.02)
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    assert all_gone([int(record.read_text())])
    socket = Path((tmp_path / "told.uds").read_text().strip().removeprefix("--uds="))
    assert socket.parent.exists()
    publications.release(publications.claim(tmp_path, 0))
    assert not socket.parent.exists()


@pytest.mark.parametrize(
    ("gpus", "allocator", "maps"),
    [
        (ServerGpus(None, None), "", False),
        (SHARED, "max_split_size_mb:64", True),
        (SHARED, "expandable_segments:True", False),
    ],
)
def test_all_weights_are_trained_with_it(
    tmp_path: Path,
    python: Path,
    server: VllmServer,
    monkeypatch: pytest.MonkeyPatch,
    gpus: ServerGpus,
    allocator: str,
    maps: bool,
) -> None:
    """It reads files, or maps weights on the learner's GPU if they can be mapped, and takes them again after a kill, or to evaluate."""
    monkeypatch.setattr(servers, "server_gpus", lambda *_, **__: gpus)
    monkeypatch.setattr(local_policy, "gpu_uuid", lambda _: GPU)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    given = {**settings(tmp_path, python), "lora": None}
    given["sampler"]["logprob_tolerance"] = 1e-4
    given["callbacks"] = [{"name": f"{__name__}:Kills", "folder": str(tmp_path)}]
    result = groupwise.rl(given, TOY)
    assert result.summary["steps"] == 3
    assert len(recorded_calls(tmp_path)) == 2
    paths = [path for path, _ in server.asked]
    taken = paths.count("/update_weights"), paths.count("/collective_rpc")
    assert (min(taken), max(taken) >= 5) == (0, True)
    assert (taken[0] > 0) == maps == (server.weight_version is not None)
    evaluation = groupwise.evaluate(given, TOY, policy=str(tmp_path / "runs/toy"))
    assert evaluation.rows
    assert evaluation.path is not None
    assert evaluation.path.with_suffix(".vllm.log").read_text() == "begins\n"
    assert len(recorded_calls(tmp_path)) == 3


@pytest.fixture
def broadcast(tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings of a run whose server gets all weights by a group, of gloo in NCCL's place."""
    monkeypatch.setattr(servers, "server_gpus", lambda *_, **__: OTHER)
    monkeypatch.setattr(placement, "_refuse_transfer_without_gpu", lambda *_: None)
    monkeypatch.setattr(nccl, "NcclGroup", GlooGroup)
    given = {**settings(tmp_path, python), "lora": None}
    given["sampler"] |= {
        "weight_transfer": "nccl", "weight_transfer_timeout": 20.0, "logprob_tolerance": 1e-4
    }  # fmt: skip
    return given


@pytest.mark.parametrize(
    "where",
    [None, "between", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"],
)  # fmt: skip
def test_a_server_on_another_gpu_receives_all_weights(
    tmp_path: Path, server: VllmServer, broadcast: dict[str, Any], where: str | None
) -> None:
    """It gets them again, by a new group, if it is killed at any point on the way, or between two publications."""
    killed: list[int] = []

    async def kill(path: str, _: Any) -> Response | None:
        if path == where and not killed:
            killed.append(recorded_calls(tmp_path)[0]["pid"])
            os.kill(killed[0], signal.SIGKILL)
            return refusal(500, "nobody gets this")
        return None

    server.interfere = kill
    if where == "between":
        broadcast["callbacks"] = [{"name": f"{__name__}:Kills", "folder": str(tmp_path)}]
    result = groupwise.rl(broadcast, TOY)
    assert result.summary["steps"] == 3
    starts = recorded_calls(tmp_path)
    assert len(starts) == (1 if where is None else 2)
    assert starts[0]["weight_transfer_config"] == {"backend": "nccl"}
    assert not server.bodies("/collective_rpc")
    assert len(server.bodies("/init_weight_transfer_engine")) == len(starts)
    assert str(server.weight_version).startswith("groupwise-toy-v")


def test_a_server_that_never_takes_weights_is_ended_and_reads_files(
    tmp_path: Path, server: VllmServer, broadcast: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Two times it is started again; then its workers are asked for nothing more."""

    async def hang(path: str, _: Any) -> Response | None:
        if path == "/update_weights":
            await asyncio.sleep(30)
        return None

    server.interfere = hang
    broadcast["sampler"]["weight_transfer_timeout"] = 0.5
    assert groupwise.rl(broadcast, TOY).summary["steps"] == 3
    assert len(recorded_calls(tmp_path)) == 3
    assert len(server.bodies("/update_weights")) == 2
    assert len(server.bodies("/collective_rpc")) >= 3
    assert caplog.text.count("NCCL needs vLLM 0.30") == 1


@pytest.mark.parametrize("refused", ["/init_weight_transfer_engine", "/start_weight_update"])
def test_a_server_that_maps_no_weights_reads_the_files(
    tmp_path: Path,
    python: Path,
    server: VllmServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refused: str,
) -> None:
    """As older releases do; it is said once."""
    monkeypatch.setattr(servers, "server_gpus", lambda *_, **__: SHARED)

    async def be_older(path: str, _: Any) -> Response | None:
        return refusal(500, "unexpected keyword argument") if path == refused else None

    server.interfere = be_older
    given = {**settings(tmp_path, python), "lora": None}
    assert groupwise.rl(given, TOY).summary["steps"] == 3
    assert len(server.bodies("/collective_rpc")) >= 4
    assert len(server.bodies(refused)) == 1
    assert caplog.text.count("CUDA IPC needs vLLM 0.27") == 1


def test_a_server_that_takes_no_weights_is_not_left_paused(
    tmp_path: Path, python: Path, server: VllmServer
) -> None:
    async def be_older(path: str, _: Any) -> Response | None:
        return refusal(500, "reload_weights()") if path == "/collective_rpc" else None

    server.interfere = be_older
    with pytest.raises(UsageError, match=r"reload_weights\(\)(.|\n)*vLLM 0\.16 or newer"):
        groupwise.rl({**settings(tmp_path, python), "lora": None}, TOY)
    assert server.bodies("/pause")
    assert not server.paused


def test_a_server_on_the_learners_gpu_sleeps_while_the_run_learns(
    tmp_path: Path, python: Path, server: VllmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "server_gpus", lambda *_, **__: SHARED)
    monkeypatch.setenv(
        "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,roundup_power2_divisions:[256:1,512:2]"
    )
    assert groupwise.rl(settings(tmp_path, python), TOY).summary["steps"] == 3
    (started,) = recorded_calls(tmp_path)
    assert (started["enable_sleep_mode"], started["gpu_memory_utilization"]) == (True, 0.7)
    assert started["allocator"] == "roundup_power2_divisions:[256:1,512:2]"
    paths = [path for path, _ in server.asked]
    turns = [path for path in paths if path in ("/sleep", "/wake_up")]
    assert turns[:6] == ["/sleep", "/wake_up"] * 3
    for place in (place for place, path in enumerate(paths) if path == "/sleep"):
        assert paths[place + 1] == "/wake_up"


@pytest.mark.parametrize(
    ("count", "parallel", "memory", "learners", "in_turn", "gpus"),
    [
        (0, 1, None, 1, True, ServerGpus(None, None)),
        (4, 2, None, 1, True, ServerGpus(("1", "2"), 0.9)),
        (4, 1, 0.7, 3, True, ServerGpus(("3",), 0.7)),
        (1, 1, None, 1, False, ServerGpus(("0",), 0.5, True, False)),
        (1, 1, None, 1, True, ServerGpus(("0",), 0.7, True, True)),
        (1, 1, 0.4, 1, True, ServerGpus(("0",), 0.4, True, True)),
        (3, 2, 0.9, 2, True, "need 4 GPUs, and there are 3"),
        (1, 1, 0.7, 1, False, "gpu_memory_utilization"),
        (1, 1, 0.9, 1, True, "gpu_memory_utilization"),
        (2, 2, 0.9, 1, True, "tensor_parallel_size is 2"),
    ],
)
def test_it_has_the_gpus_that_the_learner_leaves(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    parallel: int,
    memory: float | None,
    learners: int,
    in_turn: bool,
    gpus: ServerGpus | str,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if isinstance(gpus, str):
        with pytest.raises(UsageError, match=gpus):
            server_gpus(count, parallel, memory, learners, in_turn=in_turn)
    else:
        assert server_gpus(count, parallel, memory, learners, in_turn=in_turn) == gpus


def test_vllm_gets_only_gpus_of_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-7")
    assert server_gpus(2, 1, None, 1, in_turn=True) == ServerGpus(("GPU-7",), 0.9)


def test_a_server_of_a_mixture_of_experts_returns_routed_experts(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training; nothing is learnt from an evaluation's completions."""
    given = settings(tmp_path, python)
    given["model"]["name"] = name = model_of("qwen3_moe", tmp_path / "moe")
    given["training"]["max_steps"] = 1
    with VllmServer(
        folder=tmp_path / "moe", name=name, logprobs_mode="processed_logprobs", returns_experts=True
    ) as server:
        monkeypatch.setenv("FAKE_VLLM_THERE", server.url)
        given["sampler"]["routing_replay"] = True
        assert groupwise.rl(given, TOY).exit_code == 0
        groupwise.evaluate(given, TOY)
    assert [each["enable_return_routed_experts"] for each in recorded_calls(tmp_path)] == [
        True,
        False,
    ]
