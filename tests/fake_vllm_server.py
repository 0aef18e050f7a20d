"""A server that answers as vLLM does, with the tiny model: real HTTP, adapters that really act, tokens that are really drawn.

    with VllmServer() as server:
        Endpoint(server.url, "tiny")

Routes, fields, statuses and messages are those of `vllm serve` (0.12 to 0.33): /v1/models, /v1/completions, /v1/load_lora_adapter,
/v1/unload_lora_adapter, /tokenize, and of the developer mode those to sleep, to pause, and to take whole weights (0.30; by NCCL through
gloo, see `tests/gloo_transfer.py`). While it sleeps or pauses it refuses what would wait there, and one that sleeps cannot take weights. If
the learner is lost while it sends weights, the engine answers nothing more. As there, a stop
text counts from the token after `min_tokens` on, `logprobs` are raw unless the server is told otherwise, and an adapter that is loaded is
loaded once. `end` and `begin` start it anew at its address: without adapters. `asked` keeps what came; `interfere` may answer in its place.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import threading
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from torch.multiprocessing.reductions import rebuild_tensor
from transformers import AutoModelForCausalLM

from groupwise.core.types import GroupRequest, LogitsProcessing, SamplingParams, TopLogprobs
from groupwise.engine.models.experts import experts_of, routed_blocks, router_shape
from groupwise.engine.models.files import FULL_WEIGHTS, read_model_tensors, write_tensors
from groupwise.engine.models.lora import AdaptedModel, copy_exactly, read_adapter
from groupwise.engine.models.lora_config import CONFIG, read_lora_config
from groupwise.engine.models.tiny import tiny_model, tiny_tokenizer
from groupwise.engine.sampler.queued import DecodeLayout
from groupwise.engine.sampler.servers.local_policy import TorchPolicy
from groupwise.engine.sampler.torch_sampler import TorchSampler
from groupwise.engine.sampler.weights import ServedAdapter, ServedModel, ServedWeights
from tests.gloo_transfer import GlooWorker
from tests.ports import free_port

GPU = "GPU-of-the-tests"
DEVELOPER_ROUTES = (
    "/sleep",
    "/wake_up",
    "/pause",
    "/resume",
    "/collective_rpc",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/shutdown_weight_transfer_engine",
    "/begin_again",
)
Body = dict[str, Any]
Interference = Callable[[str, Body], Awaitable[Response | None]]
Spoil = Callable[[Body], Body]


@dataclass(frozen=True, slots=True)
class Serving:
    """A served model: the base, or an adapter over it."""

    root: str
    parent: str | None
    weights: ServedWeights
    sampler: TorchSampler


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that a server was started with."""

    name: str = "tiny"
    seed: int = 0
    """The seed of the base's weights."""
    folder: Path | None = None
    """A folder with a base in transformers' format, used instead of the tiny model."""
    logprobs_mode: str = "raw_logprobs"
    max_model_len: int = 256
    max_lora_rank: int = 16
    updates: bool = True
    """The variable VLLM_ALLOW_RUNTIME_LORA_UPDATING."""
    ignores_adapters: bool = False
    """True: it lists adapters, but serves the base for them."""
    key: str | None = None
    returns_experts: bool = False
    """The option --enable-return-routed-experts."""


class VllmServer:
    """See the module; the arguments are the fields of `Settings`."""

    def __init__(self, **settings: Any) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.set = Settings(**settings)
        self.asked: list[tuple[str, Body]] = []
        self.interfere: Interference | None = None
        self.spoil: Spoil | None = None
        """A function that changes the answer to a request for completions."""
        self.models: dict[str, Serving] = {}
        self.asleep = self.paused = self._updating = self.hangs = False
        self.weight_version: str | None = None
        self._worker: GlooWorker | None = None
        self._draws = count()
        self._tokenizer: Any = tiny_tokenizer()
        self._running: tuple[uvicorn.Server, threading.Thread, socket.socket] | None = None

    def __enter__(self) -> VllmServer:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """Start the server with the base only."""
        self._serve_base()
        listener = socket.create_server(("127.0.0.1", self.port))
        config = uvicorn.Config(
            self._app(), log_level="critical", lifespan="off", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        self._running = (server, thread, listener)

    def _serve_base(self) -> None:
        self.asleep = self.paused = self._updating = self.hangs = False
        self.weight_version, self._worker = "default", None
        folder, name = self.set.folder, self.set.name
        base: Any = (
            tiny_model(seed=self.set.seed)
            if folder is None
            else AutoModelForCausalLM.from_pretrained(folder)
        )
        self._base = base.eval()
        self._adapted: AdaptedModel | None = None
        self.models = {name: self._serving(name, None, ServedModel(self._base))}

    def renew(self, **settings: Any) -> None:
        """Behave like a newly started server with these settings, at the same address; faster than a restart if it runs."""
        self.set = Settings(**settings)
        self.interfere = self.spoil = None
        self.asked.clear()
        if self._running is None:
            self.begin()
        else:
            self._serve_base()

    def end(self) -> None:
        """Stop the server; it no longer answers. May be repeated."""
        if self._running is not None:
            server, thread, listener = self._running
            self._running = None
            server.should_exit = True
            thread.join()
            listener.close()

    def stop_soon(self) -> None:
        """Let the server end after its current answers."""
        assert self._running is not None
        self._running[0].should_exit = True

    @property
    def adapters(self) -> list[str]:
        """The names of the loaded adapters."""
        return [name for name in self.models if name != self.set.name]

    def bodies(self, path: str) -> list[Body]:
        """The bodies of the requests to a route."""
        return [body for asked, body in self.asked if asked == path]

    def _app(self) -> Starlette:
        posted = {
            "completions": self._complete,
            "load_lora_adapter": self._load,
            "unload_lora_adapter": self._unload,
        }
        routes = [Route(f"/v1/{path}", do, methods=["POST"]) for path, do in posted.items()]
        routes += [Route(path, self._obey, methods=["POST"]) for path in DEVELOPER_ROUTES]
        routes.append(Route("/tokenize", self._tokenise, methods=["POST"]))
        gets = {"v1/models": self._list, "weight_info": self._say, "get_world_size": self._say}
        routes += [Route(f"/{path}", do, methods=["GET"]) for path, do in gets.items()]
        return Starlette(routes=routes)

    def _serving(self, root: str, parent: str | None, weights: ServedWeights) -> Serving:
        layout = DecodeLayout(slots=16, key_length=self.set.max_model_len)
        return Serving(
            root, parent, weights, TorchSampler(weights, self._tokenizer, layout, native=False)
        )

    async def _begun(self, request: Request) -> tuple[Body, Response | None]:
        """The request's body, and the answer of a fault, if any, that replaces the server's."""
        sent = await request.body()
        body = json.loads(sent) if sent else {}
        path = request.url.path.removeprefix("/v1")
        self.asked.append((path, body))
        key = self.set.key
        if key and request.headers.get("Authorization") != f"Bearer {key}":
            return body, JSONResponse({"error": "Unauthorized"}, 401)
        if path.endswith("_lora_adapter") and not self.set.updates:
            return body, JSONResponse({"detail": "Not Found"}, 404)
        if self.hangs and path not in ("/models", "/begin_again"):
            await asyncio.Event().wait()
        if self.asleep and path not in ("/models", "/wake_up", "/begin_again"):
            return body, refusal(400, "The engine sleeps.")
        if self.paused and path == "/completions":
            return body, refusal(400, "The scheduler is paused.")
        return body, await self.interfere(path, body) if self.interfere else None

    async def _obey(self, request: Request) -> Response:
        """A route of the developer mode, or `/begin_again`, by which `tests/fake_vllm.py` says that it has just been started."""
        body, instead = await self._begun(request)
        path = request.url.path
        if instead is not None:
            return instead
        if path in ("/sleep", "/wake_up"):
            self.asleep = path == "/sleep"
        elif path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        elif path == "/begin_again":
            self._serve_base()
        elif path == "/shutdown_weight_transfer_engine":
            self._worker = None
        elif not self.paused:
            return refusal(500, "The weights change while completions are under way.")
        else:
            return await self._change_weights(path, body)
        return JSONResponse({"message": "done"})

    async def _change_weights(self, path: str, body: Body) -> Response:
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self._take(read_model_tensors(Path(body["kwargs"]["weights_path"])))
            self.weight_version = None  # nobody knows
        elif path == "/init_weight_transfer_engine":
            await self._join(**body["init_info"])
        elif path == "/update_weight_version":
            self.weight_version = body["new_version"]
        elif path == "/update_weights":
            if not self._updating:
                return refusal(500, "start_weight_update must be called before update_weights.")
            await self._receive(body["update_info"])
        else:
            self._updating = path == "/start_weight_update"
            self.weight_version = body.get("weight_version")
        return JSONResponse({"message": "done"})

    async def _join(
        self,
        packed: bool,
        nccl_unique_id_b64: str | None = None,
        rank_offset: int = 1,
        world_size: int = 2,
    ) -> None:
        assert not packed
        if nccl_unique_id_b64 is not None:
            identity = b64decode(nccl_unique_id_b64)
            assert (len(identity), rank_offset, world_size) == (128, 1, 2)
            self._worker = await self._collectively(GlooWorker, identity, rank_offset, world_size)

    async def _receive(self, update: Body) -> None:
        if "ipc_handles_pickled" in update:
            self._take(mapped_tensors(**update))
            return
        assert self._worker is not None
        self._take(dict(await self._collectively(list, self._worker.receive(**update))))

    async def _collectively(self, do: Callable[..., Any], *arguments: Any) -> Any:
        """Take part in a collective operation; wait for ever if the others do not."""
        try:
            return await asyncio.to_thread(do, *arguments)
        except RuntimeError:
            self.hangs = True
            await asyncio.Event().wait()

    async def _say(self, request: Request) -> Response:
        _, instead = await self._begun(request)
        return instead or JSONResponse({"weight_version": self.weight_version, "world_size": 1})

    def _take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        copy_exactly(ServedModel(self._base).tensors(), tensors, "the run")

    # --- models -----------------------------------------------------------------------------------

    async def _list(self, request: Request) -> Response:
        _, instead = await self._begun(request)
        cards = [
            {
                "id": name,
                "object": "model",
                "owned_by": "vllm",
                "root": each.root,
                "parent": each.parent,
                "max_model_len": self.set.max_model_len if each.parent is None else None,
            }
            for name, each in self.models.items()
        ]
        return instead or JSONResponse({"object": "list", "data": cards})

    async def _load(self, request: Request) -> Response:
        body, instead = await self._begun(request)
        if instead is not None:
            return instead
        name, path = body["lora_name"], body["lora_path"]
        if name in self.models:
            return refusal(
                400,
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True.",
                "InvalidUserInput",
            )
        if not (Path(path) / CONFIG).is_file():
            return refusal(
                404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError"
            )
        config = read_lora_config(Path(path))
        if config.r > self.set.max_lora_rank:
            return refusal(
                500,
                f"Call to add_lora method failed: LoRA rank {config.r} is greater than max_lora_rank {self.set.max_lora_rank}.",
                "InternalServerError",
            )
        factors = read_adapter(Path(path))
        if any(".experts.0." in each for each in factors):
            merged = ServedModel(self._merged(factors, config.lora_alpha / config.r))
            self.models[name] = self._serving(path, self.set.name, merged)
            return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")
        if self._adapted is None:
            self._adapted = AdaptedModel(self._base, config)
        weights = ServedAdapter(self._adapted, name.replace(".", "_"), config)
        if not self.set.ignores_adapters:
            weights.read(Path(path))
        self.models[name] = self._serving(path, self.set.name, weights)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    def _merged(self, factors: Mapping[str, torch.Tensor], scaling: float) -> Any:
        """The base with an adapter that has factors for each matrix of each expert."""
        assert self.set.folder is not None
        tensors = read_model_tensors(self.set.folder)
        for name in [name for name in factors if name.endswith(".lora_A.weight")]:
            product = factors[name.replace("lora_A", "lora_B")] @ factors[name]
            changed = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            tensors[changed] = tensors[changed] + scaling * product
        with TemporaryDirectory() as folder:
            self._base.config.save_pretrained(folder)
            write_tensors(tensors, Path(folder) / FULL_WEIGHTS)
            return AutoModelForCausalLM.from_pretrained(folder).eval()

    async def _unload(self, request: Request) -> Response:
        body, instead = await self._begun(request)
        if instead is not None:
            return instead
        name = body["lora_name"]
        if name not in self.adapters:
            return refusal(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        weights = self.models.pop(name).weights
        if isinstance(weights, ServedAdapter):
            weights.remove()
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _tokenise(self, request: Request) -> Response:
        body, instead = await self._begun(request)
        if instead is not None:
            return instead
        ids = self._tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])
        tokens = ids["input_ids"]
        return JSONResponse(
            {"count": len(tokens), "max_model_len": self.set.max_model_len, "tokens": tokens}
        )

    # --- completions ------------------------------------------------------------------------------

    async def _complete(self, request: Request) -> Response:
        body, instead = await self._begun(request)
        if instead is not None:
            return instead
        serving = self.models.get(body["model"])
        if serving is None:
            return refusal(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
        if body["n"] > 1 and body["temperature"] == 0:
            return refusal(400, f"n must be 1 when using greedy sampling, got {body['n']}.")
        prompt, most = max(body["prompt"], key=len), body.get("max_tokens", 16)
        longest, wanted = self.set.max_model_len, len(prompt) + most
        if wanted > longest:
            told = f"This model's maximum context length is {longest} tokens. However, you requested {wanted} tokens."
            return refusal(400, told)
        highest = max(map(max, body["prompt"]))
        if highest >= len(self._tokenizer):
            return refusal(400, f"Token id {highest} is out of vocabulary")
        seed = body.get("seed")
        asked = [
            body | {"prompt": prompt, "seed": next(self._draws) if seed is None else seed + number}
            for prompt in body["prompt"]
            for number in range(body["n"])
        ]
        choices = await asyncio.gather(*(self._choice(serving, one) for one in asked))
        numbered = [{"index": number, **choice} for number, choice in enumerate(choices)]
        answer = {
            "id": "cmpl-0",
            "object": "text_completion",
            "model": body["model"],
            "choices": numbered,
        }
        return JSONResponse(answer if self.spoil is None else self.spoil(answer))

    async def _choice(self, serving: Serving, body: Body) -> Body:
        """One completion of one prompt."""
        ids, logprobs, best = await self._drawn(serving, body)
        ids, reason, stop_reason, text = self._stopped(ids, body)
        logprobs = logprobs[: len(ids)]
        if self.set.logprobs_mode == "raw_logprobs":
            (logprobs,) = TorchPolicy(serving.weights).logprobs([(body["prompt"], ids)], (1.0,))
        as_ids = body.get("return_tokens_as_token_ids")
        tokens = [f"token_id:{id}" if as_ids else self._tokenizer.decode([id]) for id in ids]
        told = None
        if body.get("logprobs") is not None:
            told = {
                "text_offset": [0] * len(ids),
                "token_logprobs": [max(value, -9999.0) for value in logprobs],
                "tokens": tokens,
                "top_logprobs": [
                    {token: value, **{f"token_id:{id}": other for id, other in tops}}
                    for token, value, tops in zip(tokens, logprobs, best, strict=False)
                ],
            }
        with_ids = body.get("return_token_ids")
        experts = (
            self._experts(serving, [*body["prompt"], *ids]) if self.set.returns_experts else None
        )
        return {
            "routed_experts": experts,
            "text": text, "logprobs": told, "finish_reason": reason,
            "stop_reason": stop_reason, "prompt_logprobs": await self._prompt_logprobs(serving, body),
            "prompt_token_ids": body["prompt"] if with_ids else None,
            "token_ids": ids if with_ids else None,
        }  # fmt: skip

    def _experts(self, serving: Serving, tokens: list[int]) -> str:
        """The experts of all tokens but the last, as a NumPy file in base64, in uint8 as in the newest releases."""
        model = serving.weights.model
        shape = router_shape(model)
        chosen_TLK = torch.zeros(len(tokens) - 1, shape.layers, shape.top_k)

        def note(layer: int) -> Callable[..., None]:
            def hook(_: Any, given: tuple[torch.Tensor, ...]) -> None:
                chosen_TLK[:, layer] = given[1]

            return hook

        hooks = [
            next(iter(experts_of(block).values())).register_forward_pre_hook(note(layer))
            for layer, block in routed_blocks(model).items()
        ]
        with torch.inference_mode(), serving.weights.acting():
            model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False)
        for hook in hooks:
            hook.remove()
        file = BytesIO()
        numpy.save(file, chosen_TLK.to(torch.uint8).numpy())
        return b64encode(file.getvalue()).decode()

    async def _prompt_logprobs(self, serving: Serving, body: Body) -> list[Any] | None:
        """The prompt's log-probabilities in vLLM's form: at each position the prompt's token and the most probable ones, by id as text."""
        if body.get("prompt_logprobs") is None:
            return None
        prompt, count = body["prompt"], body["prompt_logprobs"]
        told = await serving.sampler.prompt_logprobs(tuple(prompt), count)
        best = told.top_logprobs or ((),) * len(told.logprobs)
        positions = [
            {str(id): {"logprob": value} for id, value in ((token, logprob), *tops)}
            for token, logprob, tops in zip(prompt[1:], told.logprobs, best, strict=True)
        ]
        return [None, *positions]

    async def _drawn(
        self, serving: Serving, body: Body
    ) -> tuple[list[int], list[float], list[TopLogprobs]]:
        form = body.get("response_format")
        changes = LogitsProcessing(
            body.get("presence_penalty", 0.0),
            body.get("frequency_penalty", 0.0),
            body.get("repetition_penalty", 1.0),
            tuple((int(token), value) for token, value in body.get("logit_bias", {}).items()),
            None if form is None else json.dumps(form["json_schema"]["schema"]),
        )
        temperature = body.get("temperature", 1.0)
        params = SamplingParams(
            max_tokens=body.get("max_tokens", 16),
            temperature=max(temperature, 0.01) if temperature else 0.0,
            stop_token_ids=tuple(self._stops(body)),
            min_tokens=body.get("min_tokens", 0),
            top_k=body.get("top_k") or None,
            top_p=None if body.get("top_p", 1.0) == 1.0 else body["top_p"],
            min_p=body.get("min_p") or None,
            processing=None if changes == LogitsProcessing() else changes,
        )
        seed = body["seed"]
        assert -(1 << 63) <= seed < 1 << 63
        top = body.get("logprobs") or 0
        asked = GroupRequest(next(self._draws), tuple(body["prompt"]), (seed,), params, top)
        torch.set_num_threads(1)
        (found,) = await serving.sampler.generate(asked)
        best = list(found.top_logprobs) or [()] * len(found.token_ids)
        return list(found.token_ids), list(found.logprobs), best

    def _stops(self, body: Body) -> list[int]:
        own = [] if body.get("ignore_eos") else [self._tokenizer.eos_token_id]
        return [*body.get("stop_token_ids", []), *own]

    def _stopped(self, ids: list[int], body: Body) -> tuple[list[int], str, int | str | None, str]:
        """Tokens, finish reason, stop reason, and the text without the stop text that ended it."""
        skip, offset = body.get("skip_special_tokens", True), 0
        text = ""
        for number in range(1, len(ids) + 1):
            before = len(text)
            text = self._tokenizer.decode(ids[:number], skip_special_tokens=skip)
            if body.get("min_tokens") and number <= body["min_tokens"]:
                offset = len(text)
                continue
            for stop in body.get("stop", []):
                start = max(0, before - len(stop) + 1)
                place = text.find(stop, start)
                if place >= 0 and place + len(stop) > max(before, offset):
                    return ids[:number], "stop", stop, text[:place]
        stopped = ids[-1] in self._stops(body)
        return ids, "stop" if stopped else "length", ids[-1] if stopped else None, text


def mapped_tensors(
    names: list[str], dtype_names: list[str], shapes: list[list[int]], ipc_handles_pickled: str
) -> dict[str, torch.Tensor]:
    """The tensors of the fields of vLLM's IPCWeightTransferUpdateInfo. On a CPU the handles hold the tensors themselves."""
    handles = pickle.loads(b64decode(ipc_handles_pickled))
    tensors: dict[str, torch.Tensor] = {
        name: rebuild_tensor(*each[GPU]) for name, each in zip(names, handles, strict=True)
    }
    assert [str(tensor.dtype) for tensor in tensors.values()] == [
        f"torch.{name}" for name in dtype_names
    ]
    assert [[*tensor.shape] for tensor in tensors.values()] == shapes
    return tensors


def refusal(status: int, message: str, kind: str = "BadRequestError") -> Response:
    """An error answer in vLLM's words."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status)
