"""The gRPC server of every service: health, reflection, and one gate before every method."""

import hmac
import logging
import socket
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import Histogram

from atoll.runtime.clients.base import ERROR_KEY, FENCE_KEY, MAX_WIRE_BYTES
from atoll.runtime.errors import AtollError, StaleFenceError, UnauthenticatedError, UserError

_log = logging.getLogger(__name__)

_HEALTH: Final = "/grpc.health.v1."
_REFLECTION: Final = "/grpc.reflection."
_FENCED_SERVICES: Final = (
    "/atoll.v1.Agents/",
    "/atoll.v1.Gateway/",
    "/atoll.v1.Rollout/",
    "/atoll.v1.Trainer/",
)
# Their methods that any client may call; all others belong to the coordinator.
_READ_ONLY_METHODS: Final = ("Info", "Checksums", "ComputeLogprobs", "ComputeValues", "List", "Show")
_NO_DEADLINE_S: Final = 1e9  # some servers report a missing deadline as a huge one
_MAX_DETAILS: Final = 4000  # characters; a message travels in the trailers, which hold 8 KiB

# Generic in the stubs alone, so these are strings at run time.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Check: TypeAlias = Callable[[str, "Context"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class TokenGrant:
    """A token and the methods that its holders may call; None: all of them."""

    token: str
    methods: frozenset[str] | None = None


class Fence:
    """The epoch of the coordinator that a service obeys. It only increases.

    A registered service accepts a higher epoch once its coordinator (and so the store) has confirmed it: a
    made-up epoch would lock out all coordinators. A standalone service trusts its callers.
    """

    def __init__(self, confirmed: Callable[[], Awaitable[int]] | None = None) -> None:
        """`confirmed` returns the current epoch."""
        self._epoch = 0
        self._confirmed = confirmed

    def rise(self, epoch: int) -> None:
        self._epoch = max(self._epoch, epoch)

    async def check(self, method: str, given: int) -> None:
        """Raises StaleFenceError for any epoch but the current one."""
        if given > self._epoch:
            self.rise(given if self._confirmed is None else await self._confirmed())
        if given < self._epoch:
            raise StaleFenceError(
                f"{method}: epoch {given} is over, epoch {self._epoch} has begun; another coordinator took "
                "this run over"
            )
        if given > self._epoch:
            raise StaleFenceError(
                f"{method}: epoch {given} has not begun, the coordinator says {self._epoch}: only its orders "
                "are accepted"
            )


class Server:
    """A running server. `address` is what peers connect to."""

    def __init__(self, server: grpc.aio.Server, health_servicer: Any, address: str) -> None:
        self._server = server
        self._health = health_servicer
        self.address = address

    @classmethod
    async def start(
        cls,
        service: str,
        add_to: Callable[[grpc.aio.Server], None],
        *,
        host: str,
        port: int,
        token: str,
        setting: str,
        operators: TokenGrant | None = None,
        fence: Fence | None = None,
        calls: Histogram | None = None,
    ) -> Self:
        """Serves `service` ("atoll.v1.Trainer"), whose methods `add_to` registers, to holders of `token`.

        `operators` have a token of their own. Without a `fence`, any holder of the token may raise the epoch.
        `calls` gets the seconds of each call, by service, method and code.
        `port` 0 takes any free one. Raises UserError if the port, which `setting` gave, is taken.
        """
        server = _create_server(fence or Fence(), TokenGrant(token), *filter(None, [operators]), calls=calls)
        add_to(server)
        health_servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            raise UserError(
                f"{service} cannot listen on {host}:{port}: the port is in use or the host is not of this "
                f"machine; set {setting} to a free port, or to 0 for any"
            ) from None
        await server.start()
        for name in ("", service):
            await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        return cls(server, health_servicer, f"{advertised_host(host)}:{bound}")

    @classmethod
    async def start_local(
        cls, service: str, add_to: Callable[[grpc.aio.Server], None], *, socket_path: Path
    ) -> Self:
        """Serves `service` on a unix socket: who may open it is a matter of the folder's permissions."""
        server, health_servicer, address = (
            _create_server(Fence()),
            health.aio.HealthServicer(),
            f"unix:{socket_path}",
        )
        add_to(server)
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        server.add_insecure_port(address)
        await server.start()
        await health_servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
        return cls(server, health_servicer, address)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls at once, and cancels those in progress after `grace_s` seconds."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


def _create_server(fence: Fence, *admitted: TokenGrant, calls: Histogram | None = None) -> grpc.aio.Server:
    return grpc.aio.server(
        interceptors=[_CallGate(fence, admitted, calls)],
        options=[
            ("grpc.max_send_message_length", MAX_WIRE_BYTES),
            ("grpc.max_receive_message_length", MAX_WIRE_BYTES),
            ("grpc.so_reuseport", 0),  # otherwise two servers could share a port unnoticed
        ],
    )


def advertised_host(host: str) -> str:
    return socket.gethostname() if host == "0.0.0.0" else host


class _CallGate(grpc.aio.ServerInterceptor):
    """Access control (token, deadline, fence), error translation and timing."""

    def __init__(self, fence: Fence, admitted: Sequence[TokenGrant], calls: Histogram | None = None) -> None:
        """Empty `admitted`: everyone who can open the socket."""
        assert all(each.token for each in admitted), "an empty token would admit every caller"
        self._admitted = admitted
        self._fence = fence
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = await continuation(details)
        if handler is None or details.method.startswith(_HEALTH):
            return handler
        return _wrap(handler, details.method, self._check, self._calls)

    async def _check(self, method: str, context: Context) -> None:
        metadata = dict(context.invocation_metadata() or ())
        if self._admitted:
            self._check_token(method, str(metadata.get("authorization", "")))
        if method.startswith(_REFLECTION):
            return
        remaining = context.time_remaining()
        if remaining is None or remaining > _NO_DEADLINE_S:
            raise UserError(f"{method}: the call has no deadline; set a timeout")
        service, _, name = method.rpartition("/")
        if service + "/" in _FENCED_SERVICES and name not in _READ_ONLY_METHODS:
            given = metadata.get(FENCE_KEY)
            if given is None:
                raise StaleFenceError(
                    f"{method} changes state: only a coordinator may call it, with {FENCE_KEY}"
                )
            await self._fence.check(method, int(given))

    def _check_token(self, method: str, authorization: str) -> None:
        known = [
            each
            for each in self._admitted
            if hmac.compare_digest(authorization.encode(), f"Bearer {each.token}".encode())
        ]
        if not known:
            raise UnauthenticatedError(
                f"{method}: no or wrong bearer token; give caller and service the same ATOLL_TOKEN"
            )
        name = method.rpartition("/")[2]
        if not any(each.methods is None or name in each.methods for each in known):
            raise UnauthenticatedError(
                f"{method}: the operators' token is not enough; call it with the run's own, ATOLL_TOKEN"
            )


def _wrap(handler: Handler, method: str, check: Check, calls: Histogram | None) -> Handler:
    """Wraps a handler: runs `check` first, translates exceptions, and observes each call in `calls`."""

    async def admitted(request: Any, context: Context) -> Any:
        await check(method, context)
        return to_its_end(request, context) if handler.request_streaming else request

    async def to_its_end(requests: AsyncIterable[Any], context: Context) -> AsyncIterator[Any]:
        """Checks again at the end of a stream: the epoch may have changed."""
        async for request in requests:
            yield request
        await check(method, context)

    async def unary(request: Any, context: Context) -> Any:
        with _timed(calls, method, context):
            try:
                return await answer(await admitted(request, context), context)
            except Exception as error:
                await _abort(method, request, context, error)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        with _timed(calls, method, context):
            try:
                async for reply in answer(await admitted(request, context), context):
                    yield reply
            except Exception as error:
                await _abort(method, request, context, error)

    kinds: dict[tuple[bool, bool], tuple[Any, Any, Any]] = {
        (False, False): (handler.unary_unary, unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, stream, grpc.stream_stream_rpc_method_handler),
    }
    answer, gated, make_handler = kinds[handler.request_streaming, handler.response_streaming]
    wrapped: Handler = make_handler(gated, handler.request_deserializer, handler.response_serializer)
    return wrapped


@contextmanager
def _timed(calls: Histogram | None, method: str, context: Context) -> Iterator[None]:
    """Observes the seconds until the call has ended, however it ends."""
    if calls is None:
        yield
        return
    service, _, name = method.removeprefix("/").rpartition("/")
    start, code = time.perf_counter(), grpc.StatusCode.OK
    try:
        yield
    except grpc.aio.AbortError:
        code = context.code()
        raise
    except BaseException:  # the client has gone, or closed the stream
        code = grpc.StatusCode.CANCELLED
        raise
    finally:
        calls.labels(service, name, code.name).observe(time.perf_counter() - start)


async def _abort(method: str, request: Any, context: Context, error: Exception) -> None:
    """Ends the call with the error's code and class, so that the caller raises the same class."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(request, AsyncIterable) and not isinstance(error, UnauthenticatedError):
        async for _ in request:  # a caller that is still sending may lose the reply: INTERNAL
            pass
    match error:
        case AtollError():
            name = ((ERROR_KEY, type(error).__name__),)
            await context.abort(error.code, str(error)[:_MAX_DETAILS], name)
        case _:
            _log.exception("%s failed", method)
            details = f"{type(error).__name__}: {error}; the service's log has the traceback"
            await context.abort(grpc.StatusCode.INTERNAL, details[:_MAX_DETAILS])
