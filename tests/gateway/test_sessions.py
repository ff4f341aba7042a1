"""Two gateway instances over one store take a session from each other."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from atoll.gateway.conversation import ChatRequest, RequestError
from atoll.gateway.draws import Draws, UndrawnError
from atoll.gateway.history.tree import Cause
from atoll.gateway.session_store import SessionStore
from atoll.gateway.sessions import AskedTurn, Sessions
from atoll.gateway.templates.chat_format import ChatFormat
from atoll.gateway.turns import Turns
from atoll.runtime.store import Store, run_embedded_server
from atoll.wire.types import (
    Message,
    Sampling,
    SessionEnd,
    SessionId,
    SessionLimits,
    SessionReward,
    SessionSpec,
    TurnRecord,
    TurnRequest,
)
from tests import builders
from tests.gateway.model_folders import make_folder

ID = SessionId(builders.sample_id(), 0)
KEY = "the agent's key"
ASK, MORE, OTHER = Message("user", "12+34="), Message("user", "And now?"), Message("user", "A title, please")
FIRST, SIDE = ChatRequest((ASK,)), ChatRequest((Message("system", "You name things."), OTHER))
SECOND = ChatRequest((ASK, Message("assistant", "46"), MORE))
THIRD = ChatRequest((*SECOND.messages, Message("assistant", "Still 46"), MORE))


@pytest.fixture(scope="module")
def chat_format(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat(make_folder(tmp_path_factory.mktemp("model"), "qwen3", tiny=True), thinking="keep")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run_embedded_server(tmp_path_factory.mktemp("store")) as server:
        yield server.url


def spec(key: str = KEY) -> SessionSpec:
    return SessionSpec(ID, key, f"reward {key}", Sampling(64), SessionLimits())


class Instance:
    """A gateway without its servers, whose turns are drawn by the test."""

    def __init__(self, store: Store, chat_format: ChatFormat) -> None:
        self.store = SessionStore(store)
        self.sessions, self.draws = Sessions(self.store), Draws()
        self.turns = Turns(self.sessions, self.store, self.draws, chat_format, 1000)
        self._format = chat_format
        self._stop = chat_format.encoder.token_id("<|im_end|>") or 0
        self._wanted = self.draws.wanted(object())

    async def ask(self, chat: ChatRequest, body: bytes) -> AskedTurn:
        return self.turns.ask(await self.sessions.of_agent(KEY), body, chat)

    async def wanted(self) -> TurnRequest:
        [request] = await anext(self._wanted)
        return request

    def draw(self, request: TurnRequest, text: str) -> None:
        id = request.ids[0]
        ids = [*self._format.encoder.encode_whole(text), self._stop]
        drawn = builders.sample(id.sample, builders.node(ids), text=text)
        turn = drawn.turns[0]._replace(number=id.turn, branch=id.branch)
        self.draws.deliver([drawn._replace(turns=(turn,))])

    async def play(self, chat: ChatRequest, body: bytes, text: str) -> TurnRecord:
        asked = await self.ask(chat, body)
        self.draw(await self.wanted(), text)
        return await asked.record

    async def records(self) -> list[TurnRecord]:
        return (await self.store.show(ID))[0]


@pytest.fixture
async def instances(
    url: str, chat_format: ChatFormat, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[Instance, Instance]]:
    """The first has opened the session."""
    store = Store(url, request.node.name)
    await store.take_epoch()
    one, other = Instance(store, chat_format), Instance(store, chat_format)
    assert await one.sessions.open([spec()]) == {ID}
    yield one, other
    await store.close()


def sampled(record: TurnRecord) -> list[int]:
    return record.drawn[0].nodes[0].token_ids.tolist()


async def test_a_turn_is_finished_by_whom_the_session_was_taken_from(
    instances: tuple[Instance, Instance],
) -> None:
    one, other = instances
    asked = await one.ask(FIRST, b"first")
    request = await one.wanted()
    side = await other.play(SIDE, b"side", "Sums")
    one.draw(request, "46")
    first = await asked.record
    assert [record.number for record in await one.records()] == [side.number, first.number]
    assert first.number == request.ids[0].turn
    assert one.sessions.counters["sessions_taken_back"] == 1
    second = await one.play(SECOND, b"second", "Still 46")
    assert second.parent == 1
    assert len({record.number for record in await one.records()}) == 3


async def test_the_same_request_at_both_is_one_turn(instances: tuple[Instance, Instance]) -> None:
    one, other = instances
    asked = await one.ask(FIRST, b"first")
    request = await one.wanted()
    finished = await other.play(FIRST, b"first", "46")
    one.draw(request, "No idea")
    assert sampled(await asked.record) == sampled(finished)
    assert len(await one.records()) == 1


async def test_a_retry_at_another_instance_gets_the_very_same_answer(
    instances: tuple[Instance, Instance],
) -> None:
    one, other = instances
    finished = await one.play(FIRST, b"first", "46")
    for instance in (other, one):
        asked = await instance.ask(FIRST, b"first")
        replayed = await asked.record
        answers = [
            each.turns.answer(await each.sessions.of_agent(KEY), record, FIRST, "model")
            for each, record in ((one, finished), (instance, replayed))
        ]
        assert sampled(replayed) == sampled(finished)
        assert answers[0] == answers[1]
    assert len(await one.records()) == 1


async def test_a_delivered_answer_is_not_replayed(instances: tuple[Instance, Instance]) -> None:
    one, other = instances
    await one.play(FIRST, b"first", "46")
    session = await one.sessions.of_agent(KEY)
    one.turns.note_delivered(session, b"first", session.asked[b"first"])
    while not (await other.store.take(ID)).delivered:
        pass  # it is noted soon
    beside = await other.play(FIRST, b"first", "47")
    assert beside.cause == Cause.RESAMPLED
    assert len(await one.records()) == 2


async def test_a_turn_after_one_that_another_instance_finished_is_drawn_after_its_tokens(
    instances: tuple[Instance, Instance],
) -> None:
    one, other = instances
    await one.play(FIRST, b"first", "46")
    second = await other.play(SECOND, b"second", "Still 46")
    asked = await one.ask(THIRD, b"third")
    one.draw(await one.wanted(), "drawn after what the instance knew")
    request = await one.wanted()
    one.draw(request, "46")
    third = await asked.record
    assert third.parent == 1
    held = request.context_ids[: len(request.context_ids) - len(third.inserted_ids)].tolist()
    assert held[-len(sampled(second)) :] == sampled(second)
    assert [record.cause for record in await one.records()][1:] == ["", ""]


async def test_a_turn_of_a_session_that_ended_elsewhere_is_refused(
    instances: tuple[Instance, Instance],
) -> None:
    one, other = instances
    asked = await one.ask(FIRST, b"first")
    request = await one.wanted()
    await other.sessions.end(ID, SessionEnd.SECONDS)
    one.draw(request, "46")
    with pytest.raises(RequestError, match="has ended"):
        await asked.record
    with pytest.raises(RequestError, match="no open session"):
        await other.ask(FIRST, b"first")


async def test_a_limit_keeps_the_rewards_that_were_set_before_it(
    instances: tuple[Instance, Instance],
) -> None:
    one, other = instances
    record = await one.play(FIRST, b"first", "46")
    await one.sessions.reward(spec().reward_key, "call", 0.5, "judge", None)
    await one.sessions.end(ID, SessionEnd.TURNS)
    with pytest.raises(RequestError) as refused:
        await one.sessions.reward(spec().reward_key, "late", 1.0, "judge", None)
    assert refused.value.status == 401
    ended = await other.sessions.end(ID, SessionEnd.AGENT_FAILED)  # since its next turn was refused
    assert (ended.end, ended.rewards) == (SessionEnd.TURNS, (SessionReward("judge", 0.5, None),))
    assert [each.number for each in ended.records] == [record.number]


async def test_after_a_limit_there_is_no_turn_but_a_reward_until_the_end(
    instances: tuple[Instance, Instance],
) -> None:
    one, other = instances
    record = await one.play(FIRST, b"first", "46")
    await one.sessions.stop(ID, SessionEnd.TURNS)
    for instance in instances:
        with pytest.raises(RequestError, match="no open session"):
            await instance.ask(SECOND, b"second")
    await other.sessions.reward(spec().reward_key, "call", 0.5, "judge", None)
    ended = await other.sessions.end(ID, SessionEnd.DONE)
    assert (ended.end, ended.rewards) == (SessionEnd.TURNS, (SessionReward("judge", 0.5, None),))
    assert [each.number for each in ended.records] == [record.number]
    assert [instance.sessions.counters["sessions_ended: turns"] for instance in instances] == [0, 1]
    with pytest.raises(RequestError, match="no open session"):
        await other.sessions.reward(spec().reward_key, "late", 1.0, "judge", None)


async def test_an_opening_whose_answer_was_lost_is_repeated_anywhere(
    instances: tuple[Instance, Instance],
) -> None:
    one, other = instances
    assert await other.sessions.open([spec()]) == {ID}
    assert await other.sessions.open([spec("of a coordinator that came later")]) == set()
    first = await other.play(FIRST, b"first", "46")
    side = await one.play(SIDE, b"side", "Sums")
    assert first.number != side.number
    assert len(await one.records()) == 2


async def test_the_end_of_a_stream_leaves_the_one_that_took_its_place() -> None:
    draws, old, new = Draws(), object(), object()
    before, after = draws.wanted(old), draws.wanted(new)
    waiting = asyncio.create_task(anext(before, None))
    asked = asyncio.create_task(draws.draw(builders.turn_request([1])))
    assert await waiting
    [again] = await anext(after)
    draws.interrupt(old)
    draws.give_up(again.ids[0], "no replica", None)
    with pytest.raises(UndrawnError):
        await asked
    later = asyncio.create_task(draws.draw(builders.turn_request([2])))
    [request] = await anext(after)
    assert request.context_ids.tolist() == [2]
    later.cancel()
