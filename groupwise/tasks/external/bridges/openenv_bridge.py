"""Plays environments of OpenEnv: reset and steps over a WebSocket, in a Python that has the package openenv.

`name` is the address of a server (`http://127.0.0.1:8000`), or an ASGI application of an installed package
(`echo_env.server.app:app`), which is then started here on a free port of loopback. `args`:

    instructions    what the policy is told first, before the observation
    action          the field of an action that gets the policy's text; `json`: its text is the action as JSON; `tools`: it calls the
                    environment's tools; null: what the server's schema suggests
    observation     the field of an observation that the policy is told; null: all that are not empty
    episodes        examples by seed; every tenth is held out
    sessions        attempts at once; a server of OpenEnv takes one unless it was written for more
    reset           further arguments of reset

An attempt ends when the environment is done or, with tools, at a turn that calls none. Rewards of all steps add up.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import importlib.metadata
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import groupwise_bridge

KNOWN = {"instructions", "action", "observation", "episodes", "sessions", "reset"}
EPISODES, HELD_OUT_EVERY = 1000, 10
START_SECONDS = 60.0
NO_CONTENT = ("reward", "done", "metadata")
"""Fields of an observation that tell the policy nothing."""


class OpenEnv:
    """One server."""

    def open(
        self, protocol: int, name: str, args: dict[str, Any], eval_args: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Start the server if it is an application, and see that it answers."""
        if unknown := {*args, *(eval_args or {})} - KNOWN:
            raise ValueError(f"args has {sorted(unknown)}; known are {', '.join(sorted(KNOWN))}")
        self._args = {"train": args, "eval": args if eval_args is None else eval_args}
        self._has_eval_args = eval_args is not None
        self._server: subprocess.Popen[bytes] | None = None
        self._sessions = asyncio.Semaphore(args.get("sessions", 1))
        self._url = name if "://" in name else self._start(name)
        self._action = args.get("action") or _suggested_action(_schema(self._url, self._server))
        version = importlib.metadata.version("openenv")
        return {"library": f"openenv {version}", "notes": [f"actions: {self._action}"]}

    def examples(self, split: str, offset: int, limit: int) -> dict[str, Any]:
        """One for each seed."""
        args = self._args[split]
        seeds = [
            seed
            for seed in range(args.get("episodes", EPISODES))
            if self._has_eval_args
            or (seed % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == (split == "eval")
        ]
        prompt = [{"role": "user", "content": args.get("instructions") or "Play."}]
        found = [
            {"prompt": prompt, "columns": {"episode_seed": seed, "split": split}}
            for seed in seeds[offset : offset + limit]
        ]
        return {"examples": found, "more": offset + limit < len(seeds)}

    async def rollout(self, call: dict[str, Any]) -> dict[str, Any]:
        """One episode."""
        from openenv.core.generic_client import GenericEnvClient

        async with self._sessions, GenericEnvClient(base_url=self._url) as client:
            return await self._play(client, call)

    async def close(self) -> None:
        """End the server that was started here."""
        if self._server is not None:
            self._server.kill()

    async def _play(self, client: Any, call: dict[str, Any]) -> dict[str, Any]:
        columns = call["example"]["columns"]
        args = self._args[columns["split"]]
        result = await client.reset(seed=columns["episode_seed"], **args.get("reset", {}))
        tools = await self._tools(client) if self._action == "tools" else None
        shown = self._observation_text(result.observation, args)
        told = "\n\n".join(filter(None, (args.get("instructions"), shown))) or "Begin."
        messages: list[dict[str, Any]] = [{"role": "user", "content": told}]
        total, steps, stopped = float(result.reward or 0.0), 0, "done"
        while not result.done:
            try:
                _, message = await groupwise_bridge.chat(call, messages, tools)
            except groupwise_bridge.Refused:
                stopped = "cut off"
                break
            messages.append(message)
            actions, answers = self._actions(message)
            if not actions and not answers:
                stopped = "no call"
                break
            for action, answer in actions:
                result = await client.step(action)
                total += float(result.reward or 0.0)
                steps += 1
                answers.append(
                    {**answer, "content": self._observation_text(result.observation, args)}
                )
                if result.done:
                    break
            messages += answers
        return {
            "rewards": [{"name": "environment", "value": total}],
            "metrics": {"steps": steps},
            "truncated": stopped == "cut off",
            "stopped": stopped,
        }

    def _actions(
        self, message: dict[str, Any]
    ) -> tuple[list[tuple[dict[str, Any], dict[str, Any]]], list[dict[str, Any]]]:
        """The actions of a message, each with the beginning of its answer; and answers to what is not an action."""
        text = message.get("content") or ""
        if self._action == "tools":
            return [
                (
                    {
                        "type": "call_tool",
                        "tool_name": made["function"]["name"],
                        "arguments": json.loads(made["function"]["arguments"]),
                    },
                    {"role": "tool", "tool_call_id": made["id"]},
                )
                for made in message.get("tool_calls") or ()
            ], []
        if self._action != "json":
            return [({self._action: text}, {"role": "user"})], []
        try:
            action = json.loads(text[text.index("{") : text.rindex("}") + 1])
        except ValueError:
            return [], [{"role": "user", "content": "Answer with one JSON object, the action."}]
        return [(action, {"role": "user"})], []

    async def _tools(self, client: Any) -> list[dict[str, Any]]:
        listed = (await client.step({"type": "list_tools"})).observation["tools"]
        return [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description") or "",
                    "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
                },
            }
            for tool in listed
        ]

    def _observation_text(self, observation: dict[str, Any], args: dict[str, Any]) -> str:
        """What the policy is told of an observation."""
        field = args.get("observation")
        result = observation.get("result")
        if field is None and isinstance(result, dict) and isinstance(result.get("content"), list):
            return "\n".join(str(part.get("text", part)) for part in result["content"])  # of a tool
        if field is not None:
            return _as_text(observation.get(field))
        full = {
            key: value
            for key, value in observation.items()
            if key not in NO_CONTENT and value not in (None, "", [], {})
        }
        return _as_text(next(iter(full.values())) if len(full) == 1 else full or "")

    def _start(self, application: str) -> str:
        """Start an application; it ends with this process, whose group and marks it inherits."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        command = [sys.executable, "-m", "uvicorn", application, "--host", "127.0.0.1"]
        self._server = subprocess.Popen([*command, "--port", str(port), "--log-level", "warning"])
        return f"http://127.0.0.1:{port}"


def _schema(url: str, server: subprocess.Popen[bytes] | None) -> dict[str, Any]:
    """The schema of the server's actions, as soon as it answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with opener.open(f"{url.rstrip('/')}/schema", timeout=10) as answer:
                return json.load(answer).get("action") or {}
        except urllib.error.HTTPError:
            return {}  # it answers, and has no schema
        except OSError as error:
            if server is None or server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no server of OpenEnv answers at {url}: {error}") from None
            time.sleep(0.1)


def _suggested_action(schema: dict[str, Any]) -> str:
    """How the policy acts, by the schema of actions."""
    fields = schema.get("properties", {})
    if "tool_name" in fields:
        return "tools"
    texts = [name for name in schema.get("required", []) if fields[name].get("type") == "string"]
    return texts[0] if texts == schema.get("required") and len(texts) == 1 else "json"


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    groupwise_bridge.serve(OpenEnv())
