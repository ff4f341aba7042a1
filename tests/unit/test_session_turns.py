"""Turns of sessions on replicas: drawn once for each want, lost and sent again, recorded, given up."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np

from atoll.coordinator.fleet.gateways import GatewayLink, Gateways
from atoll.coordinator.fleet.replicas import ReplicaState
from atoll.coordinator.journal.journal import OpenSession
from atoll.coordinator.rollouts.generate_call import turn_id
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.coordinator.rollouts.session_turns import SessionTurns
from atoll.runtime.clients.rollout import Arrival
from atoll.runtime.errors import ServiceUnavailableError
from atoll.wire.types import (
    FinishReason,
    SessionEnd,
    SessionId,
    Trajectory,
    TurnId,
    TurnRequest,
    UndrawnTurn,
    Version,
)
from tests.builders import SAMPLING, arrival, node, pending, sample, sample_id, turn_request
from tests.fake_replicas import SAMPLE_TIMEOUT_S, V3, Fleet
from tests.virtual_clock import timed

V4 = Version("run", 4)
SESSION = SessionId(sample_id(0, 1), 2)


def drawn(id: TurnId, version: Version = V3, reason: FinishReason = FinishReason.STOP) -> Trajectory:
    made = sample(id.sample, node([4, 5], versions=version), attempt=id.attempt, reason=reason)
    return made._replace(turns=(made.turns[0]._replace(number=id.turn, branch=id.branch),))


def request(turn: int = 0, branches: int = 1, session: SessionId = SESSION) -> TurnRequest:
    ids = tuple(TurnId(session.sample, session.attempt, turn, branch) for branch in range(branches))
    return TurnRequest(ids, turn_request([1, 2]).context_ids, SAMPLING, str(session))


def ids(*turns: str) -> list[str]:
    return [f"{SESSION}/{turn}" for turn in turns]


class Peer:
    """A replica that answers what `answers` holds, or aborts what it is told to."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.aborted: list[str] = []
        self.answers: asyncio.Queue[Sequence[Trajectory] | Exception] = asyncio.Queue()
        self.was_asked = asyncio.Semaphore(0)

    async def generate(self, model: str, requests: Sequence[TurnRequest]) -> AsyncGenerator[Arrival, None]:
        missing = {id for request in requests for id in request.ids}
        self.asked.append([str(id) for request in requests for id in request.ids])
        self.was_asked.release()
        while missing:
            answer = await self.answers.get()
            if isinstance(answer, Exception):
                raise answer
            missing -= set(map(turn_id, answer))
            yield arrival(*answer)

    async def abort(self, id_prefix: str) -> int:
        self.aborted.append(id_prefix)
        self.answers.put_nowait([drawn(TurnId(*SESSION), reason=FinishReason.ABORT)])
        return 1


class Link(GatewayLink):
    """A gateway that notes what it is answered."""

    def __init__(self) -> None:
        self.log: list[str | UndrawnTurn] = []
        self.answered = asyncio.Semaphore(0)

    def answer(self, drawn: Sequence[Trajectory], undrawn: Sequence[UndrawnTurn]) -> None:
        self.log += [str(turn_id(turn)) for turn in drawn]
        self.log += undrawn
        for _ in (*drawn, *undrawn):
            self.answered.release()


class Run(Fleet):
    def __init__(self, *peers: Any) -> None:
        super().__init__(*peers)
        self.link = Link()
        self.recorded: list[OpenSession] = []
        self.log_when_recorded: list[int] = []  # answers that came before
        self.goes_on = True
        self.turns = SessionTurns(
            self.replicas,
            self.record,
            model="actor",
            max_attempts=3,
            sample_timeout_s=SAMPLE_TIMEOUT_S,
            timeout_s=100.0,
        )

    async def record(self, session: OpenSession) -> bool:
        self.log_when_recorded.append(len(self.link.log))
        self.recorded.append(session)
        return self.goes_on

    async def __aenter__(self) -> "Run":
        await self.route_all()
        self._tasks = asyncio.create_task(self._run())
        return self

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self.turns.start(tasks)

    async def __aexit__(self, *error: object) -> None:
        self._tasks.cancel()
        self.turns.stop()


@timed
async def test_a_turn_is_recorded_then_answered_and_its_branches_as_they_come() -> None:
    peer = Peer()
    async with Run(peer) as run:
        run.turns.want(run.link, [request(branches=2)])
        await peer.was_asked.acquire()
        assert peer.asked == [ids("0/0", "0/1")]
        first, second = request(branches=2).ids
        peer.answers.put_nowait([drawn(second)])
        await run.link.answered.acquire()
        assert run.link.log == ids("0/1")
        peer.answers.put_nowait([drawn(first)])
        await run.link.answered.acquire()
        assert run.link.log == ids("0/1", "0/0")
        assert run.recorded == [OpenSession(SESSION.sample, SESSION.attempt, V3)]
        assert run.turns.has_turn(SESSION)


@timed
async def test_a_session_is_recorded_again_at_each_newer_version_alone() -> None:
    peer = Peer()
    async with Run(peer) as run:
        for turn, version in enumerate((V3, V3, V4, V4)):
            run.members[0].latest = run.members[0].version = version
            run.turns.want(run.link, [request(turn)])
            peer.answers.put_nowait([drawn(request(turn).ids[0], version)])
            await run.link.answered.acquire()
        assert [session.version for session in run.recorded] == [V3, V4]
        assert run.log_when_recorded == [0, 2]  # before the turn is answered


@timed
async def test_a_turn_that_is_under_way_is_not_sent_again_and_goes_to_who_asked_last() -> None:
    peer, later = Peer(), Link()
    async with Run(peer) as run:
        run.turns.want(run.link, [request(branches=2)])
        await peer.was_asked.acquire()
        first, second = request(branches=2).ids
        peer.answers.put_nowait([drawn(first)])
        await run.link.answered.acquire()
        run.turns.want(later, [request(branches=2)])  # the first answer was lost with the stream
        await peer.was_asked.acquire()
        assert peer.asked == [ids("0/0", "0/1"), ids("0/0")]
        peer.answers.put_nowait([drawn(second)])
        await later.answered.acquire()
        peer.answers.put_nowait([drawn(first)])
        await later.answered.acquire()
        assert (run.link.log, later.log) == (ids("0/0"), ids("0/1", "0/0"))


@timed
async def test_a_lost_turn_is_sent_again_under_the_same_attempt_to_another_replica() -> None:
    lost, other = Peer(), Peer()
    async with Run(lost, other) as run:
        run.turns.want(run.link, [request()])
        await lost.was_asked.acquire()
        run.replicas.suspend(run.members[0], "it hangs")
        await other.was_asked.acquire()
        assert (lost.asked, other.asked) == ([ids("0/0")], [ids("0/0")])
        other.answers.put_nowait([drawn(request().ids[0])])
        await run.link.answered.acquire()
        assert run.link.log == ids("0/0")
        assert [member.load.in_hand for member in run.members] == [0, 0]


@timed
async def test_a_turn_that_is_lost_three_times_is_given_up_and_may_be_asked_for_again() -> None:
    peers = [Peer() for _ in range(3)]
    async with Run(*peers) as run:
        run.turns.want(run.link, [request()])
        for peer in peers:
            await peer.was_asked.acquire()
            peer.answers.put_nowait(ServiceUnavailableError("away"))  # the stream is joined once
            await peer.was_asked.acquire()
            peer.answers.put_nowait(ServiceUnavailableError("away"))
        await run.link.answered.acquire()
        reason = "3 attempts failed, the last: lost with rollout-2: away"
        assert run.link.log == [UndrawnTurn(request().ids[0], reason, None)]
        await run.replicas.route(run.members[0])
        run.turns.want(run.link, [request()])
        peers[0].answers.put_nowait([drawn(request().ids[0])])
        await run.link.answered.acquire()
        assert run.link.log[1:] == ids("0/0")


@timed
async def test_a_session_that_is_not_to_go_on_learns_it_for_every_branch() -> None:
    peer = Peer()
    async with Run(peer) as run:
        run.goes_on = False
        run.turns.want(run.link, [request(branches=2)])
        await peer.was_asked.acquire()
        peer.answers.put_nowait([drawn(request().ids[0])])
        await run.link.answered.acquire()
        assert [(str(turn.id), turn.end) for turn in run.link.log if isinstance(turn, UndrawnTurn)] == [
            (id, SessionEnd.CANCELLED) for id in ids("0/0", "0/1")
        ]
        assert not run.turns.has_turn(SESSION)


@timed
async def test_the_end_of_a_session_aborts_its_turn_and_no_other_sessions() -> None:
    peer, other = Peer(), SessionId(sample_id(0, 2), 0)
    async with Run(peer) as run:
        run.turns.want(run.link, [request(), request(session=other)])
        await peer.was_asked.acquire()
        run.turns.end(SESSION)
        assert run.link.log == [UndrawnTurn(request().ids[0], "its session has ended", None)]
        peer.answers.put_nowait([drawn(request(session=other).ids[0])])
        await run.link.answered.acquire()
        await run.link.answered.acquire()
        assert run.link.log[1:] == [f"{other}/0/0"]
        assert peer.aborted == [f"{SESSION}/0/"]
        assert len(peer.asked) == 1  # the aborted turn is not sent again


class GatewayOf:
    """A gateway's client: the stream carries what it wants, and never ends."""

    def __init__(self, *wanted: TurnRequest) -> None:
        self.wanted = wanted

    async def draw(self, answers: object) -> AsyncGenerator[Sequence[TurnRequest], None]:
        yield self.wanted
        await asyncio.Event().wait()


@timed
async def test_turns_of_a_gateway_that_is_gone_are_aborted_and_no_other_gateways() -> None:
    peer, other = Peer(), SessionId(sample_id(0, 2), 0)
    client: Any = GatewayOf(request())
    async with Run(peer) as run:
        gateways = Gateways()
        gateways.serve(run.turns.want, run.turns.leave)
        gateways.add("gateway-0", client)
        await peer.was_asked.acquire()
        run.turns.want(run.link, [request(session=other)])
        await peer.was_asked.acquire()
        gateways.remove(client)
        retried = request(1 << 16)  # the same, asked by the session's next holder
        run.turns.want(run.link, [retried])
        await peer.was_asked.acquire()
        peer.answers.put_nowait([drawn(request(session=other).ids[0])])
        await run.link.answered.acquire()
        peer.answers.put_nowait([drawn(retried.ids[0])])
        await run.link.answered.acquire()
        assert run.link.log == [f"{other}/0/0", *ids("65536/0")]
        assert peer.aborted == [f"{SESSION}/0/"]
        assert peer.asked == [ids("0/0"), [f"{other}/0/0"], ids("65536/0")]  # the aborted one once


@timed
async def test_a_session_ends_before_a_turn_of_one_version_too_many() -> None:
    peer = Peer()
    async with Run(peer) as run:
        run.turns.limit(SESSION, max_versions=1)
        run.turns.want(run.link, [request()])
        peer.answers.put_nowait([drawn(request().ids[0])])
        await run.link.answered.acquire()
        run.members[0].latest = run.members[0].version = V4
        run.turns.want(run.link, [request(1)])
        reason = "its session outlived too many versions"
        assert run.link.log == [*ids("0/0"), UndrawnTurn(request(1).ids[0], reason, SessionEnd.VERSIONS)]


@timed
async def test_a_replica_that_answers_another_turn_or_branch_violates_the_protocol() -> None:
    for wrong in (request(1).ids[0], request(branches=2).ids[1]):
        peer, other = Peer(), Peer()
        async with Run(peer, other) as run:
            run.turns.want(run.link, [request()])
            peer.answers.put_nowait([drawn(wrong)])
            await other.was_asked.acquire()
            assert (run.members[0].state, run.members[0].violations) == (ReplicaState.UNHEALTHY, 1)
            assert run.link.log == []


class Busy(Peer):
    """Draws whatever it is asked for, a call for each `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Semaphore(0)

    async def generate(self, model: str, requests: Sequence[TurnRequest]) -> AsyncGenerator[Arrival, None]:
        asked = [id for request in requests for id in request.ids]
        self.asked.append([str(id) for id in asked])
        self.was_asked.release()
        await self.go.acquire()
        yield arrival(*map(drawn, asked))


class Done:
    """A sink that knows when the last group is complete."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.reached = asyncio.Event()

    async def on_finished(self, samples: Sequence[Trajectory], payload: bytes) -> None: ...

    async def on_completed(self, group: PendingGroup) -> None:
        self.expected -= 1
        if not self.expected:
            self.reached.set()


@timed
async def test_groups_and_turns_of_sessions_take_turns_where_there_is_room() -> None:
    """However many groups wait, a session's turn waits for a few calls; and all are sent once."""
    peer = Busy()
    async with Run(peer) as run:
        run.members[0].load.slots = 4
        generating = asyncio.create_task(run.generation.run())
        groups, done = [pending(number, 4) for number in range(1, 101)], Done(100)
        run.generation.submit(groups, done)  # type: ignore[arg-type]
        for turn in range(5):
            run.turns.want(run.link, [request(turn)])
            while len(run.link.log) == turn:
                await peer.was_asked.acquire()  # each finished call makes room for another
                peer.go.release()
        for _ in range(100):
            peer.go.release()
        turns = [number for number, [id, *_] in enumerate(peer.asked) if id.startswith(str(SESSION))]
        assert max(np.diff(turns)) <= 4  # calls: what waited before it, and what filled the room meanwhile
        await done.reached.wait()
        asked = [id for call in peer.asked for id in call]
        assert len(asked) == len(set(asked)) == 100 * 4 + 5
        assert run.members[0].load.in_hand == 0
        generating.cancel()
