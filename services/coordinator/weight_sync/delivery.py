"""Delivers a version to one replica: calls with deadlines, and failure handling."""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from atoll.coordinator.fleet.replicas import Replica, Replicas
from atoll.coordinator.weight_sync.canary import CanaryCheck, CanaryError
from atoll.coordinator.weight_sync.epochs import EpochMember, Epochs
from atoll.coordinator.weight_sync.push_report import LiveReplica
from atoll.coordinator.weight_sync.turns import DeviceTurns
from atoll.runtime.errors import AtollError, ServiceUnavailableError
from atoll.runtime.progress_timeout import await_with_progress
from atoll.wire.types import EngineMemory, PushPart, StreamManifest, Version

T = TypeVar("T")
log = logging.getLogger(__name__)

ANSWER_S = 10.0  # for a replica to respond, beyond the transport's deadline


class Delivery:
    def __init__(
        self,
        replicas: Replicas,
        turns: DeviceTurns,
        epochs: Epochs,
        deadline_s: float,
        *,
        finish_running: bool,
    ) -> None:
        """`finish_running`: a replica ends its running sequences before it commits; otherwise they continue
        with the new weights.
        """
        self._replicas = replicas
        self._turns = turns
        self._epochs = epochs
        self._deadline_s = deadline_s
        self._finish_running = finish_running
        self._have_plan: set[str] = set()  # incarnations of replicas that were sent theirs

    async def receive(
        self, version: Version, streams: Sequence[StreamManifest], member: EpochMember, replica: Replica
    ) -> None:
        """Receives one part: its streams for the replica's plan. Raises ServiceUnavailableError if it takes
        too long.
        """
        mine = [stream for stream in streams if stream.plan_id == member.plan.id]
        new_plan = None if replica.entry.incarnation in self._have_plan else member.plan
        part = PushPart(version, mine, new_plan, member.membership)
        await self._turns.restore(replica, EngineMemory.WEIGHTS)
        await self._in_time(replica, replica.client.receive_weights(part), f"a part of {version}")
        self._have_plan.add(replica.entry.incarnation)

    async def roll_back(self, version: Version, replica: Replica) -> None:
        await self._in_time(replica, replica.client.rollback_weights(version), f"the rollback of {version}")

    async def go_live(self, version: Version, check: CanaryCheck, replica: Replica) -> LiveReplica:
        """Commits, and routes to the replica if its canary matches. Raises CanaryError if it does not: its
        samples are then generated again elsewhere.

        Bounded by silence, not by a deadline, since running sequences may have to end first.
        """
        self._replicas.hold(replica)
        client, silence_s = replica.client, self._deadline_s + ANSWER_S
        with replica.track_commit(version):
            committing = client.commit_weights(version, finish_running=self._finish_running)
            stall_s = await await_with_progress(committing, client.progress, silence_s)
        await self._turns.restore(replica, EngineMemory.CACHE)
        try:
            difference = await check.compare(replica, silence_s)
        except CanaryError as error:
            await replica.abort_all(error)
            raise
        await self._replicas.route(replica)
        return LiveReplica(stall_s, difference)

    def drop(self, replica: Replica, error: AtollError) -> None:
        """Handles a failed replica: it catches up once it generates again, or is held for the next push if
        its canary differs.
        """
        self._epochs.end()
        self._have_plan.discard(replica.entry.incarnation)  # a new incarnation needs it again
        if isinstance(error, CanaryError):
            log.warning("%s has the wrong weights: %s", replica.entry.name, error)
            self._replicas.hold(replica)
        else:
            self._replicas.defer(replica, error)

    async def _in_time(self, replica: Replica, call: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(self._deadline_s + ANSWER_S):
                return await call
        except TimeoutError:
            self._have_plan.discard(replica.entry.incarnation)
            raise ServiceUnavailableError(
                f"no answer to {what} within weights.deadline_s = {self._deadline_s:g} s and "
                f"{ANSWER_S:g} s more"
            ) from None
        except AtollError:
            self._have_plan.discard(replica.entry.incarnation)
            raise
