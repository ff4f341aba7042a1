"""How busy slots are where lengths are log-normal: the coordinator next to ideal list scheduling of the same
lengths under the same bound on staleness. `python -m benchmarks.long_tails --json`

Source, groups, sessions, dispatch and routing are the coordinator's own. Replicas, agents, gateway and
journal are stand-ins that cost nothing, on a virtual clock: the result does not depend on the machine.
"""

import argparse
import asyncio
import heapq
import json
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from atoll.config.schema import AgentConfig
from atoll.coordinator.background import BackgroundWork
from atoll.coordinator.fleet.agent_hosts import AgentHosts
from atoll.coordinator.fleet.gateways import Answers, Gateways
from atoll.coordinator.fleet.replicas import Replica, Replicas
from atoll.coordinator.journal.journal import OpenSession
from atoll.coordinator.rollouts.generate_call import turn_id
from atoll.coordinator.rollouts.generation import Generation
from atoll.coordinator.rollouts.group_sources import GenerateSource
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.rollout import Arrival
from atoll.wire.codec.trajectories import encode_payload
from atoll.wire.types import (
    AgentOutcome,
    AgentTask,
    FinishReason,
    GroupId,
    Node,
    Origin,
    Prompt,
    SampleId,
    Sampling,
    ServerAccess,
    SessionEnd,
    SessionId,
    SessionSpec,
    Trajectory,
    TrajectoryStatus,
    Turn,
    TurnId,
    TurnRequest,
    Version,
    VersionSpan,
)
from tests import virtual_clock
from tests.fake_replicas import AllRight
from tests.fake_rewards import rewards_of

SLOTS: Final = 16  # of a replica
SAMPLES: Final = 8  # of a group
SIGMA: Final = 1.0  # of the logarithms of lengths
AGENT: Final = "player"
FUNCTION: Final = "examples/agents.py:calculator"  # which the stand-in replaces
NEVER_S: Final = 1e9
SAMPLING: Final = Sampling(max_new_tokens=1 << 14)
PROMPT: Final = Prompt(GroupId("run", 0, 0), np.zeros(1, np.int32), "", "", "")


@dataclass(frozen=True, slots=True)
class Case:
    replicas: int = 4
    groups_per_step: int = 8
    steps: int = 20
    max_staleness: int = 1
    turn_s: float = 0.0  # of each turn of a session; 0: no sessions, a sample is one turn of any length
    places: int = 0  # for sessions, at once
    mean_s: float = 60.0  # of a sample
    partial_rollouts: bool = True
    seed: int = 0

    @property
    def slots(self) -> int:
        return self.replicas * SLOTS

    def lengths(self) -> NDArray[np.float64]:
        """[groups, samples of a group] seconds; of sessions, whole turns."""
        rng = np.random.default_rng(self.seed)
        shape = (self.steps * self.groups_per_step, SAMPLES)
        lengths = rng.lognormal(math.log(self.mean_s) - SIGMA**2 / 2, SIGMA, shape)
        return np.ceil(lengths / self.turn_s) * self.turn_s if self.turn_s else lengths


CASES: Final = {
    "sessions, as many as slots": Case(turn_s=10.0, places=64, partial_rollouts=False),
    "sessions, twice as many as slots": Case(turn_s=10.0, places=128, partial_rollouts=False),
    "single turns, partial rollouts": Case(),
    "single turns, a push waits for them": Case(partial_rollouts=False),
}


def list_schedule(
    lengths: NDArray[np.float64], slots: int, groups_per_step: int, max_staleness: int
) -> float:
    """Seconds until the last step of greedy list scheduling: whenever a slot is free, it gets the next sample
    in the order of issue, as soon as that may begin.

    `lengths`: [groups, samples of a group]. Step b trains, in no time, on the b-th `groups_per_step` groups
    once all of them are there, and publishes version b + 1. The samples of step b may begin once version
    b - max_staleness is published, since until then max_staleness + 1 steps' groups are in flight.
    """
    free = [0.0] * slots  # when each slot is
    published = [0.0]  # when each version was
    for step, batch in enumerate(lengths.reshape(-1, groups_per_step * lengths.shape[1])):
        may_begin = published[max(step - max_staleness, 0)]
        end = published[-1]
        for length in batch:
            begin = max(heapq.heappop(free), may_begin)
            heapq.heappush(free, begin + length)
            end = max(end, begin + length)
        published.append(end)
    return published[-1]


class MockReplica:
    """Works at SLOTS turns at once, in the order in which they were asked for."""

    def __init__(self, case: Case, lengths: NDArray[np.float64], name: str) -> None:
        self._case = case
        self._lengths = lengths
        self._origin = Origin(name, "1")
        self._version = Version("run", 0)
        self._queue: deque[asyncio.Future[None]] = deque()
        self._running = 0
        self._is_paused = False
        self._idle = asyncio.Event()

    async def generate(self, model: str, requests: Sequence[TurnRequest]) -> AsyncGenerator[Arrival, None]:
        turns = [asyncio.create_task(self._draw(id)) for request in requests for id in request.ids]
        for drawn in asyncio.as_completed(turns):
            yield Arrival.parse(encode_payload([await drawn]))

    async def abort(self, id_prefix: str) -> int:
        raise AssertionError("nothing is too old where every step waits for its oldest groups")

    async def commit(self, version: Version) -> None:
        """Without partial rollouts, once what runs has ended."""
        if not self._case.partial_rollouts:
            self._is_paused = True
            while self._running:
                self._idle.clear()
                await self._idle.wait()
            self._is_paused = False
        self._version = version
        self._start()

    def _start(self) -> None:
        while self._queue and self._running < SLOTS and not self._is_paused:
            self._running += 1
            self._queue.popleft().set_result(None)

    async def _draw(self, id: TurnId) -> Trajectory:
        self._queue.append(begins := asyncio.get_running_loop().create_future())
        self._start()
        await begins
        version = self._version
        seconds = self._case.turn_s or self._lengths[id.sample.group.prompt, id.sample.index]
        await asyncio.sleep(seconds)
        self._running -= 1
        self._idle.set()
        self._start()
        T = math.ceil(seconds)  # a token a second
        node = Node(
            -1,
            np.zeros(T, np.int32),
            np.ones(T, np.bool_),
            np.zeros(T, np.float32),
            (VersionSpan(version, 0, T),),
        )
        turn = Turn(0, FinishReason.STOP, "", self._origin, 0.0, 0.0, number=id.turn, branch=id.branch)
        return Trajectory(id.sample, id.attempt, (node,), (turn,), TrajectoryStatus.COMPLETED)


class MockGateway:
    """Gateway and agents: each session asks for one turn after the other."""

    def __init__(self, case: Case, lengths: NDArray[np.float64]) -> None:
        self._case = case
        self._lengths = lengths
        self._asked: asyncio.Queue[TurnRequest] = asyncio.Queue()
        self._waiting: dict[TurnId, asyncio.Future[Trajectory]] = {}
        self._drawn: dict[SessionId, list[Trajectory]] = {}

    async def open(self, spec: SessionSpec) -> tuple[str, bool]:
        self._drawn[spec.id] = []
        return "", True

    async def run(self, task: AgentTask) -> AgentOutcome:
        id = task.session
        length = self._lengths[id.sample.group.prompt, id.sample.index]
        for number in range(round(length / self._case.turn_s)):
            turn = TurnId(id.sample, id.attempt, number)
            self._waiting[turn] = asyncio.get_running_loop().create_future()
            self._asked.put_nowait(TurnRequest((turn,), np.zeros(1, np.int32), SAMPLING, str(id)))
            self._drawn[id].append(await self._waiting[turn])
        return AgentOutcome(reward=1.0)

    async def cancel(self, id: SessionId) -> None:
        raise AssertionError("every session is played to its end")

    async def end(self, id: SessionId, end: SessionEnd) -> tuple[SessionEnd, bytes]:
        """With the session's turns, one behind the other."""
        drawn = self._drawn.pop(id)
        nodes = tuple(each.nodes[0]._replace(parent=number - 1) for number, each in enumerate(drawn))
        turns = tuple(each.turns[0]._replace(node=number) for number, each in enumerate(drawn))
        return end, encode_payload([drawn[0]._replace(nodes=nodes, turns=turns)])

    async def draw(self, answers: AsyncIterator[Answers]) -> AsyncGenerator[list[TurnRequest], None]:
        hearing = asyncio.create_task(self._hear(answers))
        try:
            while True:
                yield [await self._asked.get()]
        finally:
            hearing.cancel()

    async def _hear(self, answers: AsyncIterator[Answers]) -> None:
        async for drawn, _ in answers:
            for each in drawn:
                self._waiting[turn_id(each)].set_result(each)


class NoServers:
    """Agents here use none."""

    @asynccontextmanager
    async def lend(self, agent: AgentConfig) -> AsyncIterator[tuple[ServerAccess, ...]]:
        yield ()


class NoJournal:
    """Accepts everything and keeps nothing."""

    full = False

    async def issue(self, samples: Sequence[SampleId], cursor: str) -> None: ...

    async def load(self, groups: Sequence[object]) -> Sequence[object]:
        return groups

    async def open(self, sessions: Sequence[OpenSession]) -> Sequence[OpenSession]:
        return sessions

    async def finish(self, samples: Sequence[Trajectory], payload: bytes) -> Sequence[Trajectory]:
        return samples

    async def consume(self, step: int, samples: Sequence[SampleId]) -> None: ...


class Prompts:
    """Numbered through."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._drawn = 0
        self.cursor = self

    def dump(self) -> str:
        return ""

    def draw(self, count: int) -> list[Prompt]:
        self._drawn += count
        numbers = range(self._drawn - count, self._drawn)
        ids = [GroupId("run", 0, number) for number in numbers]
        return [replace(PROMPT, id=id, agent=self._agent) for id in ids]


async def coordinated(case: Case) -> float:
    """Seconds until the coordinator's last step."""
    lengths = case.lengths()
    replicas, hosts, gateways = Replicas(Caller(), NEVER_S), AgentHosts(), Gateways()
    members = []
    for name in (f"rollout-{number}" for number in range(case.replicas)):
        info = SimpleNamespace(slots=SLOTS, vocab_size=1, route_shape=())
        entry: Any = SimpleNamespace(name=name, incarnation="1")
        client: Any = MockReplica(case, lengths, name)
        members.append(Replica(entry, client, info, Version("run", 0)))  # type: ignore[arg-type]
    mock: Any = MockGateway(case, lengths)
    gateways.add("gateway-0", mock)
    hosts.add(mock, {AGENT: case.places})
    agent = AgentConfig(name=AGENT, function=FUNCTION, reward="session", max_seconds=0.0)
    generation = Generation(
        replicas,
        rewards_of(AllRight()),
        {AGENT: agent},
        hosts,
        gateways,
        NoServers(),  # type: ignore[arg-type]
        model="actor",
        max_attempts=1,
        sample_timeout_s=NEVER_S,
        timeout_s=NEVER_S,
    )
    source = GenerateSource(
        Prompts(AGENT if case.turn_s else ""),  # type: ignore[arg-type]
        generation,
        NoJournal(),  # type: ignore[arg-type]
        sampling=SAMPLING,
        prompts_per_step=case.groups_per_step,
        samples_per_prompt=SAMPLES,
        greedy_baseline=False,
        max_staleness=case.max_staleness,
        weighs_turns=False,
        cuts_sessions=False,
        steps=case.steps,
        max_dropped_share=0.0,
        dynamic_sampling=None,
    )
    work = BackgroundWork(generation.run())
    try:
        await publish(members, replicas, source, Version("run", 0))
        for step in range(1, case.steps + 1):
            await work.wait_for(source.take(step, case.groups_per_step, Version("run", step - 1)))
            await publish(members, replicas, source, Version("run", step))
        assert not source.drops
        return asyncio.get_running_loop().time()
    finally:
        await work.end()


async def publish(
    members: Sequence[Replica], replicas: Replicas, source: GenerateSource, version: Version
) -> None:
    async def go_live(replica: Replica) -> None:
        replicas.hold(replica)
        with replica.track_commit(version):
            await replica.client.commit(version)  # type: ignore[attr-defined]
        await replicas.route(replica)

    await asyncio.gather(*map(go_live, members))
    await source.on_published(version)


def compare(case: Case) -> dict[str, Any]:
    """How busy slots are up to the last step, as shares of their time."""
    lengths, slots = case.lengths(), case.slots
    ideal = list_schedule(lengths, slots, case.groups_per_step, case.max_staleness)
    real = virtual_clock.run(coordinated(case))
    return {
        "case": asdict(case),
        "busy_ideal": lengths.sum() / slots / ideal,
        "busy": lengths.sum() / slots / real,
        "ratio": ideal / real,
    }


def run(groups_per_step: Sequence[int] = (4, 8, 16, 32)) -> dict[str, Any]:
    """By kind of sample and groups per step."""
    return {
        f"{name}, {number} groups per step": compare(replace(case, groups_per_step=number))
        for name, case in CASES.items()
        for number in groups_per_step
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    result = run()
    if parser.parse_args().json:
        print(json.dumps(result, indent=2))
    else:
        for name, row in result.items():
            print(f"{name:65} ideal {row['busy_ideal']:.3f} real {row['busy']:.3f} ratio {row['ratio']:.3f}")
