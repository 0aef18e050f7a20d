"""Fingerprints of weights: SHA-256 as a tree, so that several threads hash the pieces of a large model at once.

Each tensor is cut into pieces of `PIECE` bytes, and each piece is hashed alone. The root is the hash of every tensor's name, format and
shape, each followed by the hashes of its pieces. It does not depend on the number of threads. Nothing here imports torch, because
workers without it compute the same fingerprints.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

PIECE = 4 << 20
"""Bytes that are hashed alone: a few milliseconds, and many pieces for each tensor of a large model."""
AHEAD = 64
"""Pieces that may wait for a thread. More would hold more copies of a GPU's tensors in main memory."""


def tree_hash(tensors: Iterable[tuple[str, memoryview]], threads: int) -> str:
    """The root over these tensors, in their order; 16 hex digits.

    Each comes as `name|dtype|shape|` and its bytes. They are taken one after another in this thread, and hashed in `threads` others.
    """
    root = hashlib.sha256()
    pending: deque[bytes | Future[bytes]] = deque()

    def add_oldest() -> None:
        part = pending.popleft()
        root.update(part if isinstance(part, bytes) else part.result())

    with ThreadPoolExecutor(threads) as pool:
        for described, content in tensors:
            pending.append(described.encode())
            for start in range(0, len(content), PIECE):
                pending.append(pool.submit(_hash, content[start : start + PIECE]))
                while len(pending) > AHEAD:
                    add_oldest()
        while pending:
            add_oldest()
    return root.hexdigest()[:16]


def _hash(piece: memoryview) -> bytes:
    return hashlib.sha256(piece).digest()
