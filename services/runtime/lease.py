"""A service's place in its run: registration, heartbeats, draining."""

import asyncio
import logging
from contextlib import suppress
from typing import Final

from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.errors import (
    AtollError,
    ReplacedError,
    RunEndedError,
    ServiceUnavailableError,
    UnauthenticatedError,
)
from atoll.runtime.server import Fence
from atoll.wire.types import ServiceEntry

_log = logging.getLogger(__name__)

COORDINATOR_TIMEOUT_S: Final = 3.0
AWAY_PAUSE_S: Final = 1.0  # between attempts to reach an unavailable coordinator


class Lease:
    """Registers a service, then sends three heartbeats per lease; the replies say which coordinator's
    epoch is valid, and whether an operator wants the service to leave.
    """

    def __init__(self, coordinator: str, token: str, away_timeout_s: float, drain_grace_s: float) -> None:
        self._client = CoordinatorClient(coordinator, Caller(token=token), COORDINATOR_TIMEOUT_S)
        self._away_timeout_s = away_timeout_s
        self._drain_grace_s = drain_grace_s
        self._told_to_leave: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_away = False  # the coordinator did not answer last
        self._registered = asyncio.Event()
        self._entry: ServiceEntry | None = None  # as it was registered first
        self.fence = Fence(self._epoch)

    async def hold(
        self, entry: ServiceEntry, asked: asyncio.Future[None], failed: asyncio.Future[None]
    ) -> None:
        """Keeps `entry` registered until it is `asked` or told to leave, has `failed` or the run has ended,
        even if the coordinator is unavailable for a while. A service that leaves finishes its work first;
        then deregisters.

        Raises ReplacedError if a newer process took the name, UnauthenticatedError for a wrong token,
        ServiceUnavailableError if the coordinator stays away.
        """
        lease = asyncio.create_task(self._renew(entry))
        try:
            ends = (lease, failed, asked, self._told_to_leave)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not (lease.done() or failed.done()):
                await self._drain(entry, lease, failed)
            if lease.done():
                await lease
            lease.cancel()  # otherwise its next heartbeat would register again
            await asyncio.wait((lease,))
            if not self._is_away:
                with suppress(AtollError):  # ignore a coordinator that is gone
                    await self._client.deregister(entry)
        finally:
            lease.cancel()

    async def _drain(self, entry: ServiceEntry, *ends: asyncio.Future[None]) -> None:
        """Gets no new work, and waits until none is in progress here: at most `coordinator.drain_grace_s`,
        not at all if the coordinator is away, and until the first of `ends` is done."""
        if self._is_away or not self._client.is_connected:  # a call would be retried for most of a second
            self._is_away = True
            return
        _log.info("drains: gets no new work, and leaves once its work in progress is finished")
        grace_s = self._drain_grace_s
        drained = asyncio.create_task(self._client.drain(entry, grace_s + COORDINATOR_TIMEOUT_S))
        try:
            await asyncio.wait((drained, *ends), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            if drained.done():
                await drained
            elif not any(end.done() for end in ends):
                _log.warning(
                    "leaves after %g s (coordinator.drain_grace_s); others repeat its work in progress",
                    grace_s,
                )
        except AtollError as error:
            self._is_away = isinstance(error, ServiceUnavailableError)
            _log.info("stops at once: %s", error)
        finally:
            drained.cancel()

    async def close(self) -> None:
        await self._client.close()

    async def _renew(self, entry: ServiceEntry) -> None:
        """Returns when the run has ended."""
        clock = asyncio.get_running_loop().time
        registered, away_since = False, None
        pause_s = AWAY_PAUSE_S
        while True:
            try:
                if registered:
                    renewal = await self._client.heartbeat(entry)
                    registered, epoch = renewal.known, renewal.epoch
                    if renewal.drain and not self._told_to_leave.done():
                        _log.info("an operator wants this service to leave")
                        self._told_to_leave.set_result(None)
                if not registered:
                    lease_s, epoch = await self._client.register(entry)
                    pause_s, registered = lease_s / 3, True
                    _log.info("registered at %s as %s", self._client.address, entry.incarnation)
                self._heard(entry, epoch)
                away_since, self._is_away = None, False
            except RunEndedError:
                _log.info("the run has ended")
                return
            except (ReplacedError, UnauthenticatedError):
                raise
            except AtollError as error:  # it is away, or has lost its store, or another one takes over
                self._is_away = isinstance(error, ServiceUnavailableError)
                if away_since is None:
                    away_since = clock()
                    _log.warning("could not renew the lease, retrying: %s", error)
                if clock() >= away_since + self._away_timeout_s:
                    raise ServiceUnavailableError(
                        f"no answer from the coordinator at {self._client.address} for "
                        f"{self._away_timeout_s:g} s (coordinator.away_timeout_s): {error}"
                    ) from None
            await asyncio.sleep(pause_s if away_since is None else AWAY_PAUSE_S)

    def _heard(self, entry: ServiceEntry, epoch: int) -> None:
        self._entry = entry
        self.fence.rise(epoch)
        self._registered.set()

    async def _epoch(self) -> int:
        """Waits for the first registration, whose answer a coordinator's first order may overtake."""
        await self._registered.wait()
        assert self._entry is not None
        return (await self._client.heartbeat(self._entry)).epoch
