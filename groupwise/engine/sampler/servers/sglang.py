"""SGLang's servers, asked as vLLM's are: requests are rewritten for its route `/generate`, and answers into those of vLLM's route.

Its OpenAI routes return neither the log-probabilities of a prompt nor, in most releases, token ids; `/generate` returns both. It has
adapters loaded at the root, not below `/v1`. Two things are different there. With `ignore_eos` SGLang ignores the requested stop tokens
as well, so it is only sent where there are none. And the same seed would draw the same completion for each member of a group, so no seeds
are sent.

All weights it reads from files, and calls itself by their folder from then on; or, on the learner's own GPU, it copies them from the
learner's memory. Routes and fields as in SGLang 0.5.23.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from groupwise.api.openai_client.response_parsing import excerpt
from groupwise.core.errors import EndpointError, UsageError
from groupwise.core.types import SamplingParams
from groupwise.engine.sampler.servers.completions import TOKEN_AS_TEXT, refuse_withheld_end
from groupwise.engine.sampler.servers.probe import LocalPolicy
from groupwise.engine.sampler.servers.server_pool import Server

T = TypeVar("T")

NEVER_LOADED = "has never been loaded"
"""Part of SGLang's message for an adapter that it does not know, whose status is 400."""


@dataclass(slots=True, eq=False)
class SglangServer(Server):
    """A server of SGLang."""

    adapters_remedy: ClassVar[str] = (
        "Start SGLang with --enable-lora, --max-lora-rank and --lora-target-modules all."
    )

    weights_remedy: ClassVar[str] = (
        "Weights from files need a release of SGLang with /update_weights_from_disk, as 0.5.23"
    )
    renames_base: ClassVar[bool] = True

    @property
    def adapters_url(self) -> str:
        """See `Server.adapters_url`."""
        return self.root_url

    async def pause(self) -> None:
        """See `Server.pause`: `read_weights` waits by itself for what is under way, and holds up what comes."""

    async def resume(self) -> None:
        """See `Server.resume`."""

    async def read_weights(self, folder: str, version: str | None) -> None:
        """See `Server.read_weights`; keys and values of earlier weights are dropped."""
        body = {"model_path": folder, "weight_version": version, "flush_cache": True}
        await self.post("/update_weights_from_disk", body)

    async def map_weights(self, local_policy: LocalPolicy, version: str) -> None:
        """See `Server.map_weights`; the server has one rank, because the learner has one GPU."""
        with suppress(EndpointError):  # an update that a killed run has left open
            await self.post("/end_weight_update", {})
        await self.post("/begin_weight_update", {})
        tensors = await asyncio.to_thread(local_policy.pickled_tensors)
        body = {"serialized_named_tensors": [tensors], "flush_cache": True}
        await self.post("/update_weights_from_tensor", {**body, "weight_version": version})
        await self.post("/end_weight_update", {})

    async def weight_version(self) -> str | None:
        """See `Server.weight_version`."""
        return (await self.get("/model_info")).get("weight_version")

    def refuse(self, params: SamplingParams, end_id: int | None) -> None:
        """See `Server.refuse`."""
        if params.processing is not None:
            raise UsageError(
                "Penalties, logit_bias, response_format and tools are not supported with sampler.engine sglang: they have not been "
                "compared with this project's. Leave them out, or sample with sampler.engine torch or vllm."
            )
        refuse_withheld_end("SGLang", params, end_id)

    async def complete(self, body: Mapping[str, Any], read: Callable[[bytes], T]) -> T:
        """See `Server.complete`."""
        name = str(body["model"])

        def read_generated(answer: bytes) -> T:
            return read(completions_answer(answer, name))

        adapter = None if name == self.endpoint.model else name
        address = self.root_url + "/generate"
        try:
            return await self.client.ask(
                "POST", address, generate_body(body, adapter), read_generated, 0
            )
        except EndpointError as error:
            if error.status == 400 and NEVER_LOADED in str(error):
                error.status = 404  # as vLLM says it
            raise


def generate_body(body: Mapping[str, Any], adapter: str | None) -> dict[str, Any]:
    """The body of a POST to /generate that asks for what the `completions.request_body` does."""
    prompt_top = body.get("prompt_logprobs")
    least = body.get("min_tokens", 0)
    return {
        "input_ids": body["prompt"],
        "lora_path": adapter,
        "return_logprob": True,
        "logprob_start_len": -1 if prompt_top is None else 0,
        "top_logprobs_num": max(body["logprobs"], prompt_top or 0),
        "sampling_params": {
            "n": body["n"],
            "max_new_tokens": body["max_tokens"],
            "min_new_tokens": least,
            "temperature": body["temperature"],
            "top_p": body["top_p"],
            "top_k": body["top_k"] or -1,
            "min_p": body["min_p"],
            "stop_token_ids": body["stop_token_ids"],
            "ignore_eos": not body["stop_token_ids"],
            # Here a stop text would end a completion within its least tokens.
            "stop": [] if least else body.get("stop", []),
            "skip_special_tokens": False,
        },
    }


def completions_answer(answer: bytes, name: str) -> bytes:
    """An answer of /generate as vLLM's /v1/completions would give it. SGLang does not name the model that answers. Raises EndpointError
    for an answer of another form."""
    try:
        entries: list[Any] = json.loads(answer)
        choices = [
            {"index": index, **_read_entry(entry["meta_info"])}
            for index, entry in enumerate(entries)
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EndpointError(
            f"answered no completions as SGLang's /generate does ({type(error).__name__}: {error}): {excerpt(answer)}"
        ) from None
    return json.dumps({"model": name, "choices": choices}).encode()


def _read_entry(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a choice. Log-probabilities are triples: the value, the token's id, its text or null."""
    drawn, reason = meta["output_token_logprobs"], meta["finish_reason"]
    prompt: list[Any] = meta.get("input_token_logprobs") or []
    prompt_top: list[Any] = meta.get("input_top_logprobs") or [None] * len(prompt)
    positions = [
        {str(token): {"logprob": value} for value, token, _ in [*(best or ()), own]}
        for own, best in zip(prompt, prompt_top, strict=True)
    ]
    return {
        "finish_reason": reason["type"],
        "stop_reason": reason.get("matched"),
        "token_ids": [token for _, token, _ in drawn],
        "logprobs": {
            "token_logprobs": [value for value, _, _ in drawn],
            "top_logprobs": [
                {f"{TOKEN_AS_TEXT}{token}": value for value, token, _ in best}
                for best in meta.get("output_top_logprobs") or ()
            ],
        },
        "prompt_logprobs": positions,
    }
