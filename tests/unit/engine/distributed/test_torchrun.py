"""What torchrun says in the environment, and configs that do not go with several learners, or with samplers apart from them."""

import selectors
import socket
import threading

import pytest

from groupwise.core.errors import ConfigError, UsageError
from groupwise.engine.distributed import peer, prefork, spawned_workers
from groupwise.engine.distributed.learner_workers import LearnerWorkers
from groupwise.engine.distributed.messages import Setup
from groupwise.engine.distributed.sampler_workers import SamplerWorkers
from groupwise.engine.distributed.torchrun import (
    TorchrunRank,
    check_world_size,
    read_torchrun_rank,
    visible_gpu,
)
from groupwise.engine.models.footprint import bytes_of
from groupwise.training import placement
from groupwise.training.config import load_config
from groupwise.training.loops.rl_prepare import planned_sizes
from groupwise.training.loops.sft_prepare import planned_sft_sizes
from groupwise.training.sft_config import load_sft_config

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "first", "MASTER_PORT": "29500",
}  # fmt: skip


def test_the_environment_says_what_a_process_is():
    found = read_torchrun_rank(TORCHRUN)
    assert found == TorchrunRank(5, 8, 1, 4, "first")
    assert found.machines == 2
    assert [found.elsewhere(rank) for rank in (0, 3, 4, 7)] == [False, False, True, True]
    for word in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        assert read_torchrun_rank({**TORCHRUN, word: ""}) is None
    assert read_torchrun_rank({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}) is None
    with pytest.raises(UsageError, match="RANK=five"):
        read_torchrun_rank({**TORCHRUN, "RANK": "five"})
    check_world_size(None, 4)
    check_world_size(found, 8)
    with pytest.raises(UsageError, match=r"distributed\.learners is 2"):
        check_world_size(found, 2)


def test_each_rank_sees_its_own_gpu(monkeypatch):
    # torch's mesh takes the GPU of this number, of which each rank sees one.
    first = {"LOCAL_RANK": "0"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert visible_gpu(1) == {"CUDA_VISIBLE_DEVICES": "6", **first}
    assert visible_gpu(2) == {}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpu(1) == {"CUDA_VISIBLE_DEVICES": "1", **first}, "with any device files"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpu(0) == {}


TWO = {"model": {"name": "tiny"}, "distributed": {"learners": 2}}
APART = {"model": {"name": "tiny"}, "distributed": {"learners": 1, "samplers": 2}}
DIVIDED = {"learners": 2, "samplers": 1, "strategy": "fsdp2"}
TUNIX = {"model": {"name": "tiny", "backend": "tunix"}}


@pytest.mark.parametrize(("given", "more", "words"), [
    (TWO, {"distributed": {"learners": 65}}, r"65, but a step has only 64 rows"), (TWO, {"run": {"processes": 2}}, r"run\.processes is 2"),
    (TWO, {"run": {"threads": 1}}, r"run\.threads is 1"), (TWO, {"run": {"server": "http://there"}}, r"run\.server"),
    (TWO, TUNIX, "tunix"), (APART, {"run": {"processes": 2}}, r"samplers is 2 and run\.processes is 2"),
    (APART, {"run": {"threads": 2}}, r"samplers is 2, but run\.threads is 2"),
    (APART, {"run": {"server": "http://there"}}, r"samplers is 2(.|\n)*run\.server"),
    (APART, {"sampler": {"engine": "vllm", "url": "http://x"}}, r"vllm, but distributed\.samplers"),
    (TWO, {"distributed": {**DIVIDED, "learners": 1}}, r"fsdp2(.|\n)*learners is 1"),
    (TWO, {"distributed": {**DIVIDED, "samplers": 0}}, r"distributed\.samplers is 0"),
])  # fmt: skip
def test_conflicting_settings_of_several_processes_are_refused(given, more, words):
    with pytest.raises(ConfigError, match=words):
        load_config({**given, **more})


def test_each_learner_needs_room_for_its_part_of_the_weights():
    whole, divided = (
        planned_sizes(config, placement.choose_layout(config, 12)).memory
        for config in (
            load_config(
                {"model": {"name": "tiny"}, "distributed": {**DIVIDED, **more}, "lora": None}
            ).config
            for more in ({"strategy": "ddp"}, {})
        )
    )
    assert divided.trained == whole.trained / 2
    alone = {"learners": 2, "strategy": "fsdp2"}
    config = load_sft_config({"model": {"name": "tiny"}, "distributed": alone}).config
    layout = placement.supervised_layout(config)
    assert (layout.weight_shards, layout.processes_per_model) == (2, 1)
    base = prefork.all_parameters(config.model) * bytes_of(layout.dtype) / 2**20
    assert planned_sft_sizes(config, layout, 12).memory.weights == pytest.approx(base / 2)


@pytest.mark.parametrize(
    ("given", "there", "told"), [(TWO, 1, "needs 2 GPUs"), (APART, 2, "needs 3 GPUs")]
)
def test_each_learner_and_each_sampler_needs_a_gpu(monkeypatch, given, there, told):
    monkeypatch.setattr("groupwise.engine.models.machine.choose_device", lambda: "cuda")
    monkeypatch.setattr("groupwise.engine.models.machine.gpu_count", lambda: there)
    with pytest.raises(ConfigError, match=told):
        placement.choose_layout(load_config(given).config, 12)


def test_samplers_see_the_gpus_after_those_of_the_learners(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr(
        spawned_workers, "Popen", lambda command, env, **more: env["CUDA_VISIBLE_DEVICES"]
    )
    samplers = SamplerWorkers(2, 1, sends_log=False, timeout=9.0)
    samplers._setup = Setup("", {"layout": {"device": "cuda"}}, (), 0)
    assert [samplers._popen(rank, 0) for rank in range(2)] == ["5", "6"]
    for each in (samplers._wake_sender, samplers._wake_receiver, samplers._selector):
        each.close()


@pytest.fixture
def peers():
    found = LearnerWorkers(3, TorchrunRank(0, 3, 0, 3, "127.0.0.1"), learning=True)
    found._call_socket = socket.create_server(("127.0.0.1", 0))
    found._rendezvous_socket = found._call_socket
    found._setup = Setup("", {}, (), 0)
    found._selector.register(found._call_socket, selectors.EVENT_READ)
    yield found
    for each in (found._wake_sender, found._wake_receiver, found._selector, found._call_socket):
        each.close()


@pytest.mark.parametrize("greeting", [b"x" * 72, b"GET / HTTP/1.1\r\n"])
def test_a_caller_without_the_secret_is_disconnected(peers, greeting):
    with socket.create_connection(peers._call_socket.getsockname()) as stranger:
        stranger.sendall(greeting)
        stranger.shutdown(socket.SHUT_WR)
        peers._accept_caller()
        assert len(stranger.recv(100)) == 32
        assert stranger.recv(1) == b""
    assert peers._by_rank == {}


def test_each_rank_is_admitted_once_and_none_after_the_last(peers):
    peers._by_rank[0] = None
    lines, calls = [], ["127.0.0.1", str(peers._call_socket.getsockname()[1]), peers._token]
    for rank, expected in ((1, {0, 1}), (1, {0, 1}), (3, {0, 1}), (2, {0, 1, 2})):
        calling = threading.Thread(
            target=lambda rank=rank: lines.append(peer._call_first_rank(calls, rank))
        )
        calling.start()
        peers._accept_caller()
        calling.join()
        assert {*peers._by_rank} == expected
    assert peers._call_socket.fileno() == -1
    assert [lines[n].receive().rank for n in (0, 3)] == [1, 2]
    for each in (*lines, peers._by_rank[1], peers._by_rank[2]):
        each.close()
