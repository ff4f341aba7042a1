"""Replica health, judged by what a replica generates: samples, or responses to probes while it is silent."""

import asyncio
from contextlib import aclosing, suppress
from itertools import count
from secrets import token_hex
from typing import Protocol

import numpy as np

from atoll.coordinator.fleet.replicas import Replica, Replicas, ReplicaState, now
from atoll.runtime.clients.rollout import Arrival
from atoll.runtime.errors import AtollError, ProtocolError, ServiceUnavailableError, UserError
from atoll.wire.types import FinishReason, GroupId, SampleId, Sampling, Trajectory, TurnId, TurnRequest

SILENCE_S = 10.0  # minimum silence of a busy replica before it is probed
SILENCE = 3.0  # times the estimated time for its current work
IDLE_S = 60.0  # without work
ANSWER_S = 30.0  # for a probe; longer for a busy replica, since a probe waits for a slot
RETRY_S = 5.0  # between two probes of an unhealthy replica


class WeightProvider(Protocol):
    """Provides replicas with weights."""

    async def may_generate(self, replica: Replica) -> bool:
        """Whether it can be probed; otherwise the models use its devices, or it has no weights. Raises
        AtollError if it fails."""
        ...

    async def catch_up(self, replica: Replica) -> None:
        """Gives a replica that generates the current weights and routes to it, or holds it until there are
        any. Raises UserError if it does not fit the run, AtollError if it fails."""
        ...

    async def wait_for_push(self) -> None:
        """Waits for the end of the push in progress, if there is one."""
        ...


class ReplicaListener(Protocol):
    """Is notified of admitted and refused replicas."""

    async def on_admitted(self, replica: Replica) -> None:
        """The replica generates and has, or waits for, the current weights."""
        ...

    async def on_refused(self, replica: Replica, error: UserError) -> None:
        """It does not fit the run, such as one with another model."""
        ...


class HealthWatch:
    """Stops routing to replicas that do not generate, and admits those that do."""

    def __init__(
        self, replicas: Replicas, model: str, weights: WeightProvider, listener: ReplicaListener
    ) -> None:
        self._replicas = replicas
        self._model = model
        self._weights = weights
        self._listener = listener
        # unique ids: replicas answer known ids from memory
        self._run = f"probe-{token_hex(4)}"
        self._numbers = count()

    async def watch(self, replica: Replica) -> None:
        """Ends once the replica is lost. Consumes its state and silence; waits until its next probe is due,
        and checks in between since it may get work; unblocked by its failure or loss.
        """
        while replica.state is not ReplicaState.LOST:
            pause_s = self._seconds_to_probe(replica)
            if replica.state is ReplicaState.UNHEALTHY:
                pause_s = replica.excluded_until - now()
                if pause_s <= 0 and not await self._recovers(replica):
                    replica.excluded_until = max(replica.excluded_until, now() + RETRY_S)
            elif pause_s <= 0:
                pause_s = await self._check(replica)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(max(pause_s, 0.0), SILENCE_S)):
                    await replica.state_changed.wait()
            replica.state_changed.clear()

    def _seconds_to_probe(self, replica: Replica) -> float:
        """Seconds until the replica's next probe, if it stays silent."""
        if replica.state is ReplicaState.HELD or replica.committing:
            return IDLE_S
        return max(replica.load.last_activity, replica.last_probed) + self._allowed_silence_s(replica) - now()

    def _allowed_silence_s(self, replica: Replica) -> float:
        """Seconds of silence that are allowed."""
        if not replica.load.in_hand:
            return IDLE_S
        return max(SILENCE_S, SILENCE * self._replicas.backlog_s(replica))

    async def _check(self, replica: Replica) -> float:
        """Suspends the replica if it neither answers nor delivers samples in time. Returns seconds to its
        next probe.
        """
        asked, version, timeout_s = now(), replica.version, max(ANSWER_S, self._allowed_silence_s(replica))
        try:
            probe = await self._probe(replica, timeout_s)
            if probe.versions() != {version}:
                raise ServiceUnavailableError(f"it generates with {probe.versions()}, expected {version}")
        except AtollError as error:
            if isinstance(error, ProtocolError):
                self._replicas.blame(replica, error)
            elif replica.load.last_activity <= asked and not replica.committing:
                self._replicas.suspend(replica, error)
        replica.last_probed = now()
        return self._seconds_to_probe(replica)

    async def _recovers(self, replica: Replica) -> bool:
        """Whether it generates and has, or waits for, the current weights."""
        try:
            if await self._weights.may_generate(replica):
                begun = now()
                probe = await self._probe(replica, ANSWER_S)
                replica.probe_throughput = probe.num_produced / max(now() - begun, 1e-3)
            await self._weights.catch_up(replica)
            await self._listener.on_admitted(replica)
        except AtollError as error:
            if isinstance(error, UserError | ProtocolError):
                self._replicas.blame(replica, error)
            else:
                self._replicas.suspend(replica, error)
            if isinstance(error, UserError):
                await self._listener.on_refused(replica, error)
            return False
        replica.last_probed = now()
        return True

    async def _probe(self, replica: Replica, timeout_s: float) -> Trajectory:
        """One short greedy generation, never journaled. Raises ServiceUnavailableError if it fails, and
        ProtocolError if the response does not match it."""
        id = SampleId(GroupId(self._run, next(self._numbers), 0), 0)
        sampling = Sampling(max_new_tokens=4, temperature=0.0)
        request = TurnRequest((TurnId(id, attempt=0),), np.zeros(1, np.int32), sampling)
        arrivals: list[Arrival] = []
        try:
            async with (
                asyncio.timeout(timeout_s),
                aclosing(replica.client.generate(self._model, [request])) as stream,
            ):
                async for arrival in stream:
                    arrivals.append(arrival)
        except TimeoutError:
            raise ServiceUnavailableError(f"it has not answered a probe within {timeout_s:g} s") from None
        samples = [sample for arrival in arrivals for sample in arrival.samples]
        if not samples or samples[0].finish_reason is FinishReason.ABORT:
            raise ServiceUnavailableError("it ended a probe without an answer")
        if [sample.id for sample in samples] != [id]:
            raise ProtocolError(f"it answered a probe with {', '.join(str(s.id) for s in samples)}")
        largest_id, vocab_size = arrivals[0].largest_id, replica.info.vocab_size
        if not 0 <= largest_id < vocab_size:
            raise ProtocolError(
                f"the largest token id in its answer to a probe is {largest_id}, expected one below its "
                f"vocab_size = {vocab_size}; -1 means no tokens"
            )
        return samples[0]
