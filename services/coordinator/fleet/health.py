"""Whether a replica is well is seen from what it generates: samples, or a probe where it is silent."""

import asyncio
from contextlib import aclosing, suppress
from itertools import count
from secrets import token_hex
from typing import Protocol

import numpy as np

from atoll.coordinator.fleet.replicas import Replica, Replicas, State, now
from atoll.runtime.clients.rollout import Arrival
from atoll.runtime.errors import AtollError, BadAnswerError, ServiceUnavailableError, UserError
from atoll.wire.types import FinishReason, GroupId, SampleId, Sampling, Trajectory, TurnId, TurnRequest

SILENCE_S = 10.0  # with work in hand: so long at least before a replica is asked
SILENCE = 3.0  # times what it has in hand, by its throughput
IDLE_S = 60.0  # without work
ANSWER_S = (
    30.0  # for a probe; who has work may take as long as it may be silent: a probe waits for a slot, too
)
RETRY_S = 5.0  # between two probes of one that is unwell


class WeightProvider(Protocol):
    """Whoever gives replicas the weights that they are to generate with."""

    async def catch_up(self, replica: Replica) -> None:
        """Gives a replica that generates the current weights and routes to it, or holds it until there are
        any. Raises UserError where it does not fit the run, AtollError where it fails."""
        ...


class Watcher(Protocol):
    """Whoever is to know of the replicas that are in the run."""

    async def admitted(self, replica: Replica) -> None:
        """It generates, and has got, or waits for, the current weights."""
        ...

    async def refused(self, replica: Replica, error: UserError) -> None:
        """It does not fit the run, such as one with another model."""
        ...


class Health:
    """Takes replicas that do not generate out of the routing, and brings those in that do."""

    def __init__(self, replicas: Replicas, model: str, weights: WeightProvider, watcher: Watcher) -> None:
        self._replicas = replicas
        self._model = model
        self._weights = weights
        self._watcher = watcher
        # ids that no sample has, nor a probe of an earlier coordinator: an id is answered from memory
        self._run = f"probe-{token_hex(4)}"
        self._numbers = count()

    async def watch(self, replica: Replica) -> None:
        """Ends once the replica is lost. Consumes its state and its silence; waits for the time at which it
        is to be asked, and looks in between since it may get work; unblocked by its failure and its loss."""
        while replica.state is not State.LOST:
            patience = self._patience(replica)
            if replica.state is State.UNWELL:
                patience = replica.out_until - now()
                if patience <= 0:
                    patience = 0.0 if await self._recovers(replica) else RETRY_S
            elif patience <= 0:
                patience = await self._ask(replica)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(patience, SILENCE_S)):
                    await replica.stirred.wait()
            replica.stirred.clear()

    def _patience(self, replica: Replica) -> float:
        """Seconds until the replica is to be asked, if nothing is heard of it before."""
        if replica.state is State.HELD or replica.committing:
            return IDLE_S
        return max(replica.seat.heard, replica.asked) + self._silence(replica) - now()

    def _silence(self, replica: Replica) -> float:
        """Seconds that it may be silent."""
        if not replica.seat.in_hand:
            return IDLE_S
        return max(SILENCE_S, SILENCE * self._replicas.time_in_hand(replica))

    async def _ask(self, replica: Replica) -> float:
        """Suspends the replica where it neither answers nor is heard of in time. Returns its patience."""
        asked, version, timeout_s = now(), replica.version, max(ANSWER_S, self._silence(replica))
        try:
            probe = await self._probe(replica, timeout_s)
            if probe.versions() != {version}:
                raise ServiceUnavailableError(f"it generates with {probe.versions()}, expected {version}")
        except AtollError as error:
            if isinstance(error, BadAnswerError):
                self._replicas.blame(replica, error)
            elif replica.seat.heard <= asked and not replica.committing:
                self._replicas.suspend(replica, error)
        replica.asked = now()
        return self._patience(replica)

    async def _recovers(self, replica: Replica) -> bool:
        """Whether it generates and has got, or waits for, the current weights."""
        try:
            begun = now()
            probe = await self._probe(replica, ANSWER_S)
            replica.alone = probe.num_produced / max(now() - begun, 1e-3)
            await self._weights.catch_up(replica)
            await self._watcher.admitted(replica)
        except AtollError as error:
            if isinstance(error, UserError | BadAnswerError):
                self._replicas.blame(replica, error)
            else:
                self._replicas.suspend(replica, error)
            if isinstance(error, UserError):
                await self._watcher.refused(replica, error)
            return False
        replica.asked = now()
        return True

    async def _probe(self, replica: Replica, timeout_s: float) -> Trajectory:
        """One short greedy generation, never journaled. Raises ServiceUnavailableError if it fails, and
        BadAnswerError if the answer is not one to it."""
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
            raise BadAnswerError(f"it answered a probe with {', '.join(str(s.id) for s in samples)}")
        largest_id, vocab_size = arrivals[0].largest_id, replica.info.vocab_size
        if not 0 <= largest_id < vocab_size:
            raise BadAnswerError(
                f"the largest token id in its answer to a probe is {largest_id}, expected one below its "
                f"vocab_size = {vocab_size}; -1 stands for no tokens"
            )
        return samples[0]
