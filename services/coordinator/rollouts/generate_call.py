"""One Generate call: the requested samples. Anything else that a replica sends is rejected."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from atoll.coordinator.fleet.replicas import Replica
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.runtime.clients.rollout import Arrival
from atoll.runtime.errors import ProtocolError
from atoll.wire.types import FinishReason, SampleId, TurnRequest


class GenerateCall:
    """Mutable, private to the dispatch of groups. Its length is the number of samples still expected."""

    def __init__(self, replica: Replica, groups: Sequence[PendingGroup]) -> None:
        self.replica = replica
        self.groups = groups
        self.reason = "the replica ended the stream without it"  # why samples were lost
        self.is_refused = False  # refused by the replica as invalid
        self._since = replica.version
        self._requests = [request for group in groups for request in group.requests()]
        self._asked = {id.sample: id.attempt for request in self._requests for id in request.ids}
        self._expected = dict(self._asked)
        self.prompt_tokens = sum(len(group.prompt.token_ids) for group in groups) / len(self)  # per sample
        for group in groups:
            for index in group.missing:
                group.oldest[index] = replica.version.number

    def __len__(self) -> int:
        return len(self._expected)

    def requests(self) -> list[TurnRequest]:
        """Requests for the missing samples."""
        requests = []
        for request in self._requests:
            if rest := tuple(id for id in request.ids if id.sample in self._expected):
                requests.append(replace(request, ids=rest))
        return requests

    def accept(self, arrival: Arrival) -> None:
        """Raises ProtocolError for unexpected or repeated samples; for tokens beyond
        the vocabulary; for versions that the replica never had; and for a message without samples."""
        if not arrival.samples:
            raise ProtocolError("it sent a message without samples, expected at least one")
        vocab_size = self.replica.info.vocab_size
        if arrival.largest_id >= vocab_size:
            raise ProtocolError(
                f"it sent token id {arrival.largest_id}, expected one below its vocab_size = {vocab_size}"
            )
        got = {sample.id: sample.attempt for sample in arrival.samples}
        if len(got) < len(arrival.samples) or not got.items() <= self._expected.items():
            others = [f"{id}, attempt {attempt}" for id, attempt in got.items() - self._expected.items()]
            raise ProtocolError(
                f"it sent {'; '.join(others) or 'a sample twice in one message'}: expected each sample that "
                "it was asked for once"
            )
        self._check_content(arrival)
        for id in got:
            del self._expected[id]
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

    def lost_indices(self) -> Iterator[tuple[PendingGroup, list[int]]]:
        """Indices of each group that neither this attempt nor another one has delivered."""
        for group in self.groups:
            yield (
                group,
                [
                    index
                    for index in group.missing
                    if self._asked.get(SampleId(group.prompt.id, index)) == group.attempts[index]
                ],
            )
