"""A program that begins like vLLM's server and answers like it (`tests/vllm_server.py`): `python fake_vllm.py -m … --port=…`.

It wants what a real one is told: the rights to load adapters and a key in its environment, and no key among its arguments. What it was told
it appends to the file that FAKE_VLLM_TOLD names, a line each time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="module")
    for name in ("model", "served-model-name", "host", "dtype", "logprobs-mode"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "max-model-len", "max-lora-rank", "max-loras", "tensor-parallel-size"):
        parser.add_argument(f"--{name}", required=True, type=int)
    parser.add_argument("--gpu-memory-utilization", required=True, type=float)
    parser.add_argument("--enable-lora", action="store_true")
    given = parser.parse_args()
    key = os.environ["VLLM_API_KEY"]
    assert os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert given.module == "vllm.entrypoints.openai.api_server"
    assert not any(key in word for word in sys.argv)
    with open(os.environ["FAKE_VLLM_TOLD"], "a") as told:
        print(json.dumps({**vars(given), "pid": os.getpid()}), file=told, flush=True)

    from tests.vllm_server import VllmServer

    server = VllmServer(
        name=given.served_model_name,
        logprobs_mode=given.logprobs_mode,
        max_model_len=given.max_model_len,
        max_lora_rank=given.max_lora_rank,
        key=key,
    )
    server.port = given.port
    server.begin()
    print("ready", flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.sigwait({signal.SIGTERM})
    server.end()


if __name__ == "__main__":
    main()
