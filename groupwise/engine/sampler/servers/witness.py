"""Computes log-probabilities under the published weights, read from the same files, over the base that the learner has in memory."""

from __future__ import annotations

import pickle
from base64 import b64encode
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn.utils.rnn import pad_sequence

from groupwise.core.errors import ModelError
from groupwise.engine.models.experts import experts_of
from groupwise.engine.models.lora import fingerprint
from groupwise.engine.models.memory import explaining_out_of_memory
from groupwise.engine.sampler.servers.probe import Answer
from groupwise.engine.sampler.weights import ServedAdapter, ServedWeights


def gpu_uuid(device: torch.device) -> str:
    """A GPU's identity, by which vLLM finds the handles of the GPU on which it computes."""
    return str(torch.cuda.get_device_properties(device).uuid)


class Witness:
    """A `groupwise.engine.sampler.servers.sampler.PolicyWitness` over weights in this process."""

    def __init__(self, weights: ServedWeights) -> None:
        self._weights = weights

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

    def read(self, folder: str) -> None:
        """Load a publication. Raises `ModelError` unless all names and shapes match."""
        self._weights.read(Path(folder))

    def fingerprint(self) -> str:
        """The fingerprint of the weights that are in memory now."""
        return fingerprint(self._weights.tensors())

    def give_back_memory(self) -> None:
        """Free the GPU's memory that torch keeps for later tensors."""
        if self._weights.model.device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def ipc_handles(self) -> dict[str, Any]:
        """The weights, for another process on the same GPU that maps them: the fields of vLLM's `IPCWeightTransferUpdateInfo`."""
        if experts_of(self._weights.model):
            raise ModelError(
                f"lora is null, and the run's vLLM server would take the weights of a {self._weights.model.config.model_type} from the "
                "learner's memory, where the experts of a layer are one tensor and not those of its files. Give the server a GPU "
                "of its own, where it reads files, or train an adapter."
            )
        tensors = {name: tensor.detach() for name, tensor in self._weights.tensors().items()}
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        gpu = gpu_uuid(self._weights.model.device)
        handles = [{gpu: reduce_tensor(tensor)[1]} for tensor in tensors.values()]
        return {
            "names": [*tensors],
            "dtype_names": [
                str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()
            ],
            "shapes": [[*tensor.shape] for tensor in tensors.values()],
            "ipc_handles_pickled": b64encode(pickle.dumps(handles)).decode(),
        }

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
        with explaining_out_of_memory("comparing with the server"), torch.inference_mode(), acting:
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
