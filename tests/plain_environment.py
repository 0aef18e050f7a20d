"""An environment of the standard library alone, for tests: how it plays, or misbehaves, is the example's column `does`.

It runs as a bridge does: `python plain_environment.py SOCKET`. It asks the policy through plain HTTP.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

BRIDGES = Path(__file__).parents[1] / "groupwise" / "tasks" / "external" / "bridges"
sys.path.insert(0, str(BRIDGES))

import groupwise_bridge  # pyright: ignore[reportMissingImports]  # noqa: E402 — found in the folder above


class Letters:
    """An environment of two turns whose reward is the share of letters `a`."""

    def open(
        self, protocol: int, name: str, args: dict[str, Any], eval_args: Any
    ) -> dict[str, Any]:
        if name == "cannot":
            raise ValueError("no such game")
        self._args = args
        return {"library": "plain 1.0", "scores_groups": "scores" in args}

    def examples(self, split: str, offset: int, limit: int) -> dict[str, Any]:
        count = 12 if split == "train" else 0
        rows = [
            {
                "prompt": [{"role": "user", "content": f"say {n}"}],
                "columns": {"does": "play", "example": n},
            }
            for n in range(count)
        ]
        return {"examples": rows[offset : offset + limit], "more": offset + limit < count}

    async def rollout(self, call: dict[str, Any]) -> dict[str, Any]:
        return await getattr(self, call["example"]["columns"]["does"])(call)

    async def score(self, rollouts: list[str]) -> dict[str, Any]:
        if self._args["scores"] == "badly":
            raise RuntimeError("the judge is asleep")
        places = range(len(rollouts))
        return {"answers": [{"rewards": [{"name": "place", "value": place}]} for place in places]}

    async def close(self) -> None:
        pass

    async def play(self, call: dict[str, Any]) -> dict[str, Any]:
        messages = list(call["example"]["prompt"])
        ids, text = [], ""
        for _ in range(2):
            answer = await asyncio.to_thread(chat, call, messages)
            ids.append(answer["id"])
            reply = answer["choices"][0]["message"]["content"]
            text += reply
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": "more"},
            ]
        share = text.count("a") / max(len(text), 1)
        rewards = [
            {"name": "letters", "value": share, "weight": 2.0},
            {"name": "first", "value": 0.5, "completion": ids[0]},
        ]
        return {
            "rewards": rewards,
            "metrics": {"length": len(text)},
            "stopped": "two turns",
            "notes": {"seen": text},
        }

    async def last_teaches(self, call: dict[str, Any]) -> dict[str, Any]:
        answers = [
            await asyncio.to_thread(chat, call, [{"role": "user", "content": word}])
            for word in ("one", "two")
        ]
        return {"rewards": [{"name": "r", "value": 1.0}], "completions": [answers[-1]["id"]]}

    async def sessions(self, call: dict[str, Any]) -> dict[str, Any]:
        for seat in ("left", "right"):
            await asyncio.to_thread(
                chat, call, [{"role": "user", "content": seat}], {"X-Session-ID": seat}
            )
        return {"rewards": [{"name": "r", "value": 1.0}], "sessions": ["right"]}

    async def endless(self, call: dict[str, Any]) -> dict[str, Any]:
        for _ in range(1000):
            await asyncio.to_thread(chat, call, [{"role": "user", "content": "again"}])
        return {}

    async def endless_but_scored(self, call: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self.endless(call)
        except urllib.error.HTTPError:
            return {"rewards": [{"name": "r", "value": 1.0}]}

    async def sleeps(self, call: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(1000)
        return {}

    async def hangs(self, call: dict[str, Any]) -> dict[str, Any]:
        time.sleep(1000)  # noqa: ASYNC251 — it holds up all others of its process
        return {}

    async def dies(self, call: dict[str, Any]) -> dict[str, Any]:
        print("about to die", flush=True)
        os._exit(7)

    async def raises(self, call: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("the board fell over")

    async def lies_about_ids(self, call: dict[str, Any]) -> dict[str, Any]:
        await asyncio.to_thread(chat, call, [{"role": "user", "content": "x"}])
        return {"rewards": [{"name": "r", "value": 9.0}], "completions": ["chatcmpl-of-another"]}

    async def lies_about_numbers(self, call: dict[str, Any]) -> dict[str, Any]:
        await asyncio.to_thread(chat, call, [{"role": "user", "content": "x"}])
        return {"rewards": [{"name": "r", "value": "a million"}]}

    async def lies_about_infinity(self, call: dict[str, Any]) -> dict[str, Any]:
        await asyncio.to_thread(chat, call, [{"role": "user", "content": "x"}])
        return {"rewards": [{"name": "r", "value": float("nan")}]}

    async def quotes_an_encyclopedia(self, call: dict[str, Any]) -> dict[str, Any]:
        await asyncio.to_thread(chat, call, [{"role": "user", "content": "x" * 10_000_000}])
        return {}

    async def floods(self, call: dict[str, Any]) -> dict[str, Any]:
        for stream in (sys.stdout, sys.stderr):
            stream.write('{"id": 0, "result": {}}\n' * 200_000)
            stream.flush()
        return await self.play(call)

    async def never_asks(self, call: dict[str, Any]) -> dict[str, Any]:
        return {"rewards": [{"name": "r", "value": 1.0}]}

    async def babbles(self, call: dict[str, Any]) -> dict[str, Any]:
        for descriptor in range(3, 64):  # the socket is one of these
            try:
                os.write(descriptor, b"no json at all\n")
            except OSError:
                continue
        return {}


def chat(
    call: dict[str, Any], messages: Any, headers: dict[str, str] | None = None
) -> dict[str, Any]:
    """Ask the policy."""
    body = json.dumps(
        {"model": "any", "messages": messages, "temperature": 0.1, "strange": 1}
    ).encode()
    request = urllib.request.Request(
        f"{call['base_url']}/chat/completions",
        body,
        {"Content-Type": "application/json", **(headers or {})},
    )
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


if __name__ == "__main__":
    groupwise_bridge.serve(Letters())
