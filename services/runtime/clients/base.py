"""Base of all clients: a channel, and the only place that makes calls.

Every call has a deadline and carries the caller's fence and token; transport errors and unreadable responses
are translated to Atoll's exceptions. Calls that are safe to repeat are retried while the peer is unavailable.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import grpc
import grpc.aio

from atoll.runtime import errors

T = TypeVar("T")
Reply = TypeVar("Reply")
Request = TypeVar("Request", contravariant=True)
Answer = TypeVar("Answer", covariant=True)
Metadata = tuple[tuple[str, str], ...]

MAX_MESSAGE_BYTES = 64 << 20
MAX_WIRE_BYTES = 1 << 30  # of messages that cannot be cut: a group with the experts of each token
FENCE_KEY = "atoll-fence"
CEILING_S = 30 * 86400.0  # of calls of unbounded length: only their silence is bounded
ERROR_KEY = "atoll-error"  # trailing metadata: the class in runtime/errors.py

_ERRORS = {
    cls.__name__: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.AtollError)
}

# grpc.aio's own words, with status INTERNAL, if a peer dies while a request stream is being sent
_SEND_FAILED = "Internal error from Core"

# Generate joins what runs or has finished, and every trainer call is keyed, so all may be repeated.
_RETRY = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.05s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 3,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: the coordinator's lease epoch (None: not a coordinator) and the shared token."""

    fence: int | None = None
    token: str | None = None

    @property
    def metadata(self) -> Metadata:
        fence = () if self.fence is None else ((FENCE_KEY, str(self.fence)),)
        token = () if self.token is None else (("authorization", f"Bearer {self.token}"),)
        return fence + token


class Method(Protocol[Request, Answer]):
    """A method of a stub; `request` is an iterator of messages if the method takes a stream."""

    def __call__(self, request: Request, /, *, timeout: float, metadata: Metadata) -> Answer: ...


Stream = grpc.aio.UnaryStreamCall[Any, Reply] | grpc.aio.StreamStreamCall[Any, Reply]


class Client:
    """Subclasses set `_stub` and call its methods by `_call`, `_query` and `_stream` alone."""

    _stub: object

    def __init__(self, address: str, caller: Caller, timeout_s: float) -> None:
        self.address = address
        self._metadata = caller.metadata
        self._timeout_s = timeout_s
        self._closed = False
        self._channel = grpc.aio.insecure_channel(
            address,
            options=[
                ("grpc.max_receive_message_length", MAX_WIRE_BYTES),
                ("grpc.max_send_message_length", MAX_WIRE_BYTES),
                ("grpc.enable_http_proxy", 0),  # a proxy from the environment would see the token
                ("grpc.max_reconnect_backoff_ms", 2000),  # otherwise two minutes after a long outage
                ("grpc.service_config", _RETRY),
            ],
        )

    @property
    def is_connected(self) -> bool:
        """Whether the connection of earlier calls is still there; a peer that ends closes it."""
        return bool(self._channel.get_state() is grpc.ChannelConnectivity.READY)

    async def close(self) -> None:
        self._closed = True
        await self._channel.close(None)

    async def _call(
        self, method: Method[Request, Awaitable[Reply]], request: Request, timeout_s: float | None = None
    ) -> Reply:
        """`timeout_s` is the client's if None."""
        timeout_s = timeout_s or self._timeout_s
        with self._translate(method, timeout_s):
            return await method(request, timeout=timeout_s, metadata=self._metadata)

    async def _query(
        self,
        method: Method[Request, Awaitable[Reply]],
        request: Request,
        decode: Callable[[Reply], T],
        timeout_s: float | None = None,
    ) -> T:
        """The reply, decoded. Raises ProtocolError if that fails."""
        reply = await self._call(method, request, timeout_s)
        with self._translate(method):
            return decode(reply)

    async def _stream(
        self,
        method: Method[Request, Stream[Reply]],
        request: Request,
        decode: Callable[[Reply], T],
        timeout_s: float = CEILING_S,
        silence_s: float | None = None,
    ) -> AsyncGenerator[T, None]:
        """Yields replies, decoded as in `_query`. Closing the generator cancels the call. Raises
        ServiceUnavailableError if nothing comes for `silence_s`, unless that is None."""
        with self._translate(method, timeout_s):
            call = method(request, timeout=timeout_s, metadata=self._metadata)
            try:
                while (reply := await self._next(call, method, silence_s)) is not None:
                    yield decode(reply)
            finally:
                call.cancel()

    async def _next(self, call: Stream[Reply], method: object, silence_s: float | None) -> Reply | None:
        """None: the stream has ended."""
        try:
            async with asyncio.timeout(silence_s):
                reply = await call.read()
        except TimeoutError:
            raise errors.ServiceUnavailableError(
                f"{self._where(method)}: nothing came for {silence_s:g} s"
            ) from None
        return None if reply is grpc.aio.EOF else cast(Reply, reply)

    @contextmanager
    def _translate(self, method: object, timeout_s: float = 0.0) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._exception(method, error, timeout_s) from error
        except (asyncio.CancelledError, grpc.aio.UsageError) as error:
            # closing a channel cancels its calls, which the caller must see as a lost peer
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            raise errors.ServiceUnavailableError(f"{self._where(method)}: the client closed") from error
        except errors.AtollError:
            raise
        except Exception as error:  # only decoding can fail here: the response is garbled
            raise errors.ProtocolError(
                f"{self._where(method)}: its response cannot be decoded: {type(error).__name__}: {error}"
            ) from error

    def _where(self, method: object) -> str:
        """Such as "Rollout.Info at 10.0.0.1:4711"."""
        [name] = (name for name, other in vars(self._stub).items() if other is method)
        return f"{type(self).__name__.removesuffix('Client')}.{name} at {self.address}"

    def _exception(self, method: object, error: grpc.aio.AioRpcError, timeout_s: float) -> errors.AtollError:
        where = self._where(method)
        name = cast(grpc.aio.Metadata, error.trailing_metadata()).get(ERROR_KEY)
        if isinstance(name, str) and name in _ERRORS:
            return _ERRORS[name](f"{where}: {error.details()}")
        reason = {
            grpc.StatusCode.UNAVAILABLE: "the connection failed; the service may have died: see its log",
            grpc.StatusCode.DEADLINE_EXCEEDED: f"no answer within {timeout_s:g} s",
            grpc.StatusCode.CANCELLED: "the service is shutting down",
        }.get(error.code())
        if error.details() == _SEND_FAILED:
            reason = "the connection failed during the request; the service may have died: see its log"
        if reason:
            return errors.ServiceUnavailableError(f"{where}: {reason} ({error.details()})")
        return errors.AtollError(f"{where}: {error.code().name}: {error.details()}")
