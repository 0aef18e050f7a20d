"""A program that begins like vLLM's server and has another one answer (`tests/fake_vllm_server.py`): `python fake_vllm.py -m … --port=…`.

It wants what a real one is told: the rights to load adapters and a key in its environment, and no key among its arguments. What it was told
it appends to the file that FAKE_VLLM_TOLD names, a line each time. Connections whose first request has the key are led to the server whose
address is in FAKE_VLLM_THERE, which has no adapters when this program begins.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
from contextlib import suppress
from urllib.request import Request, urlopen


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
    assert given.logprobs_mode == "processed_logprobs"
    assert not any(key in word for word in sys.argv)
    there = os.environ["FAKE_VLLM_THERE"]
    forget_adapters(there)
    with open(os.environ["FAKE_VLLM_TOLD"], "a") as told:
        print(json.dumps({**vars(given), "pid": os.getpid()}), file=told, flush=True)
    with socket.create_server((given.host, given.port)) as door:
        while True:
            threading.Thread(target=lead, args=(door.accept()[0], there, key)).start()


def forget_adapters(there: str) -> None:
    with urlopen(f"{there}/v1/models") as listed:
        names = [each["id"] for each in json.load(listed)["data"] if each["parent"]]
    for name in names:
        body = json.dumps({"lora_name": name}).encode()
        urlopen(Request(f"{there}/v1/unload_lora_adapter", body)).close()


def lead(caller: socket.socket, there: str, key: str) -> None:
    """Bytes to and fro, once the caller has shown the key."""
    host, _, port = there.removeprefix("http://").partition(":")
    with caller, socket.create_connection((host, int(port))) as server, suppress(OSError):
        heard = b""
        while b"\r\n\r\n" not in heard:
            data = caller.recv(1 << 16)
            if not data:
                return
            heard += data
        assert f"authorization: bearer {key}\r\n".lower().encode() in heard.lower()
        server.sendall(heard)
        threading.Thread(target=copy, args=(server, caller)).start()
        copy(caller, server)


def copy(one: socket.socket, other: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
        other.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
