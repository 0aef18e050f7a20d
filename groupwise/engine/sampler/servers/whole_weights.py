"""How all weights of a model get into the run's own server, for full fine-tuning.

The server finishes what it computes, takes the weights, drops the keys and values of earlier ones, and goes on. On the learner's GPU it
copies the weights from the learner's memory: CUDA IPC lets it map tensors of another process (vLLM's weight-transfer engine `ipc`).
Otherwise it reads the published files, which are in this machine's memory. The routes are those of vLLM's developer mode: for files from
0.16 on, for CUDA IPC from 0.27 on. A server that refuses the latter reads the files.

The model keeps its name, so a request cannot say which weights it wants. But only this run reaches the server, so no other program changes
its weights, and one that was started again is not asked before it has taken them again (`spawned_server.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

from groupwise.core.errors import EndpointError, UsageError
from groupwise.core.types import Policy
from groupwise.engine.sampler.servers.adapters import ListedModel
from groupwise.engine.sampler.servers.server_pool import Served, Server

logger = logging.getLogger(__name__)


class WholeWeights:
    """A `groupwise.engine.sampler.servers.sampler.WeightSync` for full fine-tuning."""

    kind: Literal["adapter", "full"] = "full"

    def __init__(self, base: str, ipc_handles: Callable[[], Mapping[str, Any]] | None) -> None:
        """`base`: the server's name for the model. `ipc_handles`: see `Witness.ipc_handles`; None: the server reads the files."""
        self._base = base
        self._ipc_handles = ipc_handles

    def offer(self, policy: Policy) -> Served:
        """See `WeightSync.offer`."""
        return Served(self._base, policy.version, policy.fingerprint, policy.path, policy)

    async def serve(
        self, server: Server, served: Served, models: Mapping[str, ListedModel]
    ) -> None:
        """See `WeightSync.serve`. A server whose release takes no weights by CUDA IPC reads the files, now and later."""
        try:
            await server.post("/pause?mode=wait")
            try:
                await self._hand_over(server, served)
            except EndpointError:
                with suppress(EndpointError):  # which would hide why it refused the weights
                    await server.post("/resume")
                raise
            await server.post("/resume")
        except EndpointError as error:
            if _is_temporary(error):
                raise
            raise UsageError(
                f"The vLLM of sampler.vllm_python could not take the weights of {served.folder}: {error}\nAll weights from files need "
                "vLLM 0.16 or newer. Install it, train an adapter (lora), or leave sampler.engine out."
            ) from None

    async def _hand_over(self, server: Server, served: Served) -> None:
        if self._ipc_handles is not None:
            try:
                await server.post("/init_weight_transfer_engine", {"init_info": {"packed": False}})
                await server.post("/start_weight_update")
            except EndpointError as error:
                if _is_temporary(error):
                    raise
                self._ipc_handles = None
                logger.warning(
                    "The vLLM of sampler.vllm_python takes no weights from the learner's memory (CUDA IPC needs vLLM 0.27 or newer), so it "
                    "reads them from files after each step: %s",
                    error,
                )
        if self._ipc_handles is None:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": served.folder}}
            await server.post("/collective_rpc", reload)
            return
        update = await asyncio.to_thread(self._ipc_handles)
        await server.post("/update_weights", {"update_info": update})
        await server.post("/finish_weight_update", {"weight_version": served.fingerprint})


def _is_temporary(error: EndpointError) -> bool:
    """True if the server may take the weights at another attempt; a refusal by vLLM has status 500 as well."""
    return error.may_pass and error.status != 500
