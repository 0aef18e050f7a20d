"""Attention of one token of every row by a kernel, each row by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.engine.models.native.compiled import array
from groupwise.engine.models.native.weights import NativeModel
from groupwise.engine.sampler.native.cache import Group, OwnCache

NO_NORM = np.empty(0, np.float32)


class CompiledAttention:
    """An `Attend` for all rows of one token."""

    def __init__(
        self,
        model: NativeModel,
        own: OwnCache,
        groups: Sequence[Group],
        rotations_N1C: Tensor,
        written_N: Tensor,
    ) -> None:
        self._model = model
        self._keys_LBKDS, self._values_LBTD = array(own.keys_LBKDS), array(own.values_LBTD)
        self._turns_NC2 = array(torch.view_as_real(rotations_N1C[:, 0]))
        self._written_N = array(written_N)
        self._epsilon = np.float32(model.shape.epsilon)
        self._prompts_N4 = np.zeros((len(written_N), 4), np.int64)
        self._bytes_of_layer_N4 = np.zeros_like(self._prompts_N4)
        for group in groups:
            keys, values = group.prompt.keys_LJKDS, group.prompt.values_LJPD
            rows, blocks = slice(group.start, group.end), keys.shape[2]
            self._prompts_N4[rows] = keys.data_ptr(), values.data_ptr(), group.prompt.length, blocks
            self._bytes_of_layer_N4[rows] = keys[0].nbytes, values[0].nbytes, 0, 0

    def __call__(self, layer: int, qkv_NO: Tensor) -> Tensor:
        """Queries, keys and values [rows, O] of one layer, to [rows, heads · D]."""
        from groupwise.engine.models.native import kernels

        shape, weights = self._model.shape, self._model.layers[layer]
        outputs = shape.heads * shape.head_size
        found_NO = torch.empty(len(qkv_NO), outputs, dtype=self._model.dtype)
        kernels.attend(
            array(qkv_NO),
            self._turns_NC2,
            _norm(weights.query_norm_D),
            _norm(weights.key_norm_D),
            self._epsilon,
            shape.kv_heads,
            self._keys_LBKDS[layer],
            self._values_LBTD[layer],
            self._written_N,
            self._prompts_N4 + layer * self._bytes_of_layer_N4,
            array(found_NO),
        )
        return found_NO


def _norm(norm_D: Tensor | None) -> Any:
    return NO_NORM if norm_D is None else array(norm_D)
