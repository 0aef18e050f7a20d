"""Computes log-probabilities under the published weights, read from the same files, over the base that the learner has in memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch

from groupwise.engine.models.lora import fingerprint
from groupwise.engine.models.memory import explaining_out_of_memory
from groupwise.engine.sampler.weights import ServedAdapter, ServedWeights


class Witness:
    """A `groupwise.engine.sampler.vllm.sampler.PolicyWitness` over weights in this process."""

    def __init__(self, weights: ServedWeights) -> None:
        self._weights = weights

    @property
    def vocabulary(self) -> int:
        """Number of token ids of the model."""
        return int(cast("Any", self._weights.model.get_input_embeddings()).weight.shape[0])

    @property
    def rank(self) -> int:
        """Rank of the adapter; 1 if there is none."""
        weights = self._weights
        return weights.adapted.configs[weights.name].r if isinstance(weights, ServedAdapter) else 1

    def read(self, folder: str) -> None:
        """Load a publication. Raises `ModelError` unless all names and shapes match."""
        self._weights.read(Path(folder))

    def fingerprint(self) -> str:
        """Fingerprint of the weights in memory."""
        return fingerprint(self._weights.tensors())

    def logprobs(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        temperature: float,
        plain: bool = False,
    ) -> list[float]:
        """Log-probabilities (nats) of the tokens after the prompt; with `plain`, under the base without its adapter."""
        model, start = self._weights.model, len(prompt_ids) - 1
        ids_BT = torch.tensor([[*prompt_ids, *token_ids]], device=model.device)
        acting = self._weights.acting()
        if plain:
            weights = self._weights
            acting = (
                weights.adapted.using(None) if isinstance(weights, ServedAdapter) else nullcontext()
            )
        with explaining_out_of_memory("comparing with the server"), torch.inference_mode(), acting:
            logits_TV = model(input_ids=ids_BT, use_cache=False).logits[0, start:-1].float()
        logprobs_TV = (logits_TV / temperature).log_softmax(-1)
        return logprobs_TV.gather(-1, ids_BT[0, start + 1 :, None])[:, 0].tolist()
