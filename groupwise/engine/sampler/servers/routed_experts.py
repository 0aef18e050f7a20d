"""Reads the experts that vLLM chose for each token, which it returns if it is started with --enable-return-routed-experts (0.22 to 0.33).

`choices[].routed_experts` is a NumPy file in base64: integers [tokens, layers, experts of a token], uint8 or uint16 (int32 in older
releases), for all tokens of prompt and completion but the last. Some kernels have returned zeros, so every number that matters is checked.
"""

from __future__ import annotations

from base64 import b64decode
from io import BytesIO

from groupwise.core.errors import EndpointError
from groupwise.core.types import RoutedExperts, RouterShape

WIRE_BYTES = 16 / 3
"""Bytes of an answer for each index: int32 in base64."""


def read_routed_experts(value: object, shape: RouterShape, tokens: int) -> RoutedExperts:
    """The experts in an answer. `tokens`: of its prompt and completion, the last one included. Raises EndpointError for what cannot be the
    choice of a router of this shape."""
    import numpy as np  # the main process of a run has no other need of it

    if not isinstance(value, str):
        raise EndpointError("returned no experts")
    try:
        found = np.load(BytesIO(b64decode(value, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError) as error:
        raise EndpointError(f"returned experts that are not a NumPy array: {error}") from None
    expected = (tokens - 1, shape.layers, shape.top_k)
    if not isinstance(found, np.ndarray) or found.shape != expected or found.dtype.kind not in "iu":
        raise EndpointError(
            f"returned experts as {getattr(found, 'dtype', type(found))} {getattr(found, 'shape', '')}, where integers {expected} belong: "
            "tokens without the last one, layers, and experts of a token"
        )
    chosen_TLK = found[:, list(shape.with_experts)]
    if chosen_TLK.size and not 0 <= chosen_TLK.min() <= chosen_TLK.max() < shape.experts:
        raise EndpointError(
            f"returned the experts {chosen_TLK.min()} to {chosen_TLK.max()}, but the model has 0 to {shape.experts - 1}"
        )
    ordered_TLK = np.sort(chosen_TLK, axis=-1)
    if (ordered_TLK[..., 1:] == ordered_TLK[..., :-1]).any() or not chosen_TLK.any():
        raise EndpointError("returned an expert twice for one token, which no router chooses")
    kind = np.uint8 if shape.experts <= 256 else np.dtype("<u2")
    found = np.where(np.isin(np.arange(shape.layers), shape.with_experts)[:, None], found, 0)
    return RoutedExperts(0, expected, found.astype(kind).tobytes())
