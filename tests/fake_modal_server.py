"""A server that Modal's own client speaks to: it takes what is deployed and called, keeps it to be looked at, and answers from a table.

It runs nothing. What Modal makes of the messages is not known here; that our client sends those that are meant is.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpclib
import grpclib.const
import grpclib.server
from google.protobuf.empty_pb2 import Empty
from modal._serialization import deserialize, serialize
from modal_proto import api_grpc, api_pb2

from tests.ports import free_port

UNFINISHED = object()
"""The call has no result yet."""
EXPIRED = object()
"""Modal has forgotten the call."""


@dataclass
class Server:
    """The server's state, and the messages that it got."""

    asked: list[tuple[str, Any]] = field(default_factory=list)
    functions: dict[str, Any] = field(default_factory=dict)
    """The created functions, by `app/name`."""
    results: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """The result of each call, or one of the constants above."""
    answers: Callable[..., Callable[[], Any]] = lambda *_: lambda: UNFINISHED
    """Computes the result of a call from the function's name and its arguments."""
    says: str = ""
    """A gRPC status to send instead of an answer."""
    url: str = ""
    names: list[str] = field(default_factory=list)
    """Everything that has an id; an id is one or two letters, a dash, and the index in this list."""

    def of(self, method: str) -> list[Any]:
        """The messages of one method."""
        return [message for name, message in self.asked if name == method]

    def identity(self, kind: str, name: str) -> str:
        """The id of a name, the same each time."""
        if name not in self.names:
            self.names.append(name)
        return f"{kind}-{self.names.index(name)}"

    def name(self, identity: str) -> str:
        """The name that has this id."""
        return self.names[int(identity.partition("-")[2])]

    # --- methods ----------------------------------------------------------------------------------

    def EnvironmentGetOrCreate(self, _: Any) -> Any:
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06", webhook_suffix="")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    def AppCreate(self, message: Any) -> Any:
        return api_pb2.AppCreateResponse(app_id=self.identity("ap", message.description))

    def VolumeGetOrCreate(self, message: Any) -> Any:
        metadata = api_pb2.VolumeMetadata(version=message.version, name=message.deployment_name)
        return api_pb2.VolumeGetOrCreateResponse(
            volume_id=self.identity("vo", message.deployment_name),
            version=message.version,
            metadata=metadata,
        )

    def SecretGetOrCreate(self, _: Any) -> Any:
        return api_pb2.SecretGetOrCreateResponse(secret_id=f"st-{len(self.asked)}")

    def MountGetOrCreate(self, message: Any) -> Any:
        return api_pb2.MountGetOrCreateResponse(mount_id=f"mo-{len(self.asked)}")

    def ImageGetOrCreate(self, _: Any) -> Any:
        done = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        return api_pb2.ImageGetOrCreateResponse(image_id=f"im-{len(self.asked)}", result=done)

    def FunctionPrecreate(self, message: Any) -> Any:
        identity = self.identity("fu", f"{self.name(message.app_id)}/{message.function_name}")
        return api_pb2.FunctionPrecreateResponse(
            function_id=identity, handle_metadata=_handle(message.function_name)
        )

    def FunctionCreate(self, message: Any) -> Any:
        found, app = message.function, self.name(message.app_id)
        name = f"{app}/{found.function_name}"
        self.functions[name] = found
        identity, handle = self.identity("fu", name), _handle(found.function_name)
        return api_pb2.FunctionCreateResponse(
            function_id=identity, function=found, handle_metadata=handle, function_data=_data(found)
        )

    def FunctionGet(self, message: Any) -> Any:
        name = f"{message.app_name}/{message.object_tag}"
        if name not in self.functions:
            raise grpclib.GRPCError(grpclib.const.Status.NOT_FOUND, f"no {name}")
        return api_pb2.FunctionGetResponse(
            function_id=self.identity("fu", name),
            handle_metadata=_handle(message.object_tag),
            function=_data(self.functions[name]),
        )

    def FunctionBindParams(self, message: Any) -> Any:
        bound = self.identity("fu", f"{self.name(message.function_id)} bound {len(self.asked)}")
        return api_pb2.FunctionBindParamsResponse(
            bound_function_id=bound, handle_metadata=_handle("work")
        )

    def FunctionMap(self, message: Any) -> Any:
        call = f"fc-{len(self.asked)}"
        [item] = message.pipelined_inputs
        words, _ = deserialize(item.input.args, None)
        self.results[call] = self.answers(self.name(message.function_id), *words)
        taken = api_pb2.FunctionPutInputsResponseItem(idx=0, input_id=f"in-{call}")
        return api_pb2.FunctionMapResponse(function_call_id=call, pipelined_inputs=[taken])

    def FunctionGetOutputs(self, message: Any) -> Any:
        call = message.function_call_id
        said = self.results[call]()
        if said is UNFINISHED:
            return api_pb2.FunctionGetOutputsResponse(num_unfinished_inputs=1)
        if said is EXPIRED:
            return api_pb2.FunctionGetOutputsResponse(num_unfinished_inputs=0)
        succeeded = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
        result = said
        if not isinstance(said, api_pb2.GenericResult):
            result = api_pb2.GenericResult(status=succeeded, data=serialize(said))
        item = api_pb2.FunctionGetOutputsItem(
            result=result, idx=0, data_format=api_pb2.DATA_FORMAT_PICKLE
        )
        return api_pb2.FunctionGetOutputsResponse(outputs=[item], num_unfinished_inputs=0)

    def FunctionCallCancel(self, message: Any) -> Any:
        self.results[message.function_call_id] = lambda: EXPIRED
        return Empty()


ALWAYS = {
    "ClientHello": api_pb2.ClientHelloResponse(), "AuthTokenGet": api_pb2.AuthTokenGetResponse(token=""),
    "AppGetByDeploymentName": api_pb2.AppGetByDeploymentNameResponse(), "AppHeartbeat": Empty(), "AppClientDisconnect": Empty(),
    "AppPublish": api_pb2.AppPublishResponse(url="http://127.0.0.1/app"),
    "MountBatchedCheckExistence": api_pb2.MountBatchedCheckExistenceResponse(),
    "WorkspaceNameLookup": api_pb2.WorkspaceNameLookupResponse(username="me"),
    "WorkspaceBillingRates": api_pb2.WorkspaceBillingRatesResponse(rates={"gpu_hour_cost_h100": "3.95", "cpu_hour_cost": "0.0473"}),
    "MountPutFile": api_pb2.MountPutFileResponse(exists=True),
}  # fmt: skip
"""Answers that do not depend on the request."""


def _data(function: Any) -> Any:
    ranked = api_pb2.FunctionData.RankedFunction(rank=0, function=function)
    return api_pb2.FunctionData(ranked_functions=[ranked])


def _handle(name: str) -> Any:
    return api_pb2.FunctionHandleMetadata(
        function_name=name,
        function_type=api_pb2.Function.FUNCTION_TYPE_FUNCTION,
        supported_input_formats=[api_pb2.DATA_FORMAT_PICKLE],
    )


def _servicer(server: Server) -> api_grpc.ModalClientBase:
    def of(name: str) -> Callable[..., Any]:
        async def method(_: Any, stream: Any) -> None:
            message = await stream.recv_message()
            server.asked.append((name, message))
            if server.says:
                raise grpclib.GRPCError(grpclib.const.Status[server.says], "refused")
            if name in ALWAYS:
                await stream.send_message(ALWAYS[name])
            elif handler := getattr(server, name, None):
                await stream.send_message(handler(message))
            else:
                raise grpclib.GRPCError(grpclib.const.Status.UNIMPLEMENTED, f"no {name} here")

        return method

    names = api_grpc.ModalClientBase.__abstractmethods__
    return type("Servicer", (api_grpc.ModalClientBase,), {name: of(name) for name in names})()


@asynccontextmanager
async def modal_server() -> AsyncIterator[Server]:
    """Serve on a port of this machine."""
    found = Server()
    running = grpclib.server.Server([_servicer(found)])
    port = free_port()
    await running.start("127.0.0.1", port)
    found.url = f"http://127.0.0.1:{port}"
    try:
        yield found
    finally:
        running.close()
        await asyncio.wait_for(running.wait_closed(), 10)
