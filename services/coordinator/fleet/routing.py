"""Routes groups to replicas. Pure: the time is an argument.

A replica runs `slots` samples concurrently. Once it holds fewer, it gets more: up to what it finishes in
AHEAD_S beyond its slots, so that it does not idle between two messages. The rest waits in the coordinator's
queue for a faster or new replica.

Letter in shapes: S replicas with room.
"""

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from atoll.wire.types import GroupId, Int32

AHEAD_S = 1.0  # of work beyond its slots that a replica may hold
MEMORY_S = 60.0  # time constant of the throughput average
MEAN_OVER = 1000  # finished samples in the mean response length
SLACK = 1.25  # a replica that has the prefix may finish this much later than the first
PREFIX_LENGTHS = (1024, 512, 256, 128, 64)  # tokens; shorter prefixes are cheaper to recompute
MAX_REMEMBERED = 1 << 14  # groups, sessions and prefixes whose replicas are remembered


@dataclass(frozen=True, slots=True, eq=False)
class ContextWork:
    """Turns after one context for one replica, which computes it once: a group's samples after their prompt,
    or a session's next turn."""

    group: GroupId
    context_ids: Int32  # [T]
    num_turns: int
    max_tokens: int  # of a turn
    session: str = ""  # turns of one session extend the same sequence; "": none

    def keys(self) -> Iterator[Hashable]:
        """Cache keys that a replica may have, most valuable first."""
        if self.session:
            yield self.session
        yield self.group
        for length in PREFIX_LENGTHS:
            if length <= len(self.context_ids):
                yield self.context_ids[:length].tobytes()


@dataclass(slots=True, eq=False)
class ReplicaLoad:
    """One replica's pending work and measured throughput."""

    name: str  # per incarnation, since a new one has an empty cache
    slots: int
    in_hand: int = 0  # samples sent and not yet returned
    prompt_tokens: float = 0.0  # their prompt tokens; a group's prompt counts once
    last_activity: float = 0.0  # last time it finished a sample, or got one while idle
    last_measured: float = 0.0  # time of the last throughput measurement
    _given: int = 0  # samples in hand after the last send
    _tokens: float = field(default=0.0, repr=False)  # tokens finished while busy, exponentially weighted
    _seconds: float = field(default=0.0, repr=False)  # of those

    @property
    def throughput(self) -> float | None:
        """Tokens per second while busy; None before the first measurement."""
        return self._tokens / self._seconds if self._tokens and self._seconds else None

    @property
    def has_room(self) -> bool:
        return self.in_hand < self.slots

    def tokens_in_hand(self, response_length: float) -> float:
        """Tokens in hand, if each response has `response_length` tokens."""
        return self.prompt_tokens + self.in_hand * response_length

    def max_in_hand(self, response_length: float) -> int:
        """Samples in hand from which on it gets no further group."""
        return self.slots + int((self.throughput or 0.0) * AHEAD_S / response_length)

    def record_sent(self, num_samples: int, prompt_tokens: float, now: float) -> None:
        if not self.in_hand:
            self.last_activity = now
        self.in_hand += num_samples
        self.prompt_tokens += prompt_tokens
        self._given = self.in_hand

    def record_finished(
        self, num_samples: int, prompt_tokens: float, response_tokens: int, now: float
    ) -> None:
        """Measures throughput while it is at least half full, since the longest samples of a batch run on
        with few others.
        """
        if 2 * self.in_hand >= self._given:
            elapsed = now - self.last_activity
            kept = math.exp(-elapsed / MEMORY_S)
            self._tokens = self._tokens * kept + response_tokens
            self._seconds = self._seconds * kept + elapsed
            self.last_measured = now
        self.last_activity = now
        self.record_released(num_samples, prompt_tokens)

    def record_released(self, num_samples: int, prompt_tokens: float) -> None:
        """No longer in hand, finished or not."""
        self.in_hand -= num_samples
        self.prompt_tokens = self.prompt_tokens - prompt_tokens if self.in_hand else 0.0

    def forget(self) -> None:
        """Resets the throughput measurement."""
        self._tokens = self._seconds = 0.0


class Router:
    """Sends each whole group to the replica that would finish it first, by tokens in hand and throughput, or
    to one that had the group, its session or its prompt prefix before if that is only slightly later.
    """

    def __init__(self) -> None:
        self.response_length = 1.0  # mean tokens of a finished sample; before that, the longest allowed
        self._num_finished = 0
        self._had: OrderedDict[Hashable, set[str]] = (
            OrderedDict()
        )  # names of replicas by cache key, oldest use first

    def record_finished(self, num_samples: int, response_tokens: int) -> None:
        """Updates the mean response length."""
        self._num_finished = min(self._num_finished + num_samples, MEAN_OVER)
        surplus = response_tokens - num_samples * self.response_length
        self.response_length = max(self.response_length + surplus / self._num_finished, 1.0)

    def _expect(self, max_tokens: int) -> None:
        """Before a sample has finished."""
        if not self._num_finished:
            self.response_length = max(self.response_length, float(max_tokens))

    def share(
        self, waiting: Iterable[ContextWork], loads: Iterable[ReplicaLoad], now: float
    ) -> list[tuple[ContextWork, ReplicaLoad]]:
        """Assigns waiting work in order until no replica has room.

        A replica whose measurement is MEMORY_S older than the others' is measured again: otherwise, under low
        load, one that was slow once (while compiling kernels, say) would never get work again.
        """
        loads = list(loads)
        takers = [load for load in loads if load.has_room]
        if not takers:
            return []
        latest = max(load.last_measured for load in loads)
        for load in takers:
            if not load.in_hand and latest - load.last_measured > MEMORY_S:
                load.forget()
        numbers = {load.name: number for number, load in enumerate(takers)}
        known = [load.throughput for load in takers if load.throughput]
        typical = sum(known) / len(known) if known else 1.0
        slowness_S = np.array([1 / (load.throughput or typical) for load in takers])
        ready_S = np.array([load.tokens_in_hand(self.response_length) for load in takers]) * slowness_S
        placed = []
        for work in waiting:
            self._expect(work.max_tokens)
            cost = len(work.context_ids) + work.num_turns * self.response_length
            finish_S = ready_S + cost * slowness_S
            number = self._choose(work, finish_S, takers, numbers)
            if finish_S[number] == math.inf:
                break
            load = takers[number]
            load.record_sent(work.num_turns, len(work.context_ids), now)
            full = load.in_hand >= load.max_in_hand(self.response_length)
            ready_S[number] = math.inf if full else finish_S[number]
            placed.append((work, load))
        return placed

    def forget(self, name: str) -> None:
        """Forgets a replica whose cache is gone."""
        for had in self._had.values():
            had.discard(name)

    def _choose(
        self,
        work: ContextWork,
        finish_S: NDArray[np.float64],
        takers: list[ReplicaLoad],
        numbers: dict[str, int],
    ) -> int:
        """The first to finish, or one with a cached prefix that finishes within SLACK of that."""
        first = chosen = int(finish_S.argmin())
        if finish_S[first] == math.inf:
            return first
        keys = list(work.keys())
        for key in keys:
            had = self._had.get(key, ())
            if takers[first].name in had:
                break
            there = [numbers[name] for name in had if name in numbers]
            nearest = min(there, key=finish_S.__getitem__, default=first)
            if nearest != first and finish_S[nearest] <= SLACK * finish_S[first]:
                chosen = nearest
                break
        for key in keys:
            self._remember(key, takers[chosen].name)
        return chosen

    def _remember(self, key: Hashable, name: str) -> None:
        self._had.setdefault(key, set()).add(name)
        self._had.move_to_end(key)
        if len(self._had) > MAX_REMEMBERED:
            self._had.popitem(last=False)
