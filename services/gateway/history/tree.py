"""A session's state between turns: token ids and known conversations. No I/O.

    tree = SessionTree(records)
    match = tree.match(digest_request(request.messages, request.tools))
    context_ids = tree.context_ids(match.parent, match.branch)  # then request.messages[match.num_messages :]

Messages and log-probabilities stay with the records, in the store. Terms: a *context* is all messages of a
request that was answered, and a *reply* the message drawn after it. A conversation is held as far as it is
the beginning of a context or of a context with its reply.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np

from atoll.gateway.history.canonical import Digests, count_leading, link
from atoll.wire.types import Int32, Trajectory, TurnRecord, Version

ROOT: Final = -1  # parent of a turn that begins a conversation


class Cause(StrEnum):
    """Why a request does not simply continue the last turn of its conversation.

    Below, the matched reply is the deepest one that the request continues. The first cause that applies
    counts.
    """

    # Its tools and first system messages are new, and it has no assistant message (or is the first of all).
    NEW_CONVERSATION = "new conversation"
    # Its tools and first system messages are new, and it has assistant messages: of a conversation that began
    # with others.
    EDITED_PROMPT = "edited prompt"
    # None: no context has had the matched reply yet.
    NONE = ""
    # A turn had the very same context.
    RESAMPLED = "resampled"
    # It continues a turn's context that has the matched reply, with that turn's reply changed or left out.
    EDITED_REPLY = "edited reply"
    # It has assistant messages beyond what is held of it: something before them was changed or left out.
    EDITED_HISTORY = "edited history"
    # It continues the matched reply with other messages than an earlier context.
    PARALLEL = "parallel"
    # No reply matches: another conversation with known tools and system messages, as after a summary.
    RESTARTED = "restarted"
    # The template strips thinking from earlier turns, so the prompt is rendered again. The caller says so.
    THINKING = "thinking"
    # The named renderer cannot append what the request adds. The caller says so.
    RENDERER = "renderer"


class Match(NamedTuple):
    parent: int  # record with the reply that the request continues; ROOT: none
    branch: int  # which of its replies; 0 for ROOT
    num_messages: int  # of the request, up to and with that reply
    cause: Cause


Cache = tuple[str, Version | None]  # incarnation of a replica, and version of its weights


class _HeldTurn(NamedTuple):
    parent: int
    branch: int  # of the parent
    inserted_ids: Int32
    replies: tuple[Int32, ...]  # token ids, by branch
    chains: tuple[bytes, ...]  # by branch
    caches: tuple[Cache, ...]  # by branch: where its keys and values are


class SessionTree:
    """Of one session. Records are numbered in the order in which they are added. Mutable."""

    def __init__(self, records: Iterable[TurnRecord] = ()) -> None:
        self._turns: list[_HeldTurn] = []
        self._heads: set[bytes] = set()
        self._contexts: set[bytes] = set()
        self._passed: set[bytes] = set()  # beginnings of contexts, and the whole of them
        self._replies: dict[bytes, tuple[int, int]] = {}  # record and branch, the latest of equal ones
        self.num_turns = 0  # each reply is one
        self.num_produced = 0  # tokens
        self.num_recomputed = 0  # tokens of contexts that were computed before, elsewhere or by other weights
        self.branches: Counter[str] = Counter()  # turns by cause; those that continue the last have none
        for record in records:
            self.add(record)

    def __len__(self) -> int:
        """Records."""
        return len(self._turns)

    def add(self, record: TurnRecord) -> None:
        """A root's messages are all of its request's, any other's those behind its parent's reply."""
        replies = tuple(_copy(drawn.nodes[drawn.turns[0].node].token_ids) for drawn in record.drawn)
        self._remember_messages(record)
        position = len(self._turns)
        self._replies |= {chain: (position, branch) for branch, chain in enumerate(record.chains)}
        parent, branch = record.parent, record.parent_branch
        if parent != ROOT and _cache(record.drawn[0], 0) != self._turns[parent].caches[branch]:
            self.num_recomputed += self.num_tokens(parent, branch)
        caches = tuple(_cache(drawn, -1) for drawn in record.drawn)
        self._turns.append(
            _HeldTurn(parent, branch, _copy(record.inserted_ids), replies, record.chains, caches)
        )
        self.num_turns += len(replies)
        self.num_produced += sum(map(len, replies))
        if record.cause:
            self.branches[record.cause] += 1

    def match(self, request: Digests) -> Match:
        """For a request of one or more messages: the deepest reply such that it has the same messages up to
        it and at least one more; the latest of equally deep ones. Takes as long as it has messages, however
        many turns there are."""
        chains = request.chains
        last = next((i for i in range(len(chains) - 2, -1, -1) if chains[i] in self._replies), -1)
        parent, branch = self._replies[chains[last]] if last >= 0 else (ROOT, 0)
        return Match(parent, branch, last + 1, self._cause(request, last))

    def context_ids(self, parent: int, branch: int) -> Int32:
        """[T] all tokens down to the end of a reply; none for ROOT."""
        path = [(turn.inserted_ids, reply) for turn, reply in self._path(parent, branch)]
        return np.concatenate([np.zeros(0, np.int32), *(ids for turn in path[::-1] for ids in turn)])

    def num_tokens(self, parent: int, branch: int) -> int:
        """`len(context_ids(parent, branch))`, without a copy of them."""
        return sum(len(turn.inserted_ids) + len(reply) for turn, reply in self._path(parent, branch))

    def replies(self, parent: int, branch: int) -> list[Int32]:
        """Token ids of each reply down to and with one, the oldest first; none for ROOT."""
        return [reply for _, reply in self._path(parent, branch)][::-1]

    def _path(self, parent: int, branch: int) -> Iterator[tuple[_HeldTurn, Int32]]:
        """Turns with the reply that each continues with, the youngest first."""
        while parent != ROOT:
            turn = self._turns[parent]
            yield turn, turn.replies[branch]
            parent, branch = turn.parent, turn.branch

    def _remember_messages(self, record: TurnRecord) -> None:
        messages, chain = record.messages, record.head
        if record.parent == ROOT:
            messages = messages[count_leading(messages) :]  # the head stands for the others
        else:
            chain = self._turns[record.parent].chains[record.parent_branch]
        self._heads.add(record.head)
        for message in messages:
            self._passed.add(chain)
            chain = link(chain, message)
        self._passed.add(chain)
        self._contexts.add(chain)

    def _cause(self, request: Digests, last: int) -> Cause:
        """`last`: position of the matched reply, or -1."""
        chains = request.chains
        if request.head not in self._heads:
            is_new = request.last_assistant < 0 or not self._heads
            return Cause.NEW_CONVERSATION if is_new else Cause.EDITED_PROMPT
        if last >= 0 and chains[last] not in self._passed:
            return Cause.NONE
        if chains[-1] in self._contexts:
            return Cause.RESAMPLED
        if any(chain in self._contexts for chain in chains[max(last, 0) : -1]):
            return Cause.EDITED_REPLY
        held = (
            i
            for i in range(len(chains) - 1, -1, -1)
            if chains[i] in self._passed or chains[i] in self._replies
        )
        if request.last_assistant > next(held, -1):
            return Cause.EDITED_HISTORY
        return Cause.PARALLEL if last >= 0 else Cause.RESTARTED


def _cache(drawn: Trajectory, span: int) -> Cache:
    """While the turn's first (0) or last (-1) span was generated."""
    spans = drawn.nodes[0].spans
    return drawn.turns[0].origin.incarnation, spans[span].version if spans else None


def _copy(ids: Int32) -> Int32:
    """Of its own: a part of a message's array would keep the whole of it."""
    return np.array(ids, np.int32)
