"""Compiles kernels, or loads saved ones, before they are needed, so that processes forked afterwards have them.

Each kernel is called once with tiny arrays, in the number formats that the engines of sampler and learner use.
"""

from __future__ import annotations

import numpy as np
import torch

from groupwise.engine.models.native import compiled
from groupwise.engine.models.native.compiled import array
from groupwise.engine.models.native.facts import LANES, STRETCH
from groupwise.engine.models.native.packed import Packed
from groupwise.engine.models.native.weights import NativeModel

EPSILON = 1e-6


def ready_to_decode(model: NativeModel, *, int8: bool = False) -> None:
    """Compile the kernels that one thread calls for a prompt and for a token; `int8` as in `NativeModel.pack`."""
    compiled.normed(torch.ones(1, 1), torch.ones(1), EPSILON, model.dtype)
    for products in (model.dtype, torch.float32):
        compiled.swiglu(torch.ones(1, 2, dtype=products), model.dtype)
    # Use the model's own weights, which may be stored in another format than `model.dtype`.
    weight_OI = model.head.weight_OI[:LANES]
    for each in {False, int8}:
        Packed(weight_OI, None, int8=each).product(torch.ones_like(weight_OI[:1]), None)
    compiled.draw(torch.ones(1, 1), torch.ones(1), torch.zeros(1, dtype=torch.float64))
    from groupwise.engine.models.native import kernels

    no_norm, size = np.empty(0, np.float32), LANES
    kernels.attend(
        array(torch.ones(1, 3 * size)),
        array(torch.ones(1, size // 2, 2)),
        no_norm,
        no_norm,
        np.float32(EPSILON),
        1,
        array(torch.zeros(1, 1, size, STRETCH)),
        array(torch.zeros(1, STRETCH, size, dtype=model.dtype)),
        np.zeros(1, np.int64),
        np.zeros((1, 4), np.int64),
        array(torch.empty(1, size, dtype=model.dtype)),
    )


def ready_to_learn(model: NativeModel) -> None:
    """Compile the kernels that a gradient needs; on a GPU there are none."""
    if not model.compiled:
        return
    dtype = model.dtype
    x_NH, weight_H = torch.ones(1, 1), torch.ones(1)
    y_NF, gate_up_N2F = torch.ones(1, 1, dtype=dtype), torch.ones(1, 2, dtype=dtype)
    compiled.normed(x_NH, weight_H, EPSILON, dtype)
    compiled.norm_with_gradient(x_NH, weight_H, EPSILON, dtype, None, None)
    compiled.norm_with_gradient(x_NH, weight_H, EPSILON, dtype, y_NF, torch.zeros(1, 1))
    compiled.swiglu(gate_up_N2F, dtype)
    compiled.swiglu_with_gradient(gate_up_N2F, y_NF)
    from groupwise.engine.models.native import text_attention

    size, empty = LANES, np.empty((0, 2), np.int64)
    qkv_NO = array(torch.ones(1, 3 * size, dtype=dtype))
    turns_NC2, no_norm = np.ones((1, size // 2, 2), np.float32), np.empty(0, np.float32)
    of_heads = turns_NC2, no_norm, no_norm, np.float32(EPSILON), 1
    texts = np.zeros((1, 4), np.int64), empty
    d_kv_XND = np.zeros((2, 1, size), np.float32)
    out_NO = qkv_NO[:, :size].copy()
    text_attention.forward(qkv_NO, *of_heads, *texts, out_NO, 0, 0)
    text_attention.backward(qkv_NO, *of_heads, *texts, out_NO, d_kv_XND, qkv_NO.copy(), 0, 0)
    text_attention.finish(
        qkv_NO, *of_heads[:1], no_norm, np.float32(EPSILON), d_kv_XND, qkv_NO.copy()
    )
    likeliest_N = torch.zeros(1, dtype=torch.int64)
    compiled.head_numbers(y_NF, torch.ones(1), likeliest_N, gradient=True, entropy_CV=None)
