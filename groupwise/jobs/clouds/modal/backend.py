"""Modal as a backend: a machine whose disk is a Modal volume, and whose jobs are started by Modal calls, each with its own GPU.

`place_options` of an order: gpu (Modal's name for it), timeout (seconds of a call), image (name, python, and files: its entries in the blob
store).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from groupwise.core.errors import UsageError
from groupwise.core.terminal.quantities import counted
from groupwise.jobs.clouds.backend import Capabilities, Cost, Handle, Order, Plan
from groupwise.jobs.clouds.machine import MachineBackend
from groupwise.jobs.clouds.modal.api import (
    MAX_SECONDS,
    NAME,
    NAMED,
    SPARE_SECONDS,
    Call,
    Image,
    app_of,
)
from groupwise.jobs.clouds.modal.runner import ModalRunner
from groupwise.jobs.hosts.driver import Scheduler
from groupwise.jobs.hosts.files import BlobStore
from groupwise.jobs.hosts.spec import FileEntry

ENVIRONMENTS = "/opt/groupwise/environments"
"""The folder in images that holds the jobs' Python environments."""
GPU_RATE = "gpu_hour_cost_"
"""What the names of GPUs begin with in Modal's list of rates."""


class ModalBackend(MachineBackend):
    """A `Backend` that runs jobs at Modal."""

    capabilities = Capabilities(paid=True)

    def __init__(
        self,
        name: str,
        runner: ModalRunner,
        where: str,
        *,
        spare: float = SPARE_SECONDS,
        every: float = 5.0,
    ) -> None:
        """`where`: description of the place for messages. `spare` and `every` as in `Call`."""
        super().__init__(name, runner, where)
        self._modal, self._spare, self._every = runner, spare, every

    async def plan(self, order: Order) -> Plan:
        """See `Backend.plan`. It works without a Modal token; with a token, the only request to Modal is for its owner."""
        order.check()
        call = self._modal_call(order)
        files = {entry.sha256: entry.size for entry in order.spec.files.values()}
        with self._cloud_errors():
            owner = await self._modal.api.workspace()
            price = await self._price_per_hour(order)
        token = (
            "there is no token of Modal here, which launching needs: `modal token new` gets one"
            if owner is None
            else f"as {owner}"
        )
        image = order.place_options.get("image")
        image_step = (
            f"have Modal make the image of app {call.app}, once" if image else "take a plain image"
        )
        secrets = " and ".join(
            f"{', '.join(variables)} of {name}" for name, variables in call.named.items()
        )
        secrets_text = f", with {secrets} of its workspace" if secrets else ""
        calls = math.ceil(call.limit / (call.timeout - call.spare)) if call.limit else 1
        continuation = (
            f", and gone on with by up to {calls - 1} more, from its checkpoints"
            if calls > 1
            else ""
        )
        steps = (
            token,
            image_step,
            f"send what it lacks of {counted(len(files), 'file')} ({counted(sum(files.values()), 'byte')}) to its volume",
            f"spawn a call with {call.gpu or 'no GPU'}{secrets_text}, ended by Modal after {call.timeout / 3600:.3g} h{continuation}",
            "the price is that of the GPUs alone, by Modal's rates for this workspace"
            if price is not None or call.gpu is None
            else f"what {call.gpu} costs is not known: that takes a token which may ask for the rates of its workspace",
        )
        return Plan(self._where, steps, order.spec.arguments, price, paid=True)

    async def submit(self, order: Order, store: BlobStore) -> Handle:
        """See `Backend.submit`."""
        order.check()
        with self._cloud_errors():
            await self._modal.api.expect_secrets(order.place_options.get(NAMED) or {})
            await self._deploy(order, store)
        return await super().submit(order, store)

    async def resume(self, name: str, secrets: Mapping[str, str], store: BlobStore) -> Handle:
        """See `Backend.resume`."""
        handle = await self.find(name)
        if handle is not None:
            with self._cloud_errors():
                await self._deploy(await self.order(handle), store)
        return await super().resume(name, secrets, store)

    async def cost(self, handle: Handle) -> Cost | None:
        """See `Priced.cost`: an estimate from the duration of the attempts and the present rates."""
        order = await self.order(handle)
        with self._cloud_errors():
            price = await self._price_per_hour(order)
        if price is None:
            return None
        attempts = await self._started_attempts(handle.name)
        durations = {
            attempt.epoch: attempt.exit.seconds for attempt in attempts if attempt.exit is not None
        }
        seconds = sum(filter(None, durations.values()))
        unknown = sorted({attempt.epoch for attempt in attempts} - durations.keys())
        uncounted = (
            f"; attempt {', '.join(map(str, unknown))} is not counted, since its end is not known"
            if unknown
            else ""
        )
        return Cost(
            round(price * seconds / 3600, 2),
            f"{seconds:.0f} s of {max(1, order.gpus)} {order.place_options['gpu']} at the rates of now, from the first call's "
            f"beginning to each attempt's end, without processors and memory{uncounted}; Modal's bill is what counts",
        )

    async def _price_per_hour(self, order: Order) -> float | None:
        """Dollars an hour for the order's GPUs; None if it has none, or if Modal does not say. Raises UsageError for an unknown GPU."""
        gpu = order.place_options.get("gpu")
        rates = None if gpu is None else await self._modal.api.rates()
        return None if gpu is None or rates is None else gpu_rate(rates, gpu) * max(1, order.gpus)

    async def _deploy(self, order: Order, store: BlobStore) -> None:
        """Have Modal build the order's image if Modal does not have it yet."""
        image: Mapping[str, Any] | None = order.place_options.get("image")
        if image is None or await self._modal.api.has_app(app := app_of(image["name"])):
            return
        entries = {path: FileEntry(*entry) for path, entry in image["files"].items()}
        if store.missing([entry.sha256 for entry in entries.values()]):
            raise UsageError(
                f"the app {app} is not at Modal any more, and this machine does not have what its image is made of: resume the job from "
                "the machine that it was launched from, or launch it under another name."
            )
        files = {path: store.read(entry.sha256) for path, entry in entries.items()}
        await self._modal.api.deploy(Image(image["name"], image["python"], files))

    async def _scheduler(self, order: Order) -> Scheduler:
        """The call, which `ModalRunner.launch` spawns for the attempt."""
        return Scheduler(NAME, (json.dumps(self._modal_call(order).document()),))

    def _modal_call(self, order: Order) -> Call:
        """The Modal call for this job; `ModalRunner` adds the attempt's number. Raises UsageError if the timeout is out of range."""
        place_options, image = order.place_options, order.place_options.get("image")
        gpu, gpus = place_options.get("gpu"), (order.gpus or 1) if place_options.get("gpu") else 0
        timeout = int(place_options.get("timeout") or MAX_SECONDS)
        if not self._spare < timeout <= MAX_SECONDS:
            raise UsageError(
                f"a time-out of {timeout} s: a call of Modal has more than {self._spare:g} s, which are kept for saving, and at most "
                f"{MAX_SECONDS} s, 24 hours. A job may take longer: --time-limit."
            )
        limit, usable_seconds = order.spec.limits.time_seconds, timeout - self._spare
        if limit is not None and limit <= timeout:  # one call suffices, including the time to save
            limit = min(limit, usable_seconds)
            timeout = min(timeout, math.ceil(limit + self._spare))
        return Call(
            order.name,
            0,
            app=app_of(image["name"]) if image else "",
            gpu=f"{gpu}:{gpus}" if gpus > 1 else gpu,
            gpus=gpus,
            timeout=timeout,
            spare=self._spare,
            limit=limit,
            python=f"{ENVIRONMENTS}/{image['name']}/bin/python" if image else None,
            every=self._every,
            named=order.place_options.get(NAMED) or {},
        )


def gpu_rate(rates: Mapping[str, float], gpu: str) -> float:
    """Dollars an hour for one GPU, by the workspace's rates. Raises UsageError if they do not list it.

    The list has a10g, a100_40gb, a100_80gb, rtx6000 for what functions name A10, A100, A100-80GB, RTX-PRO-6000; `H100!` and `B200+` say
    which others Modal may give instead, at the same price."""
    listed = {
        name.removeprefix(GPU_RATE): rate
        for name, rate in rates.items()
        if name.startswith(GPU_RATE)
    }
    name = gpu.lower().rstrip("!+").replace("-", "_").replace("rtx_pro_", "rtx")
    matching = [
        rate for key, rate in listed.items() if re.fullmatch(rf"{re.escape(name)}(g|_\d+gb)?", key)
    ]
    if not matching:
        names = ", ".join(key.upper().replace("_", "-") for key in listed)
        raise UsageError(f"--gpu-model {gpu}: Modal's list of rates has {names}.")
    return min(matching)
