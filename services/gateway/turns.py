"""One turn: from a request's messages to exact tokens, and from sampled tokens to a finished record.

What the policy produced never meets a tokenizer again: a request's context is the ids that the session's tree
holds, and the ids of its new messages behind them.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from atoll.gateway.conversation import ChatAnswer, ChatRequest, Reply, RequestError, TokenLogprob
from atoll.gateway.draws import Draws, UndrawnError
from atoll.gateway.history.canonical import digest_request, link
from atoll.gateway.history.tree import ROOT, Cause, Match
from atoll.gateway.session_store import SessionEndedError, SessionStore, SessionTakenError
from atoll.gateway.sessions import AskedTurn, Session, Sessions, reply_name, turn_name
from atoll.gateway.templates.chat_format import ChatFormat
from atoll.gateway.templates.demands import unmet
from atoll.gateway.templates.replies import ParsedReply
from atoll.wire.types import (
    Int32,
    Message,
    SessionEnd,
    Trajectory,
    TurnId,
    TurnRecord,
    TurnRequest,
)

MAX_OPEN_TURNS: Final = 256  # of a session, being drawn at the same time
RETRY: Final = "try again: the same request is the same turn"


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """What the policy sees before a turn."""

    match: Match
    held_ids: Int32  # [T] what the session's tree holds of it
    new_ids: Int32  # [T] behind that
    new_messages: tuple[Message, ...]  # that they stand for
    head: bytes  # digest of tools and first system messages
    chain: bytes  # digest of tools and all messages

    def __len__(self) -> int:
        return len(self.held_ids) + len(self.new_ids)


class Turns:
    def __init__(
        self, sessions: Sessions, store: SessionStore, draws: Draws, chat_format: ChatFormat, max_length: int
    ) -> None:
        """`max_length`: tokens of a context and a reply together."""
        self._sessions = sessions
        self._store = store
        self._draws = draws
        self._format = chat_format
        self._max_length = max_length

    def ask(self, session: Session, body: bytes, chat: ChatRequest) -> AskedTurn:
        """The turn of a request with this digest of its body. As long as its answer has not arrived at a
        client, a repeated request is the same turn; after that, it is a turn beside it."""
        asked = session.asked.get(body)
        if asked is not None and not _has_failed(asked):
            self._sessions.counters["turns_joined"] += 1
            return asked
        if finished := session.undelivered.get(body):
            self._sessions.counters["turns_replayed"] += 1
            asked = AskedTurn.of_finished(finished)
        else:
            if sum(not other.record.done() for other in session.asked.values()) >= MAX_OPEN_TURNS:
                raise RequestError(
                    429, "rate_limit", f"{MAX_OPEN_TURNS} turns of this session are being drawn; try again"
                )
            asked = AskedTurn(asyncio.create_task(self._draw(session, body, chat)))
            asked.record.add_done_callback(lambda _: _drop_failed(session, body, asked))
        session.asked[body] = asked
        return asked

    def note_delivered(self, session: Session, body: bytes, asked: AskedTurn) -> None:
        """The answer's last byte has gone to a client that was there."""
        if session.asked.get(body) is asked:
            del session.asked[body]
            session.undelivered.pop(body, None)
            self._store.note_delivered(session.id, asked.record.result().number)

    def note_undelivered(self, session: Session, body: bytes, asked: AskedTurn) -> None:
        """The client disconnected without reading the whole answer."""
        if session.asked.setdefault(body, asked) is asked:
            self._store.note_undelivered(session.id, asked.record.result().number)

    async def result(self, asked: AskedTurn) -> TurnRecord:
        """Raises RequestError if it was not drawn, or its session has ended."""
        try:
            return await asyncio.shield(asked.record)
        except asyncio.CancelledError:
            if asked.record.cancelled():
                raise _ended(None) from None
            raise

    async def count(self, session: Session, chat: ChatRequest) -> int:
        """Tokens of the request's context."""
        return len(await self._context(session, chat))

    def answer(self, session: Session, record: TurnRecord, chat: ChatRequest, model: str) -> ChatAnswer:
        """The same for the same record, whichever instance gives it."""
        first = record.drawn[0].turns[0]
        name = turn_name(session.id, record.number)
        held = session.tree.num_tokens(record.parent, record.parent_branch)
        return ChatAnswer(
            name=name,
            created=int(first.finished),
            model=model,
            prompt_tokens=held + len(record.inserted_ids),
            cached_tokens=held,
            replies=tuple(self._reply(session, drawn, chat) for drawn in record.drawn),
        )

    def _reply(self, session: Session, drawn: Trajectory, chat: ChatRequest) -> Reply:
        parsed, node = self._parse(session, drawn, chat), drawn.nodes[drawn.turns[0].node]
        logprobs: Sequence[TokenLogprob] = ()
        if chat.logprobs:
            texts = [self._format.encoder.decode([id]) for id in node.token_ids.tolist()]
            logprobs = [
                TokenLogprob(text, text.encode(), logprob)
                for text, logprob in zip(texts, node.logprobs.tolist(), strict=True)
            ]
        return Reply(
            parsed.message,
            parsed.end,
            len(node.token_ids),
            parsed.num_thinking_tokens,
            parsed.stop_sequence,
            logprobs,
        )

    def _parse(self, session: Session, drawn: Trajectory, chat: ChatRequest) -> ParsedReply:
        turn = drawn.turns[0]
        return self._format.parse(
            drawn.nodes[turn.node].token_ids,
            name=reply_name(session.id, turn),
            finish_reason=turn.finish_reason,
            stop=(*session.spec.sampling.stop, *chat.stop),
            tools=chat.tools,
        )

    async def _draw(self, session: Session, body: bytes, chat: ChatRequest) -> TurnRecord:
        while True:
            await self._check_limits(session)
            context = await self._context(session, chat)
            drawn = await self._draw_after(session, chat, context)
            record = self._record(session, body, chat, context, drawn)
            if finished := await self._finish(session, chat, record):
                return finished

    async def _draw_after(
        self, session: Session, chat: ChatRequest, context: Context
    ) -> Sequence[Trajectory]:
        room = self._max_length - len(context)
        session.overflowed = room < 1
        if session.overflowed:
            self._sessions.counters["context_overflows"] += 1
            raise RequestError.of_overflow(len(context), self._max_length)
        request = self._request(session, chat, context, room)
        try:
            return await self._draws.draw(request)
        except UndrawnError as error:
            if error.end is None:
                raise RequestError(503, "unavailable", f"the turn was not drawn: {error}; {RETRY}") from None
            await self._sessions.stop(session.id, error.end)
            raise _ended(error.end) from None

    async def _check_limits(self, session: Session) -> None:
        limits = session.spec.limits
        for reason, limit, used in (
            (SessionEnd.TURNS, limits.turns, session.tree.num_turns),
            (SessionEnd.TOKENS, limits.tokens, session.tree.num_produced),
        ):
            if limit and used >= limit:
                await self._sessions.stop(session.id, reason)
                raise _ended(reason)

    async def _context(self, session: Session, chat: ChatRequest) -> Context:
        digests = digest_request(chat.messages, chat.tools)
        match = session.tree.match(digests)
        held = session.tree.context_ids(match.parent, match.branch)
        new = chat.messages[match.num_messages :]
        if match.parent != ROOT and (cause := self._branch_cause(session, match, new)):
            match, held, new = Match(ROOT, 0, 0, Cause(cause)), held[:0], chat.messages
        if match.parent == ROOT:
            ids = await self._format.root(chat.messages, chat.tools, chat.demands)
        else:
            ended = int(held[-1]) in self._format.stop_ids
            ids = await self._format.suffix(new, ended=ended, demands=chat.demands)
        return Context(match, held, ids, new, digests.head, digests.chains[-1])

    def _branch_cause(self, session: Session, match: Match, new: Sequence[Message]) -> str:
        """Why the new messages cannot follow the reply; "": they can."""
        replies = session.tree.replies(match.parent, match.branch)
        thinks = self._format.thinking == "template" and any(map(self._format.has_thinking, replies))
        return self._format.branch_cause(new, has_thinking=thinks)

    def _request(self, session: Session, chat: ChatRequest, context: Context, room: int) -> TurnRequest:
        sampling, limits = session.spec.sampling, session.spec.limits
        bounds = [sampling.max_new_tokens, room]
        if chat.max_tokens is not None:
            bounds.append(chat.max_tokens)
        if limits.tokens:
            bounds.append(limits.tokens - session.tree.num_produced)
        number = session.next_number()
        id = session.id
        return TurnRequest(
            ids=tuple(TurnId(id.sample, id.attempt, number, branch) for branch in range(chat.n)),
            context_ids=np.concatenate((context.held_ids, context.new_ids)),
            sampling=replace(sampling, max_new_tokens=min(bounds), stop=tuple({*sampling.stop, *chat.stop})),
            session=str(id),
            num_routed=max(len(context.held_ids) - 1, 0),  # its last token is computed in this turn
        )

    def _record(
        self, session: Session, body: bytes, chat: ChatRequest, context: Context, drawn: Sequence[Trajectory]
    ) -> TurnRecord:
        replies = [self._parse(session, each, chat) for each in drawn]
        counters = self._sessions.counters
        for parsed in replies:
            counters["malformed_calls"] += parsed.num_malformed_calls
            counters["unmet_demands"] += bool(unmet(chat.demands, parsed.message))
        return TurnRecord(
            number=drawn[0].turns[0].number,
            request=body,
            parent=context.match.parent,
            parent_branch=context.match.branch,
            head=context.head,
            has_tools=bool(chat.tools),
            inserted_ids=context.new_ids,
            messages=context.new_messages,
            cause=context.match.cause,
            drawn=tuple(drawn),
            chains=tuple(link(context.chain, parsed.message) for parsed in replies),
        )

    async def _finish(self, session: Session, chat: ChatRequest, record: TurnRecord) -> TurnRecord | None:
        """The turn is finished once the store has it. If another instance has taken the session, this one
        takes it back and keeps that instance's turns; if one of them answers the same request, it is the
        result. None: the request continues a turn of that instance that this one had not seen."""
        while True:
            try:
                position = await self._store.finish(session.id, session.fence, record)
            except SessionTakenError:
                await self._sessions.take(session.id)
                if other := session.undelivered.get(record.request):
                    return other
                match = (await self._context(session, chat)).match
                if (match.parent, match.branch) != (record.parent, record.parent_branch):
                    return None
            except SessionEndedError:
                raise _ended(None) from None
            else:
                if position == len(session.tree):  # if not, it was there when the session was taken back
                    self._add(session, record)
                return record

    def _add(self, session: Session, record: TurnRecord) -> None:
        counters, recomputed = self._sessions.counters, session.tree.num_recomputed
        session.tree.add(record)
        counters["turns"] += len(record.drawn)
        counters["recomputed_prefill_tokens"] += session.tree.num_recomputed - recomputed
        if record.cause:
            counters[f"branches: {record.cause}"] += 1


def _drop_failed(session: Session, body: bytes, asked: AskedTurn) -> None:
    """Its exception would hold the whole request for as long as the session is open."""
    if _has_failed(asked) and session.asked.get(body) is asked:
        del session.asked[body]


def _has_failed(asked: AskedTurn) -> bool:
    return asked.record.done() and (asked.record.cancelled() or asked.record.exception() is not None)


def _ended(reason: SessionEnd | None) -> RequestError:
    why = f": {reason.value}" if reason else ""
    return RequestError(403, "permission", f"this session has ended{why}; no further turn will be drawn")
