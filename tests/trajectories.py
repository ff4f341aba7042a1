"""Random trajectories, and a brute-force reading of them: every token, its whole context and what it follows.

The reading knows samples, nodes and contexts as plain tuples: no segments, no branches, no flat arrays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from hypothesis import strategies as st

from atoll.runtime.trajectory import extend
from atoll.wire.types import (
    NEW_CONVERSATION,
    WHOLE,
    Group,
    Node,
    Trajectory,
    TurnReward,
    Version,
    VersionSpan,
)
from tests import builders
from tests.builders import sample_id

PROMPT = (1, 2)
GAMMA = 0.9
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One turn, relative to those before: `of` counts them, modulo how many there are."""

    kind: str  # "continue", "again", "cut" or "new"
    of: int
    inserted: list[int]
    produced: list[int]


def calls(max_tokens: int = 3) -> st.SearchStrategy[Call]:
    """Few different tokens, so that contexts meet by accident, too."""
    some = st.lists(st.integers(1, 5), max_size=2)
    kinds = st.sampled_from(["continue", "continue", "again", "cut", "new"])
    produced = st.lists(st.integers(1, 5), max_size=max_tokens)
    return st.builds(Call, kinds, st.integers(0, 7), some, produced)


def play(session: Sequence[Call]) -> Iterator[tuple[list[int], list[int]]]:
    """Context and produced tokens of each turn; the first one's context begins with the prompt."""
    turns: list[tuple[list[int], list[int]]] = []
    for call in session:
        context, produced = turns[call.of % len(turns)] if turns else (list(PROMPT), [])
        match call.kind:
            case "continue":
                context = [*context, *produced, *call.inserted]
            case "cut":  # an edited history: the beginning of an old context, then other words
                context = [*context[: 1 + call.of % len(context)], *call.inserted]
            case "new":
                context = [3, 4, *call.inserted]
        turns.append((context, call.produced))
        yield turns[-1]


def turn(
    nodes: tuple[Node, ...], context: Sequence[int], produced: Sequence[int]
) -> tuple[tuple[Node, ...], int]:
    """The nodes with one more turn below PROMPT, at version l:0 with log-probabilities of -1."""
    return extend(
        nodes,
        np.array(PROMPT, np.int32),
        np.array(context, np.int32),
        token_ids=np.array(produced, np.int32),
        logprobs=np.full(len(produced), -1, np.float32),
        spans=(VersionSpan(Version("l", 0), 0, len(produced)),),
    )


def path(nodes: Sequence[Node], number: int) -> Tokens:
    """All tokens down to the end of a node or of what is above the first ones."""
    if number < 0:
        return () if number == NEW_CONVERSATION else PROMPT
    return path(nodes, nodes[number].parent) + tuple(nodes[number].token_ids.tolist())


@st.composite
def batches(draw: st.DrawFn, samples: int = 2) -> list[Group]:
    groups = []
    for number in range(draw(st.integers(1, 2))):
        drawn = []
        for index in range(samples):
            nodes: tuple[Node, ...] = ()
            for context, produced in play(draw(st.lists(calls(), min_size=1, max_size=5))):
                nodes, _ = turn(nodes, context, produced)
            drawn.append(sample(number, index, nodes, draw(st.lists(st.integers(0, 7), max_size=3))))
        greedy = sample(number, samples, (builders.node([3]),), [number])
        groups.append(builders.group(*drawn, ids=PROMPT, baseline=greedy))
    return groups


def sample(number: int, index: int, nodes: tuple[Node, ...], rewarded: Sequence[int]) -> Trajectory:
    """Rewards at some of its turns; every other one is for the whole trajectory."""
    turns = [i for i, node in enumerate(nodes) if node.loss_mask.any()]
    rewards = []
    for k, which in enumerate(rewarded):
        node = WHOLE if k % 2 or not turns else turns[which % len(turns)]
        value = (which - 3) / 4
        rewards.append(TurnReward(node, value, {"exact_match": value}))
    rewards.append(TurnReward(WHOLE, 0.5, {"exact_match": 0.5}))
    return builders.sample(sample_id(number, index), *nodes, rewards=tuple(rewards))


def said_after(context: Tokens) -> float:
    """What a critic says after these tokens; some number of its own for each."""
    return (sum((i + 2) * token for i, token in enumerate(context)) % 11) / 7


@dataclass(frozen=True)
class Token:
    node: int
    context: Tokens  # all before it
    id: int
    after: int  # number of the token that it follows, among those of its sample; -1: none


class Reading:
    """A sample's produced tokens, in time order."""

    def __init__(self, sample: Trajectory) -> None:
        self.sample, nodes = sample, sample.nodes
        self.tokens: list[Token] = []
        last: dict[int, int] = {}  # of each decision, its last token
        follows: dict[int, int] = {}
        for k, node in enumerate(nodes):
            if not node.loss_mask.any():
                continue
            follows[k] = self._follows(k, follows)
            before = last.get(follows[k], -1)
            context = path(nodes, node.parent)
            for id in node.token_ids.tolist():
                self.tokens.append(Token(k, context, id, before))
                context, before = (*context, id), len(self.tokens) - 1
            last[k] = before

    def _follows(self, k: int, follows: dict[int, int]) -> int:
        """The latest decision without a pair of alternatives, one in its history and one above `k`; those of
        `k` itself have the same history."""
        nodes = self.sample.nodes
        for j in follows:
            if self._are_alternatives(j, k):
                return follows[j]
        above = [j for j in follows if j in self._ancestors(k)]
        for j in reversed(follows):
            history = [j]
            while follows[history[-1]] >= 0:
                history.append(follows[history[-1]])
            if not any(self._are_alternatives(a, b) for a in history for b in above):
                return j
        assert not follows, nodes
        return -1

    def _ancestors(self, k: int) -> list[int]:
        parent = self.sample.nodes[k].parent
        return [parent, *self._ancestors(parent)] if parent >= 0 else []

    def _are_alternatives(self, a: int, b: int) -> bool:
        nodes = self.sample.nodes
        return a != b and nodes[a].parent == nodes[b].parent

    @cached_property
    def history(self) -> list[list[int]]:
        """Of each token: itself and all that it follows, the nearest first."""
        histories: list[list[int]] = []
        for number, token in enumerate(self.tokens):
            histories.append([number, *(histories[token.after] if token.after >= 0 else [])])
        return histories

    def carried_back(self, terms: Sequence[float], discount: float) -> list[float]:
        """Of each token: every term at or after it, once, discounted by how many tokens lie in between."""
        sums = [0.0] * len(self.tokens)
        for number, term in enumerate(terms):
            for distance, before in enumerate(self.history[number]):
                sums[before] += discount**distance * term
        return sums

    @cached_property
    def turn_history(self) -> dict[int, list[int]]:
        """Of each turn, by its node: itself and all that it follows, the nearest first."""
        return {
            token.node: list(dict.fromkeys(self.tokens[i].node for i in history))
            for token, history in zip(self.tokens, self.history, strict=True)
        }

    def carried_back_by_turn(self, terms: dict[int, float], discount: float) -> dict[int, float]:
        """Of each turn: every term at or after it, once, discounted by how many turns lie in between."""
        sums = dict.fromkeys(self.turn_history, 0.0)
        for node, term in terms.items():
            for distance, before in enumerate(self.turn_history[node]):
                sums[before] += discount**distance * term
        return sums

    def on_tokens(self, of_turns: dict[int, float]) -> list[float]:
        return [of_turns[token.node] for token in self.tokens]

    @cached_property
    def rewards(self) -> list[float]:
        at = [0.0] * len(self.tokens)
        for reward in self.sample.rewards if at else ():
            place = max(i for i, t in enumerate(self.tokens) if reward.node in (WHOLE, t.node))
            at[place] += reward.value
        return at

    @cached_property
    def values(self) -> list[float]:
        return [float(np.float32(said_after(token.context))) for token in self.tokens]

    @cached_property
    def errors(self) -> list[float]:
        next_values = [0.0] * len(self.tokens)
        for token, value in zip(self.tokens, self.values, strict=True):
            if token.after >= 0:
                next_values[token.after] += value
        return [r + GAMMA * n - v for r, n, v in zip(self.rewards, next_values, self.values, strict=True)]

    @cached_property
    def turn_rewards(self) -> dict[int, float]:
        sums = dict.fromkeys(self.turn_history, 0.0)
        for token, reward in zip(self.tokens, self.rewards, strict=True):
            sums[token.node] += reward
        return sums

    @cached_property
    def turn_values(self) -> dict[int, float]:
        """Before the first token of each turn."""
        backwards = zip(reversed(self.tokens), reversed(self.values), strict=True)
        return {token.node: value for token, value in backwards}

    @cached_property
    def turn_errors(self) -> dict[int, float]:
        next_values = dict.fromkeys(self.turn_history, 0.0)
        for node, (_, *before) in self.turn_history.items():
            if before:
                next_values[before[0]] += self.turn_values[node]
        return {
            node: reward + GAMMA * next_values[node] - self.turn_values[node]
            for node, reward in self.turn_rewards.items()
        }


def read(groups: Sequence[Group]) -> list[list[Reading]]:
    return [[Reading(each) for each in group.samples] for group in groups]
