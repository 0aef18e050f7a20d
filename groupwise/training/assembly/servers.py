"""The sampler of a run whose completions vLLM or SGLang draw: servers at `sampler.url`, or one that the run starts."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.api.openai_client.client import Endpoint
from groupwise.core.cache import cache_folder
from groupwise.core.errors import UsageError
from groupwise.core.retry import Timing
from groupwise.core.types import Policy
from groupwise.engine.distributed import prefork
from groupwise.engine.models.tokenizer import resolve
from groupwise.engine.sampler.servers.adapters import AdapterFiles, SharedFolder
from groupwise.engine.sampler.servers.sampler import ServerSampler, WeightSync
from groupwise.engine.sampler.servers.server_pool import Server, Servers
from groupwise.engine.sampler.servers.sglang import SglangServer
from groupwise.engine.sampler.servers.spawned_server import (
    ALLOCATOR_SETTINGS,
    ASLEEP,
    ServerGpus,
    ServerSpec,
    SpawnedServer,
    has_expandable_segments,
    server_gpus,
)
from groupwise.engine.sampler.servers.whole_weights import WholeWeights
from groupwise.training.placement import Layout, first_gpu

if TYPE_CHECKING:
    from groupwise.engine.sampler.config import SamplerConfig
    from groupwise.engine.sampler.servers.probe import LocalPolicy
    from groupwise.training.config import RunConfig

logger = logging.getLogger(__name__)


def server_sampler(
    config: RunConfig, layout: Layout, local_policy: LocalPolicy, tokenizer: Any
) -> ServerSampler:
    """The sampler of servers: their addresses or one that is started here, how weights reach them, and what checks their answers."""
    sampler_config, timing = config.sampler, Timing()
    base = sampler_config.served_model or config.model.name
    own = (
        None
        if sampler_config.vllm_python is None
        else _own_server(config, layout, local_policy.rank, timing)
    )
    return ServerSampler(
        _servers(sampler_config, base, own, timing),
        local_policy,
        tokenizer,
        base=base,
        key_length=layout.key_length,
        tolerance=sampler_config.logprob_tolerance,
        seeded=layout.seeded,
        sync=_weight_sync(sampler_config, base, own, local_policy),
        own=own,
        routers=local_policy.router_shape() if sampler_config.routing_replay else None,
    )


async def serve_policy(sampler: ServerSampler, config: RunConfig, weights: Path | None) -> None:
    """Load the policy to evaluate into the vLLM servers."""
    from groupwise.engine.models.adapters import adapter_folder
    from groupwise.engine.models.lora_config import CONFIG

    folder = await asyncio.to_thread(adapter_folder, config.model) if weights is None else weights
    try:
        if folder is None:
            await sampler.serve_base()
            return
        kind = "adapter" if (folder / CONFIG).is_file() else "full"
        # Fingerprint of the weights that were read from the folder.
        fingerprint = await asyncio.to_thread(sampler.fingerprint)
        await sampler.load(Policy("served", 0, fingerprint, kind, str(folder.resolve())))
    except BaseException:
        sampler.close()
        raise


def _servers(
    sampler_config: SamplerConfig, base: str, own: SpawnedServer | None, timing: Timing
) -> Servers:
    """The run's own server, or those at `sampler.urls`."""
    timeout = sampler_config.server_timeout
    if own is not None:
        return Servers([own.server], timeout, timing, lambda: f"Read why in {own.log}")
    kind = SglangServer if sampler_config.engine == "sglang" else Server
    endpoints = [
        Endpoint(url, base, sampler_config.api_key_env, sampler_config.timeout)
        for url in sampler_config.urls
    ]
    servers = [kind(endpoint, sampler_config.concurrency, timing) for endpoint in endpoints]
    return Servers(servers, timeout, timing)


def _weight_sync(
    sampler_config: SamplerConfig, base: str, own: SpawnedServer | None, local_policy: LocalPolicy
) -> WeightSync:
    """How new weights reach the servers. Raises UsageError if this process cannot share its GPU memory with them."""
    takes = sampler_config.weight_transfer or "files"
    if own is not None:
        takes = own.spec.takes
    elif takes == "ipc" and has_expandable_segments(os.environ):
        raise UsageError(
            f"sampler.weight_transfer is ipc, but {' or '.join(ALLOCATOR_SETTINGS)} has expandable_segments:True, and other processes "
            "cannot map such memory. Take it out, or set weight_transfer to files."
        )
    shared = None
    if sampler_config.adapter_folder is not None:
        folder = Path(sampler_config.adapter_folder).expanduser().resolve()
        there = (sampler_config.adapter_folder_there or str(folder)).rstrip("/")
        shared = SharedFolder(folder, there)
    if local_policy.rank is not None or takes == "adapters":
        by_expert = local_policy.write_by_expert if local_policy.adapts_experts else None
        return AdapterFiles(shared, by_expert)
    timeout = sampler_config.weight_transfer_timeout
    return WholeWeights(base, takes, local_policy, timeout=timeout, shared=shared, own=own)


def _own_server(
    config: RunConfig, layout: Layout, rank: int | None, timing: Timing
) -> SpawnedServer:
    """The vLLM server, not started yet. `rank`: rank of the adapters; None without any. Raises UsageError if there are too few GPUs."""
    sampler_config, source = config.sampler, resolve(config.model)
    assert sampler_config.vllm_python is not None
    if (
        sampler_config.max_model_len is not None
        and sampler_config.max_model_len < layout.key_length
    ):
        raise UsageError(
            f"sampler.max_model_len is {sampler_config.max_model_len}, but prompt and completion of this run have up to "
            f"{layout.key_length} tokens together. Leave it out, or lower data.max_prompt_length or sampler.max_completion_length."
        )
    gpus = _own_server_gpus(config, layout)
    takes = sampler_config.weight_transfer or ("ipc" if gpus.shared else "files")
    if rank is not None:
        takes = "adapters"
    if takes in ("ipc", "nccl") and gpus.shared != (takes == "ipc"):
        where = "a GPU of its own" if takes == "ipc" else "the learner's own GPU"
        raise UsageError(
            f"sampler.weight_transfer is {takes}, but the server of sampler.vllm_python gets {where}: ipc is for the learner's own GPU, "
            "nccl for others. Leave weight_transfer out, or change the number of GPUs (CUDA_VISIBLE_DEVICES)."
        )
    if takes == "ipc" and has_expandable_segments(os.environ):
        takes = "files"
        logger.warning(
            "%s has expandable_segments:True: the vLLM of sampler.vllm_python cannot map such memory (CUDA IPC), and reads all weights "
            "from files after each step. Take it out for faster steps",
            " or ".join(ALLOCATOR_SETTINGS),
        )
    return SpawnedServer(
        ServerSpec(
            python=sampler_config.vllm_python,
            location=source.location,
            revision=source.revision,
            name=config.model.name,
            dtype=layout.dtype,
            tf32=layout.tf32,
            rank=rank,
            longest=sampler_config.max_model_len or layout.key_length,
            memory=gpus.memory,
            gpus=gpus.devices,
            in_turn=gpus.in_turn,
            takes=takes,
            parallel=sampler_config.tensor_parallel_size,
            in_4bit=config.model.load_in_4bit,
            returns_experts=sampler_config.routing_replay,
            trust_remote_code=config.model.trust_remote_code,
        ),
        cache_folder("vllm") / f"server-{os.getpid()}.log",
        concurrency=sampler_config.concurrency,
        timeout=sampler_config.timeout,
        server_timeout=sampler_config.server_timeout,
        timing=timing,
    )


def _own_server_gpus(config: RunConfig, layout: Layout) -> ServerGpus:
    """The GPUs of the vLLM server that the run starts. Raises UsageError if there are too few."""
    return server_gpus(
        0 if layout.device == "cpu" else prefork.gpu_count(),
        config.sampler.tensor_parallel_size,
        config.sampler.gpu_memory_utilization,
        first_gpu(layout),
        in_turn=config.training.max_off_policy_steps == 0,  # it never samples while it learns
    )


def own_server_bytes(config: RunConfig, layout: Layout) -> tuple[float, float]:
    """What the vLLM server that the run starts takes of the learner's GPU, in bytes: while the run samples, and while it learns."""
    gpus = _own_server_gpus(config, layout)
    if not gpus.shared or gpus.memory is None:
        return 0.0, 0.0
    held = gpus.memory * prefork.gpu_memory(layout.device)
    return held, ASLEEP if gpus.in_turn else held
