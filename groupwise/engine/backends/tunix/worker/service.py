"""The worker's loop: one thread reads orders, one per line; the main thread executes them in order, completions of many groups together.

The process ends when its connection ends, and so with the process that started it.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import traceback
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import singledispatchmethod
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from groupwise.api.schemas.parts import (
    Discard,
    ForwardBackward,
    Generate,
    Load,
    Logprobs,
    Predictions,
    Publish,
    TrainedLogprobs,
    Update,
)
from groupwise.core import atomic_files, errors
from groupwise.core.errors import (
    CheckpointError,
    GroupwiseError,
    ModelError,
    OutOfMemoryError,
    UsageError,
)
from groupwise.engine.backends.tunix.messages import (
    ANY,
    TPU_IN_USE_ADVICE,
    Answer,
    Look,
    Open,
    Opened,
    Order,
    Restore,
    Save,
    WorkerError,
    WorkerInfo,
)
from groupwise.engine.backends.tunix.worker import families
from groupwise.engine.backends.tunix.worker.adapter import Adapted
from groupwise.engine.backends.tunix.worker.learner import Learner
from groupwise.engine.backends.tunix.worker.sampler import Sampler
from groupwise.engine.models.files import disk_errors

GATHERED = 0.003
"""Seconds for which groups are gathered before they are computed together."""


def serve(connection: socket.socket) -> None:
    """Execute the orders from the connection until it ends."""
    answers = connection.makefile("w", encoding="utf-8")
    orders: queue.Queue[Order] = queue.Queue()
    cancelled: set[int] = set()
    reader = threading.Thread(
        target=_read_orders, args=(connection, orders, cancelled), daemon=True
    )
    reader.start()
    service, waiting = Service(), list[Order]()
    while True:
        waiting = waiting or [orders.get()]
        batch, waiting = _next_batch(waiting, orders)
        batch = [order for order in batch if order.number not in cancelled]
        if batch:
            for answer in _run_orders(service, batch):
                answers.write(answer.model_dump_json() + "\n")
            answers.flush()


def _read_orders(
    connection: socket.socket, orders: queue.Queue[Order], cancelled: set[int]
) -> None:
    """Read orders until the connection ends, then end the process; if only the thread ended, nothing would notice."""
    try:
        for line in connection.makefile("r", encoding="utf-8"):
            order = Order.model_validate_json(line)
            if order.cancel is not None:
                cancelled.add(order.cancel)
            else:
                orders.put(order)
    except BaseException:  # noqa: BLE001 — printed as the worker's last output
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _next_batch(
    waiting: list[Order], orders: queue.Queue[Order]
) -> tuple[list[Order], list[Order]]:
    """The orders to execute now (the first, and directly following ones if all are completions), and the rest that was read."""
    first, *rest = waiting
    if not isinstance(first.do, Generate):
        return [first], rest
    batch = [first]
    while True:
        try:
            following = rest.pop(0) if rest else orders.get(timeout=GATHERED)
        except queue.Empty:
            return batch, rest
        if not isinstance(following.do, Generate):
            return batch, [following, *rest]
        batch.append(following)


def _run_orders(service: Service, orders: list[Order]) -> list[Answer]:
    """The answers. If orders fail together, each is executed again by itself, so one's error does not affect the others."""
    try:
        results = service.do_all([order.do for order in orders])
        return [
            Answer(number=order.number or 0, result=ANY.dump_python(result, mode="json"))
            for order, result in zip(orders, results, strict=True)
        ]
    except Exception as error:  # noqa: BLE001 — belongs to the caller
        if len(orders) > 1:
            return [answer for order in orders for answer in _run_orders(service, [order])]
        return [Answer(number=orders[0].number or 0, error=_trouble_of(error, orders[0].do))]


def _trouble_of(error: Exception, order: Any) -> WorkerError:
    if isinstance(error, GroupwiseError):
        return WorkerError(kind=type(error).__name__, message=str(error))
    if "RESOURCE_EXHAUSTED" in str(error):
        if isinstance(order, Open):
            work = "loading the model. Take a smaller one, another model.dtype, or more devices in model.mesh."
        elif isinstance(order, Generate):
            work = "generating. Lower sampler.max_num_seqs or sampler.max_completion_length."
        else:
            work = "learning. Lower training.max_tokens_per_microbatch, or set training.gradient_checkpointing."
        return WorkerError(
            kind=OutOfMemoryError.__name__,
            message=f"JAX has no memory left while {work} It said: {_first_line(error)}",
        )
    trace = "".join(traceback.format_exception(error))
    return WorkerError(kind=errors.RunError.__name__, message=f"The Tunix worker failed:\n{trace}")


@contextmanager
def _explaining_write_errors(path: Path) -> Generator[None]:
    """Turn errors of writing into StoreError."""
    with atomic_files.explaining_disk_errors(path), disk_errors(path):
        try:
            yield
        except ValueError as error:  # TensorStore's error for any failure of the system
            raise OSError(_first_line(error)) from error


@contextmanager
def _explaining_read_errors(path: Path, kind: type[GroupwiseError]) -> Generator[None]:
    """Raise an error of this kind if files are damaged."""
    try:
        yield
    except (GroupwiseError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # Orbax and TensorStore may raise anything
        raise kind(
            f"{path} is torn or cannot be read: {_first_line(error)}. Take another one, or restore it from a copy."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class Service:
    """Sampler and learner; `Open` creates them."""

    def __init__(self) -> None:
        self._sampler: Sampler | None = None
        self._learner: Learner | None = None
        self._publish_folder: Path | None = None
        self._scope = ExitStack()

    @property
    def sampler(self) -> Sampler:
        return _require_open(self._sampler)

    @property
    def learner(self) -> Learner:
        return _require_open(self._learner)

    def do_all(self, orders: list[Any]) -> list[Any]:
        """Execute orders together; several only if all are `Generate`."""
        if isinstance(orders[0], Generate):
            return list(self.sampler.generate([order.request for order in orders]))
        (order,) = orders
        return [self.do(order)]

    @singledispatchmethod
    def do(self, order: Any) -> Any:
        """Execute an order, and return its result."""
        raise AssertionError(order)

    @do.register
    def _(self, order: Look) -> WorkerInfo:
        try:
            devices = jax.devices()
        except RuntimeError as error:
            raise UsageError(
                f"JAX cannot open its devices: {error}. {TPU_IN_USE_ADVICE}"
            ) from error
        if (hosts := jax.process_count()) > 1:
            raise UsageError(
                f"JAX sees the devices of {hosts} hosts; the backend tunix computes on those of one."
            )
        return WorkerInfo(
            tunix=version("google-tunix"),
            jax=version("jax"),
            platform=devices[0].platform,
            devices=len(devices),
            device=devices[0].device_kind,
        )

    @do.register
    def _(self, order: Open) -> Opened:
        # Multiply float32 in full precision: a TPU would round it to bfloat16 first.
        exact = "highest" if order.dtype == "float32" else None
        jax.config.update("jax_default_matmul_precision", exact)
        # Tunix's layers read the current mesh.
        mesh = self._scope.enter_context(_make_mesh(order.mesh))
        model, family = families.load(Path(order.model), order.text, order.dtype, mesh)
        adapted = Adapted(model, family, order.layers, order.rank, order.alpha)
        factors = adapted.init_factors(order.seed)
        if order.start is not None:
            factors = adapted.read(Path(order.start))
        self._sampler = Sampler(adapted, factors, order.slots, order.key_length)
        self._publish_folder = Path(order.publish_folder)
        self._learner = Learner(
            adapted,
            factors,
            run=order.run,
            publish_folder=self._publish_folder,
            described=order.described,
            vocabulary=model.embedder.input_embedding.get_value().shape[0],
            longest=order.key_length,
            max_tokens=order.max_tokens,
            multiple=order.mesh[0],
            remat=order.remat,
        )
        return Opened(fingerprint=self._sampler.fingerprint)

    @do.register
    def _(self, order: Load) -> str:
        with _explaining_read_errors(Path(order.policy.path), ModelError):
            return self.sampler.load(order.policy)

    @do.register
    def _(self, order: ForwardBackward) -> Any:
        return self.learner.forward_backward(order.rows, order.loss, order.denominators)

    @do.register
    def _(self, order: TrainedLogprobs) -> Any:
        return self.learner.trained_logprobs()

    @do.register
    def _(self, order: Update) -> Any:
        return self.learner.update(order.params)

    @do.register
    def _(self, order: Discard) -> None:
        self.learner.discard()

    @do.register
    def _(self, order: Publish) -> Any:
        with _explaining_write_errors(_require_open(self._publish_folder)):
            return self.learner.publish(order.version)

    @do.register
    def _(self, order: Logprobs) -> Any:
        return self.learner.logprobs(order.rows, order.role)

    @do.register
    def _(self, order: Predictions) -> Any:
        return self.learner.predictions(order.rows)

    @do.register
    def _(self, order: Save) -> None:
        with _explaining_write_errors(Path(order.folder)):
            self.learner.save(Path(order.folder))

    @do.register
    def _(self, order: Restore) -> None:
        with _explaining_read_errors(Path(order.folder), CheckpointError):
            self.learner.load(Path(order.folder))


def _require_open(part: Any) -> Any:
    assert part is not None, "open comes first"
    return part


def _make_mesh(shape: tuple[int, int]) -> Any:
    count, available = shape[0] * shape[1], len(jax.devices())
    if count > available:
        raise UsageError(
            f"model.mesh is {list(shape)}, which are {count} devices, but JAX sees {available}: "
            f"{jax.devices()[0].device_kind}."
        )
    kinds = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(shape, ("fsdp", "tp"), kinds, devices=jax.devices()[:count])
