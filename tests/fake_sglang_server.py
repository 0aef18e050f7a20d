"""A server that answers as SGLang does, with the model and the adapters of `tests/fake_vllm_server.py`.

Routes, fields, statuses and messages are those of `python -m sglang.launch_server`: /generate, /load_lora_adapter, /unload_lora_adapter,
/update_weights_from_disk, /update_weights_from_tensor between /begin_weight_update and /end_weight_update, /model_info, and /v1/models,
which lists the base alone, as in older releases, by the folder of the weights that it has read last. As there, `ignore_eos` takes effect
on the requested stop tokens as well, and log-probabilities are at the temperature. Member i of a group is drawn with the seed i, where a
real one takes random numbers.
"""

from __future__ import annotations

import asyncio
import pickle
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from groupwise.core.errors import ModelError
from groupwise.engine.models.files import read_model_tensors
from tests.fake_vllm_server import Body, VllmServer

SAMPLING = frozenset({
    "n", "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos", "stop",
    "skip_special_tokens",
})  # fmt: skip


class SglangServer(VllmServer):
    """See the module; `asked` and `interfere` are as in `VllmServer`, and `spoil` is given {"entries": the answer}."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(logprobs_mode="processed_logprobs", **settings)

    def _app(self) -> Starlette:
        posted: dict[str, Callable[..., Any]] = {
            "/generate": self._generate,
            "/load_lora_adapter": self._load_here,
            "/unload_lora_adapter": self._unload_here,
            "/update_weights_from_disk": self._read_weights,
            "/begin_weight_update": self._map_weights,
            "/update_weights_from_tensor": self._map_weights,
            "/end_weight_update": self._map_weights,
            "/tokenize": self._tokenise,
        }
        routes = [Route(path, do, methods=["POST"]) for path, do in posted.items()]
        gets = {"/v1/models": self._list_base, "/model_info": self._say}
        routes += [Route(path, do, methods=["GET"]) for path, do in gets.items()]
        return Starlette(routes=routes)

    def _serve_base(self) -> None:
        super()._serve_base()
        self._listed_name = self.set.name

    async def _read_weights(self, request: Request) -> Response:
        body, instead = await self._begun(request)
        if instead is not None:
            return instead
        assert body.keys() == {"model_path", "weight_version", "flush_cache"}
        folder = body["model_path"]
        try:
            tensors = read_model_tensors(Path(folder))
        except ModelError as error:
            told = f"Failed to get weights iterator: {error}."
            return JSONResponse({"success": False, "message": told, "num_paused_requests": 0}, 400)
        self._take(tensors)
        self._listed_name, self.weight_version = folder, body["weight_version"]
        told = "Succeeded to update model weights."
        return JSONResponse({"success": True, "message": told, "num_paused_requests": 0})

    async def _map_weights(self, request: Request) -> Response:
        body, instead = await self._begun(request)
        if instead is not None:
            return instead
        path = request.url.path
        if (path == "/begin_weight_update") == self._updating:
            told = f"a weight-update session is {'already' if self._updating else 'not'} open"
            return JSONResponse({"success": False, "message": told}, 400)
        if path == "/update_weights_from_tensor":
            assert body.keys() == {"serialized_named_tensors", "flush_cache", "weight_version"}
            (pickled,) = body["serialized_named_tensors"]
            self._take(dict(pickle.loads(b64decode(pickled))))
            self.weight_version = body["weight_version"]
        else:
            self._updating = path == "/begin_weight_update"
        return JSONResponse({"success": True, "message": "Success"})

    async def _list_base(self, request: Request) -> Response:
        _, instead = await self._begun(request)
        name = self._listed_name
        card = {"id": name, "root": name, "max_model_len": self.set.max_model_len}
        return instead or JSONResponse({"object": "list", "data": [card]})

    async def _load_here(self, request: Request) -> Response:
        if not self.set.updates:
            return JSONResponse({"detail": "Not Found"}, 404)
        name = (await request.json())["lora_name"]
        if name in self.models:
            self.asked.append((request.url.path, await request.json()))
            return self._updated(f"LoRA with name {name} already exists. Loaded LoRAs: {name}")
        answer = await super()._load(request)
        return self._updated("" if answer.status_code == 200 else bytes(answer.body).decode())

    async def _unload_here(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        answer = await super()._unload(request)
        unknown = f"LoRA with name {name} does not exist. Loaded LoRAs: {self.adapters}"
        return self._updated("" if answer.status_code == 200 else unknown)

    def _updated(self, error: str) -> Response:
        loaded = {name: self.models[name].root for name in self.adapters}
        told = {"success": not error, "error_message": error, "loaded_adapters": loaded}
        return JSONResponse(told, 400 if error else 200)

    async def _generate(self, request: Request) -> Response:
        body, instead = await self._begun(request)
        if instead is not None:
            return instead
        sampling, name = body["sampling_params"], body["lora_path"] or self.set.name
        assert sampling.keys() == SAMPLING
        if name not in self.models:
            told = f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: {self.adapters}."
            return JSONResponse({"error": {"message": told}}, 400)
        asked = [
            {
                **sampling,
                "prompt": prompt,
                "seed": number,
                "max_tokens": sampling["max_new_tokens"],
                "min_tokens": sampling["min_new_tokens"],
                "stop_token_ids": [] if sampling["ignore_eos"] else sampling["stop_token_ids"],
                "top_k": max(sampling["top_k"], 0),
                "logprobs": body["top_logprobs_num"],
                "prompt_logprobs": body["top_logprobs_num"]
                if body["logprob_start_len"] == 0
                else None,
                "return_tokens_as_token_ids": True,
                "return_token_ids": True,
            }
            for prompt in body["input_ids"]
            for number in range(sampling["n"])
        ]
        choices = await asyncio.gather(*(self._choice(self.models[name], one) for one in asked))
        entries = [entry(choice) for choice in choices]
        return JSONResponse(
            entries if self.spoil is None else self.spoil({"entries": entries})["entries"]
        )


def entry(choice: Body) -> Body:
    """A completion in the form of /generate, made from one in vLLM's form."""
    ids, told, prompt = choice["token_ids"], choice["logprobs"], choice["prompt_logprobs"]
    prompt_ids = choice["prompt_token_ids"]
    reason = {"type": choice["finish_reason"], "matched": choice["stop_reason"]}
    if reason["type"] == "length":
        reason = {"type": "length", "length": len(ids)}
    meta: Body = {
        "finish_reason": reason,
        "output_token_logprobs": triples(zip(told["token_logprobs"], ids, strict=True)),
        "output_top_logprobs": [
            triples((value, int(key.removeprefix("token_id:"))) for key, value in each.items())
            for each in told["top_logprobs"]
        ],
    }
    if prompt is not None:
        found = [
            each or {str(id): {"logprob": None}}
            for id, each in zip(prompt_ids, prompt, strict=True)
        ]
        meta["input_token_logprobs"] = triples(
            (each[str(id)]["logprob"], id) for id, each in zip(prompt_ids, found, strict=True)
        )
        meta["input_top_logprobs"] = [None] + [
            triples((value["logprob"], int(key)) for key, value in each.items())
            for each in found[1:]
        ]
    return {"text": choice["text"], "output_ids": ids, "meta_info": meta}


def triples(pairs: Any) -> list[list[Any]]:
    """Log-probability, token, and its text, which is null unless the request wants texts."""
    return [[value, token, None] for value, token in pairs]
