"""The interface between sources of groups and producers: a source submits groups to a `Producer`, which
reports to the source's `GroupSink`. `Generation` makes samples of a single turn.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol

from atoll.coordinator.fleet.routing import ContextWork
from atoll.coordinator.journal.journal import OpenSession
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.wire.types import GroupId, SampleId, Trajectory, TurnId, TurnRequest, Version


class GroupSink(Protocol):
    """Receives events of groups: a training run journals them, a validation only counts."""

    async def on_finished(self, samples: Sequence[Trajectory], payload: bytes) -> None:
        """These samples are generated, not yet graded; `payload` holds them as they came."""
        ...

    async def on_retried(self, samples: Sequence[SampleId], reason: str) -> None: ...

    async def on_session(self, session: OpenSession) -> bool:
        """A sample's session has its first turn, or its first at a newer version; False: it is to end."""
        ...

    async def on_completed(self, group: PendingGroup) -> None: ...

    async def on_dropped(self, group: PendingGroup, reason: str) -> None: ...


class Producer(Protocol):
    def submit(self, groups: Sequence[PendingGroup], sink: GroupSink) -> None:
        """Generates and grades the groups' missing samples."""
        ...

    def cancel(self, id: GroupId, reason: str) -> None:
        """Forgets the group and aborts its running requests."""
        ...

    def cut(self, groups: Sequence[PendingGroup]) -> None:
        """They would be too old soon: ends their sessions with the turns that they have, if they have any."""
        ...

    async def run(self) -> None:
        """Runs until cancelled or until any part fails."""
        ...

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        ...


class Work(Protocol):
    """What Dispatch sends to one replica in one piece."""

    sent_alone: bool  # in a call of its own, since it may be why a call was refused

    @property
    def key(self) -> Hashable:
        """Unique among the works of a Dispatch."""
        ...

    @property
    def id_prefix(self) -> str:
        """Of the ids of its turns, and of no others."""
        ...

    def requests(self) -> list[TurnRequest]:
        """For its missing turns."""
        ...

    def demand(self) -> ContextWork:
        """As the router sees it."""
        ...

    def note_sent(self, version: Version) -> None:
        """It is sent to a replica that has this version."""
        ...

    def still_missing(self, ids: Iterable[TurnId]) -> list[TurnId]:
        """Those of its `ids` that are still to be drawn under the same id."""
        ...


class GroupsInFlight:
    """Submitted, and neither complete nor dropped."""

    def __init__(self) -> None:
        self._groups: dict[GroupId, tuple[PendingGroup, GroupSink]] = {}

    def add(self, group: PendingGroup, sink: GroupSink) -> None:
        self._groups[group.prompt.id] = group, sink

    def remove(self, id: GroupId) -> None:
        self._groups.pop(id, None)

    def find(self, id: GroupId) -> tuple[PendingGroup, GroupSink] | None:
        """None: it was cancelled, dropped or completed."""
        return self._groups.get(id)

    def __contains__(self, id: GroupId) -> bool:
        return id in self._groups
