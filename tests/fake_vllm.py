"""A program that begins like vLLM's server and has another one answer (`tests/fake_vllm_server.py`): `python fake_vllm.py -c … …`.

It wants what a real one is told: the right to load adapters from one folder, and a socket in a folder that nobody else may enter. What it
was told, and what of torchrun's variables it has, it appends to the file that FAKE_VLLM_TOLD names, a line each time. Connections are led
to the server whose address is in FAKE_VLLM_THERE, which has no adapters when this program begins.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
from contextlib import suppress
from urllib.request import Request, urlopen

from groupwise.core.rendezvous import SET_BY_TORCHRUN
from groupwise.engine.sampler.servers.spawned_server import SERVE


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-c", dest="program")
    parser.add_argument("model")
    for name in ("served-model-name", "uds", "dtype", "logprobs-mode"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("max-model-len", "tensor-parallel-size"):
        parser.add_argument(f"--{name}", required=True, type=int)
    for name in ("max-lora-rank", "max-loras"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--weight-transfer-config", type=json.loads)
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--max-num-batched-tokens", type=int)
    flags = ("enable-lora", "no-enable-chunked-prefill", "enable-sleep-mode")
    for name in (*flags, "enable-return-routed-experts"):
        parser.add_argument(f"--{name}", action="store_true")
    given = parser.parse_args()
    assert given.enable_lora == (os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1")
    assert given.program == SERVE
    assert given.logprobs_mode == "processed_logprobs"
    asks_for_more = given.enable_sleep_mode or not given.enable_lora
    assert asks_for_more == (os.environ.get("VLLM_SERVER_DEV_MODE") == "1")
    insecure = os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION") == "1"
    assert insecure == (given.weight_transfer_config == {"backend": "ipc"})
    assert os.stat(os.path.dirname(given.uds)).st_mode & 0o777 == 0o700
    there = os.environ["FAKE_VLLM_THERE"]
    urlopen(Request(f"{there}/begin_again", b"{}")).close()
    with open(os.environ["FAKE_VLLM_TOLD"], "a") as told:
        known = {
            "pid": os.getpid(),
            "adapters": os.environ.get("VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES"),
            "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
            "cache": os.environ.get("VLLM_CPU_KVCACHE_SPACE"),
            "rank": [name for name in os.environ if name in SET_BY_TORCHRUN],
        }
        print(json.dumps({**vars(given), **known}), file=told, flush=True)
    print("begins", flush=True)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(given.uds)
        door.listen()
        while True:
            threading.Thread(target=lead, args=(door.accept()[0], there)).start()


def lead(caller: socket.socket, there: str) -> None:
    """Copy bytes in both directions."""
    host, _, port = there.removeprefix("http://").partition(":")
    with caller, socket.create_connection((host, int(port))) as server, suppress(OSError):
        threading.Thread(target=copy, args=(server, caller)).start()
        copy(caller, server)


def copy(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
