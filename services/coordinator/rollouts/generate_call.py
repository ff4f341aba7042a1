"""One Generate call: the requested turns. Anything else that a replica sends is rejected."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from atoll.coordinator.fleet.replicas import Replica
from atoll.coordinator.rollouts.producer import Work
from atoll.runtime.clients.rollout import Arrival
from atoll.runtime.errors import ProtocolError
from atoll.wire.types import FinishReason, Trajectory, TurnId, TurnRequest

W = TypeVar("W", bound=Work)


class GenerateCall(Generic[W]):
    """Mutable, private to the dispatch of works. Its length is the number of turns still expected."""

    def __init__(self, replica: Replica, works: Sequence[W]) -> None:
        self.replica = replica
        self.works = works
        self.reason = "the replica ended the stream without it"  # why turns were lost
        self.is_refused = False  # refused by the replica as invalid
        self._since = replica.version
        self._requests = [work.requests() for work in works]
        self._expected = {id for requests in self._requests for request in requests for id in request.ids}
        context_tokens = sum(len(requests[0].context_ids) for requests in self._requests)
        self.context_tokens = context_tokens / len(self)  # per turn
        for work in works:
            work.note_sent(replica.version)

    def __len__(self) -> int:
        return len(self._expected)

    def requests(self) -> list[TurnRequest]:
        """Requests for the missing turns."""
        missing = []
        for requests in self._requests:
            for request in requests:
                if rest := tuple(id for id in request.ids if id in self._expected):
                    missing.append(replace(request, ids=rest))
        return missing

    def accept(self, arrival: Arrival) -> None:
        """Raises ProtocolError for unexpected or repeated turns; for tokens beyond
        the vocabulary; for versions that the replica never had; for routes of another model; and for a
        message without turns."""
        if not arrival.samples:
            raise ProtocolError("it sent a message without samples, expected at least one")
        vocab_size = self.replica.info.vocab_size
        if arrival.largest_id >= vocab_size:
            raise ProtocolError(
                f"it sent token id {arrival.largest_id}, expected one below its vocab_size = {vocab_size}"
            )
        got = set(map(turn_id, arrival.samples))
        if len(got) < len(arrival.samples) or not got <= self._expected:
            others = [f"{id.sample}, attempt {id.attempt}" for id in got - self._expected]
            raise ProtocolError(
                f"it sent {'; '.join(others) or 'a sample twice in one message'}: expected each sample that "
                "it was asked for once"
            )
        self._check_content(arrival)
        self._expected -= got
        if any(sample.finish_reason is FinishReason.ABORT for sample in arrival.samples):
            self.reason = f"aborted: {self.replica.abort_reason or 'not by this run'}"

    def _check_content(self, arrival: Arrival) -> None:
        since, latest = self._since, self.replica.latest
        for of in arrival.versions:
            if of.lineage != latest.lineage or not since.number <= of.number <= latest.number:
                raise ProtocolError(
                    f"it sent tokens made by version {of}, expected one from {since} to {latest}"
                )
        for sample in arrival.samples:
            if sample.num_produced == 0 and sample.finish_reason is not FinishReason.ABORT:
                raise ProtocolError(f"it sent sample {sample.id} without tokens, expected at least one")
            routes = sample.nodes[0].routes
            if routes is not None and routes.shape[1:] != self.replica.info.route_shape:
                raise ProtocolError(
                    f"it sent routes of {routes.shape[1:]} layers and experts of a token, expected its "
                    f"route_shape = {self.replica.info.route_shape}"
                )

    def lost(self) -> Iterator[tuple[W, list[TurnId]]]:
        """Of each work, the requested turns that are still to be drawn, if there are any."""
        for work, requests in zip(self.works, self._requests, strict=True):
            if ids := work.still_missing(id for request in requests for id in request.ids):
                yield work, ids


def turn_id(drawn: Trajectory) -> TurnId:
    """Of a single turn, as a replica draws it."""
    turn = drawn.turns[0]
    return TurnId(drawn.id, drawn.attempt, turn.number, turn.branch)
