"""The worker with Tunix's layers sharding their computation over devices that JAX makes of one CPU; on a CPU they leave that out by
default.

Run by the Python of Tunix's environment in place of itself: what follows are the options and the file that it was to run.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import jax
from jax.interpreters import pxla
from jax.sharding import NamedSharding, PartitionSpec
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.utils import sharding_utils


def shard(x: Any, s: Any, eager: bool = False) -> Any:
    """Tunix's own, but for the first thing that it does: ask whether this is a CPU."""
    mesh = pxla.thread_resources.env.physical_mesh
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*s)))


def divide() -> None:
    """Have all families take `shard` for Tunix's own."""
    for module in (llama3, qwen2, qwen3, sharding_utils):
        assert callable(module.shard)
        module.shard = shard


if __name__ == "__main__":
    divide()
    sys.argv = [word for word in sys.argv[1:] if not word.startswith("-")]
    runpy.run_path(sys.argv[0], run_name="__main__")
