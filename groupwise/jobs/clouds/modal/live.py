"""The real Modal, called through its own client (`pip install 'groupwise[modal]'`), with a token from ~/.modal.toml or the environment."""

from __future__ import annotations

import asyncio
import builtins
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from groupwise.core.extras import not_installed
from groupwise.jobs.clouds.modal.api import Call, Image, app_of
from groupwise.jobs.hosts.host import HostUnreachable, OutcomeUnknown, RunnerRefused

if TYPE_CHECKING:
    from modal import Client

NO_TOKEN = "there is no token of Modal here: `modal token new` gets one, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"


class LiveModal:
    """The `ModalApi` of the real Modal."""

    def __init__(self, profile: str | None = None) -> None:
        """`profile`: a profile of ~/.modal.toml; None: the active profile, or the environment variables."""
        self._profile = profile
        self._client: Client | None = None
        self._has_coordinator = False

    @cached_property
    def _token(self) -> tuple[str, str] | None:
        if find_spec("modal") is None:
            raise RunnerRefused("modal", not_installed("This", "modal", "modal"))
        from modal.config import config

        uses_profile = self._profile is not None
        identity, secret = (
            config.get(key, profile=self._profile, use_env=not uses_profile)
            for key in ("token_id", "token_secret")
        )
        return (identity, secret) if identity and secret else None

    async def workspace(self) -> str | None:
        """See `ModalApi.workspace`."""
        if find_spec("modal") is None or self._token is None:
            return None
        client = await self._open_client()
        with _host_errors("modal"):
            await client.hello.aio()  # pyright: ignore[reportUnknownMemberType]
        return f"profile {self._profile}" if self._profile else "the token of this machine"

    async def rates(self) -> Mapping[str, float] | None:
        """See `ModalApi.rates`."""
        if find_spec("modal") is None or self._token is None:
            return None
        import modal

        workspace = modal.Workspace.from_context(client=await self._open_client())
        with _host_errors("rates"):
            try:
                rates = await workspace.billing.rates.aio()
            except modal.exception.PermissionDeniedError:
                return None
        return {name: float(rate) for name, rate in rates.items()}

    async def _open_client(self) -> Client:
        if self._client is None:
            if self._token is None:
                raise RunnerRefused("modal", NO_TOKEN)
            import modal

            with _host_errors("token"):
                try:
                    self._client = await modal.Client.from_credentials.aio(*self._token)
                except modal.exception.ConnectionError as error:
                    raise HostUnreachable(str(error)) from None
        return self._client

    async def has_app(self, name: str) -> bool:
        """See `ModalApi.has_app`."""
        return await self._has_function(name, "work")

    async def _has_function(self, app: str, function: str) -> bool:
        import modal

        from groupwise.jobs.clouds.modal import app as deployed

        client = await self._open_client()
        with _host_errors("app"):
            try:
                await deployed.function(app, function, client).hydrate.aio()
            except modal.exception.NotFoundError:
                return False
        return True

    async def deploy(self, image: Image) -> None:
        """See `ModalApi.deploy`."""
        from groupwise.jobs.clouds.modal import app

        await self._deploy(lambda client: app.deploy(image, client))

    async def _deploy(self, deploy: Callable[[Client], None]) -> None:
        """Deploy in a thread, because building an image takes minutes. Modal's output goes to standard error, since results may go to
        standard output."""
        import modal

        client = await self._open_client()

        def deploy_quietly() -> None:
            with redirect_stdout(sys.stderr), modal.enable_output():
                deploy(client)

        with _host_errors("deploy"):
            await asyncio.to_thread(deploy_quietly)

    async def call_coordinator(self, verb: str, *arguments: Any) -> Any:
        """See `ModalApi.call_coordinator`."""
        from groupwise.jobs.clouds.modal import app

        if not self._has_coordinator and not await self._has_function(
            app.COORDINATOR_APP, "coordinate"
        ):
            await self._deploy(app.deploy_coordinator)
        self._has_coordinator = True
        coordinator = app.function(app.COORDINATOR_APP, "coordinate", await self._open_client())
        with _host_errors("coordinator"):
            return await coordinator.remote.aio(verb, *arguments)

    async def spawn(self, call: Call, secrets: Mapping[str, str]) -> str:
        """See `ModalApi.spawn`."""
        from groupwise.jobs.clouds.modal import app

        client = await self._open_client()
        if not call.app and not await self.has_app(app_of(app.PLAIN)):
            await self.deploy(Image(app.PLAIN, app.COORDINATOR_PYTHON))
        with _host_errors("spawn"):
            spawned = await app.configured_function(call, secrets, client).spawn.aio(
                call.document()
            )
        return str(spawned.object_id)

    async def expect_secrets(self, variables_by_secret: Mapping[str, Sequence[str]]) -> None:
        """See `ModalApi.expect_secrets`."""
        from groupwise.jobs.clouds.modal import app

        client = await self._open_client()
        with _host_errors("secret"):
            for secret in app.named_secrets(variables_by_secret, client):
                await secret.hydrate.aio()  # pyright: ignore[reportUnknownMemberType]

    async def lives(self, call: str) -> bool:
        """See `ModalApi.lives`. A network error on the way to Modal does not mean that the call has ended."""
        import modal
        from modal import exception

        function_call = modal.FunctionCall.from_id(call, client=await self._open_client())
        end_errors = (
            exception.OutputExpiredError,
            exception.FunctionTimeoutError,
            exception.RemoteError,
            exception.InternalFailure,
            exception.ExecutionError,
            exception.NotFoundError,
        )
        with _host_errors("call"):
            try:
                await function_call.get.aio(timeout=0)
            except builtins.TimeoutError:
                return True
            except end_errors:
                return False
            except exception.Error:
                raise
            except OSError as error:  # a network error: the worker itself raises no OSError
                raise OutcomeUnknown(str(error)) from None
            except (Exception, exception.InputCancellation):  # noqa: BLE001  (any error of a container that could not start)
                return False
        return False

    async def cancel(self, call: str) -> None:
        """See `ModalApi.cancel`."""
        import modal

        function_call = modal.FunctionCall.from_id(call, client=await self._open_client())
        with _host_errors("cancel"), suppress(modal.exception.NotFoundError):
            await function_call.cancel.aio()  # pyright: ignore[reportUnknownMemberType]

    async def close(self) -> None:
        """See `ModalApi.close`."""
        client, self._client = self._client, None
        if client is not None:
            await client.close.aio()


@contextmanager
def _host_errors(code: str) -> Generator[None]:
    """Turn Modal's exceptions into those of `groupwise.jobs.hosts.host`. A ConnectionError too leaves the outcome unknown: Modal raises it
    if the last of several tries of a request got no answer."""
    from modal import exception

    try:
        yield
    except exception.AuthError as error:
        raise RunnerRefused(code, f"Modal does not take the token: {error}") from None
    except (
        exception.InvalidError,
        exception.NotFoundError,
        exception.PermissionDeniedError,
        exception.ResourceExhaustedError,
        exception.ImageBuildError,
    ) as error:
        raise RunnerRefused(code, str(error)) from None
    except exception.Error as error:
        raise OutcomeUnknown(str(error)) from None
