"""Continuous batching: waiting groups, running rows, finished samples. Owned by one thread.

Rows [0, num_rows) run; each has the same number in the KV cache and in every array here. A row that
finishes is replaced by the last one, so that a step costs what its running rows cost, and the next
waiting sample takes the free row before the next step.

Letters in shapes: R rows, P prompts, S prompt positions, V vocabulary, W stop tokens, T response tokens.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from atoll.rollout.engines.base import Completion
from atoll.rollout.engines.local_model import KVCache, LocalModel, Prefix
from atoll.rollout.engines.local_output import PartialOutput, empty_output
from atoll.rollout.engines.local_sessions import SessionCache
from atoll.rollout.engines.sampling import draw, stream_key, uniforms
from atoll.wire.types import FinishReason, Int32, Routes, TurnId, TurnRequest, Version

Call = TypeVar("Call")  # identifies the caller; passed through

PREFILL_TOKENS = 8192  # of one prefill, padding included; a longer prompt goes alone

ROW = np.dtype(
    [
        ("key", np.uint64),  # names the random stream
        ("length", np.int64),  # positions in the KV cache
        ("produced", np.int64),  # response tokens
        ("limit", np.int64),  # of response tokens
        ("token", np.int64),  # the newest; not in the cache yet
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("watched", np.bool_),  # has stop strings
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeRequest(Generic[Call]):
    """One requested turn."""

    call: Call
    request: TurnRequest
    id: TurnId
    output: PartialOutput | None = None  # of a retracted sample

    @property
    def num_produced(self) -> int:
        return 0 if self.output is None else len(self.output.token_ids_T)

    def ids(self) -> Int32:
        """Context, and what was produced."""
        context_ids = self.request.context_ids
        return context_ids if self.output is None else np.concatenate([context_ids, self.output.token_ids_T])


@dataclass(slots=True, eq=False)
class _WaitingGroup(Generic[Call]):
    """Samples of a group without a row yet, or one retracted sample."""

    tickets: list[_DecodeRequest[Call]]
    prefix: Prefix | None = None  # kept if free rows did not suffice for the whole group

    @property
    def length(self) -> int:
        ticket = self.tickets[0]
        return len(ticket.request.context_ids) + ticket.num_produced

    @property
    def session(self) -> str:
        return self.tickets[0].request.session


@dataclass(frozen=True, slots=True, eq=False)
class _RunningRow(Generic[Call]):
    """Data of a running row that steps do not use."""

    ticket: _DecodeRequest[Call]
    started: float
    versions: list[tuple[Version, int]]  # and the number of the first token of each


class Decoder(Generic[Call]):
    def __init__(
        self, model: LocalModel, tokenizer: Tokenizer, slots: int, max_length: int, version: Version
    ) -> None:
        self.version = version
        self.tokens_generated = 0
        self.tokens_prefilled = 0
        self._slots = slots
        self._max_length = max_length
        self._model = model
        self._tokenizer = tokenizer
        self._waiting: deque[_WaitingGroup[Call]] = deque()
        self._running: list[_RunningRow[Call]] = []
        self._cache = KVCache(model.spec, slots, model.no_routes)
        self._sessions = SessionCache(slots * max_length)
        self._rows = np.zeros(slots, ROW)
        self._stops_RW = np.full((slots, 1), -1)  # short lists are filled up with -1
        self._tokens_RT = np.zeros((slots, 1), np.int32)
        self._logprobs_RT = np.zeros((slots, 1), np.float32)

    @property
    def num_rows(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """From any thread: the copy of the queue is taken in one go."""
        return sum(len(waiting.tickets) for waiting in self._waiting.copy())

    def submit(self, requests: Sequence[TurnRequest], call: Call) -> None:
        """Queues turns; their contexts are shorter than `max_length` and within the vocabulary.

        Requests of one group and context that follow each other, which differ in sampling, share its prefill.
        """
        for _, same in groupby(requests, key=lambda r: (r.group, r.context_ids.tobytes())):
            self._waiting.append(
                _WaitingGroup([_DecodeRequest(call, request, id) for request in same for id in request.ids])
            )

    def step(self, admit: bool) -> list[tuple[Call, Completion]]:
        """Decodes one token for every running row, after starting waiting samples in free rows."""
        finished: list[tuple[Call, Completion]] = []
        while admit and self._waiting and self.num_rows < self._slots:
            finished += self._admit()
        if self._running:
            rows = self._rows[: self.num_rows]
            tokens, positions = rows["token"].copy(), rows["length"].copy()
            logits_RV = self._model.decode(
                self._cache, torch.from_numpy(tokens), torch.from_numpy(positions), int(positions.max())
            )
            rows["length"] += 1
            finished += self._advance(0, logits_RV)
        return finished

    def abort(self, chosen: Callable[[Call, str], bool]) -> list[tuple[Call, Completion]]:
        """Aborts samples selected by `chosen` (caller, request id); returns them with partial output."""
        aborted = []
        for waiting in self._waiting:
            picked = [ticket for ticket in waiting.tickets if chosen(ticket.call, str(ticket.id))]
            aborted += [(ticket.call, self._unfinished(ticket)) for ticket in picked]
            waiting.tickets = [ticket for ticket in waiting.tickets if ticket not in picked]
        self._waiting = deque(waiting for waiting in self._waiting if waiting.tickets)
        tickets = [running.ticket for running in self._running]
        rows = [row for row, ticket in enumerate(tickets) if chosen(ticket.call, str(ticket.id))]
        return aborted + self._finish(
            [(row, FinishReason.ABORT, self._text(self._response(row))) for row in rows]
        )

    def retract(self) -> None:
        """Moves running samples to the front of the queue, with their tokens."""
        for row in reversed(range(self.num_rows)):
            ticket = replace(self._running[row].ticket, output=self._output(row))
            self._waiting.appendleft(_WaitingGroup([ticket]))
        self._running.clear()

    def release(self) -> None:
        """Gives the memory of keys and values back; no row runs."""
        self._cache = KVCache(self._model.spec, self._slots, self._model.no_routes)
        self._sessions.clear()

    def set_version(self, version: Version) -> None:
        """Sets the version of the model's weights; rows keep their keys and values."""
        self.version = version
        for running, row in zip(self._running, self._rows, strict=False):
            running.versions.append((version, int(row["produced"])))
        for waiting in self._waiting:
            waiting.prefix = None
        self._sessions.clear()

    def _admit(self) -> list[tuple[Call, Completion]]:
        """Prefills waiting groups, or takes the kept prefix of the first; starts rows with their samples."""
        tickets: list[_DecodeRequest[Call]] = []
        prompts: list[int] = []  # of each ticket
        groups: list[_WaitingGroup[Call]] = []
        longest, free = 0, self._slots - self.num_rows
        for waiting in self._waiting:
            longest = max(longest, waiting.length)
            alone = waiting.prefix is not None or waiting.session in self._sessions
            full = groups and (alone or (len(groups) + 1) * longest > PREFILL_TOKENS)
            if full or len(tickets) == free:
                break
            taken = waiting.tickets[: free - len(tickets)]
            prompts += [len(groups)] * len(taken)
            tickets += taken
            groups.append(waiting)
            if alone:
                break
        prefix = groups[0].prefix or self._prefill(groups)
        for number, waiting in enumerate(groups):
            waiting.tickets = waiting.tickets[prompts.count(number) :]
            if not waiting.tickets:
                self._waiting.popleft()
            elif waiting.prefix is None:
                waiting.prefix = prefix.select(number)
        first = self.num_rows
        self._start(tickets)
        prompts_R = torch.tensor(prompts)
        self._cache.fill(first, prefix, prompts_R)
        return self._advance(first, prefix.logits_PV[prompts_R])

    def _prefill(self, groups: Sequence[_WaitingGroup[Call]]) -> Prefix:
        prompts = [waiting.tickets[0].ids() for waiting in groups]
        if groups[0].session in self._sessions:
            past, length = self._sessions.find(groups[0].session, prompts[0])
            added_S = prompts[0][length:].astype(np.int64)
            self.tokens_prefilled += len(added_S)
            return self._model.extend(past, length, torch.from_numpy(added_S))
        lengths_P = np.array([len(prompt) for prompt in prompts])
        self.tokens_prefilled += int(lengths_P.sum())
        tokens_PS = np.zeros((len(prompts), lengths_P.max()), np.int64)
        for row, prompt in zip(tokens_PS, prompts, strict=True):
            row[: len(prompt)] = prompt
        return self._model.prefill(torch.from_numpy(tokens_PS), torch.from_numpy(lengths_P))

    def _start(self, tickets: Sequence[_DecodeRequest[Call]]) -> None:
        """Sets up the rows after the running ones."""
        first, now = self.num_rows, time.time()
        longest = 0
        for row, ticket in enumerate(tickets, first):
            sampling, produced = ticket.request.sampling, ticket.num_produced
            context_length = len(ticket.request.context_ids)
            limit = min(sampling.max_new_tokens, self._max_length - context_length)
            key = stream_key(sampling.seed, ticket.id)
            how = sampling.temperature, sampling.top_p, sampling.top_k, bool(sampling.stop)
            self._rows[row] = (key, context_length + produced, produced, limit, 0, *how)
            stops = sampling.stop_token_ids
            self._stops_RW = _widen(self._stops_RW, len(stops), -1)
            self._stops_RW[row] = -1
            self._stops_RW[row, : len(stops)] = stops
            output = ticket.output or empty_output(now)
            versions = [*output.versions, (self.version, produced)]
            self._running.append(_RunningRow(ticket, output.started, versions))
            longest = max(longest, context_length + limit)
        limits = self._rows["limit"][first : self.num_rows]
        self._tokens_RT = _widen(self._tokens_RT, limits.max(), 0)
        self._logprobs_RT = _widen(self._logprobs_RT, limits.max(), 0)
        for row, ticket in enumerate(tickets, first):
            if ticket.output is not None:
                self._tokens_RT[row, : ticket.num_produced] = ticket.output.token_ids_T
                self._logprobs_RT[row, : ticket.num_produced] = ticket.output.logprobs_T
        self._cache.reserve(longest)

    def _advance(self, first: int, logits_RV: torch.Tensor) -> list[tuple[Call, Completion]]:
        """Draws the next token of rows [first, num_rows); returns what that finished."""
        end = self.num_rows
        rows = self._rows[first:end]
        at_R = np.arange(first, end), rows["produced"]
        tokens_R, logprobs_R = draw(
            logits_RV,
            uniforms(rows["key"], rows["produced"]),
            rows["temperature"],
            rows["top_p"],
            rows["top_k"],
        )
        self._tokens_RT[at_R] = tokens_R
        self._logprobs_RT[at_R] = logprobs_R
        rows["token"] = tokens_R
        rows["produced"] += 1
        self.tokens_generated += end - first
        stopped_R = (self._stops_RW[first:end] == tokens_R[:, None]).any(1)
        done_R = stopped_R | (rows["produced"] >= rows["limit"])
        cut: dict[int, str] = {}  # the text of rows that met a stop string
        for row in np.flatnonzero(rows["watched"] & ~stopped_R).tolist():
            text = self._text_before_stop(first + row)
            if text is not None:
                cut[row], done_R[row] = text, True
        ended = []
        for row in np.flatnonzero(done_R).tolist():
            ids_T = self._response(first + row)[: -1 if stopped_R[row] else None]
            reason = FinishReason.STOP if stopped_R[row] or row in cut else FinishReason.LENGTH
            ended.append((first + row, reason, cut[row] if row in cut else self._text(ids_T)))
        return self._finish(ended)

    def _finish(self, ended: Sequence[tuple[int, FinishReason, str]]) -> list[tuple[Call, Completion]]:
        """Rows that ended, why, and their text: makes them completions and gives their places away."""
        if not ended:
            return []
        finished = []
        for row, reason, text in ended:
            ticket, output = self._running[row].ticket, self._output(row)
            finished.append((ticket.call, output.complete(ticket.id, reason, text)))
            if ticket.request.session:
                self._keep(row, ticket.request, output)
        self._close_gaps({row for row, _, _ in ended})
        return finished

    def _keep(self, row: int, request: TurnRequest, output: PartialOutput) -> None:
        """For the session's next turn. Keys and values that older weights computed are of no use to it."""
        if all(version == self.version for version, _ in output.versions):
            length = int(self._rows["length"][row])
            ids_L = np.concatenate([request.context_ids, output.token_ids_T])[:length]
            self._sessions.keep(request.session, ids_L, self._cache.past(row, length))

    def _unfinished(self, ticket: _DecodeRequest[Call]) -> Completion:
        """Of a sample that waits."""
        output = ticket.output or empty_output(time.time())
        return output.complete(ticket.id, FinishReason.ABORT, self._text(output.token_ids_T))

    def _output(self, row: int) -> PartialOutput:
        running, token_ids_T = self._running[row], self._response(row).copy()
        logprobs_T, versions = self._logprobs_RT[row, : len(token_ids_T)].copy(), tuple(running.versions)
        return PartialOutput(token_ids_T, logprobs_T, versions, running.started, self._routes(row))

    def _routes(self, row: int) -> Routes:
        """A retracted sample keeps what it had: the last layer does not compute a whole context again."""
        ticket, cached = self._running[row].ticket, self._cache.routes_BLYC[row].numpy()
        before = ticket.output.routes_NYC if ticket.output else cached[:0]
        first = ticket.request.first_route(ticket.id) + len(before)
        return np.concatenate([before, cached[first : self._rows["length"][row]]])

    def _close_gaps(self, gone: set[int]) -> None:
        """Moves the last rows into the places of those that are gone."""
        remaining = self.num_rows - len(gone)
        targets = [row for row in gone if row < remaining]
        sources = [row for row in range(remaining, self.num_rows) if row not in gone]
        if sources:
            length = int(self._rows["length"][sources].max())
            self._cache.move(torch.tensor(sources), torch.tensor(targets), length)
            for array in (self._rows, self._stops_RW, self._tokens_RT, self._logprobs_RT):
                array[targets] = array[sources]
            for target, source in zip(targets, sources, strict=True):
                self._running[target] = self._running[source]
        del self._running[remaining:]

    def _response(self, row: int) -> Int32:
        return self._tokens_RT[row, : self._rows["produced"][row]]

    def _text(self, ids_T: Int32) -> str:
        text: str = self._tokenizer.decode(ids_T.tolist(), skip_special_tokens=True)
        return text

    def _text_before_stop(self, row: int) -> str | None:
        """The response up to its first stop string; None if it has none."""
        stops = self._running[row].ticket.request.sampling.stop
        ids_T = self._response(row)
        # a token adds at least one byte of at most four per character: look only if a stop can end
        tail = self._text(ids_T[-4 * max(map(len, stops)) - 4 :])
        if not any(stop in tail for stop in stops):
            return None
        text = self._text(ids_T)
        found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
        return text[: min(found)] if found else None


def _widen(array: NDArray[Any], columns: int, fill: int) -> NDArray[Any]:
    """The array itself, or a copy with at least twice its columns if it has too few."""
    have = array.shape[1]
    if columns <= have:
        return array
    return np.pad(array, ((0, 0), (0, max(columns, 2 * have) - have)), constant_values=fill)
