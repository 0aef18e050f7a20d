"""How all weights of a model get into a server, for full fine-tuning.

The server finishes what it computes, takes the weights, drops the keys and values of earlier ones, and goes on. There are three ways
(`sampler.weight_transfer`), by the routes of vLLM's developer mode; SGLang has the first two (`sglang.py`):

files   it reads the published files, which are in this machine's memory or in a folder that both machines have (from 0.16 on)
ipc     on the learner's GPU it copies the weights from the learner's memory: CUDA IPC lets it map tensors of another process (from 0.27 on)
nccl    on other GPUs, also of other machines, it receives them from the learner's GPU (`nccl.py`; from 0.30 on)

The run's own server reads the files if the other way fails: at once if it refuses it, after the second failure in a row if it was lost
meanwhile. After a failed broadcast it is started again, because its workers wait for ever; a server that somebody else has started is left
alone until somebody starts it again.

The model keeps its name, so a request cannot say which weights it wants. Only this run reaches its own server, so no other program changes
its weights, and one that was started again is not asked before it has taken them again (`spawned_server.py`). Any other server gets a
version with the weights, which it forgets with them, and is asked for it after each answer (from 0.27 on).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Literal

from groupwise.core.errors import EndpointError, RunError, UsageError
from groupwise.core.types import Policy
from groupwise.engine.sampler.servers.adapters import ListedModel, SharedFolder, policy_name
from groupwise.engine.sampler.servers.probe import LocalPolicy
from groupwise.engine.sampler.servers.server_pool import Served, Server
from groupwise.engine.sampler.servers.spawned_server import SpawnedServer

logger = logging.getLogger(__name__)

Transfer = Literal["files", "ipc", "nccl"]
FAILURES = 2
"""Failures in a row after which the run's own server reads files."""
GRACE = 10.0
"""Seconds that a server may take longer than this side to end a broadcast, or to go on after one that failed."""
NEEDS = {"ipc": "CUDA IPC needs vLLM 0.27 or newer", "nccl": "NCCL needs vLLM 0.30 or newer"}


class WholeWeights:
    """A `groupwise.engine.sampler.servers.sampler.WeightSync` for full fine-tuning."""

    kind: Literal["adapter", "full"] = "full"

    def __init__(
        self,
        base: str,
        transfer: Transfer,
        local_policy: LocalPolicy,
        *,
        timeout: float,
        shared: SharedFolder | None = None,
        own: SpawnedServer | None = None,
    ) -> None:
        """`base`: the servers' name for the model. `timeout`: seconds for a transfer by NCCL. `shared`: see `AdapterFiles`. `own`: the
        only server, if this run starts it."""
        self._base = base
        self._transfer = transfer
        self._local_policy = local_policy
        self._timeout = timeout
        self._shared = shared
        self._own = own
        self._groups: dict[str, str] = {}
        """The version that a server was given last by its group, by the server's address. One with another version was started again, and
        is in no group."""
        self._failures = 0
        """Failed transfers since the last one that succeeded."""
        self._broadcasting: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}
        """One server at a time, because collectives of several groups on one GPU may wait for each other."""

    def offer(self, policy: Policy) -> Served:
        """See `WeightSync.offer`."""
        copied = self._shared is not None and self._transfer == "files"
        folder = (
            self._shared.put(policy, policy.path)
            if self._shared is not None and copied
            else policy.path
        )
        return Served(self._base, policy.version, policy.fingerprint, folder, policy)

    async def serve(
        self, server: Server, served: Served, models: Mapping[str, ListedModel]
    ) -> None:
        """See `WeightSync.serve`."""
        try:
            await server.pause()
            try:
                await self._hand_over(server, served)
            except EndpointError:
                with suppress(EndpointError):  # which would hide why it did not take the weights
                    await _limited(server.resume(), GRACE)
                raise
            await server.resume()
        except EndpointError as error:
            if _is_temporary(error):
                raise
            raise UsageError(self._refusal(server, served, error)) from None
        self._failures = 0

    async def still_serves(self, server: Server, served: Served) -> bool:
        """See `WeightSync.still_serves`."""
        if self._own is not None or served.policy is None:
            return True
        return await server.weight_version() == policy_name(served.policy)

    def forget(self, server: Server, served: Served) -> None:
        """See `WeightSync.forget`: the group with the server ends."""
        if server.url in self._groups:
            del self._groups[server.url]
            with suppress(RunError):  # the process with the group has ended already
                self._local_policy.close_group(server.url)
            server.notify(server.root_url + "/shutdown_weight_transfer_engine", {})

    def remove(self, served: Served) -> None:
        """See `WeightSync.remove`."""
        if self._shared is not None and served.policy is not None and self._transfer == "files":
            self._shared.remove(served.policy)

    async def _hand_over(self, server: Server, served: Served) -> None:
        """Have a paused server take the weights, by files where the other way fails."""
        assert served.policy is not None
        version = None if self._own is not None else policy_name(served.policy)
        if self._transfer != "files":
            try:
                await self._hand_over_tensors(server, policy_name(served.policy))
                return
            except EndpointError as error:
                if self._own is None or not self._falls_back(error):
                    raise
        await server.read_weights(served.folder or "", version)

    async def _hand_over_tensors(self, server: Server, version: str) -> None:
        """Have the server take the weights from the learner's memory, by one of vLLM's weight-transfer engines."""
        if self._transfer == "ipc":
            await server.map_weights(self._local_policy, version)
            return
        lock = self._broadcasting.setdefault(asyncio.get_running_loop(), asyncio.Lock())
        async with lock:
            try:
                if self._groups.pop(server.url, "") != await server.weight_version():
                    await self._open_group(server)
                await _limited(server.post("/start_weight_update"), self._timeout)
                update = await asyncio.to_thread(self._local_policy.weight_info)
                await self._run_collective(
                    server,
                    server.post("/update_weights", {"update_info": update}),
                    self._local_policy.broadcast_weights,
                    *(server.url, self._timeout),
                )
                finish = {"weight_version": version}
                await _limited(server.post("/finish_weight_update", finish), self._timeout)
                self._groups[server.url] = version
            except EndpointError as error:
                await asyncio.to_thread(self._local_policy.close_group, server.url)
                if self._own is not None and _is_temporary(error):
                    await asyncio.to_thread(self._own.restart)
                raise

    async def _open_group(self, server: Server) -> None:
        world = 1 + await server.world_size()
        identity = await asyncio.to_thread(self._local_policy.open_group, server.url)
        init = {"nccl_unique_id_b64": identity, "rank_offset": 1, "world_size": world}
        await self._run_collective(
            server,
            server.post("/init_weight_transfer_engine", {"init_info": {**init, "packed": False}}),
            self._local_policy.join_group,
            *(server.url, world, self._timeout),
        )

    async def _run_collective(
        self,
        server: Server,
        request: Awaitable[None],
        here: Callable[..., None],
        *arguments: object,
    ) -> None:
        """Both sides of a collective: the request that has the server take part, and the call `here`. If one fails, the other ends, too."""
        server_side = asyncio.ensure_future(_limited(request, self._timeout + GRACE))
        our_side = asyncio.ensure_future(asyncio.to_thread(here, *arguments))
        both = {server_side, our_side}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            if not (our_side.done() and our_side.exception() is None):
                server_side.cancel()
                await asyncio.to_thread(self._local_policy.close_group, server.url)
            results = await asyncio.gather(server_side, our_side, return_exceptions=True)
        server_result, error = results
        if isinstance(server_result, EndpointError) and not _is_temporary(server_result):
            raise server_result  # a refusal, which says more than that this side has waited in vain
        if isinstance(error, EndpointError):
            lost = EndpointError(f"{server.url} did not take the weights by NCCL: {error}")
            lost.is_retryable = True
            raise lost
        for failure in (error, server_result):
            if isinstance(failure, BaseException):
                raise failure

    def _falls_back(self, error: EndpointError) -> bool:
        """True if the run's own server reads files from now on."""
        self._failures += 1
        if _is_temporary(error) and (self._transfer == "ipc" or self._failures < FAILURES):
            return False
        logger.warning(
            "The vLLM of sampler.vllm_python takes no weights from the learner's memory (%s), so it reads them from files after each "
            "step: %s",
            NEEDS[self._transfer],
            error,
        )
        self._transfer = "files"
        return not _is_temporary(error)

    def _refusal(self, server: Server, served: Served, error: EndpointError) -> str:
        if self._own is not None:
            return (
                f"The vLLM of sampler.vllm_python could not take the weights of {served.folder}: {error}\nAll weights from files need "
                "vLLM 0.16 or newer. Install it, train an adapter (lora), or leave sampler.engine out."
            )
        remedy = (
            f"{NEEDS['nccl']}, started with the environment variable VLLM_SERVER_DEV_MODE=1 and with --weight-transfer-config "
            '\'{"backend": "nccl"}\''
            if self._transfer == "nccl"
            else "With weight_transfer ipc the server must compute on the learner's own GPU, as its only one"
            if self._transfer == "ipc"
            else f"{server.weights_remedy}, and the server must see that folder (sampler.adapter_folder is one that both machines have)"
        )
        return f"{server.url} could not take all weights, those of {served.folder}: {error}\n{remedy}. Or train an adapter (lora)."


async def _limited(request: Awaitable[None], seconds: float) -> None:
    """Await a request for a limited time. Raises EndpointError if it takes longer."""
    try:
        await asyncio.wait_for(request, seconds)
    except TimeoutError:
        error = EndpointError(
            f"the server has not ended what weights need for {seconds:g} s; sampler.weight_transfer_timeout limits it. If a run was "
            "killed while it sent weights, start the server again: its workers wait for that run"
        )
        error.is_retryable = True
        raise error from None


def _is_temporary(error: EndpointError) -> bool:
    """True if the server may take the weights at another attempt; a refusal by vLLM has status 500 as well."""
    return error.is_retryable and error.status != 500
