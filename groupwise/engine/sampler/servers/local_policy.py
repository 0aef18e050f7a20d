"""The policy that servers must serve, in the memory of this process: the learner's base with the published weights, read from the files.

The sampler compares the servers' log-probabilities with its own, and servers that take weights from memory get them from here. If weights
are divided among learners, each has a policy of its own parts: all compute log-probabilities and the fingerprint together, and
`contribute_shards` while the first one broadcasts.
"""

from __future__ import annotations

import pickle
from base64 import b64encode
from collections.abc import Sequence
from contextlib import nullcontext
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn.utils.rnn import pad_sequence

from groupwise.core.errors import EndpointError, ModelError
from groupwise.core.types import RouterShape
from groupwise.engine.models.experts import experts_of, router_shape
from groupwise.engine.models.lora import fingerprint
from groupwise.engine.models.machine import engine_products
from groupwise.engine.models.memory import explaining_out_of_memory
from groupwise.engine.models.sharded import FullTensors, full_tensors
from groupwise.engine.sampler.servers import nccl
from groupwise.engine.sampler.servers.probe import Answer
from groupwise.engine.sampler.weights import ServedAdapter, ServedWeights


def gpu_uuid(device: torch.device) -> str:
    """A GPU's identity, by which vLLM finds the handles of the GPU on which it computes."""
    return str(torch.cuda.get_device_properties(device).uuid)


class TorchPolicy:
    """A `groupwise.engine.sampler.servers.probe.LocalPolicy` over a model of torch."""

    def __init__(self, weights: ServedWeights) -> None:
        self._weights = weights
        self._groups: dict[str, nccl.TransferGroup] = {}
        """One entry for each server that takes the weights, by its address."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids of the model."""
        return int(cast("Any", self._weights.model.get_input_embeddings()).weight.shape[0])

    @property
    def rank(self) -> int | None:
        """Rank of the adapter; None if there is none."""
        weights = self._weights
        if not isinstance(weights, ServedAdapter):
            return None
        return weights.adapted.configs[weights.name].r

    @property
    def adapts_experts(self) -> bool:
        """True if the adapter changes experts, whose factors servers take in other files than peft's."""
        weights = self._weights
        return isinstance(weights, ServedAdapter) and bool(
            weights.adapted.configs[weights.name].target_parameters
        )

    def router_shape(self) -> RouterShape:
        """What choices of experts look like. Raises ModelError if the learner cannot replay them."""
        return router_shape(self._weights.model)

    def write_by_expert(self, folder: str) -> None:
        """Write the adapter as it is in memory, with factors for each matrix of each expert; see `AdaptedModel.save_by_expert`."""
        weights = self._weights
        assert isinstance(weights, ServedAdapter)
        Path(folder).mkdir(parents=True)
        weights.adapted.save_by_expert(weights.name, Path(folder))

    def read(self, folder: str) -> None:
        """Load a publication. Raises `ModelError` unless all names and shapes match."""
        self._weights.read(Path(folder))

    def fingerprint(self) -> str:
        """The fingerprint of the weights that are in memory now."""
        return fingerprint(FullTensors(self._weights.tensors()))

    def give_back_memory(self) -> None:
        """Free the GPU's memory that torch keeps for later tensors."""
        if self._weights.model.device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def weight_info(self) -> dict[str, Any]:
        """Names, number formats and shapes of the weights: the fields that vLLM's transfers by `ipc` and by `nccl` have in common."""
        tensors = self._whole_weights()
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
        shapes = [[*tensor.shape] for tensor in tensors.values()]
        return {"names": [*tensors], "dtype_names": dtypes, "shapes": shapes}

    def ipc_handles(self) -> dict[str, Any]:
        """The weights, for another process on the same GPU that maps them: the fields of vLLM's `IPCWeightTransferUpdateInfo`."""
        gpu = gpu_uuid(self._weights.model.device)
        handles = [{gpu: reduce_tensor(tensor)[1]} for tensor in self._whole_weights().values()]
        pickled = b64encode(pickle.dumps(handles)).decode()
        return {**self.weight_info(), "ipc_handles_pickled": pickled}

    def pickled_tensors(self) -> str:
        """The weights, likewise, as SGLang takes them: pairs of name and tensor, pickled as torch does for other processes, in base64."""
        pickled = BytesIO()
        ForkingPickler(pickled).dump([*self._whole_weights().items()])
        return b64encode(pickled.getvalue()).decode()

    def open_group(self, server: str) -> str:
        """Prepare a group with a server's workers; returns its unique id in base64. An earlier group with that server ends."""
        self.close_group(server)
        self._groups[server] = group = nccl.NcclGroup(self._weights.model.device)
        return b64encode(group.identity).decode()

    def join_group(self, server: str, world: int, timeout: float) -> None:
        """Form that group while the workers do; see `nccl.TransferGroup.join`."""
        self._group(server).join(world, timeout)

    def broadcast_weights(self, server: str, timeout: float) -> None:
        """Send all weights while the workers take them; see `nccl.TransferGroup.broadcast`."""
        tensors = full_tensors(self._whole_weights())
        try:
            self._group(server).broadcast(tensors, timeout)
        finally:
            for _ in tensors:  # after a failure the other learners still contribute the rest
                pass

    def contribute_shards(self) -> None:
        """Contribute this learner's parts while the first learner broadcasts."""
        FullTensors(self._weights.tensors()).contribute_shards()

    def close_group(self, server: str) -> None:
        """End the group with a server, if there is one; a call that waits in it fails."""
        group = self._groups.pop(server, None)
        if group is not None:
            group.close()

    def _group(self, server: str) -> nccl.TransferGroup:
        group = self._groups.get(server)
        if group is None:
            raise EndpointError(f"the group with {server} was closed")
        return group

    def _whole_weights(self) -> dict[str, torch.Tensor]:
        """All weights, or this learner's parts, by their names in the files. Raises ModelError for names that the files do not have."""
        if experts_of(self._weights.model):
            raise ModelError(
                f"lora is null, and a vLLM server would take the weights of a {self._weights.model.config.model_type} from the "
                "learner's memory, where the experts of a layer are one tensor and not those of its files. Have it read the files "
                "(sampler.weight_transfer: files; a run's own server then needs a GPU of its own), or train an adapter."
            )
        tensors = {name: tensor.detach() for name, tensor in self._weights.tensors().items()}
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        return tensors

    @engine_products()
    def logprobs(
        self, answers: Sequence[Answer], temperatures: Sequence[float], plain: bool = False
    ) -> list[list[float]]:
        """For each temperature the log-probabilities (nats) of all tokens after the prompts, one answer after the other; with `plain`,
        under the base without its adapter."""
        model = self._weights.model
        rows = [torch.tensor([*prompt, *tokens]) for prompt, tokens in answers]
        # Tokens after the end of a row change nothing before it.
        ids_BT = pad_sequence(rows, batch_first=True).to(model.device)
        acting = self._weights.acting()
        if plain:
            weights = self._weights
            acting = (
                weights.adapted.using(None) if isinstance(weights, ServedAdapter) else nullcontext()
            )
        with explaining_out_of_memory("comparing with the server"), torch.no_grad(), acting:
            logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
        after_BT = torch.zeros(ids_BT[:, 1:].shape, dtype=torch.bool)
        for row, (prompt, tokens) in enumerate(answers):
            after_BT[row, len(prompt) - 1 : len(prompt) + len(tokens) - 1] = True
        found: list[list[float]] = []
        for temperature in temperatures:
            logprobs_BTV = (logits_BTV / temperature).log_softmax(-1)
            logprobs_BT = logprobs_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]
            found.append(logprobs_BT.cpu()[after_BT].tolist())
        return found
